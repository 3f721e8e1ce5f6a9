"""Quality of predicted stars, and of two simple predictors."""

from __future__ import annotations

import numpy as np
from movielens_data import MovieLens, Ratings

NDCG_PLACES = 10
BIAS_SHRINKAGE = 2.0  # as if each person and movie had two more ratings at the mean; best for the baseline


def quality(ratings: Ratings, predicted: np.ndarray) -> dict[str, float]:
    """RMSE over all ratings, and NDCG@10 over people."""
    return {
        "rmse": float(np.sqrt(np.mean((predicted - ratings.stars) ** 2))),
        "ndcg_at_10": ndcg(ratings.features["user"], ratings.stars, predicted),
    }


def ndcg(user: np.ndarray, stars: np.ndarray, predicted: np.ndarray, places: int = NDCG_PLACES) -> float:
    """Returns the quality of the order of each person's own ratings: the mean over people of DCG / DCG of the best
    order.

    A person's ratings in the arrays, no other movies, are put in order of the predicted stars. The one at
    place p = 1, 2, ... adds `(2**stars - 1) / log2(p + 1)` to DCG, up to place 10; ratings predicted alike
    share their gains evenly. People who gave the same stars to all are left out.
    """
    scores = []
    for u in np.unique(user):
        gain = 2.0 ** stars[user == u] - 1
        if gain.min() == gain.max():
            continue
        _, alike, count = np.unique(predicted[user == u], return_inverse=True, return_counts=True)
        shared = (np.bincount(alike, gain) / count)[alike]
        discount = 1 / np.log2(np.arange(min(places, len(gain))) + 2)
        found, best = shared[np.argsort(-alike)], np.sort(gain)[::-1]
        scores.append((found[:places] @ discount) / (best[:places] @ discount))
    return float(np.mean(scores))


def baselines(data: MovieLens, mean: float) -> dict[str, dict[str, float]]:
    """The mean of all ratings; the mean, a bias for each person and a bias for each movie."""
    (features, stars), held_out = data.train, data.held_out
    bias = {name: np.zeros(data.num_categories[name]) for name in ("user", "movie")}
    for _ in range(20):
        for name, other in (("user", "movie"), ("movie", "user")):
            rest = stars - mean - bias[other][features[other]]
            total = np.bincount(features[name], rest, len(bias[name]))
            bias[name] = total / (np.bincount(features[name], minlength=len(bias[name])) + BIAS_SHRINKAGE)
    by_bias = mean + bias["user"][held_out.features["user"]] + bias["movie"][held_out.features["movie"]]
    return {
        "mean rating": quality(held_out, np.full(len(held_out.stars), mean)),
        "biases only": quality(held_out, by_bias),
    }
