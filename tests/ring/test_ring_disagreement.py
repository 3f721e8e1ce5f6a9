"""Ranks that do not do the same: an error on every rank that names both sides, never a wrong result."""

import numpy as np
import pytest
import ranks

# What rank 1 does while the others run all_reduce "gradients/0" of float32[1024], and how the error calls it.
ODD_ONE = {
    "another size": (
        lambda ring: ring.all_reduce(np.ones(1000, np.float32), name="gradients/0"),
        'all_reduce "gradients/0" sum float32[1000]',
    ),
    "another shape of the same size": (
        lambda ring: ring.all_reduce(np.ones((32, 32), np.float32), name="gradients/0"),
        'all_reduce "gradients/0" sum float32[32, 32]',
    ),
    "another dtype": (
        lambda ring: ring.all_reduce(np.ones(1024, np.int32), name="gradients/0"),
        'all_reduce "gradients/0" sum int32[1024]',
    ),
    "another operation": (
        lambda ring: ring.all_reduce(np.ones(1024, np.float32), "max", name="gradients/0"),
        'all_reduce "gradients/0" max float32[1024]',
    ),
    "another name": (
        lambda ring: ring.all_reduce(np.ones(1024, np.float32), name="gradients/1"),
        'all_reduce "gradients/1" sum float32[1024]',
    ),
    "another collective": (
        lambda ring: ring.all_gather(np.ones((3, 8), np.float32), name="x"),
        'all_gather "x" float32[3, 8]',
    ),
    "a broadcast": (
        lambda ring: ring.broadcast(np.ones(1024, np.float32), root=1),
        'broadcast "broadcast" from rank 1 float32[1024]',
    ),
    "a barrier": (lambda ring: ring.barrier(name="b"), 'barrier "b"'),
    "much more data": (
        lambda ring: ring.all_reduce(np.ones(3_000_000, np.float32), name="gradients/0"),
        'all_reduce "gradients/0" sum float32[3000000]',
    ),
}


def disagree(cluster, transport, which):
    with ranks.join(cluster, transport=transport) as ring:
        ring.barrier()
        try:
            if cluster.rank == 1:
                ODD_ONE[which][0](ring)
            else:
                ring.all_reduce(np.ones(1024, np.float32), name="gradients/0")
            return "no error", "", ()
        except Exception as error:
            first = error
        with pytest.raises(type(first)) as again:
            ring.barrier()
        concerned = {first.rank, first.other} == {again.value.rank, again.value.other}
        told = first.reason.name, again.value.reason.name, concerned and 1 in (first.rank, first.other), first.call
        return f"{type(first).__name__}: {first}", str(again.value), told


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("which", list(ODD_ONE))
def test_both_sides_are_named_on_every_rank(which, transport):
    for rank, (first, again, told) in enumerate(ranks.run(3, disagree, transport, which)):
        assert told[:3] == ("CALLS_DIFFER", "CALLS_DIFFER", True), told
        assert rank == 1 or told[3] == "gradients/0", told
        assert first.startswith("MismatchError: ranks disagree:"), first
        assert f"rank 1 called {ODD_ONE[which][1]} as collective 2" in first
        assert 'called all_reduce "gradients/0" sum float32[1024] as collective 2' in first
        assert "All ranks must make the same calls in the same order, none of them under `if rank == 0:`" in first
        assert "can no longer be used" in again and "ranks disagree" in again


# Calls that differ in one thing only, for the other kinds.
PAIRS = {
    "gathered rows of another width": (
        lambda ring, odd: ring.all_gather(np.ones((2, 5 if odd else 4)), name="rows"),
        'all_gather "rows" float64[2, 5]',
        'all_gather "rows" float64[2, 4]',
    ),
    "another root": (
        lambda ring, odd: ring.broadcast(np.ones(3), root=int(odd)),
        'broadcast "broadcast" from rank 1 float64[3]',
        'broadcast "broadcast" from rank 0 float64[3]',
    ),
    "scattered rows of another number": (
        lambda ring, odd: ring.reduce_scatter(np.ones((6 + odd, 2))),
        'reduce_scatter "reduce_scatter" sum float64[7, 2]',
        'reduce_scatter "reduce_scatter" sum float64[6, 2]',
    ),
    "nothing to reduce": (
        lambda ring, odd: ring.all_reduce(np.ones(0), name="empty" if odd else "full"),
        'all_reduce "empty" sum float64[0]',
        'all_reduce "full" sum float64[0]',
    ),
    "a long name": (
        lambda ring, odd: ring.all_reduce(np.ones(1), name="x" * 500 + str(odd)),
        'all_reduce "xxxx',
        'all_reduce "xxxx',
    ),
}


