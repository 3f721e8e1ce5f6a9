"""TF_CONFIG, TensorFlow's own variable for a cluster, read and written."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tfring.errors import ConfigurationError
from tfring.transport.address import Address, parse_address

VARIABLE = "TF_CONFIG"
# Users, Kubeflow and Vertex AI write these. Keys other than "cluster" and "task" ("environment", "rpc_layer") mean
# nothing to a ring.
#   {"cluster": {"worker": ["host1:12345", "host2:12345"]}, "task": {"type": "worker", "index": 0}}
#   {"cluster": {"chief": ["host1:12345"], "worker": ["host2:12345"]}, "task": {"type": "chief", "index": 0}}
#   {"cluster": {"worker": [...], "evaluator": ["host3:1"]}, "task": {"type": "evaluator", "index": 0}}
_EXAMPLE: dict[str, Any] = {
    "cluster": {"worker": ["host1:12345", "host2:12345"]},
    "task": {"type": "worker", "index": 0},
}
_JOBS = ("chief", "worker", "evaluator")


class Parsed(NamedTuple):
    """The ring that a TF_CONFIG describes, chief first."""

    rank: int
    addresses: tuple[str, ...]
    job: str  # "chief", "worker" or "evaluator"; an evaluator is alone, with rank 0 and no addresses


def parse(value: str | Mapping[str, Any]) -> Parsed | None:
    """Reads TF_CONFIG from its text or from a mapping.

    Returns:
      A `Parsed`; None if no cluster is named: an empty text, `{}`, or a cluster without tasks.

    Raises:
      ConfigurationError: If it is not valid. The message has the rule, the value received and a corrected text to
        paste.
    """
    config = _load(value)
    cluster = _read_cluster(config)
    if not cluster:
        if "sparseCluster" in config:
            what = (
                'has a "sparseCluster", as Kubeflow writes with enableDynamicWorker: each worker then knows only '
                "itself, but a ring needs all workers. Turn enableDynamicWorker off"
            )
            raise _error(what, config, sparseCluster={}, cluster=_EXAMPLE["cluster"], task=_EXAMPLE["task"])
        if config.get("task"):
            raise _error('has a "task" but no "cluster"', config, cluster=_EXAMPLE["cluster"])
        return None
    ring = [(job, index) for job in ("chief", "worker") for index in range(len(cluster.get(job, [])))]
    if not ring:
        raise _error("lists no worker", config, cluster={**cluster, **_EXAMPLE["cluster"]})
    addresses = _read_addresses(config, cluster, ring)
    job, index = _read_task(config, cluster)
    if job == "evaluator":
        return Parsed(0, (), job)
    return Parsed(ring.index((job, index)), addresses, job)


def render(rank: int, addresses: tuple[str, ...]) -> str:
    """Returns the text of TF_CONFIG for worker `rank` of `addresses`; `{}` if there are none."""
    if not addresses:
        return "{}"
    return json.dumps({"cluster": {"worker": list(addresses)}, "task": {"type": "worker", "index": rank}})


def for_hosts(hosts: Sequence[str], workers_per_host: int = 1, port: int = 12345) -> list[str]:
    """Returns TF_CONFIG for each worker of a list of hosts, in order.

    Args:
      hosts: Names or addresses, with or without a port (`"node1"`, `"node1:20000"`, `"fd00::1"`).
      workers_per_host: Number of workers on each host. Each uses one port, from the host's port or `port` upwards.
        Defaults to 1.
      port: The first port of a host without one. Defaults to 12345.

    Returns:
      A list of values of the variable, by rank: the workers of the first host, then those of the next.

    Raises:
      ConfigurationError: If a host is malformed, or if two workers would share an address.

    >>> for text in for_hosts(["node1", "node2"]):
    ...     print(text)
    {"cluster": {"worker": ["node1:12345", "node2:12345"]}, "task": {"type": "worker", "index": 0}}
    {"cluster": {"worker": ["node1:12345", "node2:12345"]}, "task": {"type": "worker", "index": 1}}
    """
    if isinstance(hosts, str) or not hosts or workers_per_host < 1:
        raise ConfigurationError(
            f"hosts={hosts!r}, workers_per_host={workers_per_host!r} describe no worker: give at least one host, and "
            "at least 1 worker on each."
        )
    addresses: list[str] = []
    for host in hosts:
        bare_ipv6 = host.count(":") > 1 and "[" not in host
        has_port = not bare_ipv6 and re.search(r":[^\]]*$", host)
        first = parse_address(host if has_port else f"[{host}]:{port}" if bare_ipv6 else f"{host}:{port}")
        addresses += [str(first._replace(port=first.port + number)) for number in range(workers_per_host)]
    texts = [render(rank, tuple(addresses)) for rank in range(len(addresses))]
    parse(texts[0])  # raises if an address is given twice
    return texts


def _load(value: str | Mapping[str, Any]) -> Mapping[str, Any]:
    config = value
    if isinstance(value, str):
        try:
            config = json.loads(value) if value.strip() else {}
        except (ValueError, RecursionError) as error:
            hint = " (JSON needs double quotes; put single quotes around all of it)" if "'" in value else ""
            raise _error(f"is not JSON: {error}{hint}", value) from None
    if not isinstance(config, Mapping):
        raise _error("is not a JSON object", value)
    return config


def _read_cluster(config: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Returns the cluster's jobs that have tasks, each as a list."""
    given = config.get("cluster") or {}
    if not isinstance(given, Mapping):
        raise _error('has a "cluster" that is not an object of jobs', config, cluster=_EXAMPLE["cluster"])
    for job, tasks in given.items():
        if isinstance(tasks, (str, Mapping)):
            mended = tasks.split(",") if isinstance(tasks, str) else list(tasks.values())
            raise _error(f"has a {job!r} that is not a list of addresses", config, cluster={**given, job: mended})
        if not isinstance(tasks, (list, tuple)):
            raise _error(f"has a {job!r} that is not a list of addresses", config, cluster=_EXAMPLE["cluster"])
    cluster = {job: list(tasks) for job, tasks in given.items() if tasks}
    for job in cluster:
        if job == "ps":
            what = (
                'lists parameter servers ("ps"), but a ring has none: every worker holds all variables, and '
                "gradients are summed in a ring. Start the workers only, or make a tfring.ParameterServerStrategy"
            )
            raise _error(what, config, **_remove_job(job, config, cluster))
        if job not in _JOBS:
            what = f"has a job {job!r}, but jobs are chief, worker and evaluator"
            raise _error(what, config, **_renamed(job, config, cluster))
    if len(cluster.get("chief", [])) > 1:
        raise _error("lists more than one chief", config, **_all_workers(config, cluster))
    return cluster


