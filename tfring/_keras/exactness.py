"""Analyzes each step once it is traced, and warns of what replicas do not compute as one process would.

Keras' step runs on each replica with its own rows. `partition.expect` marks what tfring takes for a mean or a sum over
rows (gradients, state, logs); `partition.declare` marks what it has made one of the whole batch.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from tfring import _tf, partition
from tfring import step as steps
from tfring._keras.layers import all_layers
from tfring.errors import InexactError, InexactWarning
from tfring.step import graphs

if TYPE_CHECKING:
    from tfring.strategy.ring import RingStrategy

_warned: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # of each strategy, the texts it has warned of


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
        findings = partition.analyze(tf.compat.v1.get_default_graph(), _is_summed_when_read)
    except Exception as error:  # a graph of a kind that was never seen: training does not need the analysis
        _warn(strategy, f"{name}: whether it gives the result of one process is not looked into, for {error!r}.")
        return
    if not findings:
        return
    text = partition.text(findings, name)
    if strategy.check_equal and any(map(partition.is_known, findings)):
        raise InexactError(text)
    _warn(strategy, text)


def check_outputs(strategy: RingStrategy, model: Any, outputs: Any) -> None:
    """Warns where rows of what `predict` returns are not computed from the same rows alone; as `check_step`."""
    for value in tf.nest.flatten(outputs):
        if isinstance(value, tf.Tensor) and value.shape.rank and value.shape[0] is None:
            partition.expect(value, "rows", "an output")
    check_step(strategy, model, "predict_step")


def _warn(strategy: RingStrategy, text: str) -> None:
    """Warns once on the first rank."""
    warned = _warned.setdefault(strategy, set())
    if text not in warned and strategy.cluster.is_chief:
        warnings.warn(text, InexactWarning, stacklevel=2)
    warned.add(text)


def _is_summed_when_read(handle: Any) -> bool:
    """Returns True if a handle is that of a variable of which replicas hold parts of a sum, such as a metric's."""
    variable = _tf.variable_of_replicas(graphs.outermost(handle))
    if variable is None or variable.synchronization != tf.VariableSynchronization.ON_READ:
        return False
    return variable.aggregation != tf.VariableAggregation.ONLY_FIRST_REPLICA


@contextlib.contextmanager
def own_statistics(model: Any) -> Iterator[None]:
    """While a step is traced: batch normalization that is not synchronized is each replica's own, as Keras has it."""
    layers = [layer for layer in all_layers(model) if _has_own_statistics(layer)]
    try:
        for layer in layers:
            vars(layer)["_moments"] = _declared(layer._moments)
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
        mean, variance = moments(partition.declare_gradient(tf.convert_to_tensor(inputs)), mask)
        return partition.declare(mean, "full"), partition.declare(variance, "full")

    return declared
