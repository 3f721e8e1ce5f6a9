"""A user's `tf.data` pipeline, taken apart into rows, maps and batches, so that rows are cut before maps run.

```
source ─► map ─► shuffle ─► map ─► batch ─► prefetch                                        as the user wrote it
source ─► shuffle ─► batches ─► this worker's rows ─► map ─► map ─► batch ─► prefetch       the same, on this worker
                        └─► fingerprint of all rows
```

Where the source is slices of arrays that ranks have compared, or records of files, their numbers stand for the rows
until a batch is cut; so too where it zips such sources. Maps of what is zipped are applied after the zip.

Only steps whose effect on the order and number of rows is known are made again. All else, and what comes before it,
is the source: every rank draws all of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfring import _tf
from tfring.data import fingerprint
from tfring.data.by_row import treats_rows_apart
from tfring.data.chance import reached_by_chance
from tfring.data.records import Records, records_of
from tfring.data.rows import Place, num_rows, slice_rows
from tfring.errors import ConfigurationError

_BETWEEN_ROWS = ("map", "shuffle", "prefetch", "repeat", "take", "skip", "nothing")
_BETWEEN_BATCHES = (*_BETWEEN_ROWS, "cache")
_BY_ROW = {("keras.src.trainers.data_adapters.tf_dataset_adapter", "class_weights_map_fn")}  # maps of batches


class Pipeline(NamedTuple):
    """Holds a pipeline taken apart; `rows` and `batches` are datasets whose last step is one to make again, in order.

    Attributes:
      source: the dataset of rows.
      rows: the steps from there to the batch.
      batch: the dataset that the batch step makes.
      batches: the steps after it.
      whole: whether a map of batches needs the rows of all workers.
      arrays: of which the source is slices, or the records that it reads, in its structure, where their numbers stand
        for the rows; else None.
    """

    source: tf.data.Dataset
    rows: list
    batch: tf.data.Dataset
    batches: list
    whole: bool
    arrays: Any

    @property
    def has_numbers_alone(self) -> bool:
        """Returns True if numbers of slices stand for the rows of all batches: there is no map of rows or batches."""
        if self.arrays is None or any(isinstance(leaf, Records) for leaf in tf.nest.flatten(self.arrays)):
            return False
        return not any(map(_is_map, [*self.rows, *self.batches]))


def yields_alike(dataset: tf.data.Dataset) -> bool:
    """Returns True if all iterators yield the same rows; those of a shuffle depend on how many were made before."""
    kinds = {*_BETWEEN_BATCHES, "batch"} - {"shuffle"}
    _, source = _tf.last_steps(dataset, lambda step: step.kind in kinds)
    return _tf.dataset_step(source).kind == "slices"


def take_apart(dataset: tf.data.Dataset, *, by_number: bool = False) -> Pipeline | None:
    """Returns the pipeline, or None if rows cannot be told apart, or nothing is gained.

    Args:
      dataset: of batches.
      by_number: whether ranks have compared the arrays of which the source may be slices.
    """
    if not tf.executing_eagerly():
        return None
    batches, batch = _tf.last_steps(
        dataset, lambda step: step.kind in _BETWEEN_BATCHES and not step.arguments.get("filename")
    )
    step = _tf.dataset_step(batch)
    if step.kind != "batch":
        return None
    rows, source = _tf.last_steps(step.before, lambda step: step.kind in _BETWEEN_ROWS and not _draws_in_order(step))
    if _tf.dataset_step(source).kind == "zip":
        source, maps = _zip_before_maps(source)
        rows = maps + rows
    maps_of_batches = list(filter(_is_map, batches))
    arrays = _arrays(source) if by_number else None
    if arrays is None:
        while rows and not _is_map(rows[0]):  # nothing is gained above the first map
            source = rows.pop(0)
        if not rows and not maps_of_batches:
            return None
    specs = (tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec)
    if not all(isinstance(spec, specs) for spec in tf.nest.flatten(source.element_spec)):
        return None
    whole = not is_shared(batch) and not all(map(_maps_by_row, maps_of_batches))
    return Pipeline(source, rows, batch, batches, whole, arrays)


def arrays_of(dataset: tf.data.Dataset) -> list[tf.Tensor | Records]:
    """Returns the arrays or records whose numbers stand for the rows of a dataset, which ranks compare before."""
    parts = take_apart(dataset, by_number=True)
    return [] if parts is None or parts.arrays is None else tf.nest.flatten(parts.arrays)


def _arrays(dataset: tf.data.Dataset) -> Any:
    """Returns the arrays of which a dataset is slices, or its records, in the structure of its rows; or None."""
    step = _tf.dataset_step(dataset)
    if step.kind == "records":
        return records_of(dataset)
    if step.kind != "zip":
        return step.arguments.get("arrays")
    datasets = step.arguments["datasets"]
    arrays = list(map(_arrays, tf.nest.flatten(datasets)))
    if any(of_one is None or (isinstance(of_one, Records) and not of_one.in_order) for of_one in arrays):
        return None
    return tf.nest.pack_sequence_as(datasets, arrays)


def _numbers(pipeline: Pipeline) -> tf.data.Dataset:
    """Returns the dataset of the numbers of a source's rows, in its order."""
    records = pipeline.arrays
    if not isinstance(records, Records) or records.in_order:
        return tf.data.Dataset.range(min(map(len, tf.nest.flatten(pipeline.arrays))))
    files = tf.data.Dataset.range(len(records.files))
    for like in records.steps:
        files = _kept(like, "numbers", functools.partial(_again, like, files))
    bounds = tf.constant(records.bounds)
    numbers = tf.autograph.experimental.do_not_convert(
        lambda file: tf.data.Dataset.range(bounds[file], bounds[file + 1])
    )
    return _tf.interleaved_like(records.reads, files, numbers)


