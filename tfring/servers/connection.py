"""A connection of a worker and a server, or of two servers: a ring of the two. Requests go one way, replies back."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfring.cluster.roles import Roles
from tfring.errors import PeerLostError, RendezvousError
from tfring.ring import trace
from tfring.ring.communicator import Communicator
from tfring.servers import messages

_FOR_EVER = 1e8  # seconds: an evaluating worker sends servers no requests, and a server waits for slow workers


class Connection:
    """One end of the connection of a worker and a server, or of two servers that hold the same shards.

    Args:
      roles: Roles of this process.
      other: Number of the server, or rank of the worker, at the other end.
      shards: Number of the server whose shards the connection is for, if a server may also hold those of another one.
        None if it holds only its own.
      between_servers: Whether the two ends are the two servers that hold these shards.
      seconds: Time to wait for the other end, in seconds. Defaults to the time that a ring waits for its ranks.

    Attributes:
      last_sent: Size of the last message sent, in bytes.
      last_received: Size of the last message received, in bytes.

    Raises:
      RendezvousError: If the other end does not connect in time.
    """

    def __init__(
        self,
        roles: Roles,
        other: int,
        seconds: float | None = None,
        shards: int | None = None,
        between_servers: bool = False,
    ) -> None:
        self.name = f"worker {other}" if roles.is_server and not between_servers else f"server {other}"
        self.last_sent = self.last_received = 0
        self._bytes_sent: int | None = None  # once it is closed
        cluster = roles.pair_of_servers(shards) if between_servers and shards is not None else roles.pair(other)
        self._other = 1 - cluster.rank
        try:
            self._communicator = Communicator.connect(
                cluster,
                trace.SERVERS if shards is None else f"{trace.SERVERS} {shards}",
                timeout_seconds=_FOR_EVER,
                connect_timeout_seconds=seconds,
                stall_warning_seconds=_FOR_EVER,
            )
        except RendezvousError as error:
            own = f"server {roles.index}" if roles.is_server else f"worker {roles.index}"
            raise RendezvousError(f"{own} did not connect to {self.name} (ranks 0 and 1 below): {error}") from None

    def send(self, head: Mapping[str, Any], arrays: Sequence[np.ndarray] = ()) -> None:
        """Sends a message.

        Raises:
          PeerLostError: If the other end is gone.
        """
        message = messages.pack(head, arrays)
        self._call(lambda: self._communicator.send(message, self._other, name="message"))
        self.last_sent = message.nbytes

    def receive(self) -> tuple[dict[str, Any], list[np.ndarray]]:
        """Waits for a message and returns its head and arrays.

        Raises:
          PeerLostError: If the other end is gone.
        """
        message = self._call(lambda: self._communicator.receive(self._other, np.uint8, [None], name="message"))
        self.last_received = message.nbytes
        return messages.unpack(message)

    def failure(self) -> BaseException | None:
        """Returns the error that broke the connection, or None while it is intact."""
        return self._communicator.failure()

    def tell_raised(self, error: BaseException) -> None:
        """Makes the other end give up this end unless it gets a request within three seconds."""
        self._communicator.tell_raised(error)

    def bytes_sent(self) -> int:
        """Returns the number of bytes that this end has sent."""
        if self._bytes_sent is not None:
            return self._bytes_sent
        return int(self._communicator.statistics()["bytes_sent"])

    def close(self) -> None:
        """Closes this end. If the other end is waiting, it gets a PeerLostError."""
        with contextlib.suppress(ValueError):  # Python is exiting and has closed it
            self._bytes_sent = self.bytes_sent()
        self._communicator.close()

    def _call(self, function: Any) -> Any:
        try:
            return function()
        except PeerLostError as error:
            why = f"in the ring of the two it is rank {self._other}: {error}"
            raise PeerLostError(f"{self.name} is lost ({why})", reason=error.reason) from None
