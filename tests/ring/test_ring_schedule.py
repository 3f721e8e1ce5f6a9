"""The schedules: each is right as a table, the native code computes the same, and partners name all they need."""

import collections
import ctypes
import itertools
import math
import random

import pytest
import schedule_tables
from native import core
from schedule_tables import Step

from tfring.ring import library, schedule
from tfring.ring.schedule import Layout

SIZES = (*range(1, 21), 33)
MAX_STEPS = 256
EACH = (
    "ring_all_reduce",
    "ring_all_gather",
    "ring_reduce_scatter",
    "halving_all_reduce",
    "flat_all_gather",
    "bruck_all_gather",
)
ROOTED = ("ring_broadcast", "ring_reduce", "tree_broadcast", "tree_reduce", "flat_broadcast")


def local_sizes(size):
    """Returns the numbers of members a host that divide `size`."""
    return [local for local in range(1, size + 1) if size % local == 0]


def native_table(which, position, size, more=0):
    table = (ctypes.c_int32 * 5 * MAX_STEPS)()
    count = core.tfring_schedule(which.encode(), position, size, more, table, MAX_STEPS)
    assert count <= MAX_STEPS
    return [Step(*(None if each < 0 else each for each in row[:4]), bool(row[4])) for row in table[:count]]


@pytest.mark.parametrize("which", EACH)
@pytest.mark.parametrize("size", SIZES)
def test_native_code_follows_the_table(which, size):
    for position in range(size):
        assert native_table(which, position, size) == getattr(schedule_tables, which)(position, size)


@pytest.mark.parametrize("which", ROOTED)
@pytest.mark.parametrize("size", SIZES)
def test_native_code_follows_the_table_of_each_root(which, size):
    for position, root in itertools.product(range(size), range(size)):
        assert native_table(which, position, size, root) == getattr(schedule_tables, which)(position, size, root)


@pytest.mark.parametrize("size", SIZES)
def test_native_code_follows_the_table_of_two_levels(size):
    for local in local_sizes(size):
        for position in range(size):
            expected = schedule_tables.two_level_all_reduce(position, size, local)
            assert native_table("two_level_all_reduce", position, size, local) == expected


@pytest.mark.parametrize("size", SIZES)
def test_native_code_has_the_same_partners(size):
    for local, position in itertools.product((0, *local_sizes(size)), range(size)):
        found = (ctypes.c_int32 * size)()
        count = core.tfring_partners(position, size, local, found)
        assert found[:count] == schedule.partners(position, size, local)


@pytest.mark.parametrize("wanted", library.ALGORITHMS)
def test_native_code_makes_the_same_choice(wanted):
    for size in SIZES:
        limit = schedule_tables.SMALL_BYTES // size
        middle = (schedule_tables.HALVING_BYTES + 1) * size - 1
        shared = (schedule_tables.HALVING_SHARED_BYTES + 1) * size - 1
        numbers = (0, 1, limit, limit + 1, shared, shared + 1, middle, middle + 1, 1 << 30, 1 << 40)
        for local, num_bytes in itertools.product((0, *local_sizes(size)), numbers):
            native = schedule.choose_all_reduce(num_bytes, size, local, wanted)
            assert native == schedule_tables.choose_all_reduce(num_bytes, size, local, wanted)


@pytest.mark.parametrize("wanted", library.ALGORITHMS)
def test_choices_in_words_are_those_made(wanted):
    for size, num_bytes in itertools.product(SIZES, (0, 100, 3000, 20_000, 65_536, 65_537, 400_000, 1 << 40)):
        for local in (0, *local_sizes(size)):
            choices = schedule.all_reduce_choices(size, local, wanted)
            said = next(algorithm for limit, algorithm in choices if limit is None or num_bytes <= limit)
            assert said == schedule.choose_all_reduce(num_bytes, size, local, wanted)


