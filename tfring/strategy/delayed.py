"""Delayed: the option of RingStrategy that synchronizes workers only after several local steps."""

from __future__ import annotations

import numbers
from typing import Any

import keras

from tfring.errors import ConfigurationError

LOCAL_MOMENTA = ("keep", "reset", "average")
TABLES = ("average", "diversity")


class Delayed:
    """Lets each worker take `every` optimizer steps on its own rows, then synchronizes the weights.

    In a step, each worker updates its weights with the gradient of its share of the batch and sends nothing. After
    `every` steps (a window), the differences of the weights since the last synchronization are averaged over workers,
    each weighted by the rows it trained in the window. An outer optimizer applies the average as if it were a gradient:

    ```
    d_i = weights then - weights of worker i             the same weights on all workers
    weights = outer(weights then, sum_i rows_i d_i / sum_i rows_i)
    ```

    A window thus exchanges the weights once: 1/`every` of the bytes of dense gradients. A window that ends early, at
    the end of an epoch or by `evaluate`, `predict`, saving or `RingStrategy.synchronize`, is synchronized at that
    point, so files contain synchronized weights.

    Args:
      every: Number of optimizer steps in a window, at least 1.
      outer: The Keras optimizer that applies the averaged difference. Each optimizer of a model gets its own copy. Its
        momentum is shared by all workers; its `global_clipnorm` clips the averaged difference. Defaults to `SGD(1.0)`,
        which is plain averaging. DiLoCo uses `keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)`.
      local_momentum: How to treat the slots of a model's optimizer at a synchronization. "keep" (default): each worker
        keeps its own slots. "average": all workers get the mean of the slots, weighted by rows, which adds the bytes of
        the slots to the exchange. "reset": slots become zeros; only for `keras.optimizers.SGD`, as other optimizers
        count the steps since their slots were zeros.
      tables: How to combine the workers' differences of a row of a table (a variable with sparse gradients, such as
        that of `keras.layers.Embedding`). "average" (default): the mean weighted by rows, as for other weights.
        "diversity": for Adam and similar optimizers, which move a row as far for the lookups of one worker as for those
        of all. A row that only one worker moved keeps that worker's full difference, a row that all workers moved alike
        is averaged, and a row that they moved in orthogonal directions gets the sum. With plain SGD such rows move
        further than without Delayed.

    Raises:
      ConfigurationError: If an argument is out of range.

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
            raise ConfigurationError(f"`every` is {every!r}, not a number of steps (an integer of at least 1).")
        if local_momentum not in LOCAL_MOMENTA:
            raise ConfigurationError(f"`local_momentum` is {local_momentum!r}, not one of {LOCAL_MOMENTA}.")
        if tables not in TABLES:
            raise ConfigurationError(
                f"`tables` is {tables!r}, not one of {TABLES}, the ways to combine workers' differences of a table's "
                'row. Use "diversity" for Adam and similar optimizers, or leave it out.'
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
            f"`outer` is {outer!r}, not a Keras optimizer, such as keras.optimizers.SGD(0.7, momentum=0.9)."
        )
    others = ("LossScaleOptimizer", "MultiOptimizer")
    is_around_others = any(kind.__name__ in others for kind in type(outer).__mro__)
    used = [name for name in ("use_ema", "gradient_accumulation_steps", "loss_scale_factor") if getattr(outer, name)]
    if is_around_others or used:
        raise ConfigurationError(
            f"`outer` is {type(outer).__name__}{''.join(f' with {name}={getattr(outer, name)!r}' for name in used)}, "
            "which does not update by one averaged difference per window. Use a plain optimizer such as SGD."
        )
