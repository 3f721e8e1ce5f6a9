"""Resolves a cluster without addresses: ranks send their addresses to rank 0, which sends the list to all.

    rank r                                        rank 0
      │ (1) hello, meeting: rank, host, port ────► │     through its listener; the host as seen on the way
      │ ◄───────────────────────────── heard (2) │     or: refused, and why
      │ ◄───────────── hosts and ports of all (3) │     once every rank has come

The socket on which a rank listens stays open and becomes the cluster's `listen_fd`, so no process can take its port in
between. Rank 0 uses that socket for this exchange, too. If no source names its port, candidates are derived from the
job's name: rank 0 uses the first one that is free, and the others try all of them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import time
from typing import Any

from tfring import config
from tfring.cluster.cluster import Cluster
from tfring.cluster.unresolved import UnresolvedCluster
from tfring.errors import ConfigurationError, RendezvousError
from tfring.transport import dial, handshake, listener, ports, secret, wire
from tfring.transport.address import Address

_DIAL_SECONDS = 2.0  # for rank 0 to accept a connection and answer
_PAUSE_SECONDS = 0.1
_PLACE = {
    "host": wire.text(64, "[0-9a-zA-Z:.%]+"),
    "port": wire.integer(1, 65535),
    "identity": wire.text(400),
}
_ANSWERS = wire.Format({"heard": {}, "refused": handshake.REFUSED}, max_json_bytes=8192)
_log = logging.getLogger(__name__)

_met: dict[tuple[int, UnresolvedCluster], Cluster] = {}  # by process id, so that ranks exchange addresses once


def meet(unresolved: UnresolvedCluster) -> Cluster:
    """Exchanges addresses with the other ranks; a second call in one process returns the same cluster.

    Raises:
      RendezvousError: If not all ranks connect within `TFRING_CONNECT_TIMEOUT_SECONDS`, or if two claim one rank.
      ConfigurationError: If rank 0 cannot listen at the address it should.
    """
    key = (os.getpid(), unresolved)
    if key not in _met:
        _met[key] = Cluster.alone(unresolved.source) if unresolved.world_size == 1 else _AddressGather(unresolved).run()
    return _met[key]


def forget_listener(cluster: Cluster, without: Cluster) -> None:
    """Makes `meet` return `without` instead of `cluster`, as its socket is closed."""
    for key, met in _met.items():
        if met == cluster:
            _met[key] = without


class _AddressGather:
    """Runs one rank's side of the exchange."""

    def __init__(self, unresolved: UnresolvedCluster) -> None:
        self.unresolved = unresolved
        self.seconds = config.read("TFRING_CONNECT_TIMEOUT_SECONDS")
        self.deadline = time.monotonic() + self.seconds
        self.host = unresolved.host
        one_host = unresolved.is_on_one_host or _is_this_host(unresolved)
        self.loopback = unresolved.is_on_one_host or (one_host and config.read("TFRING_INTERFACE") is None)
        self.job = handshake.digest(f"{unresolved.source} {unresolved.job}")
        self.key = b"" if unresolved.share is not None else secret.of(unresolved)
        self.network = bool(self.key) or not one_host
        self.secret: str | None = None  # set if the source shares it
        self.process = secrets.token_hex(16)
        self.ports, self.remedy = ports.candidates(f"{unresolved.source} {unresolved.job}"), None
        if unresolved.port:
            self.remedy = f"Name another one, on all ranks:\n  export TFRING_PORT={self.ports[0]}"
            self.ports = [unresolved.port]

    def run(self) -> Cluster:
        if self.unresolved.rank == 0:
            self._check_host()
            among = None if self.unresolved.share else self.ports
            tcp = ports.open_listener(among, loopback=self.loopback, remedy=self.remedy)
        else:
            tcp = ports.open_listener(loopback=self.loopback, avoid=self.ports)
        try:
            if self.unresolved.share is not None:
                self._share_place(tcp)
            places = self._gather(tcp) if self.unresolved.rank == 0 else self._tell(tcp)
            return self._cluster(places, tcp.detach())
        finally:
            tcp.close()

    def _cluster(self, places: list[dict[str, Any]], listen_fd: int) -> Cluster:
        identities = [place["identity"] for place in places]
        mine = identities[self.unresolved.rank]
        return Cluster(
            rank=self.unresolved.rank,
            world_size=self.unresolved.world_size,
            local_rank=identities[: self.unresolved.rank].count(mine),
            local_world_size=identities.count(mine),
            num_nodes=len(set(identities)),
            addresses=tuple(str(Address(place["host"], place["port"])) for place in places),
            source=self.unresolved.source,
            listen_fd=listen_fd,
            secret=self.secret,
        )

    def _share_place(self, tcp: socket.socket) -> None:
        assert self.unresolved.share is not None
        mine = [ports.own_address(), tcp.getsockname()[1], secret.configured() or secret.fresh()]
        self.host, port, self.secret = json.loads(self.unresolved.share(json.dumps(mine)))
        self.ports, self.key = [port], self.secret.encode()

    def _check_host(self) -> None:
        """Raises ConfigurationError if the inferred host of rank 0 is not this host; ranks would wait in vain."""
        if not self.unresolved.remedy:
            return
        try:
            with socket.socket(socket.AF_INET6 if ":" in self.host else socket.AF_INET) as probe:
                probe.bind((self.host, 0))
        except OSError as error:
            raise ConfigurationError(
                f"{self.unresolved.source} does not say on which host rank 0 is: it seems to be {self.host!r}, which "
                f"is not this host, {socket.gethostname()} ({error}). {self.unresolved.remedy}"
            ) from None

    # Rank 0.

    def _gather(self, tcp: socket.socket) -> list[dict[str, Any]]:
        """Receives the addresses of every rank (1), (2), then sends the list to all (3)."""
        connections: dict[int, listener.Connection] = {}
        here = None if self.loopback else ports.named_address()
        port = tcp.getsockname()[1]
        places = {0: {"host": here or "127.0.0.1", "port": port, "identity": ports.host_identity()}}
        listening = listener.Listener.at(tcp, self.key)
        listening.admit(self.job, 0, self.unresolved.world_size, several_hosts=self.network)
        try:
            while len(places) < self.unresolved.world_size:
                left = self.deadline - time.monotonic()
                connection = listening.take(lambda it: (it.kind, it.hello["job"]) == ("meeting", self.job), left)
                if connection is None:
                    missing = sorted(set(range(self.unresolved.world_size)) - set(places))
                    raise self._missing(missing, listening.turned_away)
                self._register(connection, places, connections)
            outward = _outward(connections, here)
            for place in places.values():
                if ports.is_loopback(place["host"]) and outward is not None:
                    place["host"] = outward
            table = [places[rank] for rank in range(self.unresolved.world_size)]
            for connection in connections.values():
                connection.channel.deadline = time.monotonic() + _DIAL_SECONDS
                with contextlib.suppress(OSError):  # the rank has died, which the ring will report
                    connection.channel.send("places", **_columns(table))
            return table
        except BaseException:
            listener.Listener.close_at(tcp.fileno())
            raise
        finally:
            listening.dismiss(self.job)
            for connection in connections.values():
                connection.channel.close()

    def _register(
        self, connection: listener.Connection, places: dict[int, Any], connections: dict[int, listener.Connection]
    ) -> None:
        hello, channel = connection.hello, connection.channel
        rank, place = hello["rank"], {name: hello[name] for name in _PLACE}
        refusal = self._refusal(hello, places.get(rank))
        try:
            ports.is_loopback(place["host"])  # raises if it is not an address
            if refusal is not None:
                channel.send("refused", why=refusal, final=True)
                channel.close()
                return
            channel.send("heard")
        except (OSError, ValueError):
            channel.close()
            return
        came_from = _peer_address(channel.socket)
        if came_from not in (None, place["host"]):
            _log.warning(
                "Rank %d says that it listens at %s, but connects from %s. Is there address translation in between?",
                rank,
                place["host"],
                came_from,
            )
        if rank in connections:
            connections[rank].channel.close()  # the rank has connected again
        places[rank], connections[rank] = place, connection

    def _refusal(self, hello: dict[str, Any], place: dict[str, Any] | None) -> str | None:
        if hello["world_size"] != self.unresolved.world_size or not 0 < hello["rank"] < self.unresolved.world_size:
            return (
                f"{self.unresolved.source} gives one process rank 0 of {self.unresolved.world_size}, and another rank "
                f"{hello['rank']} of {hello['world_size']}."
            )
        if place is not None and (place["port"], place["identity"]) != (hello["port"], hello["identity"]):
            return handshake.claimed_twice(hello["rank"])
        return None

    def _missing(self, ranks: list[int], turned_away: str) -> RendezvousError:
        names = ", ".join(map(str, ranks[:20])) + (", ..." if len(ranks) > 20 else "")
        return RendezvousError(
            f"Rank 0 of {self.unresolved.world_size} (from {self.unresolved.source}) listened at {self._where()} for "
            f"{self.seconds:g} s, but rank{'s' if len(ranks) > 1 else ''} {names} never connected. "
            + (f"Turned away: {turned_away}. " if turned_away else "")
            + f"Are they started, and is the port open between the hosts? {self._hint()}"
        )

    # The other ranks.

    def _tell(self, tcp: socket.socket) -> list[dict[str, Any]]:
        """Finds rank 0, sends it this rank's address, and receives the addresses of all ranks."""
        reasons: dict[int, str] = {}
        while time.monotonic() < self.deadline:
            for port in self.ports:
                try:
                    return self._attempt(port, tcp.getsockname()[1])
                except (OSError, ValueError, handshake.RefusedError) as error:
                    reasons[port] = getattr(error, "strerror", None) or str(error) or type(error).__name__
            time.sleep(_PAUSE_SECONDS)
        why = "; ".join(f"port {port}: {reason}" for port, reason in reasons.items())
        raise RendezvousError(
            f"Rank {self.unresolved.rank} of {self.unresolved.world_size} (from {self.unresolved.source}) looked for "
            f"rank 0 at {self._where()} for {self.seconds:g} s. {why}. Is rank 0 started on that host, and is the "
            f"port open? {self._hint()}"
        )

    def _attempt(self, port: int, my_port: int) -> list[dict[str, Any]]:
        hello = {
            "job": self.job,
            "rank": self.unresolved.rank,
            "to": 0,
            "world_size": self.unresolved.world_size,
            "port": my_port,
            "identity": ports.host_identity(),
            "process": self.process,
        }
        channel = dial.dial(
            Address(self.host, port),
            self.key,
            "meeting",
            lambda connection: {**hello, "host": self._address_of(connection)},
            network=self.network,
            seconds=_DIAL_SECONDS,
        )
        with channel:
            answer = channel.receive(_ANSWERS)
            if answer.kind == "refused" and answer.fields["final"]:
                raise RendezvousError(f"Rank 0 refused rank {self.unresolved.rank}: {answer.fields['why']}")
            if answer.kind == "refused":
                raise handshake.RefusedError(answer.fields["why"])
            channel.deadline = max(time.monotonic() + _DIAL_SECONDS, self.deadline)
            return _rows(channel.receive(self.tables()).fields, self.unresolved.world_size)

    def tables(self) -> wire.Format:
        """Returns the format of the list that rank 0 sends to all."""
        count = self.unresolved.world_size
        columns = {name: wire.list_of(field, count) for name, field in _PLACE.items()}
        return wire.Format({"places": columns}, max_json_bytes=1024 + 600 * count)

    def _address_of(self, connection: socket.socket) -> str:
        """Returns this host's address as rank 0 sees it."""
        host = None if self.loopback else ports.named_address()
        if host is None:
            host = "127.0.0.1" if connection.family == socket.AF_UNIX else _plain(connection.getsockname()[0])
        return host

    def _where(self) -> str:
        several = f"{self.host}, ports {', '.join(map(str, self.ports))}"
        return str(Address(self.host, self.ports[0])) if len(self.ports) == 1 else several

    def _hint(self) -> str:
        return self.unresolved.remedy or (
            "You can set rank 0's host and port, the ports and the interface:\n  export TFRING_RENDEZVOUS=node1:20000\n"
            "  export TFRING_PORT_RANGE=20000-20100 TFRING_INTERFACE=eth0"
        )


