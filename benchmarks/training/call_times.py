"""Calls of Keras in one process, or on one rank: what each takes from beginning to end."""

from __future__ import annotations

import pathlib
import statistics
import time
from collections.abc import Callable

import models

BATCH, WIDTH = 32, 16
WIDE_BATCH, WIDE_STEPS = 512, 100
REPEATS = 3  # of a call in a round, of which the median counts
JPEG_ROWS, JPEG_BATCH, JPEG_SIDE = 512, 64, 256

TITLES = {
    "fit 1 2": "`fit` of a dataset, one epoch of 2 steps",
    "fit 1 12": "... of 12 steps",
    "fit 1 60": "... of 60 steps",
    "fit 5 12": "... 5 epochs of 12 steps",
    "fit 50 2": "... 50 epochs of 2 steps",
    "epoch 2": "an epoch of 2 steps within one `fit`",
    "fit arrays 2": "`fit` of arrays, 2 steps",
    "fit arrays 60": "... 60 steps",
    "validation 2": "`fit` of 2 steps with validation of 2 batches",
    "evaluate 2": "`evaluate` of a dataset, 2 batches",
    "evaluate 60": "... 60 batches",
    "predict 1": "`predict` of a dataset, one batch",
    "predict 10": "... 10 batches",
    "predict 100": "... 100 batches",
    "predict wide": f"`predict` of {WIDE_STEPS} batches of {WIDE_BATCH} rows, three dense layers of 512",
    "predict 8 rows": "`predict` of an array of 8 rows",
    "train_on_batch": "`train_on_batch`",
    "test_on_batch": "`test_on_batch`",
    "predict_on_batch": "`predict_on_batch`",
    "jpeg": f"`fit` of {JPEG_ROWS} JPEG pictures in memory, decoded and resized in a `map`",
    "records": "... in TFRecords",
    "records 8": "... in that file of TFRecords, eight times over: 64 steps",
    "interleaved": "... in TFRecords of four files, interleaved",
    "folder": "... in a folder, by `image_dataset_from_directory`",
}
# Steps of each, of which there is nothing to be told from those of a `fit`.
INPUT_BOUND = ("jpeg", "records", "interleaved", "folder")


