"""The schedules of native/schedule.cc as tables, drawn in tfring/ring/schedule.py, and the choices between them.

A table says, for one position, what it does in each step: which chunk it sends to which position, which chunk it
receives from which, and whether it adds or copies it.
"""

import itertools
from typing import NamedTuple

SMALL_BYTES = 64 * 1024
FLAT_MEMBERS = 16
HALVING_BYTES = 128 * 1024
HALVING_SHARED_BYTES = 16 * 1024
TREE_BYTES = 4 * 1024


def is_small(num_bytes: int, world_size: int) -> bool:
    """Returns True if an all_reduce of this size is flat, or Bruck's among many.

    >>> is_small(4096, 2), is_small(1 << 20, 2)
    (True, False)
    """
    return num_bytes * world_size <= SMALL_BYTES


def choose_all_reduce(num_bytes: int, size: int, local_size: int, wanted: str = "auto") -> str:
    """Returns the algorithm of an all_reduce; `wanted` is TFRING_ALGORITHM, followed wherever it can be.

    >>> choose_all_reduce(1 << 20, 8, 8), choose_all_reduce(1 << 20, 8, 4), choose_all_reduce(1000, 8, 4)
    ('ring', 'two_level', 'flat')
    """
    two_level = 1 < local_size < size
    if wanted == "two_level":
        return wanted if two_level else "ring"
    if wanted in ("ring", "halving"):
        return wanted
    if wanted != "auto" or is_small(num_bytes, size):
        flat = wanted != "bruck" and size <= FLAT_MEMBERS
        return "flat" if flat else "bruck"
    if two_level:
        return "two_level"
    waits_long = size > FLAT_MEMBERS or (local_size <= 1 and size > 2)
    most = HALVING_BYTES if local_size else HALVING_SHARED_BYTES
    return "halving" if waits_long and num_bytes // size <= most else "ring"


def choose_rooted(num_bytes: int, size: int) -> str:
    """Returns the algorithm of a broadcast or a reduce.

    >>> choose_rooted(1000, 8), choose_rooted(1 << 20, 8), choose_rooted(1 << 18, 64), choose_rooted(1 << 19, 64)
    ('flat', 'ring', 'tree', 'ring')
    """
    if size <= FLAT_MEMBERS:
        return "flat" if is_small(num_bytes, size) else "ring"
    return "tree" if num_bytes // size <= TREE_BYTES else "ring"


