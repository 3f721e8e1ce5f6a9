"""Runs a program of this folder on this rank, or plain with `--plain`, and writes its figures: worker.py NAME FOLDER"""

from __future__ import annotations

import importlib
import json
import pathlib
import sys

import keras
import numpy as np
import tensorflow as tf

import tfring


def main() -> None:
    name, folder, *plain = sys.argv[1:]
    strategy = tf.distribute.get_strategy() if plain else tfring.RingStrategy()
    rank = 0 if plain else tfring.rank()
    keras.utils.set_random_seed(1)
    figures = importlib.import_module(name).train(strategy, pathlib.Path(folder))
    values = {key: np.asarray(value, "float64") for key, value in figures.items()}
    np.savez(pathlib.Path(folder, f"rank-{rank}.npz"), **values)
    print(json.dumps({key: value.ravel()[:3].tolist() for key, value in values.items()}), flush=True)


if __name__ == "__main__":
    main()
