"""Edits each step once it is traced, so that replicas compute what one process would; names what is left.

Keras' step runs on each replica with its own rows. `partition.expect` marks what tfring takes for a mean or a sum over
rows (gradients, state, logs); `partition.declare` marks what it has made one of the whole batch. A step in which
something cannot be converted is traced again: repaired while it is traced (`losses`, `metrics`, `state`), and analyzed.
If something may still differ, it is traced from the rows of all replicas (`whole.py`).
"""

from __future__ import annotations

import contextlib
import logging
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from tfring import _tf, partition
from tfring import step as steps
from tfring._keras.layers import all_layers
from tfring._keras.metrics import metrics_of
from tfring.errors import InexactError, InexactWarning
from tfring.ring.collectives import LocalCollectives, RingCollectives
from tfring.step import graphs

if TYPE_CHECKING:
    from tfring.strategy.ring import RingStrategy

_log = logging.getLogger("tfring")
_METHODS = ("train_step", "test_step", "compute_loss", "compute_metrics")
_BY_ROW = ("Add", "Subtract", "Multiply", "Divide", "TrueDivide")
_LIBRARIES = ("keras", "keras_rs", "tfring")
_told: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # of each strategy, the texts it has told


class NotThisWay(Exception):
    """A step cannot become that of one process in the way in which it was traced; it is traced again.

    Attributes:
      way: in which it is.
      reason: findings, or a sentence, for a step whose rows cannot be divided.
      may_be_whole: whether the step gives the result of one process if it is that of the whole batch.
    """

    def __init__(
        self, way: steps.Way, reason: Sequence[partition.Finding] | str = (), may_be_whole: bool = True
    ) -> None:
        super().__init__(way)
        self.way, self.reason, self.may_be_whole = way, reason, may_be_whole


def way_of(strategy: RingStrategy, model: Any, inputs: Sequence[Any], rows: Sequence[Any]) -> steps.Way:
    """Returns the way in which a step begins to be traced.

    It is not edited where a replica is a pipeline of workers, where workers train by themselves, where rows are in
    ragged or sparse tensors, and on the runtime of TensorFlow. A step that runs eagerly has no graph.

    Args:
      strategy: a RingStrategy.
      model: whose step it is.
      inputs: one element of the dataset for each replica of this worker.
      rows: the rows of each, None where they are not counted.
    """
    if not _becomes_that_of_one_process(strategy) or _has_rows_of_its_own(model):
        return steps.Way.REPAIRED
    if tf.executing_eagerly():
        return without_division(strategy, model, rows)
    leaves = tf.nest.flatten(inputs)
    if not isinstance(strategy.extended.control, (RingCollectives, LocalCollectives)):
        return steps.Way.REPAIRED
    has_parts = any(isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)) for leaf in leaves)
    return steps.Way.REPAIRED if has_parts else steps.Way.EDITED


def without_division(strategy: RingStrategy, model: Any, rows: Sequence[Any]) -> steps.Way:
    """Returns the way of a step whose rows cannot be divided among replicas: where they are counted, of all rows."""
    are_counted = all(n is not None for n in rows)
    is_whole = are_counted and _becomes_that_of_one_process(strategy) and not _has_rows_of_its_own(model)
    return steps.Way.WHOLE if is_whole else steps.Way.REPAIRED


def _has_rows_of_its_own(model: Any) -> bool:
    """Returns True for a model whose layers hold a state for each row of a replica, as stateful RNNs do."""
    return any(getattr(layer, "stateful", False) and hasattr(layer, "states") for layer in all_layers(model))


def _becomes_that_of_one_process(strategy: RingStrategy) -> bool:
    if strategy.num_replicas_in_sync == 1 or strategy.mesh.pipeline > 1:
        return False
    return strategy.updater is None or strategy.updater.weighs  # else steps are each worker's own, on purpose


def check_step(strategy: RingStrategy, model: Any, step: str, otherwise: steps.Way = steps.Way.REPAIRED) -> None:
    """Warns of what the step whose graph was just traced may not compute as one process would.

    Args:
      strategy: a RingStrategy.
      model: whose step it is.
      step: the name of Keras' method, such as "train_step".
      otherwise: the way of a step that differs.

    Raises:
      NotThisWay: where something may differ, and the step may be that of the whole batch.
      InexactError: with `check_equal`, where something is known to differ.
    """
    if not _becomes_that_of_one_process(strategy):
        return
    name = _name(model, step)
    if tf.executing_eagerly():
        _warn(strategy, f"{name}: whether it gives the result of one process is not looked into, for it runs eagerly.")
        return
    try:
        findings = partition.analyze(tf.compat.v1.get_default_graph(), _is_summed_when_read).findings
    except Exception as error:  # a graph of a kind that was never seen: training does not need the analysis
        if otherwise is steps.Way.WHOLE:
            raise NotThisWay(otherwise, f"Its graph is of an unknown kind: {error!r}.") from error
        _warn(strategy, f"{name}: whether it gives the result of one process is not looked into, for {error!r}.")
        return
    if _is_made_by_keras(model):  # whose layers compute each row by itself, also where that is not known of operations
        findings = [*filter(partition.is_known, findings)]
    if findings and otherwise is steps.Way.WHOLE:
        raise NotThisWay(otherwise, findings)
    _tell(strategy, findings, name)


