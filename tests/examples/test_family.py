"""Retrieval, ranking and a search of hyperparameters, by packages of the Keras family; two workers as one process."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import harness
import numpy as np
import pytest
from harness import workers

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "examples"))
sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "benchmarks" / "family"))
import movielens_data
from difference import difference
from supervised_contrastive import digits

FAMILY = pathlib.Path(__file__).resolve().parents[2] / "benchmarks" / "family"


def retrieved():
    import retrieval

    return retrieval.train(harness.strategy(), movielens_data.load(max_ratings=40_000), 3)


@pytest.mark.long
def test_retrieval():
    movielens_data.fetch()
    [alone] = workers(1).run(retrieved)
    for figures in workers(2).run(retrieved):
        assert figures["loss"] == pytest.approx(alone["loss"], rel=1e-4)
        assert figures["rmse"] == pytest.approx(alone["rmse"], rel=1e-3)
        assert figures["recall"] == pytest.approx(alone["recall"], abs=5e-3)
    assert alone["loss"][-1] < alone["loss"][0] and alone["rmse"] < 1.1
    assert alone["recall"] > 0.1  # movies at random: 0.03


def searched(folder):
    import tuner

    return tuner.search(harness.strategy(), digits(), folder, trials=3, epochs=2)


@pytest.mark.long
def test_tuner(tmp_path):
    [(alone, weights)] = workers(1).run(searched, str(tmp_path / "alone"))
    for trials, others in workers(2).run(searched, str(tmp_path / "two")):
        for (values, score), (expected, score_alone) in zip(trials, alone, strict=True):
            assert values == pytest.approx(expected) and score == pytest.approx(score_alone, abs=0.01)
        for weight, expected in zip(others, weights, strict=True):
            assert weight == pytest.approx(expected, abs=1e-3)
    assert len(alone) == 3 and max(score for _, score in alone) > 0.8


@pytest.mark.parametrize("package", ["keras_rs", pytest.param("keras_tuner", marks=pytest.mark.long)])
def test_programs_of_the_benchmark(package, tmp_path, all_packages):
    plain, ring = tmp_path / "plain", tmp_path / "ring"
    program = [FAMILY / "worker.py", f"with_{package}"]
    for command in [[*program, plain, "--plain"], ["-m", "tfring", "launch", "-n", "2", *program, ring]]:
        (plain if "--plain" in command else ring).mkdir()
        done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, timeout=200)
        assert not done.returncode, done.stdout + done.stderr
    [alone] = [np.load(file) for file in plain.glob("*.npz")]
    of_ranks = [np.load(file) for file in ring.glob("*.npz")]
    assert len(of_ranks) == 2
    assert all(difference(alone, figures, alone.files) < 1e-4 for figures in of_ranks)
