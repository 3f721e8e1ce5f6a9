"""Weights that some ranks hold and the others not at all: those of a stage of a pipeline. A pure plan.

```
[3, 5] of 4 ranks, owned by 2 from rank 2 on      ranks 0, 1: nothing     rank 2: columns 0 1 2     rank 3: 3 4
```
"""

from __future__ import annotations

import dataclasses

from tfring.reduction.cuts import Cut
from tfring.reduction.placement import Placement


@dataclasses.dataclass(frozen=True)
class Owned:
    """A weight that some ranks hold, in full or sharded, and the others not at all; has the interface of `Cut`.

    Attributes:
      shape: of the full weight.
      owner: the rank that holds it, or the first of those that do.
      shards: its cut for the `owners` ranks from `owner` on; None for one that holds it in full.
      owners: how many they are.
    """

    shape: tuple[int, ...]
    owner: int
    shards: Cut | Placement | None = None
    owners: int = 1

    @property
    def lined_up(self) -> tuple[int, ...]:
        """Returns the shape along one of whose dimensions it is cut."""
        return self.shape or (1,) if self.shards is None else self.shards.lined_up

    @property
    def dimension(self) -> int:
        """Returns the dimension along which it is cut."""
        return 0 if self.shards is None else self.shards.dimension

    def _holds(self, rank: int) -> bool:
        return self.owner <= rank < self.owner + self.owners

    def shape_of(self, rank: int) -> tuple[int, ...]:
        """Returns the shape of what a rank holds.

        >>> Owned((3, 2), 1).shape_of(1), Owned((3, 2), 1).shape_of(0), Owned((), 1).shape_of(0)
        ((3, 2), (0, 2), (0,))
        >>> from tfring.reduction.cuts import cut_along
        >>> columns = Owned((3, 5), 2, cut_along((3, 5), 1, 2), 2)
        >>> [columns.shape_of(rank) for rank in range(4)]
        [(3, 0), (3, 0), (3, 3), (3, 2)]
        """
        if self._holds(rank):
            return self.shape if self.shards is None else self.shards.shape_of(rank - self.owner)
        return (*self.lined_up[: self.dimension], 0, *self.lined_up[self.dimension + 1 :])

    def slices(self, rank: int) -> tuple[slice, ...]:
        """Returns a rank's slices of the dimension along which it is cut."""
        if self.shards is not None and self._holds(rank):
            return self.shards.slices(rank - self.owner)
        return (slice(0, self.lined_up[0] if self._holds(rank) else 0),)
