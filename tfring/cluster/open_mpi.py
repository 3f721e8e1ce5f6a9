"""Open MPI's `mpirun`, with or without PMIx."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tfring.cluster import allocation
from tfring.cluster.unresolved import UnresolvedCluster, read_mpi_task

# A process of `mpirun -n 2` of Open MPI 5 has, among others:
#   OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2
#   PMIX_RANK=1 PMIX_NAMESPACE=prterun-node1-16356@1      the host that mpirun runs on, its process id
# Open MPI 4 has no such namespace, but has
#   OMPI_MCA_ess_base_jobid=1531576321 OMPI_MCA_orte_hnp_uri=1531576320.0;tcp://192.0.2.1,192.0.2.65:33911
RANK = "OMPI_COMM_WORLD_RANK"
SIZE = "OMPI_COMM_WORLD_SIZE"
LOCAL_SIZE = "OMPI_COMM_WORLD_LOCAL_SIZE"
JOBS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")

SOURCE = "Open MPI"
VARIABLES = (RANK, SIZE, LOCAL_SIZE)
_REMEDY = "Name rank 0's host:\n  mpirun -x TFRING_RENDEZVOUS=node1 ..."


def read(environ: Mapping[str, str]) -> UnresolvedCluster | None:
    """Returns the place of this process in an `mpirun`; None outside of one.

    Raises:
      ConfigurationError: If the variables are malformed.
    """
    task = read_mpi_task(environ, VARIABLES, JOBS, of=SOURCE)
    if task is None:
        return None
    if task.on_one_host:
        return UnresolvedCluster(task.rank, task.world_size, SOURCE, task.job)
    host = allocation.first_host(environ) or _host_of_mpirun(environ) or "localhost"
    return UnresolvedCluster(task.rank, task.world_size, SOURCE, task.job, host, remedy=_REMEDY)


def _host_of_mpirun(environ: Mapping[str, str]) -> str | None:
    namespace = re.fullmatch(r"prterun-(.+)-[0-9]+@[0-9]+", environ.get("PMIX_NAMESPACE", ""))
    uri = re.search(r"tcp://([^,:;]+)", environ.get("OMPI_MCA_orte_hnp_uri", ""))
    match = namespace or uri
    return match[1] if match else None
