"""How long do many ranks of NumPy on this machine take to start, and how long their first collectives?

    python benchmarks/collectives/start.py --ranks 8,32,64,128,256
    python benchmarks/collectives/start.py --against ../another-checkout       # both in turn, round after round

Each rank is a process of `tfring launch` that imports NumPy and tfring, connects and calls collectives. Seconds count
from the start of the launcher: until the last rank's program begins, and until the last rank is connected. Processor
seconds are those of the launcher and of all ranks, to their end. Medians of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import time

HERE = pathlib.Path(__file__)
LIMIT_SECONDS = 280
CALLS = 7


def rank() -> None:
    """Runs on each rank, and prints on rank 0 what all have measured."""
    began = time.time()
    import numpy as np

    from tfring import Communicator
    from tfring.cluster import detect

    imported = time.time()
    with Communicator.connect(detect()) as ring:
        connected = time.time()
        small, rows, large = (np.zeros(count, np.float32) for count in (1, 4, 1 << 18))
        calls = [lambda: ring.all_reduce(small), lambda: ring.all_gather(rows), lambda: ring.all_reduce(large)]
        start = float(os.environ["STARTED"])
        seconds = [began - start, imported - began, connected - imported, connected - start]
        mine = [*seconds, *(timed(ring, call) for call in calls)]
        found = ring.all_gather(np.array([mine]))
        if ring.rank == 0:
            medians = np.median(found, axis=0)
            print(json.dumps([found[:, 0].max(), *medians[1:3], found[:, 3].max(), *medians[4:]]))


def timed(ring, call) -> float:
    """Returns the milliseconds of the median call."""
    call()
    ring.barrier()
    took = []
    for _ in range(CALLS):
        begin = time.perf_counter()
        call()
        took.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(took)


def processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def job(checkout: pathlib.Path, count: int) -> list[float]:
    """Returns what rank 0 has printed, and processor seconds."""
    environ = {**os.environ, "PYTHONPATH": str(checkout), "STARTED": str(time.time())}
    before = processor_seconds()
    command = [sys.executable, "-m", "tfring.launch", "-n", str(count), str(HERE), "--rank"]
    done = subprocess.run(command, env=environ, cwd=checkout, stdout=subprocess.PIPE, text=True, timeout=LIMIT_SECONDS)
    if done.returncode != 0:
        sys.exit(f"{count} ranks of {checkout} ended with exit code {done.returncode}.")
    return [*json.loads(done.stdout), processor_seconds() - before]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="8,32,64,128,256")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--against", type=pathlib.Path, help="another checkout, with its native code built")
    arguments = parser.parse_args()
    own = HERE.resolve().parents[2]
    checkouts = [own, *([arguments.against.resolve()] if arguments.against else [])]
    for checkout in checkouts:  # as an installed package is
        subprocess.run([sys.executable, "-m", "compileall", "-q", checkout / "tfring"], check=True)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    print("| ranks | checkout | begun, s | import, s | connect, s | **connected, s** | processor, s "
          "| all_reduce 4 B, ms | all_gather 16 B, ms | all_reduce 1 MB, ms |\n" + "|---:" * 10 + "|")  # fmt: skip
    for count in map(int, arguments.ranks.split(",")):
        found = {checkout: [] for checkout in checkouts}
        for _ in range(arguments.rounds):
            for checkout in checkouts:
                found[checkout].append(job(checkout, count))
        for checkout, rounds in found.items():
            begun, imports, connect, connected, *calls, processor = map(statistics.median, zip(*rounds, strict=True))
            cells = [begun, imports, connect, connected, processor, *calls]
            print(f"| {count} | {checkout.name} | " + " | ".join(f"{cell:.3g}" for cell in cells) + " |", flush=True)


if __name__ == "__main__":
    rank() if "--rank" in sys.argv else main()
