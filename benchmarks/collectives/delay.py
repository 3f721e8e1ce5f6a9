"""A switch that hands every frame over some time after it came, for kernels without netem.

    ip netns exec NAMESPACE python delay.py SECONDS PORT ...   # each PORT is made in NAMESPACE, and may be moved

It prints "ready". Frames go to the port whose host has sent from that address before, or to all others.
"""

from __future__ import annotations

import collections
import os
import pathlib
import selectors
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "faults"))

from lossy import MAX_FRAME, tap


def main(delay: float, names: list[str]) -> None:
    ports = [tap(name) for name in names]
    selector = selectors.DefaultSelector()
    for port in ports:
        selector.register(port, selectors.EVENT_READ)
    behind: dict[bytes, int] = {}  # the port of an Ethernet address
    held: collections.deque[tuple[float, int, bytes]] = collections.deque()  # when, from which port, what
    print("ready", flush=True)
    while True:
        for key, _ in selector.select(max(0.0, held[0][0] - time.monotonic()) if held else None):
            try:
                while True:
                    held.append((time.monotonic() + delay, key.fd, os.read(key.fd, MAX_FRAME)))
            except OSError:  # nothing more, or a device that is down
                continue
        while held and held[0][0] <= time.monotonic():
            _, source, frame = held.popleft()
            behind[frame[6:12]] = source
            known = behind.get(frame[:6])
            for port in ports if known is None else [known]:
                try:
                    if port != source:
                        os.write(port, frame)
                except OSError:  # a device that is down, or full
                    continue


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
