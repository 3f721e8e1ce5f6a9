"""Edits each step once it is traced, so that replicas compute what one process would.

Keras' step runs on each replica with its own rows. `partition.expect` marks the values that tfring treats as a mean or
a sum over rows (gradients, state, logs, outputs); `partition.declare` marks what is known of values. A step that runs
eagerly, or has a part that cannot be converted, is computed from the rows of all replicas (`whole.py`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfring import _tf, partition
from tfring import step as steps
from tfring._keras import batch_shapes
from tfring._keras.layers import all_layers
from tfring.cross_device_ops import values_of
from tfring.runtime import Ring, current_ring
from tfring.step import graphs

_log = logging.getLogger("tfring")
_logged: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # for each ring, the texts logged so far


class WholeBatchRequired(Exception):
    """Raised when a step has to be traced again, as a step of the whole batch.

    Attributes:
      reason: The findings or the sentence that explain why its rows cannot be divided.
    """

    def __init__(self, reason: Sequence[partition.Finding] | str) -> None:
        super().__init__(reason)
        self.reason = reason


def decide_way(ring: Ring, model: Any) -> tuple[steps.Way, str]:
    """Returns the way in which a step is first traced, and the reason if its rows cannot be divided.

    Args:
      ring: The workers.
      model: The Keras model of the step.
    """
    if _is_of_own_rows(ring):
        return steps.Way.OWN, ""
    if tf.executing_eagerly():
        return steps.Way.WHOLE, "The step runs eagerly."
    if batch_shapes.is_stateful(model):
        return steps.Way.WHOLE, "A layer is stateful."
    return steps.Way.EDITED, ""


def _is_of_own_rows(ring: Ring) -> bool:
    """Returns True if each replica computes from its own rows, as it is alone or trains by itself on purpose."""
    return ring.num_replicas == 1 or ring.mesh.pipeline > 1 or ring.trains_alone


def log_whole_batch_step(ring: Ring, model: Any, step: str, reason: Sequence[partition.Finding] | str) -> None:
    """Logs once, on the first rank, that each worker computes the whole batch, and why."""
    _tell(ring, partition.text_of_whole(reason, _name(model, step)))


def describe_layer_differences(ring: Ring, model: Any) -> str:
    """Returns a sentence about the layers of a model that differ from one process in what they compute, or ""."""
    if _is_of_own_rows(ring) or model.run_eagerly:
        return ""
    layers = [layer for layer in all_layers(model) if layer.trainable]
    normalize = [n for n in layers if isinstance(n, keras.layers.BatchNormalization) and not n.synchronized]
    draw = [layer for layer in layers if ring.random == "replica" and _draws(layer)]
    said, cures = [], []
    for found, does, cure in (
        (
            *(normalize, "normalizes each worker's own rows"),
            "tfring.SyncBatchNormalization (or tfring.layers.to_sync_batch_normalization(model))",
        ),
        (draw, "draws different random numbers than in one process", 'RingStrategy(random="global")'),
    ):
        if found:
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            said.append(f"{type(found[0]).__name__} {found[0].name!r}{more} {does}")
            cures.append(cure)
    return f"{', and '.join(said)}. To get the result of one process, use {' and '.join(cures)}." if said else ""


def _draws(layer: Any) -> bool:
    """Returns True if a layer, or a model's own step, draws random numbers for rows when it trains."""
    if getattr(layer, "generator", None) is not None:  # of an augmentation layer
        return True
    is_of_keras = type(layer).__module__.partition(".")[0] == "keras"
    draws = any(getattr(layer, name, None) for name in ("rate", "stddev", "dropout", "recurrent_dropout"))
    return bool(layer._seed_generators) and (draws or not is_of_keras)


def _name(model: Any, step: str) -> str:
    return f"{step} of {type(model).__name__} {model.name!r}"


def _tell(ring: Ring, text: str) -> None:
    told = _logged.setdefault(ring, set())
    if text not in told and ring.cluster.is_chief:
        _log.warning(text)
    told.add(text)


