"""Makes the fault matrix: what the ranks of a job see of a fault, and how soon.

    python benchmarks/faults/run.py                 # all of it, some fifteen minutes; as root also between hosts
    python benchmarks/faults/run.py --write         # the same, written into benchmarks/faults/README.md
    python benchmarks/faults/run.py --only SIGSTOP  # the rows that hold this

A rank loops over all-reduces of 1 MB, or waits in Python between two; one rank is struck by a fault. Where an operation
fails, it is one of a tf.function, beside a receive that waits for what would come of it. Hosts are network
namespaces. The time is that until the last survivor had its exception. While saving the ranks are in `fit` with
a Backup of 32 MB: rank 0 is killed once half a file is there, or its disk has room for one file and no second; then the
job is started again.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import itertools
import json
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterator
from typing import NamedTuple

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
PAGE = HERE / "README.md"
sys.path.insert(0, str(ROOT / "tests" / "cluster" / "engines"))

import namespaces  # noqa: E402

import tfring  # noqa: E402
from tfring.cluster import Cluster, launch_variables  # noqa: E402

VICTIM = 1
SAVING, SAVED_STEPS, DISK_SIZE = "while saving", 12, "48m"  # worker.py saves 32 MB at each step
TRANSPORTS = {
    "shm": "shared memory",
    "tcp": "TCP",
    "hosts": "TCP between hosts",
    "peer": "TensorFlow's own runtime",
    "peer hosts": "TensorFlow's own runtime between hosts",
}
START_SECONDS = 60
MOST_CHARACTERS = 500
EXIT_SECONDS = 15  # TensorFlow's own takes two on a core
LIMIT_SECONDS = 45  # for survivors to learn of a fault
LOSS_RATE = 0.05
LOSS = "5 % packet loss"
OPERATION = "an operation fails, its process lives on"
WARNINGS = re.compile("is slow|could not save")
HANDSHAKES = ("in the handshake", "in the handshake, one rank not yet started")
AT_ONCE = ("kill -9", "kill -9, a forked child lives on", "exit", "exception")


class Scenario(NamedTuple):
    fault: str
    moment: str
    transport: str  # of TRANSPORTS
    ranks: int
    lost_seconds: float = 2.0
    slow_seconds: float = 0.0

    @property
    def victim(self) -> int | None:
        """The rank that is struck; while saving the one that writes, if it is killed."""
        if self.moment == SAVING:
            return 0 if self.fault == "kill -9" else None
        return VICTIM


class Outcome(NamedTuple):
    seconds: float | None  # None: no rank failed
    told: str
    left: str


def scenarios(slow_seconds: float, hosts: bool, disks: bool) -> list[Scenario]:
    """Those that make sense: a link can be cut between hosts only."""
    found = []
    transports = ["shm", "tcp", *(["hosts"] if hosts else [])]
    for transport, ranks in itertools.product(transports, (2, 4)):
        found += [Scenario(fault, "in a step", transport, ranks) for fault in (*AT_ONCE, "SIGSTOP")]
        found += [Scenario(fault, "between steps", transport, ranks) for fault in (*AT_ONCE[:2], "SIGSTOP")]
        found.append(Scenario("SIGSTOP", "in a step", transport, ranks, lost_seconds=15.0))
        found.append(Scenario(OPERATION, "in a step", transport, ranks))
        if transport == "hosts":
            for moment in ("in a step", "between steps"):
                found.append(Scenario("link cut", moment, transport, ranks))
            found.append(Scenario("link cut", "in a step", transport, ranks, lost_seconds=15.0))
            found.append(Scenario(LOSS, "in a step", transport, ranks, slow_seconds=20))
        else:
            found += [Scenario(fault, SAVING, transport, ranks) for fault in ("kill -9", *["disk full"] * disks)]
        found.append(Scenario("slow", "in a step", transport, ranks, slow_seconds=slow_seconds))
    found += [Scenario("kill -9", moment, transport, 4) for transport in transports for moment in HANDSHAKES]
    found += [Scenario(fault, "in a step", "peer", 2) for fault in ("kill -9", "exit", "SIGSTOP")]
    if hosts:
        found.append(Scenario("link cut", "in a step", "peer hosts", 2))
    return found


class Rank:
    """A process, and what it has said so far."""

    def __init__(
        self, scenario: Scenario, rank: int, addresses: tuple[str, ...], host: namespaces.Host | None, folder: str
    ) -> None:
        local = (rank, len(addresses)) if host is None else (0, 1)
        cluster = Cluster(rank, len(addresses), *local, len(addresses) // local[1], addresses, "faults", None)
        environ = {name: value for name, value in os.environ.items() if not name.startswith("TFRING_")}
        environ.update(
            launch_variables.write(cluster),
            PYTHONPATH=str(pathlib.Path(tfring.__file__).parents[1]),  # the one that this script has found
            OMP_NUM_THREADS="1",
            FAULT_FOLDER=folder,
            FAULT_ENGINE="tensorflow" if "peer" in scenario.transport else "ring",
            CUDA_VISIBLE_DEVICES="-1",
            TF_CPP_MIN_LOG_LEVEL="3",
            TFRING_TRANSPORT="shm" if scenario.transport == "shm" else "tcp",
            TFRING_CONNECT_TIMEOUT_SECONDS="10",
            TFRING_LOST_SECONDS=str(scenario.lost_seconds),
            TFRING_STALL_WARNING_SECONDS=str(max(1.0, min(30.0, scenario.slow_seconds / 4))),
            FAULT_SECONDS=str(scenario.slow_seconds + 5 if scenario.slow_seconds else LIMIT_SECONDS),
        )
        late = 3.0 if scenario.moment in HANDSHAKES and rank == len(addresses) - 1 else 0.0
        command = [sys.executable, str(HERE / "worker.py"), scenario.fault, scenario.moment]
        command += [str(scenario.slow_seconds), str(late)]
        self.process = subprocess.Popen(
            command if host is None else host.command(*command),
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(line.rstrip("\n") for line in iter(self.process.stdout.readline, ""))

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        while text not in self.lines:
            assert time.monotonic() < deadline and self.process.poll() is None, (text, self.lines)
            time.sleep(0.005)

    def report(self, seconds: float) -> dict | None:
        """Returns its last output; None where it is still running."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            found = [line for line in self.lines if line.startswith("{")]
            if found:
                return json.loads(found[-1])
            if self.process.poll() is not None:
                self._reader.join(1)
                assert any(line.startswith("{") for line in self.lines), self.lines
            time.sleep(0.01)
        return None

    def end(self, seconds: float) -> bool:
        """Returns True if it ended by itself; else it is killed, with what it has forked."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        ended = self.process.poll() is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        return ended


def run(scenario: Scenario) -> Outcome:
    """Starts the ranks, strikes one, asks the others; while saving, starts all again."""
    if scenario.moment != SAVING:
        return run_once(scenario)
    disk = small_disk if scenario.fault == "disk full" else contextlib.nullcontext
    with tempfile.TemporaryDirectory() as folder, disk(folder):
        outcome = run_once(scenario, folder)
        half = len(list(pathlib.Path(folder).glob("*.part")))
        assert half == (scenario.victim is not None), "it was not struck in the middle"
        for path in pathlib.Path(folder).glob("*.npz"):
            assert zipfile.ZipFile(path).testzip() is None, path
        again = run_once(scenario._replace(fault="none"), folder)
        assert again.told.startswith(f"{SAVED_STEPS} steps;") and not list(pathlib.Path(folder).glob("*.part")), again
        told = f"{outcome.told}; started again: {again.told}".replace(folder, "folder")
        left = outcome.left + (f"; {half} half-written file, which the next save removed" if half else "")
        return outcome._replace(told=told, left=left)


def run_once(scenario: Scenario, folder: str = "") -> Outcome:
    with contextlib.ExitStack() as stack:
        hosts: list[namespaces.Host | None] = [None] * scenario.ranks
        names = ["127.0.0.1"] * scenario.ranks
        if "hosts" in scenario.transport:
            hosts = list(stack.enter_context(namespaces.hosts(scenario.ranks)))
            names = [host.ipv4 for host in hosts if host]
        addresses = tuple(f"{name}:{port}" for name, port in zip(names, free_ports(scenario.ranks), strict=True))
        lossy = stack.enter_context(lossy_link(hosts[VICTIM])) if scenario.fault == LOSS else None
        shared_before = set(os.listdir("/dev/shm"))
        started = scenario.ranks - (scenario.moment == HANDSHAKES[1])
        ranks = [Rank(scenario, r, addresses, hosts[r], folder) for r in range(started)]
        try:
            if scenario.moment in HANDSHAKES:
                for rank in ranks:
                    rank.wait_for("connecting" if started == scenario.ranks else "there")
                time.sleep(1.5)
            else:
                for rank in ranks:
                    rank.wait_for("under way")
                if scenario.victim is not None:
                    time.sleep(0.2) if not folder else wait_for_half_a_file(pathlib.Path(folder))
            struck = time.time()
            if scenario.victim is not None:
                strike(scenario, ranks[scenario.victim], hosts[scenario.victim], lossy)
            outcome = ask(scenario, ranks, struck)
        finally:
            ended = [rank.end(EXIT_SECONDS) for r, rank in enumerate(ranks) if r != scenario.victim]
            if scenario.victim is not None:
                ranks[scenario.victim].end(0)
        left = set(os.listdir("/dev/shm")) - shared_before
        if left or not all(ended):
            outcome = outcome._replace(left=f"{outcome.left}; {len(left)} files, {ended.count(False)} processes")
        return outcome


def strike(
    scenario: Scenario, victim: Rank, host: namespaces.Host | None, lossy: subprocess.Popen | None
) -> None:
    if lossy is not None:
        lossy.send_signal(signal.SIGUSR1)
        return
    if scenario.fault == "link cut":
        assert host is not None
        ip("-n", host.bridge, "link", "set", host.port, "down")
        return
    number = {"kill -9": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}.get(scenario.fault.partition(",")[0])
    os.kill(victim.process.pid, number or signal.SIGUSR1)


def wait_for_half_a_file(folder: pathlib.Path) -> None:
    """Until a file is being written, and one before it is whole."""
    deadline = time.monotonic() + START_SECONDS
    while not (any(folder.glob("*.npz")) and any(path.stat().st_size for path in folder.glob("*.part"))):
        assert time.monotonic() < deadline, os.listdir(folder)
        time.sleep(0.001)


@contextlib.contextmanager
def small_disk(folder: str) -> Iterator[None]:
    """In place of the folder."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_SIZE}", "tfring-faults", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


def why_no_disk() -> str | None:
    """Returns what this machine lacks for a small disk; None if it lacks nothing."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            with small_disk(folder):
                return None
        except subprocess.CalledProcessError:
            return "no disk can be mounted"


@contextlib.contextmanager
def lossy_link(host: namespaces.Host | None) -> Iterator[subprocess.Popen]:
    """In place of the host's link one that loses packets after SIGUSR1."""
    assert host is not None
    bridge, port = host.bridge, host.port
    ip("-n", bridge, "link", "delete", port)
    command = ["ip", "netns", "exec", bridge, sys.executable, str(HERE / "lossy.py"), port, "eth0", str(LOSS_RATE)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as link:
        try:
            assert link.stdout is not None and link.stdout.readline() == "ready\n"
            ip("-n", bridge, "link", "set", port, "master", "bridge0", "up")
            ip("-n", bridge, "link", "set", "eth0", "netns", host.namespace)
            ip("-n", host.namespace, "addr", "add", f"{host.ipv4}/24", "dev", "eth0")
            ip("-n", host.namespace, "link", "set", "eth0", "up")
            yield link
        finally:
            link.kill()


def why_no_loss() -> str | None:
    """Returns what this machine lacks for a link that loses packets; None if it lacks nothing."""
    return None if os.access("/dev/net/tun", os.R_OK | os.W_OK) else "there is no /dev/net/tun to be used"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def ask(scenario: Scenario, ranks: list[Rank], struck: float) -> Outcome:
    survivors = [rank for r, rank in enumerate(ranks) if r != scenario.victim]
    reports = [rank.report(LIMIT_SECONDS + scenario.slow_seconds) for rank in survivors]
    if None in reports:
        return Outcome(None, f"a survivor knew nothing after {LIMIT_SECONDS} s", "?")
    known = [report for report in reports if report is not None]
    left = sum(report["left"] for report in known)
    text = "nothing" if left == 0 else f"{left} descriptors"
    errors = {report["error"] for report in known}
    if errors == {None}:
        assert scenario.moment != SAVING or len({report["steps"] for report in known}) == 1, known
        told = f"{known[0]['steps']} steps"
        said = [line for rank in ranks for line in rank.lines]
        told += "".join(f"; {line}" for line in said if "training continues from" in line)
        warnings = [line.partition("Warning: ")[2] or line for line in said if WARNINGS.search(line)]
        if warnings:
            told += f"; {len(warnings)} warning{'s' * (len(warnings) > 1)}: {warnings[0]}"
        return Outcome(None, told, text)
    # Whoever was late for the handshake knows when it asks.
    seconds = max(report["when"] - max(struck, report.get("asked", struck)) for report in known)
    return Outcome(seconds, f"`{'`, `'.join(sorted(map(str, errors)))}`: {known[0].get('message')}", text)


def free_ports(n: int) -> list[int]:
    """Below the range from which the kernel serves outgoing connections."""
    ports: list[int] = []
    while len(ports) < n:
        port = random.SystemRandom().randrange(12000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            ports.append(port)
    return ports


def outcomes(wanted: list[Scenario]) -> Iterator[tuple[Scenario, Outcome]]:
    """One after the other; those that only take their time, side by side at the end."""
    patient = [s for s in wanted if s.slow_seconds]
    for scenario in wanted:
        if scenario not in patient:
            yield scenario, run(scenario)
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        yield from zip(patient, pool.map(run, patient), strict=True)


def row(scenario: Scenario, outcome: Outcome) -> str:
    fault = scenario.fault if scenario.fault != "slow" else f"slow for {scenario.slow_seconds:g} s"
    if scenario.lost_seconds != 2.0:
        fault += f", limit {scenario.lost_seconds:g} s"
    knew = "no rank failed" if outcome.seconds is None else f"{outcome.seconds:.2f} s"
    if len(outcome.told) > MOST_CHARACTERS:
        outcome = outcome._replace(told=f"{outcome.told[:MOST_CHARACTERS]} ...")
    told = outcome.told if scenario.moment == SAVING else re.sub(r"\d+(\.\d+)?(?= steps)", "n", outcome.told)
    told = told.replace("|", "\\|")
    cells = (fault, scenario.moment, TRANSPORTS[scenario.transport], str(scenario.ranks), knew, told, outcome.left)
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="rows that hold this: a fault, a moment, a transport (shm, tcp)")
    parser.add_argument("--slow-seconds", type=float, default=120)
    parser.add_argument("--write", action="store_true", help="write all rows into README.md of this folder")
    arguments = parser.parse_args()
    if arguments.write and arguments.only:
        parser.error("--write writes all rows: leave --only out")
    no_hosts = namespaces.why_not()
    no_loss = why_no_loss()
    no_disk = why_no_disk()
    wanted = [s for s in scenarios(arguments.slow_seconds, not no_hosts, not no_disk) if arguments.only in str(s)]
    wanted = [s for s in wanted if not no_loss or s.fault != LOSS]
    rows = []
    for number, (scenario, outcome) in enumerate(outcomes(wanted), 1):
        rows.append((wanted.index(scenario), row(scenario, outcome)))
        print(f"{number}/{len(wanted)} {rows[-1][1]}", file=sys.stderr, flush=True)
    table = "\n".join(
        [
            "| fault at one rank | moment | transport | ranks | last error after | what it says | left over |",
            "|---|---|---|---|---|---|---|",
            *(text for _, text in sorted(rows)),
        ]
    )
    if no_hosts:
        table += f"\n\nWithout hosts of their own: {no_hosts}."
    if no_loss:
        table += f"\n\nWithout loss of packets: {no_loss}."
    if no_disk:
        table += f"\n\nWithout a full disk: {no_disk}."
    print(table)
    if not arguments.write:
        return
    begin, end = "<!-- made by benchmarks/faults/run.py -->\n", "\n<!-- end -->"
    page = PAGE.read_text()
    before, _, rest = page.partition(begin)
    PAGE.write_text(before + begin + table + end + rest.partition(end)[2])


if __name__ == "__main__":
    main()
