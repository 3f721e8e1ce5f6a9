"""A number that tells whether ranks hold the same rows.

Of a long row a bounded part is looked at: its length, its first and last bytes, and some between, evenly spread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfring.data.rows import num_rows

_ABSOLUTE_PATH = "^(?:/|[a-z0-9]+://).*/([^/]*/[^/]*)$"  # hosts keep their copies in folders of their own
_END_BYTES, _PIECES, _PIECE_BYTES = 1024, 8, 64  # of a string: at either end, and how much between
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
    strings, lengths = _of_strings(tensor)
    return _in_order(tf.bitcast(tf.fingerprint(strings), tf.int64) + lengths)


def _of_strings(strings: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns a bounded part of each string, and the lengths of long ones; of paths the last two names."""
    strings = tf.reshape(strings, [-1])
    lengths = tf.strings.length(strings)
    is_long = lengths > _END_BYTES
    zeros = tf.zeros_like(lengths)
    short = tf.strings.substr(strings, zeros, tf.where(is_long, 0, lengths))
    short = tf.strings.regex_replace(short, _ABSOLUTE_PATH, r"\1")
    # Of a long one its first bytes, parts between, and its last bytes; nothing of a short one.
    between = tf.maximum(lengths - _END_BYTES, 0)[None] // _PIECES * tf.range(_PIECES)[:, None] + _END_BYTES
    begins = tf.concat([zeros[None], between, [lengths - _END_BYTES]], 0)
    sizes = tf.constant([[_END_BYTES]] + [[_PIECE_BYTES]] * _PIECES + [[_END_BYTES]])
    begins, sizes = tf.where(is_long, begins, 0), tf.where(is_long, sizes, 0)
    parts = tf.strings.reduce_join(tf.strings.substr(strings[None], begins, sizes), 0)
    return short + parts, tf.cast(tf.where(is_long, lengths, 0), tf.int64)


def _of_numbers(tensor: tf.Tensor) -> tf.Tensor:
    """Returns a bounded part of each row, if the size of a row is static."""
    size = tensor.shape[1:].num_elements()
    most, end = _ROW_BYTES // tensor.dtype.size, _ROW_BYTES // 4 // tensor.dtype.size
    if size is None or size <= most:
        return tensor
    rows = tf.reshape(tensor, [-1, size])
    stride = -(-(size - 2 * end) // (most - 2 * end))
    return tf.concat([rows[:, :end], rows[:, end : size - end : stride], rows[:, size - end :]], 1)
