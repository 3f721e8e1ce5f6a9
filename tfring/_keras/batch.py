"""Slices the batch of `train_on_batch` and `test_on_batch` if all workers got the same; otherwise they keep theirs."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfring._keras import configuration
from tfring.data.rows import bounds, num_rows, slice_rows
from tfring.runtime import Ring


def slice_own_rows(ring: Ring, batch: Any) -> Any:
    """Returns this worker's rows of a batch if all workers were given the same one; any other batch as it is.

    Runs one eager collective. Workers that were given equal batches by chance lose nothing: their mean is that of one.

    Args:
      ring: The workers.
      batch: Eager tensors in any structure.
    """
    control, rows = ring.control, num_rows(batch)
    if control.world_size == 1:
        return batch
    parts = [np.asarray(part) for part in tf.nest.flatten(batch, expand_composites=True)]
    digest = configuration.number([[part.dtype.name, part.shape, configuration.digest(part)] for part in parts])
    if ring.world.agreed(digest, name="batch") is None or rows is None:
        return batch
    return slice_rows(batch, *bounds(rows, control.rank, control.world_size))
