"""Listening sockets: their ports and interfaces, and the identity of this host."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import ipaddress
import os
import pathlib
import socket
import struct
from collections.abc import Iterable, Iterator

from tfring import config
from tfring.errors import ConfigurationError
from tfring.transport.address import Address, host_key, parse_address

_ANY = ("::", "0.0.0.0")
_SIOCGIFADDR = 0x8915
_NUM_CANDIDATES = 8
_DEFAULT_RANGE = (20000, 29999)  # below the range that Linux uses for outgoing connections (from 32768)


def open_listener(
    ports: Iterable[int] | None = None,
    *,
    loopback: bool = False,
    avoid: Iterable[int] = (),
    remedy: str | None = None,
) -> socket.socket:
    """Listens on the first port that is free.

    Args:
      ports: Ports to try, in this order. Defaults to those of `TFRING_PORT_RANGE`, or any port if it is not set.
      loopback: Whether to be reachable from this host only.
      avoid: Ports of `TFRING_PORT_RANGE` to try last, because other processes will need them.
      remedy: Advice in the error if no port is free. Defaults to setting `TFRING_PORT_RANGE`.

    Returns:
      The listening socket.

    Raises:
      ConfigurationError: If no port is free, or there is no such interface.
    """
    if ports is None:
        first_last = config.read("TFRING_PORT_RANGE")
        ports = [0] if first_last is None else _shuffled(first_last, avoid)
    hosts: tuple[str, ...] = ("127.0.0.1",) if loopback else _ANY
    if not loopback and (named := named_address()) is not None:
        hosts = (named,)
    tried = []
    problem: OSError | None = None
    for port in ports:
        for host in hosts:
            try:
                return listen_at(host, port)
            except OSError as error:
                problem = error
        tried.append(port)
    remedy = remedy or f"Name others:\n  export TFRING_PORT_RANGE={_DEFAULT_RANGE[0]}-{_DEFAULT_RANGE[1]}"
    raise ConfigurationError(
        f"No port is free at {hosts[-1]}: tried port{'s' if len(tried) > 1 else ''} {_in_short(tried)} ({problem}). "
        f"{remedy}"
    )


def listen() -> tuple[str, int]:
    """Listens for other ranks, for use with an engine that tfring does not detect (docs/clusters.md).

    Send the address to the other ranks by the engine's own means, gather theirs, and create the cluster:

    >>> address, fd = listen()
    >>> addresses = [address]                        # of all ranks, in order
    >>> from tfring.cluster import Cluster
    >>> Cluster.from_hosts(addresses, rank=0, listen_fd=fd).world_size
    1

    Returns:
      A tuple of this host's address (of the interface that `TFRING_INTERFACE` names, otherwise the one of the default
      route) with a port (of `TFRING_PORT_RANGE`, otherwise any), and the descriptor of the socket that listens there.
    """
    with open_listener() as listener:
        return str(Address(own_address(), listener.getsockname()[1])), os.dup(listener.fileno())


def own_address() -> str:
    """Returns the address of this host at which others are most likely to reach it."""
    named = named_address()
    if named is not None:
        return named
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # asks for the route; nothing is sent
        return probe.getsockname()[0]
    there = [address for _, address in interfaces() if not is_loopback(address) and "%" not in address]
    return there[0] if there else "127.0.0.1"


def candidates(job: str) -> list[int]:
    """Returns the ports at which rank 0 of a job may listen, in order: the same on all ranks, different for other jobs.

    >>> candidates("slurm 17.0") == candidates("slurm 17.0") != candidates("slurm 18.0")
    True
    """
    first, last = config.read("TFRING_PORT_RANGE") or _DEFAULT_RANGE
    start = int.from_bytes(hashlib.sha256(job.encode()).digest()[:8], "big")
    size = last - first + 1
    return [first + (start + number) % size for number in range(min(_NUM_CANDIDATES, size))]


def named_address() -> str | None:
    """Returns the address of the interface that `TFRING_INTERFACE` names on this host; None if it is not set."""
    wanted = config.read("TFRING_INTERFACE")
    if wanted is None:
        return None
    network = None
    with contextlib.suppress(ValueError):
        network = ipaddress.ip_network(wanted, strict=False)
    there = list(interfaces())
    for name, address in there:
        if name == wanted or (network is not None and ipaddress.ip_address(address.split("%")[0]) in network):
            return address
    raise ConfigurationError(
        f"TFRING_INTERFACE={wanted!r} is neither an interface of {socket.gethostname()} nor the network of one. The "
        f"host has {', '.join((f'{name} ({address})' for name, address in there))}. Write, for instance:\n  export "
        f"TFRING_INTERFACE={next((name for name, _ in there if name != 'lo'), 'lo')}"
    )


def interfaces() -> Iterator[tuple[str, str]]:
    """Yields names and addresses of this host's interfaces, IPv4 before IPv6."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no IPv4 address
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                yield name, socket.inet_ntoa(answer[20:24])
    # "fd000000000000000000000000000001 02 40 00 80     eth0"; the fourth column is the scope, 20 means link-local
    with contextlib.suppress(OSError):
        for line in pathlib.Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, _, name = line.split()
            address = str(ipaddress.IPv6Address(int(digits, 16)))
            yield name, f"{address}%{name}" if scope == "20" else address


