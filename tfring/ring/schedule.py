"""Schedules of the collectives: which chunk each member sends to and receives from whom in each step.

The members of a group stand in an order, those of one host side by side (`Layout`), so that as few edges of a ring
as possible cross the network. The steps themselves are in `native/schedule.cc`, and once more as tables in
`tests/ring/schedule_tables.py`, which the tests play. A step that
sends on what an earlier one receives follows it byte by byte, so nothing waits for a whole step.

**Ring**, all_reduce of a large buffer, cut into N chunks (`chunk_bounds`), N = 3 (`+` adds what came, `=` copies it):

    step            0        1        2        3
    0 sends         0        2        1        0       to 1
      gets         +2       +1       =0       =2       from 2
    1 sends         1        0        2        1       to 2
      gets         +0       +2       =1       =0       from 0
    2 sends         2        1        0        2       to 0
      gets         +1       +0       =2       =1       from 1

After N - 1 steps position p holds the sum of chunk p + 1 (reduce-scatter); N - 1 more hand the sums round (all-gather).
Each sends 2 (N - 1) / N of the buffer, the least there is (Patarasuk and Yuan, 2009,
https://doi.org/10.1016/j.jpdc.2008.09.002), and there are 2 (N - 1) delays.

**Two levels**, H hosts of L members: a ring of the L within each host adds up, then L rings of H, one for each local
member, each with its share of the buffer, and then the rings within the hosts again. 2 (H - 1) delays of the network in
place of 2 (N - 1), and 2 (H - 1) / H of the buffer through each host's interface in place of 2 (N - 1) / N.

    host 0: 0 - 1      0   1     0 - 1
                       |   |
    host 1: 2 - 3      2   3     2 - 3

**Flat**, a small buffer: every member sends its full contribution to every other, and each adds them up in the order
of the members: one delay, N - 1 messages.

**Bruck**, a small buffer among many: in round k each sends all it has to the position 2^k further on: log2 N delays
(Bruck et al., 1997, https://doi.org/10.1109/71.642949). N = 5:

    round           0             1                2
    0 sends         0 to 1        0, 4 to 2        0 to 4      (then it has all five)
      gets          4 from 4      3, 2 from 3      1 from 1

An all_gather among more than 16 gathers the numbers of rows so, with the rows beside them if they are few, and then
larger ones, unless all together are large: those take the ring.

**Tree**, a broadcast of a small buffer or one of middle size among many: the root sends to the position half of the
members further on, and each that has it does the same within its half: log2 N delays (a binomial tree). A member
acknowledges after those that it has sent to. A reduce goes the other way, and adds. Larger ones stream along a chain,
which hides its N - 1 delays. N = 6, root 0:

    0 ──► 4 ──► 5
      ──► 2 ──► 3
      ──► 1

**Halving and doubling**, a buffer of middle size, cut into as many chunks as the largest power of two up to N: in each
round a member and the one at half the distance of the round before exchange the halves of what each still adds up, and
then, in the reverse order, what each has of the sum: 2 log2 N delays, and the bytes of a ring (Thakur, Rabenseifner and
Gropp, 2005, https://doi.org/10.1177/1094342005051521). Members beyond the power of two hand their full buffer to one of
the others first, and get the sum last. N = 4, with the chunks that member 0 exchanges:

    round           0             1             2             3
    0 sends         3, 2 to 2     1 to 1        0 to 1        0, 1 to 2
      gets          +1, +0        +0            =1            =2, =3

Whichever it is, all members hold the same bits. The native code chooses, and is asked here.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Sequence

from tfring.ring import library

FLAT_MEMBERS = 16
_BEYOND = 1 << 50  # more bytes than any buffer has


@dataclasses.dataclass(frozen=True)
class Layout:
    """Order of the members of a group, ranks of a host side by side.

    Attributes:
      order: `[position]`: the member there.
      local_size: Members on each host; 0 where hosts differ in it.

    Example:
        >>> Layout.of([0, 1, 0, 1])  # dealt round-robin over two hosts
        Layout(order=(0, 2, 1, 3), local_size=2)
    """

    order: tuple[int, ...]
    local_size: int

    @classmethod
    def of(cls, hosts: Sequence[int]) -> Layout:
        """Returns the layout of members on these hosts; any numbers that tell hosts apart."""
        order = tuple(sorted(range(len(hosts)), key=lambda member: hosts[member]))
        sizes = {len(list(members)) for _, members in itertools.groupby(order, key=lambda member: hosts[member])}
        return cls(order, sizes.pop() if len(sizes) == 1 else 0)

    def partners(self, member: int) -> list[int]:
        """Returns the members with which this one exchanges data in a collective of all of them."""
        found = partners(self.order.index(member), len(self.order), self.local_size)
        return sorted(self.order[position] for position in found)


def chunk_bounds(count: int, world_size: int) -> list[tuple[int, int]]:
    """Returns the bounds of each chunk; the first `count % world_size` chunks hold one more than the others.

    >>> chunk_bounds(8, 3)
    [(0, 3), (3, 6), (6, 8)]
    """
    base, extra = divmod(count, world_size)
    begins = [index * base + min(index, extra) for index in range(world_size + 1)]
    return list(itertools.pairwise(begins))


def choose_all_reduce(num_bytes: int, size: int, local_size: int, wanted: str = "auto") -> str:
    """Returns the algorithm of an all_reduce; `wanted` is TFRING_ALGORITHM, followed wherever it can be.

    >>> choose_all_reduce(1 << 20, 8, 8), choose_all_reduce(1 << 20, 8, 4), choose_all_reduce(1000, 8, 4)
    ('ring', 'two_level', 'flat')
    """
    chosen = library.core().tfring_choose(library.ALGORITHMS[wanted], num_bytes, size, local_size)
    return library.ALGORITHM_NAMES[chosen]


def choose_rooted(num_bytes: int, size: int) -> str:
    """Returns the algorithm of a broadcast or a reduce.

    >>> choose_rooted(1000, 8), choose_rooted(1 << 20, 8), choose_rooted(1 << 18, 64), choose_rooted(1 << 19, 64)
    ('flat', 'ring', 'tree', 'ring')
    """
    return library.ALGORITHM_NAMES[library.core().tfring_choose_rooted(num_bytes, size)]


def all_reduce_choices(size: int, local_size: int, wanted: str = "auto") -> list[tuple[int | None, str]]:
    """Returns `(most bytes, algorithm)` of `all_reduce`; None: no limit.

    >>> all_reduce_choices(4, 2), all_reduce_choices(4, 1)
    ([(16384, 'flat'), (None, 'two_level')], [(16384, 'flat'), (524291, 'halving'), (None, 'ring')])
    """

    def choose(num_bytes: int) -> str:
        return choose_all_reduce(num_bytes, size, local_size, wanted)

    def is_another(num_bytes: int) -> bool:
        return choose(num_bytes) != algorithm

    found: list[tuple[int | None, str]] = []
    begin, last = 0, choose(_BEYOND)
    while (algorithm := choose(begin)) != last:
        begin = bisect.bisect(range(_BEYOND), False, begin, key=is_another)
        found.append((begin - 1, algorithm))
    return [*found, (None, last)]


def partners(position: int, size: int, local_size: int) -> list[int]:
    """The positions with which this one exchanges anything in a collective of its group.

    >>> partners(0, 3, 1), len(partners(0, 64, 1))
    ([1, 2], 11)
    """
    if size <= FLAT_MEMBERS:
        return [other for other in range(size) if other != position]
    distances = list(itertools.takewhile(lambda d: d < size, (2**k for k in itertools.count())))
    found = {(position + sign * distance) % size for distance in distances for sign in (1, -1)}
    if local_size > 1:
        host, local = divmod(position, local_size)
        for step in (1, -1):
            found.add(host * local_size + (local + step) % local_size)
            found.add((host + step) % (size // local_size) * local_size + local)
    return sorted(found - {position})
