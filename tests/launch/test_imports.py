"""Imports of TensorFlow and Keras, during which Python looks for no garbage."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from test_launch import LAUNCH

# Beside a package of that name, which notes what it is imported with and leaves cyclic garbage.
KERAS = """
import gc, sys
sys.seen = getattr(sys, "seen", []) + [gc.isenabled()]
class Cycle: pass
cycles = [Cycle() for _ in range(20_000)]
for cycle in cycles:
    cycle.own = cycle
if "fail" in sys.argv:
    raise LookupError("while it is imported")
del cycles, cycle
import other
"""
PROGRAM = """
import gc, json, sys
{before}
try:
    import keras
except LookupError as error:
    sys.seen.append(str(error))
gets_back = [gc.isenabled(), gc.get_freeze_count()]
collected = gc.collect() if not gets_back[1] else 0
print(json.dumps([sys.seen, *gets_back, collected >= 20_000]))
"""


@pytest.fixture
def seen(tmp_path):
    """Runs the program, launched or by itself, and returns what it has printed."""
    (tmp_path / "keras").mkdir()
    (tmp_path / "keras" / "__init__.py").write_text(KERAS)
    (tmp_path / "other.py").write_text("import gc, sys\nsys.seen.append(gc.isenabled())")

    def run(before="", *arguments, command=(*LAUNCH, "-n", "1")):
        (tmp_path / "program.py").write_text(PROGRAM.format(before=before))
        done = subprocess.run(
            [*command, str(tmp_path / "program.py"), *arguments], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def test_a_launched_program_imports_without_collections(seen):
    assert seen() == [[False, False], True, 0, True]
    assert seen(command=[sys.executable]) == [[True, True], True, 0, True]  # nothing is done to others


def test_an_import_that_fails_leaves_the_collector_on(seen):
    assert seen("", "fail") == [[False, "while it is imported"], True, 0, True]


def test_what_the_program_does_with_its_collector_stays(seen):
    assert seen("gc.disable()") == [[False, False], False, 0, True]
    enabled, frozen = seen("gc.freeze()")[1:3]
    assert enabled and frozen > 1000


def test_a_module_is_reloaded_as_ever(seen):
    again = "import importlib, keras\nassert importlib.reload(keras) is keras and len(sys.seen) == 3, sys.seen"
    assert seen(again) == [[False, False, False], True, 0, True]
    assert seen("import importlib.util\nassert importlib.util.find_spec('keras').loader.exec_module") == [
        [False, False], True, 0, True,
    ]  # fmt: skip


@pytest.mark.parametrize("asked_first", ["", "sys.meta_path.insert(0, sys.meta_path.pop(1))"])
def test_hooks_of_the_program_run_behind_the_import(seen, asked_first):
    hook = "register_post_import_hook(lambda module: sys.seen.append(module.__name__), 'keras')"
    before = f"from wrapt import register_post_import_hook\n{hook}\n{asked_first}"
    assert seen(before) == [[False, False, "keras"], True, 0, True]
