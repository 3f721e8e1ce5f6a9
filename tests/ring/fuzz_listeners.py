"""Sends wrong messages to every place where a process listens to another one, and looks that nothing comes of it.

    python tests/ring/fuzz_listeners.py                        # a short run
    python tests/ring/fuzz_listeners.py --messages 1000000     # at each of the four places

What is sent are right conversations with something wrong in them: bits, lengths, fields, types, numbers, order, tags,
cuts. The one who sends knows the secret, or nothing would get past the proofs. Whatever comes is answered, or refused
as WireError or OSError; memory, descriptors and threads stay as they are, and a right conversation still succeeds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import random
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

from tfring.cluster import meeting
from tfring.cluster.unresolved import UnresolvedCluster
from tfring.launch import frames
from tfring.ring import rendezvous
from tfring.transport import dial, handshake, sockets, wire
from tfring.transport.listener import Connection, Listener

SECRET = "known to the one who sends, too"
ODD = (
    *(None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, 10**400, 0.5, 1e308, "", "\x00", "\x1b[2J", "\ud800", "0" * 16),
    *("0" * 32, "a" * 5000, "::1", "127.0.0.1", "::ffff:127.0.0.1%lo", [], [[]], [1] * 100, {}, {"kind": "here"}),
)
_MOST_GROWTH_BYTES = 32 << 20


class Fuzz:
    """Makes messages with something wrong in them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def fields(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Some of them wrong."""
        fields = dict(fields)
        for _ in range(self.random.choice((0, 1, 1, 2, 4))):
            name = self.random.choice([*fields, "kind", "more"])
            match self.random.randrange(4):
                case 0:
                    fields.pop(name, None)
                case 1 if isinstance(fields.get(name), str):
                    fields[name] = self.text(fields[name])
                case _:
                    fields[name] = self.random.choice(ODD)
        return fields

    def text(self, text: str) -> str:
        """With a character changed."""
        at = self.random.randrange(len(text) + 1)
        return text[:at] + chr(self.random.choice((0, 10, 27, 45, 47, 0x2028, 0xD800, 0x1F600))) + text[at + 1 :]

    def message(self, kind: str, data: bytes, fields: dict[str, Any]) -> bytes:
        """Packed, whatever it holds."""
        body = json.dumps({"kind": kind, **fields}).encode()
        match self.random.randrange(12):
            case 0:
                body = b"[" * self.random.randrange(1, 4000)
            case 1:
                body = body[:-1] + b', "kind": "probe"}'
            case 2:
                body = body.replace(b"1", b"NaN")
            case 3:
                body = b'{"a":' * self.random.randrange(1, 700)
        lengths = [len(body), len(data)]
        if self.random.randrange(8) == 0:
            lengths[self.random.randrange(2)] = self.random.choice((0, 1, 2, 4097, 2**20, 2**31, 2**32 - 1))
        return wire.MAGIC + struct.pack("<II", *lengths) + body + data

    def bytes(self, data: bytes) -> bytes:
        """Some of them wrong."""
        changed = bytearray(data)
        for _ in range(self.random.choice((0, 0, 0, 1, 3, 20))):
            at = self.random.randrange(len(changed) + 1)
            match self.random.randrange(4):
                case 0:
                    changed[at : at + 1] = bytes([self.random.randrange(256)])
                case 1:
                    del changed[at : at + self.random.randrange(1, 40)]
                case 2:
                    changed[at:at] = changed[at : at + self.random.randrange(1, 40)]
                case _:
                    changed[at:at] = self.random.randbytes(self.random.randrange(1, 40))
        return bytes(changed)


def lie(fuzz: Fuzz, channel: wire.Channel, kind: str, fields: dict[str, Any]) -> bytes:
    """A message with something wrong in it, and mostly with the right tag."""
    signed = fuzz.message(kind, bytes(wire.TAG_BYTES), fuzz.fields(fields))[: -wire.TAG_BYTES]
    tag = channel._tag(channel._mine, channel._num_sent, signed)
    channel._num_sent += fuzz.random.choice((1, 1, 1, 1, 0, 2))
    return signed + tag if fuzz.random.randrange(8) else fuzz.bytes(signed + tag)


# The places.


def at_the_listener(fuzz: Fuzz, messages: int) -> None:
    """Connections to a listener, through its socket: each says a few things before it is turned away."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    cluster = SimpleNamespace(
        rank=0, world_size=2, addresses=(address, "127.0.0.1:1"), listen_fd=listener.fileno(), secret=SECRET
    )
    gate = Listener.of(cluster)
    name = sockets.local_name("127.0.0.1", gate.port)
    who = {"job": handshake.job_id(cluster.addresses), "rank": 1, "to": 0, "seconds": 1}
    token = "0123456789abcdef" * 2
    hellos = {
        "probe": who,
        "doctor": who,
        "ring": {**who, "ring": "x", "transport": "auto", "encrypts": False, "process": token, "session": token},
        "data": {**who, "session": token},
        "meeting": {**who, "world_size": 2, "host": "127.0.0.1", "port": 1, "identity": "x", "process": token},
    }
    said = 0
    try:
        while said < messages:
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(name)
            channel = wire.Channel(connection, time.monotonic() + 20, connects=True)
            with channel, contextlib.suppress(OSError, wire.WireError):
                said += 1
                if fuzz.random.randrange(8) == 0:
                    _hear_out(channel, fuzz.bytes(fuzz.message("challenge", channel._challenge, {})))
                    continue
                channel.challenge()
                channel.challenged(channel.receive(wire.Channel.CHALLENGES), SECRET.encode())
                if fuzz.random.randrange(8) == 0:
                    _hear_out(channel, lie(fuzz, channel, "proof", {}))
                    continue
                channel.send("proof")
                channel.receive(wire.Channel.PROOFS)
                kind = fuzz.random.choice(list(hellos))
                channel._write(lie(fuzz, channel, kind, hellos[kind]))
        found = dial.probe(cluster, 0, 20)
        assert found.rank == 0, found
        assert gate._thread.is_alive()
    finally:
        Listener.close_at(listener.fileno())
        listener.close()


