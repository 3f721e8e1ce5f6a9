"""Runs Keras' own tests beside a RingStrategy, in its scope, and on two ranks in lockstep.

    python benchmarks/equality/keras_tests.py --write                         all, and the table of README.md: hours
    python benchmarks/equality/keras_tests.py --only losses/ metrics/iou      files whose path holds one of these
    python benchmarks/equality/keras_tests.py --modes lockstep                after the other modes

The tests are those of the wheel (`keras/src/**/*_test.py`), which need pytest and absl-py, some of them jax.
The files of a folder run in one process a mode, which begins again after a test that ends it:

    plain      without tfring
    beside     a strategy of one worker was made before the tests
    scope      each test runs in the scope of that strategy
    lockstep   as `scope`, on two workers that run the same tests in the same order

Of a mode run only tests that passed plain, of `lockstep` only those that passed in the scope, too. After a failure in
lockstep, both workers begin again, and so does the test if others ran before it: one that raises an error may end
the ring for those after it; not one that tfring refuses on both before they communicate (`ConfigurationError`). What
passes plain and fails otherwise is printed with its error. `keras_tests.json` keeps the outcomes, also those of
earlier runs, and of one that is interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import json
import os
import pathlib
import platform
import signal
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from typing import Any

import pytest

MODES = ("plain", "beside", "scope", "lockstep")
REFUSED = "tfring.errors.ConfigurationError"
HERE = pathlib.Path(__file__).resolve()
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

    def pytest_sessionstart(self, session: Any) -> None:
        self.session = session

    def pytest_collectreport(self, report: Any) -> None:
        """Notes a file whose tests cannot be read, such as for want of a package."""
        if report.outcome == "failed" and report.nodeid.rpartition("keras/src/")[2] not in self.done:
            self.note(report.nodeid, "failed", str(report.longrepr).splitlines()[-1])

    def pytest_collection_modifyitems(self, items: list) -> None:
        """Leaves out tests that have run, or failed in a mode before."""
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
            if self.mode == "lockstep" and report.outcome == "failed" and not message.startswith(REFUSED):
                self.session.shouldfail = "after a failure ranks are not in step"


def run_modules(names: list[str]) -> int:
    """Runs the tests of modules in this process."""
    conftest: Any = types.ModuleType("conftest")  # that of Keras' repository, which the wheel does not hold
    conftest.skip_if_backend = lambda name, reason: pytest.mark.skipif(name == "tensorflow", reason=reason)
    sys.modules["conftest"] = conftest
    options = ["-q", "--continue-on-collection-errors", "-p", "no:cacheprovider"]
    options += ["--rootdir", "/", "-c", os.devnull, "--noconftest"]  # those of Keras, not of this folder
    return pytest.main(["--pyargs", *names, *options], plugins=[Plugin()])


# -- the driver --------------------------------------------------------------------------------------------------------

Outcomes = dict[str, list[str]]  # of each test: how it ended, and its error


def run_tests(found: Outcomes, modules: list[str], mode: str, seconds: int, left_out: list[str]) -> None:
    """Adds the outcomes of the tests of some modules, also of those that ended before an interrupt.

    Of workers that differ it is the failure.
    """
    command = [sys.executable, str(HERE), "--run", *modules]
    if mode == "lockstep":
        command = [sys.executable, "-m", "tfring", "launch", "-n", "2", *command[1:]]
    while True:
        with tempfile.TemporaryDirectory() as folder:
            (pathlib.Path(folder) / "done").write_text(json.dumps([*left_out, *found]))
            environment = {**os.environ, _MODE: mode, _RESULTS: folder, _SECONDS: str(seconds)}
            environment["TF_CPP_MIN_LOG_LEVEL"] = "3"
            before = len(found)
            try:
                run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
                if not list(pathlib.Path(folder).glob("rank.*")):
                    raise RuntimeError(f"No test began in mode {mode}:\n{run.stderr[-3000:]}")
            finally:
                found.update(_outcomes_in(pathlib.Path(folder), mode))
        if len(found) == before:
            return


def _outcomes_in(folder: pathlib.Path, mode: str) -> Outcomes:
    """Returns the outcomes that processes have written, up to the first after which workers are not in step."""
    files = [file.read_text().splitlines() for file in folder.glob("rank.*")]
    ranks = [dict(json.loads(line) for line in lines if line.endswith("]")) for lines in files]  # of a test its last
    found: Outcomes = {}
    for number, test in enumerate(max(ranks, key=len, default={})):
        outcomes = [rank.get(test, ["failed", "another rank did not run it"]) for rank in ranks]
        outcome = max(outcomes, key=lambda outcome: outcome[0] == "failed")
        refused = all(error.startswith(REFUSED) for _, error in outcomes)
        failed = mode == "lockstep" and outcome[0] == "failed" and not refused
        if not failed or number == 0:
            found[test] = outcome
        if failed:
            break  # a rank may have gone on after the first that failed on another
    return found


def passed(outcomes: Outcomes) -> set[str]:
    return {test for test, outcome in outcomes.items() if outcome[0] == "passed"}


def table(modes: dict[str, Outcomes]) -> str:
    """Returns the numbers of tests of each folder that pass plain and in each mode."""
    rows = ["| |" + "".join(f" {mode} |" for mode in MODES), "|---|" + "---:|" * len(MODES)]
    plain = passed(modes["plain"])
    for folder in sorted({test.rpartition("/")[0] for test in plain}):
        here = {test for test in plain if test.rpartition("/")[0] == folder}
        cells = []
        for mode in MODES:
            run = any(test in modes.get(mode, {}) for test in here)
            cells.append(str(len(here & passed(modes[mode]))) if run else "not run")
        rows.append(f"| {folder} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="parts of paths below keras/src")
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES)
    parser.add_argument("--new", action="store_true", help="only tests of which the file --out has no outcome")
    parser.add_argument("--seconds", type=int, default=120, help="for a test")
    parser.add_argument("--out", default="keras_tests.json")
    parser.add_argument("--write", action="store_true", help="write the table into README.md")
    parser.add_argument("--run", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        sys.exit(run_modules(options.run))

    [package] = importlib.util.find_spec("keras").submodule_search_locations
    source, out = pathlib.Path(package) / "src", pathlib.Path(options.out)
    files = [path.relative_to(source) for path in sorted(source.rglob("*_test.py"))]
    files = [file for file in files if any(part in str(file) for part in options.only)]
    folders: dict[str, list[str]] = {}
    for file in files:
        folders.setdefault(str(file.parent), []).append(".".join(("keras", "src", *file.with_suffix("").parts)))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # with the tests that run
    modes: dict[str, Outcomes] = json.loads(out.read_text()) if out.exists() else {}
    order = [mode for mode in MODES if mode in options.modes]
    for mode, modules in ((mode, modules) for modules in folders.values() for mode in order):
        needed = {"plain": (), "lockstep": ("plain", "scope")}.get(mode, ("plain",))
        failed = [test for other in needed for test in modes[other].keys() - passed(modes[other])]
        found: Outcomes = {}
        known = list(modes.get(mode, {})) if options.new else []
        try:
            run_tests(found, modules, mode, options.seconds, [*failed, *known])
        finally:
            modes.setdefault(mode, {}).update(found)
            out.write_text(json.dumps(modes, indent=1))
        for test, (outcome, error) in found.items():
            if mode != "plain" and outcome != "passed":
                print(f"{mode}: {test}: {error.splitlines()[0] if error else outcome}", flush=True)
    import keras
    import tensorflow as tf

    versions = f"TensorFlow {tf.__version__}, Keras {keras.__version__}, Python {platform.python_version()}"
    lines = f"{versions}, {datetime.date.today()}:\n\n{table(modes)}\n"
    print(lines)
    if options.write:
        readme = HERE.parent / "README.md"
        before, mark, rest = readme.read_text().partition("<!-- keras' tests -->\n")
        readme.write_text(before + mark + lines + rest[rest.index("<!-- end -->") :])


if __name__ == "__main__":
    main()
