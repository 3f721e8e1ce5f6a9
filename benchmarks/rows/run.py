"""Cost of the sparse gradients of a step: the 26 tables of `benchmarks/training`'s DLRM, Zipf ids, batch 2,048.

    python benchmarks/rows/run.py                        # 2 and 4 ranks, all tables as IndexedSlices
    python benchmarks/rows/run.py --realtime             # where the machine has other things to do

Interleaved, each rank on a core of its own, inside a `tf.function`:

    TensorFlow   tf.unique and unsorted_segment_sum for each table, one all_gather of all, the same again
    gather       one native collective: each rank's ids once to all
    owner        the same, rows to the owners of their ids, sums to all
    auto         what the counts of the last step say

Bytes are those that a rank sends a step; "every row" is what gathering would take without adding up at home.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import statistics
import sys
import time

import numpy as np

BENCHMARKS = pathlib.Path(__file__).parents[1]
sys.path[:0] = [str(BENCHMARKS.parent), str(BENCHMARKS), str(BENCHMARKS / "training")]

import contest  # noqa: E402
import models  # noqa: E402

WAYS = ("TensorFlow", "gather", "owner", "auto")
BATCH, WIDTH = 2048, 16


class Gradients:
    """One rank: its rows of some steps, and the ways to add them to those of the others."""

    def __init__(self, rank, addresses, transport):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
        os.environ.update(TF_NUM_INTRAOP_THREADS="1", TF_NUM_INTEROP_THREADS="2", TF_CPP_MIN_LOG_LEVEL="2")
        import tensorflow as tf

        from tfring import Cluster
        from tfring.ring.communicator import Communicator

        self.tf = tf
        self.ring = Communicator.connect(Cluster.from_hosts(addresses, rank=rank), "rows", transport=transport)
        rows = BATCH // len(addresses)
        generator = np.random.default_rng(rank)
        tables = models.DLRM_TABLES
        self.steps = [  # two tensors a step: to hand over fifty takes a function longer than to add them up
            (
                tf.constant(generator.random((len(tables), rows, WIDTH), np.float32)),
                tf.constant(np.stack([models.zipf(generator, rows, size) for size in tables])),
            )
            for _ in range(10)
        ]
        self.functions = {way: self.function(way) for way in WAYS}

    def function(self, way):
        from tfring.ring import ops
        from tfring.ring.collectives import sum_duplicates

        tf = self.tf

        def by_tensorflow(values, ids):
            own = [sum_duplicates(v, i) for v, i in zip(values, ids, strict=True)]
            gathered = ops.all_gather(self.ring, [*(v for v, _ in own), *(i for _, i in own)])
            return [sum_duplicates(v, i) for v, i in zip(gathered[: len(own)], gathered[len(own) :], strict=True)]

        def natively(values, ids):
            return ops.all_reduce_rows(self.ring, values, ids, reduction=way, name=way)

        @tf.function
        def step(values, ids):
            sums = (by_tensorflow if way == "TensorFlow" else natively)(tf.unstack(values), tf.unstack(ids))
            with tf.control_dependencies([each for pair in sums for each in pair]):
                return tf.constant(0)

        return step

    def measure(self, way):
        """Seconds a step by the clock and of the processor, bytes sent a step."""
        function = self.functions[way]
        for step in self.steps[:2]:
            function(*step)
        self.ring.barrier()
        sent, start, worked = self.ring.statistics()["bytes_sent"], time.perf_counter(), time.process_time()
        for step in self.steps:
            function(*step)
        totals = (
            time.perf_counter() - start,
            time.process_time() - worked,
            self.ring.statistics()["bytes_sent"] - sent,
        )
        return [total / len(self.steps) for total in totals]


def measured(ranks, arguments):
    """`{way: (milliseconds by the clock, of a rank's processor, most bytes any rank sent)}`, the first two medians."""
    found = {}
    with contest.own_ranks(Gradients, ranks, arguments.transport) as ask:
        for _ in range(arguments.rounds):
            for way in WAYS:
                rows = ask(arguments.realtime, way)
                found.setdefault(way, []).append([max(column) for column in zip(*rows, strict=True)])
    results = {}
    for way, rows in found.items():
        clock, worked, sent = (statistics.median(column) for column in zip(*rows, strict=True))
        results[way] = clock * 1e3, worked * 1e3, sent
    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--transport", default="auto", choices=["auto", "tcp", "shm"])
    contest.add_realtime(parser)
    arguments = parser.parse_args()
    os.environ.setdefault("TFRING_SECRET", "without one, a host takes no TCP")
    print("| ranks | way | ms a step | of them its processor | kB a rank sends | of every row |")
    print("|---|---|---|---|---|---|")
    for ranks in arguments.ranks:
        every_row = (ranks - 1) * (BATCH // ranks) * len(models.DLRM_TABLES) * (4 * WIDTH + 4)
        print(f"| {ranks} | every row | | | {every_row / 1e3:.0f} | 1 |")
        for way, (clock, worked, sent) in measured(ranks, arguments).items():
            figures = f"{clock:.2f} | {worked:.2f} | {sent / 1e3:.0f} | 1 / {every_row / sent:.2f}"
            print(f"| {ranks} | {way} | {figures} |", flush=True)
    contest.print_conditions(arguments.realtime)


if __name__ == "__main__":
    main()
