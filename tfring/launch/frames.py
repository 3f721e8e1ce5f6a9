"""What a launcher and its agent on another host say to each other, over the standard streams of ssh or srun.

A frame is a line of JSON, and behind it as many raw bytes as its "bytes" says, if it says so.

    launcher                                          agent (agent.py)
       │ {"ranks": [2, 3], "command": ..., ...} ────────► │     (1) environment and all: on no command line
       │ ◄──────── {"listening": [...], "address": ...} (2)     a port for each rank
       │ {"addresses": [...]} ─────────────────────────► │     (3) of all ranks; the workers start
       │ ◄──────── {"rank": 2, "stream": "out", "bytes": n}     what they print
       │ ◄──────────────────── {"rank": 2, "code": 0} │     as they end
       │ {"signal": 15, "rank": 2} ────────────────────► │     and for rank 0: {"stdin": true, "bytes": n}
       │ (closes) ─────────────────────────────────────► │     stop the workers, however the launcher ended
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

MAGIC = b"tfring agent 1\n"  # before the agent's first frame: what a login shell may print comes before it
_MAX_FRAME_BYTES = 1 << 26


def pack(data: bytes = b"", **message: Any) -> bytes:
    """A frame.

    >>> pack(b"hello", rank=1)
    b'{"rank": 1, "bytes": 5}\\nhello'
    """
    if data:
        message["bytes"] = len(data)
    return json.dumps(message).encode() + b"\n" + data


class Unpacker:
    """Cuts frames out of what is read from a descriptor."""

    def __init__(self, magic: bytes = b"") -> None:
        self._magic = magic
        self._buffer = b""

    def feed(self, data: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
        """The frames that are complete.

        Raises:
            ValueError: This is no frame.
        """
        self._buffer += data
        if self._magic:
            _, found, rest = self._buffer.partition(self._magic)
            if not found:
                return
            self._magic, self._buffer = b"", rest
        while True:
            line, end, rest = self._buffer.partition(b"\n")
            if not end:
                return
            message = json.loads(line)
            size = message.get("bytes", 0)
            if not 0 <= size <= _MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {size} bytes")
            if len(rest) < size:
                return
            self._buffer = rest[size:]
            yield message, rest[:size]


def write(fd: int, data: bytes) -> None:
    """Writes all of it."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
