"""Starts one worker, on whichever host this is."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tfring import config
from tfring.cluster import Cluster, launch_variables
from tfring.cpus import available_cpus, share_of_cores, thread_variables
from tfring.gpus import gpu_variables, shortage
from tfring.launch import processes

FDS_OF_A_WORKER = 6  # its socket, the same for a restart, two pipes it prints to, one it reports by, its log
_MOST_RANKS_A_CPU = 4  # with huge pages, by which each thread's memory begins with 2 MB that the kernel clears
_HOOK = os.path.join(os.path.dirname(__file__), "hook")  # Python runs its sitecustomize.py before the program


class Started(NamedTuple):
    """A worker's process, and where to read what it prints."""

    process: subprocess.Popen
    out: int
    err: int
    taken: int  # reads as not empty once the worker has taken its place in the ring


def start(
    command: Sequence[str],
    cluster: Cluster,
    environ: Mapping[str, str],
    *,
    stdin: int | None,
    cwd: str | None = None,
    place: Mapping[str, str] | None = None,
) -> Started:
    """Starts the worker that takes `cluster`'s place, in a group of its own. It dies with this process.

    Args:
      command: The program with its arguments.
      cluster: Its place, with the socket it inherits.
      environ: To which the launcher adds.
      stdin: As `subprocess.Popen` takes it.
      cwd: Where it runs; here by default.
      place: The variables that say its place; by default those of `cluster`.

    Raises:
      OSError: It cannot be started.
      ConfigurationError: It cannot be bound to cores.
    """
    assert cluster.listen_fd is not None
    cpus = available_cpus()
    is_server = launch_variables.SERVER in (place or ())
    binds = config.read("TFRING_BIND", environ) == "cores" and not is_server
    bound = share_of_cores(cluster.local_rank, cluster.local_world_size) if binds else None
    threads = thread_variables(cluster.local_world_size, cpus, environ)
    variables = {**environ, **threads, **(launch_variables.write(cluster) if place is None else place)}
    if variables.get("TFRING_SEED"):  # a program of the user's
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [_HOOK, variables.get("PYTHONPATH")]))
        variables.update(
            gpu_variables(cluster.local_rank, cluster.local_world_size, environ, is_server=is_server)
        )
        warning = shortage(cluster.local_world_size, environ)
        if warning is not None and cluster.local_rank == 0 and not is_server:
            print(f"tfring launch: {warning}", file=sys.stderr, flush=True)
        if cluster.rank > 0:
            variables.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")  # rank 0 says what TensorFlow says of itself
    variables.setdefault("PYTHONUNBUFFERED", "1")  # what it prints is shown when it is printed
    variables.setdefault("PYTHONFAULTHANDLER", "1")  # a crash in native code shows where
    if cluster.local_world_size <= _MOST_RANKS_A_CPU * cpus:
        variables.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")  # or large tensors begin with 4 kB after 4 kB
    out, out_end = os.pipe()
    err, err_end = os.pipe()
    taken, taken_end = os.pipe()
    variables[launch_variables.TAKEN] = f"{taken_end}:{os.fstat(taken_end).st_ino}"
    try:
        process = subprocess.Popen(
            command,
            env=variables,
            cwd=cwd,
            stdin=stdin,
            stdout=out_end,
            stderr=err_end,
            pass_fds=[cluster.listen_fd, taken_end],
            start_new_session=True,  # leads a group of its own, to be signalled with what it starts
            preexec_fn=functools.partial(_prepare, os.getpid(), bound),
        )
    finally:
        os.close(out_end)
        os.close(err_end)
        os.close(taken_end)
    return Started(process, out, err, taken)


def _prepare(launcher: int, cpus: set[int] | None) -> None:
    """Runs in the worker's process before its program."""
    processes.die_with_parent(launcher)
    if cpus is not None:
        os.sched_setaffinity(0, cpus)
