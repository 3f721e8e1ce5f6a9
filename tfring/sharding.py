"""The sharding of a value: which rank holds which part of it. Pure data, the same on all ranks, and written to files.

```
plan_shards    [130, 3] of 2 ranks, by rows        rank 0: rows 0 to 65         rank 1: rows 65 to 130
               [3, 3]   of 2 ranks, flattened      rank 0: elements 0 to 5      rank 1: elements 5 to 9
shard_along    [3, 5]   of 2 ranks, dimension 1    rank 0: columns 0 to 3       rank 1: columns 3 to 5
shard_table    [10, 4]  of 3 ranks, interleaved    rank 0: rows 0 3 6 9         rank 1: 1 4 7        rank 2: 2 5 8
                                    range          rank 0: rows 0 1 2 3         rank 1: 4 5 6 7      rank 2: 8 9
at_stage 1     [3, 5]   of 2 stages of 2 ranks     ranks 0, 1: nothing          rank 2: columns 0 to 3   rank 3: 3 to 5
```

`plan_shards` is for ranks that share the work of an optimizer. A weight with many rows is cut between rows, so that its
sparse gradient (such as that of an embedding) stays sparse: each rank uses the ids of its own rows. Any other weight is
cut between elements. `shard_along` is for layers whose operation determines the dimension. Sizes of these shards differ
by at most one row, column or element, and shards may be empty.

`shard_table` and `shard_tables` are for tables. Ids are often sorted by frequency; if they are interleaved, every rank
has the same number of frequent ids, give or take one. By range, the rows of a rank are contiguous in a file; the last
ranks may have fewer rows.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left
from collections.abc import Sequence

from tfring.cluster.mesh import axes_of
from tfring.errors import ConfigurationError
from tfring.ring.schedule import chunk_bounds

ROWS_A_RANK = 64  # with fewer rows per rank, a difference of one row would matter
BY_ROWS = ("interleaved", "range")
KINDS = (*BY_ROWS, "columns")


@dataclasses.dataclass(frozen=True)
class Sharding:
    """The shards of a value, one for each rank along an axis, or several axes, of the mesh.

    Attributes:
      shape: Shape of the full value.
      parts: For each rank, the ranges of `dimension` that it holds, in the order in which it holds them.
      axis: An axis of the mesh, or axes joined by "+": "pipeline+model".
      dimension: The dimension that is cut into ranges.
      is_flat: Whether ranges are of the flattened value.
    """

    shape: tuple[int, ...]
    parts: tuple[tuple[range, ...], ...]
    axis: str = "data"
    dimension: int = 0
    is_flat: bool = False

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of the mesh along which ranks hold different shards."""
        return axes_of(self.axis)

    @property
    def lined_up(self) -> tuple[int, ...]:
        """The shape of the lined-up value, one dimension of which is cut: `shape`, or that of the flattened value."""
        return (math.prod(self.shape),) if self.is_flat else self.shape or (1,)

    @property
    def by_rows(self) -> bool:
        """True if shards are rows of the value."""
        return self.lined_up == self.shape and self.dimension == 0

    def count(self, rank: int) -> int:
        """Returns the number of rows (or columns, or elements) of the lined-up value that a rank has."""
        return sum(map(len, self.parts[rank]))

    def shape_of(self, rank: int) -> tuple[int, ...]:
        """Returns the shape of a rank's shard.

        >>> plan_shards((3, 3), 2).shape_of(1), shard_along((3, 5), 1, 2).shape_of(1)
        ((4,), (3, 2))
        >>> [at_stage((), None, stage=1, num_stages=2).shape_of(rank) for rank in (0, 1)]
        [(0,), ()]
        """
        if self.parts[rank] and not self.shape and not self.is_flat:
            return ()
        return (*self.lined_up[: self.dimension], self.count(rank), *self.lined_up[self.dimension + 1 :])

    def slices(self, rank: int) -> tuple[slice, ...]:
        """Returns a rank's slices of the dimension that is cut, in the rank's order; one empty slice if it has none.

        >>> shard_table((10, 4), 3, "interleaved").slices(1), shard_table((4, 4), 3, "range").slices(2)
        ((slice(1, 10, 3),), (slice(0, 0, 1),))
        """
        return tuple(slice(part.start, part.stop, part.step) for part in self.parts[rank] or (range(0),))

    def within(self, rank: int, begin: int, end: int) -> tuple[slice, ...]:
        """Returns a rank's slices of rows `begin` to `end` (rows of one table) of a matrix, counted from `begin`.

        >>> shard_table((10, 4), 3, "interleaved").within(1, 5, 8), shard_along((9, 5), 1, 2).within(1, 4, 6)
        ((slice(2, 5, 3),), (slice(0, 2, 1), slice(3, 5, 1)))
        """
        if self.dimension:
            return (slice(0, end - begin, 1), *self.slices(rank))
        [part] = [part for part in self.parts[rank] if part[0] < end and begin <= part[-1]] or [range(begin, begin)]
        rows = part[bisect_left(part, begin) : bisect_left(part, end)]
        return (slice(rows.start - begin, rows.stop - begin, rows.step),)


def _between(bounds: Sequence[tuple[int, int]]) -> tuple[tuple[range, ...], ...]:
    return tuple((range(begin, end),) if begin < end else () for begin, end in bounds)


