"""Finds the optimizers that a model, or another optimizer, holds."""

from __future__ import annotations

from typing import Any

import keras

from tfring._keras.layers import objects_in


def optimizers_of(holder: Any) -> list[keras.optimizers.Optimizer]:
    """Returns the optimizers that an object holds, each once.

    These are its attributes, those in lists and dicts in its attributes, and those that these optimizers hold in turn.
    They include those of a GAN's own `compile`, the one in a LossScaleOptimizer and those of a MultiOptimizer. The
    order is that in which the attributes were set, the same on all ranks.

    Args:
      holder: A model or an optimizer. It is not part of the result.
    """
    found = [holder]
    for each in found:
        held = objects_in(vars(each).values(), keras.optimizers.Optimizer)
        found += [optimizer for optimizer in held if not any(optimizer is other for other in found)]
    return found[1:]
