"""The one way into a process: who connects proves itself, says what for, and is handed to whom it asks for.

    another rank ──Unix socket──►┌──────────┐
    of this host                 │ one loop │──► parked ──► take(...): the ring, the meeting, the doctor
    another rank ──TCP──────────►└──────────┘
    of another host                   └──► strangers: dropped, after _GREETING_SECONDS at the latest

Between processes of one host the Unix socket is the only way, or the first choice where there is a secret: the kernel
tells each side which user the other is, descriptors can be handed over, and nobody can stand in between. It is
abstract, named after where the process listens (so its network namespace is its host), and gone with the process. TCP
is served where the ranks of a job are on several hosts or have a secret.

What is said is defined in tfring/wire.py; after the proofs, the one that connects says one of HELLOS.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import itertools
import logging
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple

from tfring import wire
from tfring.cluster import ports, secret
from tfring.cluster.address import Address, host_key, parse_address
from tfring.errors import RendezvousError

MAX_RANKS = 1 << 20
_MAX_STRANGERS = 64  # the oldest is dropped for the next
_MAX_PARKED = 64  # beside two for each rank of the largest job
_GREETING_SECONDS = 10.0  # for a connection to say what it is, all in all
_DIAL_SECONDS = 5.0
_MAX_SECONDS = 10**7
_PAUSE_SECONDS = 0.1  # before accepting again when descriptors have run out, or another user floods this process
_UNWELCOME_AT_ONCE = 16
_SWEEP_SECONDS = 1.0  # between looks at who has gone or waited in vain
_LOOPBACKS = ("127.0.0.1", "::1")
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PEER = struct.Struct("3i")  # process, user, group
_TIME = struct.Struct("ll")  # seconds, microseconds

JOB = wire.text(16, "[0-9a-f]{16}")
_TOKEN = wire.text(32, "[0-9a-f]{32}")
_WHO = {
    "job": JOB,
    "rank": wire.integer(0, MAX_RANKS),  # of the one that connects,
    "to": wire.integer(0, MAX_RANKS),  # and of whom it wants
    "seconds": wire.integer(1, _MAX_SECONDS),  # how long it waits to be taken
}
HELLOS = wire.Format(
    {
        "probe": _WHO,
        "doctor": _WHO,
        "ring": {
            **_WHO,
            "ring": wire.text(200),
            "transport": wire.one_of("auto", "shm", "tcp"),
            "process": _TOKEN,
            "session": _TOKEN,
        },
        "data": {**_WHO, "session": _TOKEN},
        "meeting": {
            **_WHO,
            "world_size": wire.integer(2, MAX_RANKS),
            "host": wire.text(64, "[0-9a-fA-F:.%a-zA-Z]+"),
            "port": wire.integer(1, 65535),
            "identity": wire.text(400),
            "process": _TOKEN,
        },
    }
)
REFUSED = {"why": wire.REASON, "final": wire.one_of(False, True)}
_ANSWERS_TO_PROBE = wire.Format({"here": {"rank": wire.integer(0, MAX_RANKS)}, "refused": REFUSED}, max_json_bytes=8192)

_log = logging.getLogger(__name__)


class RefusedError(Exception):
    """The other side answered, and said no."""

    def __init__(self, why: str, final: bool = False) -> None:
        super().__init__(why)
        self.final = final


class Guest(NamedTuple):
    """Who has come in."""

    channel: wire.Channel
    kind: str
    hello: dict[str, Any]
    until: float  # it waits no longer


@dataclasses.dataclass
class _Stranger:
    """Who has not said yet what it wants."""

    channel: wire.Channel
    conversation: Generator[wire.Format, wire.Message, None]
    expected: wire.Format
    deadline: float
    peer: str


class _Member(NamedTuple):
    """What this process is in a job."""

    rank: int
    world_size: int
    several_hosts: bool


def job_id(addresses: tuple[str, ...]) -> str:
    """Tells jobs apart: ranks with other addresses belong to another job."""
    return digest("\n".join(addresses))


def claimed_twice(rank: int) -> str:
    """Returns the reason for rejecting one of two processes of one rank."""
    return f"two processes say that they are rank {rank}. Is every rank started once?"


def digest(text: str) -> str:
    """A name for a job that says nothing about it."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Entrance:
    """Where a process is reached, for as long as it lives.

    Attributes:
        turned_away: Who was, last, and why; empty if nobody was.
    """

    _instances: dict[tuple[int, Any], Entrance] = {}
    _instances_lock = threading.Lock()

    @classmethod
    def of(cls, cluster: Any) -> Entrance:
        """The entrance at this rank's address, made on first use, with this job let in.

        Raises:
            RendezvousError: It cannot listen there.
            ConfigurationError: A secret is wanted, and there is none.
        """
        key = secret.of(cluster)
        # One socket, one entrance, however its address is spelled: two would take each other's connections.
        fd = cluster.listen_fd
        name = (os.getpid(), cluster.addresses[cluster.rank] if fd is None else os.fstat(fd).st_ino)
        addresses = tuple(cluster.addresses)
        several_hosts = spans_hosts(addresses)
        with cls._instances_lock:
            if several_hosts and name in cls._instances and cls._instances[name]._for_this_host:
                cls._instances.pop(name)._close()  # an earlier job of this rank needed no more
            if name not in cls._instances:
                listener = _listen(cluster, several_hosts) if fd is None else socket.socket(fileno=os.dup(fd))
                cls._instances[name] = cls(listener, key, for_this_host=fd is None and not several_hosts)
            entrance = cls._instances[name]
        entrance.admit(job_id(addresses), cluster.rank, len(addresses), several_hosts)
        return entrance

    @classmethod
    def at(cls, listener: socket.socket, key: bytes) -> Entrance:
        """The entrance of a socket that listens; a duplicate of it is what the entrance keeps."""
        name = (os.getpid(), os.fstat(listener.fileno()).st_ino)
        with cls._instances_lock:
            cls._instances[name] = cls(listener.dup(), key)
            return cls._instances[name]

    @classmethod
    def close_at(cls, listen_fd: int) -> None:
        """Closes the entrance of a socket, if there is one, so that its port can be bound anew."""
        with cls._instances_lock:
            entrance = cls._instances.pop((os.getpid(), os.fstat(listen_fd).st_ino), None)
        if entrance is not None:
            entrance._close()

    def __init__(self, listener: socket.socket, key: bytes, for_this_host: bool = False) -> None:
        self.port = listener.getsockname()[1]
        self._for_this_host = for_this_host
        self._key = key
        self._tcp = listener
        self._unix = _listen_locally(listener, with_secret=bool(key))
        self._members: dict[str, _Member] = {}
        self._strangers: dict[int, _Stranger] = {}  # by descriptor, oldest first
        self._parked: list[Guest] = []
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
        self._thread = threading.Thread(target=self._run, name="tfring-entrance", daemon=True)
        self._thread.start()

    def admit(self, job: str, rank: int, world_size: int, several_hosts: bool) -> None:
        """Lets the ranks of a job in, of which this process is rank `rank`."""
        if several_hosts and not self._key and rank == 0 and not self._members and not self._warned:
            self._warned = True
            _log.warning("%s", secret.warning(f"port {self.port} of {socket.gethostname()}"))
        with self._changed:
            self._members[job] = _Member(rank, world_size, several_hosts)
        self._wake_up()

    def dismiss(self, job: str) -> None:
        """Lets them in no longer."""
        with self._changed:
            self._members.pop(job, None)
        self._wake_up()

    def take(self, wanted: Callable[[Guest], bool], seconds: float) -> Guest | None:
        """A guest that has come and is still there; None if no such one came in time. Its channel is the caller's."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while True:
                self._sweep()
                for guest in self._parked:
                    if wanted(guest):
                        self._parked.remove(guest)
                        guest.channel.deadline = time.monotonic() + _GREETING_SECONDS
                        return guest
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
        """After a fork: the child is another process, and its copies would keep the port and the name."""
        for entry in (self._tcp, self._unix, *(guest.channel for guest in self._parked)):
            if entry is not None:
                entry.close()
        for stranger in self._strangers.values():
            stranger.channel.close()
        self._selector.close()
        os.close(self._wake)

    # The loop, in a thread of its own. It never waits for anybody.

    def _run(self) -> None:
        while not self._closing:
            self._watch_listeners()
            for key, _ in self._selector.select(self._seconds_to_next()):
                if key.fileobj in (self._tcp, self._unix):
                    self._accept(key.fileobj)  # type: ignore[arg-type]
                elif key.fd in self._strangers:
                    self._listen_to(self._strangers[key.fd])
                elif key.fd == self._wake:
                    os.eventfd_read(self._wake)
            while (oldest := next(iter(self._strangers.values()), None)) and oldest.deadline <= time.monotonic():
                self._drop(oldest, "it did not say in time what it is")
            with self._changed:
                self._sweep()
        for stranger in list(self._strangers.values()):
            self._drop(stranger, "closed")
        for guest in self._parked:
            guest.channel.close()
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
        times = [stranger.deadline for stranger in itertools.islice(self._strangers.values(), 1)]
        times += [] if self._paused_until is None else [self._paused_until]
        left = [max(0.0, at - time.monotonic()) for at in times] + ([_SWEEP_SECONDS] if self._parked else [])
        return min(left, default=None)

    def _accept(self, entry: socket.socket) -> None:
        try:
            connection, _ = entry.accept()
        except OSError as error:
            if error.errno in _OUT_OF_DESCRIPTORS:
                self._drop_oldest("descriptors have run out")
                self._paused_until = time.monotonic() + _PAUSE_SECONDS
            return
        peer = _describe_peer(connection)
        if connection.family == socket.AF_UNIX and peer_of(connection)[1] != os.geteuid():
            self._note(peer, "of another user")
            connection.close()
            self._num_unwelcome += 1
            if self._num_unwelcome % _UNWELCOME_AT_ONCE == 0:  # a loop of them would keep this process busy
                self._paused_until = time.monotonic() + _PAUSE_SECONDS
            return
        if len(self._strangers) >= _MAX_STRANGERS:
            self._drop_oldest("too many others came after it")
        channel = wire.Channel(connection, 0.0, connects=False)  # no deadline but now: what is sent here never waits
        conversation = self._converse(channel)
        deadline = time.monotonic() + _GREETING_SECONDS
        stranger = _Stranger(channel, conversation, next(conversation), deadline, peer)
        self._strangers[connection.fileno()] = stranger
        self._selector.register(connection, selectors.EVENT_READ)

    def _listen_to(self, stranger: _Stranger) -> None:
        try:
            while (message := stranger.channel.try_receive(stranger.expected)) is not None:
                if stranger.expected is HELLOS:
                    self._forget(stranger)
                    self._let_in(stranger.channel, message.kind, message.fields)
                    return
                stranger.expected = stranger.conversation.send(message)
        except (OSError, wire.WireError) as error:
            self._drop(stranger, str(error))

    def _converse(self, channel: wire.Channel) -> Generator[wire.Format, wire.Message, None]:
        """The listening side's part: yields what may come, and is sent what came."""
        challenge = yield wire.Channel.CHALLENGES
        channel.challenge()
        channel.challenged(challenge, self._key)
        yield wire.Channel.PROOFS
        channel.send("proof")
        yield HELLOS

    def _let_in(self, channel: wire.Channel, kind: str, hello: dict[str, Any]) -> None:
        """It has proved itself, and may be spoken to."""
        with self._changed:
            member = self._members.get(hello["job"])
        try:
            if member is None:
                channel.send("refused", why="a process of another job listens there", final=False)
            elif kind == "probe":
                channel.send("here", rank=member.rank)
            elif hello["to"] != member.rank:
                why = f"the process there takes itself for rank {member.rank}. Is every rank started once?"
                channel.send("refused", why=why, final=False)
            else:
                _no_delay(channel.socket)
                self._park(Guest(channel, kind, hello, time.monotonic() + hello["seconds"]))
                return
        except OSError:
            pass
        channel.close()

    def _park(self, guest: Guest) -> None:
        with self._changed:
            for other in list(self._parked):
                if _same_place(other, guest):  # the new one counts: the old one may have lost its host
                    self._parked.remove(other)
                    if other.hello.get("process") != guest.hello.get("process"):
                        with contextlib.suppress(OSError):
                            other.channel.send("refused", why=claimed_twice(guest.hello["rank"]), final=True)
                    other.channel.close()
            most = _MAX_PARKED + 2 * max((member.world_size for member in self._members.values()), default=0)
            if len(self._parked) >= most:
                self._parked.pop(0).channel.close()
            self._parked.append(guest)
            self._changed.notify_all()

    def _sweep(self) -> None:
        """Lets go of the parked that have gone or waited in vain; `_changed` is held."""
        now = time.monotonic()
        for guest in list(self._parked):
            if guest.until <= now or guest.channel.is_closed_by_peer:
                self._parked.remove(guest)
                guest.channel.close()

    def _drop_oldest(self, why: str) -> None:
        for stranger in list(self._strangers.values())[:1]:
            self._drop(stranger, why)

    def _drop(self, stranger: _Stranger, why: str) -> None:
        self._forget(stranger)
        self._note(stranger.peer, why)
        stranger.channel.close()

    def _forget(self, stranger: _Stranger) -> None:
        fd = stranger.channel.socket.fileno()
        del self._strangers[fd]
        self._selector.unregister(fd)

    def _note(self, peer: str, why: str) -> None:
        self.turned_away = f"{peer}: {why}"
        _log.debug("turned away %s", self.turned_away)


