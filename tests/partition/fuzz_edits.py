"""Random functions of rows and their gradients, edited: does every replica have what one process has?

TF_NUM_INTEROP_THREADS=32 python tests/partition/fuzz_edits.py 0 2000        # seeds; for hours: more of them
"""

from __future__ import annotations

import collections
import sys

import numpy as np
import replicas
import tensorflow as tf
from fuzz import program

SIZES = ((5, 3), (4, 1, 3), (6, 0, 2))


def run(seed, length=8):
    """Runs one program; returns what `replicas.run` does, None where TensorFlow refuses to run it."""
    random = np.random.default_rng(1000 + seed)
    sizes = SIZES[seed % len(SIZES)]
    rows = sum(sizes)
    x, y = random.normal(size=(rows, 3, 4)), random.normal(size=(rows, 4))
    ids, mask = random.integers(0, 3, rows).astype(np.int32), random.integers(0, 2, rows).astype(np.int32)
    function = program(seed, length)
    try:
        replicas.whole(function, x, y, ids, mask)
    except (tf.errors.InvalidArgumentError, ValueError):
        return None
    return replicas.run(function, x, y, ids, mask, sizes=sizes, tolerance=1e-8)


def main(first, last):
    said = collections.Counter()
    for seed in range(first, last):
        try:
            ran = run(seed)
        except Exception as error:  # of any kind: the seed is what has to be seen
            lines = [line for line in str(error).splitlines() if line.strip() and "File" not in line]
            print(seed, type(error).__name__, lines[:1], lines[-8:-1], flush=True)
            said["wrong"] += 1
            continue
        if ran is None:
            said["no program"] += 1
            continue
        said["equal, or named"] += 1
        said.update(f"named: {finding.reason} {finding.op.type}" for finding in ran.findings)
    print(dict(said))
    sys.exit(said["wrong"] > 0)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
