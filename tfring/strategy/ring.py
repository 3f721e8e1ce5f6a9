"""RingStrategy: trains one model on the replicas of several workers, as one process would."""

from __future__ import annotations

import numbers
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from tfring import _keras, equality, step
from tfring import config as settings
from tfring._keras.optimizers.local_steps import LocalSteps
from tfring._keras.sharding import gradient_is_complete, sharding_of
from tfring.cluster import Cluster, Mesh, detect, detection
from tfring.cluster_resolver import ClusterResolver
from tfring.errors import ConfigurationError
from tfring.program import ShortTraceback, short_traceback
from tfring.reduction.sparse import SparseOptions
from tfring.ring import failures
from tfring.ring.library import COMPRESSIONS
from tfring.ring.trace import Recorder
from tfring.runtime import Ring, forget, remember
from tfring.strategy.delayed import Delayed
from tfring.strategy.extended import RingExtended
from tfring.strategy.lines import RunLines

_COMMUNICATIONS = ("ring", "tensorflow")
_RANDOM = ("replica", "global")
_OF_MESHES = (
    "With a model or a pipeline axis workers exchange parts of layers by the ring, each worker has one device, and its "
    "optimizer all slots of its weights."
)
_OF_DELAYED = (
    "With synchronization=Delayed(...) each worker is a replica that holds all weights and slots, which differ in "
    "windows, and the ring averages them."
)
_EXCLUSIONS = {  # of two options, why one excludes the other
    ("cluster", "cluster_resolver"): "Both give the cluster.",
    ("compression", "communication"): "TensorFlow's collectives send float32 as it is.",
    ("compression", "shard_optimizer"): "Gradients travel as they are where they are reduced and scattered.",
    ("mesh", "communication"): _OF_MESHES,
    ("mesh", "shard_optimizer"): _OF_MESHES,
    ("mesh", "devices"): _OF_MESHES,
    ("synchronization", "mesh"): _OF_DELAYED,
    ("synchronization", "communication"): _OF_DELAYED,
    ("synchronization", "shard_optimizer"): _OF_DELAYED,
    ("synchronization", "check_equal"): _OF_DELAYED,
    ("trace", "communication"): '`trace`, or TFRING_TRACE, tells of the collectives of communication="ring".',
}


