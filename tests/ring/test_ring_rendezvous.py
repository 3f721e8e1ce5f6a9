"""Ranks that look for each other: late, missing, doubled, by every kind of address, over either transport."""

import contextlib
import logging
import os
import signal
import socket
import time
from types import SimpleNamespace

import numpy as np
import pytest
import ranks
from harness import free_ports

from tfring.errors import RendezvousError
from tfring.ring import communicator, rendezvous
from tfring.transport import mailbox
from tfring.transport.listener import Listener


def sum_of_ranks(cluster, **kwargs):
    with ranks.join(cluster, **kwargs) as ring:
        return int(ring.all_reduce(np.int64(cluster.rank))), ring.transport


def at_other_addresses(cluster, host):
    addresses = tuple(f"{host}:{address.rpartition(':')[2]}" for address in cluster.addresses)
    there = SimpleNamespace(**{**vars(cluster), "addresses": addresses})
    return sum_of_ranks(there)


def test_ipv6():
    with ranks.Group(3, host="::1") as group:
        group.start(3, sum_of_ranks)
        assert [result[0] for result in group.outcomes()] == [3, 3, 3]


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST"])
def test_host_names(host):
    assert [result[0] for result in ranks.run(2, at_other_addresses, host)] == [1, 1]


def bind_own_address(cluster, addresses):
    there = SimpleNamespace(**{**vars(cluster), "addresses": addresses, "listen_fd": None})
    return sum_of_ranks(there)[0]


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost", socket.gethostname()])
def test_a_rank_binds_its_own_address(host):
    addresses = tuple(f"{host}:{port}" for port in free_ports(2))  # the test holds none
    assert ranks.run(2, bind_own_address, addresses) == [1, 1]


def where_it_listens(several_hosts):
    addresses = [f"{socket.gethostname()}:{port}" for port in free_ports(2)]
    here, everywhere = (
        SimpleNamespace(rank=0, world_size=len(names), addresses=names, listen_fd=None)
        for names in (tuple(addresses), (*addresses, "192.0.2.1:1"))
    )
    door = Listener.of(here)
    if several_hosts:  # the earlier one was for fewer
        door = Listener.of(everywhere)
    assert Listener.of(everywhere if several_hosts else here) is door
    try:
        return door._tcp.getsockname()[0]
    finally:
        del Listener._instances[os.getpid(), addresses[0]]
        door._close()


def test_a_rank_listens_where_it_must():
    assert where_it_listens(several_hosts=False) == "127.0.0.1"
    assert where_it_listens(several_hosts=True) in ("::", "0.0.0.0")


def join_late(cluster):
    if cluster.rank == 1:
        time.sleep(1.0)
    return sum_of_ranks(cluster)[0]


def test_ranks_wait_for_a_late_one():
    assert ranks.run(3, join_late) == [3, 3, 3]


def join_without(cluster, missing, seconds):
    if cluster.rank in missing:
        os.close(cluster.listen_fd)
        time.sleep(seconds + 3)
        return None
    start = time.monotonic()
    try:
        ranks.join(cluster, connect_timeout_seconds=seconds)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start


@pytest.mark.parametrize("missing", [(2,), (1, 2)])
def test_every_rank_names_those_that_never_answered(missing):
    with ranks.Group(5) as group:
        group.start(5, join_without, missing, 2.0)
        results = group.outcomes(20, without=missing)
        for rank in {0, 1, 2, 3, 4} - set(missing):
            kind, message, seconds = results[rank]
            assert kind == "RendezvousError" and seconds < 8, results[rank]
            for lost in missing:
                assert f"rank {lost} at {group._members[lost].address} (Connection refused)" in message, message
            for present in {0, 1, 2, 3, 4} - set(missing):
                assert f"rank {present} at" not in message, message


def join_and_count_probes(cluster):
    probed = []
    original = rendezvous.probe

    def probe(of, rank, seconds):
        probed.append(rank)
        return original(of, rank, seconds)

    rendezvous.probe = probe
    if cluster.rank == cluster.world_size - 1:
        time.sleep(4.5)  # the others look for it after three seconds
    sum_of_ranks(cluster)
    return probed


def join_after_several_lines(cluster):
    rendezvous._REPORT_SECONDS = 0.5  # not 30
    if cluster.rank == 1:
        time.sleep(10)  # the first line comes after 3 seconds, and 2 for an answer
    return sum_of_ranks(cluster, connect_timeout_seconds=40)[0]


