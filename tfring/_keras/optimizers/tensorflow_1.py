"""Optimizers of `tf.compat.v1.train` in a step of Keras: they sum the gradients of replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfring import partition, step
from tfring._keras.seam import seam


def install() -> None:
    """Weighs the gradients of each replica by its rows, as a RingOptimizer does, if the rows are known."""

    @seam(tf.compat.v1.train.Optimizer, "apply_gradients")
    def apply_gradients(original: Callable[..., Any], self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        running = step.weighing()
        if running is None or kwargs.get("skip_gradients_aggregation"):
            return original(self, grads_and_vars, *args, **kwargs)
        pairs = [
            (g if g is None else running.weigh(partition.expect_gradient(g, f"the gradient of {v.name}")), v)
            for g, v in grads_and_vars
        ]
        with partition.own():
            return original(self, pairs, *args, **kwargs)
