"""The text of `tfring launch --dry-run`: which workers would start where, by which command, with which variables."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence

from tfring.cpus import available_cpus, thread_variables
from tfring.gpus import gpu_variables
from tfring.launch.hosts import Host
from tfring.launch.remote import Way


def text(command: Sequence[str], hosts: Sequence[Host], num_workers: int, num_servers: int, way: Way) -> str:
    """Returns a line for each host and each worker.

    Args:
      command: Command that each worker runs.
      hosts: Hosts on which the workers start. Empty: this machine.
      num_workers: Number of workers.
      num_servers: Number of parameter servers. The hosts take them in turn.
      way: The command that reaches the hosts, and the environment there.
    """
    processes = _counted(num_workers, "worker") + (f" and {_counted(num_servers, 'server')}" if num_servers else "")
    lines = [f"{processes}, each running: {shlex.join(command)}"]
    first = 0
    for number, host in enumerate(hosts or [Host("this machine", num_workers)]):
        lines.append(f"{host.name}:")
        if hosts:
            there = shlex.join(way.connect(host.name, "..."))
            lines.append(f"  through {there}, in {way.workdir}; threads and GPUs depend on the host")
            passed_on = " ".join(sorted(way.environ))
            lines.append(f"  with {passed_on or 'no variable of this environment'}")
            lines.append("  workers listen at ports that are free when they start (--interface, --port-range)")
        for local_rank in range(host.num_workers):
            variables = {} if hosts else _variables(local_rank, host.num_workers)
            shown = "".join(f" {name}={value}" for name, value in sorted(variables.items()))
            lines.append(f"  rank {first + local_rank}, local rank {local_rank} of {host.num_workers}{shown}")
        lines += [f"  server {server}" for server in range(number, num_servers, len(hosts) or 1)]
        first += host.num_workers
    return "\n".join(lines)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _variables(local_rank: int, num_workers: int) -> dict[str, str]:
    threads = thread_variables(num_workers, available_cpus(), os.environ)
    return {**threads, **gpu_variables(local_rank, num_workers, os.environ)}
