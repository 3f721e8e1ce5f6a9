"""The digits example: with the layer workers train as one process does, without it they do not."""

from __future__ import annotations

import pathlib
import sys

import harness
from harness import workers

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "examples"))
import digits_sync_bn

IMAGES = 160  # 10 steps; the example itself takes 1,438


def compare(folder):
    """In a worker: an epoch of the example on some of its images."""
    x, y, x_test, y_test = digits_sync_bn.digits(shuffled=False)
    data = x[:IMAGES], y[:IMAGES], x_test, y_test
    results = digits_sync_bn.compare(harness.strategy(), data, 1)
    if results:
        curves = {name: accuracy for name, (accuracy, *_) in results.items()}
        digits_sync_bn.plot(curves, pathlib.Path(folder, "results", "curves.png"), "Digits")
    return results


def test_two_workers_with_eight_images_each(tmp_path):
    results, other = workers(2).run(compare, str(tmp_path), timeout=180)
    assert other is None
    _, accuracy_off, weights_off = results["SyncBatchNormalization"]
    assert weights_off < 1e-4
    assert accuracy_off < 1e-6
    assert results["BatchNormalization"][2] > 0.01
    assert (tmp_path / "results" / "curves.png").stat().st_size > 1000
