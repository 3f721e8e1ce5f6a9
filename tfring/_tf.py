"""The only file that imports `tensorflow.python.*` and uses private parts of TensorFlow, each with the reason.

A new TensorFlow release should only affect this file and, if it calls strategies by other hooks, strategy/extended.py.
"""

# ruff: noqa: F401 - other files use these imports

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.core.framework import (
    attr_value_pb2,  # attributes of operations
    full_type_pb2,  # kinds of variants
)

# Comments say why each is needed. `tf.distribute` has no public way to write a strategy outside of TensorFlow.
from tensorflow.python.autograph.core import ag_ctx as _ag_ctx  # turns AutoGraph on where it was turned off
from tensorflow.python.autograph.core import config as _autograph_config  # packages that AutoGraph leaves as they are
from tensorflow.python.autograph.pyct import error_utils as _autograph_errors  # errors that it raises again by type
from tensorflow.python.checkpoint.checkpoint import TrackableSaver  # writes the files of tf.train.Checkpoint
from tensorflow.python.data.experimental.ops import cardinality as _cardinality
from tensorflow.python.data.ops import (  # classes of the steps of a pipeline: `dataset_step`
    batch_op,
    cache_op,
    dataset_ops,
    flat_map_op,
    from_tensor_slices_op,
    interleave_op,
    map_op,
    prefetch_op,
    readers,
    repeat_op,
    shuffle_op,
    skip_op,
    take_op,
    zip_op,
)
from tensorflow.python.data.util import random_seed as data_random_seed  # seeds of unseeded tf.data shuffles
from tensorflow.python.data.util import structure as _structure  # arguments of a map as flat tensors
from tensorflow.python.distribute import (
    collective_all_reduce_strategy as _mwms,  # the class that Keras checks for, and its Extended
)
from tensorflow.python.distribute import collective_util as _collective_util  # its communication options
from tensorflow.python.distribute import cross_device_ops as _cross_device_ops  # helpers of CrossDeviceOps
from tensorflow.python.distribute import cross_device_utils as _cross_device_utils  # keys of its collectives
from tensorflow.python.distribute import (
    device_util,  # canonical device names
    distribute_lib,  # contexts: replica, cross-replica
    distribute_utils,  # regroup values of replicas
    input_lib,  # DistributedDataset over one worker's share
)
from tensorflow.python.distribute import mirrored_run as _mirrored_run  # the context of one of several replicas
from tensorflow.python.distribute import values as distribute_values  # PerReplica, Mirrored, SyncOnRead
from tensorflow.python.distribute import values_util as _values_util  # marks functions that a SavedModel cannot hold
from tensorflow.python.eager import context as eager_context  # number of GPUs; is eager async
from tensorflow.python.eager import lift_to_graph as _lift_to_graph  # initial values out of a function
from tensorflow.python.eager import record as _record  # tensors that gradient tapes watch
from tensorflow.python.eager.polymorphic_function import (
    autograph_util as _autograph_util,  # AutoGraph's conversion of a tf.function's Python function
)
from tensorflow.python.framework import func_graph as _func_graph  # graphs of functions
from tensorflow.python.framework import kernels as _kernels  # devices for which operations have kernels
from tensorflow.python.framework import none_tensor as _none_tensor  # the spec of an input that is None
from tensorflow.python.framework import op_def_registry as _op_def_registry  # which operations are stateful
from tensorflow.python.framework import ops as framework_ops  # the function graph being built
from tensorflow.python.ops import (
    collective_ops,  # communication="tensorflow"
    nn_impl_distribute,  # defines the number by which `tf.nn` divides losses
)
from tensorflow.python.ops import control_flow_v2_func_graphs as _control_flow  # branches and bodies of loops
from tensorflow.python.ops import gen_dataset_ops as dataset_kernels  # shuffles with a generator of seeds
from tensorflow.python.ops import handle_data_util as _handle_data  # items of TensorLists
from tensorflow.python.ops import op_selector as _op_selector  # the error for tensors that cannot be lifted
from tensorflow.python.ops import summary_ops_v2 as _summary_ops  # which replica writes summaries
from tensorflow.python.ops.resource_variable_ops import ResourceVariable  # a variable that no strategy mirrors

from tfring.errors import TfringError
from tfring.setting import setting

Dataset = dataset_ops.DatasetV2
CollectiveAllReduceExtended = _mwms.CollectiveAllReduceExtended
CommunicationOptions = _collective_util.Options
CollectiveKeys = _cross_device_utils.CollectiveKeys
StrategyExtendedV1 = distribute_lib.StrategyExtendedV1
MirroredReplicaContext = _mirrored_run._MirroredReplicaContext
mark_as_unsaveable = _values_util.mark_as_unsaveable
simple_broadcast = _cross_device_ops.simple_broadcast
devices_of = _cross_device_ops.get_devices_from
aggregate_slices = _cross_device_utils.aggregate_tensors_or_indexed_slices
# Types of operations that return their input, at most in another shape or dtype.
PASSES_ON = ("Identity", "Cast", "Reshape", "StopGradient", "EnsureShape", "Squeeze", "ExpandDims")
# Types of operations that leave a variable, or a table, as it is.
READS = (
    *("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape", "VarIsInitializedOp", "Identity"),
    *("LookupTableFindV2", "LookupTableSizeV2"),
)
# AutoGraph converts a user's functions that tfring calls (`strategy.run`), but not tfring's own, as with Keras'.
_autograph_config.CONVERSION_RULES += (_autograph_config.DoNotConvert("tfring"),)
_autograph_errors.KNOWN_STRING_CONSTRUCTOR_ERRORS += tuple(TfringError.__subclasses__())  # others become StagingError
_MAX_GRAPH_BYTES = 64 << 20  # of arrays; the graph of a dataset is several times as large as its arrays


