"""Placements: how a replica's tensor belongs to the tensor that one process computes from the whole batch.

The words are those of torch's DTensor. With `t_i` what replica `i` holds and `T` what one process computes:

| placement | meaning |
|---|---|
| Replicate | `t_i = T` |
| Shard(axis) | `t_i` is the rows of replica `i` in `T`, along an axis |
| Partial("sum") | `sum_i t_i = T`; likewise "max", "min" |
| Drawn | random numbers for all rows, others on each replica |
| Unplaced | none of these, or nothing is known; it says why |

Each holds up to a factor, the scale: where `n_i` of `n` rows are replica `i`'s, scale `n^k` stands for

```
Replicate, Shard:  t_i (n_i / n)^k = T            a mean over a replica's rows is Partial("sum") of scale n^1,
Partial("sum"):    sum_i t_i (n_i / n)^k = T      a number of its rows Replicate of scale n^-1
```

Sizes are those of the whole batch, in terms of its rows `n`, of rows that a mask keeps, and of other open dimensions.
"""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from tfring.partition.dims import ROWS, Dim, Size, symbols


class Replicate(NamedTuple):
    """The same tensor on all replicas."""


class Shard(NamedTuple):
    """The rows of a replica.

    Attributes:
      axis: Along which rows lie.
      blocks: How many blocks of equally many rows lie one after another, as in `concat([fake, real], 0)`; or a tuple
        of the sizes of unequal ones.
    """

    axis: int
    blocks: Any = 1


class Partial(NamedTuple):
    """A part of a reduction over rows.

    Attributes:
      op: "sum", "max" or "min".
    """

    op: str = "sum"


class Drawn(NamedTuple):
    """Numbers that each replica has drawn by itself, where one process draws them once for all rows."""

    by: str = "replica"


class Unplaced(NamedTuple):
    """Not, or not known to be, of the whole batch.

    Attributes:
      op: The operation that made it so.
      reason: One of `report.REASONS`; or "own", which is of tfring's, and declared where a step reads it.
    """

    op: Any
    reason: str = "rows"


Placement = Replicate | Shard | Partial | Drawn | Unplaced

_REPLICATE = Replicate()

Scale = tuple[tuple[str, Fraction], ...]  # the exponent of each symbol of rows, without zeros

UNSCALED: Scale = ()


def scale(**exponents: int) -> Scale:
    """Returns the scale with an exponent for each symbol."""
    return tuple(sorted((name, Fraction(power)) for name, power in exponents.items() if power))


def times(a: Scale, b: Scale, power: Fraction | int = 1) -> Scale:
    """Returns the scale of `x * y ** power` for `x` of scale `a` and `y` of scale `b`."""
    exponents = dict(a)
    for name, exponent in b:
        exponents[name] = exponents.get(name, Fraction(0)) + exponent * power
    return tuple(sorted((name, exponent) for name, exponent in exponents.items() if exponent))


PER_MEAN = scale(**{ROWS: 1})
PER_COUNT = scale(**{ROWS: -1})


@dataclasses.dataclass(eq=False)
class Value:
    """A tensor of a step.

    Attributes:
      shape: Sizes in the whole batch; None where the rank is not known.
      placement: What a replica holds.
      scale: See above.
      const: The integers in it, an array of sizes, where they are known. Those of rows are this replica's, unless
        `is_total`.
      is_total: Whether numbers of rows in `const` are those of the whole batch; None where some are.
      points_into: How many rows there are of which it holds numbers, counted from this replica's first; "?" where it
        is not known.
      is_held: Whether a part is of what replicas hold in parts, such as a metric's state, of which one without rows of
        the batch has its part, too; None where it is such a part beside one of the batch, in a body.
      adds_to: What a variable held when it was read, where it is that, or that plus a part of the batch.
      none_of: Of a part of a sum, the symbol of rows that a mask keeps, without any of which a replica holds zeros.
      is_zero: Whether it is zeros, which fit every scale.
      is_uniform: Whether all rows are alike, so that they fit any order of rows.
      handle: Of a resource, which variable it is.
      is_list: Whether it is a list of tensors; its shape, placement and numbers are those of the stacked items, where
        numbers are the same in each.
      is_empty: Of a list, whether nothing was put in.
    """

    shape: tuple[Size, ...] | None
    placement: Placement = _REPLICATE
    scale: Scale = UNSCALED
    const: Any = None
    points_into: Any = None
    none_of: str | None = None
    is_zero: bool = False
    is_uniform: bool = False
    handle: Any = None
    is_list: bool = False
    is_empty: bool = False
    is_total: bool | None = False
    is_held: bool | None = False
    adds_to: Any = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Value):
            return NotImplemented
        pairs = [(getattr(self, field.name), getattr(other, field.name)) for field in dataclasses.fields(self)]
        return all(np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b for a, b in pairs)

    @property
    def rank(self) -> int:
        """Returns the number of dimensions."""
        assert self.shape is not None
        return len(self.shape)

    def over(self, rows: set[str]) -> Scale | None:
        """Returns the scale, of numbers in `const` that of the rows in them; None where they have several.

        Args:
          rows: The symbols of rows.
        """
        if self.const is None or self.is_total:
            return self.scale
        found = set()
        for size in np.ravel(self.const):
            powers = {name: -power for name, power in symbols(size).items() if name in rows}
            if size != 0:
                found.add(tuple(sorted((name, Fraction(power)) for name, power in powers.items())))
        return found.pop() if len(found) == 1 else UNSCALED if not found else None


def is_sharded(value: Value) -> bool:
    """Returns True if a replica holds rows of a value."""
    return isinstance(value.placement, Shard)


def is_partial(value: Value) -> bool:
    """Returns True if a replica holds a part of a reduction."""
    return isinstance(value.placement, Partial)


def is_replicated(value: Value) -> bool:
    """Returns True if all replicas hold a value."""
    return isinstance(value.placement, Replicate)


def has_numbers(value: Value, rows: set[str]) -> bool:
    """Returns True if a value holds numbers of a replica's rows."""
    if value.const is None or value.is_total:
        return False
    return any(name in rows for size in np.ravel(value.const) for name in symbols(size))


def is_drawn(value: Value) -> bool:
    """Returns True if each replica has drawn a value by itself."""
    return isinstance(value.placement, Drawn)


def kept_rows(scale: Scale) -> set[str]:
    """Returns the symbols in a scale of rows that masks keep, of which a replica may have none."""
    return {name for name, _ in scale if name != ROWS}


def own_rows(value: Value, rows: set[str]) -> str | None:
    """Returns the symbol of the rows that a replica holds of a value; None where it holds none."""
    if not isinstance(value.placement, Shard) or value.shape is None:
        return None
    return rows_in(value.shape[value.placement.axis], rows)


def rows_in(size: Size, rows: set[str]) -> str | None:
    """Returns the symbol of rows in a size that has one, once."""
    if not isinstance(size, Dim):
        return None
    found = [(name, power) for name, power in size.powers if name in rows]
    return found[0][0] if len(found) == 1 and found[0][1] == 1 else None
