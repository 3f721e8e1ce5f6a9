"""The models and their data, the same for every contestant.

`keras` is Keras 3, or tf.keras of Horovod's old TensorFlow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Task:
    """One model with its data.

    Attributes:
      title: for the tables.
      batch: rows of the global batch.
      steps: of one measurement.
      make: `make(keras)`, the model before it is compiled.
      rows: `rows(generator, n)`, n rows: `(x, y)`, where x may be a list.
      optimizer: name of a Keras optimizer.
      classes: whether the loss is that of a classification, else squared errors.
      jpeg: whether x is JPEG files, which the dataset decodes.
    """

    title: str
    batch: int
    steps: int
    make: Callable[[Any], Any]
    rows: Callable[[np.random.Generator, int], tuple]
    optimizer: str = "sgd"
    classes: bool = False
    jpeg: bool = False

    def data(self) -> tuple:
        return self.rows(np.random.default_rng(0), self.batch * self.steps)


def images(generator, n, side=32):
    return generator.random((n, side, side, 3), np.float32), generator.integers(10, size=n)


def convolutions(keras, side=32, filters=(32, 64)):
    layers = keras.layers
    model = [layers.Input((side, side, 3))]
    for number in filters:
        model += [layers.Conv2D(number, 3, activation="relu", padding="same"), layers.MaxPooling2D()]
    return keras.Sequential([*model, layers.Flatten(), layers.Dense(10)])


def large_convolutions(keras):
    """25 million weights, as a ResNet-50 has."""
    layers = keras.layers
    model = [layers.Input((32, 32, 3))]
    for number in (64, 128):
        model += [layers.Conv2D(number, 3, activation="relu", padding="same"), layers.MaxPooling2D()]
    model += [layers.Conv2D(number, 3, activation="relu", padding="same") for number in (256, *(512,) * 11)]
    return keras.Sequential([*model, layers.GlobalAveragePooling2D(), layers.Dense(10)])


def dense(keras):
    layers = keras.layers
    return keras.Sequential(
        [layers.Input((512,)), *(layers.Dense(512, activation="relu") for _ in range(3)), layers.Dense(1)]
    )


def small(keras):
    layers = keras.layers
    return keras.Sequential([layers.Input((64,)), *(layers.Dense(64, activation="relu") for _ in range(3))])


def zipf(generator, n, size):
    return (generator.zipf(1.2, n) - 1).clip(max=size - 1).astype("int32")


TABLES = (50_000, 20_000)


def embedded(keras, sizes, width):
    layers = keras.layers
    ids = [keras.Input((), dtype="int32") for _ in sizes]
    return ids, [layers.Embedding(size, width)(each) for size, each in zip(sizes, ids, strict=True)]


def embeddings(keras):
    ids, vectors = embedded(keras, TABLES, 32)
    hidden = keras.layers.Dense(64, activation="relu")(keras.layers.Concatenate()(vectors))
    return keras.Model(ids, keras.layers.Dense(1)(hidden))


DLRM_TABLES = (100_000, 50_000, 20_000, 10_000, *(1_000 * k for k in range(1, 12)), *(10 * k for k in range(1, 12)))


def dlrm(keras, sizes=DLRM_TABLES, width=16, embedded=embedded):
    layers = keras.layers
    numbers = keras.Input((13,))
    ids, vectors = embedded(keras, sizes, width)
    bottom = layers.Dense(width, activation="relu")(layers.Dense(64, activation="relu")(numbers))
    together = layers.Concatenate()([bottom, *vectors])
    rows = layers.Reshape((len(vectors) + 1, width))(together)
    products = layers.Flatten()(layers.Dot(axes=2)([rows, rows]))
    top = layers.Dense(64, activation="relu")(layers.Concatenate()([bottom, products]))
    return keras.Model([numbers, *ids], layers.Dense(1)(top))


def dlrm_rows(generator, n, sizes=DLRM_TABLES):
    ids = [zipf(generator, n, size) for size in sizes]
    return [generator.random((n, 13), np.float32), *ids], generator.random((n, 1), np.float32)


VOCABULARY, LENGTH, WIDTH = 8_000, 64, 128


def transformer(keras):
    layers = keras.layers
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(VOCABULARY, WIDTH)(tokens)
    for _ in range(2):
        attended = layers.MultiHeadAttention(4, WIDTH // 4)(x, x)
        x = layers.LayerNormalization()(layers.Add()([x, attended]))
        wide = layers.Dense(WIDTH)(layers.Dense(4 * WIDTH, activation="relu")(x))
        x = layers.LayerNormalization()(layers.Add()([x, wide]))
    return keras.Model(tokens, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


TASKS = {
    "convolutions": Task("convolutions, batch 128", 128, 10, convolutions, images, classes=True),
    "dense": Task(
        "three dense layers of 512, batch 512, SGD", 512, 60, dense,
        lambda g, n: (g.random((n, 512), np.float32), g.random((n, 1), np.float32)),
    ),
    "small": Task(
        "three dense layers of 64, batch 64, SGD", 64, 200, small,
        lambda g, n: (g.random((n, 64), np.float32), g.random((n, 64), np.float32)),
    ),
    "embeddings": Task(
        "two embeddings (50,000 and 20,000 x 32), Zipf ids, Adam, batch 1,024", 1024, 60, embeddings,
        lambda g, n: ([zipf(g, n, size) for size in TABLES], g.random((n, 1), np.float32)), "adam",
    ),
    "jpeg": Task(
        "JPEG decoding in the dataset, small convolutions, batch 128", 128, 6,
        lambda keras: convolutions(keras, 64, (8,)), lambda g, n: images(g, n, 256), classes=True, jpeg=True,
    ),
    "dlrm": Task(
        "DLRM-like, 26 tables of 10 to 100,000 x 16, Zipf ids, Adagrad, batch 2,048", 2048, 20, dlrm,
        dlrm_rows, "adagrad",
    ),
    "transformer": Task(
        "Transformer encoder, 2 layers of 128, 64 tokens, Adam, batch 32", 32, 10, transformer,
        lambda g, n: (g.integers(VOCABULARY, size=(n, LENGTH)).astype("int32"), g.integers(10, size=n)), "adam",
        classes=True,
    ),
}  # fmt: skip
LARGE_TABLES = (
    1_000_000, 500_000, 200_000, 100_000, *(10_000 * k for k in range(1, 12)), *(10 * k for k in range(1, 12)),
)  # fmt: skip
LARGE_WIDTH = 32


def tables_task(parts: int = 1) -> Task:
    """Returns the task with one of `parts` parts of each table and of a batch."""
    sizes = [-(-size // parts) for size in LARGE_TABLES]
    return Task(
        "DLRM-like, 26 tables of 10 to 1,000,000 x 32, Zipf ids, Adagrad, batch 2,048", 2048 // parts, 20,
        lambda keras, embedded=embedded: dlrm(keras, sizes, LARGE_WIDTH, embedded),
        lambda g, n: dlrm_rows(g, n, sizes), "adagrad",
    )  # fmt: skip


TABLES_TASK = tables_task()
DEPTH, DEEP_WIDTH, DEEP_INPUTS = 32, 128, 8  # so that a batch is small beside what layers keep of it
MANY_ROWS, FEW_ROWS = 65536, 64  # of a batch, where memory is measured


def deep(keras):
    hidden = [keras.layers.Dense(DEEP_WIDTH, activation="relu", name=f"layer_{i}") for i in range(DEPTH)]
    return keras.Sequential([keras.Input((DEEP_INPUTS,)), *hidden, keras.layers.Dense(1)])


DEEP_TASK = Task(
    f"{DEPTH} dense layers of {DEEP_WIDTH}, batch 16,384, SGD", 16384, 8, deep,
    lambda g, n: (g.random((n, DEEP_INPUTS), np.float32), g.random((n, 1), np.float32)),
)  # fmt: skip
LARGE = Task("convolutions with 25 million weights, SGD, batch 32", 32, 4, large_convolutions, images, classes=True)


def shares(data, rank: int, ranks: int, batch: int):
    """The rows of one rank, for those who cut themselves: its part of every global batch."""

    def cut(array):
        each = array.reshape(-1, ranks, batch // ranks, *array.shape[1:])
        return np.ascontiguousarray(each[:, rank]).reshape(-1, *array.shape[1:])

    x, y = data
    return ([cut(each) for each in x] if isinstance(x, list) else cut(x)), cut(y)