def host_identity() -> str:
    """Returns a text that is the same for processes that share this host, its network and its boot, and no others."""
    boot = ""
    with contextlib.suppress(OSError):
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    network = ""
    with contextlib.suppress(OSError):
        network = os.readlink("/proc/self/ns/net")
    return f"{socket.gethostname()} {boot} {network}"


def is_loopback(host: str) -> bool:
    """Returns True if an address (not a name) is a loopback address."""
    return ipaddress.ip_address(host.split("%")[0]).is_loopback


def resolve(host: str) -> list[str]:
    """Returns the addresses of a host name, in the order to try them; for an address, the address itself.

    >>> resolve("127.0.0.1")
    ['127.0.0.1']
    """
    return [str(place[0]) for *_, place in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]


def is_local(host: str) -> bool:
    """Returns True if an address (not a name) is this host's.

    >>> is_local("127.0.0.1"), is_local("192.0.2.200")
    (True, False)
    """
    place = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST)[0]
    with socket.socket(place[0], socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.bind(place[4])
        return True
    return False


def listen_at(host: str, port: int) -> socket.socket:
    """Listens at an address of this host; `::` accepts IPv4 as well."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if host == "::":
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)[0][4])
        listener.listen(128)
        return listener
    except OSError:
        listener.close()
        raise


def _shuffled(first_last: tuple[int, int], avoid: Iterable[int]) -> list[int]:
    """Returns ports from a start that depends on the process, so that processes of one host rarely try the same."""
    first, last = first_last
    start = os.getpid() % (last - first + 1)
    ports = [*range(first + start, last + 1), *range(first, first + start)]
    later = set(avoid)
    return [port for port in ports if port not in later] + [port for port in ports if port in later]


def _in_short(ports: list[int]) -> str:
    return ", ".join(map(str, ports)) if len(ports) <= _NUM_CANDIDATES else f"{min(ports)}-{max(ports)}"


def spans_hosts(addresses: tuple[str, ...]) -> bool:
    """Returns True if ranks may be on other hosts, according to their addresses.

    >>> spans_hosts(("127.0.0.1:1", "localhost:2")), spans_hosts(("127.0.0.1:1", "192.0.2.1:1"))
    (False, True)
    """
    parsed = [parse_address(address) for address in addresses]
    if len({host_key(address) for address in parsed}) > 1:
        return True
    try:
        return not all(map(is_local, resolve(parsed[0].host)))
    except OSError:
        return True
