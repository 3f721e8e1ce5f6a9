"""Cost of one exchange of statistics as workers are added: in the ring, and through rank 0.

    python benchmarks/sync_bn/exchange.py

Makes the calls of the layer's two ways to synchronize on NumPy arrays, without TensorFlow, so that eight processes
start in a moment and only the exchange is measured. A layer makes two a step. Bytes are counted, by whom most are
sent; times are medians over interleaved rounds.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import sys
import time
import types

import numpy as np

BENCHMARKS = pathlib.Path(__file__).parents[1]
sys.path[:0] = [str(BENCHMARKS.parent), str(BENCHMARKS)]

import contest  # noqa: E402

WAYS = ("all_reduce", "central")


class Exchange:
    """One rank's ring, and its lines to rank 0 or from rank 0 to all others."""

    def __init__(self, rank, addresses, transport):
        from tfring import Cluster
        from tfring.ring.communicator import Communicator

        self.rank = rank
        self.ring = Communicator.connect(Cluster.from_hosts(addresses, rank=rank), "ring", transport=transport)
        self.lines = []
        for other in range(1, len(addresses)) if rank == 0 else [rank]:
            pair = types.SimpleNamespace(
                rank=min(rank, 1), world_size=2, addresses=(addresses[0], addresses[other]), listen_fd=None
            )
            self.lines.append(Communicator.connect(pair, "line", transport=transport))

    def all_reduce(self, moments):
        return self.ring.all_gather(moments).sum(0)

    def central(self, moments):
        if self.rank == 0:
            total = np.stack([moments, *(line.broadcast(moments, 1) for line in self.lines)]).sum(0)
            for line in self.lines:
                line.broadcast(total, 0)
            return total
        [line] = self.lines
        line.broadcast(moments, 1)
        return line.broadcast(moments, 0)

    def bytes_sent(self):
        return sum(c.statistics()["bytes_sent"] for c in (self.ring, *self.lines))

    def measure(self, way, channels, exchanges):
        """`(seconds, bytes sent)` an exchange."""
        moments = np.ones([1, 3, channels])
        exchange = getattr(self, way)
        for _ in range(5):
            exchange(moments)
        self.ring.all_gather(np.zeros(1))
        sent, start = self.bytes_sent(), time.perf_counter()
        for _ in range(exchanges):
            exchange(moments)
        return (time.perf_counter() - start) / exchanges, (self.bytes_sent() - sent) / exchanges


def measured(ranks, arguments):
    """`{(way, channels): (median milliseconds, most bytes any rank sent)}`."""
    seconds, sent = {}, {}
    with contest.own_ranks(Exchange, ranks, arguments.transport) as ask:
        for _ in range(arguments.rounds):
            for channels in arguments.channels:
                for way in WAYS:
                    results = ask(arguments.realtime, way, channels, arguments.exchanges)
                    seconds.setdefault((way, channels), []).append(max(s for s, _ in results))
                    sent[way, channels] = max(b for _, b in results)
    return {key: (statistics.median(values) * 1e3, sent[key]) for key, values in seconds.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4, 6, 8])
    parser.add_argument("--channels", type=int, nargs="+", default=[64, 2048])
    parser.add_argument("--transport", default="auto", choices=["auto", "tcp", "shm"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--exchanges", type=int, default=100, help="of one measurement")
    contest.add_realtime(parser)
    arguments = parser.parse_args()
    heads = [f"{way}, {channels} channels" for channels in arguments.channels for way in WAYS]
    print("| workers | " + " | ".join(f"{head}: ms | kB" for head in heads) + " |")
    print("|---" * (1 + 2 * len(heads)) + "|")
    for ranks in arguments.ranks:
        table = measured(ranks, arguments)
        cells = [table[way, channels] for channels in arguments.channels for way in WAYS]
        print(f"| {ranks} | " + " | ".join(f"{ms:.3f} | {sent / 1e3:.1f}" for ms, sent in cells) + " |", flush=True)
    print(f"\nTransport: {arguments.transport}. kB: what the rank sends that sends most.")
    contest.print_conditions(arguments.realtime)


if __name__ == "__main__":
    main()
