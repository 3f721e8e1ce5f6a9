"""Measures the limits of the machines: a raw socket between hosts, a memory copy within a host.

Every rank sends to the next and receives from the previous one, all at once, as in a ring. The slowest rank is the
limit.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from typing import Any, NamedTuple

from tfring.cluster import Cluster, parse_address
from tfring.transport import ports

SOCKET, COPY = "raw socket", "memory copy"
_SECONDS = 20.0  # for the connections, and for a transfer
_TOKEN_BYTES = 16
_CHUNK_BYTES = 1 << 18  # stays in the cache
_FIRST_BYTES, _LAST_BYTES = 1 << 20, 1 << 28
_LONG_ENOUGH_SECONDS = 0.2
_COPY_BYTES = 1 << 25
_REPEATS = 3


class Limit(NamedTuple):
    """Bytes per second, and the means by which they were moved."""

    kind: str
    bytes_per_second: float


def measure(cluster: Cluster, ring: Any, order: tuple[int, ...]) -> Limit:
    """Measures the limit of a ring through `order`. This is a collective."""
    position = order.index(cluster.rank)
    to, source = order[(position + 1) % len(order)], order[position - 1]
    if ring.all_reduce([float("tcp" in ring.transport)], "max", name="bench's transports")[0] == 0:
        return Limit(COPY, _slowest(ring, _copy_speed(ring)))
    hosts = [parse_address(address).host for address in cluster.addresses]
    on_one_host = len(set(hosts)) == 1  # TCP was requested then
    sends, gets = (on_one_host or hosts[rank] != hosts[cluster.rank] for rank in (to, source))
    return Limit(SOCKET, _slowest(ring, _socket_speed(ring, to, hosts[to], on_one_host, sends, gets)))


def _slowest(ring: Any, speed: float) -> float:
    return float(ring.all_reduce([speed], "min", name="bench's limit")[0])


def _copy_speed(ring: Any) -> float:
    import numpy as np

    source, target = np.ones(_COPY_BYTES, np.uint8), np.ones(_COPY_BYTES, np.uint8)
    best = float("inf")
    for _ in range(_REPEATS):
        ring.barrier(name="bench's copy")
        start = time.perf_counter()
        np.copyto(target, source)
        best = min(best, time.perf_counter() - start)
    return _COPY_BYTES / best


def _socket_speed(ring: Any, to: int, host: str, on_one_host: bool, sends: bool, gets: bool) -> float:
    """Measures the speed of sockets. Returns infinity for a rank that neither sends nor receives."""
    import numpy as np

    token = np.frombuffer(secrets.token_bytes(_TOKEN_BYTES), np.uint8)
    token = ring.broadcast(token, name="bench's token")
    with ports.open_listener(loopback=on_one_host and host in ("127.0.0.1", "localhost")) as listener:
        numbers = ring.all_gather([listener.getsockname()[1]], name="bench's ports")
        outgoing = socket.create_connection((host, int(numbers[to])), _SECONDS) if sends else None
        if outgoing is not None:
            outgoing.sendall(token.tobytes())
        incoming = _accept(listener, token.tobytes()) if gets else None
    try:
        return _speed_of(ring, outgoing, incoming)
    finally:
        for connection in (outgoing, incoming):
            if connection is not None:
                connection.close()


def _accept(listener: socket.socket, token: bytes) -> socket.socket:
    """Accepts connections until one sends the token."""
    deadline = time.monotonic() + _SECONDS
    while True:
        listener.settimeout(max(0.01, deadline - time.monotonic()))
        connection, _ = listener.accept()
        connection.settimeout(_SECONDS)
        said = bytearray(len(token))
        try:
            _fill(connection, said, len(said))
        except OSError:
            said.clear()
        if secrets.compare_digest(bytes(said), token):
            return connection
        connection.close()


def _speed_of(ring: Any, outgoing: socket.socket | None, incoming: socket.socket | None) -> float:
    size = _FIRST_BYTES
    while True:
        ring.barrier(name="bench's sockets")
        seconds = _seconds_for(size, outgoing, incoming)
        slowest = ring.all_reduce([seconds], "max", name="bench's seconds")[0]
        if slowest > _LONG_ENOUGH_SECONDS or size >= _LAST_BYTES:
            return size / seconds if seconds > 0 else float("inf")
        size *= 4


def _seconds_for(size: int, outgoing: socket.socket | None, incoming: socket.socket | None) -> float:
    """Measures the seconds to send and receive this number of bytes at once; 0 without a peer."""
    if outgoing is None and incoming is None:
        return 0.0
    start = time.perf_counter()
    sending = threading.Thread(target=_send_bytes, args=(outgoing, size), daemon=True)
    sending.start()
    if incoming is not None:
        _fill(incoming, bytearray(_CHUNK_BYTES), size)
    sending.join(_SECONDS)
    return time.perf_counter() - start


def _send_bytes(connection: socket.socket | None, size: int) -> None:
    chunk = bytes(_CHUNK_BYTES)
    for _ in range(size // len(chunk) if connection is not None else 0):
        assert connection is not None
        connection.sendall(chunk)


def _fill(connection: socket.socket, buffer: bytearray, size: int) -> None:
    while size:
        got = connection.recv_into(buffer, min(size, len(buffer)))
        if not got:
            raise ConnectionError("the connection was closed")
        size -= got