def _same_place(one: Guest, other: Guest) -> bool:
    names = ("job", "rank", "session" if one.kind == "data" else "ring")
    return one.kind == other.kind and all(one.hello.get(name) == other.hello.get(name) for name in names)


def _close_all_in_child() -> None:
    for (pid, _), entrance in Entrance._instances.items():
        if pid != os.getpid():
            entrance._close_in_child()
    Entrance._instances.clear()
    Entrance._instances_lock = threading.Lock()  # whoever held it stayed in the parent


os.register_at_fork(after_in_child=_close_all_in_child)


# The other side of it.


def knock(
    address: Address,
    key: bytes,
    kind: str,
    hello: dict[str, Any] | Callable[[socket.socket], dict[str, Any]],
    *,
    network: bool,
    seconds: float,
    wait_for: Callable[[], bool] = lambda: True,
) -> wire.Channel:
    """Goes to where a rank listens, proves itself and says what for.

    Args:
        address: Where it listens.
        key: The secret, or nothing.
        kind: Of HELLOS.
        hello: Its fields but `seconds`, or what makes them of the connection.
        network: Whether it may answer over TCP, if no process of this user on this host does.
        seconds: For all that is said on this channel, until the caller sets another deadline.
        wait_for: Asked while nothing comes: whether to go on waiting.

    Raises:
        wire.NoProofError: Another secret.
        wire.WireError: Another program answers.
        wire.GivenUpError: `wait_for` says so.
        OSError: Nobody answers.
    """
    place = (ports.resolve(address.host), address.port)
    deadline = time.monotonic() + seconds
    connection = _dial(*place, network=network, deadline=deadline, wait_for=wait_for)
    return _introduce(connection, place, key, kind, hello, deadline, wait_for)


