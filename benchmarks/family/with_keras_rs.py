"""Retrieval by BruteForceRetrieval, ranking by FeatureCross and DotInteraction; three epochs, ragged batches."""

from __future__ import annotations

import keras
import keras_rs
import models
import numpy as np
from keras import layers

USERS, MOVIES = 60, 90


class Retrieval(keras.Model):
    """The model of keras-rs' tutorial: the score of a user and a movie is the product of their towers."""

    def __init__(self):
        super().__init__()
        self.user = keras.Sequential([layers.Embedding(USERS, 16), layers.Dense(16, "tanh")])
        self.movie = layers.Embedding(MOVIES, 16)
        self.retrieval = keras_rs.layers.BruteForceRetrieval(k=5, return_scores=False)
        self.loss_fn = keras.losses.MeanSquaredError()

    def build(self, input_shape):
        self.user.build(input_shape)
        self.movie.build(input_shape)
        self.retrieval.candidate_embeddings = self.movie.embeddings
        self.retrieval.build(input_shape)
        self.built = True

    def call(self, inputs, training=False):
        user = self.user(inputs)
        return {"user": user} if training else {"user": user, "best": self.retrieval(user)}

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        scores = keras.ops.sum(y_pred["user"] * self.movie(y["movie"]), axis=1)
        return self.loss_fn(keras.ops.expand_dims(y["stars"], -1), keras.ops.expand_dims(scores, -1), sample_weight)


def ranking():
    """Returns a model of stars: embeddings, their products, crosses of features."""
    user, movie = keras.Input((), dtype="int32", name="user"), keras.Input((), dtype="int32", name="movie")
    embedded = [layers.Embedding(USERS, 8)(user), layers.Embedding(MOVIES, 8)(movie)]
    x = layers.Concatenate()([*embedded, keras_rs.layers.DotInteraction()(embedded)])
    x = keras_rs.layers.FeatureCross(projection_dim=4)(x)
    return keras.Model({"user": user, "movie": movie}, layers.Dense(1)(layers.Dense(16, "tanh")(x)))


def train(strategy, folder):
    random = np.random.default_rng(0)
    user, movie = random.integers(0, USERS, 1003, "int32"), random.integers(0, MOVIES, 1003, "int32")
    stars = (np.sin(user) + np.cos(movie)).astype("float32")

    with strategy.scope():
        retrieval = Retrieval()
        retrieval.compile(keras.optimizers.SGD(0.5))
    history = retrieval.fit(user, {"movie": movie, "stars": stars}, batch_size=100, epochs=3, verbose=0)
    best = retrieval.predict(np.arange(USERS), verbose=0)["best"]

    with strategy.scope():
        ranker = ranking()
        ranker.compile(keras.optimizers.SGD(0.1), "mse", metrics=[keras.metrics.RootMeanSquaredError()])
    ranked = ranker.fit({"user": user, "movie": movie}, stars, batch_size=100, epochs=3, verbose=0)
    evaluated = ranker.evaluate({"user": user, "movie": movie}, stars, batch_size=100, verbose=0)
    assert history.history["loss"][-1] < history.history["loss"][0]
    return {
        "retrieval weights": models.weights(retrieval),
        "retrieval loss": history.history["loss"],
        "best": best,
        "weights": models.weights(ranker),
        "loss": ranked.history["loss"],
        "evaluated": evaluated,
    }
