"""Ranks that die, stand still or are interrupted: every survivor raises in time and names the rank."""

import atexit
import contextlib
import ctypes
import gc
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
import weakref

import numpy as np
import pytest
import ranks

from tfring.errors import PeerLostError


def reduce_for_ever(cluster, size, transport, timeout_seconds):
    with ranks.join(cluster, transport=transport, timeout_seconds=timeout_seconds) as ring:
        value = np.ones(size, np.float32)
        for step in range(10**9):
            ring.all_reduce(value, name="step")
            if step == 3:
                print("under way", flush=True)


def wait_for_rank_1(cluster, transport, timeout_seconds):
    """All but rank 1 are inside a collective, rank 1 outside."""
    with ranks.join(cluster, transport=transport, timeout_seconds=timeout_seconds) as ring:
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
        outcomes = group.outcomes(15, without=(2,))
        assert time.monotonic() - killed < 10.0  # one that gave no sign of life would be lost after 15
        for rank in (0, 1, 3):
            assert outcomes[rank].kind == "PeerLostError", outcomes[rank]
            assert "rank 2 died" in outcomes[rank].message
            assert f'all_reduce "step" sum float32[{size}], collective ' in outcomes[rank].message


def test_a_rank_killed_outside_a_collective_is_missed_inside_one():
    with ranks.Group(3) as group:
        group.start(3, wait_for_rank_1, "shm", 20)
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
        group.start(3, wait_for_rank_1, "tcp", 1.0)
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


def wait_until_there(path):
    while not path.exists():
        time.sleep(0.01)


def keep_own_signals(cluster, folder):
    """A handler that does not raise does no harm; one that raises its own exception gets it through."""
    calls = []

    def handler(number, frame):
        calls.append(number)
        (folder / str(len(calls))).touch()
        if len(calls) == 2:
            raise LookupError("from the handler")

    signal.signal(signal.SIGALRM, handler)
    try:
        with ranks.join(cluster) as ring:
            if cluster.rank == 0:
                signal.setitimer(signal.ITIMER_REAL, 0.3)
            else:
                wait_until_there(folder / "1")
            ring.barrier()
            calls_first = len(calls)
            try:
                if cluster.rank == 0:
                    signal.setitimer(signal.ITIMER_REAL, 0.3)
                else:
                    wait_until_there(folder / "2")
                ring.barrier()
                ring.barrier()
            except LookupError as error:
                return calls_first, str(error)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def test_signal_handlers_run_while_a_collective_waits(tmp_path):
    first, second = ranks.try_run(2, keep_own_signals, tmp_path)
    assert first == (1, "from the handler")
    assert second.kind == "PeerLostError"


def close_while_waiting(cluster):
    ring = ranks.join(cluster)
    if cluster.rank == 0:
        threading.Timer(0.3, ring.close).start()
    if cluster.rank == 1:
        time.sleep(3.0)
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
    ring = ranks.join(cluster, timeout_seconds=4.0)
    ring.barrier()
    if cluster.rank == 1:
        raise LookupError("in the user's code")
    ring.barrier()


def test_a_rank_that_raises_and_lives_on_is_a_timeout_not_a_hang():
    with ranks.Group(2) as group:
        group.start(2, raise_with_short_timeout)
        survivor, failed = group.outcomes(13)
        assert failed.kind == "LookupError"
        # Its communicator went with the exception, or stands idle; either way the other is told.
        assert survivor.kind in ("CollectiveTimeoutError", "PeerLostError"), survivor


def test_nothing_is_left_in_shared_memory():
    """For what ranks share has no name there, not even while they work."""
    with ranks.Group(2) as group:
        group.start(2, reduce_for_ever, 1000, "shm", 20)
        for rank in range(2):
            group.wait_for(rank, "under way")
        for rank in range(2):
            proc = pathlib.Path(f"/proc/{group.pid(rank)}")
            held = (proc / "maps").read_text().splitlines()
            for fd in (proc / "fd").iterdir():
                with contextlib.suppress(FileNotFoundError):
                    held.append(os.readlink(fd))
            assert any("tfring-mailbox" in each for each in held)
            assert not [each for each in held if "/dev/shm" in each]


# Liveness apart from progress: a rank is slow, stopped, cut off or gone, and the message tells which.