class Probed(NamedTuple):
    """Whom a probe found."""

    local: str  # the address of this host on the way there
    rank: int | None  # which it takes itself for
    problem: Exception | None  # why that is not known


def probe(cluster: Any, rank: int, seconds: float) -> Probed:
    """Asks who listens at a rank's address.

    Raises:
        OSError: Nobody does.
    """
    addresses = tuple(cluster.addresses)
    address, key = parse_address(addresses[rank]), secret.of(cluster)
    place = hosts, _ = ports.resolve(address.host), address.port
    network = bool(key) or spans_hosts(addresses)
    deadline = time.monotonic() + seconds
    try:
        connection = _dial(*place, network=network, deadline=deadline)
    except ConnectionRefusedError:
        if network:
            raise
        # Somebody else may listen there, who is told nothing but a challenge.
        connection = _dial(*place, network=True, deadline=deadline)
    local = hosts[0] if connection.family == socket.AF_UNIX else str(connection.getsockname()[0])
    try:
        if connection.family != socket.AF_UNIX and not network:
            with wire.Channel(connection, deadline, connects=True) as stranger:
                stranger.challenge()
                stranger.receive(wire.Channel.CHALLENGES)
            raise RefusedError(f"not a process of user {os.geteuid()} on this host")
        hello = {"job": job_id(addresses), "rank": cluster.rank, "to": rank}
        with _introduce(connection, place, key, "probe", hello, deadline) as channel:
            answer = channel.receive(_ANSWERS_TO_PROBE)
        if answer.kind == "refused":
            raise RefusedError(answer.fields["why"], answer.fields["final"])
        return Probed(local, answer.fields["rank"], None)
    except (OSError, wire.WireError, RefusedError) as error:
        return Probed(local, None, error)


