"""Measures the connections between ranks: whether they connect, their clocks' offsets, the ring's speed."""

from __future__ import annotations

import errno
import math
import socket
import statistics
import time
from collections.abc import Callable
from typing import Any

from tfring.cluster import Cluster
from tfring.doctor.parallel import in_parallel
from tfring.transport import dial, handshake

PROBE_SECONDS = 3.0  # within this time the kernel has tried twice
_MARGIN_SECONDS = 5.0
_MAX_PARALLEL = 32
_MAX_DETAILS = 256
_PINGS = 10  # of a clock, and before the duration of one is known
_LATENCY_SECONDS = 0.3
_MAX_ROUND_TRIPS = 300
_FIRST_BYTES, _LAST_BYTES = 1 << 16, 1 << 24
_LONG_ENOUGH_SECONDS = 0.05  # for a message to be of the largest size worth measuring
_REPEATS = 3

# Results of an attempt to connect.
CONNECTED = "connected"
REFUSED = "refused"  # the host answered: no process listens there
TIMED_OUT = "timed out"  # no answer at all
UNREACHABLE = "unreachable"  # this host or a router has no route
UNRESOLVED = "unresolved"
NO_ANSWER = "no answer"  # connected, and then silence
ANOTHER_JOB = "another job"
ANOTHER_RANK = "another rank"
ANOTHER_PROGRAM = "another program"
FAILED = "failed"

_NO_WAY = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EACCES, errno.EPERM, errno.EINVAL, errno.ENETDOWN)


def kind_of(error: Exception) -> str:
    """Returns the kind of a connection error.

    >>> kind_of(ConnectionRefusedError()), kind_of(TimeoutError()), kind_of(OSError(errno.EHOSTUNREACH, ""))
    ('refused', 'timed out', 'unreachable')
    """
    if isinstance(error, socket.gaierror):
        return UNRESOLVED
    if isinstance(error, ConnectionRefusedError):
        return REFUSED
    if isinstance(error, TimeoutError) or getattr(error, "errno", None) == errno.ETIMEDOUT:
        return TIMED_OUT
    if isinstance(error, OSError) and error.errno in _NO_WAY:
        return UNREACHABLE
    return FAILED


def probe(cluster: Cluster, rank: int) -> dict[str, Any]:
    """Connects to a rank as the ring does, and asks for its rank.

    Returns:
      A dict with `kind`; `detail`, the reason as text, unless `kind` is CONNECTED or NO_ANSWER; and `local`, the
      address of this host in the connection, if there was one.
    """
    try:
        found = dial.probe(cluster, rank, PROBE_SECONDS)
    except OSError as error:
        return {"kind": kind_of(error), "detail": error.strerror or str(error)}
    if isinstance(found.problem, TimeoutError):
        return {"kind": NO_ANSWER, "local": found.local}
    if isinstance(found.problem, handshake.RefusedError):
        return {"kind": ANOTHER_JOB, "detail": str(found.problem), "local": found.local}
    if found.problem is not None:
        return {"kind": ANOTHER_PROGRAM, "detail": str(found.problem), "local": found.local}
    if found.rank != rank:
        return {"kind": ANOTHER_RANK, "detail": f"rank {found.rank}", "local": found.local}
    return {"kind": CONNECTED, "local": found.local}


def probe_seconds(num_ranks: int) -> float:
    """Returns the maximum duration of `probe_all`, in seconds."""
    return 2 * PROBE_SECONDS * math.ceil(num_ranks / _MAX_PARALLEL) + _MARGIN_SECONDS


def probe_all(cluster: Cluster, ranks: list[int]) -> dict[int, dict[str, Any]]:
    """Probes all of `ranks` except this one, beginning with the next, so that not all probe the same one at once."""
    later = [rank for rank in ranks if rank > cluster.rank]
    others = [*later, *(rank for rank in ranks if rank < cluster.rank)]
    answers = in_parallel(lambda rank: probe(cluster, rank), others, probe_seconds(len(others)), _MAX_PARALLEL)
    found = {rank: answers.get(rank, {"kind": TIMED_OUT}) for rank in others}
    for rank in others[_MAX_DETAILS:]:  # a row is one message
        found[rank] = {"kind": found[rank]["kind"]}
    return found


