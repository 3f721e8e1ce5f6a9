"""Traces of jobs with parameter servers: the number of the run, and each clock's offset from server 0's.

    server 0  ◄── clock? ── worker r        each worker measures its own clock
    server s  ◄── clock? ── worker 0 ── trace: run, clock of server s ──► server s
"""

from __future__ import annotations

import os
import threading

from tfring.cluster.roles import Roles
from tfring.ring import trace
from tfring.ring.clocks import Distance, distance_by_asking
from tfring.servers.client import Client

UNTRACED = ("join", "leave", "clock", "trace")  # kinds of requests of which traces do not tell


class WorkerSource:
    """The source of a worker; see `tfring.ring.trace.Source`.

    Args:
        client: The connections of this worker.
    """

    def __init__(self, client: Client) -> None:
        self._client = client

    def run(self) -> int:
        """Returns the number that server 0 has drawn."""
        return self._client.run

    def distance(self) -> Distance:
        """Measures this worker's clock; worker 0 measures those of the servers too, and tells them."""
        own = self._from(0)
        for server in range(self._client.num_servers) if self._client.rank == 0 else ():
            there = own if server == 0 else self._from(server)
            offset, uncertainty = own.offset - there.offset, own.uncertainty + there.uncertainty
            if server == 0:
                uncertainty = 0
            told = Distance(there.at - there.offset, offset, uncertainty, offset - uncertainty, offset + uncertainty)
            self._client.ask(server, "trace", {"run": self._client.run, "clock": told._asdict()})
        return own

    def _from(self, server: int) -> Distance:
        def ask() -> tuple[int, int]:
            reply = self._client.ask(server, "clock", {})[0]
            return reply["at"], reply["kernel"]

        return distance_by_asking(ask)


class ServerSource:
    """The source of a server: what worker 0 has told it.

    Args:
        run: The number of the run.
        clock: The fields of a `Distance`.
    """

    def __init__(self, run: int, clock: dict[str, int]) -> None:
        self._run = run
        self._clock = clock

    def run(self) -> int:
        """See `tfring.ring.trace.Source`."""
        return self._run

    def distance(self) -> Distance:
        """See `tfring.ring.trace.Source`."""
        return Distance(**self._clock)


class ServerTrace:
    """The trace of a server, begun where a worker asks for one.

    Args:
        roles: Of this process, a server.
        folder: Where it is written; None for nowhere.

    Attributes:
        recorder: None until it is begun.
    """

    def __init__(self, roles: Roles, folder: str | os.PathLike | None) -> None:
        self.recorder: trace.Recorder | None = None
        self._roles = roles
        self._folder = folder
        self._lock = threading.Lock()

    def begin(self, run: int, clock: dict[str, int]) -> None:
        """Begins the trace of this run, and notes what a worker has measured of this server's clock."""
        source = ServerSource(run, clock)
        with self._lock:
            if self.recorder is not None:
                self.recorder.measure_clock(source)
            elif self._folder is not None:
                sizes = len(self._roles.workers), len(self._roles.servers)
                self.recorder = trace.start_server(self._folder, self._roles.index, *sizes, source)

    def close(self) -> None:
        """Ends the trace."""
        if self.recorder is not None:
            self.recorder.close()