@pytest.mark.parametrize("wanted", library.ALGORITHMS)
def test_what_is_wanted_is_what_is_chosen_where_it_can_be(wanted):
    def chosen(num_bytes, size, local):
        return schedule.choose_all_reduce(num_bytes, size, local, wanted)

    small, middle, large = 8, 1 << 17, 1 << 26
    expected = {
        #            8 on 2 hosts         8 on 1 host     32 on 4 hosts
        "auto": (("flat", "two_level"), ("flat", "ring"), ("bruck", "two_level")),
        "flat": (("flat", "flat"), ("flat", "flat"), ("bruck", "bruck")),
        "bruck": (("bruck", "bruck"), ("bruck", "bruck"), ("bruck", "bruck")),
        "halving": (("halving", "halving"), ("halving", "halving"), ("halving", "halving")),
        "ring": (("ring", "ring"), ("ring", "ring"), ("ring", "ring")),
        "two_level": (("two_level", "two_level"), ("ring", "ring"), ("two_level", "two_level")),
    }[wanted]
    for (size, local), pair in zip(((8, 4), (8, 8), (32, 8)), expected, strict=True):
        assert (chosen(small, size, local), chosen(large, size, local)) == pair
    if wanted == "auto":
        assert [chosen(middle, 32, local) for local in (1, 8, 32)] == ["halving", "two_level", "halving"]
        assert [chosen(middle, 8, local) for local in (0, 1, 2, 8)] == ["halving", "halving", "two_level", "ring"]
        assert [chosen(1 << 20, 30, local) for local in (0, 1)] == ["ring", "halving"]
    assert chosen(large, 6, 1) != "two_level"  # as many hosts as members, or hosts that differ


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [0, 1, 7, 8, 1000, 2**33 + 5])
def test_chunks_are_a_partition_and_native_cuts_alike(size, count):
    bounds = schedule.chunk_bounds(count, size)
    begin, end = ctypes.c_int64(), ctypes.c_int64()
    for index, bound in enumerate(bounds):
        core.tfring_chunk(count, size, index, begin, end)
        assert (begin.value, end.value) == bound
    assert bounds[0][0] == 0 and bounds[-1][1] == count
    assert all(a[1] == b[0] for a, b in itertools.pairwise(bounds))
    sizes = [end - begin for begin, end in bounds]
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


def test_small_is_small_on_both_sides():
    for size in SIZES:
        limit = schedule_tables.SMALL_BYTES // size
        for num_bytes in (0, 1, limit - 1, limit, limit + 1, 10 * limit):
            native = bool(core.tfring_is_small(num_bytes, size))
            assert native == schedule_tables.is_small(num_bytes, size)


class Message:
    """A step's send or receive, the receive whose bytes it needs, and how many delays it ends."""

    def __init__(self, peer, chunk, reduce=False, needs=None):
        self.peer, self.chunk, self.reduce, self.needs = peer, chunk, reduce, needs
        self.over = False
        self.depth = 0


def plan(steps):
    """As the native code: sends and receives by peer, each in its order; a send needs what last brought its chunk."""
    sends, recvs = collections.defaultdict(collections.deque), collections.defaultdict(collections.deque)
    brought_by = {}
    for step in steps:
        if step.to is not None:
            sends[step.to].append(Message(step.to, step.send, needs=brought_by.get(step.send)))
        if step.from_ is not None:
            recv = Message(step.from_, step.recv, step.reduce, brought_by.get(step.recv) if step.reduce else None)
            recvs[step.from_].append(recv)
            brought_by[step.recv] = recv
    return sends, recvs


def play(tables, held, delay=lambda position, peer: 1, seed=None):
    """Runs tables on sets of contributions, held[position][chunk], until nothing moves; then nothing may be left.

    Each pair of positions has a queue each way. Whoever can move does, in an order drawn from `seed`: None lets all
    send as early as they can. Returns what is held, and the longest chain of messages each of which needs the one
    before, where a message from a position to a peer counts as `delay` says.
    """
    plans = [plan(steps) for steps in tables]
    wires = collections.defaultdict(collections.deque)
    longest = 0

    def send(position, peer):
        queue = plans[position][0][peer]
        if not queue or (queue[0].needs is not None and not queue[0].needs.over):
            return False
        message = queue.popleft()
        depth = delay(position, peer) + (message.needs.depth if message.needs else 0)
        wires[position, peer].append((message.chunk, held[position][message.chunk], depth))
        return True

    def receive(position, peer):
        nonlocal longest
        queue = plans[position][1][peer]
        if not queue or not wires[peer, position] or (queue[0].needs is not None and not queue[0].needs.over):
            return False
        message = queue.popleft()
        chunk, came, depth = wires[peer, position].popleft()
        assert chunk == message.chunk, "each receives what the other sends, in its order"
        if message.reduce:
            assert not held[position][chunk] & came, "nothing is added twice"
            came = held[position][chunk] | came
        held[position][chunk] = came
        message.over = True
        message.depth = max(depth, message.needs.depth if message.needs else 0)
        longest = max(longest, message.depth)
        return True

    moves = [(send, p, peer) for p, (sends, _) in enumerate(plans) for peer in sends]
    moves += [(receive, p, peer) for p, (_, recvs) in enumerate(plans) for peer in recvs]
    shuffle = (lambda _: None) if seed is None else random.Random(seed).shuffle
    moved = True
    while moved:
        shuffle(moves)
        moved = any([move(position, peer) for move, position, peer in moves])
    left = [queue for sides in plans for side in sides for queue in side.values() if queue]
    assert not left, "all wait for each other"
    assert not any(wires.values()), "all that is sent is received"
    return held, longest


