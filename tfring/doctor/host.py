"""Facts about a rank and its host: versions, the compiled ring, CPUs, memory, interfaces, names."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import itertools
import json
import os
import pathlib
import platform
import socket
from typing import Any

from tfring._version import __version__
from tfring.cluster import Cluster, parse_address
from tfring.cpus import available_cpus
from tfring.doctor.parallel import in_parallel
from tfring.errors import TfringError
from tfring.ring import library
from tfring.ring.schedule import Layout
from tfring.transport import mailbox, ports

_NAMES = ("tensorflow", "tensorflow-cpu", "tf-nightly", "tf-nightly-cpu", "tensorflow-rocm", "intel-tensorflow")
_RINGS = 2  # control and gradients
_RESOLVE_SECONDS = 10.0
_MAX_INTERFACES = 64


def facts(cluster: Cluster) -> dict[str, Any]:
    """Returns the facts that rank 0 requests from every rank, in a form that JSON can encode."""
    return {
        "rank": cluster.rank,
        "source": cluster.source,
        "hostname": socket.gethostname(),
        "host": ports.host_identity(),
        "pid": os.getpid(),
        "python": platform.python_version(),
        "executable": os.path.realpath(f"/proc/{os.getpid()}/exe"),
        "tfring": __version__,
        "tensorflow": tensorflow_version(),
        "keras": _version("keras"),
        "keras_backend": _keras_backend(),
        "library": _library(),
        "cpus": available_cpus(),
        "cpu_ids": sorted(os.sched_getaffinity(0)),
        "interfaces": interfaces(),
        "shared_memory": _shared_memory(cluster),
        "unresolved": unresolved(cluster),
    }


def tensorflow_version() -> str | None:
    """Returns TensorFlow's version, None if it is missing. Uses pip's metadata, because an import takes seconds."""
    if importlib.util.find_spec("tensorflow") is None:
        return None
    for name in _NAMES:
        if version := _version(name):
            return version
    others = importlib.metadata.packages_distributions().get("tensorflow", ())
    return next((_version(name) for name in others), "unknown")


def interfaces() -> list[dict[str, Any]]:
    """Returns the names and addresses of this host's interfaces, with their speed (None if unknown) and MTU.

    >>> [each["mtu"] > 0 for each in interfaces() if each["name"] == "lo"][:1]
    [True]
    """
    found = []
    for name, address in itertools.islice(ports.interfaces(), _MAX_INTERFACES):
        about = pathlib.Path("/sys/class/net", name)
        speed = _number(about / "speed")
        found.append(
            {
                "name": name,
                "address": address,
                "speed_megabits": speed if speed and speed > 0 else None,
                "mtu": _number(about / "mtu"),
            }
        )
    return found


def unresolved(cluster: Cluster) -> dict[str, str]:
    """Returns the host names among the cluster's addresses that this host cannot resolve, with its error messages.

    >>> sorted(unresolved(Cluster.from_hosts(["127.0.0.1:1", "nowhere.invalid:1"], rank=0)))
    ['nowhere.invalid']
    """
    names = sorted({parse_address(address).host for address in cluster.addresses})

    def problem(name: str) -> str | None:
        try:
            socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
            return None
        except OSError as error:
            return error.strerror or str(error)

    answers = in_parallel(problem, names, _RESOLVE_SECONDS)
    late = f"no answer within {_RESOLVE_SECONDS:g} s"
    return {name: said for name in names if (said := answers.get(name, late)) is not None}


def _library() -> dict[str, Any]:
    problem = None
    try:
        library.core()
    except TfringError as error:
        problem = str(error)
    except (OSError, AttributeError) as error:  # a library, but a different one
        problem = f"The compiled ring cannot be used: {error}. Install tfring again on this machine."
    if problem is None and not library.OPS.exists():
        problem = f"The ring's ops for TensorFlow are missing ({library.OPS}). Install tfring again."
    return {"path": str(library.CORE), "interface": library.ABI_VERSION, "problem": problem}


def _shared_memory(cluster: Cluster) -> dict[str, Any]:
    """Returns facts about shared memory. The ring's has no name: /dev/shm may be small, the kernel has to give it."""
    problem = None
    try:
        mailbox.Mailbox().close()
    except OSError as error:
        problem = error.strerror or str(error)
    size = free = None
    with contextlib.suppress(OSError):
        about = os.statvfs("/dev/shm")
        size, free = about.f_frsize * about.f_blocks, about.f_frsize * about.f_bavail
    needed = _RINGS * _links_within_host(cluster) * (mailbox.HEADER_BYTES + mailbox.CAPACITY_BYTES)
    return {
        "needed_bytes": needed,
        "needed_in_dev_shm_bytes": 0,
        "dev_shm_bytes": size,
        "dev_shm_free_bytes": free,
        "problem": problem,
    }


def _links_within_host(cluster: Cluster) -> int:
    """Returns the number of ranks on its own host with which a rank exchanges data, each through a mailbox."""
    hosts = [parse_address(address).host for address in cluster.addresses]
    if not hosts:
        return 0
    partners = Layout.of([hosts.index(host) for host in hosts]).partners(cluster.rank)
    return sum(hosts[rank] == hosts[cluster.rank] for rank in partners)


def _keras_backend() -> str | None:
    """Returns the backend of the variable, or of Keras' own file. None without either, which means TensorFlow."""
    if os.environ.get("KERAS_BACKEND"):
        return os.environ["KERAS_BACKEND"]
    folder = os.environ.get("KERAS_HOME") or os.path.expanduser("~/.keras")
    try:
        return json.loads(pathlib.Path(folder, "keras.json").read_text()).get("backend")
    except (OSError, ValueError, AttributeError):
        return None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _number(path: pathlib.Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
