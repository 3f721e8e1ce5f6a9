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

UNTRACED = ("join", "leave", "clock", "trace")  # operations that are left out of traces


def worker_source(client: Client) -> trace.Source:
    """Returns the trace source of a worker: the run number that server 0 has drawn, and the offset from its clock.

    Worker 0 also measures the clock of each server, and sends the result to that server.
    """

    def measure(server: int) -> Distance:
        def ask() -> tuple[int, int]:
            reply = client.ask(server, "clock", {})[0]
            return reply["at"], reply["kernel"]

        return distance_by_asking(ask)

    def distance() -> Distance:
        own = measure(0)
        for server in range(client.num_servers) if client.rank == 0 else ():
            there = own if server == 0 else measure(server)
            offset, uncertainty = own.offset - there.offset, own.uncertainty + there.uncertainty
            if server == 0:
                uncertainty = 0
            told = Distance(there.at - there.offset, offset, uncertainty, offset - uncertainty, offset + uncertainty)
            client.ask(server, "trace", {"run": client.run, "clock": told._asdict()})
        return own

    return trace.Source(lambda: client.run, distance)


class ServerTrace:
    """The trace of a server. It begins when a worker asks for one.

    Args:
      roles: Roles of this process, which is a server.
      folder: Folder to which the trace is written. None: no trace is written.

    Attributes:
      recorder: The recorder of the trace. None until the trace begins.
    """

    def __init__(self, roles: Roles, folder: str | os.PathLike | None) -> None:
        self.recorder: trace.Recorder | None = None
        self._roles = roles
        self._folder = folder
        self._lock = threading.Lock()

    def begin(self, run: int, clock: dict[str, int]) -> None:
        """Begins the trace of this run, and records a worker's measurement of this server's clock."""
        source = trace.Source(lambda: run, lambda: Distance(**clock))
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
