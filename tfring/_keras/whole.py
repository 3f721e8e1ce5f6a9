"""Gathers the rows of all replicas on each replica, for a step with rows that cannot be divided among them.

```
rows of a replica ─► all_gather ─► rows of the batch ─► Keras' step ─► what the first replica computes
```

The first replica has the share 1 and the others 0, so that gradients, logs and state are those of the first replica.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfring.data.rows import num_rows as rows_of
from tfring.data.rows import slice_rows, static_rows, with_inner_shape
from tfring.runtime import Ring

_NAME = "the whole batch"


def shares(ring: Ring) -> tf.Tensor:
    """Returns float64 `[replicas_per_worker]`: 1 for the first replica of all workers, 0 for the others."""
    # Made from booleans, as float constants in a step's graph are compared over ranks.
    return tf.cast(tf.constant([replica == 0 for replica in _replicas(ring)]), tf.float64)


def batch(ring: Ring, inputs: Sequence[Any], rows: Sequence[Any], num_rows: int | None = None) -> list:
    """Returns the rows of all replicas, in order, for each replica of this worker.

    Args:
      ring: The workers.
      inputs: One element for each replica of this worker.
      rows: Number of rows of each of them; None for an element that has none, which stays as it is.
      num_rows: Number of rows of the batch, if known before it is drawn.
    """
    first = inputs[0]
    if None in rows:
        return list(inputs)
    counted = rows_of(first)
    elements = [slice_rows(element, 0, n) for element, n in zip(inputs, rows, strict=True)]
    flat = [tf.nest.flatten(element) for element in elements]
    gathered = []
    for number, like in enumerate(tf.nest.flatten(first)):
        static = static_rows(like)
        is_constant = static is not None and (tf.is_tensor(counted) or static != counted)
        has_rows = isinstance(like, (tf.Tensor, tf.RaggedTensor, tf.SparseTensor)) and like.shape.rank != 0
        if is_constant or not has_rows or like.dtype == tf.variant:
            gathered.append(like)
        else:
            gathered.append(_of_all(ring, [leaves[number] for leaves in flat], num_rows))
    return [tf.nest.pack_sequence_as(first, gathered)] * len(inputs)


def concatenated(values: Sequence[Any], axis: int = 0) -> Any:
    """Returns the concatenation of dense, ragged or sparse tensors."""
    if len(values) == 1:
        return values[0]
    if isinstance(values[0], tf.SparseTensor):
        return tf.sparse.concat(axis, list(values), expand_nonconcat_dims=True)
    return tf.concat(values, axis)


def of_workers(value: Any, gather: Callable[[tf.Tensor], tf.Tensor], rank: int) -> Any:
    """Returns the rows of all workers, in order, of a dense, ragged or sparse tensor.

    Args:
      value: This worker's rows.
      gather: A function that concatenates a dense tensor over workers.
      rank: This worker's rank.
    """
    if isinstance(value, tf.RaggedTensor):
        lengths = [gather(lengths) for lengths in value.nested_row_lengths()]
        return tf.RaggedTensor.from_nested_row_lengths(gather(value.flat_values), lengths, validate=False)
    if isinstance(value, tf.SparseTensor):
        shapes = gather(value.dense_shape[None])  # [workers, rank]
        before = tf.reduce_sum(shapes[:rank, 0])
        indices = value.indices + tf.concat([[before], tf.zeros_like(value.dense_shape[1:])], 0)
        shape = tf.concat([[tf.reduce_sum(shapes[:, 0])], tf.reduce_max(shapes[:, 1:], 0)], 0)
        return tf.SparseTensor(gather(indices), gather(value.values), shape)
    return gather(value)


def _replicas(ring: Ring) -> range:
    """Returns the indices of this worker's replicas among all replicas."""
    return range(ring.first_replica, ring.first_replica + len(ring.devices))


def _of_all(ring: Ring, parts: Sequence[Any], num_rows: int | None) -> Any:
    """Returns the rows of all replicas for one component, from the parts of this worker's replicas."""
    gather = functools.partial(_gathered, ring)
    found = of_workers(concatenated(parts), gather, ring.control.rank)
    shape = parts[0].shape
    if isinstance(found, tf.SparseTensor):
        return with_inner_shape(found, shape)
    return tf.ensure_shape(found, [num_rows, *shape[1:]]) if isinstance(found, tf.Tensor) else found


def _gathered(ring: Ring, tensor: tf.Tensor) -> tf.Tensor:
    """Returns the concatenation of the tensors of all workers; strings are sent as their bytes."""
    ops = ring.control_ops
    if tensor.dtype != tf.string:
        return ops.gather_over_workers(tensor, 0, name=_NAME)
    flat = tf.reshape(tensor, [-1])
    lengths = ops.gather_over_workers(tf.strings.length(flat), 0, name=_NAME)
    sent = tf.io.decode_raw(tf.strings.reduce_join(flat), tf.uint8)
    every = tf.gather(_BYTES, tf.cast(ops.gather_over_workers(sent, 0, name=_NAME), tf.int32))
    strings = tf.strings.reduce_join(tf.RaggedTensor.from_row_lengths(every, lengths, validate=False), axis=1)
    return tf.reshape(strings, tf.concat([[-1], tf.shape(tensor)[1:]], 0))


def broadcast_first(ring: Ring, tensor: tf.Tensor) -> tf.Tensor:
    """Returns the first worker's tensor, which may have any shape there, in place of this worker's."""
    if ring.control.world_size == 1 or tensor.dtype in (tf.variant, tf.resource):
        return tensor
    flat, shape = tf.reshape(tensor, [-1]), tf.shape(tensor)
    sizes = ring.control_ops.gather_over_workers(tf.stack([tf.size(flat), tf.size(shape)])[None], 0, name=_NAME)
    every, shapes = _gathered(ring, flat), _gathered(ring, shape)
    found = tf.reshape(every[: sizes[0, 0]], shapes[: sizes[0, 1]])
    return tf.ensure_shape(found, tensor.shape)


_BYTES = np.array([bytes([byte]) for byte in range(256)], dtype=object)
