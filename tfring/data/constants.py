"""Tells a dataset's rows from constants beside them, such as the anchors of a detector."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfring import _tf


def constants_of(dataset: tf.data.Dataset) -> list[bool]:
    """Returns for each component of a dataset of batches whether it is a constant beside the rows.

    A component whose first dimension is known only when it is drawn has rows; one whose first dimension is static is a
    constant, but where `drop_remainder` made it so. Where all are static and no `batch` says how many rows there are,
    most components have them. Of batches of other sizes in one element, as of labelled and unlabelled rows, the largest
    are the rows; each replica gets the others in full.
    """
    counts = [_static_rows(spec) for spec in tf.nest.flatten(dataset.element_spec)]
    known = [count for count in counts if count is not None and count >= 0]
    sizes = set(known).intersection(map(_tf.static_batch_size, _tf.pipeline(dataset)))
    rows = max(sizes, default=None)
    if rows is None and None not in counts and known:
        rows = max(known, key=known.count)
    return [count is not None and count >= 0 and count != rows for count in counts]


def _static_rows(spec: Any) -> int | None:
    """Returns the first dimension, None where it is not static, -1 where there is none."""
    shape = getattr(spec, "shape", None)
    if shape is None or shape == ():
        return -1
    shape = tf.TensorShape(shape)
    return shape[0] if shape.rank else None if shape.rank is None else -1