def reduce_with_short_limits(cluster, size, transport):
    os.environ["TFRING_LOST_SECONDS"] = "1"
    reduce_for_ever(cluster, size, transport, 60)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("size", [16, 4_000_000])
def test_a_stopped_rank_is_lost_long_before_the_timeout(size, transport):
    with ranks.Group(4) as group:
        group.start(4, reduce_with_short_limits, size, transport)
        for rank in range(4):
            group.wait_for(rank, "under way")
        os.kill(group.pid(2), signal.SIGSTOP)
        stopped = time.monotonic()
        outcomes = group.outcomes(15, without=(2,))
        assert time.monotonic() - stopped < 10.0  # the limit is 1, and without it 60
        for rank in (0, 1, 3):
            assert outcomes[rank].kind == "PeerLostError", outcomes[rank]
            assert "rank 2 on 127.0.0.1 is stopped" in outcomes[rank].message, outcomes[rank]
            assert 'all_reduce "step"' in outcomes[rank].message
        os.kill(group.pid(2), signal.SIGCONT)  # it finds out when it wakes up
        woken = group.outcomes(10, without=(0, 1, 3))[2]
        assert woken.kind == "PeerLostError" and "rank 2 on 127.0.0.1 is stopped" in woken.message


def be_slow(cluster, transport, how, size=100_000, lost_seconds="0.8"):
    """Rank 1 takes three times as long as a rank may be silent; without the GIL, or holding it."""
    os.environ.update(TFRING_LOST_SECONDS=lost_seconds, TFRING_STALL_WARNING_SECONDS="0.6")
    with ranks.join(cluster, transport=transport) as ring:
        ring.all_reduce(np.ones(4), name="before")
        if cluster.rank == 1:
            print("under way", flush=True)
            if how == "holding the GIL":
                ctypes.PyDLL(None).usleep(2_400_000)
            else:
                time.sleep(2.4)
        return float(ring.all_reduce(np.full(size, 1.0), name="late")[-1])


@pytest.mark.parametrize("size", [100_000, 4])  # one rank waits for it, or all do
@pytest.mark.parametrize("transport, how", [("tcp", "asleep"), ("shm", "holding the GIL")])
def test_a_slow_rank_fails_nobody_and_one_warning_names_it(transport, how, size):
    with ranks.Group(4) as group:
        group.start(4, be_slow, transport, how, size)
        assert group.outcomes(20) == [4.0] * 4
        lines = [line for line in group.logs().splitlines() if "is slow" in line]
        assert len(lines) == 1, lines
        last = 'last call in this ring is all_reduce "before"'
        for words in ("rank 1 on 127.0.0.1 is slow", 'all_reduce "late"', last):
            assert words in lines[0], lines
        logs = group.logs()
        assert logs.count("All ranks wait for rank 1, whose main thread is at\n") == 1, logs
        if how == "asleep":
            assert "in be_slow\n    time.sleep(2.4)" in logs, logs


def test_a_rank_that_was_stopped_for_a_moment_accuses_nobody():
    with ranks.Group(3) as group:
        group.start(3, be_slow, "shm", "asleep", 100_000, "3")
        group.wait_for(1, "under way")
        os.kill(group.pid(0), signal.SIGSTOP)
        time.sleep(1.5)  # half of what is allowed
        os.kill(group.pid(0), signal.SIGCONT)
        assert group.outcomes(20) == [3.0] * 3


def test_ranks_that_were_all_stopped_accuse_nobody():
    """As when a machine was asleep."""
    with ranks.Group(3) as group:
        group.start(3, be_slow, "tcp", "asleep")
        group.wait_for(1, "under way")
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for rank in range(3):
                os.kill(group.pid(rank), number)
            time.sleep(2.0)  # the limit is 0.8
        assert group.outcomes(20) == [3.0] * 3


def stop_at_once(cluster):
    """Stops before the watcher has looked at a peer that has spoken."""
    os.environ["TFRING_LOST_SECONDS"] = "0.8"
    with ranks.join(cluster, transport="tcp") as ring:
        os.kill(os.getpid(), signal.SIGSTOP)
        return float(ring.all_reduce(np.ones(4), name="late")[-1])


