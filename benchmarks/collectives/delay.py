"""A switch that hands every frame over some time after it came, for kernels without netem.

    ip netns exec NAMESPACE python delay.py PORT ...   # each PORT is made in NAMESPACE, and may be moved

It reads lines of seconds and of bits a second that a port takes in each direction, 0 for no limit, and answers each by
"ready". Frames go to the port whose host has sent from that address before, or to all others.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import pathlib
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

sys.path.append(str(pathlib.Path(__file__).parents[1] / "faults"))

from lossy import MAX_FRAME, tap

QUEUE_SECONDS = 0.05  # as `Host.shape`


@contextlib.contextmanager
def delayed(hosts, seconds: float, rate: float = 0, mtu: int = 1500) -> Iterator[Callable[[float, float], None]]:
    """In place of all hosts' links a switch that takes its time. Their connections stay; yields how to change it."""
    bridge = hosts[0].bridge
    names = [f"slow{number}" for number in range(len(hosts))]
    command = ["ip", "netns", "exec", bridge, sys.executable, __file__, *names]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as switch:

        def change(seconds: float, rate: float) -> None:
            assert switch.stdin is not None and switch.stdout is not None
            print(seconds, rate, file=switch.stdin, flush=True)
            assert switch.stdout.readline() == "ready\n"

        try:
            change(seconds, rate)
            for name, host in zip(names, hosts, strict=True):
                shown = subprocess.run(
                    ["ip", "-n", host.namespace, "-json", "link", "show", "eth0"], check=True, capture_output=True
                )
                address = json.loads(shown.stdout)[0]["address"]  # so that the others still know it
                for arguments in (
                    f"-n {host.namespace} link delete eth0",
                    f"-n {bridge} link set {name} netns {host.namespace}",
                    f"-n {host.namespace} link set {name} name eth0 mtu {mtu} address {address}",
                    f"-n {host.namespace} addr add {host.ipv4}/24 dev eth0",
                    f"-n {host.namespace} link set eth0 up",
                ):
                    subprocess.run(["ip", *arguments.split()], check=True)
            yield change
        finally:
            switch.kill()


class Port:
    """One port, with the frames that will leave through it: `(when, frame)`, the earliest first."""

    def __init__(self, name: str) -> None:
        self.fd = tap(name)
        self.held: collections.deque[tuple[float, bytes]] = collections.deque()
        self.in_until = self.out_until = 0.0  # when the last frame has passed, in each direction

    def take_in(self, seconds: float) -> float:
        """Returns when a frame that takes `seconds` has come in."""
        self.in_until = max(time.monotonic(), self.in_until) + seconds
        return self.in_until

    def hold(self, frame: bytes, when: float, seconds: float) -> None:
        """Sends a frame that comes out at `when`; loses it where it would wait for too long, as switches do."""
        if self.out_until - when < QUEUE_SECONDS:
            self.out_until = max(when, self.out_until) + seconds
            self.held.append((self.out_until, frame))

    def send(self) -> None:
        while self.held and self.held[0][0] <= time.monotonic():
            with contextlib.suppress(OSError):  # a device that is down, or full
                os.write(self.fd, self.held.popleft()[1])


def main(names: list[str]) -> None:
    with contextlib.suppress(PermissionError):  # a switch has a processor of its own
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    ports = [Port(name) for name in names]
    selector = selectors.DefaultSelector()
    for port in ports:
        selector.register(port.fd, selectors.EVENT_READ, port)
    selector.register(sys.stdin, selectors.EVENT_READ)
    behind: dict[bytes, Port] = {}  # the port of an Ethernet address
    delay = rate = 0.0
    while True:
        times = [port.held[0][0] for port in ports if port.held]
        for key, _ in selector.select(max(0.0, min(times) - time.monotonic()) if times else None):
            source = key.data
            if source is None:
                delay, rate = map(float, sys.stdin.readline().split())
                print("ready", flush=True)
                continue
            try:
                while True:
                    frame = os.read(source.fd, MAX_FRAME)
                    passes = 8 * len(frame) / rate if rate else 0.0
                    when = source.take_in(passes) + delay
                    behind[frame[6:12]] = source
                    known = behind.get(frame[:6])
                    for port in ports if known is None else [known]:
                        if port is not source:
                            port.hold(frame, when, passes)
            except OSError:  # nothing more, or a device that is down
                continue
        for port in ports:
            port.send()


if __name__ == "__main__":
    main(sys.argv[1:])