def _zip_before_maps(dataset: tf.data.Dataset) -> tuple[tf.data.Dataset, list]:
    """Returns the zip of what `dataset` zips as it is before maps, and the datasets of these maps, applied after it."""
    datasets = _tf.dataset_step(dataset).arguments["datasets"]
    sources, maps = [], []
    for number, zipped in enumerate(tf.nest.flatten(datasets)):
        steps, source = _tf.last_steps(
            zipped, lambda step: step.kind in ("map", "prefetch", "nothing") and not _draws_in_order(step)
        )
        sources.append(source)
        maps += [(number, _tf.dataset_step(each).arguments) for each in steps if _is_map(each)]
    if not maps:
        return dataset, []
    source = dataset = tf.data.Dataset.zip(datasets=tf.nest.pack_sequence_as(datasets, sources))
    made = []
    for number, arguments in maps:
        function = functools.partial(_mapped_component, datasets, dataset.element_spec, number, arguments["function"])
        function = tf.autograph.experimental.do_not_convert(function)
        dataset = dataset.map(function, num_parallel_calls=arguments["num_parallel_calls"])
        made.append(dataset)
    return source, made


def _mapped_component(datasets: Any, spec: Any, number: int, function: Any, *components: Any) -> Any:
    """Returns the row of a zip, of which a map's function is applied to one component."""
    rows = tf.__internal__.nest.flatten_up_to(datasets, as_element(components, spec))
    rows[number] = _tf.call_map_function(function, rows[number])
    return tf.nest.pack_sequence_as(datasets, rows)


def share(batch_size: int, drop_remainder: bool = False) -> Callable[[tf.data.Dataset], tf.data.Dataset]:
    """In place of `dataset.batch(batch_size)`: maps after it run on this worker's rows alone.

    A map of batches may look at all rows of its batch, so by default every rank runs it on all of them, and cuts
    afterwards. `share` says that the maps which follow treat each row by itself. The batches are those of
    `dataset.batch`, and without a strategy nothing else happens.

    Args:
      batch_size: rows of a batch over all workers.
      drop_remainder: whether to leave out a last batch of fewer rows. Defaults to `False`.

    Returns:
      A function for `dataset.apply`.

    >>> rows = tf.data.Dataset.range(5)
    >>> batches = rows.apply(share(2)).map(lambda x: 10 * x, num_parallel_calls=2).prefetch(1)
    >>> [batch.tolist() for batch in batches.as_numpy_iterator()]
    [[0, 10], [20, 30], [40]]
    """

    def apply(dataset: tf.data.Dataset) -> tf.data.Dataset:
        batched = dataset.batch(batch_size, drop_remainder)
        _tf.set_element_spec(batched, dataset.batch(batch_size).element_spec)  # for maps of any number of rows
        batched._tfring_share = True
        return batched

    return apply


def is_shared(dataset: tf.data.Dataset) -> bool:
    """Returns True if `share` made these batches."""
    return getattr(dataset, "_tfring_share", False)


def check_share(dataset: tf.data.Dataset) -> None:
    """Raises ConfigurationError where a step after `share` is none that `take_apart` knows."""
    _, dataset = _tf.last_steps(dataset, lambda step: step.kind in _BETWEEN_BATCHES)
    if not is_shared(dataset) and any(map(is_shared, _tf.pipeline(dataset))):
        raise ConfigurationError(
            f"A {type(dataset).__name__.strip('_')} follows `tfring.data.share`, and only map, prefetch, repeat, take, "
            "skip, shuffle, cache and with_options may. Move that step before `share`, or use `dataset.batch`."
        )