def is_stopped(pid):
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_ranks_that_were_stopped_once_they_were_connected_accuse_nobody():
    with ranks.Group(3) as group:
        group.start(3, stop_at_once)
        deadline = time.monotonic() + 20
        while not all(is_stopped(group.pid(rank)) for rank in range(3)):
            assert time.monotonic() < deadline, group.logs()
            time.sleep(0.05)
        time.sleep(2.0)  # the limit is 0.8
        for rank in range(3):
            os.kill(group.pid(rank), signal.SIGCONT)
        assert group.outcomes(20) == [3.0] * 3


def wait_elsewhere(cluster):
    """All but rank 0 are busy in Python, in no collective, when rank 2 dies."""
    with ranks.join(cluster) as ring:
        ring.barrier()
        print("under way", flush=True)
        deadline = time.monotonic() + 10  # one that gave no sign of life would be lost after 15
        while ring.failure() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return str(ring.failure()), time.time()


def test_a_death_is_known_outside_of_collectives_too():
    with ranks.Group(4) as group:
        group.start(4, wait_elsewhere)
        for rank in range(4):
            group.wait_for(rank, "under way")
        os.kill(group.pid(2), signal.SIGKILL)
        killed = time.time()
        for rank, outcome in enumerate(group.outcomes(15, without=(2,))):
            if rank != 2:
                assert "rank 2 died: its process on 127.0.0.1 is gone" in outcome[0], outcome
                assert outcome[1] - killed < 8.0  # who looks for it waits for 10


# Fork.


def what_is_open():
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one listdir itself held
            found.add(os.readlink(f"/proc/self/fd/{fd}"))
    return found


def fork_and_go_on(cluster, transport, child):
    with ranks.join(cluster, name=f"{cluster.ring} before"):
        pass  # leaves what a process opens once
    before = what_is_open()
    ring = ranks.join(cluster, transport=transport)
    rings_own = what_is_open() - before
    ring.barrier()
    pid = os.fork()
    if pid == 0:
        inherited = rings_own & what_is_open()
        maps = "tfring-mailbox" in pathlib.Path("/proc/self/maps").read_text()
        with pytest.raises(ValueError, match="a forked child cannot use it"):
            ring.barrier()
        print(f"of {len(rings_own)} the child has {len(inherited)}, maps: {maps}", flush=True)
        if child == "lives on":
            time.sleep(60)
        ring.close()
        atexit._run_exitfuncs()  # as a child that ends by sys.exit
        os._exit(0)
    if child == "ends":
        os.waitpid(pid, 0)
    print("under way", flush=True)
    for _ in range(10 if child == "ends" else 10**9):
        ring.all_reduce(np.ones(1000), name="step")
    ring.close()
    return pid


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_forked_child_closes_what_it_inherits_and_harms_nobody(transport):
    with ranks.Group(2) as group:
        group.start(2, fork_and_go_on, transport, "ends")
        assert all(isinstance(pid, int) for pid in group.outcomes(20))
        for rank in range(2):
            group.wait_for(rank, "the child has 0, maps: False")


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_death_is_seen_at_once_though_a_forked_child_lives_on(transport):
    with ranks.Group(3) as group:
        group.start(3, fork_and_go_on, transport, "lives on")
        for rank in range(3):
            group.wait_for(rank, "under way")
        time.sleep(0.1)
        os.kill(group.pid(1), signal.SIGKILL)
        killed = time.monotonic()
        outcomes = group.outcomes(15, without=(1,))
        assert time.monotonic() - killed < 10.0  # one that gave no sign of life would be lost after 15
        for rank in (0, 2):
            assert outcomes[rank].kind == "PeerLostError" and "rank 1 died" in outcomes[rank].message


def square(x):
    return x * x


def use_other_processes(cluster):
    with ranks.join(cluster) as ring:
        for method in ("fork", "spawn"):
            with multiprocessing.get_context(method).Pool(2) as pool:
                assert pool.map(square, range(4)) == [0, 1, 4, 9]
                ring.all_reduce(np.ones(10))
        subprocess.run([sys.executable, "-c", "pass"], check=True, close_fds=False)
        return float(ring.all_reduce(np.ones(10))[0])


def test_pools_and_commands_leave_the_ring_alone():
    assert ranks.run(2, use_other_processes) == [2.0, 2.0]


# Ctrl-C at awkward moments.


