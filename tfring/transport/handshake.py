"""The handshake: which rank connects, to which rank, and for which purpose.

Both sides prove that they know the secret (wire.py); then the connecting side sends one of HELLOS.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator

from tfring.transport import wire

MAX_RANKS = 1 << 20
MAX_SECONDS = 10**7

JOB = wire.text(16, "[0-9a-f]{16}")
_TOKEN = wire.text(32, "[0-9a-f]{32}")
_WHO = {
    "job": JOB,
    "rank": wire.integer(0, MAX_RANKS),  # of the connecting process
    "to": wire.integer(0, MAX_RANKS),  # of the process it wants to reach
    "seconds": wire.integer(1, MAX_SECONDS),  # time that it waits to be taken
}
_LINK = {
    **_WHO,
    "ring": wire.text(200),
    "transport": wire.one_of("auto", "shm", "tcp"),
    "encrypts": wire.one_of(False, True),
    "process": _TOKEN,
    "session": _TOKEN,
}
HELLOS = wire.Format(
    {
        "probe": _WHO,
        "doctor": _WHO,
        "ring": _LINK,  # a link of a ring that forms
        "link": _LINK,  # another link of an open ring
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
ANSWERS_TO_PROBE = wire.Format({"here": {"rank": wire.integer(0, MAX_RANKS)}, "refused": REFUSED}, max_json_bytes=8192)


class RefusedError(Exception):
    """The other side rejected the connection."""

    def __init__(self, why: str, final: bool = False) -> None:
        super().__init__(why)
        self.final = final


def job_id(addresses: tuple[str, ...]) -> str:
    """Returns the name of a job. Ranks with other addresses belong to another job."""
    return digest("\n".join(addresses))


def claimed_twice(rank: int) -> str:
    """Returns the reason for rejecting one of two processes of one rank."""
    return f"two processes say that they are rank {rank}. Is every rank started once?"


def digest(text: str) -> str:
    """Returns a name for a job that reveals nothing about it."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def answer(channel: wire.Channel, key: bytes) -> Generator[wire.Format, wire.Message, None]:
    """Runs the listening side: yields the format of the next message, and receives the message by `send`."""
    challenge = yield wire.Channel.CHALLENGES
    channel.challenge()
    channel.challenged(challenge, key)
    yield wire.Channel.PROOFS
    channel.send("proof")
    yield HELLOS
