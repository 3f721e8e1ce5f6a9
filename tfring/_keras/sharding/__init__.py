"""Marks, makes, gathers and assigns Keras variables that hold a rank's shard of a full value.

They belong to a sharded layer, a table, or an optimizer with `shard_optimizer=True`. Such a variable accepts full
values and keeps its shard; files contain full values (`slots.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfring.cross_device_ops import values_of
from tfring.errors import ConfigurationError
from tfring.ring.collectives import LocalCollectives
from tfring.runtime import Ring, ring_of
from tfring.setting import setting
from tfring.sharding import Sharding

_local = threading.local()
_AXES_OF_LAYERS = ("model", "data")  # a layer can be sharded along them


@dataclasses.dataclass(frozen=True)
class Mark:
    """The mark on a Keras variable: the part of its value on this worker, and who computes with it and updates it.

    Attributes:
      sharding: The sharding of the full value. None if the variable holds the full value.
      rank: Rank of this worker among those that hold the shards.
      update: "rows" or "dense" for a table of `tfring.layers`. None for any other variable.
      sums_ids: Whether an id counts once in its gradient, in one process too: it is a replicated table. Keras'
        optimizers square the gradients of duplicate ids one by one; over a ring they are summed first.
      stage: The stage that computes with it, if ranks of all stages hold it, such as the seed of a Dropout.
      weight: The weight for which a slot of an optimizer was made.
    """

    sharding: Sharding | None = None
    rank: int = 0
    update: str | None = None
    sums_ids: bool = False
    stage: int = 0
    weight: Any = None


_UNMARKED = Mark()


def mark_of(variable: Any) -> Mark:
    """Returns the mark on a Keras variable."""
    return getattr(variable, "_tfring_mark", _UNMARKED)


def mark(variable: Any, **fields: Any) -> Any:
    """Sets fields of the mark on a Keras variable, and returns the variable."""
    variable._tfring_mark = dataclasses.replace(mark_of(variable), **fields)
    return variable


def mark_shard(variable: Any, ring: Ring, sharding: Sharding) -> Any:
    """Notes that a Keras variable holds this worker's shard, and returns the variable."""
    return mark(variable, sharding=sharding, rank=ring.mesh.coordinate(sharding.axis, ring.cluster.rank))


def sharding_of(variable: Any) -> Sharding | None:
    """Returns the sharding of a Keras variable that holds a shard; None for one that is not sharded."""
    return mark_of(variable).sharding


def is_sharded_along(variable: Any, axis: str) -> bool:
    """Returns whether ranks along an axis of the mesh hold different shards of the value of a Keras variable."""
    sharding = sharding_of(variable)
    return sharding is not None and axis in sharding.axes


def gradient_is_complete(variable: Any) -> bool:
    """Returns whether a tape gives the gradient of the whole batch for a Keras variable.

    In that case ranks along the data axis hold different shards. The code that computes their gradients weighs them and
    sums over all rows, and an optimizer does neither.
    """
    return is_sharded_along(variable, "data")


@dataclasses.dataclass(frozen=True)
class ShardGroup:
    """The ranks over which a layer is sharded: those along an axis of a strategy's mesh, or this process alone.

    Attributes:
      ring: The workers of the strategy; None for this process alone.
      axis: "model" or "data".
    """

    ring: Ring | None = None
    axis: str = "data"

    @classmethod
    def of(cls, axis: str | None, layer: str, instead: str) -> ShardGroup:
        """Returns the group of a layer that is built under the strategy in scope.

        Args:
          axis: "model" or "data". None: the model axis if the mesh has one, otherwise the data axis.
          layer: Name of the layer, for errors.
          instead: Alternative to the layer, for errors.

        Raises:
          ConfigurationError: If this process has several replicas.
        """
        if not tf.distribute.has_strategy():
            return cls()
        strategy = tf.distribute.get_strategy()
        ring = ring_of(strategy)
        here = strategy.num_replicas_in_sync if ring is None else len(ring.devices)
        if here > 1:
            raise ConfigurationError(
                f"A {layer} supports one replica per worker, but this process has {here} replicas of a "
                f"{type(strategy).__name__}. Give each worker one device, or use {instead}."
            )
        if ring is None:
            return cls()
        axis = axis or ("model" if ring.mesh.model > 1 else "data")
        return cls(ring, axis) if ring.mesh.size_along(axis) > 1 else cls()

    @property
    def is_alone(self) -> bool:
        return self.ring is None

    @property
    def collectives(self) -> Any:
        """The collectives of its ranks, on the channel of everything but gradients."""
        return LocalCollectives() if self.ring is None else self.ring.along(self.axis)

    @property
    def world(self) -> Any:
        """The collectives of all workers."""
        return LocalCollectives() if self.ring is None else self.ring.world

    def add_weight(self, add_weight: Callable, sharding: Sharding, initializer: Any, **options: Any) -> Any:
        """Makes a weight of a layer that holds this worker's shard, and returns it.

        Args:
          add_weight: The layer's `add_weight`.
          sharding: Sharding of the full value.
          initializer: An initializer. It is called with the shape of the shard and its dtype.
          **options: Options of `add_weight`.
        """
        own = contextlib.nullcontext() if self.ring is None else self.ring.variables_of_worker()
        with own:
            shape = sharding.shape_of(self.collectives.rank)
            variable = add_weight(shape=shape, initializer=initializer, **options)
        return variable if self.ring is None else mark_shard(variable, self.ring, sharding)


