"""What the functions have in common that Keras calls with batches."""

from __future__ import annotations

import numpy as np
import tensorflow as tf


def graph_function(body):
    """`body` as a tf.function that is traced anew for other structures only."""
    return tf.function(body, reduce_retracing=True, autograph=False)


def to_tensor(leaf):
    """What `..._on_batch` is given, as a tensor."""
    return tf.convert_to_tensor(leaf) if isinstance(leaf, (np.ndarray, np.generic, list, float, int)) else leaf


def without_optionals(element):
    """None where Keras' generators put an Optional."""
    return tf.nest.map_structure(
        lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, element
    )
