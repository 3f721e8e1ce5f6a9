"""Data and a model for the programs of this folder."""

from __future__ import annotations

import keras
import numpy as np


def digits(rows=203, seed=0):
    """Returns `(x, y)`: float32 `[rows, 16]`, int32 `[rows]` below 4, which a dense model learns."""
    random = np.random.default_rng(seed)
    centers = random.normal(size=(4, 16))
    y = random.integers(0, 4, rows)
    return (centers[y] + random.normal(scale=0.5, size=(rows, 16))).astype("float32"), y.astype("int32")


def dense(units=16, rate=0.05):
    """Returns a compiled model, to be made in the scope of a strategy."""
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(units, "tanh"), keras.layers.Dense(4)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(rate, momentum=0.9), loss, metrics=["accuracy"])
    return model


def weights(model):
    """Returns all weights of a model in one array `[n]`, so that a difference is one of the largest weight."""
    return np.concatenate([np.ravel(value) for value in model.get_weights()])