class DatasetStep(NamedTuple):
    """The last step of a `tf.data` pipeline: its kind, its arguments, and the dataset before it."""

    dataset: Any
    kind: str
    before: Any
    arguments: dict


def dataset_step(dataset: tf.data.Dataset) -> DatasetStep:
    """Returns the last step of a pipeline, with kind "other" if tfring cannot repeat it on other rows.

    There is no public way to find out how a dataset was made.
    """

    def scalar(name: str) -> Any:
        return getattr(dataset, name).numpy().item()

    match type(dataset):
        case map_op._MapDataset | map_op._ParallelMapDataset:
            kind, parallel = "map", type(dataset) is map_op._ParallelMapDataset
            arguments = {
                "function": dataset._map_func,
                "python_function": dataset._map_func._func,
                "num_parallel_calls": scalar("_num_parallel_calls") if parallel else None,
            }
        case batch_op._BatchDataset | batch_op._ParallelBatchDataset:
            kind = "batch"
            arguments = {"batch_size": scalar("_batch_size"), "drop_remainder": scalar("_drop_remainder")}
        case shuffle_op._ShuffleDataset:
            kind, arguments = "shuffle", {}
        case prefetch_op._PrefetchDataset:
            kind, arguments = "prefetch", {"buffer_size": scalar("_buffer_size")}
        case repeat_op._RepeatDataset | take_op._TakeDataset | skip_op._SkipDataset:
            kinds = {repeat_op._RepeatDataset: "repeat", take_op._TakeDataset: "take", skip_op._SkipDataset: "skip"}
            kind, arguments = kinds[type(dataset)], {"count": scalar("_count")}
        case cache_op.CacheDataset:
            kind, arguments = "cache", {"filename": dataset._filename.numpy().decode()}
        case dataset_ops._OptionsDataset | _cardinality._AssertCardinalityDataset:
            kind, arguments = "nothing", {}
        case from_tensor_slices_op._TensorSliceDataset:
            spec, arrays = dataset.element_spec, None
            if all(isinstance(component, tf.TensorSpec) for component in tf.nest.flatten(spec)):
                arrays = tf.nest.pack_sequence_as(spec, dataset._tensors)
            return DatasetStep(dataset, "slices", None, {"arrays": arrays})
        case zip_op._ZipDataset:
            return DatasetStep(dataset, "zip", None, {"datasets": dataset._datasets})
        case readers.TFRecordDatasetV2 if dataset._compression_type in (None, ""):
            return DatasetStep(dataset, "records", None, {"files": dataset._filenames, "reads": dataset._impl})
        case flat_map_op._FlatMapDataset | interleave_op._InterleaveDataset | interleave_op._ParallelInterleaveDataset:
            if not _reads_records(dataset._map_func.function.graph):
                return DatasetStep(dataset, "other", None, {})
            return DatasetStep(dataset, "records", None, {"files": dataset._input_dataset, "reads": dataset})
        case _:
            return DatasetStep(dataset, "other", None, {})
    return DatasetStep(dataset, kind, dataset._input_dataset, arguments)


def last_steps(dataset: tf.data.Dataset, belongs: Callable[[DatasetStep], bool]) -> tuple[list[DatasetStep], Any]:
    """Returns the last steps of a pipeline for which `belongs` is True, in order, and the dataset before them."""
    steps: list[DatasetStep] = []
    while belongs(step := dataset_step(dataset)):
        steps.insert(0, step)
        dataset = step.before
    return steps, dataset


def _reads_records(graph: Any) -> bool:
    """Returns whether a function of `flat_map` or `interleave` is `tf.data.TFRecordDataset`, with its defaults."""
    return _skeleton(graph) == _skeleton_of_reads()


@functools.cache
def _skeleton_of_reads() -> list:
    reads = tf.data.Dataset.from_tensors("").flat_map(tf.data.TFRecordDataset)
    return _skeleton(reads._map_func.function.graph)


def _skeleton(graph: Any) -> list:
    """Returns the operations of a graph, with its constant strings."""
    return [(node.op, [*node.attr["value"].tensor.string_val]) for node in nodes_of(graph)]


def nodes_of(graph: Any) -> list:
    """Returns the operations of a graph and of the functions that it calls, as NodeDefs."""
    definition = graph.as_graph_def()
    return [*definition.node, *(node for function in definition.library.function for node in function.node_def)]