def own_batches(pipeline: Pipeline, place: Place) -> tf.data.Dataset:
    """Returns a dataset of `(about, batch)`: of every batch of the user's, this worker's rows or, if `whole`, all.

    `about` is int64 `[rows, 2]`, each row the same: how many rows all workers have, and a fingerprint of them.
    """
    key = (place, pipeline.whole, pipeline.arrays is not None)
    above, below = _maps_last(pipeline.rows)
    dataset, batched = pipeline.source, _batched
    if pipeline.arrays is not None:
        dataset, batched = _numbers(pipeline), _batched_by_number
    for like in above:
        dataset = _kept(like, key, functools.partial(_again, like, dataset))
    dataset = _kept(pipeline.batch, key, lambda: batched(dataset, below, pipeline, place))
    for like in pipeline.batches:
        dataset = _kept(like, key, functools.partial(_again_beside, like, dataset))
    return dataset


def batches_of_numbers(pipeline: Pipeline) -> tf.data.Dataset:
    """Returns the dataset of the numbers of the rows of every batch, of a pipeline that `has_numbers_alone`."""
    arguments = _tf.dataset_step(pipeline.batch).arguments
    dataset = _numbers(pipeline)
    for like in pipeline.rows:
        dataset = _kept(like, "numbers", functools.partial(_again, like, dataset))
    dataset = dataset.batch(arguments["batch_size"], arguments["drop_remainder"])
    for like in pipeline.batches:
        dataset = _kept(like, "numbers", functools.partial(_again, like, dataset))
    return dataset


def _kept(like: tf.data.Dataset, key: Any, make: Callable[[], tf.data.Dataset]) -> tf.data.Dataset:
    """Makes a dataset once for one of the user's: what a shuffle or a cache holds is there in the next epoch."""
    made = like.__dict__.setdefault("_tfring_made", {})
    if key not in made:
        made[key] = make()
    return made[key]


def _maps_last(steps: list) -> tuple[list, list]:
    """Returns `(others, maps)`: what chooses or orders rows does so by place alone, so it may come before the maps."""
    is_map = list(map(_is_map, steps))
    above = [d for d, m in zip(steps, is_map, strict=True) if not m]
    return above, [d for d, m in zip(steps, is_map, strict=True) if m]


def _batched(rows: tf.data.Dataset, maps: list, pipeline: Pipeline, place: Place) -> tf.data.Dataset:
    """Returns `(about, batch)` of the user's batch step; below it the maps, on the rows that are wanted here.

    Rows are cut a batch at a time and then apart again: datasets a row, as of `window`, would cost more than the rows.
    """
    arguments = _tf.dataset_step(pipeline.batch).arguments
    size, drop_remainder = arguments["batch_size"], arguments["drop_remainder"]
    left_out = reached_by_chance(pipeline.source)
    spec = rows.element_spec
    packed = not all(isinstance(s, tf.TensorSpec) and s.shape.is_fully_defined() for s in tf.nest.flatten(spec))
    if packed and maps:
        # Rows of many shapes make no batch; one variant and a digest of each do.
        @tf.autograph.experimental.do_not_convert
        def pack(*components: Any) -> tuple[tf.Tensor, tf.Tensor]:
            row = as_element(components, spec)
            return _tf.packed(spec, row), fingerprint.of_row(row, left_out)

        rows = rows.map(pack)
    batches = rows.batch(size, drop_remainder)
    most, own_rows = _own_rows(rows, size, drop_remainder, pipeline.whole, place)

    @tf.autograph.experimental.do_not_convert
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
        if not maps:  # none is needed for every row
            return about[None], batch if pipeline.whole else slice_rows(batch, begin, begin + count)
        own = tf.nest.map_structure(lambda component: component[begin : begin + count], batch)
        return tf.tile(about[None], [count, 1]), own[0] if packed else own

    dataset = batches.map(wanted)
    if not maps:
        return dataset
    dataset = _tf.unbatched(dataset)
    if packed:

        @tf.autograph.experimental.do_not_convert
        def unpack(about: tf.Tensor, variant: tf.Tensor) -> tuple[tf.Tensor, Any]:
            return about, _tf.unpacked(spec, variant)

        dataset = dataset.map(unpack)
    for like in maps:
        dataset = _again_beside(like, dataset)
    return dataset.batch(most)


