"""One job after the other, until one ends well: what `--max-restarts` asks for."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tfring.cluster import launch_variables
from tfring.launch.hosts import Host
from tfring.launch.job import Job

_AT_ONCE_SECONDS = 60.0  # a script that fails earlier has hardly trained
_MAX_DELAY_SECONDS = 30.0


class Limits(NamedTuple):
    """The most restarts of all workers, and the fewest workers to restart with."""

    max_restarts: int
    min_workers: int | None = None  # None: as many as at first


class Restarts:
    """Runs a job, and again with fresh ports after a failure.

    Args:
        make_job: `make_job(hosts, variables, restart=..., delay_seconds=..., sequel=...)`, with `variables` for the
            workers' environment.
        hosts: Where to start workers; none for this host.
        limits: What is allowed.
        environ: The launcher's environment.
    """

    def __init__(
        self, make_job: Callable[..., Job], hosts: Sequence[Host], limits: Limits, environ: Mapping[str, str]
    ) -> None:
        self._make_job = make_job
        self._hosts = list(hosts)
        self._limits = limits
        self._variables: dict[str, str] = {}
        if limits.max_restarts and not environ.get(launch_variables.DATA_SEED):
            self._variables[launch_variables.DATA_SEED] = str(secrets.randbelow(10**9))
        self._restart = 0
        self._goes_on = False
        self._failure_before: Any = None
        self._failures_at_once = 0

    def run(self, parent_gone: int) -> int:
        """As `Job.run`, of the last job."""
        delay = 0.0
        while True:
            self._goes_on = False
            variables = {**self._variables, launch_variables.RESTART: str(self._restart)}
            job = self._make_job(
                self._hosts, variables, restart=self._restart, delay_seconds=delay, sequel=self._sequel
            )
            code = job.run(parent_gone)
            if not self._goes_on or job.asked_to_stop:
                return code
            self._restart += 1
            delay = min(0.5 * 2**self._failures_at_once, _MAX_DELAY_SECONDS)

    def _sequel(self, job: Job) -> str:
        """Decides whether there is another try; for the line that says who failed."""
        if not self._limits.max_restarts or job.asked_to_stop:
            return ""
        first = job.first_to_fail
        if first is None and not self._restart:  # what never started has nothing to go on from
            return ""
        preempted = first is not None and first.exit_code == launch_variables.PREEMPTED
        by_itself = first is not None and not preempted and not first.lost_a_peer and (first.exit_code or 0) > 0
        at_once = by_itself and job.seconds < _AT_ONCE_SECONDS
        failure = (first.exit_code, first.err.last_words()[0][-1:]) if first is not None and at_once else None
        if failure is not None and failure == self._failure_before:
            return " Not restarted: it has failed at once, in the same way, before."
        self._failure_before = failure
        self._failures_at_once = self._failures_at_once + 1 if at_once else 0
        if self._restart >= self._limits.max_restarts:
            return f" Not restarted: all {self._limits.max_restarts} restarts are used."
        without = self._leave_out(job.lost_hosts)
        self._goes_on = True
        return (
            f" Restart {self._restart + 1} of {self._limits.max_restarts}: all workers start again{without}, and "
            "training goes on from its last tfring.callbacks.Backup."
        )

    def _leave_out(self, lost: Sequence[str]) -> str:
        left = [host for host in self._hosts if host.name not in lost]
        num_workers = sum(host.num_workers for host in left)
        if not lost or self._limits.min_workers is None or num_workers < self._limits.min_workers:
            return ""
        self._hosts = left
        return f", {num_workers} of them, without {', '.join(lost)}"
