"""Digits from TFRecord files, augmented: every rank reads the files, and parses and augments its share of each batch.

    tfring launch -n 2 examples/tfrecords.py

Rank 0 writes the files. `tfring.data.share` in place of `batch` says that the maps behind it treat each row by itself,
so a rank runs them on its rows alone. Each row is shifted by random numbers that follow from its own number
(`tf.random.stateless_uniform`), so that one worker and several train on the same pictures.
"""

from __future__ import annotations

import argparse
import math
import pathlib
import tempfile

import keras
import numpy as np
import tensorflow as tf
from supervised_contrastive import digits

import tfring

BATCH = 64


def write(folder, data, num_files=4):
    """Writes the training rows to TFRecord files, on rank 0; all ranks call it, and get their names."""
    x, y, *_ = data
    files = [str(pathlib.Path(folder) / f"digits-{number}.tfrecord") for number in range(num_files)]
    if tfring.is_chief():
        for number, file in enumerate(files):
            with tf.io.TFRecordWriter(file) as writer:
                for row in range(number, len(x), num_files):
                    pixels = tf.train.Feature(float_list=tf.train.FloatList(value=x[row]))
                    numbers = tf.train.Feature(int64_list=tf.train.Int64List(value=[y[row], row]))
                    feature = {"pixels": pixels, "label_and_row": numbers}
                    writer.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())
    tfring.barrier()
    return files


def read(files, num_rows):
    """Returns batches of `([rows, 8, 8, 1], [rows])`, each row of a share parsed and shifted by up to a pixel."""
    features = {
        "pixels": tf.io.FixedLenFeature([64], tf.float32),
        "label_and_row": tf.io.FixedLenFeature([2], tf.int64),
    }

    def parse(record):
        parsed = tf.io.parse_example(record, features)
        images, numbers = tf.reshape(parsed["pixels"], [-1, 8, 8, 1]), parsed["label_and_row"]
        return tf.map_fn(shift, (images, numbers[:, 1]), fn_output_signature=tf.float32), numbers[:, 0]

    def shift(image_and_row):
        image, row = image_and_row
        moved = tf.random.stateless_uniform([2], [7, row], 0, 3, tf.int32)
        return tf.slice(tf.pad(image, [[1, 1], [1, 1], [0, 0]]), [moved[0], moved[1], 0], [8, 8, 1])

    records = tf.data.TFRecordDataset(files).shuffle(2_000, seed=1)
    batches = records.apply(tfring.data.share(BATCH)).map(parse, num_parallel_calls=2).prefetch(2)
    # TensorFlow does not know how many records a file has, and Keras warns at the end of such a dataset.
    return batches.apply(tf.data.experimental.assert_cardinality(math.ceil(num_rows / BATCH)))


def train(strategy, files, data, epochs):
    """Trains a small convolutional network; returns its history and the accuracy on the test rows."""
    x, _, x_test, y_test = data
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                keras.layers.Conv2D(16, 3, activation="tanh"),
                keras.layers.Flatten(),
                keras.layers.Dense(10, "softmax"),
            ]
        )
        model.compile(keras.optimizers.Adam(0.003), "sparse_categorical_crossentropy", metrics=["accuracy"])
    history = model.fit(read(files, len(x)), epochs=epochs, verbose=2).history
    _, accuracy = model.evaluate(np.reshape(x_test, [-1, 8, 8, 1]), y_test, verbose=0)
    return history, float(accuracy)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    ring, rows = tfring.RingStrategy(), digits()
    folder = tfring.broadcast(tempfile.mkdtemp() if tfring.is_chief() else None)  # on one host, or a shared disk
    _, held_out = train(ring, write(folder, rows), rows, parser.parse_args().epochs)
    tfring.print_once(f"accuracy on held-out digits: {held_out:.3f}")
