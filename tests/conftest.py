"""Fixtures for tests of all folders."""

import os

import pytest

from tfring import imports

imports.quicken()

_PATH = os.environ.get("PYTHONPATH")


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
