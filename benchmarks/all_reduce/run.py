"""All-reduce of float32, tfring against its peers, all in one interleaved run. Prints a markdown table.

    python benchmarks/all_reduce/run.py                      # two ranks on this machine
    python benchmarks/all_reduce/run.py --ranks 4 --contestants floor,tfring_tcp,gloo

A contestant that is not installed is left out and named. Each has processes of its own that live through the whole
run and sleep while others are measured; a round visits every contestant at every size, and the table shows the
median over the rounds. So what the machine does meanwhile hits all alike, and ratios hold where times drift.
"""

from __future__ import annotations

import argparse
import datetime
import os
import pathlib
import platform
import secrets
import shutil
import socket
import statistics
import subprocess
import sys
from multiprocessing import connection

HERE = pathlib.Path(__file__).parent
START_SECONDS = 180
MEASURE_SECONDS = 120

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


class Contestant:
    """The processes of one contestant, each with a connection to this one."""

    def __init__(self, name: str, python: str, ranks: int, listener: connection.Listener) -> None:
        self.name = name
        ports = _free_ports(ranks)
        environment = {
            **os.environ,
            "PYTHONPATH": str(HERE.parents[1]),
            "TFRING_BENCHMARK": f"{listener.address[1]} {_key.hex()}",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "CUDA_VISIBLE_DEVICES": "-1",
        }
        worker = [python, str(HERE / "worker.py"), name, str(ranks), ",".join(map(str, ports))]
        tools = pathlib.Path(python).parent
        if name == "mpich":
            commands = [[str(tools / "mpiexec"), "-n", str(ranks), *worker]]
        elif name == "horovod":
            commands = [[str(tools / "horovodrun"), "-np", str(ranks), "--gloo", *worker]]
        else:
            commands = [[*worker, str(rank)] for rank in range(ranks)]
        self.processes = [
            subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
            for command in commands
        ]
        self.pipes: dict[int, connection.Connection] = {}
        while len(self.pipes) < ranks:
            if not connection.wait([listener._listener._socket], START_SECONDS):  # type: ignore[attr-defined]
                raise RuntimeError(f"{name} did not start\n{self.errors()}")
            pipe = listener.accept()
            self.pipes[pipe.recv()] = pipe
        self.facts = self.ask("facts")[0]

    def ask(self, *question: object) -> list:
        """Puts a question to all ranks; their answers, by rank."""
        for pipe in self.pipes.values():
            pipe.send(question)
        answers = []
        for rank in sorted(self.pipes):
            if not self.pipes[rank].poll(MEASURE_SECONDS):
                raise RuntimeError(f"{self.name}: rank {rank} did not answer {question}\n{self.errors()}")
            try:
                answers.append(self.pipes[rank].recv())
            except EOFError:
                raise RuntimeError(f"{self.name}: rank {rank} died\n{self.errors()}") from None
        return answers

    def errors(self) -> str:
        self.close()
        return "\n".join(process.stderr.read().decode()[-2000:] for process in self.processes)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def _can_import(python: str, module: str) -> bool:
    if shutil.which(python) is None:
        return False
    command = [python, "-c", f"import {module}"]
    return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0


_key = secrets.token_bytes(16)
_MODULES = {"tensorflow": "tensorflow", "horovod": "horovod.tensorflow", "gloo": "torch", "mpich": "mpi4py"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--bytes", default="4,4K,16K,256K,1M,16M,64M", help="sizes, e.g. 4,16K,64M")
    parser.add_argument("--contestants", default=",".join(CONTESTANTS))
    parser.add_argument("--peers-python", default=sys.executable, help="has torch and mpi4py")
    parser.add_argument("--horovod-python", default=str(HERE / ".horovod" / "bin" / "python"))
    parser.add_argument(
        "--realtime",
        action="store_true",
        help="measure at real-time priority (needs root), where the machine has other things to do",
    )
    arguments = parser.parse_args()
    sizes = [_parse_size(text) for text in arguments.bytes.split(",")]
    pythons = {
        "tensorflow": sys.executable,
        "horovod": arguments.horovod_python,
        "peers": arguments.peers_python,
    }
    load_before = os.getloadavg()[0]

    running: list[Contestant] = []
    missing = []
    with connection.Listener(("127.0.0.1", 0), backlog=64, authkey=_key) as listener:
        try:
            for name in arguments.contestants.split(","):
                python = pythons[CONTESTANTS[name][1]]
                module = _MODULES.get(name, "tensorflow")
                if not _can_import(python, module):
                    missing.append(f"{CONTESTANTS[name][0]} (no {module} for {python})")
                    continue
                running.append(Contestant(name, python, arguments.ranks, listener))
                print(f"started {name}", file=sys.stderr)
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
        finally:
            for contestant in running:
                contestant.close()
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
    print(f"Machine: {_machine()}. Date: {datetime.date.today()}.")
    print(f"Load {load_before:.1f} at the start{', measured at real-time priority' * arguments.realtime}.")
    print("Versions: " + ", ".join(sorted({f for c in running for f in c.facts})) + ".")
    if missing:
        print("Left out: " + "; ".join(missing) + ".")


def _machine() -> str:
    model = "unknown processor"
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return f"{len(os.sched_getaffinity(0))} cores of {model}, Linux {platform.release().split('-')[0]}"


if __name__ == "__main__":
    main()
