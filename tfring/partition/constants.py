"""Computes the small integers of a graph, such as shapes and axes, in terms of the rows of the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfring.partition import dims
from tfring.partition.dims import Dim, Size
from tfring.partition.slices import parse, sizes
from tfring.partition.types import Value

_LARGEST = 64  # elements of a tensor that is evaluated


def _by(divide: Callable[[Size, Size], Size]) -> Callable[[Size, Size], Size]:
    """Returns a division that returns None if the divisor may be zero."""
    return lambda a, b: None if dims.may_be_zero(b) else divide(a, b)


_BINARY: dict[str, Callable[[Size, Size], Size]] = {
    "AddV2": dims.add,
    "Add": dims.add,
    "Sub": dims.subtract,
    "Mul": dims.multiply,
    "FloorDiv": _by(dims.floor_divide),
    "FloorMod": _by(dims.modulo),
    "Maximum": dims.maximum,
    "Minimum": dims.minimum,
    "RealDiv": _by(dims.divide),
    "DivNoNan": _by(dims.divide),
}
_FOLDED: dict[str, Callable] = {"Prod": dims.product, "Sum": dims.total}


def folded_shape(op: Any, ins: Sequence[Value]) -> list[Any] | None:
    """Returns an array for each output of Shape, ShapeN, Size or Rank; None for other operations or unknown shapes."""
    if op.type not in ("Shape", "ShapeN", "Size", "Rank") or any(value.shape is None for value in ins):
        return None
    if op.type == "Rank":
        return [array(ins[0].rank)]
    if op.type == "Size":
        size = dims.product(ins[0].shape or ())
        return None if size is None else [array(size)]
    return [array(list(value.shape or ())) for value in ins]


def folded_self_comparison(op: Any) -> list[Any] | None:
    """Returns the result of comparing a number with itself, as `tf.recompute_grad` does; otherwise None."""
    if op.type not in ("Equal", "NotEqual") or op.inputs[0] is not op.inputs[1] or op.inputs[0].dtype.is_floating:
        return None
    shape = op.outputs[0].shape
    if not shape.is_fully_defined() or shape.num_elements() > _LARGEST:
        return None
    return [np.full(shape.as_list(), int(op.type == "Equal"), object)]


def const_integers(op: Any) -> Any:
    """Returns the numbers of a Const if they are few integers; otherwise None."""
    tensor = op.outputs[0]
    count = tensor.shape.num_elements()
    if not (tensor.dtype.is_integer or tensor.dtype.is_bool or tensor.dtype.is_floating) or count > _LARGEST:
        return None
    numbers = tf.make_ndarray(op.get_attr("value"))
    if tensor.dtype.is_floating:
        numbers = numbers.astype(np.float64)
        if tensor.shape.rank or not np.isfinite(numbers).all() or (numbers != np.round(numbers)).any():
            return None
    return array([int(number) for number in numbers.ravel()]).reshape(numbers.shape)


def folded_integers(op: Any, ins: Sequence[Value], rows: set[str]) -> list[Any] | None:
    """Returns the integers that an operation computes from known ones, an array for each output; None if not known.

    Args:
      op: The operation.
      ins: The inputs.
      rows: The symbols of rows. Floats are computed only from numbers of rows.
    """
    if not ins or not op.outputs or any(value.const is None for value in ins):
        return None
    given = [value.const for value in ins]
    if op.outputs[0].dtype.is_floating and not any(map(_has_symbols, given)):
        return None
    try:
        results = _computed(op, given)
    except (TypeError, ValueError, KeyError, IndexError):
        return None
    if results is None or any(each.size > _LARGEST or None in each.ravel().tolist() for each in results):
        return None
    return results


def _computed(op: Any, given: list[Any]) -> list[Any] | None:
    if op.type in _BINARY:
        return [_elementwise(_BINARY[op.type], *given)]
    match op.type:
        case "Cast" if op.outputs[0].dtype.size < 4 and not set(given[0].ravel().tolist()) <= {0, 1}:
            return None  # a test for nonzero, or a number that wraps or is rounded
        case "Identity" | "StopGradient" | "EnsureShape" | "Cast" | "PreventGradient":
            return [given[0]]
        case "Neg":
            return [_elementwise(lambda a: dims.multiply(-1, a), given[0])]
        case "Reshape":
            return [given[0].reshape([int(size) for size in given[1]])]
        case "ExpandDims":
            return [np.expand_dims(given[0], int(given[1].item()))]
        case "Squeeze":
            return [array(np.squeeze(given[0], tuple(op.get_attr("squeeze_dims")) or None))]
        case "Transpose":
            return [given[0].transpose([int(axis) for axis in given[1]])]
        case "Pack":
            return [np.stack(given, op.get_attr("axis"))]
        case "Unpack":
            return [array(np.take(given[0], i, op.get_attr("axis"))) for i in range(op.get_attr("num"))]
        case "ConcatV2":
            return [np.concatenate(given[:-1], int(given[-1]))]
        case "GatherV2":
            return [array(np.take(given[0], given[1].astype(int), int(given[2])))]
        case "StridedSlice":
            return [array(given[0][parse(op, given[1:], given[0].ndim).key])]
        case "Slice":
            ends = [None if size == -1 else int(begin) + int(size) for begin, size in zip(*given[1:], strict=True)]
            return [given[0][tuple(slice(int(b), e) for b, e in zip(given[1], ends, strict=True))]]
        case "Prod" | "Sum" | "Max":
            return _reduced(op, *given)
        case "Range":
            return [array(list(range(*[int(limit) for limit in given])))]
        case "Fill":
            return [np.full([int(size) for size in given[0]], given[1].item(), object)]
        case "BroadcastTo":
            return [np.broadcast_to(given[0], [int(size) for size in given[1]])]
        case "DynamicStitch":
            half = len(given) // 2
            pairs = zip(given[:half], given[half:], strict=True)
            stitched = {int(i): v for at, data in pairs for i, v in zip(np.ravel(at), np.ravel(data), strict=True)}
            return [array([stitched[i] for i in range(len(stitched))])]
        case "BroadcastGradientArgs":
            return _reduction_axes(*given)
        case "BroadcastArgs":
            return [array(list(sizes([tuple(given[0]), tuple(given[1])])))]
        case "ConcatOffset":
            return _offsets(int(given[0]), given[1:])
        case "InvertPermutation":
            return [array(np.argsort(given[0].astype(int)))]
        case "Equal" | "NotEqual" | "Less" | "LessEqual" | "Greater" | "GreaterEqual":
            return [_elementwise(lambda a, b: _compared(op.type, a, b), *given)]
    return None


def _compared(comparison: str, a: Size, b: Size) -> Size:
    """Returns 0 or 1 for a comparison; None if it depends on the values of symbols."""
    if a != b and (dims.may_be_zero(a) or dims.may_be_zero(b)):
        return None
    largest, smallest = dims.maximum(a, b), dims.minimum(a, b)
    if a != b and (largest is None or largest == smallest or 1 in (a, b)):
        return None
    if a == b:
        return int(comparison in ("Equal", "LessEqual", "GreaterEqual"))
    if comparison in ("Equal", "NotEqual"):
        return int(comparison == "NotEqual")
    return int((largest == a) == comparison.startswith("Greater"))


def _reduced(op: Any, given: Any, axes: Any) -> list[Any] | None:
    axes = np.ravel(axes)
    if not axes.size:
        return [given]
    if given.ndim > 1:
        return None
    items = given.ravel().tolist()
    if op.type == "Max":
        result = items[0]
        for item in items[1:]:
            result = dims.maximum(result, item)
    else:
        result = _FOLDED[op.type](items)
    return [array(result).reshape([1] * given.ndim if op.get_attr("keep_dims") else [])]


def _reduction_axes(a: Any, b: Any) -> list[Any] | None:
    rank = max(len(a), len(b))
    padded = [[1] * (rank - len(shape)) + list(shape) for shape in (a, b)]
    if any(one != other and 1 not in (one, other) for one, other in zip(*padded, strict=True)):
        return None  # sizes of all rows and of a replica's rows
    return [array([i for i in range(rank) if padded[j][i] == 1]) for j in (0, 1)]


def _offsets(axis: int, shapes: Sequence[Any]) -> list[Any] | None:
    others = [{shape[i] for shape in shapes} for i in range(len(shapes[0])) if i != axis % len(shapes[0])]
    if any(len(found) > 1 and any(map(dims.is_of_rows, found)) for found in others):
        return None  # the kernel compares them
    at: Size = 0
    offsets = []
    for shape in shapes:
        offset = np.zeros(len(shape), object)
        offset[axis] = at
        offsets.append(offset)
        at = dims.add(at, shape[axis])
        if at is None:
            return None
    return offsets


def _elementwise(function: Callable[..., Size], *arrays: Any) -> Any:
    shape = np.broadcast_shapes(*(each.shape for each in arrays))
    columns = [np.broadcast_to(each, shape).ravel().tolist() for each in arrays]
    return array([function(*sizes) for sizes in zip(*columns, strict=True)]).reshape(shape)


def array(numbers: Any) -> Any:
    """Returns an array of sizes, which NumPy holds as objects."""
    return np.asarray(numbers, object)


def same_numbers(a: Any, b: Any) -> bool:
    """Returns True if two arrays of sizes, or None, are the same."""
    return a is not None and b is not None and a.shape == b.shape and a.ravel().tolist() == b.ravel().tolist()


def _has_symbols(numbers: Any) -> bool:
    return any(isinstance(size, Dim) for size in numbers.ravel().tolist())
