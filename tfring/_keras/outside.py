"""What users make outside the strategy's scope: taken in where that is safe, else refused with the line to move.

| made outside | |
|---|---|
| a metric, an optimizer without slots yet | its variables are made anew in the scope; the user's object stays |
| an optimizer that has its slots; weights that train; a model that is compiled or fit in the scope | refused |
| state that a step writes | refused when it is written (`_keras/state.py`) |

Left alone, each rank would log and keep its own rows, and callbacks decide differently on each.
"""

from __future__ import annotations

import tensorflow as tf

from tfring._keras.layers import all_layers
from tfring._keras.metrics import metrics_of
from tfring.errors import ConfigurationError
from tfring.recognition import current_ring

_SCOPE = "inside `with strategy.scope():`"


def take_in_optimizers(model, strategy) -> None:
    """Makes optimizers that a model holds its strategy's.

    Raises:
      ConfigurationError: an optimizer was built outside the scope.
    """
    for optimizer in optimizers_of(model):
        if getattr(optimizer, "_distribution_strategy", strategy) is strategy:
            continue
        if optimizer.built:
            raise ConfigurationError(
                "An optimizer belongs to the strategy in whose scope it was made. Received: "
                f"{type(optimizer).__name__} {optimizer.name!r}, built outside the scope of the model's strategy. Make "
                f"it {_SCOPE}."
            )
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
    layers = [layer for layer in all_layers(model) if any(id(v) in outside for v in layer._trainable_variables)]
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
    """The optimizers a model holds, also those of a GAN's own `compile`, and those inside of others."""
    import keras

    found: list = []
    todo = list(vars(model).values())
    while todo:
        value = todo.pop(0)
        if isinstance(value, (dict, list, tuple)):
            inside = value.values() if isinstance(value, dict) else value
            todo.extend(v for v in inside if isinstance(v, keras.optimizers.Optimizer))
        elif isinstance(value, keras.optimizers.Optimizer) and not any(value is other for other in found):
            found.append(value)
            todo.append(getattr(value, "inner_optimizer", None))
    return found
