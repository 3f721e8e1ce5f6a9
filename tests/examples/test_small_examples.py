"""Small examples: a loop of one's own, TFRecords with augmentation, text, fine-tuning; two workers as one process."""

from __future__ import annotations

import pathlib
import sys

import harness
import pytest
from harness import workers

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "examples"))
import custom_loop
import fine_tuning
import text_transformer
import tfrecords
from supervised_contrastive import digits


def loop():
    return custom_loop.train(harness.strategy(), digits(), 4)


def test_custom_loop():
    [(losses, accuracy)] = workers(1).run(loop)
    for other in workers(2).run(loop):
        assert other == (pytest.approx(losses, rel=1e-4), pytest.approx(accuracy, abs=0.01))
    assert losses[-1] < losses[0] / 2 and accuracy > 0.8


def records(folder):
    strategy, data = harness.strategy(), digits()
    return tfrecords.train(strategy, tfrecords.write(folder, data), data, 2)


def test_tfrecords(tmp_path):
    [(alone, accuracy)] = workers(1).run(records, str(tmp_path))
    for history, other in workers(2).run(records, str(tmp_path)):
        assert history["loss"] == pytest.approx(alone["loss"], rel=1e-3)
        assert other == pytest.approx(accuracy, abs=0.01)
    assert alone["loss"][1] < alone["loss"][0] and accuracy > 0.5


def text():
    return text_transformer.train(harness.strategy(), 2)


@pytest.mark.long
def test_text_transformer():
    [alone] = workers(1).run(text)
    for history in workers(2).run(text):
        assert history["loss"] == pytest.approx(alone["loss"], rel=1e-3)
        assert history["val_accuracy"] == pytest.approx(alone["val_accuracy"], abs=0.02)
    assert alone["val_accuracy"][-1] > 0.7


def fine_tuned():
    histories, before, after = fine_tuning.train(harness.strategy(), 2)
    return histories, [(a == b).all() for a, b in zip(before, after, strict=True)], [float(a.sum()) for a in after]


@pytest.mark.long
def test_fine_tuning():
    [(alone, kept, sums)] = workers(1).run(fine_tuned)
    assert all(kept) and len(kept) == 6
    for histories, others_kept, others_sums in workers(2).run(fine_tuned):
        assert all(others_kept) and others_sums == pytest.approx(sums, rel=1e-4)
        for history, expected in zip(histories, alone, strict=True):
            assert history["loss"] == pytest.approx(expected["loss"], rel=1e-3)
    assert alone[2]["val_accuracy"][-1] > 0.8
