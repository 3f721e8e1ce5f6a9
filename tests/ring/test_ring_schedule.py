"""The schedules: each is right as a table, and the native code computes the same table."""

import ctypes
import itertools

import pytest

from tfring.ring import library, schedule

WORLD_SIZES = (1, 2, 3, 4, 5, 8, 13)


def native_table(which, rank, world_size, root=0):
    table = (ctypes.c_int32 * 3 * 64)()
    count = library.core().tfring_schedule(which.encode(), rank, world_size, root, table, 64)
    none = {-1: None}
    return [(none.get(send, send), none.get(recv, recv), bool(add)) for send, recv, add in table[:count]]


@pytest.mark.parametrize("which", ["all_reduce", "all_gather", "reduce_scatter"])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_native_code_follows_the_table(which, world_size):
    for rank in range(world_size):
        assert native_table(which, rank, world_size) == getattr(schedule, which)(rank, world_size)


@pytest.mark.parametrize("world_size", WORLD_SIZES[1:])
def test_native_broadcast_follows_the_table(world_size):
    for root in range(world_size):
        for rank in range(world_size):
            assert native_table("broadcast", rank, world_size, root) == schedule.broadcast(rank, world_size, root)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("count", [0, 1, 7, 8, 1000, 2**33 + 5])
def test_chunks_are_a_partition_and_native_cuts_alike(world_size, count):
    bounds = schedule.chunk_bounds(count, world_size)
    begin, end = ctypes.c_int64(), ctypes.c_int64()
    for index, bound in enumerate(bounds):
        library.core().tfring_chunk(count, world_size, index, begin, end)
        assert (begin.value, end.value) == bound
    assert bounds[0][0] == 0 and bounds[-1][1] == count
    assert all(a[1] == b[0] for a, b in itertools.pairwise(bounds))
    sizes = [end - begin for begin, end in bounds]
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


def test_small_is_small_on_both_sides():
    for world_size in WORLD_SIZES:
        limit = schedule.SMALL_BYTES // world_size
        for num_bytes in (0, 1, limit - 1, limit, limit + 1, 10 * limit):
            native = bool(library.core().tfring_is_small(num_bytes, world_size))
            assert native == schedule.is_small(num_bytes, world_size)


def play(tables, held):
    """Runs tables on sets of contributions: held[rank][chunk]. Every rank sends before any receives."""
    for steps in zip(*tables, strict=True):
        sent = [None if step.send is None else held[rank][step.send] for rank, step in enumerate(steps)]
        for rank, step in enumerate(steps):
            if step.recv is None:
                continue
            previous = (rank - 1) % len(steps)
            assert steps[previous].send == step.recv, "a rank receives what its neighbour sends"
            if step.reduce:
                assert not held[rank][step.recv] & sent[previous], "nothing is added twice"
                held[rank][step.recv] = held[rank][step.recv] | sent[previous]
            else:
                held[rank][step.recv] = sent[previous]
    return held


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_all_reduce_adds_every_contribution_once(world_size):
    ranks = range(world_size)
    held = play([schedule.all_reduce(r, world_size) for r in ranks], [[{r} for _ in ranks] for r in ranks])
    assert all(chunk == set(ranks) for row in held for chunk in row)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_reduce_scatter_leaves_rank_r_with_chunk_r(world_size):
    ranks = range(world_size)
    held = play([schedule.reduce_scatter(r, world_size) for r in ranks], [[{r} for _ in ranks] for r in ranks])
    assert all(held[r][r] == set(ranks) for r in ranks)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_all_gather_brings_every_chunk_everywhere(world_size):
    ranks = range(world_size)
    held = [[{c} if c == r else set() for c in ranks] for r in ranks]
    play([schedule.all_gather(r, world_size) for r in ranks], held)
    assert all(held[r][c] == {c} for r in ranks for c in ranks)


@pytest.mark.parametrize("which", ["all_reduce", "all_gather", "reduce_scatter"])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_what_is_sent_is_what_came_last(which, world_size):
    """The native code streams on this: step s + 1 sends the chunk step s received."""
    for rank in range(world_size):
        steps = getattr(schedule, which)(rank, world_size)
        assert all(b.send == a.recv for a, b in itertools.pairwise(steps))
