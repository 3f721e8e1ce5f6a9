"""A worker's side: one request to all servers, or to one, and their replies."""

from __future__ import annotations

import atexit
import concurrent.futures
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfring import errors
from tfring.cluster.roles import Roles
from tfring.errors import TfringError
from tfring.servers.connection import Connection

Reply = tuple[dict[str, Any], list[np.ndarray]]


class Client:
    """The connections of a worker with all servers. Used by one thread at a time.

    Args:
        roles: Of this process, a worker.
        settings: What the strategy was made with; servers compare it with theirs.

    Raises:
        RendezvousError: A server did not come.
        TfringError: A server's program made its strategy with other settings.
    """

    def __init__(self, roles: Roles, settings: Mapping[str, Any]) -> None:
        self.rank = roles.index
        self.num_servers = len(roles.servers)
        self._pool = concurrent.futures.ThreadPoolExecutor(self.num_servers, "tfring-servers")
        self._connections = list(self._pool.map(lambda s: Connection(roles, s), range(self.num_servers)))
        atexit.register(self._close_at_exit)
        self.ask_all("join", [{"settings": dict(settings)}] * self.num_servers)

    def ask_all(
        self, operation: str, heads: Sequence[Mapping[str, Any]], arrays: Sequence[Sequence[np.ndarray]] | None = None
    ) -> list[Reply]:
        """Asks all servers at once, each its own, and returns their replies.

        Raises:
            PeerLostError: A server is gone, or a worker that the others need.
            TfringError: A server refused, with its reason.
        """
        arrays = [()] * self.num_servers if arrays is None else arrays
        # Sent to all before any reply is waited for: a server may wait for what another worker sends to another server.
        asked = [
            self._pool.submit(self.ask, server, operation, head, its)
            for server, (head, its) in enumerate(zip(heads, arrays, strict=True))
        ]
        concurrent.futures.wait(asked)
        return [future.result() for future in asked]

    def ask(self, server: int, operation: str, head: Mapping[str, Any], arrays: Sequence[np.ndarray] = ()) -> Reply:
        """Asks one server; see `ask_all`."""
        connection = self._connections[server]
        connection.send({"op": operation, **head}, arrays)
        reply = connection.receive()
        if "error" in reply[0]:
            kind = getattr(errors, str(reply[0].get("kind")), TfringError)
            raise kind(f"Server {server}: {reply[0]['error']}")
        return reply

    def bytes_sent(self) -> int:
        """Returns how many bytes this worker has sent to servers."""
        return sum(connection.bytes_sent() for connection in self._connections)

    def close(self, is_done: bool = True) -> None:
        """Leaves all servers. Where `is_done` is False they learn that this worker has failed."""
        for connection in self._connections:
            try:
                if is_done:
                    connection.send({"op": "leave"})
                    connection.receive()
            except TfringError:
                pass  # it is gone, and needs no reply
            connection.close()
        self._connections = []
        self._pool.shutdown()
        atexit.unregister(self._close_at_exit)

    def _close_at_exit(self) -> None:
        """Says whether the program has come to its end, or ends by an exception."""
        self.close(is_done=not hasattr(sys, "last_type"))
