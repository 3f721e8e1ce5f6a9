"""Calls of Keras in one process, or on one rank: what each takes from beginning to end."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

BATCH, WIDTH = 32, 16
REPEATS = 3  # of a call in a round, of which the median counts
JPEG_ROWS, JPEG_BATCH, JPEG_SIDE = 512, 64, 256

TITLES = {
    "fit 2": "`fit` of a dataset, one epoch of 2 steps",
    "fit 12": "... of 12 steps",
    "fit 60": "... of 60 steps",
    "epoch 2": "an epoch of 2 steps within one `fit`",
    "fit arrays 2": "`fit` of arrays, 2 steps",
    "validation 2": "`fit` of 2 steps with validation of 2 batches",
    "evaluate 2": "`evaluate` of a dataset, 2 batches",
    "evaluate 60": "... 60 batches",
    "predict 2": "`predict` of a dataset, 2 batches",
    "predict 60": "... 60 batches",
    "predict 8 rows": "`predict` of an array of 8 rows",
    "train_on_batch": "`train_on_batch`",
    "jpeg": f"`fit` of {JPEG_ROWS} JPEG pictures in memory, decoded and resized in a `map`",
    "records": "... in TFRecords",
    "interleaved": "... in TFRecords of four files, interleaved",
}
# Steps of each, of which there is nothing to be told from those of a `fit`.
INPUT_BOUND = ("jpeg", "records", "interleaved")


class Calls:
    """The calls, each ready to be made and made once before."""

    def __init__(self, keras, tf, make_in_scope: Callable, folder: str) -> None:
        """Makes a small model and its data.

        Args:
          keras: the module.
          tf: the module.
          make_in_scope: calls a function where models are made.
          folder: for files, of this process alone.
        """
        import numpy as np

        self._keras, self._tf, self._folder = keras, tf, folder
        generator = np.random.default_rng(0)
        self._x = generator.normal(size=(60 * BATCH, WIDTH)).astype("float32")
        self._y = self._x[:, :1]
        self._make_in_scope = make_in_scope
        self._calls: dict[str, Callable[[], float]] = {}

    def seconds(self, name: str) -> float:
        """Returns the median of some calls; the first of all calls is made twice before, untimed."""
        if name not in self._calls:
            self._calls[name] = self._ready(name)
            self._calls[name]()
            self._calls[name]()
        return statistics.median(self._calls[name]() for _ in range(1 if name in INPUT_BOUND else REPEATS))

    def _ready(self, name: str) -> Callable[[], float]:
        kind, *rest = name.split()
        if kind in INPUT_BOUND:
            model = self._make_in_scope(self._picture_model)
            pictures = self._pictures(kind)
            return timed(lambda: model.fit(pictures, epochs=1, verbose=0))
        model = self._make_in_scope(self._small_model)
        if kind == "train_on_batch":
            x, y = self._x[: BATCH], self._y[: BATCH]
            return timed(lambda: model.train_on_batch(x, y), 20)
        if name == "predict 8 rows":
            x = self._x[:8]
            return timed(lambda: model.predict(x, verbose=0))
        steps = int(rest[-1])
        x, y = self._x[: steps * BATCH], self._y[: steps * BATCH]
        if "arrays" in rest:
            return timed(lambda: model.fit(x, y, batch_size=BATCH, epochs=1, verbose=0))
        rows = self._tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
        if kind == "epoch":
            return lambda: self._epoch(model, rows)
        if kind == "validation":
            return timed(lambda: model.fit(rows, validation_data=rows, epochs=1, verbose=0))
        calls = {
            "fit": lambda: model.fit(rows, epochs=1, verbose=0),
            "evaluate": lambda: model.evaluate(rows, verbose=0),
            "predict": lambda: model.predict(rows, verbose=0),
        }
        return timed(calls[kind])

    def _epoch(self, model, rows) -> float:
        times: list[float] = []

        class Begins(self._keras.callbacks.Callback):
            def on_epoch_begin(self, epoch, logs=None):
                times.append(time.perf_counter())

        model.fit(rows, epochs=8, verbose=0, callbacks=[Begins()])
        return statistics.median(times[i + 1] - times[i] for i in range(1, len(times) - 1))

    def _small_model(self):
        keras = self._keras
        model = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    def _picture_model(self):
        keras = self._keras
        layers = [keras.Input((32, 32, 3)), keras.layers.AveragePooling2D(8), keras.layers.Flatten()]
        model = keras.Sequential([*layers, keras.layers.Dense(10)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    def _pictures(self, kind: str):
        import numpy as np

        tf, data = self._tf, self._tf.data
        image = np.random.default_rng(0).integers(0, 255, (JPEG_SIDE, JPEG_SIDE, 3), dtype=np.uint8)
        smooth = tf.cast(tf.image.resize(image[:: JPEG_SIDE // 32, :: JPEG_SIDE // 32], [JPEG_SIDE] * 2), tf.uint8)
        files = [tf.io.encode_jpeg(tf.roll(smooth, i, 0), quality=95).numpy() for i in range(JPEG_ROWS)]
        labels = np.arange(JPEG_ROWS) % 10

        def decode(file, label):
            picture = tf.io.decode_jpeg(file, channels=3)
            return tf.image.resize(tf.cast(picture, tf.float32) / 255, [32, 32]), label

        def parse(record):
            return decode(record, tf.constant(1, tf.int64))

        if kind == "jpeg":
            return data.Dataset.from_tensor_slices((files, labels)).map(decode).batch(JPEG_BATCH)
        paths = [f"{self._folder}/{kind}-{number}" for number in range(4 if kind == "interleaved" else 1)]
        for number, path in enumerate(paths):
            with tf.io.TFRecordWriter(path) as writer:
                for file in files[number :: len(paths)]:
                    writer.write(file)
        if kind == "records":
            return data.TFRecordDataset(paths).map(parse).batch(JPEG_BATCH)
        read = data.Dataset.from_tensor_slices(paths).interleave(data.TFRecordDataset, cycle_length=4)
        return read.map(parse).batch(JPEG_BATCH)


def timed(call: Callable, times: int = 1) -> Callable[[], float]:
    """Returns a function that makes a call and returns its seconds."""

    def seconds() -> float:
        begin = time.perf_counter()
        for _ in range(times):
            call()
        return (time.perf_counter() - begin) / times

    return seconds
