"""Finds the optimizers that a model, or another optimizer, holds."""

from __future__ import annotations

from typing import Any

import keras


def optimizers_of(holder: Any) -> list[keras.optimizers.Optimizer]:
    """Returns the optimizers that an object holds, each once.

    Those are its attributes, what lists and dicts in them hold, and what these optimizers hold in turn: also those of
    a GAN's own `compile`, the one in a LossScaleOptimizer and those of a MultiOptimizer. The order is that in which the
    attributes were set, the same on all ranks.

    Args:
      holder: a model or an optimizer, which is not part of the result.
    """
    found: list[keras.optimizers.Optimizer] = []
    todo: list[Any] = list(vars(holder).values())
    while todo:
        value = todo.pop(0)
        if isinstance(value, dict):
            todo.extend(v for v in value.values() if _may_hold(v))
        elif isinstance(value, (list, tuple)):
            todo.extend(v for v in value if _may_hold(v))
        elif isinstance(value, keras.optimizers.Optimizer) and not any(value is o for o in (holder, *found)):
            found.append(value)
            todo.extend(v for v in vars(value).values() if _may_hold(v))
    return found


def _may_hold(value: Any) -> bool:
    return isinstance(value, (keras.optimizers.Optimizer, dict, list, tuple))