def reads_in_turn(reads: Any) -> bool:
    """Returns True if a dataset's last step is a `flat_map`."""
    return type(reads) is flat_map_op._FlatMapDataset


def interleaved_like(like: Any, dataset: tf.data.Dataset, function: Any) -> Any:
    """Maps `function` over the elements of `dataset`, in the order of `like`, a `flat_map` or `interleave`.

    The order is deterministic, even if that of `like` is not. There is no public way to get the interleaving of
    `TFRecordDataset(num_parallel_reads=2)`.
    """
    if reads_in_turn(like):
        return dataset.flat_map(function)
    names = ("cycle_length", "block_length", "num_parallel_calls", "buffer_output_elements", "prefetch_input_elements")
    given = {name: getattr(like, f"_{name}") for name in names if hasattr(like, f"_{name}")}
    if type(like) is readers.ParallelInterleaveDataset:
        given["sloppy"] = False
    elif type(like) is interleave_op._ParallelInterleaveDataset:
        given["deterministic"] = True
    return type(like)(dataset, function, **given)


def datasets_before(dataset: tf.data.Dataset) -> list:
    """Returns the datasets that a dataset was made from. There is no public way up a pipeline."""
    return dataset._inputs()


def pipeline(dataset: tf.data.Dataset) -> Iterator[Any]:
    """Yields a dataset and all datasets that it was made from."""
    yield dataset
    for before in datasets_before(dataset):
        yield from pipeline(before)


def leaves_order_open(dataset: tf.data.Dataset) -> bool:
    """Returns True if a `map` or `batch` of a pipeline has `deterministic=False`. An `interleave` does not store it."""
    return any(getattr(each, "_deterministic", None) == "false" for each in pipeline(dataset))


def static_batch_size(dataset: tf.data.Dataset) -> int | None:
    """Returns the size of a `batch` or `padded_batch` that drops the remainder, if it is a dataset's last step."""
    if not getattr(dataset, "_drop_remainder", False):
        return None
    sizes = [getattr(dataset, name, None) for name in ("_drop_remainder", "_batch_size")]
    drops, size = (tf.get_static_value(value) for value in sizes)
    return int(size) if drops and size is not None else None


def set_element_spec(batched: tf.data.Dataset, spec: Any) -> None:
    """Sets the element spec of a dataset that `batch` has made. The spec must be true of its elements."""
    batched._structure = spec


def graphs_of(dataset: tf.data.Dataset) -> list:
    """Returns the graphs of the functions that the last step of a pipeline calls."""
    return [function.function.graph for function in dataset._functions()]


def operations_of(dataset: tf.data.Dataset, kind: str) -> list:
    """Returns the operations of a kind in the functions of a pipeline."""
    graphs = [graph for each in pipeline(dataset) for graph in graphs_of(each)]
    return [operation for graph in graphs for operation in graph.get_operations() if operation.type == kind]


def graph_of_function(graph: Any, name: str) -> Any:
    """Returns the graph of a function that an operation names (a loop's body, a branch); None for TensorFlow 1 ones."""
    return getattr(graph._get_function(name), "graph", None)


def is_of_backward_pass(op: Any) -> bool:
    """Returns True if an operation was created while TensorFlow computed gradients."""
    return any(frame.filename.endswith(("/imperative_grad.py", "/gradients_util.py")) for frame in op.traceback or ())


def scratch_graph() -> contextlib.AbstractContextManager:
    """Returns a context in which operations are created in a graph that is not run."""
    return _func_graph.FuncGraph("scratch").as_default()


def set_attribute(op: Any, name: str, text: str) -> None:
    """Sets a string attribute of an operation, which copies of its graph keep; its name must begin with `_`."""
    op._set_attr(name, tf.compat.v1.AttrValue(s=text.encode()))


def spec_of_items(tensor_list: tf.Tensor) -> tf.TensorSpec | None:
    """Returns the spec of the items of a TensorList; None for a variant of another kind."""
    data = _handle_data.get_resource_handle_data(tensor_list)
    if not data.is_set or len(data.shape_and_type) != 1:
        return None
    [items] = data.shape_and_type
    if items.type.type_id != full_type_pb2.TFT_ARRAY:
        return None
    return tf.TensorSpec(tf.TensorShape(items.shape), tf.as_dtype(items.dtype))


def update_input(op: Any, index: int, tensor: tf.Tensor) -> None:
    """Replaces an input of an operation in a graph that is being built."""
    op._update_input(index, tensor)


def add_control_inputs(op: Any, before: list) -> None:
    """Makes an operation in a graph that is being built wait for others."""
    op._add_control_inputs(before)


def is_stateful(op: str) -> bool:
    """Returns whether an operation of this type may return a different result each time."""
    definition = _op_def_registry.get(op)
    return definition is None or definition.is_stateful


def seeds_of(dataset: tf.data.Dataset) -> list[int]:
    """Returns the seeds of the shuffles in a pipeline."""
    seeds = [getattr(each, name, None) for each in pipeline(dataset) for name in ("_seed", "_seed2")]
    return [int(seed) for seed in seeds if isinstance(seed, framework_ops.EagerTensor)]


