"""Numbers the rows of sharded tables so that one division tells which rank holds a row, and where. Pure.

```
interleaved    number = row of its rank * ranks + rank        rank 2 of 3 holds rows 2 5 8: numbers 2 5 8
range          number = rank * rows of a rank + row           rank 2 of 3 holds rows 8 9:   numbers 8 9
```

So the rows of a single table are numbered in their order. If other tables lie before it, or one rank holds all of it,
its numbers begin elsewhere and increase by a step:

```
a, in full at rank 2; b, interleaved; c, in full at rank 0

rank 0   b0 b3 c0 c1 c2      numbers 0 3 6 9 12      c begins at 6, by steps of 3
rank 1   b1                          1               b begins at 0, by steps of 1
rank 2   b2 a0 a1                    2 5 8           a begins at 5, by steps of 3
```
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from tfring.sharding import Sharding


class RowNumbers:
    """The numbers of rows of tables that lie one after another.

    Args:
      sharding: The sharding of all tables together, by rows.
      sizes: Number of rows of each table.

    Attributes:
      firsts: The number of the first row of each table.
      steps: The step from a number to the next in each table.
      end: An exclusive upper bound of the numbers.

    >>> from tfring.sharding import shard_table, shard_tables
    >>> numbers = RowNumbers(shard_tables((9, 4), 3, [(2, 2), (4, None), (3, 0)]), [2, 4, 3])
    >>> numbers.firsts, numbers.steps, numbers.end
    ([5, 0, 6], [3, 1, 3], 13)
    """

    def __init__(self, sharding: Sharding, sizes: Sequence[int]) -> None:
        held = [part for parts in sharding.parts for part in parts]
        self._is_interleaved = any(part.step > 1 for part in held)
        num_ranks, rows_a_rank = len(sharding.parts), max(1, *map(sharding.count, range(len(sharding.parts))))
        self._divisor = num_ranks if self._is_interleaved else rows_a_rank
        numbers = {}  # of the first two rows of each range: among them are the first two of each table
        for rank, parts in enumerate(sharding.parts):
            filled = 0
            for part in parts:
                for place, row in enumerate(part[:2], filled):
                    numbers[row] = place * num_ranks + rank if self._is_interleaved else rank * rows_a_rank + place
                filled += len(part)
        begins = [*itertools.accumulate(sizes[:-1], initial=0)]
        self.firsts = [numbers.get(begin, 0) for begin in begins]
        self.steps = [
            numbers[begin + 1] - numbers[begin] if size > 1 else 1 for begin, size in zip(begins, sizes, strict=True)
        ]
        of_tables = zip(self.firsts, self.steps, sizes, strict=True)
        self.end = 1 + max(first + step * (size - 1) for first, step, size in of_tables)

    def owner(self, numbers: Any) -> Any:
        """Returns the rank that holds each row, for an int, an array or a tensor.

        >>> from tfring.sharding import shard_table
        >>> [RowNumbers(shard_table((10, 4), 3, kind), [10]).owner(7) for kind in ("interleaved", "range")]
        [1, 1]
        """
        return numbers % self._divisor if self._is_interleaved else numbers // self._divisor

    def row_of_owner(self, numbers: Any) -> Any:
        """Returns the position of each row in the shard of its rank.

        >>> from tfring.sharding import shard_table
        >>> [RowNumbers(shard_table((10, 4), 3, kind), [10]).row_of_owner(7) for kind in ("interleaved", "range")]
        [2, 3]
        """
        return numbers // self._divisor if self._is_interleaved else numbers % self._divisor
