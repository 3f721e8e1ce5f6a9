"""Reduces dense gradients: packs them into buckets, with one collective per bucket."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from tfring.reduction.buckets import plan_buckets
from tfring.ring.collectives import Collectives, zeros_unless
from tfring.sharding import Sharding

BUCKET_BYTES = 32 << 20  # within a host, where sums and copies use processors that would otherwise compute
NETWORK_BUCKET_BYTES, NETWORK_LAST_BYTES = 8 << 20, 1 << 20  # between hosts; figures: benchmarks/training


class BucketSizes(NamedTuple):
    """The arguments of `plan_buckets`; see there."""

    bucket_bytes: int = BUCKET_BYTES
    last_bytes: int | None = None

    @classmethod
    def of(cls, num_nodes: int) -> BucketSizes:
        """Returns the sizes for workers on a number of hosts.

        >>> BucketSizes.of(num_nodes=1)
        BucketSizes(bucket_bytes=33554432, last_bytes=None)
        >>> BucketSizes.of(num_nodes=4)
        BucketSizes(bucket_bytes=8388608, last_bytes=1048576)
        """
        return cls() if num_nodes == 1 else cls(NETWORK_BUCKET_BYTES, NETWORK_LAST_BYTES)


def reduce_dense(
    collectives: Collectives,
    tensors: Sequence[tf.Tensor],
    *,
    name: str,
    active: tf.Tensor | None = None,
    buckets: BucketSizes,
    compression: str | None = None,
) -> list[tf.Tensor]:
    """Sums each tensor over all ranks.

    Args:
      collectives: The engine, see `tfring.ring.collectives`.
      tensors: The tensors of this worker, with the same shapes and dtypes in the same order on every rank.
      name: Name of the tensors, for errors and traces.
      active: A bool scalar. If False, this rank adds zeros, whatever its tensors hold (NaN included). Defaults to None.
      buckets: The sizes of the buckets.
      compression: How float32 is sent; see `Communicator.all_reduce`. Defaults to None.

    Returns:
      The sums, in the order and with the shapes of `tensors`.
    """

    def reduce(indices: Sequence[int], name: str, dtype: tf.DType) -> list[tf.Tensor]:
        travels_as = compression if dtype == "float32" else None
        return collectives.all_reduce([tensors[i] for i in indices], name=name, active=active, compression=travels_as)

    return _in_buckets(reduce, tensors, [t.shape for t in tensors], name, buckets)


def reduce_scatter_dense(
    collectives: Collectives,
    tensors: Sequence[tf.Tensor],
    shardings: Sequence[Sharding],
    *,
    name: str,
    active: tf.Tensor | None = None,
    buckets: BucketSizes,
) -> list[tf.Tensor]:
    """Sums over all ranks and returns this rank's shards, see `plan_shards`; otherwise like `reduce_dense`."""

    def reduce_scatter(indices: Sequence[int], name: str, dtype: tf.DType) -> list[tf.Tensor]:
        return collectives.reduce_scatter(zeros_unless(active, [lined_up[i] for i in indices]), name=name)

    lined_up = [tf.reshape(t, sharding.lined_up) for t, sharding in zip(tensors, shardings, strict=True)]
    return _in_buckets(reduce_scatter, lined_up, [sharding.shape for sharding in shardings], name, buckets)


def all_gather_dense(
    collectives: Collectives,
    shards: Sequence[tf.Tensor],
    shardings: Sequence[Sharding],
    *,
    name: str,
    buckets: BucketSizes,
) -> list[tf.Tensor]:
    """Gathers, on every rank, the full tensors from the shards of all ranks; `shards` are those of this rank."""

    def all_gather(indices: Sequence[int], name: str, dtype: tf.DType) -> list[tf.Tensor]:
        return collectives.all_gather([shards[i] for i in indices], name=name)

    gathered = _in_buckets(all_gather, shards, [sharding.shape for sharding in shardings], name, buckets)
    return [tf.reshape(full, sharding.shape) for full, sharding in zip(gathered, shardings, strict=True)]


def _in_buckets(
    collective: Callable,
    tensors: Sequence[tf.Tensor],
    shapes: Sequence[tf.TensorShape],
    name: str,
    buckets: BucketSizes,
) -> list[tf.Tensor]:
    """Calls `collective(indices, name, dtype)` on buckets grouped by `shapes`, in the same way on all ranks."""
    # A shape that is not static counts as 0 bytes: it joins a bucket and the native code measures it.
    sizes = [tf.TensorShape(shape).num_elements() or 0 for shape in shapes]
    num_bytes = [size * t.dtype.size for size, t in zip(sizes, tensors, strict=True)]
    results: list[tf.Tensor] = [None] * len(tensors)
    for number, bucket in enumerate(plan_buckets(num_bytes, [t.dtype.name for t in tensors], *buckets)):
        of_bucket = collective(bucket.indices, f"{name}/bucket_{number}", bucket.dtype)
        for i, result in zip(bucket.indices, of_bucket, strict=True):
            results[i] = result
    return results
