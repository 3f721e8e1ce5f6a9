"""Element-wise operations."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import tensorflow as tf

from tfring.partition import dims, slices
from tfring.partition.dims import Dim, Size
from tfring.partition.rules.table import (
    NoRule,
    Walk,
    beside,
    common_scale,
    kept,
    refuse_if,
    rule,
    scale_of,
    scale_of_power,
    scale_of_product,
    shape_of,
    shard_of,
    summed,
    unscaled,
)
from tfring.partition.types import (
    ROWS,
    UNSCALED,
    Partial,
    Placement,
    Replicate,
    Scale,
    Shard,
    Value,
    is_partial,
    is_sharded,
    kept_rows,
    times,
)

_LINEAR = (
    *("Identity", "Neg", "Cast", "StopGradient", "PreventGradient", "Snapshot", "EnsureShape", "Real", "Imag", "Conj"),
    *("CheckNumerics", "CheckNumericsV2", "PlaceholderWithDefault", "DebugIdentityV2", "DebugIdentityV3"),
)
# f(c x) = c^degree f(x) for c > 0
_DEGREES = {
    "Abs": Fraction(1),
    "Relu": Fraction(1),
    "LeakyRelu": Fraction(1),
    "Sign": Fraction(0),
    "Square": Fraction(2),
    "Sqrt": Fraction(1, 2),
    "Rsqrt": Fraction(-1, 2),
    "Inv": Fraction(-1),
    "Reciprocal": Fraction(-1),
    "IsFinite": Fraction(0),
    "IsInf": Fraction(0),
    "IsNan": Fraction(0),
}
_NONLINEAR = (
    "ApproximateEqual",
    *("Acos", "Acosh", "Asin", "Asinh", "Atan", "Atan2", "Atanh", "BesselI0e", "BesselI1e", "BitwiseAnd"),
    *("BitwiseOr", "BitwiseXor", "Bucketize", "Ceil", "ClipByValue", "Cos", "Cosh", "Digamma", "Elu", "Erf", "Erfc"),
    *(
        "Erfinv",
        "Exp",
        "Expm1",
        "Floor",
        "FloorDiv",
        "FloorMod",
        "Igamma",
        "Igammac",
        "Invert",
        "LeftShift",
        "Lgamma",
        "Log",
    ),
    *("Log1p", "LogicalAnd", "LogicalNot", "LogicalOr", "Mod", "Ndtri", "NextAfter", "Polygamma", "Pow", "Relu6"),
    *("RightShift", "Rint", "Round", "Selu", "Sigmoid", "Sin", "Sinh", "Softplus", "Softsign", "Tan", "Tanh"),
    *("TruncateDiv", "TruncateMod", "Xdivy", "Xlog1py", "Xlogy", "Zeta"),
)
_INTEGERS = (tf.int32, tf.int64)
_SUMS = ("AddV2", "Add", "Sub", "AddN")
_PRODUCTS = ("Mul", "MulNoNan")
_RATIOS = ("RealDiv", "Div", "DivNoNan")
_CHOICES = ("Maximum", "Minimum")
_COMPARISONS = ("Greater", "GreaterEqual", "Less", "LessEqual", "Equal", "NotEqual")
_SELECTS = ("Select", "SelectV2")
# The position of the incoming gradient, in which they are linear.
_GRADIENTS = {
    "ReluGrad": 0,
    "Relu6Grad": 0,
    "LeakyReluGrad": 0,
    "EluGrad": 0,
    "SeluGrad": 0,
    "SoftplusGrad": 0,
    "SoftsignGrad": 0,
    "TanhGrad": 1,
    "SigmoidGrad": 1,
    "SqrtGrad": 1,
    "RsqrtGrad": 1,
    "InvGrad": 1,
    "ReciprocalGrad": 1,
}


@rule(*_LINEAR, takes_row_indices=True)
def linear(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Computes `f` with `f(a x + b y) = a f(x) + b f(y)`; not a Cast that rounds, wraps or tests for nonzero."""
    [value] = ins[:1]
    if value.is_list or value.handle is not None:
        return [value]
    if op.type == "EnsureShape" and is_sharded(value):
        sizes = tf.TensorShape(op.get_attr("shape"))
        if sizes.rank is not None and sizes[shard_of(value).axis] is not None:
            raise NoRule  # the number of rows of the whole batch
    # A replica without such rows may have NaN or infinity where one process has a number.
    is_checked = op.type.startswith("CheckNumerics")
    refuse_if(is_checked and (bool(kept_rows(value.scale)) or value.placement in (Partial("max"), Partial("min"))))
    keeps_numbers = op.type != "Neg" and op.outputs[0].dtype in (*_INTEGERS, tf.float32, tf.float64)
    refuse_if(value.indexed_rows is not None and not keeps_numbers)
    if op.type == "Cast" and not _is_exact(op.inputs[0].dtype, op.outputs[0].dtype):
        is_number = value.const is not None and op.outputs[0].dtype in _INTEGERS
        refuse_if(value.placement == Partial() or (not is_number and scale_of(walk, value) != UNSCALED))
    is_extreme = op.type == "Cast" and value.placement in (Partial("max"), Partial("min"))
    refuse_if(is_extreme and not _keeps_order(op.inputs[0].dtype, op.outputs[0].dtype))
    shape = walk.shape(op.outputs[0], like=value.shape)
    placement = value.placement
    if isinstance(placement, Partial) and placement.op != "sum" and op.type in ("Neg", "Real", "Imag", "Conj"):
        refuse_if(op.type != "Neg" or not op.outputs[0].dtype.is_floating)  # the lowest integer has no negative
        placement = Partial({"max": "min", "min": "max"}[placement.op])
    return [kept(walk, value, shape, placement, indexed_rows=value.indexed_rows)]


