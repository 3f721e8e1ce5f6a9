"""The batch of `train_on_batch` and `test_on_batch`: cut where all workers were given the same, else each its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfring._keras import configuration
from tfring.data.rows import bounds, num_rows, slice_rows
from tfring.runtime import Ring


def own_share(ring: Ring, batch: Any) -> Any:
    """Returns this worker's rows of a batch that all workers were given alike; any other batch as it is.

    One eager collective. Workers that were given equal batches by chance lose nothing: their mean is that of one.

    Args:
      ring: The workers.
      batch: Of eager tensors, in any structure.
    """
    control, rows = ring.control, num_rows(batch)
    if control.world_size == 1:
        return batch
    parts = [np.asarray(part) for part in tf.nest.flatten(batch, expand_composites=True)]
    digest = configuration.number([[part.dtype.name, part.shape, configuration.digest(part)] for part in parts])
    if ring.world.agreed(digest, name="batch") is None or rows is None:
        return batch
    return slice_rows(batch, *bounds(rows, control.rank, control.world_size))
