"""Divides a host's CPUs among its workers; with TensorFlow's defaults each worker would use all of them."""

from __future__ import annotations

import contextlib
import os
import pathlib
import socket
from collections.abc import Iterator, Mapping

from tfring.errors import ConfigurationError

_MIN_INTER_OP_THREADS = 2  # a collective occupies a thread while it waits for other ranks


def available_cpus(root: pathlib.Path = pathlib.Path("/")) -> int:
    """Returns the number of CPUs this process may use, by its affinity mask and cgroup quotas (set by containers)."""
    return max(1, int(min([len(os.sched_getaffinity(0)), *_cgroup_quotas(root)])))


def share_of_cores(
    number: int, num_workers: int, root: pathlib.Path = pathlib.Path("/sys/devices/system/cpu")
) -> set[int]:
    """Returns the CPUs for one of the workers of this host: whole, adjacent cores among those that it may use.

    Raises:
      ConfigurationError: If there are fewer cores than workers.
    """
    cores: dict[tuple[int, int], set[int]] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        core = [0, cpu]  # unless the kernel reports a topology: each CPU is a core, all in one socket
        for index, name in enumerate(("physical_package_id", "core_id")):
            with contextlib.suppress(OSError, ValueError):
                core[index] = int((root / f"cpu{cpu}/topology/{name}").read_text())
        cores.setdefault((core[0], core[1]), set()).add(cpu)
    if len(cores) < num_workers:
        raise ConfigurationError(
            f"{num_workers} workers on {socket.gethostname()} cannot be bound to its {len(cores)} cores: each needs at "
            "least one. Start fewer workers there, or leave --bind out."
        )
    in_order = [cores[core] for core in sorted(cores)]
    first, end = (each * len(in_order) // num_workers for each in (number, number + 1))
    return set().union(*in_order[first:end])


def thread_variables(num_workers: int, cpus: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the thread variables for each of `num_workers` workers, except those that the user has set.

    >>> thread_variables(2, 8, {"OMP_NUM_THREADS": "1"})
    {'TF_NUM_INTRAOP_THREADS': '4', 'TF_NUM_INTEROP_THREADS': '4'}
    """
    share = max(1, cpus // num_workers)
    variables = {
        "TF_NUM_INTRAOP_THREADS": share,
        "TF_NUM_INTEROP_THREADS": max(_MIN_INTER_OP_THREADS, share),
        "OMP_NUM_THREADS": share,
    }
    return {name: str(value) for name, value in variables.items() if not environ.get(name)}


def _cgroup_quotas(root: pathlib.Path) -> Iterator[float]:
    """Yields the quotas, in CPUs, of this process's cgroup and of those above it.

    /proc/self/cgroup contains "0::/user.slice/job" (version 2) or "4:cpu,cpuacct:/job" (version 1). Quotas are in
    cpu.max ("150000 100000" or "max 100000"), or in cpu.cfs_quota_us ("150000" or "-1") and cpu.cfs_period_us.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        is_v2 = controllers == ""
        if not is_v2 and "cpu" not in controllers.split(","):
            continue
        group = root / "sys/fs/cgroup" / ("" if is_v2 else controllers) / path.lstrip("/")
        for folder in (group, *group.parents):
            with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
                if is_v2:
                    quota, period = (folder / "cpu.max").read_text().split()
                else:
                    quota = (folder / "cpu.cfs_quota_us").read_text()
                    period = (folder / "cpu.cfs_period_us").read_text()
                if float(quota) > 0:  # "max" raises ValueError, -1 means no limit
                    yield float(quota) / float(period)
