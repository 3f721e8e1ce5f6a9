"""Prints the largest relative differences, of ranks and of one process: difference.py PLAIN RING"""

from __future__ import annotations

import pathlib
import sys

import numpy as np


def difference(one, other) -> float:
    """Returns the largest difference of arrays, each relative to its largest number; inf if they do not match."""
    if set(one.files) != set(other.files):
        return float("inf")
    found = [0.0]
    for name in one.files:
        if one[name].shape != other[name].shape:
            return float("inf")
        if one[name].size:
            found.append(float(np.max(np.abs(one[name] - other[name])) / max(np.max(np.abs(one[name])), 1e-30)))
    return max(found) if np.all(np.isfinite(found)) else float("inf")


if __name__ == "__main__":
    plain, ring = map(pathlib.Path, sys.argv[1:])
    ranks = [np.load(ring / f"rank-{rank}.npz") for rank in range(2)]
    print(difference(*ranks), difference(np.load(plain / "rank-0.npz"), ranks[0]))
