"""Messages between two processes that do not trust each other yet: their format, validated before use.

A message, over a socket or through the standard streams of ssh; numbers are little endian:

    ┌──────────────┬────────────────┬────────────────┬───────────────────────────┬──────────────────┐
    │ "TFRING" 0 2 │ bytes of JSON  │ bytes of data  │ JSON: {"kind": ..., ...}  │ data             │
    │ 8 bytes      │ 4 bytes        │ 4 bytes        │ an object                 │ raw bytes        │
    └──────────────┴────────────────┴────────────────┴───────────────────────────┴──────────────────┘

The reader defines which kinds of messages may come next, and the fields of each kind with their types, ranges and
sizes. A message must have all of these fields and no others. Both lengths are checked before memory is allocated.

Two processes that share a secret prove it to each other before either sends anything else:

    the one that connects                                 the one that listens
       │ challenge; data: 32 random bytes ──────────────────► │
       │ ◄────────────────── challenge; data: 32 random bytes │     from now on the data of every message is its tag
       │ proof ─────────────────────────────────────────────► │     or the connection closes
       │ ◄────────────────────────────────────────────── proof │
       │ who I am, whom I want, for what ───────────────────► │     see HELLOS

    key = HMAC-SHA-256(secret, "tfring 2" + both challenges)
    tag = HMAC-SHA-256(key, side ("c" or "l") + number of the message (8 bytes) + the message up to its data)

So a message with a valid tag comes from a process that knows the secret, in this conversation, in this order, and from
the other side. Without a secret the key is that of an empty secret: it proves nothing, but the order is checked.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import os
import re
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

MAGIC = b"TFRING\x00\x02"
CHALLENGE_BYTES = TAG_BYTES = 32
_PREFIX = struct.Struct("<8sII")
_SLICE_SECONDS = 0.1  # between checks whether to continue
_MAX_FDS = 4
_CHUNK_BYTES = 1 << 16  # memory is allocated for received data, not for announced data

Field = Callable[[Any], bool]  # returns whether a value is valid for the field
Fields = Mapping[str, Field]


class WireError(ValueError):
    """An unexpected message, or one with an unexpected tag."""


class NoProofError(WireError):
    """The other side does not know the secret."""


class GivenUpError(Exception):
    """The caller does not want to wait any longer."""


# Fields.


def integer(low: int, high: int) -> Field:
    """Returns a field that accepts integers within both bounds.

    >>> [integer(0, 3)(value) for value in (0, 3, 4, -1, 1.0, True, "1")]
    [True, True, False, False, False, False, False]
    """
    return lambda value: type(value) is int and low <= value <= high


def text(max_length: int, pattern: str = r"[^\x00-\x08\x0e-\x1f\x7f\ud800-\udfff]*") -> Field:
    """Returns a field that accepts texts up to a length that match a pattern; by default all printable texts."""
    matches = re.compile(pattern, re.DOTALL).fullmatch
    return lambda value: isinstance(value, str) and len(value) <= max_length and matches(value) is not None


def one_of(*choices: Any) -> Field:
    """Returns a field that accepts one of these values, of the same type."""
    return lambda value: any(type(value) is type(choice) and value == choice for choice in choices)


def optional(field: Field) -> Field:
    """Returns a field that accepts None, or a value that `field` accepts."""
    return lambda value: value is None or field(value)


def list_of(field: Field, max_items: int) -> Field:
    """Returns a field that accepts lists of up to `max_items` items."""
    return lambda value: isinstance(value, list) and len(value) <= max_items and all(map(field, value))


def mapping_of(name: Field, field: Field, max_items: int) -> Field:
    """Returns a field that accepts objects with up to `max_items` names."""
    return lambda value: (
        isinstance(value, dict) and len(value) <= max_items and all(name(k) and field(v) for k, v in value.items())
    )


def anything(value: Any) -> bool:
    """Accepts any value: for answers of an authenticated process that are only passed on or printed."""
    return True


MOST_REASON = 4000
REASON = text(MOST_REASON)


# Messages.


class Message(NamedTuple):
    """A validated message: `fields` are those of its kind, without `kind` itself."""

    kind: str
    fields: dict[str, Any]
    data: bytes = b""


class Format:
    """The messages that may come next.

    Args:
      kinds: A dict that maps each kind to its fields.
      max_json_bytes: Maximum bytes of JSON in one message.
      max_data_bytes: Maximum bytes of data in one message.

    >>> greeting = Format({"hello": {"rank": integer(0, 9)}}, max_data_bytes=3)
    >>> message = Decoder(greeting).feed(pack("hello", b"abc", rank=7))
    >>> list(message)
    [Message(kind='hello', fields={'rank': 7}, data=b'abc')]
    """

    def __init__(self, kinds: Mapping[str, Fields], *, max_json_bytes: int = 4096, max_data_bytes: int = 0) -> None:
        self.kinds = kinds
        self.max_json_bytes = max_json_bytes
        self.max_data_bytes = max_data_bytes

    def check(self, body: bytes) -> tuple[str, dict[str, Any]]:
        """Returns the kind and the fields.

        Raises:
          WireError: If it is not a message of this format.
        """
        try:
            message = json.loads(body, object_pairs_hook=_object, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise WireError(f"not JSON: {type(error).__name__}") from None
        if not isinstance(message, dict):
            raise WireError("not an object")
        kind = message.pop("kind", None)
        fields = self.kinds.get(kind) if isinstance(kind, str) else None
        if fields is None:
            raise WireError(f"a message of kind {str(kind)[:40]!r}, where {' or '.join(self.kinds)} is expected")
        if message.keys() != fields.keys():
            odd = ", ".join(sorted(name[:40] for name in message.keys() ^ fields.keys())[:8])
            raise WireError(f"{kind}: it has {', '.join(fields) or 'no field'}; missing or unexpected: {odd}")
        for name, field in fields.items():
            if not field(message[name]):
                raise WireError(f"{kind}: {name} is {json.dumps(message[name])[:80]}")
        return kind, message


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in pairs}) != len(pairs):
        raise ValueError("a name occurs twice")
    return dict(pairs)


def _no_constant(name: str) -> Any:
    raise ValueError(name)  # NaN, Infinity


def pack(kind: str, data: bytes = b"", **fields: Any) -> bytes:
    """Returns the bytes of a message.

    >>> pack("end")
    b'TFRING\\x00\\x02\\x0f\\x00\\x00\\x00\\x00\\x00\\x00\\x00{"kind": "end"}'
    """
    body = json.dumps({"kind": kind, **fields}, allow_nan=False).encode()
    return _PREFIX.pack(MAGIC, len(body), len(data)) + body + data


class Decoder:
    """Decodes messages from bytes that come in parts."""

    def __init__(self, expected: Format) -> None:
        self.expected = expected
        self.signed = b""  # the part of the last message that its tag covers
        self._buffer = bytearray()

    @property
    def missing(self) -> int:
        """Returns the fewest bytes that must come before there can be another message."""
        return self._needed() - len(self._buffer)

    def _needed(self) -> int:
        if len(self._buffer) < _PREFIX.size:
            if not MAGIC.startswith(self._buffer[: len(MAGIC)]):
                raise WireError(f"not a message of tfring: {bytes(self._buffer)!r}")
            return _PREFIX.size
        magic, json_bytes, data_bytes = _PREFIX.unpack_from(self._buffer)
        if magic != MAGIC:
            raise WireError(f"not a message of tfring: {magic!r}")
        if not 2 <= json_bytes <= self.expected.max_json_bytes or data_bytes > self.expected.max_data_bytes:
            raise WireError(f"a message of {json_bytes} and {data_bytes} bytes")
        return _PREFIX.size + json_bytes + data_bytes

    def feed(self, data: bytes) -> Iterator[Message]:
        """Yields the messages that these bytes complete.

        Raises:
          WireError: If the bytes are not a message.
        """
        self._buffer += data
        while (needed := self._needed()) > _PREFIX.size and len(self._buffer) >= needed:
            end = _PREFIX.size + _PREFIX.unpack_from(self._buffer)[1]
            self.signed, rest = bytes(self._buffer[:end]), bytes(self._buffer[end:needed])
            del self._buffer[:needed]
            yield Message(*self.expected.check(self.signed[_PREFIX.size :]), rest)


class Channel:
    """A connected socket that carries messages, tagged once both challenges are known. Every wait ends.

    Attributes:
      socket: The non-blocking socket.
      deadline: Time of `time.monotonic()` by which all messages must have been sent and received.
      wait_for: A function that is called while no data arrives. Returns whether to continue to wait.
    """

    CHALLENGES = Format({"challenge": {}}, max_data_bytes=CHALLENGE_BYTES)
    PROOFS = Format({"proof": {}}, max_data_bytes=TAG_BYTES)

    def __init__(self, connection: socket.socket, deadline: float, *, connects: bool) -> None:
        connection.setblocking(False)
        self.socket = connection
        self.deadline = deadline
        self.wait_for: Callable[[], bool] = lambda: True
        self._decoder: Decoder | None = None
        self._mine, self._theirs = (b"c", b"l") if connects else (b"l", b"c")
        self._challenge = secrets.token_bytes(CHALLENGE_BYTES)
        self._key: bytes | None = None
        self._num_sent = self._num_received = 0

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()

    @property
    def is_closed_by_peer(self) -> bool:
        """Returns True if the peer has closed the connection and no data is left to read, or the connection failed."""
        try:
            return self.socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    @property
    def is_local(self) -> bool:
        """Returns True if the peer is a process of this host, so that the channel can carry descriptors."""
        return self.socket.family == socket.AF_UNIX

    def challenge(self) -> None:
        """Sends this side's challenge."""
        self._write(pack("challenge", self._challenge))

    def challenged(self, by: Message, secret: bytes) -> None:
        """Derives the key from both challenges; all further messages are tagged."""
        if len(by.data) != CHALLENGE_BYTES or by.data == self._challenge:
            raise WireError("no challenge")
        both = (self._challenge, by.data) if self._mine == b"c" else (by.data, self._challenge)
        self._key = hmac.digest(secret, b"tfring 2" + b"".join(both), "sha256")

    def prove_first(self, secret: bytes) -> None:
        """Runs the handshake of the connecting side.

        Raises:
          NoProofError: If the other side has another secret.
        """
        self.challenge()
        self.challenged(self.receive(self.CHALLENGES), secret)
        self.send("proof")
        try:
            self.receive(self.PROOFS)
        except ConnectionError as error:
            why = "it does not accept this rank's secret: TFRING_SECRET differs, or is set on some ranks only"
            raise NoProofError(why) from error

    def send(self, kind: str, fds: Sequence[int] = (), **fields: Any) -> None:
        """Writes one message, with descriptors if it is a Unix socket.

        Raises:
          OSError: If the connection closed, or the deadline has passed.
        """
        self._write(self.packed(kind, **fields), fds)

    def packed(self, kind: str, **fields: Any) -> bytes:
        """Returns the bytes of a message, with its tag once messages are tagged."""
        if self._key is None:
            return pack(kind, **fields)
        signed = pack(kind, bytes(TAG_BYTES), **fields)[:-TAG_BYTES]
        tag = self._tag(self._mine, self._num_sent, signed)
        self._num_sent += 1
        return signed + tag

    def receive(self, expected: Format, fds: list[int] | None = None, max_fds: int = 0) -> Message:
        """Reads one message and no byte beyond it.

        Args:
          expected: The format of the message.
          fds: A list to which descriptors that came with the message are appended.
          max_fds: Maximum number of descriptors.

        Raises:
          WireError: If the data is not a message of this format.
          GivenUpError: If `wait_for` returned False.
          OSError: If the connection closed, or the deadline has passed.
        """
        while True:
            message = self.try_receive(expected, fds, max_fds)
            if message is not None:
                return message
            self._wait(select.POLLIN)

    def try_receive(self, expected: Format, fds: list[int] | None = None, max_fds: int = 0) -> Message | None:
        """Reads like `receive`, but returns None if the message is not complete yet."""
        tagged = self._key is not None
        if self._decoder is None:
            if tagged and expected.max_data_bytes != TAG_BYTES:
                expected = Format(expected.kinds, max_json_bytes=expected.max_json_bytes, max_data_bytes=TAG_BYTES)
            self._decoder = Decoder(expected)
        while True:
            try:
                data = self._read(min(self._decoder.missing, _CHUNK_BYTES), fds, max_fds)
            except BlockingIOError:
                return None
            if not data:
                raise ConnectionError("the connection closed")
            for message in self._decoder.feed(data):
                signed, self._decoder = self._decoder.signed, None
                if tagged:
                    tag = self._tag(self._theirs, self._num_received, signed)
                    if not hmac.compare_digest(tag, message.data):
                        raise NoProofError("its tag does not match the secret")
                    self._num_received += 1
                    message = message._replace(data=b"")
                return message

    def _tag(self, side: bytes, number: int, signed: bytes) -> bytes:
        assert self._key is not None
        return hmac.digest(self._key, side + struct.pack("<Q", number) + signed, "sha256")

    def _read(self, size: int, fds: list[int] | None, max_fds: int) -> bytes:
        if fds is None:
            return self.socket.recv(size)  # the kernel closes descriptors that are not received
        data, found, flags, _ = socket.recv_fds(self.socket, size, _MAX_FDS, socket.MSG_CMSG_CLOEXEC)
        fds += found
        if flags & socket.MSG_CTRUNC and len(found) < _MAX_FDS:  # there was space, so this process can open no more
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        if flags & socket.MSG_CTRUNC or len(fds) > max_fds:
            raise WireError("too many descriptors")
        return data

    def _write(self, data: bytes, fds: Sequence[int] = ()) -> None:
        view = memoryview(data)
        while view:
            try:
                if fds:
                    sent, fds = socket.send_fds(self.socket, [view], list(fds)), ()
                else:
                    sent = self.socket.send(view, socket.MSG_NOSIGNAL)
                view = view[sent:]
            except BlockingIOError:
                self._wait(select.POLLOUT)

    def _wait(self, events: int) -> None:
        _wait(self.socket, events, self.deadline, self.wait_for)


def connect(connection: socket.socket, address: Any, deadline: float, wait_for: Callable[[], bool]) -> None:
    """Connects a socket, calling `wait_for` while there is no answer.

    Raises:
      GivenUpError: If `wait_for` returned False.
      OSError: If there is no answer, or none in time.
    """
    connection.setblocking(False)
    while (code := connection.connect_ex(address)) in (errno.EINPROGRESS, errno.EALREADY):
        _wait(connection, select.POLLOUT, deadline, wait_for)
    if code not in (0, errno.EISCONN):
        raise OSError(code, os.strerror(code))


def _wait(connection: socket.socket, events: int, deadline: float, wait_for: Callable[[], bool]) -> None:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("no answer in time")
    poll = select.poll()  # select() does not support descriptors above 1023
    poll.register(connection, events)
    if not poll.poll(1e3 * min(left, _SLICE_SECONDS)) and not wait_for():
        raise GivenUpError


def close_all(fds: list[int]) -> None:
    """Closes all descriptors of a list and empties it."""
    while fds:
        with contextlib.suppress(OSError):
            os.close(fds.pop())
