"""Rows of a batch: how many there are, and cutting them."""

from __future__ import annotations

import tensorflow as tf


def num_rows(element) -> tf.Tensor | int | None:
    """Rows of a batch: the first dimension of its first component; None where it has none."""
    for component in tf.nest.flatten(element):
        if isinstance(component, tf.RaggedTensor):
            return component.nrows()
        if isinstance(component, tf.SparseTensor):
            return component.dense_shape[0]
        if isinstance(component, tf.experimental.Optional):
            continue
        shape = getattr(component, "shape", None)
        if shape is None or (isinstance(component, tf.Tensor) and shape.rank == 0) or shape == ():
            continue
        if isinstance(component, tf.Tensor):
            return shape[0] if shape.rank and shape[0] is not None else tf.shape(component, tf.int64)[0]
        return shape[0]
    return None


def slice_rows(element, begin, end):
    """Rows `begin` to `end` of every component: tensors, ragged and sparse tensors."""

    def cut(component):
        if isinstance(component, tf.SparseTensor):
            begins = tf.concat([[begin], tf.zeros_like(component.dense_shape[1:])], 0)
            sizes = tf.concat([[end - begin], component.dense_shape[1:]], 0)
            return tf.sparse.slice(component, tf.cast(begins, tf.int64), tf.cast(sizes, tf.int64))
        if component is None or isinstance(component, tf.experimental.Optional):
            return component
        return component[begin:end]

    return tf.nest.map_structure(cut, element)


def bounds(rows, replica, num_replicas):
    """The first row of a replica's share and the one after its last."""
    return replica * rows // num_replicas, (replica + 1) * rows // num_replicas


def split_rows(element, num_parts: int) -> list:
    """Cuts a batch into `num_parts` consecutive parts whose sizes differ by at most one row."""
    rows = num_rows(element)
    if rows is None:
        return [element] * num_parts
    return [slice_rows(element, *bounds(rows, part, num_parts)) for part in range(num_parts)]
