"""The ring of a strategy: its workers, and how they exchange data. All code below strategies uses it."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from tfring import _tf
from tfring.cluster import Cluster, Mesh
from tfring.cross_device_ops import RingAllReduce
from tfring.errors import ConfigurationError
from tfring.reduction.dense import BucketSizes
from tfring.reduction.sparse import SparseOptions
from tfring.ring.collectives import Collectives, LocalCollectives, RingCollectives
from tfring.ring.trace import Recorder, Source, ring_source
from tfring.ring.trace import start as start_recorder

_of_several_workers: list[weakref.ref[Ring]] = []  # the newest last


class Ring:
    """The workers of a RingStrategy, and how they exchange data.

    Args:
      strategy: The `tf.distribute.Strategy` that creates it.
      cluster: The workers, and the rank of this process among them.
      mesh: The arrangement of the workers.
      communication: "ring" or "tensorflow".
      devices: Names of the devices of this worker's replicas.
      channels: Collectives of all workers for control, and for gradients.
      sparse: A `SparseOptions` that describes how sparse gradients are summed.
      bucket_bytes: Size of buckets of gradients in bytes; None chooses it by the cluster.
      compression: Dtype in which gradients are sent; None sends them as they are.

    Attributes:
      strategy, cluster, mesh, communication: The arguments.
      devices: A tuple of names.
      channels: A list of the engines that are counted and closed with the ring.
      world: Collectives of all workers, on the control channel: for values that are the same on every rank, files,
        initial values.
      peers: Collectives of all workers for exchanges of the program itself, including workers that train by themselves.
      control: Collectives of the workers that share each weight, for everything except gradients: statistics, logs.
      gradients: The same on the channel of gradients, so that no bucket waits for a statistic of the backward pass.
      control_ops: A `RingAllReduce` that reduces and gathers TensorFlow's values with `control`.
      gradient_ops: A `RingAllReduce` that does so with `gradients`.
      updater: The layer between optimizers and weights, parameter servers or local steps of a worker; or None.
      shard_optimizer: Whether each worker holds a shard of optimizers' slots.
      check_equal: Whether replicas compare their weights after each step.
      random: The rows for which random numbers are drawn: "replica" or "global".
      trace: The recorder of this rank's trace, or None.
      trace_source: The source that the recorder reads.
      makes_own_variables: Whether variables that are created now belong to this worker alone.
      lines: An object that prints the first and the last line of a run.
    """

    updater: Any = None
    shard_optimizer = False
    check_equal = False
    random = "replica"
    trace: Recorder | None = None
    trace_source: Source
    makes_own_variables = False
    lines: Any = None

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        cluster: Cluster,
        mesh: Mesh,
        communication: str,
        devices: Sequence[str],
        channels: tuple[Collectives, Collectives],
        *,
        sparse: SparseOptions,
        bucket_bytes: int | None,
        compression: str | None,
    ) -> None:
        self.strategy: Any = strategy
        self.cluster = cluster
        self.mesh = mesh
        self.communication = communication
        self.devices = tuple(devices)
        world, gradients = channels
        self.world = world
        self.peers: Any = world
        self.channels = [world] if world is gradients else [world, gradients]
        self._along = {"control": {"world": world}, "gradients": {"world": gradients}}
        self.control = self.along("data")
        self.gradients = self.along("data", "gradients")
        buckets = BucketSizes(bucket_bytes) if bucket_bytes else BucketSizes.of(cluster.num_nodes)
        self.control_ops = RingAllReduce(self.control, self.devices, sparse, buckets)
        self.gradient_ops = RingAllReduce(self.gradients, self.devices, sparse, buckets, compression)

    def scope(self) -> AbstractContextManager[Any]:
        """Returns the scope of the strategy."""
        return self.strategy.scope()

    # -- workers and replicas --------------------------------------------------------------------------------------

    @property
    def trains_alone(self) -> bool:
        """True if each worker trains by itself, until a window ends or with asynchronous servers."""
        return self.updater is not None and not self.updater.weighs

    @property
    def num_replicas(self) -> int:
        """The number of replicas of all workers."""
        return self.mesh.size_along("data") * len(self.devices)

    @property
    def first_replica(self) -> int:
        """The index of this worker's first replica."""
        return self.control.rank * len(self.devices)

    @property
    def is_on_cpu(self) -> bool:
        """True if the replicas of this worker are on CPUs."""
        return all("CPU" in device for device in self.devices)

    @property
    def is_alone(self) -> bool:
        """True for a single replica on a single worker, which has no other replica to exchange data with."""
        return self.channels[0].world_size * len(self.devices) == 1

    def along(self, axis: str, channel: str = "control") -> Collectives:
        """Returns the collectives of the ranks along an axis of the mesh through this rank, ordered by coordinate.

        Collectives of one channel are called in one order; those of the other channel may run at the same time.

        Args:
          axis: "data", "model", "pipeline", several joined by "+", or "world".
          channel: "control" or "gradients".
        """
        found = self._along[channel]
        if axis not in found:
            world = found["world"]
            ranks = self.mesh.ranks(axis, world.rank)
            if len(ranks) == 1:
                found[axis] = LocalCollectives()
            elif len(ranks) == world.world_size:
                found[axis] = world
            else:
                found[axis] = world.group(ranks, f"{axis} of ranks {', '.join(map(str, ranks))}")
        return found[axis]

    def cross_replica(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Runs `fn(*args)` in the cross-replica context, from a replica.

        With one replica per worker this needs no `merge_call`, so it works inside `tf.cond`, too.
        """
        if len(self.devices) > 1:
            if _tf.is_in_another_graph():
                raise ConfigurationError(_in_a_branch(len(self.devices)))
            return tf.distribute.get_replica_context().merge_call(lambda _, *a: fn(*a), args=args)
        with _tf.cross_replica_context(self.strategy):
            return fn(*args)

    @contextlib.contextmanager
    def variables_of_worker(self) -> Iterator[None]:
        """Enters a scope in which variables belong to this worker alone; those of others may have other shapes."""
        self.makes_own_variables = True
        try:
            yield
        finally:
            self.makes_own_variables = False

    # -- costs -----------------------------------------------------------------------------------------------------

    def bytes_sent(self) -> int | None:
        """Returns the number of bytes this worker has sent to others; None if the engine does not count them."""
        return _total(sender.bytes_sent() for sender in self._senders())

    def seconds_waited(self) -> float | None:
        """Returns the seconds that this worker has waited for others; None if they are not counted."""
        return _total(sender.seconds_waited() for sender in self._senders())

    def _senders(self) -> list[Any]:
        return self.channels if self.updater is None else [*self.channels, self.updater]

    def start_trace(self, folder: str | os.PathLike) -> None:
        """Starts writing the trace of this rank into a folder; see `tfring.ring.trace`."""
        communicator = getattr(self.world, "communicator", None)
        self.trace_source = ring_source(communicator)
        self.trace = start_recorder(folder, self.world.rank, self.world.world_size, self.trace_source)
        if communicator is not None:
            self.gradients.marks_ready = True

    def close(self) -> None:
        """Leaves the ring."""
        if self.trace is not None:
            self.trace.close()
            self.trace = None
        for channel in self.channels:
            channel.close()


def connect(cluster: Cluster) -> tuple[Collectives, Collectives]:
    """Connects two rings of the same workers, one for control and one for gradients."""
    if cluster.world_size == 1:
        alone = LocalCollectives()
        return alone, alone
    from tfring.ring.communicator import Communicator

    control = Communicator.connect(cluster, "control")
    gradients = Communicator.connect(cluster, "gradients", beside=control)
    return RingCollectives(control), RingCollectives(gradients)


# -- the ring of a strategy, a scope, a process ------------------------------------------------------------------------


def ring_of(strategy: Any) -> Ring | None:
    """Returns the ring of a strategy; None if it is not a RingStrategy."""
    ring = getattr(strategy, "ring", None)
    return ring if isinstance(ring, Ring) else None


def current_ring() -> Ring | None:
    """Returns the ring of the strategy in whose scope this code runs; None if there is none."""
    return ring_of(tf.distribute.get_strategy()) if tf.distribute.has_strategy() else None


def remember(ring: Ring) -> None:
    """Notes that this process takes part in a ring, until `forget`."""
    forget(ring)
    if ring.cluster.world_size > 1:
        _of_several_workers.append(weakref.ref(ring))


def forget(ring: Ring) -> None:
    """Notes that this process has left a ring."""
    _of_several_workers[:] = [ref for ref in _of_several_workers if ref() not in (None, ring)]


def ring_of_process() -> Ring | None:
    """Returns the newest open ring of several workers in this process; None if there is none."""
    found = (ref() for ref in reversed(_of_several_workers))
    return next((ring for ring in found if ring is not None), None)


def _in_a_branch(replicas: int) -> str:
    return (
        "An optimizer, or another call for all replicas, is in a `tf.cond`, a `tf.while_loop` or a function of these, "
        f"where TensorFlow cannot run the {replicas} replicas of this worker together. Accumulate gradients with the "
        "optimizer's `gradient_accumulation_steps`, or start one worker per device."
    )


def _total(counts: Iterable[Any]) -> Any:
    """Returns the sum, or None if a count is None. The counts of a channel include those of its groups."""
    found = list(counts)
    return None if None in found else sum(found)
