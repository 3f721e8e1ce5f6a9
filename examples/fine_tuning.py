"""Fine-tunes a small convolutional network with frozen batch normalization, on any number of workers.

    tfring launch -n 2 examples/fine_tuning.py

A network learns scikit-learn's digits 0 to 4. Its layers but the last then serve for all ten digits: first they are
frozen and a new last layer is trained, then the convolutions are trained on at a lower rate, while the batch
normalizations keep the statistics of the first task (https://keras.io/guides/transfer_learning/).
"""

from __future__ import annotations

import argparse

import keras
import numpy as np
from sklearn.datasets import load_digits

import tfring

BATCH = 64
layers = keras.layers


def digits():
    """Returns `(images, labels)`, `[1797, 8, 8, 1]` and `[1797]`, in one order on all ranks."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    return images[order].reshape(-1, 8, 8, 1).astype("float32") / 16, labels[order]


def features():
    """Returns the layers that both tasks share: three convolutions, each with batch normalization."""
    inputs = x = keras.Input((8, 8, 1))
    for filters, strides in ((16, 1), (32, 2), (32, 2)):
        x = layers.Conv2D(filters, 3, strides, padding="same", use_bias=False)(x)
        x = layers.Activation("silu")(tfring.SyncBatchNormalization()(x))
    return keras.Model(inputs, layers.Flatten()(x), name="features")


def classifier(shared, num_classes, rate):
    """Returns a compiled model of the shared layers and a last one."""
    inputs = keras.Input((8, 8, 1))
    outputs = layers.Dense(num_classes, "softmax")(shared(inputs))
    model = keras.Model(inputs, outputs)
    compile_with(model, rate)
    return model


def compile_with(model, rate):
    model.compile(keras.optimizers.Adam(rate), "sparse_categorical_crossentropy", metrics=["accuracy"])


def statistics_of(model):
    """Returns the moving means and variances of a model's normalizations."""
    found = [layer for layer in model.layers if isinstance(layer, tfring.SyncBatchNormalization)]
    return [keras.ops.convert_to_numpy(v) for each in found for v in (each.moving_mean, each.moving_variance)]


def train(strategy, epochs):
    """Returns the histories of the three stages, and the normalizations' statistics after the first and the last."""
    images, labels = digits()
    held_out = len(images) // 5
    first = labels[held_out:] < 5
    arguments = {"batch_size": BATCH, "epochs": epochs, "verbose": 2}
    keras.utils.set_random_seed(1)

    with strategy.scope():
        shared = features()
        model = classifier(shared, 5, 0.003)
    histories = [model.fit(images[held_out:][first], labels[held_out:][first], **arguments).history]
    statistics = statistics_of(shared)

    arguments["validation_data"] = (images[:held_out], labels[:held_out])
    shared.trainable = False
    with strategy.scope():
        model = classifier(shared, 10, 0.003)
    histories.append(model.fit(images[held_out:], labels[held_out:], **arguments).history)

    shared.trainable = True
    for layer in shared.layers:  # a frozen one also normalizes by the statistics it has
        layer.trainable = not isinstance(layer, tfring.SyncBatchNormalization)
    with strategy.scope():
        compile_with(model, 0.001)
    histories.append(model.fit(images[held_out:], labels[held_out:], **arguments).history)
    return histories, statistics, statistics_of(shared)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    train(tfring.RingStrategy(), parser.parse_args().epochs)
