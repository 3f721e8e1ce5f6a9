"""Dense gradients: packed into buckets, one all-reduce a bucket."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfring.reduction.buckets import plan_buckets

DEFAULT_BUCKET_BYTES = 32 << 20


def reduce_dense(
    collectives,
    tensors: Sequence[tf.Tensor],
    *,
    name: str,
    active: tf.Tensor | None = None,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    compression: str | None = None,
) -> list[tf.Tensor]:
    """Sums each tensor over all ranks.

    Args:
      collectives: the engine, see `tfring.ring.collectives`.
      tensors: one worker's tensors; same shapes and dtypes in the same order on every rank.
      name: what they are, for errors and traces.
      active: bool scalar; where False this rank adds zeros, whatever its tensors hold (NaN included).
      bucket_bytes: see `plan_buckets`.
      compression: what float32 travels as, see `Communicator.all_reduce`.

    Returns:
      The sums, in the order and with the shapes of `tensors`.
    """
    if not tensors:
        return []
    # A shape that is not static counts as 0 bytes: it joins a bucket and the native code measures it.
    num_bytes = [(t.shape.num_elements() or 0) * t.dtype.size for t in tensors]
    buckets = plan_buckets(num_bytes, [t.dtype.name for t in tensors], bucket_bytes)
    results: list[tf.Tensor] = [None] * len(tensors)
    for number, bucket in enumerate(buckets):
        reduced = collectives.all_reduce(
            [tensors[i] for i in bucket.indices],
            name=f"{name}/bucket_{number}",
            active=active,
            compression=compression if bucket.dtype == "float32" else None,
        )
        for i, value in zip(bucket.indices, reduced, strict=True):
            results[i] = value
    return results
