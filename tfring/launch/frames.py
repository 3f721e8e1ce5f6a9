"""Messages between a launcher and its agent on another host, over the standard streams of ssh or srun.

    launcher                                          agent (agent.py)
       │ tfring launcher 5 0.1.0 ─────────────────────────► │     a line each: the protocol, and the version to be told;
       │ ◄──────────────────────────── tfring agent 5 0.1.0 │     another protocol ends the run at once
       │ start: ranks, command, environment ──────────────► │     (1) and the secret: all that is on no command line
       │ ◄─────────────────────── listening: address, ports │     (2) a port for each rank, of servers too; or: problem
       │ addresses ───────────────────────────────────────► │     (3) of all ranks; the workers start
       │ ◄──────────────────────────── output: rank, stream │     what they print
       │ ◄────────────────────────────── ended: rank, code │     as they end, and what they said of their place
       │ signal: rank, number ────────────────────────────► │     and for rank 0: input, empty at its end
       │ ◄────────────────────────────────────────── taken │     an input, of at most INPUT_MESSAGES on the way
       │ (closes) ────────────────────────────────────────► │     stop the workers, however the launcher ended

The messages are those of tfring/transport/wire.py. They have no tags: ssh has authenticated both sides.
The first lines stay the same in every later protocol.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from tfring._version import __version__
from tfring.transport import handshake, wire

PROTOCOL = 5  # changes with every change of these messages
_GREETING = re.compile(rb"tfring (agent|launcher) ([0-9]{1,9}) ([0-9A-Za-z.+!-]{1,64})\n")
_MAX_GREETING_BYTES = 128

_MAX_JSON_BYTES = 1 << 24  # an environment and a command
_MAX_DATA_BYTES = 1 << 20  # of output and input, per chunk
INPUT_MESSAGES, INPUT_BYTES = 64, 1 << 14  # of standard input, in flight at a time
_RANK = wire.integer(0, handshake.MAX_RANKS)
_WORD = wire.text(_MAX_JSON_BYTES, r"[^\x00]*")
_RANKS = wire.list_of(_RANK, handshake.MAX_RANKS)

TO_AGENT = wire.Format(
    {
        "start": {
            "ranks": _RANKS,
            "num_workers": wire.integer(1, handshake.MAX_RANKS),
            "command": wire.list_of(_WORD, 1 << 20),
            "cwd": _WORD,
            "environ": wire.mapping_of(_WORD, _WORD, 1 << 16),
            "num_nodes": wire.integer(1, handshake.MAX_RANKS),
        },
        "addresses": {"addresses": wire.list_of(wire.text(300), handshake.MAX_RANKS)},
        "input": {},
        "signal": {"rank": _RANK, "number": wire.integer(1, 64)},
    },
    max_json_bytes=_MAX_JSON_BYTES,
    max_data_bytes=_MAX_DATA_BYTES,
)
TO_LAUNCHER = wire.Format(
    {
        "listening": {"address": wire.text(64), "ports": wire.list_of(wire.integer(1, 65535), handshake.MAX_RANKS)},
        "problem": {"what": wire.REASON},
        "output": {"rank": _RANK, "stream": wire.one_of("out", "err")},
        "taken": {},
        "ended": {"rank": _RANK, "code": wire.integer(-64, 255), "said": wire.text(16, "[0-9a-z]*")},
    },
    max_json_bytes=_MAX_JSON_BYTES,
    max_data_bytes=_MAX_DATA_BYTES,
)


class OtherProtocolError(wire.WireError):
    """The other side runs another tfring.

    >>> str(OtherProtocolError("agent", "tfring 7.8.9 (protocol 99)"))
    'The agent runs tfring 7.8.9 (protocol 99), but its launcher runs ... Install the same tfring on all hosts.'
    """

    def __init__(self, role: str, theirs: str) -> None:
        ours = f"tfring {__version__} (protocol {PROTOCOL})"
        agent, launcher = (theirs, ours) if role == "agent" else (ours, theirs)
        super().__init__(
            f"The agent runs {agent}, but its launcher runs {launcher}. Install the same tfring on all hosts."
        )


def greeting(role: str) -> bytes:
    """Returns the first line that the "launcher" or the "agent" sends."""
    return f"tfring {role} {PROTOCOL} {__version__}\n".encode()


class Reader:
    """Extracts messages from the data that the other side sends after its greeting.

    Args:
      role: Role of the other side: "agent" or "launcher". Output of a login shell may precede an agent's greeting.
      expected: Format of the messages that may arrive.
    """

    def __init__(self, role: str, expected: wire.Format) -> None:
        self._role = role
        self._decoder = wire.Decoder(expected)
        self._unread = b""
        self._greeted = False

    def feed(self, data: bytes) -> Iterator[wire.Message]:
        """Yields the messages that are complete.

        Raises:
          OtherProtocolError: If the other side runs another tfring.
          WireError: If the data is not a message.
        """
        if not self._greeted:
            self._unread += data
            found = _GREETING.search(self._unread)
            if found is None or found[1].decode() != self._role:
                self._look_for_others()
                return
            if int(found[2]) != PROTOCOL:
                raise OtherProtocolError(self._role, f"tfring {found[3].decode()} (protocol {int(found[2])})")
            self._greeted, data = True, self._unread[found.end() :]
        yield from self._decoder.feed(data)

    def _look_for_others(self) -> None:
        start = f"tfring {self._role} ".encode()
        if self._role == "agent":
            self._unread = self._unread[-_MAX_GREETING_BYTES:]
        elif not start.startswith(self._unread[: len(start)]) or len(self._unread) > _MAX_GREETING_BYTES:
            raise OtherProtocolError(self._role, f"an older tfring, or none (it says {self._unread[:40]!r})")


def write(fd: int, data: bytes) -> None:
    """Writes all data."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
