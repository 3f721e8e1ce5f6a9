"""Combines workers' differences of a table's rows by their diversity: `tfring.Delayed(tables="diversity")`.

The differences `d_i` of a row, from workers with shares `s_i` of the rows trained (their sum is 1), become

```
mean = sum_i s_i d_i
row  = mean * sum_i s_i |d_i|^2 / max(|mean|^2, sum_i s_i^2 |d_i|^2)
```

The factor is 1 if all workers moved the row alike, and 1 / s_i if only worker i moved it: then the row is d_i.
If the differences are orthogonal, the second term of the maximum equals the first, and for equal shares the row is
their sum. This term bounds the factor if differences oppose each other. For equal shares the factor is N times the
gradient diversity of Yin et al. (https://arxiv.org/abs/1706.05699), at most N.

Both sums of squares are sent as two additional columns of the rows, so that one exchange is enough.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

_COLUMNS = 2


def with_squares(rows: tf.Tensor, share: tf.Tensor) -> tf.Tensor:
    """Returns a worker's differences times its share, flat, with two columns of squares, to be summed over workers.

    16-bit floats become float32, which holds the squares of small differences.

    >>> with_squares(tf.constant([[3.0, 4.0]]), tf.constant(0.5, tf.float64)).numpy().tolist()
    [[1.5, 2.0, 12.5, 6.25]]
    """
    dtype = tf.float32 if rows.dtype.size < 4 else rows.dtype
    flat = tf.cast(tf.reshape(rows, [tf.shape(rows)[0], rows.shape[1:].num_elements()]), dtype)
    share = tf.cast(share, dtype)
    squares = tf.reduce_sum(tf.square(flat), 1, keepdims=True)
    return tf.concat([share * flat, share * squares, share * share * squares], 1)


def combined(sums: tf.Tensor, row_shape: Sequence[int], dtype: tf.DType) -> tf.Tensor:
    """Returns the combined rows, from the sums of `with_squares` over workers.

    >>> half = tf.constant(0.5, tf.float64)
    >>> rows = [tf.constant([[3.0, 4.0], [1.0, 0.0]]), tf.constant([[0.0, 0.0], [1.0, 0.0]])]
    >>> combined(tf.add_n([with_squares(each, half) for each in rows]), [2], tf.float32).numpy().tolist()
    [[3.0, 4.0], [1.0, 0.0]]
    """
    mean, squares, orthogonal = tf.split(sums, [sums.shape[1] - _COLUMNS, 1, 1], 1)
    bound = tf.maximum(tf.reduce_sum(tf.square(mean), 1, keepdims=True), orthogonal)
    factor = tf.maximum(tf.math.divide_no_nan(squares, bound), 1)  # below 1 by rounding alone
    return tf.cast(tf.reshape(mean * factor, [tf.shape(sums)[0], *row_shape]), dtype)
