"""Steps whose result on several workers is not that of one process are named, with the line; others are not."""

import pathlib
import warnings

import harness
import keras
import numpy as np
import pytest
import tensorflow as tf
from harness import workers

import tfring
from tfring import errors

ROWS, BATCH = 19, 8  # the last batch has three rows


def _data():
    random = np.random.default_rng(5)
    x = random.normal(size=(ROWS, 6)).astype("float32") * np.exp(random.normal(size=(ROWS, 1))).astype("float32")
    return x, (x[:, :1] * 0.5 + random.normal(size=(ROWS, 1))).astype("float32")


class OneLayer(keras.Model):
    """One dense layer, whose loss is a function of the model, inputs and targets."""

    def __init__(self, loss_of, between=None):
        super().__init__()
        self.dense = keras.layers.Dense(1, kernel_initializer="ones")
        self.loss_of = loss_of
        self.between = between
        self.state = self.add_weight(shape=(), initializer="zeros", trainable=False, name="state")

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(self, x, y)
        gradients = tape.gradient(loss, self.trainable_variables)
        if self.between is not None:
            gradients = self.between(gradients)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"own": tf.reduce_mean(loss)}


def _error(model, x, y):
    return model(x) - y


# What is computed, and a part of what is said of it; None for what equals one process.
LOSSES = {
    "mean": (lambda m, x, y: tf.reduce_mean(_error(m, x, y) ** 2), None),
    "mean by the number of rows": (
        lambda m, x, y: tf.reduce_sum(_error(m, x, y) ** 2) / tf.cast(tf.shape(x)[0], tf.float32),
        None,
    ),
    "gathered ratio": (
        lambda m, x, y: (lambda e, t: tf.reduce_sum(tf.abs(e)) / tf.reduce_sum(tf.abs(t)))(
            *tfring.gather_for_loss((_error(m, x, y), y))
        ),
        None,
    ),
    "penalty": (lambda m, x, y: tf.reduce_mean(_error(m, x, y) ** 2) + tf.nn.l2_loss(m.dense.kernel), None),
    "sum over the global batch": (lambda m, x, y: tf.reduce_sum(_error(m, x, y) ** 2) * (1 / BATCH), "a sum over"),
    "kept rows": (
        lambda m, x, y: tf.reduce_mean(tf.boolean_mask(_error(m, x, y) ** 2, y[:, 0] > 0.0)),
        "a mean over the rows that a mask keeps",
    ),
    "ratio": (lambda m, x, y: tf.reduce_sum(_error(m, x, y) ** 2) / tf.reduce_sum(y**2), "a function of a sum"),
    "log": (lambda m, x, y: tf.math.log(tf.reduce_mean(_error(m, x, y) ** 2)), "a function of a sum"),
    "root": (lambda m, x, y: tf.sqrt(tf.reduce_mean(_error(m, x, y) ** 2)), "a function of a sum"),
    "vector": (lambda m, x, y: tf.reduce_sum(_error(m, x, y) ** 2, 1), "a sum over"),
    "in-batch negatives": (
        lambda m, x, y: tf.reduce_mean(
            tf.nn.sparse_softmax_cross_entropy_with_logits(
                tf.range(tf.shape(x)[0]), tf.matmul(m(x), y, transpose_b=True)
            )
        ),
        "combined with each other",
    ),
    "hardest": (lambda m, x, y: tf.reduce_max(_error(m, x, y) ** 2), "all rows"),
    "minibatch": (lambda m, x, y: tf.reduce_mean(_error(m, x, y)[:2] ** 2), "their position"),
}


def _clipped(gradients):
    return tf.clip_by_global_norm(gradients, 0.1)[0]


def _clipped_together(gradients):
    return _clipped(tf.distribute.get_strategy().all_reduce_gradients(gradients))


BETWEEN = {"clipped": (_clipped, "a function of a sum"), "clipped together": (_clipped_together, None)}


