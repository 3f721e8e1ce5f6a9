"""Hosts that a batch system has allocated to a job, for engines that do not list their hosts."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Mapping

from tfring.errors import ConfigurationError

_MAX_HOSTS = 100_000


def first_host(environ: Mapping[str, str]) -> str | None:
    """Returns the first host of an allocation of SLURM, PBS or LSF; None outside of an allocation.

    >>> first_host({"SLURM_JOB_NODELIST": "node[003-004]"})
    'node003'
    """
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"):
        if environ.get(name):
            return expand(environ[name], name)[0]
    if environ.get("PBS_NODEFILE"):  # one host per line
        try:
            return pathlib.Path(environ["PBS_NODEFILE"]).read_text().split()[0]
        except (OSError, IndexError) as error:
            raise ConfigurationError(
                f"PBS_NODEFILE={environ['PBS_NODEFILE']!r} cannot be read as a file with one host per line ({error}). "
                "Name rank 0's host instead:\n  export TFRING_RENDEZVOUS=node1"
            ) from None
    hosts = environ.get("LSB_HOSTS", "").split()  # one host per slot: "node1 node1 node2 node2"
    return hosts[0] if hosts else None


def expand(text: str, name: str = "The host list") -> list[str]:
    """Returns the hosts of a SLURM host list.

    Raises:
      ConfigurationError: If `text` is not a host list.

    >>> expand("node[001-003,7],login")
    ['node001', 'node002', 'node003', 'node7', 'login']
    >>> expand("rack[1-2]n[08-09]")
    ['rack1n08', 'rack1n09', 'rack2n08', 'rack2n09']
    """
    hosts: list[str] = []
    for part in _split(text, name):
        prefixes = [""]
        for literal, ranges in re.findall(r"([^\[\]]+)|\[([^\[\]]*)\]", part):
            numbers = [literal] if literal else _numbers(ranges, text, name)
            if len(hosts) + len(prefixes) * len(numbers) > _MAX_HOSTS:
                raise _error(text, name, f"more than {_MAX_HOSTS} hosts")
            prefixes = [prefix + number for prefix in prefixes for number in numbers]
        hosts += prefixes
    return hosts


def per_node(text: str) -> list[int]:
    """Returns the number of tasks of each node, from SLURM's short form.

    >>> per_node("2(x3),1")
    [2, 2, 2, 1]
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", part.strip())
        if match is None or int(match[2] or 1) > _MAX_HOSTS:
            raise ConfigurationError(
                f'Tasks per node are {text!r}, not written like "2(x3),1": 2 on each of three, 1 on the next.'
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _split(text: str, name: str) -> list[str]:
    """Splits a host list at commas outside of brackets."""
    parts, depth = [""], 0
    for character in text.strip():
        depth += (character == "[") - (character == "]")
        if depth not in (0, 1):
            raise _error(text, name, "the brackets do not match")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    if depth:
        raise _error(text, name, "the brackets do not match")
    for part in parts:
        if not re.fullmatch(r"[A-Za-z0-9_.\-\[\],]+", part) or part.startswith("-"):
            raise _error(text, name, f"{part!r} is not a host")
    return parts


def _numbers(ranges: str, text: str, name: str) -> list[str]:
    numbers: list[str] = []
    for part in ranges.split(","):
        match = re.fullmatch(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", part)
        if match is None:
            raise _error(text, name, f"{part!r} is not a range of numbers")
        first, last = match[1], match[2] or match[1]
        if not int(first) <= int(last) < int(first) + _MAX_HOSTS:
            raise _error(text, name, f"the range {part!r} is descending or too long")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def _error(text: str, name: str, what: str) -> ConfigurationError:
    return ConfigurationError(
        f'{name} is {text!r}: {what}. A list of nodes is written like "node[001-003,7],login1". To expand a node '
        f"list of SLURM:\n  scontrol show hostnames '{text}'"
    )
