"""Calls that differ where nothing is exchanged, circles of waits, what only looks so; a short run of fuzz_calls.py."""

import time

import fuzz_calls
import numpy as np
import pytest
import ranks


@pytest.mark.parametrize(("world_size", "seed", "rounds"), [(2, 3, 8), (4, 7, 12), (7, 1, 4)])
def test_one_rank_calls_something_else(world_size, seed, rounds):
    outcomes = ranks.run(world_size, fuzz_calls.play, seed, rounds, seconds=120)
    assert not fuzz_calls.unexpected(outcomes, limit_seconds=1.0)


def receive_first(cluster):
    with ranks.join(cluster) as ring:
        ring.receive((cluster.rank + 1) % cluster.world_size, np.float32)


def groups_in_a_circle(cluster):
    with ranks.join(cluster) as ring:
        for first in (cluster.rank, (cluster.rank + 2) % 3):  # each begins with the next rank
            ring.group([first, (first + 1) % 3], f"pair {first}").all_reduce(np.ones(3))


def test_a_circle_of_waits_is_named_with_its_members():
    for failed in ranks.try_run(2, receive_first):
        assert failed.kind == "MismatchError" and failed.message.count('called receive "send"') == 2, failed.message
    for task in (receive_first, groups_in_a_circle):
        for failed in ranks.try_run(3, task):
            assert failed.kind == "MismatchError", failed
            assert "wait for each other in a circle" in failed.message, failed.message
            assert all(f" rank {rank}" in failed.message.partition(". ")[0] for rank in range(3)), failed.message


def calls_that_wait_long(cluster):
    """Legal, though each asks the others why it waits: both send before they receive, groups wait for a late rank."""
    with ranks.join(cluster) as ring:
        if cluster.rank < 2:
            ring.send(np.full(3, cluster.rank), 1 - cluster.rank)
            time.sleep(1.0 * cluster.rank)
            other = ring.receive(1 - cluster.rank, np.int64)
            assert other[0] == 1 - cluster.rank
        if cluster.rank == 2:
            time.sleep(1.5)
        if cluster.rank > 0:
            ring.group([1, 2], "late").all_reduce(np.ones(2))
        ring.broadcast(np.ones(5), root=1)
        if cluster.rank == 0:
            time.sleep(1.0)
        return float(ring.all_reduce(np.ones(300_000))[-1])


def test_ranks_that_wait_long_for_each_other_may():
    assert ranks.run(3, calls_that_wait_long) == [3.0] * 3


def barrier_in_an_except(cluster):
    control, gradients = (ranks.join(cluster, name=f"{cluster.ring} {name}") for name in ("control", "gradients"))
    with control, gradients:
        control.barrier()
        try:
            if cluster.rank == 1:
                raise ValueError("of this rank alone")
            gradients.all_reduce(np.ones(10))
        except ValueError:
            control.barrier(name="in the except")


def test_waits_in_different_rings_are_a_disagreement():
    with ranks.Group(2, environ={"TFRING_STALL_WARNING_SECONDS": "1"}) as group:
        group.start(2, barrier_in_an_except)
        for failed in group.outcomes():
            assert failed.kind == "MismatchError", failed
            assert "wait for each other in different rings" in failed.message, failed.message
            assert "gradients" in failed.message and "control" in failed.message, failed.message
            assert "is slow" not in group.logs()


def computes_beside(cluster):
    """Waits in one ring while another thread computes what the other rank waits for in the second."""
    import threading

    first, second = (ranks.join(cluster, name=f"{cluster.ring} {name}") for name in ("first", "second"))

    def compute_and_call():
        end = time.monotonic() + 4
        while time.monotonic() < end:
            np.dot(np.ones(1000), np.ones(1000))
        (second if cluster.rank == 0 else first).barrier()

    with first, second:
        first.barrier()
        beside = threading.Thread(target=compute_and_call)
        beside.start()
        (first if cluster.rank == 0 else second).barrier()
        beside.join()
        return "met"


def test_a_rank_that_computes_may_yet_come():
    with ranks.Group(2, environ={"TFRING_STALL_WARNING_SECONDS": "2"}) as group:
        group.start(2, computes_beside)
        assert group.outcomes() == ["met", "met"]
