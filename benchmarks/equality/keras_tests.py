"""Runs Keras' own tests beside a RingStrategy, in its scope, and on two ranks in lockstep.

    python benchmarks/equality/keras_tests.py                                  all of them: hours
    python benchmarks/equality/keras_tests.py --only losses/ metrics/iou       files whose path holds one of these

The tests are those of the wheel (`keras/src/**/*_test.py`), which need pytest and absl-py, some of them jax.
Each file runs in processes of its own, once a mode:

    plain      without tfring
    beside     a strategy of one worker was made before the tests
    scope      each test runs in the scope of that strategy
    lockstep   as `scope`, on two workers that run the same tests in the same order

What passes plain and fails otherwise is printed with its error, and written to `keras_tests.json`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

MODES = ("plain", "beside", "scope", "lockstep")
HERE = pathlib.Path(__file__)
_RESULTS, _MODE, _PASSED_OVER = "KERAS_TESTS_RESULTS", "KERAS_TESTS_MODE", "KERAS_TESTS_PASSED_OVER"


# -- in a process that runs tests: this file is a plugin of pytest -----------------------------------------------------


class Plugin:
    """Runs each test as the mode says, and writes down how it ended."""

    def __init__(self) -> None:
        self.mode, self.strategy, self.outcomes = os.environ[_MODE], None, {}
        if self.mode != "plain":
            import tfring

            self.strategy = tfring.RingStrategy()

    def pytest_collection_modifyitems(self, items: list) -> None:
        """Leaves out tests that failed before."""
        passed_over = os.environ.get(_PASSED_OVER, "").split("\n")
        items[:] = [item for item in items if _name(item.nodeid) not in passed_over]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: Any) -> Iterator[None]:
        """Runs a test, with what sets it up and tears it down, in the scope."""
        with self.strategy.scope() if self.mode in ("scope", "lockstep") else contextlib.nullcontext():
            return (yield)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Notes an outcome; of a failure its last line."""
        if report.when == "call" or report.outcome != "passed":
            message = ""
            if report.outcome == "failed":
                crash = getattr(report.longrepr, "reprcrash", None)
                message = (crash.message if crash else str(report.longrepr))[:600]
            self.outcomes.setdefault(_name(report.nodeid), [report.outcome, message])
            rank = os.environ.get("TFRING_RANK", "0")
            pathlib.Path(f"{os.environ[_RESULTS]}.{rank}").write_text(json.dumps(self.outcomes))


def _name(test: str) -> str:
    return test.rpartition("keras/src/")[2]


def run_module(name: str) -> int:
    """Runs the tests of a module in this process."""
    options = ["-q", "-x"] if os.environ[_MODE] == "lockstep" else ["-q"]  # after a failure ranks are not in step
    return pytest.main(["--pyargs", name, *options, "-p", "no:cacheprovider", "--rootdir", "/"], plugins=[Plugin()])


# -- the driver --------------------------------------------------------------------------------------------------------


def all_outcomes_of(module: str, mode: str, seconds: float) -> dict[str, list[str]]:
    """Returns what `outcomes_of` does, where two workers begin again without a test that has failed."""
    found = outcomes_of(module, mode, seconds, [])
    passed_over: list[str] = []
    while mode == "lockstep" and (failed := [t for t, o in found.items() if o[0] == "failed" and t not in passed_over]):
        passed_over += failed
        found = {**outcomes_of(module, mode, seconds, passed_over), **{test: found[test] for test in passed_over}}
    return found


def outcomes_of(module: str, mode: str, seconds: float, passed_over: list[str]) -> dict[str, list[str]]:
    """Returns the outcome and the error of each test of a module; of ranks that differ, the failure."""
    command = [sys.executable, str(HERE), "--run", module]
    if mode == "lockstep":
        command = [sys.executable, "-m", "tfring", "launch", "-n", "2", *command[1:]]
    with tempfile.TemporaryDirectory() as folder:
        results = pathlib.Path(folder) / "results"
        environment = {**os.environ, _MODE: mode, _RESULTS: str(results), "TF_CPP_MIN_LOG_LEVEL": "3"}
        environment[_PASSED_OVER] = "\n".join(passed_over)
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(command, env=environment, capture_output=True, timeout=seconds, check=False)
        found: dict[str, list[str]] = {}
        for file in sorted(pathlib.Path(folder).glob("results.*")):
            for test, outcome in json.loads(file.read_text()).items():
                if test not in found or outcome[0] == "failed":
                    found[test] = outcome
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="parts of paths below keras/src")
    parser.add_argument("--modes", nargs="+", default=MODES[1:], choices=MODES[1:])
    parser.add_argument("--seconds", type=float, default=1800, help="for the tests of a file in a mode")
    parser.add_argument("--out", default="keras_tests.json")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        sys.exit(run_module(options.run))

    [keras] = importlib.util.find_spec("keras").submodule_search_locations
    source = pathlib.Path(keras) / "src"
    files = [str(path.relative_to(source)) for path in sorted(source.rglob("*_test.py"))]
    files = [file for file in files if any(part in file for part in options.only)]
    everything: dict[str, dict[str, Any]] = {mode: {} for mode in options.modes}
    counts = dict.fromkeys(("plain", *options.modes), 0)
    for file in files:
        module = "keras.src." + file.removesuffix(".py").replace("/", ".")
        plain = {t for t, o in all_outcomes_of(module, "plain", options.seconds).items() if o[0] == "passed"}
        counts["plain"] += len(plain)
        if not plain:
            print(f"plain: {file}: no test passed; a module that is missing?", flush=True)
        for mode in options.modes:
            found = all_outcomes_of(module, mode, options.seconds)
            for test in sorted(plain):
                outcome, error = found.get(test, ["missing", "did not run, or not to its end"])
                counts[mode] += outcome == "passed"
                if outcome != "passed":
                    everything[mode][test] = error
                    print(f"{mode}: {test}: {error.splitlines()[0] if error else outcome}", flush=True)
        pathlib.Path(options.out).write_text(json.dumps({"passed": counts, "failed": everything}, indent=1))
    print(", ".join(f"{mode}: {number} passed" for mode, number in counts.items()))


if __name__ == "__main__":
    main()
