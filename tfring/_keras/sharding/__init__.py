"""Keras variables that hold a rank's shard of a full value: marked, made, gathered, assigned full values.

A variable of a layer that is sharded, of a table, or of an optimizer with `shard_optimizer=True`. It takes full values
and keeps its shard; files hold full values (`slots.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from tfring.cluster.mesh import axes_of
from tfring.cross_device_ops import values_of
from tfring.errors import ConfigurationError
from tfring.recognition import ring_of
from tfring.reduction.cuts import Cut
from tfring.reduction.owned import Owned
from tfring.reduction.placement import Placement
from tfring.ring.collectives import LocalCollectives

if TYPE_CHECKING:
    from tfring.strategy.ring import RingStrategy

DIVIDING = ("model", "data")  # the axes of a mesh over which a layer can be divided


def cut_of(variable: Any) -> Cut | Owned | Placement | None:
    """Returns the cut of the full value of which a Keras variable holds a shard; None for one that is not sharded."""
    return getattr(variable, "_tfring_cut", None)


def axis_of(variable: Any) -> str | None:
    """Returns the axis of the mesh, or axes joined by "+", along which ranks hold the shards of a Keras variable; None
    for one that is not sharded."""
    return getattr(variable, "_tfring_axis", None)


def mark(variable: Any, strategy: RingStrategy, cut: Cut | Owned | Placement | None, axis: str = "data") -> Any:
    """Notes that a Keras variable holds this worker's shard of a value, cut for the ranks along an axis or several."""
    variable._tfring_cut = cut
    variable._tfring_axis = axis
    variable._tfring_rank = strategy.mesh.coordinate(axis, strategy.cluster.rank)
    return variable


def gradient_is_complete(variable: Any) -> bool:
    """Returns whether a tape gives the gradient of the whole batch for a Keras variable.

    Ranks along the data axis hold different shards then. What makes their gradients weighs and sums over all rows on
    its way, and an optimizer does neither.
    """
    return "data" in axes_of(axis_of(variable) or "")


@dataclasses.dataclass(frozen=True)
class Division:
    """The ranks over which a layer is sharded: those along an axis of a strategy's mesh, or this process alone.

    Attributes:
      strategy: the RingStrategy; None for this process alone.
      axis: "model" or "data".
    """

    strategy: Any = None
    axis: str = "data"

    @classmethod
    def of(cls, axis: str | None, layer: str, instead: str) -> Division:
        """Returns the division of a layer that is built under the strategy in scope.

        Args:
          axis: "model" or "data"; None for the model axis where the mesh has one, else the data axis.
          layer: what it is called, for errors.
          instead: what to use instead, for errors.

        Raises:
          ConfigurationError: for several replicas a process.
        """
        if not tf.distribute.has_strategy():
            return cls()
        strategy = tf.distribute.get_strategy()
        ring = ring_of(strategy)
        here = strategy.num_replicas_in_sync if ring is None else len(ring.extended.worker_devices)
        if here > 1:
            raise ConfigurationError(
                f"A {layer} works for one replica of each worker. Received: {type(strategy).__name__} with {here} "
                f"replicas in this process. Give each worker one device, or use {instead}."
            )
        if ring is None:
            return cls()
        axis = axis or ("model" if ring.mesh.model > 1 else "data")
        return cls(ring, axis) if ring.mesh.size_along(axis) > 1 else cls()

    @property
    def is_alone(self) -> bool:
        return self.strategy is None

    @property
    def collectives(self) -> Any:
        """The collectives of its ranks, on the channel of everything but gradients."""
        return LocalCollectives() if self.is_alone else self.strategy.extended.along(self.axis)

    @property
    def world(self) -> Any:
        """The collectives of all workers."""
        return LocalCollectives() if self.is_alone else self.strategy.extended.world

    def add_weight(self, add_weight: Callable, cut: Cut | Placement, initializer: Any, **options: Any) -> Any:
        """Makes the weight of a layer that holds this worker's shard, and returns it.

        Args:
          add_weight: the layer's.
          cut: of the full value.
          initializer: called with the shape of the shard, and its dtype.
          **options: for `add_weight`.
        """
        own = contextlib.nullcontext() if self.is_alone else self.strategy.extended.variables_of_worker()
        with own:
            shape = cut.shape_of(self.collectives.rank)
            variable = add_weight(shape=shape, initializer=initializer, **options)
        return variable if self.is_alone else mark(variable, self.strategy, cut, self.axis)


