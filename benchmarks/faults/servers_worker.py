"""A worker or server of a scenario: trains, and prints when each batch ends; sleeps for 5 s on SIGUSR1."""

from __future__ import annotations

import json
import signal
import sys
import time

import keras
import numpy as np

import tfring

BATCHES, ROWS = 20_000, 8


class Say(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.02)
        print(f"batch {time.time()}", flush=True)


strategy = tfring.ParameterServerStrategy(**json.loads(sys.argv[1]))
signal.signal(signal.SIGUSR1, lambda *_: time.sleep(5.0))
x = np.random.default_rng(0).normal(size=(BATCHES * ROWS, 4)).astype("float32")
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse")
model.fit(x, x.sum(1), batch_size=ROWS, verbose=0, shuffle=False, callbacks=[Say()])
