"""Placements: how a replica's tensor relates to the tensor that one process computes from the whole batch.

The names are those of torch's DTensor. `t_i` is the tensor of replica `i`, and `T` the tensor of one process:

| placement | meaning |
|---|---|
| Replicate | `t_i = T` |
| Shard(axis) | `t_i` is the rows of replica `i` in `T`, along an axis |
| Partial("sum") | `sum_i t_i = T`; analogously "max", "min" |
| Drawn | random numbers for all rows, different on each replica |
| Unplaced | none of these, or not known, with a reason |

Each holds up to a factor, the scale: if `n_i` of `n` rows belong to replica `i`, scale `n^k` means

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

from tfring.partition.dims import ROWS, Dim, Size, is_of_rows, symbols


class Replicate(NamedTuple):
    """The same tensor on all replicas."""


class Shard(NamedTuple):
    """The rows of a replica.

    Attributes:
      axis: The axis of the rows.
      blocks: Number of consecutive blocks with equal numbers of rows, as in `concat([fake, real], 0)`; or a tuple of
        the sizes of unequal blocks.
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
    """Random numbers that each replica has drawn by itself, and that one process draws once for all rows."""

    by: str = "replica"


class Unplaced(NamedTuple):
    """A tensor with no known relation to that of the whole batch.

    Attributes:
      op: The operation that made it so.
      reason: A key of `report.REASONS`; or "own" for results of tfring's own operations, which are declared before a
        step reads them.
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
    """Returns the scale of `x * y ** power` for `x` with scale `a` and `y` with scale `b`."""
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
      shape: Sizes in the whole batch; None if the rank is not known.
      placement: Placement of the replica's tensor.
      scale: Scale of the replica's tensor, see above.
      const: The integers in it, an array of sizes, if they are known. Numbers of rows are this replica's, unless
        `is_total`.
      is_total: Whether numbers of rows in `const` are those of the whole batch; None if some are.
      indexed_rows: If it holds numbers of rows, counted from this replica's first row: the number of these rows, "?" if
        it is not known.
      is_held: Whether a part belongs to a value that replicas hold in parts, such as the state of a metric, of which a
        replica without rows of the batch has a part as well. None for such a part combined with one of the batch, in a
        body.
      adds_to: The content of a variable when it was read, if this is that content, or that plus a part of the batch.
      none_of: For a part of a sum, the symbol of rows that a mask keeps; a replica without such rows holds zeros.
      is_zero: Whether it is zeros, which fit every scale.
      is_uniform: Whether all rows are equal, so that they fit any order of rows.
      handle: For a resource, a key of its variable.
      is_list: Whether it is a list of tensors. Its shape, placement and numbers are those of the stacked items; numbers
        are the same in each item.
      is_empty: For a list, whether it has no items yet.
    """

    shape: tuple[Size, ...] | None
    placement: Placement = _REPLICATE
    scale: Scale = UNSCALED
    const: Any = None
    indexed_rows: Any = None
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
        """Returns the scale; for numbers in `const`, the scale of the rows in them, None if they have several.

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
    """Returns True if all replicas hold the full value."""
    return isinstance(value.placement, Replicate)


def has_row_counts(value: Value, rows: set[str]) -> bool:
    """Returns True if a value holds numbers of a replica's rows."""
    if value.const is None or value.is_total:
        return False
    return any(name in rows for size in np.ravel(value.const) for name in symbols(size))


def is_drawn(value: Value) -> bool:
    """Returns True if each replica has drawn a value by itself."""
    return isinstance(value.placement, Drawn)


def kept_rows(scale: Scale) -> set[str]:
    """Returns the symbols in a scale of rows that masks keep; a replica may have none of these rows."""
    return {name for name, _ in scale if name != ROWS}


def own_rows(value: Value, rows: set[str]) -> str | None:
    """Returns the symbol of the rows of a value that a replica holds; None if it does not hold rows."""
    if not isinstance(value.placement, Shard) or value.shape is None:
        return None
    return row_symbol(value.shape[value.placement.axis], rows)


def has_rows_of(items: Value, other: Value) -> bool:
    """Returns True if the items of two lists have the same rows, if these are known, and no other known sizes."""
    if items.shape is None or other.shape is None:
        return True
    if is_sharded(items) != is_sharded(other) or len(items.shape) != len(other.shape):
        return False
    pairs = zip(items.shape[1:], other.shape[1:], strict=True)
    return all(a == b or not (_is_known(a) and _is_known(b)) for a, b in pairs)


def _is_known(size: Size) -> bool:
    return isinstance(size, int) or is_of_rows(size)


def row_symbol(size: Size, rows: set[str]) -> str | None:
    """Returns the symbol of rows in a size with exactly one such factor; otherwise None."""
    if not isinstance(size, Dim):
        return None
    found = [(name, power) for name, power in size.powers if name in rows]
    return found[0][0] if len(found) == 1 and found[0][1] == 1 else None