def test_the_line_of_who_is_missing_is_repeated():
    with ranks.Group(3) as group:
        group.start(3, join_after_several_lines)
        assert group.outcomes(50) == [3] * 3
        lines = [line for line in group.logs().splitlines() if "has waited" in line]
    assert len(lines) >= 2, lines
    assert all("rank 0 has waited" in line and "rank 1 at" in line for line in lines), lines


def test_one_rank_alone_looks_for_a_late_one():
    first, *others = ranks.run(4, join_and_count_probes)
    assert first == [3] and others == [[], [], []]


def test_ranks_in_short():
    missing = {rank: "refused" for rank in range(3, 60) if rank != 40}
    cluster = SimpleNamespace(rank=0, world_size=60, addresses=[f"127.0.0.1:{port}" for port in range(1, 61)])
    forming = SimpleNamespace(cluster=cluster, peers=(), links={}, reasons={}, listener=SimpleNamespace(turned_away=""))
    text = rendezvous._Rendezvous._who_is_missing(forming, missing)
    assert text.startswith("never answered: rank 3 at 127.0.0.1:4 (refused), rank 4 at ")
    assert text.endswith("rank 18 at 127.0.0.1:19 (refused), and ranks 19 to 39, 41 to 59")


def join_another_ring(cluster):
    name = cluster.ring + "-other" if cluster.rank == 1 else cluster.ring
    ranks.join(cluster, name=name, connect_timeout_seconds=2.0)


def test_a_rank_that_asks_for_another_ring_is_told_from_a_missing_one():
    for failed in ranks.try_run(3, join_another_ring):
        assert failed.kind == "RendezvousError"
        assert "all ranks that it still waits for respond" in failed.message and "rank" in failed.message


def claim_rank(cluster):
    """Two processes take themselves for rank 0: the second connects to rank 1 as well."""
    claimed = SimpleNamespace(**{**vars(cluster), "rank": 0 if cluster.rank == 2 else cluster.rank})
    ranks.join(claimed, connect_timeout_seconds=3)


def test_two_processes_with_one_rank():
    outcomes = ranks.try_run(3, claim_rank)
    assert all(failed.kind == "RendezvousError" for failed in outcomes), outcomes


def want(cluster, transports):
    return sum_of_ranks(cluster, transport=transports[cluster.rank])


def test_transports():
    assert ranks.run(2, want, ["auto", "auto"]) == [(1, ("shm", "shm"))] * 2
    assert ranks.run(2, want, ["tcp", "auto"]) == [(1, ("tcp", "tcp"))] * 2
    mixed = ranks.run(3, want, ["auto", "auto", "tcp"])
    assert [transport for _, transport in mixed] == [("shm", "tcp"), ("tcp", "shm"), ("tcp", "tcp")]


def test_transports_that_exclude_each_other():
    for failed in ranks.try_run(3, want, ["shm", "tcp", "auto"]):
        assert failed.kind == "RendezvousError"
        assert 'rank 1 "tcp", rank 0 "shm"' in failed.message and "TFRING_TRANSPORT" in failed.message


def hide_memory(cluster, transport, how):
    if cluster.rank == 1:
        if how == "no memory":
            mailbox.Mailbox = lambda: (_ for _ in ()).throw(OSError("out of memory"))
        elif how == "not sealed":
            mailbox._SEALS = 0
    if cluster.rank == 0 and how == "handed over wrongly":
        mailbox.Mailbox.for_peer = property(lambda self: (self.memory_fd, self.doorbell_fd))
    warnings = logging.Handler(logging.WARNING)
    told = []
    warnings.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("tfring").addHandler(warnings)
    return *sum_of_ranks(cluster, transport=transport), told


@pytest.mark.parametrize("how", ["no memory", "not sealed", "handed over wrongly"])
def test_without_shared_memory_it_is_tcp_and_a_warning_or_an_error(how):
    with ranks.Group(2) as group:
        group.start(2, hide_memory, "auto", how)
        outcomes = group.outcomes()
        assert [outcome[:2] for outcome in outcomes] == [(1, ("tcp", "tcp"))] * 2
        told = [line for _, _, lines in outcomes for line in lines]
        assert told and all("no shared memory" in line and "use TCP, which is slower" in line for line in told)
        group.start(2, hide_memory, "shm", how)
        for failed in group.outcomes():
            assert failed.kind == "RendezvousError" and "has no shared memory" in failed.message, failed


def die_while_forming(cluster):
    if cluster.rank == 2:
        print("about to die", flush=True)
        time.sleep(1000)
    ranks.join(cluster, connect_timeout_seconds=10)  # who has ended is looked at after three seconds


