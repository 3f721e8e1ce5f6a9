"""Gradients that are applied one step late, and the exchange of them behind the computation: `tfring.OneStepLate`.

```
step t      forward and backward of step t ──────────────────┐ g(t) ─► held until step t + 1
            all-reduce of g(t - 1), held since step t - 1 ───┴─► update by its sum
```

The all-reduce takes what variables hold when a step begins, and nothing that the step computes; so TensorFlow's
executor runs it beside forward and backward. It is in a branch of its own, for a branch with the update in it would
wait for the loops and functions of the step that read the weights. The first step after weights were read (an epoch,
`evaluate`, a file) has nothing to apply, and before the next reading the last gradients are exchanged and applied:
there are as many updates as steps.

Gradients are held dense. Of a table, whose gradient is sparse, the rows that are not zeros are exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfring._keras.optimizers.outstanding import Outstanding, assign, read, zeros
from tfring._keras.optimizers.ring_optimizer import Update
from tfring.errors import ConfigurationError

if TYPE_CHECKING:
    from tfring.strategy.ring import RingStrategy


class HeldGradients:
    """The gradients of one optimizer that this worker has not exchanged yet, weighed by its share of the rows.

    Args:
      strategy: the RingStrategy, whose scope is entered.
      variables: the weights.

    Attributes:
      gradients: variables of the shapes of the weights.
      num_steps: int64 scalar, of how many steps they are: 0 or 1.
      present: the positions of weights that have a gradient; None before the first step.
      tables: the positions of weights whose gradients are sparse.
    """

    def __init__(self, strategy: RingStrategy, variables: Sequence[Any]) -> None:
        self.variables = list(variables)
        self.present: list[int] | None = None
        self.tables: set[int] = set()
        with strategy.extended.variables_of_worker():
            self.gradients = [zeros(v.shape, v.dtype, "held_gradient") for v in self.variables]
            self.num_steps = zeros((), "int64", "steps_held")

    def note(self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> list[int]:
        """Notes which gradients a step has, and returns their positions.

        Raises:
          ConfigurationError: where another call of apply has had others.
        """
        present = [i for i, gradient in enumerate(gradients) if gradient is not None]
        same = len(variables) == len(self.variables) and all(
            a is b for a, b in zip(variables, self.variables, strict=True)
        )
        if not same or self.present not in (None, present):
            raise ConfigurationError(
                "With synchronization=OneStepLate(...) an optimizer updates the same weights in every step. Received: "
                f"gradients of {len(present)} of {len(variables)} weights for {type(optimizer).__name__} "
                f"{optimizer.name!r}, which was built for {len(self.variables)} and has updated "
                f"{len(self.present or present)}. Make an optimizer for each set of weights."
            )
        self.present = present
        self.tables |= {i for i in present if isinstance(gradients[i], tf.IndexedSlices)}
        return present

    def values(self) -> list[tf.Tensor]:
        """Returns the gradients that are held, of the weights that have one."""
        return [read(self.gradients[i]) for i in self.present or ()]


class LateGradients(Outstanding):
    """Updates weights by the gradients of the step before, whose exchange needs nothing of the step under way.

    Args:
      strategy: the RingStrategy.
      late: the `tfring.OneStepLate`.
    """

    def __init__(self, strategy: RingStrategy, late: Any) -> None:
        super().__init__(strategy, late)
        self._ops = strategy.extended.gradient_ops.over(strategy.extended.gradients)

    def settings(self) -> dict[str, Any]:
        names = ("warmup_steps", "clip_local_norm")
        return {f"{name} of OneStepLate": getattr(self._asked, name) for name in names}

    def check_model(self, model: Any) -> None:
        if model.jit_compile is True:
            raise ConfigurationError(
                "With synchronization=OneStepLate(...) the ring exchanges gradients in a step, which XLA refuses. "
                "Received: jit_compile=True. Leave it out, or train without OneStepLate."
            )

    def on_build(self, optimizer: Any, variables: Sequence[Any]) -> None:
        if optimizer._tfring_window is None:
            self._check_optimizer(optimizer, variables)
            with self.strategy.scope():
                object.__setattr__(optimizer, "_tfring_window", HeldGradients(self.strategy, variables))

    def _problem_of(self, optimizer: Any, variables: Sequence[Any]) -> str | None:
        if optimizer._overrides:
            return f"{' and '.join(sorted(optimizer._overrides))} of its own, for which gradients are reduced at once"
        return super()._problem_of(optimizer, variables)

    # -- in a step -------------------------------------------------------------------------------------------------

    def apply(
        self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any], active: Any, apply: Callable
    ) -> None:
        running = self._running_step(optimizer)
        if not optimizer.built:
            optimizer.build(variables)
        held = optimizer._tfring_window
        present = held.note(optimizer, gradients, variables)
        is_late = tf.greater(read(held.num_steps), 0)
        late = self._sums_if(is_late, held)  # of what is held until this step writes it
        own = self._clipped([_dense(gradients[i], variables[i]) for i in present], running.share)

        def update(sums: Sequence[Any]) -> tf.Tensor:
            every: list[Any] = [None] * len(variables)
            for i, total in zip(present, sums, strict=True):
                every[i] = total
            apply(every, variables)
            return tf.zeros([])

        def hold() -> tf.Tensor:
            tf.cond(is_late, lambda: update(late), lambda: tf.zeros([]))
            for i, gradient in zip(present, own, strict=True):
                assign(held.gradients[i], gradient)
            assign(held.num_steps, tf.constant(1, tf.int64))
            return tf.zeros([])

        if self._asked.warmup_steps:
            num_updates = tf.cast(read(optimizer.iterations), tf.int64)
            is_warm_up = tf.logical_and(tf.logical_not(is_late), num_updates < self._asked.warmup_steps)
            tf.cond(is_warm_up, lambda: update(self._sums(held, own)), hold)
        else:
            hold()

    def _clipped(self, gradients: list[tf.Tensor], share: Any) -> list[tf.Tensor]:
        """Clips a worker's own gradient, which is weighed by its share of the rows, by its norm without that."""
        limit = self._asked.clip_local_norm
        if limit is None:
            return gradients
        limit = tf.cast(limit * (1.0 if share is None else share), tf.float32)
        norm = tf.linalg.global_norm([tf.cast(gradient, tf.float32) for gradient in gradients])
        scale = tf.where(norm > limit, limit / norm, 1.0)
        return [gradient * tf.cast(scale, gradient.dtype) for gradient in gradients]

    def _sums(self, held: HeldGradients, gradients: Sequence[tf.Tensor]) -> list[Any]:
        """Returns the sums of the weights' gradients over all workers; of tables their rows."""
        values = [_rows(g) if i in held.tables else g for i, g in zip(held.present or (), gradients, strict=True)]
        names = [held.variables[i].path for i in held.present or ()]
        return self._ops.sum_over_workers(values, name="late gradients", value_names=names)

    def _sums_if(self, is_late: tf.Tensor, held: HeldGradients) -> list[Any]:
        """Returns the sums of what is held, which nothing reads where nothing is."""
        if tf.executing_eagerly():
            return self._sums(held, held.values()) if is_late else []
        kinds: list[type] = []

        def sums() -> list[Any]:
            found = self._sums(held, held.values())
            kinds.extend(type(total) for total in found)
            return [(t.values, t.indices) if isinstance(t, tf.IndexedSlices) else t for t in found]

        def nothing() -> list[Any]:
            return [
                (value[:0], tf.zeros([0], tf.int64)) if issubclass(kind, tf.IndexedSlices) else tf.zeros_like(value)
                for kind, value in zip(kinds, held.values(), strict=True)
            ]

        found = tf.cond(is_late, sums, nothing)
        return [
            tf.IndexedSlices(*each, tf.constant(value.shape.as_list(), tf.int64)) if isinstance(each, tuple) else each
            for each, value in zip(found, held.values(), strict=True)
        ]

    def _synchronize(self, optimizer: Any) -> None:
        held = optimizer._tfring_window
        # On the channel on which other ranks tell their status, if this one alone should come here.
        self.strategy.extended.control_ops.sum_over_workers([read(held.num_steps)], name="steps of held gradients")
        gradients: list[Any] = [None] * len(held.variables)
        for i, total in zip(held.present, self._sums(held, held.values()), strict=True):
            gradients[i] = total
        with optimizer._updating(Update(is_reduced=True)):
            optimizer.apply(gradients, held.variables)
        assign(held.num_steps, tf.constant(0, tf.int64))


def _dense(gradient: Any, variable: Any) -> tf.Tensor:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.math.unsorted_segment_sum(gradient.values, gradient.indices, variable.shape[0])
    return tf.convert_to_tensor(gradient)


def _rows(gradient: tf.Tensor) -> tf.IndexedSlices:
    """Returns the rows of a table's gradient that are not zeros."""
    ids = tf.where(tf.reduce_any(tf.not_equal(gradient, 0), list(range(1, gradient.shape.rank))))[:, 0]
    return tf.IndexedSlices(tf.gather(gradient, ids), ids, tf.constant(gradient.shape.as_list(), tf.int64))
