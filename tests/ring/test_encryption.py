"""What ranks send over TCP, encrypted: nobody on the way reads it or changes it unseen."""

import contextlib
import os
import select
import socket
import ssl
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import ranks

from tfring.ring import encryption

SECRET = "the secret of a test of encryption"
PATTERN = np.float32(1234.5)  # of whatever is sent
SIZES = (1, 7, 1000, 70_001, 1_000_003)

# Of this test alone: any process can make such a server, which knows no secret of a job.
CERTIFICATE = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgvE9jYh7XToVxm/9s
dOoWE2awOq/tqp6xBlUxJbCFNGyhRANCAARxZsSG1xiphoKBdXnFjVhfE7mARgL7
9zlKj05Py/YqngxjbTFDsnT+wgU+2Qo97Jje9l/0FVU4xGHxs0GKhszq
-----END PRIVATE KEY-----
-----BEGIN CERTIFICATE-----
MIIBgzCCASmgAwIBAgIUY/5B8+7roSicEvc15hYD90LJxYMwCgYIKoZIzj0EAwIw
FjEUMBIGA1UEAwwLdGZyaW5nIHRlc3QwIBcNMjYxMTI5MTI1NjIyWhgPMjEyNjEx
MDUxMjU2MjJaMBYxFDASBgNVBAMMC3RmcmluZyB0ZXN0MFkwEwYHKoZIzj0CAQYI
KoZIzj0DAQcDQgAEcWbEhtcYqYaCgXV5xY1YXxO5gEYC+/c5So9OT8v2Kp4MY20x
Q7J0/sIFPtkKPeyY3vZf9BVVOMRh8bNBiobM6qNTMFEwHQYDVR0OBBYEFNhIpS3p
6v3dK/Bm2qmWa7g2Av+0MB8GA1UdIwQYMBaAFNhIpS3p6v3dK/Bm2qmWa7g2Av+0
MA8GA1UdEwEB/wQFMAMBAf8wCgYIKoZIzj0EAwIDSAAwRQIhALvMXSmKGJBfPEXu
xRDV3CzWtzW/9lDY/jQeYZdb2f9hAiBdZBAzrSlApsIfKK+m8tjWtBTW5FYOabEO
T4rbHP1d8w==
-----END CERTIFICATE-----
"""


class Relay:
    """Stands between rank 1 and rank 0: keeps what passes, and changes a byte of it where that is asked for.

    Args:
      change_after: of large connections the number of the byte that is changed on its way to rank 0; None for none.
    """

    def __init__(self, change_after: int | None = None) -> None:
        self._change_after = change_after
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._target = 0
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []
        self.passed = bytearray()
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"

    def start(self, port: int) -> None:
        self._target = port
        self._run(self._accept)

    def _run(self, body, *args) -> None:
        self._threads.append(threading.Thread(target=body, args=args, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        while not self._closed.is_set():
            if select.select([self._listener], [], [], 0.1)[0]:
                one = self._listener.accept()[0]
                self._run(self._pass_on, one, socket.create_connection(("127.0.0.1", self._target)))

    def _pass_on(self, one: socket.socket, other: socket.socket) -> None:
        passed = 0
        with one, other, contextlib.suppress(OSError):
            while not self._closed.is_set():
                for source in select.select([one, other], [], [], 0.1)[0]:
                    data = source.recv(1 << 16)
                    if not data:
                        return
                    if source is one and self._change_after is not None:
                        at = self._change_after - passed
                        if 0 <= at < len(data):
                            data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
                        passed += len(data)
                    self.passed += data
                    (other if source is one else one).sendall(data)

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        for thread in self._threads:
            thread.join(10)
        self._listener.close()


def exchange(cluster, relay, encrypts, rounds=1):
    """Sums and gathers arrays of the pattern; rank 0 listens behind the relay."""
    os.environ["TFRING_ENCRYPT"] = str(int(encrypts[cluster.rank]))  # of a process of this test alone
    addresses = (relay or cluster.addresses[0], *cluster.addresses[1:])
    there = SimpleNamespace(**{**vars(cluster), "addresses": addresses, "secret": SECRET})
    with ranks.join(there, transport="tcp") as ring:
        found = []
        for size in SIZES * rounds:
            mine = np.full(size, PATTERN * (cluster.rank + 1))
            found += [ring.all_reduce(mine), ring.all_gather(mine[: size // 2])]
            ring.broadcast(mine, root=1)
        return [array.tobytes() for array in found]


def port_of(group, rank):
    return int(group._members[rank].address.rpartition(":")[2])


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_same_results(world_size):
    results = []
    for encrypts in (False, True):
        with ranks.Group(world_size) as group:
            group.start(world_size, exchange, None, [encrypts] * world_size)
            results.append(group.outcomes(60))
    assert all(isinstance(result, list) for result in results[0]) and results[0] == results[1], results


@pytest.mark.parametrize("encrypts", [False, True])
def test_what_can_be_read_on_the_way(encrypts):
    with ranks.Group(2) as group, Relay() as relay:
        relay.start(port_of(group, 0))
        group.start(2, exchange, relay.address, [encrypts] * 2)
        results = group.outcomes(60)
        assert not any(isinstance(result, ranks.Failed) for result in results), results
        sent = bytes(relay.passed)
    assert len(sent) > 4 * max(SIZES)
    found = [pattern.tobytes() * 4 in sent for pattern in (PATTERN, PATTERN * 2)]
    assert found == [not encrypts] * 2


def test_a_changed_byte_breaks_the_ring():
    with ranks.Group(2) as group, Relay(change_after=100_000) as relay:
        relay.start(port_of(group, 0))
        group.start(2, exchange, relay.address, [True] * 2, 5)
        for failed in group.outcomes(60):
            assert failed.kind == "PeerLostError"
            assert "what arrived from rank 1" in failed.message and "changed on the way" in failed.message


def test_ranks_that_differ_in_it():
    with ranks.Group(2) as group:
        group.start(2, exchange, None, [True, False])
        for failed in group.outcomes(60):
            assert failed.kind == "RendezvousError"
            assert "Rank 0 encrypts what it sends, but rank 1 does not" in failed.message
            assert "Set the same TFRING_ENCRYPT on all ranks" in failed.message


def without_a_secret(cluster):
    os.environ["TFRING_ENCRYPT"] = "1"
    with ranks.join(cluster, transport="tcp"):
        return None


def test_without_a_secret():
    with ranks.Group(2) as group:
        group.start(2, without_a_secret)
        for failed in group.outcomes():
            assert failed.kind == "ConfigurationError"
            assert failed.message.startswith("The job has no secret, but TFRING_ENCRYPT=1 needs one")


def connected_pair():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pair = socket.create_connection(listener.getsockname()), listener.accept()[0]
        for end in pair:
            end.settimeout(10)
        return pair


def attempt(connection, key, session, accepts, seconds, said):
    try:
        said[accepts] = encryption.encrypt(connection, key, session, accepts=accepts, seconds=seconds)
    except ConnectionError as error:
        said[accepts] = str(error)


@pytest.mark.parametrize(
    ("keys", "sessions"), [((b"a" * 16, b"b" * 16), ("ring 1", "ring 1")), ((b"a" * 16,) * 2, ("ring 1", "ring 2"))]
)
def test_another_key_or_a_connection_that_was_diverted(keys, sessions):
    one, other = connected_pair()
    said: dict = {}
    with one, other:
        sides = zip((one, other), keys, sessions, (False, True), strict=True)
        threads = [threading.Thread(target=attempt, args=(*side, 10, said)) for side in sides]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert all(text.startswith("its connection cannot be encrypted") for text in said.values()) and len(said) == 2


def test_a_program_without_the_key():
    """It speaks TLS, and is not let in."""
    one, other = connected_pair()
    said: dict = {}
    with one, other:
        thread = threading.Thread(target=attempt, args=(other, b"a" * 16, "ring 1", True, 10, said))
        thread.start()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with pytest.raises((ssl.SSLError, OSError)):
            context.wrap_socket(one).recv(1)
        thread.join(20)
    assert said[True].startswith("its connection cannot be encrypted")


def test_a_server_with_a_certificate_and_without_the_key(tmp_path):
    """It could read everything, if a rank that connects took it for the other rank."""
    (tmp_path / "server.pem").write_text(CERTIFICATE)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server.pem")
    one, other = connected_pair()
    said: dict = {}
    with one, other:
        thread = threading.Thread(target=attempt, args=(one, b"a" * 16, "ring 1", False, 10, said))
        thread.start()
        with pytest.raises((ssl.SSLError, OSError)):
            context.wrap_socket(other, server_side=True).recv(1)
        thread.join(20)
    assert said[False].startswith("its connection cannot be encrypted")


@pytest.mark.parametrize("accepts", [False, True])
def test_a_peer_that_says_nothing_is_not_waited_for(accepts):
    one, other = connected_pair()
    said: dict = {}
    began = time.monotonic()
    with one, other:
        attempt(other, b"a" * 16, "ring 1", accepts, 0.5, said)
    assert said[accepts].endswith("the other side did not finish the TLS handshake")
    assert time.monotonic() - began < 20
