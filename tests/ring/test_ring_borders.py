"""At the borders of a ring: who left, what is no rank, counts that only the root has, descriptors that run out."""

import os
import resource
import socket
import subprocess
import sys
import time

import fuzz_calls
import numpy as np
import pytest
import ranks

from tfring.transport import listener, wire


def one_leaves(cluster):
    ring = ranks.join(cluster)
    ring.barrier()
    if cluster.rank == 1:
        ring.close()
        return "left"
    time.sleep(0.5)
    with pytest.raises(Exception) as caught:
        ring.send(np.ones(3), 1)
    return f"{type(caught.value).__name__}: {caught.value}"


def borders(cluster):
    with ranks.join(cluster) as ring:
        for call in (lambda r: ring.broadcast(np.ones(2), root=r), lambda r: ring.send(np.ones(2), r)):
            for root in (2**32, -(2**32), 2**31):
                with pytest.raises(ValueError, match=f"Rank {root}, "):
                    call(root)
        counts = [0, 2, 1] if cluster.rank == 1 else None
        return ring.scatter(np.arange(3.0) if cluster.rank == 1 else np.ones(0), counts, root=1).tolist()


def test_who_has_left_what_is_no_rank_and_whose_counts_they_are():
    left = ranks.run(2, one_leaves)
    assert left[1] == "left" and left[0].startswith("PeerLostError: rank 1 left the ring"), left
    assert ranks.run(3, borders) == [[], [0.0, 1.0], [2.0]]


def with_few_descriptors(cluster, more, may_raise):
    listener.Listener.of(cluster)  # which opens some of its own
    soft = len(os.listdir("/proc/self/fd")) + more
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if cluster.rank == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard if may_raise else soft))
    with ranks.join(cluster) as ring:
        return float(ring.all_reduce(np.ones(1))[0])


def test_a_limit_of_descriptors_is_raised_or_named():
    with ranks.Group(3) as group:
        group.start(3, with_few_descriptors, 4, True)
        assert group.outcomes() == [3.0] * 3
    with ranks.Group(3) as group:  # of new processes: those of a ring that has ended may still close descriptors
        group.start(3, with_few_descriptors, 1, False)  # too few for two links, even of TCP
        failed = group.outcomes()
    assert all(one.kind == "RendezvousError" for one in failed), failed
    assert "Rank 1 has no file descriptors left" in failed[1].message, failed[1]


def receive_where_nothing_may_be_opened(cluster):
    """Is handed three descriptors, where there is room for one."""
    ours, theirs = (wire.Channel(end, time.monotonic() + 20, connects=True) for end in socket.socketpair())
    with ours, theirs:
        ours.send("challenge", [0, 1, 2], data=bytes(wire.CHALLENGE_BYTES))
        spare = os.dup(0)
        resource.setrlimit(resource.RLIMIT_NOFILE, (spare + 1, spare + 1))
        os.close(spare)
        fds = []
        with pytest.raises(OSError, match="Too many open files"):
            theirs.receive(wire.Channel.CHALLENGES, fds, max_fds=3)
        return len(fds)


def test_descriptors_that_do_not_fit_are_no_fault_of_the_other_side():
    """The kernel hands over those that fit and says that there were more, as where too many are sent."""
    with ranks.Group(1) as group:  # of a process of its own, which may open nothing from now on
        group.start(1, receive_where_nothing_may_be_opened)
        assert group.outcomes() == [1]


def ring_at_the_dead():
    """Rings the doorbell of a rank that has died, where SIGPIPE kills."""
    import signal

    from tfring.transport import mailbox

    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    box = mailbox.Mailbox()
    fds = [os.dup(fd) for fd in box.for_peer]
    mailbox.check(fds)
    box.close()
    os.write(fds[1], b"1")


def test_the_doorbell_of_a_dead_rank_can_be_rung():
    code = f"import sys; sys.path[:] = {sys.path!r}; import test_ring_borders as t; t.ring_at_the_dead()"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def no_rows(ring):
    return ring.gather(np.ones((0, 8), np.float32), root=16)


# Among more than 16 ranks not each has a link to each. The rank that calls something else, what it calls, and what the
# others call.
ODD_CALLS = {
    "all_to_all": (5, lambda ring: ring.all_to_all(np.ones(18)), lambda ring: ring.all_reduce(np.ones(10))),
    "group": (5, lambda ring: ring.group([5, 15], "pair").barrier(), lambda ring: ring.all_reduce(np.ones(10))),
    # Rank 2 wants a link to 13, which wants one to 16, which wants one to each.
    "circle of links": (2, lambda ring: ring.receive(13, np.float32), no_rows),
    # Rank 10 has nothing to send, and is through with its call when rank 5 waits for it in another.
    "a call that is over": (5, lambda ring: ring.group([5, 10], "pair").all_reduce(np.ones(3)), no_rows),
}


def one_differs(cluster, which):
    ring = ranks.join(cluster, connect_timeout_seconds=60)
    odd, unusual, usual = ODD_CALLS[which]
    try:
        ring.barrier()
        began = time.monotonic()
        with pytest.raises(Exception) as caught:
            (unusual if cluster.rank == odd else usual)(ring)
            ring.barrier(name="the next")
        time.sleep(0.05)
        return type(caught.value).__name__, time.monotonic() - began
    finally:
        ring.close()


def leave_before_a_link(cluster):
    """Rank 3 sends to rank 8, to which it has no link, and which leaves meanwhile."""
    ring = ranks.join(cluster, connect_timeout_seconds=60)
    ring.barrier()
    began = time.monotonic()
    try:
        if cluster.rank == 3:
            time.sleep(0.5)
            ring.send(np.ones(1 << 20), 8)
        elif cluster.rank != 8:
            time.sleep(2)
        return "none", "", 0.0
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - began
    finally:
        ring.close()


def test_a_rank_that_wants_a_link_nobody_else_wants():
    with ranks.Group(18) as group:
        for size in (6, 12):  # each start has a limit, and so many processes take long to import what they need
            group.start(size, fuzz_calls.play, 3, 0)
            group.outcomes(100)
        for which in ODD_CALLS:
            group.start(18, one_differs, which)
            outcomes = group.outcomes(100)
            assert all(one[0] == "MismatchError" and one[1] < 15 for one in outcomes), (which, outcomes)
        group.start(18, leave_before_a_link)
        outcomes = group.outcomes(100)
        assert outcomes[3][0] == "PeerLostError" and "rank 8 left the ring" in outcomes[3][1], outcomes[3]
        assert outcomes[3][2] < 10, outcomes[3]
        group.start(18, fuzz_calls.play, 3, 3)
        assert not fuzz_calls.unexpected(group.outcomes(100), limit_seconds=10.0)
