"""Starts one worker on the host of this process."""

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

FDS_OF_A_WORKER = 6  # its socket, one for a restart, two pipes for its output, one for its reports, its log
_MOST_RANKS_A_CPU = 4  # with huge pages: each thread's memory then begins with 2 MB that the kernel clears
_HOOK = os.path.join(os.path.dirname(__file__), "hook")  # Python runs its sitecustomize.py before the program


class Started(NamedTuple):
    """A worker's process, and the descriptors from which its output is read."""

    process: subprocess.Popen
    out: int
    err: int
    taken: int  # has something to read once the worker has taken its place in the ring


def start(
    command: Sequence[str],
    cluster: Cluster,
    environ: Mapping[str, str],
    *,
    stdin: int | None,
    cwd: str | None = None,
    place: Mapping[str, str] | None = None,
) -> Started:
    """Starts the worker at the place of `cluster`, in its own process group. It dies with this process.

    Args:
      command: The program with its arguments.
      cluster: Place of the worker, with the socket that it inherits.
      environ: Environment to which the launcher adds variables.
      stdin: Standard input, as for `subprocess.Popen`.
      cwd: Working directory. Defaults to that of this process.
      place: Environment variables that describe its place. Defaults to those of `cluster`.

    Raises:
      OSError: If it cannot be started.
      ConfigurationError: If it cannot be bound to cores.
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
            variables.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")  # rank 0 shows what TensorFlow logs about itself
    variables.setdefault("PYTHONUNBUFFERED", "1")  # output is shown as soon as it is printed
    variables.setdefault("PYTHONFAULTHANDLER", "1")  # a crash in native code shows its place
    if cluster.local_world_size <= _MOST_RANKS_A_CPU * cpus:
        variables.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")  # or large tensors get pages of 4 kB
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
            start_new_session=True,  # leads its own group, to be signalled with what it starts
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
