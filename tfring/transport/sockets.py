"""Sockets of a listener: Unix within a host, TCP between hosts; the limit of open descriptors."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import socket
import struct
from collections.abc import Iterator
from typing import Any

from tfring.errors import RendezvousError
from tfring.transport import ports
from tfring.transport.address import parse_address

CONNECT_SECONDS = 5.0
LOOPBACKS = ("127.0.0.1", "::1")
_FDS_OF_OTHERS = 256  # for everything else that a process opens: files, threads' pipes, other rings
_PEER = struct.Struct("3i")  # process, user, group
_TIME = struct.Struct("ll")  # seconds, microseconds

_log = logging.getLogger(__name__)


def raise_descriptor_limit(descriptors: int) -> int:
    """Raises this process's descriptor limit, as far as allowed, if this number of new descriptors needs it.

    Returns the limit that all descriptors need.
    """
    wanted = len(os.listdir("/proc/self/fd")) + descriptors + _FDS_OF_OTHERS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and wanted > soft:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return wanted


def without_descriptors(num_processes: int, wanted: int) -> str:
    """Returns the reason why processes cannot be started; `wanted` is the limit that they need."""
    return (
        f"no file descriptors left: the limit is {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}, and "
        f"{num_processes} processes take up to {wanted}. Raise it (`ulimit -n {wanted}`, or LimitNOFILE of a "
        "service), or start fewer"
    )


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Returns the process and the user at the other end of a Unix socket, as the kernel reports them."""
    process, user, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return process, user


def describe_peer(connection: socket.socket) -> str:
    """Describes the peer of a connection, for messages."""
    if connection.family == socket.AF_UNIX:
        return "process {} of user {}".format(*peer_of(connection))
    with contextlib.suppress(OSError):
        return str(connection.getpeername()[0]).removeprefix("::ffff:")
    return "an unknown peer"


def no_delay(connection: socket.socket) -> None:
    """Disables the delay of small messages over TCP."""
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def local_name(host: str, port: int) -> str:
    """Returns the name of the Unix socket of a process of this user that listens at an address; "*" for all."""
    return f"\0tfring {os.geteuid()} {host} {port}"


def connect_locally(hosts: list[str], port: int, *, strict: bool) -> socket.socket | None:
    """Connects to a process of this user that listens at one of these addresses of this host; None if there is none."""
    for host in hosts:
        if not ports.is_local(host):
            continue
        for place in dict.fromkeys((host, "*", *LOOPBACKS)):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                _connect_unix(connection, local_name(place, port))
                process, user = peer_of(connection)
            except OSError:
                connection.close()
                continue
            if user == os.geteuid():
                return connection
            connection.close()
            if strict:
                why = f"process {process} of user {user}, not {os.geteuid()}, listens there"
                raise PermissionError(errno.EPERM, why)
    return None


def _connect_unix(connection: socket.socket, name: str) -> None:
    """Connects to a Unix socket, and waits while its queue is full.

    A Python socket with a timeout does not block, and would get EAGAIN at once.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIME.pack(int(CONNECT_SECONDS), 0))
    connection.connect(name)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIME.pack(0, 0))
    connection.settimeout(CONNECT_SECONDS)


def listen_locally(listener: socket.socket, *, with_secret: bool) -> socket.socket | None:
    """Listens at the Unix socket that belongs to a TCP listener; None if its name is taken and a secret is set.

    Raises:
      RendezvousError: If the name is taken and there is no secret, or it is taken by another process of this user.
    """
    host, port = listener.getsockname()[:2]
    name = local_name("*" if host in ("::", "0.0.0.0") else host, port)
    local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        local.bind(name)
        local.listen(128)
        return local
    except OSError as error:
        why, user = str(error), None
        with contextlib.suppress(OSError):
            local.settimeout(CONNECT_SECONDS)
            local.connect(name)
            process, user = peer_of(local)
            why = f"process {process} of user {user} has taken its name"
        local.close()
        text = f"Ranks of this host cannot connect at port {port} through a Unix socket: {why}."
        if user == os.geteuid():
            raise RendezvousError(f"{text} Is every rank started once?") from None
        if not with_secret:
            raise RendezvousError(f"{text} Use another port, or set a secret (docs/security.md).") from None
        _log.warning("%s They use TCP, which is slower.", text)
        return None


def listen(cluster: Any, several_hosts: bool) -> socket.socket:
    """Listens at a rank's address.

    Raises:
      RendezvousError: If it cannot listen there.
    """
    address = parse_address(cluster.addresses[cluster.rank])
    problem = None
    for host in _addresses_to_bind(address.host, several_hosts):
        try:
            return ports.listen_at(host, address.port)
        except OSError as error:
            problem = problem or error
            if error.errno == errno.EADDRINUSE:
                break
    raise RendezvousError(
        f"Rank {cluster.rank} cannot listen at {address}: {problem}. Does the address belong to this machine, does "
        "an earlier run still hold the port, and is every rank started once?"
    ) from problem


def _addresses_to_bind(host: str, several_hosts: bool) -> Iterator[str]:
    """Yields loopback if all ranks are on this host, a literal address itself, and all addresses for a name."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):
            socket.inet_pton(family, host)
            if several_hosts or ports.is_loopback(host):
                yield host
    if not several_hosts:
        yield "127.0.0.1"
        yield "::1"
        return
    yield "::"  # all addresses: the address may be translated on the way
    yield "0.0.0.0"
