"""Hosts that are network namespaces of this machine, on a network of their own; as root, on Linux.

    host1 (192.0.2.1, fd00:74::1) ──── bridge, in a namespace too ──── host2 (192.0.2.2, fd00:74::2) ...

Each knows the others as host1, host2 ... Nothing of it touches the machine's own network.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import secrets
import shutil
import subprocess
from collections.abc import Iterator, Sequence


def why_not() -> str | None:
    """Returns what this machine lacks for namespaces; None if it lacks nothing."""
    if os.geteuid() != 0:
        return "only root makes network namespaces"
    if shutil.which("ip") is None:
        return "`ip` is missing (apt-get install iproute2)"
    name = f"tfring-probe-{secrets.token_hex(3)}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode == 0:
        subprocess.run(["ip", "netns", "delete", name])
    return None if made.returncode == 0 else f"this machine makes no network namespaces: {made.stderr.strip()}"


class Host:
    """A namespace: `host.command("ip", "addr")` is what to run to run something there.

    Its link ends at `port` of the namespace `bridge`.
    """

    def __init__(self, name: str, namespace: str, ipv4: str, ipv6: str, bridge: str, port: str) -> None:
        self.name, self.namespace, self.ipv4, self.ipv6 = name, namespace, ipv4, ipv6
        self.bridge, self.port = bridge, port

    def command(self, *command: str) -> list[str]:
        return ["ip", "netns", "exec", self.namespace, *command]

    def shape(self, rate: int) -> None:
        """Makes its link one of so many bits a second, in both directions."""
        limit = ["tbf", "rate", f"{rate}bit", "burst", "128kb", "latency", "50ms"]
        for namespace, device in ((self.namespace, "eth0"), (self.bridge, self.port)):
            _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *limit)


@contextlib.contextmanager
def hosts(n: int = 2) -> Iterator[Sequence[Host]]:
    """`n` hosts that reach each other, gone afterwards."""
    tag = f"tfring-{os.getpid()}-{secrets.token_hex(2)}"
    bridge = f"{tag}-bridge"
    made = [
        Host(f"host{i}", f"{tag}-host{i}", f"192.0.2.{i}", f"fd00:74::{i}", bridge, f"port{i}")
        for i in range(1, n + 1)
    ]
    known = "127.0.0.1 localhost\n::1 localhost\n" + "".join(f"{host.ipv4} {host.name}\n" for host in made)
    try:
        _ip("netns", "add", bridge)
        _ip("-n", bridge, "link", "add", "bridge0", "type", "bridge")
        _ip("-n", bridge, "link", "set", "bridge0", "up")
        for host in made:
            folder = pathlib.Path("/etc/netns") / host.namespace  # `ip netns exec` mounts it over /etc
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(known)
            _ip("netns", "add", host.namespace)
            _ip("-n", bridge, "link", "add", host.port, "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
            _ip("-n", bridge, "link", "set", host.port, "master", "bridge0", "up")
            _ip("-n", host.namespace, "link", "set", "lo", "up")
            _ip("-n", host.namespace, "addr", "add", f"{host.ipv4}/24", "dev", "eth0")
            _ip("-n", host.namespace, "addr", "add", f"{host.ipv6}/64", "dev", "eth0", "nodad")
            _ip("-n", host.namespace, "link", "set", "eth0", "up")
        yield made
    finally:
        for namespace in (*(host.namespace for host in made), bridge):
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True)
            shutil.rmtree(pathlib.Path("/etc/netns") / namespace, ignore_errors=True)


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