def _fit(name, check_equal=False):
    """Returns the weights after two epochs, and what was warned of."""
    strategy = harness.strategy(check_equal=check_equal)
    x, y = _data()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with strategy.scope():
            model = OneLayer(LOSSES.get(name, LOSSES["mean"])[0], BETWEEN.get(name, (None,))[0])
            model.compile(keras.optimizers.SGD(0.05))
        try:
            model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
        except errors.InexactError as error:
            return None, [str(error)]
    said = [str(w.message) for w in caught if issubclass(w.category, errors.InexactWarning)]
    return [v.numpy() for v in model.trainable_variables], said


def _all(names):
    return {name: _fit(name) for name in names}


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_differs_is_named_and_nothing_else(world_size):
    cases = {**LOSSES, **BETWEEN}
    one = workers(1).run(_all, list(cases))[0]
    several = workers(world_size).run(_all, list(cases))
    for name, (_, expected) in cases.items():
        weights, said = several[0][name]
        assert one[name][1] == [], name
        equal = all(np.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(weights, one[name][0], strict=True))
        if expected is None:
            assert said == [] and equal, (name, said)
            continue
        assert not equal, name
        [text] = said  # once, on the first rank
        assert expected in text and pathlib.Path(__file__).name in text, (name, text)
        assert several[1][name][1] == []


def test_with_check_equal_it_is_an_error():
    for _, [text] in workers(2).run(_fit, "log", True):
        assert "a function of a sum" in text and "`Log`" in text
    weights, said = workers(2).run(_fit, "mean", True)[0]
    assert weights is not None and said == []


def _plain(kind):
    """Returns what is warned of in a fit, an evaluate and a predict of a model as people build it."""
    strategy = harness.strategy()
    random = np.random.default_rng(2)
    layers = keras.layers
    ids = random.integers(0, 9, size=(ROWS, 5))
    images = random.normal(size=(ROWS, 8, 8, 3)).astype("float32")
    classes = random.integers(0, 3, ROWS)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with strategy.scope():
            match kind:
                case "images":
                    parts = [
                        *(layers.Input((8, 8, 3)), layers.Conv2D(4, 3), layers.BatchNormalization(), layers.ReLU()),
                        *(tfring.layers.SyncBatchNormalization(), layers.MaxPooling2D(), layers.Dropout(0.2)),
                        *(layers.UpSampling2D(), layers.GlobalAveragePooling2D(), layers.Dense(3)),
                    ]
                    x = images
                case "sequences":
                    parts = [
                        *(layers.Input((5,)), layers.Embedding(9, 4, mask_zero=True)),
                        *(layers.Bidirectional(layers.LSTM(3, return_sequences=True)), layers.GRU(3), layers.Dense(3)),
                    ]
                    x = ids
                case "attention":
                    inputs = layers.Input((5,))
                    h = layers.Embedding(9, 4)(inputs)
                    h = layers.LayerNormalization()(h + layers.MultiHeadAttention(2, 2)(h, h, use_causal_mask=True))
                    h = layers.Dense(4, "gelu", kernel_regularizer="l2", activity_regularizer="l2")(h)
                    parts, x = keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling1D()(h))), ids
            model = parts if isinstance(parts, keras.Model) else keras.Sequential(parts)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.Adam(0.01, global_clipnorm=1.0), loss, metrics=["accuracy"])
        weights = np.linspace(0.5, 2.0, ROWS)
        model.fit(x, classes, sample_weight=weights, batch_size=BATCH, epochs=1, verbose=0)
        model.evaluate(x, classes, batch_size=BATCH, verbose=0)
        model.predict(x, batch_size=BATCH, verbose=0)
    return [str(w.message) for w in caught if issubclass(w.category, errors.InexactWarning)]


@pytest.mark.parametrize("kind", ["images", "sequences", "attention"])
def test_plain_models_are_not_named(kind):
    assert workers(2).run(_plain, kind)[0] == []
