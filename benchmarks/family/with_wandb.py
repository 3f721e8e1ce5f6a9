"""WandbMetricsLogger by `chief_only`, offline; one run in one folder."""

from __future__ import annotations

import models
import wandb
from wandb.integration.keras import WandbMetricsLogger

import tfring


def train(strategy, folder):
    x, y = models.digits()
    with strategy.scope():
        model = models.dense()
    if tfring.is_chief():
        wandb.init(mode="offline", dir=folder, project="family")
    callback = tfring.callbacks.chief_only(WandbMetricsLogger)
    history = model.fit(x, y, batch_size=32, epochs=2, callbacks=[callback], verbose=0)
    if tfring.is_chief():
        assert abs(wandb.run.summary["epoch/loss"] - history.history["loss"][-1]) < 1e-6
        wandb.finish()
    tfring.barrier()  # rank 0 has written
    runs = len(list(folder.glob("wandb/offline-run-*/*.wandb")))
    return {"runs": runs, "loss": history.history["loss"], "weights": models.weights(model)}
