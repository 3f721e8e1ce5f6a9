"""A study of four trials by the TPE sampler with a seed, the same on all ranks, each trial trained by all workers."""

from __future__ import annotations

import models
import optuna


def train(strategy, folder):
    x, y = models.digits()

    def objective(trial):
        with strategy.scope():
            model = models.dense(trial.suggest_int("units", 4, 16), trial.suggest_float("rate", 0.01, 0.1, log=True))
        pruning = optuna.exceptions.TrialPruned
        for epoch in range(2):
            loss = model.fit(x, y, batch_size=32, verbose=0).history["loss"][0]
            trial.report(loss, epoch)
            if trial.should_prune():
                raise pruning
        return loss

    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=1, n_startup_trials=2))
    study.optimize(objective, n_trials=4)
    trials = [trial for trial in study.trials if trial.value is not None]
    return {
        "values": [trial.value for trial in trials],
        "units": [trial.params["units"] for trial in trials],
        "rates": [trial.params["rate"] for trial in trials],
    }
