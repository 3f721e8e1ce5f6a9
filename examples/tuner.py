"""A search of KerasTuner in which all workers train each trial.

    tfring launch -n 2 examples/tuner.py

Each rank runs the same search: what `fit` returns is the same on all, so all choose the same next trial. The trials and
their scores are those of one process.
"""

from __future__ import annotations

import argparse
import pathlib
import tempfile

import keras
import keras_tuner
from supervised_contrastive import digits

import tfring


def build(choices):
    """Returns a compiled model of digits; KerasTuner calls it in the strategy's scope."""
    model = keras.Sequential([keras.Input((64,))])
    for _ in range(choices.Int("layers", 1, 2)):
        model.add(keras.layers.Dense(choices.Int("units", 16, 64, step=16), "tanh"))
    model.add(keras.layers.Dense(10, "softmax"))
    rate = choices.Float("rate", 1e-3, 1e-1, sampling="log")
    model.compile(keras.optimizers.Adam(rate), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def search(strategy, data, folder, trials, epochs):
    """Searches; returns the values and score of each trial, in order, and the best model's weights."""
    keras.utils.set_random_seed(1)
    tuner = keras_tuner.BayesianOptimization(
        build,
        objective="val_accuracy",
        max_trials=trials,
        num_initial_points=2,
        seed=1,
        directory=folder,  # one for all ranks: weights are written once
        project_name="digits",
        distribution_strategy=strategy,
    )
    tfring.barrier()  # a rank that came later would take what another has begun to write for a search to resume
    x, y, x_test, y_test = data
    tuner.search(x, y, validation_data=(x_test, y_test), batch_size=64, epochs=epochs, verbose=0)
    found = sorted(tuner.oracle.trials.values(), key=lambda trial: trial.trial_id)
    [best] = tuner.get_best_models()
    return [(trial.hyperparameters.values, trial.score) for trial in found], best.get_weights()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=6)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--folder", type=pathlib.Path, help="of the search, which all hosts see (default: a new one)")
    arguments = parser.parse_args()
    folder = tfring.broadcast(str(arguments.folder or tempfile.mkdtemp()))
    trials, _ = search(tfring.RingStrategy(), digits(), folder, arguments.trials, arguments.epochs)
    for values, score in trials:
        tfring.print_once(f"{score:.4f}", values)
