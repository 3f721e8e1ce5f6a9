"""Faults between hosts, which are network namespaces: rows of the matrix that benchmarks/faults/run.py makes."""

import importlib.util
import pathlib

import pytest

PATH = pathlib.Path(__file__).parents[2] / "benchmarks" / "faults" / "run.py"


@pytest.fixture(scope="module")
def matrix():
    spec = importlib.util.spec_from_file_location("fault_matrix", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if problem := module.namespaces.why_not():
        pytest.skip(f"no network namespaces: {problem}")
    return module


CUT = "have not been able to reach each other"


@pytest.mark.parametrize(
    ("fault", "ranks", "loss_rate", "words"),
    [
        ("link cut", 2, None, CUT),
        ("5 % packet loss", 2, 0.05, None),
        ("5 % packet loss", 2, 1.0, CUT),
        ("SIGSTOP", 2, None, "rank 1 on 192.0.2.2 is stopped"),
        ("an operation fails, its process lives on", 2, None, "rank 1 gave up in receive"),
        ("kill -9", 4, None, "rank 1 died: its process on 192.0.2.2 is gone"),
    ],
)
def test_between_hosts(matrix, monkeypatch, fault, ranks, loss_rate, words):
    if loss_rate is not None:
        if problem := matrix.why_no_loss():
            pytest.skip(f"no packets to lose: {problem}")
        monkeypatch.setattr(matrix, "LOSS_RATE", loss_rate)
    scenario = matrix.Scenario(fault, "in a step", "hosts", ranks, slow_seconds=2.0 if fault == matrix.LOSS else 0.0)
    outcome = matrix.run(scenario)
    assert outcome.left == "nothing", outcome
    if words is None:
        assert outcome.seconds is None and int(outcome.told.split()[0]) > 5, outcome
    else:
        assert outcome.seconds < 10.0 and words in outcome.told, outcome  # TFRING_LOST_SECONDS=2, otherwise 15