def _read_addresses(
    config: Mapping[str, Any], cluster: dict[str, list[Any]], ring: list[tuple[str, int]]
) -> tuple[str, ...]:
    addresses: list[Address] = []
    for job, index in ring:
        try:
            addresses.append(parse_address(cluster[job][index]))
        except ConfigurationError as error:
            raise ConfigurationError(f'{VARIABLE} gives "{job}" {index} a wrong address. {error}') from None
    owners: dict[Address, str] = {}
    for (job, index), address in zip(ring, addresses, strict=True):
        if address in owners:
            text = cluster[job][index]
            what = f"gives {text!r} to both {owners[address]} and {job} {index}; each needs its own"
            raise _error(what, config, cluster=_make_addresses_unique(cluster, ring, addresses))
        owners[address] = f"{job} {index}"
    return tuple(map(str, owners))


def _make_addresses_unique(
    cluster: dict[str, list[Any]], ring: list[tuple[str, int]], addresses: list[Address]
) -> dict[str, list[Any]]:
    """Returns the cluster with another port for every address that an earlier task already has."""
    corrected = {job: list(tasks) for job, tasks in cluster.items()}
    taken, earlier = set(addresses), set()
    for (job, index), address in zip(ring, addresses, strict=True):
        if address in earlier:
            ports = itertools.chain(range(address.port + 1, 65536), range(1024, address.port))
            free = next(a for port in ports if (a := address._replace(port=port)) not in taken)
            taken.add(free)
            corrected[job][index] = str(free)
        earlier.add(address)
    return corrected


