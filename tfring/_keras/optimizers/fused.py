"""Updates that compute the same as Keras with less memory traffic.

**Adam** in Keras is about twelve operations on whole tensors, most of which make a new tensor: large tables spend most
of a step there. Here it is one operation, which reads and writes the weight and each slot once. It computes element by
element what Keras does, in the same order, so the bits are the same. The gradient of a table stays the rows that the
ring has summed; for the other rows, whose momenta continue, it is zero and is not stored.

**Adagrad** in Keras takes the root of a whole table's accumulator, even if few rows have a gradient. Rows without one
do not change, so here only the others are read.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfring._keras.optimizers.ring_optimizer import RingOptimizer
from tfring.cross_device_ops import values_of
from tfring.ring import library

_MOST_THREADS = 4  # Adam here runs on one thread, Keras' operations on all of TensorFlow's


class RingAdam(keras.optimizers.Adam, RingOptimizer):
    """Adam and AdamW in one native operation."""

    _known_factors: dict | None = None  # during an update

    def _backend_update_step(self, grads: Any, trainable_variables: Any, learning_rate: Any) -> None:
        object.__setattr__(self, "_known_factors", {})
        try:
            super()._backend_update_step(grads, trainable_variables, learning_rate)
        finally:
            object.__setattr__(self, "_known_factors", None)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        held = None if self.amsgrad else _held_by_worker(self, variable, "_momentums", "_velocities")
        if held is None or not _suits(held[0]):
            return super().update_step(gradient, variable, learning_rate)
        from tfring.ring import ops

        weight, momentum, velocity = held
        if not _has_unique_ids(self, gradient):
            gradient = tf.convert_to_tensor(gradient)  # rows become dense too: the momenta of other rows continue
        gradient = tf.cast(gradient, weight.dtype)
        results = ops.adam(weight, momentum, velocity, gradient, self._factors(learning_rate, weight.dtype))
        for variable, value in zip((momentum, velocity, weight), results, strict=True):
            variable.assign(value)
        return None

    def _factors(self, learning_rate: Any, dtype: tf.DType) -> tf.Tensor:
        """Returns `[step size, 1 - beta_1, 1 - beta_2, epsilon]`, computed once per update for all its weights."""
        known = {} if self._known_factors is None else self._known_factors
        place = tf.compat.v1.get_default_graph(), dtype, id(learning_rate)
        if place not in known:
            step = tf.cast(self.iterations + 1, dtype)
            powers = [tf.pow(keras.ops.cast(beta, dtype), step) for beta in (self.beta_1, self.beta_2)]
            alpha = tf.cast(learning_rate, dtype) * tf.sqrt(1 - powers[1]) / (1 - powers[0])
            rest = [tf.constant(value, dtype) for value in (1 - self.beta_1, 1 - self.beta_2, self.epsilon)]
            # Keeps the learning rate alive. Otherwise a later one of the user's could have the same id.
            known[place] = learning_rate, tf.stack([alpha, *rest])
        return known[place][1]


class RingAdagrad(keras.optimizers.Adagrad, RingOptimizer):
    """Adagrad that reads only the rows of a sparse gradient, if the ring has summed them."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        is_sparse = _has_unique_ids(self, gradient)
        held = _held_by_worker(self, variable, "_accumulators") if is_sparse else None
        if held is None:
            return super().update_step(gradient, variable, learning_rate)
        weight, accumulator = held
        ids, values = gradient.indices, tf.cast(gradient.values, weight.dtype)
        sums = tf.gather(accumulator, ids) + tf.square(values)
        accumulator.scatter_update(tf.IndexedSlices(sums, ids))
        change = tf.cast(learning_rate, weight.dtype) * values / tf.sqrt(sums + self.epsilon)
        weight.scatter_sub(tf.IndexedSlices(change, ids))
        return None


def _has_unique_ids(optimizer: Any, gradient: Any) -> bool:
    """Returns True for IndexedSlices that the ring has summed."""
    update = optimizer._current_update
    return isinstance(gradient, tf.IndexedSlices) and update is not None and update.has_each_id_once


def _held_by_worker(optimizer: Any, variable: Any, *slots: str) -> list[tf.Variable] | None:
    """Returns TensorFlow's variables of a weight and its slots; None unless a ring's worker holds one of each."""
    if optimizer._ring is None:
        return None
    index = optimizer._get_variable_index(variable)
    every = [variable, *(getattr(optimizer, name)[index] for name in slots)]
    held = [values_of(each.value if isinstance(each, keras.Variable) else each) for each in every]
    is_one = all(len(values) == 1 and isinstance(values[0], tf.Variable) for values in held)
    return [values[0] for values in held] if is_one else None


def _suits(weight: tf.Variable) -> bool:
    """Returns whether the native operation supports a weight, and is faster on one thread than Keras on all."""
    if not library.OPS.exists() or "GPU" in weight.device or weight.dtype not in (tf.float32, tf.float64):
        return False
    from tfring.ring import ops

    return ops.num_threads("intra") <= _MOST_THREADS
