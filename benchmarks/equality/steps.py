"""Trains programs of every kind that users write into a step on several workers, and compares them with one process.

    python benchmarks/equality/steps.py                          # all, on two and on three workers
    python benchmarks/equality/steps.py --only "contrast|dice" --workers 2
    python benchmarks/equality/steps.py --write FILE             # a table in Markdown
    python benchmarks/equality/steps.py --list

The programs are those of the folder `corpus`. Each trains for two epochs of 16 skewed rows in batches of 7, the last of
which has 2, and one of the first 12 of them, in one process (a ring of one) and on each number of workers. What is
compared are all variables and the logs of each epoch, by the largest difference over 1 or, if that is more, the largest
absolute value. A program is

    equal          where the difference is at most 1e-5
    whole          the same, and each worker has computed the whole batch
    DIFFERS        where it is more
    refused        where tfring raised an error of its own
    error          where another exception was raised, workers hung, or ranks hold other weights
"""

from __future__ import annotations

import argparse
import collections
import pathlib
import re
import sys
import tempfile
from typing import Any, NamedTuple

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tests")]

import corpus  # noqa: E402
import harness  # noqa: E402
import numpy as np  # noqa: E402

TOLERANCE = 1e-5
AT_ONCE = 8  # programs in one task
SECONDS = 60  # that a program may take
VERDICTS = ("equal", "whole", "DIFFERS", "refused", "error")


class Outcome(NamedTuple):
    """What has become of a program on several workers.

    Attributes:
      verdict: one of VERDICTS.
      difference: the largest, if there is one.
      where: the variable or log that differs most.
      text: why each worker has computed the whole batch, or the error.
    """

    verdict: str
    difference: float | None
    where: str
    text: str


def run(names: list[str], world_size: int, devices: int = 1) -> list[list[corpus.Trained]]:
    """Returns what has become of programs on each rank; programs that break workers are tried without the others.

    Args:
      names: of programs.
      world_size: the number of workers.
      devices: of each worker.
    """
    results: list[list[corpus.Trained]] = []
    while len(results) < len(names):
        rest = names[len(results) :]
        with tempfile.NamedTemporaryFile("r") as progress:
            progress_of = [progress.name] + [None] * (world_size - 1)
            try:
                by_rank = harness.workers(world_size, logical_cpus=devices).run(
                    corpus.trained, rest, devices, per_rank=progress_of, timeout=SECONDS * len(rest)
                )
            except harness.WorkersFailedError as error:
                broken = int(pathlib.Path(progress.name).read_text() or 0)
                text = "workers broke or hung: " + " | ".join(str(error).splitlines()[-1:])[:200]
                results += run(rest[:broken], world_size, devices)
                results.append([corpus.Trained({}, None, text, False, 0.0)] * world_size)
            else:
                results += [list(of_ranks) for of_ranks in zip(*by_rank, strict=True)]
    return results


def compare(one: corpus.Trained, ranks: list[corpus.Trained]) -> Outcome:
    """Returns what has become of a program, given what one process and each rank have."""
    broken = [rank for rank in ranks if rank.error is not None]
    if one.error is not None:
        return Outcome("error", None, "", f"in one process: {one.error}")
    if broken:
        first = min(broken, key=_is_consequence)
        verdict = "refused" if all(rank.is_refused for rank in broken) and len(broken) == len(ranks) else "error"
        return Outcome(verdict, None, "", first.error or "")
    said = _reason(ranks[0].said)
    bad = [name for name, value in one.values.items() if not np.all(np.isfinite(value))]
    if bad:
        return Outcome("error", None, "", f"in one process: not finite: {', '.join(bad)[:100]}")
    for rank in ranks[1:]:
        other = [name for name, value in rank.values.items() if not _is_same(value, ranks[0].values.get(name))]
        if other:
            text = f"ranks differ: {', '.join(other)[:100]}"
            return Outcome("error", None, other[0], f"{text}; {said or 'nothing was said'}")
    differences = {name: _difference(ranks[0].values.get(name), value) for name, value in one.values.items()}
    where = max(differences, key=lambda name: differences[name])
    if differences[where] <= TOLERANCE:
        return Outcome("whole" if said else "equal", differences[where], "", said)
    return Outcome("DIFFERS", differences[where], where, said)


def _is_consequence(rank: corpus.Trained) -> bool:
    return any(name in (rank.error or "") for name in ("PeerLost", "Aborted", "CollectiveTimeout"))


