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
    """Passes gradients of the whole batch to a user's own `apply` and `apply_gradients`, as in one process.

    It comes before the user's class. `RingOptimizer` weighs and sums the gradients that the user's methods pass on like
    any others: the weights add up to one, so values that are equal on all replicas stay the same. Gradients are
    therefore sent twice.
    """

    _overrides: frozenset[str] = frozenset()  # "apply", "apply_gradients" or both

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
        """Returns whether gradients come from a replica of a step, and no method of this optimizer has had them yet."""
        running = step.weighing()
        if self._ring is None or running is None or tf.distribute.get_replica_context() is None:
            return False
        if self._ring.updater is not None and not self._ring.updater.weighs:  # a step of this worker's own rows
            return False
        return self._current_update is None and running.applying is not self

    def _running(self: Any) -> AbstractContextManager:
        return setting(step.weighing(), "applying", self)

    def _reduced(self: Any, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Returns the gradients of the whole batch, in each replica, except for shards and values.

        Gradients of shards are already those of the whole batch, and values are not gradients.
        """
        grads = list(grads)
        chosen = [i for i, v in enumerate(variables) if not gradient_is_complete(v) and not is_value(v)]
        reduced = self._ring.strategy.all_reduce_gradients([grads[i] for i in chosen])
        for i, gradient in zip(chosen, reduced, strict=True):
            grads[i] = gradient
        return grads
