"""`all_reduce` and `all_gather` of a replica within a step: gradients of replicas are weighted by their shares.

In TensorFlow the gradient of a sum over replicas is the sum of their gradients. In a step, each replica's gradient is
weighted by its share only in the optimizer. A gradient that passes through such a sum is therefore weighted before it,
and the result is divided by the share of the replica it belongs to. Keras' `BatchNormalization(synchronized=True)` is
one user. In a step that is traced as that of one process, both functions return their argument.
A replica without rows computes on a padding row that does not count, so the values it passes do not count either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfring import _tf, step
from tfring._keras.seam import state_of_thread, use_thread_state


class RingReplicaContext(_tf.MirroredReplicaContext):
    """The replica context of a RingStrategy."""

    @staticmethod
    def around(fn: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function of a replica that runs in such a context instead of the one that TensorFlow creates.

        TensorFlow gives each replica a thread. These threads get the thread-local state of Keras of the calling thread.
        """
        state = state_of_thread()

        def in_context(*args: Any, **kwargs: Any) -> Any:
            _enter()
            with use_thread_state(state):
                return fn(*args, **kwargs)

        return in_context

    def all_reduce(self, reduce_op: tf.distribute.ReduceOp | str, value: Any, options: Any = None) -> Any:
        if _is_of_all_rows():
            tf.distribute.ReduceOp(reduce_op.upper() if isinstance(reduce_op, str) else reduce_op)  # raises if invalid
            return tf.nest.map_structure(_as_tensor, value)
        collective = super().all_reduce
        return _weighed(
            self, value, step.Step.zero_if_empty, lambda value: collective(reduce_op, value, options)
        )

    def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:
        if _is_of_all_rows():
            return tf.nest.map_structure(_as_tensor, value)

        def rows(running: step.Step, value: Any) -> Any:
            value = tf.convert_to_tensor(value)
            if value.dtype.is_integer and value.shape == [1]:  # a size, which the gradient of all_gather gathers
                return value
            return running.drop_if_empty(value, axis)

        collective = super().all_gather
        return _weighed(self, value, rows, lambda value: collective(value, axis, options))


def _enter() -> None:
    tf.distribute.get_replica_context().__class__ = RingReplicaContext


def _as_tensor(value: Any) -> Any:
    return value if isinstance(value, tf.IndexedSlices) else tf.convert_to_tensor(value)


def _is_of_all_rows() -> bool:
    """Returns True in a step that is traced as that of one replica with all rows."""
    running = step.current()
    return running is not None and running.is_plain


def _weighed(
    context: tf.distribute.ReplicaContext,
    value: Any,
    mask: Callable[[step.Step, Any], Any],
    collective: Callable[[Any], Any],
) -> Any:
    """Returns `collective(value)`; a replica without rows passes only what `mask(step, value)` leaves of its value."""
    running = step.weighing()
    if running is None:
        return collective(value)

    def own(value: Any) -> Any:
        return value if isinstance(value, tf.IndexedSlices) else mask(running, value)

    value = _backward(running.unweigh, tf.nest.map_structure(own, value))
    flat = tf.nest.flatten(value)
    if any(isinstance(each, tf.IndexedSlices) for each in flat):
        return _backward(running.weigh, collective(value))

    def of_flat(*flat: Any) -> Any:
        return collective(tf.nest.pack_sequence_as(value, flat))

    return _backward(running.weigh, context.strategy.ring.control.call_in_order(of_flat, *flat))


def _backward(operation: Callable[[Any], Any], values: Any) -> Any:
    """Returns the same values, and applies `operation` to their gradients."""

    def pass_on(value: Any) -> Any:
        if isinstance(value, tf.IndexedSlices):
            return value
        value = tf.convert_to_tensor(value)
        return _tf.with_gradient(tf.identity, operation)(value) if value.dtype.is_floating else value

    return tf.nest.map_structure(pass_on, values)
