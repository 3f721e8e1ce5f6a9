"""The pipeline example: two stages train as one process."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import harness
import pytest
from harness import workers

import tfring

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"
LAUNCH_SECONDS = 180
sys.path.insert(0, str(EXAMPLES))
import pipeline_transformer  # noqa: E402


def trained(stages):
    """In a worker: the curves of a short run, and the bytes it sent."""
    data = pipeline_transformer.generated(700)
    strategy = harness.strategy(mesh=tfring.Mesh(pipeline=stages))
    before = strategy.bytes_sent()
    curves = pipeline_transformer.train(strategy, *data, 2, 100, blocks=2, width=16, num_microbatches=3)
    return curves, strategy.bytes_sent() - before


def test_as_one_process():
    [(alone, _)] = workers(1).run(trained, 1)
    for curves, sent in workers(2).run(trained, 2):
        assert curves.keys() == alone.keys() and len(curves["val_accuracy"]) == 2
        for name, values in curves.items():
            assert values == pytest.approx(alone[name], abs=1e-4)
        assert sent > 0
    assert alone["loss"][1] < alone["loss"][0]


@pytest.mark.long
def test_the_program():
    sizes = {"epochs": 1, "examples": 200, "batch-size": 60, "blocks": 1, "width": 8, "microbatches": 2}
    small = ["--recompute", *(f"--{name}={size}" for name, size in sizes.items())]
    command = [sys.executable, "-m", "tfring.launch", "-n", "2", EXAMPLES / "pipeline_transformer.py", *small]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LAUNCH_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "stage 2  " in done.stdout and "a step of 2 microbatches" in done.stdout and "held out" in done.stdout
