"""Count, mean and squared deviations of each channel: on one replica, and merged over replicas.

Moments are one float64 tensor `[3, channels]` with rows `(count, mean, m2)`; m2 is the sum of squared deviations from
the mean. A count beyond 2**24 and a mean far from zero (the deviation of two means of 1e5 is their last float32 bit)
need float64, and the tensor is small.
"""

from __future__ import annotations

import tensorflow as tf

_BLOCK_ROWS = 256


def local_moments(x: tf.Tensor, axis: int, mask: tf.Tensor | None = None) -> tf.Tensor:
    """Computes the moments of one replica's elements.

    Makes two passes over the data: `shift = mean(x)` rounded to x's dtype, then sums of `d = x - shift` and `d * d`.
    The error of the shift is then removed from the sums (Chan, Golub, LeVeque 1983, "corrected two-pass").

    Args:
      x: A float32 or float64 tensor of any rank.
      axis: The axis of the channels; not negative.
      mask: A bool tensor of x's shape. False elements do not count. Defaults to None.

    Returns:
      A float64 tensor of shape `[3, channels]`, with zeros for a channel without elements.
    """
    channels = x.shape[axis]
    if mask is None:
        num_elements = tf.size(x, tf.int64) // channels
        count = tf.fill([channels], tf.cast(num_elements, tf.float64))
    else:
        count = channel_sums(tf.cast(mask, x.dtype), axis)
        x = tf.where(mask, x, tf.zeros_like(x))
    shift = tf.cast(tf.math.divide_no_nan(channel_sums(x, axis), count), x.dtype)
    deviations = x - along(shift, axis, x.shape.rank)
    if mask is not None:
        deviations = tf.where(mask, deviations, tf.zeros_like(x))
    off = tf.math.divide_no_nan(channel_sums(deviations, axis), count)
    mean = tf.cast(shift, tf.float64) + off
    m2 = tf.maximum(channel_sums(tf.square(deviations), axis) - count * tf.square(off), 0.0)
    return tf.stack([count, mean, m2])


def merge(moments: tf.Tensor) -> tf.Tensor:
    """Merges the moments of parts, in their order, into those of all elements.

    ```
    count = sum count_i     mean = sum count_i mean_i / count     m2 = sum (m2_i + count_i (mean_i - mean)^2)
    ```

    Args:
      moments: float64 `[parts, ..., 3, channels]`.

    Returns:
      A float64 tensor of shape `[..., 3, channels]`.
    """
    counts, means, m2s = tf.unstack(moments, axis=-2)
    count = tf.reduce_sum(counts, 0)
    mean = tf.math.divide_no_nan(tf.reduce_sum(counts * means, 0), count)
    m2 = tf.reduce_sum(m2s + counts * tf.square(means - mean), 0)
    return tf.stack([count, mean, m2], -2)


def mean_and_variance(moments: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the float64 mean and (biased) variance, zeros for channels whose elements are all masked out."""
    count, mean, m2 = tf.unstack(moments, axis=-2)
    return mean, tf.math.divide_no_nan(m2, count)


def channel_sums(x: tf.Tensor, axis: int) -> tf.Tensor:
    """Sums over all axes but `axis`, as float64.

    Sums within blocks in x's dtype, and over the blocks in float64. One running float32 sum, as `tf.reduce_sum` keeps
    over leading axes, is wrong by 1e-3 after a million rows; blocks are accurate to 1e-7, and faster.
    """
    rank, channels = x.shape.rank, x.shape[axis]
    if axis < rank - 1:
        shape = tf.shape(x)
        x = tf.reshape(x, [tf.reduce_prod(shape[:axis]), channels, tf.reduce_prod(shape[axis + 1 :])])
        return tf.reduce_sum(tf.cast(tf.reduce_sum(x, 2), tf.float64), 0)
    x = tf.reshape(x, [-1, channels])
    num_blocks = tf.shape(x)[0] // _BLOCK_ROWS
    num_blocked = num_blocks * _BLOCK_ROWS
    blocks = tf.reduce_sum(tf.reshape(x[:num_blocked], [num_blocks, _BLOCK_ROWS, channels]), 1)
    rest = tf.reduce_sum(x[num_blocked:], 0)
    return tf.reduce_sum(tf.cast(blocks, tf.float64), 0) + tf.cast(rest, tf.float64)


def along(values: tf.Tensor, axis: int, rank: int) -> tf.Tensor:
    """Returns one value per channel, shaped to broadcast along `axis` of a tensor of `rank`."""
    return values if axis == rank - 1 else tf.reshape(values, [-1] + [1] * (rank - 1 - axis))