def edit_step(ring: Ring, model: Any, step: str, rows: tf.Tensor | Callable[[], tf.Tensor]) -> list:
    """Edits the graph of a step that is being traced.

    Args:
      ring: The workers.
      model: The Keras model of the step.
      step: The name of Keras' method, such as "train_step".
      rows: int64 `[num_replicas]`, the number of rows of each replica; or a function that exchanges these numbers.

    Returns:
      Operations after which the replicas have exchanged what they need.

    Raises:
      WholeBatchRequired: If a part of the step cannot be converted.
    """
    try:
        graph = tf.compat.v1.get_default_graph()
        _tf.name_squeezed_dimensions(graph)
        analysis = partition.analyze(graph, _held)
        if not analysis.findings:
            made = []
            if step == "predict_step" and analysis.writes_parts:
                raise WholeBatchRequired("It writes values computed from its rows to the model's state.")
            if analysis.edits:
                made = partition.apply_edits(analysis, _Exchange(ring, rows() if callable(rows) else rows))
    except WholeBatchRequired:
        raise
    except Exception as error:  # a graph of an unknown kind
        _log.debug("A step is not edited.", exc_info=True)
        raise WholeBatchRequired(f"Its graph is of an unknown kind: {error!r}.") from error
    if analysis.findings:
        raise WholeBatchRequired(analysis.findings)
    gathered = partition.text_of_gathered(analysis, _name(model, step))
    if gathered is not None:
        _tell(ring, gathered)
    return made


