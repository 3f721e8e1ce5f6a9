"""Gradients for the methods of a user's optimizer that overrides `apply` or `apply_gradients`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from tfring import step
from tfring._keras.sharding import gradient_is_complete
from tfring._keras.sharding.shards import is_value
from tfring.setting import setting


class ReducedForOverrides:
    """Gives a user's own `apply` and `apply_gradients` gradients of the whole batch, as one process has them.

    It comes before the user's class. What becomes of the gradients there is weighed and summed by `RingOptimizer` like
    any others: weights that add up to one leave alone what is equal on all replicas, and gradients are sent twice.
    """

    _overrides: frozenset[str] = frozenset()  # of "apply" and "apply_gradients"

    def apply(self: Any, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        own: Any = super()
        if "apply" not in self._overrides or not self._is_outermost():
            return own.apply(grads, trainable_variables)
        given = None if trainable_variables is None else list(trainable_variables)
        variables = given or self._trainable_variables
        if len(variables) == len(grads):
            grads = self._reduced(grads, variables)
        with self._running():
            return own.apply(grads, given)

    def apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        own: Any = super()
        if "apply_gradients" not in self._overrides or not self._is_outermost():
            return own.apply_gradients(grads_and_vars, *args, **kwargs)
        grads, variables = zip(*grads_and_vars, strict=True)
        with self._running():
            pairs = list(zip(self._reduced(grads, variables), variables, strict=True))
            return own.apply_gradients(pairs, *args, **kwargs)

    def _is_outermost(self: Any) -> bool:
        """Returns whether gradients come from a replica of a step, and no method of this optimizer's has had them."""
        running = step.weighing()
        if self._ring is None or running is None or tf.distribute.get_replica_context() is None:
            return False
        if self._ring.updater is not None and not self._ring.updater.weighs:  # a step of this worker's own rows
            return False
        return self._current_update is None and running.applying is not self

    def _running(self: Any) -> AbstractContextManager:
        return setting(step.weighing(), "applying", self)

    def _reduced(self: Any, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Returns the gradients of the whole batch, in each replica; those of shards are, and values are none."""
        grads = list(grads)
        chosen = [i for i, v in enumerate(variables) if not gradient_is_complete(v) and not is_value(v)]
        reduced = self._ring.strategy.all_reduce_gradients([grads[i] for i in chosen])
        for i, gradient in zip(chosen, reduced, strict=True):
            grads[i] = gradient
        return grads