def _is_made_by_keras(model: Any) -> bool:
    """Returns True if the layers, losses and metrics of a model, and its steps, are Keras' and not the user's."""
    steps_of_model = [getattr(type(model), name) for name in _METHODS]
    metrics = [metric for each in metrics_of(model) for metric in (type(each), getattr(each, "_fn", None)) if metric]
    losses = tf.nest.flatten(getattr(model._compile_loss, "_user_loss", None))
    made = [*steps_of_model, *map(type, all_layers(model)), *metrics, *filter(callable, losses)]
    if any(isinstance(layer, keras.layers.Lambda) for layer in all_layers(model)):
        return False
    between = [op for layer in all_layers(model) for op in getattr(layer, "operations", ())]
    if not all(isinstance(op, keras.layers.Layer) or _computes_by_row(op) for op in between):
        return False
    return all(_module(each).partition(".")[0] in _LIBRARIES for each in made)


def _computes_by_row(operation: Any) -> bool:
    """Returns True for an operation of a functional model that is known to compute each row by itself."""
    name = type(operation).__name__
    return name in _BY_ROW or (name == "Concatenate" and operation.axis != 0)


def _module(made: Any) -> str:
    return getattr(made, "__module__", None) or type(made).__module__


def tell_whole(strategy: RingStrategy, model: Any, step: str, reason: Sequence[partition.Finding] | str) -> None:
    """Logs once, on the first rank, that each worker computes the whole batch, and why."""
    text = partition.text_of_whole(reason, _name(model, step))
    if _is_new(strategy, text) and strategy.cluster.is_chief:
        _log.warning(text)


def _name(model: Any, step: str) -> str:
    return f"{step} of {type(model).__name__} {model.name!r}"


def _tell(strategy: RingStrategy, findings: Sequence[partition.Finding], name: str) -> None:
    if not findings:
        return
    text = partition.text(findings, name)
    if strategy.check_equal and any(map(partition.is_known, findings)):
        raise InexactError(text)
    _warn(strategy, text)


def edit_step(strategy: RingStrategy, model: Any, step: str, rows: tf.Tensor, logs: Collection[str]) -> list:
    """Edits the graph of a step that is being traced.

    Args:
      strategy: a RingStrategy.
      model: whose step it is.
      step: the name of Keras' method, such as "train_step".
      rows: int64 `[num_replicas]`, each replica's rows of the batch.
      logs: names of what is not looked at again where it cannot be converted: it is named.

    Returns:
      Operations behind which replicas have exchanged what they need.

    Raises:
      NotThisWay: where something else cannot be converted.
    """
    try:
        analysis = partition.analyze(tf.compat.v1.get_default_graph(), _is_held_in_parts, converts=True)
        left = [finding for finding in analysis.findings if finding.name not in logs]
        if not left:
            made = partition.apply_edits(analysis, _Exchange(strategy, rows))
    except Exception as error:  # a graph of a kind that was never seen
        _log.debug("A step is not edited.", exc_info=True)
        raise NotThisWay(steps.Way.REPAIRED) from error
    if left:
        is_for_one = any(finding.reason == "replicas" for finding in left)
        raise NotThisWay(steps.Way.REPAIRED, may_be_whole=not is_for_one)
    name = _name(model, step)
    _tell(strategy, analysis.findings, name)
    gathered = partition.text_of_gathered(analysis, name)
    if gathered is not None and _is_new(strategy, gathered) and strategy.cluster.is_chief:
        _log.warning(gathered)
    return made


