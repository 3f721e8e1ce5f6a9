"""The rows of all replicas on each replica, for a step whose rows cannot be divided among them.

```
rows of a replica ─► all_gather ─► rows of the batch ─► Keras' step ─► what the first replica computes
```

The first replica has the share 1 and the others 0, so that gradients, logs and state are those of the first replica.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from tfring import data

if TYPE_CHECKING:
    from tfring.strategy.ring import RingStrategy

_NAME = "the whole batch"


def shares(strategy: RingStrategy) -> tf.Tensor:
    """Returns float64 `[replicas_per_worker]`: 1 for the first replica of all workers, 0 for the others."""
    return tf.constant([float(replica == 0) for replica in _replicas(strategy)], tf.float64)


def batch(strategy: RingStrategy, inputs: Sequence[Any], rows: Sequence[Any], rows_of_all: tf.Tensor) -> list:
    """Returns the rows of all replicas, in order, for each replica of this worker.

    Args:
      strategy: the RingStrategy.
      inputs: one element for each replica of this worker.
      rows: the number of rows of each of them.
      rows_of_all: int64 `[num_replicas]`, those of all replicas.
    """
    first = inputs[0]
    counted = data.num_rows(first)
    elements = [data.slice_rows(element, 0, n) for element, n in zip(inputs, rows, strict=True)]
    flat = [tf.nest.flatten(element) for element in elements]
    gathered = []
    for number, like in enumerate(tf.nest.flatten(first)):
        static = data.static_rows(like)
        is_constant = static is not None and (tf.is_tensor(counted) or static != counted)
        has_rows = isinstance(like, (tf.Tensor, tf.RaggedTensor, tf.SparseTensor)) and like.shape.rank != 0
        if is_constant or not has_rows or like.dtype == tf.variant:
            gathered.append(like)
        else:
            gathered.append(_of_all(strategy, [leaves[number] for leaves in flat], rows_of_all))
    return [tf.nest.pack_sequence_as(first, gathered)] * len(inputs)


def _replicas(strategy: RingStrategy) -> range:
    """Returns the numbers of this worker's replicas among all."""
    here = len(strategy.extended.worker_devices)
    before = strategy.extended.control.rank * here
    return range(before, before + here)


def _of_all(strategy: RingStrategy, parts: Sequence[Any], rows_of_all: tf.Tensor) -> Any:
    """Returns the rows of all replicas of one component, a dense, a ragged or a sparse one."""
    like = parts[0]

    def gather(leaf: Callable[[Any], tf.Tensor]) -> tf.Tensor:
        return _gathered(strategy, tf.concat([leaf(part) for part in parts], 0))

    if isinstance(like, tf.RaggedTensor):
        values = gather(lambda part: part.flat_values)
        by_level = zip(*(part.nested_row_lengths() for part in parts), strict=True)
        lengths = [_gathered(strategy, tf.concat(each, 0)) for each in by_level]
        return tf.RaggedTensor.from_nested_row_lengths(values, lengths, validate=False)
    if not isinstance(like, tf.SparseTensor):
        return tf.ensure_shape(gather(lambda part: part), [None, *like.shape[1:]])
    before = tf.cumsum(rows_of_all, exclusive=True)
    begins = {id(part): before[replica] for part, replica in zip(parts, _replicas(strategy), strict=True)}

    def indices(part: tf.SparseTensor) -> tf.Tensor:
        return part.indices + tf.one_hot(0, part.indices.shape[1], begins[id(part)], tf.constant(0, tf.int64))

    inner = tf.reduce_max(tf.stack([part.dense_shape for part in parts]), 0)[1:]
    [inner] = strategy.extended.control.all_reduce([inner], "max", name=_NAME)
    shape = tf.concat([[tf.reduce_sum(rows_of_all)], inner], 0)
    every = tf.SparseTensor(gather(indices), gather(lambda part: part.values), shape)
    return data.with_inner_shape(every, like.shape)


def _gathered(strategy: RingStrategy, tensor: tf.Tensor) -> tf.Tensor:
    """Returns the tensors of all workers, one after another; strings travel as their bytes."""
    ops = strategy.extended.control_ops
    if tensor.dtype != tf.string:
        return ops.gather_over_workers(tensor, 0, name=_NAME)
    flat = tf.reshape(tensor, [-1])
    lengths = ops.gather_over_workers(tf.strings.length(flat), 0, name=_NAME)
    sent = tf.io.decode_raw(tf.strings.reduce_join(flat), tf.uint8)
    every = tf.gather(_BYTES, tf.cast(ops.gather_over_workers(sent, 0, name=_NAME), tf.int32))
    strings = tf.strings.reduce_join(tf.RaggedTensor.from_row_lengths(every, lengths, validate=False), axis=1)
    return tf.reshape(strings, tf.concat([[-1], tf.shape(tensor)[1:]], 0))


_BYTES = np.array([bytes([byte]) for byte in range(256)], dtype=object)
