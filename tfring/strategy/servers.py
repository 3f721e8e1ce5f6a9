"""ParameterServerStrategy: weights live on servers, workers push gradients and pull what they need."""

from __future__ import annotations

import os
from typing import Any

from tfring._keras import held
from tfring._keras.served import Updater
from tfring.cluster import Cluster, launch_variables
from tfring.cluster.roles import Roles
from tfring.errors import ConfigurationError
from tfring.servers.admission import Admission
from tfring.servers.client import Client
from tfring.servers.service import Service
from tfring.strategy.ring import RingStrategy

_UPDATES = ("sync",)


class ParameterServerStrategy(RingStrategy):
    """Trains one model on workers whose weights and optimizer are held by parameter servers.

    Every process runs the same program. In a server this constructor serves until the workers are through, and then
    ends the process with code 0. Weights are sharded over the servers by bytes, large tables by rows. In each step a
    worker pushes its gradients, of tables those of the batch's rows, servers update, and the worker pulls the new
    weights; rows of tables above 64 KiB when a batch is about to read them.

    With update="sync" the gradients of all workers make one update, weighed by rows: the result equals one process on
    the whole batch. Rows, logs, metrics and state go as under RingStrategy, by a ring of the workers.

    Roles come from `tfring launch --servers S`, or from TF_CONFIG with "ps" and "worker" tasks. Without either the
    process trains alone, without servers.

    Args:
      update: "sync".
      roles: a `tfring.cluster.roles.Roles`; by default what the environment says.
      trace: as of RingStrategy.

    Raises:
      ConfigurationError: for settings that cannot be honoured.
      RendezvousError: where the other processes do not come.
      SystemExit: in a server, with code 0, when the workers are through.
      PeerLostError: in a server, where a worker was lost that the others need.

    >>> strategy = ParameterServerStrategy()
    >>> strategy.num_servers
    0
    """

    def __init__(
        self,
        update: str = "sync",
        *,
        roles: Roles | None = None,
        trace: str | os.PathLike | None = None,
    ):
        if update not in _UPDATES:
            raise ConfigurationError(f"`update` is one of {_UPDATES}. Received: update={update!r}")
        if roles is not None and not isinstance(roles, Roles):
            raise ConfigurationError(f"`roles` is a tfring.cluster.roles.Roles or None. Received: roles={roles!r}")
        self.roles = Roles.of() if roles is None else roles
        settings = {"update": update}
        if self.roles is not None and self.roles.source == launch_variables.SOURCE:
            launch_variables.say_taken(os.environ.get(launch_variables.TAKEN, ""))
        if self.roles is not None and self.roles.is_server:
            _serve(self.roles, settings)
        super().__init__(Cluster.alone() if self.roles is None else self.roles.cluster_of_workers(), trace=trace)
        if len(self.extended.worker_devices) > 1:
            raise ConfigurationError(
                "A worker of parameter servers computes on one device. Received: "
                f"devices={self.extended.worker_devices}. Start a worker for each, with CUDA_VISIBLE_DEVICES."
            )
        self.updater = None
        if self.roles is not None:
            self.updater = Updater(Client(self.roles, settings), is_star=False)

    @property
    def num_servers(self) -> int:
        """Number of parameter servers; 0 in a process that trains alone."""
        return 0 if self.roles is None else len(self.roles.servers)

    def pull(self) -> None:
        """Pulls full weights, and the optimizer's slots, from the servers into this worker's model.

        `fit` does it at the end of an epoch, and whatever saves does it before. In a callback after a batch, rows of
        tables that later batches have not read yet may be older.
        """
        if self.updater is not None:
            self.updater.renew(with_slots=True)

    def bytes_sent(self) -> int | None:
        """Bytes this worker has sent to servers and to other workers so far."""
        to_workers = super().bytes_sent() or 0
        return to_workers + (0 if self.updater is None else self.updater.client.bytes_sent())

    def close(self) -> None:
        """Leaves the servers and the ring; the strategy cannot be used afterwards."""
        if self.updater is not None:
            self.updater.client.close()
            self.updater = None
        super().close()


def _serve(roles: Roles, settings: dict[str, Any]) -> None:
    """Serves until the workers are through, and ends the process."""
    from tfring import _keras

    _keras.install()
    workers = list(range(len(roles.workers)))

    def make_admission() -> Admission:
        admission = Admission(workers, is_sync=True)
        for worker in workers:
            admission.begin(worker)
        return admission

    Service(
        roles, settings, lambda description: held.HeldShards(description, roles.index), make_admission, needs_all=True
    ).run()
    raise SystemExit(0)
