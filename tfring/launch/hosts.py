"""Hosts to start workers on: `host1:4,user@host2:4`, a file with one a line, or an allocation of SLURM."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Mapping
from typing import NamedTuple

from tfring.cluster import allocation, parse_address
from tfring.errors import ConfigurationError

_RULE = 'Hosts are written like "host1:4,user@host2:4,[fd00::3]:4", with the number of workers on each (1 if left out)'


class Host(NamedTuple):
    """A host, as ssh or srun takes it, and how many workers it gets."""

    name: str
    num_workers: int


def parse_hosts(text: str) -> list[Host]:
    """Reads the value of `--hosts`.

    Raises:
        ConfigurationError: A host is malformed or named twice.

    >>> parse_hosts("host1:4,user@host2")
    [Host(name='host1', num_workers=4), Host(name='user@host2', num_workers=1)]
    """
    return _checked([_parse_host(part.strip(), text) for part in text.split(",")], text)


def read_hostfile(path: pathlib.Path) -> list[Host]:
    """Reads a file with a host a line: `host1:4`, or `host1 slots=4` as for Open MPI; `#` begins a comment.

    Raises:
        ConfigurationError: It cannot be read, or a line is malformed.
    """
    try:
        lines = [line.partition("#")[0].split() for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"The file of --hostfile, {str(path)!r}, cannot be read ({error}).") from None
    hosts = []
    for words in filter(None, lines):
        slots = [word[len("slots=") :] for word in words[1:] if word.startswith("slots=")]
        hosts.append(_parse_host(f"{words[0]}:{slots[0]}" if slots else words[0], " ".join(words)))
    return _checked(hosts, str(path))


def of_allocation(environ: Mapping[str, str], n: int | None = None) -> list[Host]:
    """The nodes and tasks of the SLURM allocation that this process is in.

    Args:
        environ: With the variables of `salloc` or of a batch script.
        n: How many workers, of its first tasks; all by default.

    Raises:
        ConfigurationError: It has fewer tasks, or the variables are malformed.

    >>> of_allocation({"SLURM_JOB_NODELIST": "a[1-3]", "SLURM_TASKS_PER_NODE": "2(x2),1"}, 3)
    [Host(name='a1', num_workers=2), Host(name='a2', num_workers=1)]
    """
    nodes = allocation.expand(environ.get("SLURM_JOB_NODELIST", ""), "SLURM_JOB_NODELIST")
    tasks = allocation.per_node(environ.get("SLURM_TASKS_PER_NODE", ""))
    if n is not None and n > sum(tasks):
        raise ConfigurationError(
            f"-n {n} asks for more workers than job {environ.get('SLURM_JOB_ID')} of SLURM has tasks, {sum(tasks)}. "
            f"Ask for more:\n  sbatch -n {n} ..."
        )
    left = sum(tasks) if n is None else n
    hosts = []
    for node, num_tasks in zip(nodes, tasks, strict=False):
        if left > 0:
            hosts.append(Host(node, min(left, num_tasks)))
        left -= num_tasks
    return hosts


def _parse_host(part: str, text: str) -> Host:
    match = re.fullmatch(r"((?:[A-Za-z0-9._-]+@)?)(\[[^\]]*\]|[^:\[\]]*)(?::([0-9]{1,4}))?", part)
    if match is None or match[1].startswith("-"):
        raise ConfigurationError(f"{part!r} in {text!r} is no host. {_RULE}.")
    try:
        parse_address(f"{match[2]}:1")
    except ConfigurationError as error:
        raise ConfigurationError(f"{part!r} in {text!r} is no host. {_RULE}. {error}") from None
    if match[3] is not None and int(match[3]) == 0:
        raise ConfigurationError(f"{part!r} has no workers. {_RULE}. Leave the host out.")
    return Host(match[1] + match[2].strip("[]"), int(match[3] or 1))


def _checked(hosts: list[Host], text: str) -> list[Host]:
    if not hosts:
        raise ConfigurationError(f"{text!r} names no host. {_RULE}.")
    names = [host.name for host in hosts]
    for name in names:
        if names.count(name) > 1:
            total = sum(host.num_workers for host in hosts if host.name == name)
            raise ConfigurationError(f'{name!r} stands twice in {text!r}. Write it once: "{name}:{total}".')
    return hosts
