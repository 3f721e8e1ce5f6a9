"""Measures the offset of this rank's clock from rank 0's.

A gather of all ranks does not end on any rank before it has begun on all. So each gather bounds the distance on both
sides:

```
rank 0   ──begin 0────────────end 0──►        end r   - distance >= begin 0
rank r   ──────begin r──────────end r──►      begin r - distance <= end 0
```

and the tightest bounds of several gathers hold. This gives the result of a round trip from an existing collective,
among any number of ranks and without a link from rank 0 to each.
"""

from __future__ import annotations

import functools
import hashlib
import pathlib
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from tfring.ring.communicator import Communicator

ROUNDS = 24
NAME = "clock"  # of these gathers, which traces leave out


class Distance(NamedTuple):
    """The difference of this rank's clock from rank 0's at a time of this rank's clock, in nanoseconds."""

    at: int
    offset: int
    uncertainty: int  # the largest error of the offset
    lowest: int  # the measured bounds
    highest: int


def now() -> int:
    """Returns the nanoseconds of the clock that the core reads as well."""
    return time.monotonic_ns()


def distance(communicator: Communicator | None, rounds: int = ROUNDS, clock: Callable[[], int] = now) -> Distance:
    """Measures the offset. This is a collective of all ranks.

    Two processes on one kernel read the same clock: their offset is 0 unless the measurement contradicts it.

    Args:
      communicator: A `tfring.Communicator`, or None for a single process.
      rounds: Number of gathers, which take some ten microseconds each on one host. One more is made.
      clock: A function that returns the time in nanoseconds.

    >>> distance(None).offset
    0
    """
    if communicator is None or communicator.world_size == 1:
        return Distance(clock(), 0, 0, 0, 0)
    begin = end = 0
    bounds = []
    mine = kernel()
    for _ in range(rounds + 1):  # each carries the begin and end of the one before
        row = np.array([[begin, end, mine]], np.int64)
        begun = clock()
        rows = communicator.all_gather(row, name=NAME)
        ended = clock()
        if end:
            begin_0, end_0 = int(rows[0, 0]), int(rows[0, 1])
            bounds.append((begin - end_0, end - begin_0))
        begin, end = begun, ended
    lowest, highest = max(low for low, _ in bounds), min(high for _, high in bounds)
    same = int(rows[0, 2]) == mine
    if communicator.rank == 0 or (same and lowest <= 0 <= highest):
        return Distance(end, 0, 0, lowest, highest)
    return Distance(end, (lowest + highest) // 2, max(0, -(-(highest - lowest) // 2)), lowest, highest)


def distance_by_asking(ask: Callable[[], tuple[int, int]], rounds: int = ROUNDS) -> Distance:
    """Measures the offset of this process's clock from that of another process, which answers. Not a collective.

    Args:
      ask: A function that returns `now()` and `kernel()` of the other process, read between its call and its return.
      rounds: Number of calls of `ask`.

    >>> distance_by_asking(lambda: (now(), kernel())).offset
    0
    """
    bounds = []
    for _ in range(rounds):
        begun = now()
        there, its_kernel = ask()
        ended = now()
        bounds.append((begun - there, ended - there))
    lowest, highest = max(low for low, _ in bounds), min(high for _, high in bounds)
    if its_kernel == kernel() and lowest <= 0 <= highest:
        return Distance(ended, 0, 0, lowest, highest)
    return Distance(ended, (lowest + highest) // 2, max(0, -(-(highest - lowest) // 2)), lowest, highest)


@functools.cache
def kernel() -> int:
    """Returns a number that identifies the running kernel; if it is unknown, one that matches no other process."""
    try:
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        boot = str(now()).encode()
    return int.from_bytes(hashlib.sha256(boot).digest()[:7], "little")
