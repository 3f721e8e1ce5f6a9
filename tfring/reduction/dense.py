"""Dense gradients: packed into buckets, one all-reduce a bucket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tfring.reduction.buckets import plan_buckets

BUCKET_BYTES = 32 << 20  # within a host, where adding and copying take the processors that would compute meanwhile
NETWORK_BUCKET_BYTES, NETWORK_LAST_BYTES = 8 << 20, 1 << 20  # else; benchmarks/training has figures


class BucketSizes(NamedTuple):
    """See `plan_buckets`."""

    bucket_bytes: int = BUCKET_BYTES
    last_bytes: int | None = None

    @classmethod
    def of(cls, num_nodes: int) -> BucketSizes:
        """For workers on so many hosts.

        >>> BucketSizes.of(num_nodes=1)
        BucketSizes(bucket_bytes=33554432, last_bytes=None)
        >>> BucketSizes.of(num_nodes=4)
        BucketSizes(bucket_bytes=8388608, last_bytes=1048576)
        """
        return cls() if num_nodes == 1 else cls(NETWORK_BUCKET_BYTES, NETWORK_LAST_BYTES)


def reduce_dense(
    collectives,
    tensors: Sequence[tf.Tensor],
    *,
    name: str,
    active: tf.Tensor | None = None,
    buckets: BucketSizes,
    compression: str | None = None,
) -> list[tf.Tensor]:
    """Sums each tensor over all ranks.

    Args:
      collectives: the engine, see `tfring.ring.collectives`.
      tensors: one worker's tensors; same shapes and dtypes in the same order on every rank.
      name: what they are, for errors and traces.
      active: bool scalar; where False this rank adds zeros, whatever its tensors hold (NaN included).
      buckets: how large they get.
      compression: what float32 travels as, see `Communicator.all_reduce`.

    Returns:
      The sums, in the order and with the shapes of `tensors`.
    """
    if not tensors:
        return []
    # A shape that is not static counts as 0 bytes: it joins a bucket and the native code measures it.
    num_bytes = [(t.shape.num_elements() or 0) * t.dtype.size for t in tensors]
    plan = plan_buckets(num_bytes, [t.dtype.name for t in tensors], *buckets)
    results: list[tf.Tensor] = [None] * len(tensors)
    for number, bucket in enumerate(plan):
        reduced = collectives.all_reduce(
            [tensors[i] for i in bucket.indices],
            name=f"{name}/bucket_{number}",
            active=active,
            compression=compression if bucket.dtype == "float32" else None,
        )
        for i, value in zip(bucket.indices, reduced, strict=True):
            results[i] = value
    return results
