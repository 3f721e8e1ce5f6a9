"""Gathers the rows of all replicas, with gradients, for losses that compare the rows of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfring import step
from tfring.cross_device_ops import values_of
from tfring.errors import ConfigurationError
from tfring.runtime import Ring, current_ring
from tfring.step import branches


def gather_for_loss(tensors: Any) -> Any:
    """Gathers the rows of all replicas, for a loss that is not a mean over rows: contrastive, in-batch negatives, Dice.

    Call it on every replica, in the loss, `compute_loss` or `train_step`, with the tensors that the loss compares:

    ```python
    def dice(y_true, y_pred):
        return keras.losses.dice(*tfring.gather_for_loss((y_true, y_pred)))
    ```

    In a step of Keras the gradient is that of the whole batch, both if every replica computes the same loss from all
    rows and if it computes the mean over its own rows, each compared with all rows. In a loop of your own, where
    gradients are summed, the gradient is the sum over replicas of the gradients of their losses.

    Args:
      tensors: A tensor of shape `[rows, ...]` of any numeric dtype or bool, or a nested structure of such tensors and
        None. Replicas may have different numbers of rows, possibly none.

    Returns:
      The same structure, with tensors of shape `[rows of all replicas, ...]` in the order of replicas, which is the
      order of the batch. Float tensors have gradients. With one replica, and outside of replicas, the tensors are
      returned as they are.

    Raises:
      TypeError: If a tensor is ragged, sparse or of strings.
      ValueError: If a tensor is a scalar.

    >>> gather_for_loss({"anchors": tf.constant([[1.0], [2.0]]), "labels": tf.constant([0, 1])})["labels"].numpy()
    array([0, 1], dtype=int32)
    """
    ring, running = current_ring(), step.current()
    if ring is not None and ring.trains_alone:
        raise ConfigurationError(
            "gather_for_loss was called with synchronization=Delayed(...), where a worker computes its loss from its "
            "own rows. Leave it out, or train without Delayed."
        )
    if running is not None:
        running.refuse_in_parts("gather_for_loss")
    flat = [_checked(t) for t in tf.nest.flatten(tensors)]
    has_all_rows = running is not None and running.is_plain
    has_others = ring is not None and ring.num_replicas > 1 and not has_all_rows
    if ring is not None and has_others and tf.distribute.get_replica_context() is not None:
        present = [i for i, t in enumerate(flat) if t is not None]
        gathered = _gather(ring, [flat[i] for i in present])
        for i, t in zip(present, gathered, strict=True):
            flat[i] = t
    return tf.nest.pack_sequence_as(tensors, flat)


def _checked(tensor: Any) -> tf.Tensor | None:
    if tensor is None:
        return None
    if isinstance(tensor, (tf.RaggedTensor, tf.SparseTensor, tf.IndexedSlices)):
        raise TypeError(
            f"gather_for_loss got a {type(tensor).__name__}, but takes only dense tensors. Gather its components, or "
            "make it dense (`to_tensor`, `tf.sparse.to_dense`)."
        )
    tensor = tf.convert_to_tensor(tensor)
    if tensor.shape.rank == 0:
        raise ValueError(f"gather_for_loss got a scalar, {tensor}, but takes tensors [rows, ...].")
    return tensor


def _gather(ring: Ring, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    running = step.current() or step.Step()
    control, control_ops = ring.control, ring.control_ops
    replica = tf.distribute.get_replica_context().replica_id_in_sync_group

    def all_counts(counts: Any) -> tf.Tensor:
        with branches.checked(ring, running):
            return control.gather_equal(tf.stack(values_of(counts)), name="gather_for_loss/rows")

    def all_rows(values: Any) -> tf.Tensor:
        return control_ops.gather_over_workers(tf.concat(values_of(values), 0), 0, name="gather_for_loss")

    def total(gradients: Any) -> tf.Tensor:
        [summed] = control.all_reduce([tf.add_n(values_of(gradients))], name="gather_for_loss/gradient")
        return summed

    counts = tf.stack([tf.shape(running.drop_if_empty(t), tf.int64)[0] for t in tensors])
    counts = ring.cross_replica(all_counts, counts)

    # One collective in each tf.custom_gradient: it ties its outputs together, and an order that Grappler sees through
    # such a tie is lost once Grappler takes the tie apart.
    def gathered(tensor: tf.Tensor, counts: tf.Tensor) -> tf.Tensor:
        if not tensor.dtype.is_floating:
            return tf.identity(ring.cross_replica(all_rows, running.drop_if_empty(tensor)))

        @tf.custom_gradient
        def with_gradient(x: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
            def gradient(upstream: tf.Tensor) -> tf.Tensor:
                everyone = ring.cross_replica(total, running.weigh(upstream))
                begin = tf.reduce_sum(counts[:replica])
                mine = running.unweigh(everyone[begin : begin + counts[replica]])
                rest = tf.shape(x, tf.int64)[0] - counts[replica]  # a replica without rows computes on a padding row
                return tf.ensure_shape(tf.pad(mine, [[0, rest], *[[0, 0]] * (x.shape.rank - 1)]), x.shape)

            return ring.cross_replica(all_rows, running.drop_if_empty(x)), gradient

        return control.call_in_order(with_gradient, tensor)

    return [gathered(t, counts[:, i]) for i, t in enumerate(tensors)]
