"""The rounding errors of compressed gradients, which a worker adds to its next ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from tfring._keras.optimizers import optimizers_of
from tfring._keras.sharding import gradient_is_complete
from tfring.cross_device_ops import values_of
from tfring.errors import ConfigurationError

if TYPE_CHECKING:
    from tfring.strategy.ring import RingStrategy


class Residuals:
    """The residuals of an optimizer, this worker's own: a float32 variable for each weight that it reduces.

    Args:
      strategy: the RingStrategy.
      optimizer: whose weights they are of.
      variables: the weights.

    Raises:
      ConfigurationError: for an optimizer whose gradients are reduced more than once, or are scaled.
    """

    def __init__(self, strategy: RingStrategy, optimizer: Any, variables: Sequence[Any]) -> None:
        if optimizer._overrides:
            refuse(optimizer, f"{' and '.join(sorted(optimizer._overrides))} of its own, which reduces gradients twice")
        self._by_weight: dict[int, keras.Variable] = {}
        with strategy.scope(), strategy.extended.variables_of_worker():
            for weight in variables:
                if weight.dtype == "float32" and not gradient_is_complete(weight):
                    self._by_weight[id(weight)] = keras.Variable(
                        "zeros", shape=weight.shape, dtype="float32", trainable=False, name="residual"
                    )

    @property
    def variables(self) -> list[keras.Variable]:
        """The residuals, in the order of their weights."""
        return list(self._by_weight.values())

    def of(self, variables: Sequence[Any]) -> list[Sequence[tf.Variable]]:
        """Returns the copies of the residual of each weight, which hold the same; none where it has no residual."""
        found = (self._by_weight.get(id(variable)) for variable in variables)
        return [() if residual is None else values_of(residual.value) for residual in found]


def residuals_of(model: Any) -> list[keras.Variable]:
    """Returns the residuals of all optimizers of a model; none without `error_feedback=True`."""
    of_optimizers = (getattr(optimizer, "_tfring_residuals", None) for optimizer in optimizers_of(model))
    return [variable for residuals in of_optimizers if residuals is not None for variable in residuals.variables]


def refuse(optimizer: Any, problem: str) -> None:
    """Raises the error for an optimizer that has no residuals."""
    raise ConfigurationError(
        "With error_feedback=True an optimizer reduces the gradients of a step once, and they are of one scale in all "
        f"steps. Received: {optimizer.__class__.__name__} {optimizer.name!r} with {problem}. Leave out error_feedback, "
        "or use a plain optimizer, without mixed_float16."
    )
