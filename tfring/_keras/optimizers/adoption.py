"""Makes optimizers part of a RingStrategy: those made in its scope, and those that its models hold.

| optimizer | |
|---|---|
| made in the scope | a ring's from the start |
| made outside, without slots, held by a model of the strategy | adopted: its variables are recreated in the scope |
| made outside, to update variables made inside | rejected |
| of one process, for a table of `tfring.layers` | becomes a ring's when it is built, without a strategy |
| any other | stays Keras' own |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfring._keras.optimizers import fused, optimizers_of, ring_optimizer
from tfring._keras.optimizers.optimizer_class import join_ring, register
from tfring._keras.optimizers.ring_optimizer import RingOptimizer
from tfring._keras.sharding import mark_of
from tfring.errors import ConfigurationError
from tfring.runtime import Ring, ring_of

SCOPE = "inside `with strategy.scope():`"


def adopt_optimizers(model: Any, ring: Ring) -> None:
    """Makes the optimizers that a model holds part of its strategy.

    Raises:
      ConfigurationError: If an optimizer was built outside the scope.
    """
    for optimizer in optimizers_of(model):
        if getattr(optimizer, "_distribution_strategy", ring.strategy) is ring.strategy:
            continue
        if optimizer.built:
            raise _outside_scope_error(optimizer, "and was built there")
        optimizer._distribution_strategy = ring.strategy
        join_ring(optimizer)
        adopt_variables(optimizer._variables, ring)


def adopt_variables(variables: Sequence[Any], ring: Ring) -> None:
    """Recreates Keras variables in the scope of a strategy, with their current values."""
    for variable in variables:
        if not is_made_in_scope(variable, ring):
            value = variable._value.numpy()
            with ring.scope():
                variable._initialize(value)


def is_made_in_scope(variable: Any, ring: Ring) -> bool:
    """Returns whether a Keras variable was made in the scope of a strategy, or will be made later."""
    value = variable._value
    if value is None:  # Keras makes it later
        return True
    return isinstance(value, tf.distribute.DistributedValues) and ring_of(value.distribute_strategy) is ring


def ring_of_variable(variable: Any) -> Any:
    """Returns the ring in whose scope a variable of Keras or TensorFlow was made; None if there is none."""
    value = getattr(variable, "_value", variable)
    return ring_of(value.distribute_strategy) if isinstance(value, tf.distribute.DistributedValues) else None


def belongs_to_ring(optimizer: Any, variables: Sequence[Any]) -> bool:
    """Returns True for an optimizer of one process that updates a table of `tfring.layers`.

    Raises:
      ConfigurationError: If a variable was made in a scope and the optimizer was not.
    """
    if any(ring_of_variable(v) is not None for v in variables):
        raise _outside_scope_error(optimizer, "and is applied to variables made in the scope")
    return any(mark_of(v).update or mark_of(v).sums_ids for v in variables)


def install() -> None:
    """Registers the classes that extend Keras' optimizers."""
    register(keras.optimizers.Optimizer, RingOptimizer)
    register(keras.optimizers.LossScaleOptimizer, ring_optimizer.RingLossScaleOptimizer)
    register(keras.optimizers.Adam, fused.RingAdam)
    register(keras.optimizers.Adagrad, fused.RingAdagrad)
    if hasattr(keras.optimizers, "MultiOptimizer"):
        register(keras.optimizers.MultiOptimizer, ring_optimizer.RingMultiOptimizer)


def _outside_scope_error(optimizer: Any, what: str) -> ConfigurationError:
    return ConfigurationError(
        f"{type(optimizer).__name__} {optimizer.name!r} was made outside of the scope of the strategy that trains with "
        f"it, {what}. Make it {SCOPE}."
    )
