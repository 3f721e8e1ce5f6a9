"""A rank's part of the measurement. All ranks run the same collectives in the same order. Rank 0 reports."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from tfring import config
from tfring.bench import limits, report
from tfring.bench.options import FACTORS, ITEM_BYTES, Options
from tfring.cluster import Cluster, detect, detection, parse_address
from tfring.errors import TfringError
from tfring.ring import schedule

FAILED = 2
_LOOP_SECONDS = 0.1
_LOOPS = 3
_MAX_CALLS = 1000
_MOST_ONES = 256  # bfloat16 can count up to this number
_ROW = 64  # items per row, so that large exchanges have rows to distribute

ALONE = """\
tfring bench measures communication between ranks, but this process is alone. Type one of:
  tfring bench -n 2
  tfring bench --hosts host1:4,host2:4
or start it as you start your program, with mpirun or srun."""
NO_MATPLOTLIB = "--plot needs matplotlib, which is not installed where rank 0 runs. Type:\n  pip install matplotlib"


def run(options: Options) -> int:
    """Runs this process's part. Rank 0 prints.

    Returns:
      The exit code.
    """
    rank = 0
    try:
        said = detection.find(os.environ)
        rank = said.rank if said is not None else 0
        cluster = detect()
        if cluster.world_size == 1:
            return _complain(ALONE)
        return _measure(cluster, options)
    except TfringError as error:
        return _complain(f"rank {rank}: {error}")


def _complain(text: str) -> int:
    print(f"tfring bench: {text}" if "\n" not in text else text, file=sys.stderr, flush=True)
    return FAILED


def _measure(cluster: Cluster, options: Options) -> int:
    from tfring.ring.communicator import Communicator  # imports NumPy

    with Communicator.connect(cluster, "bench") as ring:
        problem = _why_not(options) if cluster.rank == 0 else None
        if ring.broadcast([float(problem is not None)], 0, name="bench's beginning")[0]:
            return _complain(problem) if problem is not None else 0
        hosts = [parse_address(address).host for address in cluster.addresses]
        numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
        layout = schedule.Layout.of([numbers[host] for host in hosts])
        limit = limits.measure(cluster, ring, layout.order)
        document = report.document(cluster, options, limit)
        show = cluster.rank == 0 and not options.as_json
        if show:
            print(report.head(document), flush=True)
        for op in options.ops:
            for size in options.sizes:
                found = _cell(ring, op, size, options.dtype, layout.local_size, limit)
                document["results"].append(found)
                if show:
                    print(report.line(found), flush=True)
        if cluster.rank == 0:
            if options.as_json:
                print(report.as_json(document), flush=True)
            if options.plot:
                report.plot(document, options.plot)
    return 0


def _why_not(options: Options) -> str | None:
    """Returns what rank 0 lacks for these options, or None if it lacks nothing."""
    if options.plot is None:
        return None
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return NO_MATPLOTLIB
    folder = os.path.dirname(options.plot) or "."
    return None if os.access(folder, os.W_OK) else f"--plot: cannot write a file in {os.path.abspath(folder)}"


def _cell(ring: Any, op: str, size: int, dtype: str, local_size: int, limit: limits.Limit) -> dict[str, Any]:
    """Measures one collective of one size."""
    ranks = ring.world_size
    count = max(1, size // ITEM_BYTES[dtype])
    if op not in ("all_reduce", "broadcast", "reduce"):  # per pair: sent to, or received from, each rank
        count = max(1, count // ranks)
    size = count * ITEM_BYTES[dtype] * (ranks if op not in ("all_reduce", "broadcast", "reduce") else 1)
    seconds = _seconds(ring, _call(ring, op, count, dtype))
    algorithm_speed = size / seconds
    bus_speed = algorithm_speed * FACTORS[op](ranks)
    return {
        "op": op,
        "size": size,
        "count": count,
        "dtype": dtype,
        "microseconds": seconds * 1e6,
        "algorithm": algorithm(op, size, ranks, local_size, config.read("TFRING_ALGORITHM")),
        "algbw": algorithm_speed / 1e9,
        "busbw": bus_speed / 1e9,
        "share_of_limit": bus_speed / limit.bytes_per_second,
    }


def algorithm(op: str, size: int, ranks: int, local_size: int, wanted: str = "auto") -> str:
    """Returns the algorithm of tfring/ring/schedule.py that a collective uses.

    >>> algorithm("all_reduce", 1 << 26, 8, 4), algorithm("broadcast", 4, 8, 4), algorithm("reduce_scatter", 4, 8, 4)
    ('two_level', 'flat', 'ring')
    """
    if op == "all_reduce":
        return schedule.choose_all_reduce(size, ranks, local_size, wanted)
    if op in ("all_to_all", "gather", "scatter"):
        return "flat"
    if op in ("broadcast", "reduce"):
        return schedule.choose_rooted(size, ranks)
    is_flat = op == "all_gather" and schedule.choose_all_reduce(size // ranks, ranks, local_size) == "flat"
    return "flat" if is_flat else "ring"


def _call(ring: Any, op: str, count: int, dtype: str) -> Callable[[], Any]:
    """Returns a function that calls the collective with ones. Its result is checked once."""
    import numpy as np

    if dtype == "bfloat16":
        import ml_dtypes

        kind = np.dtype(ml_dtypes.bfloat16)
    else:
        kind = np.dtype(dtype)
    ranks, rank = ring.world_size, ring.rank
    reduces = op in ("all_reduce", "reduce", "reduce_scatter")
    ones = not reduces or rank < _MOST_ONES
    given = np.full(count, ones, kind)
    if op in ("reduce_scatter", "all_to_all", "scatter"):
        given = np.full(count * ranks, ones, kind)
        if count % _ROW == 0:
            given = given.reshape(-1, _ROW)
    expected = min(ranks, _MOST_ONES) if reduces else 1
    if op == "reduce" and rank != 0:
        expected = 0

    def call() -> Any:
        return getattr(ring, op)(given, name=f"bench's {op}")

    result = call()
    result = result[0] if op == "all_to_all" else result
    if not (np.asarray(result, np.float64) == expected).all():
        raise ArithmeticError(f"{op} of {count} {dtype} at rank {rank}: not all of the result is {expected}")
    return call


def _seconds(ring: Any, call: Callable[[], Any]) -> float:
    """Returns the seconds per call on the slowest rank: the median of loops of calls that fill `_LOOP_SECONDS`."""

    def loop(calls: int) -> float:
        ring.barrier(name="bench's loop")
        start = time.perf_counter()
        for _ in range(calls):
            call()
        taken = (time.perf_counter() - start) / calls
        return float(ring.all_reduce([taken], "max", name="bench's seconds")[0])

    calls = max(1, min(_MAX_CALLS, int(_LOOP_SECONDS / loop(2))))
    return statistics.median(loop(calls) for _ in range(_LOOPS))
