"""A number that tells whether ranks hold the same rows.

Of a long row of numbers a bounded part is looked at: its first and last bytes, and some between, evenly spread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfring.data.rows import num_rows

_ABSOLUTE_PATH = "^(?:/|[a-z0-9]+://).*/([^/]*/[^/]*)$"  # hosts keep their copies in folders of their own
_PATH_BYTES = 1024  # at most
_ROW_BYTES = 16384  # of a row of numbers: a quarter at either end, and half of it spread between


def of_batch(element: Any, left_out: Sequence[bool] | None = None) -> tf.Tensor:
    """Returns an int64 scalar above 0 of every row of a batch and of their number.

    Args:
      element: A batch.
      left_out: A bool for each component, whether it is not looked at; None if none is left out.
    """
    rows = num_rows(element)
    total = tf.constant(0, tf.int64) if rows is None else tf.cast(rows, tf.int64)
    return _positive(_of_components(total, element, left_out))


def of_row(row: Any, left_out: Sequence[bool] | None = None) -> tf.Tensor:
    """Returns an int64 scalar of a row of any shape, for `of_digests`."""
    return _of_components(tf.constant(0, tf.int64), row, left_out)


def of_digests(digests: tf.Tensor) -> tf.Tensor:
    """Returns an int64 scalar above 0 of the rows of a batch, of which `of_row` gave int64 `[rows]`."""
    return _positive(_in_order(digests) + tf.size(digests, tf.int64))


def _of_components(total: tf.Tensor, element: Any, left_out: Sequence[bool] | None) -> tf.Tensor:
    for number, component in enumerate(_compared(element, left_out)):
        if not isinstance(component, tf.Tensor) or component.dtype in (tf.variant, tf.resource):
            continue
        total = _mixed(total, _digest(component), number)
    return total


def _positive(total: tf.Tensor) -> tf.Tensor:
    return tf.bitwise.bitwise_or(tf.bitwise.bitwise_and(total, tf.int64.max), 1)


def _compared(element: Any, left_out: Sequence[bool] | None) -> list[Any]:
    components = tf.nest.flatten(element)
    left_out = [False] * len(components) if left_out is None else left_out
    compared = [c for c, left in zip(components, left_out, strict=True) if not left]
    return tf.nest.flatten(compared, expand_composites=True)


def _mixed(total: tf.Tensor, digest: tf.Tensor, number: int) -> tf.Tensor:
    """Returns another number for other numbers, and for another order; products are taken modulo 2**64."""
    return total * 6364136223846793005 + (2 * number + 1) * digest


def _in_order(prints: tf.Tensor) -> tf.Tensor:
    """Returns an int64 scalar of int64 numbers and of their order."""
    return tf.reduce_sum(prints * (2 * tf.range(tf.size(prints, tf.int64)) + 1))


def _digest(tensor: tf.Tensor) -> tf.Tensor:
    """Returns an int64 scalar of a tensor's bytes, row by row."""
    if tensor.dtype == tf.bool:
        tensor = tf.cast(tensor, tf.uint8)
    if not tensor.shape.rank:
        tensor = tensor[None]
    if tensor.dtype != tf.string:
        return _in_order(tf.bitcast(tf.fingerprint(_of_numbers(tensor)), tf.int64))
    return _in_order(_of_strings(tensor))


def _of_strings(strings: tf.Tensor) -> tf.Tensor:
    """Returns an int64 number of each string; of paths the last two names count."""
    strings = tf.reshape(strings, [-1])
    lengths = tf.strings.length(strings)
    is_path = lengths <= _PATH_BYTES  # or may be one
    paths = tf.strings.substr(strings, tf.zeros_like(lengths), tf.where(is_path, lengths, 0))
    paths = tf.strings.regex_replace(paths, _ABSOLUTE_PATH, r"\1")
    return tf.where(is_path, *(tf.bitcast(tf.fingerprint(each), tf.int64) for each in (paths, strings)))


def _of_numbers(tensor: tf.Tensor) -> tf.Tensor:
    """Returns a bounded part of each row, if the size of a row is static."""
    size = tensor.shape[1:].num_elements()
    most, end = _ROW_BYTES // tensor.dtype.size, _ROW_BYTES // 4 // tensor.dtype.size
    if size is None or size <= most:
        return tensor
    rows = tf.reshape(tensor, [-1, size])
    stride = -(-(size - 2 * end) // (most - 2 * end))
    return tf.concat([rows[:, :end], rows[:, end : size - end : stride], rows[:, size - end :]], 1)
