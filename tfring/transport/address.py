"""Addresses of workers: `host:port`, `192.0.2.1:port`, `[2001:db8::1]:port`."""

from __future__ import annotations

import functools
import ipaddress
import re
from typing import NamedTuple

from tfring.errors import ConfigurationError

_RULE = 'An address is "host:port", "192.0.2.1:port" or "[2001:db8::1]:port"'
_HOST_NAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9_-]{1,63}(?<!-))*\.?")
_LOOPBACK = {"localhost", "127.0.0.1", "::1"}


class Address(NamedTuple):
    """The address at which a worker listens. The host of an IPv6 address has no brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Parses an address.

    Args:
      text: `"host:port"`, `"192.0.2.1:port"` or `"[2001:db8::1]:port"`.

    Returns:
      An `Address` with the host in lower case (IPv6 in its shortest form) and the port.

    Raises:
      ConfigurationError: If `text` has none of the three forms, or the port is not from 1 to 65535.

    >>> parse_address("Host1:12345")
    Address(host='host1', port=12345)
    >>> str(parse_address("[2001:DB8:0::1]:12345"))
    '[2001:db8::1]:12345'
    """
    if not isinstance(text, str):
        raise ConfigurationError(f"{text!r} is a {type(text).__name__}, not an address. {_RULE}.")
    return _parse(text)


@functools.lru_cache(4096)  # every rank parses the addresses of all ranks a few times
def _parse(text: str) -> Address:
    if "://" in text:
        raise _error(text, f'Leave out the scheme: write "{text.split("://", 1)[1]}".')
    host, colon, port = text.rpartition(":")
    if not colon or not host:
        lone = text.strip(":")
        raise _error(
            text,
            f'The host is missing: write "localhost:{lone}".'
            if lone.isdecimal()
            else f'The port is missing: write "{lone or "host"}:12345".',
        )
    if host.startswith("[") and host.endswith("]"):
        return Address(_ipv6(host[1:-1], text), _port(port, text))
    if ":" in host or "[" in host or "]" in host:
        raise _error(text, f'An IPv6 address needs brackets: write "[{host.strip("[]")}]:{port}".')
    return Address(_name_or_ipv4(host, text), _port(port, text))


def host_key(address: Address) -> str:
    """Returns the host, with one name for the three spellings of loopback."""
    return "localhost" if address.host in _LOOPBACK else address.host


def _port(port: str, text: str) -> int:
    if not (port.isascii() and port.isdecimal() and len(port) <= 5 and 1 <= int(port) <= 65535):
        raise _error(text, f"The port is a whole number from 1 to 65535, not {port!r}.")
    return int(port)


def _ipv6(host: str, text: str) -> str:
    try:
        return str(ipaddress.IPv6Address(host))
    except ValueError as error:
        raise _error(text, f"Not an IPv6 address: {error}.") from None


def _name_or_ipv4(host: str, text: str) -> str:
    if re.fullmatch(r"[0-9.]+", host):  # looks like IPv4, so it has to be IPv4
        try:
            return str(ipaddress.IPv4Address(host))
        except ValueError as error:
            raise _error(text, f"Not an IPv4 address: {error}.") from None
    if len(host) > 253 or not _HOST_NAME.fullmatch(host):
        raise _error(text, f"{host!r} is not a host name: use only letters, digits, '-', '_' and '.'.")
    return host.lower()


def _error(text: str, what_to_do: str) -> ConfigurationError:
    return ConfigurationError(f"{text!r} is not an address. {_RULE}. {what_to_do}")
