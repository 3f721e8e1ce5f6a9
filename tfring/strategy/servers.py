"""ParameterServerStrategy: servers hold the weights; workers push gradients and pull the weights they need."""

from __future__ import annotations

import functools
import os
from typing import Any

from tfring import _keras, config
from tfring._keras.optimizers.server_updater import ServerUpdater
from tfring._keras.sharding import server_shards
from tfring.cluster import Cluster, detection, launch_variables
from tfring.cluster.launch_variables import Note
from tfring.cluster.roles import Roles
from tfring.errors import ConfigurationError
from tfring.program import short_traceback
from tfring.ring.trace import start as start_trace
from tfring.servers.admission import LATE, Admission
from tfring.servers.client import Client
from tfring.servers.collectives import MeetingCollectives, PostedCollectives
from tfring.servers.service import Service, run
from tfring.servers.snapshots import Snapshots
from tfring.servers.tracing import ServerTrace, worker_source
from tfring.strategy.ring import RingStrategy

_UPDATES = ("sync", "async")


class ParameterServerStrategy(RingStrategy):
    """Trains one model on workers, while parameter servers hold its weights and optimizer.

    Every process runs the same program. In a server process the constructor serves until the workers have finished,
    then ends the process with exit code 0. Weights are sharded over the servers by bytes, large tables by rows. In each
    step a worker pushes its gradients (for tables, only those of the batch's rows), the servers update, and the worker
    pulls the new weights. Rows of tables above 64 KiB are pulled when a batch is about to read them.

    With update="sync" the gradients of all workers form one update, weighted by rows: the result equals one process on
    the whole batch. A ring of the workers handles rows, logs, metrics and state, as under RingStrategy. With
    update="async" each worker trains on its own batches, and continues as soon as its gradient is part of an update. In
    an epoch each batch goes to one worker, the first that is ready for it, so a slow worker trains fewer batches.

    Roles come from `tfring launch --servers S`, or from TF_CONFIG with "ps" and "worker" tasks. Without either, the
    process trains alone, without servers.

    If workers proceed independently (update="async", or `backup_workers`), the job survives the loss of a worker, and a
    process that replaces it (`tfring launch --max-worker-restarts`) joins the current epoch.

    Args:
      update: "sync" or "async". Defaults to "sync".
      max_staleness: With "async", number of updates a gradient may be behind the weights it is applied to. With 0 the
        gradients of all workers, each of its own batch, form one update. Defaults to None: no bound.
      late: How to treat a gradient beyond the bound. "wait" (default): no gradient becomes that stale; workers that are
        ahead wait, and gradients that wait together form one update. "scale": the gradient is multiplied by
        1 / staleness. "drop": the gradient is dropped. Each server enforces the bound for its own shards.
      backup_workers: With "sync", number of workers an update does not wait for: it uses the first gradients and drops
        those that arrive later. Each worker then trains on its own batches, as with "async". Defaults to 0.
      snapshot_dir: A folder, the same one for a restarted server. Each server writes its shards and slots there when
        they are created, and every `snapshot_seconds`. A lost server is restarted by `tfring launch --servers` (or by
        whatever started it) and continues from its last snapshot; workers wait for it, up to
        `TFRING_CONNECT_TIMEOUT_SECONDS`. Gradients pushed to it since the snapshot are lost. Requires "async" or
        `backup_workers`. Defaults to None: the loss of a server ends the job.
      snapshot_seconds: Interval between snapshots, in seconds. Defaults to 30.
      replicas: Number of servers that hold each shard, 1 or 2. With 2, both servers make the same updates. If the
        process of one ends, no pushed gradient is lost, and workers continue with the other. A server that is restarted
        by `tfring launch --servers`, or by whatever started it, gets the state of the other. Excludes `snapshot_dir`.
        Defaults to 1.
      roles: A `tfring.cluster.roles.Roles`. Defaults to the roles that the environment describes.
      trace: See `RingStrategy`. Servers write traces as well.

    Raises:
      ConfigurationError: If a setting cannot be honoured.
      RendezvousError: If the other processes do not connect in time.
      SystemExit: In a server, with code 0, when the workers have finished.
      PeerLostError: In a server, if a worker was lost that the others need, or if all workers were lost.

    Sources: bounded staleness follows stale synchronous parallel (Ho et al. 2013); backup workers follow Chen et al.
    (https://arxiv.org/abs/1604.00981).

    >>> strategy = ParameterServerStrategy(update="async", max_staleness=4)
    >>> strategy.num_servers
    0
    """

    @short_traceback
    def __init__(
        self,
        update: str = "sync",
        *,
        max_staleness: int | None = None,
        late: str = "wait",
        backup_workers: int = 0,
        snapshot_dir: str | os.PathLike | None = None,
        snapshot_seconds: float = 30.0,
        replicas: int = 1,
        roles: Roles | None = None,
        trace: str | os.PathLike | None = None,
    ) -> None:
        if roles is not None and not isinstance(roles, Roles):
            raise ConfigurationError(f"`roles` is {roles!r}, not a tfring.cluster.roles.Roles or None.")
        self.roles = Roles.of() if roles is None else roles
        if self.roles is None and (found := detection.find(os.environ)) is not None and found.world_size > 1:
            raise ConfigurationError(
                f"The job has {found.world_size} workers and no parameter servers, so each worker would train alone. "
                "Start some: `tfring launch --servers 1 ...`, or \"ps\" in TF_CONFIG. Without servers, make a "
                "tfring.RingStrategy(). (docs/parameter_servers.md)"
            )
        settings = {
            "update": update, "max_staleness": max_staleness, "late": late, "backup_workers": backup_workers,
            "snapshot_dir": None if snapshot_dir is None else os.fspath(snapshot_dir),
            "snapshot_seconds": snapshot_seconds, "replicas": replicas,
        }
        _check(settings, self.roles)
        is_star = update == "async" or backup_workers > 0
        max_restarts = config.read(launch_variables.MAX_WORKER_RESTARTS)
        if max_restarts and not is_star:
            raise ConfigurationError(
                f"`tfring launch --max-worker-restarts {max_restarts}` cannot be used with update={update!r}, "
                f"backup_workers={backup_workers}: a synchronous update equals that of one process, and needs all "
                'workers. Use update="async" or `backup_workers`, or --max-restarts with tfring.callbacks.Backup.'
            )
        trace = config.read("TFRING_TRACE") if trace is None else trace
        if self.roles is not None:
            if self.roles.source == launch_variables.SOURCE:
                note = Note.STARTED
                if is_star and not self.roles.is_server:
                    note = Note.SURVIVABLE
                elif self.roles.is_server and (snapshot_dir is not None or replicas > 1):
                    note = Note.RESTORABLE if replicas == 1 else Note.REPLICATED
                launch_variables.notify_launcher(note)
            if self.roles.is_server:
                _serve(self.roles, settings, is_star, trace)
            self._workers = self.roles.cluster_of_workers()
        # Workers hold different rows of tables, so their bits differ until an epoch ends.
        of_ring = Cluster.alone() if self._workers is None or is_star else self._workers
        super().__init__(of_ring, trace=trace, check_equal=False)
        if len(self.ring.devices) > 1:
            raise ConfigurationError(
                f"`devices` has several devices, {self.ring.devices}, but a worker of parameter servers computes on "
                "one. Start a worker for each, with CUDA_VISIBLE_DEVICES."
            )
        if self.roles is not None:
            client = Client(self.roles, settings, snapshot_dir is not None or replicas > 1, replicas > 1)
            if is_star and self.roles.source == launch_variables.SOURCE:
                launch_variables.notify_launcher(Note.JOINED)
            self.ring.updater = updater = ServerUpdater(client, is_star)
            if is_star:
                self.ring.world = PostedCollectives(client)
                self.ring.channels.append(self.ring.world)
                self.ring.peers = MeetingCollectives(self.rank, self.world_size, updater.meet)
                _keras.share_seeds(self.ring)
            if trace is not None:
                source = self.ring.trace_source = worker_source(client)
                client.known["run"] = client.run
                recorder = start_trace(trace, self.rank, self.world_size, source, self.num_servers)
                self.ring.trace = client.recorder = recorder

    @property
    def num_servers(self) -> int:
        """Number of parameter servers; 0 in a process that trains alone."""
        return 0 if self.roles is None else len(self.roles.servers)

    def pull(self) -> None:
        """Pulls full weights, and the optimizer's slots, from the servers into this worker's model.

        `fit` does so at the end of an epoch, and everything that saves does so first. Otherwise, in a callback after a
        batch, rows of tables that later batches have not read yet may be out of date.
        """
        if self.ring.updater is not None:
            self.ring.updater.renew(with_slots=True)

    def histograms(self) -> dict[str, dict]:
        """Returns the histograms of the last epoch: of all workers with asynchronous updates, otherwise of this worker.

        Returns:
          A dict with "staleness", the number of gradients by how many updates they were behind, and "waited_seconds",
          the number of gradients by how long they waited on servers. `fit` logs their means as `staleness`,
          `max_staleness`, `waited_seconds`, `dropped_gradients`.
        """
        return {} if self.ring.updater is None else self.ring.updater.statistics.histograms()

    def close(self) -> None:
        """Leaves the servers and the ring; the strategy cannot be used afterwards."""
        if self.ring.updater is not None:
            self.ring.updater.client.close()
            self.ring.updater = None
        super().close()


