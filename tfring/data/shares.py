"""Each replica's share of a dataset: rows `i*B//R` to `(i+1)*B//R` of every global batch of B rows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from tfring.data import fingerprint, pipeline
from tfring.data.arrays import ArrayBatches, beside, rows_of_tensors
from tfring.data.plan import plan_of
from tfring.data.rows import (
    ReplicaRange,
    bounds,
    check_equal_rows,
    cut_rows,
    forget_rows,
    num_rows,
    slice_rows,
    spec_of_any_rows,
)


class Shares(NamedTuple):
    """One worker's shares of a global batch, one per replica: the input of Keras' steps.

    Attributes:
      parts: An element for each replica. It has one row of another replica if a replica has no rows.
      rows: int64 scalars, the number of rows of each part that belong to the replica.
      fingerprint: int64 scalar of the full batch, above 0, which detects ranks that drew another batch. If rows were
        cut before maps, it is that of the rows before the maps. 0 if each rank has its own rows.
    """

    parts: tuple
    rows: tuple
    fingerprint: tf.Tensor


class Cut(NamedTuple):
    """Cuts elements of a `WorkerDataset` into `Shares`. Hashable: a function traced with one serves an equal one.

    Attributes:
      replica_range: The replicas of this worker.
      constants: A bool for each component of a batch, whether it is a constant beside the rows.
      compare: Whether to compute a fingerprint of the batch here.
      left_out: A bool for each component, whether the fingerprint leaves it out; None if none is left out.
      is_beside: Whether elements are `(about, batch)`, as `pipeline.own_batches` returns them.
      is_full: Whether the batch has the rows of all workers.
    """

    replica_range: ReplicaRange
    constants: tuple[bool, ...]
    compare: bool
    left_out: tuple[bool, ...] | None
    is_beside: bool
    is_full: bool

    def __call__(self, element: Any, is_drawn: Any = True) -> Shares:
        """Returns the shares in an element.

        Args:
          element: An element of the dataset of the `WorkerDataset`, with tensors of a graph.
          is_drawn: bool scalar, False if zeros replace the element at the end of the data: it then has no rows.
        """
        first: Any = 0
        if self.is_beside:
            about, batch = element
            total, digest = tf.unstack(tf.reduce_sum(about[:1], 0))  # zeros if there is none
            digest = fingerprint.above_zero(digest)
            if self.is_full:
                total = None  # maps of the whole batch may have changed it
            else:
                first, _ = self.replica_range.bounds(total)
        else:
            batch, total, digest = element, None, tf.constant(0, tf.int64)
        batch = check_equal_rows(forget_rows(batch, self.constants))
        if self.compare:
            digest = fingerprint.of_batch(batch, self.left_out)
        total = num_rows(batch) if total is None else total
        replicas = [self.replica_range.first + i for i in range(self.replica_range.replicas)]
        cuts = [bounds(total, replica, self.replica_range.num_replicas) for replica in replicas]
        parts, rows = cut_rows(batch, [(begin - first, end - first) for begin, end in cuts])
        if is_drawn is not True:
            rows = tuple(tf.where(is_drawn, count, 0) for count in rows)
            digest = tf.where(is_drawn, digest, 0)
        return Shares(parts, rows, digest)


class GatherRows(NamedTuple):
    """Makes `Shares` of `(indices, arrays)` by gathering the rows of each replica. Hashable, like `Cut`.

    Ranks have compared all of the arrays, so the fingerprint is that of the indices.

    Attributes:
      replica_range: The replicas of this worker.
      constants: See `Cut`. There are none.
      take: `take(arrays, indices)` returns rows of the arrays. Hashable.
    """

    replica_range: ReplicaRange
    constants: tuple[bool, ...]
    take: Callable[[Any, tf.Tensor], Any]

    def __call__(self, element: Any, is_drawn: Any = True) -> Shares:
        """Returns the shares in an element.

        Args:
          element: int64 `[n]`, the row indices of a batch, -1 after the last; and the arrays, in any structure. At the
            end of the data there are no indices.
          is_drawn: See `Cut`.
        """
        indices, arrays = element
        parts, rows = [], []
        with tf.device("CPU:0"):  # the arrays are there
            total = tf.reduce_sum(tf.cast(indices >= 0, tf.int64))
            digest = fingerprint.above_zero(tf.squeeze(fingerprint.of_digests(indices), 0))
            for replica in range(self.replica_range.first, self.replica_range.first + self.replica_range.replicas):
                begin, end = bounds(total, replica, self.replica_range.num_replicas)
                rows.append(end - begin)
                begin = tf.minimum(begin, total - 1)  # a row of another replica if there is none
                parts.append(self.take(arrays, indices[begin : tf.maximum(end, begin + 1)]))
        if is_drawn is not True:  # if an iterator's spec has static sizes, zeros replace indices too
            rows = [tf.where(is_drawn, count, 0) for count in rows]
            digest = tf.where(is_drawn, digest, 0)
        return Shares(tuple(parts), tuple(rows), digest)


class WorkerDataset(NamedTuple):
    """A dataset as a worker draws it, and the object that makes shares of its elements.

    Attributes:
      dataset: One of three datasets: the user's batches; this worker's rows of each batch, with the values common to
        all ranks (`about`) beside them; or the row numbers of each batch, with the arrays beside them.
      cut: Makes `Shares` of an element.
      spec: The spec of the batches.
      next_pass: Returns the dataset of each iterator after the first. None if `dataset` serves all iterators.
    """

    dataset: tf.data.Dataset
    cut: Cut | GatherRows
    spec: Any
    next_pass: Callable[[], tf.data.Dataset] | None = None

    def element_spec(self) -> Any:
        """Returns the spec of the elements, with any number of rows, so that steps are traced only once."""
        if isinstance(self.cut, GatherRows):
            return spec_of_any_rows(self.dataset.element_spec, _no_constants(self.dataset.element_spec))
        batch = spec_of_any_rows(self.spec, self.cut.constants)
        return (tf.TensorSpec([None, 2], tf.int64), batch) if self.cut.is_beside else batch

    def shares_spec(self) -> Shares:
        """Returns the spec of the shares."""
        replicas = self.cut.replica_range.replicas
        part = spec_of_any_rows(self.spec, self.cut.constants)
        count = tf.TensorSpec([], tf.int64)
        return Shares((part,) * replicas, (count,) * replicas, count)

    def shares(self) -> tf.data.Dataset:
        """Returns the dataset of `Shares`."""
        spec = self.dataset.element_spec

        def cut(*components: Any) -> Shares:
            return self.cut(pipeline.as_element(components, spec))

        return self.dataset.map(cut)


def worker_dataset(
    dataset: tf.data.Dataset | ArrayBatches,
    rank: int,
    replicas_per_worker: int,
    world_size: int,
    *,
    compare: bool | None = None,
    by_number: bool = False,
) -> WorkerDataset:
    """Returns the dataset that one worker draws, from a dataset of global batches.

    Args:
      dataset: A dataset of global batches. The first dimension of every component counts rows. A batch may have fewer
        rows than there are replicas: some replicas then get 0 rows. For `ArrayBatches` only the order is compared.
      rank: Rank of this worker.
      replicas_per_worker: Number of replicas on each worker.
      world_size: Number of workers.
      compare: Whether other workers draw the same batches, to be compared by their fingerprints. Defaults to True if
        there are several workers, otherwise to False.
      by_number: Whether workers have compared `plan_of(dataset).arrays`, whose row numbers then stand for the rows.
        Defaults to False.

    Raises:
      ValueError: If an element has a component without a first dimension.
      ConfigurationError: If `share` made the batches and a step after it cannot run on this worker's rows alone.
    """
    num_replicas = replicas_per_worker * world_size
    replica_range = ReplicaRange(rank * replicas_per_worker, replicas_per_worker, num_replicas)
    if isinstance(dataset, ArrayBatches):
        spec = dataset.spec()
        cut = GatherRows(replica_range, _no_constants(spec), dataset.take)
        return WorkerDataset(dataset.next_pass(), cut, spec, dataset.next_pass)
    _check_batched(dataset.element_spec)
    compare = world_size > 1 if compare is None else compare
    plan = plan_of(dataset)
    parts = plan.batching(by_number=by_number) if compare else None
    if parts is None:
        plan.check_share()
        left_out = plan.depends_on_randomness if compare else None
        whole = Cut(replica_range, plan.constants, compare, left_out, is_beside=False, is_full=True)
        return WorkerDataset(dataset, whole, dataset.element_spec)
    if parts.has_numbers_alone:
        numbers = pipeline.batches_of_numbers(parts).with_options(dataset.options())
        cut = GatherRows(replica_range, _no_constants(dataset.element_spec), rows_of_tensors)
        return WorkerDataset(beside(parts.arrays, numbers), cut, dataset.element_spec)
    own = pipeline.own_batches(parts, replica_range).with_options(dataset.options())
    own._tfring_dataset = dataset  # all that its functions refer to has to live as long
    return WorkerDataset(own, Cut(replica_range, plan.constants, False, None, True, parts.whole), dataset.element_spec)


def single_shares(
    dataset: tf.data.Dataset, rank: int, replicas_per_worker: int, world_size: int
) -> tf.data.Dataset:
    """Returns a dataset of single shares for `tf.distribute`'s own iterators: one element per replica of each batch."""
    if replicas_per_worker * world_size == 1:
        return dataset
    drawn = worker_dataset(dataset, rank, replicas_per_worker, world_size)
    shares = drawn.shares().prefetch(2)

    def own(part: Any, rows: tf.Tensor) -> Any:
        # Drops the row that does not count; elements of one dataset may have different numbers of rows.
        return slice_rows(forget_rows(part, drawn.cut.constants), 0, rows)

    if replicas_per_worker == 1:
        return shares.map(lambda s: own(s.parts[0], s.rows[0]))

    def elements(s: Shares) -> tf.data.Dataset:
        parts = map(own, s.parts, s.rows)
        concatenate: Callable = tf.data.Dataset.concatenate
        return functools.reduce(concatenate, map(tf.data.Dataset.from_tensors, parts))

    return shares.flat_map(elements).prefetch(2 * replicas_per_worker)


def _no_constants(spec: Any) -> tuple[bool, ...]:
    return (False,) * len(tf.nest.flatten(spec))


def _check_batched(spec: Any) -> None:
    for component in tf.nest.flatten(spec):
        shape = getattr(component, "shape", None)
        if isinstance(component, tf.TensorSpec) and shape is not None and shape.rank == 0:
            raise ValueError(
                f"The elements of the dataset hold a scalar, element_spec={spec}, but RingStrategy slices each batch "
                "along its first dimension, the rows. Call `dataset.batch(global_batch_size)` before the dataset "
                "reaches the strategy, or set `options.experimental_distribute.auto_shard_policy = "
                "tf.data.experimental.AutoShardPolicy.OFF`."
            )
