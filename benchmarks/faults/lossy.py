"""A link between two network namespaces that loses packets, for kernels without netem: frames pass through here.

    ip netns exec NAMESPACE python lossy.py PORT PEER RATE     # PORT and PEER are made in NAMESPACE; PEER may be moved

It prints "ready", and loses frames of both directions, each with probability RATE, from SIGUSR1 on.
"""

from __future__ import annotations

import fcntl
import os
import random
import selectors
import signal
import struct
import sys

_TUNSETIFF = 0x400454CA
_TAP_WITHOUT_HEADER = 0x0002 | 0x1000
MAX_FRAME = 65600


def tap(name: str) -> int:
    """A network device whose frames are read from, and written to, the descriptor returned."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP_WITHOUT_HEADER))
    return fd


def main(port: str, peer: str, rate: float) -> None:
    ends = tap(port), tap(peer)
    losing = False

    def lose(*_: object) -> None:
        nonlocal losing
        losing = True

    signal.signal(signal.SIGUSR1, lose)
    draw = random.Random(1)
    selector = selectors.DefaultSelector()
    for end, other in (ends, ends[::-1]):
        selector.register(end, selectors.EVENT_READ, other)
    print("ready", flush=True)
    while True:
        for key, _ in selector.select():
            try:
                frame = os.read(key.fd, MAX_FRAME)
                if not losing or draw.random() >= rate:
                    os.write(key.data, frame)
            except OSError:  # a device that is down, or full
                continue


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
