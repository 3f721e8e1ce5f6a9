"""Flags of a program that absl.app.run starts, and its logging, beside tfring's."""

from __future__ import annotations

import models
from absl import app, flags, logging

UNITS = flags.DEFINE_integer("units", 4, "of the hidden layer")


def train(strategy, folder):
    found = {}

    def main(arguments):
        assert arguments[1:] == ["rest"]
        x, y = models.digits()
        with strategy.scope():
            model = models.dense(UNITS.value)
        history = model.fit(x, y, batch_size=32, epochs=2, verbose=0)
        logging.info("trained")
        found.update(loss=history.history["loss"], weights=models.weights(model))

    try:
        app.run(main, ["program", "--units=12", "rest"])
    except SystemExit as end:
        assert not end.code, end.code
    return found
