"""Large shards of this worker, read and written where they lie: a copy is a block of rows, not a shard.

A variable whose rows have been looked up copies all of them when it is read, and Keras copies what it assigns.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tfring.blocks import rows_of_a_block
from tfring.cross_device_ops import values_of


def view(variable) -> np.ndarray:
    """Returns what a Keras variable holds on this worker, without a copy; on a GPU with one, to this host."""
    held = values_of(variable.value)[0]
    read = getattr(held, "read_value_no_copy", None)
    return np.asarray(tf.convert_to_tensor(held) if read is None else read())


def write(variable, begin: int, value, part: tuple[slice, ...]) -> int:
    """Writes a part of an array, which may be one in a file, into a Keras variable of this worker, from a row on.

    Args:
      variable: eager, of this worker alone.
      begin: the variable's first row to write.
      value: the array.
      part: slices of the array, of the first dimension and of others.

    Returns:
      The row behind the last one written.
    """
    held = values_of(variable.value)[0]
    rows = range(*part[0].indices(value.shape[0]))
    step = rows_of_a_block(value)
    for first in range(0, len(rows), step):
        these = rows[first : first + step]
        block = tf.cast(np.asarray(value[(slice(these.start, these.stop, these.step), *part[1:])]), held.dtype)
        tf.raw_ops.ResourceStridedSliceAssign(
            ref=held.handle, begin=[begin], end=[begin + len(these)], strides=[1], value=block
        )
        begin += len(these)
    tf.raw_ops.DisableCopyOnRead(resource=held.handle)  # or each read of it copied from now on
    return begin


def write_shard(variable, cut, rank: int, value) -> None:
    """Writes a rank's shard of an array, which may be one in a file, into its Keras variable."""
    if 0 in cut.shape_of(rank):
        return
    if cut.dimension == 0:
        begin = 0
        for rows in cut.slices(rank):
            begin = write(variable, begin, value, (rows,))
    else:
        [columns] = cut.slices(rank)
        write(variable, 0, value, (*[slice(None)] * cut.dimension, columns))
