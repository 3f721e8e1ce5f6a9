"""Base classes that Keras' own classes derive from instead of Keras' TensorFlow bases (docs/decisions/0021).

```
keras.Variable ─► RingVariable ─► Variable of Keras' TensorFlow backend
keras.Layer ─► RingLayer ─► TFLayer
keras.Optimizer ─► ScopedOptimizer ─► TFOptimizer
keras.Model ─► RingTrainer (trainer.py) ─► TensorFlowTrainer
```

Methods of a user's class therefore come first and reach these by `super()`. The base classes act only on
objects of a RingStrategy and of sharded layers.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.tensorflow import core
from keras.src.backend.tensorflow.layer import TFLayer
from keras.src.backend.tensorflow.optimizer import TFOptimizer

from tfring._keras import scope, sharding, state
from tfring._keras.optimizers import adoption
from tfring._keras.optimizers.optimizer_class import join_ring, leave_ring
from tfring._keras.optimizers.ring_optimizer import RingOptimizer
from tfring._keras.seam import extend
from tfring._keras.sharding import large, slots, stores
from tfring.runtime import current_ring, ring_of


def install() -> None:
    extend(keras.Variable, RingVariable)
    extend(keras.layers.Layer, RingLayer)
    extend(keras.optimizers.Optimizer, ScopedOptimizer)


class RingVariable(core.Variable):
    """Aggregates what replicas write to a variable in a step, and accepts and shows the full value of a shard.

    If Keras makes the variable later, after the trace of a layer without `build`, it is made in the scope that was open
    at construction.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self._value is None:
            self._tfring_made_in = current_ring()

    def _initialize(self, value: Any) -> None:
        with state.made_by_keras():
            super()._initialize(value)

    @property
    def shape(self) -> tf.TensorShape:
        spread = sharding.sharding_of(self) if sharding.shows_full_shapes() else None
        return super().shape if spread is None else tf.TensorShape(spread.shape)

    def assign(self, value: Any) -> Any:
        if isinstance(value, stores.Stored):
            mark = sharding.mark_of(self)
            if mark.sharding is not None and value.shape == mark.sharding.shape == mark.sharding.lined_up:
                return large.write_shard(self, mark.sharding, mark.rank, value)
            value = np.asarray(value)
        return super().assign(sharding.shard_of(self, value))

    def assign_add(self, value: Any) -> Any:
        with state.adding_to(self):
            return super().assign_add(value)

    def assign_sub(self, value: Any) -> Any:
        with state.adding_to(self):
            return super().assign_sub(value)

    def _direct_assign(self, value: Any) -> None:
        state.write(self, value, super()._direct_assign)

    def _deferred_initialize(self) -> None:
        with scope.scope_of(self):
            if sharding.sharding_of(self) is None:
                return super()._deferred_initialize()
            ring = current_ring()
            assert ring is not None  # the ring that has the shards
            with ring.variables_of_worker():
                return super()._deferred_initialize()

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        """Returns the value that files hold for a layer's weight."""
        found = slots.gathered(self)
        return super().__array__(*args, **kwargs) if found is None else found

    def __float__(self) -> float:
        return float(self.numpy()) if self._is_distributed_scalar() else super().__float__()

    def __int__(self) -> int:
        return int(self.numpy()) if self._is_distributed_scalar() else super().__int__()

    def _is_distributed_scalar(self) -> bool:
        # Python cannot convert such a value to a number.
        return not self.ndim and isinstance(self._value, tf.distribute.DistributedValues)


class RingLayer(TFLayer):
    """Builds a layer in the scope it was made in, and prevents TensorFlow from writing its shards."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        layer, ring = super().__new__(cls, *args, **kwargs), current_ring()
        if ring is not None:
            build = layer.build

            @functools.wraps(build)
            def build_in_scope(*args: Any, **kwargs: Any) -> Any:
                with scope.scope_of(layer):
                    return build(*args, **kwargs)

            vars(layer).update(build=build_in_scope, _tfring_made_in=ring)
        return layer

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> Any:
        sharded = [*filter(sharding.sharding_of, self.weights)]
        if sharded:
            raise slots.shard_write_error("weight", sharded, self, save_type)
        return super()._trackable_children(save_type, **kwargs)


class ScopedOptimizer(TFOptimizer):
    """Turns optimizers of the scope or of sharded tables into RingOptimizers; rejects others for a scope's weights."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # When Keras reads or writes a file, it makes a plain Optimizer to see which attributes optimizers have. Its
        # variables do not concern other ranks: they are made in a graph in which no scope was entered.
        is_example = type(self) is keras.optimizers.Optimizer and current_ring() is not None
        with tf.Graph().as_default() if is_example else contextlib.nullcontext():
            super().__init__(*args, **kwargs)
        if ring_of(self._distribution_strategy) is not None:
            join_ring(self)
        else:
            leave_ring(self)  # one made by `type(optimizer)(...)` from a ring's

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        if not isinstance(self, RingOptimizer):
            scope.warn_of_optimizer(self)
        super().apply(grads, trainable_variables)

    def build(self, variables: Sequence[Any]) -> None:
        if isinstance(self, RingOptimizer) or not adoption.belongs_to_ring(self, variables):
            return super().build(variables)
        join_ring(self)
        return RingOptimizer.build(self, variables)
