"""RingAllReduce: the cross-device ops with which TensorFlow reduces, gathers and broadcasts values of replicas."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfring import _tf
from tfring.errors import ConfigurationError
from tfring.reduction.dense import BucketSizes, all_gather_dense, reduce_dense, reduce_scatter_dense
from tfring.reduction.sparse import SparseOptions, goes_dense, reduce_sparse
from tfring.ring.collectives import Collectives, zeros_unless
from tfring.sharding import Sharding


class RingAllReduce(tf.distribute.CrossDeviceOps):
    """Reduces values on the worker first, then once over the ring, then copies the result to the worker's replicas.

    ```
    worker 0   replica 0 ─┐ (1)                       (3) ┌─► replica 0
               replica 1 ─┴─► device 0 ──┐            ┌───┴─► replica 1
                                         ├─ (2) ring ─┤
    worker 1   replica 2 ─┬─► device 0 ──┘            └───┬─► replica 2
               replica 3 ─┘                               └─► replica 3
    ```

    Args:
      collectives: The engine, see `tfring.ring.collectives`.
      devices: This worker's devices, one per replica. They receive results whose destination has no device. Defaults to
        `("",)`: one replica, whose results stay on the device that computed them.
      sparse: A `SparseOptions` that describes how IndexedSlices are reduced.
      buckets: Bytes of dense values that one collective reduces. Defaults to the sizes for one host.
      compression: Dtype in which dense float32 values are sent. Defaults to None: as they are.
    """

    def __init__(
        self,
        collectives: Collectives,
        devices: Sequence[str] = ("",),
        sparse: SparseOptions | None = None,
        buckets: BucketSizes | None = None,
        compression: str | None = None,
    ) -> None:
        super().__init__()
        self._collectives = collectives
        self._devices = tuple(devices)
        self._sparse = sparse or SparseOptions()
        self._buckets = buckets or BucketSizes()
        self._compression = compression

    def over(self, collectives: Collectives) -> RingAllReduce:
        """Returns the same ops over other collectives, for IndexedSlices with any number of rows."""
        sparse = dataclasses.replace(self._sparse, batch_size=None)
        return RingAllReduce(collectives, self._devices, sparse, self._buckets, self._compression)

    @property
    def _num_between_graph_workers(self) -> int:
        return self._collectives.world_size

    def __deepcopy__(self, memo: Any) -> Any:
        return self  # a connection has no copy

    # -- used by tfring itself: one value per worker --------------------------------------------------------------

    def sum_over_workers(
        self,
        values: Sequence[tf.Tensor | tf.IndexedSlices],
        *,
        name: str,
        value_names: Sequence[str] | None = None,
        active: tf.Tensor | None = None,
        keep_sparse: bool = False,
    ) -> list[tf.Tensor | tf.IndexedSlices]:
        """Sums a worker's values over all workers. Sparse sums contain each id once, or are dense.

        Args:
          values: One worker's tensors and IndexedSlices.
          name: Name of the values, for errors and traces.
          value_names: A name for each value (the variable of a gradient), for errors.
          active: bool scalar. If False, this worker contributes nothing, whatever its values are.
          keep_sparse: Whether IndexedSlices stay IndexedSlices, whatever `SparseOptions.dense` is.
        """
        world_size = self._collectives.world_size

        def stays_sparse(i: int) -> bool:
            return keep_sparse or not goes_dense(values[i], self._sparse, world_size)

        def all_reduce(tensors: Sequence[tf.Tensor], positions: Sequence[int]) -> list[tf.Tensor]:
            return reduce_dense(
                self._collectives,
                tensors,
                name=name,
                active=active,
                buckets=self._buckets,
                compression=self._compression,
            )

        value_names = value_names or [f"{name}/{i}" for i in range(len(values))]
        return self._reduce(values, stays_sparse, all_reduce, name, value_names, active)

    def reduce_scatter_over_workers(
        self,
        values: Sequence[tf.Tensor | tf.IndexedSlices],
        shardings: Sequence[Sharding],
        *,
        name: str,
        value_names: Sequence[str],
        active: tf.Tensor | None = None,
        is_zero_unless_active: bool = False,
    ) -> list[tf.Tensor | tf.IndexedSlices]:
        """Sums values over all workers and returns this worker's shards of the sums.

        Args:
          values: One worker's tensors and IndexedSlices.
          shardings: The sharding of each value. The shard of IndexedSlices that are sharded by rows contains its rows,
            each once; other IndexedSlices become dense.
          name: Name of the values, for errors and traces.
          value_names: A name for each value.
          active: See `sum_over_workers`.
          is_zero_unless_active: Whether dense values are already zeros if `active` is False.
        """
        rank, world_size = self._collectives.rank, self._collectives.world_size

        def stays_sparse(i: int) -> bool:
            return shardings[i].by_rows and not goes_dense(values[i], self._sparse, world_size)

        def reduce_scatter(tensors: Sequence[tf.Tensor], positions: Sequence[int]) -> list[tf.Tensor]:
            return reduce_scatter_dense(
                self._collectives,
                tensors,
                [shardings[i] for i in positions],
                name=name,
                active=None if is_zero_unless_active else active,
                buckets=self._buckets,
            )

        sums = self._reduce(values, stays_sparse, reduce_scatter, name, value_names, active)
        return [
            _rows_of_shard(value, sharding, rank) if isinstance(value, tf.IndexedSlices) else value
            for value, sharding in zip(sums, shardings, strict=True)
        ]

    def _reduce(
        self, values: Any, stays_sparse: Callable, reduce: Callable, name: str, value_names: Any, active: Any
    ) -> Any:
        """Sums IndexedSlices for which `stays_sparse(i)` is True; `reduce(tensors, positions)` reduces the others."""
        results: list = [None] * len(values)
        sparse = [i for i, value in enumerate(values) if isinstance(value, tf.IndexedSlices) and stays_sparse(i)]
        dense = [i for i in range(len(values)) if i not in sparse]
        rows = reduce_sparse(
            self._collectives,
            [values[i] for i in sparse],
            [value_names[i] for i in sparse],
            self._sparse,
            name=name,
            active=active,
        )
        reduced = reduce([tf.convert_to_tensor(values[i]) for i in dense], dense)
        for i, value in zip([*sparse, *dense], [*rows, *reduced], strict=True):
            results[i] = value
        return results

    def gather_full(self, shards: Sequence[tf.Tensor], shardings: Sequence[Sharding], *, name: str) -> list[tf.Tensor]:
        """Gathers full tensors from the shards of all workers, laid out as by `plan_shards`."""
        return all_gather_dense(self._collectives, shards, shardings, name=name, buckets=self._buckets)

    def sum_on_worker(self, per_replica: Any, active: Any = None) -> Any:
        """Sums the replicas of this worker onto its first device; inactive replicas count as zero.

        Args:
          per_replica: A PerReplica; or a plain tensor or IndexedSlices, which is then the value of each replica
            (TensorFlow makes one value of one object that all replicas pass).
          active: One bool scalar per replica, or None.
        """
        values = values_of(per_replica)
        if len(values) == 1:
            values = values * len(self._devices)
        if active is not None:
            values = [_mask(a, v) for a, v in zip(active, values, strict=True)]
        if len(values) == 1:
            return values[0]
        return _tf.aggregate_slices(values, tf.add_n)

    # -- tf.distribute.CrossDeviceOps ------------------------------------------------------------------------------

    def batch_reduce_implementation(self, reduce_op: Any, value_destination_pairs: Any, options: Any) -> list:
        del options  # timeouts and packs belong to the engine
        _tf.mark_as_unsaveable()
        values = [values_of(value) for value, _ in value_destination_pairs]
        local = [v[0] if len(v) == 1 else _tf.aggregate_slices(v, tf.add_n) for v in values]
        # IndexedSlices stay sparse: with a sum of all rows, `scatter_mul` would set rows without an index to zero.
        reduced = self.sum_over_workers(local, name="reduce", keep_sparse=True)
        if reduce_op == tf.distribute.ReduceOp.MEAN:
            # A value that does not exist per replica (a value of the host) counts once per worker.
            counts = [len(v) * self._collectives.world_size for v in values]
            reduced = [_divide(value, count) for value, count in zip(reduced, counts, strict=True)]
        return [
            self.broadcast_implementation(value, destinations)
            for value, (_, destinations) in zip(reduced, value_destination_pairs, strict=True)
        ]

    def reduce_implementation(self, reduce_op: Any, per_replica_value: Any, destinations: Any, options: Any) -> Any:
        return self.batch_reduce_implementation(reduce_op, [(per_replica_value, destinations)], options)[0]

    def broadcast_implementation(self, tensor: tf.Tensor, destinations: Any) -> Any:
        if isinstance(destinations, tf.distribute.DistributedValues):
            placed = [v.device for v in destinations.values]
            if len(placed) == len(self._devices) and not all(placed):  # arguments of a function are not placed yet
                copies = [_tf.simple_broadcast(tensor, device) for device in self._devices]
                return _tf.distribute_utils.regroup(copies, wrap_class=_tf.distribute_values.Mirrored)
        return _tf.simple_broadcast(tensor, destinations, always_mirrored=True)

    def _gather_implementation(self, per_replica_value: Any, destinations: Any, axis: int, options: Any) -> Any:
        del options
        _tf.mark_as_unsaveable()
        local = tf.concat(values_of(per_replica_value), axis)
        gathered = self.gather_over_workers(local, axis, name="gather")
        return self.broadcast_implementation(gathered, destinations)

    def gather_over_workers(self, tensor: tf.Tensor, axis: int, *, name: str) -> tf.Tensor:
        """Concatenates the workers' tensors along `axis`, in rank order; their sizes along `axis` may differ."""
        if tensor.dtype == tf.string:
            raise TypeError(
                f"{name} has dtype string and shape {tensor.shape}, but workers exchange only numbers and booleans. "
                "Look strings up in a vocabulary (keras.layers.StringLookup), or gather their ids."
            )
        rank = tensor.shape.rank
        if rank is None:
            raise ConfigurationError(
                f"{name} has a tensor of unknown rank, but workers concatenate tensors along their first dimension. "
                "Set its shape, such as `x.set_shape([None, 3])`: `tf.numpy_function` returns tensors without one."
            )
        front = [axis, *range(axis), *range(axis + 1, rank)]
        back = [*range(1, axis + 1), 0, *range(axis + 1, rank)]
        if axis == 0:
            return self._collectives.all_gather(tensor, name=name)
        return tf.transpose(self._collectives.all_gather(tf.transpose(tensor, front), name=name), back)


def values_of(value: Any) -> list:
    """Returns the values of the replicas of this worker."""
    return list(value.values) if isinstance(value, tf.distribute.DistributedValues) else [value]


def _mask(active: Any, value: Any) -> Any:
    if isinstance(value, tf.IndexedSlices):
        num_rows = tf.where(active, tf.size(value.indices), 0)
        return tf.IndexedSlices(value.values[:num_rows], value.indices[:num_rows], value.dense_shape)
    return zeros_unless(active, [value])[0]


def _rows_of_shard(value: Any, sharding: Sharding, rank: int) -> Any:
    """Returns the rows of IndexedSlices in this rank's shard, with indices counted from its first row."""
    [rows] = sharding.slices(rank)
    inside = tf.logical_and(value.indices >= rows.start, value.indices < rows.stop)
    indices = tf.boolean_mask(value.indices, inside) - rows.start
    shape = tf.constant(sharding.shape_of(rank), tf.int64)
    return tf.IndexedSlices(tf.boolean_mask(value.values, inside), indices, shape)


def _divide(value: Any, count: Any) -> Any:
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(value.values / count, value.indices, value.dense_shape)
    return value / tf.cast(count, value.dtype) if value.dtype.is_floating else value / count
