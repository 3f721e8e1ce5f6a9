"""Every example in a docstring of the package runs and prints what it says."""

import doctest
import importlib
import pkgutil

import pytest

import tfring

# Importing these runs something, or needs what only an installation has.
SKIPPED = ("tfring.launch.__main__",)
MODULES = [
    module.name for module in pkgutil.walk_packages(tfring.__path__, "tfring.") if module.name not in SKIPPED
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.failed == 0


def test_examples_are_there():
    finder = doctest.DocTestFinder(exclude_empty=True)
    counts = [len([t for t in finder.find(importlib.import_module(name)) if t.examples]) for name in MODULES]
    assert sum(counts) >= 15
