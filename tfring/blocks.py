"""Processes large arrays one block of rows at a time, so that no rank holds all of a sharded value in memory.

A full value is assembled in an unnamed file in the folder for temporary files, and copied from there into the output
file (`_keras/sharding/stores.py`, `callbacks/files.py`).
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np

LARGE_BYTES = 16 << 20  # smaller values are held in memory
BLOCK_BYTES = 1 << 20


def allocate(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Allocates an array for a full value: from `LARGE_BYTES` on memory-mapped, in a file that is freed with the array.

    If the folder for temporary files has no room, the array is allocated in memory: writing to a mapped file that the
    disk has no room for would end the process with SIGBUS.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if size < LARGE_BYTES:
        return np.empty(shape, dtype)
    with contextlib.suppress(OSError), tempfile.TemporaryFile(prefix="tfring-") as file:
        os.posix_fallocate(file.fileno(), 0, size)
        return np.memmap(file, dtype, "r+", shape=tuple(shape))
    return np.empty(shape, dtype)


def rows_of_a_block(array: Any, num_ranks: int = 1) -> int:
    """Returns the number of rows in a block, per rank, of an array or of any object with `shape` and `dtype`."""
    return max(1, BLOCK_BYTES // num_ranks // max(1, array.dtype.itemsize * math.prod(array.shape[1:])))


def read_rows(begin: int, count: int, parts: Sequence[np.ndarray]) -> np.ndarray:
    """Returns `count` rows, from row `begin` on, of the concatenation of several arrays."""
    found = []
    for part in parts:
        found.append(part[begin : begin + count])
        begin, count = max(0, begin - len(part)), count - len(found[-1])
    return found[0] if len(found) == 1 else np.concatenate(found)


def write_rows(rows: np.ndarray, begin: int, parts: Sequence[np.ndarray]) -> None:
    """Writes rows into the concatenation of several arrays, from row `begin` on."""
    for part in parts:
        target = part[begin : begin + len(rows)]
        target[...], rows = rows[: len(target)], rows[len(target) :]
        begin = max(0, begin - len(part))
