"""Edits each step once it is traced, so that replicas compute what one process would; names what is left.

Keras' step runs on each replica with its own rows. `partition.expect` marks what tfring takes for a mean or a sum over
rows (gradients, state, logs); `partition.declare` marks what it has made one of the whole batch. A step in which
something cannot be converted is traced again, as one that tfring repairs while it is traced (`losses`, `metrics`,
`state`), and is analyzed only.
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
from tfring.errors import InexactError, InexactWarning
from tfring.ring.collectives import LocalCollectives, RingCollectives
from tfring.step import graphs

if TYPE_CHECKING:
    from tfring.strategy.ring import RingStrategy

_log = logging.getLogger("tfring")
_told: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # of each strategy, the texts it has told


def check_step(strategy: RingStrategy, model: Any, step: str) -> None:
    """Warns of what the step whose graph was just traced does not compute as one process would.

    Args:
      strategy: a RingStrategy.
      model: whose step it is.
      step: the name of Keras' method, such as "train_step".

    Raises:
      InexactError: with `check_equal`, where something is known to differ.
    """
    if strategy.num_replicas_in_sync == 1 or not strategy.mesh.is_data_only:
        return
    if strategy.updater is not None and not strategy.updater.weighs:  # steps of each worker's own, on purpose
        return
    name = f"{step} of {type(model).__name__} {model.name!r}"
    if tf.executing_eagerly():
        _warn(strategy, f"{name}: whether it gives the result of one process is not looked into, for it runs eagerly.")
        return
    try:
        findings = partition.analyze(tf.compat.v1.get_default_graph(), _is_summed_when_read).findings
    except Exception as error:  # a graph of a kind that was never seen: training does not need the analysis
        _warn(strategy, f"{name}: whether it gives the result of one process is not looked into, for {error!r}.")
        return
    _tell(strategy, findings, name)


def _tell(strategy: RingStrategy, findings: Sequence[partition.Finding], name: str) -> None:
    if not findings:
        return
    text = partition.text(findings, name)
    if strategy.check_equal and any(map(partition.is_known, findings)):
        raise InexactError(text)
    _warn(strategy, text)


class NotEditedError(Exception):
    """A step holds what cannot be converted; it is traced again, and is not edited."""


def is_editable(strategy: RingStrategy, model: Any, inputs: Sequence[Any]) -> bool:
    """Returns True for a step whose graph is edited once it is traced.

    Not where a replica is several workers (a mesh), where workers train by themselves, or where rows lie in ragged or
    sparse tensors.

    Args:
      strategy: a RingStrategy.
      model: whose step it is.
      inputs: one element of the dataset for each replica of this worker.
    """
    if strategy.num_replicas_in_sync == 1 or not strategy.mesh.is_data_only:
        return False
    if strategy.updater is not None and not strategy.updater.weighs:  # steps of each worker's own, on purpose
        return False
    if not isinstance(strategy.extended.control, (RingCollectives, LocalCollectives)):
        return False
    leaves = tf.nest.flatten(inputs)
    return not model.run_eagerly and not any(isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)) for leaf in leaves)


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
      NotEditedError: where something else cannot be converted.
    """
    try:
        analysis = partition.analyze(tf.compat.v1.get_default_graph(), _is_held_in_parts, converts=True)
        if any(finding.name not in logs for finding in analysis.findings):
            raise NotEditedError
        made = partition.apply_edits(analysis, _Exchange(strategy, rows))
    except NotEditedError:
        raise
    except Exception as error:  # a graph of a kind that was never seen
        _log.debug("A step is not edited.", exc_info=True)
        raise NotEditedError from error
    name = f"{step} of {type(model).__name__} {model.name!r}"
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


def check_outputs(strategy: RingStrategy, model: Any, outputs: Any) -> None:
    """Warns where rows of what `predict` returns are not computed from the same rows alone; as `check_step`."""
    for value in tf.nest.flatten(outputs):
        if isinstance(value, tf.Tensor) and value.shape.rank and value.shape[0] is None:
            partition.expect(value, "rows", "an output")
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