def _is_same(a: np.ndarray, b: np.ndarray | None) -> bool:
    return b is not None and a.shape == b.shape and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")


def _difference(value: np.ndarray | None, wanted: np.ndarray) -> float:
    if value is None or value.shape != wanted.shape:
        return np.inf
    if not wanted.size:
        return 0.0
    value, wanted = value.astype("float64"), wanted.astype("float64")
    difference = np.max(np.abs(value - wanted)) / max(1.0, np.max(np.abs(wanted)))
    return float(np.nan_to_num(difference, nan=np.inf))


def _reason(said: str | None) -> str:
    """Returns the first reason that is logged, in one line."""
    if not said:
        return ""
    lines = said.splitlines()
    return (lines[1] if len(lines) > 1 and lines[1].startswith("  ") else lines[0]).strip()


def shown(outcome: Outcome) -> str:
    if outcome.verdict in ("refused", "error"):
        return f"{outcome.verdict}: {outcome.text}"
    text = f"{outcome.verdict} {outcome.difference:.0e}"
    text += f" ({outcome.where})" if outcome.where else ""
    return text + (f": {outcome.text}" if outcome.text else "")


def table(outcomes: dict[str, dict[int, Outcome]], sizes: list[int]) -> list[str]:
    """Returns a table in Markdown: a row a program."""

    def cell(outcome: Outcome) -> str:
        number = "" if outcome.difference is None else f" {outcome.difference:.0e}"
        return f"{outcome.verdict}{number}"

    lines = [f"| program | {' | '.join(f'{n} workers' for n in sizes)} | said |", f"|---|{'---|' * (len(sizes) + 1)}"]
    for name, by_size in outcomes.items():
        said = next((by_size[n].text for n in sizes if by_size[n].text), "").replace("|", "\\|")
        lines.append(f"| {name} | {' | '.join(cell(by_size[n]) for n in sizes)} | {said} |")
    return lines


def summary(outcomes: dict[str, dict[int, Outcome]]) -> list[str]:
    """Returns how many programs have come to what, by the worst of the numbers of workers, and which to look at."""
    order = ("equal", "whole", "refused", "DIFFERS", "error")
    worst: dict[str, list[str]] = collections.defaultdict(list)
    for name, by_size in outcomes.items():
        worst[max((outcome.verdict for outcome in by_size.values()), key=order.index)].append(name)
    counts = ", ".join(f"{len(worst[verdict])} {verdict}" for verdict in VERDICTS)
    lines = [f"{len(outcomes)} programs: {counts}.", ""]
    for verdict in ("DIFFERS", "error", "refused", "whole"):
        if worst[verdict]:
            lines += [f"{verdict}:", "", *(f"* {name}" for name in worst[verdict]), ""]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="PATTERN", help="a regular expression, found in names")
    parser.add_argument("--workers", default="2,3", help="numbers of workers, with commas between")
    parser.add_argument("--devices", type=int, default=1, help="of each worker, one replica on each")
    parser.add_argument("--write", metavar="FILE", help="write the table and the counts into a file")
    parser.add_argument("--list", action="store_true", help="print the names of the programs alone")
    arguments = parser.parse_args()
    names = [name for name in corpus.PROGRAMS if re.search(arguments.only, name)]
    if arguments.list:
        print("\n".join(names))
        return
    sizes = [int(size) for size in arguments.workers.split(",")]
    outcomes: dict[str, dict[int, Outcome]] = {}
    try:
        for begin in range(0, len(names), AT_ONCE):
            part = names[begin : begin + AT_ONCE]
            alone = run(part, 1)
            found: dict[int, Any] = {size: run(part, size, arguments.devices) for size in sizes}
            for number, name in enumerate(part):
                one = alone[number][0]
                outcomes[name] = {size: compare(one, found[size][number]) for size in sizes}
                for size in sizes:
                    seconds = f"{one.seconds:.1f}/{found[size][number][0].seconds:.1f} s"
                    print(f"{name} [{size}] {shown(outcomes[name][size])}  ({seconds})", flush=True)
    finally:
        harness.shut_down()
        lines = summary(outcomes)
        print("\n".join(["", *lines]))
        if arguments.write:
            pathlib.Path(arguments.write).write_text("\n".join([*lines, *table(outcomes, sizes), ""]))


if __name__ == "__main__":
    main()
