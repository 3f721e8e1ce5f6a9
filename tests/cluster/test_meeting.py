"""Ranks that know no addresses meet at rank 0: over real sockets, with strangers and mistakes in between."""

import concurrent.futures
import contextlib
import itertools
import json
import os
import socket
import struct
import time

import pytest

from tfring.cluster import Cluster, detect, listen, meeting, parse_address
from tfring.cluster.launch_variables import release_listener
from tfring.cluster.meeting import meet
from tfring.cluster.unresolved import UnresolvedCluster
from tfring.errors import ConfigurationError, RendezvousError
from tfring.transport import ports, sockets, wire

SECONDS = 30


@pytest.fixture
def job(request, monkeypatch):
    """A name of its own for each test, whose ports nobody has; nobody waits for long."""
    monkeypatch.setenv("TFRING_CONNECT_TIMEOUT_SECONDS", str(SECONDS))
    for name in ("TFRING_PORT", "TFRING_PORT_RANGE", "TFRING_INTERFACE"):
        monkeypatch.delenv(name, raising=False)
    names = (f"{os.getpid()} {request.node.name} {number}" for number in itertools.count())
    return next(name for name in names if all(map(_is_free, ports.candidates(f"test {name}"))))


def _is_free(port):
    with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def a_range(job):
    """The ports of a job, as `TFRING_PORT_RANGE`."""
    there = ports.candidates(f"test {job}")
    return min(there), max(there)


def unresolved_clusters(n, job, **changes):
    fields = {"world_size": n, "source": "test", "job": job, **changes}
    return [UnresolvedCluster(**{"rank": rank, **fields}) for rank in range(n)]


def all_meet(places):
    """Returns the result or error of each `meet`."""
    with concurrent.futures.ThreadPoolExecutor(len(places)) as pool:
        calls = [pool.submit(meet, unresolved) for unresolved in places]
        done = [(call.exception(2 * SECONDS) or call.result()) for call in calls]
    for result in done:
        if isinstance(result, Cluster) and result.listen_fd is not None:
            os.close(result.listen_fd)
    return done


def check(clusters):
    for rank, cluster in enumerate(clusters):
        assert isinstance(cluster, Cluster), cluster
        assert (cluster.rank, cluster.local_rank, cluster.world_size) == (rank, rank, len(clusters))
        assert (cluster.local_world_size, cluster.num_nodes) == (len(clusters), 1)
        assert cluster.addresses == clusters[0].addresses
        assert cluster.listen_fd is not None
    return [parse_address(address) for address in clusters[0].addresses]


def test_one_host(job):
    addresses = check(all_meet(unresolved_clusters(5, job)))
    assert {address.host for address in addresses} == {"127.0.0.1"}
    assert addresses[0].port in ports.candidates(f"test {job}")


@pytest.mark.parametrize("host", ["localhost", "::1"])
def test_by_name_and_over_ipv6(job, host):
    if host == "::1" and not any(address == "::1" for _, address in ports.interfaces()):
        pytest.skip("this machine has no IPv6 loopback")
    check(all_meet(unresolved_clusters(3, job, host=host)))


