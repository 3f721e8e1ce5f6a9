"""Measures what encryption costs: sums over two ranks, encrypted and not in turn, in one run.

    python benchmarks/collectives/encryption.py                # on loopback; as root also on a link of 1 Gbit/s

Each rank is in two rings, of which one is encrypted. Prints the medians of both, in GB/s of the array, and of the ratio
of neighbouring calls.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1] / "tests" / "cluster" / "engines")]

import contest  # noqa: E402
import namespaces  # noqa: E402

from tfring.cluster import Cluster  # noqa: E402
from tfring.ring.communicator import Communicator  # noqa: E402

GIGABIT = 1_000_000_000
SIZES = {4: 400, 1 << 20: 200, 100 << 20: 15}  # bytes, and how many calls of each kind


def rank(number: int, addresses: Sequence[str]) -> None:
    """Runs a rank; rank 0 prints a line a size."""
    cluster = Cluster(number, 2, number, 2, 1, tuple(addresses), "benchmark")
    with contextlib.ExitStack() as rings:
        both = []
        for encrypts in ("0", "1"):
            os.environ["TFRING_ENCRYPT"] = encrypts
            both.append(rings.enter_context(Communicator.connect(cluster, f"encrypted {encrypts}", transport="tcp")))
        for size, calls in SIZES.items():
            array = np.ones(size // 4, "float32")
            seconds: list[list[float]] = [[], []]
            for call in range(calls + 3):
                for ring, of_ring in zip(both, seconds, strict=True):
                    ring.barrier()
                    began = time.perf_counter()
                    ring.all_reduce(array)
                    if call >= 3:
                        of_ring.append(time.perf_counter() - began)
            plain, encrypted = map(statistics.median, seconds)
            ratio = statistics.median(b / a for a, b in zip(*seconds, strict=True))
            if number == 0:
                rate = f"{size / plain / 1e9:.3f} and {size / encrypted / 1e9:.3f} GB/s, " if size > 4 else ""
                print(
                    f"  {size} bytes: {plain * 1e6:.0f} and {encrypted * 1e6:.0f} us, {rate}{ratio:.2f} times as long"
                )


def run(hosts: Sequence[namespaces.Host | None], ports: Sequence[int]) -> None:
    addresses = [f"{host.ipv4 if host else '127.0.0.1'}:{port}" for host, port in zip(hosts, ports, strict=True)]
    environ = {**os.environ, "TFRING_SECRET": secrets.token_hex(16)}
    running = []
    for number, host in enumerate(hosts):
        command = [sys.executable, __file__, str(number), json.dumps(addresses)]
        running.append(subprocess.Popen(host.command(*command) if host else command, env=environ))
    if any([process.wait(timeout=600) for process in running]):
        raise SystemExit("a rank failed")


def main() -> None:
    if len(sys.argv) > 1:
        return rank(int(sys.argv[1]), json.loads(sys.argv[2]))
    ports = contest.free_ports(2)
    print("loopback, not encrypted and encrypted", flush=True)
    run([None, None], ports)
    if why_not := namespaces.why_not():
        return print(f"a link of 1 Gbit/s: left out, {why_not}")
    with namespaces.hosts(2) as hosts:
        for host in hosts:
            host.shape(GIGABIT)
        print("a link of 1 Gbit/s, not encrypted and encrypted", flush=True)
        run(hosts, ports)


if __name__ == "__main__":
    main()
