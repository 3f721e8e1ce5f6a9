"""Gradients by the rows of a batch, for penalties and attacks: of the mean over the batch, not over a replica's rows.

A replica's loss is the mean over its n_i rows of n, so its gradient by a row is n / n_i times that of one process. By
weights this is made good where the optimizer weighs gradients; by rows here, where a graph tells of a mean.
The gradient of a sum over rows, or of a value a row, is that of one process as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfring import step
from tfring._keras.seam import seam
from tfring.recognition import current_ring
from tfring.step import graphs


def install() -> None:
    @seam(tf.GradientTape, "gradient")
    def gradient(original: Callable[..., Any], self: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        gradients = original(self, target, sources, *args, **kwargs)
        running = step.repairing()
        if running is None or tf.executing_eagerly() or not isinstance(target, tf.Tensor) or target.shape.rank != 0:
            return gradients
        if current_ring() is None or kwargs.get("output_gradients") is not None or args:
            return gradients
        has_rows = [_has_rows(source) for source in tf.nest.flatten(sources)]
        if not any(has_rows) or not graphs.is_mean_of_rows(target, running.share):
            return gradients
        flat = tf.nest.flatten(gradients, expand_composites=False)
        weighed = [running.weigh(g) if rows else g for g, rows in zip(flat, has_rows, strict=True)]
        return tf.nest.pack_sequence_as(gradients, weighed)


def _has_rows(source: Any) -> bool:
    return isinstance(source, tf.Tensor) and bool(source.shape.rank) and source.shape[0] is None
