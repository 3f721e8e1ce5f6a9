"""Reads and writes large shards of this worker in place: a copy is a block of rows, not a shard.

A variable whose rows have been looked up copies all of them when it is read, and Keras copies the values it assigns.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfring.blocks import rows_of_a_block
from tfring.cross_device_ops import values_of
from tfring.sharding import Sharding


def read(held: Any) -> tf.Tensor:
    """Returns the value of a TensorFlow variable, or a tensor, without a copy."""
    no_copy = getattr(held, "read_value_no_copy", None)
    return tf.convert_to_tensor(held) if no_copy is None else no_copy()


def view(variable: Any) -> np.ndarray:
    """Returns the value of a Keras variable on this worker without a copy; from a GPU with one, to this host."""
    return np.asarray(read(values_of(variable.value)[0]))


def write_block(held: Any, begin: int, block: np.ndarray, dimension: int = 0) -> None:
    """Writes a block into a TensorFlow variable, from an index on along one of its dimensions.

    Args:
      held: An eager variable of this worker alone.
      begin: The first row to write; for another dimension, the first column.
      block: An array of the variable's shape except along `dimension`. It is cast to the variable's dtype.
      dimension: The dimension along which to write. Defaults to 0.
    """
    size = block.shape[dimension]
    tf.raw_ops.ResourceStridedSliceAssign(
        ref=held.handle,
        begin=[0] * dimension + [begin],
        end=[*held.shape[:dimension], begin + size],
        strides=[1] * (dimension + 1),
        value=tf.cast(np.asarray(block), held.dtype),
    )
    tf.raw_ops.DisableCopyOnRead(resource=held.handle)  # otherwise each later read would copy it


def write(variable: Any, begin: int, value: Any, part: tuple[slice, ...]) -> int:
    """Writes a part of an array, which may be in a file, into a Keras variable of this worker, from a row on.

    Args:
      variable: An eager variable of this worker alone.
      begin: The first row of the variable to write.
      value: The array.
      part: Slices of the array, of the first dimension and of others.

    Returns:
      The row after the last one written.
    """
    held = values_of(variable.value)[0]
    rows = range(*part[0].indices(value.shape[0]))
    step = rows_of_a_block(value)
    for first in range(0, len(rows), step):
        these = rows[first : first + step]
        write_block(held, begin, value[(slice(these.start, these.stop, these.step), *part[1:])])
        begin += len(these)
    return begin


def write_shard(variable: Any, sharding: Sharding, rank: int, value: Any) -> None:
    """Writes a rank's shard of an array, which may be in a file, into its Keras variable."""
    if 0 in sharding.shape_of(rank):
        return
    if sharding.dimension == 0:
        begin = 0
        for rows in sharding.slices(rank):
            begin = write(variable, begin, value, (rows,))
    else:
        [columns] = sharding.slices(rank)
        write(variable, 0, value, (*[slice(None)] * sharding.dimension, columns))
