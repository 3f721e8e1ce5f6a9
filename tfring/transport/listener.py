"""The listener: the only entry into a process, for the ring, the meeting and the doctor.

    another rank ──Unix socket──►┌──────────┐
    of this host                 │ one loop │──► pending ──► take(...): the ring, the meeting, the doctor
    another rank ──TCP──────────►└──────────┘
    of another host                   └──► unauthenticated: dropped, after _GREETING_SECONDS at the latest

Processes of one host connect through the Unix socket: the kernel tells each side the user of the other, descriptors can
be handed over, and no other process can intercept. The socket is abstract, named after the address of the listener (so
its network namespace is its host), and disappears with the process. TCP is served only if the ranks of a job are on
several hosts or have a secret; processes of one host then fall back to it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

from tfring.transport import handshake, ports, secret, sockets, wire

_MAX_UNAUTHENTICATED = 64  # beyond this the oldest is dropped
_MAX_PENDING = 64  # in addition to two for each rank of the largest job
_GREETING_SECONDS = 10.0  # from a connection to its hello, in total
_PAUSE_SECONDS = 0.1  # before accepting again when descriptors have run out, or another user floods this process
_UNWELCOME_AT_ONCE = 16
_SWEEP_SECONDS = 1.0  # between checks for peers that have gone or waited in vain
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

_log = logging.getLogger(__name__)


class Connection(NamedTuple):
    """A connection with an authenticated peer, and its purpose."""

    channel: wire.Channel
    kind: str
    hello: dict[str, Any]
    until: float  # closed at this time unless it is taken


@dataclasses.dataclass
class _Unauthenticated:
    """A connection that has not sent its hello yet."""

    channel: wire.Channel
    conversation: Generator[wire.Format, wire.Message, None]
    expected: wire.Format
    deadline: float
    peer: str


class _Member(NamedTuple):
    """The rank of this process in a job."""

    rank: int
    world_size: int
    several_hosts: bool


class Listener:
    """Listens for all connections to this process during its lifetime.

    Attributes:
      turned_away: The last connection that was rejected, and the reason; empty if there is none.
    """

    _instances: dict[tuple[int, Any], Listener] = {}
    _instances_lock = threading.Lock()

    @classmethod
    def of(cls, cluster: Any) -> Listener:
        """Admits this job and returns the listener at this rank's address, which is created on first use.

        Raises:
          RendezvousError: If it cannot listen there.
          ConfigurationError: If a secret is required and there is none.
        """
        key = secret.of(cluster)
        # One listener per socket, however its address is spelled: two would take each other's connections.
        fd = cluster.listen_fd
        name = (os.getpid(), cluster.addresses[cluster.rank] if fd is None else os.fstat(fd).st_ino)
        addresses = tuple(cluster.addresses)
        several_hosts = ports.spans_hosts(addresses)
        with cls._instances_lock:
            if several_hosts and name in cls._instances and cls._instances[name]._for_this_host:
                cls._instances.pop(name)._close()  # an earlier job of this rank needed this host only
            if name not in cls._instances:
                tcp = sockets.listen(cluster, several_hosts) if fd is None else socket.socket(fileno=os.dup(fd))
                cls._instances[name] = cls(tcp, key, for_this_host=fd is None and not several_hosts)
            listener = cls._instances[name]
        listener.admit(handshake.job_id(addresses), cluster.rank, len(addresses), several_hosts)
        return listener

    @classmethod
    def at(cls, tcp: socket.socket, key: bytes) -> Listener:
        """Creates the listener for a listening socket; the listener keeps a duplicate of the socket."""
        name = (os.getpid(), os.fstat(tcp.fileno()).st_ino)
        with cls._instances_lock:
            cls._instances[name] = cls(tcp.dup(), key)
            return cls._instances[name]

    @classmethod
    def close_at(cls, listen_fd: int) -> None:
        """Closes the listener of a socket, if there is one, so that its port can be bound again."""
        with cls._instances_lock:
            listener = cls._instances.pop((os.getpid(), os.fstat(listen_fd).st_ino), None)
        if listener is not None:
            listener._close()

    def __init__(self, tcp: socket.socket, key: bytes, for_this_host: bool = False) -> None:
        self.port = tcp.getsockname()[1]
        self._for_this_host = for_this_host
        self._key = key
        self._tcp = tcp
        self._unix = sockets.listen_locally(tcp, with_secret=bool(key))
        self._members: dict[str, _Member] = {}
        self._unauthenticated: dict[int, _Unauthenticated] = {}  # by descriptor, oldest first
        self._pending: list[Connection] = []
        self._changed = threading.Condition()
        self.turned_away = ""
        self._warned = self._closing = False
        self._num_unwelcome = 0
        self._paused_until: float | None = None
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._wake, selectors.EVENT_READ)
        for entry in (self._tcp, self._unix):
            if entry is not None:
                entry.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="tfring-listener", daemon=True)
        self._thread.start()

    def admit(self, job: str, rank: int, world_size: int, several_hosts: bool) -> None:
        """Admits the ranks of a job in which this process is rank `rank`."""
        if several_hosts and not self._key and rank == 0 and not self._members and not self._warned:
            self._warned = True
            _log.warning("%s", secret.warning(f"port {self.port} of {socket.gethostname()}"))
        with self._changed:
            self._members[job] = _Member(rank, world_size, several_hosts)
        self._wake_up()

    def dismiss(self, job: str) -> None:
        """Rejects the ranks of a job from now on."""
        with self._changed:
            self._members.pop(job, None)
        self._wake_up()

    def take(self, wanted: Callable[[Connection], bool], seconds: float) -> Connection | None:
        """Returns a pending connection, which the caller then owns; None if no such connection came in time."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while True:
                self._sweep()
                for connection in self._pending:
                    if wanted(connection):
                        self._pending.remove(connection)
                        connection.channel.deadline = time.monotonic() + _GREETING_SECONDS
                        return connection
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._changed.wait(left)

    def _wake_up(self) -> None:
        with self._changed:
            if not self._closing:
                os.eventfd_write(self._wake, 1)

    def _close(self) -> None:
        with self._changed:
            os.eventfd_write(self._wake, 1)
            self._closing = True
        self._thread.join()

    def _close_in_child(self) -> None:
        """Closes the copies in a forked child, which would otherwise keep the port and the name."""
        for entry in (self._tcp, self._unix, *(connection.channel for connection in self._pending)):
            if entry is not None:
                entry.close()
        for waiting in self._unauthenticated.values():
            waiting.channel.close()
        self._selector.close()
        os.close(self._wake)

    # The loop, in its own thread. It never waits for a peer.

    def _run(self) -> None:
        while not self._closing:
            self._watch_listeners()
            for key, _ in self._selector.select(self._seconds_to_next()):
                if key.fileobj in (self._tcp, self._unix):
                    self._accept(key.fileobj)  # type: ignore[arg-type]  # it is one of the two sockets
                elif key.fd in self._unauthenticated:
                    self._read(self._unauthenticated[key.fd])
                elif key.fd == self._wake:
                    os.eventfd_read(self._wake)
            while (oldest := next(iter(self._unauthenticated.values()), None)) and oldest.deadline <= time.monotonic():
                self._drop(oldest, "it did not identify itself in time")
            with self._changed:
                self._sweep()
        for waiting in list(self._unauthenticated.values()):
            self._drop(waiting, "closed")
        for connection in self._pending:
            connection.channel.close()
        self._selector.close()
        os.close(self._wake)
        for entry in (self._tcp, self._unix):
            if entry is not None:
                entry.close()

    def _watch_listeners(self) -> None:
        if self._paused_until is not None and time.monotonic() >= self._paused_until:
            self._paused_until = None
        with self._changed:
            serve_tcp = bool(self._key) or any(member.several_hosts for member in self._members.values())
        for entry, serve in ((self._unix, True), (self._tcp, serve_tcp)):
            if entry is None:
                continue
            serve = serve and self._paused_until is None
            if serve and entry not in self._selector.get_map():
                self._selector.register(entry, selectors.EVENT_READ)
            elif not serve and entry in self._selector.get_map():
                self._selector.unregister(entry)

    def _seconds_to_next(self) -> float | None:
        times = [waiting.deadline for waiting in itertools.islice(self._unauthenticated.values(), 1)]
        times += [] if self._paused_until is None else [self._paused_until]
        left = [max(0.0, at - time.monotonic()) for at in times] + ([_SWEEP_SECONDS] if self._pending else [])
        return min(left, default=None)

    def _accept(self, entry: socket.socket) -> None:
        try:
            connection, _ = entry.accept()
        except OSError as error:
            if error.errno in _OUT_OF_DESCRIPTORS:
                self._drop_oldest("descriptors have run out")
                self._paused_until = time.monotonic() + _PAUSE_SECONDS
            return
        peer = sockets.describe_peer(connection)
        if connection.family == socket.AF_UNIX and sockets.peer_of(connection)[1] != os.geteuid():
            self._note(peer, "it belongs to another user")
            connection.close()
            self._num_unwelcome += 1
            if self._num_unwelcome % _UNWELCOME_AT_ONCE == 0:  # a flood of them would keep this process busy
                self._paused_until = time.monotonic() + _PAUSE_SECONDS
            return
        if len(self._unauthenticated) >= _MAX_UNAUTHENTICATED:
            self._drop_oldest("too many others connected after it")
        channel = wire.Channel(connection, 0.0, connects=False)  # the deadline is now: sending never waits here
        conversation = handshake.answer(channel, self._key)
        deadline = time.monotonic() + _GREETING_SECONDS
        waiting = _Unauthenticated(channel, conversation, next(conversation), deadline, peer)
        self._unauthenticated[connection.fileno()] = waiting
        self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, waiting: _Unauthenticated) -> None:
        try:
            while (message := waiting.channel.try_receive(waiting.expected)) is not None:
                if waiting.expected is handshake.HELLOS:
                    self._forget(waiting)
                    self._receive_hello(waiting.channel, message.kind, message.fields)
                    return
                waiting.expected = waiting.conversation.send(message)
        except (OSError, wire.WireError) as error:
            self._drop(waiting, str(error))

    def _receive_hello(self, channel: wire.Channel, kind: str, hello: dict[str, Any]) -> None:
        """Answers an authenticated peer, or keeps its connection pending."""
        with self._changed:
            member = self._members.get(hello["job"])
        try:
            if member is None:
                channel.send("refused", why="a process of another job listens there", final=False)
            elif kind == "probe":
                channel.send("here", rank=member.rank)
            elif hello["to"] != member.rank:
                why = f"the process there says that it is rank {member.rank}. Is every rank started once?"
                channel.send("refused", why=why, final=False)
            else:
                sockets.no_delay(channel.socket)
                self._keep(Connection(channel, kind, hello, time.monotonic() + hello["seconds"]))
                return
        except OSError:
            pass
        channel.close()

    def _keep(self, connection: Connection) -> None:
        with self._changed:
            for other in list(self._pending):
                if _is_same_claim(other, connection):  # the new one replaces it: the old one may have lost its host
                    self._pending.remove(other)
                    if other.hello.get("process") != connection.hello.get("process"):
                        why = handshake.claimed_twice(connection.hello["rank"])
                        with contextlib.suppress(OSError):
                            other.channel.send("refused", why=why, final=True)
                    other.channel.close()
            most = _MAX_PENDING + 2 * max((member.world_size for member in self._members.values()), default=0)
            if len(self._pending) >= most:
                self._pending.pop(0).channel.close()
            self._pending.append(connection)
            self._changed.notify_all()

    def _sweep(self) -> None:
        """Closes pending connections that have gone or waited in vain. The caller must hold `_changed`."""
        now = time.monotonic()
        for connection in list(self._pending):
            if connection.until <= now or connection.channel.is_closed_by_peer:
                self._pending.remove(connection)
                connection.channel.close()

    def _drop_oldest(self, why: str) -> None:
        for waiting in list(self._unauthenticated.values())[:1]:
            self._drop(waiting, why)

    def _drop(self, waiting: _Unauthenticated, why: str) -> None:
        self._forget(waiting)
        self._note(waiting.peer, why)
        waiting.channel.close()

    def _forget(self, waiting: _Unauthenticated) -> None:
        fd = waiting.channel.socket.fileno()
        del self._unauthenticated[fd]
        self._selector.unregister(fd)

    def _note(self, peer: str, why: str) -> None:
        self.turned_away = f"{peer}: {why}"
        _log.debug("turned away %s", self.turned_away)


def _is_same_claim(one: Connection, other: Connection) -> bool:
    names = ("job", "rank", "session" if one.kind == "data" else "ring")
    return one.kind == other.kind and all(one.hello.get(name) == other.hello.get(name) for name in names)


def _close_all_in_child() -> None:
    for (pid, _), listener in Listener._instances.items():
        if pid != os.getpid():
            listener._close_in_child()
    Listener._instances.clear()
    Listener._instances_lock = threading.Lock()  # the thread that held it stayed in the parent


os.register_at_fork(after_in_child=_close_all_in_child)
