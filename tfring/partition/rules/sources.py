"""Constants, variables, random numbers, and sums over replicas."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfring.partition import constants
from tfring.partition.rules.table import (
    NoRule,
    Walk,
    beside,
    refuse_extremes,
    refuse_if,
    replicated,
    rule,
    scale_of,
    unscaled,
)
from tfring.partition.types import (
    PER_COUNT,
    UNSCALED,
    Drawn,
    Replicate,
    Shard,
    Value,
    is_drawn,
    is_replicated,
    is_sharded,
    row_symbol,
)

_LOOKED_AT = 64


@rule("Const")
def const(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Returns a constant, the same on all replicas."""
    [output] = op.outputs
    value = Value(tuple(output.shape.as_list()), const=constants.const_integers(op))
    if (output.dtype.is_floating or output.dtype.is_integer) and output.shape.num_elements() <= _LOOKED_AT:
        value.is_zero = not tf.make_ndarray(op.get_attr("value")).any()
    return [value]


@rule("ReadVariableOp")
def read(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Returns the value that the step wrote last, or before any write a value that is the same on all replicas."""
    [handle] = ins
    content = walk.contents.get(handle.handle)
    shape = walk.shape(op.outputs[0])
    if content is None:
        return [Value(shape)]
    shape = walk.shape(op.outputs[0], like=content.shape)
    return [Value(shape, content.placement, content.scale, is_zero=content.is_zero)]


@rule("AssignVariableOp")
def assign(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Assigns a value. Variables that optimizers update, or nothing synchronizes, need the value of one process."""
    handle, value = ins
    if handle.handle in walk.written_alike:
        replicated(walk, [value])
    if handle.handle in walk.updated:
        unscaled(walk, [value])
    shape = value.shape if is_sharded(value) else None
    walk.contents[handle.handle] = Value(shape, value.placement, scale_of(walk, value), is_zero=value.is_zero)
    return []


@rule("AssignAddVariableOp", "AssignSubVariableOp")
def assign_add(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Adds to a variable, if the sum is one of the whole batch."""
    handle, value = ins
    before = walk.contents.get(handle.handle, Value(None))
    refuse_extremes([before, value])
    refuse_if((before.placement, before.scale) != (value.placement, scale_of(walk, value)))
    beside(walk, [before, value])
    is_zero = before.is_zero and value.is_zero
    walk.contents[handle.handle] = dataclasses.replace(before, is_zero=is_zero)
    return []


DRAWS = (
    *("RandomStandardNormal", "RandomUniform", "RandomUniformInt", "TruncatedNormal", "StatelessRandomNormal"),
    *("StatelessRandomNormalV2", "StatelessRandomUniform", "StatelessRandomUniformFullInt"),
    *("StatelessRandomUniformFullIntV2", "StatelessRandomUniformInt", "StatelessRandomUniformIntV2"),
    *("StatelessRandomUniformV2", "StatelessTruncatedNormal", "StatelessTruncatedNormalV2", "RandomGamma"),
    *("StatelessRandomGammaV2", "StatelessRandomGammaV3", "StatelessRandomBinomial", "RandomPoisson"),
    *("RandomPoissonV2", "ParameterizedTruncatedNormal"),
)


def _draws_alike(op: Any) -> bool:
    """Returns True if replicas that draw by themselves would draw the same numbers because the program sets a seed."""
    return op.op_def.is_stateful and any(op.get_attr(name) for name in ("seed", "seed2"))


@rule(*DRAWS)
def draw(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Draws separate numbers on each replica, for its rows or for all rows; with a seed, those for all rows."""
    sizes = ins[0]
    # Seeds, limits and the parameters of a distribution, possibly one for each row.
    replicated(walk, [value for value in ins[1:] if not is_drawn(value)])
    is_own = op.op_def.is_stateful or any(map(is_drawn, ins))
    of_all = Drawn() if is_own else Replicate()
    if sizes.const is None:
        if sizes.shape == (0,):
            return [Value((), of_all)]
        raise NoRule
    shape = tuple(np.ravel(sizes.const).tolist())
    with_rows = [axis for axis, size in enumerate(shape) if row_symbol(size, walk.rows)]
    with_rows = [] if sizes.is_total else with_rows
    refuse_if(with_rows and (not is_own or _draws_alike(op)))  # each would draw the numbers of the first rows
    refuse_if(len(with_rows) > 1)
    shape = walk.shape(op.outputs[0], dict(enumerate(shape))) or shape
    return [Value(shape, Shard(with_rows[0]) if with_rows else of_all)]


SHUFFLES = ("RandomShuffle", "Multinomial", "StatelessShuffle", "StatelessMultinomial")


@rule(*SHUFFLES)
def shuffle(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Shuffles or samples among all rows."""
    if op.type == "Multinomial" and ins[0].placement == Shard(0) and not _draws_alike(op):
        assert ins[0].shape is not None
        return [Value(walk.shape(op.outputs[0], {0: ins[0].shape[0]}), Shard(0))]
    refuse_if(any(map(is_sharded, ins)))
    unscaled(walk, ins)
    is_own = op.op_def.is_stateful or any(map(is_drawn, ins))
    of_all = Drawn() if is_own else Replicate()
    return [Value(walk.shape(output), of_all) for output in op.outputs]


@rule("TfringAllReduce")
def all_reduce(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Sums over replicas: parts, or replicated values."""
    given = [
        value for value, tensor in zip(ins, op.inputs, strict=True) if tensor.dtype.name not in ("resource", "bool")
    ]
    results = op.outputs[: op.get_attr("N")]
    for value in given[: len(results)]:
        refuse_if(is_sharded(value))
        is_count = is_replicated(value) and scale_of(walk, value) == PER_COUNT
        refuse_if(scale_of(walk, value) != UNSCALED and not is_count)
    return [Value(walk.shape(output)) for output in op.outputs]
