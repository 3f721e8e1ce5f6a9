"""Makes losses of replicas that compute steps of their own rows stand for the mean over replicas, weighted by rows.

```
replica i   rows ─► loss_i, whatever it is ─► gradient_i ─► optimizer: sum share_i * gradient_i      share_i = n_i / n
```

Means over rows need no correction: the sum of `share_i * mean_i` is the mean over the global batch. A regularizer is
equal on every replica, so its weighted mean is itself. Keras divides by the number of replicas, which is 1 in a step.
In microbatches of a pipeline, and if workers train by themselves, sums over rows are divided by the share: those of
`reduction="sum"`, and vectors with one value per row, which Keras or the tape sums (`reduction=None`, `add_loss`). The
mean over unmasked elements, or by the sum of weights, needs a replica's rows in one part. An edited step, or a step of
the whole batch, is that of one process, and none of this is done.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from keras.src.layers.layer import Layer
from keras.src.losses import loss as loss_module
from keras.src.trainers.compile_utils import CompileLoss

from tfring import _tf, step
from tfring._keras.seam import put, seam
from tfring.runtime import current_ring


def install() -> None:
    put(Layer, "_losses", _AddedLosses())

    @seam(loss_module, "reduce_weighted_values")
    def reduce_weighted_values(
        original: Callable[..., Any],
        values: Any,
        sample_weight: Any = None,
        mask: Any = None,
        reduction: str | None = "sum_over_batch_size",
        dtype: Any = None,
    ) -> Any:
        running = step.current_own_rows_step()
        with _one_replica_scope():
            loss = original(values, sample_weight, mask, reduction, dtype)
        if running is None or reduction in (None, "none"):
            return loss
        if mask is not None and reduction in ("mean", "sum_over_batch_size"):
            running.refuse_in_parts("A mean over the unmasked elements of a batch")
        if not len(tf.convert_to_tensor(values).shape):
            return loss
        if reduction == "mean_with_sample_weight" and (sample_weight is not None or mask is not None):
            running.refuse_in_parts("A mean weighted by the sample weights of a batch")
        if tuple(loss.shape) == (0,):
            # In eager mode Keras leaves the losses of a replica without rows unreduced: an empty vector.
            return tf.reduce_sum(loss)
        return running.unweigh(loss) if reduction == "sum" else loss

    @seam(_tf.nn_impl_distribute, "compute_average_loss")
    def average(
        original: Callable[..., Any], per_example_loss: Any, sample_weight: Any = None, global_batch_size: Any = None
    ) -> Any:
        running = step.current_own_rows_step()
        loss = original(per_example_loss, sample_weight, global_batch_size)
        return loss if running is None or global_batch_size is None else running.unweigh(loss)


class RingCompileLoss(CompileLoss):
    """Divides a vector of losses, which is then summed, by the share of the replica."""

    @classmethod
    def adopt(cls, model: Any) -> None:
        """Turns the loss of a model that was just compiled into a RingCompileLoss."""
        if model._compile_loss is not None:
            model._compile_loss.__class__ = cls

    def call(self, *args: Any, **kwargs: Any) -> Any:
        with _one_replica_scope():
            return scale_row_losses(super().call(*args, **kwargs))


@contextlib.contextmanager
def _one_replica_scope() -> Iterator[None]:
    """Makes a loss in the scope, outside of any replica, that of all its rows: no replicas are summed."""
    in_no_step = current_ring() is not None and tf.distribute.in_cross_replica_context()
    with step.one_replica() if in_no_step else contextlib.nullcontext():
        yield


def scale_row_losses(loss: Any) -> Any:
    """Scales a vector, which the tape sums, so that its mean over replicas is the sum. A scalar stays as it is."""
    running = step.current_own_rows_step()
    if running is None or loss is None or undivided_loss(loss) is not loss:
        return loss
    loss = tf.convert_to_tensor(loss)
    if not loss.shape.rank:
        return loss
    divided = running.unweigh(loss)
    divided._tfring_before_division = loss
    return divided


def undivided_loss(loss: Any) -> Any:
    """Returns a loss as logs show it."""
    return getattr(loss, "_tfring_before_division", loss)


def additional_loss(aggregate: Callable[[Any], Any], loss: Any) -> Any:
    """Returns the term that one of `model.losses` adds to the loss, in place of Keras' `aggregate(loss)`.

    A vector that a layer has added belongs to the rows of a replica. That of a regularizer is equal on all replicas.
    """
    running = step.current_own_rows_step()
    with _one_replica_scope():
        total = aggregate(loss)
    if running is None or not len(loss.shape):
        return total
    return running.unweigh(total) if any(loss is each for added in running.added.values() for each in added) else total


class _AddedLosses:
    """Replaces the attribute `Layer._losses`: within a step it is what this replica has added to the loss.

    Replicas of a worker share the layers and are traced in turns, which change whenever they exchange something.
    """

    def __get__(self, layer: Any, owner: type | None = None) -> Any:
        if layer is None:
            return self
        running = step.current()
        if running is not None:  # after an eager step those of its last replica stay, as in Keras
            layer.__dict__["_losses"] = running.added.setdefault(id(layer), [])
        if "_losses" not in layer.__dict__:
            raise AttributeError("_losses")
        return layer.__dict__["_losses"]

    def __set__(self, layer: Any, losses: list) -> None:
        layer.__dict__["_losses"] = losses
