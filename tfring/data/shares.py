"""Each replica's share of a dataset: rows `i*B//R` to `(i+1)*B//R` of every global batch of B rows."""

from __future__ import annotations

import functools
from typing import NamedTuple

import tensorflow as tf

from tfring.data import fingerprint, pipeline
from tfring.data.chance import reached_by_chance
from tfring.data.constants import constants_of
from tfring.data.rows import bounds, cut_rows, forget_rows, num_rows, slice_rows, with_equal_rows


class Shares(NamedTuple):
    """What Keras' steps draw: this worker's shares of one global batch, one a replica.

    Attributes:
      parts: an element a replica. Where a replica has no rows, a row of another's.
      rows: int64 scalars, how many rows of each part are the replica's.
      fingerprint: int64 scalar of the whole batch, above 0, by which ranks are found out that drew another; where rows
        were cut before maps, of what they were made from. 0 where each rank has rows of its own.
    """

    parts: tuple
    rows: tuple
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
    cut = _Cut(dataset, place)
    if parts is None:
        pipeline.check_share(dataset)
        left_out = reached_by_chance(dataset) if compare else None
        shares = dataset.map(_of_whole_batches(cut, compare, left_out))
    else:
        shares = pipeline.own_batches(parts, place).map(_of_own_rows(cut, parts.whole))
        shares = shares.with_options(dataset.options())
        shares._tfring_dataset = dataset  # whatever its functions hold has to live as long
    return shares.prefetch(ahead) if ahead else shares


class _Cut:
    """Cuts batches of a dataset into the shares of this worker's replicas."""

    def __init__(self, dataset, place):
        self.spec = dataset.element_spec
        self.place = place
        self._constants = constants_of(dataset)

    def __call__(self, batch, total=None, first=0):
        """Returns `(parts, rows)` of a batch, or of its rows from `first` on, which all ranks have `total` of."""
        batch = with_equal_rows(forget_rows(batch, self._constants))
        total = num_rows(batch) if total is None else total
        replicas = [self.place.first + i for i in range(self.place.replicas)]
        cuts = [bounds(total, replica, self.place.num_replicas) for replica in replicas]
        return cut_rows(batch, [(begin - first, end - first) for begin, end in cuts])


def _of_whole_batches(cut, compare, left_out):
    @tf.autograph.experimental.do_not_convert
    def shares(*components):
        batch = pipeline.as_element(components, cut.spec)
        about = fingerprint.of_batch(batch, left_out) if compare else tf.constant(0, tf.int64)
        parts, rows = cut(batch)
        return Shares(parts, rows, about)

    return shares


def _of_own_rows(cut, whole):
    @tf.autograph.experimental.do_not_convert
    def shares(about, batch):
        if whole:
            parts, rows = cut(batch)
        else:
            first, _ = cut.place.bounds(about.total)
            parts, rows = cut(batch, about.total, first)
        return Shares(parts, rows, about.fingerprint)

    return shares


def single_shares(dataset: tf.data.Dataset, rank: int, replicas_per_worker: int, world_size: int):
    """A dataset of single shares, for `tf.distribute`'s own iterators: `replicas_per_worker` elements a batch."""
    if replicas_per_worker * world_size == 1:
        return dataset
    shares = worker_shares(dataset, rank, replicas_per_worker, world_size)
    constants = constants_of(dataset)

    def own(part, rows):  # without a row that does not count; elements of one dataset may have different rows
        return slice_rows(forget_rows(part, constants), 0, rows)

    if replicas_per_worker == 1:
        return shares.map(lambda s: own(s.parts[0], s.rows[0]))

    @tf.autograph.experimental.do_not_convert
    def elements(s):
        parts = map(own, s.parts, s.rows)
        return functools.reduce(tf.data.Dataset.concatenate, map(tf.data.Dataset.from_tensors, parts))

    return shares.flat_map(elements).prefetch(2 * replicas_per_worker)


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
