"""SLURM: the tasks of `srun`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from tfring.cluster import allocation
from tfring.cluster.unresolved import UnresolvedCluster, read_numbers, unset
from tfring.errors import ConfigurationError

# A task of `srun -N 2 -n 3` has, among some sixty variables (SLURM 22.05):
#   SLURM_JOB_ID=17 SLURM_STEP_ID=0 SLURM_PROCID=2 SLURM_LOCALID=0 SLURM_NODEID=1
#   SLURM_STEP_NUM_TASKS=3 SLURM_STEP_NODELIST=node[001-002] SLURM_STEP_TASKS_PER_NODE=2,1
# The single process of a batch script also has SLURM_PROCID=0 and SLURM_NTASKS=3, but no SLURM_STEP_ID; the shell of
# `salloc` has neither.
PROCID = "SLURM_PROCID"
STEP_ID = "SLURM_STEP_ID"
NUM_TASKS = "SLURM_STEP_NUM_TASKS"
NODE_LIST = "SLURM_STEP_NODELIST"
TASKS_PER_NODE = "SLURM_STEP_TASKS_PER_NODE"
JOB_ID = "SLURM_JOB_ID"

SOURCE = "SLURM"
VARIABLES = (PROCID, STEP_ID, NUM_TASKS, NODE_LIST, TASKS_PER_NODE)
_REMEDY = "Start the program with `srun`, which sets them:\n  srun -n 4 python train.py"


def read(environ: Mapping[str, str]) -> UnresolvedCluster | None:
    """Returns the place of this task in a step; None in a batch script, in `salloc`, and outside of SLURM.

    Raises:
      ConfigurationError: If the variables are malformed or contradict each other.
    """
    if not environ.get(STEP_ID) or PROCID not in environ:
        return None
    remedy = f"{_REMEDY}\nor remove the variables left over from a step:\n  {unset(VARIABLES, environ)}"
    rank, world_size = read_numbers(environ, PROCID, NUM_TASKS, of=SOURCE, remedy=remedy)
    nodes = allocation.expand(environ.get(NODE_LIST, ""), NODE_LIST)
    tasks = allocation.per_node(environ.get(TASKS_PER_NODE, ""))
    if len(tasks) != len(nodes) or sum(tasks) != world_size:
        raise ConfigurationError(
            f"{TASKS_PER_NODE}={environ.get(TASKS_PER_NODE)} and {NODE_LIST}={environ.get(NODE_LIST)} do not describe "
            f"{NUM_TASKS}={world_size} tasks: {TASKS_PER_NODE} gives a number for each node of {NODE_LIST}, "
            f"{NUM_TASKS} in all. {remedy}"
        )
    return UnresolvedCluster(
        rank,
        world_size,
        SOURCE,
        job=f"{environ.get(JOB_ID, '')}.{environ[STEP_ID]}",
        host="127.0.0.1" if len(nodes) == 1 else nodes[0],
        remedy="" if len(nodes) == 1 else "Name rank 0's host:\n  export TFRING_RENDEZVOUS=node1",
    )


def warn_if_alone(environ: Mapping[str, str]) -> None:
    """Warns in a batch script, or in `salloc`, with several tasks: `srun` was forgotten, or one process is intended."""
    tasks = environ.get("SLURM_NTASKS", "")
    if in_allocation(environ) and tasks.isdecimal() and int(tasks) > 1:
        warnings.warn(
            f"This process trains alone: it is in SLURM job {environ[JOB_ID]}, which has {tasks} tasks, but in none "
            "of its steps. To train on all tasks, start the program with `srun python train.py` or `tfring launch "
            "train.py`.",
            stacklevel=3,
        )


def in_allocation(environ: Mapping[str, str]) -> bool:
    """Returns True in the shell of an allocation, from which `srun` starts tasks; False in a task."""
    return bool(environ.get(JOB_ID)) and not environ.get(STEP_ID)
