"""Measures the cost of each layer of a model, to balance the stages of a pipeline.

Each call of a layer runs by itself, forward and backward, on the rows of a microbatch. The graph shows what it keeps
for the backward pass: tensors that the forward pass makes and the backward pass uses.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfring._keras.seam import ring_of_model
from tfring._keras.sharding import is_sharded_along
from tfring.errors import ConfigurationError
from tfring.parallel.stages import calls_of, crossings_of, functional_of, outputs_of
from tfring.reduction.stage_plan import LayerCost
from tfring.runtime import Ring

_SAME_MEMORY = ("Identity", "Reshape", "Squeeze", "ExpandDims", "StopGradient", "PreventGradient")  # as their input
_NO_ACTIVATIONS = ("ReadVariableOp", "Const", "Placeholder")


def measure_layers(model: keras.Model, x: Any, *, slots: int = 2, repetitions: int = 10) -> list[LayerCost]:
    """Measures the costs of the layers of a model, for `tfring.parallel.plan_stages`.

    The calls of layers run one by one as they would in training, forward and backward. State that layers write (moving
    statistics, the state of random numbers) stays as it was. All workers of the strategy call it at the same time and
    get the same result: times are the mean over workers of the median over repetitions, without the overhead of calling
    a `tf.function`. Costs exclude the loss, and what loops keep for their backward pass (recurrent layers).

    Args:
      model: A built `keras.Sequential` or functional model that is not in a Pipeline yet.
      x: Inputs as for `model.fit`, arrays or tensors, with the number of rows of a microbatch: activations and times
        are measured for this number of rows.
      slots: Number of values that the optimizer keeps per value of a weight: 0 for SGD, 1 for SGD with momentum, 2 for
        Adam. Defaults to 2.
      repetitions: Number of times that each call is timed. Defaults to 10.

    Returns:
      A list of `LayerCost`, in the order of the calls. Stages may not begin where a Pipeline refuses to cut: between
      layers that share weights, and where masks, sparse or ragged tensors would cross.

    Raises:
      ConfigurationError: If a Pipeline does not support the model, the model is already in one, or a number is too
        small.

    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, name="a"), keras.layers.Dense(1, name="b")])
    >>> a, b = measure_layers(model, tf.zeros([3, 4]))
    >>> a.name, a.weight_bytes, b.crossing_bytes  # (4 + 1) * 8 weights, their gradients, two slots; 3 rows of 8
    ('a', 640, 96)
    """
    functional = functional_of(model)
    _check(model, slots=slots, repetitions=repetitions)
    ring = ring_of_model(model)
    nodes = calls_of(functional)
    known = _Known(dict(zip(map(id, functional.inputs), functional._standardize_inputs(x), strict=True)))
    seconds, inside = [], []
    for node in nodes:
        call = _Call(node, known, ring)
        seconds.append(_seconds(call.function, call.taken(), repetitions))
        inside.append(call.bytes_inside)
    if ring is not None:
        world = ring.world
        summed = world.all_reduce([tf.constant(seconds, tf.float64)], name="seconds of layers")[0]
        seconds = (summed.numpy() / world.world_size).tolist()
    costs: list[LayerCost] = []
    counted: set[int] = set()
    for place, node in enumerate(nodes):
        new = {id(v): v for v in _variables(node) if id(v) not in counted}
        counted |= new.keys()
        kept = inside[place] + sum(_bytes(known.values[id(t)]) for t in node.outputs if id(t) in known.kept)
        crossing = _crossing_bytes(functional, nodes, place, known)
        weights = sum(_bytes(v) * (2 + slots if v.trainable else 1) for v in new.values())
        costs.append(
            LayerCost(node.operation.name, seconds[place], weights, kept, crossing or 0, may_begin=crossing is not None)
        )
    return costs


def _check(model: keras.Model, **numbers: int) -> None:
    for name, number in numbers.items():
        least = 0 if name == "slots" else 1
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise ConfigurationError(f"`{name}` is {number!r}, not an integer of at least {least}.")
    divided = [v.path for v in model.weights if is_sharded_along(v, "pipeline")]
    if divided:
        raise ConfigurationError(
            f"Model {model.name!r} is in a Pipeline, where {divided[0]!r} belongs to one stage. Measure its layers "
            "before it goes into a Pipeline."
        )


class _Known:
    """Values of the model's tensors, by id.

    Attributes:
      values: The values for one microbatch.
      roots: For a tensor that shares the memory of another, that other tensor.
      wanted: Tensors whose gradient a backward pass computes.
      kept: Tensors that a backward pass uses.
    """

    def __init__(self, inputs: dict[int, Any]) -> None:
        self.values = inputs
        self.roots = {key: key for key in inputs}
        self.wanted: set[int] = set()
        self.kept: set[int] = set()


class _Call:
    """One call of a layer.

    Attributes:
      function: A `tf.function` of the inputs of the call that returns its outputs, and the gradients of inputs and
        weights. While it is traced, `known` learns about the outputs.
      bytes_inside: Bytes of the tensors kept for the backward pass that are neither inputs nor outputs.
    """

    def __init__(self, node: Any, known: _Known, ring: Ring | None) -> None:
        self._node = node
        self._known = known
        self._tensors = list({id(tensor): tensor for tensor in node.input_tensors}.values())
        self._weights = [variable for variable in _variables(node) if variable.trainable]
        self.bytes_inside = 0

        @tf.function(autograph=False)
        def function(values: Sequence[Any]) -> list:
            if ring is None:
                return self._passes(values)
            results = ring.strategy.run(self._passes, args=(values,))
            return [ring.strategy.experimental_local_results(result)[0] for result in results]

        self.function = function
        outputs = function(self.taken())[: len(node.outputs)]
        known.values.update(zip(map(id, node.outputs), outputs, strict=True))

    def taken(self) -> list:
        return [self._known.values[id(tensor)] for tensor in self._tensors]

    def _passes(self, values: Sequence[Any]) -> list:
        known, graph = self._known, tf.compat.v1.get_default_graph()
        wanted = [v for t, v in zip(self._tensors, values, strict=True) if id(t) in known.wanted and _is_float(v)]
        with keras.StatelessScope(), tf.GradientTape() as tape:
            tape.watch(wanted)
            found = outputs_of(self._node, dict(zip(map(id, self._tensors), values, strict=True)), training=True)
        outputs = [found[id(tensor)] for tensor in self._node.outputs]
        names: dict[str, int] = {}  # by the name of a tensor: the model's tensor that has its memory
        for tensor, value in [*zip(self._tensors, values, strict=True), *zip(self._node.outputs, outputs, strict=True)]:
            if isinstance(value, tf.Tensor):
                known.roots[id(tensor)] = names.setdefault(_memory(value).name, known.roots.get(id(tensor), id(tensor)))
        forward = {operation.name for operation in graph.get_operations()}
        targets = [value for value in outputs if _is_float(value)]
        sources = [*wanted, *self._weights]
        gradients = tape.gradient(targets, sources) if targets and sources else []
        if sources:
            known.wanted.update(map(id, self._node.outputs))
        kept = {
            tensor.name: tensor
            for operation in graph.get_operations()
            if operation.name not in forward
            for tensor in map(_memory, operation.inputs)
            if tensor.op.name in forward
        }
        known.kept |= {names[name] for name in kept.keys() & names.keys()}
        inside = [
            tensor for name, tensor in kept.items() if name not in names and tensor.op.type not in _NO_ACTIVATIONS
        ]
        self.bytes_inside = sum(map(_bytes, inside))
        return [*outputs, *(part for g in gradients if g is not None for part in tf.nest.flatten(g, True))]


def _crossing_bytes(model: keras.Model, nodes: Sequence, place: int, known: _Known) -> int | None:
    """Returns the bytes that a stage that begins at `place` receives, or None if no stage may begin there."""
    name = nodes[place].operation.name
    if place == 0 or any(node.operation.name == name for node in nodes[:place]):
        return None  # a name refers to the first call
    try:
        crossings = crossings_of(model, nodes, [int(number >= place) for number in range(len(nodes))])
    except ConfigurationError:
        return None
    return sum(_bytes(known.values[id(crossing.tensor)]) for crossing in crossings)


@tf.function(autograph=False)
def _nothing() -> tf.Tensor:
    return tf.constant(0.0)


def _seconds(function: Callable[..., Any], values: Sequence[Any], repetitions: int) -> float:
    """Measures the seconds of a traced function beyond those of an empty one: medians of alternating calls."""
    times: list[list[float]] = [[], []]
    for _ in range(repetitions):
        for call, taken in zip((_nothing, lambda: function(values)), times, strict=True):
            begin = time.perf_counter()
            call()
            tf.test.experimental.sync_devices()
            taken.append(time.perf_counter() - begin)
    nothing, something = map(statistics.median, times)
    return max(0.0, something - nothing)


def _variables(node: Any) -> list[keras.Variable]:
    return node.operation.variables if isinstance(node.operation, keras.layers.Layer) else []


def _memory(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the tensor whose memory this one shares."""
    while tensor.op.type in _SAME_MEMORY:
        tensor = tensor.op.inputs[0]
    return tensor


def _is_float(value: Any) -> bool:
    return isinstance(value, tf.Tensor) and value.dtype.is_floating


def _bytes(value: Any) -> int:
    """Returns the bytes of a tensor or variable; parts of unknown shape count as 0."""
    parts: Iterable = [value] if isinstance(value, keras.Variable) else tf.nest.flatten(value, True)
    sizes = [(tf.TensorShape(part.shape).num_elements(), tf.as_dtype(part.dtype).size) for part in parts]
    return sum((elements or 0) * size for elements, size in sizes)
