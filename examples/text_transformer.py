"""A small Transformer that tells whether a docstring is NumPy's or Keras', on any number of workers.

    tfring launch -n 2 examples/text_transformer.py

The text is what the installed packages ship, so nothing is fetched.
"""

from __future__ import annotations

import argparse
import inspect

import keras
import numpy as np

import tfring

WORDS, LENGTH = 2_000, 48


def docstrings():
    """Returns `(texts, labels)`: parts of docstrings of NumPy (0) and Keras (1), in one order on all ranks."""
    texts, labels = [], []
    for label, modules in enumerate([[np, np.linalg, np.random, np.fft], [keras.layers, keras.ops, keras.losses]]):
        found = {inspect.getdoc(getattr(module, name)) or "" for module in modules for name in dir(module)}
        for text in sorted(found):
            words = text.split()
            parts = [" ".join(words[begin : begin + LENGTH]) for begin in range(0, len(words) - LENGTH + 1, LENGTH)]
            texts += parts[:4]
            labels += [label] * len(parts[:4])
    order = np.random.default_rng(0).permutation(len(texts))
    return [texts[i] for i in order], np.array(labels, "float32")[order, None]


def train(strategy, epochs):
    """Trains; returns the history, whose values are those of one process."""
    texts, labels = docstrings()
    vectorize = keras.layers.TextVectorization(WORDS, output_sequence_length=LENGTH)
    vectorize.adapt(texts)
    ids = np.array(vectorize(texts))
    keras.utils.set_random_seed(1)
    layers = keras.layers
    with strategy.scope():
        inputs = keras.Input((LENGTH,), dtype="int32")
        x = layers.Embedding(WORDS, 32)(inputs) + layers.Embedding(LENGTH, 32)(keras.ops.arange(LENGTH))
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 16)(x, x))
        x = layers.LayerNormalization()(x + layers.Dense(32)(layers.Dense(64, "gelu")(x)))
        model = keras.Model(inputs, layers.Dense(1, "sigmoid")(layers.GlobalAveragePooling1D()(x)))
        model.compile(keras.optimizers.Adam(0.002), "binary_crossentropy", metrics=["accuracy"])
    held_out = len(ids) // 5
    return model.fit(
        ids[held_out:],
        labels[held_out:],
        validation_data=(ids[:held_out], labels[:held_out]),
        batch_size=64,
        epochs=epochs,
        verbose=2,
    ).history


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    train(tfring.RingStrategy(), parser.parse_args().epochs)