def _dial(
    hosts: list[str], port: int, *, network: bool, deadline: float, wait_for: Callable[[], bool] = lambda: True
) -> socket.socket:
    connection = _dial_locally(hosts, port, strict=not network)
    if connection is not None:
        return connection
    if not network:
        raise ConnectionRefusedError(errno.ECONNREFUSED, f"refused: no process of user {os.geteuid()} listens there")
    problems = []
    # Ranks that are all on this host listen for nobody else.
    for host in dict.fromkeys((*hosts, *(_LOOPBACKS if any(map(ports.is_local, hosts)) else ()))):
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0]
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            wire.connect(connection, where, min(deadline, time.monotonic() + _DIAL_SECONDS), wait_for)
            _no_delay(connection)
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
        # Its process may have been on the way when this one came by.
        if not channel.is_local and (nearer := _dial_locally(*place, strict=False)) is not None:
            channel.close()
            channel = wire.Channel(nearer, deadline, connects=True)
            channel.wait_for = wait_for
            channel.prove_first(key)
        fields = hello(channel.socket) if callable(hello) else hello
        left = min(_MAX_SECONDS, max(1, int(deadline - time.monotonic())))
        channel.send(kind, **fields, seconds=left)
        return channel
    except BaseException:
        channel.close()
        raise


