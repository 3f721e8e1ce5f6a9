"""Each replica's share of a dataset: rows `i*B//R` to `(i+1)*B//R` of every global batch of B rows."""

from __future__ import annotations

import functools
from typing import NamedTuple

import tensorflow as tf

from tfring.data import fingerprint, pipeline
from tfring.data.rows import bounds, num_rows, slice_rows, with_equal_rows


class Shares(NamedTuple):
    """What Keras' steps draw: this worker's shares of one global batch, one a replica.

    The fingerprint is of the whole batch, where rows were cut before maps of what they were made from; so that ranks
    which drew another batch are found out.
    """

    parts: tuple
    fingerprint: tf.Tensor


def worker_shares(
    dataset: tf.data.Dataset,
    rank: int,
    replicas_per_worker: int,
    world_size: int,
    *,
    ahead: int = 2,
    compare: bool | None = None,
):
    """A dataset of `Shares`: one worker's slices of each global batch.

    Args:
      dataset: of global batches; every component's first dimension counts rows. A batch may have fewer rows than
        there are replicas: some then get 0 rows.
      rank: this worker.
      replicas_per_worker: replicas on each worker.
      world_size: number of workers.
      ahead: batches drawn before they are asked for. Defaults to 2.
      compare: whether other workers draw the same batches, which are compared by their fingerprints. Default: where
        there are several of them.

    Raises:
      ValueError: where an element has a component without a first dimension.
      ConfigurationError: where `share` made the batches and what follows cannot be done on this worker's rows alone.
    """
    num_replicas = replicas_per_worker * world_size
    place = pipeline.Place(rank * replicas_per_worker, replicas_per_worker, num_replicas)
    _check_batched(dataset.element_spec)
    compare = world_size > 1 if compare is None else compare
    parts = pipeline.take_apart(dataset) if compare else None
    if parts is None:
        pipeline.check_share(dataset)
        shares = dataset.map(_of_whole_batches(dataset.element_spec, place, compare))
    else:
        shares = pipeline.own_batches(parts, place).map(_of_own_rows(place, parts.whole))
        shares = shares.with_options(dataset.options())
        shares._tfring_dataset = dataset  # whatever its functions hold has to live as long
    return shares.prefetch(ahead) if ahead else shares


def _of_whole_batches(spec, place, compare):
    @tf.autograph.experimental.do_not_convert
    def shares(*components):
        batch = pipeline.as_element(components, spec)
        about = fingerprint.of_batch(batch) if compare else tf.constant(0, tf.int64)
        return Shares(_parts(batch, place), about)

    return shares


def _of_own_rows(place, whole):
    @tf.autograph.experimental.do_not_convert
    def shares(about, batch):
        if whole:
            return Shares(_parts(batch, place), about.fingerprint)
        first, _ = place.bounds(about.total)
        cuts = [bounds(about.total, place.first + i, place.num_replicas) for i in range(place.replicas)]
        parts = [slice_rows(batch, begin - first, end - first) for begin, end in cuts]
        return Shares(tuple(parts), about.fingerprint)

    return shares


def _parts(batch, place):
    """The shares of this worker's replicas."""
    batch = with_equal_rows(batch)
    rows = num_rows(batch)
    cuts = [bounds(rows, place.first + i, place.num_replicas) for i in range(place.replicas)]
    return tuple(slice_rows(batch, begin, end) for begin, end in cuts)


def single_shares(dataset: tf.data.Dataset, rank: int, replicas_per_worker: int, world_size: int):
    """A dataset of single shares, for `tf.distribute`'s own iterators: `replicas_per_worker` elements a batch."""
    if replicas_per_worker * world_size == 1:
        return dataset
    shares = worker_shares(dataset, rank, replicas_per_worker, world_size)
    if replicas_per_worker == 1:
        return shares.map(lambda s: s.parts[0])

    @tf.autograph.experimental.do_not_convert
    def elements(s):
        parts = map(forget_rows, s.parts)
        return functools.reduce(tf.data.Dataset.concatenate, map(tf.data.Dataset.from_tensors, parts))

    return shares.flat_map(elements).prefetch(2 * replicas_per_worker)


def forget_rows(element):
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
