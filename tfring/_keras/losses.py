"""Losses of replicas: each stands for the mean over replicas, weighted by their rows.

```
replica i   rows ─► loss_i, whatever it is ─► gradient_i ─► optimizer: sum share_i * gradient_i      share_i = n_i / n
```

Means over rows need nothing more: the sum of `share_i * mean_i` is the mean over the global batch; a regularizer,
equal on every replica, weighs to itself. Keras' division by the number of replicas is left out. What is known to be
something else is made such a mean:

* a sum over rows is divided by the share: `reduction="sum"`, and vectors of a value a row, which Keras or the tape sum
  (`reduction=None`, `add_loss`);
* the mean over unmasked elements, or by the sum of the weights, divides by what all replicas count;
* Keras before 3.14 adds up activity regularizers over the rows of a replica: a sum as well;
* `tf.nn.compute_average_loss` and `tf.nn.scale_regularization_loss` divide by the replicas whose gradients are summed.

Losses that compare rows, or are a ratio of sums, cannot be made one: an analysis of the step names them (exactness.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras.src.layers.layer import Layer
from keras.src.losses import loss as loss_module
from keras.src.trainers.compile_utils import CompileLoss

from tfring import _tf, partition, step
from tfring._keras.seam import put, seam, version_of_keras
from tfring.cross_device_ops import values_of
from tfring.recognition import current_ring, ring_in_scope


def install() -> None:
    _replace_scaling()
    _replace_reductions()

    @seam(Layer, "_get_regularization_losses")
    def regularization_losses(original: Callable[..., Any], self: Any) -> list:
        losses = original(self)
        return [tf.reduce_sum(loss) for loss in losses] if step.weighing() else losses  # equal on all replicas

    put(Layer, "_losses", _AddedLosses())
    if version_of_keras() < (3, 14):
        put(Layer, "activity_regularizer", _SummedRegularizer())


class RingCompileLoss(CompileLoss):
    """Divides a vector of losses, whose elements are added up, by the share of the replica."""

    @classmethod
    def adopt(cls, model: Any) -> None:
        """Makes the loss of a model that was just compiled a ring's."""
        if model._compile_loss is not None:
            model._compile_loss.__class__ = cls

    def call(self, *args: Any, **kwargs: Any) -> Any:
        return per_row_as_sum(super().call(*args, **kwargs))


# -- scale -------------------------------------------------------------------------------------------------------------


def _replace_scaling() -> None:
    @seam(loss_module, "scale_loss_for_distribution")
    def scale(original: Callable[..., Any], value: Any) -> Any:
        return value if step.weighing() or _runs_in_no_step() else original(value)

    @seam(loss_module, "unscale_loss_for_distribution")
    def unscale(original: Callable[..., Any], value: Any) -> Any:
        running = step.weighing()
        if running is None:
            return value if _runs_in_no_step() else original(value)
        value = tf.convert_to_tensor(before_division(value))
        if running.is_plain:
            return value
        return tf.where(running.active, value, tf.zeros_like(value))  # a mean of no rows is NaN

    @seam(_tf.nn_impl_distribute, "compute_average_loss")
    def average(
        original: Callable[..., Any], per_example_loss: Any, sample_weight: Any = None, global_batch_size: Any = None
    ) -> Any:
        loss = original(per_example_loss, sample_weight, global_batch_size)
        running = step.weighing()
        if running is None:
            return loss
        if global_batch_size is not None:
            return loss if running.is_plain else running.unweigh(loss)
        return loss * ring_in_scope().num_replicas_in_sync

    @seam(_tf.nn_impl_distribute, "scale_regularization_loss")
    def regularization(original: Callable[..., Any], regularization_loss: Any) -> Any:
        loss = original(regularization_loss)
        return loss * ring_in_scope().num_replicas_in_sync if step.weighing() else loss


def _runs_in_no_step() -> bool:
    """Returns True in the scope outside of any replica: a loss is that of all its rows, and no replicas add up."""
    return current_ring() is not None and tf.distribute.in_cross_replica_context()


def per_row_as_sum(loss: Any) -> Any:
    """Makes a vector, whose elements the tape adds up, one whose mean over replicas is the sum; a scalar stays."""
    running = step.repairing()
    if running is None or loss is None or before_division(loss) is not loss:
        return loss
    loss = tf.convert_to_tensor(loss)
    if not loss.shape.rank:
        return loss
    divided = running.unweigh(loss)
    divided._tfring_before_division = loss
    return divided


