"""MlflowCallback by `chief_only` into a local store, then one run read back, with its metrics of each epoch."""

from __future__ import annotations

import contextlib

import mlflow
import mlflow.tensorflow
import models

import tfring


def train(strategy, folder):
    mlflow.set_tracking_uri(f"sqlite:///{folder.resolve()}/mlflow.db")
    x, y = models.digits()
    with strategy.scope():
        model = models.dense()
    with mlflow.start_run() if tfring.is_chief() else contextlib.nullcontext():
        callback = tfring.callbacks.chief_only(mlflow.tensorflow.MlflowCallback)
        history = model.fit(x, y, batch_size=32, epochs=2, callbacks=[callback], verbose=0)
    tfring.barrier()  # rank 0 has written
    runs = mlflow.search_runs()
    logged = mlflow.MlflowClient().get_metric_history(runs["run_id"][0], "loss")
    return {
        "runs": len(runs),
        "logged": [metric.value for metric in logged],
        "loss": history.history["loss"],
        "weights": models.weights(model),
    }