def test_a_rank_that_dies_before_joining():
    with ranks.Group(3) as group:
        group.start(3, die_while_forming)
        group.wait_for(2, "about to die")
        os.kill(group.pid(2), signal.SIGKILL)
        for failed in group.outcomes(15, without=(2,))[:2]:
            assert failed.kind == "RendezvousError" and "Rank 2 has ended" in failed.message


def form_two_rings(cluster, transport, beside):
    """The last rank asks for the second ring when the others have long given up."""
    ranks.join(cluster, name="what a process opens once").close()
    before = what_is_open()
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(ranks.join(cluster, name="first", transport=transport)) if beside else None
        print("ready", flush=True)
        time.sleep(2.0 if cluster.rank == 3 else 0.0)
        asked = time.time()
        with pytest.raises(RendezvousError, match=r"rank 1 died|Rank 1 went away") as raised:
            ranks.join(cluster, name="second", transport=transport, beside=first)
        known = time.time()
    raised.value.__traceback__ = None
    return asked, known, what_is_open() - before


def what_is_open():
    return {os.readlink(file.path) for file in os.scandir("/proc/self/fd") if os.path.exists(file.path)}


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("beside", [True, False])
def test_a_rank_that_dies_while_the_ring_forms_is_lost_to_all_at_once(transport, beside):
    with ranks.Group(4) as group:
        group.start(4, form_two_rings, transport, beside)
        for rank in range(4):
            group.wait_for(rank, "ready")
        time.sleep(0.5)
        struck = time.time()
        os.kill(group.pid(1), signal.SIGKILL)
        # A rank that has no ring with the lost one may come minutes later, when the lost one has been started again.
        survivors = (0, 2, 3) if beside else (0, 2)
        outcomes = group.outcomes(20, without=tuple({0, 1, 2, 3} - set(survivors)))
        for rank in survivors:
            asked, known, left = outcomes[rank]
            assert known - max(struck, asked) < 8 and not left, (rank, outcomes)  # who asks waits for 15


def interrupt_while_forming(cluster):
    if cluster.rank == 1:
        time.sleep(60)
    print("joining", flush=True)
    ranks.join(cluster, connect_timeout_seconds=30)


def test_control_c_while_forming():
    with ranks.Group(2) as group:
        group.start(2, interrupt_while_forming)
        group.wait_for(0, "joining")
        time.sleep(0.3)
        os.kill(group.pid(0), signal.SIGINT)
        start = time.monotonic()
        assert group.outcomes(20, without=(1,))[0].kind == "KeyboardInterrupt"
        assert time.monotonic() - start < 10  # without it, it would wait for 30


def test_arguments():
    from tfring.ring.communicator import Communicator

    alone = SimpleNamespace(rank=0, world_size=1, addresses=(), listen_fd=None)
    for arguments, words in (
        ({"transport": "udp"}, "`transport` is 'udp'"),
        ({"timeout_seconds": 0}, "`timeout_seconds` is 0"),
        ({"connect_timeout_seconds": -1}, "`connect_timeout_seconds` is -1"),
    ):
        with pytest.raises(ValueError, match=words):
            Communicator.connect(alone, **arguments)


def test_ranks_spin_where_those_of_their_host_have_a_core_each():
    cores = len(os.sched_getaffinity(0))
    assert communicator._num_spins(SimpleNamespace(world_size=64 * cores, local_world_size=cores)) > 0
    assert communicator._num_spins(SimpleNamespace(world_size=64 * cores, local_world_size=cores + 1)) == 0
    assert communicator._num_spins(SimpleNamespace(world_size=cores + 1)) == 0


def test_environment(monkeypatch):
    from tfring.errors import ConfigurationError
    from tfring.ring.communicator import Communicator

    alone = SimpleNamespace(rank=0, world_size=1, addresses=(), listen_fd=None)
    monkeypatch.setenv("TFRING_TRANSPORT", "infiniband")
    with pytest.raises(ConfigurationError, match=r"TFRING_TRANSPORT=.infiniband. is not auto, tcp or shm"):
        Communicator.connect(alone)


def test_an_address_of_another_machine():
    cluster = SimpleNamespace(rank=0, world_size=2, addresses=("127.0.0.1:1", "127.0.0.1:2"), listen_fd=None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        cluster.addresses = (f"127.0.0.1:{taken.getsockname()[1]}", "127.0.0.1:2")
        if os.geteuid() == 0:
            with pytest.raises(RendezvousError, match="cannot listen at 127"):
                Listener.of(cluster)
