"""Dialing: connects to the listener of another process and proves knowledge of the job's secret."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from tfring.transport import handshake, ports, secret, sockets, wire
from tfring.transport.address import Address, parse_address


def dial(
    address: Address,
    key: bytes,
    kind: str,
    hello: dict[str, Any] | Callable[[socket.socket], dict[str, Any]],
    *,
    network: bool,
    seconds: float,
    wait_for: Callable[[], bool] = lambda: True,
) -> wire.Channel:
    """Connects to the listener of a rank, proves knowledge of the secret and sends its hello.

    Args:
      address: The address at which the rank listens.
      key: The secret, or empty bytes.
      kind: A kind of HELLOS.
      hello: The fields of the hello except `seconds`, or a function that returns them, given the connection.
      network: Whether TCP may be used if no process of this user listens on this host.
      seconds: Time for all messages on this channel, until the caller sets another deadline.
      wait_for: A function that is called while no data arrives. Returns whether to continue to wait.

    Returns:
      The channel of the connection.

    Raises:
      wire.NoProofError: If the other side has another secret.
      wire.WireError: If another program answers.
      wire.GivenUpError: If `wait_for` returned False.
      OSError: If there is no answer.
    """
    place = (ports.resolve(address.host), address.port)
    deadline = time.monotonic() + seconds
    connection = _connect(*place, network=network, deadline=deadline, wait_for=wait_for)
    return _introduce(connection, place, key, kind, hello, deadline, wait_for)


class Probed(NamedTuple):
    """The process that a probe found."""

    local: str  # the address of this host on the route to it
    rank: int | None  # the rank that the process reports
    problem: Exception | None  # why its rank is not known


def probe(cluster: Any, rank: int, seconds: float) -> Probed:
    """Probes the process that listens at a rank's address.

    Raises:
      OSError: If there is none.
    """
    addresses = tuple(cluster.addresses)
    address, key = parse_address(addresses[rank]), secret.of(cluster)
    place = hosts, _ = ports.resolve(address.host), address.port
    network = bool(key) or ports.spans_hosts(addresses)
    deadline = time.monotonic() + seconds
    try:
        connection = _connect(*place, network=network, deadline=deadline)
    except ConnectionRefusedError:
        if network:
            raise
        # Another program may listen there; it gets only a challenge.
        connection = _connect(*place, network=True, deadline=deadline)
    local = hosts[0] if connection.family == socket.AF_UNIX else str(connection.getsockname()[0])
    try:
        if connection.family != socket.AF_UNIX and not network:
            with wire.Channel(connection, deadline, connects=True) as other:
                other.challenge()
                other.receive(wire.Channel.CHALLENGES)
            raise handshake.RefusedError(f"not a process of user {os.geteuid()} on this host")
        hello = {"job": handshake.job_id(addresses), "rank": cluster.rank, "to": rank}
        with _introduce(connection, place, key, "probe", hello, deadline) as channel:
            answer = channel.receive(handshake.ANSWERS_TO_PROBE)
        if answer.kind == "refused":
            raise handshake.RefusedError(answer.fields["why"], answer.fields["final"])
        return Probed(local, answer.fields["rank"], None)
    except (OSError, wire.WireError, handshake.RefusedError) as error:
        return Probed(local, None, error)


def _connect(
    hosts: list[str], port: int, *, network: bool, deadline: float, wait_for: Callable[[], bool] = lambda: True
) -> socket.socket:
    connection = sockets.connect_locally(hosts, port, strict=not network)
    if connection is not None:
        return connection
    if not network:
        raise ConnectionRefusedError(errno.ECONNREFUSED, f"refused: no process of user {os.geteuid()} listens there")
    problems = []
    # If all ranks are on this host, they listen only at its loopback addresses.
    for host in dict.fromkeys((*hosts, *(sockets.LOOPBACKS if any(map(ports.is_local, hosts)) else ()))):
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0]
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            wire.connect(connection, where, min(deadline, time.monotonic() + sockets.CONNECT_SECONDS), wait_for)
            sockets.no_delay(connection)
            return connection
        except OSError as error:
            connection.close()
            problems.append(error)
        except BaseException:
            connection.close()
            raise
    raise problems[0]


def _introduce(
    connection: socket.socket,
    place: tuple[list[str], int],
    key: bytes,
    kind: str,
    hello: dict[str, Any] | Callable[[socket.socket], dict[str, Any]],
    deadline: float,
    wait_for: Callable[[], bool] = lambda: True,
) -> wire.Channel:
    channel = wire.Channel(connection, deadline, connects=True)
    try:
        channel.wait_for = wait_for
        channel.prove_first(key)
        # The process may have started to listen at its Unix socket in the meantime.
        if not channel.is_local and (nearer := sockets.connect_locally(*place, strict=False)) is not None:
            channel.close()
            channel = wire.Channel(nearer, deadline, connects=True)
            channel.wait_for = wait_for
            channel.prove_first(key)
        fields = hello(channel.socket) if callable(hello) else hello
        left = min(handshake.MAX_SECONDS, max(1, int(deadline - time.monotonic())))
        channel.send(kind, **fields, seconds=left)
        return channel
    except BaseException:
        channel.close()
        raise
