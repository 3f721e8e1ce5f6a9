"""Exchanges statistics through a central server: every worker sends its own to rank 0 and gets the merged ones back.

```
rank 1 ──(1)──► rank 0 ──(3)──► rank 1          (1) rank 0 receives from rank 1, 2, ..., N - 1
rank 2 ──(1)──►   │    ──(3)──► rank 2          (2) and combines what they sent, in the order of ranks
rank 3 ──(1)──►  (2)   ──(3)──► rank 3          (3) and sends it to rank 1, 2, ..., N - 1
```

Each of the other ranks exchanges two messages, one after the other, instead of the N - 1 steps of a ring. But rank 0
handles 2(N - 1) messages, and each is a full copy of the statistics.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfring.layers.exchange import RingStatistics
from tfring.ring.collectives import Collectives, RingCollectives
from tfring.runtime import Ring

_lines: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # keyed by ring


def connect(ring: Ring) -> None:
    """Connects rank 0 with each other rank, once per strategy. Every rank calls it at the same point."""
    if ring in _lines or ring.control.world_size == 1 or ring.communication != "ring":
        return
    from tfring.ring import ops
    from tfring.ring.communicator import Communicator

    cluster = ring.cluster
    first, *rest = ring.mesh.ranks("data", cluster.rank)
    world = ring.world
    assert isinstance(world, RingCollectives)
    others = rest if cluster.rank == first else [cluster.rank]
    lines = []
    for other in others:
        pair: Any = types.SimpleNamespace(
            rank=0 if cluster.rank == first else 1,
            world_size=2,
            local_world_size=cluster.local_world_size,
            addresses=(cluster.addresses[first], cluster.addresses[other]),
            listen_fd=cluster.listen_fd,
            secret=cluster.secret,
        )
        communicator = Communicator.connect(pair, "central", beside=world.communicator)
        # Ordered with the control ring: a rank then waits in one ring at a time, and no two ranks can wait for each
        # other in different rings.
        ops.share_order(communicator, world.communicator)
        lines.append(RingCollectives(communicator))
    ring.channels.extend(lines)  # counted and closed with the others
    _lines[ring] = lines


class CentralStatistics(RingStatistics):
    """Statistics over a RingStrategy with `synchronization="central"`.

    TensorFlow's collective runtime has no messages between two workers. There all workers send to all, and rank 0's
    result is broadcast: as exact as `RingStatistics`, but more expensive.
    """

    def _over_workers(self, replicas: tf.Tensor, what: str, combine: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
        name = f"{self._key}/{what}"
        lines: list[Collectives] | None = _lines.get(self.ring)
        if lines is None:
            combined = combine(self._control.gather_equal(replicas, name=name))
            return self._control.broadcast([combined], name=f"{name} from rank 0")[0]
        if self._control.rank == 0:
            received = [line.broadcast([replicas], 1, name=name)[0] for line in lines]
            combined = combine(tf.concat([replicas, *received], 0))
            for line in lines:
                line.broadcast([combined], 0, name=f"{name} from rank 0")
            return combined
        [line] = lines
        line.broadcast([replicas], 1, name=name)
        return line.broadcast([tf.zeros_like(replicas[0])], 0, name=f"{name} from rank 0")[0]
