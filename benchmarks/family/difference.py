"""Prints the largest relative differences, of ranks and of one process: difference.py PLAIN RING"""

from __future__ import annotations

import pathlib
import sys

import numpy as np

OF_RANKS = ", of ranks"  # ends names of figures in which one process may differ


def difference(one, other, names) -> float:
    """Returns the largest difference of arrays, each relative to its largest number; inf if they do not match."""
    found = [0.0]
    for name in names:
        if one[name].shape != other[name].shape:
            return float("inf")
        if one[name].size:
            found.append(float(np.max(np.abs(one[name] - other[name])) / max(np.max(np.abs(one[name])), 1e-30)))
    return max(found) if np.all(np.isfinite(found)) else float("inf")


if __name__ == "__main__":
    plain, ring = map(pathlib.Path, sys.argv[1:])
    ranks = [np.load(ring / f"rank-{rank}.npz") for rank in range(2)]
    alone = np.load(plain / "rank-0.npz")
    shared = [name for name in alone.files if not name.endswith(OF_RANKS)]
    print(difference(*ranks, alone.files), difference(alone, ranks[0], shared))
