"""The `mpirun` of MPICH and Intel MPI (Hydra), and others that use PMI-1 or PMI-2: PMI_RANK, PMI_SIZE."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping

from tfring.cluster import allocation
from tfring.cluster.unresolved import UnresolvedCluster, read_mpi_task
from tfring.errors import ConfigurationError

# A process of `mpirun -n 2` of MPICH 5 has
#   PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2 PMI_HOSTNAME=node1 PMI_FD=11 HYDI_CONTROL_FD=7
# A process of Intel MPI has the first four, and I_MPI_HYDRA_UUID=f1400000-e9ab-773f-c860-060061353e5c, among others.
RANK = "PMI_RANK"
SIZE = "PMI_SIZE"
LOCAL_SIZE = "MPI_LOCALNRANKS"
JOBS = ("I_MPI_HYDRA_UUID", "PMI_JOBID")

SOURCE = "MPICH or Intel MPI"
VARIABLES = (RANK, SIZE, LOCAL_SIZE)
_REMEDY = "Name rank 0's host:\n  mpirun -genv TFRING_RENDEZVOUS node1 ..."
# The parents of all processes of a host identify the job, as MPICH does not name it.
_PROXIES = ("hydra_pmi_proxy", "mpiexec", "mpirun", "mpiexec.hydra", "mpiexec.gforker")


def read(environ: Mapping[str, str]) -> UnresolvedCluster | None:
    """Returns the place of this process in an `mpirun`; None outside of one.

    Raises:
      ConfigurationError: If the variables are malformed, or do not tell where rank 0 is.
    """
    task = read_mpi_task(environ, VARIABLES, JOBS, of=SOURCE)
    if task is None:
        return None
    rank, world_size, job, on_one_host = task
    if on_one_host:
        return UnresolvedCluster(rank, world_size, SOURCE, job or f"started by process {_proxy()}")
    host = allocation.first_host(environ)
    if host is None and world_size > 1 and not environ.get("TFRING_RENDEZVOUS"):
        raise ConfigurationError(
            f"{SOURCE} does not say on which host rank 0 is: {RANK}={rank}, {SIZE}={world_size}, "
            f"{LOCAL_SIZE}={environ.get(LOCAL_SIZE, '')} describe several hosts. {_REMEDY}"
        )
    job = job or f"of user {os.getuid()}"
    return UnresolvedCluster(rank, world_size, SOURCE, job, host or "localhost", remedy=_REMEDY)


def _proxy() -> int:
    """Returns the id of the process that started all ranks of this host; 0 if none is visible."""
    pid = os.getppid()
    while pid > 1:
        try:
            # "4242 (hydra_pmi_proxy) S 4200 ..."
            head, _, tail = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")
        except OSError:
            break
        if head.partition("(")[2] in _PROXIES:
            return pid
        pid = int(tail.split()[1])
    return 0
