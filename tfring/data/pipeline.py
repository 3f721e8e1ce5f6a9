"""Rebuilds a user's `tf.data` pipeline on this worker's rows, so that rows are cut before maps run.

```
source ─► map ─► shuffle ─► map ─► batch ─► prefetch                                        as the user wrote it
source ─► shuffle ─► batches ─► this worker's rows ─► map ─► map ─► batch ─► prefetch       the same, on this worker
                        └─► fingerprint of all rows
```

If the source is slices of arrays that ranks have compared, records of files, or a zip of such sources, row numbers
stand for the rows until a batch is cut. Maps of zipped datasets are applied after the zip.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import tensorflow as tf

from tfring import _tf
from tfring.data import fingerprint
from tfring.data.plan import Batching, as_element, plan_of
from tfring.data.records import Records
from tfring.data.rows import ReplicaRange, num_rows, slice_rows


def own_batches(parts: Batching, replica_range: ReplicaRange) -> tf.data.Dataset:
    """Returns a dataset of `(about, batch)`: this worker's rows of each of the user's batches, or all rows if `whole`.

    `about` is int64 `[rows, 2]` with identical rows: the number of rows of all workers, and their fingerprint.
    """
    key = (replica_range, parts.whole, parts.arrays is not None)
    # The steps that select or order rows do so by position alone, so they may run before the maps.
    maps = [step for step in parts.rows if step.kind == "map"]
    dataset, batched = parts.source, _batched
    if parts.arrays is not None:
        dataset, batched = _numbers(parts.arrays), _batched_by_number
    dataset = _reapply([step for step in parts.rows if step.kind != "map"], dataset, key)
    dataset = plan_of(parts.batch.dataset).kept(key, lambda: batched(dataset, maps, parts, replica_range))
    return _reapply(parts.batches, dataset, key)


def batches_of_numbers(parts: Batching) -> tf.data.Dataset:
    """Returns the dataset of the row numbers of every batch, for a pipeline that `has_numbers_alone`."""
    dataset = _reapply(parts.rows, _numbers(parts.arrays), "numbers")
    return _reapply(parts.batches, dataset.batch(**parts.batch.arguments), "numbers")


def _numbers(arrays: Any) -> tf.data.Dataset:
    """Returns the dataset of the row numbers of arrays or records, in the order of their source."""
    if not isinstance(arrays, Records) or arrays.in_order:
        return tf.data.Dataset.range(min(map(len, tf.nest.flatten(arrays))))
    files = _reapply(arrays.steps, tf.data.Dataset.range(len(arrays.files)), "numbers")
    bounds = tf.constant(arrays.bounds)
    return _tf.interleaved_like(arrays.reads, files, lambda file: tf.data.Dataset.range(bounds[file], bounds[file + 1]))


def _batched(rows: tf.data.Dataset, maps: list, parts: Batching, replica_range: ReplicaRange) -> tf.data.Dataset:
    """Returns the dataset of `(about, batch)` of the user's batch step; the maps below it run on this worker's rows.

    Rows are cut a batch at a time and then unbatched: a dataset per row, as `window` makes, would cost more than the
    rows.
    """
    size, drop_remainder = parts.batch.arguments["batch_size"], parts.batch.arguments["drop_remainder"]
    left_out = plan_of(parts.source).depends_on_randomness
    spec = rows.element_spec
    packed = not all(isinstance(s, tf.TensorSpec) and s.shape.is_fully_defined() for s in tf.nest.flatten(spec))
    if packed and maps:
        # Rows of different shapes cannot be batched; a variant and a digest of each row can.
        def pack(*components: Any) -> tuple[tf.Tensor, tf.Tensor]:
            row = as_element(components, spec)
            return _tf.packed(spec, row), fingerprint.of_row(row, left_out)

        rows = rows.map(pack)
    batches = rows.batch(size, drop_remainder)
    most, own_rows = _own_rows(rows, size, drop_remainder, parts.whole, replica_range)

    def wanted(*components: Any) -> tuple[tf.Tensor, Any]:
        batch = as_element(components, batches.element_spec)
        if packed and maps:
            variants, digests = batch
            total = tf.size(variants, tf.int64)
            [digest] = tf.unstack(fingerprint.of_digests(digests))
        else:
            total = tf.cast(num_rows(batch), tf.int64)
            digest = fingerprint.of_batch(batch, left_out)
        about = tf.stack([total, digest])
        begin, count = tf.unstack(tf.gather(own_rows, total))
        if not maps:  # then `about` is not needed for every row
            return about[None], batch if parts.whole else slice_rows(batch, begin, begin + count)
        own = tf.nest.map_structure(lambda component: component[begin : begin + count], batch)
        return tf.tile(about[None], [count, 1]), own[0] if packed else own

    dataset = batches.map(wanted)
    if not maps:
        return dataset
    dataset = _tf.unbatched(dataset)
    if packed:

        def unpack(about: tf.Tensor, variant: tf.Tensor) -> tuple[tf.Tensor, Any]:
            return about, _tf.unpacked(spec, variant)

        dataset = dataset.map(unpack)
    return _mapped(dataset, maps, most)


def _batched_by_number(
    rows: tf.data.Dataset, maps: list, parts: Batching, replica_range: ReplicaRange
) -> tf.data.Dataset:
    """Returns the same as `_batched` for a dataset of row numbers; the fingerprint is that of the numbers."""
    size, drop_remainder = parts.batch.arguments["batch_size"], parts.batch.arguments["drop_remainder"]
    most, own_rows = _own_rows(rows, size, drop_remainder, parts.whole, replica_range)

    def wanted(numbers: tf.Tensor) -> tuple[tf.Tensor, Any]:
        total = tf.shape(numbers, tf.int64)
        about = tf.concat([total, fingerprint.of_digests(numbers)], 0)
        begin, count = tf.split(tf.gather_nd(own_rows, total), 2)
        own = tf.slice(numbers, begin, count)
        own = tf.nest.map_structure(
            lambda leaf: leaf.rows(own) if isinstance(leaf, Records) else tf.gather(leaf, own), parts.arrays
        )
        return tf.broadcast_to(about, tf.concat([count, [2]], 0)), own

    dataset = rows.batch(size, drop_remainder).map(wanted)
    if not maps:
        return dataset
    dataset = _tf.unbatched(dataset)
    return _mapped(dataset, maps, most)


def _own_rows(
    rows: tf.data.Dataset, size: int, drop_remainder: bool, whole: bool, replica_range: ReplicaRange
) -> tuple[int, np.ndarray]:
    """Returns the largest number of rows drawn here of a batch; and their first row and number, by the batch's rows.

    One row is drawn if this worker has none, so that a batch is never missing; `Shares` leaves it out. The largest
    number is drawn of every full batch, at most one row too many, so only the last batch can have fewer.
    """
    count = int(rows.cardinality())
    totals = np.arange((min(size, count) if count >= 0 else size) + 1, dtype=np.int64)
    if whole:
        return size, np.stack([0 * totals, totals], 1)
    begin, end = replica_range.bounds(totals)
    own = np.maximum(end - begin, 1)
    most = int(own[size if drop_remainder else 0 :].max(initial=1))
    own[size:] = most
    begin = np.maximum(np.minimum(begin, totals - 1), 0)
    return most, np.stack([begin, np.minimum(own, totals - begin)], 1)


def _mapped(dataset: tf.data.Dataset, maps: list[_tf.DatasetStep], most: int) -> tf.data.Dataset:
    """Applies maps to a dataset of `(about, row)`, and returns batches of its rows."""
    for step in maps:
        dataset = _reapply_step(step, dataset)
    return dataset.batch(most)


def _reapply(steps: list[_tf.DatasetStep], dataset: tf.data.Dataset, key: Any) -> tf.data.Dataset:
    """Applies steps of a user's pipeline to another dataset, each step once per key."""
    for step in steps:
        dataset = plan_of(step.dataset).kept(key, functools.partial(_reapply_step, step, dataset))
    return dataset


def _reapply_step(step: _tf.DatasetStep, dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Applies a step to another dataset; a map is applied to one of `(about, element)`."""
    arguments = step.arguments
    match step.kind:
        case "map":
            return _reapply_map(arguments["function"], arguments["num_parallel_calls"], dataset)
        case "shuffle":
            return _tf.shuffled_like(step.dataset, dataset)
        case "cache":
            return dataset.cache()
        case "prefetch" | "repeat" | "take" | "skip":
            return getattr(dataset, step.kind)(**arguments)
    return dataset


def _reapply_map(function: Any, parallel: int | None, dataset: tf.data.Dataset) -> tf.data.Dataset:
    def mapped(about: tf.Tensor, element: Any) -> tuple[tf.Tensor, Any]:
        return about, _tf.call_map_function(function, element)

    # In order even if the user allows another order: all ranks must hold rows of the same batch at the same time.
    return dataset.map(mapped, num_parallel_calls=parallel, deterministic=True if parallel else None)
