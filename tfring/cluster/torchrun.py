"""Variables in the style of torchrun: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT.

They are set by torchrun, by Kubeflow's PyTorchJob, by Ray Train for torch, and by hand in many scripts.
"""

from __future__ import annotations

from collections.abc import Mapping

from tfring.cluster.unresolved import UnresolvedCluster, read_numbers, unset
from tfring.errors import ConfigurationError
from tfring.transport.address import parse_address

# One of two workers of `torchrun --nproc-per-node 2` has, among others:
#   RANK=1 LOCAL_RANK=1 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 GROUP_RANK=0 MASTER_ADDR=node1 MASTER_PORT=29500
#   TORCHELASTIC_RUN_ID=none TORCHELASTIC_USE_AGENT_STORE=True
# Kubeflow's PyTorchJob sets the four needed; older versions set MASTER_ADDR=localhost on rank 0.
RANK = "RANK"
WORLD_SIZE = "WORLD_SIZE"
MASTER_ADDR = "MASTER_ADDR"
MASTER_PORT = "MASTER_PORT"
LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"

SOURCE = "torchrun-style variables"
VARIABLES = (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT)
_EXAMPLE = "export RANK=0 WORLD_SIZE=2 MASTER_ADDR=node1 MASTER_PORT=29500   # RANK=1 for the second process, and so on"


def read(environ: Mapping[str, str]) -> UnresolvedCluster | None:
    """Returns the place that these variables describe; None without both RANK and another: alone, they are too common.

    Raises:
      ConfigurationError: If some are missing or malformed.
    """
    if RANK not in environ or not any(name in environ for name in VARIABLES[1:]):
        return None
    remedy = f"Write:\n  {_EXAMPLE}\nor remove the leftovers:\n  {unset(VARIABLES, environ)}"
    missing = [name for name in VARIABLES if not environ.get(name, "").strip()]
    if missing == [MASTER_ADDR, MASTER_PORT] and environ[WORLD_SIZE].strip() == "1":
        missing = []  # there is no other rank to connect with
    if missing:
        received = " ".join(f"{name}={environ[name]}" for name in VARIABLES if name in environ)
        raise ConfigurationError(
            f"Some {SOURCE} are missing: {received} is set, without {', '.join(missing)}. {remedy}"
        )
    rank, world_size = read_numbers(environ, RANK, WORLD_SIZE, of="torchrun", remedy=remedy)
    if world_size == 1:
        return UnresolvedCluster(rank, world_size, SOURCE, job="alone")
    host, port = environ[MASTER_ADDR].strip(), environ[MASTER_PORT].strip()
    try:
        address = parse_address(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    except ConfigurationError as error:
        raise ConfigurationError(
            f"MASTER_ADDR={host!r}, MASTER_PORT={port!r} are not rank 0's host and port. {error} {remedy}"
        ) from None
    # torchrun's agent may listen at that port itself. Rank 0 then uses another port, derived from source and job.
    taken = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return UnresolvedCluster(
        rank,
        world_size,
        SOURCE,
        job=f"{environ.get('TORCHELASTIC_RUN_ID', '')} {port} {environ.get('TORCHELASTIC_RESTART_COUNT', '')}",
        host="127.0.0.1" if environ.get(LOCAL_WORLD_SIZE) == str(world_size) else address.host,
        port=None if taken else address.port,
    )


def check_rank_is_set(environ: Mapping[str, str]) -> None:
    """Checks that a world size and an address are not set without a rank, as each process would then train alone.

    Raises:
      ConfigurationError: If they are.
    """
    if environ.get(WORLD_SIZE, "1").strip() not in ("", "0", "1") and environ.get(MASTER_ADDR):
        raise ConfigurationError(
            f"RANK is missing among {SOURCE}: WORLD_SIZE={environ[WORLD_SIZE]}, MASTER_ADDR={environ[MASTER_ADDR]} are "
            f"set. Write:\n  {_EXAMPLE}\nor remove the leftovers:\n  {unset(VARIABLES, environ)}"
        )
