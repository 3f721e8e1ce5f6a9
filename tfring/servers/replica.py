"""Two servers hold the same shards: the primary answers workers, the secondary gets each change before they do.

    worker ═ push ═► primary ── the update ──► secondary      the same updates in the same order
                        │ ◄─ acknowledgement ──┘ then updates, too
    worker ◄═ values ═══╛

Servers `s` and `s + 1` hold shards `s`. Server `s` is the primary at first. When the primary's process is gone, the
secondary becomes the primary. A process started in the lost one's place becomes the secondary, and is filled first.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from tfring import config
from tfring.cluster.roles import Roles
from tfring.errors import PeerLostError, Reason, RendezvousError
from tfring.servers.connection import Connection

PRIMARY, SECONDARY = "primary", "secondary"
_PAUSE_SECONDS = 0.1  # between attempts to connect
_LOOK_SECONDS = 0.2  # between checks whether an idle secondary is gone

_log = logging.getLogger(__name__)

Message = tuple[Mapping[str, Any], Sequence[np.ndarray]]


class Copied(Protocol):
    """State with a copy on the other server. Its methods are called with the lock held."""

    def full(self) -> Message:
        """Returns all state that a secondary needs."""

    def take(self, head: Mapping[str, Any], arrays: list[np.ndarray]) -> None:
        """Applies a message of the primary: `full`, or a change."""

    def promote(self) -> None:
        """Continues as the primary."""

    def fail(self, why: str) -> None:
        """Ends this server with an error."""

    def end(self) -> None:
        """Ends this server, which holds no state."""


class Replica:
    """One end of the link between the two servers that hold the same shards.

    Args:
      roles: Roles of this process, which is a server.
      shards: Number of the server that is the primary at first.
      copied: The state that is kept the same on both servers.
      changed: The condition with the lock of that state.

    Attributes:
      role: `PRIMARY`, `SECONDARY`, or None until one of the two servers has filled the other.
    """

    def __init__(self, roles: Roles, shards: int, copied: Copied, changed: threading.Condition) -> None:
        self.role: str | None = None
        self._roles = roles
        self._shards = shards
        self._copied = copied
        self._changed = changed
        self._link: Connection | None = None  # of a primary, once its secondary has all state
        first, second = shards, (shards + 1) % len(roles.servers)
        self._other = second if roles.index == first else first
        self._is_first = roles.index == first

    def start(self) -> None:
        """Starts the thread that connects to the other server."""
        threading.Thread(target=self._run, name=f"tfring-replica-{self._shards}", daemon=True).start()

    def pass_on(
        self, head: Mapping[str, Any], arrays: Sequence[np.ndarray] = (), meanwhile: Callable[[], None] | None = None
    ) -> None:
        """Sends a change to the secondary, calls `meanwhile`, and waits for the acknowledgement, with the lock held.

        Raises:
          PeerLostError: If the secondary does not answer, and its process may be alive.
        """
        link = self._link
        if link is not None:
            self._try(lambda: link.send(head, arrays))
        if meanwhile is not None:
            meanwhile()
        if self._link is not None:
            self._try(self._link.receive)

    def _try(self, function: Callable[[], Any]) -> None:
        try:
            function()
        except PeerLostError as error:
            self._lose(error)

    def _lose(self, error: PeerLostError) -> None:
        """Continues alone if the secondary's process is gone. Otherwise fails: the secondary may assume the same."""
        if self._link is not None:
            self._link.close()
            self._link = None
        if not is_gone(error):
            why = f"server {self._other}, which holds the same shards, is lost, but its process may be alive: {error}"
            self._copied.fail(why)
            raise PeerLostError(why)
        _log.warning(
            "Server %d continues alone with the shards of server %d: server %d died.",
            *(self._roles.index, self._shards, self._other),
        )

    def _run(self) -> None:
        deadline = time.monotonic() + config.read("TFRING_CONNECT_TIMEOUT_SECONDS")
        while True:
            try:
                link = Connection(self._roles, self._other, shards=self._shards, between_servers=True)
            except (PeerLostError, RendezvousError) as error:
                if self.role is None and time.monotonic() >= deadline:
                    with self._changed:
                        self._copied.fail(str(error))
                    return
                time.sleep(_PAUSE_SECONDS)
                continue  # no process was started in the other's place so far
            try:
                theirs = self._greet(link)
                self._replicate(link, theirs)
            except PeerLostError as error:
                with self._changed:
                    if self.role is None and has_left(error):  # it reports why, if the workers have not finished
                        self._copied.end()
                        return
                    if self.role == SECONDARY and is_gone(error):
                        self.role = PRIMARY
                        self._copied.promote()
                    elif self.role != PRIMARY or not is_gone(error):
                        self._copied.fail(f"server {self._other}, which holds the same shards, is lost: {error}")
                        return
            except Exception as error:
                with self._changed:
                    self._copied.fail(f"{type(error).__name__}: {error}")
                raise  # a defect: with its traceback
            finally:
                link.close()

    def _greet(self, link: Connection) -> str | None:
        """Exchanges roles. Returns the other's role, or None if its process has just been started."""
        if self._is_first:
            link.send({"role": self.role})
        theirs = link.receive()[0]["role"]
        if not self._is_first:
            link.send({"role": self.role})
        return theirs

    def _replicate(self, link: Connection, theirs: str | None) -> None:
        """Keeps the two servers in the same state until the link breaks. One of them has just been started.

        Raises:
          PeerLostError: If the link breaks on a secondary, or while the secondary is filled.
        """
        if self.role == PRIMARY or (theirs is None and self._is_first):
            with self._changed:
                link.send(*self._copied.full())
                link.receive()
                self.role, self._link = PRIMARY, link
                self._changed.notify_all()
                while self._link is not None:
                    if link.failure() is not None:
                        self._try(link.receive)  # raises it
                    self._changed.wait(_LOOK_SECONDS)
            return
        while True:
            head, arrays = link.receive()
            link.send({})
            with self._changed:
                self._copied.take(head, arrays)
                if self.role is None:
                    self.role = SECONDARY
                    self._changed.notify_all()


def is_gone(error: BaseException) -> bool:
    """Returns whether a process was lost because it ended, as its host reports, and not because it was silent.

    >>> is_gone(PeerLostError("rank 1 died", reason=Reason.DIED)), is_gone(PeerLostError("rank 1 is stopped"))
    (True, False)
    """
    return getattr(error, "reason", None) is Reason.DIED


def has_left(error: BaseException) -> bool:
    """Returns whether a process was lost because its program ended, possibly with an error.

    >>> has_left(PeerLostError("rank 1 closed the ring", reason=Reason.CLOSED)), has_left(PeerLostError("it is silent"))
    (True, False)
    """
    return getattr(error, "reason", None) in (Reason.LEFT, Reason.CLOSED)
