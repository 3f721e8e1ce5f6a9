"""OneStepLate: how RingStrategy exchanges the gradients of a step behind the computation of the next."""

from __future__ import annotations

import numbers

from tfring.errors import ConfigurationError


class OneStepLate:
    """Has each step update the weights by the gradients of the step before, which are exchanged while it computes.

    ```
    ring          compute 1 ─► exchange 1 ─► update 1 ─► compute 2 ─► exchange 2 ─► update 2 ─► ...
    OneStepLate   compute 1 ─► compute 2  ───────────────► compute 3 ───────────────► ...
                               exchange 1 ─► update 1      exchange 2 ─► update 2
    ```

    A step takes as long as the longer of computation and exchange, not both. The gradient of step `t` is computed from
    weights that lack one update, that of step `t - 1`. All workers hold the same weights, bit for bit, and each
    gradient is applied once: what is outstanding at the end of an epoch, and in `evaluate`, `predict`, saving or
    `RingStrategy.synchronize`, is exchanged and applied there.

    Args:
      warmup_steps: how many updates of an optimizer are made without delay, from its first, while weights change most.
        Default: 0.
      clip_local_norm: the norm, over all weights of an optimizer, above which a worker's own gradient is scaled down
        before it is exchanged. Default: None. `clipnorm` and `global_clipnorm` of the optimizer clip the averaged
        gradient.

    Raises:
      ConfigurationError: for arguments out of range.

    Source: warm-up, and clipping before the exchange, are those of Deep Gradient Compression
    (https://arxiv.org/abs/1712.01887). `docs/servers_and_delay.md` says when to use it.

    >>> OneStepLate(warmup_steps=100)
    OneStepLate(warmup_steps=100, clip_local_norm=None)
    """

    def __init__(self, *, warmup_steps: int = 0, clip_local_norm: float | None = None) -> None:
        if not isinstance(warmup_steps, numbers.Integral) or isinstance(warmup_steps, bool) or warmup_steps < 0:
            raise ConfigurationError(
                f"`warmup_steps` is a whole number of updates from 0. Received: warmup_steps={warmup_steps!r}"
            )
        is_norm = isinstance(clip_local_norm, numbers.Real) and not isinstance(clip_local_norm, bool)
        if clip_local_norm is not None and not (is_norm and clip_local_norm > 0):
            raise ConfigurationError(
                f"`clip_local_norm` is a norm above 0, or None. Received: clip_local_norm={clip_local_norm!r}"
            )
        self.warmup_steps: int = int(warmup_steps)
        self.clip_local_norm: float | None = None if clip_local_norm is None else float(clip_local_norm)

    def __repr__(self) -> str:
        return f"OneStepLate(warmup_steps={self.warmup_steps}, clip_local_norm={self.clip_local_norm})"
