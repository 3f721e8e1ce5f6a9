"""All-reduces on hosts that are network namespaces, their links shaped by `tc` or delayed by delay.py."""

from __future__ import annotations

import contextlib
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

import contest
from delay import delayed

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "tests" / "cluster" / "engines"))

import namespaces  # noqa: E402

M = 1 << 20
GIGABIT, MEGABIT = 1_000_000_000, 1_000_000
# Bits a second, bytes, how often, numbers of hosts with one rank each; with two ranks there are four.
SHAPES = ((GIGABIT, 64 * M, 5, (2, 4, 8)), (100 * MEGABIT, 16 * M, 2, (4,)))
TWO_RANKS_A_HOST = {
    "two ranks a host, by block": [0, 0, 1, 1, 2, 2, 3, 3],
    "two ranks a host, round-robin": [0, 1, 2, 3, 0, 1, 2, 3],
}
DELAY_SECONDS, DELAYED_HOSTS, DELAYED_BYTES, DELAYED_CALLS = 0.005, 8, 1024, 10


def algorithms(placement: str) -> dict[str, float]:
    """Returns the algorithms, and the part of the calls to measure; "auto" is two levels on hosts of several ranks."""
    ring = {"ring": 1.0} if "two" in placement else {}
    return {"auto": 1.0, **ring, **({} if "round-robin" in placement else {"server": 0.2})}


def measure(arguments) -> dict | None:
    """Times of each way on each network; None where there can be none."""
    why_not = namespaces.why_not()
    if why_not:
        print(f"network: left out, {why_not}", file=sys.stderr)
        return None
    found: dict = {"conditions": contest.conditions(arguments.realtime, arguments.load), "shaped": [], "delayed": []}
    found.update(delayed_hosts=DELAYED_HOSTS, delayed_bytes=DELAYED_BYTES)
    with contest.realtime_without_limit(arguments.realtime):
        _measure(arguments, found)
    return found


def _measure(arguments, found: dict) -> None:
    for rate, size, calls, numbers in SHAPES:
        cases = [("one rank a host", list(range(number))) for number in numbers]
        for placement, places in [*cases, *TWO_RANKS_A_HOST.items()]:
            number = 1 + max(places)
            with namespaces.hosts(number) as hosts:
                for host in hosts:
                    host.shape(rate)
                with ranks(hosts, places, arguments.realtime) as contestant:
                    for algorithm, part in algorithms(placement).items():
                        loops = max(1, int(part * calls))
                        seconds = slowest(contestant.ask("repeated", algorithm, size, loops, 1))
                        found["shaped"].append([rate, size, placement, number, len(places), algorithm, seconds])
                        where = f"{rate / 1e6:.0f} Mbit/s, {number} hosts, {placement}"
                        print(f"{where}, {algorithm}: {seconds:.3f} s", file=sys.stderr)
    with (
        namespaces.hosts(DELAYED_HOSTS) as hosts,
        delayed(hosts, DELAY_SECONDS),
        ranks(hosts, range(DELAYED_HOSTS), arguments.realtime) as contestant,
    ):
        found["ping"] = ping(hosts)
        for algorithm in ("auto", "bruck", "ring", "server"):
            question = ("repeated", algorithm, DELAYED_BYTES, 5, DELAYED_CALLS)
            seconds = slowest(contestant.ask(*question))
            found["delayed"].append([algorithm, seconds])
            print(f"delay, {algorithm}: {seconds * 1e3:.2f} ms", file=sys.stderr)


@contextlib.contextmanager
def ranks(hosts, places, realtime) -> Iterator[contest.Contestant]:
    of_ranks = [hosts[place] for place in places]
    wanted = [("network", "tfring", sys.executable, "numpy")]
    with contest.started(HERE / "worker.py", wanted, len(of_ranks), of_ranks, realtime) as ((contestant,), _):
        yield contestant


def slowest(answers: list[list[float]]) -> float:
    """A call takes as long as its slowest rank; the median."""
    return statistics.median(map(max, zip(*answers, strict=True)))


def ping(hosts) -> float:
    """Seconds from one host to another and back, by datagrams."""
    answer = "import socket; s = socket.socket(type=2); s.bind(('', 9)); [s.sendto(*s.recvfrom(9)) for _ in range(20)]"
    ask = (
        "import socket, statistics, time; s = socket.socket(type=2); s.settimeout(1); times = []\n"
        "for _ in range(20):\n"
        "  start = time.perf_counter()\n"
        f"  s.sendto(b'ping', ('{hosts[1].ipv4}', 9)); s.recv(9)\n"
        "  times.append(time.perf_counter() - start)\n"
        "print(statistics.median(times))"
    )
    with subprocess.Popen(hosts[1].command(sys.executable, "-c", answer)) as answering:
        try:
            time.sleep(1)
            return float(run(*hosts[0].command(sys.executable, "-c", ask)))
        finally:
            answering.kill()


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
