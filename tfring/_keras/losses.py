"""A mean loss weighs each replica by its rows, so that a ragged batch gives the mean, not the mean of means.

Keras divides by the number of replicas (`scale_loss_for_distribution`), which is right for equal shares only. With
the share `n_i / n` of replica i in place of `1 / R`, the sum over replicas of `share_i * mean_i` is the mean over
the global batch; regularization losses, equal on every replica, still add up to once; a replica without rows adds
nothing, not even NaN. A loss that is a sum is not scaled, as before. Keras before 3.14 adds up activity regularizers
over the rows of a replica, but has them scaled; divided by the share first, they are the sum over the global batch.

With several outputs Keras logs the mean of each loss over batches, each batch once where its size is not static; so a
replica counts by its share there too.
"""

from __future__ import annotations

import threading

import tensorflow as tf

from tfring import step
from tfring._keras.seam import seam, version_of_keras

_local = threading.local()


def install():
    import keras
    from keras.src.layers.layer import Layer
    from keras.src.losses import loss as loss_module
    from keras.src.trainers import compile_utils

    @seam(compile_utils.CompileLoss, "call")
    def compile_loss(original, self, *args, **kwargs):
        running = step.current()
        _local.share = running.share if running else None
        try:
            return original(self, *args, **kwargs)
        finally:
            _local.share = None

    @seam(keras.metrics.Mean, "update_state")
    def mean_of_outputs_loss(original, self, values, sample_weight=None):
        if sample_weight is None and getattr(_local, "share", None) is not None:
            sample_weight = tf.cast(_local.share, self.dtype)
        return original(self, values, sample_weight=sample_weight)

    @seam(loss_module, "reduce_values")
    def reduce_values(original, values, sample_weight=None, reduction="sum_over_batch_size"):
        # Eagerly Keras leaves the losses of a replica without rows unreduced, a vector of none, and its mean is NaN.
        if step.current() is not None and reduction not in (None, "none") and tuple(values.shape) == (0,):
            return tf.reduce_sum(values)
        return original(values, sample_weight=sample_weight, reduction=reduction)

    def by_share(operation):
        def replacement(original, value):
            running = step.current()
            if running is None or running.share is None:
                return original(value)
            value = tf.convert_to_tensor(value)
            return operation(value, tf.cast(running.share, value.dtype))

        return replacement

    seam(loss_module, "scale_loss_for_distribution")(by_share(tf.math.multiply_no_nan))
    seam(loss_module, "unscale_loss_for_distribution")(by_share(tf.math.divide_no_nan))
    if version_of_keras() < (3, 14):
        Layer.activity_regularizer = _SummedRegularizer()


class _SummedRegularizer:
    """In place of the attribute `Layer.activity_regularizer`: within a step what it gives is divided by the share."""

    def __get__(self, layer, owner=None):
        if layer is None:
            return self
        regularizer = layer.__dict__.get("activity_regularizer")
        running = step.current()
        if regularizer is None or running is None or running.share is None:
            return regularizer

        def summed(activity):
            loss = tf.convert_to_tensor(regularizer(activity))
            return tf.math.divide_no_nan(loss, tf.cast(running.share, loss.dtype))

        return summed

    def __set__(self, layer, regularizer):
        layer.__dict__["activity_regularizer"] = regularizer
