"""Finds the optimizers that a model, or another optimizer, holds."""

from __future__ import annotations

from typing import Any

import keras

from tfring._keras.layers import objects_in


def optimizers_of(holder: Any) -> list[keras.optimizers.Optimizer]:
    """Returns the optimizers that an object holds, each once.

    Those are its attributes, what lists and dicts in them hold, and what these optimizers hold in turn: also those of
    a GAN's own `compile`, the one in a LossScaleOptimizer and those of a MultiOptimizer. The order is that in which the
    attributes were set, the same on all ranks.

    Args:
      holder: A model or an optimizer, which is not part of the result.
    """
    found = [holder]
    for each in found:
        held = objects_in(vars(each).values(), keras.optimizers.Optimizer)
        found += [optimizer for optimizer in held if not any(optimizer is other for other in found)]
    return found[1:]
