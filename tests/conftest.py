"""Fixtures for tests of all folders."""

import os

import pytest


@pytest.fixture(scope="session")
def empty_packages(tmp_path_factory):
    """Returns a folder with packages that do not import: those that Keras imports only where it finds them."""
    folder = tmp_path_factory.mktemp("empty")
    for name in ("matplotlib", "sklearn"):
        (folder / f"{name}.py").write_text("raise ImportError('hidden by a test')")
    return folder


@pytest.fixture
def plain_keras(empty_packages, monkeypatch):
    """Has programs that a test starts import Keras as where it is installed alone, in three quarters of the time."""
    monkeypatch.setenv("PYTHONPATH", str(empty_packages), prepend=os.pathsep)