class _Exchange:
    """Implements `partition.Exchange` over the control channel, in one order with its other collectives of a step."""

    def __init__(self, ring: Ring, rows: tf.Tensor) -> None:
        self._control: Any = ring.control
        self._trace = ring.trace
        self.rows = rows
        self.replica = ring.first_replica

    def note_lines(self, name: str, lines: str) -> None:
        if self._trace is not None:
            self._trace.lines(name, lines)

    def others(self) -> list[tf.Operation]:
        return self._control.ordered_ops()

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: str, *, name: str) -> list[tf.Tensor]:
        with self._control.apart():
            return self._control.all_reduce(tensors, op, name=name)

    def all_gather(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        with self._control.apart():
            return self._control.all_gather(tensors, name=name)


def expect_outputs(outputs: Any) -> Any:
    """Returns the outputs of a replica's `predict_step`, marked as rows, or as one value that all replicas compute."""

    def marked(value: Any) -> Any:
        if not isinstance(value, tf.Tensor):
            parts = tf.nest.flatten(value, expand_composites=True)
            parts = [partition.expect(part, "rows", "an output") for part in parts]
            return tf.nest.pack_sequence_as(value, parts, expand_composites=True)
        if value.shape.rank is None:
            return value
        if value.shape.is_fully_defined():
            return partition.expect(value, "same", "an output")
        return partition.expect(value, "concatenated", "an output") if value.shape[0] is None else value

    return tf.nest.map_structure(marked, outputs, expand_composites=False)


def _held(handle: Any) -> str:
    """Returns what replicas hold in the variable of a handle: "copies", "parts" of a sum, or their own "values"."""
    variable = _tf.variable_of_replicas(graphs.outermost(handle))
    if variable is None:
        return "values"
    if variable.synchronization != tf.VariableSynchronization.ON_READ:
        return "copies"
    if "_tfring_own_values" in vars(variable):  # its `getattr` would read the variable, in the graph of the step
        return "values"
    is_copy = variable.aggregation in (tf.VariableAggregation.ONLY_FIRST_REPLICA, tf.VariableAggregation.MEAN)
    return "copies" if is_copy else "parts"


# -- layers --------------------------------------------------------------------------------------------------------

_PARTS = (tf.RaggedTensor, tf.SparseTensor)
_LIBRARIES = ("keras", "keras_rs", "tensorflow")


def is_own_statistic(variable: Any) -> bool:
    """Returns True for moving statistics of a layer that normalizes each replica's own rows; see `declared_layers`."""
    return getattr(variable, "_tfring_own_statistic", False)


@contextlib.contextmanager
def declared_layers(model: Any, way: steps.Way | None) -> Iterator[None]:
    """Declares what is known of layers while a step is traced.

    Batch normalization that is not synchronized is each replica's own, as in Keras. Keras' layers compute each row of
    ragged and sparse tensors by itself, and TextVectorization each text; the operations that they use for it are not
    analyzed.
    """
    patched: list[tuple[dict, str]] = []

    def patch(layer: Any, name: str, declared: Callable[..., Any]) -> None:
        vars(layer)[name] = declared
        patched.append((vars(layer), name))

    try:
        for layer in all_layers(model):
            if isinstance(layer, keras.layers.BatchNormalization) and not layer.synchronized:
                patch(layer, "_moments", _of_own_rows(layer._moments))
                for variable in layer.non_trainable_variables:
                    variable._tfring_own_statistic = True
            elif way is steps.Way.EDITED and _pads_text(layer):
                patch(layer, "call", _declare_padded_text(layer))
            elif _computes_by_row(layer):
                patch(layer, "call", _declare_call_by_row(layer.call, layer.name))
        yield
    finally:
        for attributes, name in patched:
            attributes.pop(name, None)


def _of_own_rows(moments: Callable[..., Any]) -> Callable[..., Any]:
    def declared(inputs: Any, mask: Any) -> Any:
        if steps.weighing() is None or tf.executing_eagerly():
            return moments(inputs, mask)
        inputs = partition.declare_gradient(tf.convert_to_tensor(inputs))
        with partition.own():
            found = moments(inputs, mask)
        return tuple(partition.declare(partition.declare_gradient(each, "full"), "full") for each in found)

    return declared


def _computes_by_row(layer: Any) -> bool:
    """Returns True for a Keras layer that computes each row by itself and contains nothing of the user's."""
    if layer._layers or layer.non_trainable_variables or isinstance(layer, (keras.layers.Lambda, keras.Model)):
        return False
    axes = [getattr(layer, name, None) for name in ("axis", "axes")]
    functions = [each for each in vars(layer).values() if callable(each) and hasattr(each, "__module__")]
    return 0 not in tf.nest.flatten(axes) and all(map(_is_of_library, [type(layer), *functions]))


def _is_of_library(made: Any) -> bool:
    return (getattr(made, "__module__", None) or "").partition(".")[0] in _LIBRARIES


def _declare_call_by_row(call: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(call)
    def declared(*args: Any, **kwargs: Any) -> Any:
        leaves = tf.nest.flatten((args, kwargs))
        if not any(isinstance(leaf, _PARTS) for leaf in leaves) or not partition.is_noted():
            return call(*args, **kwargs)
        dense = [leaf for leaf in leaves if isinstance(leaf, tf.Tensor) and leaf.shape.rank != 0]
        if not all(map(_may_have_rows, dense)):
            return call(*args, **kwargs)
        args, kwargs = tf.nest.map_structure(_as_input, (args, kwargs))
        with partition.own():
            outputs = call(*args, **kwargs)
        return tf.nest.map_structure(functools.partial(_as_output, name=name), outputs)

    return declared


def _pads_text(layer: Any) -> bool:
    """Returns True for a TextVectorization that pads the numbers of words, with functions of Keras alone."""
    if type(layer) is not keras.layers.TextVectorization or layer._output_mode != "int" or layer._ragged:
        return False
    return not any(map(callable, (layer._standardize, layer._split)))


def _declare_padded_text(layer: Any) -> Callable[..., Any]:
    """Returns the `call` of a TextVectorization, which pads each row to the longest of all replicas."""
    call = layer.call

    @functools.wraps(call)
    def declared(inputs: Any) -> Any:
        if not partition.is_noted() or not isinstance(inputs, tf.Tensor) or not _may_have_rows(inputs):
            return call(inputs)
        inputs = partition.expect(inputs, "rows", f"the inputs of {layer.name}")
        with partition.own():
            numbers = call(inputs)
            if layer._output_sequence_length is None:
                numbers = tf.pad(numbers, [[0, 0], [0, _longest(tf.shape(numbers)[1]) - tf.shape(numbers)[1]]])
        return partition.declare(numbers, "rows")

    return declared


def _longest(length: tf.Tensor) -> tf.Tensor:
    """Returns the largest of the lengths of all replicas that have rows."""
    ring, running = current_ring(), steps.current()
    assert ring is not None
    control = ring.control

    def of_all(lengths: Any) -> tf.Tensor:
        [longest] = control.all_reduce([tf.reduce_max(tf.stack(values_of(lengths)))], "max", name="the longest text")
        return longest

    # Without rows, a replica computes on a padding row; that of `predict`, an empty text, is the shortest.
    return ring.cross_replica(of_all, length if running is None else running.zero_if_empty(length))


def _may_have_rows(tensor: tf.Tensor) -> bool:
    return bool(tensor.shape.rank) and tensor.shape[0] is None


def _as_input(value: Any) -> Any:
    if not isinstance(value, tf.Tensor) or not _may_have_rows(value):
        return value
    return partition.declare_gradient(partition.expect(value, "rows", "rows beside ragged or sparse ones"))


def _as_output(value: Any, name: str) -> Any:
    if not isinstance(value, tf.Tensor) or not _may_have_rows(value):
        return value
    value = partition.expect_upstream(value, "gradients of rows", f"the gradient of the outputs of {name}")
    return partition.declare(value, "rows")