def _hear_out(channel: wire.Channel, lie: bytes) -> None:
    """Until the listener closes, which waits for nothing when no more can come."""
    channel._write(lie)
    channel.socket.shutdown(socket.SHUT_WR)
    while True:
        channel.receive(wire.Format({"challenge": {}, "proof": {}}, max_data_bytes=32))


def at_the_meeting(fuzz: Fuzz, messages: int) -> None:
    """Sends hellos to rank 0's meeting, and rank 0's answers to the others."""
    host = meeting._AddressGather(UnresolvedCluster(0, 9, "fuzz", "job"))
    rank = meeting._AddressGather(UnresolvedCluster(1, 9, "fuzz", "job"))
    table = [{"host": f"192.0.2.{i}", "port": 1 + i, "identity": "x"} for i in range(9)]
    for _ in range(messages // 2):
        places, connections = {0: table[0]}, {}
        ours, theirs = socket.socketpair()
        hello = {"rank": 1, "to": 0, "world_size": 9, "host": "192.0.2.1", "port": 1, "identity": "x", "process": ""}
        for name, field in (("host", handshake.HELLOS.kinds["meeting"]["host"]), ("rank", wire.integer(0, 1 << 20))):
            odd = fuzz.random.choice(ODD)
            if field(odd):  # as the listener accepts it
                hello[name] = odd
        channel = wire.Channel(ours, time.monotonic() + 20, connects=False)
        host._register(Connection(channel, "meeting", hello, 0.0), places, connections)
        assert set(places) <= set(range(9))
        for connection in connections.values():
            connection.channel.close()
        channel.close()
        theirs.close()
    formats = (meeting._ANSWERS, rank.tables())
    fields = {"refused": {"why": "x", "final": False}, "heard": {}, "places": meeting._columns(table)}

    def use(message: wire.Message) -> None:
        if message.kind == "places":
            assert len(meeting._rows(message.fields, 9)) == 9

    _through_a_channel(fuzz, messages - messages // 2, formats, fields, use)


def at_the_launcher(fuzz: Fuzz, messages: int) -> None:
    """Sends an agent's messages to a launcher, and a launcher's to an agent."""
    to_agent = {
        "start": {"ranks": [0], "command": ["x"], "cwd": "/", "environ": {"A": "b"}, "num_nodes": 1},
        "addresses": {"addresses": ["127.0.0.1:1"]},
        "input": {},
        "signal": {"rank": 0, "number": 15},
    }
    to_launcher = {
        "listening": {"address": "127.0.0.1", "ports": [1]},
        "problem": {"what": "x"},
        "output": {"rank": 0, "stream": "out"},
        "ended": {"rank": 0, "code": 0},
    }
    for number in range(messages):
        kinds = to_agent if number % 2 else to_launcher
        role, expected = ("launcher", frames.TO_AGENT) if number % 2 else ("agent", frames.TO_LAUNCHER)
        reader = frames.Reader(role, expected)
        kind = fuzz.random.choice(list(kinds))
        message = fuzz.message(kind, fuzz.random.randbytes(5), fuzz.fields(kinds[kind]))
        greeting = frames.greeting(role)
        data = fuzz.bytes(greeting + message) if number % 8 < 2 else greeting + fuzz.bytes(message)
        cut = fuzz.random.randrange(len(data) + 1)
        with contextlib.suppress(wire.WireError):
            for piece in (data[:cut], data[cut:]):
                for message in reader.feed(piece):
                    assert message.fields.keys() == kinds[message.kind].keys()


def at_a_neighbour(fuzz: Fuzz, messages: int) -> None:
    """Sends each of two neighbours the messages of the other while a ring forms."""
    formats = (rendezvous._WELCOMES, rendezvous._CONFIRMS, rendezvous._AGREED)
    fields = {
        "welcome": {"transport": "shm", "wanted": "auto"},
        "refused": {"why": "x", "final": True},
        "failed": {"why": "x"},
        "confirm": {"transport": "tcp"},
        "agreed": {"transport": "tcp"},
    }
    _through_a_channel(fuzz, messages, formats, fields, lambda message: None)


def _through_a_channel(
    fuzz: Fuzz,
    messages: int,
    formats: tuple[wire.Format, ...],
    fields: dict[str, dict[str, Any]],
    use: Callable[[wire.Message], None],
) -> None:
    for number in range(messages):
        ours, theirs = socket.socketpair()
        expected = formats[number % len(formats)]
        kind = fuzz.random.choice(list(expected.kinds))
        with (
            wire.Channel(ours, 0.0, connects=True) as liar,
            wire.Channel(theirs, 0.0, connects=False) as channel,
            contextlib.suppress(OSError, wire.WireError),
        ):
            secret = SECRET.encode()
            liar._key = channel._key = secret
            liar._write(lie(fuzz, liar, kind, fields[kind]))
            fds: list[int] = []
            message = channel.try_receive(expected, fds, 2)
            if message is not None:
                assert message.fields.keys() == fields[message.kind].keys()
                use(message)


PLACES = {
    "listener": at_the_listener,
    "meeting": at_the_meeting,
    "launcher": at_the_launcher,
    "neighbour": at_a_neighbour,
}


def _held() -> tuple[int, int, int]:
    """Resident bytes, descriptors, threads."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd")), threading.active_count()


def run(messages: int, seed: int = 1) -> Iterator[str]:
    """Yields what to say of each place.

    Raises:
      AssertionError: Something grew, or a right conversation failed.
    """
    for name, place in PLACES.items():
        place(Fuzz(seed), min(messages, 1000))  # what is made once is made
        before, began = _held(), time.monotonic()
        place(Fuzz(seed + 1), messages)
        seconds, after = time.monotonic() - began, _held()
        assert after[1:] == before[1:], f"{name}: descriptors and threads were {before[1:]}, and are {after[1:]}"
        grown = after[0] - before[0]
        assert grown < _MOST_GROWTH_BYTES, f"{name}: {grown} bytes more than before"
        yield f"{name}: {messages} messages in {seconds:.0f} s, {max(0, grown) / 1e6:.1f} MB more than before"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    for line in run(arguments.messages, arguments.seed):
        print(line, flush=True)


if __name__ == "__main__":
    main()
