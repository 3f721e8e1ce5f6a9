"""The `strategy.extended` of a RingStrategy: devices, variables, contexts, reductions.

TensorFlow calls a strategy through private methods and attributes. They are overridden only here.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfring import _tf, config, partition, step
from tfring._keras.state import RingMirroredVariable, RingSyncOnReadVariable, is_of_own_values
from tfring.cluster import Cluster, Mesh
from tfring.cluster.launch_variables import release_listener
from tfring.cluster_resolver import ClusterResolver
from tfring.cross_device_ops import RingAllReduce, values_of
from tfring.data.distribute import agreed_cardinality, distribute, is_sliced
from tfring.data.rows import has_static_rows, num_rows, pad_empty_batch, relax_static_rows
from tfring.data.shares import Shares
from tfring.errors import ConfigurationError, MismatchError
from tfring.reduction.sparse import SparseOptions
from tfring.ring.collectives import Collectives
from tfring.runtime import Ring, connect
from tfring.setting import setting
from tfring.step import branches
from tfring.strategy.replica_context import RingReplicaContext

_NOT_SUMMED = (tf.VariableAggregation.MEAN, tf.VariableAggregation.ONLY_FIRST_REPLICA)
_OF_TENSORFLOW = {
    _tf.distribute_values.MirroredVariable: RingMirroredVariable,
    _tf.distribute_values.SyncOnReadVariable: RingSyncOnReadVariable,
}
_running = threading.local()  # .replicas: whether this thread waits for replicas, and runs their merge calls
_tensorflow_runtime: tuple = ()  # (addresses, collectives) once this process has joined a cluster


class RingExtended(_tf.CollectiveAllReduceExtended):
    """Implements `strategy.extended` for TensorFlow and Keras."""

    def __init__(
        self,
        container_strategy: tf.distribute.Strategy,
        cluster: Cluster,
        mesh: Mesh,
        *,
        workers: Cluster | None,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None,
        communication: str,
        devices: Sequence[str] | None,
        sparse: SparseOptions,
        bucket_bytes: int | None,
        compression: str | None,
        communication_options: tf.distribute.experimental.CommunicationOptions | None,
    ) -> None:
        if communication == "tensorflow" and config.read("TFRING_ENCRYPT"):
            raise ConfigurationError(
                "communication=\"tensorflow\" uses TensorFlow's own connections, which TFRING_ENCRYPT=1 does not "
                'encrypt. Use communication="ring", or an encrypted network (docs/security.md).'
            )
        # Not super().__init__, which starts TensorFlow's own cluster and creates its own cross-device ops.
        _tf.StrategyExtendedV1.__init__(self, container_strategy)
        # TensorFlow's server binds the port itself.
        self.cluster = release_listener(cluster) if communication == "tensorflow" else cluster
        self.mesh = mesh
        self._requested_devices = tuple(devices) if devices else None
        self._cluster_resolver = cluster_resolver or ClusterResolver(self.cluster, release_port=False)
        self._communication_options = communication_options or _tf.CommunicationOptions()
        self._collective_key_base = container_strategy._collective_key_base
        self._cfer_fn_cache: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self._use_var_policy = False
        self._of_parts = False  # whether replicas hold parts of a sum in the variable that is being created
        self.experimental_enable_get_next_as_optional = True

        if communication == "tensorflow" and self.cluster.world_size > 1:
            self._initialize_tensorflow_worker()
            channels = (_tensorflow_runtime[1],) * 2
        else:
            self._initialize_ring_worker()
            channels = connect(self.cluster)
        self.ring = Ring(
            container_strategy,
            workers or self.cluster,
            mesh,
            communication,
            self.worker_devices,
            channels,
            sparse=sparse,
            bucket_bytes=bucket_bytes,
            compression=compression,
        )
        self._cross_device_ops = self._host_cross_device_ops = self.ring.control_ops

    # -- devices ---------------------------------------------------------------------------------------------------

    def _initialize_ring_worker(self) -> None:
        """Initializes a plain local TensorFlow runtime; the ring carries all data between processes."""
        self._num_workers = self.mesh.size_along("data")  # all workers on one share of the rows are one replica
        self._id_in_cluster = self.mesh.coordinate("data", self.cluster.rank)
        self._is_chief = self.cluster.is_chief
        self._worker_device = _tf.device_util.canonicalize("/device:CPU:0")
        devices, self._local_device_type = self._initialize_local_devices(self._cluster_resolver, "")
        with _silence_strategy_log():
            self._initialize_single_worker(devices)
        self._cluster_spec = self._cluster_resolver.cluster_spec()
        self._task_type, self._task_id = "worker", self.cluster.rank
        self._num_devices_per_worker = len(devices)
        self._rpc_layer = None
        self._local_or_standalone_client_mode = True

    def _initialize_tensorflow_worker(self) -> None:
        """Connects TensorFlow's collective runtime, once per process: a process cannot leave it again."""
        global _tensorflow_runtime
        if _tensorflow_runtime:
            addresses, _ = _tensorflow_runtime
            if addresses != self.cluster.addresses:
                raise ConfigurationError(
                    f'This process is in the cluster {addresses}, and with communication="tensorflow" it cannot join '
                    f"{self.cluster.addresses}. Start separate processes for another cluster."
                )
            self._local_or_standalone_client_mode = True  # the server is already running
            self._enable_check_health = False
            self._initialize_multi_worker(self._cluster_resolver)
            return
        if _tf.has_run():
            raise ConfigurationError(
                'TensorFlow has run in this process before RingStrategy(communication="tensorflow") was made. Make it '
                "the first TensorFlow call of the program."
            )
        self._initialize_multi_worker(self._cluster_resolver)
        _tensorflow_runtime = (self.cluster.addresses, self._make_tensorflow_collectives())

    def _initialize_local_devices(
        self, cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver, worker_device: str
    ) -> tuple[tuple[str, ...], str]:
        gpus = [f"GPU:{i}" for i in range(len(tf.config.list_logical_devices("GPU")))]
        devices = list(self._requested_devices or gpus or ["CPU:0"])
        names = []
        for device in devices:
            kind, _, number = device.lower().rpartition("/device:")[2].partition(":")
            names.append(f"{worker_device}/device:{kind.upper()}:{number or 0}")
        known = {d.name.rpartition("/device:")[2] for d in tf.config.list_logical_devices()}
        missing = [n for n in names if n.rpartition("/device:")[2] not in known]
        if missing:
            raise ConfigurationError(f"`devices` is {devices}, but this process has {sorted(known)}.")
        return tuple(names), names[0].rpartition("/device:")[2].partition(":")[0]

    def _make_tensorflow_collectives(self) -> Collectives:
        from tfring.ring.tensorflow_collectives import TensorFlowCollectives

        return TensorFlowCollectives(
            self.cluster.rank,
            self.cluster.world_size,
            self.worker_devices[0],
            self._communication_options,
            self._collective_keys,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> RingExtended:
        return self

    # -- contexts --------------------------------------------------------------------------------------------------

    def _use_merge_call(self) -> bool:
        # In the cross-replica context there is nothing to merge, so optimizers update variables directly.
        return not _tf.distribute_lib.in_cross_replica_context()

    # -- reduction -------------------------------------------------------------------------------------------------

    def _get_cross_device_ops(self, value: Any) -> RingAllReduce:
        return self._cross_device_ops

    def _replica_ctx_all_reduce(self, reduce_op: tf.distribute.ReduceOp | str, value: Any, options: Any = None) -> Any:
        if len(self.worker_devices) > 1:
            return _tf.distribute_lib.StrategyExtendedV2._replica_ctx_all_reduce(
                self, reduce_op, value, options
            )
        reduce_op = tf.distribute.ReduceOp(reduce_op)
        pairs = [(v, self.worker_devices[0]) for v in tf.nest.flatten(value)]
        reduced = self._cross_device_ops.batch_reduce_implementation(reduce_op, pairs, options)
        return tf.nest.pack_sequence_as(value, [values_of(r)[0] for r in reduced])

    def _create_variable(self, next_creator: Any, **kwargs: Any) -> Any:
        synchronization, aggregation = kwargs.get("synchronization"), kwargs.get("aggregation")
        own_values = is_of_own_values(synchronization, aggregation)
        is_read_as_one = synchronization == tf.VariableSynchronization.ON_READ
        self._of_parts = is_read_as_one and aggregation not in _NOT_SUMMED and not own_values
        with contextlib.ExitStack() as scopes:
            if not tf.executing_eagerly():  # a step creates it while it is traced; TensorFlow then traces it again
                value = _known_before_the_step(kwargs["initial_value"], kwargs.get("dtype"), self.worker_devices[0])
                if value is not None:
                    scopes.enter_context(tf.init_scope())
                    kwargs["initial_value"] = value
            variable = super()._create_variable(next_creator, **kwargs)
        if isinstance(variable, tf.distribute.DistributedValues):
            _tf.note_replicas(variable)
            if own_values:
                variable._tfring_own_values = True
        if type(variable) in _OF_TENSORFLOW:
            variable.__class__ = _OF_TENSORFLOW[type(variable)]
        return variable

    def _reduce_to(self, reduce_op: tf.distribute.ReduceOp | str, value: Any, destinations: Any, options: Any) -> Any:
        value = self._of_each_replica(value)
        if getattr(value, "dtype", None) == tf.bool:  # whether any of them is True, such as the state of a metric
            numbers = tuple(tf.cast(tf.convert_to_tensor(copy), tf.int32) for copy in values_of(value))
            value = _tf.distribute_utils.regroup(numbers)
            return tf.cast(super()._reduce_to(reduce_op, value, destinations, options), tf.bool)
        return super()._reduce_to(reduce_op, value, destinations, options)

    def all_reduce_gradients(self, gradients: Any) -> Any:
        """See `RingStrategy.all_reduce_gradients`."""
        if self._container_strategy().num_replicas_in_sync == 1:
            return gradients
        running = step.current() or step.Step()
        flat = tf.nest.flatten(gradients)
        if running.share is not None:
            name = "a gradient given to all_reduce_gradients"
            flat = [None if g is None else partition.expect_gradient(g, name) for g in flat]

        def on_worker(active: Any, *gradients: Any) -> list[Any]:
            active = None if active is None else values_of(active)
            with branches.checked(self.ring, running):
                summed = [self.ring.gradient_ops.sum_on_worker(g, active) for g in gradients]
                return self.ring.gradient_ops.sum_over_workers(summed, name="gradients")

        present = [i for i, g in enumerate(flat) if g is not None]
        with partition.own():
            reduced = self.ring.cross_replica(on_worker, running.active, *(running.weigh(flat[i]) for i in present))
        for i, total in zip(present, reduced, strict=True):
            # A separate tensor for this replica: TensorFlow would make one value of a tensor that all replicas share.
            flat[i] = tf.nest.map_structure(
                lambda part: partition.declare(tf.identity(part), "full"), _like(flat[i], total), expand_composites=True
            )
            if running.share is None:
                step.note_sum(flat[i])
        return tf.nest.pack_sequence_as(gradients, flat)

    def _batch_reduce_to(
        self, reduce_op: tf.distribute.ReduceOp | str, value_destination_pairs: Any, options: Any
    ) -> Any:
        pairs = [(self._of_each_replica(value), to) for value, to in self._placed(value_destination_pairs)]
        return super()._batch_reduce_to(reduce_op, pairs, options)

    def _gather_to_implementation(self, value: Any, destinations: Any, axis: int, options: Any) -> Any:
        return super()._gather_to_implementation(self._of_each_replica(value), destinations, axis, options)

    def _batch_gather_to(self, value_destination_pairs: Any, axis: int, options: Any = None) -> Any:
        pairs = [(self._of_each_replica(value), to) for value, to in self._placed(value_destination_pairs)]
        return super()._batch_gather_to(pairs, axis, options)

    def _placed(self, value_destination_pairs: Any) -> list[tuple[Any, Any]]:
        """Assigns a device to values without one: the argument of a function is not placed yet."""
        here = self.worker_devices[0]
        return [(value, here if isinstance(to, str) and not to else to) for value, to in value_destination_pairs]

    def _of_each_replica(self, value: Any) -> Any:
        """Returns one value per replica of what replicas pass to a merge call.

        If all replicas pass the same tensor, TensorFlow makes one value of it, and would count it once per worker.
        """
        replicas = len(self.worker_devices)
        is_one = tf.is_tensor(value) and not isinstance(value, (tf.distribute.DistributedValues, tf.Variable))
        if replicas == 1 or not is_one or not getattr(_running, "replicas", False):
            return value
        return _tf.distribute_values.PerReplica((value,) * replicas)

    # -- variables -------------------------------------------------------------------------------------------------

    def _get_variable_creator_initial_value(
        self, replica_id: int, device: str, primary_var: Any, **kwargs: Any
    ) -> Callable[[], tf.Tensor]:
        if replica_id != 0:  # the initial value of the previous replica: its variable may not be initialized in a step
            to_value = tf.zeros_like if self._of_parts else tf.identity
            return lambda: to_value(kwargs["initial_value"]())

        of_worker = self.ring.makes_own_variables
        is_zero = self._of_parts and self.ring.control.rank > 0  # otherwise the sum would count the value of each rank

        @functools.cache  # for the replicas of this worker
        def initial_value_fn() -> tf.Tensor:
            with tf.device(device):
                value = _value_of(kwargs["initial_value"], kwargs.get("dtype"))
                value = self._initial_value(value, kwargs.get("name"), of_worker)
                return tf.zeros_like(value) if is_zero else value

        return initial_value_fn

    def _initial_value(self, value: tf.Tensor, variable: str | None, of_worker: bool) -> tf.Tensor:
        """Returns the first rank's value, or this worker's own value if it has its own variables."""
        is_alone = self.cluster.world_size == 1 and not self.ring.world.reaches_others
        if value.dtype == tf.string or is_alone or of_worker:
            return value
        value = partition.expect(value, "same", "the initial value of a variable")
        # Not under the variable's name: Keras numbers names, and a rank may have created another model before.
        try:
            with partition.own():
                value = self.ring.world.broadcast([value], name="initial value of a variable")[0]
        except MismatchError as error:
            raise _variable_mismatch_error(error, f"{variable or 'a variable'} of shape {tuple(value.shape)}") from None
        return partition.declare(value, "full")

    def _broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        is_of_first = getattr(destinations, "aggregation", None) == tf.VariableAggregation.ONLY_FIRST_REPLICA
        if is_of_first and not self.ring.trains_alone and self.ring.control.world_size > 1:
            if not isinstance(tensor, tf.IndexedSlices):
                tensor = tf.convert_to_tensor(tensor, destinations.dtype)
            parts = tf.nest.flatten(tensor, expand_composites=True)
            parts = self.ring.control.broadcast(parts, name="the first replica's value of a variable")
            tensor = tf.nest.pack_sequence_as(tensor, parts, expand_composites=True)
        return super()._broadcast_to(tensor, destinations)

    def _update(self, var: Any, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        updater = self.ring.updater
        if updater is not None and tf.executing_eagerly() and step.current() is None:
            updater.on_assign(var)
        return super()._update(var, fn, *args, **kwargs)

    # -- datasets --------------------------------------------------------------------------------------------------

    def _experimental_distribute_dataset(self, dataset: Any, options: tf.distribute.InputOptions | None) -> Any:
        per_replica = tf.distribute.InputReplicationMode.PER_REPLICA
        if is_sliced(dataset) and not (options and options.experimental_replication_mode == per_replica):
            return distribute(self.ring, dataset, options)
        return self._with_agreed_cardinality(super()._experimental_distribute_dataset(dataset, options))

    def _distribute_datasets_from_function(
        self, dataset_fn: Callable[..., Any], options: tf.distribute.InputOptions | None
    ) -> Any:
        return self._with_agreed_cardinality(super()._distribute_datasets_from_function(dataset_fn, options))

    def _with_agreed_cardinality(self, distributed: Any) -> Any:
        cardinality = agreed_cardinality(self.ring.world, int(distributed.cardinality))
        _tf.set_cardinality(distributed, cardinality)
        return distributed

    # -- steps -----------------------------------------------------------------------------------------------------

    def _call_for_each_replica(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._container_strategy().warn_of_another_cluster()
        if any(isinstance(value, Shares) for value in (*args, *(kwargs or {}).values())):
            raise ConfigurationError(
                "strategy.run was called with a batch from the iterator of `fit`, which holds rows of all replicas. "
                "Override `train_step`, or pass the iterator to the function that `super().make_train_function()` "
                "returns."
            )
        if step.current() is not None or self.ring.is_alone:
            return self._run_replicas(fn, args, kwargs)
        if isinstance(fn, tf.types.experimental.PolymorphicFunction):
            # One tf.function around all replicas, as in TensorFlow: in separate tf.functions they could not merge.
            around_all = self._cfer_fn_cache.get(fn)
            if around_all is None:
                call = functools.partial(_tf.call_unwrapped, fn)
                around_all = self._cfer_fn_cache[fn] = fn._clone(
                    python_function=lambda *a, **k: self._call_for_each_replica(call, a, k)
                )
            return around_all(*args, **kwargs)

        branches.begin_run(self.ring)

        def with_step(*args: Any, **kwargs: Any) -> Any:
            # A custom loop chooses the divisor of its loss itself, but a replica without rows adds nothing.
            rows = num_rows((args, kwargs))
            active = None if rows is None else tf.convert_to_tensor(rows > 0)
            with step.running(step.Step(active=active)):
                return fn(*args, **kwargs)

        return self._run_replicas(with_step, args, kwargs)

    def _run_replicas(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        # Each replica has its own thread; this thread runs their merge calls.
        if not isinstance(fn, tf.types.experimental.PolymorphicFunction):
            fn = RingReplicaContext.around(fn)
        with setting(_running, "replicas", True):
            return super()._call_for_each_replica(fn, args, kwargs)

    def run_step(
        self, fn: Callable[[Any], Any], inputs: Sequence[Any], shares: tf.Tensor, way: step.Way = step.Way.OWN
    ) -> tuple[Any, list]:
        """Runs `fn(inputs)` on each replica with its share of the batch.

        Args:
          fn: A step of a model, such as Keras' `train_step`.
          inputs: A list with one element per replica of this worker.
          shares: float64 `[replicas_per_worker]`, the rows of each replica divided by those of the global batch.
          way: The `step.Way` in which the steps of replicas become that of one process.

        Returns:
          `(outputs, written)`: the outputs of each replica, regrouped, and the Keras variables the step wrote, each
            with the rule that combines the values of replicas.
        """
        strategy = self._container_strategy()
        alone = self.ring.is_alone
        written: list = []

        def replica_fn(number: int, element: Any, share: tf.Tensor) -> Any:
            with contextlib.nullcontext() if alone else partition.replica(number):
                return step_of_replica(element, share)

        def step_of_replica(element: Any, share: tf.Tensor) -> Any:
            if not alone and way is not step.Way.WHOLE:
                element, _ = pad_empty_batch(element)
            if not alone and way is step.Way.EDITED:
                if has_static_rows(element):  # otherwise their number would be a constant like any other
                    element = relax_static_rows(element)
                element, share = partition.declare_batch(element), partition.declare(share, "share")
            mine = step.Step() if alone else step.Step(share, share > 0, way=way)
            with step.running(mine) as running:
                running.num_rows = num_rows(element)
                outputs = fn(element)
            written.extend(running.written)
            return outputs

        shares = tf.unstack(shares, num=len(self.worker_devices))
        regroup = _tf.distribute_utils.regroup
        with strategy.scope():
            outputs = self._run_replicas(
                replica_fn, (regroup(tuple(range(len(inputs)))), regroup(tuple(inputs)), regroup(tuple(shares))), {}
            )
        return outputs, written


@contextlib.contextmanager
def _silence_strategy_log() -> Iterator[None]:
    """Keeps TensorFlow from logging that MirroredStrategy is used, which reads as if tfring were not."""

    def names_no_other(record: logging.LogRecord) -> bool:
        return "Using MirroredStrategy" not in record.getMessage()

    logger = tf.get_logger()
    logger.addFilter(names_no_other)
    try:
        yield
    finally:
        logger.removeFilter(names_no_other)


def _like(gradient: Any, total: Any) -> Any:
    """Returns a reduced gradient as IndexedSlices if it was IndexedSlices before: the ring may have made it dense."""
    if not isinstance(gradient, tf.IndexedSlices) or isinstance(total, tf.IndexedSlices):
        return total
    return tf.IndexedSlices(total, tf.range(tf.shape(total, gradient.indices.dtype)[0]), gradient.dense_shape)


def _variable_mismatch_error(error: MismatchError, variable: str) -> MismatchError:
    """Returns the error for ranks that create different variables."""
    found = MismatchError(
        f"The ranks make different models: this rank makes {variable}. Make the same layers on all ranks; no size may "
        f"depend on the rank, or on data that only one rank has. {error}"
    )
    vars(found).update(vars(error))
    return found


def _value_of(initial_value: Any, dtype: Any) -> tf.Tensor:
    value = initial_value() if callable(initial_value) else initial_value
    value = getattr(value, "wrapped_value", value)  # a value from a checkpoint
    return tf.convert_to_tensor(value, dtype=dtype)


def _known_before_the_step(initial_value: Any, dtype: Any, device: str) -> tf.Tensor | None:
    """Returns the initial value of a variable, computed outside of the step; None if it depends on the step."""
    with contextlib.suppress(TypeError, ValueError), tf.init_scope(), tf.device(device):
        if tf.executing_eagerly():
            value = _value_of(initial_value, dtype)
            return _tf.lifted(value) if tf.is_symbolic_tensor(value) else value
    return None
