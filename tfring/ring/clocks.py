"""Measures the offset of this rank's clock from rank 0's.

A gather of all ranks ends on no rank before it has begun on all. So each one bounds the distance on both sides:

```
rank 0   ──begin 0────────────end 0──►        end r   - distance >= begin 0
rank r   ──────begin r──────────end r──►      begin r - distance <= end 0
```

and of several the tightest bounds hold. What a round trip would give, from the collective there is, among any number of
ranks and without a link of rank 0 to each.
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
NAME = "clock"  # of these gathers, which no trace shows


class Distance(NamedTuple):
    """This rank's clock less rank 0's, at a moment of this rank's clock; nanoseconds."""

    at: int
    offset: int
    uncertainty: int  # the offset is at most so wrong
    lowest: int  # what was measured
    highest: int


def now() -> int:
    """Nanoseconds of the clock that the core reads too."""
    return time.monotonic_ns()


def distance(communicator: Communicator | None, rounds: int = ROUNDS, clock: Callable[[], int] = now) -> Distance:
    """Measures it; a collective of all ranks.

    Two processes of one kernel read one clock: where the measurement does not deny it, the offset is 0.

    Args:
      communicator: A `tfring.Communicator`, or None for a process alone.
      rounds: How many gathers, of some ten microseconds each on one host; one more is made.
      clock: What to read, nanoseconds.

    >>> distance(None).offset
    0
    """
    if communicator is None or communicator.world_size == 1:
        return Distance(clock(), 0, 0, 0, 0)
    begin = end = 0
    bounds = []
    mine = kernel()
    for _ in range(rounds + 1):  # each carries when the one before it began and ended
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
    """Measures the offset of this process's clock from that of another, which answers; no collective.

    Args:
      ask: Returns the other's `now()` and `kernel()`, read between the call and its end.
      rounds: How often it is asked.

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
    """A number for the running kernel; 0 if it is unknown, which fits no other."""
    try:
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        boot = str(now()).encode()
    return int.from_bytes(hashlib.sha256(boot).digest()[:7], "little")
