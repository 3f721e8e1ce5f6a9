"""Plans which gradients share a collective. Pure: from sizes and dtypes, before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Bucket(NamedTuple):
    """Gradients of one dtype that are sent in one collective."""

    dtype: str
    indices: tuple[int, ...]
    """Positions in the list of gradients, in the order of packing."""
    num_bytes: int


def plan_buckets(
    num_bytes: Sequence[int], dtypes: Sequence[str], bucket_bytes: int, last_bytes: int | None = None
) -> list[Bucket]:
    """Groups gradients by dtype into buckets of about `bucket_bytes`, in the order in which they become ready.

    The backward pass computes the last layer's gradient first, so buckets are sent from the end of the list while the
    rest is still being computed. No computation is left to hide the bucket that is sent last: it can be small, and the
    buckets before it grow from its size.

    ```
    gradients   0: f32 4   1: f32 4   2: f16 2   3: f32 4        bucket_bytes = 8
    buckets     [3] f32    [2] f16    [1, 0] f32                 (in this order)
    ```

    A gradient is never split, so a bucket is closed by the gradient with which it holds `bucket_bytes` or more.

    Args:
      num_bytes: Size of each gradient in bytes, in the order of the layers.
      dtypes: Name of the dtype of each gradient.
      bucket_bytes: Number of bytes that close a bucket, > 0.
      last_bytes: Number of bytes that close the bucket that is sent last (of each dtype), > 0. Twice this number closes
        the bucket before it, and so on up to `bucket_bytes`. Defaults to `bucket_bytes`.

    Returns:
      The buckets in the order of sending: by when the last of their gradients is computed. Every gradient is in
      exactly one bucket, and the gradients of a bucket are in the order in which they are computed.

    >>> plan_buckets([4, 4, 2, 4], ["float32", "float32", "float16", "float32"], 8)
    [Bucket(dtype='float32', indices=(3,), num_bytes=4), Bucket(dtype='float16', indices=(2,), num_bytes=2), \
Bucket(dtype='float32', indices=(1, 0), num_bytes=8)]
    >>> [bucket.num_bytes for bucket in plan_buckets([1] * 20, ["float32"] * 20, 8, last_bytes=2)]
    [6, 8, 4, 2]
    """
    assert bucket_bytes > 0 and (last_bytes is None or last_bytes > 0)
    assert len(num_bytes) == len(dtypes)
    buckets: list[Bucket] = []
    for dtype in dict.fromkeys(dtypes):
        limit = min(bucket_bytes, last_bytes or bucket_bytes)
        indices: list[int] = []
        total = 0
        of_dtype = [i for i in range(len(dtypes)) if dtypes[i] == dtype]
        for i in of_dtype:
            indices.insert(0, i)
            total += num_bytes[i]
            if total >= limit or i == of_dtype[-1]:
                buckets.append(Bucket(dtype, tuple(indices), total))
                limit = min(bucket_bytes, 2 * limit)
                indices, total = [], 0
    return sorted(buckets, key=lambda bucket: -bucket.indices[-1])
