"""Makes the rows of parameter servers: who is struck, and what the others do.

    python benchmarks/faults/servers.py                 # all of them, some fifteen minutes, as root
    python benchmarks/faults/servers.py --write         # the same, written into benchmarks/faults/README.md
    python benchmarks/faults/servers.py --only SIGSTOP  # the rows that hold this; with --write the others stay

Two workers and a server, each on a host of its own, which are network namespaces, in one long epoch of batches of about
20 ms; worker 1 or the server is struck. With replicas there are two servers, and server 0 is struck. "The others go on
after" is the longest time between two batches of a worker that was not struck, from the fault on. A server that was
killed is started again at once by this script, as a batch system would, and so is a worker where the row says so.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any, NamedTuple

import run as matrix

PAGE = matrix.PAGE
MODES = {
    "sync": {},
    "async": {"update": "async", "max_staleness": 4},
    "async, snapshots": {"update": "async", "max_staleness": 4, "snapshot_dir": "", "snapshot_seconds": 1.0},
    "sync, replicas": {"replicas": 2},
    "async, replicas": {"update": "async", "max_staleness": 4, "replicas": 2},
}
KILL, AGAIN, STOP, PAUSE = "kill -9", "kill -9, started again", "SIGSTOP", "SIGSTOP for 1 s"
CUT, HEALED, SLOW = "link cut", "link cut for 6 s", "slow for 5 s"
LOST_SECONDS = 2.0
QUIET_SECONDS = 6.0  # how long the others have to train after the fault, to be taken for going on
LIMIT_SECONDS = 40.0
PERIOD = 0.2
BEGIN, END = "<!-- made by benchmarks/faults/servers.py -->\n", "\n<!-- end of servers -->"


class Scenario(NamedTuple):
    struck: str  # "worker" or "server"
    fault: str
    mode: str  # of MODES


def scenarios() -> list[Scenario]:
    faults = {"worker": (KILL, AGAIN, STOP, PAUSE, CUT, HEALED, SLOW), "server": (KILL, STOP, PAUSE, CUT, HEALED)}
    every = [Scenario(who, f, m) for who in faults for f, m in itertools.product(faults[who], MODES)]
    every = [s for s in every if (s.fault, s.mode) != (AGAIN, "sync")]  # the others end
    return [s for s in every if s.struck == "server" or "replicas" not in s.mode]  # to a worker they are all alike


class Process:
    """A worker or the server on its host, and what it prints."""

    def __init__(self, host: Any, role: str, index: int, config: str, options: dict[str, Any], folder: str) -> None:
        self.role, self.index = role, index
        self._path = pathlib.Path(folder, f"{role}-{index}-{time.monotonic_ns()}.log")
        environ = {name: value for name, value in os.environ.items() if not name.startswith("TFRING_")}
        environ.update(
            TF_CONFIG=config,
            PYTHONPATH=str(matrix.ROOT),
            TFRING_SECRET="the secret of this run",
            TFRING_LOST_SECONDS=str(LOST_SECONDS),
            OMP_NUM_THREADS="1",
            CUDA_VISIBLE_DEVICES="-1",
            TF_CPP_MIN_LOG_LEVEL="3",
            PYTHONUNBUFFERED="1",
        )
        command = host.command(sys.executable, str(matrix.HERE / "servers_worker.py"), json.dumps(options))
        with self._path.open("w") as output:
            self.process = subprocess.Popen(
                command, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )

    def batches(self) -> list[float]:
        """Returns when its batches ended."""
        return [float(time_) for time_ in re.findall(r"^batch (\S+)$", self.log(), re.M)]

    def log(self) -> str:
        return self._path.read_text()

    def error(self) -> str | None:
        """Returns the error it has ended with."""
        found = re.findall(r"^[\w.]*?(\w+Error: .*)$", self.log(), re.M)
        return found[-1] if found and self.process.poll() is not None else None

    def signal(self, number: int) -> None:
        os.killpg(self.process.pid, number)

    def end(self) -> None:
        self.signal(signal.SIGCONT) if self.process.poll() is None else None
        self.process.kill()
        self.process.wait()


def wait_until(condition: Any, seconds: float) -> bool:
    deadline = time.time() + seconds
    while not condition():
        if time.time() > deadline:
            return False
        time.sleep(PERIOD)
    return True


def strike(fault: str, victim: Process, host: Any) -> None:
    if fault in (CUT, HEALED):
        matrix.ip("-n", host.bridge, "link", "set", host.port, "down")
        if fault == HEALED:
            time.sleep(6.0)
            matrix.ip("-n", host.bridge, "link", "set", host.port, "up")
        return
    victim.signal({KILL: signal.SIGKILL, AGAIN: signal.SIGKILL, SLOW: signal.SIGUSR1}.get(fault, signal.SIGSTOP))
    if fault == PAUSE:
        time.sleep(1.0)
        victim.signal(signal.SIGCONT)


def run(scenario: Scenario) -> tuple[str, str, str]:
    """Returns how soon the others go on, what they do, and what the one does that was struck."""
    options = dict(MODES[scenario.mode])
    num_servers = options.get("replicas", 1)
    with tempfile.TemporaryDirectory() as folder, matrix.namespaces.hosts(2 + num_servers) as hosts:
        if "snapshot_dir" in options:
            options["snapshot_dir"] = f"{folder}/snapshots"
        addresses = [f"{host.ipv4}:12345" for host in hosts]
        cluster = {"worker": addresses[:2], "ps": addresses[2:]}

        def start(host: Any, kind: str, index: int) -> Process:
            config = json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})
            return Process(host, kind, index, config, options, folder)

        workers = [start(hosts[0], "worker", 0), start(hosts[1], "worker", 1)]
        server, *more = [start(host, "ps", index) for index, host in enumerate(hosts[2:])]
        processes = [*workers, server, *more]
        try:
            is_training = wait_until(lambda: all(len(w.batches()) > 20 for w in workers), 120)
            assert is_training, [process.error() for process in processes]
            victim, host = (workers[1], hosts[1]) if scenario.struck == "worker" else (server, hosts[2])
            others = [w for w in workers if w is not victim]
            struck = time.time()
            strike(scenario.fault, victim, host)
            again = None
            if scenario.struck == "server" and scenario.fault == KILL and {"snapshot_dir", "replicas"} & {*options}:
                again = start(hosts[2], "ps", 0)
            if scenario.fault == AGAIN:
                again = start(hosts[1], "worker", 1)
            processes += [again] if again else []

            def goes_on(worker: Process) -> bool:
                now = time.time()
                recent = [at for at in worker.batches() if at > now - QUIET_SECONDS]
                return now - struck > QUIET_SECONDS and len(recent) > 20 and now - recent[-1] < 1.0

            ended: dict[Process, float] = {}

            def is_settled(worker: Process) -> bool:
                if worker.process.poll() is not None:
                    ended.setdefault(worker, time.time() - struck)
                return worker in ended or goes_on(worker)

            wait_until(lambda: all([is_settled(worker) for worker in others]), LIMIT_SECONDS)
            pauses, told = [], []
            for worker in others:
                if worker.process.poll() is not None:
                    told.append(worker.error() or f"ended with exit code {worker.process.returncode}")
                elif goes_on(worker):
                    times = [struck, *(at for at in worker.batches() if at > struck)]
                    pauses.append(max(b - a for a, b in itertools.pairwise(times)))
                else:
                    told.append(f"waits, after {time.time() - struck:.0f} s")
            after = f"{max(pauses):.2f} s" if pauses and not told else "they do not"
            if len(ended) == len(others):
                after = f"they end, within {max(ended.values()):.1f} s"
            fate = "is gone" if scenario.fault == KILL else "is struck to the end"
            if scenario.fault == KILL and more:
                is_filled = wait_until(lambda: again.log().count("holds the shards of server") == 2, 120)
                fate = f"started again, {'holds all shards again' if is_filled else 'holds nothing'}"
            elif scenario.fault == KILL and again:
                fate = "started again, from its snapshot"
            elif again:
                trains = wait_until(lambda: len(again.batches()) > 20, 120)
                seconds = again.batches()[0] - struck if trains else 0.0
                fate = f"trains again, after {seconds:.1f} s" if trains else "does not train"
            elif scenario.fault in (PAUSE, HEALED, SLOW):
                wait_until(lambda: victim.process.poll() is not None or victim is server or goes_on(victim), 20)
                fate = "goes on" if victim.process.poll() is None else f"ends: {victim.error()}"
            return after, "; ".join(dict.fromkeys(told)) or "train on", fate
        finally:
            for process in processes:
                process.end()


def row(scenario: Scenario, outcome: tuple[str, str, str]) -> str:
    cells = (scenario.struck, scenario.fault, scenario.mode, *outcome)
    return "| " + " | ".join(f"{cell[:300]} ..." if len(cell) > 300 else cell for cell in cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="rows that hold this")
    parser.add_argument("--write", action="store_true", help="write the rows into benchmarks/faults/README.md")
    arguments = parser.parse_args()
    if problem := matrix.namespaces.why_not():
        parser.error(f"no hosts: {problem}")
    rows = {}
    for scenario in scenarios():
        if arguments.only in str(tuple(scenario)):
            rows[scenario] = row(scenario, run(scenario))
            print(rows[scenario], file=sys.stderr, flush=True)
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    table, _, after = rest.partition(END)
    for line in table.splitlines()[2:]:
        rows.setdefault(Scenario(*(cell.strip() for cell in line.split("|")[1:4])), line)
    head = "| struck | fault | updates | the others go on after | the others | the one that was struck |"
    table = "\n".join([head, "|---" * 6 + "|", *(rows[each] for each in scenarios() if each in rows)])
    print(table)
    if arguments.write:
        PAGE.write_text(before + BEGIN + table + END + after)


if __name__ == "__main__":
    main()