def contributions(size, num_chunks):
    """Every position's own to every chunk."""
    return [[frozenset({p})] * num_chunks for p in range(size)]


def blocks(size):
    """Chunk p at position p."""
    return [[frozenset({c}) if c == p else frozenset() for c in range(size)] for p in range(size)]


@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize("size", SIZES)
def test_all_reduce_adds_every_contribution_once(size, seed):
    held, delays = play(
        [schedule_tables.ring_all_reduce(p, size) for p in range(size)], contributions(size, size), seed=seed
    )
    assert all(chunk == set(range(size)) for row in held for chunk in row)
    assert delays == 2 * (size - 1)


@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize("size", SIZES)
def test_halving_and_doubling_adds_every_contribution_once(size, seed):
    tables = [schedule_tables.halving_all_reduce(p, size) for p in range(size)]
    chunks = schedule_tables.halving_chunks(size)
    held, delays = play(tables, contributions(size, chunks), seed=seed)
    assert all(chunk == set(range(size)) for row in held for chunk in row)
    assert delays == 2 * math.ceil(math.log2(size))
    for p, steps in enumerate(tables):
        has_extra = p >= chunks or p + chunks < size
        assert sum(step.to is not None for step in steps) <= 2 * (chunks - 1) + chunks * has_extra


