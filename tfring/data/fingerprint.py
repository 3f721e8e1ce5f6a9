"""A number that tells whether ranks hold the same rows."""

from __future__ import annotations

import tensorflow as tf

from tfring.data.rows import num_rows

_ABSOLUTE_PATH = "^(?:/|[a-z0-9]+://).*/([^/]*/[^/]*)$"  # hosts keep their copies in folders of their own


def of_batch(element, left_out=None) -> tf.Tensor:
    """An int64 scalar above 0 of every row of a batch and of their number; `left_out` is a bool for each component."""
    rows = num_rows(element)
    total = tf.constant(0, tf.int64) if rows is None else tf.cast(rows, tf.int64)
    for number, component in enumerate(_compared(element, left_out)):
        if not isinstance(component, tf.Tensor) or component.dtype in (tf.variant, tf.resource):
            continue
        total = _mixed(total, _digest(component), number)
    return _positive(total)


def of_rows(rows: tf.data.Dataset, batch_size: int, left_out=None) -> tf.Tensor:
    """As `of_batch`, of a dataset of at most `batch_size` rows, whatever their shapes."""
    if all(isinstance(s, tf.TensorSpec) and s.shape.is_fully_defined() for s in tf.nest.flatten(rows.element_spec)):
        return of_batch(_element(rows.batch(batch_size).get_single_element(), rows.element_spec), left_out)

    @tf.autograph.experimental.do_not_convert
    def add(total, *row):
        row = row if type(rows.element_spec) is tuple else row[0]
        for number, component in enumerate(_compared(row, left_out)):
            total = _mixed(total, _digest(component), number)
        return total + 1

    total = rows.reduce(tf.constant(0, tf.int64), add)
    return _positive(total)


def _positive(total):
    return tf.bitwise.bitwise_or(tf.bitwise.bitwise_and(total, tf.int64.max), 1)


def _compared(element, left_out):
    components = tf.nest.flatten(element)
    left_out = [False] * len(components) if left_out is None else left_out
    compared = [c for c, left in zip(components, left_out, strict=True) if not left]
    return tf.nest.flatten(compared, expand_composites=True)


def _element(element, spec):
    return element if not isinstance(element, list) else tf.nest.pack_sequence_as(spec, element)


def _mixed(total, digest, number):
    """Other numbers in another order are another number; products are taken modulo 2**64."""
    return total * 6364136223846793005 + (2 * number + 1) * digest


def _digest(tensor):
    """An int64 scalar of a tensor's bytes, row by row."""
    if tensor.dtype == tf.bool:
        tensor = tf.cast(tensor, tf.uint8)
    if tensor.dtype == tf.string:
        tensor = tf.strings.regex_replace(tensor, _ABSOLUTE_PATH, r"\1")
    prints = tf.bitcast(tf.fingerprint(tensor if tensor.shape.rank else tensor[None]), tf.int64)
    weights = 2 * tf.range(tf.size(prints, tf.int64)) + 1
    return tf.reduce_sum(prints * weights)
