"""Plans the shards of a weight: pure, from shapes.

```
plan_cut    [130, 3] of 2 ranks, by rows        rank 0: rows 0 to 65         rank 1: rows 65 to 130
            [3, 3]   of 2 ranks, flattened      rank 0: elements 0 to 5      rank 1: elements 5 to 9
cut_along   [3, 5]   of 2 ranks, dimension 1    rank 0: columns 0 to 3       rank 1: columns 3 to 5
```

`plan_cut` is for ranks that share the work of an optimizer. A weight of many rows is cut between rows, so that a sparse
gradient of it (an embedding's) stays sparse: each rank takes the ids that are its own. Any other is cut between
elements. `cut_along` is for layers whose operation says along which dimension. Shards differ by one row, column or
element, and may be empty.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from tfring.ring.schedule import chunk_bounds

ROWS_A_RANK = 64  # with fewer, a row more or less would matter


class Cut(NamedTuple):
    """The shards of a tensor, one for each rank.

    Attributes:
      shape: of the full tensor.
      lined_up: the shape along one of whose dimensions it is cut: `shape`, or that of the flattened tensor.
      bounds: where in that dimension each rank's shard begins and ends.
      dimension: which one it is.
    """

    shape: tuple[int, ...]
    lined_up: tuple[int, ...]
    bounds: tuple[tuple[int, int], ...]
    dimension: int = 0

    @property
    def by_rows(self) -> bool:
        """Returns True if shards are whole rows."""
        return self.lined_up == self.shape and self.dimension == 0

    def shape_of(self, rank: int) -> tuple[int, ...]:
        """Returns the shape of a rank's shard.

        >>> plan_cut((3, 3), 2).shape_of(1)
        (4,)
        """
        begin, end = self.bounds[rank]
        return (*self.lined_up[: self.dimension], end - begin, *self.lined_up[self.dimension + 1 :])

    def rows(self, rank: int) -> slice:
        """Returns a rank's range of the dimension along which the tensor is cut."""
        return slice(*self.bounds[rank])

    def slices(self, rank: int) -> tuple[slice, ...]:
        """Returns the same as a tuple, as of a `Placement`, which may have several."""
        return (self.rows(rank),)

    def part(self, rank: int) -> tuple[slice, ...]:
        """Returns a rank's shard as slices of the full, lined-up tensor.

        >>> cut_along((3, 5), 1, 2).part(1)
        (slice(None, None, None), slice(3, 5, None))
        """
        return (*[slice(None)] * self.dimension, self.rows(rank))

    def part_within(self, rank: int, begin: int, end: int) -> tuple[slice, ...]:
        """Returns a rank's slices of rows `begin` to `end` of a matrix cut by columns, counted from `begin`.

        >>> cut_along((9, 5), 1, 2).part_within(1, 4, 6)
        (slice(0, 2, None), slice(3, 5, None))
        """
        return (slice(0, end - begin), self.rows(rank))


def plan_cut(shape: Sequence[int], world_size: int) -> Cut:
    """Returns the cut of a weight of this shape, the same on every rank.

    >>> plan_cut((130, 3), 2)
    Cut(shape=(130, 3), lined_up=(130, 3), bounds=((0, 65), (65, 130)), dimension=0)
    >>> plan_cut((3, 3), 2)
    Cut(shape=(3, 3), lined_up=(9,), bounds=((0, 5), (5, 9)), dimension=0)
    >>> plan_cut((), 3).bounds
    ((0, 1), (1, 1), (1, 1))
    """
    shape = tuple(int(size) for size in shape)
    many_rows = bool(shape) and shape[0] >= ROWS_A_RANK * world_size
    lined_up = shape if many_rows else (math.prod(shape),)
    return Cut(shape, lined_up, tuple(chunk_bounds(lined_up[0], world_size)))


def cut_along(shape: Sequence[int], dimension: int, world_size: int) -> Cut:
    """Returns the cut of a weight along one of its dimensions.

    >>> cut_along((3, 5), 1, 2)
    Cut(shape=(3, 5), lined_up=(3, 5), bounds=((0, 3), (3, 5)), dimension=1)
    >>> cut_along((3, 5), 1, 2).shape_of(0)
    (3, 3)
    """
    shape = tuple(int(size) for size in shape)
    return Cut(shape, shape, tuple(chunk_bounds(shape[dimension], world_size)), dimension)
