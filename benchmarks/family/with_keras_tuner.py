"""A random search of three trials, each trained by all workers, with one folder for all."""

from __future__ import annotations

import keras_tuner
import models

import tfring


def train(strategy, folder):
    x, y = models.digits()

    def build(choices):
        return models.dense(choices.Int("units", 4, 16, step=4), choices.Float("rate", 0.01, 0.1, sampling="log"))

    tuner = keras_tuner.RandomSearch(
        build,
        objective="val_loss",
        max_trials=3,
        seed=1,
        directory=folder,
        project_name="search",
        distribution_strategy=strategy,
    )
    tfring.barrier()  # a rank that comes later would reload what another has begun to write
    tuner.search(x, y, validation_data=models.digits(50, seed=0), batch_size=32, epochs=2, verbose=0)
    best = tuner.get_best_hyperparameters()[0].values
    scores = [trial.score for trial in tuner.oracle.get_best_trials(3)]
    with strategy.scope():
        model = tuner.get_best_models()[0]
    return {"units": best["units"], "rate": best["rate"], "scores": scores, "weights": models.weights(model)}
