"""The contrastive example: two workers, which compare each row with all rows of a batch, train as one process does."""

from __future__ import annotations

import pathlib
import sys

import harness
import numpy as np
from harness import workers

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "examples"))
import supervised_contrastive


def compare():
    """In a worker: the largest difference of a weight from one process', and the accuracies."""
    import tensorflow as tf

    ring = harness.strategy()
    data = supervised_contrastive.digits()
    together = supervised_contrastive.train(ring, data, 2)
    alone = supervised_contrastive.train(tf.distribute.get_strategy(), data, 2)
    off = max(np.abs(a - b).max() for a, b in zip(together[1], alone[1], strict=True))
    return off, together[0], alone[0]


def test_two_workers_compare_all_rows():
    for off, accuracy, accuracy_alone in workers(2).run(compare):
        assert off < 1e-4
        assert abs(accuracy - accuracy_alone) < 1e-6
        assert accuracy > 0.5
