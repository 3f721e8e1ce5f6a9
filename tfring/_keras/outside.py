"""Adopts or rejects objects made outside of the strategy's scope; an error names the line to move.

| made outside | |
|---|---|
| the weights of a layer or model that was made inside | made in the scope, which its `build` enters |
| a model composed of layers that were made inside | the strategy's from `compile` or `fit` on |
| a model of which nothing was made inside, while there is a ring | trains alone; `fit` warns once |
| a metric, an optimizer without slots yet | its variables are made again in the scope; the user's object stays |
| an optimizer that has its slots; weights that train; a model that is compiled or fit in the scope | refused |
| state that a step writes | refused when it is written (`_keras/state.py`) |

Left alone, each rank would log and keep its own rows, and callbacks decide differently on each.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
import weakref

import tensorflow as tf

from tfring._keras.layers import all_layers
from tfring._keras.metrics import metrics_of
from tfring._keras.seam import seam
from tfring.errors import ConfigurationError
from tfring.recognition import current_ring, ring_of, ring_of_process

_warned: weakref.WeakSet = weakref.WeakSet()  # strategies beside which a model has trained alone
_SCOPE = "inside `with strategy.scope():`"


def install():
    from keras.src.layers.layer import Layer

    @seam(Layer, "__new__")
    def new(original, cls, *args, **kwargs):
        layer, strategy = original(cls, *args, **kwargs), current_ring()
        if strategy is not None:
            build = layer.build

            @functools.wraps(build)
            def build_in_scope(*args, **kwargs):
                with _scope_of(layer):
                    return build(*args, **kwargs)

            vars(layer).update(build=build_in_scope, _tfring_made_in=strategy)
        return layer

    @seam(Layer, "_maybe_build")  # where Keras traces a layer that has no `build`, and makes the variables in it later
    def maybe_build(original, self, *args, **kwargs):
        with contextlib.nullcontext() if self.built else _scope_of(self):
            return original(self, *args, **kwargs)

    @seam(tf.compat.v1, "reset_default_graph")
    def reset_default_graph(original):
        # `keras.backend.clear_session()` calls it. An open scope is noted in the graph, which is empty anyway.
        if current_ring() is None:
            original()


def _scope_of(layer):
    """The scope in which a layer was made, where it is not open."""
    strategy = vars(layer).get("_tfring_made_in")
    return contextlib.nullcontext() if strategy is None or tf.distribute.has_strategy() else strategy.scope()


def take_in_model(model) -> None:
    """Makes a model that was composed outside the scope its strategy's, where a layer of it was made inside."""
    if getattr(model, "_distribute_strategy", None) is not None:
        return
    made_in = [vars(layer).get("_tfring_made_in") for layer in all_layers(model)]
    rings = [ring for ring in (*map(_ring_of_variable, model.weights), *made_in) if ring is not None]
    if rings:
        model._distribute_strategy = rings[0]


def warn_of_model(model) -> None:
    """Warns once a strategy of a model that trains on this worker alone, while others train theirs."""
    strategy = ring_of_process()
    if strategy is None or strategy in _warned or getattr(model, "_distribute_strategy", None) is not None:
        return
    _warned.add(strategy)
    warnings.warn(
        f"{type(model).__name__} {model.name!r} was made outside the scope: it trains alone on each of "
        f"{strategy.cluster.world_size} workers that call fit(), and of what they write to one path the last remains. "
        f"To train one model on all of them, make it {_SCOPE}.",
        stacklevel=6,
    )


def refuse_variables(optimizer, variables) -> None:
    """Raises ConfigurationError where an optimizer made outside the scope is to update variables made inside."""
    variables = optimizer._trainable_variables if variables is None else variables
    if any(_ring_of_variable(v) is not None for v in variables):
        raise ConfigurationError(_is_not_of_scope(optimizer, "to be applied to variables made in the scope"))


