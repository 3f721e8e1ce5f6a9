"""A pure function that assigns variables to servers: full variables, and large tables split by rows.

    bytes    table [1000, 8]: 32 000          kernel: 2 000   bias: 32
    server 0 rows 0 .. 500   ████████████████ 16 000  ► + bias
    server 1 rows 500 .. 1000 ███████████████ 16 000  ► + kernel
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

SPLIT_BYTES = 1 << 18  # a smaller variable stays on one server: a message costs more than its bytes


class Span(NamedTuple):
    """Rows `begin` to `end` of a variable, on one server. A scalar or a variable that is not split is one span."""

    variable: int
    server: int
    begin: int
    end: int
    is_full: bool  # whether the server holds the full variable


def plan(
    shapes: Sequence[Sequence[int]],
    item_bytes: Sequence[int],
    can_split: Sequence[bool],
    num_servers: int,
    split_bytes: int = SPLIT_BYTES,
) -> list[Span]:
    """Distributes variables over servers by bytes. The result is the same on every process.

    A variable of `split_bytes` or more that can be split, and has a row for each server, is split by rows, as evenly as
    possible. The others are placed from the largest to the smallest, each on the server with the fewest bytes, the
    first one in a tie.

    Args:
      shapes: Shape of each variable.
      item_bytes: Size of an element of each variable, in bytes.
      can_split: Whether each variable may be split by rows.
      num_servers: Number of servers, at least 1.
      split_bytes: Size from which a variable is split, in bytes.

    Returns:
      The shards, ordered by variable and then by row. Each row is in one shard.

    >>> [tuple(p) for p in plan([(4, 2), (3,)], [4, 4], [True, True], 2, split_bytes=32)]
    [(0, 0, 0, 2, False), (0, 1, 2, 4, False), (1, 0, 0, 3, True)]
    """
    assert num_servers >= 1 and len(shapes) == len(item_bytes) == len(can_split)
    sizes = [math.prod(shape) * item for shape, item in zip(shapes, item_bytes, strict=True)]
    rows = [shape[0] if len(shape) else 1 for shape in shapes]
    loads = [0] * num_servers
    spans: dict[int, list[Span]] = {}
    is_split = [
        num_servers > 1 and can and size >= split_bytes and n >= num_servers
        for can, size, n in zip(can_split, sizes, rows, strict=True)
    ]
    for variable, n in enumerate(rows):
        if not is_split[variable]:
            continue
        bounds = [(s * n // num_servers, (s + 1) * n // num_servers) for s in range(num_servers)]
        spans[variable] = [Span(variable, s, begin, end, False) for s, (begin, end) in enumerate(bounds)]
        for span in spans[variable]:
            loads[span.server] += sizes[variable] // n * (span.end - span.begin)
    for variable in sorted((v for v in range(len(rows)) if not is_split[v]), key=lambda v: (-sizes[v], v)):
        server = loads.index(min(loads))
        spans[variable] = [Span(variable, server, 0, rows[variable], True)]
        loads[server] += sizes[variable]
    return [span for variable in range(len(rows)) for span in spans[variable]]