def test_a_named_port_and_a_range(job, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    first, last = a_range(job)
    monkeypatch.setenv("TFRING_PORT_RANGE", f"{first}-{last}")
    addresses = check(all_meet(unresolved_clusters(3, job, port=port)))
    assert addresses[0].port == port
    assert all(first <= address.port <= last for address in addresses[1:])


def test_an_interface(job, monkeypatch):
    monkeypatch.setenv("TFRING_INTERFACE", "lo")
    assert ports.named_address() == "127.0.0.1"
    check(all_meet(unresolved_clusters(2, job, host="localhost")))
    monkeypatch.setenv("TFRING_INTERFACE", "127.0.0.0/8")
    assert ports.named_address() == "127.0.0.1"
    monkeypatch.setenv("TFRING_INTERFACE", "wlan77")
    with pytest.raises(ConfigurationError, match=r"(?s)'wlan77'.*lo \(127.0.0.1\).*export TFRING_INTERFACE="):
        meet(unresolved_clusters(2, f"{job} again", host="localhost")[0])


def test_ports_of_others_are_passed_over(job):
    """A stranger who is silent at the first candidate, one who talks at the second: rank 0 takes the third."""
    silent, talks = ports.candidates(f"test {job}")[:2]
    with (
        socket.create_server(("127.0.0.1", silent)),
        socket.create_server(("127.0.0.1", talks)) as stranger,
        concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):
        pool.submit(_talk, stranger)
        addresses = check(all_meet(unresolved_clusters(3, job)))
        stranger.shutdown(socket.SHUT_RDWR)
    assert addresses[0].port == ports.candidates(f"test {job}")[2]


def _talk(stranger):
    with contextlib.suppress(OSError):
        while True:
            with stranger.accept()[0] as connection:
                connection.sendall(b"220 mail.example ESMTP\r\n")


def test_another_job_at_the_same_port(job):
    """Two jobs share all candidates: each finds its own rank 0."""
    shared = ports.candidates(f"test {job}")[:2]
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(ports, "candidates", lambda _: shared)
        both = all_meet([*unresolved_clusters(3, f"{job} 1"), *unresolved_clusters(3, f"{job} 2")])
    first, second = check(both[:3]), check(both[3:])
    assert not set(first) & set(second)


@pytest.mark.parametrize("secret", [None, "a secret of this test"])
def test_strangers_at_the_meeting_do_no_harm(job, monkeypatch, secret):
    """Over TCP, where it is served for there is a secret, and through the Unix socket of this user."""
    if secret:
        monkeypatch.setenv("TFRING_SECRET", secret)
    port = ports.candidates(f"test {job}")[0]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(meet, unresolved_clusters(3, job)[0])]
        mute = _dial(port)
        for body in (
            b"GET / HTTP/1.1\r\n\r\n",
            b'{"rank": 1, "host": 1, "port": 1, "identity": 1}',
            b"[" * 4000,
            b"\xff",
            b"",
            b'{"kind": "challenge"}',
        ):
            for data in (body, wire.MAGIC + struct.pack("<II", len(body), 0) + body):
                for dial in (_dial, _dial_unix):
                    with dial(port) as stranger:
                        stranger.sendall(data)
        calls += [pool.submit(meet, unresolved) for unresolved in unresolved_clusters(3, job)[1:]]
        clusters = [call.result(2 * SECONDS) for call in calls]
        mute.close()
    check(clusters)
    for cluster in clusters:
        os.close(cluster.listen_fd)


@pytest.mark.parametrize("key", [b"", b"another secret"])
def test_a_stranger_takes_no_seat_and_hears_nothing_of_the_job(job, monkeypatch, key):
    monkeypatch.setenv("TFRING_SECRET", "a secret of this test")
    port = ports.candidates(f"test {job}")[0]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(meet, unresolved_clusters(2, job)[0])]
        channel = wire.Channel(_dial(port), time.monotonic() + SECONDS, connects=True)
        with channel, pytest.raises(wire.NoProofError):
            channel.prove_first(key)
        calls.append(pool.submit(meet, unresolved_clusters(2, job)[1]))
        clusters = [call.result(2 * SECONDS) for call in calls]
    check(clusters)
    for cluster in clusters:
        os.close(cluster.listen_fd)


def test_another_secret_at_the_meeting(job, monkeypatch):
    monkeypatch.setenv("TFRING_CONNECT_TIMEOUT_SECONDS", "8")
    keys = iter([b"one", b"other"])
    monkeypatch.setattr(meeting.secret, "of", lambda unresolved: next(keys))
    results = all_meet(unresolved_clusters(2, job))
    told = " ".join(map(str, results))
    assert all(isinstance(result, RendezvousError) for result in results), results
    assert "it does not accept this rank's secret" in told and "Turned away" in told


def _dial(port):
    return _until_there(lambda: socket.create_connection(("127.0.0.1", port), 5))


def _dial_unix(port):
    def connect():
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(sockets.local_name("127.0.0.1", port))
        except OSError:
            connection.close()
            raise
        return connection

    return _until_there(connect)