def _is_exact(given: tf.DType, wanted: tf.DType) -> bool:
    """Returns True if a Cast of a sum is the sum of Casts, up to rounding."""
    to_reals = wanted.is_floating or wanted.is_complex
    return (given.is_floating or given.is_complex or given in _INTEGERS) and (
        to_reals or (given in _INTEGERS and wanted in _INTEGERS)
    )


def _keeps_order(given: tf.DType, wanted: tf.DType) -> bool:
    """Returns True if a Cast of the maximum is the maximum of Casts, also for the value that stands for no rows."""
    if given.is_integer and wanted.is_integer:
        return bool(wanted.min <= given.min and given.max <= wanted.max)
    return given.is_bool or (wanted.is_floating and not given.is_complex)


@rule("Bitcast")
def bitcast(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Returns the same bits as another dtype of the same size."""
    [value] = ins
    unscaled(walk, ins)
    refuse_if(op.inputs[0].dtype.size != op.outputs[0].dtype.size)
    return [Value(value.shape, value.placement, is_zero=value.is_zero)]


@rule("OnesLike", "ZerosLike", takes_row_indices=True)
def constant_like(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Returns a constant, whatever the input holds."""
    [value] = ins
    is_zero = op.type == "ZerosLike"
    if value.is_list or value.handle is not None:
        placement = value.placement if is_sharded(value) else Replicate()
        return [Value(value.shape, placement, is_zero=True, is_list=True, is_empty=value.is_empty)]
    placement = Replicate() if is_partial(value) else value.placement
    return [Value(value.shape, placement, UNSCALED, is_zero=is_zero, is_uniform=is_sharded(value))]


@rule(*_SUMS)
def sums(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Adds terms of one scale."""
    if any(value.is_list for value in ins):
        return [_of_lists(walk, ins)]
    return [_combined(walk, ins, "sum")]


@rule(*_PRODUCTS)
def products(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Multiplies factors, at most one of which is a part."""
    return [_combined(walk, ins, "product")]


@rule("Cross")
def cross(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Computes cross products of vectors along the last axis."""
    result = _combined(walk, ins, "product")
    refuse_if(is_sharded(result) and shard_of(result).axis == result.rank - 1)
    return [result]


@rule("SquaredDifference")
def squared_difference(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Computes `(x - y)^2` of inputs with one scale."""
    result = _combined(walk, ins, "choice")
    result.scale = times(UNSCALED, result.scale, 2)
    return [result]


@rule(*_RATIOS)
def ratios(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Divides; linear in the dividend, except for integers, which are truncated. The divisor must not be a part."""
    if op.outputs[0].dtype.is_integer:
        unscaled(walk, ins)
        return [_combined(walk, ins, "choice")]
    return [_combined(walk, ins, "ratio")]


@rule(*_CHOICES)
def choices(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Computes the larger or smaller input. Two maxima over rows give a maximum over rows."""
    reduced = {"Maximum": "max", "Minimum": "min"}[op.type]
    is_reduced = all(value.placement in (Replicate(), Partial(reduced)) for value in ins)
    if is_reduced and common_scale(walk, ins) == UNSCALED:
        placement: Placement = Partial(reduced) if any(map(is_partial, ins)) else Replicate()
        return [Value(slices.sizes([shape_of(value) for value in ins]), placement)]
    return [_combined(walk, ins, "choice")]


@rule(*_COMPARISONS)
def comparisons(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Compares inputs of one scale, which the result does not have; a scale of rows that a mask keeps is rejected."""
    result = _combined(walk, ins, "choice")
    refuse_if(any(name != ROWS for name, _ in result.scale))
    result.scale, result.is_zero = UNSCALED, False
    return [result]


@rule(*_SELECTS)
def selects(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Selects by a condition for all, or for each row. The other inputs are treated as in a sum."""
    condition, *others = ins
    if condition.const is not None and condition.const.size == 1 and condition.const.item() in (0, 1):
        chosen, other = others if condition.const.item() else others[::-1]
        if chosen.shape is not None and chosen.shape == other.shape and len(shape_of(condition)) <= chosen.rank:
            return [chosen]
    unscaled(walk, [condition])
    refuse_if(is_sharded(condition) and any(map(is_partial, others)))
    shape = shape_of(condition)
    if op.type == "Select" and len(shape) == 1:  # of rows, not of the last axis
        shape += (1,) * (len(shape_of(others[0])) - 1)
    result = _combined(walk, [*others, Value(shape, condition.placement, is_zero=True)], "sum")
    result.is_zero = all(value.is_zero for value in others)
    return [result]


@rule(*_DEGREES)
def homogeneous(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Computes `f` with `f(c x) = c^k f(x)` for `c > 0`, of rows and of replicated values, but not of parts."""
    [value] = ins
    refuse_if(is_partial(value))
    degree = _DEGREES[op.type]
    scale = scale_of_power(walk, value, degree)
    return [kept(walk, value, value.shape, scale=scale, is_zero=value.is_zero and degree > 0)]


@rule(*_NONLINEAR)
def nonlinear(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Requires inputs without a scale. A power with a constant exponent is homogeneous."""
    if op.type == "Pow" and ins[1].const is not None and ins[1].const.size == 1 and not is_partial(ins[0]):
        exponent = ins[1].const.item()
        if isinstance(exponent, int):
            scale = scale_of_power(walk, ins[0], exponent)
            return [Value(ins[0].shape, ins[0].placement, scale)]
    is_of_counts = op.type in ("FloorDiv", "FloorMod") and not any(map(is_partial, ins))
    refuse_if(is_of_counts and any(scale_of(walk, value) != UNSCALED for value in ins))
    unscaled(walk, ins)
    result = _combined(walk, ins, "choice")
    result.is_zero = False
    return [result]


@rule(*_GRADIENTS)
def gradients(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Computes a result that is linear in the incoming gradient."""
    position = _GRADIENTS[op.type]
    unscaled(walk, [value for i, value in enumerate(ins) if i != position])
    result = _combined(walk, ins, "product")
    result.is_zero = ins[position].is_zero
    return [result]


def _combined(walk: Walk, ins: Sequence[Value], how: str) -> Value:
    """Returns the result of "sum", "product", "ratio", or "choice" (inputs have one scale and are not parts)."""
    shape = slices.sizes([shape_of(value) for value in ins])
    is_zero = _is_zero(ins, how)
    if any(map(is_sharded, ins)):
        shard, is_uniform = _beside_rows(walk, ins, len(shape))
        return Value(shape, shard, _scale(walk, ins, how), is_zero=is_zero, is_uniform=is_uniform)
    parts = [value for value in ins if is_partial(value)]
    if not parts:
        return Value(shape, Replicate(), _scale(walk, ins, how), is_zero=is_zero)
    if how == "sum":
        placement, scale = summed(walk, ins)
        refuse_if(placement != Partial("sum"))
        return Value(shape, placement, scale, is_zero=is_zero)
    is_linear = how == "product" or (how == "ratio" and not is_partial(ins[1]))
    refuse_if(not is_linear or len(parts) > 1 or parts[0].placement != Partial("sum"))
    return Value(shape, Partial(), _scale(walk, ins, how), none_of=parts[0].none_of, is_zero=is_zero)


def _is_zero(ins: Sequence[Value], how: str) -> bool:
    if how == "product":
        return any(value.is_zero for value in ins)
    return all(value.is_zero for value in ins) if how in ("sum", "choice") else ins[0].is_zero


def _scale(walk: Walk, ins: Sequence[Value], how: str) -> Scale:
    if how in ("sum", "choice"):
        return common_scale(walk, ins)
    return scale_of_product(walk, ins, is_ratio=how == "ratio")


def _beside_rows(walk: Walk, ins: Sequence[Value], rank: int) -> tuple[Shard, bool]:
    """Returns the placement of a result for which some inputs have rows, and whether its rows are equal."""
    refuse_if(any(is_partial(value) and not value.is_zero for value in ins))
    beside(walk, ins)
    sharded = [value for value in ins if is_sharded(value)]
    first = max(sharded, key=lambda value: (value.rank - shard_of(value).axis, not value.is_uniform))
    axis, blocks = shard_of(first).axis + rank - first.rank, shard_of(first).blocks
    is_uniform = True
    for value in ins:
        mine = axis - (rank - value.rank)  # the axis of rows in this input
        size = 1 if mine < 0 else shape_of(value)[mine]
        if is_sharded(value):
            refuse_if(shard_of(value).axis != mine)
            refuse_if(shard_of(value).blocks != blocks and not value.is_uniform)
            is_uniform = is_uniform and value.is_uniform
        elif size != 1:
            # As long as all rows: all replicas hold it, but each should hold only its part.
            raise NoRule
    return Shard(axis, blocks), is_uniform


def _of_lists(walk: Walk, ins: Sequence[Value]) -> Value:
    """Returns the sum of lists of tensors."""
    filled = [value for value in ins if not value.is_empty and not value.is_zero]
    if not filled:
        return ins[0]
    filled = [dataclasses.replace(value, const=None, scale=scale_of(walk, value)) for value in filled]
    first = filled[0]
    refuse_if(any((value.placement, value.scale) != (first.placement, first.scale) for value in filled))
    lengths = [value.shape[0] for value in ins if value.shape]
    if first.shape and isinstance(first.shape[0], Dim):  # all have the same length
        length = next((size for size in lengths if not _is_new(size)), first.shape[0])
        return dataclasses.replace(first, shape=(length, *first.shape[1:]))
    return first


def _is_new(size: Size) -> bool:
    return isinstance(size, Dim) and any(name.startswith("open:") for name in dims.symbols(size))
