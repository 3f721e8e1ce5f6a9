"""Unresolved clusters: a source knows the rank of this process, but not the addresses of the ranks."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from tfring import config
from tfring.errors import ConfigurationError
from tfring.transport.address import parse_address


@dataclasses.dataclass(frozen=True)
class UnresolvedCluster:
    """A rank and a world size; the ranks have yet to exchange their addresses (`meeting.py`).

    Attributes:
      rank: Rank of this process, from 0 to `world_size - 1`.
      world_size: Number of processes in the ring.
      source: Name of the source of these facts, for messages.
      job: A text that distinguishes jobs; the same on all ranks.
      host: Host of rank 0, as the other ranks reach it.
      port: Port at which rank 0 listens; None for a port that is derived from `source` and `job`.
      remedy: The text to write if `host` turns out not to be rank 0's; empty unless `host` was inferred.
      share: A function of the source that sends a text of rank 0 to all ranks; replaces `host`.
    """

    rank: int
    world_size: int
    source: str
    job: str
    host: str = "127.0.0.1"
    port: int | None = None
    remedy: str = ""
    share: Callable[[str], str] | None = None

    addresses = ()  # none yet; a Cluster has them

    def overridden(self, environ: Mapping[str, str]) -> UnresolvedCluster:
        """Returns a copy with rank 0's host and port replaced by `TFRING_RENDEZVOUS` and `TFRING_PORT`, if set."""
        named = rendezvous(environ)
        port = config.read("TFRING_PORT", environ) or self.port
        if named is None:
            return dataclasses.replace(self, port=port)
        return dataclasses.replace(self, host=named[0], port=named[1] or port, remedy="", share=None)

    @property
    def is_on_one_host(self) -> bool:
        """True if all ranks are known to be on this host."""
        return self.host == "127.0.0.1" and self.share is None


def read_numbers(
    environ: Mapping[str, str], rank: str, world_size: str, *, of: str, remedy: str
) -> tuple[int, int]:
    """Returns the rank and the world size, validated.

    Args:
      environ: The environment.
      rank: Name of the variable that holds the rank.
      world_size: Name of the variable that holds the world size.
      of: Name of the program that sets them, for messages.
      remedy: Commands to paste if they are wrong.

    Raises:
      ConfigurationError: If one is missing or not a number, or if the rank is out of range.

    >>> read_numbers({"R": "1", "W": "3"}, "R", "W", of="test", remedy="")
    (1, 3)
    """
    numbers = []
    for name in (rank, world_size):
        text = environ.get(name, "").strip()
        if not (text.isascii() and text.isdecimal() and len(text) < 10):
            received = f"{name}={text!r}" if name in environ else f"no {name}"
            raise _error(f"{name} must be a whole number", received, of, remedy)
        numbers.append(int(text))
    if not 0 <= numbers[0] < numbers[1]:
        received = f"{rank}={numbers[0]}, {world_size}={numbers[1]}"
        raise _error(f"{rank} must be from 0 to {world_size} - 1", received, of, remedy)
    return numbers[0], numbers[1]


class MpiTask(NamedTuple):
    """A process of any `mpirun`. `job` is empty if the `mpirun` does not name one."""

    rank: int
    world_size: int
    job: str
    on_one_host: bool


def read_mpi_task(
    environ: Mapping[str, str], variables: tuple[str, str, str], jobs: Sequence[str], *, of: str
) -> MpiTask | None:
    """Returns the process as both kinds of `mpirun` describe it; None outside of one.

    Args:
      environ: The environment.
      variables: Names of the variables of the rank, the world size, and the number of ranks on this host.
      jobs: Names of variables that distinguish one `mpirun` from another.
      of: Name of the program that sets them, for messages.

    Raises:
      ConfigurationError: See `read_numbers`.

    >>> read_mpi_task({"R": "1", "W": "3", "L": "2", "ID": "7"}, ("R", "W", "L"), ["ID"], of="test")
    MpiTask(rank=1, world_size=3, job='7', on_one_host=False)
    """
    rank, world_size, local_world_size = variables
    if rank not in environ and world_size not in environ:
        return None
    remedy = f"Start the program with `mpirun`, or remove the leftovers:\n  {unset(variables, environ)}"
    numbers = read_numbers(environ, rank, world_size, of=of, remedy=remedy)
    job = " ".join(environ[name] for name in jobs if name in environ)
    return MpiTask(*numbers, job, environ.get(local_world_size) == str(numbers[1]))


def unset(names: Sequence[str], environ: Mapping[str, str]) -> str:
    """Returns the command that removes those of the variables that are set.

    >>> unset(["A", "B", "C"], {"A": "1", "C": "2"})
    'unset A C'
    """
    return f"unset {' '.join(shlex.quote(name) for name in names if name in environ)}"


def rendezvous(environ: Mapping[str, str]) -> tuple[str, int | None] | None:
    """Returns the host and port that `TFRING_RENDEZVOUS` names; None if it is not set.

    >>> rendezvous({"TFRING_RENDEZVOUS": "node1"}), rendezvous({"TFRING_RENDEZVOUS": "[fd00::1]:20000"})
    (('node1', None), ('fd00::1', 20000))
    """
    text = config.read("TFRING_RENDEZVOUS", environ)
    if text is None:
        return None
    has_port = text.count(":") == 1 or "]:" in text
    try:
        bare = f"[{text.strip('[]')}]" if text.count(":") > 1 and not has_port else text
        address = parse_address(text if has_port else f"{bare}:1")
    except ConfigurationError as error:
        raise ConfigurationError(
            f"TFRING_RENDEZVOUS={text!r} is not the host of rank 0, or its host:port. {error}\nWrite, for instance:\n  "
            "export TFRING_RENDEZVOUS=node1:20000"
        ) from None
    return address.host, address.port if has_port else None


def _error(rule: str, received: str, of: str, remedy: str) -> ConfigurationError:
    return ConfigurationError(f"{of} gives {received}: {rule}. {remedy}")
