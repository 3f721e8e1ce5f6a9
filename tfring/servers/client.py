"""The worker's side: requests to all servers or to one, and their replies."""

from __future__ import annotations

import atexit
import concurrent.futures
import itertools
import logging
import secrets
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfring import config, errors
from tfring.cluster.roles import Roles
from tfring.errors import PeerLostError, RendezvousError, TfringError
from tfring.ring import clocks, trace
from tfring.servers.connection import Connection
from tfring.servers.replica import has_left

_LOOK_SECONDS = 0.5  # between checks whether an idle server is gone
_TRY_SECONDS = 5.0  # for one attempt to connect, between checks whether this worker leaves
_PAUSE_SECONDS = 0.1  # before another attempt
_TRIES = 10  # attempts to reach one of two servers before the other is tried

_log = logging.getLogger(__name__)

Reply = tuple[dict[str, Any], list[np.ndarray]]


class Client:
    """The connections of a worker to all servers. Used by one thread at a time.

    Args:
      roles: Roles of this process, which is a worker.
      settings: Settings with which the strategy was made. Servers compare them with their own.
      can_come_back: Whether a lost server may come back from a snapshot. If so, the worker waits for it. If each shard
        is on two servers, the other server continues.
      is_replicated: Whether each shard is on two servers. See `tfring.servers.replica`.

    Attributes:
      known: A dict that is sent to a server that comes back: `is_training`; `claimed`, the last epoch and batch;
        `meeting`, the name of the last meeting, and `results`, its results; `position`, that of the epoch under way.
      is_back: Whether this process replaces one that servers have lost.
      run: The number that server 0 has drawn for the traces of this job.
      recorder: The trace recorder of this process. None without a trace.

    Raises:
      RendezvousError: If a server does not connect in time.
      TfringError: If a server's program made its strategy with other settings.
    """

    def __init__(
        self,
        roles: Roles,
        settings: Mapping[str, Any],
        can_come_back: bool = False,
        is_replicated: bool = False,
    ) -> None:
        self.rank = roles.index
        self.num_servers = len(roles.servers)
        self.known: dict[str, Any] = {}
        self._roles = roles
        self._settings = dict(settings)
        self._jobs: list[str | None] = [None] * self.num_servers
        self._is_replicated = is_replicated
        self._at = list(range(self.num_servers))  # for the shards of each server: the one that answers
        # Servers recognize a repeated request by its number, which differs from those of an earlier process.
        self._numbers = itertools.count(secrets.randbits(48))
        self.recorder: trace.Recorder | None = None
        self._bytes_before = [0] * self.num_servers  # sent over connections that were lost
        self._locks = [threading.Lock() for _ in range(self.num_servers)]
        self._gone: dict[int, TfringError] = {}  # servers that did not come back
        self._closing = threading.Event()
        self._pool = concurrent.futures.ThreadPoolExecutor(self.num_servers, "tfring-servers")
        self._connections = list(self._pool.map(self._connect, range(self.num_servers)))
        atexit.register(self._close_at_exit)
        self._can_come_back = False  # a server that is lost before all have joined ends the job
        replies = self.ask_all("join", [{"settings": self._settings}] * self.num_servers)
        self._jobs = [reply.get("job") for reply, _ in replies]
        self.is_back = any(reply.get("is_back") for reply, _ in replies)
        self.run = int(replies[0][0]["run"])
        self._can_come_back = can_come_back
        for server in range(self.num_servers) if can_come_back else ():
            threading.Thread(target=self._watch, args=(server,), name="tfring-servers-watch", daemon=True).start()

    def _connect(self, server: int, seconds: float | None = None) -> Connection:
        """Connects to the server that answers for the shards of `server`."""
        return Connection(self._roles, self._at[server], seconds, server if self._is_replicated else None)

    def _other(self, server: int) -> int:
        """Returns the other server that holds the shards of `server`, or `server` if it alone does."""
        second = (server + 1) % self.num_servers
        return second if self._is_replicated and self._at[server] == server else server

    def ask_all(
        self, operation: str, heads: Sequence[Mapping[str, Any]], arrays: Sequence[Sequence[np.ndarray]] | None = None
    ) -> list[Reply]:
        """Sends each server its own request, to all at once, and returns their replies.

        Raises:
          PeerLostError: If a server is gone, or a worker that the others need.
          TfringError: If a server refuses, with its reason.
        """
        arrays = [()] * self.num_servers if arrays is None else arrays
        # Sent to all before any reply is awaited: a server may wait for what another worker sends to another server.
        asked = [
            self._pool.submit(self.ask, server, operation, head, its)
            for server, (head, its) in enumerate(zip(heads, arrays, strict=True))
        ]
        concurrent.futures.wait(asked)
        return [future.result() for future in asked]

    def ask(self, server: int, operation: str, head: Mapping[str, Any], arrays: Sequence[np.ndarray] = ()) -> Reply:
        """Sends a request to one server. See `ask_all`. Repeats the request if the server is lost and comes back."""
        message = {"op": operation, "number": next(self._numbers), **head}
        with self._locks[server]:
            began = clocks.now()
            while True:
                if server in self._gone:
                    raise self._gone[server]
                connection = self._connections[server]
                try:
                    connection.send(message, arrays)
                    reply = connection.receive()
                    if not reply[0].get("is_secondary"):
                        break
                    connection.close()
                    self._at[server] = self._other(server)
                    self._connections[server] = self._connect(server)
                except PeerLostError as error:
                    if not self._can_come_back or (self._is_replicated and has_left(error)):
                        raise
                    self._reconnect(server, error)
            timing = reply[0].pop("timing", None)
            if self.recorder is not None and timing is not None:
                sizes, staleness = (connection.last_sent, connection.last_received), reply[0].get("staleness", -1)
                told = (began, clocks.now(), server, operation, *sizes, *timing, staleness)
                self.recorder.request(trace.Request._make(told))
        return self._checked(server, reply)

    def _checked(self, server: int, reply: Reply) -> Reply:
        """Raises the error that a reply holds, if it is one."""
        if "error" in reply[0]:
            kind = getattr(errors, str(reply[0].get("kind")), TfringError)
            raise kind(f"Server {server}: {reply[0]['error']}")
        return reply

    def _watch(self, server: int) -> None:
        """Reconnects to a lost server even without a request: other workers may wait there for this one."""
        lock = self._locks[server]
        while not self._closing.wait(_LOOK_SECONDS):
            if lock.acquire(blocking=False):
                try:
                    if not self._closing.is_set() and server not in self._gone and (
                        failure := self._connections[server].failure()
                    ):
                        if self._is_replicated and has_left(failure):
                            return  # its program has ended, as the next request reports
                        self._reconnect(server, failure)
                except TfringError:
                    return  # the next request raises it
                finally:
                    lock.release()

    def _reconnect(self, server: int, why: object) -> None:
        """Waits for a lost server, and joins it again.

        Raises:
          PeerLostError: If it does not come back in time, or comes back without the shards that it held.
        """
        seconds, began = config.read("TFRING_CONNECT_TIMEOUT_SECONDS"), time.monotonic()
        where = f"server {self._at[server]} to come back"
        if self._is_replicated:
            where = f"server {self._other(server)} to continue with the shards of server {self._at[server]}"
        _log.warning("Worker %d waits up to %g s for %s: %s", self.rank, seconds, where, why)
        self._connections[server].close()
        try:
            connection = self._joined_again(server, began + seconds)
        except TfringError as problem:
            self._gone[server] = problem
            raise
        except RuntimeError as problem:  # this process is ending and cannot start threads
            self._gone[server] = PeerLostError(f"server {server} has not come back: {problem}")
            raise self._gone[server] from None
        self._bytes_before[server] += self._connections[server].bytes_sent()
        self._connections[server] = connection
        seconds = time.monotonic() - began
        _log.warning("Server %d is back with worker %d after %.1f s.", self._at[server], self.rank, seconds)

    def _joined_again(self, server: int, deadline: float) -> Connection:
        for number in itertools.count():
            connection = None
            if number % _TRIES == 0:  # beginning with the other server
                self._at[server] = self._other(server)
            try:
                connection = self._connect(server, _TRY_SECONDS)
                known = {"settings": self._settings, "job": self._jobs[server], **self.known}
                results = known.pop("results", [])
                connection.send({"op": "join", **known}, results)
                reply = connection.receive()
                if reply[0].get("is_secondary"):
                    raise PeerLostError(f"server {self._at[server]} is not the primary")
            except (PeerLostError, RendezvousError) as error:  # it may be gone again
                if connection is not None:
                    connection.close()
                if time.monotonic() >= deadline or self._closing.is_set():
                    raise PeerLostError(f"server {server} has not come back: {error}") from None
                time.sleep(_PAUSE_SECONDS)
                continue
            self._checked(server, reply)
            return connection
        raise AssertionError

    def bytes_sent(self) -> int:
        """Returns the number of bytes that this worker has sent to servers."""
        return sum(self._bytes_before) + sum(connection.bytes_sent() for connection in self._connections)

    def tell_raised(self, error: BaseException) -> None:
        """Tells all servers that this worker's program raised, so that the others continue if this one does not."""
        for connection in self._connections:
            connection.tell_raised(error)

    def close(self, is_done: bool = True) -> None:
        """Leaves all servers. If `is_done` is False, they learn that this worker has failed."""
        self._closing.set()
        for server, lock in enumerate(self._locks):
            with lock:
                connection = self._connections[server]
                try:
                    if is_done and server not in self._gone:
                        connection.send({"op": "leave"})
                        connection.receive()
                except TfringError:
                    pass  # it is gone, and needs no reply
                connection.close()
        self._pool.shutdown()
        atexit.unregister(self._close_at_exit)

    def _close_at_exit(self) -> None:
        """Leaves all servers, and lets them know whether the program has finished or ends by an exception."""
        self.close(is_done=not hasattr(sys, "last_type"))
