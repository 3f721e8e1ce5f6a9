"""Retrieval and ranking of movies with keras-rs on MovieLens-100K, on any number of workers.

    tfring launch -n 2 examples/retrieval.py

Two towers find the movies that a person may like among all: each person's liked movie against those of all rows of the
batch (`tfring.gather_for_loss`), the best ones by keras-rs' BruteForceRetrieval. A network with feature crosses then
predicts stars. The figures are those of one process.
"""

from __future__ import annotations

import argparse

import keras
import keras_rs
import movielens_data
import numpy as np
from keras import layers, ops

import tfring

LIKED = 4  # stars, or more
NUM_FOUND = 50


class TwoTowers(keras.Model):
    """Embeddings of people and movies, and the movies whose embeddings are nearest to a person's."""

    def __init__(self, num_users, num_movies, width=32, num_retrieved=300):
        super().__init__()
        self.user = layers.Embedding(num_users, width)
        self.movie = layers.Embedding(num_movies, width)
        self.retrieval = keras_rs.layers.BruteForceRetrieval(k=num_retrieved, return_scores=False)

    def build(self, shape):
        self.user.build(shape)
        self.movie.build(shape)
        self.retrieval.candidate_embeddings = self.movie.embeddings  # all movies
        self.retrieval.build(shape)
        self.built = True

    def call(self, user, training=False):
        return self.user(user) if training else self.retrieval(self.user(user))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        movie = self.movie(y)
        others = tfring.gather_for_loss(movie)  # of all workers' rows
        scores = ops.matmul(y_pred, ops.transpose(others))
        return ops.mean(ops.logsumexp(scores, axis=1) - ops.sum(y_pred * movie, axis=1))


def ranking_model(num_categories, width=16):
    """Returns a model of stars: a deep and cross network over what is known of both."""
    inputs = {name: keras.Input((), name=name, dtype="int32") for name in num_categories}
    x = layers.Concatenate()([layers.Embedding(num, width)(inputs[name]) for name, num in num_categories.items()])
    for _ in range(2):
        x = keras_rs.layers.FeatureCross(projection_dim=16)(x)
    return keras.Model(inputs, layers.Dense(1)(layers.Dense(64, "tanh")(x)))


def recall(found, data):
    """Returns the share of liked held-out movies among the first `NUM_FOUND` that a person has not rated before."""
    rated = set(zip(data.train.features["user"].tolist(), data.train.features["movie"].tolist(), strict=True))
    best = [[m for m in movies if (user, m) not in rated][:NUM_FOUND] for user, movies in enumerate(found.tolist())]
    liked = data.held_out.stars >= LIKED
    pairs = zip(data.held_out.features["user"][liked], data.held_out.features["movie"][liked], strict=True)
    return float(np.mean([movie in best[user] for user, movie in pairs]))


def train(strategy, data, epochs):
    """Trains both models; returns their figures, which are those of one process."""
    keras.utils.set_random_seed(1)
    features, stars = data.train
    liked = stars >= LIKED
    num = data.num_categories
    with strategy.scope():
        towers = TwoTowers(num["user"], num["movie"])
        towers.compile(keras.optimizers.Adam(0.01))
    losses = towers.fit(features["user"][liked], features["movie"][liked], batch_size=1024, epochs=epochs, verbose=2)
    found = towers.predict(np.arange(num["user"], dtype="int32"), batch_size=512, verbose=0)

    with strategy.scope():
        ranker = ranking_model(num)
        ranker.compile(keras.optimizers.Adagrad(0.1), "mse", metrics=[keras.metrics.RootMeanSquaredError(name="rmse")])
    inputs, held_out = ({name: part.features[name] for name in num} for part in (data.train, data.held_out))
    ranker.fit(inputs, stars, batch_size=1024, epochs=epochs, verbose=2)
    rmse = ranker.evaluate(held_out, data.held_out.stars, batch_size=1024, verbose=0, return_dict=True)["rmse"]
    return {"loss": losses.history["loss"], "recall": recall(found, data), "rmse": rmse}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=6)
    arguments = parser.parse_args()
    if tfring.local_rank() == 0:
        movielens_data.fetch()
    tfring.barrier()
    figures = train(tfring.RingStrategy(), movielens_data.load(), arguments.epochs)
    tfring.print_once(f"recall of {NUM_FOUND} movies: {figures['recall']:.4f}; RMSE of stars: {figures['rmse']:.4f}")
