"""One process of a launch: trains MovieLens-100K and digits in some ways; rank 0 prints each way's curves as JSON.

    tfring launch -n 4 train.py '{"ways": {"ring": {}, "delayed, k=4": {"every": 4}}}'
"""

from __future__ import annotations

import json
import pathlib
import sys
import time

import keras
import numpy as np
from sklearn.datasets import load_digits

ROOT = pathlib.Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "examples")]

import movielens  # noqa: E402
import movielens_data  # noqa: E402

import tfring  # noqa: E402

FIGURES = {"movielens": "val_rmse", "digits": "val_accuracy"}
BATCH = {"movielens": 1024, "digits": 64}  # of all workers
SLOW_SECONDS = 0.1  # that the slow worker sleeps before a batch


def data_of(name: str):
    """Returns `(x, y, held-out x, held-out y)` and the function that makes a compiled model."""
    if name == "movielens":
        movielens_data.fetch()
        data = movielens_data.load()
        mean = float(data.train.stars.mean())

        def model():
            made = movielens.build_model(data, 16, mean)
            rmse = keras.metrics.RootMeanSquaredError(name="rmse")
            made.compile(keras.optimizers.AdamW(2e-3, weight_decay=0.2), "mse", metrics=[rmse])
            return made

        order = np.random.default_rng(0).permutation(len(data.train.stars))
        x = {name: values[order] for name, values in data.train.features.items()}
        return (x, data.train.stars[order], *data.held_out), model

    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = x[order].reshape(-1, 8, 8, 1).astype("float32") / 16, y[order].astype("int32")
    held_out = len(x) // 5

    def model():
        made = keras.Sequential([
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, activation="silu", padding="same"),
            keras.layers.Conv2D(32, 3, 2, activation="silu"),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        made.compile(keras.optimizers.SGD(0.02, momentum=0.9), loss, metrics=["accuracy"])
        return made

    return (x[held_out:], y[held_out:], x[:held_out], y[:held_out]), model


class Slow(keras.callbacks.Callback):
    """Sleeps before each batch of training."""

    def on_train_batch_begin(self, batch, logs=None):
        time.sleep(SLOW_SECONDS)


class EpochSeconds(keras.callbacks.Callback):
    """Times the training of each epoch, up to its validation."""

    def __init__(self):
        super().__init__()
        self.seconds: list[float] = []

    def on_epoch_begin(self, epoch, logs=None):
        self._begin = time.perf_counter()

    def on_test_begin(self, logs=None):
        self.seconds.append(time.perf_counter() - self._begin)


def strategy_of(way: dict):
    if "servers" in way:
        return tfring.ParameterServerStrategy(**way["servers"])
    if "every" not in way:
        return tfring.RingStrategy(**way)
    outer = keras.optimizers.SGD(**way["outer"]) if "outer" in way else None
    options = {name: way[name] for name in ("local_momentum", "tables") if name in way}
    delayed = tfring.Delayed(way["every"], outer=outer, **options)
    return tfring.RingStrategy(synchronization=delayed)


def train(strategy, way: dict, name: str, epochs: int) -> dict:
    (x, y, *held_out), model = data_of(name)
    by_turns = way.get("servers", {}).get("update") == "async"
    batch = BATCH[name] // (strategy.world_size if by_turns else 1)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        made = model()
    timer = EpochSeconds()
    callbacks = [timer, Slow()] if way.get("slow") and strategy.rank == strategy.world_size - 1 else [timer]
    sent = strategy.bytes_sent()
    history = made.fit(
        x, y, batch_size=batch, epochs=epochs, validation_data=tuple(held_out), verbose=0, callbacks=callbacks
    ).history
    told = {"curve": history[FIGURES[name]], "loss": history["loss"]}
    told.update(epoch_seconds=timer.seconds, num_rows=len(y))
    if strategy.bytes_sent() is not None:
        told["bytes_a_step"] = (strategy.bytes_sent() - sent) / epochs / -(-len(y) // BATCH[name])
    if "staleness" in history:
        told["staleness"] = float(np.mean(history["staleness"]))
    if "difference_norm" in history:
        told["difference_norm"] = history["difference_norm"]
    return told


def main() -> None:
    wanted = json.loads(sys.argv[1])
    for way, settings in wanted["ways"].items():
        strategy = strategy_of(settings)
        for name, epochs in wanted["epochs"].items():
            told = train(strategy, settings, name, epochs)
            if strategy.is_chief:
                print("RESULT " + json.dumps({"way": way, "data": name, **told}), flush=True)
        strategy.close()


if __name__ == "__main__":
    main()
