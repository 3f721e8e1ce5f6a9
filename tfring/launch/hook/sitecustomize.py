"""Prepares a worker of `tfring launch` for its program: one seed for all ranks, and prompts only on rank 0.

TensorFlow and Keras are imported without garbage collection (`tfring.imports`).

This file imports nothing from tfring, so that the program finds its own.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.util
import os
import pathlib
import sys
from typing import Any

_HERE = pathlib.Path(__file__).parent


def _run() -> None:
    _leave_path()
    imports = _load("_tfring_imports", _HERE.parents[1] / "imports.py")
    with imports.end_by_interrupt():
        _prepare(imports)


def _prepare(imports: Any) -> None:
    imports.quicken()
    if os.environ.get("TFRING_SEED"):
        seeding = _load("_tfring_seeding", _HERE.parents[1] / "seeding.py")
        seeding.apply_from_environment(imports.after_import)
        del os.environ["TFRING_SEED"]  # processes that the program starts draw their own numbers
    if os.environ.get("TFRING_RANK", "0") != "0":
        _ask_nothing(os.environ["TFRING_RANK"], imports)
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:  # the file that this one has replaced
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules["sitecustomize"] = module


def _leave_path() -> None:
    """Removes this folder from the path: processes that the program starts are not workers."""
    sys.path[:] = [entry for entry in sys.path if entry != str(_HERE)]
    left = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry != str(_HERE)]
    os.environ["PYTHONPATH"] = os.pathsep.join(left)
    if not any(left):
        del os.environ["PYTHONPATH"]


def _load(name: str, file: pathlib.Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _ask_nothing(rank: str, imports: Any) -> None:
    """Explains why `input()` ends at once: standard input is rank 0's. Skips calls that would stop in a debugger."""
    original = builtins.input

    def input(prompt: object = "", /) -> str:
        try:
            return original(prompt)
        except EOFError:
            raise EOFError(
                f"input() on rank {rank}: standard input goes to rank 0 alone. Ask there, and send the answer to all: "
                "answer = tfring.broadcast(input() if tfring.is_chief() else None)"
            ) from None

    def pass_by(*_: object, **__: object) -> None:
        print(f"rank {rank} passes by the breakpoint: standard input goes to rank 0 alone", file=sys.stderr)

    builtins.input = input
    sys.breakpointhook = pass_by
    imports.after_import("pdb", lambda pdb: setattr(pdb, "set_trace", pass_by))


if __name__ == "sitecustomize":
    _run()
