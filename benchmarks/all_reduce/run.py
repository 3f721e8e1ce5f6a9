"""All-reduce of float32, tfring against its peers, all in one interleaved run. Prints a markdown table.

    python benchmarks/all_reduce/run.py                      # two ranks on this machine
    python benchmarks/all_reduce/run.py --ranks 4 --contestants floor,tfring_tcp,gloo

A contestant that is not installed is left out and named. Each has processes of its own that live through the whole
run and sleep while others are measured; a round visits every contestant at every size, and the table shows the
median over the rounds. So what the machine does meanwhile hits all alike, and ratios hold where times drift.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import statistics
import sys

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import contest  # noqa: E402

# name: heading, what it runs on
CONTESTANTS = {
    "floor": ("calling a function that does nothing", "tensorflow"),
    "tensorflow": ("TensorFlow RING over gRPC", "tensorflow"),
    "tfring_tcp": ("tfring, TCP", "tensorflow"),
    "tfring_shm": ("tfring, shared memory", "tensorflow"),
    "horovod": ("Horovod (gloo)", "horovod"),
    "gloo": ("outside TensorFlow: torch gloo", "peers"),
    "mpich": ("outside TensorFlow: MPICH", "peers"),
}


_MODULES = {"tensorflow": "tensorflow", "horovod": "horovod.tensorflow", "gloo": "torch", "mpich": "mpi4py"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    contest.add_arguments(parser, CONTESTANTS)
    parser.add_argument("--bytes", default="4,4K,16K,256K,1M,16M,64M", help="sizes, e.g. 4,16K,64M")
    parser.add_argument("--peers-python", default=sys.executable, help="has torch and mpi4py")
    arguments = parser.parse_args()
    sizes = [_parse_size(text) for text in arguments.bytes.split(",")]
    pythons = {
        "tensorflow": sys.executable,
        "horovod": arguments.horovod_python,
        "peers": arguments.peers_python,
    }
    load_before = os.getloadavg()[0]

    wanted = []
    for name in arguments.contestants.split(","):
        heading, runs_on = CONTESTANTS[name]
        wanted.append((name, heading, pythons[runs_on], _MODULES.get(name, "tensorflow")))
    with contest.started(HERE / "worker.py", wanted, arguments.ranks) as (running, missing):
        # First, while nothing freed earlier can be used again.
        memory = {c.name: max(c.ask("memory", sizes[-1])) for c in running if c.name.startswith("tfring")}
        times: dict[tuple[str, int], list[float]] = {}
        for round_number in range(arguments.rounds + 1):
            for size in sizes:
                for contestant in running:
                    # A collective takes as long as its slowest rank. The first round warms up.
                    seconds = max(contestant.ask("measure", size, arguments.realtime))
                    if round_number > 0:
                        times.setdefault((contestant.name, size), []).append(seconds)
            print(f"round {round_number} of {arguments.rounds}", file=sys.stderr)
    _print(arguments, sizes, running, missing, times, memory, load_before)


def _parse_size(text: str) -> int:
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return int(text[:-1]) * units[text[-1]] if text[-1] in units else int(text)


def _size_text(size: int) -> str:
    for unit, suffix in ((1 << 30, "GB"), (1 << 20, "MB"), (1 << 10, "KB")):
        if size >= unit:
            return f"{size // unit} {suffix}"
    return f"{size} B"


def _number(value: float) -> str:
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 10 else f"{value:.0f}"


def _print(arguments, sizes, running, missing, times, memory, load_before) -> None:
    median = {key: statistics.median(values) * 1e3 for key, values in times.items()}
    names = [contestant.name for contestant in running]
    print(f"\n{arguments.ranks} ranks, float32, ms, median of {arguments.rounds} interleaved rounds\n")
    print("| | " + " | ".join(_size_text(size) for size in sizes) + " |")
    print("|---" * (len(sizes) + 1) + "|")
    for name in names:
        cells = [_number(median[name, size]) for size in sizes]
        print(f"| {CONTESTANTS[name][0]} | " + " | ".join(cells) + " |")

    def ratios(heading, top, bottom, over_floor=False):
        if top not in names or bottom not in names or (over_floor and "floor" not in names):
            return
        cells = []
        for size in sizes:
            # Within a round, so that a slow spell of the machine stands on both sides.
            values = []
            for i in range(arguments.rounds):
                floor = times["floor", size][i] if over_floor else 0.0
                low = times[bottom, size][i] - floor
                values.append((times[top, size][i] - floor) / low if low > 0 else float("inf"))
            ratio = statistics.median(values)
            cells.append("at the floor" if ratio > 1000 else f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.2g}")
        print(f"| {heading} | " + " | ".join(cells) + " |")

    print("\nHow many times as fast (median of the ratios within a round)\n")
    print("| | " + " | ".join(_size_text(size) for size in sizes) + " |")
    print("|---" * (len(sizes) + 1) + "|")
    for name in ("tfring_tcp", "tfring_shm"):
        what = CONTESTANTS[name][0]
        ratios(f"{what}, as TensorFlow RING", "tensorflow", name)
        ratios(f"{what}, as TensorFlow RING, both over the floor", "tensorflow", name, over_floor=True)
        ratios(f"{what}, as Horovod", "horovod", name)
        ratios(f"{what}, as torch gloo", "gloo", name)
        ratios(f"{what}, as MPICH", "mpich", name)

    print()
    for name, peak in memory.items():
        print(
            f"{CONTESTANTS[name][0]}: at its peak a rank holds {peak / sizes[-1]:.2f} times the "
            f"{_size_text(sizes[-1])} tensor beside it, the result included.\n"
        )
    facts = [fact for contestant in running for fact in contestant.facts]
    contest.print_conditions(arguments.realtime, facts, missing, load_before)


if __name__ == "__main__":
    main()
