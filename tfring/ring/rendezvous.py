"""How ranks find each other: every rank listens, rank r connects to rank r + 1.

    rank r                                 rank r + 1
       │ (1) hello, control ────────────────► │     who I am, which job, which ring, my mailbox
       │ ◄──────────────────────── welcome (2) │     transport, its mailbox; or: refused, and why
       │ (3) confirm ───────────────────────► │     the transport, TCP if I cannot reach its mailbox
       │ (4) hello, data ───────────────────► │     over TCP only: a second connection

Each message is MAGIC, its length (4 bytes, little endian) and JSON. After (3) the control connection, and
after (4) the data connection, belong to the native ring. Whoever does not speak this way is turned away, to
no harm. The version in (1) leaves room for more steps, such as proving to know a secret of the job.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import secrets
import select
import socket
import struct
import threading
import time
from typing import Any

from tfring.cluster.address import Address, parse_address
from tfring.errors import RendezvousError
from tfring.ring import library, mailbox

MAGIC = b"TFRING\x00\x01"
PROTOCOL = 1
_MAX_MESSAGE_BYTES = 64 * 1024
_HELLO_SECONDS = 10.0  # for a connection to say what it is
_DIAL_SECONDS = 5.0
_PROBE_SECONDS = 2.0
_SLICE_SECONDS = 0.1  # between looks at what else may have happened
# A ControlFrame of native/frame.h: magic, version, type, code, rank, reserved, sequence, message.
_CONTROL_FRAME = struct.Struct("<IHBBiiQ1000s")
_ABORT = 0

_log = logging.getLogger(__name__)


@dataclasses.dataclass
class Neighbour:
    """A neighbour this rank is connected with. The descriptors belong to whoever holds it; -1 for none."""

    rank: int
    transport: str
    control: socket.socket
    data: socket.socket | None = None
    mailbox_fd: int = -1
    doorbell_fd: int = -1

    def detach(self) -> library.Link:
        """Hands the descriptors over to the native ring."""
        data_fd = -1 if self.data is None else self.data.detach()
        return library.Link(self.control.detach(), data_fd, self.mailbox_fd, self.doorbell_fd)

    def close(self) -> None:
        self.control.close()
        if self.data is not None:
            self.data.close()
        for fd in (self.mailbox_fd, self.doorbell_fd):
            if fd >= 0:
                os.close(fd)


class _Refused(Exception):
    """The other side answered, and said no."""


class _Cancelled(Exception):
    """The other thread has failed, or the time is over."""


def cluster_id(addresses: tuple[str, ...]) -> str:
    """Tells jobs apart: ranks with other addresses belong to another job."""
    return hashlib.sha256("\n".join(addresses).encode()).hexdigest()[:16]


class Endpoint:
    """A listening socket, kept for the life of the process. Rings of any name are formed through it."""

    _instances: dict[tuple[int, Any], Endpoint] = {}
    _instances_lock = threading.Lock()

    @classmethod
    def of(cls, cluster: Any) -> Endpoint:
        """The endpoint at this rank's address, made on first use."""
        # One socket, one listener, however its address is spelled: two would take each other's connections.
        fd = cluster.listen_fd
        key = (os.getpid(), cluster.addresses[cluster.rank] if fd is None else os.fstat(fd).st_ino)
        with cls._instances_lock:
            if key not in cls._instances:
                cls._instances[key] = cls(cluster)
            endpoint = cls._instances[key]
        endpoint._cluster_ids.add(cluster_id(tuple(cluster.addresses)))
        return endpoint

    def __init__(self, cluster: Any) -> None:
        self._rank: int = cluster.rank
        self._cluster_ids = {cluster_id(tuple(cluster.addresses))}  # before the first connection is taken
        # By cluster, ring and session ("" for control): connections for rings not asked for here yet.
        self._parked: dict[tuple[str, str, str], tuple[socket.socket, dict[str, Any]]] = {}
        self._arrived = threading.Condition()
        self._listener = _listen(cluster)
        threading.Thread(target=self._accept_forever, name="tfring-endpoint", daemon=True).start()

    def take(
        self, cluster: str, ring: str, session: str, seconds: float
    ) -> tuple[socket.socket, dict[str, Any]] | None:
        """The connection parked for this ring, or None if none has come in time."""
        key = (cluster, ring, session)
        with self._arrived:
            self._arrived.wait_for(lambda: key in self._parked, seconds)
            return self._parked.pop(key, None)

    def _accept_forever(self) -> None:
        while True:
            try:
                connection, peer = self._listener.accept()
            except OSError:  # out of descriptors; the listener itself is never closed
                time.sleep(_SLICE_SECONDS)
                continue
            threading.Thread(target=self._greet, args=(connection, peer), daemon=True).start()

    def _greet(self, connection: socket.socket, peer: Any) -> None:
        try:
            connection.settimeout(_HELLO_SECONDS)
            hello = receive(connection)
            problem = self._problem(hello)
            if problem is not None or hello["purpose"] == "probe":
                send(connection, {"rank": self._rank} if problem is None else {"refused": problem})
                connection.close()
                return
            _no_delay(connection)
            session = hello["session"] if hello["purpose"] == "data" else ""
            key = (hello["cluster"], hello["ring"], session)
            with self._arrived:
                earlier = self._parked.pop(key, None)  # its maker has given it up
                self._parked[key] = (connection, hello)
                self._arrived.notify_all()
            if earlier is not None:
                earlier[0].close()
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.debug("turned away a connection from %s: %s", peer, error)
            connection.close()

    def _problem(self, hello: dict[str, Any]) -> str | None:
        if hello["protocol"] != PROTOCOL:
            return f"rank {self._rank} speaks version {PROTOCOL} of the protocol, not {hello['protocol']}"
        if hello["cluster"] not in self._cluster_ids:
            return "a process of another job listens there"
        return None


