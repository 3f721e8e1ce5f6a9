"""The modules of patches/, which belong to no package, and a Python 3.7 where there is one."""

import importlib.util
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def load(name, path):
    spec = importlib.util.spec_from_file_location(name, ROOT / "patches" / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def patch():
    """A fresh copy of the patch: it keeps what it replaced in its own variables."""
    return load("tfring_sparse_patch", "tfring_sparse_patch.py")


@pytest.fixture(scope="session")
def show():
    return load("tfring_patches_show", "show/show.py")


@pytest.fixture(scope="session")
def source_patch():
    return load("tfring_patches_source", "source/patch_gather.py")


@pytest.fixture(scope="session")
def python37(show):
    """The path of a Python 3.7; where there is none, tests that need it are skipped, aloud."""
    try:
        return show.find_python37()
    except show.NoPython37 as error:
        print(error, file=sys.stderr)
        pytest.skip(str(error))
