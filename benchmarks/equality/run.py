"""Trains divided models on every kind of mesh and compares them with one process: the tables of this folder's README.

    .venv-test/bin/python benchmarks/equality/run.py            # prints them; with --write into README.md, too
    .venv-test/bin/python benchmarks/equality/restarts.py    for restarts on other meshes alone, on standard output

Each model trains for two epochs of 43 skewed rows in batches of 20, the last of which has 3, on started workers and in
one process. What is shown is the largest relative difference of histories and weights, and for the first model of a
mesh of evaluation and predictions. The models are those of tests/training/test_pipeline.py.
"""

from __future__ import annotations

import argparse
import math
import pathlib
import platform
import sys

HERE = pathlib.Path(__file__).resolve().parent
TESTS = HERE.parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "training")]

import common  # noqa: E402
import harness  # noqa: E402
import test_pipeline  # noqa: E402

MICROBATCHES = (1, 2, 4, 8)
SCHEDULES = ("1f1b", "gpipe")
PIPELINES = ({"pipeline": 2}, {"pipeline": 3}, {"pipeline": 4}, {"pipeline": 2, "data": 2})
DIVIDED = (
    *({"data": n} for n in (2, 3, 4)),
    *({"data": 1, "model": n} for n in (2, 3, 4)),
    {"data": 2, "model": 2},
)
TOGETHER = ({"pipeline": 2, "model": 2}, {"pipeline": 2, "data": 2, "model": 2})
AT_ONCE = 4  # models in one task, which has a time limit


def errors(mesh: dict, cases: list, floatx: str = "float32") -> list[float]:
    """Returns the largest relative error of each case; raises where ranks differ."""
    found = []
    for begin in range(0, len(cases), AT_ONCE):
        part = cases[begin : begin + AT_ONCE]
        results = harness.workers(math.prod(mesh.values())).run(test_pipeline.trained, mesh, part, floatx)
        for number, case in enumerate(part):
            of_case = [rank[number] for rank in results]
            if len({rank["bits"] for rank in of_case}) > 1:
                raise AssertionError(f"ranks hold other weights: {mesh}, {case}")
            found.append(max(max(rank["errors"]) for rank in of_case if "errors" in rank))
        print(f"{mesh} {floatx}: {max(found):.1e}", file=sys.stderr)
    return found


def table(head: list[str], rows: dict[str, list[float]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
    return [*lines, *(f"| {name} | {' | '.join(f'{value:.0e}' for value in row)} |" for name, row in rows.items())]


def called(mesh: dict) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in mesh.items() if size > 1)


def pipelines() -> list[str]:
    kinds = [(schedule, m) for schedule in SCHEDULES for m in MICROBATCHES]
    cases = [("chain", {"num_microbatches": m, "schedule": schedule}, "adam", {}) for schedule, m in kinds]
    columns = [errors(mesh, cases) for mesh in PIPELINES]
    rows = {f"{kind}, M = {m}": list(row) for (kind, m), row in zip(kinds, zip(*columns, strict=True), strict=True)}
    return table(["", *map(called, PIPELINES)], rows)


def by_optimizer(meshes, kind: str, **options) -> list[str]:
    """A row an optimizer and setting; every other pipeline computes again."""
    names = [*common.element_wise_optimizers(), *common.optimizer_settings(), "swapped"]
    names.remove("MultiOptimizer") if "MultiOptimizer" in names else None  # of names of other models
    cases = [(kind, {**options, "recompute": bool(i % 2)} if options else {}, name, {}) for i, name in enumerate(names)]
    columns = [errors(mesh, cases) for mesh in meshes]
    rows = {name: list(row) for name, row in zip(names, zip(*columns, strict=True), strict=True)}
    return table(["", *map(called, meshes)], rows)


def in_float64() -> list[str]:
    meshes = (*PIPELINES, *DIVIDED, *TOGETHER)
    rows = {}
    for mesh in meshes:
        kind = "chain" if mesh in PIPELINES else "dense"
        rows[called(mesh)] = errors(mesh, [(kind, {"num_microbatches": 4}, "adam", {})], "float64")
    return table(["", "float64"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the tables into README.md")
    arguments = parser.parse_args()
    try:
        parts = {
            "Pipelines": pipelines(),
            "Optimizers in pipelines": by_optimizer(PIPELINES, "chain", num_microbatches=2),
            "Sharded layers": by_optimizer(DIVIDED, "dense"),
            "Sharded layers within stages": by_optimizer(TOGETHER, "dense", num_microbatches=2),
            "In float64": in_float64(),
        }
    finally:
        harness.shut_down()
    import keras
    import tensorflow as tf

    text = HERE.joinpath("README.md").read_text()
    begin = text.index("<!-- tables -->")
    lines = [f"TensorFlow {tf.__version__}, Keras {keras.__version__}, Python {platform.python_version()}.", ""]
    for title, part in parts.items():
        lines += [f"## {title}", "", *part, ""]
    print("\n".join(lines))
    if arguments.write:
        HERE.joinpath("README.md").write_text(text[:begin] + "<!-- tables -->\n" + "\n".join(lines))


if __name__ == "__main__":
    main()
