"""Merges the moments of all replicas of a strategy in one collective, to the same bits on all replicas.

```
            in the forward pass: merge                      in the backward pass: sum
replica i   (count_i, mean_i, m2_i) ─► all ─► (count, mean, m2)     (dy_i, dy_i xhat_i) ─► all ─► sums
```

Every replica gets the moments of all replicas, in the order of rank and replica, and merges them itself
("all_reduce"), or rank 0 merges them for all ("central", `tfring/layers/central.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfring.cross_device_ops import values_of
from tfring.layers.moments import merge
from tfring.runtime import Ring


class LocalStatistics:
    """Statistics of one replica, or of a layer called outside of `strategy.run`: its own moments."""

    def merge(self, moments: tf.Tensor, share: tf.Tensor | None = None) -> tf.Tensor:
        """Returns the moments `[..., 3, channels]` of all replicas.

        Args:
          moments: The moments of this replica.
          share: A bool scalar, the same on all replicas. If False, nothing is exchanged and each replica keeps its own
            moments.
        """
        return moments

    def sum(self, sums: tf.Tensor, share: tf.Tensor | None = None) -> tf.Tensor:
        """Returns the sum over all replicas of tensors of the same shape; see `merge` for the arguments."""
        return sums

    def call_in_order(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls a function that calls `sum` in its gradient, in order with others; see `Collectives.call_in_order`."""
        return function(*args)


class ReplicaStatistics(LocalStatistics):
    """Statistics over any `tf.distribute.Strategy`: each replica adds its moments to zeros at its own index."""

    def __init__(self, context: tf.distribute.ReplicaContext) -> None:
        self._context = context

    def merge(self, moments: tf.Tensor, share: tf.Tensor | None = None) -> tf.Tensor:
        return self._exchange(moments, share, merge)

    def sum(self, sums: tf.Tensor, share: tf.Tensor | None = None) -> tf.Tensor:
        return self._exchange(sums, share, lambda everyone: tf.reduce_sum(everyone, 0))

    def _exchange(
        self, mine: tf.Tensor, share: tf.Tensor | None, combine: Callable[[tf.Tensor], tf.Tensor]
    ) -> tf.Tensor:
        replica = tf.reshape(tf.cast(self._context.replica_id_in_sync_group, tf.int32), [1, 1])
        places = tf.zeros([self._context.num_replicas_in_sync, *mine.shape], mine.dtype)
        everyone = tf.tensor_scatter_nd_update(places, replica, mine[None])
        combined = combine(self._context.all_reduce(tf.distribute.ReduceOp.SUM, everyone))
        # Replicas of this strategy may not merge inside a tf.cond, so they also exchange values that they do not use.
        return combined if share is None else tf.where(share, combined, mine)


class RingStatistics(LocalStatistics):
    """Statistics over a RingStrategy: the replicas of a worker join, then one all-gather of the control ring.

    It does not use the gradients' ring, so that no bucket of gradients waits for a statistic.
    """

    def __init__(self, ring: Ring, key: str) -> None:
        self.ring = ring
        self._control = ring.control
        self._key = key

    def merge(self, moments: tf.Tensor, share: tf.Tensor | None = None) -> tf.Tensor:
        return self._exchange(moments, share, "moments", merge)

    def sum(self, sums: tf.Tensor, share: tf.Tensor | None = None) -> tf.Tensor:
        return self._exchange(sums, share, "gradient", lambda everyone: tf.reduce_sum(everyone, 0))

    def call_in_order(self, function: Callable[..., Any], *args: Any) -> Any:
        return self._control.call_in_order(function, *args)

    def _exchange(
        self, mine: tf.Tensor, share: tf.Tensor | None, what: str, combine: Callable[[tf.Tensor], tf.Tensor]
    ) -> tf.Tensor:
        def on_worker(replicas: Any, shares: Any) -> tf.Tensor:
            replicas = tf.stack(values_of(replicas))
            if share is None:
                return self._over_workers(replicas, what, combine)
            return tf.cond(
                values_of(shares)[0],
                lambda: self._over_workers(replicas, what, combine),
                lambda: tf.zeros_like(replicas[0]),
            )

        combined = self.ring.cross_replica(on_worker, mine, share)
        return combined if share is None else tf.where(share, combined, mine)

    def _over_workers(self, replicas: tf.Tensor, what: str, combine: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
        """Combines the replicas' values of all workers; `replicas` is `[replicas of this worker, ...]`."""
        everyone = self._control.gather_equal(replicas, name=f"{self._key}/{what}")
        return combine(everyone)