def _until_there(connect):
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            return connect()
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_ranks_that_never_come_are_named(job, monkeypatch):
    monkeypatch.setenv("TFRING_CONNECT_TIMEOUT_SECONDS", "4")
    started = time.monotonic()
    results = all_meet(unresolved_clusters(4, job)[:2])
    assert time.monotonic() - started < 20
    assert all(isinstance(result, RendezvousError) for result in results), results
    assert "ranks 2, 3 never connected" in str(results[0]) and "TFRING_RENDEZVOUS" in str(results[0])
    alone = all_meet(unresolved_clusters(2, f"{job} 2")[1:])[0]
    assert "looked for rank 0 at 127.0.0.1, ports" in str(alone) and "refused" in str(alone)


def test_two_that_claim_one_rank(job):
    """One of them is refused at once, whether rank 0 has read its hello or not; the others meet."""
    places = unresolved_clusters(3, job)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        rank_0 = pool.submit(meet, places[0])
        another = UnresolvedCluster(1, 3, "test", job, remedy="another object")
        claims = {pool.submit(meet, places[1]), pool.submit(meet, another)}
        (refused,), (accepted,) = concurrent.futures.wait(
            claims, 2 * SECONDS, return_when=concurrent.futures.FIRST_COMPLETED
        )
        assert "two processes say that they are rank 1" in str(refused.exception())
        rank_2 = pool.submit(meet, places[2])
        clusters = [call.result(2 * SECONDS) for call in (rank_0, accepted, rank_2)]
    check(clusters)
    for cluster in clusters:
        os.close(cluster.listen_fd)


def test_world_sizes_that_differ(job):
    """A rank of another world size is rejected at once; the others meet."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        rank_0 = pool.submit(meet, unresolved_clusters(2, job)[0])
        with pytest.raises(RendezvousError, match="gives one process rank 0 of 2, and another rank 1 of 3"):
            meet(unresolved_clusters(3, job)[1])
        rank_1 = pool.submit(meet, unresolved_clusters(2, job)[1])
        clusters = [call.result(2 * SECONDS) for call in (rank_0, rank_1)]
    check(clusters)
    for cluster in clusters:
        os.close(cluster.listen_fd)


def test_an_inferred_host_that_is_not_rank_0s_is_an_error_at_once(job):
    remedy = "Name it:\n  mpirun -x TFRING_RENDEZVOUS=node1 ..."
    (unresolved, _) = unresolved_clusters(2, job, host="192.0.2.77", remedy=remedy)
    with pytest.raises(ConfigurationError, match=r"(?s)it seems to be '192.0.2.77'.*-x TFRING_RENDEZVOUS"):
        meet(unresolved)


def test_no_port_is_free(job, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        (unresolved, _) = unresolved_clusters(2, job, port=taken.getsockname()[1])
        with pytest.raises(ConfigurationError, match=r"(?s)No port is free.*on all ranks:\n  export TFRING_PORT=\d+$"):
            meet(unresolved)


def test_a_source_that_shares_by_its_own_means(job):
    told: concurrent.futures.Future = concurrent.futures.Future()

    def from_rank_0(text):
        told.set_result(text)
        return text

    addresses = check(
        all_meet(
            [
                UnresolvedCluster(0, 2, "test", job, host="", share=from_rank_0),
                UnresolvedCluster(1, 2, "test", job, host="", share=lambda _: told.result(SECONDS)),
            ]
        )
    )
    host, port, secret = json.loads(told.result())
    assert host == ports.own_address() and addresses[0] == ("127.0.0.1", port) and len(secret) == 64


def test_met_once_said_again(job, monkeypatch):
    """`detect()` twice, and once more after the port was given back to a server that binds it itself."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(detect, environ={**variables, "RANK": str(rank)}) for rank in range(2)]
        clusters = [call.result(2 * SECONDS) for call in calls]
    assert [detect(environ={**variables, "RANK": str(rank)}) for rank in range(2)] == clusters
    released = release_listener(clusters[1])
    assert released.listen_fd is None and detect(environ={**variables, "RANK": "1"}) == released
    os.close(clusters[0].listen_fd)


def test_listening_for_an_engine_of_ones_own(job, monkeypatch):
    first, last = a_range(job)
    monkeypatch.setenv("TFRING_PORT_RANGE", f"{first}-{last}")
    address, fd = listen()
    assert first <= parse_address(address).port <= last
    with socket.create_connection(parse_address(address), 5), socket.socket(fileno=fd) as listener:
        listener.accept()[0].close()
