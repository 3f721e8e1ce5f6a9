"""Which gradients share a collective: a pure plan from sizes and dtypes, made before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Bucket(NamedTuple):
    """Gradients of one dtype that travel in one collective."""

    dtype: str
    indices: tuple[int, ...]
    """Positions in the list of gradients, in the order of packing."""
    num_bytes: int


def plan_buckets(num_bytes: Sequence[int], dtypes: Sequence[str], bucket_bytes: int) -> list[Bucket]:
    """Groups gradients by dtype into buckets of at most `bucket_bytes`.

    The list is walked from its end, because the backward pass computes the last layer's gradient first: the
    first bucket is full, and on its way, while the rest is still being computed. A gradient larger than
    `bucket_bytes` has a bucket of its own.

    ```
    gradients   0: f32 4   1: f32 4   2: f16 2   3: f32 4        bucket_bytes = 8
    buckets     [3, 1] f32    [2] f16    [0] f32                 (in this order)
    ```

    Args:
      num_bytes: size of each gradient in bytes.
      dtypes: dtype name of each gradient.
      bucket_bytes: the most bytes that share a bucket, > 0.

    Returns:
      The buckets in the order of sending: by when each was opened. Every gradient is in exactly one.

    Raises:
      ValueError: where `bucket_bytes` is not positive.

    >>> plan_buckets([4, 4, 2, 4], ["float32", "float32", "float16", "float32"], 8)
    [Bucket(dtype='float32', indices=(3, 1), num_bytes=8), Bucket(dtype='float16', indices=(2,), num_bytes=2), \
Bucket(dtype='float32', indices=(0,), num_bytes=4)]
    """
    if bucket_bytes <= 0:
        raise ValueError(f"`bucket_bytes` must be positive. Received: bucket_bytes={bucket_bytes}")
    assert len(num_bytes) == len(dtypes)
    buckets: list[tuple[str, list[int], int]] = []
    open_bucket: dict[str, int] = {}
    for i in reversed(range(len(num_bytes))):
        at = open_bucket.get(dtypes[i])
        if at is None or buckets[at][2] + num_bytes[i] > bucket_bytes:
            at = open_bucket[dtypes[i]] = len(buckets)
            buckets.append((dtypes[i], [], 0))
        dtype, indices, total = buckets[at]
        indices.append(i)
        buckets[at] = (dtype, indices, total + num_bytes[i])
    return [Bucket(dtype, tuple(indices), total) for dtype, indices, total in buckets]