def _is_this_host(unresolved: UnresolvedCluster) -> bool:
    """Returns True if rank 0 is at a loopback address, so that all ranks are on its host."""
    if unresolved.share is not None:
        return False
    with contextlib.suppress(OSError):
        return all(ports.is_loopback(host) for host in ports.resolve(unresolved.host))
    return False


def _outward(connections: dict[int, listener.Connection], named: str | None) -> str | None:
    """Returns the address at which other hosts reach rank 0; None if all ranks are on its host."""
    if named is not None:
        return named
    for _, connection in sorted(connections.items()):
        with contextlib.suppress(OSError):
            end = connection.channel.socket
            host = None if end.family == socket.AF_UNIX else end.getsockname()[0]
            if host is not None and not ports.is_loopback(_plain(host)):
                return _plain(host)
    return None


def _peer_address(connection: socket.socket) -> str | None:
    """Returns the address of the peer; None for a peer on this host."""
    if connection.family == socket.AF_UNIX:
        return None
    host = _plain(connection.getpeername()[0])
    return None if ports.is_local(host) else host


def _plain(host: str) -> str:
    return host.removeprefix("::ffff:")


def _columns(table: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [place[name] for place in table] for name in _PLACE}


def _rows(columns: dict[str, list[Any]], count: int) -> list[dict[str, Any]]:
    if any(len(column) != count for column in columns.values()):
        raise wire.WireError("places of a different number of ranks")
    return [{name: columns[name][rank] for name in _PLACE} for rank in range(count)]