class RingStrategy(tf.distribute.MultiWorkerMirroredStrategy):
    """Trains one model on the replicas of several workers, as one process would train it on the whole batch.

    Every worker (process) runs the same program. Variables are made on every replica with rank 0's initial value;
    each global batch is cut into one share a replica; gradients are summed on the worker, then round a ring of all
    workers; every replica applies the same update to the same weights.

    Args:
      cluster: A `tfring.cluster.Cluster`; by default what `tfring launch` or TF_CONFIG say, and this process alone
        where neither does.
      cluster_resolver: A `tf.distribute.cluster_resolver.ClusterResolver` instead of `cluster`.
      mesh: How the workers divide the work, see `Mesh`. With a model or a pipeline axis several workers are one
        replica: they train on the same rows, and `num_replicas_in_sync` is the size of the data axis. Default: each
        worker is a replica.
      communication: "ring", the compiled ring of this package (default), or "tensorflow", TensorFlow's collective
        runtime (NCCL between GPUs, gRPC between CPUs).
      devices: This worker's devices, such as `["GPU:0", "GPU:1"]`; by default all its GPUs, or its CPU. Every worker
        has the same number.
      sparse: How sparse gradients are reduced, see `SparseOptions`.
      bucket_bytes: How many bytes of dense gradients close a bucket, which is summed by one collective while the
        backward pass goes on. Default: 32 MiB on one host; on several 8 MiB, with smaller ones for the first layers,
        whose gradients leave last, when nothing is left to hide them.
      compression: "bfloat16" or "float16": what dense float32 gradients travel as between workers, in half the bytes.
        Their sums are made in float32 and each number is rounded twice (see `Communicator.all_reduce`), so the result
        no longer equals one process to float32's accuracy; all replicas still hold the same bits. Where float16 is too
        narrow (above 65504), gradients become infinite. It pays on slow networks. Default: None, float32.
      communication_options: `tf.distribute.experimental.CommunicationOptions`, for communication="tensorflow".
      shard_optimizer: Whether each worker updates its share of every weight and keeps the optimizer's slots of that
        share alone (ZeRO stage 1, https://arxiv.org/abs/1910.02054): gradients are reduced and scattered, weights
        gathered, the same bytes as without. For optimizers of Keras that compute element by element (not Adafactor,
        Lamb, Muon), and for classes of your own that say so by the attribute `element_wise = True`. All workers
        take part in saving; see `docs/saving.md`. Default: False.
      synchronization: A `tfring.Delayed`: each worker takes several steps on its own rows, and then the weights are
        averaged. For slow networks, and not equal to one process. Default: None, gradients are reduced in every step.
      random: What random layers such as Dropout draw. "replica": each replica draws for its own rows. "global": each
        draws for all rows, as one process does, and uses those of its own; the result is that of one process, and
        random numbers take as long as there. Steps of a replica's own rows (pipelines, `Delayed`) always draw as with
        "replica". Default: "replica".
      check_equal: Whether Keras' `fit` compares all variables of all replicas bit for bit after every step (see
        `assert_equal`); for debugging, it costs a pass over all variables. Default: TFRING_CHECK_EQUAL, else False.
      trace: A folder where each worker writes what it did when, for `tfring report`. Default: TFRING_TRACE, else none
        is written.

    Raises:
      ConfigurationError: For settings that cannot be honoured.
      RendezvousError: Where the other workers do not come.

    Where the cluster comes from and what the environment may say is in `docs/`.

    >>> strategy = RingStrategy()
    >>> with strategy.scope():
    ...     variable = tf.Variable(1.0)
    >>> strategy.num_replicas_in_sync, strategy.rank, strategy.world_size, strategy.is_chief
    (1, 0, 1, True)
    """

    extended: RingExtended
    ring: Ring
    _workers: Cluster | None = None  # those of parameter servers, where each has a ring of its own
    _extended_class = RingExtended

    @short_traceback
    def __init__(
        self,
        cluster: Cluster | None = None,
        *,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None = None,
        mesh: Mesh | None = None,
        communication: str = "ring",
        devices: Sequence[str] | None = None,
        sparse: SparseOptions | None = None,
        bucket_bytes: int | None = None,
        compression: str | None = None,
        communication_options: tf.distribute.experimental.CommunicationOptions | None = None,
        shard_optimizer: bool = False,
        synchronization: Delayed | None = None,
        random: str = "replica",
        check_equal: bool | None = None,
        trace: str | os.PathLike | None = None,
    ) -> None:
        if communication not in _COMMUNICATIONS:
            raise ConfigurationError(f"`communication` is {communication!r}, not one of {_COMMUNICATIONS}.")
        if bucket_bytes is not None and not (isinstance(bucket_bytes, numbers.Integral) and bucket_bytes >= 1):
            raise ConfigurationError(f"`bucket_bytes` is {bucket_bytes!r}, not a whole number, 1 or more, or None.")
        if compression is not None and compression not in COMPRESSIONS:
            raise ConfigurationError(f"`compression` is {compression!r}, not one of {COMPRESSIONS} or None.")
        if random not in _RANDOM:
            raise ConfigurationError(f"`random` is {random!r}, not one of {_RANDOM}.")
        if synchronization is not None and not isinstance(synchronization, Delayed):
            raise ConfigurationError(
                f"`synchronization` is {synchronization!r}, not a tfring.Delayed, such as tfring.Delayed(every=8), or "
                "None."
            )
        if mesh is not None and not isinstance(mesh, Mesh):
            raise ConfigurationError(f"`mesh` is {mesh!r}, not a tfring.Mesh, such as tfring.Mesh(model=2), or None.")
        mesh = mesh or Mesh()
        check_equal = settings.read("TFRING_CHECK_EQUAL") if check_equal is None else check_equal
        settings.read("TFRING_SEED")  # which was taken when tfring was imported, if it is legal
        trace = settings.read("TFRING_TRACE") if trace is None else trace
        given = {
            "cluster": cluster,
            "cluster_resolver": cluster_resolver,
            "mesh": None if mesh.is_data_only else mesh,
            "communication": communication if communication == "tensorflow" else None,
            "devices": devices if devices is not None and len(devices) > 1 else None,
            "compression": compression,
            "shard_optimizer": shard_optimizer or None,
            "synchronization": synchronization,
            "check_equal": check_equal or None,
            "trace": None if trace is None else str(trace),
        }
        _check_exclusions(given)
        if cluster_resolver is not None:
            cluster = _cluster_of(cluster_resolver)
        self._found = detection.Outlook(os.environ) if cluster is None else None
        cluster = detect(cluster)
        if cluster.is_chief:
            settings.warn_of_unknown()
        mesh = mesh.of(cluster.world_size)
        extended = self._extended_class(
            self,
            cluster,
            mesh,
            workers=self._workers,
            cluster_resolver=cluster_resolver,
            communication=communication,
            devices=devices,
            sparse=sparse or SparseOptions(),
            bucket_bytes=bucket_bytes,
            compression=compression,
            communication_options=communication_options,
        )
        # Not the initialiser of MultiWorkerMirroredStrategy: that starts a gRPC server.
        tf.distribute.Strategy.__init__(self, extended)
        ring = self.ring = extended.ring
        ring.shard_optimizer, ring.check_equal, ring.random = bool(shard_optimizer), check_equal, random
        if synchronization is not None:
            if len(ring.devices) > 1:
                raise ConfigurationError(
                    f"`devices` has several devices, {ring.devices}, and with "
                    f"synchronization={type(synchronization).__name__}(...) a worker is one replica. Start a worker "
                    "for each, as `tfring launch` does."
                )
            ring.updater = LocalSteps(ring, synchronization)
        _keras.install()
        if cluster.world_size > 1:
            _keras.share_seeds(ring)
        if trace is not None and self._workers is None:  # servers start it once they are there
            ring.start_trace(trace)
        remember(ring)
        ring.lines = RunLines(ring, getattr(self, "num_servers", 0))

    @tf.autograph.experimental.do_not_convert
    def scope(self) -> AbstractContextManager[Any]:
        """As `tf.distribute.Strategy.scope`."""
        self.warn_of_another_cluster()
        return super().scope()

    def warn_of_another_cluster(self) -> None:
        """Once, where the environment says another cluster than when the strategy was made from it."""
        changed = self._found and self._found.changed(os.environ)
        if changed:
            self._found = None
            before, now = changed
            warnings.warn(
                f"The environment describes another cluster ({now}) than when RingStrategy() was made ({before}), "
                "which this strategy keeps. Set TF_CONFIG and the like before RingStrategy().",
                stacklevel=4,
            )

    @property
    def trace(self) -> Recorder | None:
        """The recorder of this rank's trace; None where none is written."""
        return self.ring.trace

    @property
    def cluster(self) -> Cluster:
        """The rank of this worker and the addresses of all."""
        return self.ring.cluster

    @property
    def rank(self) -> int:
        """The number of this worker, from 0 to `world_size - 1`."""
        return self.cluster.rank

    @property
    def world_size(self) -> int:
        """The number of workers."""
        return self.cluster.world_size

    @property
    def is_chief(self) -> bool:
        """True on rank 0, which prints, logs and writes what is wanted once."""
        return self.cluster.is_chief

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas; 1 in a step of Keras, which is written for all rows."""
        return 1 if step.is_one_replica() else self.ring.num_replicas

    @property
    def mesh(self) -> Mesh:
        """The arrangement of the workers along the axes data, model and pipeline."""
        return self.ring.mesh

    @tf.autograph.experimental.do_not_convert
    def run(
        self,
        fn: Callable[..., Any],
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
        options: tf.distribute.RunOptions | None = None,
    ) -> Any:
        """Runs `fn` on each replica, as `tf.distribute.Strategy.run`.

        Where a collective fails, it raises tfring's error, unless TensorFlow runs it later, in a `tf.function` around
        this call.
        """
        with ShortTraceback(), failures.reraise_as_tfring_error(self.ring.channels, self.mesh):
            return super().run(fn, args, kwargs, options)

    def reduce(self, reduce_op: tf.distribute.ReduceOp | str, value: Any, axis: int | None) -> Any:
        """As `tf.distribute.Strategy.reduce`; scalars reduce over axis 0 too, and structures are accepted.

        Keras asks for both (keras #20585).
        """
        if tf.nest.is_nested(value) and not isinstance(value, tf.distribute.DistributedValues):
            return tf.nest.map_structure(lambda v: self.reduce(reduce_op, v, axis), value)
        return super().reduce(reduce_op, value, axis)

    def all_reduce_gradients(self, gradients: Any) -> Any:
        """Reduces the gradients of all replicas to those of the whole batch; every replica calls it.

        For what a `train_step` does itself between tape and optimizer, such as `tf.clip_by_global_norm`. In a step of
        Keras the result may go to `optimizer.apply_gradients` as it is: the optimizer weighs replicas by their rows,
        and weights that add up to one leave alone what is equal on all. In a loop of your own, where gradients are
        summed over replicas, it is the sum; divide it by `num_replicas_in_sync` before an optimizer sums it once more.

        Args:
          gradients: A structure of tensors, `tf.IndexedSlices` and None, alike on all replicas.

        Returns:
          The same structure, equal on all replicas; IndexedSlices have each id once.

        Raises:
          RuntimeError: Outside of a replica (`train_step`, `strategy.run`).
        """
        if tf.distribute.get_replica_context() is None:
            raise RuntimeError(
                "all_reduce_gradients was called in the cross-replica context. Call it in a replica: in `train_step`, "
                "or in the function given to `strategy.run`."
            )
        return self.extended.all_reduce_gradients(gradients)

    def bytes_sent(self) -> int | None:
        """Returns the bytes this worker has sent to others so far; None with communication="tensorflow"."""
        return self.ring.bytes_sent()

    def seconds_waited(self) -> float | None:
        """Returns the seconds this worker's collectives have waited for others so far; None where they are not counted.

        Those of communication="tensorflow" are not, nor is what parameter servers are waited for. What the backward
        pass hides counts, too.
        """
        return self.ring.seconds_waited()

    def synchronize(self, model: Any) -> None:
        """Exchanges and applies what workers hold back with `synchronization=...`; every rank calls it.

        For reading weights between two batches (`get_weights`, a call of the model, a checkpoint of TensorFlow's) with
        `synchronization=Delayed(...)`. At the end of an epoch, and in `evaluate`, `predict` and saving, it is done.
        Without it, and where nothing is held back, it does nothing.

        Args:
          model: A Keras model of this strategy.
        """
        if self.ring.updater is not None:
            with failures.reraise_as_tfring_error(self.ring.channels, self.mesh):
                self.ring.updater.before_evaluation(model)

    def barrier(self) -> None:
        """Returns once every worker has called it."""
        self.ring.peers.barrier(name="barrier")

    def assert_equal(self, variables: Sequence) -> None:
        """Checks that all replicas hold the same bits of `variables`; every rank calls it, eagerly or in a function.

        Args:
          variables: Of Keras or TensorFlow; those that replicas do not mirror are passed over (metrics, and the shards
            of slots that `shard_optimizer` gives each worker).

        Raises:
          tf.errors.InvalidArgumentError: On every rank, naming the variables and the replicas that differ.

        >>> strategy = RingStrategy()
        >>> with strategy.scope():
        ...     variable = tf.Variable([1.0, 2.0])
        >>> strategy.assert_equal([variable])
        """
        variables = [v for v in variables if not gradient_is_complete(v)]  # others have other shards
        names = [getattr(v, "path", None) or v.name for v in variables]
        values = [v.value if hasattr(v, "path") else v for v in variables]  # a Keras variable holds TensorFlow's
        equality.assert_equal(self.ring, values, names, [sharding_of(v) is not None for v in variables])

    def close(self) -> None:
        """Leaves the ring; the strategy cannot be used afterwards."""
        forget(self.ring)
        self.ring.lines.close()
        self.ring.close()


def _check_exclusions(given: Mapping[str, Any]) -> None:
    """Raises ConfigurationError where two options are given, not None, of which one excludes the other."""
    for (one, other), why in _EXCLUSIONS.items():
        if given.get(one) is not None and given.get(other) is not None:
            received = f"{one}={given[one]!r} and {other}={given[other]!r}"
            raise ConfigurationError(f"{received} exclude each other. {why} Leave out one of them.")


def _cluster_of(resolver: tf.distribute.cluster_resolver.ClusterResolver) -> Cluster:
    if isinstance(resolver, ClusterResolver):
        return resolver.cluster
    spec = resolver.cluster_spec().as_dict()
    if not spec:
        return Cluster.alone()
    return Cluster.from_tf_config(
        {"cluster": spec, "task": {"type": resolver.task_type, "index": resolver.task_id}}
    )
