"""Adds empty shards, as optimizers do: Keras' TensorFlow backend drops dimensions of size 0.

It adds whatever could be a bias with `tf.nn.bias_add`, and mistakes a shard of shape `[0, n]` for a bias of `n`
elements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfring._keras.seam import seam


def _is_empty(value: Any) -> bool:
    if isinstance(value, tf.SparseTensor):
        return False
    return tf.TensorShape(getattr(value, "shape", ())).num_elements() == 0


def install() -> None:
    import keras
    from keras.src.backend.tensorflow import numpy

    @seam(numpy, "add")
    def add(original: Callable[..., Any], x1: Any, x2: Any) -> Any:
        if not (_is_empty(x1) and _is_empty(x2)):
            return original(x1, x2)
        dtype = keras.backend.result_type(x1.dtype, x2.dtype)
        return tf.add(*(tf.cast(tf.convert_to_tensor(x), dtype) for x in (x1, x2)))
