"""Exchanges between ranks that hold the same rows and different parts of a layer (Megatron-LM, arXiv:1909.08053).

```
                 forward                                 in the backward pass
copied           every rank has all: nothing             the sum of what each rank's part gives
gathered         parts of all ranks beside each other    this rank's part: nothing
sliced           this rank's part: nothing               parts of all ranks beside each other
summed           the sum of what each rank has           every rank has all: nothing
```

A product by columns is `gathered(copied(x) @ W_r)`, a product by rows `summed(sliced(x) @ W_r)`. One after the other
needs neither `gathered` nor `sliced`, and so one sum in the forward pass and one in the backward pass.

All ranks compute the same loss from the outputs, so a gradient that all ranks have is one gradient, not one per rank.
The gradients of the engine's own `all_gather` and `all_reduce`, which sum those of different losses, differ from these.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import tensorflow as tf

from tfring import _tf
from tfring.layers.data_parallel_matmul import unflatten_columns
from tfring.ring.collectives import Collectives


class ReplicatedInputMatmul:
    """The ranks of an axis, which hold the same rows.

    Args:
      collectives: The engine, see `tfring.ring.collectives`.
      bounds: Begin and end of each rank's part of the columns that are gathered or sliced.
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
          inputs: `[rows, features]`, the same on all ranks.
          kernel: `[features, columns of this rank]`, of the dtype of `inputs`.
          bias: `[columns of this rank]`, or None.
          leaves_parts: Whether the result has only the columns of this rank.

        Returns:
          A tensor of shape `[rows, columns]`, with the columns of all ranks or of this one.
        """
        result = tf.matmul(self.copied(inputs), kernel)
        if bias is not None:
            result += bias
        return result if leaves_parts else self.gathered(result)

    def rows(self, inputs: tf.Tensor, kernel: tf.Tensor, takes_parts: bool = False) -> tf.Tensor:
        """Returns `inputs @ kernel` with the full kernel, of which this rank has rows.

        Args:
          inputs: `[rows, features]`, with the features of all ranks or of this one.
          kernel: `[features of this rank, units]`, of the dtype of `inputs`.
          takes_parts: Whether `inputs` have only the features of this rank.

        Returns:
          A tensor of shape `[rows, units]`.
        """
        return self.summed(tf.matmul(inputs if takes_parts else self.sliced(inputs), kernel))

    def copied(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the value; its gradient is the sum over the ranks."""
        exchange = _tf.with_gradient(tf.identity, functools.partial(self._sum, what="gradient of inputs"))
        return self._collectives.call_in_order(exchange, value)

    def summed(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the sum over the ranks; each rank's gradient is that of the sum."""
        exchange = _tf.with_gradient(functools.partial(self._sum, what="outputs"), tf.identity)
        return self._collectives.call_in_order(exchange, value)

    def gathered(self, part: tf.Tensor) -> tf.Tensor:
        """Gathers `[rows, columns of all ranks]` from those of this rank; the gradient is this rank's part."""
        return _tf.with_gradient(functools.partial(self._gather, what="outputs"), self._part)(part)

    def sliced(self, rows: tf.Tensor) -> tf.Tensor:
        """Slices `[rows, columns of this rank]` from those of all ranks; the gradient is that of all ranks."""
        exchange = _tf.with_gradient(self._part, functools.partial(self._gather, what="gradient of inputs"))
        return self._collectives.call_in_order(exchange, rows)

    def _sum(self, value: tf.Tensor, what: str) -> tf.Tensor:
        [total] = self._collectives.all_reduce([value], name=f"{self._key}/{what}")
        return total

    def _gather(self, part: tf.Tensor, what: str) -> tf.Tensor:
        flat = self._collectives.all_gather(tf.reshape(part, [-1]), name=f"{self._key}/{what}")
        return unflatten_columns(flat, self._sizes)

    def _part(self, rows: tf.Tensor) -> tf.Tensor:
        return tf.split(rows, self._sizes, axis=1)[self._collectives.rank]
