"""`tfring test` with real processes: it passes, it fails where workers differ from one process, it says which rank."""

from __future__ import annotations

import json
import re
import socket
import sys

import pytest
from commands import ended, environment, tf_config

TEST = [sys.executable, "-m", "tfring", "test"]
LOCAL_STATISTICS = """
import sys
if "tfring.test" in sys.orig_argv:
    import keras
    original = keras.layers.BatchNormalization.__init__
    keras.layers.BatchNormalization.__init__ = lambda self, synchronized: original(self)
"""


def test_two_on_this_machine(start):
    out, _ = ended(start([*TEST, "-n", "2"]))
    title, _, rows, weights, _, verdict = out.splitlines()
    assert title == "tfring test: 2 workers on 1 host, from tfring launch; 60 steps of 256 rows"
    numbers = r"Rows a second  [\d,]+ with 2 workers, [\d,]+ with rank 0 alone"
    assert re.fullmatch(numbers + r" \(this model is too small to predict the gain of larger ones\)", rows)
    found = re.fullmatch(r"Weights        differ .* by (\S+) of a variable's largest value; 0.001 is allowed", weights)
    assert found and float(found[1]) < 1e-4
    assert verdict == "Passed: the weights are those of one process."


def test_a_process_that_is_alone(start):
    out, _ = ended(start(TEST))
    assert "this process is alone" in out and "type: tfring test -n 2" in out
    assert out.endswith("\n\nPassed: this process trains.\n")


@pytest.mark.parametrize("options", [[], ["-n", "2"]])
def test_without_tensorflow(start, tmp_path, options):
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['tensorflow'] = None\n")
    path = f"{tmp_path}:{environment().get('PYTHONPATH', '')}"
    out, err = ended(start([*TEST, *options], PYTHONPATH=path), 2)
    assert out == "" and 'pip install "tensorflow-cpu' in err and "Traceback" not in err


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_workers_that_do_not_start(start, options):
    out, err = ended(start([*TEST, "--hosts", "nowhere.invalid:2", *options]), 71)
    verdict = "Failed: the workers did not start, or ended before the comparison (exit code 71)."
    assert out.strip() == verdict or json.loads(out) == {"schema": 1, "passed": False, "verdict": verdict}
    assert "no workers on nowhere.invalid" in err


def test_the_document(start):
    found = json.loads(ended(start([*TEST, "-n", "2", "--json"]))[0])
    assert found["cluster"] == {"source": "tfring launch", "world_size": 2, "num_hosts": 1}
    assert (found["schema"], found["passed"], found["steps"], found["rows_per_step"]) == (1, True, 60, 256)
    assert found["verdict"] == "Passed: the weights are those of one process."
    assert 0 <= found["difference"] < 1e-4 and found["tolerance"] == 1e-3
    assert found["rows_per_second"] > 0 and found["rows_per_second_alone"] > 0


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_workers_that_differ_from_one_process(start, tmp_path, options):
    """Each normalizes by its own rows."""
    (tmp_path / "sitecustomize.py").write_text(LOCAL_STATISTICS)
    path = f"{tmp_path}:{environment().get('PYTHONPATH', '')}"
    out, err = ended(start([*TEST, "-n", "2", *options], PYTHONPATH=path), 1)
    assert "tfring launch: rank" not in err
    if options:
        found = json.loads(out)
        assert not found["passed"] and found["difference"] > found["tolerance"]
    else:
        assert out.endswith("\n\nFailed: the weights differ.\n")


def test_ranks_that_something_else_starts(start):
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in (first, second)]
    ranks = [start([*TEST, "--json"], TF_CONFIG=tf_config(addresses, rank)) for rank in range(2)]
    assert ended(ranks[1])[0] == ""
    found = json.loads(ended(ranks[0])[0])
    assert found["cluster"]["source"] == "TF_CONFIG" and found["verdict"].startswith("Passed: ")


def test_a_rank_that_cannot_train(start):
    """The other does not come; the error is the last line, without a traceback."""
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in (first, second)]
    out, err = ended(start([*TEST, "--start-timeout", "1"], TF_CONFIG=tf_config(addresses, 1)), 1)
    assert out == "" and "tfring test: rank 1: " in err and "Traceback" not in err
