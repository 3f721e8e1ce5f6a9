"""Roles of a job with parameter servers: workers, servers, and the role of this process."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any

from tfring import config
from tfring.cluster import launch_variables, tf_config
from tfring.cluster.cluster import Cluster
from tfring.errors import ConfigurationError

SERVER_JOB = "ps"  # of TF_CONFIG


@dataclasses.dataclass(frozen=True)
class Roles:
    """The workers and the parameter servers of a job, and the role of this process.

    Attributes:
      workers: Addresses at which the workers listen, by rank.
      servers: Addresses at which the servers listen, by number.
      is_server: Whether this process is a server.
      index: The rank of this worker, or the number of this server.
      source: Name of the source of these facts, for messages.
      listen_fd: An inherited socket that listens at this process's address; see `Cluster`.

    >>> roles = Roles.of({"TF_CONFIG": '{"cluster": {"worker": ["a:1", "b:1"], "ps": ["c:1"]},'
    ...                                ' "task": {"type": "ps", "index": 0}}'})
    >>> roles.is_server, roles.workers, roles.servers
    (True, ('a:1', 'b:1'), ('c:1',))
    """

    workers: tuple[str, ...]
    servers: tuple[str, ...]
    is_server: bool
    index: int
    source: str
    listen_fd: int | None = None

    def __post_init__(self) -> None:
        processes = (*self.workers, *self.servers)
        if not self.workers or not self.servers or len(set(processes)) < len(processes):
            raise ConfigurationError(
                "A job with parameter servers needs one or more workers, one or more servers, and an address for each, "
                f"but {self.source} gives workers={self.workers}, servers={self.servers}."
            )
        own = self.servers if self.is_server else self.workers
        if not 0 <= self.index < len(own):
            raise ConfigurationError(f"`index` is {self.index} in {self.source}, not from 0 to {len(own) - 1}.")

    @classmethod
    def of(cls, environ: Mapping[str, str] | None = None) -> Roles | None:
        """Returns the roles that `tfring launch --servers` or TF_CONFIG describes; None if neither has servers.

        Args:
          environ: The environment to read. Defaults to `os.environ`.

        Raises:
          ConfigurationError: If the source is malformed.
        """
        environ = os.environ if environ is None else environ
        servers = config.read(launch_variables.SERVERS, environ)
        if servers is None:
            return _of_tf_config(environ.get(tf_config.VARIABLE, ""))
        number = config.read(launch_variables.SERVER, environ)
        addresses = config.read(launch_variables.ADDRESSES, environ) or ()
        listen_fd = config.read(launch_variables.LISTEN_FD, environ)
        rank = config.read(launch_variables.RANK, environ)
        index = rank if number is None else number
        if index is None:
            raise ConfigurationError(
                f"{launch_variables.SERVERS} is set to {','.join(servers)}, without {launch_variables.RANK} or "
                f"{launch_variables.SERVER}. Start the program through `tfring launch --servers`."
            )
        return cls(addresses, servers, number is not None, index, launch_variables.SOURCE, listen_fd)

    def cluster_of_workers(self) -> Cluster:
        """Returns the cluster of the workers alone, for a worker."""
        return Cluster.from_hosts(self.workers, self.index, self.source, self.listen_fd)

    def cluster_of_all(self) -> Cluster:
        """Returns the cluster of all processes: the workers, then the servers."""
        rank = self.index + (len(self.workers) if self.is_server else 0)
        return Cluster.from_hosts((*self.workers, *self.servers), rank, self.source, self.listen_fd)

    def pair(self, other: int) -> Cluster:
        """Returns the cluster of a server, rank 0, and a worker, rank 1. This process is one of them.

        Args:
          other: The number of the server, or the rank of the worker.
        """
        worker, server = (other, self.index) if self.is_server else (self.index, other)
        addresses = [self.servers[server], self.workers[worker]]
        return Cluster.from_hosts(addresses, 0 if self.is_server else 1, self.source, self.listen_fd)

    def pair_of_servers(self, first: int) -> Cluster:
        """Returns the cluster of server `first`, rank 0, and the next server, rank 1. This process is one of them."""
        addresses = [self.servers[first], self.servers[(first + 1) % len(self.servers)]]
        return Cluster.from_hosts(addresses, 0 if self.index == first else 1, self.source, self.listen_fd)


def _of_tf_config(text: str) -> Roles | None:
    try:
        given: Any = json.loads(text) if text.strip() else {}
        servers = given["cluster"][SERVER_JOB]
    except (ValueError, RecursionError, KeyError, TypeError, IndexError):
        return None  # `tf_config` reports errors of a cluster without servers
    if not servers:
        return None
    cluster = {job: tasks for job, tasks in given["cluster"].items() if job != SERVER_JOB}
    as_chief = {"type": "chief" if cluster.get("chief") else "worker", "index": 0}
    task = given.get("task") or {}
    is_server = isinstance(task, Mapping) and task.get("type") == SERVER_JOB
    workers = tf_config.parse({**given, "cluster": cluster, "task": as_chief if is_server else task})
    others = tf_config.parse({"cluster": {"worker": servers}, "task": {"type": "worker", "index": 0}})
    if workers is None or others is None:
        raise ConfigurationError(f'{tf_config.VARIABLE} lists parameter servers ("{SERVER_JOB}") but no worker: {text}')
    if workers.job == "evaluator":
        return None
    index = task.get("index") if is_server else workers.rank
    if isinstance(index, bool) or not isinstance(index, int):
        raise ConfigurationError(f"A task of {tf_config.VARIABLE} has no index, a whole number from 0: {dict(task)}")
    return Roles(workers.addresses, others.addresses, is_server, index, tf_config.VARIABLE)
