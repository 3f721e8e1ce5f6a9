"""Classes that Keras' own derive from in the place of Keras' bases for TensorFlow (docs/decisions/0021).

```
keras.Variable ─► RingVariable ─► Variable of Keras' TensorFlow backend
keras.Layer ─► RingLayer ─► TFLayer
keras.Optimizer ─► ScopedOptimizer ─► TFOptimizer
keras.Model ─► RingTrainer (trainer.py) ─► TensorFlowTrainer
```

So methods of a user's class come first and reach these by `super()`. They act on objects of a RingStrategy and of
sharded layers alone.
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
    """Aggregates what replicas write to a variable in a step, and takes and shows full values of a shard.

    One that Keras makes later, after the trace of a layer without `build`, is then made in the scope that was open.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self._value is None:
            self._tfring_made_in = current_ring()

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
            assert ring is not None  # which has the shards
            with ring.variables_of_worker():
                return super()._deferred_initialize()

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        """Returns what files hold of a layer's weight."""
        found = slots.gathered(self)
        return super().__array__(*args, **kwargs) if found is None else found

    def __float__(self) -> float:
        return float(self.numpy()) if self._is_distributed_scalar() else super().__float__()

    def __int__(self) -> int:
        return int(self.numpy()) if self._is_distributed_scalar() else super().__int__()

    def _is_distributed_scalar(self) -> bool:
        # Which is no number to Python.
        return not self.ndim and isinstance(self._value, tf.distribute.DistributedValues)


class RingLayer(TFLayer):
    """Builds a layer in the scope it was made in; TensorFlow does not write the shards of one."""

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
            raise slots.refusal_to_write("weight", sharded, self, save_type)
        return super()._trackable_children(save_type, **kwargs)


class ScopedOptimizer(TFOptimizer):
    """Makes an optimizer of the scope, or of sharded tables, a RingOptimizer; rejects one made outside."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # One of no kind is what Keras makes, as it reads or writes a file, to see which attributes optimizers have. Its
        # variables are no business of other ranks: they are in a graph, in which no scope was entered.
        is_example = type(self) is keras.optimizers.Optimizer and current_ring() is not None
        with tf.Graph().as_default() if is_example else contextlib.nullcontext():
            super().__init__(*args, **kwargs)
        if ring_of(self._distribution_strategy) is not None:
            join_ring(self)
        else:
            leave_ring(self)  # one made by `type(optimizer)(...)` of a ring's

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        if not isinstance(self, RingOptimizer):
            scope.warn_of_optimizer(self)
        super().apply(grads, trainable_variables)

    def build(self, variables: Sequence[Any]) -> None:
        if isinstance(self, RingOptimizer) or not adoption.belongs_to_ring(self, variables):
            return super().build(variables)
        join_ring(self)
        return RingOptimizer.build(self, variables)
