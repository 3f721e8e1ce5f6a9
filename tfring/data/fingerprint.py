"""Fingerprints that tell whether ranks hold the same rows.

Only a bounded part of a long row of numbers is read: its first and last bytes, and evenly spread ones in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfring.data.rows import num_rows

_ABSOLUTE_PATH = "^(?:/|[a-z0-9]+://).*/([^/]*/[^/]*)$"  # hosts may keep their copies in different folders
_PATH_BYTES = 1024  # the longest string that may be a path
_ROW_BYTES = 16384  # bytes read of a row of numbers: a quarter at either end, and half of them spread in between


def of_batch(element: Any, left_out: Sequence[bool] | None = None) -> tf.Tensor:
    """Returns the fingerprint of all rows of a batch and of their number, an int64 scalar above 0.

    Args:
      element: A batch.
      left_out: A bool for each component, whether to ignore it; None to ignore none.
    """
    prints = _prints(element, left_out)
    rows = None if prints else num_rows(element)
    return above_zero(_joined(prints) if rows is None else tf.cast(rows, tf.int64))


def of_row(row: Any, left_out: Sequence[bool] | None = None) -> tf.Tensor:
    """Returns the digest of a row of any shape, an int64 scalar, for `of_digests`."""
    return _joined(_prints(row, left_out))


def of_digests(digests: tf.Tensor) -> tf.Tensor:
    """Returns int64 `[1]` for `above_zero`, from the digests of a batch's rows by `of_row`, int64 `[rows]`."""
    return tf.bitcast(tf.fingerprint(tf.reshape(digests, [1, -1])), tf.int64)


# Each operation below costs a fifth of a millisecond at the beginning of each pass, in a function of a pipeline.


def _joined(prints: list[tf.Tensor]) -> tf.Tensor:
    """Returns one int64 scalar for uint8 tensors `[n, 8]`, which depends on their values and order."""
    if not prints:
        return tf.constant(0, tf.int64)
    every = prints[0] if len(prints) == 1 else tf.concat(prints, 0)
    return tf.squeeze(tf.bitcast(tf.fingerprint(tf.reshape(every, [1, -1])), tf.int64))


def above_zero(total: tf.Tensor) -> tf.Tensor:
    """Returns the number without its sign and with its lowest bit set, so that 0 can mean that ranks do not compare."""
    return tf.bitwise.bitwise_or(tf.bitwise.bitwise_and(total, tf.int64.max), 1)


def _prints(element: Any, left_out: Sequence[bool] | None) -> list[tf.Tensor]:
    """Returns uint8 `[rows, 8]` for each component that is not left out."""
    components = tf.nest.flatten(element)
    left_out = [False] * len(components) if left_out is None else left_out
    compared = [c for c, left in zip(components, left_out, strict=True) if not left]
    tensors = [c for c in tf.nest.flatten(compared, expand_composites=True) if isinstance(c, tf.Tensor)]
    return [_of_tensor(tensor) for tensor in tensors if tensor.dtype not in (tf.variant, tf.resource)]


def _of_tensor(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the fingerprints of a tensor's rows, uint8 `[rows, 8]`."""
    if tensor.dtype == tf.bool:
        tensor = tf.cast(tensor, tf.uint8)
    if not tensor.shape.rank:
        tensor = tf.expand_dims(tensor, 0)
    return _of_strings(tensor) if tensor.dtype == tf.string else tf.fingerprint(_of_numbers(tensor))


def _of_strings(strings: tf.Tensor) -> tf.Tensor:
    """Returns the fingerprints of strings, uint8 `[strings, 8]`; only the last two names of a path count."""
    if strings.shape.rank != 1:
        strings = tf.reshape(strings, [-1])
    is_path = tf.strings.length(strings) <= _PATH_BYTES  # or may be one
    paths = tf.strings.regex_replace(tf.strings.substr(strings, 0, _PATH_BYTES), _ABSOLUTE_PATH, r"\1")
    return tf.where(tf.expand_dims(is_path, 1), tf.fingerprint(paths), tf.fingerprint(strings))


def _of_numbers(tensor: tf.Tensor) -> tf.Tensor:
    """Returns a bounded part of each row, if the size of a row is static."""
    size = tensor.shape[1:].num_elements()
    most, end = _ROW_BYTES // tensor.dtype.size, _ROW_BYTES // 4 // tensor.dtype.size
    if size is None or size <= most:
        return tensor
    rows = tf.reshape(tensor, [-1, size])
    stride = -(-(size - 2 * end) // (most - 2 * end))
    return tf.concat([rows[:, :end], rows[:, end : size - end : stride], rows[:, size - end :]], 1)