def connect_ring(
    cluster: Any, ring: str, *, transport: str, timeout_seconds: float
) -> tuple[Neighbour, Neighbour, mailbox.Mailbox | None]:
    """Connects this rank with its two neighbours.

    Args:
        cluster: With `rank`, `world_size` above 1, `addresses`, `listen_fd`.
        ring: The ring's name.
        transport: "auto", "tcp" or "shm".
        timeout_seconds: How long to wait.

    Returns:
        The next neighbour, the previous one, and this rank's mailbox if one of the two uses shared memory.

    Raises:
        RendezvousError: Naming who never answered, or why the ranks cannot form one ring.
    """
    return _Forming(cluster, ring, transport, timeout_seconds).run()


class _Forming:
    """One rank's part in the forming of one ring."""

    def __init__(self, cluster: Any, ring: str, transport: str, timeout_seconds: float) -> None:
        self.cluster = cluster
        self.ring = ring
        self.transport = transport
        self.timeout_seconds = timeout_seconds
        self.deadline = time.monotonic() + timeout_seconds
        self.endpoint = Endpoint.of(cluster)
        self.mailbox = _make_mailbox(transport)
        self.previous_rank = (cluster.rank - 1) % cluster.world_size
        self.next_rank = (cluster.rank + 1) % cluster.world_size
        self.hello = {
            "protocol": PROTOCOL,
            "cluster": cluster_id(tuple(cluster.addresses)),
            "ring": ring,
            "rank": cluster.rank,
            "world_size": cluster.world_size,
            "transport": transport,
            "host": mailbox.host_identity() if self.mailbox else None,
            "mailbox": self.mailbox.facts() if self.mailbox else None,
            "session": secrets.token_hex(8),
        }
        self.previous: Neighbour | None = None
        # Filled in by the connecting thread.
        self.next: Neighbour | None = None
        self.connect_error: BaseException | None = None
        self.reason = ""  # why the last attempt to connect failed
        self.failure = ""  # why this rank gives up
        self.cancelled = threading.Event()

    def run(self) -> tuple[Neighbour, Neighbour, mailbox.Mailbox | None]:
        connecting = threading.Thread(target=self._connect_next, name="tfring-connect", daemon=True)
        connecting.start()
        try:
            while self.previous is None or self.next is None:
                if time.monotonic() > self.deadline:
                    raise self._nobody()
                if self.previous is None:
                    self.previous = self._accept_previous()
                else:
                    connecting.join(_SLICE_SECONDS)
                if self.connect_error is not None:
                    raise self.connect_error
                for neighbour in (self.previous, self.next):
                    if neighbour is not None:
                        _check_still_there(neighbour, self.ring)
            if "shm" not in (self.previous.transport, self.next.transport) and self.mailbox is not None:
                self.mailbox.close()
                self.mailbox = None
            return self.next, self.previous, self.mailbox
        except BaseException as error:
            self.failure = str(error) or f"rank {self.cluster.rank} was interrupted while the ring formed"
            self.cancelled.set()
            connecting.join()
            for neighbour in (self.previous, self.next):
                if neighbour is not None:
                    self._part_with(neighbour)
            if self.mailbox is not None:
                self.mailbox.close()
            raise

    def _part_with(self, neighbour: Neighbour) -> None:
        """Tells a neighbour why, who tells its own; nobody waits for a ring that cannot form."""
        library.core().tfring_send_abort(
            neighbour.control.fileno(), self.cluster.rank, library.PEER_LOST, self.failure.encode()
        )
        neighbour.close()

    # Connecting to the next rank, in a thread of its own.

    def _connect_next(self) -> None:
        address = parse_address(self.cluster.addresses[self.next_rank])
        try:
            while not self.cancelled.is_set() and time.monotonic() < self.deadline:
                try:
                    self.next = self._attempt(address)
                    return
                except _Cancelled:
                    return
                except (OSError, ValueError, KeyError, TypeError, _Refused) as error:
                    self.reason = str(error) or type(error).__name__
                    self.cancelled.wait(_SLICE_SECONDS)
        except BaseException as error:
            self.connect_error = error

    def _attempt(self, address: Address) -> Neighbour:
        control = dial(address, _DIAL_SECONDS)
        neighbour = Neighbour(self.next_rank, "tcp", control)
        confirmed = False
        try:
            send(control, {**self.hello, "purpose": "control"})  # (1)
            # The answer comes when the other rank asks for this ring; that may take its time.
            while not select.select([control], [], [], _SLICE_SECONDS)[0]:
                if self.cancelled.is_set() or time.monotonic() > self.deadline:
                    self.reason = "it listens, but did not answer"
                    raise _Cancelled
            welcome = receive(control)  # (2)
            if "refused" in welcome:
                if welcome.get("final"):
                    raise RendezvousError(welcome["refused"])
                raise _Refused(welcome["refused"])
            problem = None
            if welcome["transport"] == "shm":
                problem = self._attach(neighbour, welcome["mailbox"])
            if problem is not None and "shm" in (self.transport, welcome["wanted"]):
                send(control, {"failed": problem})
                raise RendezvousError(problem)
            send(control, {"transport": neighbour.transport})  # (3)
            confirmed = True
            if neighbour.transport == "tcp":
                neighbour.data = dial(address, _DIAL_SECONDS)
                send(neighbour.data, {**self.hello, "purpose": "data"})  # (4)
            return neighbour
        except BaseException as error:
            if not confirmed:
                neighbour.close()
                raise
            # The other rank takes this one for connected, so this attempt was the only one.
            self.failure = self.failure or f"Rank {self.cluster.rank} lost rank {self.next_rank}: {error}"
            self._part_with(neighbour)
            raise RendezvousError(self.failure) from error

    # Answering the previous rank.

    def _accept_previous(self) -> Neighbour | None:
        parked = self.endpoint.take(self.hello["cluster"], self.ring, "", _SLICE_SECONDS)
        if parked is None:
            return None
        control, hello = parked
        neighbour = Neighbour(self.previous_rank, "tcp", control)
        try:
            problem = self._disagreement(hello)
            wanted = {self.transport, hello["transport"]}
            if problem is None and "tcp" not in wanted:
                why_not = self._why_not_shared(neighbour, hello)
                if why_not is not None and "shm" in wanted:
                    problem = why_not
            if problem is not None:
                send(control, {"refused": problem, "final": True})
                raise RendezvousError(problem)
            shared = neighbour.transport == "shm"
            facts = self.mailbox.facts() if shared and self.mailbox else None
            welcome = {"transport": neighbour.transport, "wanted": self.transport, "mailbox": facts}
            send(control, welcome)  # (2)
            control.settimeout(_HELLO_SECONDS)
            confirm = receive(control)  # (3): a rank that died in the meantime does not confirm
            if "failed" in confirm:
                raise RendezvousError(confirm["failed"])
            if confirm["transport"] == "tcp":
                neighbour.transport = "tcp"
                data = self.endpoint.take(self.hello["cluster"], self.ring, hello["session"], _HELLO_SECONDS)
                if data is None:
                    raise ValueError("the data connection did not come")
                neighbour.data = data[0]
            return neighbour
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.debug("rank %d connected and went away: %s", self.previous_rank, error)
            neighbour.close()
            return None
        except BaseException:
            neighbour.close()
            raise

    def _disagreement(self, hello: dict[str, Any]) -> str | None:
        me, other = self.cluster.rank, hello["rank"]
        if (other, hello["world_size"]) != (self.previous_rank, self.cluster.world_size):
            return (
                f"Rank {me} of {self.cluster.world_size} awaits rank {self.previous_rank}, but a process "
                f"that takes itself for rank {other} of {hello['world_size']} connected. Is every rank "
                "started once?"
            )
        if {self.transport, hello["transport"]} == {"tcp", "shm"}:
            return (
                f'Ranks want transports that exclude each other: rank {other} "{hello["transport"]}", '
                f'rank {me} "{self.transport}". Set TFRING_TRANSPORT alike on all ranks.'
            )
        return None

    def _why_not_shared(self, neighbour: Neighbour, hello: dict[str, Any]) -> str | None:
        if self.mailbox is None or hello["mailbox"] is None or hello["host"] != self.hello["host"]:
            return (
                f'transport="shm" needs ranks of one host (and PID namespace), and rank {hello["rank"]} and '
                f'rank {self.cluster.rank} share none. Use transport="auto".'
            )
        return self._attach(neighbour, hello["mailbox"])

    def _attach(self, neighbour: Neighbour, facts: dict[str, Any]) -> str | None:
        """Opens the neighbour's mailbox, or says why that cannot be."""
        try:
            neighbour.mailbox_fd, neighbour.doorbell_fd = mailbox.attach(facts)
            neighbour.transport = "shm"
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = (
                f"rank {self.cluster.rank} cannot open the shared memory of rank {neighbour.rank}: {error}"
            )
            _log.debug("%s; using TCP", reason)
            return reason

    # Giving up.

    def _nobody(self) -> RendezvousError:
        missing = _who_is_missing(self.cluster)
        facts = [f"rank {r} at {self.cluster.addresses[r]} ({why})" for r, why in sorted(missing.items())]
        told = f"never answered: {', '.join(facts)}" if facts else "every rank answers"
        for neighbour, rank, what in (
            (self.next, self.next_rank, "did not take rank {me} as its neighbour"),
            (self.previous, self.previous_rank, "did not connect to rank {me}"),
        ):
            if neighbour is None and rank not in missing:
                told += f"; rank {rank} is there but {what.format(me=self.cluster.rank)}"
                told += f" ({self.reason})" if rank == self.next_rank and self.reason else ""
        return RendezvousError(
            f"Rank {self.cluster.rank} of {self.cluster.world_size} waited {self.timeout_seconds:g} s for "
            f'ring "{self.ring}" to form; {told}. Are all ranks started with the same list of addresses, and '
            "are the ports open between the hosts?"
        )


