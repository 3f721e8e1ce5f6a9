"""Adopts or rejects objects made outside of the strategy's scope; an error names the line to move.

| made outside | |
|---|---|
| the weights of a layer or model that was made inside | made in the scope, which its `build` enters |
| a model composed of layers that were made inside | belongs to the strategy from `compile` or `fit` on |
| a model with no part made inside, while there is a ring | trains alone; `fit` or its optimizer warns once |
| a metric, an optimizer without slots yet | its variables are made again in the scope; the user's object stays |
| an optimizer that has its slots; trainable weights; a model that is compiled or called in the scope | refused |
| state that a step writes | refused when it is written (`_keras/state.py`) |

Otherwise each rank would log and keep its own rows, and callbacks would decide differently on each.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfring import _tf
from tfring._keras.layers import all_layers
from tfring._keras.metrics import metrics_of
from tfring._keras.optimizers.adoption import SCOPE, adopt_variables, is_made_in_scope, ring_of_variable
from tfring._keras.seam import seam
from tfring.errors import ConfigurationError
from tfring.runtime import Ring, current_ring, ring_of_process

_warned: weakref.WeakSet = weakref.WeakSet()  # rings that have warned of a model that trains alone


def install() -> None:
    @seam(_tf.framework_ops, "reset_default_graph")
    def reset_default_graph(original: Callable[..., Any]) -> None:
        # `keras.backend.clear_session()` calls it. An open scope is noted in the graph, which is empty anyway.
        if current_ring() is None:
            original()


def scope_of(made: Any) -> contextlib.AbstractContextManager:
    """Returns the scope in which a layer or a variable was made; a null context if there is none or one is open."""
    ring = vars(made).get("_tfring_made_in")
    return contextlib.nullcontext() if ring is None or tf.distribute.has_strategy() else ring.scope()


def adopt_model(model: Any) -> None:
    """Gives a model that was composed outside the scope its strategy, if one of its layers was made inside."""
    if getattr(model, "_distribute_strategy", None) is not None:
        return
    made_in = [vars(layer).get("_tfring_made_in") for layer in all_layers(model)]
    rings = [ring for ring in (*map(ring_of_variable, model.weights), *made_in) if ring is not None]
    if rings:
        model._distribute_strategy = rings[0].strategy


def warn_of_model(model: Any, stacklevel: int = 3) -> None:
    """Warns once per strategy of a model that trains on this worker alone, while other workers train theirs."""
    _warn_of(model, getattr(model, "_distribute_strategy", None), "it", stacklevel + 1)


def warn_of_optimizer(optimizer: Any) -> None:
    """Warns in the same way of an optimizer in a custom training loop."""
    strategy = tf.distribute.get_strategy() if tf.distribute.has_strategy() else None
    _warn_of(optimizer, strategy, "its model", 4)


def _warn_of(made: Any, strategy: tf.distribute.Strategy | None, trained: str, stacklevel: int) -> None:
    ring = ring_of_process()
    if ring is None or ring in _warned:
        return
    _warned.add(ring)
    other = strategy or keras.distribution.distribution()
    where = f"belongs to a {type(other).__name__}" if other is not None else "was made outside the scope"
    warnings.warn(
        f"{type(made).__name__} {made.name!r} {where}: {trained} trains alone on each of {ring.cluster.world_size} "
        "workers, so each gets different weights and overwrites the files of the others. To train one model on all of "
        f"them, make the model and the optimizer {SCOPE}.",
        stacklevel=stacklevel,
    )


def adopt_metrics(model: Any, ring: Ring) -> None:
    """Gives the strategy to the metrics that a model holds and those of `compile`, which its first step adopts."""
    compiled = model._compile_metrics
    given = compiled and (compiled._user_metrics, compiled._user_weighted_metrics)
    given = [metric for metric in tf.nest.flatten(given) if isinstance(metric, keras.metrics.Metric)]
    for metric in [*metrics_of(model), *given]:
        adopt_variables(metric._variables, ring)


def refuse_weights(model: Any, ring: Ring) -> None:
    """Raises ConfigurationError, which names the layers, if trainable weights were made outside the scope."""
    outside = {id(v) for v in model.trainable_variables if not is_made_in_scope(v, ring)}
    if not outside or model.optimizer is None:
        return
    layers = [layer for layer in _layers_as_written(model) if any(id(v) in outside for v in layer.trainable_variables)]
    layers = layers or [model]
    raise ConfigurationError(
        f"Model {model.name!r} has layers whose weights were made outside of its strategy's scope: "
        f"{', '.join(f'{type(layer).__name__} {layer.name!r}' for layer in layers)}. Move the lines that make them "
        f"(the layers, `build`, `enable_lora`) {SCOPE}."
    )


def refuse_model(model: Any, method: str) -> None:
    """Raises ConfigurationError if the scope of a RingStrategy is open and the model was made outside it."""
    if current_ring() is None:
        return
    raise ConfigurationError(
        f"{method}() runs in the scope of a RingStrategy, but {type(model).__name__} {model.name!r} was made outside. "
        f"Move the lines that make the model {SCOPE}; to use it alone, call {method}() outside the scope."
    )


def _layers_as_written(model: Any) -> list:
    """Returns the layers of a model and of models in it, without the layers that layers are made of."""
    layers = model._flatten_layers(include_self=False, recursive=False)
    inner = (_layers_as_written(layer) if isinstance(layer, keras.Model) else [layer] for layer in layers)
    return [*itertools.chain.from_iterable(inner)]