class InitialShard:
    """The initializer of a shard: its part of the full value that one process draws, with the values of rank 0.

    Args:
      initializer: Keras initializer of the full value.
      sharding: Sharding of the full value.
      group: The ranks that have the shards.
    """

    def __init__(self, initializer: Any, sharding: Sharding, group: ShardGroup) -> None:
        self._initializer = initializer
        self._sharding = sharding
        self._group = group

    def __call__(self, shape: Sequence[int], dtype: Any = None) -> tf.Tensor:
        from keras.src.backend.common.stateless_scope import in_stateless_scope

        if in_stateless_scope():  # while Keras infers shapes
            return tf.zeros(shape, dtype)
        full = tf.convert_to_tensor(self._initializer(self._sharding.shape, dtype=dtype))
        [full] = self._group.world.broadcast([full], name="initial value of a weight in shards")
        return take_shard(self._sharding, tf.reshape(full, self._sharding.lined_up), self._group.collectives.rank)


def check_axis(axis: str | None) -> None:
    """Raises ConfigurationError for an axis over which layers are not sharded."""
    if axis not in (None, *_AXES_OF_LAYERS):
        raise ConfigurationError(f"`axis` is {axis!r}, not one of {_AXES_OF_LAYERS} or None.")


def full_shape(variable: Any) -> tuple[int, ...]:
    """Returns the shape of a variable in one process."""
    sharding = sharding_of(variable)
    return tuple(variable.shape if sharding is None else sharding.shape)


def full_shapes() -> contextlib.AbstractContextManager:
    """Makes Keras variables show this thread their shapes in one process, inside the context."""
    return setting(_local, "shows_full_shapes", True)


def shows_full_shapes() -> bool:
    """Returns True within `full_shapes`."""
    return getattr(_local, "shows_full_shapes", False)


def gather(ops: Any, variables: Sequence[Any], *, name: str) -> list[tf.Tensor]:
    """Returns the full values of variables, on all ranks; `ops` is a RingAllReduce, `name` is for errors."""
    values = [local_value(variable) for variable in variables]
    sharded = {i: sharding for i, sharding in enumerate(map(sharding_of, variables)) if sharding is not None}
    full = ops.gather_full([values[i] for i in sharded], [*sharded.values()], name=name)
    for i, value in zip(sharded, full, strict=True):
        values[i] = value
    return values


def shard_of(variable: Any, value: Any) -> Any:
    """Returns this worker's shard of a full value, for a variable that holds a shard; any other value as it is."""
    sharding, rank = sharding_of(variable), mark_of(variable).rank
    if sharding is None:
        return value
    if sharding.lined_up == sharding.shape == tuple(getattr(value, "shape", ())) and not tf.is_tensor(value):
        return take_shard(sharding, value, rank)  # no more of an array in a file is read
    value = local_value(value)
    if value.shape != sharding.shape:
        return value
    return tf.reshape(take_shard(sharding, tf.reshape(value, sharding.lined_up), rank), sharding.shape_of(rank))


def take_shard(sharding: Sharding, lined_up: Any, rank: int) -> Any:
    """Returns a rank's shard of a lined-up full value: a tensor, an array, or an array in a file."""
    parts = [lined_up[(*[slice(None)] * sharding.dimension, part)] for part in sharding.slices(rank)]
    if len(parts) == 1:
        return parts[0]
    return (tf.concat if tf.is_tensor(lined_up) else np.concatenate)(parts, sharding.dimension)


def local_value(value: Any) -> tf.Tensor:
    """Returns the value of a Keras or TensorFlow variable on this worker, or another value, as a tensor."""
    import keras

    value = value.value if isinstance(value, keras.Variable) else value
    return tf.convert_to_tensor(values_of(value)[0])
