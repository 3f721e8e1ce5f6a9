"""The variables that `tfring launch` gives to a worker, written and read in one place."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import os
import socket
import stat
import sys
from collections.abc import Mapping, Sequence

from tfring import config
from tfring.cluster import meeting
from tfring.cluster.cluster import Cluster
from tfring.errors import ConfigurationError, PeerLostError, RendezvousError
from tfring.transport import listener
from tfring.transport.address import host_key, parse_address

# A worker started by `tfring launch -n 2` has, for example:
#   TFRING_RANK=1  TFRING_WORLD_SIZE=2  TFRING_LOCAL_RANK=1  TFRING_LOCAL_WORLD_SIZE=2
#   TFRING_ADDRESSES=127.0.0.1:40123,127.0.0.1:40125  TFRING_LISTEN_FD=5
RANK = "TFRING_RANK"
WORLD_SIZE = "TFRING_WORLD_SIZE"
LOCAL_RANK = "TFRING_LOCAL_RANK"
LOCAL_WORLD_SIZE = "TFRING_LOCAL_WORLD_SIZE"
ADDRESSES = "TFRING_ADDRESSES"
LISTEN_FD = "TFRING_LISTEN_FD"

# With --servers: all processes have the first; a server has the second, its number, instead of a rank.
SERVERS = "TFRING_SERVERS"
SERVER = "TFRING_SERVER"

# A pipe, by descriptor and inode, to which a worker writes once it joins the ring.
TAKEN = "TFRING_TAKEN_FD"
_written: set[tuple[str, bytes]] = set()


class Note:
    """The bytes that a worker or server writes to this pipe, each with a meaning for the launcher."""

    STARTED = b"1"
    SURVIVABLE = b"a"  # the other workers continue if this one is lost (asynchronous parameter servers)
    JOINED = b"j"  # the same worker, once all servers have accepted it
    RESTORABLE = b"s"  # a server that continues from a snapshot once it is restarted
    REPLICATED = b"r"  # a server whose replica continues without it, and fills it once it is restarted
    PEER_LOST = b"l"  # at its end: an error ends it because another rank has ended


# Not a place in a cluster: the number of earlier starts of the job, and the seed from which unseeded shuffles begin.
RESTART = "TFRING_RESTART"
DATA_SEED = "TFRING_DATA_SEED"
MAX_WORKER_RESTARTS = "TFRING_MAX_WORKER_RESTARTS"  # of each worker by itself, with asynchronous parameter servers
PREEMPTED = 75  # EX_TEMPFAIL: the exit code of a worker that was asked to stop, and has saved a state to resume from

NEEDED = (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, ADDRESSES)
ALL = (*NEEDED, LISTEN_FD)
SOURCE = "tfring launch"
_REMEDY = f"Start the program through `tfring launch`, or remove the leftovers:\n  unset {' '.join(ALL)}"


def write(cluster: Cluster, servers: Sequence[str] = ()) -> dict[str, str]:
    """Returns the environment that makes a process this member of the ring, with parameter servers if there are any."""
    variables = {
        RANK: str(cluster.rank),
        WORLD_SIZE: str(cluster.world_size),
        LOCAL_RANK: str(cluster.local_rank),
        LOCAL_WORLD_SIZE: str(cluster.local_world_size),
        ADDRESSES: ",".join(cluster.addresses),
    }
    if servers:
        variables[SERVERS] = ",".join(servers)
    if cluster.listen_fd is not None:
        variables[LISTEN_FD] = str(cluster.listen_fd)
    return variables


def write_server(cluster: Cluster, workers: Sequence[str]) -> dict[str, str]:
    """Returns the environment of a parameter server.

    Args:
      cluster: The cluster of the servers alone, with the socket of this server.
      workers: Addresses at which the workers listen.
    """
    return {
        SERVER: str(cluster.rank),
        SERVERS: ",".join(cluster.addresses),
        ADDRESSES: ",".join(workers),
        LISTEN_FD: str(cluster.listen_fd),
    }


def read(environ: Mapping[str, str]) -> Cluster | None:
    """Returns the cluster that these variables describe; None if none of them is set.

    Raises:
      ConfigurationError: If some are missing or malformed, if they contradict each other, or if `TFRING_LISTEN_FD` is
        not a socket that listens at this rank's address (as in a program that a worker started).
    """
    if config.read(SERVER, environ) is not None:
        raise ConfigurationError(
            f"This process is parameter server {SERVER}={environ[SERVER]} of `tfring launch --servers`, not a "
            "worker. Make a tfring.ParameterServerStrategy() instead of a RingStrategy(), or leave out --servers."
        )
    values = {name: config.read(name, environ) for name in ALL}
    found = {name: environ[name] for name in ALL if values[name] is not None}
    if not found:
        return None
    missing = [name for name in NEEDED if name not in found]
    if missing:
        received = " ".join(f"{name}={text}" for name, text in found.items())
        raise ConfigurationError(
            f"Some variables of `tfring launch` are missing: {received} is set, without {', '.join(missing)}. {_REMEDY}"
        )
    try:
        cluster = Cluster(
            rank=values[RANK],
            world_size=values[WORLD_SIZE],
            local_rank=values[LOCAL_RANK],
            local_world_size=values[LOCAL_WORLD_SIZE],
            num_nodes=len({host_key(parse_address(address)) for address in values[ADDRESSES]}),
            addresses=values[ADDRESSES],
            source=SOURCE,
            listen_fd=values[LISTEN_FD],
        )
    except ConfigurationError as error:
        raise ConfigurationError(f"The variables of `tfring launch` are wrong: {error}\n{_REMEDY}") from None
    if cluster.listen_fd is not None:
        _check_listens(cluster.listen_fd, cluster.addresses[cluster.rank])
    return cluster


def notify_launcher(note: bytes = Note.STARTED) -> None:
    """Notifies the launcher that the program joins the ring; a program that never does so trains alone.

    At the end of the program it also notifies the launcher if the program ends because another rank was lost.

    Args:
      note: A `Note`, which is written once. Defaults to `Note.STARTED`.
    """
    text = os.environ.get(TAKEN, "")
    if (text, note) not in _written:
        _written.add((text, note))
        _write_note(text, note)
        _notify_at_exit(text, os.getpid())


@functools.cache
def _notify_at_exit(text: str, process: int) -> None:
    def notify() -> None:
        if os.getpid() == process and _has_lost_another(getattr(sys, "last_value", None)):
            _write_note(text, Note.PEER_LOST)

    atexit.register(notify)


def _has_lost_another(error: BaseException | None) -> bool:
    """Returns whether the error that ends this program, or one of its causes, is the loss of another rank."""
    kinds: list[type] = [PeerLostError, RendezvousError]
    if (of_tensorflow := sys.modules.get("tensorflow.python.framework.errors_impl")) is not None:
        kinds += [of_tensorflow.AbortedError, of_tensorflow.UnavailableError]
    while error is not None and not isinstance(error, tuple(kinds)):
        error = error.__cause__ or error.__context__
    return error is not None


def _write_note(text: str, note: bytes) -> None:
    fd, _, inode = text.partition(":")
    with contextlib.suppress(OSError, ValueError):
        about = os.fstat(int(fd))
        if stat.S_ISFIFO(about.st_mode) and about.st_ino == int(inode):  # a child may have another file here
            os.write(int(fd), note)
            os.set_inheritable(int(fd), False)


def release_listener(cluster: Cluster) -> Cluster:
    """Closes the inherited socket, for a server in this process that binds the port itself.

    Returns:
      The cluster without `listen_fd`, which `detect()` returns from now on, too.
    """
    if cluster.listen_fd is None:
        return cluster
    notify_launcher()
    listener.Listener.close_at(cluster.listen_fd)
    os.close(cluster.listen_fd)
    if os.environ.get(LISTEN_FD) == str(cluster.listen_fd):
        del os.environ[LISTEN_FD]
    released = dataclasses.replace(cluster, listen_fd=None)
    meeting.forget_listener(cluster, released)
    return released


def _check_listens(fd: int, address: str) -> None:
    try:
        with socket.socket(fileno=os.dup(fd)) as inherited:
            listens = inherited.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
            port = inherited.getsockname()[1] if inherited.family in (socket.AF_INET, socket.AF_INET6) else None
    except OSError:
        listens, port = False, None
    if not listens or port != parse_address(address).port:
        raise ConfigurationError(
            f"{LISTEN_FD}={fd} is not a socket that listens at {address} in this process. A program that a worker "
            f"starts is not a worker: start it without the worker's variables. {_REMEDY}"
        )
    os.set_inheritable(fd, False)  # processes that the user's program starts must not hold the port
