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
    "With a model or pipeline axis, workers exchange parts of layers over the ring, each worker has one device, and "
    "its optimizer has all slots of its weights."
)
_OF_DELAYED = (
    "With synchronization=Delayed(...), each worker is a replica that holds all weights and slots. They differ within "
    "windows, and the ring averages them."
)
_EXCLUSIONS = {  # by pair of options: why they exclude each other
    ("cluster", "cluster_resolver"): "Both specify the cluster.",
    ("compression", "communication"): "TensorFlow's collectives send float32 uncompressed.",
    ("compression", "shard_optimizer"): "Gradients are sent uncompressed when they are reduced and scattered.",
    ("mesh", "communication"): _OF_MESHES,
    ("mesh", "shard_optimizer"): _OF_MESHES,
    ("mesh", "devices"): _OF_MESHES,
    ("synchronization", "mesh"): _OF_DELAYED,
    ("synchronization", "communication"): _OF_DELAYED,
    ("synchronization", "shard_optimizer"): _OF_DELAYED,
    ("synchronization", "check_equal"): _OF_DELAYED,
    ("trace", "communication"): '`trace`, or TFRING_TRACE, records the collectives of communication="ring".',
}


class RingStrategy(tf.distribute.MultiWorkerMirroredStrategy):
    """Trains one model on the replicas of several workers, as one process would train it on the whole batch.

    Every worker (process) runs the same program. Each variable is created on every replica with rank 0's initial
    value. Each global batch is split into one share per replica. Gradients are summed on the worker, then over the
    ring of all workers, and every replica applies the same update to the same weights.

    Args:
      cluster: A `tfring.cluster.Cluster`. Defaults to the cluster that the first of these describes: `tfring launch`,
        TF_CONFIG, torchrun, MPI, SLURM and the others of `tfring.cluster.detect`; or to this process alone if none
        describes one.
      cluster_resolver: A `tf.distribute.cluster_resolver.ClusterResolver` instead of `cluster`.
      mesh: A `Mesh` that describes how the workers divide the work. With a model or a pipeline axis several workers
        form one replica: they train on the same rows, and `num_replicas_in_sync` is the size of the data axis.
        Defaults to one replica per worker.
      communication: "ring", the compiled ring of this package, or "tensorflow", TensorFlow's collective runtime (NCCL
        between GPUs, gRPC between CPUs). Defaults to "ring".
      devices: This worker's devices, such as `["GPU:0", "GPU:1"]`. Every worker must have the same number of devices.
        Defaults to all GPUs of this worker, or to its CPU if it has none.
      sparse: A `SparseOptions` that describes how sparse gradients are reduced.
      bucket_bytes: Bytes of dense gradients at which a bucket is closed. One collective sums a bucket while the
        backward pass continues. Defaults to 32 MiB on one host, and to 8 MiB on several hosts, with smaller buckets
        for the first layers: their gradients are sent last, when no computation is left to hide them.
      compression: Dtype in which dense float32 gradients are sent between workers, in half the bytes: "bfloat16" or
        "float16". Sums are computed in float32 and each number is rounded twice (see `Communicator.all_reduce`), so
        the result no longer equals one process to float32's accuracy; all replicas still hold the same bits. With
        "float16", gradients above 65504 become infinite. Pays on slow networks. Defaults to None: float32.
      communication_options: `tf.distribute.experimental.CommunicationOptions`, for communication="tensorflow".
      shard_optimizer: Whether each worker updates only its share of every weight and keeps only the optimizer's slots
        of that share (ZeRO stage 1, https://arxiv.org/abs/1910.02054). Gradients are reduce-scattered and weights
        all-gathered, which moves the same number of bytes as without it. Works with Keras optimizers that compute
        element by element (not Adafactor, Lamb, Muon), and with your own classes that set the attribute
        `element_wise = True`. All workers take part in saving; see `docs/saving.md`. Defaults to False.
      synchronization: A `tfring.Delayed`: each worker takes several steps on its own rows, then the weights are
        averaged. For slow networks; the result does not equal one process. Defaults to None: gradients are reduced in
        every step.
      random: How random layers such as Dropout draw. "replica": each replica draws for its own rows. "global": each
        replica draws for all rows, as one process does, and uses the numbers of its own rows. The result is that of
        one process, and drawing takes as long as in one process. Steps that each replica computes from its own rows
        (pipelines, `Delayed`) always draw as with "replica". Defaults to "replica".
      check_equal: Whether Keras' `fit` compares all variables of all replicas bit for bit after every step (see
        `assert_equal`). For debugging: it costs a pass over all variables. Defaults to TFRING_CHECK_EQUAL, or to False
        if that is not set.
      trace: A folder to which each worker writes a trace of what it did and when, for `tfring report`. Defaults to
        TFRING_TRACE; if that is not set, no trace is written.

    Raises:
      ConfigurationError: If a setting cannot be honoured.
      RendezvousError: If the other workers do not connect in time.

    The pages in `docs/` describe the sources of a cluster and the environment variables.

    >>> strategy = RingStrategy()
    >>> with strategy.scope():
    ...     variable = tf.Variable(1.0)
    >>> strategy.num_replicas_in_sync, strategy.rank, strategy.world_size, strategy.is_chief
    (1, 0, 1, True)
    """

    extended: RingExtended
    ring: Ring
    _workers: Cluster | None = None  # with parameter servers: all workers, even if each is in a ring by itself
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
            raise ConfigurationError(f"`bucket_bytes` is {bucket_bytes!r}, not an integer of at least 1, or None.")
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
        settings.read("TFRING_SEED")  # raises if it is not valid; a valid one was applied when tfring was imported
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
        self._found = detection.ClusterSnapshot(os.environ) if cluster is None else None
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
        # Not the initializer of MultiWorkerMirroredStrategy, which starts a gRPC server.
        tf.distribute.Strategy.__init__(self, extended)
        ring = self.ring = extended.ring
        ring.shard_optimizer, ring.check_equal, ring.random = bool(shard_optimizer), check_equal, random
        if synchronization is not None:
            if len(ring.devices) > 1:
                raise ConfigurationError(
                    f"`devices` has several devices, {ring.devices}, but with "
                    f"synchronization={type(synchronization).__name__}(...) a worker is one replica. Start a worker "
                    "for each, as `tfring launch` does."
                )
            ring.updater = LocalSteps(ring, synchronization)
        _keras.install()
        if cluster.world_size > 1:
            _keras.share_seeds(ring)
        if trace is not None and self._workers is None:  # with servers, ParameterServerStrategy starts it later
            ring.start_trace(trace)
        remember(ring)
        ring.lines = RunLines(ring, getattr(self, "num_servers", 0))

    def scope(self) -> AbstractContextManager[Any]:
        """Returns the scope of this strategy; see `tf.distribute.Strategy.scope`."""
        self.warn_of_another_cluster()
        return super().scope()

    def warn_of_another_cluster(self) -> None:
        """Warns once if the environment describes another cluster than when the strategy was made from it."""
        changed = self._found and self._found.changed(os.environ)
        if changed:
            self._found = None
            before, now = changed
            warnings.warn(
                f"The environment describes a different cluster ({now}) than when RingStrategy() was made ({before}). "
                "This strategy keeps the latter. Set TF_CONFIG and similar variables before RingStrategy().",
                stacklevel=4,
            )

    @property
    def trace(self) -> Recorder | None:
        """The recorder of this rank's trace; None if no trace is written."""
        return self.ring.trace

    @property
    def cluster(self) -> Cluster:
        """The rank of this worker and the addresses of all workers."""
        return self.ring.cluster

    @property
    def rank(self) -> int:
        """The rank of this worker, from 0 to `world_size - 1`."""
        return self.cluster.rank

    @property
    def world_size(self) -> int:
        """The number of workers."""
        return self.cluster.world_size

    @property
    def is_chief(self) -> bool:
        """True on rank 0, which prints, logs and writes on behalf of all ranks."""
        return self.cluster.is_chief

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas; 1 in a step of Keras, which is written as if one replica had all rows."""
        return 1 if step.is_one_replica() else self.ring.num_replicas

    @property
    def mesh(self) -> Mesh:
        """The arrangement of the workers along the axes data, model and pipeline."""
        return self.ring.mesh

    def run(
        self,
        fn: Callable[..., Any],
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
        options: tf.distribute.RunOptions | None = None,
    ) -> Any:
        """Runs `fn` on each replica; see `tf.distribute.Strategy.run`.

        If a collective fails, this raises tfring's error, unless TensorFlow runs the collective later, in a
        `tf.function` around this call.
        """
        with ShortTraceback(), failures.reraise_as_tfring_error(self.ring.channels, self.mesh):
            return super().run(fn, args, kwargs, options)

    def reduce(self, reduce_op: tf.distribute.ReduceOp | str, value: Any, axis: int | None) -> Any:
        """Reduces a value over replicas; see `tf.distribute.Strategy.reduce`.

        Scalars can be reduced over axis 0 too, and nested structures are accepted. Keras needs both (keras #20585).
        """
        if tf.nest.is_nested(value) and not isinstance(value, tf.distribute.DistributedValues):
            return tf.nest.map_structure(lambda v: self.reduce(reduce_op, v, axis), value)
        return super().reduce(reduce_op, value, axis)

    def all_reduce_gradients(self, gradients: Any) -> Any:
        """Reduces the gradients of all replicas to those of the whole batch; every replica calls it.

        Use it if a `train_step` processes gradients between tape and optimizer, as with `tf.clip_by_global_norm`. In a
        step of Keras, pass the result to `optimizer.apply_gradients` as it is: the optimizer weighs replicas by their
        rows, these weights add up to one, and so gradients that are equal on all replicas do not change. In a loop of
        your own, gradients are summed over replicas, so the result is the sum: divide it by `num_replicas_in_sync`
        before an optimizer sums it again.

        Args:
          gradients: A nested structure of tensors, `tf.IndexedSlices` and None, the same on all replicas.

        Returns:
          The same structure, with equal values on all replicas. IndexedSlices contain each id once.

        Raises:
          RuntimeError: If it is called outside of a replica (`train_step`, `strategy.run`).
        """
        if tf.distribute.get_replica_context() is None:
            raise RuntimeError(
                "all_reduce_gradients was called in the cross-replica context. Call it in a replica: in `train_step`, "
                "or in the function given to `strategy.run`."
            )
        return self.extended.all_reduce_gradients(gradients)

    def bytes_sent(self) -> int | None:
        """Returns the number of bytes this worker has sent to others so far; None with communication="tensorflow"."""
        return self.ring.bytes_sent()

    def seconds_waited(self) -> float | None:
        """Returns the seconds this worker's collectives have waited for others so far; None if they are not counted.

        Waiting with communication="tensorflow" is not counted, nor is waiting for parameter servers. Waiting that the
        backward pass hides is counted, too.
        """
        return self.ring.seconds_waited()

    def synchronize(self, model: Any) -> None:
        """Exchanges and applies the updates that workers hold back with `synchronization=...`; every rank calls it.

        With `synchronization=Delayed(...)`, call it before you read weights between two batches (`get_weights`, a call
        of the model, a checkpoint of TensorFlow). At the end of an epoch, and in `evaluate`, `predict` and saving,
        tfring does so itself. Without `synchronization`, or if nothing is held back, it does nothing.

        Args:
          model: A Keras model of this strategy.
        """
        if self.ring.updater is not None:
            with failures.reraise_as_tfring_error(self.ring.channels, self.mesh):
                self.ring.updater.before_evaluation(model)

    def barrier(self) -> None:
        """Blocks until every worker has called it."""
        self.ring.peers.barrier(name="barrier")

    def assert_equal(self, variables: Sequence) -> None:
        """Checks that all replicas hold the same bits of `variables`; every rank calls it, eagerly or in a function.

        Args:
          variables: Variables of Keras or TensorFlow. Skipped are variables of strings and those that replicas do not
            mirror: metrics, and weights and slots that are sharded along the data axis, as by `shard_optimizer`.

        Raises:
          tf.errors.InvalidArgumentError: If replicas differ; on every rank, naming the variables and the replicas.

        >>> strategy = RingStrategy()
        >>> with strategy.scope():
        ...     variable = tf.Variable([1.0, 2.0])
        >>> strategy.assert_equal([variable])
        """
        variables = [v for v in variables if not gradient_is_complete(v)]  # other ranks have other shards
        names = [getattr(v, "path", None) or v.name for v in variables]
        values = [v.value if hasattr(v, "path") else v for v in variables]  # a Keras variable holds TensorFlow's
        equality.assert_equal(self.ring, values, names, [sharding_of(v) is not None for v in variables])

    def close(self) -> None:
        """Leaves the ring; the strategy cannot be used afterwards."""
        forget(self.ring)
        self.ring.lines.close()
        self.ring.close()


def _check_exclusions(given: Mapping[str, Any]) -> None:
    """Raises ConfigurationError if two options are given (not None) that exclude each other."""
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
