"""Many ranks of NumPy on this machine: they start, connect, exchange and end."""

from __future__ import annotations

import math
import subprocess

from test_launch import LAUNCH, plain_environment, write

__all__ = ["plain_environment"]  # a fixture

RANKS = 64
PROGRAM = """
import hashlib
import numpy as np
from tfring import Communicator
from tfring.cluster import detect

with Communicator.connect(detect()) as ring:
    inputs = np.random.default_rng(7).normal(size=(world, 1000)).astype("float32")
    small = ring.all_reduce(inputs[rank, :100])
    large = ring.all_reduce(np.tile(inputs[rank], 50))
    rows = ring.all_gather(inputs[rank, :4])
    more = ring.all_gather(inputs[rank, : 10 * rank])                # another number on each rank
    first = ring.broadcast(inputs[rank], root=5)
    total = ring.reduce(np.arange(1000) + rank, root=5)
    assert np.array_equal(first, inputs[5])
    assert np.array_equal(total, (rank == 5) * (np.arange(1000) * world + world * (world - 1) // 2))
    assert np.array_equal(rows, inputs[:, :4].ravel())
    assert np.array_equal(more, np.concatenate([inputs[r, : 10 * r] for r in range(world)]))
    np.testing.assert_allclose(large, np.tile(inputs.sum(0, "float64"), 50), rtol=1e-4, atol=1e-4)
    in_order = inputs[0, :100].copy()
    for row in inputs[1:, :100]:
        in_order += row
    assert np.array_equal(small, in_order)
    digest = hashlib.sha256(b"".join(x.tobytes() for x in (small, large, rows, more))).hexdigest()
    print(f"equal {digest} {len(ring._world.links.transports)}\\n", end="")
"""


def test_64_ranks_start_exchange_and_end(tmp_path):
    command = [*LAUNCH, "-n", str(RANKS), write(tmp_path, PROGRAM)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    lines = [line[line.index("equal") :] for line in done.stdout.splitlines() if "equal" in line]
    assert len(lines) == RANKS and len(set(lines)) == 1, lines
    assert int(lines[0].split()[-1]) == 2 * int(math.log2(RANKS)) - 1  # links of a rank: with those 1, 2, 4, ... away