def _make_mailbox(transport: str) -> mailbox.Mailbox | None:
    if transport == "tcp":
        return None
    try:
        return mailbox.Mailbox()
    except OSError as error:
        _log.debug("no shared memory (%s); using TCP", error)
        return None


def _check_still_there(neighbour: Neighbour, ring: str) -> None:
    """Raises if a neighbour this rank is connected with has given up."""
    readable, _, _ = select.select([neighbour.control], [], [], 0)
    if not readable:
        return
    try:
        frame = neighbour.control.recv(_CONTROL_FRAME.size, socket.MSG_PEEK)
    except OSError:
        frame = b""
    if len(frame) == _CONTROL_FRAME.size:
        _, _, kind, _, _, _, _, message = _CONTROL_FRAME.unpack(frame)
        if kind == _ABORT:
            raise RendezvousError(message.rstrip(b"\0").decode(errors="replace"))
    elif not frame:
        raise RendezvousError(f'Rank {neighbour.rank} went away while ring "{ring}" was forming.')


def _who_is_missing(cluster: Any) -> dict[int, str]:
    """Asks every rank whether it is there. Returns those that do not answer, and why."""

    def probe(rank: int) -> str | None:
        try:
            with dial(parse_address(cluster.addresses[rank]), _PROBE_SECONDS) as connection:
                connection.settimeout(_PROBE_SECONDS)
                identity = {"protocol": PROTOCOL, "cluster": cluster_id(tuple(cluster.addresses))}
                send(connection, {**identity, "purpose": "probe"})
                return receive(connection).get("refused")
        except (OSError, ValueError) as error:
            return getattr(error, "strerror", None) or str(error) or type(error).__name__

    others = [rank for rank in range(cluster.world_size) if rank != cluster.rank]
    with concurrent.futures.ThreadPoolExecutor(min(32, len(others))) as pool:
        answers = dict(zip(others, pool.map(probe, others), strict=True))
    return {rank: problem for rank, problem in answers.items() if problem is not None}


