"""The contrastive example: with all rows gathered two workers train as one process does, with their own they do not."""

from __future__ import annotations

import pathlib
import sys

import harness
import numpy as np
from harness import workers

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "examples"))
import supervised_contrastive


def compare():
    """In a worker: the largest difference of a weight from one process', with all rows and with its own."""
    import tensorflow as tf

    ring = harness.strategy()
    data = supervised_contrastive.digits()
    together = supervised_contrastive.train(ring, data, 2)
    apart = supervised_contrastive.train(ring, data, 2, gather=False)
    alone = supervised_contrastive.train(tf.distribute.get_strategy(), data, 2)
    off = [max(np.abs(a - b).max() for a, b in zip(w[1], alone[1], strict=True)) for w in (together, apart)]
    return off, together[0], alone[0]


def test_two_workers_compare_all_rows():
    for (together, apart), accuracy, accuracy_alone in workers(2).run(compare):
        assert together < 1e-4
        assert apart > 0.01
        assert abs(accuracy - accuracy_alone) < 1e-6
        assert accuracy > 0.5
