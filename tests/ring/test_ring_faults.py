"""Ranks that die, stand still or are interrupted: every survivor raises in time and names the rank."""

import os
import signal
import threading
import time

import numpy as np
import pytest
import ranks


def reduce_for_ever(cluster, size, transport, timeout_seconds):
    with ranks.join(cluster, transport=transport, timeout_seconds=timeout_seconds) as ring:
        value = np.ones(size, np.float32)
        for step in range(10**9):
            ring.all_reduce(value, name="step")
            if step == 3:
                print("under way", flush=True)


def wait_for_rank_1(cluster, transport):
    """All but rank 1 are inside a collective, rank 1 outside."""
    with ranks.join(cluster, transport=transport, timeout_seconds=1.0) as ring:
        ring.barrier()
        print("under way", flush=True)
        if cluster.rank == 1:
            time.sleep(1000)
        ring.all_reduce(np.ones(4, np.float32), name="alone")


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("size", [16, 4_000_000])
def test_survivors_of_a_killed_rank_raise_at_once(size, transport):
    with ranks.Group(4) as group:
        group.start(4, reduce_for_ever, size, transport, 20)
        for rank in range(4):
            group.wait_for(rank, "under way")
        time.sleep(0.05)
        os.kill(group.pid(2), signal.SIGKILL)
        killed = time.monotonic()
        outcomes = group.outcomes(10, without=(2,))
        assert time.monotonic() - killed < 2.0
        for rank in (0, 1, 3):
            assert outcomes[rank].kind == "PeerLostError", outcomes[rank]
            assert "rank 2 died" in outcomes[rank].message
            assert f'all_reduce "step" sum float32[{size}], collective ' in outcomes[rank].message


def test_a_rank_killed_outside_a_collective_is_missed_inside_one():
    with ranks.Group(3) as group:
        group.start(3, wait_for_rank_1, "shm")
        for rank in range(3):
            group.wait_for(rank, "under way")
        time.sleep(0.2)
        os.kill(group.pid(1), signal.SIGKILL)
        for outcome in group.outcomes(10, without=(1,)):
            assert outcome is None or "rank 1 died" in outcome.message, outcome


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("size", [16, 4_000_000])
def test_a_stopped_rank_is_named_after_the_timeout(size, transport):
    with ranks.Group(4) as group:
        group.start(4, reduce_for_ever, size, transport, 1.0)
        for rank in range(4):
            group.wait_for(rank, "under way")
        os.kill(group.pid(2), signal.SIGSTOP)
        stopped = time.monotonic()
        outcomes = group.outcomes(15, without=(2,))
        assert 0.9 < time.monotonic() - stopped < 6.0
        for rank in (0, 1, 3):
            assert outcomes[rank].kind == "CollectiveTimeoutError", outcomes[rank]
            assert "rank 2 takes no part" in outcomes[rank].message, outcomes[rank]
            assert 'all_reduce "step"' in outcomes[rank].message
        os.kill(group.pid(2), signal.SIGCONT)  # it finds out when it wakes up
        assert group.outcomes(10, without=(0, 1, 3))[2].kind in ("CollectiveTimeoutError", "PeerLostError")


def test_a_rank_that_is_busy_elsewhere_is_named_too():
    with ranks.Group(3) as group:
        group.start(3, wait_for_rank_1, "tcp")
        for outcome in group.outcomes(15, without=(1,))[::2]:
            assert outcome.kind == "CollectiveTimeoutError"
            assert "rank 1 takes no part" in outcome.message and 'all_reduce "alone"' in outcome.message


def wait_in_vain(cluster):
    with ranks.join(cluster) as ring:
        print("under way", flush=True)
        if cluster.rank == 1:
            time.sleep(3)  # longer than rank 0 needs to be interrupted
        ring.all_reduce(np.ones(3))  # rank 0 had brought its share, so rank 1 may finish this one
        ring.barrier()


def test_control_c_ends_a_waiting_collective():
    with ranks.Group(2) as group:
        group.start(2, wait_in_vain)
        group.wait_for(0, "under way")
        time.sleep(0.3)
        os.kill(group.pid(0), signal.SIGINT)
        interrupted, other = group.outcomes(10)
        assert interrupted.kind == "KeyboardInterrupt"
        assert other.kind == "PeerLostError" and "rank 0 was interrupted" in other.message


def keep_own_signals(cluster):
    """A handler that does not raise does no harm; one that raises its own exception gets it through."""
    calls = []

    def handler(number, frame):
        calls.append(number)
        if len(calls) == 2:
            raise LookupError("from the handler")

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.3, 0.3)
    try:
        with ranks.join(cluster) as ring:
            if cluster.rank == 1:
                signal.setitimer(signal.ITIMER_REAL, 0)
                time.sleep(0.45)
            ring.barrier()
            calls_first = len(calls)
            if cluster.rank == 1:
                time.sleep(1.0)
            try:
                ring.barrier()
                ring.barrier()
            except LookupError as error:
                return calls_first, str(error)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def test_signal_handlers_run_while_a_collective_waits():
    first, second = ranks.try_run(2, keep_own_signals)
    assert first == (1, "from the handler")
    assert second.kind == "PeerLostError"


def close_while_waiting(cluster):
    ring = ranks.join(cluster)
    if cluster.rank == 0:
        threading.Timer(0.3, ring.close).start()
    if cluster.rank == 1:
        time.sleep(1.0)
    ring.all_reduce(np.ones(300_000))


def test_closing_from_another_thread_ends_the_collective():
    outcomes = ranks.try_run(3, close_while_waiting)
    assert all(outcome.kind == "PeerLostError" for outcome in outcomes)
    assert all("rank 0 closed the ring" in outcome.message for outcome in outcomes)


def use_closed(cluster):
    ring = ranks.join(cluster)
    ring.close()
    ring.close()
    with pytest.raises(ValueError, match="closed"):
        ring.barrier()
    with pytest.raises(ValueError, match="closed"):
        ring.statistics()


def test_a_closed_communicator_says_so():
    ranks.run(2, use_closed)


def end_without_goodbye(cluster):
    ring = ranks.join(cluster)
    ring.barrier()
    if cluster.rank == 1:
        os._exit(3)
    ring.barrier()


def test_an_abrupt_exit_counts_as_death():
    with ranks.Group(2) as group:
        group.start(2, end_without_goodbye)
        survivor, _ = group.outcomes(10)
        assert survivor.kind == "PeerLostError" and "rank 1 died" in survivor.message


def raise_with_short_timeout(cluster):
    ring = ranks.join(cluster, timeout_seconds=1.0)
    ring.barrier()
    if cluster.rank == 1:
        raise LookupError("in the user's code")
    ring.barrier()


def test_a_rank_that_raises_and_lives_on_is_a_timeout_not_a_hang():
    with ranks.Group(2) as group:
        group.start(2, raise_with_short_timeout)
        survivor, failed = group.outcomes(10)
        assert failed.kind == "LookupError"
        # Its communicator went with the exception, or stands idle; either way the other is told.
        assert survivor.kind in ("CollectiveTimeoutError", "PeerLostError"), survivor


def test_nothing_is_left_in_shared_memory():
    before = set(os.listdir("/dev/shm"))
    with ranks.Group(2) as group:
        group.start(2, reduce_for_ever, 1000, "shm", 20)
        for rank in range(2):
            group.wait_for(rank, "under way")
        assert set(os.listdir("/dev/shm")) <= before
        for rank in range(2):
            os.kill(group.pid(rank), signal.SIGKILL)
    assert set(os.listdir("/dev/shm")) <= before
