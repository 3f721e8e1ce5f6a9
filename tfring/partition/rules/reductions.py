"""Reductions over axes, including or excluding that of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tfring.partition.rules.table import (
    NoRule,
    Walk,
    kept,
    refuse_extremes,
    refuse_if,
    rule,
    scale_of,
    scale_of_power,
    shard_of,
    unscaled,
)
from tfring.partition.types import (
    Partial,
    Replicate,
    Shard,
    Value,
    is_partial,
    is_sharded,
    row_symbol,
    times,
)

_OVER_ROWS = {"Sum": "sum", "Mean": "sum", "Max": "max", "Min": "min", "All": "min", "Any": "max"}


@rule(*_OVER_ROWS, "Prod", "EuclideanNorm")
def reduce(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Reduces over axes. A sum over rows is a part of the full sum; a mean is a part with scale n^1."""
    value, axes = ins
    if value.shape is None or axes.const is None:
        raise NoRule
    keeps, rank = op.get_attr("keep_dims"), value.rank
    over = {int(axis) % rank for axis in np.ravel(axes.const)} if rank else set()
    shape = tuple(1 if axis in over else size for axis, size in enumerate(value.shape) if keeps or axis not in over)
    if isinstance(value.placement, Partial):
        reduced = value.placement.op
        is_same = op.type in ("Sum", "Mean") if reduced == "sum" else _OVER_ROWS.get(op.type) == reduced
        refuse_if(over and (not is_same or (op.type == "Mean" and op.outputs[0].dtype.is_integer)))
        return [kept(walk, value, shape)]
    if op.type == "Prod" and over:
        unscaled(walk, [value])
    is_zero = value.is_zero and (op.type in ("Sum", "Mean") or not over)  # other reductions of no entries are not 0
    if not is_sharded(value):
        return [kept(walk, value, shape, is_zero=is_zero)]
    axis = shard_of(value).axis
    if axis not in over:
        axis -= 0 if keeps else sum(other < axis for other in over)
        return [kept(walk, value, shape, Shard(axis, shard_of(value).blocks), is_zero=is_zero)]
    refuse_if(op.type not in _OVER_ROWS or (op.type == "Mean" and op.outputs[0].dtype.is_integer))  # rounds
    scale = scale_of(walk, value)
    if op.type == "Mean":
        # Along other axes a replica holds all entries.
        count = value.shape[axis]
        per_count = Value((), const=_scalar(count)).over(walk.rows)
        if per_count is None or row_symbol(count, walk.rows) is None:
            raise NoRule
        scale = times(scale, per_count, -1)
    elif op.type in ("Max", "Min", "All", "Any"):
        unscaled(walk, [value])
    return [Value(shape, Partial(_OVER_ROWS[op.type]), scale, is_zero=is_zero)]


def _scalar(size: Any) -> Any:
    array = np.empty((), object)
    array[()] = size
    return array


@rule("L2Loss")
def l2_loss(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Computes half the sum of squares."""
    [value] = ins
    refuse_if(is_partial(value))
    scale = scale_of_power(walk, value, 2)
    return [Value((), Partial() if is_sharded(value) else Replicate(), scale, is_zero=value.is_zero)]


@rule("ArgMax", "ArgMin")
def arg_max(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Finds the index of the largest or smallest entry along an axis other than that of rows."""
    value, axis = ins
    if is_partial(value) or axis.const is None or not value.shape:
        raise NoRule
    over = int(np.ravel(axis.const)[0]) % value.rank
    shape = tuple(size for i, size in enumerate(value.shape) if i != over)
    scale_of_power(walk, value, 0)  # all entries have one scale
    if not is_sharded(value):
        return [Value(shape)]
    refuse_if(shard_of(value).axis == over)
    return [Value(shape, Shard(shard_of(value).axis - (over < shard_of(value).axis), shard_of(value).blocks))]


@rule("BiasAddGrad")
def bias_add_gradient(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Sums over all axes except that of the channels."""
    [value] = ins
    refuse_if(value.shape is None)
    refuse_extremes(ins)
    channels = 1 if op.get_attr("data_format") == b"NCHW" else value.rank - 1
    if is_sharded(value) and shard_of(value).axis != channels:
        return [kept(walk, value, walk.shape(op.outputs[0]), Partial(), is_uniform=False)]
    refuse_if(is_sharded(value))
    return [kept(walk, value, walk.shape(op.outputs[0]))]
