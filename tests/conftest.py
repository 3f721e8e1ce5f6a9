"""Fixtures for tests of all folders."""

import collections
import itertools
import json
import os
import pathlib
import signal
import tomllib

import pytest

from tfring import imports

imports.quicken()
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's job beside others ignores; tests send it

_PATH = os.environ.get("PYTHONPATH")
_DURATIONS = pathlib.Path(__file__).with_name(".durations.json")


def pytest_terminal_summary(terminalreporter, config):
    """Writes the seconds of each test to .durations.json, and prints those of each folder beside its budget."""
    tests, folders = collections.Counter(), collections.Counter()
    for report in itertools.chain(*terminalreporter.stats.values()):
        if hasattr(report, "duration"):  # of its setup, its call or its teardown
            tests[report.nodeid] += report.duration
            folders[pathlib.PurePath(report.fspath).parent.as_posix()] += report.duration
    known = json.loads(_DURATIONS.read_text()) if _DURATIONS.exists() else {}
    known.update({test: round(seconds, 2) for test, seconds in tests.items()})
    written = _DURATIONS.with_suffix(f".{os.getpid()}")  # for ./test.sh has two runs beside each other
    written.write_text(json.dumps(known, indent=0, sort_keys=True))
    written.replace(_DURATIONS)
    budgets = tomllib.loads((config.rootpath / "pyproject.toml").read_text())["tool"]["tfring"]["test-seconds"]
    for folder, seconds in sorted(folders.items()):
        budget = budgets.get(folder, 0)
        more = "  WARNING: more than half above" if seconds > 1.5 * budget else ""
        terminalreporter.write_line(f"{folder:16} {seconds:5.0f} s, budget {budget:4} s{more}", yellow=bool(more))


@pytest.fixture(scope="session", autouse=True)
def bare_keras(tmp_path_factory):
    """Has programs that tests start import Keras as where it is installed alone, in three quarters of the time.

    Keras imports these packages where it finds them.
    """
    folder = tmp_path_factory.mktemp("hidden")
    for name in ("matplotlib", "sklearn"):
        (folder / f"{name}.py").write_text("raise ImportError('hidden by a test')")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        yield


@pytest.fixture
def all_packages(monkeypatch):
    """Has programs that a test starts find what `bare_keras` hides."""
    if _PATH is None:
        monkeypatch.delenv("PYTHONPATH")
    else:
        monkeypatch.setenv("PYTHONPATH", _PATH)
