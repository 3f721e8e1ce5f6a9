"""Options of `tfring bench`."""

from __future__ import annotations

import json
from typing import NamedTuple

# Bus bandwidth over algorithm bandwidth, for N ranks: bytes that the slowest link carries per byte of the size, as
# in nccl-tests (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
FACTORS = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "gather": lambda n: (n - 1) / n,
    "scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "reduce": lambda n: 1.0,
}
DEFAULT_OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
DEFAULT_SIZES = "4,4K,64K,1M,16M,64M"
ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int32": 4, "int64": 8}
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class Options(NamedTuple):
    """The options that the ranks get. They are the same on all ranks."""

    ops: tuple[str, ...] = DEFAULT_OPS
    sizes: tuple[int, ...] = ()  # bytes
    dtype: str = "float32"
    as_json: bool = False
    plot: str | None = None

    def to_json(self) -> str:
        return json.dumps(self)

    @classmethod
    def from_json(cls, text: str) -> Options:
        """
        >>> Options.from_json(Options(("broadcast",), (4, 8)).to_json())
        Options(ops=('broadcast',), sizes=(4, 8), dtype='float32', as_json=False, plot=None)
        """
        ops, sizes, *others = json.loads(text)
        return cls(tuple(ops), tuple(sizes), *others)


def parse_ops(text: str) -> tuple[str, ...]:
    """Parses names of collectives.

    >>> parse_ops("all_reduce,broadcast")
    ('all_reduce', 'broadcast')
    """
    ops = tuple(text.split(","))
    for op in ops:
        if op not in FACTORS:
            raise ValueError(f"{op!r} is not one of the collectives {', '.join(FACTORS)}")
    return ops


def parse_sizes(text: str) -> tuple[int, ...]:
    """Parses numbers of bytes.

    >>> parse_sizes("4,64K,1M")
    (4, 65536, 1048576)
    """
    return tuple(map(_size, text.split(",")))


def _size(text: str) -> int:
    number, unit = (text[:-1], text[-1:].upper()) if text[-1:].upper() in _UNITS else (text, "")
    if not (number.isascii() and number.isdecimal() and int(number) >= 1):
        raise ValueError(f"{text!r} is not a whole number of bytes from 1 up, such as 64, 64K, 64M or 1G")
    return int(number) * _UNITS.get(unit, 1)
