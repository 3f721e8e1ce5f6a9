"""One process of `run.py overlap`: times steps whose computation is imitated by sleeping; rank 0 prints JSON.

A third of the sleep is in the forward pass and two thirds in the backward pass, between two kernels.
"""

from __future__ import annotations

import json
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import tfring

WIDTH = 512  # two kernels of 1 MB
BATCH = 8


def sleeping(seconds: float):
    """Returns the identity, which sleeps in both passes."""

    def sleep(x, part):
        def wait(value):
            time.sleep(seconds * part)
            return value

        waited = tf.numpy_function(wait, [x], tf.float32)
        waited.set_shape(x.shape)
        return waited

    @tf.custom_gradient
    def function(x):
        return sleep(x, 1 / 3), lambda gradient: sleep(gradient, 2 / 3)

    return function


def seconds_a_step(settings: dict, seconds: float, num_steps: int) -> tuple[float, float]:
    """Returns the median time of a step, and how many bytes this rank sends in one."""
    late = settings.get("late")
    synchronization = None if late is None else tfring.OneStepLate(**late)
    strategy = tfring.RingStrategy(synchronization=synchronization, compression=settings.get("compression"))
    function = sleeping(seconds)

    class Sleeps(keras.layers.Layer):
        def call(self, inputs):
            return function(inputs)

    with strategy.scope():
        layers = [keras.layers.Dense(WIDTH, use_bias=False), Sleeps(), keras.layers.Dense(WIDTH, use_bias=False)]
        model = keras.Sequential([keras.Input((WIDTH,)), *layers])
        model.compile(keras.optimizers.SGD(1e-3, momentum=0.9), "mse")
    begun = []

    class Times(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            begun.append(time.perf_counter())

    x = np.zeros((BATCH * num_steps, WIDTH), "float32")
    before = strategy.bytes_sent()
    model.fit(x, x, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[Times()])
    sent = strategy.bytes_sent() - before
    strategy.close()
    return float(np.median(np.diff(begun)[3:])), sent / num_steps


def main() -> None:
    wanted = json.loads(sys.argv[1])
    for way, settings in wanted["ways"].items():
        for seconds in wanted["seconds"]:
            took, sent = seconds_a_step(settings, seconds, wanted["steps"])
            if json.loads(sys.argv[2]) == 0:
                told = {"way": way, "seconds": seconds, "took": took, "sent": sent}
                print("RESULT " + json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
