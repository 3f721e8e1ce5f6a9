"""Whose part of a weight is whose, where ranks share the work of the optimizer: a pure plan from shapes.

```
[130, 3] of 2 ranks, by rows       rank 0: rows 0 to 65            rank 1: rows 65 to 130
[3, 3]   of 2 ranks, flattened     rank 0: elements 0 to 5         rank 1: elements 5 to 9
```

A weight of many rows is cut between rows, so that a sparse gradient of it (an embedding's) stays sparse: each rank
takes the ids that are its own. Any other is cut between elements. Pieces differ by one row or element, and may be
empty.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from tfring.ring.schedule import chunk_bounds

ROWS_A_RANK = 64  # with fewer, a row more or less would matter


class Cut(NamedTuple):
    """How a tensor is cut into a piece for each rank.

    Attributes:
      shape: of the whole.
      lined_up: the shape along whose first dimension it is cut: `shape`, or that of the flattened tensor.
      bounds: where in that dimension each rank's piece begins and ends.
    """

    shape: tuple[int, ...]
    lined_up: tuple[int, ...]
    bounds: tuple[tuple[int, int], ...]

    @property
    def by_rows(self) -> bool:
        """Whether pieces are whole rows."""
        return self.lined_up == self.shape

    def shape_of(self, rank: int) -> tuple[int, ...]:
        """The shape of a rank's piece.

        >>> plan_cut((3, 3), 2).shape_of(1)
        (4,)
        """
        begin, end = self.bounds[rank]
        return (end - begin, *self.lined_up[1:])

    def rows(self, rank: int) -> slice:
        """A rank's piece of the first dimension of the lined-up whole."""
        return slice(*self.bounds[rank])


def plan_cut(shape: Sequence[int], world_size: int) -> Cut:
    """The cut of a weight of this shape, the same on every rank.

    >>> plan_cut((130, 3), 2)
    Cut(shape=(130, 3), lined_up=(130, 3), bounds=((0, 65), (65, 130)))
    >>> plan_cut((3, 3), 2)
    Cut(shape=(3, 3), lined_up=(9,), bounds=((0, 5), (5, 9)))
    >>> plan_cut((), 3).bounds
    ((0, 1), (1, 1), (1, 1))
    """
    shape = tuple(int(size) for size in shape)
    many_rows = bool(shape) and shape[0] >= ROWS_A_RANK * world_size
    lined_up = shape if many_rows else (math.prod(shape),)
    return Cut(shape, lined_up, tuple(chunk_bounds(lined_up[0], world_size)))
