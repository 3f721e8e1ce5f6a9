"""Metrics of ranked lists, by keras-rs, with and without weights: two workers with unequal rows as one process."""

import numpy as np
import pytest
from common import assert_equal, train_both
from harness import strategy, workers

WEIGHTS = {"unweighted": None, "of lists": (), "of items": (6,)}


def train(names):
    import keras
    import keras_rs

    generator = np.random.default_rng(0)
    x = generator.normal(size=(41, 6, 3)).astype("float32") + np.linspace(0, 2, 41, dtype="float32")[:, None, None]
    y = generator.integers(-1, 3, size=(41, 6)).astype("float32")  # -1: masked out
    y[:4] = -1

    def ranking():
        metrics = keras_rs.metrics
        kinds = [
            metrics.DCG, metrics.MeanAveragePrecision, metrics.MeanReciprocalRank, metrics.NDCG, metrics.PrecisionAtK,
            metrics.RecallAtK,
        ]  # fmt: skip
        model = keras.Sequential([keras.Input((6, 3)), keras.layers.Dense(1), keras.layers.Flatten()])
        given = [[kind(k=3, name=kind.__name__ + end) for kind in kinds] for end in ("", "_weighted")]
        # The loss of keras-rs takes no weights of lists.
        loss = keras_rs.losses.PairwiseLogisticLoss() if shape else "mse"
        model.compile(keras.optimizers.SGD(0.1), loss, metrics=given[0], weighted_metrics=given[1])
        return model

    def weighted(shape):
        weights = generator.uniform(0.2, 3, size=(41, *shape)).astype("float32")
        return (np.where(generator.uniform(size=weights.shape) < 0.2, 0, weights),)

    ring, results = strategy(), {}
    for name in names:
        shape = WEIGHTS[name]
        given = () if shape is None else weighted(shape)
        options = {"sample_weight": given[0] if given else None, "evaluate": (x, y), "predict": x}
        # Shares of 10 and 9 rows, and of 2 and 1 in the last batch.
        results[name] = train_both(ring, ranking, x, y, batch_size=19, **options)
    return results


@pytest.mark.parametrize("names", [
    ["of items"], pytest.param(["unweighted", "of lists"], marks=pytest.mark.long),
])  # fmt: skip
def test_rank_metrics(names):
    assert_equal(workers(2).run(train, names, timeout=300))
