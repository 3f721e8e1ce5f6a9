"""Ranks that work for long, in rings that come and go: memory, descriptors and threads have to stay as they are.

    python tests/ring/soak.py                  # a quarter of a minute
    python tests/ring/soak.py --minutes 60

Four ranks call collectives of random kinds, sizes and dtypes, with pauses, and look at every result; after a few
collectives they close the ring and form another, of other transports. What they hold is looked at once a leg, with all
rings closed.
"""

from __future__ import annotations

import argparse
import gc
import os
import pathlib
import random
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

import ml_dtypes  # noqa: F401  teaches NumPy the name bfloat16
import numpy as np
import ranks

from tfring.ring import library
from tfring.ring.schedule import chunk_bounds

RANKS = 4
_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
_MOST_ELEMENTS = 1 << 19
_MOST_GROWTH_BYTES = 1 << 18  # of one rank
_ENVIRON = dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), "65536")  # what is free is given back
_LEG_LIMIT_SECONDS = 60  # beyond its time


class Held(NamedTuple):
    """The resources that a process holds."""

    resident_bytes: int
    descriptors: int
    threads: int
    mailboxes: int


class Leg(NamedTuple):
    """The report of one rank on one leg."""

    held: Held
    collectives: int
    rings: int


def work(cluster: Any, seed: int, seconds: float, pause_seconds: float) -> Leg:
    """One rank's part of a leg."""
    common, own = random.Random(seed), random.Random(seed * RANKS + cluster.rank)
    end = time.monotonic() + seconds
    collectives, rings = 0, 1
    with ranks.join(cluster, name="the leg's") as lasting:
        while True:
            rings += 1
            transports = common.choice((["auto"] * RANKS, ["tcp"] * RANKS, ["auto", "auto", "tcp", "auto"]))
            with ranks.join(cluster, name="a", transport=transports[cluster.rank], beside=lasting) as ring:
                for _ in range(common.randrange(1, 20)):
                    call(ring, common)
                    collectives += 1
                    time.sleep(own.expovariate(1 / pause_seconds))
            if lasting.all_reduce(np.array(time.monotonic() > end), "max"):
                break
    return Leg(held(), collectives, rings)


def call(ring: Any, common: random.Random) -> None:
    """A collective that all ranks draw alike, of numbers that every dtype has."""
    kind, dtype = common.choice(_KINDS), np.dtype(common.choice(list(library.DTYPES)))
    size, rank, count = int(_MOST_ELEMENTS ** common.random()), ring.rank, ring.world_size
    rows = (np.arange(size) % 6).astype(dtype)
    if kind == "broadcast":
        root = common.randrange(count)
        found, expected = ring.broadcast(rows if rank == root else np.zeros_like(rows), root), rows
    elif kind == "all_gather":
        found, expected = ring.all_gather(rows[rank:]), np.concatenate([rows[r:] for r in range(count)])
    else:
        ops = {"b": ("max", "min"), "c": ("sum",)}.get(dtype.kind, ("sum", "max", "min"))
        op = common.choice(ops)
        times = {"sum": count * (count + 1) // 2, "max": count, "min": 1}[op]
        mine, expected = (((np.arange(size) % 6) * factor).astype(dtype) for factor in (rank + 1, times))
        found = getattr(ring, kind)(mine, op)
        if kind == "reduce_scatter":
            begin, end = chunk_bounds(size, count)[rank]
            expected = expected[begin:end]
    assert found.dtype == expected.dtype and np.array_equal(found, expected), (kind, dtype, size)


def held() -> Held:
    """Returns the resources that this process holds now."""
    gc.collect()
    for size in range(1024):  # NumPy keeps as many small pieces of each size; all at once, or they look like a leak
        _ = [np.empty(size, np.uint8) for _ in range(8)]
    proc = pathlib.Path("/proc/self")
    return Held(
        int((proc / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        len(os.listdir("/proc/self/fd")),
        len(os.listdir("/proc/self/task")),
        (proc / "maps").read_text().count("tfring-mailbox"),
    )


def run(legs: int, leg_seconds: float, pause_seconds: float, seed: int = 1) -> Iterator[str]:
    """Yields a line a leg, and then what to say of all.

    Raises:
      AssertionError: A result is wrong, or something has grown since the first third.
    """
    seen: list[list[Leg]] = []
    with ranks.Group(RANKS, environ=_ENVIRON) as group:
        for number in range(legs):
            group.start(RANKS, work, seed * legs + number, leg_seconds, pause_seconds)
            outcomes = group.outcomes(leg_seconds + _LEG_LIMIT_SECONDS)
            assert all(isinstance(outcome, Leg) for outcome in outcomes), outcomes
            seen.append(outcomes)
            yield f"leg {number + 1}: " + "; ".join(_told(leg.held) for leg in outcomes)
    warm = legs // 3
    most = 0
    for rank in range(RANKS):
        found = [outcomes[rank].held for outcomes in seen]
        for one in found[warm:]:
            assert one[1:] == found[warm][1:], f"rank {rank} held {_told(found[warm])}, and holds {_told(one)}"
        early, late = (max(one.resident_bytes for one in part) for part in (found[warm : 2 * warm], found[2 * warm :]))
        assert late - early < _MOST_GROWTH_BYTES, f"rank {rank} grew by {(late - early) / 1e6:.1f} MB in the last third"
        most = max(most, late - early)
    totals = [sum(getattr(outcomes[0], name) for outcomes in seen) for name in ("collectives", "rings")]
    yield (
        f"{totals[0]} collectives in {totals[1]} rings: descriptors, threads and mailboxes as after the first third, "
        f"resident memory at most {most / 1e6:.2f} MB more"
    )


def _told(one: Held) -> str:
    return (
        f"{one.resident_bytes / 1e6:.1f} MB, {one.descriptors} descriptors, {one.threads} threads, "
        f"{one.mailboxes} mailboxes"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=0.25)
    parser.add_argument("--pause-seconds", type=float, default=0.01, help="between two collectives, on average")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    leg_seconds = min(60.0, 60 * arguments.minutes / 12)
    legs = max(12, round(60 * arguments.minutes / leg_seconds))
    for line in run(legs, leg_seconds, arguments.pause_seconds, arguments.seed):
        print(line, flush=True)


if __name__ == "__main__":
    import soak  # by the name under which ranks find `work`

    soak.main()
