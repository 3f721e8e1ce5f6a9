"""Gives each worker of a host its own GPU; with TensorFlow's defaults each worker would use all of them."""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Mapping

from tfring import config

VISIBLE = "CUDA_VISIBLE_DEVICES"
GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"  # TensorFlow's: it allocates GPU memory as needed, not all at the start
_SECONDS = 20.0  # for nvidia-smi, which starts the driver if nothing has started it


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """Returns the GPUs that a program may use here, as `CUDA_VISIBLE_DEVICES` names them; an empty list if none.

    If the variable is set, these are the GPUs it names, up to the first invalid name, as CUDA reads it. Otherwise they
    are the GPUs that `nvidia-smi` lists.

    >>> visible_gpus({"CUDA_VISIBLE_DEVICES": "2,GPU-8f1c"}), visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"})
    (['2', 'GPU-8f1c'], [])
    """
    if VISIBLE not in environ:
        return [str(number) for number in range(_count(environ.get("PATH", "")))]
    found: list[str] = []
    for name in (part.strip() for part in environ[VISIBLE].split(",")):
        if not (name.isdecimal() or name.startswith(("GPU-", "MIG-"))):
            break
        found.append(name)
    return found


def gpu_variables(
    local_rank: int, num_workers: int, environ: Mapping[str, str], *, is_server: bool = False
) -> dict[str, str]:
    """Returns the environment variables that select the GPU of one process of a host.

    `CUDA_VISIBLE_DEVICES` names the GPU of its local rank, or no GPU for a server. If there are fewer GPUs than
    workers, the workers share them and TensorFlow allocates memory as needed, unless the environment sets that.

    Args:
      local_rank: Rank of the process among the workers of its host.
      num_workers: Number of workers of the host.
      environ: The environment of the process. TFRING_GPUS=all leaves it as it is.
      is_server: Whether the process is a parameter server, which computes on CPUs. Defaults to False.

    Returns:
      A dict of the variables to set; empty if there are no GPUs.

    >>> gpu_variables(1, 2, {"CUDA_VISIBLE_DEVICES": "4,5,6"}), gpu_variables(1, 4, {"CUDA_VISIBLE_DEVICES": "4,5,6"})
    ({'CUDA_VISIBLE_DEVICES': '5'}, {'TF_FORCE_GPU_ALLOW_GROWTH': 'true'})
    """
    if config.read("TFRING_GPUS", environ) == "all":
        return {}
    gpus = visible_gpus(environ)
    if is_server:
        return {VISIBLE: "-1"} if gpus else {}
    if num_workers <= len(gpus):
        return {VISIBLE: gpus[local_rank]}
    return {GROWTH: environ.get(GROWTH, "true")} if gpus else {}


def shortage(num_workers: int, environ: Mapping[str, str]) -> str | None:
    """Returns a warning if a host has GPUs, but fewer than workers."""
    gpus = visible_gpus(environ)
    if not gpus or num_workers <= len(gpus) or config.read("TFRING_GPUS", environ) == "all":
        return None
    return (
        f"{num_workers} workers on a host with {len(gpus)} GPU{'s' if len(gpus) > 1 else ''}: each worker sees all "
        f"GPUs, so they share their memory. Start {len(gpus)}, or set CUDA_VISIBLE_DEVICES=-1 to train on CPUs "
        "(docs/gpus.md)."
    )


@functools.cache
def _count(path: str) -> int:
    """Returns the number of GPUs that `nvidia-smi` lists, 0 without it. `path` is a cache key, and is not searched."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_SECONDS, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines()) if done.returncode == 0 else 0
