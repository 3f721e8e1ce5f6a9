"""Trains on each kind of mesh, interrupts, goes on on each other one, and compares with one process, as a table.

    .venv-test/bin/python benchmarks/equality/restarts.py

A backup is saved after step 7 of 20, between two updates of an optimizer that accumulates three gradients, and in the
second epoch; a second model has moving averages of weights. Each pair goes on from a backup that rank 0
wrote and from one whose shards the ranks wrote. What is shown is the largest relative difference of weights and of logs
of each epoch. The models are those of tests/training/test_backup_on_meshes.py; meshes named as arguments are taken
alone.
"""

from __future__ import annotations

import pathlib
import sys
import tempfile

TESTS = pathlib.Path(__file__).resolve().parents[2] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "training")]

import harness  # noqa: E402
import test_backup_on_meshes as restarts  # noqa: E402


def main(meshes: list[str]) -> None:
    cases = list(restarts.CASES)
    rows: dict[str, list[float]] = {}
    try:
        with tempfile.TemporaryDirectory() as folder:
            wholes = restarts.whole(cases)
            for then in meshes:
                restarts.saved(then, cases, folder)
            for now in meshes:
                for then in meshes:  # a task each: they have a time limit
                    found = [(then, case, kind) for case in cases for kind in restarts.KINDS]
                    errors = restarts.errors(now, found, folder, wholes)
                    rows.setdefault(then, []).append(max(errors.values()))
                    print(f"{then}, then {now}: {errors}", file=sys.stderr, flush=True)
    finally:
        harness.shut_down()
    print(f"| saved on, goes on on | {' | '.join(meshes)} |\n|---|{'---:|' * len(meshes)}")
    for then, errors in rows.items():
        print(f"| {then} | {' | '.join(f'{error:.0e}' for error in errors)} |")


if __name__ == "__main__":
    main(sys.argv[1:] or list(restarts.MESHES))
