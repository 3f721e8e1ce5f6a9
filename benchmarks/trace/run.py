"""Cost of a trace: the time of a step of a small dense model with and without, in turns.

    tfring launch -n 2 benchmarks/trace/run.py
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time

import keras
import numpy as np

import tfring
from tfring.ring import library, trace

STEPS = 150  # of a fit, within those whose spans are kept
SKIPPED = 5


def model_in(strategy):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        layers = [keras.layers.Dense(256, activation="relu") for _ in range(2)]
        model = keras.Sequential([keras.layers.Input((64,)), *layers, keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(1e-3), "mse")
    return model


class Times(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.at, self.cpu = [], []

    def on_train_batch_end(self, batch, logs=None):
        self.at.append(time.perf_counter())
        self.cpu.append(time.process_time())

    def milliseconds(self):
        """A step, without the first: median and mean of the clock, mean of the processor's time."""
        steps = 1e3 * np.diff(self.at[SKIPPED:])
        cpu = 1e3 * (self.cpu[-1] - self.cpu[SKIPPED]) / (len(self.cpu) - 1 - SKIPPED)
        return float(np.median(steps)), float(np.mean(steps)), cpu


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    generator = np.random.default_rng(0)
    x = generator.normal(size=(128 * STEPS, 64)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    with tempfile.TemporaryDirectory() as folder:
        strategies = {"without": tfring.RingStrategy(), "with": tfring.RingStrategy(trace=folder)}
        models = {name: model_in(strategy) for name, strategy in strategies.items()}
        found = {name: [] for name in models}
        for number in range(arguments.rounds + 1):
            for name in sorted(models, reverse=number % 2 == 0):
                library.core().tfring_trace(trace.CAPACITY if name == "with" else 0)  # one switch a process
                times = Times()
                models[name].fit(x, y, batch_size=128, shuffle=False, verbose=0, callbacks=[times])
                if number:  # graphs are built in the first
                    found[name].append(times.milliseconds())
        chief = strategies["with"].cluster.is_chief
        for strategy in strategies.values():
            strategy.barrier()
            strategy.close()
    if not chief:
        return
    for place, what in enumerate(("median", "mean", "CPU time")):
        pairs = list(zip(*([each[place] for each in found[name]] for name in ("without", "with")), strict=True))
        ratios = [b / a for a, b in pairs]
        without, traced = (statistics.median(pair[i] for pair in pairs) for i in (0, 1))
        print(
            f"{what} of a step, ms, middle of {len(pairs)} rounds: without {without:.3f}, with {traced:.3f}; "
            f"ratio {statistics.median(ratios):.3f} "
            f"(quartiles {np.quantile(ratios, 0.25):.3f} to {np.quantile(ratios, 0.75):.3f})"
        )


if __name__ == "__main__":
    main()
