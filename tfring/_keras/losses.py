"""Losses of replicas that compute steps of their own rows: each stands for the mean over replicas, by their rows.

```
replica i   rows ─► loss_i, whatever it is ─► gradient_i ─► optimizer: sum share_i * gradient_i      share_i = n_i / n
```

Means over rows need nothing more: the sum of `share_i * mean_i` is the mean over the global batch; a regularizer,
equal on every replica, weighs to itself. Keras' division by the number of replicas is left out. In microbatches of a
pipeline, and where workers train by themselves, sums over rows are divided by the share: `reduction="sum"`, and vectors
of a value a row, which Keras or the tape sum (`reduction=None`, `add_loss`). The mean over unmasked elements, or by the
sum of weights, needs a replica's rows in one part. A step that is edited, or of the whole batch, is that of one
process, and nothing of this is done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras.src.layers.layer import Layer
from keras.src.losses import loss as loss_module
from keras.src.trainers.compile_utils import CompileLoss

from tfring import _tf, step
from tfring._keras.seam import put, seam
from tfring.recognition import current_ring, ring_in_scope


def install() -> None:
    _replace_scaling()
    _replace_reductions()
    put(Layer, "_losses", _AddedLosses())


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
        # A mean of no rows is NaN.
        return value if running.is_plain else tf.where(running.active, value, tf.zeros_like(value))

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
    running = step.of_own_rows()
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
    """Returns what one of `model.losses` adds to the loss, where Keras would add `total`.

    A vector that a layer has added is of the rows of a replica. That of a regularizer is equal on all replicas.
    """
    running = step.of_own_rows()
    if running is None or not len(loss.shape):
        return total
    return running.unweigh(total) if any(loss is each for added in running.added.values() for each in added) else total


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


# -- reduction ---------------------------------------------------------------------------------------------------------


def _replace_reductions() -> None:
    @seam(loss_module, "apply_mask")
    def apply_mask(
        original: Callable[..., Any], sample_weight: Any, mask: Any, dtype: Any, reduction: str | None
    ) -> Any:
        running = step.of_own_rows()
        if running is not None and mask is not None and reduction in ("mean", "sum_over_batch_size"):
            running.refuse_in_parts("a mean by the unmasked elements of a batch")
        return original(sample_weight, mask, dtype, reduction)

    @seam(loss_module, "reduce_values")
    def reduce_values(
        original: Callable[..., Any],
        values: Any,
        sample_weight: Any = None,
        reduction: str | None = "sum_over_batch_size",
    ) -> Any:
        running = step.of_own_rows()
        if running is None or reduction in (None, "none") or not len(values.shape):
            return original(values, sample_weight, reduction)
        if reduction == "mean_with_sample_weight" and sample_weight is not None:
            running.refuse_in_parts("a mean by the sample weights of a batch")
        if tuple(values.shape) == (0,):
            # Eagerly Keras leaves the losses of a replica without rows unreduced, a vector of none.
            return tf.reduce_sum(values)
        loss = original(values, sample_weight, reduction)
        return running.unweigh(loss) if reduction == "sum" else loss
