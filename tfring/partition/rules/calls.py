"""Functions, branches and loops: the results of their bodies."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

from tfring.partition import dims
from tfring.partition.constants import same_numbers
from tfring.partition.dims import Size
from tfring.partition.rules.table import NoRule, Walk, kept, refuse_if, rule, unscaled
from tfring.partition.types import (
    PER_MEAN,
    UNSCALED,
    Partial,
    Placement,
    Unplaced,
    Value,
    has_rows_of,
    is_drawn,
    is_partial,
    is_replicated,
    is_sharded,
    own_rows,
)

_LONGEST = 12  # most walks over the body of a loop until its values no longer change


@rule("PartitionedCall", "StatefulPartitionedCall", takes_row_indices=True)
def call(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Returns the results of the function. Its graph has more outputs if TensorFlow has also differentiated it."""
    return walk.body(op, ins, "f")[: len(op.outputs)]


@rule("IdentityN", takes_row_indices=True)
def identity_n(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Returns each input, as a tf.custom_gradient does."""
    return list(ins)


@rule("If", "StatelessIf", "Case", "StatelessCase", takes_row_indices=True)
def branches(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Joins the results of all branches, if all replicas take the same branch."""
    condition, *arguments = ins
    _refuse_divergent_condition(walk, condition)
    bodies: list[tuple[str, int | None]] = [("then_branch", None), ("else_branch", None)]
    if op.type in ("Case", "StatelessCase"):
        bodies = [("branches", i) for i in range(len(op.get_attr("branches")))]
    before, contents = walk.contents, []
    results = []
    for attribute, position in bodies:
        walk.contents = dict(before)
        results.append(walk.body(op, arguments, attribute, position))
        contents.append(walk.contents)

    def of_any(position: Any, values: Iterable[Value]) -> Value:
        return functools.reduce(lambda a, b: joined(walk, op, position, a, b), values)

    handles = {handle: None for each in contents for handle in each}
    walk.contents = {handle: of_any("", [each.get(handle, Value(None)) for each in contents]) for handle in handles}
    return [of_any(i, values) for i, values in enumerate(zip(*results, strict=True))]


@rule("While", "StatelessWhile", takes_row_indices=True)
def while_(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Walks over the body until the placements of its variables no longer change."""
    is_same = walk.unchanged(op)
    values = [value if same else _without_numbers(walk, op, value) for value, same in zip(ins, is_same, strict=True)]
    for _ in range(_LONGEST):
        before = dict(walk.contents)
        results = walk.body(op, values, "body")
        merged = [
            value if same else _without_numbers(walk, op, joined(walk, op, i, value, result))
            for i, (value, result, same) in enumerate(zip(values, results, is_same, strict=True))
        ]
        walk.contents = {
            handle: joined(walk, op, "", content, before.get(handle, Value(None)))
            for handle, content in walk.contents.items()
        }
        if merged == values and walk.contents == before:
            break
        values = merged
    else:
        raise NoRule
    [condition] = walk.body(op, values, "cond")
    _refuse_divergent_condition(walk, condition)
    return values


def _refuse_divergent_condition(walk: Walk, condition: Value) -> None:
    """Raises NoRule unless a condition is the same on all replicas."""
    refuse_if(not is_replicated(condition))
    unscaled(walk, [condition])


def _without_numbers(walk: Walk, op: Any, value: Value) -> Value:
    """Returns a value without known integers, as they may change in a loop. Numbers of rows keep their scale."""
    if value.const is None or value.is_list:
        return value
    scale = value.over(walk.rows)
    if scale is None:
        return Value(value.shape, Unplaced(op))
    return dataclasses.replace(value, const=None, scale=scale)


def joined(walk: Walk, op: Any, position: Any, a: Value, b: Value) -> Value:
    """Returns the value of a tensor that is either of two."""
    if a == b:
        return a
    result = _joined(walk, op, position, a, b)
    is_held = a.is_held if a.is_held == b.is_held else None
    return dataclasses.replace(result, is_held=is_held) if is_partial(result) else result


def _joined(walk: Walk, op: Any, position: Any, a: Value, b: Value) -> Value:
    is_same = same_numbers(a.const, b.const) and a.is_total == b.is_total
    if not is_same and not (a.is_empty or b.is_empty):
        a, b = _without_numbers(walk, op, a), _without_numbers(walk, op, b)
    for value, other in ((a, b), (b, a)):
        if isinstance(value.placement, Unplaced):
            return value
        if value.is_empty or (value.is_zero and not other.is_zero and _fits(walk, value, other)):
            return _like_zero(other, value)
    shape = _joined_shape(f"open:{walk.label(op)}/{position}", a.shape, b.shape)
    if own_rows(a, walk.rows) != own_rows(b, walk.rows) and a.placement == b.placement:
        return Value(shape, Unplaced(op))  # either of different rows
    if a.placement == b.placement and a.scale == b.scale:
        const = a.const if is_same else None
        points = a.indexed_rows if a.indexed_rows == b.indexed_rows else None
        if points != a.indexed_rows or points != b.indexed_rows:
            return Value(shape, Unplaced(op))
        is_zero, is_uniform = a.is_zero and b.is_zero, a.is_uniform and b.is_uniform
        return Value(
            *(shape, a.placement, a.scale, const, points),
            is_zero=is_zero,
            is_uniform=is_uniform,
            handle=a.handle,
            is_list=a.is_list,
            is_total=const is not None and a.is_total,
        )
    placement: Placement = Unplaced(op)
    for value, other in ((a, b), (b, a)):
        if is_replicated(value) and is_drawn(other) and value.scale == other.scale == UNSCALED:
            return dataclasses.replace(other, shape=shape, is_zero=False)
        # A replicated value combined with parts of a mean, as in a sum.
        if is_replicated(value) and other.placement == Partial() and _is_mean(value, other):
            return kept(walk, other, shape, none_of=None, is_zero=False)
        if is_replicated(value) and is_sharded(other) and value.scale == other.scale == UNSCALED:
            placement = Unplaced(op)
    return Value(shape, placement)


def _is_mean(value: Value, other: Value) -> bool:
    return other.scale == PER_MEAN and value.scale == UNSCALED


def _fits(walk: Walk, zero: Value, other: Value) -> bool:
    """Returns True if zeros may replace another value: for rows, the same rows; never for numbers of rows."""
    if other.indexed_rows is not None:
        return False
    if is_sharded(other) and not other.is_list and zero.shape is not None:
        is_alike = zero.is_uniform or zero.placement == other.placement
        return is_sharded(zero) and is_alike and own_rows(zero, walk.rows) == own_rows(other, walk.rows)
    if other.is_list and not has_rows_of(zero, other):
        return False
    return is_replicated(zero) or zero.placement == other.placement


def _like_zero(value: Value, zero: Value) -> Value:
    return value if value.shape is not None else dataclasses.replace(value, shape=zero.shape)


def _joined_shape(name: str, a: Any, b: Any) -> tuple[Size, ...] | None:
    if a is None or b is None or len(a) != len(b):
        return a if b is None else b if a is None else None
    return tuple(x if x == y else dims.symbol(f"{name}/{i}") for i, (x, y) in enumerate(zip(a, b, strict=True)))