# Messages.


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Writes one message."""
    body = json.dumps(message).encode()
    connection.sendall(MAGIC + struct.pack("<I", len(body)) + body)


def receive(connection: socket.socket) -> dict[str, Any]:
    """Reads one message and not a byte more.

    Raises:
        ValueError: What came is no message.
        OSError: The connection closed, or its time is over.
    """
    prefix = _receive_exactly(connection, len(MAGIC) + 4)
    if not prefix.startswith(MAGIC):
        raise ValueError(f"not a message of tfring: {prefix!r}")
    (length,) = struct.unpack("<I", prefix[len(MAGIC) :])
    if length > _MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {length} bytes")
    message = json.loads(_receive_exactly(connection, length))
    if not isinstance(message, dict):
        raise ValueError("a message that is no object")
    return message


def _receive_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    received = b""
    while len(received) < num_bytes:
        part = connection.recv(num_bytes - len(received))
        if not part:
            raise ConnectionError("the connection closed")
        received += part
    return received


# Sockets.


def _no_delay(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def dial(address: Address, seconds: float) -> socket.socket:
    """Connects to where a rank listens, within `seconds`."""
    connection = socket.create_connection((address.host, address.port), timeout=seconds)
    _no_delay(connection)
    return connection


def _listen(cluster: Any) -> socket.socket:
    if cluster.listen_fd is not None:
        listener = socket.socket(fileno=os.dup(cluster.listen_fd))
        listener.setblocking(True)
        return listener
    address = parse_address(cluster.addresses[cluster.rank])
    problem = None
    for family, host in _places_to_listen(address.host):
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
    raise RendezvousError(
        f"Rank {cluster.rank} cannot listen at {address}: {problem}. Is the address this machine's, and does "
        "an earlier run still hold the port?"
    ) from problem


def _places_to_listen(host: str) -> list[tuple[socket.AddressFamily, str]]:
    """Loopback and literal addresses as they stand; a name may stand for another address elsewhere."""
    everywhere = [(socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")]
    if host == "localhost":
        return [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")]
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):
            socket.inet_pton(family, host)
            return [(family, host), *everywhere]  # everywhere: the address may be translated on the way
    return everywhere
