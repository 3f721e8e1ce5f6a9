"""Each replica's share of a dataset: rows `i*B//R` to `(i+1)*B//R` of every global batch of B rows."""

from __future__ import annotations

import functools
from typing import NamedTuple

import tensorflow as tf

from tfring.data.rows import bounds, num_rows, slice_rows


class Shares(NamedTuple):
    """What Keras' steps draw: this worker's shares of one global batch, one a replica.

    The fingerprint is of the whole batch, so that ranks which drew another one are found out.
    """

    parts: tuple
    fingerprint: tf.Tensor


def fingerprint(element) -> tf.Tensor:
    """An int64 scalar of a batch's number of rows, first row and last row; cheap, whatever its size."""
    total = tf.cast(num_rows(element), tf.int64)
    for number, component in enumerate(tf.nest.flatten(element)):
        if not isinstance(component, tf.Tensor) or not component.shape.rank or component.dtype == tf.variant:
            continue
        edges = tf.concat([component[:1], component[-1:]], 0)
        if edges.dtype == tf.bool:
            edges = tf.cast(edges, tf.uint8)
        digest = tf.bitcast(tf.fingerprint(edges), tf.int64)
        total += (2 * number + 1) * tf.reduce_sum(digest * tf.range(1, tf.size(digest, tf.int64) + 1))
    return tf.bitwise.right_shift(total, 2)  # room to be negated


def worker_shares(dataset: tf.data.Dataset, rank: int, replicas_per_worker: int, world_size: int):
    """A dataset of `Shares`: one worker's slices of each global batch.

    Args:
      dataset: of global batches; every component's first dimension counts rows. A batch may have fewer rows than
        there are replicas: some then get 0 rows.
      rank: this worker.
      replicas_per_worker: replicas on each worker.
      world_size: number of workers.

    Raises:
      ValueError: where an element has a component without a first dimension.
    """
    num_replicas = replicas_per_worker * world_size
    first = rank * replicas_per_worker
    if num_replicas > 1:
        _check_batched(dataset.element_spec)

    @tf.autograph.experimental.do_not_convert
    def shares(*components):
        element = components if type(dataset.element_spec) is tuple else components[0]  # as `map` hands it over
        if num_replicas == 1:
            return Shares((element,), tf.constant(0, tf.int64))
        rows = num_rows(element)
        parts = [
            slice_rows(element, *bounds(rows, first + i, num_replicas)) for i in range(replicas_per_worker)
        ]
        return Shares(tuple(parts), fingerprint(element) if world_size > 1 else tf.constant(0, tf.int64))

    return dataset.map(shares).prefetch(2)


def single_shares(dataset: tf.data.Dataset, rank: int, replicas_per_worker: int, world_size: int):
    """A dataset of single shares, for `tf.distribute`'s own iterators: `replicas_per_worker` elements a batch."""
    if replicas_per_worker * world_size == 1:
        return dataset
    shares = worker_shares(dataset, rank, replicas_per_worker, world_size)
    if replicas_per_worker == 1:
        return shares.map(lambda s: s.parts[0])

    @tf.autograph.experimental.do_not_convert
    def elements(s):
        parts = map(_forget_rows, s.parts)
        return functools.reduce(tf.data.Dataset.concatenate, map(tf.data.Dataset.from_tensors, parts))

    return shares.flat_map(elements).prefetch(2 * replicas_per_worker)


def _forget_rows(element):
    """Forgets the static number of rows, so that slices of different sizes are elements of one dataset."""

    def forget(t):
        if not isinstance(t, tf.Tensor) or not t.shape.rank:
            return t
        return tf.raw_ops.PlaceholderWithDefault(input=t, shape=[None, *t.shape[1:]])

    return tf.nest.map_structure(forget, element)


def _check_batched(spec):
    for component in tf.nest.flatten(spec):
        shape = getattr(component, "shape", None)
        if isinstance(component, tf.TensorSpec) and shape is not None and shape.rank == 0:
            raise ValueError(
                "RingStrategy cuts each batch of the dataset into one share for each replica, along its first "
                f"dimension. Received: a dataset whose elements hold a scalar, element_spec={spec}. Call "
                "`dataset.batch(global_batch_size)` before the dataset reaches the strategy, or set "
                "`options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF`."
            )