def _check(settings: dict[str, Any], roles: Roles | None) -> None:
    """Raises ConfigurationError if settings are invalid or exclude each other."""
    num_workers = None if roles is None else len(roles.workers)
    replicas = settings["replicas"]
    update, bound, late = settings["update"], settings["max_staleness"], settings["late"]
    backup = settings["backup_workers"]

    def is_count(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= 0

    def is_seconds(value: Any) -> bool:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")

    problem = None
    if update not in _UPDATES:
        problem = f"`update` is {update!r}, not one of {_UPDATES}"
    elif late not in LATE:
        problem = f"`late` is {late!r}, not one of {LATE}"
    elif bound is not None and not is_count(bound):
        problem = f"`max_staleness` is {bound!r}, not an integer of at least 0, or None"
    elif not is_count(backup) or (num_workers is not None and backup >= num_workers):
        problem = (
            f"`backup_workers` is {backup!r}, not an integer of at least 0 that is below the number of workers, "
            f"{num_workers}"
        )
    elif update == "sync" and (bound is not None or late != "wait"):
        problem = '`max_staleness` and `late` cannot be used with update="sync", which uses no stale gradients'
    elif update == "async" and backup:
        problem = '`backup_workers` cannot be used with update="async", which waits for no worker'
    elif bound is None and late != "wait":
        problem = f"`late` is {late!r} without `max_staleness`: give both"
    elif settings["snapshot_dir"] is not None and update == "sync" and not backup:
        problem = (
            '`snapshot_dir` cannot be used with update="sync" without `backup_workers`, which equals one process: '
            "shards of two moments would not. Use tfring.callbacks.Backup with `tfring launch --max-restarts`"
        )
    elif not is_count(replicas) or replicas not in (1, 2):
        problem = f"`replicas` is {replicas!r}, not 1 or 2, the number of servers that hold each shard"
    elif replicas == 2 and settings["snapshot_dir"] is not None:
        problem = "`replicas` and `snapshot_dir` are two ways to survive the loss of a server: leave out one of them"
    elif replicas == 2 and roles is not None and len(roles.servers) < 2:
        problem = "`replicas=2` needs two servers or more (`tfring launch --servers 2`), but there is one"
    elif not is_seconds(settings["snapshot_seconds"]):
        problem = f"`snapshot_seconds` is {settings['snapshot_seconds']!r}, not a number above 0"
    if problem is not None:
        raise ConfigurationError(f"{problem}.")


def _serve(roles: Roles, settings: dict[str, Any], is_star: bool, trace: str | os.PathLike | None) -> None:
    """Serves until the workers have finished, then ends the process."""
    _keras.install()
    workers = list(range(len(roles.workers)))

    def make_admission() -> Admission:
        admission = Admission(
            workers,
            is_sync=settings["update"] == "sync",
            backup_workers=settings["backup_workers"],
            max_staleness=settings["max_staleness"],
            late=settings["late"],
        )
        for worker in () if is_star else workers:
            admission.begin(worker)
        return admission

    folder, is_replicated = settings["snapshot_dir"], settings["replicas"] > 1
    server_trace = ServerTrace(roles, trace)
    of_servers = [roles.index]
    if is_replicated:
        of_servers.append((roles.index - 1) % len(roles.servers))
    services = [
        Service(
            roles,
            settings,
            functools.partial(server_shards.ServerShards, {}),
            make_admission,
            needs_all=not is_star,
            snapshots=None if folder is None else Snapshots(folder, roles.index),
            snapshot_seconds=settings["snapshot_seconds"],
            server_trace=server_trace,
            shards=shards,
            is_replicated=is_replicated,
        )
        for shards in of_servers
    ]
    run(services, server_trace)
    raise SystemExit(0)
