"""Where a source gives no addresses, ranks tell rank 0 where they listen, and it tells all.

    rank r                                        rank 0
      │ (1) job, rank, host, port ───────────────► │     the host as seen on the way to rank 0
      │ ◄───────────────────────── here I am (2) │     or: refused, and why
      │ ◄───────────── hosts and ports of all (3) │     once every rank has come

Each message is a line of JSON. The socket a rank listens on stays open and becomes the cluster's `listen_fd`, so nobody
takes its port in between; rank 0 meets the others at the one it keeps. Where nothing says at which port that
is, it follows from the job's name: rank 0 takes the first that is free of a few, and the others try them all.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import time
from typing import Any

from tfring import config
from tfring.cluster import ports
from tfring.cluster.address import Address
from tfring.cluster.cluster import Cluster
from tfring.cluster.seat import Seat
from tfring.errors import ConfigurationError, RendezvousError

_GREETING = "tfring meeting 1"
_DIAL_SECONDS = 2.0  # for rank 0 to take a connection and say that it is there
_PAUSE_SECONDS = 0.1
_MAX_LINE_BYTES = 1 << 20

_met: dict[tuple[int, Seat], Cluster] = {}  # by process id: ranks meet once


class _Refused(Exception):
    """Rank 0 answered, and said no."""


def meet(seat: Seat) -> Cluster:
    """Exchanges addresses with the other ranks; a second time in one process, says the same.

    Raises:
        RendezvousError: Not all ranks came within `TFRING_CONNECT_TIMEOUT_SECONDS`, or two claim one rank.
        ConfigurationError: Rank 0 cannot listen where it should.
    """
    key = (os.getpid(), seat)
    if key not in _met:
        _met[key] = Cluster.alone(seat.source) if seat.world_size == 1 else _Meeting(seat).run()
    return _met[key]


def forget_listener(cluster: Cluster, without: Cluster) -> None:
    """Has `meet` say `without` where it said `cluster`, whose socket is closed."""
    for key, met in _met.items():
        if met == cluster:
            _met[key] = without


class _Meeting:
    """One rank's part."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self.seconds = config.read("TFRING_CONNECT_TIMEOUT_SECONDS")
        self.deadline = time.monotonic() + self.seconds
        self.host = seat.host
        self.loopback = seat.is_on_one_host
        self.ports = [seat.port] if seat.port else ports.candidates(f"{seat.source} {seat.job}")

    def run(self) -> Cluster:
        if self.seat.rank == 0:
            self._check_host()
            listener = ports.open_listener(None if self.seat.share else self.ports, loopback=self.loopback)
        else:
            listener = ports.open_listener(loopback=self.loopback, avoid=self.ports)
        try:
            if self.seat.share is not None:
                self._share_place(listener)
            places = self._gather(listener) if self.seat.rank == 0 else self._tell(listener)
            return self._cluster(places, listener.detach())
        finally:
            listener.close()

    def _cluster(self, places: list[dict[str, Any]], listen_fd: int) -> Cluster:
        identities = [place["identity"] for place in places]
        mine = identities[self.seat.rank]
        return Cluster(
            rank=self.seat.rank,
            world_size=self.seat.world_size,
            local_rank=identities[: self.seat.rank].count(mine),
            local_world_size=identities.count(mine),
            num_nodes=len(set(identities)),
            addresses=tuple(str(Address(place["host"], place["port"])) for place in places),
            source=self.seat.source,
            listen_fd=listen_fd,
        )

    def _share_place(self, listener: socket.socket) -> None:
        assert self.seat.share is not None
        place = json.loads(self.seat.share(json.dumps([ports.own_address(), listener.getsockname()[1]])))
        self.host, self.ports = place[0], [place[1]]

    def _check_host(self) -> None:
        """Where the host of rank 0 was inferred: better an error at once than ranks that wait for each other."""
        if not self.seat.remedy:
            return
        try:
            with socket.socket(socket.AF_INET6 if ":" in self.host else socket.AF_INET) as probe:
                probe.bind((self.host, 0))
        except OSError as error:
            raise ConfigurationError(
                f"{self.seat.source} does not say on which host rank 0 is. Received: {self.host!r} by inference, "
                f"which is not this host, {socket.gethostname()} ({error}). {self.seat.remedy}"
            ) from None

    # Rank 0.

    def _gather(self, listener: socket.socket) -> list[dict[str, Any]]:
        """Hears every rank (1), (2), then tells all (3)."""
        connections: dict[int, socket.socket] = {}
        port = listener.getsockname()[1]
        here = ports.named_address()
        places = {0: {"host": here or "127.0.0.1", "port": port, "identity": ports.host_identity()}}
        listener.setblocking(False)
        waiting: dict[socket.socket, bytes] = {}
        with selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            try:
                while len(places) < self.seat.world_size:
                    left = self.deadline - time.monotonic()
                    if left <= 0:
                        raise self._missing(sorted(set(range(self.seat.world_size)) - set(places)))
                    for key, _ in selector.select(left):
                        if key.fileobj is listener:
                            with contextlib.suppress(OSError):
                                connection, _ = listener.accept()
                                connection.setblocking(False)
                                selector.register(connection, selectors.EVENT_READ)
                                waiting[connection] = b""
                            continue
                        connection = key.fileobj  # type: ignore[assignment]
                        line = _more_of_line(connection, waiting)
                        if line is None:
                            continue
                        selector.unregister(connection)
                        del waiting[connection]
                        self._hear(connection, line, places, connections)
                outward = _outward(connections, here)
                for place in places.values():
                    if ports.is_loopback(place["host"]) and outward is not None:
                        place["host"] = outward
                table = [places[rank] for rank in range(self.seat.world_size)]
                for connection in connections.values():
                    with contextlib.suppress(OSError):  # it has died; the ring will say so
                        connection.settimeout(_DIAL_SECONDS)
                        _send(connection, {"places": table})
                return table
            finally:
                for connection in (*waiting, *connections.values()):
                    connection.close()
                listener.setblocking(True)

    def _hear(
        self,
        connection: socket.socket,
        line: bytes,
        places: dict[int, dict[str, Any]],
        connections: dict[int, socket.socket],
    ) -> None:
        connection.settimeout(_DIAL_SECONDS)
        try:
            message = json.loads(line)
            rank, place = message["rank"], {name: message[name] for name in ("host", "port", "identity")}
            ports.is_loopback(place["host"])  # or it is no address
            known = message["greeting"] == _GREETING
            refusal = self._refusal(message, places.get(rank)) if known else "another protocol"
            if refusal is not None:
                _send(connection, {"refused": refusal, "final": known and message["job"] == self.seat.job})
                connection.close()
                return
            if rank in connections:
                connections[rank].close()  # it dialled again
            _send(connection, {"greeting": _GREETING})
        except (OSError, ValueError, KeyError, TypeError):  # no rank of ours
            connection.close()
            return
        places[rank], connections[rank] = place, connection

    def _refusal(self, message: dict[str, Any], place: dict[str, Any] | None) -> str | None:
        if message["job"] != self.seat.job:
            return f"another job meets here: {self.seat.job}"
        if message["world_size"] != self.seat.world_size or not 0 < message["rank"] < self.seat.world_size:
            return (
                f"{self.seat.source} says rank 0 of {self.seat.world_size} to one process, and rank "
                f"{message['rank']} of {message['world_size']} to another"
            )
        if place is not None and (place["port"], place["identity"]) != (message["port"], message["identity"]):
            return f"two processes say that they are rank {message['rank']}. Is every rank started once?"
        return None

    def _missing(self, ranks: list[int]) -> RendezvousError:
        names = ", ".join(map(str, ranks[:20])) + (", ..." if len(ranks) > 20 else "")
        return RendezvousError(
            f"Rank 0 of {self.seat.world_size} (from {self.seat.source}) listened at {self._where()} for "
            f"{self.seconds:g} s, but rank{'s' if len(ranks) > 1 else ''} {names} never came. Are they started, and is "
            f"the port open between the hosts? {self._hint()}"
        )

    # The others.

    def _tell(self, listener: socket.socket) -> list[dict[str, Any]]:
        """Finds rank 0, tells it where this rank listens, and hears of all."""
        reasons: dict[int, str] = {}
        while time.monotonic() < self.deadline:
            for port in self.ports:
                try:
                    return self._attempt(port, listener.getsockname()[1])
                except _Refused as refused:
                    reasons[port] = str(refused)
                except (OSError, ValueError, KeyError, TypeError) as error:
                    reasons[port] = getattr(error, "strerror", None) or str(error) or type(error).__name__
            time.sleep(_PAUSE_SECONDS)
        why = "; ".join(f"port {port}: {reason}" for port, reason in reasons.items())
        raise RendezvousError(
            f"Rank {self.seat.rank} of {self.seat.world_size} (from {self.seat.source}) looked for rank 0 at "
            f"{self._where()} for {self.seconds:g} s. {why}. Is rank 0 started on that host, and is the port open? "
            f"{self._hint()}"
        )

    def _attempt(self, port: int, my_port: int) -> list[dict[str, Any]]:
        here = ports.named_address()
        source = None if here is None or self.loopback else (here, 0)
        with socket.create_connection((self.host, port), _DIAL_SECONDS, source) as connection:
            message = {
                "greeting": _GREETING,
                "job": self.seat.job,
                "rank": self.seat.rank,
                "world_size": self.seat.world_size,
                "host": connection.getsockname()[0],
                "port": my_port,
                "identity": ports.host_identity(),
            }
            _send(connection, message)
            with connection.makefile("rb") as lines:
                answer = json.loads(lines.readline(_MAX_LINE_BYTES))
                if "refused" in answer:
                    if answer["final"]:
                        raise RendezvousError(f"Rank 0 refused rank {self.seat.rank}: {answer['refused']}.")
                    raise _Refused(answer["refused"])
                if answer["greeting"] != _GREETING:
                    raise ValueError("another protocol")
                connection.settimeout(max(_DIAL_SECONDS, self.deadline - time.monotonic()))
                line = lines.readline(_MAX_LINE_BYTES)
                if not line:
                    raise ConnectionError("rank 0 went away before all ranks had come")
                return json.loads(line)["places"]

    def _where(self) -> str:
        several = f"{self.host}, ports {', '.join(map(str, self.ports))}"
        return str(Address(self.host, self.ports[0])) if len(self.ports) == 1 else several

    def _hint(self) -> str:
        return self.seat.remedy or (
            "Rank 0's host and port can be named, ports and interface chosen:\n  export TFRING_RENDEZVOUS=node1:20000\n"
            "  export TFRING_PORT_RANGE=20000-20100 TFRING_INTERFACE=eth0"
        )


def _outward(connections: dict[int, socket.socket], named: str | None) -> str | None:
    """Rank 0's address as other hosts reach it; None where all ranks are on its own."""
    if named is not None:
        return named
    for _, connection in sorted(connections.items()):
        with contextlib.suppress(OSError):
            host = _plain(connection.getsockname()[0])
            if not ports.is_loopback(host):
                return host
    return None


def _plain(host: str) -> str:
    return host.removeprefix("::ffff:")


def _more_of_line(connection: socket.socket, waiting: dict[socket.socket, bytes]) -> bytes | None:
    """What the connection has sent, once it is a line or will become none."""
    try:
        data = connection.recv(4096)
    except OSError:
        data = b""
    waiting[connection] += data
    text = waiting[connection]
    return text if not data or text.endswith(b"\n") or len(text) > _MAX_LINE_BYTES else None


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")
