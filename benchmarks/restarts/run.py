"""MovieLens with ten kills: are the final weights those of an undisturbed run, and how long does a restart take?

    python benchmarks/restarts/run.py                        # ten kills, two workers on this machine
    python benchmarks/restarts/run.py --kills 3 --seed 5

Both runs save every 20 steps (`tfring.callbacks.Backup`) under `tfring launch --max-restarts`. A random rank gets
SIGKILL at a random moment: every third time while the processes still start, else in the seconds after a step was made,
that is in a step, between two, in a validation or while a backup is written. What is compared are all arrays of the
last backup: weights, optimizer state, seed generators.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from tfring.launch.processes import descendants  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-n", type=int, default=2, metavar="WORKERS", help="default 2")
    parser.add_argument("--kills", type=int, default=10, help="default 10")
    parser.add_argument("--epochs", type=int, default=24, help="default 24")
    parser.add_argument("--seed", type=int, default=1, help="of the random moments (default 1)")
    parser.add_argument("--data-dir", type=pathlib.Path, help="as of examples/movielens.py")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return compare(args, pathlib.Path(folder))


def compare(args: argparse.Namespace, folder: pathlib.Path) -> int:
    load = os.getloadavg()[0]
    undisturbed = start(args, folder / "undisturbed", 0)
    began = time.time()
    if undisturbed.wait() != 0:
        sys.exit((folder / "undisturbed" / "output").read_text())
    seconds_undisturbed = time.time() - began
    disturbed = start(args, folder / "disturbed", args.kills)
    began = time.time()
    kills = kill(disturbed, folder / "disturbed", args)
    if disturbed.wait() != 0:
        sys.exit((folder / "disturbed" / "output").read_text())
    seconds = time.time() - began
    (name, want), (got_name, got) = (last_backup(folder / run) for run in ("undisturbed", "disturbed"))
    equal = name == got_name and len(want) == len(got) and all(map(same_bits, want, got))

    print(f"{args.n} workers, {args.epochs} epochs, load average before {load:.1f} on {os.cpu_count()} cores\n")
    print("| kill | rank | at | seconds from the kill to the first new step |")
    print("|---:|---:|---|---:|")
    waits = []
    for number, (rank, at, moment) in enumerate(kills, 1):
        first_step = folder / "disturbed" / "first-steps" / str(number)
        wait = float(first_step.read_text()) - moment if first_step.exists() else None
        waits += [] if wait is None else [wait]
        print(f"| {number} | {rank} | {at} | {'killed again before' if wait is None else f'{wait:.1f}'} |")
    print(f"\nkills {len(kills)}, seconds {seconds:.0f} (undisturbed {seconds_undisturbed:.0f})")
    print(f"from a kill to the first new step: median {statistics.median(waits):.1f} s, longest {max(waits):.1f} s")
    print(f"{len(want)} arrays of {name}: {'equal bit for bit' if equal else 'NOT EQUAL'}")
    return 0 if equal and len(kills) == args.kills else 1


def start(args: argparse.Namespace, folder: pathlib.Path, kills: int) -> subprocess.Popen:
    (folder / "first-steps").mkdir(parents=True)
    launch = [sys.executable, "-m", "tfring.launch", "-n", str(args.n), "--max-restarts", str(kills)]
    script = [str(HERE / "worker.py"), "--epochs", str(args.epochs), "--backup", str(folder / "backup")]
    script += ["--data-dir", str(args.data_dir)] if args.data_dir else []
    script += ["--output-dir", str(folder)]
    environ = {**os.environ, "FIRST_STEPS": str(folder / "first-steps"), "TF_CPP_MIN_LOG_LEVEL": "2"}
    environ["PYTHONPATH"] = os.pathsep.join([str(HERE.parents[1]), environ.get("PYTHONPATH", "")])
    with (folder / "output").open("wb") as output:
        return subprocess.Popen([*launch, *script], env=environ, stdout=output, stderr=output)


def kill(launcher: subprocess.Popen, folder: pathlib.Path, args: argparse.Namespace) -> list[tuple[int, str, float]]:
    """Kills `args.kills` workers, each in another try. `(rank, when in the try, time)` of each."""
    generator = random.Random(args.seed)
    kills: list[tuple[int, str, float]] = []
    while len(kills) < args.kills:
        workers: dict[int, int] = {}
        while len(workers) < args.n and launcher.poll() is None:
            workers = {rank: pid for pid in descendants(launcher.pid) for rank in ranks(pid, len(kills))}
            time.sleep(0.05)
        early = len(kills) % 3 == 2
        while not early and not (folder / "first-steps" / str(len(kills))).exists() and launcher.poll() is None:
            time.sleep(0.01)
        seconds = generator.uniform(0, 8 if early else 3)
        time.sleep(seconds)
        rank = generator.randrange(args.n)
        if launcher.poll() is not None or rank not in workers:
            return kills
        kills.append((rank, f"{seconds:.2f} s after its {'start' if early else 'first step'}", time.time()))
        os.kill(workers[rank], signal.SIGKILL)
        print(f"kill {len(kills)} of {args.kills}", file=sys.stderr)
    return kills


def ranks(pid: int, restart: int) -> list[int]:
    """The rank of a process, if it is a worker of this try."""
    try:
        environ = dict(
            entry.split("=", 1)
            for entry in pathlib.Path(f"/proc/{pid}/environ").read_text().split("\0")
            if entry.startswith("TFRING_")
        )
    except OSError:
        return []
    return [int(environ["TFRING_RANK"])] if environ.get("TFRING_RESTART") == str(restart) else []


def last_backup(folder: pathlib.Path) -> tuple[str, list[np.ndarray]]:
    path = max((folder / "backup").glob("*.npz"))
    with np.load(path) as archive:
        return path.name, [archive[name] for name in archive.files if name != "state.json"]


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


if __name__ == "__main__":
    sys.exit(main())
