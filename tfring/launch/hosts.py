"""Hosts to start workers on: `host1:4,user@host2:4`, a file with one host per line, or a SLURM allocation."""

from __future__ import annotations

import pathlib
import re
import subprocess
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tfring.cluster import allocation, parse_address
from tfring.errors import ConfigurationError

_RULE = 'Hosts are written like "host1:4,user@host2:4,[fd00::3]:4", with the number of workers on each (1 if left out)'

_SCRIPT_SECONDS = 60.0


class Host(NamedTuple):
    """The name of a host, in the form that ssh or srun accepts, and its number of workers."""

    name: str
    num_workers: int


def parse_hosts(text: str) -> list[Host]:
    """Reads the value of `--hosts`.

    Raises:
      ConfigurationError: If a host is malformed or named twice.

    >>> parse_hosts("host1:4,user@host2")
    [Host(name='host1', num_workers=4), Host(name='user@host2', num_workers=1)]
    """
    return _checked([_parse_host(part.strip(), text) for part in text.split(",")], text)


def read_hostfile(path: pathlib.Path) -> list[Host]:
    """Reads a file with one host per line: `host1:4`, or `host1 slots=4` as for Open MPI. `#` begins a comment.

    Raises:
      ConfigurationError: If it cannot be read, or a line is malformed.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"The file of --hostfile, {str(path)!r}, cannot be read ({error}).") from None
    return _checked(_parse_lines(text), str(path))


def ask_script(script: pathlib.Path, max_workers: int | None = None) -> list[Host]:
    """Runs a program that prints the hosts available now, possibly none, one per line as in a file of hosts.

    Args:
      script: The program. It runs without arguments, for at most `_SCRIPT_SECONDS`.
      max_workers: Maximum number of workers, on the first of its hosts. By default workers start on all hosts.

    Raises:
      ConfigurationError: If it cannot be run, it fails, or a line is malformed.
    """
    try:
        run = subprocess.run(
            [script.absolute()], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, timeout=_SCRIPT_SECONDS, check=True
        )
        hosts = _parse_lines(run.stdout.decode())
    except (OSError, UnicodeDecodeError, subprocess.SubprocessError) as error:
        raise ConfigurationError(
            f"The program of --hosts-from, {str(script)!r}, names no hosts ({error}). It must be executable "
            "(chmod +x), begin with a line such as #!/bin/sh, print one host per line and end with exit code 0."
        ) from None
    return _first(_checked(hosts, str(script)) if hosts else [], max_workers)


def num_workers(hosts: Sequence[Host]) -> int:
    """Returns the number of workers on all hosts."""
    return sum(host.num_workers for host in hosts)


def of_allocation(environ: Mapping[str, str], n: int | None = None) -> list[Host]:
    """Returns the nodes and tasks of the SLURM allocation that this process is in.

    Args:
      environ: Environment with the variables of `salloc` or of a batch script.
      n: Number of workers, for the first tasks of the allocation. Defaults to all tasks.

    Raises:
      ConfigurationError: If the allocation has fewer tasks, or the variables are malformed.

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
    return _first([Host(node, num_tasks) for node, num_tasks in zip(nodes, tasks, strict=False)], n)


def _first(hosts: Sequence[Host], max_workers: int | None) -> list[Host]:
    """Returns the first hosts, for at most `max_workers` workers in all. None: all hosts."""
    left = num_workers(hosts) if max_workers is None else max_workers
    taken = []
    for host in hosts:
        if left > 0:
            taken.append(Host(host.name, min(left, host.num_workers)))
        left -= host.num_workers
    return taken


def _parse_lines(text: str) -> list[Host]:
    hosts = []
    for words in filter(None, (line.partition("#")[0].split() for line in text.splitlines())):
        slots = [word[len("slots=") :] for word in words[1:] if word.startswith("slots=")]
        hosts.append(_parse_host(f"{words[0]}:{slots[0]}" if slots else words[0], " ".join(words)))
    return hosts


def _parse_host(part: str, text: str) -> Host:
    match = re.fullmatch(r"((?:[A-Za-z0-9._-]+@)?)(\[[^\]]*\]|[^:\[\]]*)(?::([0-9]{1,4}))?", part)
    if match is None or match[1].startswith("-"):
        raise ConfigurationError(f"{part!r} in {text!r} is not a host. {_RULE}.")
    try:
        parse_address(f"{match[2]}:1")
    except ConfigurationError as error:
        raise ConfigurationError(f"{part!r} in {text!r} is not a host. {_RULE}. {error}") from None
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
            raise ConfigurationError(f'{name!r} occurs twice in {text!r}. Write it once: "{name}:{total}".')
    return hosts
