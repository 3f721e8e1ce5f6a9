"""What whole calls cost, `fit`, `evaluate`, `predict` and `train_on_batch`: two workers and one beside Keras alone.

    python benchmarks/training/calls.py                       # prints the table
    python benchmarks/training/calls.py --calls "fit 2,jpeg"  # some calls alone
    python benchmarks/training/calls.py --write               # and writes it into README.md

Each contestant has processes of its own, each on a core of its own, that live through the run; a round puts one call
after the other to all of them in turn.
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import re
import statistics
import sys

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import call_times  # noqa: E402
import contest  # noqa: E402

COLUMNS = {("tfring", 2): "two workers", ("tfring", 1): "one worker", ("plain", 1): "Keras alone"}
MARKS = re.compile("(<!-- calls.py -->\n).*?(<!-- end of calls.py -->)", re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", default=",".join(call_times.TITLES))
    parser.add_argument("--write", action="store_true", help="write the table into README.md")
    arguments = parser.parse_args()
    table = measure(arguments.calls.split(","), arguments.rounds)
    print(table)
    if arguments.write:
        page = HERE / "README.md"
        page.write_text(MARKS.sub(lambda marks: f"{marks[1]}\n{table}\n\n{marks[2]}", page.read_text()))


def measure(names: list[str], rounds: int) -> str:
    """Returns the table of some calls."""
    conditions = contest.conditions(realtime=False)
    times: dict[tuple, list[float]] = {}
    with contextlib.ExitStack() as stack:
        running = []
        for contestant, ranks in COLUMNS:
            wanted = [(contestant, contestant, sys.executable, "tensorflow")]
            (started,), _ = stack.enter_context(contest.started(HERE / "worker.py", wanted, ranks))
            running.append(((contestant, ranks), started))
        versions = running[0][1].facts
        for round_number in range(rounds):
            for name in names:
                for column, contestant in running:
                    times.setdefault((name, column), []).append(max(contestant.ask("call", name)))
            print(f"calls, round {round_number + 1} of {rounds}", file=sys.stderr)
    lines = [
        f"{conditions} Versions: {'; '.join(versions)}. Milliseconds, medians of {rounds} interleaved rounds.",
        "",
        f"| | {' | '.join(COLUMNS.values())} | two workers beyond Keras alone | over |",
        "|---|" + "---:|" * (len(COLUMNS) + 2),
    ]
    for name in names:
        several, _, alone = (times[name, column] for column in COLUMNS)
        pairs = list(zip(several, alone, strict=True))
        cells = [f"{1e3 * statistics.median(times[name, column]):,.1f}" for column in COLUMNS]
        cells.append(f"{1e3 * statistics.median(ours - theirs for ours, theirs in pairs):,.1f}")
        cells.append(f"{statistics.median(ours / theirs for ours, theirs in pairs):.2f}")
        lines.append(f"| {call_times.TITLES[name]} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