def before_division(loss: Any) -> Any:
    """A loss as logs show it."""
    return getattr(loss, "_tfring_before_division", loss)


def additional_loss(total: Any, loss: Any) -> Any:
    """Returns what `add_loss(loss)` adds to the loss of a model, where Keras would add `total`."""
    running = step.repairing()
    return running.unweigh(total) if running and len(loss.shape) else total


class _AddedLosses:
    """In place of the attribute `Layer._losses`: within a step what this replica has added to the loss.

    Replicas of a worker share the layers and are traced by turns, which change where they exchange something.
    """

    def __get__(self, layer: Any, owner: type | None = None) -> Any:
        if layer is None:
            return self
        running = step.current()
        if running is not None:  # and behind an eager step its last replica's stay, as Keras' do
            layer.__dict__["_losses"] = running.added.setdefault(id(layer), [])
        if "_losses" not in layer.__dict__:
            raise AttributeError("_losses")
        return layer.__dict__["_losses"]

    def __set__(self, layer: Any, losses: list) -> None:
        layer.__dict__["_losses"] = losses


class _SummedRegularizer:
    """In place of the attribute `Layer.activity_regularizer`: within a step what it gives is divided by the share."""

    def __get__(self, layer: Any, owner: type | None = None) -> Any:
        if layer is None:
            return self
        regularizer = layer.__dict__.get("activity_regularizer")
        running = step.repairing()
        if regularizer is None or running is None:
            return regularizer
        return lambda activity: running.unweigh(tf.reduce_sum(regularizer(activity)))

    def __set__(self, layer: Any, regularizer: Any) -> None:
        layer.__dict__["activity_regularizer"] = regularizer


# -- reduction ---------------------------------------------------------------------------------------------------------


def _replace_reductions() -> None:
    @seam(loss_module, "apply_mask")
    def apply_mask(
        original: Callable[..., Any], sample_weight: Any, mask: Any, dtype: Any, reduction: str | None
    ) -> Any:
        weight = original(sample_weight, mask, dtype, reduction)
        running = step.repairing()
        if running is None or mask is None or reduction not in ("mean", "sum_over_batch_size"):
            return weight
        # Keras made it the mean over this replica's unmasked elements.
        mine = tf.reduce_sum(tf.cast(mask, tf.float64))
        factor = running.unweigh(tf.math.divide_no_nan(mine, _over_replicas(running, mine, "unmasked elements")))
        return partition.declare(weight * tf.cast(factor, weight.dtype), "rows")

    @seam(loss_module, "reduce_values")
    def reduce_values(
        original: Callable[..., Any],
        values: Any,
        sample_weight: Any = None,
        reduction: str | None = "sum_over_batch_size",
    ) -> Any:
        running = step.current()
        if running is None or running.is_plain or reduction in (None, "none"):
            return original(values, sample_weight, reduction)
        if not len(values.shape):
            return original(values, sample_weight, reduction)
        if running.share is not None and reduction == "mean_with_sample_weight" and sample_weight is not None:
            total = _over_replicas(running, tf.reduce_sum(tf.cast(sample_weight, tf.float64)), "sample weights")
            return running.unweigh(tf.math.divide_no_nan(tf.reduce_sum(values), tf.cast(total, values.dtype)))
        if tuple(values.shape) == (0,):
            # Eagerly Keras leaves the losses of a replica without rows unreduced, a vector of none.
            return tf.reduce_sum(values)
        loss = original(values, sample_weight, reduction)
        return running.unweigh(loss) if reduction == "sum" else loss


def _over_replicas(running: step.Step, value: tf.Tensor, name: str) -> tf.Tensor:
    """The sum of a scalar over all replicas, without a gradient."""
    running.refuse_in_parts(f"a mean by the {name} of a batch")
    extended = ring_in_scope().extended

    def on_worker(values: Any) -> tf.Tensor:
        [total] = extended.control.all_reduce([tf.add_n(values_of(values))], name=name)
        return total

    mine = running.zero_if_empty(tf.stop_gradient(value))
    mine = partition.expect(mine, "sum", f"the {name} of all replicas")
    return partition.declare(extended.cross_replica(on_worker, mine), "full")