class _Exchange:
    """See `partition.Exchange`: over the control channel, whose collectives of a step run in one order with these."""

    def __init__(self, strategy: RingStrategy, rows: tf.Tensor) -> None:
        self._control: Any = strategy.extended.control
        self.rows = rows
        self.replica = self._control.rank * len(strategy.extended.worker_devices)

    def others(self) -> list[tf.Operation]:
        return self._control.in_one_order()

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: str, *, name: str) -> list[tf.Tensor]:
        with self._control.apart():
            return self._control.all_reduce(tensors, op, name=name)

    def all_gather(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        with self._control.apart():
            return self._control.all_gather(tensors, name=name)


def expect_outputs(outputs: Any) -> Any:
    """Returns the outputs of a replica's `predict_step`, marked as rows, or as one value that all replicas compute."""

    def marked(value: Any) -> Any:
        if not isinstance(value, tf.Tensor) or value.shape.rank is None:
            return value
        if value.shape.is_fully_defined():
            return partition.expect(value, "same", "an output")
        return partition.expect(value, "concatenated", "an output") if value.shape[0] is None else value

    return tf.nest.map_structure(marked, outputs, expand_composites=False)


def edit_predictions(
    strategy: RingStrategy, model: Any, rows: Sequence[tf.Tensor], rows_of_all: tf.Tensor | None
) -> None:
    """Edits the graph of a `predict_step` that is being traced; where it cannot be, what differs is named.

    Args:
      strategy: a RingStrategy.
      model: whose step it is.
      rows: int64 scalars, the rows of each replica of this worker.
      rows_of_all: int64 `[num_replicas]`, those of all replicas; None where they were not exchanged.

    Raises:
      InexactError: with `check_equal`, where something is known to differ.
    """
    control: Any = strategy.extended.control
    if isinstance(control, (RingCollectives, LocalCollectives)) and _becomes_that_of_one_process(strategy):
        try:
            analysis = partition.analyze(tf.compat.v1.get_default_graph(), _is_held_in_parts, converts=True)
            if not analysis.findings and not analysis.edits:
                return
            # What is exchanged to count rows comes behind what the model exchanges, which may need what is edited.
            if not analysis.findings and (rows_of_all is not None or not control.in_one_order()):
                if rows_of_all is None:
                    rows_of_all = control.gather_equal(tf.stack(rows), name="rows of the batch")
                partition.apply_edits(analysis, _Exchange(strategy, rows_of_all))
                return
        except Exception:  # a graph of a kind that was never seen
            _log.debug("A step is not edited.", exc_info=True)
    check_step(strategy, model, "predict_step")


def _warn(strategy: RingStrategy, text: str) -> None:
    """Warns once on the first rank."""
    if _is_new(strategy, text) and strategy.cluster.is_chief:
        warnings.warn(text, InexactWarning, stacklevel=2)


def _is_new(strategy: RingStrategy, text: str) -> bool:
    """Returns True once for each text."""
    told = _told.setdefault(strategy, set())
    is_new = text not in told
    told.add(text)
    return is_new


def _is_summed_when_read(handle: Any) -> bool:
    """Returns True if a handle is that of a variable of which replicas hold parts of a sum, such as a metric's."""
    variable = _tf.variable_of_replicas(graphs.outermost(handle))
    if variable is None or variable.synchronization != tf.VariableSynchronization.ON_READ:
        return False
    return variable.aggregation != tf.VariableAggregation.ONLY_FIRST_REPLICA


def _is_held_in_parts(handle: Any) -> bool:
    """As `_is_summed_when_read`, in a step that is edited: what is a mean when it is read is the same on all."""
    variable = _tf.variable_of_replicas(graphs.outermost(handle))
    return _is_summed_when_read(handle) and variable.aggregation != tf.VariableAggregation.MEAN


def is_own_statistic(variable: Any) -> bool:
    """Returns True for moving statistics of what each replica has normalized by itself; see `own_statistics`."""
    return getattr(variable, "_tfring_own_statistic", False)


@contextlib.contextmanager
def own_statistics(model: Any) -> Iterator[None]:
    """While a step is traced: batch normalization that is not synchronized is each replica's own, as Keras has it."""
    layers = [layer for layer in all_layers(model) if _has_own_statistics(layer)]
    try:
        for layer in layers:
            vars(layer)["_moments"] = _declared(layer._moments)
            for variable in layer.non_trainable_variables:
                variable._tfring_own_statistic = True
        yield
    finally:
        for layer in layers:
            vars(layer).pop("_moments", None)


def _has_own_statistics(layer: Any) -> bool:
    return isinstance(layer, keras.layers.BatchNormalization) and not layer.synchronized


def _declared(moments: Callable[..., Any]) -> Callable[..., Any]:
    def declared(inputs: Any, mask: Any) -> Any:
        if steps.weighing() is None or tf.executing_eagerly():
            return moments(inputs, mask)
        inputs = partition.declare_gradient(tf.convert_to_tensor(inputs))
        with partition.own():
            found = moments(inputs, mask)
        return tuple(partition.declare(partition.declare_gradient(each, "full"), "full") for each in found)

    return declared
