"""Runs one job after the other until one succeeds, for `--max-restarts`."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tfring.cluster import launch_variables
from tfring.errors import ConfigurationError
from tfring.launch import exit_codes
from tfring.launch.hosts import Host, num_workers
from tfring.launch.job import Job, interrupted

_AT_ONCE_SECONDS = 60.0  # a script that fails earlier has hardly trained
_MAX_DELAY_SECONDS = 30.0
_ASK_SECONDS = 60.0  # between two requests for hosts
_MIN_ASKS = 5  # requests during the time to wait for hosts


class Limits(NamedTuple):
    """The maximum number of restarts of all workers, and the minimum number of workers to restart with."""

    max_restarts: int
    min_workers: int | None = None  # None: 1 with `ask` of `Restarts`, otherwise the number at the start


class Restarts:
    """Runs a job, and runs it again with fresh ports after a failure.

    Args:
      make_job: A function `make_job(hosts, variables, restart=..., delay_seconds=..., sequel=...)` that returns a
        `Job`, with `variables` for the workers' environment.
      hosts: Hosts on which to start workers. Empty: this host.
      limits: The limits of restarts.
      environ: The launcher's environment.
      ask: A function that returns the hosts available now, called before each restart. By default they stay the same.
      ask_seconds: Time to ask until there are enough hosts, in seconds.
    """

    def __init__(
        self,
        make_job: Callable[..., Job],
        hosts: Sequence[Host],
        limits: Limits,
        environ: Mapping[str, str],
        ask: Callable[[], list[Host]] | None = None,
        ask_seconds: float = 300.0,
    ) -> None:
        self._ask = ask
        self._ask_seconds = ask_seconds
        self._make_job = make_job
        self._hosts = list(hosts)
        self._limits = limits
        self._variables: dict[str, str] = {}
        if limits.max_restarts and not environ.get(launch_variables.DATA_SEED):
            self._variables[launch_variables.DATA_SEED] = str(secrets.randbelow(10**9))
        self._restart = 0
        self._should_restart = False
        self._failure_before: Any = None
        self._failures_at_once = 0

    def run(self, parent_gone: int) -> int:
        """Runs the jobs. Returns the exit code of the last job, as `Job.run`."""
        delay = 0.0
        while True:
            self._should_restart = False
            variables = {**self._variables, launch_variables.RESTART: str(self._restart)}
            job = self._make_job(
                self._hosts, variables, restart=self._restart, delay_seconds=delay, sequel=self._describe_followup
            )
            code = job.run(parent_gone)
            if not self._should_restart or job.is_stop_requested:
                return code
            if self._ask is not None and (stop_code := self._wait_for_hosts(parent_gone)) is not None:
                return stop_code
            self._restart += 1
            delay = min(0.5 * 2**self._failures_at_once, _MAX_DELAY_SECONDS)

    def _describe_followup(self, job: Job) -> str:
        """Decides whether there is another try. Returns text for the line that reports the first to fail."""
        if not self._limits.max_restarts or job.is_stop_requested:
            return ""
        first = job.first_to_fail
        if first is None and not self._restart:  # a job that never started has nothing to resume
            return ""
        preempted = first is not None and first.exit_code == launch_variables.PREEMPTED
        by_itself = first is not None and not preempted and not first.has_lost_peer and (first.exit_code or 0) > 0
        at_once = by_itself and job.seconds < _AT_ONCE_SECONDS
        failure = (first.exit_code, first.err.get_failure_output()[0][-1:]) if first is not None and at_once else None
        if failure is not None and failure == self._failure_before:
            return " Not restarted: it failed early in the same way before."
        self._failure_before = failure
        self._failures_at_once = self._failures_at_once + 1 if at_once else 0
        if self._restart >= self._limits.max_restarts:
            return f" Not restarted: all {self._limits.max_restarts} restarts are used up."
        if self._ask is not None:
            self._hosts = self._hosts_now()
        without = self._leave_out(job.lost_hosts)
        self._should_restart = True
        return (
            f" Restart {self._restart + 1} of {self._limits.max_restarts}: all workers start again{without}, and "
            "training continues from its last backup, or from the start without one."
        )

    def _leave_out(self, lost: Sequence[str]) -> str:
        """Leaves lost hosts out if enough are left. Returns text about the hosts of the next try."""
        if self._ask is None and (not lost or self._limits.min_workers is None):
            return ""
        left = [host for host in self._hosts if host.name not in lost]
        without = ""
        if num_workers(left) >= self._least:
            names = ", ".join(host.name for host in self._hosts if host.name in lost)
            without = f", without {names}" if names else ""
            self._hosts = left
        elif self._ask is None:
            return ""
        if num_workers(self._hosts) < self._least:
            return " as soon as --hosts-from names enough hosts"
        return f", {num_workers(self._hosts)} of them{without}"

    @property
    def _least(self) -> int:
        return self._limits.min_workers or 1

    def _hosts_now(self) -> list[Host]:
        assert self._ask is not None
        try:
            return self._ask()
        except ConfigurationError as error:
            _say(str(error))
            return []

    def _wait_for_hosts(self, parent_gone: int) -> int | None:
        """Asks until there are enough hosts. Returns an exit code if this fails, or if the launcher is to stop."""
        end = time.monotonic() + self._ask_seconds
        while num_workers(self._hosts) < self._least:
            if time.monotonic() >= end:
                _say(
                    f"--hosts-from has named hosts for fewer than {self._least} workers for {self._ask_seconds:g} s. "
                    "Allow more time with --start-timeout."
                )
                return exit_codes.CANNOT_START
            stop_code = interrupted(parent_gone, min(_ASK_SECONDS, self._ask_seconds / _MIN_ASKS))
            if stop_code is not None:
                return stop_code
            self._hosts = self._hosts_now()
        return None


def _say(text: str) -> None:
    print(f"tfring launch: {text}", file=sys.stderr, flush=True)