def _is_not_of_scope(optimizer, what: str) -> str:
    return (
        "An optimizer belongs to the strategy in whose scope it was made. Received: "
        f"{type(optimizer).__name__} {optimizer.name!r}, {what}. Make it {_SCOPE}."
    )


def take_in_optimizers(model, strategy) -> None:
    """Makes optimizers that a model holds its strategy's.

    Raises:
      ConfigurationError: an optimizer was built outside the scope.
    """
    for optimizer in optimizers_of(model):
        if getattr(optimizer, "_distribution_strategy", strategy) is strategy:
            continue
        if optimizer.built:
            raise ConfigurationError(_is_not_of_scope(optimizer, "built outside the scope of the model's strategy"))
        optimizer._distribution_strategy = strategy
        _take_in(optimizer._variables, strategy)


def take_in_metrics(model, strategy) -> None:
    """Makes metrics that a model holds its strategy's."""
    for metric in metrics_of(model):
        for variable in metric._variables:
            # Keras before 3.10 knows no synchronization: see `_keras/state.py`.
            variable._tfring_of_metric = variable.aggregation != "none"
        _take_in(metric._variables, strategy)


def refuse_weights(model, strategy) -> None:
    """Raises ConfigurationError where weights that train were made outside the scope, and names their layers."""
    outside = {id(v) for v in model.trainable_variables if not _is_of(v, strategy)}
    if not outside or model.optimizer is None:
        return
    layers = [layer for layer in _layers_as_written(model) if any(id(v) in outside for v in layer.trainable_variables)]
    layers = layers or [model]
    raise ConfigurationError(
        "All layers of a model that trains under a RingStrategy are made in its scope. Received: "
        f"{', '.join(f'{type(layer).__name__} {layer.name!r}' for layer in layers)} in model {model.name!r}, made "
        f"outside. Move the lines that make them {_SCOPE}."
    )


def refuse_model(model, method: str) -> None:
    """Raises ConfigurationError where the scope of a RingStrategy is open and the model was made outside it."""
    if current_ring() is None:
        return
    raise ConfigurationError(
        f"A model trains under the strategy in whose scope it was made. Received: {method}() of "
        f"{type(model).__name__} {model.name!r}, made outside, in the scope of a RingStrategy. Move the lines that "
        f"make the model {_SCOPE}; to train it alone, call {method}() outside the scope."
    )


def _layers_as_written(model) -> list:
    """The layers of a model and of models in it, without those of which layers are made."""
    import keras

    layers = model._flatten_layers(include_self=False, recursive=False)
    inner = (_layers_as_written(layer) if isinstance(layer, keras.Model) else [layer] for layer in layers)
    return [*itertools.chain.from_iterable(inner)]


def _ring_of_variable(variable):
    value = getattr(variable, "_value", variable)
    return ring_of(value.distribute_strategy) if isinstance(value, tf.distribute.DistributedValues) else None


def _is_of(variable, strategy) -> bool:
    value = variable._value
    if value is None:  # Keras makes it later
        return True
    return isinstance(value, tf.distribute.DistributedValues) and value.distribute_strategy is strategy


def _take_in(variables, strategy) -> None:
    for variable in variables:
        if not _is_of(variable, strategy):
            value = variable._value.numpy()
            with strategy.scope():
                variable._initialize(value)


def optimizers_of(model) -> list:
    """The optimizers a model holds, also those of a GAN's own `compile`, in lists and dicts, and inside of others."""
    import keras

    found: list = []
    todo = list(vars(model).values())
    while todo:
        value = todo.pop(0)
        if isinstance(value, (dict, list, tuple)):
            inside = value.values() if isinstance(value, dict) else value
            todo.extend(v for v in inside if isinstance(v, (keras.optimizers.Optimizer, dict, list, tuple)))
        elif isinstance(value, keras.optimizers.Optimizer) and not any(value is other for other in found):
            found.append(value)
            todo += [getattr(value, "inner_optimizer", None), *getattr(value, "_inner_optimizers", ())]
    return found
