"""Prints lines on rank 0's standard error when a run starts, trains and ends. TFRING_QUIET=1 turns them off."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

from tfring import config, seeding
from tfring.runtime import Ring
from tfring.transport import secret

_MOST = 0.5  # share of waiting above which the last line gives advice
_LINKS = {"shm": "shared memory", "tcp": "TCP"}
_ADVICE = (
    " More than half was waiting: TFRING_TRACE=traces and `tfring report traces` show for whom; docs/speed.md says "
    "what to try."
)


class RunLines:
    """Prints one line when a strategy of several workers is created, and one with its times when it is closed.

    It holds no reference to the strategy, so an unreferenced strategy is collected; its last line then comes at exit.

    Args:
      ring: The strategy's Ring.
      num_servers: Number of parameter servers.
    """

    def __init__(self, ring: Ring, num_servers: int) -> None:
        self._seconds = 0.0
        self._waited: float | None = 0.0
        self._sent: int | None = 0
        self._depth = 0  # of nested calls: `fit` calls `evaluate`
        self._has_failed = False
        self._noted: set[str] = set()
        self._process = os.getpid()  # forked processes print nothing
        self._is_open = ring.cluster.world_size > 1 and ring.cluster.is_chief and not config.read("TFRING_QUIET")
        if self._is_open:
            _print(start_line(ring, num_servers))
            atexit.register(self.close)

    @contextlib.contextmanager
    def timed(self, ring: Ring) -> Iterator[None]:
        """Adds the time of a call of `fit`, `evaluate` or `predict`, the seconds it waited and the bytes it sent."""
        before = (time.monotonic(), ring.seconds_waited(), ring.bytes_sent())
        self._depth += 1
        self._has_failed = True
        try:
            yield
        finally:
            self._depth -= 1
        self._has_failed = False
        if self._depth == 0:
            self._seconds += time.monotonic() - before[0]
            self._waited = _sum(self._waited, before[1], ring.seconds_waited())
            self._sent = _sum(self._sent, before[2], ring.bytes_sent())

    def note(self, text: str) -> None:
        """Prints a line, but each text only once."""
        if self._is_open and text and text not in self._noted:
            self._noted.add(text)
            _print(text)

    def close(self) -> None:
        """Prints the last line, once; prints nothing if no call was made, or if the program fails."""
        atexit.unregister(self.close)
        is_wanted = self._is_open and self._seconds > 0 and self._process == os.getpid()
        self._is_open = False
        if is_wanted and not self._has_failed and not hasattr(sys, "last_type"):
            _print(end_line(self._seconds, self._waited, self._sent))


def start_line(ring: Ring, servers: int) -> str:
    """Returns the first line, such as "2 workers on 1 host (TF_CONFIG): ring over shared memory, without a secret."."""
    cluster = ring.cluster
    hosts = f"{cluster.num_nodes} hosts" if cluster.num_nodes > 1 else "1 host"
    parts = []
    communicator = getattr(ring.world, "communicator", None)
    if ring.communication == "tensorflow":
        parts.append("TensorFlow's collectives")
    elif communicator is not None:
        links = sorted(set(communicator.transport))
        parts.append(f"ring over {' and '.join(_LINKS[link] for link in links)}")
        if config.read("TFRING_ENCRYPT"):
            parts.append("TCP encrypted by TLS" if "tcp" in links else "nothing to encrypt")
    if servers:
        parts.append(f"{servers} parameter server{'s' if servers > 1 else ''}")
    if ring.communication != "tensorflow":
        has_secret = cluster.secret is not None or secret.configured() is not None
        parts.append("with a secret" if has_secret else "without a secret")
    if seeding.current() is not None:
        parts.append(f"seed {seeding.current()}")
    return f"{cluster.world_size} workers on {hosts} ({cluster.source}): {', '.join(parts)}."


def end_line(seconds: float, waited: float | None, sent: int | None) -> str:
    """Returns the last line.

    Args:
      seconds: Seconds in `fit`, `evaluate` and `predict`.
      waited: Seconds of these that rank 0's collectives waited for other ranks; None if they are not counted.
      sent: Bytes that rank 0 sent in that time; None if they are not counted.

    >>> print(end_line(12.3, 4.1, 12_000_000))
    12.3 s in fit, evaluate and predict: 8.2 s of computation, 4.1 s (33%) of waiting for others; rank 0 sent 12.0 MB.
    >>> print(end_line(3.0, None, None))
    3.0 s in fit, evaluate and predict.
    """
    text = f"{seconds:.1f} s in fit, evaluate and predict"
    share = 0.0
    if waited is not None:
        waited = min(waited, seconds)  # two channels may wait at the same time
        share = round(waited / seconds, 2)  # as it is printed
        text += f": {seconds - waited:.1f} s of computation, {waited:.1f} s ({share:.0%}) of waiting for others"
    if sent is not None:
        text += f"; rank 0 sent {sent / 1e6:.1f} MB" if sent >= 1e6 else f"; rank 0 sent {sent / 1e3:.1f} kB"
    return f"{text}.{_ADVICE if share > _MOST else ''}"


def _sum(total: Any, before: Any, now: Any) -> Any:
    """Returns the total plus the increase from `before` to `now`; None if one of them is not counted."""
    return None if total is None or before is None or now is None else total + now - before


def _print(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # standard error is gone, or closed
        print(f"tfring: {text}", file=sys.stderr, flush=True)
