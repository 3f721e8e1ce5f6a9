"""Who sends what to whom in each step of a ring collective, as pure tables of integers.

A ring of N ranks; each only ever sends to the next and receives from the previous:

    rank 0 ──► rank 1 ──► rank 2 ──► ... ──► rank N-1 ──► rank 0

The buffer is cut into N chunks (`chunk_bounds`). In step s every rank sends one chunk and receives another;
the chunk it sends in step s + 1 is the one it received in step s, so nothing waits for a whole step and the
bytes stream.

all_reduce of a large buffer, N = 3 (`+` adds what came, `=` copies it; the number is the chunk):

    step            0        1        2        3
    rank 0 sends    0        2        1        0
           gets    +2       +1       =0       =2
    rank 1 sends    1        0        2        1
           gets    +0       +2       =1       =0
    rank 2 sends    2        1        0        2
           gets    +1       +0       =2       =1

After N - 1 steps rank r holds the sum of chunk r + 1 (reduce-scatter); N - 1 more hand the sums round
(all-gather). Each rank sends 2 (N - 1) / N of the buffer, the least there is (Patarasuk and Yuan, 2009,
https://doi.org/10.1016/j.jpdc.2008.09.002).

all_reduce of a small buffer: every rank's whole contribution goes round in the N - 1 steps of an all-gather,
and each rank adds them up in rank order: more bytes, half the steps. Either way all ranks hold the same bits.

The native code computes the same tables (`native/schedule.h`); the tests compare the two.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

SMALL_BYTES = 64 * 1024


class Step(NamedTuple):
    """What one rank does in one step. `None` where it does nothing."""

    send: int | None
    recv: int | None
    reduce: bool


def chunk_bounds(count: int, world_size: int) -> list[tuple[int, int]]:
    """Where each chunk begins and ends; the first `count % world_size` chunks hold one more than the others.

    >>> chunk_bounds(8, 3)
    [(0, 3), (3, 6), (6, 8)]
    """
    base, extra = divmod(count, world_size)
    begins = [index * base + min(index, extra) for index in range(world_size + 1)]
    return list(itertools.pairwise(begins))


def is_small(num_bytes: int, world_size: int) -> bool:
    """Whether an all_reduce of this size goes round whole.

    >>> is_small(4096, 2), is_small(1 << 20, 2)
    (True, False)
    """
    return num_bytes * world_size <= SMALL_BYTES


def all_reduce(rank: int, world_size: int) -> list[Step]:
    """The steps of a large all_reduce: reduce-scatter, then all-gather.

    >>> [tuple(step) for step in all_reduce(0, 3)]
    [(0, 2, True), (2, 1, True), (1, 0, False), (0, 2, False)]
    """
    return [
        Step((rank - s) % world_size, (rank - s - 1) % world_size, s < world_size - 1)
        for s in range(2 * (world_size - 1))
    ]


def all_gather(rank: int, world_size: int) -> list[Step]:
    """The steps of an all_gather, and of a small all_reduce; chunk r is what rank r contributes.

    >>> [tuple(step) for step in all_gather(0, 3)]
    [(0, 2, False), (2, 1, False)]
    """
    return [Step((rank - s) % world_size, (rank - s - 1) % world_size, False) for s in range(world_size - 1)]


def reduce_scatter(rank: int, world_size: int) -> list[Step]:
    """The steps of a reduce_scatter; rank r ends with the sum of chunk r.

    >>> [tuple(step) for step in reduce_scatter(0, 3)]
    [(2, 1, True), (1, 0, True)]
    """
    return [
        Step((rank - s - 1) % world_size, (rank - s - 2) % world_size, True) for s in range(world_size - 1)
    ]


def broadcast(rank: int, world_size: int, root: int) -> list[Step]:
    """The steps of a broadcast.

    Chunk 0 is the whole buffer; chunk 1 is the last rank's word to the root that it arrived.

    N = 3, root 0:  rank 0 ──0──► rank 1 ──0──► rank 2 ──1──► rank 0

    >>> [tuple(step) for step in broadcast(1, 3, root=0)]
    [(None, 0, False), (0, None, False)]
    """
    if rank == root:
        return [Step(0, None, False), Step(None, 1, False)]
    is_last = (rank + 1) % world_size == root
    return [Step(None, 0, False), Step(1 if is_last else 0, None, False)]