def call_map_function(function: Any, element: Any) -> Any:
    """Calls the traced function of a map without tracing it again; `element` is structured as the map's input."""
    flat = _structure.to_tensor_list(function._input_structure, element)
    return _structure.from_compatible_tensor_list(function.output_structure, list(function.function(*flat)))


def packed(spec: Any, element: Any) -> Any:
    """Returns an element of this spec as one scalar variant, so that elements of different shapes can be batched."""
    return tf.raw_ops.OptionalFromValue(components=_structure.to_tensor_list(spec, element))


def unpacked(spec: Any, variant: Any) -> Any:
    """Returns the element that `packed` turned into a variant."""
    types, shapes = _structure.get_flat_tensor_types(spec), _structure.get_flat_tensor_shapes(spec)
    flat = tf.raw_ops.OptionalGetValue(optional=variant, output_types=types, output_shapes=shapes)
    return _structure.from_compatible_tensor_list(spec, list(flat))


def shuffled_like(like: Any, dataset: tf.data.Dataset) -> Any:
    """Returns `dataset` in the order that the shuffle `like` gives to its input. `shuffle` does not accept its seeds.

    Iterators over both datasets draw the seeds of their orders from one generator in turn, if it is available.
    """
    generator = _seed_generator_of(like)
    variant = tf.raw_ops.ShuffleDatasetV3(
        input_dataset=dataset._variant_tensor,
        buffer_size=like._buffer_size,
        seed=like._seed,
        seed2=like._seed2,
        seed_generator=tf.raw_ops.DummySeedGenerator() if generator is None else generator,
        reshuffle_each_iteration=like._reshuffle_each_iteration,
        **dataset._flat_structure,
    )
    result = dataset_ops._VariantDataset(variant, dataset.element_spec)
    result._tfring_input, result._tfring_like = dataset, like  # they have to live as long as the result
    return result


