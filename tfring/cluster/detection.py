"""Finds out who is in the ring: the first source that says so."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from tfring.cluster import launch_variables, tf_config
from tfring.cluster.cluster import Cluster
from tfring.errors import ConfigurationError

Source = Callable[[Mapping[str, str]], "Cluster | None"]


def _read_tf_config(environ: Mapping[str, str]) -> Cluster | None:
    value = environ.get(tf_config.VARIABLE, "")
    return None if tf_config.parse(value) is None else Cluster.from_tf_config(value)


# In order of precedence: each names its source and the variables to remove to silence it.
_SOURCES: tuple[tuple[Source, tuple[str, ...]], ...] = (
    (launch_variables.read, launch_variables.ALL),
    (_read_tf_config, (tf_config.VARIABLE,)),
)


def detect(cluster: Cluster | None = None, *, environ: Mapping[str, str] | None = None) -> Cluster:
    """Says who this process is and who the others are.

    The first of: the argument; the variables of `tfring launch` (`TFRING_RANK` and so on); TF_CONFIG. Without
    any of them the process is alone, rank 0 of 1.

    Args:
        cluster: Taken as it is; the environment is then not read.
        environ: Read in place of `os.environ`.

    Raises:
        ConfigurationError: A source is malformed, or two sources contradict each other. The message gives
            the rule, the value received and what to write instead.

    >>> detect(environ={}).world_size
    1
    >>> detect(environ={"TF_CONFIG": '{"cluster": {"worker": ["host1:12345", "host2:12345"]},'
    ...                              ' "task": {"type": "worker", "index": 1}}'}).rank
    1
    """
    if cluster is not None:
        if not isinstance(cluster, Cluster):
            raise ConfigurationError(
                f"`cluster` is a tfring.cluster.Cluster. Received: {cluster!r}. Make one with "
                "Cluster.from_hosts([...], rank=...) or Cluster.from_tf_config(...)."
            )
        return cluster
    environ = os.environ if environ is None else environ
    found = [(cluster, names) for read, names in _SOURCES if (cluster := read(environ)) is not None]
    if not found:
        return Cluster.alone()
    chosen, _ = found[0]
    for other, names in found[1:]:
        if _seat(other) != _seat(chosen):
            raise ConfigurationError(
                f"Two sources contradict each other. Received: {_describe(chosen)}; {_describe(other)}. "
                f"Remove one of them:\n  unset {' '.join(names)}\n  unset {' '.join(found[0][1])}"
            )
    return chosen


def _seat(cluster: Cluster) -> tuple[int, int, tuple[str, ...]]:
    return cluster.rank, cluster.world_size, cluster.addresses


def _describe(cluster: Cluster) -> str:
    at = f" at {cluster.addresses[cluster.rank]}" if cluster.addresses else ""
    return f"{cluster.source} says rank {cluster.rank} of {cluster.world_size}{at}"