def differ(cluster, which):
    # No `with`: closing at once would race with the errors of the others, which is another test's matter.
    ring = ranks.join(cluster)
    try:
        for _ in range(2):  # a broadcast's root may finish the first before the last rank objects
            PAIRS[which][0](ring, cluster.rank == 1)
        return "no error"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("which", list(PAIRS))
@pytest.mark.parametrize("world_size", [2, 7])  # 7: most ranks have it from hearsay
def test_one_difference_is_enough(which, world_size):
    _, odd, even = PAIRS[which]
    for message in ranks.run(world_size, differ, which):
        assert message.startswith("MismatchError: "), message
        assert f"rank 1 called {odd}" in message and f"called {even}" in message, message


def swapped_order(cluster):
    with ranks.join(cluster) as ring:
        names = ["a", "b"] if cluster.rank != 2 else ["b", "a"]
        for name in names:
            ring.all_reduce(np.ones(10), name=name)


def test_another_order_is_named():
    for failed in ranks.try_run(3, swapped_order):
        assert failed.kind == "MismatchError"
        assert 'rank 2 called all_reduce "b"' in failed.message and 'called all_reduce "a"' in failed.message
        assert "as collective 1" in failed.message


def late_failure(cluster):
    """Rank 0 is through with collective 50 and fails in 51 while others may still be in 50."""
    with ranks.join(cluster) as ring:
        for i in range(50):
            total = ring.all_reduce(np.full(20_000, i + cluster.rank))
        with pytest.raises(Exception) as caught:
            ring.all_reduce(np.ones(1), name=str(cluster.rank))
        return float(total[0]), str(caught.value)


def test_collectives_before_the_failure_finish_everywhere():
    for _ in range(5):
        for total, message in ranks.run(4, late_failure):
            assert total == 4 * 49 + 6
            assert "as collective 51" in message and "no longer" not in message


def one_stops_early(cluster, transport):
    with ranks.join(cluster, transport=transport) as ring:
        ring.all_reduce(np.ones(10), name="step 1")
        if cluster.rank != 2:
            ring.all_reduce(np.ones(10), name="step 2")


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_missing_call_is_told_from_a_crash(transport):
    outcomes = ranks.try_run(4, one_stops_early, transport)
    assert outcomes[2] is None
    for rank in (0, 1, 3):
        assert outcomes[rank].kind == "PeerLostError"
        assert "rank 2 left the ring (its script ended?)" in outcomes[rank].message
        assert '"step 2"' in outcomes[rank].message


def one_raises_and_ends(cluster, transport):
    with ranks.join(cluster, transport=transport) as ring:
        ring.all_reduce(np.ones(10), name="step 1")
        if cluster.rank == 2:
            ring.tell_raised(ValueError("disk full"))
        else:
            ring.all_reduce(np.ones(10), name="step 2")


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_an_error_is_told_of_a_rank_that_ends_by_it(transport):
    outcomes = ranks.try_run(4, one_raises_and_ends, transport)
    for rank in (0, 1, 3):
        assert outcomes[rank].kind == "PeerLostError"
        assert outcomes[rank].message.startswith("rank 2 failed while rank "), outcomes[rank].message
        assert outcomes[rank].message.endswith(": ValueError: disk full")


def leave_at_once(cluster, size):
    with ranks.join(cluster) as ring:
        return float(ring.all_reduce(np.full(size, 1.0))[-1])


def test_ranks_that_leave_after_the_last_collective_harm_nobody():
    for size in (1, 100_000):
        for _ in range(10):
            assert ranks.run(4, leave_at_once, size) == [4.0] * 4
