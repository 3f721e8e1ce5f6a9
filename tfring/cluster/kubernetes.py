"""Kubernetes: an Indexed Job with a headless service (examples/kubernetes/indexed_job.yaml)."""

from __future__ import annotations

import re
import socket
import warnings
from collections.abc import Mapping

from tfring import config
from tfring.cluster.unresolved import UnresolvedCluster, read_numbers
from tfring.errors import ConfigurationError

# Kubernetes gives the pod of index 2 of the job "train" the variable JOB_COMPLETION_INDEX=2 and the host name
# train-2; with `subdomain: train`, the name of a headless service, the others reach it as train-2.train. Kubernetes
# does not tell the number of pods, so the manifest repeats it as TFRING_NUM_WORKERS.
INDEX = "JOB_COMPLETION_INDEX"
NUM_WORKERS = "TFRING_NUM_WORKERS"

SOURCE = "Kubernetes Indexed Job"
VARIABLES = (INDEX,)
PORT = 20000
_REMEDY = f"""\
In the manifest, set the number of completions:
  env: [{{name: {NUM_WORKERS}, value: "4"}}]"""


def read(environ: Mapping[str, str]) -> UnresolvedCluster | None:
    """Returns the place of this pod in an Indexed Job whose number of pods is set; None elsewhere.

    Raises:
      ConfigurationError: If the variables are malformed, or the host name does not tell where index 0 is.
    """
    if INDEX not in environ or config.read(NUM_WORKERS, environ) is None:
        return None
    rank, world_size = read_numbers(environ, INDEX, NUM_WORKERS, of="Kubernetes", remedy=_REMEDY)
    if world_size == 1 or environ.get("TFRING_RENDEZVOUS"):
        return UnresolvedCluster(rank, world_size, SOURCE, SOURCE, "localhost", PORT)
    name = socket.getfqdn()  # from /etc/hosts: "train-2.train.default.svc.cluster.local"
    host, _, domain = name.partition(".")
    match = re.fullmatch(rf"(.+)-{rank}", host)
    if match is None or not domain:
        raise ConfigurationError(
            f"The name of this pod, {name!r} with {INDEX}={rank}, is not that of a pod of an Indexed Job: it has no "
            "job and index in the subdomain of a headless service. In the manifest:\n  spec: {template: {spec: "
            "{subdomain: train}}}\nor name rank 0's host:\n  env: [{name: TFRING_RENDEZVOUS, value: train-0.train}]"
        )
    return UnresolvedCluster(rank, world_size, SOURCE, match[1], f"{match[1]}-0.{domain}", PORT)


def warn_if_alone(environ: Mapping[str, str]) -> None:
    """Warns in a pod of an Indexed Job without a cluster: it may run alone on purpose, or a line was forgotten."""
    if INDEX in environ:
        warnings.warn(
            f"Each pod of this Kubernetes Indexed Job trains alone: {INDEX}={environ[INDEX]} does not give the "
            f"number of pods. {_REMEDY}",
            stacklevel=3,
        )