def clock_offset(ask: Callable[[], float]) -> dict[str, float]:
    """Measures how far another clock is ahead of this one.

    The answer was given between request and reply: the middle of the shortest exchange is off by at most half of its
    duration.

    Args:
      ask: A function that returns the time of the other clock, after a round trip.

    >>> found = clock_offset(lambda: time.time() + 5.0)
    >>> abs(found["offset_seconds"] - 5.0) <= found["uncertainty_seconds"] + 1e-6
    True
    """
    exchanges = []
    for _ in range(_PINGS):
        wall, started = time.time(), time.perf_counter()
        answer = ask()
        took = time.perf_counter() - started
        exchanges.append((took / 2, answer - (wall + took / 2)))
    uncertainty, offset = min(exchanges)
    return {"offset_seconds": offset, "uncertainty_seconds": uncertainty}


def measure_ring(cluster: Cluster, seconds: float) -> dict[str, Any]:
    """Forms the ring of all ranks, computes a sum, and checks it."""
    started = time.monotonic()
    with _communicator(cluster, "doctor", seconds) as ring:
        formed = time.monotonic() - started
        total = ring.all_reduce([float(ring.rank + 1)], name="doctor's sum")
        expected = ring.world_size * (ring.world_size + 1) / 2
        if float(total[0]) != expected:
            raise ArithmeticError(f"the ring of {ring.world_size} sums to {float(total[0])}, not {expected}")
        algorithms = [{"up_to_bytes": limit, "algorithm": algorithm} for limit, algorithm in ring.algorithms]
        return {
            "seconds_to_form": formed,
            "transport": list(ring.transport),
            "algorithms": algorithms,
            **_throughput(ring),
        }


def measure_pair(cluster: Cluster, pair: list[int], seconds: float) -> dict[str, Any]:
    """Measures latency and bandwidth between two neighbours, in a ring of the two."""
    here = pair.index(cluster.rank)
    addresses = [cluster.addresses[rank] for rank in pair]
    two = Cluster.from_hosts(addresses, here, cluster.source, cluster.listen_fd, cluster.secret)
    with _communicator(two, "doctor's pair", seconds) as ring:
        return {"transport": ring.transport[0], "latency_seconds": _latency(ring), **_throughput(ring)}


def _communicator(cluster: Cluster, name: str, seconds: float) -> Any:
    from tfring.ring.communicator import Communicator  # imports NumPy

    return Communicator.connect(cluster, name, timeout_seconds=seconds, connect_timeout_seconds=seconds)


def _latency(ring: Any) -> float:
    """Returns half of the median round trip: each of the two sends in turn."""

    def round_trips(number: int) -> list[float]:
        took = []
        for _ in range(number):
            started = time.perf_counter()
            ring.broadcast([0.0], 0)
            ring.broadcast([0.0], 1)
            took.append(time.perf_counter() - started)
        return took

    (longest,) = ring.all_reduce([statistics.median(round_trips(_PINGS))], "max")
    return statistics.median(round_trips(max(_PINGS, min(_MAX_ROUND_TRIPS, int(_LATENCY_SECONDS / longest))))) / 2


def _throughput(ring: Any) -> dict[str, float]:
    """Measures the bytes that each rank sends in a large all_reduce, over the shortest time of the slowest rank."""
    import numpy as np

    def seconds_for(num_bytes: int) -> float:
        values = np.zeros(num_bytes // 4, np.float32)
        started = time.perf_counter()
        ring.all_reduce(values)
        (slowest,) = ring.all_reduce([time.perf_counter() - started], "max")
        return float(slowest)

    num_bytes = _FIRST_BYTES
    while (shortest := seconds_for(num_bytes)) < _LONG_ENOUGH_SECONDS and num_bytes < _LAST_BYTES:
        num_bytes *= 4
    shortest = min([shortest, *(seconds_for(num_bytes) for _ in range(_REPEATS))])
    sent = 2 * (ring.world_size - 1) / ring.world_size * num_bytes
    return {
        "all_reduce_bytes": num_bytes,
        "all_reduce_seconds": shortest,
        "gigabytes_per_second": sent / shortest / 1e9,
    }
