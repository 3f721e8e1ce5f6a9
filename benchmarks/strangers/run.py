"""Slowdown of training while unauthenticated connections keep coming. Prints a markdown table.

    python benchmarks/strangers/run.py

Two ranks train a Keras model with `fit`; a process of strangers has so many connections to each of them, and whenever
one is turned away, comes again after a pause. They say nothing, or what browsers say, or half of a greeting, or send
noise. Rounds with and without strangers take turns in the same processes, so what the machine does meanwhile hits both.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import selectors
import socket
import statistics
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]

import contest  # noqa: E402

from tfring.transport import wire  # noqa: E402

WORDS = (b"", b"GET / HTTP/1.1\r\n\r\n", wire.pack("challenge", bytes(32))[:20], os.urandom(300))
_SETTLE_SECONDS = 0.3


def be_strangers(ports: list[int], count: int, pause_seconds: float) -> None:
    """Knocks between "on" and "off", line by line; answers with how often it was turned away."""
    os.nice(10)
    selector = selectors.DefaultSelector()
    turned_away, knocking = 0, False
    due: list[tuple[float, int]] = []
    selector.register(sys.stdin, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select(max(0.0, due[0][0] - time.monotonic()) if due else None):
            if key.fileobj is sys.stdin:
                line = sys.stdin.readline()
                if not line:
                    return
                knocking = line.strip() == "on"
                due = [(0.0, port) for port in ports * count] if knocking else []
                for other in [key for key in selector.get_map().values() if key.fileobj is not sys.stdin]:
                    selector.unregister(other.fileobj)
                    other.fileobj.close()
                if not knocking:
                    print(turned_away, flush=True)
                turned_away = 0
                break
            try:
                if key.fileobj.recv(100):
                    continue
            except OSError:
                pass
            selector.unregister(key.fileobj)
            key.fileobj.close()
            turned_away += 1
            due.append((time.monotonic() + pause_seconds, key.data))
        while due and due[0][0] <= time.monotonic():
            _, port = due.pop(0)
            connection = socket.create_connection(("127.0.0.1", port), 10)
            connection.sendall(WORDS[turned_away % len(WORDS)])
            selector.register(connection, selectors.EVENT_READ, port)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=61)
    parser.add_argument("--connections", type=int, default=100, help="to each rank")
    parser.add_argument("--pause-seconds", type=float, default=1.0, help="before who was turned away comes again")
    parser.add_argument("--steps", type=int, default=60, help="of training, a round")
    parser.add_argument("--strangers", default="", help=argparse.SUPPRESS)
    contest.add_realtime(parser)
    arguments = parser.parse_args()
    if arguments.strangers:
        ports = [int(port) for port in arguments.strangers.split(",")]
        be_strangers(ports, arguments.connections, arguments.pause_seconds)
        return
    load_before = os.getloadavg()[0]
    wanted = [("fit", "fit", sys.executable, "tensorflow")]
    with contest.started(HERE / "worker.py", wanted, 2) as ((training,), _):
        ports = ",".join(map(str, training.ask("port")))
        options = ["--connections", str(arguments.connections), "--pause-seconds", str(arguments.pause_seconds)]
        strangers = subprocess.Popen(
            [sys.executable, __file__, "--strangers", ports, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            measure(arguments, training, strangers)
        finally:
            strangers.kill()
            strangers.wait()
    contest.print_conditions(arguments.realtime, training.facts, load_before=load_before)


def measure(arguments: argparse.Namespace, training: contest.Contestant, strangers: subprocess.Popen) -> None:
    assert strangers.stdin is not None and strangers.stdout is not None
    took: dict[bool, list[tuple[float, ...]]] = {True: [], False: []}  # by the clock, of the CPU
    turned_away, knocking_seconds = 0, 0.0
    for round_number in range(arguments.rounds + 1):
        for disturbed in (True, False) if round_number % 2 else (False, True):
            began = time.monotonic()
            if disturbed:
                print("on", file=strangers.stdin, flush=True)
                time.sleep(_SETTLE_SECONDS)
            answers = training.ask("train", arguments.steps, arguments.realtime)
            if disturbed:
                print("off", file=strangers.stdin, flush=True)
                number = int(strangers.stdout.readline())
                if round_number:
                    turned_away += number
                    knocking_seconds += time.monotonic() - began
            if round_number:  # the first warms up
                clock, cpu = zip(*answers, strict=True)
                took[disturbed].append(tuple(1e3 * s / arguments.steps for s in (max(clock), statistics.mean(cpu))))
        print(f"round {round_number} of {arguments.rounds}", file=sys.stderr)
    print("| a step, median | left alone | strangers | ratio within a round: median | quartiles |")
    print("|---|---|---|---|---|")
    for column, heading in enumerate(("by the clock", "of a rank's CPU")):
        alone, among = ([seconds[column] for seconds in took[disturbed]] for disturbed in (False, True))
        ratios = [b / a for a, b in zip(alone, among, strict=True)]
        low, middle, high = statistics.quantiles(ratios) if len(ratios) > 1 else ratios * 3
        medians = [f"{statistics.median(values):.2f} ms" for values in (alone, among)]
        print(f"| {heading} | {' | '.join(medians)} | {middle:.3f} | {low:.3f} to {high:.3f} |")
    print(
        f"\n{arguments.rounds} rounds of {arguments.steps} steps, {arguments.connections} strangers at each of two "
        f"ranks; {turned_away / knocking_seconds:.0f} were turned away a second."
    )


if __name__ == "__main__":
    main()