def choose_row_sums(sent: int, summed: int, size: int, wanted: str = "auto") -> str:
    """Returns the algorithm of a sum of rows, by the bytes of all members and of the sums the last time.

    By gathering a member sends (N - 1) / N of `sent`, its own ids once to each; by owner 1 / N of that, and (N - 1) / N
    of the sums. The second exchange costs a delay, which is worth `SMALL_BYTES`.

    >>> choose_row_sums(sent=4_000_000, summed=1_500_000, size=4), choose_row_sums(4_000_000, 3_500_000, 4)
    ('owner', 'gather')
    """
    if wanted != "auto":
        return wanted
    saved = (sent - sent // size - summed) // size * (size - 1)
    return "owner" if saved > SMALL_BYTES else "gather"


class Step(NamedTuple):
    """One step of one member. `None` where it does nothing."""

    to: int | None
    send: int | None
    from_: int | None
    recv: int | None
    reduce: bool = False


def ring_all_reduce(position: int, size: int) -> list[Step]:
    """Returns the steps of a reduce-scatter, then an all-gather.

    >>> [tuple(step) for step in ring_all_reduce(0, 2)]
    [(1, 0, 1, 1, True), (1, 1, 1, 0, False)]
    """
    following, previous = (position + 1) % size, (position - 1) % size
    return [
        Step(following, (position - s) % size, previous, (position - s - 1) % size, s < size - 1)
        for s in range(2 * (size - 1))
    ]


def ring_all_gather(position: int, size: int) -> list[Step]:
    """Returns the steps of an all-gather; position p contributes chunk p."""
    following, previous = (position + 1) % size, (position - 1) % size
    return [Step(following, (position - s) % size, previous, (position - s - 1) % size) for s in range(size - 1)]


def ring_reduce_scatter(position: int, size: int) -> list[Step]:
    """Returns the steps of a reduce-scatter; position p ends with the sum of chunk p."""
    following, previous = (position + 1) % size, (position - 1) % size
    return [
        Step(following, (position - s - 1) % size, previous, (position - s - 2) % size, True) for s in range(size - 1)
    ]


def ring_broadcast(position: int, size: int, root: int) -> list[Step]:
    """Returns the steps of a broadcast from the root round to the last.

    Chunk 0 is the full buffer; chunk 1 is the last one's acknowledgement to the root.

    N = 3, root 0:  0 ──0──► 1 ──0──► 2 ──1──► 0
    """
    following, previous = (position + 1) % size, (position - 1) % size
    if size == 1:
        return []
    if position == root:
        return [Step(following, 0, None, None), Step(None, None, previous, 1)]
    return [Step(None, None, previous, 0), Step(following, 1 if following == root else 0, None, None)]


def ring_reduce(position: int, size: int, root: int) -> list[Step]:
    """Returns the steps of a reduction to the root, which ends with the sum of the one chunk.

    N = 3, root 0:  1 ──► 2 (adds) ──► 0 (adds)
    """
    following, previous = (position + 1) % size, (position - 1) % size
    steps = []
    if size > 1 and previous != root:
        steps.append(Step(None, None, previous, 0, True))
    if size > 1 and position != root:
        steps.append(Step(following, 0, None, None))
    return steps


def _tree(position: int, size: int, root: int) -> tuple[int | None, list[int]]:
    """Returns a position's parent in a binomial tree and its children, the nearest first.

    >>> _tree(0, 6, 0), _tree(4, 6, 0), _tree(2, 6, 1)
    ((None, [1, 2, 4]), (0, [5]), (1, []))
    """
    member = (position - root) % size
    distances = [1 << k for k in range(size.bit_length()) if not member % (2 << k)]
    children = [(position + distance) % size for distance in distances if member + distance < size]
    return (None if member == 0 else (position - (member & -member)) % size), children


def tree_broadcast(position: int, size: int, root: int) -> list[Step]:
    """Returns the steps of a broadcast by a binomial tree; chunk 1 is a member's word and that of all below it.

    >>> [tuple(step) for step in tree_broadcast(2, 4, 0)]
    [(None, None, 0, 0, False), (3, 0, None, None, False), (None, None, 3, 1, True), (0, 1, None, None, False)]
    """
    parent, children = _tree(position, size, root)
    steps = [Step(child, 0, None, None) for child in reversed(children)]
    steps += [Step(None, None, child, 1, True) for child in reversed(children)]
    return steps if parent is None else [Step(None, None, parent, 0), *steps, Step(parent, 1, None, None)]


def tree_reduce(position: int, size: int, root: int) -> list[Step]:
    """Returns the steps of a reduction by the same tree."""
    parent, children = _tree(position, size, root)
    steps = [Step(None, None, child, 0, True) for child in children]
    return steps if parent is None else [*steps, Step(parent, 0, None, None)]


def flat_all_gather(position: int, size: int) -> list[Step]:
    """Returns the steps of a flat all-gather; each begins with another peer, so that not all send to one at once."""
    return [
        Step((position + s) % size, position, (position - s) % size, (position - s) % size) for s in range(1, size)
    ]


def flat_broadcast(position: int, size: int, root: int) -> list[Step]:
    """Returns the steps of a flat broadcast; chunk 1 is each one's acknowledgement."""
    if position == root:
        return [Step((position + s) % size, 0, (position + s) % size, 1) for s in range(1, size)]
    return [Step(None, None, root, 0), Step(root, 1, None, None)]


def bruck_all_gather(position: int, size: int) -> list[Step]:
    """Returns the steps of Bruck's all-gather, whose distance doubles from round to round."""
    steps = []
    distance = 1
    while distance < size:
        to, source = (position + distance) % size, (position - distance) % size
        for j in range(min(distance, size - distance)):
            steps.append(Step(to, (position - j) % size, source, (position - distance - j) % size))
        distance *= 2
    return steps


def halving_chunks(size: int) -> int:
    """Returns the largest power of two up to `size`."""
    return 1 << size.bit_length() - 1


def halving_all_reduce(position: int, size: int) -> list[Step]:
    """Returns the steps of recursive halving and doubling; those beyond a power of two hand all to one of the others.

    >>> [tuple(step) for step in halving_all_reduce(2, 3)]
    [(0, 1, None, None, False), (0, 0, None, None, False), (None, None, 0, 0, False), (None, None, 0, 1, False)]
    """
    core = halving_chunks(size)
    if position >= core:
        peer = position - core
        sent = [Step(peer, peer ^ j, None, None) for j in reversed(range(core))]
        return sent + [Step(None, None, peer, peer ^ j) for j in range(core)]
    extra = position + core
    steps = [Step(None, None, extra, position ^ j, True) for j in reversed(range(core)) if extra < size]
    distances = [1 << k for k in range(core.bit_length() - 1)]
    for distance in reversed(distances):
        peer = position ^ distance
        steps += [Step(peer, peer ^ j, peer, position ^ j, True) for j in reversed(range(distance))]
    for distance in distances:
        peer = position ^ distance
        steps += [Step(peer, position ^ j, peer, peer ^ j) for j in range(distance)]
    return steps + [Step(extra, position ^ j, None, None) for j in range(core) if extra < size]


def two_level_all_reduce(position: int, size: int, local_size: int) -> list[Step]:
    """Returns the steps on both levels; chunk l * H + h is part h of the sum of local members l of the H hosts."""
    hosts = size // local_size
    host, local = divmod(position, local_size)
    inside = [host * local_size + (local + step) % local_size for step in (1, -1)]
    across = [(host + step) % hosts * local_size + local for step in (1, -1)]
    steps = []
    # Parts in the order in which the rings across hosts need and return them.
    for s, h in itertools.product(range(local_size - 1), ((host - k) % hosts for k in range(hosts))):
        send, recv = ((local - s - k) % local_size * hosts + h for k in (1, 2))
        steps.append(Step(inside[0], send, inside[1], recv, True))
    for s in range(2 * (hosts - 1)):
        send, recv = (local * hosts + (host - s - k) % hosts for k in (0, 1))
        steps.append(Step(across[0], send, across[1], recv, s < hosts - 1))
    for s, h in itertools.product(range(local_size - 1), ((host + 1 - k) % hosts for k in range(hosts))):
        send, recv = ((local - s - k) % local_size * hosts + h for k in (0, 1))
        steps.append(Step(inside[0], send, inside[1], recv))
    return steps