def shuffled_with_generator(shuffle_dataset_v3: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls the operation of `Dataset.shuffle` with a generator of seeds that `shuffled_like` can find."""
    if not tf.executing_eagerly() or not kwargs.get("reshuffle_each_iteration"):
        return shuffle_dataset_v3(*args, **kwargs)
    seeds = {name: kwargs[name] for name in ("seed", "seed2")}
    generator = tf.raw_ops.AnonymousSeedGenerator(**seeds, reshuffle=True)
    variant = shuffle_dataset_v3(*args, **{**kwargs, "seed_generator": generator.handle})
    variant._tfring_generator = generator  # it lives as long as its deleter
    return variant


def _seed_generator_of(shuffle: Any) -> Any:
    """Returns a handle to the generator of a shuffle's seeds; None if it is not available.

    Without `shuffled_with_generator` its name is only in the dataset's graph, which contains the arrays of the
    pipeline. The kernel looks it up by container and name, whatever the resource type of the handle.
    """
    if (known := getattr(shuffle._variant_tensor, "_tfring_generator", None)) is not None:
        return known.handle
    if not shuffle._reshuffle_each_iteration or _bytes_of_slices(shuffle) > _MAX_GRAPH_BYTES:
        return None
    graph = tf.compat.v1.GraphDef()
    ignore = tf.data.experimental.ExternalStatePolicy.IGNORE.value
    variant = shuffle._variant_tensor
    graph.ParseFromString(
        tf.raw_ops.DatasetToGraphV2(input_dataset=variant, external_state_policy=ignore).numpy()
    )
    nodes = {node.name: node for node in graph.node}
    [result] = (node for node in graph.node if node.op == "_Retval")
    [handle] = nodes[nodes[result.input[0]].input[4]].attr["value"].tensor.resource_handle_val
    return tf.raw_ops.VarHandleOp(container=handle.container, shared_name=handle.name, dtype=tf.int64, shape=[])


def _bytes_of_slices(dataset: tf.data.Dataset) -> int:
    """Returns the bytes of the arrays that a pipeline begins with."""
    tensors = [tensor for each in pipeline(dataset) for tensor in getattr(each, "_tensors", ())]
    return sum(tensor.dtype.size * int(tf.size(tensor)) for tensor in tensors)


# -- distributed datasets; only TensorFlow's own strategies can create them --------------------------------------------


def workers_of_one_iterator(extended: Any) -> Any:
    """Returns InputWorkers with which one iterator serves all replicas of this worker."""
    return input_lib.InputWorkers([(extended._worker_device, extended.worker_devices[:1])])


def workers_by_options(extended: Any, options: Any) -> Any:
    """Returns InputWorkers as TensorFlow itself creates them."""
    return extended._input_workers_with_options(options)


def distributed_dataset(
    dataset: tf.data.Dataset,
    input_workers: Any,
    strategy: Any,
    options: Any,
    cardinality: int,
    *,
    one_value_a_worker: bool,
    then: Any = None,
    then_spec: Any = None,
    next_pass: Any = None,
) -> Any:
    """Returns a worker's dataset as a `tf.distribute.DistributedDataset`.

    Args:
      dataset: A `tf.data.Dataset`.
      input_workers: The InputWorkers of the dataset.
      strategy: A strategy of TensorFlow.
      options: `tf.distribute.InputOptions`.
      cardinality: Number of global batches, also with several replicas per worker.
      one_value_a_worker: Whether an element is one value, whatever the number of replicas of a worker.
      then: A hashable function `then(element, is_drawn)`, whose result the iterators yield. It is computed in the graph
        that draws the element, so that the pipeline has no function for it. None if they yield the elements.
      then_spec: A tuple of the spec of the elements and the spec of the result of `then`.
      next_pass: A function that returns the dataset of each iterator after the first, instead of `dataset`; None if
        `dataset` serves all iterators.
    """
    kind = input_lib.DistributedDataset if then is None else _DatasetAndThen
    result = kind(
        input_workers,
        strategy,
        components=[dataset],
        element_spec=input_lib._create_distributed_tensor_spec(strategy, dataset.element_spec),
        enable_get_next_as_optional=input_lib._enable_get_next_as_optional(strategy, dataset, cardinality),
        options=options,
    )
    set_cardinality(result, cardinality)
    if one_value_a_worker:
        spec = dataset.element_spec if then is None else then_spec[0]
        result._element_spec = tf.nest.map_structure(distribute_values.PerReplicaSpec, spec)
    if then is not None:
        result.then, result.then_spec, result.next_pass = then, then_spec[1], next_pass
    return result


class _DatasetAndThen(input_lib.DistributedDataset):
    """A distributed dataset with a function that is applied to each element when it is drawn."""

    has_begun = False

    def __iter__(self) -> Any:
        if self.has_begun and self.next_pass is not None:
            self._cloned_datasets = [self.next_pass()]
        self.has_begun = True
        iterator = super().__iter__()
        return _IteratorAndThen(
            self.then,
            input_workers=iterator._input_workers,
            components=iterator._iterators,
            element_spec=self._element_spec,
            strategy=iterator._strategy,
            cardinality=iterator._cardinality,
            enable_get_next_as_optional=iterator._enable_get_next_as_optional,
            options=self._options,
        )


class _IteratorAndThenSpec(input_lib.DistributedIteratorSpec):
    """The spec of an `_IteratorAndThen`, which includes the function that is applied to its elements."""

    def __init__(self, then: Callable, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._then = then

    def _serialize(self) -> tuple:
        return (*super()._serialize(), repr(self._then))

    @property
    def value_type(self) -> Any:
        return _IteratorAndThen

    def _from_components(self, components: Any) -> Any:
        return _IteratorAndThen(
            self._then,
            input_workers=self._input_workers,
            components=components,
            element_spec=self._element_spec,
            strategy=self._strategy,
            cardinality=self._cardinality,
            enable_get_next_as_optional=self._enable_get_next_as_optional,
            options=self._options,
        )


class _IteratorAndThen(input_lib.DistributedIterator):
    """A distributed iterator of a worker that yields `then(element, is_drawn)`."""

    def __init__(self, then: Callable, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.then = then

    @property
    def _type_spec(self) -> Any:
        return _IteratorAndThenSpec(
            self.then,
            self._input_workers,
            self._element_spec,
            self._strategy,
            self._options,
            self._cardinality,
            self._enable_get_next_as_optional,
        )

    def get_next(self, name: str | None = None) -> Any:
        """Returns the result of `then` for the next element, or raises OutOfRangeError."""
        [element] = next_or_error(self)
        return self.of(element, True)

    def of(self, element: Any, is_drawn: Any) -> Any:
        """Returns the result of `then` for an element, in a graph."""
        with tf.device(self._input_workers.worker_devices[0]):
            return _computed(self.then, element, is_drawn, self.spec_of_next)

    @property
    def spec_of_next(self) -> Any:
        """The spec of the drawn elements."""
        return tf.nest.map_structure(spec_of_a_replica, self._element_spec)


_functions: dict = {}  # the tf.functions of `then`


def _computed(then: Callable, element: Any, is_drawn: Any, spec: Any) -> Any:
    """Returns `then(element, is_drawn)`, computed by a function that is traced once for equal `then` and `spec`.

    The training, test and prediction steps of all models share this function.
    """
    function = _function_of(then, then, spec, _functions, tf.TensorSpec([], tf.bool))
    return function(*_tensors(element), tf.convert_to_tensor(is_drawn))


def _tensors(element: Any) -> list:
    """Returns the tensors of an element, as the components of its spec; an input that is None has no tensors."""
    return [tensor for tensor in tf.nest.flatten(element, expand_composites=True) if tensor is not None]


def _function_of(body: Callable, then: Callable, spec: Any, functions: dict, *more: tf.TensorSpec) -> Any:
    """Returns a tf.function of an element's tensors and of more tensors, traced once for equal `then` and `spec`.

    Args:
      body: A function of the element and the other tensors.
      then: A part of the cache key.
      spec: Spec of the element.
      functions: A cache of existing functions, to which a new one is added.
      *more: Specs of the other tensors.
    """
    key = (then, tuple(tf.nest.flatten(spec)), repr(tf.nest.map_structure(lambda _: None, spec)))
    if key not in functions:
        specs = [tf.TensorSpec(s.shape, s.dtype) for s in tf.nest.flatten(spec, expand_composites=True)]

        def of_tensors(*tensors: Any) -> Any:
            flat, others = tensors[: len(specs)], tensors[len(specs) :]
            return body(tf.nest.pack_sequence_as(spec, flat, expand_composites=True), *others)

        functions[key] = tf.function(of_tensors, input_signature=[*specs, *more], autograph=False)
    return functions[key]


def computes_after_draw(iterator: Any) -> bool:
    """Returns True if an iterator computes a function of the elements it draws."""
    return isinstance(iterator, _IteratorAndThen)


def function_of_next(iterator: Any, body: Callable, functions: dict) -> Any:
    """Returns a tf.function of the tensors that `tensors_of_next` returns.

    Args:
      iterator: An iterator that computes a function of the elements it draws.
      body: A function of the result that the iterator computes.
      functions: A cache of the existing functions of this body, to which a new one is added.
    """
    then, spec, [device] = iterator.then, iterator.spec_of_next, iterator._input_workers.worker_devices

    def of_element(element: Any) -> Any:
        with tf.device(device):
            computed = _computed(then, element, True, spec)
        return body(computed)

    return _function_of(of_element, then, spec, functions)


def concrete(function: Any) -> Callable[..., Any]:
    """Wraps a tf.function of tensors that has a signature, to call it without checking the tensors' types each time.

    A call of a small function takes a tenth of a millisecond less. The first call is that of `tf.function`, in which
    the function may create variables.
    """
    traced: list = []

    def call(*tensors: Any) -> Any:
        if traced and not tf.config.functions_run_eagerly():
            return traced[0]._call_flat(list(tensors), traced[0].captured_inputs)
        results = function(*tensors)
        if not traced and not tf.config.functions_run_eagerly():
            traced.append(function.get_concrete_function())
        return results

    return call


def tensors_of_next(iterator: Any) -> list:
    """Returns the tensors of the element that a worker's iterator draws next, before anything is computed from it.

    Raises OutOfRangeError at the end of this worker's data.
    """
    [element] = next_or_error(iterator)
    return _tensors(element)


def set_cardinality(distributed: Any, cardinality: int) -> None:
    """Sets the number of batches that a distributed dataset reports."""
    distributed._cardinality = cardinality


def next_or_dummy(iterator: Any) -> tuple:
    """Returns `(elements, have_value)` of a worker's iterator; `have_value` is False for the zeros after its end.

    If only the last dimensions of a shape are static, zeros have no rows. TensorFlow's own zeros forget static first
    dimensions.
    """
    elements, have_value = [], []
    computes = isinstance(iterator, _IteratorAndThen)
    # An element may contain all rows. Without a device, TensorFlow would place them on a GPU, and so copy them.
    with tf.device(iterator._input_workers.worker_devices[0]) if computes else contextlib.nullcontext():
        for optional in iterator._iterators[0].get_next_as_optional_list():
            have_value.append(optional.has_value())
            elements.append(tf.cond(have_value[-1], optional.get_value, lambda o=optional: _zeros(o.element_spec)))
    if computes:
        elements = [iterator.of(element, drawn) for element, drawn in zip(elements, have_value, strict=True)]
    return elements, have_value


def _zeros(spec: Any) -> Any:
    def zeros(spec: Any) -> Any:
        if isinstance(spec, tf.OptionalSpec):
            return tf.experimental.Optional.empty(spec._element_spec)
        if isinstance(spec, _none_tensor.NoneTensorSpec):
            return None
        if not isinstance(spec, tf.TensorSpec) or spec.dtype in (tf.variant, tf.resource):
            return input_lib._dummy_tensor_fn(spec)
        return tf.zeros([n or 0 for n in spec.shape] if spec.shape.rank else [], spec.dtype)

    return tf.nest.map_structure(zeros, spec)


def draw(iterator: Any) -> None:
    """Discards the next element of this worker's iterator; does nothing if there is none."""
    iterator._iterators[0].get_next_as_optional_list()


def next_or_error(iterator: Any) -> list:
    """Returns the next elements of a worker's iterator; raises OutOfRangeError at its end."""
    return iterator._iterators[0].get_next_as_list()


def next_of_worker(iterator: Any) -> Any:
    """Returns the next element of this worker's iterator as `next(iterator)` does, but without asking other workers.

    Raises OutOfRangeError at the end of this worker's data.
    """
    if isinstance(iterator, _IteratorAndThen):
        return iterator.get_next()
    return input_lib._create_per_replica(next_or_error(iterator), iterator._strategy)


def element_spec(distributed: Any) -> Any:
    """Returns the spec of a distributed dataset. Its own `element_spec` loses constant sizes and fails on Optionals."""
    if isinstance(distributed, _DatasetAndThen):
        return distributed.then_spec
    return getattr(distributed, "_element_spec", None) or distributed.element_spec


def spec_of_a_replica(spec: Any) -> Any:
    """Returns the spec of each replica's value in a `PerReplicaSpec`, or any other spec as it is."""
    return spec._value_specs[0] if isinstance(spec, distribute_values.PerReplicaSpec) else spec


# -- functions ---------------------------------------------------------------------------------------------------------

PolymorphicFunction = type(tf.function(lambda: None))  # the class of a `tf.function`; the public type is an interface


def is_compiled_by_xla(function: Any) -> bool:
    """Returns True if a `tf.function` is compiled as a whole."""
    return bool(function._jit_compile)


def name_squeezed_dimensions(graph: tf.Graph) -> None:
    """Makes each `tf.squeeze` without an axis remove only dimensions that are 1 when it is traced, no others later."""
    for op in graph.get_operations():
        if op.type == "Squeeze" and not op.get_attr("squeeze_dims") and op.inputs[0].shape.rank is not None:
            ones = [axis for axis, size in enumerate(op.inputs[0].shape) if size == 1]
            if ones:
                numbers = attr_value_pb2.AttrValue.ListValue(i=ones)
                op._set_attr("squeeze_dims", attr_value_pb2.AttrValue(list=numbers))


def lifted(tensor: tf.Tensor) -> tf.Tensor | None:
    """Returns the value of a tensor of a function that is being traced; None if it depends on the arguments."""

    @tf.function(autograph=False)
    def value() -> tf.Tensor:
        return _lift_to_graph.lift_to_graph([tensor], tf.compat.v1.get_default_graph())[tensor]

    with contextlib.suppress(_op_selector.UnliftableError), tf.init_scope():
        return value()
    return None


def types_in_jit_scopes(graph: Any) -> list[str]:
    """Returns the types of a graph's operations that were made in `tf.xla.experimental.jit_scope`."""
    return [operation.type for operation in graph.get_operations() if operation.node_def.attr["_XlaCompile"].b]


def has_xla_kernel(op_type: str) -> bool:
    """Returns True if XLA compiles operations of a type on some device."""
    if not tf.executing_eagerly():
        with tf.init_scope():
            return has_xla_kernel(op_type)
    _initialize_xla()
    found = _kernels.get_registered_kernels_for_op(op_type).kernel
    return any(kernel.device_type.startswith("XLA_") and kernel.device_type.endswith("_JIT") for kernel in found)


@functools.cache
def _initialize_xla() -> None:
    """Makes XLA register its kernels, as it does before it compiles for the first time."""
    tf.function(tf.identity, jit_compile=True)(0)


def call_unwrapped(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls the Python function of a `tf.function`, with AutoGraph if it uses that, in the graph being built."""
    python_function = function.python_function
    status = _ag_ctx.Status.DISABLED
    if function._autograph:
        options = function._experimental_autograph_options
        python_function = _autograph_util.py_func_from_autograph(python_function, options)
        status = _ag_ctx.Status.ENABLED
    with _ag_ctx.ControlStatusCtx(status=status):
        return python_function(*args, **kwargs)


# -- contexts and variables --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def cross_replica_context(strategy: Any) -> Iterator[None]:
    """Enters the cross-replica context in this thread, which TensorFlow enters only with `merge_call`."""
    distribute_lib._push_per_thread_mode(distribute_lib._CrossReplicaThreadMode(strategy))
    try:
        yield
    finally:
        distribute_lib._pop_per_thread_mode()


def traced_summaries() -> contextlib.AbstractContextManager:
    """Makes each replica trace `tf.summary`, though only the first one writes, so that all have the same graph."""
    def is_first() -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        # The replica's number must not be a constant while the step is traced.
        return tf.compat.v1.placeholder_with_default(tf.equal(context.replica_id_in_sync_group, 0), [])

    return setting(_summary_ops._summary_state, "is_recording_distribution_strategy", is_first)


def note_replicas(variable: Any) -> None:
    """Registers handles for `variable_of_replicas` that TensorFlow does not: of variables created in a trace."""
    for copy in variable.values:
        copy.handle._distributed_container = weakref.ref(variable)


def variable_of_replicas(handle: Any) -> Any:
    """Returns the distributed variable that the handle of a copy belongs to; None if there is none."""
    container = getattr(handle, "_distributed_container", None)
    return None if container is None else container()


def shared_tensor(array: Any) -> tf.Tensor:
    """Returns a tensor on the CPU that shares the memory of a NumPy array, which must begin at a multiple of 64 bytes.

    `tf.convert_to_tensor` copies an array, because it may be changed later, and then makes a tensor of the copy in this
    way. The array lives as long as the tensor. An array at another address is copied.
    """
    eager_context.ensure_initialized()
    with tf.device("CPU:0"):
        return framework_ops.EagerTensor(array, eager_context.context().device_name, None)


def mapped(dataset: tf.data.Dataset, function: Any, num_parallel_calls: int | None = None) -> tf.data.Dataset:
    """Returns `dataset.map(function)`, in order, without tracing the function again as `map` would.

    Args:
      dataset: A dataset of tensors.
      function: A ConcreteFunction of its elements, which takes and returns tensors, and captures none.
      num_parallel_calls: See `tf.data.Dataset.map`. Defaults to None.
    """
    spec = function.structured_outputs
    outputs = tf.nest.flatten(spec)
    common = dict(
        input_dataset=tf.data.experimental.to_variant(dataset),
        other_arguments=[],
        f=function,
        output_types=[output.dtype for output in outputs],
        output_shapes=[output.shape for output in outputs],
        use_inter_op_parallelism=True,
        preserve_cardinality=True,
    )
    if num_parallel_calls is None:
        variant = tf.raw_ops.MapDataset(**common)
    else:
        calls = tf.constant(num_parallel_calls, tf.int64)
        variant = tf.raw_ops.ParallelMapDatasetV2(**common, num_parallel_calls=calls, deterministic="true")
    result = tf.data.experimental.from_variant(variant, tf.nest.map_structure(tf.TensorSpec.from_tensor, spec))
    result._tfring_dataset = dataset, function  # both have to live as long as the result
    return result


def unbatched(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns `dataset.unbatch()` for dense tensors, without the map with which `unbatch` makes tensors dense.

    Args:
      dataset: A dataset of tensors, in any structure.
    """
    spec = tf.nest.map_structure(lambda batch: tf.TensorSpec(batch.shape[1:], batch.dtype), dataset.element_spec)
    variant = tf.raw_ops.UnbatchDataset(
        input_dataset=tf.data.experimental.to_variant(dataset),
        output_types=[row.dtype for row in tf.nest.flatten(spec)],
        output_shapes=[row.shape for row in tf.nest.flatten(spec)],
    )
    result = tf.data.experimental.from_variant(variant, spec)
    result._tfring_dataset = dataset  # has to live as long as the result
    return result


def has_run() -> bool:
    """Returns whether TensorFlow has run something in this process; its runtime can then no longer join a cluster."""
    return eager_context.context()._context_handle is not None


def is_in_another_graph() -> bool:
    """Returns whether a replica is about to merge from a graph inside its own graph, such as that of a branch."""
    graph = getattr(threading.current_thread(), "graph", None)  # an attribute of TensorFlow's replica threads
    return graph is not None and graph is not tf.compat.v1.get_default_graph()


def eager_context_address() -> int:
    """Returns the address of the TFE_Context of this process, for the eager C API."""
    context = eager_context.context()
    context.ensure_initialized()
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return pointer_of(context._handle, None)


def is_watched(tensors: Sequence[Any]) -> bool:
    """Returns True if a recording gradient tape watches one of these tensors, or a tensor it was computed from."""
    return bool(_record.should_record_backprop(list(tensors)))


def with_tape_dependencies(tensor: tf.Tensor, *others: Any) -> Any:
    """Returns a copy of a tensor that a tape treats as a function of `others`, too, without a gradient for `others`.

    The tape thus computes the gradient of the operations that made `others` after that of users of the result.
    """
    with _record.stop_recording():
        result = tf.identity(tensor)
    nothing = [None for _ in others]
    _record.record_operation("Behind", [result], [tensor, *others], lambda upstream: [upstream, *nothing])
    return result


def with_gradient(forward: Callable[[Any], Any], backward: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns `forward`, a function of one tensor, with `backward` as the gradient function of its first result."""

    @tf.custom_gradient
    def function(value: tf.Tensor) -> tuple[Any, Callable[..., Any]]:
        return forward(value), lambda gradient, *_: backward(gradient)

    return function


def stop_recording() -> Any:
    """Returns a context in which no gradient tape of this thread records; the public one is of a single tape."""
    return _record.stop_recording()


def is_function_graph(graph: Any) -> bool:
    """Returns True for the graph of a function, a branch or the body of a loop."""
    return isinstance(graph, _func_graph.FuncGraph)


def is_branch_or_body(graph: Any) -> bool:
    """Returns True for the graph of a branch of `tf.cond` or of the body of `tf.while_loop`, but not of a gradient."""
    return type(graph) in (_control_flow.CondBranchFuncGraph, _control_flow.WhileBodyFuncGraph)


def outermost_branch() -> tuple[Any, Any] | None:
    """Returns the graph around the outermost branch of `tf.cond` that is being built, and this branch, or None."""
    found, graph = None, framework_ops.get_default_graph()
    while is_branch_or_body(graph):
        if type(graph) is _control_flow.CondBranchFuncGraph:
            found = graph.outer_graph, graph
        graph = graph.outer_graph
    return found


def capture_outer_tensor(tensor: tf.Tensor) -> Any:
    """Returns an eager tensor as the gradient of a branch or a loop can use it: captured through the outer graphs."""
    return _captured(tensor, framework_ops.get_default_graph())


def _captured(tensor: tf.Tensor, graph: Any) -> Any:
    if not isinstance(graph, (_control_flow.CondBranchFuncGraph, _control_flow.WhileBodyFuncGraph)):
        return graph.capture(tensor) if is_function_graph(graph) else tensor
    return graph.capture(_captured(tensor, graph.outer_graph))
