"""Delayed: how RingStrategy synchronizes workers after several steps of their own."""

from __future__ import annotations

import numbers
from typing import Any

import keras

from tfring.errors import ConfigurationError

LOCAL_MOMENTA = ("keep", "reset", "average")
TABLES = ("average", "diversity")


class Delayed:
    """Has each worker take `every` optimizer steps on its own rows, and then synchronizes the weights.

    In a step a worker updates its weights by the gradient of its share of the batch, and sends nothing for it. After
    `every` steps (a window) the differences of weights since the last synchronization are averaged over workers, each
    weighed by the rows it trained in the window, and an outer optimizer applies the average as if it were a gradient:

    ```
    d_i = weights then - weights of worker i             the same weights on all workers
    weights = outer(weights then, sum_i rows_i d_i / sum_i rows_i)
    ```

    So gradients cost one exchange of the weights in a window: 1/`every` of the bytes of dense gradients. A window that
    ends early, with the epoch, by `evaluate`, `predict`, saving or `RingStrategy.synchronize`, is synchronized there:
    files hold synchronized weights.

    Args:
      every: How many steps a window has, from 1.
      outer: The optimizer of the averaged difference; of it each optimizer of a model gets a copy. Its momentum is that
        of all workers; `global_clipnorm` clips the averaged difference. Default: `SGD(1.0)`, plain averaging. DiLoCo
        uses `keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)`.
      local_momentum: What becomes of the slots of a model's optimizer at a synchronization: "keep" (default) leaves
        each worker its own; "average" gives all their mean by rows, and sends as many bytes more; "reset" makes them
        zeros, for `keras.optimizers.SGD` alone, as other optimizers count steps since their slots were zeros.
      tables: How the differences of a table's row (a table has sparse gradients, as `keras.layers.Embedding`) become
        one. "average" (default) is the mean by rows, as of other weights. "diversity" is for Adam and its kin, which
        move a row as far for one worker's lookups as for those of all: a row that one worker alone moved keeps that
        worker's difference in full, one that all moved alike is averaged, and one that they moved in orthogonal
        directions gets the sum. With plain SGD such rows go further than without Delayed.

    Raises:
      ConfigurationError: For arguments out of range.

    Sources: local SGD (Stich, https://arxiv.org/abs/1805.09767), SlowMo (https://arxiv.org/abs/1910.00643), DiLoCo
    (https://arxiv.org/abs/2311.08105), gradient diversity (Yin et al., https://arxiv.org/abs/1706.05699).
    `docs/delayed_synchronization.md` says when to use it.

    >>> Delayed(every=8, outer=keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True))
    Delayed(every=8, outer=SGD, local_momentum='keep', tables='average')
    >>> Delayed(every=8, tables="diversity")  # a recommender that Adam trains
    Delayed(every=8, outer=SGD, local_momentum='keep', tables='diversity')
    """

    def __init__(
        self,
        every: int,
        *,
        outer: keras.optimizers.Optimizer | None = None,
        local_momentum: str = "keep",
        tables: str = "average",
    ) -> None:
        if not isinstance(every, numbers.Integral) or isinstance(every, bool) or every < 1:
            raise ConfigurationError(f"`every` is {every!r}, not a whole number of steps, 1 or more.")
        if local_momentum not in LOCAL_MOMENTA:
            raise ConfigurationError(f"`local_momentum` is {local_momentum!r}, not one of {LOCAL_MOMENTA}.")
        if tables not in TABLES:
            raise ConfigurationError(
                f"`tables` is {tables!r}, not one of {TABLES}, how workers' differences of a table's row become one. "
                'Use "diversity" for Adam and its kin, or leave it out.'
            )
        if outer is not None:
            _check_outer(outer)
        self.every: int = int(every)
        self.local_momentum: str = local_momentum
        self.tables: str = tables
        self.outer: Any = keras.optimizers.SGD(1.0) if outer is None else outer

    def __repr__(self) -> str:
        kind = type(self.outer).__name__
        options = f"local_momentum={self.local_momentum!r}, tables={self.tables!r}"
        return f"Delayed(every={self.every}, outer={kind}, {options})"


def _check_outer(outer: Any) -> None:
    if not isinstance(outer, keras.optimizers.Optimizer):
        raise ConfigurationError(
            f"`outer` is {outer!r}, not an optimizer of Keras, such as keras.optimizers.SGD(0.7, momentum=0.9)."
        )
    others = ("LossScaleOptimizer", "MultiOptimizer")
    is_around_others = any(kind.__name__ in others for kind in type(outer).__mro__)
    used = [name for name in ("use_ema", "gradient_accumulation_steps", "loss_scale_factor") if getattr(outer, name)]
    if is_around_others or used:
        raise ConfigurationError(
            f"`outer` is {type(outer).__name__}{''.join(f' with {name}={getattr(outer, name)!r}' for name in used)}, "
            "which does not update by one averaged difference a window. Use a plain optimizer such as SGD."
        )
