"""One process of a contestant: trains and, on worker 0, prints what a step took as a line of JSON.

    python worker.py '{"strategy": "servers", "options": {"update": "async"}, "models": ["tables"], ...}'

Without "steps" it trains, for each line of its input, as many steps as that says, and each worker prints such a line.
"""

from __future__ import annotations

import json
import sys
import time

import keras
import numpy as np

import tfring

ROWS, FIELDS, WIDTH = 64, 8, 16
VOCABULARY = {"tables": 100_000, "small": 1_000}


def model(kind: str):
    """"tables": a table of 6.4 MB of which a batch reads a few rows; "dense": 4 MB in two kernels; "small": 64 kB."""
    if kind == "dense":
        inputs = keras.Input((FIELDS,))
        hidden = keras.layers.Dense(1000, activation="relu")(inputs)
        hidden = keras.layers.Dense(1000, activation="relu")(hidden)
    else:
        inputs = keras.Input((FIELDS,), dtype="int32")
        hidden = keras.layers.Flatten()(keras.layers.Embedding(VOCABULARY[kind], WIDTH)(inputs))
    return keras.Model(inputs, keras.layers.Dense(1)(hidden))


class Pace(keras.callbacks.Callback):
    """Sleeps before each batch, as long as computing it would take, and counts the batches."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.batches = 0

    def on_train_batch_begin(self, batch, logs=None):
        time.sleep(self.seconds)
        self.batches += 1


def main() -> None:
    wanted = json.loads(sys.argv[1])
    if wanted["strategy"] == "servers":
        strategy = tfring.ParameterServerStrategy(**wanted.get("options", {}))
    else:
        is_delayed = wanted["strategy"] == "delayed"
        strategy = tfring.RingStrategy(synchronization=tfring.Delayed(wanted["every"]) if is_delayed else None)
    if "steps" not in wanted:
        (kind,) = wanted["models"]
        trained = compiled(strategy, wanted, kind)
        for line in sys.stdin:
            print("RESULT " + json.dumps(fit(strategy, wanted, kind, trained, int(line))), flush=True)
        return
    told = {kind: train(strategy, wanted, kind) for kind in wanted["models"]}
    if strategy.cluster.rank == 0:
        print("RESULT " + json.dumps(told), flush=True)


def train(strategy, wanted: dict, kind: str) -> dict:
    """Returns what training one of the models took, behind two batches a worker that trace it."""
    trained = compiled(strategy, wanted, kind)
    fit(strategy, wanted, kind, trained, 2)
    return fit(strategy, wanted, kind, trained, wanted["steps"])


def compiled(strategy, wanted: dict, kind: str):
    with strategy.scope():
        made = model(kind)
        made.compile(keras.optimizers.SGD(0.01, gradient_accumulation_steps=wanted.get("accumulate")), "mse")
    return made


def fit(strategy, wanted: dict, kind: str, trained, steps: int) -> dict:
    """Trains so many batches a worker."""
    rank, num_workers = strategy.cluster.rank, strategy.cluster.world_size
    by_turns = "async" in str(wanted.get("options")) or "backup" in str(wanted.get("options"))
    rows = ROWS if by_turns else ROWS * num_workers  # of a batch; a worker computes on as many either way
    rng = np.random.default_rng(0)
    size = steps * ROWS * num_workers
    x = rng.integers(0, VOCABULARY.get(kind, 9), (size, FIELDS)).astype("float32" if kind == "dense" else "int32")
    y = rng.normal(size=(size, 1)).astype("float32")
    slow = wanted.get("slow", 1.0) if rank == num_workers - 1 else 1.0
    pace = Pace(wanted.get("step_seconds", 0.0) * slow)
    sent = strategy.bytes_sent()
    begin = time.perf_counter()
    history = trained.fit(x, y, batch_size=rows, verbose=0, shuffle=False, callbacks=[pace]).history
    seconds = time.perf_counter() - begin
    told = {"rows_a_second": size / seconds, "seconds": seconds, "batches": pace.batches}
    told["bytes_a_batch"] = (strategy.bytes_sent() - sent) / max(1, pace.batches)
    told.update({name: values[-1] for name, values in history.items()})
    return told


main()
