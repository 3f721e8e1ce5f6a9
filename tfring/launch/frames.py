"""What a launcher and its agent on another host say to each other, over the standard streams of ssh or srun.

    launcher                                          agent (agent.py)
       │ start: ranks, command, environment ──────────────► │     (1) and the secret: all that is on no command line
       │ ◄─────────────────────── listening: address, ports │     (2) a port for each rank; or: problem
       │ addresses ───────────────────────────────────────► │     (3) of all ranks; the workers start
       │ ◄──────────────────────────── output: rank, stream │     what they print
       │ ◄────────────────────────────── ended: rank, code │     as they end
       │ signal: rank, number ────────────────────────────► │     and for rank 0: input, empty at its end
       │ (closes) ────────────────────────────────────────► │     stop the workers, however the launcher ended

The messages are those of tfring/wire.py. They have no tags: ssh has proved who is there, and nobody else is on the way.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from tfring import wire
from tfring.cluster import entrance

_MAX_JSON_BYTES = 1 << 24  # an environment and a command
_MAX_DATA_BYTES = 1 << 20  # of what is printed and read, a piece at a time
_RANK = wire.integer(0, entrance.MAX_RANKS)
_WORD = wire.text(_MAX_JSON_BYTES, r"[^\x00]*")
_RANKS = wire.list_of(_RANK, entrance.MAX_RANKS)

TO_AGENT = wire.Format(
    {
        "start": {
            "ranks": _RANKS,
            "command": wire.list_of(_WORD, 1 << 20),
            "cwd": _WORD,
            "environ": wire.mapping_of(_WORD, _WORD, 1 << 16),
            "num_nodes": wire.integer(1, entrance.MAX_RANKS),
        },
        "addresses": {"addresses": wire.list_of(wire.text(300), entrance.MAX_RANKS)},
        "input": {},
        "signal": {"rank": _RANK, "number": wire.integer(1, 64)},
    },
    max_json_bytes=_MAX_JSON_BYTES,
    max_data_bytes=_MAX_DATA_BYTES,
)
TO_LAUNCHER = wire.Format(
    {
        "listening": {"address": wire.text(64), "ports": wire.list_of(wire.integer(1, 65535), entrance.MAX_RANKS)},
        "problem": {"what": wire.REASON},
        "output": {"rank": _RANK, "stream": wire.one_of("out", "err")},
        "ended": {"rank": _RANK, "code": wire.integer(-64, 255)},
    },
    max_json_bytes=_MAX_JSON_BYTES,
    max_data_bytes=_MAX_DATA_BYTES,
)


class FromAgent:
    """Cuts messages out of what an agent sends; what a login shell prints comes before the first."""

    def __init__(self) -> None:
        self._decoder = wire.Decoder(TO_LAUNCHER)
        self._noise: bytes | None = b""  # None once it has ended

    def feed(self, data: bytes) -> Iterator[wire.Message]:
        """The messages that are complete.

        Raises:
            WireError: This is none.
        """
        if self._noise is not None:
            noise, found, rest = (self._noise + data).partition(wire.MAGIC)
            if not found:
                self._noise = noise[1 - len(wire.MAGIC) :]  # half of it may have come
                return
            self._noise, data = None, found + rest
        yield from self._decoder.feed(data)


def write(fd: int, data: bytes) -> None:
    """Writes all of it."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