def gather_until_interrupted(cluster):
    """Rank 0 is interrupted wherever it is: before, within or after a gather, or between its two halves."""
    kinds = []
    for attempt in range(12):
        with ranks.join(cluster, name=f"{cluster.ring} {attempt}") as ring:
            try:
                ring.barrier()
                if cluster.rank == 0:
                    threading.Timer(0.02 + 0.003 * attempt, os.kill, (os.getpid(), signal.SIGINT)).start()
                while True:
                    ring.all_gather(np.ones((5, 3)))
            except (KeyboardInterrupt, PeerLostError) as error:
                kinds.append(type(error).__name__)
    return kinds


def test_control_c_at_any_moment_of_a_gather():
    with ranks.Group(2) as group:
        group.start(2, gather_until_interrupted)
        interrupted, other = group.outcomes(20)
        assert interrupted == ["KeyboardInterrupt"] * 12, interrupted
        assert other == ["PeerLostError"] * 12, other


def use_the_ring_in_a_handler(cluster):
    """Statistics may be had from a signal handler, a collective may not, and closing ends the one under way."""
    told = []

    def handler(number, frame):
        told.append(ring.statistics()["bytes_sent"])
        try:
            ring.barrier()
        except ValueError as error:
            told.append(str(error))
        ring.close()

    signal.signal(signal.SIGALRM, handler)
    with ranks.join(cluster) as ring:
        if cluster.rank == 1:
            time.sleep(1.5)
        else:
            signal.setitimer(signal.ITIMER_REAL, 0.3)
        try:
            ring.all_reduce(np.ones(3))
            ring.barrier()
        except PeerLostError as error:
            return [*told, str(error)]


def test_a_signal_handler_may_close_the_ring():
    closed, other = ranks.run(2, use_the_ring_in_a_handler)
    assert "was called from within a collective" in closed[1]
    assert "rank 0 closed the ring during all_reduce" in closed[2] and "rank 0 closed the ring" in other[-1]


# What is dropped is closed.


def drop_communicators(cluster, transport):
    with ranks.join(cluster, transport=transport):
        pass
    before = what_is_open()
    for i in range(5):
        ranks.join(cluster, name=f"{cluster.ring} {i}", transport=transport).all_reduce(np.ones(1000))
    gc.collect()
    maps = "tfring-mailbox" in pathlib.Path("/proc/self/maps").read_text()
    return what_is_open() - before, maps


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_dropped_communicator_is_closed(transport):
    assert ranks.run(2, drop_communicators, transport) == [(set(), False)] * 2


def drop_on_one_rank(cluster):
    ring = ranks.join(cluster)
    ring.barrier()
    if cluster.rank == 0:
        del ring
        gc.collect()
        return
    ring.barrier()


def test_others_hear_a_goodbye_from_a_dropped_communicator():
    _, other = ranks.try_run(2, drop_on_one_rank)
    assert other.kind == "PeerLostError" and "rank 0 left the ring" in other.message


def join_while_python_ends(cluster):
    """Rank 0 forms the ring in a daemon thread, behind all that Python calls at its end, and its process lives on."""
    with ranks.join(cluster, name=f"{cluster.ring} before"):
        pass
    if cluster.rank == 1:
        ring = ranks.join(cluster)
        time.sleep(1.0)  # by now rank 0 has no Python any more
        ring.send(np.ones(3, np.float32), 0)
        return ring.barrier()
    is_ending, has_joined = threading.Event(), threading.Event()

    def receive():
        is_ending.wait()
        try:
            ring = ranks.join(cluster)
        finally:
            has_joined.set()
        ring.receive(1, np.float32)

    def let_it_join():
        is_ending.set()
        has_joined.wait(ranks.CONNECT_SECONDS)
        time.sleep(0.3)  # until it waits in `receive`

    threading.Thread(target=receive, daemon=True).start()
    atexit.unregister(weakref.finalize._exitfunc)
    atexit.register(let_it_join)
    atexit.register(weakref.finalize._exitfunc)  # what was registered last is called first
    ctypes.CDLL(None).on_exit(ctypes.CDLL(None).pause, None)


def test_no_ring_outlives_python():
    with ranks.Group(2) as group:
        group.start(2, join_while_python_ends)
        group.outcomes(20, without=(1,))
        ending = group.end(0)
        _, other = group.outcomes(30, without=(0,))
        with pytest.raises(subprocess.TimeoutExpired):  # it died of a segmentation fault
            ending.wait(1)
        assert other.kind == "PeerLostError" and "rank 0 left the ring" in other.message
