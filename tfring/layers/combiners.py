"""Combines the rows of several ids per example, in a dense, ragged or sparse tensor, into one row.

```
ragged   [[4, 1], [], [4]]          ids 4 1 4   of examples 0 0 2   rows a b a ─► a+b, 0, a
```
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfring.errors import ConfigurationError

COMBINERS = (None, "sum", "mean", "sqrtn")


def check_combiner(combiner: str | None, name: str) -> None:
    """Raises ConfigurationError if `combiner`, of the layer or table `name`, is none of `COMBINERS`."""
    if combiner not in COMBINERS:
        raise ConfigurationError(f"`combiner` of {name!r} is {combiner!r}, not one of {COMBINERS}.")


def check_ids(ids: Any, combiner: str | None, name: str) -> None:
    """Raises ConfigurationError for ragged or sparse ids that cannot become one row; `ids` may be a symbol of Keras."""
    layout = _layout(ids)
    if layout != "dense" and (combiner is None or len(ids.shape) != 2):
        raise ConfigurationError(
            f"{layout.capitalize()} ids of {name!r} have shape {tuple(ids.shape)} and combiner={combiner!r}. Sparse "
            "and ragged ids must be [examples, ids] and need a combiner, which makes one row per example. Set a "
            "combiner, or pass dense ids (`to_tensor()`, `tf.sparse.to_dense`)."
        )


def _layout(ids: Any) -> str:
    """Returns the layout of ids in a tensor or a symbol of Keras: "dense", "ragged" or "sparse"."""
    if isinstance(ids, tf.RaggedTensor) or getattr(ids, "ragged", False):
        return "ragged"
    return "sparse" if isinstance(ids, tf.SparseTensor) or getattr(ids, "sparse", False) else "dense"


def flat(tensor: Any) -> tf.Tensor:
    """Returns the values of a ragged or sparse tensor, or a dense tensor as it is."""
    if isinstance(tensor, tf.RaggedTensor):
        return tensor.flat_values
    return tensor.values if isinstance(tensor, tf.SparseTensor) else tensor


def combined(rows: tf.Tensor, ids: Any, weights: Any, combiner: str, mask_zero: bool = False) -> tf.Tensor:
    """Returns one row per example: `sum w_i r_i`, divided by `sum w_i` ("mean") or by `sqrt(sum w_i^2)` ("sqrtn").

    Args:
      rows: The rows of `flat(ids)`.
      ids: `[..., ids]`, or ragged or sparse of rank 2.
      weights: `w_i`, with the layout of `ids`, of any float dtype. None for 1 each.
      combiner: "sum", "mean" or "sqrtn".
      mask_zero: Whether to ignore id 0. Defaults to False.

    Returns:
      A dense tensor of shape `[..., columns]` in the dtype of the rows, with zeros if all `w_i` are 0 or there is none.

    Raises:
      ValueError: If the weights have another layout.
    """
    if weights is not None and _layout(weights) != _layout(ids):
        raise ValueError(
            f"The weights are {_layout(weights)}, but their ids are {_layout(ids)}. Both must have the same layout."
        )

    def total(values: tf.Tensor) -> tf.Tensor:
        if isinstance(ids, tf.RaggedTensor):
            return tf.math.unsorted_segment_sum(values, ids.value_rowids(), ids.nrows())
        if isinstance(ids, tf.SparseTensor):
            return tf.math.unsorted_segment_sum(values, ids.indices[:, 0], ids.dense_shape[0])
        return tf.reduce_sum(values, -2)

    weights = tf.ones_like(flat(ids), rows.dtype) if weights is None else tf.cast(flat(weights), rows.dtype)
    if mask_zero:
        weights = tf.where(tf.equal(flat(ids), 0), tf.zeros_like(weights), weights)
    weights = weights[..., None]
    if combiner == "sum":
        return total(rows * weights)
    size = total(weights) if combiner == "mean" else tf.sqrt(total(tf.square(weights)))
    return tf.math.divide_no_nan(total(rows * weights), size)
