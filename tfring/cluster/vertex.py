"""Vertex AI's CLUSTER_SPEC, which has worker pools instead of jobs."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping

from tfring.cluster.cluster import Cluster
from tfring.errors import ConfigurationError

VARIABLE = "CLUSTER_SPEC"
# {"cluster": {"workerpool0": ["cmle-training-workerpool0-ab12-0:2222"],
#              "workerpool1": ["cmle-training-workerpool1-ab12-0:2222", "cmle-training-workerpool1-ab12-1:2222"]},
#  "environment": "cloud", "task": {"type": "workerpool0", "index": 0}, "job": "{...}", "open_ports": [3333]}
# Pool 0 is the chief, 1 the workers, 2 the parameter servers (or a reduction server), 3 the evaluators.
_JOBS = {"workerpool0": "chief", "workerpool1": "worker", "workerpool2": "ps", "workerpool3": "evaluator"}
_EXAMPLE = {"cluster": {"workerpool0": ["host1:2222"]}, "task": {"type": "workerpool0", "index": 0}}

SOURCE = "Vertex AI's CLUSTER_SPEC"
VARIABLES = (VARIABLE,)


def read(environ: Mapping[str, str]) -> Cluster | None:
    """Returns the cluster that it describes; None if it is not set.

    Raises:
      ConfigurationError: If it is malformed, or has parameter servers, which tfring does not support here.
    """
    text = environ.get(VARIABLE, "").strip()
    if not text:
        return None
    try:
        spec = json.loads(text)
        cluster = {_JOBS.get(pool, pool): tasks for pool, tasks in spec["cluster"].items()}
        task = {**spec["task"], "type": _JOBS.get(spec["task"]["type"], spec["task"]["type"])}
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(
            f'{VARIABLE} is not a JSON object with a "cluster" of worker pools and a "task" ({type(error).__name__}: '
            f"{error}): {text[:2000]}\nWrite:\n  {VARIABLE}={shlex.quote(json.dumps(_EXAMPLE))}"
        ) from None
    try:
        found = Cluster.from_tf_config({"cluster": cluster, "task": task})
    except ConfigurationError as error:
        raise ConfigurationError(
            f"{VARIABLE} does not describe a ring; in terms of TF_CONFIG (workerpool0 is the chief, 1 the workers, 2 "
            f"the parameter servers, 3 the evaluators): {error}"
        ) from None
    if task["type"] == "evaluator":
        return Cluster.alone(f"{SOURCE} (evaluator)")
    return Cluster.from_hosts(found.addresses, found.rank, SOURCE) if found.addresses else None
