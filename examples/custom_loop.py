"""A training loop of one's own on digits, as `tf.distribute` has it, on any number of workers.

    tfring launch -n 2 examples/custom_loop.py

Each replica sees its share of a batch. Under `strategy.run` gradients are summed over replicas, so the loss of a
replica is divided by the rows of the whole batch.
"""

from __future__ import annotations

import argparse

import keras
import tensorflow as tf
from supervised_contrastive import digits

import tfring

BATCH = 50


def train(strategy, data, epochs):
    """Trains a classifier; returns the losses of the epochs and the accuracy on the test rows, equal on all ranks."""
    x, y, x_test, y_test = data
    x, y = x[: len(x) // BATCH * BATCH], y[: len(y) // BATCH * BATCH]  # so that each batch has BATCH rows
    keras.utils.set_random_seed(1)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=1).batch(BATCH)
    batches = strategy.experimental_distribute_dataset(dataset)
    with strategy.scope():
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, "tanh"), keras.layers.Dense(10)])
        optimizer = keras.optimizers.Adam()
        optimizer.build(model.trainable_variables)
    each = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)

    def replica_step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.nn.compute_average_loss(each(y, model(x, training=True)), global_batch_size=BATCH)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    @tf.function
    def step(batch):
        return strategy.reduce("SUM", strategy.run(replica_step, batch), axis=None)

    losses = []
    for epoch in range(epochs):
        steps = [float(step(batch)) for batch in batches]
        losses.append(sum(steps) / len(steps))
        tfring.print_once(f"epoch {epoch + 1}: loss {losses[-1]:.4f}")
    hits = tf.argmax(model(x_test), 1).numpy() == y_test  # all ranks have the same weights
    return losses, float(hits.mean())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    _, accuracy = train(tfring.RingStrategy(), digits(), parser.parse_args().epochs)
    tfring.print_once(f"accuracy on held-out digits: {accuracy:.3f}")
