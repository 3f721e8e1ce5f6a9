"""Messages between processes that do not trust each other: what is one, what is none, however it is cut."""

import contextlib
import json
import socket
import struct
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfring.transport import wire

GREETING = wire.Format(
    {"hello": {"rank": wire.integer(0, 9), "name": wire.text(5), "to": wire.optional(wire.list_of(wire.text(3), 2))}},
    max_json_bytes=200,
    max_data_bytes=7,
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def whole(data, expected=GREETING):
    return list(wire.Decoder(expected).feed(data))


def framed(body, data=b""):
    return wire.MAGIC + struct.pack("<II", len(body), len(data)) + body + data


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.text("ab é", max_size=5), st.binary(max_size=7)), max_size=4),
    st.integers(1, 60),
)
def test_messages_however_they_are_cut(messages, size):
    stream = b"".join(wire.pack("hello", data, rank=rank, name=name, to=None) for rank, name, data in messages)
    decoder, received = wire.Decoder(GREETING), []
    for start in range(0, len(stream), size):
        assert decoder.missing > 0
        received += decoder.feed(stream[start : start + size])
    assert [(m.fields["rank"], m.fields["name"], m.data) for m in received] == messages


@settings(max_examples=400, deadline=None)
@given(st.dictionaries(st.sampled_from(["kind", "rank", "name", "to", "more"]), values) | values)
def test_any_json_is_a_checked_message_or_refused(value):
    try:
        messages = whole(framed(json.dumps(value).encode()))
    except wire.WireError:
        return
    (message,) = messages
    assert type(message.fields["rank"]) is int and 0 <= message.fields["rank"] <= 9
    assert message.fields.keys() == {"rank", "name", "to"} and len(message.fields["name"]) <= 5


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=300), st.booleans())
def test_any_bytes_are_refused_or_wait_for_more(data, with_magic):
    with contextlib.suppress(wire.WireError):
        assert whole((wire.MAGIC if with_magic else b"") + data) == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[" * 200,
        b'{"a":' * 39,
        b"[]",
        b'"hello"',
        b"{}",
        b'{"kind": ["hello"]}',
        b'{"kind": "hello"}',
        b'{"kind": "hello", "rank": 1, "rank": 1, "name": "", "to": null}',
        b'{"kind": "hello", "rank": 10, "name": "", "to": null}',
        b'{"kind": "hello", "rank": true, "name": "", "to": null}',
        b'{"kind": "hello", "rank": 1.0, "name": "", "to": null}',
        b'{"kind": "hello", "rank": NaN, "name": "", "to": null}',
        b'{"kind": "hello", "rank": 1, "name": "123456", "to": null}',
        b'{"kind": "hello", "rank": 1, "name": "\\u0000", "to": null}',
        b'{"kind": "hello", "rank": 1, "name": "\\ud800", "to": null}',
        b'{"kind": "hello", "rank": 1, "name": "\xff", "to": null}',
        b'{"kind": "hello", "rank": 1, "name": "", "to": ["", "", ""]}',
        b'{"kind": "hello", "rank": 1, "name": "", "to": null, "more": 1}',
        b'{"kind": "goodbye", "rank": 1, "name": "", "to": null}',
        b'{"kind": "hello", "rank": ' + b"1" * 150 + b"}",
    ],
)
def test_what_is_no_message(body):
    with pytest.raises(wire.WireError):
        whole(framed(body))


def test_lengths_are_looked_at_before_anything_is_taken():
    for lengths in ((201, 0), (2**32 - 1, 0), (20, 8), (20, 2**32 - 1), (0, 0), (1, 0)):
        with pytest.raises(wire.WireError):
            whole(wire.MAGIC + struct.pack("<II", *lengths))


def channels():
    ours, theirs = socket.socketpair()
    deadline = time.monotonic() + 10
    return wire.Channel(ours, deadline, connects=True), wire.Channel(theirs, deadline, connects=False)


def test_a_channel_reads_not_a_byte_more_than_its_message():
    one, other = channels()
    with one, other:
        one.socket.sendall(wire.pack("hello", rank=1, name="", to=None) + b"what the ring says next")
        assert other.receive(GREETING).fields["rank"] == 1
        assert other.socket.recv(100) == b"what the ring says next"


def test_the_deadline_is_for_all_that_is_said():
    one, other = channels()
    with one, other:
        other.deadline = began = time.monotonic()
        other.deadline += 0.5
        message = wire.pack("hello", rank=1, name="", to=None)

        def drip():
            with contextlib.suppress(OSError):
                for byte in message:  # each piece comes in time, the whole does not
                    one.socket.send(bytes([byte]))
                    time.sleep(0.1)

        threading.Thread(target=drip, daemon=True).start()
        with pytest.raises(TimeoutError):
            other.receive(GREETING)
        assert 0.5 <= time.monotonic() - began < 0.1 * len(message)
