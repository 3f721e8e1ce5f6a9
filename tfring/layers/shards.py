"""Sharded weights of a layer, drawn as Keras draws full weights and saved in full."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfring import partition, step
from tfring._keras.sharding import InitialShard, ShardGroup, sharding_of, slots, stores
from tfring.errors import ConfigurationError
from tfring.sharding import shard_along

_SUMS = ("L1", "L2", "L1L2")  # regularizers whose value for the full weight is the sum over shards


class ShardedWeights(keras.layers.Layer):
    """A base class to put before a Keras layer: this worker holds shards of the weights named in `dimensions`.

    The layer's `build` requests full weights by `add_weight` with a name. Each is drawn in full, as one process draws
    it, and its shard is kept. Optimizers, files, `get_weights` and `set_weights` support shards; see
    `tfring/_keras/sharding/`.

    Attributes:
      shard_group: The ranks over which the layer is sharded.
      dimensions: A dict that maps the name of a weight to the dimension along which it is sharded.
    """

    shard_group = ShardGroup()
    dimensions: dict[str, int] = {}

    def add_weight(
        self,
        shape: Any = None,
        initializer: Any = None,
        *,
        name: str | None = None,
        regularizer: Any = None,
        **options: Any,
    ) -> Any:
        dimension = None if self.shard_group.is_alone or name is None else self.dimensions.get(name)
        add_weight = super().add_weight
        if dimension is None:
            return add_weight(shape, initializer, name=name, regularizer=regularizer, **options)
        sharding = shard_along(shape, dimension, self.shard_group.collectives.world_size, self.shard_group.axis)
        if not all(sharding.parts):
            raise ConfigurationError(
                f"{name!r} of {self.name!r} has shape {tuple(shape)}, too small along dimension {dimension} to give "
                f"each of {len(sharding.parts)} workers a shard. Use fewer workers along the {self.shard_group.axis} "
                "axis, or Keras' own layer."
            )
        if regularizer is not None:
            regularizer = _FullRegularizer(regularizer, self.shard_group, f"regularizer of {name}")
        initial = InitialShard(keras.initializers.get(initializer), sharding, self.shard_group)
        return self.shard_group.add_weight(add_weight, sharding, initial, name=name, regularizer=regularizer, **options)

    def save_own_variables(self, store: Any) -> None:
        """Saves full weights. All ranks call it, or are in `tfring.save` or `model.save` together."""
        if not any(map(sharding_of, self._own_variables())):
            return super().save_own_variables(store)
        for number, variable in enumerate(self._own_variables()):
            store[str(number)] = slots.gather_full(variable)
        return None

    def load_own_variables(self, store: Any) -> None:
        stored = set(store.keys())
        store = stores.InBlocks(store)
        for number, variable in enumerate(self._own_variables()):
            sharding = sharding_of(variable)
            if sharding is not None and str(number) in stored and tuple(store[str(number)].shape) != sharding.shape:
                raise ValueError(
                    f"The file has shape {tuple(store[str(number)].shape)} for {variable.name!r} of {self.name!r}, but "
                    f"its full value has shape {sharding.shape}."
                )
        super().load_own_variables(store)

    def _own_variables(self) -> list:
        return [*self._trainable_variables, *self._non_trainable_variables]


class _FullRegularizer(keras.regularizers.Regularizer):
    """Applies a regularizer to the full weight; each shard has its own gradient."""

    def __init__(self, regularizer: Any, group: ShardGroup, name: str) -> None:
        self._regularizer = regularizer
        self._group = group
        self._name = name

    def __call__(self, shard: Any) -> tf.Tensor:
        running = step.current()
        # The gradient of a shard of the data axis is not weighted again (`gradient_is_complete`): one per microbatch.
        part = running.part if running is not None and self._group.axis == "data" else None

        @tf.custom_gradient
        def summed(value: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
            def gradient(given: tf.Tensor) -> tf.Tensor:
                return given if part is None else given * tf.cast(part, given.dtype)

            return self._group.collectives.all_reduce([value], name=self._name)[0], gradient

        with partition.own():
            penalty = summed(self._regularizer(shard))
        if partition.is_noted():
            penalty = partition.expect_upstream(penalty, "same", "the gradient of a regularizer")
            penalty = partition.declare(penalty, "full")
        return penalty


def check_sharded_arguments(layer: keras.layers.Layer, **given: Any) -> None:
    """Raises ConfigurationError if an argument of `layer`, given by name, needs the full weight."""
    for name, value in given.items():
        kind = type(value)
        of_keras = kind is getattr(keras.regularizers, kind.__name__, None) or kind is keras.constraints.NonNeg
        if value is None or (of_keras and kind.__name__ in (*_SUMS, "NonNeg")):
            continue
        shown = getattr(value, "__name__", kind.__name__)
        raise ConfigurationError(
            f"{name}={shown} of {layer.name!r} needs the full weight, which no worker of a {type(layer).__name__} has. "
            f"It supports regularizers that are sums over elements, {', '.join(_SUMS)}, and the constraint NonNeg. Use "
            "Keras' own layer, or leave it out."
        )
