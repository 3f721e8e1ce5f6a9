"""Schedules of the collectives: the chunk that each member sends and receives in each step, and its peers.

The members of a group are ordered so that those of one host are adjacent (`Layout`) and as few edges of a ring as
possible cross the network. The steps are implemented in `native/schedule.cc`, and listed as tables in
`tests/ring/schedule_tables.py`, which the tests run. A step that forwards the data of an earlier step follows it byte
by byte, so it does not wait for the full step.

**Ring**, an all_reduce of a large buffer, cut into N chunks (`chunk_bounds`), N = 3 (`+` adds the received chunk, `=`
copies it):

    step            0        1        2        3
    0 sends         0        2        1        0       to 1
      gets         +2       +1       =0       =2       from 2
    1 sends         1        0        2        1       to 2
      gets         +0       +2       =1       =0       from 0
    2 sends         2        1        0        2       to 0
      gets         +1       +0       =2       =1       from 1

After N - 1 steps position p holds the sum of chunk p + 1 (reduce-scatter); N - 1 more steps pass the sums on
(all-gather). Each member sends 2 (N - 1) / N of the buffer, which is the minimum (Patarasuk and Yuan, 2009,
https://doi.org/10.1016/j.jpdc.2008.09.002), and there are 2 (N - 1) delays.

**Two levels**, H hosts of L members: a ring of L members within each host adds up, then L rings of H members, one for
each local member, reduce one share of the buffer each, and then the rings within the hosts run again. This takes
2 (H - 1) delays of the network instead of 2 (N - 1), and sends 2 (H - 1) / H of the buffer through each host's
interface instead of 2 (N - 1) / N.

    host 0: 0 - 1      0   1     0 - 1
                       |   |
    host 1: 2 - 3      2   3     2 - 3

**Flat**, a small buffer: every member sends its full contribution to every other, and each adds them up in the order
of the members: one delay, N - 1 messages.

**Bruck**, a small buffer among many members: in round k each member sends all data it has to the position 2^k further:
log2 N delays (Bruck et al., 1997, https://doi.org/10.1109/71.642949). N = 5:

    round           0             1                2
    0 sends         0 to 1        0, 4 to 2        0 to 4      (then it has all five)
      gets          4 from 4      3, 2 from 3      1 from 1

An all_gather among more than 16 members gathers the numbers of rows this way, together with the rows if they are few.
Larger rows are gathered this way afterwards, unless all rows together are large: then they use the ring.

**Tree**, a broadcast of a small or medium buffer among many members: the root sends to the position half of the members
further, and each member that has the buffer does the same within its half: log2 N delays (a binomial tree). A member
acknowledges after the members to which it has sent. A reduce runs in the opposite direction and adds. Larger buffers
stream along a chain, which hides its N - 1 delays. N = 6, root 0:

    0 ──► 4 ──► 5
      ──► 2 ──► 3
      ──► 1

**Halving and doubling**, a medium buffer, cut into P chunks, where P is the largest power of two up to N: in each round
a member and the one at half the distance of the previous round exchange the halves of the part that each still adds up,
and then, in the reverse order, the parts of the sum that each has: 2 log2 N delays, and the bytes of a ring (Thakur,
Rabenseifner and Gropp, 2005, https://doi.org/10.1177/1094342005051521). Members beyond the power of two first send
their full buffer to one of the others, and receive the sum at the end. N = 4, with the chunks that member 0 exchanges:

    round           0             1             2             3
    0 sends         3, 2 to 2     1 to 1        0 to 1        0, 1 to 2
      gets          +1, +0        +0            =1            =2, =3

All members hold the same bits with every algorithm. The native code chooses the algorithm; this module queries it.
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
    """Order of the members of a group, with the members of a host adjacent.

    Attributes:
      order: The member at each position.
      local_size: Number of members on each host; 0 if hosts have different numbers.

    Example:
        >>> Layout.of([0, 1, 0, 1])  # dealt round-robin over two hosts
        Layout(order=(0, 2, 1, 3), local_size=2)
    """

    order: tuple[int, ...]
    local_size: int

    @classmethod
    def of(cls, hosts: Sequence[int]) -> Layout:
        """Returns the layout of members on these hosts, given as any numbers that distinguish hosts."""
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
    """Returns the algorithm of an all_reduce. `wanted` is TFRING_ALGORITHM, which is used if it can be.

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
    """Returns pairs `(most bytes, algorithm)` of `all_reduce`; None: no limit.

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
    """Returns the positions with which this one exchanges messages in a collective of its group.

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
