"""Finds the cluster in the first source that describes one."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import NamedTuple

from tfring.cluster import (
    hydra,
    kubernetes,
    launch_variables,
    meeting,
    open_mpi,
    ray,
    slurm,
    tf_config,
    torchrun,
    vertex,
)
from tfring.cluster.cluster import Cluster
from tfring.cluster.unresolved import UnresolvedCluster
from tfring.errors import ConfigurationError


class Source(NamedTuple):
    """A source that may describe the place of this process in a cluster."""

    read: Callable[[Mapping[str, str]], Cluster | UnresolvedCluster | None]
    variables: tuple[str, ...]  # remove these to silence it
    inside: tuple[Callable, ...] = ()  # readers of sources that may have started it, and need not agree with it


def _read_tf_config(environ: Mapping[str, str]) -> Cluster | None:
    value = environ.get(tf_config.VARIABLE, "")
    return None if tf_config.parse(value) is None else Cluster.from_tf_config(value)


# In order of precedence. Engines nest: `tfring launch` in a pod, torchrun as a task of SLURM, mpirun in a batch script
# of SLURM. The engine that was started last comes first, so MPI precedes SLURM; engines around it need not agree.
_SURROUNDINGS = (slurm.read, kubernetes.read, ray.read, vertex.read)
SOURCES = (
    Source(
        launch_variables.read,
        launch_variables.ALL,
        (torchrun.read, open_mpi.read, hydra.read, *_SURROUNDINGS),
    ),
    Source(_read_tf_config, (tf_config.VARIABLE,), (kubernetes.read, ray.read)),
    Source(torchrun.read, torchrun.VARIABLES, _SURROUNDINGS),
    Source(open_mpi.read, open_mpi.VARIABLES, _SURROUNDINGS),
    Source(hydra.read, hydra.VARIABLES, _SURROUNDINGS),
    Source(slurm.read, slurm.VARIABLES),
    Source(kubernetes.read, kubernetes.VARIABLES),
    Source(ray.read, ray.VARIABLES),
    Source(vertex.read, vertex.VARIABLES),
)


def detect(cluster: Cluster | None = None, *, environ: Mapping[str, str] | None = None) -> Cluster:
    """Returns the cluster: the rank of this process and the addresses of all ranks.

    It comes from the first of: the argument; the variables of `tfring launch` (`TFRING_RANK` and so on); TF_CONFIG;
    torchrun-style variables; Open MPI; MPICH and Intel MPI; SLURM; a Kubernetes Indexed Job; Ray Train; Vertex AI's
    CLUSTER_SPEC. Without any of them the process is alone, rank 0 of 1. docs/clusters.md has the table.

    If the source gives no addresses, the ranks exchange theirs through rank 0, and this call blocks until all ranks
    have made it.

    Args:
      cluster: A `Cluster` to return as it is; the environment is then not read.
      environ: A mapping to read instead of `os.environ`.

    Raises:
      ConfigurationError: If a source is malformed, or if two sources contradict each other. The message has
        the rule, the value received and the text to write instead.
      RendezvousError: If the ranks did not find each other.

    >>> detect(environ={}).world_size
    1
    >>> detect(environ={"TF_CONFIG": '{"cluster": {"worker": ["host1:12345", "host2:12345"]},'
    ...                              ' "task": {"type": "worker", "index": 1}}'}).rank
    1
    """
    if cluster is not None:
        if not isinstance(cluster, Cluster):
            raise ConfigurationError(
                f"`cluster` is {cluster!r}, not a tfring.cluster.Cluster. Make one with Cluster.from_hosts([...], "
                "rank=...) or Cluster.from_tf_config(...)."
            )
        return cluster
    environ = os.environ if environ is None else environ
    found = find(environ)
    if found is None:
        torchrun.check_rank_is_set(environ)
        kubernetes.warn_if_alone(environ)
        slurm.warn_if_alone(environ)
        return Cluster.alone()
    return meeting.meet(found.overridden(environ)) if isinstance(found, UnresolvedCluster) else found


def find(environ: Mapping[str, str]) -> Cluster | UnresolvedCluster | None:
    """Returns what the first source describes; None if no source describes anything. Communicates with no process.

    Raises:
      ConfigurationError: See `detect`.
    """
    found = [(said, source) for source in SOURCES if (said := source.read(environ)) is not None]
    if not found:
        return None
    chosen, first = found[0]
    for other, source in found[1:]:
        if source.read not in first.inside and _contradict(chosen, other):
            raise ConfigurationError(
                f"Two sources contradict each other: {_describe(chosen)}; {_describe(other)}. Remove one of them:\n  "
                f"unset {' '.join(source.variables)}\n  unset {' '.join(first.variables)}"
            )
    return chosen


class ClusterSnapshot:
    """A snapshot of the cluster that the environment describes, to compare with a later one.

    >>> outlook = ClusterSnapshot({})
    >>> outlook.changed({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"})
    ('no source describes a cluster', 'torchrun-style variables says rank 0 of 2')
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._variables = _variables(environ)
        self._said, self._place = _look(environ)

    def changed(self, environ: Mapping[str, str]) -> tuple[str, str] | None:
        """Returns the descriptions then and now if the ring differs. Cheap if no variable changed; never raises."""
        if _variables(environ) == self._variables:
            return None
        self._variables = _variables(environ)
        said, place = _look(environ)
        return None if place == self._place else (self._said, said)


def _variables(environ: Mapping[str, str]) -> list[str | None]:
    return [environ.get(name) for source in SOURCES for name in source.variables]


def _look(environ: Mapping[str, str]) -> tuple[str, tuple]:
    """Returns the description of the cluster in words, and as (rank, world size, addresses)."""
    try:
        said = find(environ)
    except ConfigurationError as error:
        return str(error), (str(error),)
    if said is None:
        return "no source describes a cluster", (0, 1, ())
    return _describe(said), (said.rank, said.world_size, said.addresses if said.world_size > 1 else ())


def _contradict(chosen: Cluster | UnresolvedCluster, other: Cluster | UnresolvedCluster) -> bool:
    if (isinstance(other, UnresolvedCluster) and other.world_size == 1) or chosen.source.endswith("(evaluator)"):
        return False  # an engine that started one process, or a process that is in no ring
    differ = (chosen.rank, chosen.world_size) != (other.rank, other.world_size)
    return differ or bool(chosen.addresses and other.addresses and chosen.addresses != other.addresses)


def _describe(said: Cluster | UnresolvedCluster) -> str:
    at = f" at {said.addresses[said.rank]}" if said.addresses else ""
    return f"{said.source} says rank {said.rank} of {said.world_size}{at}"
