"""Collectives of tfring beside its peers, and on networks imitated. Makes results.json, and from it README.md.

    python benchmarks/collectives/run.py                        # all parts, twenty minutes
    python benchmarks/collectives/run.py --parts 2,4 --rounds 3
    python benchmarks/collectives/run.py --parts network        # as root: hosts are network namespaces
    python benchmarks/collectives/run.py --parts "" --write     # README.md anew, from results.json

Without --write all goes into a new folder. Parts 2, 4 and 8 are ranks on this machine. A contestant that is not
installed is left out and named. Each has processes of its own that live through a whole part and sleep while others are
measured; a round visits every contestant with every collective and size, and the tables show the median over the
rounds, their ratios the median of the ratios within a round. So what the machine does meanwhile hits all alike, and
ratios hold where times drift. From 256 MB each contestant is alone, for all rounds: TensorFlow keeps memory that was
freed where it runs oneDNN, and the buffers of all would not fit the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
import time

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import contest  # noqa: E402
import network  # noqa: E402
import tables  # noqa: E402

RESULTS = "results.json"
K, M = 1 << 10, 1 << 20

# name: what it runs on
CONTESTANTS = {
    "floor": "tensorflow",
    "tensorflow": "tensorflow",
    "tf_shm": "tensorflow",
    "tf_tcp": "tensorflow",
    "horovod": "horovod",
    "np_shm": "tensorflow",
    "np_tcp": "tensorflow",
    "gloo": "peers",
    "mpich": "peers",
    "openmpi": "openmpi",
    "sockets": "tensorflow",
    "copy": "tensorflow",
    "copy_new": "tensorflow",
}
MODULES = {"horovod": "horovod.tensorflow", "gloo": "torch", "mpich": "mpi4py", "openmpi": "mpi4py"}
IN_FUNCTION = ("floor", "tensorflow", "tf_shm", "tf_tcp", "horovod")
FROM_ARRAYS = ("np_shm", "np_tcp", "gloo", "mpich", "openmpi")
LIMITS = ("sockets", "copy", "copy_new")
ALONE_BYTES = 256 * M
LARGE = tuple(name for name in CONTESTANTS if name not in ("floor", "np_tcp"))
LARGEST = tuple(name for name in LARGE if name != "tensorflow")  # 4 s a call
HAVE_BFLOAT16 = ("floor", "tf_shm", "tf_tcp", "np_shm", "np_tcp", "gloo")
HAVE_16_BITS = {"float16": (*HAVE_BFLOAT16, "horovod"), "bfloat16": HAVE_BFLOAT16}
SIZES = {
    2: (4, K, 4 * K, 64 * K, M, 16 * M, 64 * M, 256 * M, K * M),
    4: (4, K, 4 * K, 64 * K, M, 16 * M, 64 * M),
    8: (4, 4 * K, 64 * K, M),
}
OTHERS = ("all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all")


def cells(ranks: int) -> list[tuple[str, str, int, tuple[str, ...]]]:
    """Collective, dtype, size, and whom it is put to."""
    found = [("round_trip", "float32", size, FROM_ARRAYS) for size in (4, 64 * K) if ranks == 2]
    for size in SIZES[ranks]:
        whom = (*IN_FUNCTION, *FROM_ARRAYS, *LIMITS) if size < ALONE_BYTES else LARGE if size < K * M else LARGEST
        found.append(("all_reduce", "float32", size, whom))
    for dtype, whom in HAVE_16_BITS.items():
        found += [("all_reduce", dtype, size, whom) for size in ((4 * K, M, 64 * M) if ranks < 8 else ())]
    for op in OTHERS:
        sizes = (4 * K, 256 * K, 16 * M) if ranks < 8 else (4 * K,)
        found += [(op, "float32", size, FROM_ARRAYS) for size in sizes]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default="2,4,8,network", help="of 2, 4, 8 and network")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--contestants", default=",".join(CONTESTANTS))
    parser.add_argument("--peers-python", default=sys.executable, help="has torch and mpi4py")
    parser.add_argument("--openmpi-python", default="", help="has mpi4py on Open MPI; left out by default")
    parser.add_argument("--horovod-python", default=str(contest.HOROVOD_PYTHON))
    contest.add_realtime(parser)
    contest.add_write(parser)
    arguments = parser.parse_args()
    folder = contest.folder_of_results(arguments, HERE)
    results = json.loads((folder / RESULTS).read_text())
    arguments.load = os.getloadavg()[0]  # afterwards it is this run's own
    for part in filter(None, arguments.parts.split(",")):
        began = time.monotonic()
        results[part] = network.measure(arguments) if part == "network" else compare(int(part), arguments)
        (folder / RESULTS).write_text(json.dumps(results, indent=0) + "\n")
        tables.write(results, folder)
        print(f"part {part}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    tables.write(results, folder)


def compare(ranks: int, arguments) -> dict:
    """One part: the times of every contestant, round by round."""
    pythons = {
        "tensorflow": sys.executable,
        "horovod": arguments.horovod_python,
        "peers": arguments.peers_python,
        "openmpi": arguments.openmpi_python,
    }
    needed = FROM_ARRAYS if ranks > 4 else CONTESTANTS
    wanted = [
        (name, tables.HEADINGS[name], pythons[CONTESTANTS[name]], MODULES.get(name, "tensorflow"))
        for name in arguments.contestants.split(",")
        if name in needed and pythons[CONTESTANTS[name]]
    ]
    conditions = contest.conditions(arguments.realtime, arguments.load)
    times: dict[tuple, list[float]] = {}

    def measure(wanted: list, cells: list) -> tuple[list, list]:
        with contest.started(HERE / "worker.py", wanted, ranks, realtime=arguments.realtime) as (running, missing):
            with contest.realtime_without_limit(arguments.realtime):
                ask_all(cells, arguments.rounds, running, times)
            return sorted({fact for contestant in running for fact in contestant.facts}), missing

    versions, missing = measure(wanted, [cell for cell in cells(ranks) if cell[2] < ALONE_BYTES])
    large = [cell for cell in cells(ranks) if cell[2] >= ALONE_BYTES]
    for one in wanted:
        own = [cell for cell in large if one[0] in cell[3]]
        if own:
            measure([one], own)
    return {
        "conditions": conditions,
        "versions": versions,
        "missing": missing,
        "times": [[*cell, values] for cell, values in times.items()],
    }


def ask_all(cells: list, rounds: int, running: list[contest.Contestant], times: dict[tuple, list[float]]) -> None:
    """Every contestant, every collective and size, round after round."""
    refused: set[tuple] = set()
    for round_number in range(rounds + 1):
        for op, dtype, size, whom in cells:
            for contestant in running:
                cell = (contestant.name, op, dtype, size)
                if contestant.name not in whom or cell in refused:
                    continue
                answers = contestant.ask("measure", op, dtype, size)
                if any(isinstance(answer, str) for answer in answers):
                    refused.add(cell)
                    print(f"{cell}: {answers}", file=sys.stderr)
                elif round_number > 0:  # the first round warms up; a collective takes as long as its slowest rank
                    times.setdefault(cell, []).append(max(answers))
        print(f"round {round_number} of {rounds}", file=sys.stderr)


if __name__ == "__main__":
    main()