class InitialPiece:
    """The initializer of a shard: its part of the full value that one process draws, with the values of rank 0.

    Args:
      initializer: of Keras, for the full value.
      cut: of the full value.
      division: the ranks that have the shards.
    """

    def __init__(self, initializer: Any, cut: Cut, division: Division) -> None:
        self._initializer = initializer
        self._cut = cut
        self._division = division

    def __call__(self, shape: Sequence[int], dtype: Any = None) -> tf.Tensor:
        from keras.src.backend.common.stateless_scope import in_stateless_scope

        if in_stateless_scope():  # while Keras looks what shapes come out
            return tf.zeros(shape, dtype)
        whole = tf.convert_to_tensor(self._initializer(self._cut.shape, dtype=dtype))
        [whole] = self._division.world.broadcast([whole], name="initial value of a weight in shards")
        return tf.reshape(whole, self._cut.lined_up)[self._cut.part(self._division.collectives.rank)]


def check_axis(axis: str | None) -> None:
    """Raises ConfigurationError for an axis over which layers are not sharded."""
    if axis not in (None, *DIVIDING):
        raise ConfigurationError(f"`axis` is one of {DIVIDING} or None. Received: axis={axis!r}")


def whole_shape(variable: Any) -> tuple[int, ...]:
    """Returns the shape of a variable in one process."""
    cut = cut_of(variable)
    return tuple(variable.shape if cut is None else cut.shape)


def gather(ops: Any, variables: Sequence[Any], *, name: str) -> list[tf.Tensor]:
    """Returns the full values of variables, on all ranks; `ops` is a RingAllReduce, `name` is for errors."""
    values = [held_of(variable) for variable in variables]
    cuts = [cut_of(variable) for variable in variables]
    chosen = [i for i, cut in enumerate(cuts) if cut is not None]
    whole = ops.gather_full([values[i] for i in chosen], [cuts[i] for i in chosen], name=name)
    for i, value in zip(chosen, whole, strict=True):
        values[i] = value
    return values


def piece_of(variable: Any, value: Any) -> Any:
    """Returns this worker's shard of a value, for a variable that holds a shard; else the value."""
    cut = cut_of(variable)
    if cut is None:
        return value
    rank = variable._tfring_rank
    if cut.lined_up == cut.shape == tuple(getattr(value, "shape", ())) and not tf.is_tensor(value):
        return taken(cut, value, rank)  # of an array in a file no more is read
    value = held_of(value)
    if value.shape != cut.shape:
        return value
    return tf.reshape(taken(cut, tf.reshape(value, cut.lined_up), rank), cut.shape_of(rank))


def count(cut: Cut | Owned | Placement, rank: int) -> int:
    """Returns how many rows of the lined-up full value a rank has; or columns or elements, what it is cut between."""
    return sum(len(range(*rows.indices(cut.lined_up[cut.dimension]))) for rows in cut.slices(rank))


def taken(cut: Cut | Owned | Placement, whole: Any, rank: int) -> Any:
    """Returns a rank's shard of a lined-up full value: a tensor, an array, or one in a file."""
    pieces = [whole[(*[slice(None)] * cut.dimension, rows)] for rows in cut.slices(rank)]
    if len(pieces) == 1:
        return pieces[0]
    return (tf.concat if tf.is_tensor(whole) else np.concatenate)(pieces, cut.dimension)


def held_of(value: Any) -> tf.Tensor:
    """Returns as a tensor the value that a variable of Keras or TensorFlow has on this worker, or another value."""
    import keras

    value = value.value if isinstance(value, keras.Variable) else value
    return tf.convert_to_tensor(values_of(value)[0])
