"""Learning rates for batches that grow with the number of workers."""

from __future__ import annotations

import math
from typing import Any

import keras
from keras import ops

from tfring.errors import ConfigurationError

__all__ = ["Scaled"]

RULES = ("linear", "sqrt")


def factor_of(rule: str, world_size: int) -> float:
    """Returns the factor by which `rule` scales a learning rate for a batch `world_size` times as large.

    >>> factor_of("linear", 4), factor_of("sqrt", 4)
    (4.0, 2.0)
    """
    if rule not in RULES:
        raise ConfigurationError(f"`rule` is {rule!r}, not one of {RULES}.")
    if not isinstance(world_size, int) or isinstance(world_size, bool) or world_size < 1:
        raise ConfigurationError(f"`world_size` is {world_size!r}, not an integer of at least 1.")
    return float(world_size) if rule == "linear" else math.sqrt(world_size)


def check_warmup_steps(warmup_steps: int, least: int) -> None:
    """Raises ConfigurationError unless `warmup_steps` is an integer of at least `least`."""
    if not isinstance(warmup_steps, int) or isinstance(warmup_steps, bool) or warmup_steps < least:
        raise ConfigurationError(f"`warmup_steps` is {warmup_steps!r}, not an integer of at least {least}.")


@keras.saving.register_keras_serializable("tfring")
class Scaled(keras.optimizers.schedules.LearningRateSchedule):
    """Scales a learning rate for a batch that is `world_size` times as large, with a gradual warm-up.

    Under tfring `batch_size` counts the rows of all workers, so more workers need no other learning rate. Use this
    schedule if the batch grows with the number of workers, as in `batch_size=64 * tfring.world_size()`. The linear rule
    and the warm-up are those of Goyal et al. (2017), https://arxiv.org/abs/1706.02677. The square root is the rule of
    Krizhevsky (2014), https://arxiv.org/abs/1404.5997, and suits Adam.

    With `f = world_size` or `sqrt(world_size)`, the learning rate at step `t`, counted from 0, is

        base(t) * f                                           from step `warmup_steps` on,
        base(t) * (1 + (f - 1) * (t + 1) / warmup_steps)      before.

    The rate depends only on `optimizer.iterations`, so it resumes after a restart, also on another number of workers if
    the script passes the new `world_size`.

    Args:
      base: The learning rate of one worker, a float above 0 or a `LearningRateSchedule`.
      world_size: The factor by which the batch is larger, an integer of at least 1.
      rule: "linear" or "sqrt". Defaults to "linear".
      warmup_steps: Number of updates until the scaled rate is reached, an integer of at least 0. Defaults to 0.

    Raises:
      ConfigurationError: If an argument is something else.

    >>> rate = Scaled(0.1, world_size=4, warmup_steps=3)
    >>> [round(float(rate(step)), 3) for step in range(5)]
    [0.2, 0.3, 0.4, 0.4, 0.4]
    >>> base = keras.optimizers.schedules.CosineDecay(0.1, 1000)
    >>> optimizer = keras.optimizers.Adam(Scaled(base, world_size=4, rule="sqrt"))
    """

    def __init__(self, base: Any, world_size: int, rule: str = "linear", warmup_steps: int = 0) -> None:
        super().__init__()
        if not isinstance(base, keras.optimizers.schedules.LearningRateSchedule):
            is_number = isinstance(base, (int, float)) and not isinstance(base, bool)
            if not is_number or not 0 < base < math.inf:
                raise ConfigurationError(f"`base` is {base!r}, not a number above 0 or a LearningRateSchedule.")
        check_warmup_steps(warmup_steps, 0)
        self.base, self.world_size, self.rule, self.warmup_steps = base, world_size, rule, warmup_steps
        self._factor = factor_of(rule, world_size)

    def __call__(self, step: Any) -> Any:
        """Returns the learning rate at `step`, a float32 scalar."""
        step = ops.cast(step, "float32")
        base = self.base(step) if callable(self.base) else self.base
        reached = ops.minimum((step + 1) / self.warmup_steps, 1.0) if self.warmup_steps else 1.0
        return base * (1 + (self._factor - 1) * reached)

    def get_config(self) -> dict[str, Any]:
        """Returns the config from which `from_config` makes the same schedule."""
        return {
            "base": keras.saving.serialize_keras_object(self.base) if callable(self.base) else self.base,
            "world_size": self.world_size,
            "rule": self.rule,
            "warmup_steps": self.warmup_steps,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Scaled:
        """Makes a schedule from `get_config`."""
        base = config["base"]
        return cls(
            **{**config, "base": keras.saving.deserialize_keras_object(base) if isinstance(base, dict) else base}
        )