class Calls:
    """The calls, each ready to be made and made once before.

    Where a program takes its share of the rows itself, as with Horovod, a batch is that share's.
    """

    def __init__(self, contestant, folder: str) -> None:
        """Makes a small model and its data.

        Args:
          contestant: of plain.py or worker.py, with the modules `keras` and `tf`.
          folder: for files, of this process alone.
        """
        import numpy as np

        self._contestant, self._folder = contestant, pathlib.Path(folder)
        self._keras, self._tf = contestant.keras, contestant.tf
        self._batch = BATCH // contestant.parts
        self._x = np.random.default_rng(0).normal(size=(100 * BATCH, WIDTH)).astype("float32")
        self._y = self._x[:, :1]
        self._calls: dict[str, Callable[[], float]] = {}

    def seconds(self, name: str) -> float:
        """Returns the median of some calls; the first of all calls is made twice before, untimed."""
        if name not in self._calls:
            self._calls[name] = self._ready(name)
            self._calls[name]()
            self._calls[name]()
        return statistics.median(self._calls[name]() for _ in range(REPEATS))

    def _ready(self, name: str) -> Callable[[], float]:
        kind, *rest = name.split()
        if kind in INPUT_BOUND:
            model = self._made(self._picture_model)
            pictures = self._pictures(kind, *map(int, rest))
            return timed(lambda: self._fit(model, pictures))
        if name == "predict wide":
            model = self._made(lambda: models.dense(self._keras))
            x = self._x[:1].repeat(512 // WIDTH, 1).repeat(WIDE_STEPS * WIDE_BATCH // self._contestant.parts, 0)
            rows = self._tf.data.Dataset.from_tensor_slices(x).batch(WIDE_BATCH // self._contestant.parts)
            return timed(lambda: model.predict(rows, verbose=0))
        model = self._made(self._small_model)
        if kind.endswith("_on_batch"):
            x, y = self._x[:BATCH], self._y[:BATCH]
            given = (x,) if kind == "predict_on_batch" else (x, y)
            return timed(lambda: getattr(model, kind)(*given), 20)
        if name == "predict 8 rows":
            x = self._x[:8]
            return timed(lambda: model.predict(x, verbose=0))
        steps = int(rest[-1])
        x, y = self._x[: steps * self._batch], self._y[: steps * self._batch]
        if "arrays" in rest:
            return timed(lambda: self._fit(model, x, y, batch_size=self._batch))
        rows = self._tf.data.Dataset.from_tensor_slices((x, y)).batch(self._batch)
        calls = {
            "fit": lambda: self._fit(model, rows, epochs=int(rest[0])),
            "validation": lambda: self._fit(model, rows, validation_data=rows),
            "evaluate": lambda: model.evaluate(rows, verbose=0),
            "predict": lambda: model.predict(rows, verbose=0),
        }
        return timed(calls[kind]) if kind != "epoch" else lambda: self._epoch(model, rows)

    def _made(self, make: Callable):
        return self._contestant.in_scope(make)

    def _fit(self, model, *data, callbacks=(), **options) -> None:
        model.fit(*data, verbose=0, callbacks=[*self._contestant.callbacks(), *callbacks], **options)

    def _epoch(self, model, rows) -> float:
        times: list[float] = []

        class Begins(self._keras.callbacks.Callback):
            def on_epoch_begin(self, epoch, logs=None):
                times.append(time.perf_counter())

        self._fit(model, rows, epochs=8, callbacks=[Begins()])
        return statistics.median(times[i + 1] - times[i] for i in range(1, len(times) - 1))

    def _small_model(self):
        keras = self._keras
        model = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(1)])
        return self._compiled(model, "mse")

    def _picture_model(self):
        keras = self._keras
        layers = [keras.Input((32, 32, 3)), keras.layers.AveragePooling2D(8), keras.layers.Flatten()]
        model = keras.Sequential([*layers, keras.layers.Dense(10)])
        return self._compiled(model, keras.losses.SparseCategoricalCrossentropy(from_logits=True))

    def _compiled(self, model, loss):
        optimizer = self._contestant.optimizer(self._keras.optimizers.get("sgd"))
        model.compile(optimizer, loss, **self._contestant.compile_options)
        return model

    def _pictures(self, kind: str, times: int = 1):
        """Returns the dataset of pictures; of a program that takes its share itself, that of its rows.

        TFRecords may be read several times, as files one after the other.
        """
        import numpy as np

        tf, data = self._tf, self._tf.data
        part, parts = self._contestant.part, self._contestant.parts
        image = np.random.default_rng(0).integers(0, 255, (JPEG_SIDE, JPEG_SIDE, 3), dtype=np.uint8)
        smooth = tf.cast(tf.image.resize(image[:: JPEG_SIDE // 32, :: JPEG_SIDE // 32], [JPEG_SIDE] * 2), tf.uint8)
        files = [tf.io.encode_jpeg(tf.roll(smooth, i, 0), quality=95).numpy() for i in range(part, JPEG_ROWS, parts)]
        labels = np.arange(len(files)) % 10
        batch = JPEG_BATCH // parts

        def decode(file, label):
            picture = tf.io.decode_jpeg(file, channels=3)
            return tf.image.resize(tf.cast(picture, tf.float32) / 255, [32, 32]), label

        if kind == "jpeg":
            return data.Dataset.from_tensor_slices((files, labels)).map(decode).batch(batch)
        if kind == "folder":
            for number, file in enumerate(files):
                path = self._folder / f"pictures/{number % 10}/{number}.jpg"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(file)
            read = self._keras.utils.image_dataset_from_directory
            pictures = read(self._folder / "pictures", batch_size=batch, image_size=(32, 32), shuffle=False)
            return pictures.map(lambda picture, label: (picture / 255, label))
        paths = [str(self._folder / f"{kind}-{number}") for number in range(4 if kind == "interleaved" else 1)]
        for number, path in enumerate(paths):
            with tf.io.TFRecordWriter(path) as writer:
                for file in files[number :: len(paths)]:
                    writer.write(file)
        records = data.TFRecordDataset(paths * times)
        if kind == "interleaved":
            records = data.Dataset.from_tensor_slices(paths).interleave(data.TFRecordDataset, cycle_length=4)
        return records.map(lambda record: decode(record, tf.constant(1, tf.int64))).batch(batch)


def timed(call: Callable, times: int = 1) -> Callable[[], float]:
    """Returns a function that makes a call and returns its seconds."""

    def seconds() -> float:
        begin = time.perf_counter()
        for _ in range(times):
            call()
        return (time.perf_counter() - begin) / times

    return seconds
