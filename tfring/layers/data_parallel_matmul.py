"""Matrix products with a kernel that is sharded over ranks, each of which has its own rows.

```
kernel by columns   rows of each ─(1)─► rows of all ─► times W_r ─► columns r of all rows ─(2)─► own rows
kernel by rows      rows of each ─(2')─► columns r of all rows ─► times W_r ─► parts of sums ─(1')─► own rows
```

(1) is an `all_gather`. (1') sends each rank the parts of its rows from all ranks, and sums them. (2) and (2') are
`all_to_all`. In the backward pass gradients go the same way back: (1') is the gradient of (1), (2') that of (2), and
vice versa.

The gradient of the kernel covers the rows of all ranks, each weighted by its rank's share of the batch. It is that of
the whole batch, complete when the optimizer receives it. Gradients of the inputs are each rank's own, not weighted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from tfring import _tf, step
from tfring.ring.collectives import Collectives


class DataParallelMatmul:
    """The ranks of an axis, each with its own rows.

    Args:
      collectives: The engine, see `tfring.ring.collectives`.
      bounds: Begin and end of each rank's columns: of the outputs for a kernel by columns, of the inputs for one by
        rows.
      key: Name of the collectives, the same on all ranks.
    """

    def __init__(self, collectives: Collectives, bounds: Sequence[tuple[int, int]], key: str) -> None:
        self._collectives = collectives
        self._sizes = [end - begin for begin, end in bounds]
        self._key = key

    def columns(
        self, inputs: tf.Tensor, kernel: tf.Tensor, bias: tf.Tensor | None, leaves_parts: bool = False
    ) -> tf.Tensor:
        """Returns `inputs @ kernel + bias` with the full kernel, of which this rank has columns.

        Args:
          inputs: `[rows, features]`.
          kernel: `[features, columns of this rank]`, of the dtype of `inputs`.
          bias: `[columns of this rank]`, or None.
          leaves_parts: Must be False: parts would be of the rows of all ranks.

        Returns:
          A tensor of shape `[rows, columns of all ranks]`.
        """
        assert not leaves_parts
        call = _Call(self._collectives, self._sizes, self._key, inputs)
        rows, shares = call.gathered(inputs)
        return call.full(_product(rows, kernel, bias, shares))

    def rows(self, inputs: tf.Tensor, kernel: tf.Tensor, takes_parts: bool = False) -> tf.Tensor:
        """Returns `inputs @ kernel` with the full kernel, of which this rank has rows.

        Args:
          inputs: `[rows, features]`.
          kernel: `[features of this rank, units]`, of the dtype of `inputs`.
          takes_parts: Must be False.

        Returns:
          A tensor of shape `[rows, units]`.
        """
        assert not takes_parts
        call = _Call(self._collectives, self._sizes, self._key, inputs)
        rows, shares = call.sliced(inputs)
        return call.summed(_product(rows, kernel, None, shares))


class _Call:
    """One product: four exchanges. The last two need what the first two learn about the rows of all ranks.

    A rank without rows of the batch computes on a padding row: it sends no row, and gets zeros for it.
    """

    def __init__(self, collectives: Collectives, sizes: Sequence[int], key: str, inputs: tf.Tensor) -> None:
        self._collectives = collectives
        self._sizes = sizes
        self._key = key
        self._running = step.current() or step.Step()
        self._num_given = tf.shape(inputs)[0]
        share = self._running.share
        self._share = None if share is None else tf.cast(share, tf.float64)
        self._counts = tf.zeros([], tf.int64)  # number of rows of each rank, once known

    # -- with gradients ------------------------------------------------------------------------------------------------

    def gathered(self, rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor | None]:
        """(1) Gathers `[rows, features]` of all ranks, and the share of each row's rank, or None if unknown."""
        call = _tf.with_gradient(partial(self._gather, what="inputs"), partial(self._sum, what="gradient of inputs"))
        everyones, shares, self._counts = self._collectives.call_in_order(call, rows)
        return everyones, self._of_each_row(shares)

    def summed(self, products: tf.Tensor) -> tf.Tensor:
        """(1') Sums the parts of all ranks to `[rows of this rank, units]`."""

        def backward(gradient: tf.Tensor) -> tf.Tensor:
            return self._gather(gradient, "gradient of outputs")[0]

        call = _tf.with_gradient(partial(self._sum, what="outputs"), backward)
        return self._collectives.call_in_order(call, products)

    def sliced(self, rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor | None]:
        """(2') Returns this rank's columns `[rows, columns]` of the rows of all ranks, and shares; see `gathered`."""
        call = _tf.with_gradient(partial(self._cut, what="inputs"), partial(self._join, what="gradient of inputs"))
        columns, shares, self._counts = self._collectives.call_in_order(call, rows)
        return columns, self._of_each_row(shares)

    def full(self, columns: tf.Tensor) -> tf.Tensor:
        """(2) Returns `[rows of this rank, all columns]`."""

        def backward(gradient: tf.Tensor) -> tf.Tensor:
            return self._cut(gradient, "gradient of outputs")[0]

        call = _tf.with_gradient(partial(self._join, what="outputs"), backward)
        return self._collectives.call_in_order(call, columns)

    def _of_each_row(self, shares: tf.Tensor) -> tf.Tensor | None:
        return None if self._share is None else tf.repeat(shares, self._counts)

    # -- without -------------------------------------------------------------------------------------------------------

    def _gather(self, rows: tf.Tensor, what: str) -> Any:
        rows = self._running.drop_if_empty(rows)
        share = tf.ones([1], tf.float64) if self._share is None else self._share[None]
        return self._collectives.all_gather([rows, share, tf.shape(rows, tf.int64)[:1]], name=f"{self._key}/{what}")

    def _sum(self, products: tf.Tensor, what: str) -> tf.Tensor:
        mine = self._counts[self._collectives.rank]
        received, _ = self._collectives.all_to_all(products, self._counts, name=f"{self._key}/{what}")
        received = tf.reshape(received, [self._collectives.world_size, mine, products.shape[1]])
        wide = tf.float32 if received.dtype in (tf.float16, tf.bfloat16) else received.dtype
        return self._as_given(tf.cast(tf.reduce_sum(tf.cast(received, wide), 0), received.dtype))

    def _cut(self, rows: tf.Tensor, what: str) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        rows = self._running.drop_if_empty(rows)
        count = tf.shape(rows, tf.int64)[0]
        share = tf.ones([], tf.float64) if self._share is None else self._share
        (columns, shares), (received, _) = self._collectives.all_to_all(
            [flat_columns(rows, self._sizes), tf.fill([len(self._sizes)], share)],
            [count * self._sizes, [1] * len(self._sizes)],
            name=f"{self._key}/{what}",
        )
        width = self._sizes[self._collectives.rank]
        return tf.reshape(columns, [-1, width]), shares, received // width

    def _join(self, columns: tf.Tensor, what: str) -> tf.Tensor:
        sent = self._counts * columns.shape[1]
        received, _ = self._collectives.all_to_all(tf.reshape(columns, [-1]), sent, name=f"{self._key}/{what}")
        return self._as_given(unflatten_columns(received, self._sizes))

    def _as_given(self, rows: tf.Tensor) -> tf.Tensor:
        """Pads rows to the number given to the call: with zeros if the only row is a padding row."""
        if self._running.active is not None:
            rows = tf.pad(rows, [[0, self._num_given - tf.shape(rows)[0]], [0, 0]])
        return rows


