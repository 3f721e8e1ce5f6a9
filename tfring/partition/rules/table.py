"""The table of rules, and functions that rules share: combinations of scales, and checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import Any, Protocol

from tfring.partition.dims import ROWS, Size
from tfring.partition.types import (
    PER_MEAN,
    UNSCALED,
    Partial,
    Placement,
    Replicate,
    Scale,
    Shard,
    Value,
    is_partial,
    is_replicated,
    is_sharded,
    kept_rows,
    own_rows,
    row_symbol,
    times,
)


class NoRule(Exception):
    """The operation gives no known result of the whole batch for such values."""


class Walk(Protocol):
    """The walk over a graph, as a rule sees it.

    Attributes:
      rows: The symbols of rows.
      contents: A dict that maps each variable that the step has written to its value.
      written_alike: The handles of variables that are written with the value of one process, because nothing makes them
        the same on all replicas after the step, or a branch or loop reads them.
      updated: The handles of variables that tfring's own operations read or write, such as those of an optimizer.
    """

    rows: set[str]
    contents: dict[Any, Value]
    written_alike: set[Any]
    updated: set[Any]

    def shape(
        self, tensor: Any, known: dict[int, Size] | None = None, like: Sequence[Size] | None = None
    ) -> tuple[Size, ...] | None:
        """Returns the sizes of an output: known ones, static ones, those of `like`, or new symbols."""

    def new_rows(self, op: Any, of: Any = None) -> str:
        """Returns a symbol for rows that an operation makes. The same `of` gives the same symbol."""

    def body(self, op: Any, ins: Sequence[Value], attribute: str, position: int | None = None) -> list[Value]:
        """Walks the function of an attribute of an operation, or one function of several; returns its outputs."""

    def label(self, op: Any) -> str:
        """Returns the name of an operation in symbols: the same for twins, different for each call of a function."""

    def unchanged(self, op: Any) -> list[bool]:
        """Returns for each variable of a loop whether its body returns it unchanged."""


Rule = Callable[[Walk, Any, Sequence[Value]], list[Value]]

RULES: dict[str, Rule] = {}


def rule(*types: str, takes_row_indices: bool = False) -> Callable[[Rule], Rule]:
    """Adds a rule for operations of these types to the table.

    Args:
      *types: Types of the operations.
      takes_row_indices: Whether the rule accepts numbers of rows counted from each replica's first row, and determines
        which results are such numbers. Other rules get numbers of rows of the whole batch.
    """

    def add(function: Rule) -> Rule:
        def of_all_rows(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
            refuse_row_indices(ins)
            return function(walk, op, ins)

        for name in types:
            assert name not in RULES, name
            RULES[name] = function if takes_row_indices else of_all_rows
        return function

    return add


def refuse_if(condition: Any) -> None:
    """Raises NoRule if a condition is true."""
    if condition:
        raise NoRule


def shape_of(value: Value) -> tuple[Size, ...]:
    """Returns the shape of a value; raises NoRule if it is not known."""
    if value.shape is None:
        raise NoRule
    return value.shape


def scale_of(walk: Walk, value: Value) -> Scale:
    """Returns the scale of a value, including that of numbers of rows."""
    found = value.over(walk.rows)
    if found is None:
        raise NoRule
    return found


def unscaled(walk: Walk, values: Iterable[Value]) -> None:
    """Raises NoRule unless all values are those of the whole batch, or rows of them."""
    for value in values:
        refuse_if(is_partial(value))
        refuse_if(not value.is_zero and scale_of(walk, value) != UNSCALED)


def replicated(walk: Walk, values: Iterable[Value]) -> None:
    """Raises NoRule unless all replicas hold these values of one process."""
    values = list(values)
    refuse_if(any(map(is_sharded, values)))
    unscaled(walk, values)


def summed(walk: Walk, values: Sequence[Value]) -> tuple[Placement, Scale]:
    """Returns the placement and scale of a sum, or another linear combination, of values without rows.

    `T` on all replicas is `sum_i t_i (n_i / n)` with `t_i = T`, so it can be added to a mean over rows.
    """
    counted = _counted(values)
    parts = [value for value in counted if is_partial(value)]
    if not counted:
        return Replicate(), UNSCALED
    first = (parts or counted)[0]
    scale = scale_of(walk, first)
    for value in counted:
        mine = scale_of(walk, value)
        if value.placement == first.placement and mine == scale:
            continue
        if parts and first.placement == Partial("sum") and is_replicated(value) and _is_mean_of(scale, mine):
            continue
        raise NoRule
    return first.placement, scale


def _is_mean_of(scale: Scale, mine: Scale) -> bool:
    """Returns True if a replicated value with scale `mine` is also a part with this scale.

    It is not a mean over rows that a mask keeps: if there are none, no replica holds it.
    """
    return times(scale, mine, -1) == PER_MEAN


def common_scale(walk: Walk, values: Iterable[Value]) -> Scale:
    """Returns the common scale of values. Zeros fit any scale."""
    counted = _counted(values)
    scales = {scale_of(walk, value) for value in counted}
    refuse_if(len(scales) > 1)
    scale = scales.pop() if scales else UNSCALED
    is_mixed = any(map(is_replicated, counted)) and not all(map(is_replicated, counted))
    if is_mixed and kept_rows(scale) - {own_rows(value, walk.rows) for value in counted}:
        raise NoRule  # a replica with none of these rows holds zeros of one, but not of the other
    return scale


def scale_of_product(walk: Walk, values: Sequence[Value], is_ratio: bool = False) -> Scale:
    """Returns the scale of a product, or of the first divided by the second."""
    scale = scale_of(walk, values[0])
    for value in values[1:]:
        scale = times(scale, scale_of(walk, value), -1 if is_ratio else 1)
    of_any = set().union(*(kept_rows(scale_of(walk, value)) for value in values))
    refuse_if(of_any - kept_rows(scale))  # zero times infinity, on a replica that has none of these rows
    return scale


def scale_of_power(walk: Walk, value: Value, exponent: Fraction | int) -> Scale:
    """Returns the scale of `f(x)` with `f(c x) = c^exponent f(x)` for `c > 0`."""
    scale = scale_of(walk, value)
    is_of_zero = exponent == 0 or (exponent < 0 and not is_replicated(value))
    refuse_if(is_of_zero and kept_rows(scale))  # c is 0 on a replica that has none of these rows
    return times(UNSCALED, scale, exponent)


def _counted(values: Iterable[Value]) -> list[Value]:
    return [value for value in values if not value.is_zero]


def kept(
    walk: Walk, value: Value, shape: tuple[Size, ...] | None, placement: Placement | None = None, **changes: Any
) -> Value:
    """Returns a value with the scale of another: a view of it, or a result that is linear in it."""
    names = ("none_of", "is_zero", "is_uniform")
    fields = {"scale": scale_of(walk, value), **{name: getattr(value, name) for name in names}, **changes}
    return Value(shape, value.placement if placement is None else placement, **fields)


def refuse_extremes(values: Iterable[Value]) -> None:
    """Raises NoRule if a value is a maximum or a minimum over rows, because sums of these are not."""
    refuse_if(any(isinstance(value.placement, Partial) and value.placement.op != "sum" for value in values))


def shard_of(value: Value) -> Shard:
    """Returns the placement of a value that has rows."""
    assert isinstance(value.placement, Shard)
    return value.placement


def beside(walk: Walk, values: Iterable[Value]) -> None:
    """Raises NoRule if values have different rows, such as those of two masks, even if their numbers are equal."""
    found = {
        row_symbol(value.shape[shard_of(value).axis], walk.rows)
        for value in values
        if is_sharded(value) and value.shape
    }
    refuse_if(len(found - {None}) > 1)


def refuse_kept_rows(walk: Walk, value: Value) -> None:
    """Raises NoRule for rows that a mask keeps: a replica may hold none, which some of TensorFlow's kernels refuse."""
    refuse_if(is_sharded(value) and (own_rows(value, walk.rows) or ROWS) != ROWS)


def refuse_row_indices(values: Iterable[Value]) -> None:
    """Raises NoRule if a value holds numbers of rows, which are counted from each replica's first."""
    if any(value.indexed_rows is not None for value in values):
        raise NoRule