def _batched_by_number(rows: tf.data.Dataset, maps: list, pipeline: Pipeline, place: Place) -> tf.data.Dataset:
    """Returns what `_batched` does, where `rows` are their numbers; the fingerprint is that of these."""
    arguments = _tf.dataset_step(pipeline.batch).arguments
    size, drop_remainder = arguments["batch_size"], arguments["drop_remainder"]
    most, own_rows = _own_rows(rows, size, drop_remainder, pipeline.whole, place)

    @tf.autograph.experimental.do_not_convert
    def wanted(numbers: tf.Tensor) -> tuple[tf.Tensor, Any]:
        total = tf.shape(numbers, tf.int64)
        about = tf.concat([total, fingerprint.of_digests(numbers)], 0)
        begin, count = tf.split(tf.gather_nd(own_rows, total), 2)
        own = tf.slice(numbers, begin, count)
        own = tf.nest.map_structure(
            lambda leaf: leaf.rows(own) if isinstance(leaf, Records) else tf.gather(leaf, own), pipeline.arrays
        )
        return tf.broadcast_to(about, tf.concat([count, [2]], 0)), own

    dataset = rows.batch(size, drop_remainder).map(wanted)
    if not maps:
        return dataset
    dataset = _tf.unbatched(dataset)
    for like in maps:
        dataset = _again_beside(like, dataset)
    return dataset.batch(most)


def _own_rows(
    rows: tf.data.Dataset, size: int, drop_remainder: bool, whole: bool, place: Place
) -> tuple[int, np.ndarray]:
    """Returns the most rows that are drawn here of a batch; and by a batch's rows the first of them and their number.

    One row is drawn where there is none for this worker, so that a batch is never missing; `Shares` leaves it out. Of
    every full batch the most are drawn, at most one in excess, so a batch with fewer can only be the last.
    """
    count = int(rows.cardinality())
    totals = np.arange((min(size, count) if count >= 0 else size) + 1, dtype=np.int64)
    if whole:
        return size, np.stack([0 * totals, totals], 1)
    begin, end = place.bounds(totals)
    own = np.maximum(end - begin, 1)
    most = int(own[size if drop_remainder else 0 :].max(initial=1))
    own[size:] = most
    begin = np.maximum(np.minimum(begin, totals - 1), 0)
    return most, np.stack([begin, np.minimum(own, totals - begin)], 1)


def _again(like: tf.data.Dataset, dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the last step of `like`, which is no map, on another dataset."""
    kind, _, arguments = _tf.dataset_step(like)
    match kind:
        case "shuffle":
            return _tf.shuffled_like(arguments["like"], dataset)
        case "prefetch":
            return dataset.prefetch(arguments["buffer_size"])
        case "repeat":
            return dataset.repeat(arguments["count"])
        case "take":
            return dataset.take(arguments["count"])
        case "skip":
            return dataset.skip(arguments["count"])
        case "cache":
            return dataset.cache()
    return dataset


def _again_beside(like: tf.data.Dataset, dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the last step of `like` on a dataset of `(about, element)`."""
    kind, _, arguments = _tf.dataset_step(like)
    if kind != "map":
        return _again(like, dataset)
    function, parallel = arguments["function"], arguments["num_parallel_calls"]

    @tf.autograph.experimental.do_not_convert
    def mapped(about: tf.Tensor, element: Any) -> tuple[tf.Tensor, Any]:
        return about, _tf.call_map_function(function, element)

    # In order even if the user allows another: ranks hold the rows of a batch at the same time.
    return dataset.map(mapped, num_parallel_calls=parallel, deterministic=True if parallel else None)


def as_element(components: tuple, spec: Any) -> Any:
    """Returns the arguments a map's function was given, as the one element they are."""
    return components if type(spec) is tuple else components[0]


def _is_map(dataset: tf.data.Dataset) -> bool:
    return _tf.dataset_step(dataset).kind == "map"


def _draws_in_order(step: _tf.DatasetStep) -> bool:
    """Returns True if a map draws seeded random numbers, or writes variables, row after row, for all rows.

    One process does. In a parallel map the rows take their numbers as threads come: nothing is there to keep.
    """
    if step.kind != "map" or step.arguments["num_parallel_calls"] is not None:
        return False
    return any(
        any(node.attr[name].i for name in ("seed", "seed2") if name in node.attr)
        or node.op.startswith(("Assign", "RngReadAndSkip", "ResourceScatter"))
        for node in _tf.nodes_of(step.arguments["function"].function.graph)
    )


def _maps_by_row(dataset: tf.data.Dataset) -> bool:
    step = _tf.dataset_step(dataset)
    function = step.arguments["python_function"]
    name = getattr(function, "__module__", ""), getattr(function, "__name__", "")
    return name in _BY_ROW or treats_rows_apart(step.arguments["function"], step.before.element_spec)
