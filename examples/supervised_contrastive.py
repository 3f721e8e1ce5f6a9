"""Supervised contrastive learning on digits: an encoder learned from which rows of a batch are alike, on any workers.

    tfring launch -n 2 examples/supervised_contrastive.py

In two phases, as Khosla et al. (2020) and Keras' example of that name: an encoder with a projection head learns to put
digits of one class close together, then a classifier learns on top of the frozen encoder. The first loss compares each
row with all rows of the batch. It is written as for one process, and so is the accuracy, on any number of workers.
"""

from __future__ import annotations

import argparse

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import tfring

BATCH = 64
TEMPERATURE = 0.1


def digits():
    """`(x, y, x_test, y_test)`: `[rows, 64]` pixels of 0 to 9, in an order of their own."""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = (x[order] / 16).astype("float32"), y[order].astype("int32")
    num_test = len(x) // 5
    return x[num_test:], y[num_test:], x[:num_test], y[:num_test]


class SupervisedContrastive(keras.losses.Loss):
    """For each row the cross-entropy between which rows of the batch have its label, and how close they are."""

    def call(self, labels, features):
        labels, features = tf.reshape(labels, [-1, 1]), tf.math.l2_normalize(features, 1)
        logits = tf.matmul(features, features, transpose_b=True) / TEMPERATURE
        alike = tf.cast(tf.equal(labels, tf.transpose(labels)), logits.dtype)
        alike /= tf.reduce_sum(alike, 1, keepdims=True)
        return tf.nn.softmax_cross_entropy_with_logits(alike, logits)


def train(strategy, data, epochs):
    """Both phases; returns `(accuracy of the test, weights of the classifier)`."""
    x, y, x_test, y_test = data
    layers = keras.layers
    keras.utils.set_random_seed(1)
    with strategy.scope():
        encoder = keras.Sequential([keras.Input((64,)), layers.Dense(64, "tanh"), layers.Dense(32, "tanh")])
        projection = keras.Sequential([encoder, layers.Dense(16)])
        projection.compile(keras.optimizers.Adam(0.003), SupervisedContrastive())
    projection.fit(x, y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0)

    encoder.trainable = False
    with strategy.scope():
        classifier = keras.Sequential([encoder, layers.Dense(10, "softmax")])
        classifier.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy", metrics=["accuracy"])
    classifier.fit(x, y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0)
    return classifier.evaluate(x_test, y_test, batch_size=BATCH, verbose=0)[1], classifier.get_weights()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10, help="of each phase")
    arguments = parser.parse_args()
    strategy = tfring.RingStrategy()
    accuracy, _ = train(strategy, digits(), arguments.epochs)
    if strategy.cluster.is_chief:
        print(f"{strategy.cluster.world_size} workers: accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
