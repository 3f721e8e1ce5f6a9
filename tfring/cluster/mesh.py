"""The axes along which workers divide the work: rows of a batch, parts of layers, stages of a model. Plans only.

```
Mesh(data=2, model=2)       model: one layer's parts          Mesh(data=2, pipeline=2)     rank 0 ─► rank 2
                            rank 0 ── rank 1                                               rank 1 ─► rank 3
              data: rows      │         │                              data: rows            (stages 1 and 2)
                            rank 2 ── rank 3
```

The ranks of the model axis are consecutive, on one host if possible, because they exchange most.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

from tfring.errors import ConfigurationError

AXES = ("pipeline", "data", "model")  # from the axis that varies slowest with the rank to the fastest


class Coordinates(NamedTuple):
    """The position of a rank along each axis."""

    pipeline: int
    data: int
    model: int


@dataclasses.dataclass(frozen=True)
class Mesh:
    """Arranges the workers of a `tfring.RingStrategy` along axes; `world_size` is the product of all sizes.

    Args:
      data: Number of replicas of the model. Each replica trains on its share of the rows of a batch. Defaults to the
        largest number that `world_size` allows.
      model: Number of workers over which the sharded layers of a replica are divided. Defaults to 1.
      pipeline: Number of stages of a `tfring.parallel.Pipeline`, each on its own workers. Defaults to 1.

    Raises:
      ConfigurationError: If a size is not an integer of at least 1.

    >>> Mesh(model=2).of(world_size=8)
    Mesh(data=4, model=2, pipeline=1)
    """

    data: int | None = None
    model: int = 1
    pipeline: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            size = getattr(self, axis)
            is_open = axis == "data" and size is None
            if not is_open and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
                raise ConfigurationError(f"Size `{axis}` of the mesh is {size!r}, not an integer of at least 1.")

    def of(self, world_size: int) -> Mesh:
        """Returns this mesh for a number of workers, with the size of its data axis filled in.

        Raises:
          ConfigurationError: If the product of its sizes is not `world_size`.
        """
        data = self.data or world_size // (self.model * self.pipeline)
        mesh = Mesh(data or 1, self.model, self.pipeline)
        if mesh.size != world_size:
            raise ConfigurationError(
                f"{self} has places for {mesh.size} workers, but there are {world_size}: data x model x pipeline must "
                f"be world_size. Start {mesh.size} workers, or give the mesh other sizes."
            )
        return mesh

    @property
    def size(self) -> int:
        """The number of workers, if `data` is given.

        >>> Mesh(data=2, model=2).size
        4
        """
        return (self.data or 1) * self.model * self.pipeline

    @property
    def is_data_only(self) -> bool:
        """True if each worker holds the full model."""
        return self.model == self.pipeline == 1

    def size_along(self, axis: str) -> int:
        """Returns the number of ranks along an axis, along several axes ("pipeline+model"), or in the "world".

        >>> mesh = Mesh(data=2, model=3, pipeline=4)
        >>> mesh.size_along("model"), mesh.size_along("pipeline+model"), mesh.size_along("world")
        (3, 12, 24)
        """
        return math.prod(getattr(self, each) or 1 for each in axes_of(axis))

    def coordinates(self, rank: int) -> Coordinates:
        """Returns the coordinates of a rank.

        >>> Mesh(data=2, model=2, pipeline=2).coordinates(5)
        Coordinates(pipeline=1, data=0, model=1)
        """
        rest, model = divmod(rank, self.model)
        pipeline, data = divmod(rest, self.data or 1)
        return Coordinates(pipeline, data, model)

    def coordinate(self, axis: str, rank: int) -> int:
        """Returns the position of a rank along an axis, along several axes, or in the "world".

        >>> Mesh(data=2, model=2, pipeline=2).coordinate("pipeline+model", 5)
        3
        """
        here, number = self.coordinates(rank), 0
        for each in axes_of(axis):
            number = number * self.size_along(each) + getattr(here, each)
        return number

    def place(self, rank: int) -> str:
        """Describes a rank's part of the model for messages, counted from 1, along the axes of more than one rank.

        >>> Mesh(data=2, pipeline=3).place(5)
        'stage 3 of 3 of replica 2'
        """
        here = self.coordinates(rank)
        places = []
        if self.model > 1:
            places.append(f"part {here.model + 1} of {self.model}")
        if self.pipeline > 1:
            places.append(f"stage {here.pipeline + 1} of {self.pipeline}")
        if self.size_along("data") > 1:
            places.append(f"replica {here.data + 1}")
        return " of ".join(places)

    def rank(self, coordinates: Coordinates) -> int:
        """Returns the rank at these coordinates.

        >>> Mesh(data=2, model=2, pipeline=2).rank(Coordinates(pipeline=1, data=0, model=1))
        5
        """
        return (coordinates.pipeline * (self.data or 1) + coordinates.data) * self.model + coordinates.model

    def ranks(self, axis: str, rank: int) -> tuple[int, ...]:
        """Returns the ranks along one axis or several axes through a rank, in the order of their coordinates.

        >>> Mesh(data=2, model=2).ranks("data", 3), Mesh(data=2, model=2).ranks("model", 3)
        ((1, 3), (2, 3))
        """
        fixed = [each for each in AXES if each not in axes_of(axis)]
        here = self.coordinates(rank)
        there = map(self.coordinates, range(self.size))
        return tuple(self.rank(c) for c in there if all(getattr(c, each) == getattr(here, each) for each in fixed))


def axes_of(axis: str) -> tuple[str, ...]:
    """Returns the axes meant by "world" or by names joined by "+", from the slowest to the fastest.

    >>> axes_of("pipeline+model"), axes_of("world")
    (('pipeline', 'model'), ('pipeline', 'data', 'model'))
    """
    return AXES if axis == "world" else tuple(each for each in AXES if each in axis.split("+"))