def plan_shards(shape: Sequence[int], num_ranks: int, axis: str = "data") -> Sharding:
    """Returns the sharding of a weight of this shape over ranks that each update one shard.

    >>> plan_shards((130, 3), 2)
    Sharding(shape=(130, 3), parts=((range(0, 65),), (range(65, 130),)), axis='data', dimension=0, is_flat=False)
    >>> plan_shards((), 3).parts
    ((range(0, 1),), (), ())
    """
    shape = tuple(int(size) for size in shape)
    is_flat = not shape or shape[0] < ROWS_A_RANK * num_ranks
    size = math.prod(shape) if is_flat else shape[0]
    return Sharding(shape, _between(chunk_bounds(size, num_ranks)), axis, is_flat=is_flat)


def shard_along(shape: Sequence[int], dimension: int, num_ranks: int, axis: str = "data") -> Sharding:
    """Returns the sharding of a weight along one of its dimensions.

    >>> shard_along((3, 5), 1, 2, "model").parts
    ((range(0, 3),), (range(3, 5),))
    """
    shape = tuple(int(size) for size in shape)
    return Sharding(shape, _between(chunk_bounds(shape[dimension], num_ranks)), axis, dimension)


def shard_table(shape: tuple[int, int], num_ranks: int, kind: str, axis: str = "data") -> Sharding:
    """Returns the sharding of a table, by rows or by columns.

    Args:
      shape: Shape of the full table, rows first.
      num_ranks: Number of ranks that share it.
      kind: One of `KINDS`.
      axis: See `Sharding`. Defaults to "data".

    Raises:
      ConfigurationError: If `kind` is not one of `KINDS`.

    >>> shard_table((10, 4), 3, "range").parts
    ((range(0, 4),), (range(4, 8),), (range(8, 10),))
    """
    if kind not in KINDS:
        raise ConfigurationError(f"`placement` is {kind!r}, not one of {KINDS}.")
    rows = shape[0]
    if kind == "columns":
        return shard_along(shape, 1, num_ranks, axis)
    if kind == "interleaved":
        return shard_tables(shape, num_ranks, [(rows, None)], axis)
    rows_a_rank = -(-rows // num_ranks)
    bounds = [(rank * rows_a_rank, min((rank + 1) * rows_a_rank, rows)) for rank in range(num_ranks)]
    return Sharding(shape, _between(bounds), axis)


def shard_tables(
    shape: tuple[int, int], num_ranks: int, tables: Sequence[tuple[int, int | None]], axis: str = "data"
) -> Sharding:
    """Returns the sharding of concatenated tables, each interleaved or held in full by one rank.

    A rank holds its full tables after its other rows:

    ```
    a, in full at rank 2; b, interleaved; c, in full at rank 0

    all         a0 a1 | b0 b1 b2 b3 | c0 c1 c2
    rank 0              b0       b3   c0 c1 c2
    rank 1                 b1
    rank 2      a0 a1         b2                    held as b2 a0 a1
    ```

    Args:
      shape: Shape of all tables together.
      num_ranks: Number of ranks that share them.
      tables: For each table, its number of rows and the rank that holds it in full, or None.
      axis: See `Sharding`. Defaults to "data".

    >>> shard_tables((9, 4), 3, [(2, 2), (4, None), (3, 0)]).parts
    ((range(2, 6, 3), range(6, 9)), (range(3, 6, 3),), (range(4, 6, 3), range(0, 2)))
    """
    assert sum(rows for rows, _ in tables) == shape[0]
    shared: list[list[range]] = [[] for _ in range(num_ranks)]
    in_full: list[list[range]] = [[] for _ in range(num_ranks)]
    begin = dealt = 0
    for rows, owner in tables:
        end = begin + rows
        if owner is None:
            for rank in range(num_ranks):
                shared[rank].append(range(min(begin + (rank - dealt) % num_ranks, end), end, num_ranks))
            dealt += rows
        else:
            in_full[owner].append(range(begin, end))
        begin = end
    parts = zip(shared, in_full, strict=True)
    return Sharding(shape, tuple(tuple(part for part in [*a, *b] if part) for a, b in parts), axis)


def at_stage(shape: Sequence[int], sharding: Sharding | None, stage: int, num_stages: int) -> Sharding:
    """Returns the sharding of a weight that only the ranks of one stage of a pipeline hold.

    Args:
      shape: Shape of the full weight.
      sharding: Sharding over the ranks of the stage; None if each of them holds the weight in full.
      stage: Index of the stage.
      num_stages: Number of stages.

    >>> columns = at_stage((3, 5), shard_along((3, 5), 1, 2, "model"), stage=1, num_stages=2)
    >>> columns.parts, columns.axis
    (((), (), (range(0, 3),), (range(3, 5),)), 'pipeline+model')
    """
    shape = tuple(int(size) for size in shape)
    if sharding is None:
        num_rows = shape[0] if shape else 1
        sharding = Sharding(shape, _between([(0, num_rows)]), axis="")
    nothing = ((),) * len(sharding.parts)
    parts = nothing * stage + sharding.parts + nothing * (num_stages - stage - 1)
    return dataclasses.replace(sharding, parts=parts, axis="+".join(("pipeline", *sharding.axes)))
