"""Runs on each rank of the engine tests: forms a ring of the cluster it finds, and reports it.

Rank 0 prints one line of JSON; a ring that does not form, or sums wrongly, is an exit code.
"""

from __future__ import annotations

import json
import os
import sys

import numpy as np

from tfring import Communicator
from tfring.cluster import detect

cluster = detect()
assert detect() == cluster, "asked again, it says the same"
ring = Communicator.connect(cluster, "report")
mine = [cluster.rank, cluster.local_rank, cluster.local_world_size, cluster.num_nodes, os.getpid()]
table = np.zeros([cluster.world_size, len(mine)])
table[cluster.rank] = mine
table = ring.all_reduce(table)
assert list(table[:, 0]) == list(range(cluster.world_size)), table
assert len(set(table[:, -1])) == cluster.world_size, "each rank is a process of its own"
if cluster.rank == 0:
    facts = {
        "source": cluster.source,
        "world_size": cluster.world_size,
        "local_rank": table[:, 1].astype(int).tolist(),
        "local_world_size": table[:, 2].astype(int).tolist(),
        "num_nodes": cluster.num_nodes,
        "addresses": list(cluster.addresses),
    }
    print(json.dumps(facts), flush=True)
ring.close()
assert "tensorflow" not in sys.modules
