"""What whole calls cost, `fit`, `evaluate`, `predict` and `train_on_batch`, and whole programs, beside the peers.

    python benchmarks/training/calls.py                             # prints the tables
    python benchmarks/training/calls.py --calls "fit 1 2,jpeg"      # some calls alone
    python benchmarks/training/calls.py --programs ""               # no programs
    python benchmarks/training/calls.py --write                     # and writes them into README.md

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
import models  # noqa: E402
from plain import PROGRAM_STEPS  # noqa: E402

# (contestant, workers): heading, Python, module it needs
KERAS, ALONE, APART, TFRING = ("plain", 1), ("tfring", 1), ("apart", 2), ("tfring", 2)
OLD, HOROVOD, TORCH, DDP = ("old", 1), ("horovod", 2), ("torch", 1), ("torch", 2)
COLUMNS = {
    TFRING: ("two workers", "", "tensorflow"),
    ALONE: ("one worker", "", "tensorflow"),
    KERAS: ("Keras alone", "", "tensorflow"),
    APART: ("two, nothing exchanged", "", "tensorflow"),
    OLD: ("tf.keras of Horovod's TensorFlow", "horovod", "tensorflow"),
    HOROVOD: ("Horovod, two workers", "horovod", "horovod.tensorflow"),
    TORCH: ("torch", "peers", "torch"),
    DDP: ("torch DDP on gloo, two workers", "peers", "torch"),
}
OF_CALLS = (TFRING, ALONE, KERAS, APART, OLD, HOROVOD)
PROGRAMS = ("convolutions", "dense", "embeddings", "jpeg")
MARKS = re.compile("(<!-- calls.py -->\n).*?(<!-- end of calls.py -->)", re.DOTALL)
SPENT = (TFRING, ALONE, KERAS, APART)
Times = dict  # of (name, question, column): answers of the slowest worker, a round each


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", default=",".join(call_times.TITLES))
    parser.add_argument("--programs", default=",".join(PROGRAMS))
    parser.add_argument("--peers-python", default=sys.executable, help="has torch")
    parser.add_argument("--horovod-python", default=str(contest.HOROVOD_PYTHON))
    parser.add_argument("--write", action="store_true", help="write the tables into README.md")
    contest.add_realtime(parser)
    arguments = parser.parse_args()
    text = measure(arguments)
    print(text)
    if arguments.write:
        page = HERE / "README.md"
        page.write_text(MARKS.sub(lambda marks: f"{marks[1]}\n{text}\n\n{marks[2]}", page.read_text()))


def measure(arguments) -> str:
    """Returns the tables."""
    conditions = contest.conditions(arguments.realtime)
    pythons = {"": sys.executable, "horovod": arguments.horovod_python, "peers": arguments.peers_python}
    calls, programs = (list(filter(None, names.split(","))) for names in (arguments.calls, arguments.programs))
    times: Times = {}
    versions, missing = [], []
    with contextlib.ExitStack() as stack:
        running = {}
        for column, (heading, python, module) in COLUMNS.items():
            if column not in OF_CALLS and not programs:
                continue
            wanted = [(column[0], heading, pythons[python], module)]
            started, left_out = stack.enter_context(
                contest.started(HERE / "worker.py", wanted, column[1], realtime=arguments.realtime)
            )
            missing += left_out
            for contestant in started:
                running[column] = contestant
                versions += [fact for fact in contestant.facts if fact not in versions]
        with contest.realtime_without_limit(arguments.realtime):
            for round_number in range(arguments.rounds):
                for question, names in (("call", calls), ("program", programs)):
                    for name in names:
                        for column, contestant in running.items():
                            if (question == "call" and column not in OF_CALLS) or not _has(column, name, question):
                                continue
                            times.setdefault((name, question, column), []).append(max(contestant.ask(question, name)))
                print(f"round {round_number + 1} of {arguments.rounds}", file=sys.stderr)
    lines = [
        f"{conditions} Versions: {'; '.join(versions)}. Medians of {arguments.rounds} interleaved rounds; differences "
        "and ratios are taken within a round.",
        *(f"Left out: {each}." for each in missing),
        "",
    ]
    return "\n".join([*lines, *(calls_table(calls, times) if calls else []), *programs_tables(programs, times)])


def _has(column: tuple, name: str, question: str) -> bool:
    """Returns True if a contestant can do it: torch has two of the models."""
    return "torch" not in column or name in ("convolutions", "dense")


def calls_table(names: list[str], times: Times) -> list[str]:
    columns = [column for column in OF_CALLS if any((name, "call", column) in times for name in names)]
    headings = [COLUMNS[column][0] for column in columns]
    lines = [
        f"| milliseconds | {' | '.join(headings)} | two workers beyond Keras alone | over |",
        "|---|" + "---:|" * (len(columns) + 2),
    ]
    for name in names:
        cells = [f"{1e3 * statistics.median(times[name, 'call', column]):,.1f}" for column in columns]
        pairs = list(zip(times[name, "call", TFRING], times[name, "call", KERAS], strict=True))
        cells.append(f"{1e3 * statistics.median(ours - theirs for ours, theirs in pairs):,.1f}")
        cells.append(f"{statistics.median(ours / theirs for ours, theirs in pairs):.2f}")
        lines.append(f"| {call_times.TITLES[name]} | {' | '.join(cells)} |")
    return lines


def programs_tables(names: list[str], answers: Times) -> list[str]:
    times = {key: [seconds for seconds, *_ in rounds] for key, rounds in answers.items() if key[1] == "program"}
    if not names:
        return []
    singles = {TFRING: KERAS, APART: KERAS, ALONE: KERAS, HOROVOD: OLD, DDP: TORCH}
    lines = [
        "",
        f"Whole programs, {len(PROGRAM_STEPS)} calls of `fit` of {min(PROGRAM_STEPS)} to {max(PROGRAM_STEPS)} steps: "
        "rows a second, and in brackets how many times those of one process of the same library. Then tfring's over "
        "its peers'.",
        "",
    ]
    columns = [column for column in COLUMNS if any((name, "program", column) in times for name in names)]
    versus = [column for column in (HOROVOD, DDP) if column in columns]
    headings = [COLUMNS[column][0] for column in columns] + [f"over {COLUMNS[column][0]}" for column in versus]
    lines += [f"| | {' | '.join(headings)} |", "|---|" + "---:|" * len(headings)]
    for name in names:
        rows = sum(PROGRAM_STEPS) * models.TASKS[name].batch

        def ratio(one: tuple, other: tuple, name=name) -> float | None:
            pairs = times.get((name, "program", one)), times.get((name, "program", other))
            if not all(pairs):
                return None
            return statistics.median(theirs / ours for ours, theirs in zip(*pairs, strict=True))

        cells = []
        for column in columns:
            seconds = times.get((name, "program", column))
            cell = f"{rows / statistics.median(seconds):,.0f}" if seconds else ""
            gain = ratio(column, singles[column]) if column in singles else None
            cells.append(cell if gain is None else f"{cell} ({gain:.2f})")
        ratios = [ratio(TFRING, column) for column in versus]
        cells += ["" if value is None else f"{value:.2f}" for value in ratios]
        lines.append(f"| {models.TASKS[name].title} | {' | '.join(cells)} |")
    columns = [column for column in SPENT if column in columns]
    lines += [
        "",
        "Where the time goes: the slowest worker's seconds, those of its processor in them, and those in which its "
        "collectives waited for the other.",
        "",
        f"| | {' | '.join(COLUMNS[column][0] for column in columns)} |",
        "|---|" + "---:|" * len(columns),
    ]
    for name in names:
        medians = [map(statistics.median, zip(*answers[name, "program", column], strict=True)) for column in columns]
        cells = [", ".join(f"{seconds:.1f}" for seconds in of_column) for of_column in medians]
        lines.append(f"| {models.TASKS[name].title} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    main()
