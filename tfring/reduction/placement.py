"""Plans which rank owns which row of a sharded table: pure.

```
10 rows of 3 ranks, interleaved    rank 0: 0 3 6 9       rank 1: 1 4 7      rank 2: 2 5 8
                    range          rank 0: 0 1 2 3       rank 1: 4 5 6 7    rank 2: 8 9
```

Ids are often sorted by how frequent they are; interleaved, every rank then owns as many frequent ones. By range a
rank owns rows that lie together in a file.

Where several tables lie one after another, some may each be whole at one rank, which has them behind its other rows:

```
a, whole at rank 2; b, interleaved; c, whole at rank 0

all         a0 a1 | b0 b1 b2 b3 | c0 c1 c2
rank 0              b0       b3   c0 c1 c2      c0 is row 2 of rank 0: its number is 2 * 3 + 0
rank 1                 b1
rank 2      a0 a1         b2                    held as b2 a0 a1: a0 is row 1 of rank 2, number 1 * 3 + 2
```

The number of a row is `row * ranks + rank`, of where it lies. So interleaved rows are numbered 0, 1, 2 and so on, as
they come, and those of a whole table by steps of as many as there are ranks.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

from tfring.errors import ConfigurationError
from tfring.reduction.cuts import Cut, cut_along

BY_ROWS = ("interleaved", "range")
KINDS = (*BY_ROWS, "columns")


def place(shape: tuple[int, int], world_size: int, kind: str) -> Placement | Cut:
    """Returns the placement of a table: by rows, or by columns of all rows.

    Args:
      shape: of the full table, rows first.
      world_size: how many ranks share it.
      kind: one of `KINDS`.

    Raises:
      ConfigurationError: for another kind.

    >>> place((10, 4), 3, "columns").shape_of(0)
    (10, 2)
    """
    if kind not in KINDS:
        raise ConfigurationError(f"`placement` is one of {KINDS}. Received: placement={kind!r}")
    return cut_along(shape, 1, world_size) if kind == "columns" else Placement(shape, world_size, kind)


class _Table(NamedTuple):
    """Its rows among those of all, the rank that owns it whole or None, and the number of its first row."""

    begin: int
    end: int
    owner: int | None
    number: int


@dataclasses.dataclass(frozen=True)
class Placement:
    """The rows of a table on each rank; has the interface of `Cut`.

    Args:
      shape: of the full table, rows first.
      world_size: how many ranks share it.
      kind: "interleaved" or "range".
      tables: of several tables, interleaved: for each how many rows it has, and the rank that owns it whole or None.
    """

    shape: tuple[int, ...]
    world_size: int
    kind: str = "interleaved"
    tables: tuple[tuple[int, int | None], ...] = ()

    def __post_init__(self) -> None:
        assert self.kind in BY_ROWS and (self.kind == "interleaved" or not self.tables)
        assert not self.tables or sum(rows for rows, _ in self.tables) == self.shape[0]

    @property
    def lined_up(self) -> tuple[int, ...]:
        """Returns the shape along whose first dimension it is sharded."""
        return self.shape

    @property
    def dimension(self) -> int:
        """Returns that first dimension."""
        return 0

    @functools.cached_property
    def _tables(self) -> tuple[_Table, ...]:
        tables = self.tables or ((self.shape[0], None),)
        divided = sum(rows for rows, owner in tables if owner is None)
        held = [len(range(rank, divided, self.world_size)) for rank in range(self.world_size)]
        begin, number, found = 0, 0, []
        for rows, owner in tables:
            if owner is None:
                found.append(_Table(begin, begin + rows, None, number))
                number += rows
            else:
                found.append(_Table(begin, begin + rows, owner, held[owner] * self.world_size + owner))
                held[owner] += rows
            begin += rows
        return tuple(found)

    @property
    def _rows_a_rank(self) -> int:
        return -(-self.shape[0] // self.world_size)

    def slices(self, rank: int) -> tuple[slice, ...]:
        """Returns the rows that a rank owns, in its order.

        >>> Placement((10, 4), 3).slices(1), Placement((10, 4), 3, "range").slices(2)
        ((slice(1, 10, 3),), (slice(8, 10, 1),))
        >>> Placement((9, 4), 3, tables=((2, 2), (4, None), (3, 0))).slices(2)
        (slice(4, 6, 3), slice(0, 2, 1))
        """
        own = [self._rows(table, rank) for table in sorted(self._tables, key=lambda table: table.owner is not None)]
        return tuple(rows for rows in own if rows.start < rows.stop) or (slice(0, 0, 1),)

    def _rows(self, table: _Table, rank: int) -> slice:
        """Returns the rows of one table that a rank owns."""
        begin, end, owner, number = table
        if owner is not None:
            return slice(begin, end if rank == owner else begin, 1)
        if self.kind == "interleaved":
            return slice(min(begin + (rank - number) % self.world_size, end), end, self.world_size)
        begin = min(rank * self._rows_a_rank, end)
        return slice(begin, min(begin + self._rows_a_rank, end), 1)

    def part_within(self, rank: int, begin: int, end: int) -> tuple[slice, ...]:
        """Returns a rank's slice of rows `begin` to `end` of one table, counted from `begin`.

        >>> Placement((10, 4), 3).part_within(1, 5, 8), Placement((10, 4), 3, "range").part_within(1, 5, 9)
        ((slice(2, 3, 3),), (slice(0, 3, 1),))
        """
        [rows] = [self._rows(table, rank) for table in self._tables if table.begin <= begin < table.end]
        first = rows.start + max(0, -(-(begin - rows.start) // rows.step)) * rows.step - begin
        return (slice(first, max(first, min(rows.stop, end) - begin), rows.step),)

    def shape_of(self, rank: int) -> tuple[int, ...]:
        """Returns the shape of a rank's shard.

        >>> Placement((10, 4), 3).shape_of(0), Placement((9, 4), 3, tables=((2, 2), (4, None), (3, 0))).shape_of(0)
        ((4, 4), (5, 4))
        """
        return (sum(len(range(rows.start, rows.stop, rows.step)) for rows in self.slices(rank)), *self.shape[1:])

    # -- numbers of rows ---------------------------------------------------------------------------------------------

    @property
    def numbers(self) -> list[tuple[int, int]]:
        """Returns for each table the number of its first row, and the step to the number of the next.

        >>> Placement((9, 4), 3, tables=((2, 2), (4, None), (3, 0))).numbers
        [(5, 3), (0, 1), (6, 3)]
        """
        return [(table.number, 1 if table.owner is None else self.world_size) for table in self._tables]

    @property
    def end(self) -> int:
        """Returns an exclusive upper bound of row numbers."""
        steps = [step for _, step in self.numbers]
        return max(t.number + (t.end - t.begin) * step for t, step in zip(self._tables, steps, strict=True))

    def owner(self, numbers: Any) -> Any:
        """Returns the rank that owns each row: of an int, an array or a tensor.

        >>> Placement((10, 4), 3).owner(7), Placement((10, 4), 3, "range").owner(7)
        (1, 1)
        """
        return numbers % self.world_size if self.kind == "interleaved" else numbers // self._rows_a_rank

    def row_of_owner(self, numbers: Any) -> Any:
        """Returns the row of its owner's shard that holds each row.

        >>> Placement((10, 4), 3).row_of_owner(7), Placement((10, 4), 3, "range").row_of_owner(7)
        (2, 3)
        """
        return numbers // self.world_size if self.kind == "interleaved" else numbers % self._rows_a_rank