def _read_task(config: Mapping[str, Any], cluster: dict[str, list[Any]]) -> tuple[str, int]:
    first = {"type": "chief" if "chief" in cluster else "worker", "index": 0}
    task = config.get("task")
    if not task:
        what = (
            'has no "task", so this process does not know which worker it is (below is the text for the '
            "first one; each of the others has its own index)"
        )
        raise _error(what, config, task=first)
    if not isinstance(task, Mapping):
        raise _error('has a "task" that is not an object', config, task=first)
    job, index = task.get("type"), task.get("index")
    if job == "evaluator":
        return job, 0
    if job == "ps":
        what = "makes this process a parameter server, but a ring has none: start the workers only"
        raise _error(what, config, task=first)
    if not isinstance(job, str) or job not in cluster:
        what = f"has task type {job!r}, which is not one of its jobs: {', '.join(cluster)}"
        raise _error(what, config, task={**task, "type": first["type"]})
    if isinstance(index, str) and index.isascii() and index.isdecimal() and len(index) < 10:
        index = int(index)  # TensorFlow accepts "0" as 0
    last = len(cluster[job]) - 1
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index <= last:
        what = f"has task index {index!r}; {job!r} lists {last + 1}, so the index runs from 0 to {last}"
        mended = last if isinstance(index, int) and index > last else 0
        raise _error(what, config, task={**task, "index": mended})
    return job, index


def _remove_job(job: str, config: Mapping[str, Any], cluster: dict[str, list[Any]]) -> dict[str, Any]:
    left = {name: tasks for name, tasks in cluster.items() if name != job}
    if "chief" not in left and "worker" not in left:
        left.update(_EXAMPLE["cluster"])
    task = config.get("task")
    if not isinstance(task, Mapping) or task.get("type") == job:
        task = {"type": "chief" if "chief" in left else "worker", "index": 0}
    return {"cluster": left, "task": task}


def _all_workers(config: Mapping[str, Any], cluster: dict[str, list[Any]]) -> dict[str, Any]:
    chiefs = cluster["chief"]
    task = config.get("task")
    if isinstance(task, Mapping) and task.get("type") in ("chief", "worker"):
        index = task.get("index")
        if task["type"] == "worker" and isinstance(index, int):
            index += len(chiefs)
        task = {"type": "worker", "index": index}
    others = {job: tasks for job, tasks in cluster.items() if job not in ("chief", "worker")}
    return {"cluster": {"worker": chiefs + cluster.get("worker", []), **others}, "task": task}


def _renamed(job: str, config: Mapping[str, Any], cluster: dict[str, list[Any]]) -> dict[str, Any]:
    """Renames a job: `master`, TensorFlow 1's name of the chief, to chief; any other name to worker."""
    name = "chief" if job == "master" else "worker"
    if name in cluster:
        return _remove_job(job, config, cluster)
    task = config.get("task")
    if isinstance(task, Mapping) and task.get("type") == job:
        task = {**task, "type": name}
    return {"cluster": {name if key == job else key: tasks for key, tasks in cluster.items()}, "task": task}


def _error(what: str, received: Any, **corrections: Any) -> ConfigurationError:
    text = received if isinstance(received, str) else json.dumps(received, default=repr)
    corrected = {**received, **corrections} if corrections else _EXAMPLE
    paste = shlex.quote(json.dumps(corrected, default=repr))
    return ConfigurationError(f"{VARIABLE} {what}:\n  {text}\nWrite:\n  {VARIABLE}={paste}")
