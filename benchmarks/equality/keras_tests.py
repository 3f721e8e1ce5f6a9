"""Runs Keras' own tests beside a RingStrategy, in its scope, and on two ranks in lockstep.

    python benchmarks/equality/keras_tests.py                                  all of them: hours
    python benchmarks/equality/keras_tests.py --only losses/ metrics/iou       files whose path holds one of these

The tests are those of the wheel (`keras/src/**/*_test.py`), which need pytest and absl-py, some of them jax.
The files of a folder run in one process a mode, which begins again after a test that ends it:

    plain      without tfring
    beside     a strategy of one worker was made before the tests
    scope      each test runs in the scope of that strategy
    lockstep   as `scope`, on two workers that run the same tests in the same order, and begin again after a failure

What passes plain and fails otherwise is printed with its error, and written to `keras_tests.json`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

MODES = ("plain", "beside", "scope", "lockstep")
HERE = pathlib.Path(__file__)
_RESULTS, _MODE, _SECONDS = "KERAS_TESTS_RESULTS", "KERAS_TESTS_MODE", "KERAS_TESTS_SECONDS"


# -- in a process that runs tests: this file is a plugin of pytest -----------------------------------------------------


class Plugin:
    """Runs each test as the mode says, and writes down how it ended."""

    def __init__(self) -> None:
        self.mode, self.strategy, folder = os.environ[_MODE], None, pathlib.Path(os.environ[_RESULTS])
        self.done = json.loads((folder / "done").read_text())
        self.file = (folder / f"rank.{os.environ.get('TFRING_RANK', '0')}").open("w")
        if self.mode != "plain":
            import tfring

            self.strategy = tfring.RingStrategy()

    def note(self, test: str, *outcome: str) -> None:
        print(json.dumps([test.rpartition("keras/src/")[2], outcome]), file=self.file, flush=True)

    def pytest_collection_modifyitems(self, items: list) -> None:
        """Leaves out tests that have run."""
        items[:] = [item for item in items if item.nodeid.rpartition("keras/src/")[2] not in self.done]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: Any) -> Iterator[None]:
        """Runs a test, with what sets it up and tears it down, in the scope; in time, or ends the process."""
        self.note(item.nodeid, "failed", "ended the process, or did not end in time")
        signal.alarm(int(os.environ[_SECONDS]))
        with self.strategy.scope() if self.mode in ("scope", "lockstep") else contextlib.nullcontext():
            try:
                return (yield)
            finally:
                signal.alarm(0)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Notes an outcome; of a failure its last line."""
        if report.when == "call" or report.outcome != "passed":
            crash = getattr(report.longrepr, "reprcrash", None)
            message = (crash.message if crash else str(report.longrepr))[:600] if report.outcome == "failed" else ""
            self.note(report.nodeid, report.outcome, message)


def run_modules(names: list[str]) -> int:
    """Runs the tests of modules in this process."""
    options = ["-x"] if os.environ[_MODE] == "lockstep" else []  # after a failure ranks are not in step
    options += ["-q", "--continue-on-collection-errors", "-p", "no:cacheprovider", "--rootdir", "/"]
    return pytest.main(["--pyargs", *names, *options], plugins=[Plugin()])


# -- the driver --------------------------------------------------------------------------------------------------------


def outcomes_of(modules: list[str], mode: str, seconds: int) -> dict[str, list[str]]:
    """Returns the outcome and the error of each test of some modules; of ranks that differ, the failure."""
    command = [sys.executable, str(HERE), "--run", *modules]
    if mode == "lockstep":
        command = [sys.executable, "-m", "tfring", "launch", "-n", "2", *command[1:]]
    found: dict[str, list[str]] = {}
    while True:
        with tempfile.TemporaryDirectory() as folder:
            (pathlib.Path(folder) / "done").write_text(json.dumps(list(found)))
            environment = {**os.environ, _MODE: mode, _RESULTS: folder, _SECONDS: str(seconds)}
            subprocess.run(command, env={**environment, "TF_CPP_MIN_LOG_LEVEL": "3"}, capture_output=True, check=False)
            files = [file.read_text().splitlines() for file in pathlib.Path(folder).glob("rank.*")]
        ranks = [dict(json.loads(line) for line in lines) for lines in files]  # of each test, its last line
        before = len(found)
        for test in max(ranks, key=len, default={}):
            outcomes = [rank.get(test, ["failed", "another rank did not run it"]) for rank in ranks]
            found[test] = max(outcomes, key=lambda outcome: outcome[0] == "failed")
            if mode == "lockstep" and found[test][0] == "failed":
                break  # a rank may have gone on after the first that failed on another
        if len(found) == before:
            return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="parts of paths below keras/src")
    parser.add_argument("--modes", nargs="+", default=MODES[1:], choices=MODES[1:])
    parser.add_argument("--seconds", type=int, default=300, help="for a test")
    parser.add_argument("--out", default="keras_tests.json")
    parser.add_argument("--run", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        sys.exit(run_modules(options.run))

    [keras] = importlib.util.find_spec("keras").submodule_search_locations
    source = pathlib.Path(keras) / "src"
    folders: dict[str, list[str]] = {}
    for path in sorted(source.rglob("*_test.py")):
        file = path.relative_to(source)
        if any(part in str(file) for part in options.only):
            folders.setdefault(str(file.parent), []).append(".".join(("keras", "src", *file.with_suffix("").parts)))
    everything: dict[str, dict[str, Any]] = {mode: {} for mode in options.modes}
    counts: dict[str, dict[str, int]] = {}
    for folder, modules in folders.items():
        plain = {t for t, o in outcomes_of(modules, "plain", options.seconds).items() if o[0] == "passed"}
        counts[folder] = {"plain": len(plain)}
        for mode in options.modes:
            found = outcomes_of(modules, mode, options.seconds)
            counts[folder][mode] = len(plain)
            for test in sorted(plain):
                outcome, error = found.get(test, ["missing", "did not run"])
                if outcome != "passed":
                    counts[folder][mode] -= 1
                    everything[mode][test] = error
                    print(f"{mode}: {test}: {error.splitlines()[0] if error else outcome}", flush=True)
        print(folder, *(f"{mode} {number}" for mode, number in counts[folder].items()), flush=True)
        pathlib.Path(options.out).write_text(json.dumps({"passed": counts, "failed": everything}, indent=1))


if __name__ == "__main__":
    main()