def flat_columns(rows: tf.Tensor, sizes: Sequence[int]) -> tf.Tensor:
    """Flattens the columns of `[rows, sum(sizes)]`, in groups of `sizes` columns, to `[rows * sum(sizes)]`.

    >>> flat_columns(tf.constant([[1, 2, 3], [4, 5, 6]]), [2, 1]).numpy()
    array([1, 2, 4, 5, 3, 6], dtype=int32)
    """
    return tf.concat([tf.reshape(part, [-1]) for part in tf.split(rows, sizes, axis=1)], 0)


def unflatten_columns(flat: tf.Tensor, sizes: Sequence[int]) -> tf.Tensor:
    """Restores the columns that `flat_columns` flattened.

    >>> unflatten_columns(tf.constant([1, 2, 4, 5, 3, 6]), [2, 1]).numpy()
    array([[1, 2, 3],
           [4, 5, 6]], dtype=int32)
    """
    num_rows = tf.size(flat) // sum(sizes)
    parts = tf.split(flat, [num_rows * size for size in sizes], num=len(sizes))
    return tf.concat([tf.reshape(part, [num_rows, size]) for part, size in zip(parts, sizes, strict=True)], 1)


def _product(rows: tf.Tensor, kernel: tf.Tensor, bias: tf.Tensor | None, shares: tf.Tensor | None) -> tf.Tensor:
    """Returns `rows @ kernel + bias`; the gradients of kernel and bias weight each row by its share."""

    @tf.custom_gradient
    def product(rows: tf.Tensor, kernel: tf.Tensor, *bias: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
        def gradient(upstream: tf.Tensor) -> tuple[tf.Tensor, ...]:
            weighed = upstream
            if shares is not None:
                wide = tf.float32 if upstream.dtype in (tf.float16, tf.bfloat16) else upstream.dtype
                weighed = tf.cast(tf.cast(upstream, wide) * tf.cast(shares, wide)[:, None], upstream.dtype)
            of_rows = tf.matmul(upstream, kernel, transpose_b=True)
            of_kernel = tf.matmul(rows, weighed, transpose_a=True)
            return of_rows, of_kernel, *(tf.reduce_sum(weighed, 0) for _ in bias)

        result = tf.matmul(rows, kernel)
        return result + bias[0] if bias else result, gradient

    return product(rows, kernel, *([] if bias is None else [bias]))