@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize("size", SIZES)
def test_two_levels_add_every_contribution_once(size, seed):
    for local in local_sizes(size):
        tables = [schedule_tables.two_level_all_reduce(p, size, local) for p in range(size)]
        network = play(
            tables,
            contributions(size, size),
            lambda p, peer, local=local: int(p // local != peer // local),
            seed,
        )
        held, delays = network
        assert all(chunk == set(range(size)) for row in held for chunk in row)
        assert delays == 2 * (size // local - 1), "of the network"


@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize("size", SIZES)
def test_reduce_scatter_leaves_position_p_with_chunk_p(size, seed):
    tables = [schedule_tables.ring_reduce_scatter(p, size) for p in range(size)]
    held, _ = play(tables, contributions(size, size), seed=seed)
    assert all(held[p][p] == set(range(size)) for p in range(size))


@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize("which", ["ring_all_gather", "flat_all_gather", "bruck_all_gather"])
@pytest.mark.parametrize("size", SIZES)
def test_all_gather_brings_every_chunk_everywhere(which, size, seed):
    tables = [getattr(schedule_tables, which)(p, size) for p in range(size)]
    held, delays = play(tables, blocks(size), seed=seed)
    assert all(held[p][c] == {c} for p in range(size) for c in range(size))
    rounds = math.ceil(math.log2(size))
    most = {"ring_all_gather": size - 1, "flat_all_gather": min(1, size - 1), "bruck_all_gather": rounds}[which]
    assert delays <= most
    for steps in tables:
        assert len(steps) == size - 1, "each chunk comes once"
        if which == "bruck_all_gather":
            assert len({step.to for step in steps}) == len({step.from_ for step in steps}) == rounds


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("which", ["ring_broadcast", "tree_broadcast", "flat_broadcast"])
@pytest.mark.parametrize("size", SIZES)
def test_broadcast_brings_the_roots_everywhere_and_word_back(which, size, seed):
    for root in range(size):
        tables = [getattr(schedule_tables, which)(p, size, root) for p in range(size)]
        held = [[frozenset({"value"}) if p == root else frozenset(), frozenset({p})] for p in range(size)]
        held, delays = play(tables, held, seed=seed)
        assert all(chunk == {"value"} for chunk, _ in held)
        if which == "tree_broadcast":
            assert held[root][1] == set(range(size)), "each one's word"
            assert delays <= 2 * math.ceil(math.log2(size))
        else:
            words = [step.from_ for step in tables[root] if step.recv == 1]
            # Round the ring the last one's word is enough: all others have passed the value on.
            expected = {(root - 1) % size} if which == "ring_broadcast" else set(range(size)) - {root}
            assert sorted(words) == sorted(expected if size > 1 else ())
        for p in set(range(size)) - {root}:
            assert tables[p][0] == (None, None, tables[p][0].from_, 0, False), "it comes before it is passed on"


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("which", ["ring_reduce", "tree_reduce"])
@pytest.mark.parametrize("size", SIZES)
def test_reduce_brings_every_contribution_to_each_root_once(which, size, seed):
    for root in range(size):
        tables = [getattr(schedule_tables, which)(p, size, root) for p in range(size)]
        held, delays = play(tables, contributions(size, 1), seed=seed)
        assert delays <= (size - 1 if which == "ring_reduce" else math.ceil(math.log2(size)))
        assert held[root][0] == set(range(size))
        assert sum(step.to is not None for steps in tables for step in steps) == size - 1


@pytest.mark.parametrize("size", SIZES)
def test_partners_name_all_that_a_collective_needs(size):
    """And each other: a link has two ends."""
    for local in local_sizes(size):
        named = [set(schedule.partners(p, size, local)) for p in range(size)]
        for p in range(size):
            assert p not in named[p] and all(p in named[other] for other in named[p])
            tables = [getattr(schedule_tables, which)(p, size) for which in EACH if "flat" not in which]
            tables += [getattr(schedule_tables, which)(p, size, root) for which in ROOTED[:4] for root in range(size)]
            tables += [schedule_tables.two_level_all_reduce(p, size, local)] if local > 1 else []
            if size <= schedule_tables.FLAT_MEMBERS:  # the engine takes no flat table among more
                tables += [schedule_tables.flat_all_gather(p, size)]
                tables += [schedule_tables.flat_broadcast(p, size, root) for root in range(size)]
            needed = {peer for steps in tables for step in steps for peer in (step.to, step.from_)} - {None}
            assert needed <= named[p]
    if size > 16:
        assert len(schedule.partners(0, size, 1)) <= 2 * math.ceil(math.log2(size))


def through_interfaces(tables, host_of):
    """Counts the buffers that each host sends to others, where each chunk is one `size`-th."""
    sent = collections.Counter()
    for p, steps in enumerate(tables):
        for step in steps:
            if step.to is not None and host_of(p) != host_of(step.to):
                sent[host_of(p)] += 1
    return {host: number / len(tables) for host, number in sent.items()}


@pytest.mark.parametrize(("hosts", "local"), [(2, 2), (2, 8), (3, 5), (4, 2), (4, 4), (8, 2)])
def test_two_levels_send_less_through_each_interface(hosts, local):
    size = hosts * local
    ring = [schedule_tables.ring_all_reduce(p, size) for p in range(size)]
    two_level = [schedule_tables.two_level_all_reduce(p, size, local) for p in range(size)]
    expected = dict.fromkeys(range(hosts), 2 * (hosts - 1) / hosts)
    assert through_interfaces(two_level, lambda p: p // local) == pytest.approx(expected)
    expected = dict.fromkeys(range(hosts), 2 * (size - 1) / size)
    assert through_interfaces(ring, lambda p: p // local) == pytest.approx(expected)
    # Had the ring gone from rank to rank, dealt round-robin, every one of its edges would cross the network.
    expected = dict.fromkeys(range(hosts), local * 2 * (size - 1) / size)
    assert through_interfaces(ring, lambda p: p % hosts) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("hosts", "order", "local_size"),
    [
        ([0], (0,), 1),
        ([7, 7, 7], (0, 1, 2), 3),  # one host
        ([0, 1, 0, 1, 0, 1], (0, 2, 4, 1, 3, 5), 3),  # dealt round-robin
        ([0, 0, 1, 1], (0, 1, 2, 3), 2),  # in blocks
        ([1, 0, 2], (1, 0, 2), 1),  # a host each
        ([0, 1, 1], (0, 1, 2), 0),  # hosts that differ
        ([1, 0, 1, 0, 1], (1, 3, 0, 2, 4), 0),
    ],
)
def test_layout_puts_those_of_a_host_side_by_side(hosts, order, local_size):
    assert Layout.of(hosts) == Layout(order, local_size)


def test_partners_of_members_are_those_of_their_positions():
    hosts = [member % 4 for member in range(32)]  # round-robin over four
    layout = Layout.of(hosts)
    assert layout.local_size == 8
    for member in range(32):
        position = layout.order.index(member)
        expected = sorted(layout.order[other] for other in schedule.partners(position, 32, 8))
        assert layout.partners(member) == expected
        assert all(member in layout.partners(other) for other in expected)
