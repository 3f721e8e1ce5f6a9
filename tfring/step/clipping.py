"""Clips gradients of shards and of tables by the norms of the full gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfring.runtime import Ring
from tfring.sharding import Sharding


def clip(
    optimizer: Any, ring: Ring | None, grads: Sequence[Any], shardings: Sequence[Sharding | None], by_value: Callable
) -> list:
    """Returns the gradients, clipped as Keras' `_clip_gradients` clips full gradients.

    Args:
      optimizer: The optimizer, which determines how to clip.
      ring: The workers; None in one process.
      grads: Tensors and IndexedSlices. IndexedSlices stay IndexedSlices.
      shardings: For each gradient of a shard, the sharding of its variable; None for a full gradient.
      by_value: Keras' `_clip_gradients`, for clipping that needs no norm.
    """
    limit = optimizer.clipnorm or optimizer.global_clipnorm
    if not limit or limit < 0:
        return by_value(grads)
    wide = tf.float64 if any(g.dtype == tf.float64 for g in grads) else tf.float32
    squares = tf.stack([tf.reduce_sum(tf.square(tf.cast(_values(g), wide))) for g in grads])
    axes = [None if sharding is None else sharding.axis for sharding in shardings]
    for axis in sorted({axis for axis in axes if axis is not None}):
        assert ring is not None  # its workers hold the shards
        collectives = ring.along(axis, "gradients")
        [everyones] = collectives.all_reduce([squares], name="squares of gradients")
        squares = tf.where(tf.constant([a == axis for a in axes]), everyones, squares)
    if optimizer.clipnorm:
        scales = limit / tf.maximum(tf.sqrt(squares), limit)
    else:
        norm = tf.sqrt(tf.reduce_sum(squares))
        scales = tf.fill(squares.shape, limit / tf.maximum(norm, limit) + (norm - norm))  # NaN for an infinite norm
    return [_scaled(g, tf.cast(scales[i], g.dtype)) for i, g in enumerate(grads)]


def _values(gradient: Any) -> tf.Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _scaled(gradient: Any, scale: tf.Tensor) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * scale, gradient.indices, gradient.dense_shape)
    return gradient * scale
