"""Error feedback: sums in 16 bits, whose rounding errors are added to the gradients of the next step.

```
rank 0   gradient + residual ─► round ─► chunk 0 ──┐              round ─► to all
                        ▲         │      chunk 1 ─┐├─► sum of chunk 0 ─┘ │
                        └─ error ─┘               │└─ of rank 1          │
                        └──────── error of the sum of this rank's chunk ─┘
```

Each contribution is rounded once and each sum once, as in a compressed all-reduce, and each error stays on the rank
that made it. So what all ranks have applied and what their residuals hold add up to the exact sum of all gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfring.ring.collectives import Collectives, zeros_unless
from tfring.ring.schedule import chunk_bounds, is_small


def all_reduce_with_feedback(
    collectives: Collectives,
    tensors: Sequence[tf.Tensor],
    residuals: Sequence[Sequence[tf.Variable]],
    *,
    name: str,
    active: tf.Tensor | None = None,
    compression: str,
) -> list[tf.Tensor]:
    """Sums float32 tensors over all ranks in 16 bits, and keeps what rounding has cut off for the next call.

    Args:
      collectives: the engine, see `tfring.ring.collectives`.
      tensors: one worker's, of static shapes.
      residuals: for each tensor the copies of a float32 variable of its shape, which hold the same.
      name: what they are, for errors and traces.
      active: bool scalar; where False this rank adds its residuals alone, whatever its tensors hold (NaN included).
      compression: "bfloat16" or "float16".

    Returns:
      The sums, the same bits on all ranks. Residuals hold the errors; those that are not finite become zeros, and so
      do all where the tensors travel as they are, which small ones do.

    Sources: error feedback (Seide et al. 2014, 1-bit SGD; Karimireddy et al., https://arxiv.org/abs/1901.09847), of the
    sums as well (Tang et al., https://arxiv.org/abs/1905.05957).
    """
    rank, size = collectives.rank, collectives.world_size
    owed = [t + copies[0] for t, copies in zip(zeros_unless(active, tensors), residuals, strict=True)]
    lengths = [copies[0].shape.num_elements() for copies in residuals]
    if size == 1 or is_small(sum(lengths) * tf.float32.size, size):
        _keep([tf.zeros_like(t) for t in owed], residuals)
        return collectives.all_reduce(owed, name=name)
    wire = tf.as_dtype(compression)
    flat = tf.concat([tf.reshape(t, [-1]) for t in owed], 0)
    sent = tf.cast(flat, wire)
    begin, end = chunk_bounds(sum(lengths), size)[rank]
    received, _ = collectives.all_to_all(sent, name=name)
    total = tf.reduce_sum(tf.cast(tf.reshape(received, [size, end - begin]), tf.float32), 0)
    rounded = tf.cast(total, wire)
    sums = tf.cast(collectives.all_gather(rounded, name=name), tf.float32)
    errors = flat - tf.cast(sent, tf.float32)
    of_sum = total - tf.cast(rounded, tf.float32)
    errors = tf.concat([errors[:begin], errors[begin:end] + of_sum, errors[end:]], 0)
    errors = tf.where(tf.math.is_finite(errors), errors, tf.zeros_like(errors))
    shapes = [copies[0].shape for copies in residuals]
    _keep(_take_apart(errors, shapes), residuals)
    return _take_apart(sums, shapes)


def _take_apart(flat: tf.Tensor, shapes: Sequence[tf.TensorShape]) -> list[tf.Tensor]:
    parts = tf.split(flat, [shape.num_elements() for shape in shapes])
    return [tf.reshape(part, shape) for part, shape in zip(parts, shapes, strict=True)]


def _keep(values: Sequence[tf.Tensor], residuals: Sequence[Sequence[tf.Variable]]) -> None:
    for value, copies in zip(values, residuals, strict=True):
        for copy in copies:
            copy.assign(value)