def spans_hosts(addresses: tuple[str, ...]) -> bool:
    """Whether ranks may be elsewhere than on this host, going by where they listen.

    >>> spans_hosts(("127.0.0.1:1", "localhost:2")), spans_hosts(("127.0.0.1:1", "192.0.2.1:1"))
    (False, True)
    """
    parsed = [parse_address(address) for address in addresses]
    if len({host_key(address) for address in parsed}) > 1:
        return True
    try:
        return not all(map(ports.is_local, ports.resolve(parsed[0].host)))
    except OSError:
        return True


# Sockets.


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """The process and the user at the other end of a Unix socket, from the kernel."""
    process, user, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return process, user


def _describe_peer(connection: socket.socket) -> str:
    if connection.family == socket.AF_UNIX:
        return "process {} of user {}".format(*peer_of(connection))
    with contextlib.suppress(OSError):
        return str(connection.getpeername()[0]).removeprefix("::ffff:")
    return "somebody"


def _no_delay(connection: socket.socket) -> None:
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _local_name(host: str, port: int) -> str:
    """The Unix socket of whoever of this user listens at this address; "*" for all of the host's."""
    return f"\0tfring {os.geteuid()} {host} {port}"


def _dial_locally(hosts: list[str], port: int, *, strict: bool) -> socket.socket | None:
    """To a process of this user that listens at one of these addresses of this host; None without."""
    for host in hosts:
        if not ports.is_local(host):
            continue
        for place in dict.fromkeys((host, "*", *_LOOPBACKS)):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                _connect_locally(connection, _local_name(place, port))
                process, user = peer_of(connection)
            except OSError:
                connection.close()
                continue
            if user == os.geteuid():
                return connection
            connection.close()
            if strict:
                raise PermissionError(errno.EPERM, f"process {process} of user {user}, not {os.geteuid()}, is there")
    return None


def _connect_locally(connection: socket.socket, name: str) -> None:
    """Connects to a Unix socket, and waits for a place where strangers have filled its queue.

    One with a timeout of Python's does not block, and gets EAGAIN at once where the queue is full.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIME.pack(int(_DIAL_SECONDS), 0))
    connection.connect(name)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIME.pack(0, 0))
    connection.settimeout(_DIAL_SECONDS)


def _listen_locally(listener: socket.socket, *, with_secret: bool) -> socket.socket | None:
    host, port = listener.getsockname()[:2]
    name = _local_name("*" if host in ("::", "0.0.0.0") else host, port)
    local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        local.bind(name)
        local.listen(128)
        return local
    except OSError as error:
        why, user = str(error), None
        with contextlib.suppress(OSError):
            local.settimeout(_DIAL_SECONDS)
            local.connect(name)
            process, user = peer_of(local)
            why = f"process {process} of user {user} has taken its name"
        local.close()
        text = f"Ranks of this host cannot come in at port {port} through a Unix socket: {why}."
        if user == os.geteuid():
            raise RendezvousError(f"{text} Is every rank started once?") from None
        if not with_secret:
            raise RendezvousError(f"{text} Take another port, or set a secret (docs/security.md).") from None
        _log.warning("%s They use TCP, which is slower.", text)
        return None


def _listen(cluster: Any, several_hosts: bool) -> socket.socket:
    address = parse_address(cluster.addresses[cluster.rank])
    problem = None
    for family, host in _places_to_listen(address.host, several_hosts):
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if host == "::":
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            listener.bind((host, address.port))
            listener.listen(128)
            return listener
        except OSError as error:
            listener.close()
            problem = problem or error
            if error.errno == errno.EADDRINUSE:
                break
    raise RendezvousError(
        f"Rank {cluster.rank} cannot listen at {address}: {problem}. Is the address this machine's, does an earlier "
        "run still hold the port, and is every rank started once?"
    ) from problem


def _places_to_listen(host: str, several_hosts: bool) -> Iterator[tuple[socket.AddressFamily, str]]:
    """Loopback where all ranks are here; literal addresses as they stand; a name may stand for another elsewhere."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):
            socket.inet_pton(family, host)
            if several_hosts or ports.is_loopback(host):
                yield family, host
    if not several_hosts:
        yield socket.AF_INET, "127.0.0.1"
        yield socket.AF_INET6, "::1"
        return
    yield socket.AF_INET6, "::"  # everywhere: the address may be translated on the way
    yield socket.AF_INET, "0.0.0.0"
