"""`WarmUp`: a learning rate that grows to its value over the first updates."""

from __future__ import annotations

import warnings
from typing import Any

import keras

from tfring.errors import ConfigurationError
from tfring.schedules import check_warmup_steps


class WarmUp(keras.callbacks.Callback):
    """Raises the learning rate from a share of its value to its full value over the first updates.

    Large batches train badly with their full learning rate at first (Goyal et al., 2017, https://arxiv.org/abs/1706.02677).
    Use it for an optimizer with a plain number as learning rate. A schedule has its own warm-up (`CosineDecay`'s
    `warmup_steps`, `tfring.schedules.Scaled`).

    The rate of update `t`, counted from 0, is `rate * (start + (1 - start) * (t + 1) / warmup_steps)`. It is computed
    from `optimizer.iterations`, so it resumes after a restart. The full rate is that of the optimizer before its first
    update. If the optimizer has already made updates when a new WarmUp first sees it, such as that of a model from a
    file, its rate is assumed to be that of the next update, with a warning. From update `warmup_steps + 1` on, the
    callback sets nothing and leaves the rate to others such as `ReduceLROnPlateau`.

    Args:
      warmup_steps: Number of updates, an integer of at least 1.
      start: Share of the full rate to begin with, from 0 to 1. Defaults to 0.

    Raises:
      ConfigurationError: If an argument is not as described; in `fit`, if the optimizer has a schedule.

    >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    >>> model.compile(keras.optimizers.SGD(0.1), "mse")
    >>> x = keras.ops.ones((8, 1))
    >>> _ = model.fit(x, x, batch_size=2, callbacks=[WarmUp(8)], verbose=0)
    >>> round(float(model.optimizer.learning_rate), 4)         # the rate of update 4, which comes next, is 0.0625
    0.0625
    """

    def __init__(self, warmup_steps: int, start: float = 0.0) -> None:
        super().__init__()
        check_warmup_steps(warmup_steps, 1)
        if isinstance(start, bool) or not isinstance(start, (int, float)) or not 0 <= start <= 1:
            raise ConfigurationError(f"`start` is {start!r}, not a number from 0 to 1.")
        self.warmup_steps, self.start = warmup_steps, start
        self._rate: float | None = None  # once the warm-up is over

    def set_model(self, model: Any) -> None:
        """Remembers the full rate of a new optimizer, before another callback restores the rate it had reached."""
        super().set_model(model)
        optimizer: Any = getattr(model, "optimizer", None)
        rate = getattr(optimizer, "_learning_rate", None)
        if self._rate is None and isinstance(rate, keras.Variable) and int(optimizer.iterations) == 0:
            self._rate = float(optimizer.learning_rate)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Sets the rate of the next update."""
        schedule = getattr(self.model.optimizer, "_learning_rate", None)
        if isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
            raise ConfigurationError(
                f"The learning rate is a {type(schedule).__name__}, but WarmUp needs a number. Give the schedule a "
                "warm-up, as tfring.schedules.Scaled has."
            )
        if self._rate is None:
            self._rate = self._full_rate(float(self.model.optimizer.learning_rate))
        self._set()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Sets the rate of the next update."""
        self._set()

    def _set(self) -> None:
        optimizer = self.model.optimizer
        updates = int(optimizer.iterations)
        if self._rate is None or updates > self.warmup_steps:
            return
        optimizer.learning_rate = self._rate * self._share(updates)

    def _share(self, updates: int) -> float:
        """Returns an update's share of the full rate, given the number of updates before it."""
        return self.start + (1 - self.start) * min((updates + 1) / self.warmup_steps, 1.0)

    def _full_rate(self, rate: float) -> float:
        """Returns the full rate of an optimizer that has made updates; `rate` is that of the next update."""
        updates = int(self.model.optimizer.iterations)
        full = rate / self._share(updates)
        if full != rate:
            warnings.warn(
                f"WarmUp continues at update {updates} of {self.warmup_steps}: it assumes that the learning rate "
                f"{rate:.6g} is that of this update, so the full rate is {full:.6g}. If {rate:.6g} is the full rate, "
                "set `optimizer.iterations.assign(0)` before fit().",
                stacklevel=2,
            )
        return full
