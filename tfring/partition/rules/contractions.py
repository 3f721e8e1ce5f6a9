"""Matrix products, Einstein sums and convolutions: bilinear operations, with sums over contracted axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfring.partition.dims import Dim, Size
from tfring.partition.rules.table import (
    NoRule,
    Walk,
    beside,
    kept,
    refuse_extremes,
    refuse_if,
    refuse_kept_rows,
    rule,
    scale_of_product,
    shape_of,
    shard_of,
)
from tfring.partition.types import (
    Partial,
    Placement,
    Replicate,
    Shard,
    Value,
    is_partial,
    is_sharded,
    row_symbol,
)


@rule("MatMul")
def matmul(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Computes `ik,kj->ij`."""
    first = "ki" if op.get_attr("transpose_a") else "ik"
    second = "jk" if op.get_attr("transpose_b") else "kj"
    return [_contracted(walk, ins, first, second, "ij")]


@rule("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
def batch_matmul(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Computes `...ik,...kj->...ij`. A batch dimension of 1 fits any size."""
    one, other = ins
    refuse_if(one.shape is None or other.shape is None)
    rank = max(one.rank, other.rank) - 2

    def labels(value: Value, name: str) -> list[str]:
        offset = rank - (value.rank - 2)
        return [f"1{name}{j}" if value.shape[j] == 1 else f"b{offset + j}" for j in range(value.rank - 2)]  # type: ignore[index]

    first, second = labels(one, "x"), labels(other, "y")
    result = []
    for j in range(rank):
        name = f"b{j}"
        ones = [
            labels[j - rank] for labels in (first, second) if len(labels) >= rank - j and labels[j - rank][0] == "1"
        ]
        result.append(name if name in first or name in second else ones[0])
    first += ["k", "i"] if op.get_attr("adj_x") else ["i", "k"]
    second += ["j", "k"] if op.get_attr("adj_y") else ["k", "j"]
    return [_contracted(walk, ins, first, second, [*result, "i", "j"])]


@rule("Einsum")
def einsum(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Computes an einsum of one or two tensors, without an ellipsis."""
    equation = op.get_attr("equation")
    equation = (equation.decode() if isinstance(equation, bytes) else equation).replace(" ", "")
    given, result = equation.split("->")
    labels = given.split(",")
    refuse_if("..." in equation or len(labels) > 2 or any(len(set(label)) < len(label) for label in labels))
    if len(labels) == 2:
        return [_contracted(walk, ins, labels[0], labels[1], result)]
    [value] = ins
    refuse_extremes(ins)
    sizes = dict(zip(labels[0], shape_of(value), strict=True))
    shape = tuple(sizes[label] for label in result)
    if not is_sharded(value):
        return [kept(walk, value, shape)]
    rows, blocks = labels[0][shard_of(value).axis], shard_of(value).blocks
    placement: Placement = Shard(result.index(rows), blocks) if rows in result else Partial()
    return [kept(walk, value, shape, placement, is_uniform=False)]


def _contracted(
    walk: Walk, ins: Sequence[Value], first: Sequence[str], second: Sequence[str], result: Sequence[str]
) -> Value:
    """Returns the Einstein sum of two values with labeled axes."""
    one, other = ins
    sizes: dict[str, Size] = dict(zip(second, shape_of(other), strict=True))
    for label, size in zip(first, shape_of(one), strict=True):
        if label not in sizes or not _is_better(walk, sizes[label], size):
            sizes[label] = size
    shape = tuple(sizes[label] for label in result)
    scale = scale_of_product(walk, ins)
    is_zero = one.is_zero or other.is_zero
    placement = _placement(walk, ins, (list(first), list(second)), list(result))
    return Value(shape, placement, scale, is_zero=is_zero)


def _is_better(walk: Walk, size: Size, other: Size) -> bool:
    """Returns True if a size is more specific than another of the same dimension."""
    return not isinstance(size, Dim) or (row_symbol(size, walk.rows) is not None and isinstance(other, Dim))


def _placement(walk: Walk, ins: Sequence[Value], labels: Sequence[list[str]], result: list[str]) -> Placement:
    parts = [value for value in ins if is_partial(value)]
    sharded = [(value, names) for value, names in zip(ins, labels, strict=True) if is_sharded(value)]
    if parts:
        refuse_if(sharded or len(parts) > 1 or parts[0].placement != Partial("sum"))
        return Partial()
    if not sharded:
        return Replicate()
    rows = [names[shard_of(value).axis] for value, names in sharded]
    if len(sharded) == 2:
        refuse_if(rows[0] != rows[1])  # would combine each row with each
        beside(walk, ins)
        refuse_if(shard_of(ins[0]).blocks != shard_of(ins[1]).blocks and not any(value.is_uniform for value in ins))
        blocks = shard_of(next((v for v in ins if not v.is_uniform), ins[0])).blocks
    else:
        [(value, _)] = sharded
        other, theirs = next((v, n) for v, n in zip(ins, labels, strict=True) if v is not value)
        if rows[0] in theirs and other.shape[theirs.index(rows[0])] != 1:  # type: ignore[index]
            raise NoRule  # would combine this replica's rows with all rows
        blocks = shard_of(value).blocks
    return Shard(result.index(rows[0]), blocks) if rows[0] in result else Partial()


# -- convolutions: rows are the first axis -----------------------------------------------------------------------------

_CONVOLUTIONS = ("Conv1D", "Conv2D", "Conv3D", "DepthwiseConv2dNative", "Conv")


@rule(*_CONVOLUTIONS)
def convolution(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Computes a convolution, bilinear in rows and a kernel."""
    rows, kernel = ins
    refuse_kept_rows(walk, rows)
    refuse_if(is_sharded(kernel))
    refuse_extremes(ins)
    scale = scale_of_product(walk, ins)
    if is_sharded(rows):
        refuse_if(is_partial(kernel) or shard_of(rows).axis)
        assert rows.shape is not None
        return [Value(walk.shape(op.outputs[0], {0: rows.shape[0]}), rows.placement, scale, is_zero=rows.is_zero)]
    refuse_if(is_partial(rows) and is_partial(kernel))
    placement = rows.placement if is_partial(rows) else kernel.placement
    return [Value(walk.shape(op.outputs[0]), placement, scale)]


_OF_INPUTS = ("Conv2DBackpropInput", "Conv3DBackpropInputV2", "DepthwiseConv2dNativeBackpropInput")


@rule(*_OF_INPUTS)
def convolution_input_gradient(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Computes a gradient, bilinear in a kernel and the gradients of rows, or a transposed convolution."""
    sizes, kernel, rows = ins
    refuse_kept_rows(walk, rows)
    refuse_if(not is_sharded(rows) or is_sharded(kernel) or is_partial(kernel) or shard_of(rows).axis)
    assert rows.shape is not None
    known = dict(enumerate(sizes.const.tolist())) if sizes.const is not None else {0: rows.shape[0]}
    scale = scale_of_product(walk, [rows, kernel])
    return [Value(walk.shape(op.outputs[0], known), rows.placement, scale, is_zero=rows.is_zero)]


@rule("Conv2DBackpropFilter", "Conv3DBackpropFilterV2", "DepthwiseConv2dNativeBackpropFilter")
def convolution_filter_gradient(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Computes a sum over rows, bilinear in rows and their gradients."""
    rows, _, gradients = ins
    refuse_if(not is_sharded(rows) or rows.placement != gradients.placement or shard_of(rows).axis)
    scale = scale_of_product(walk, [rows, gradients])
    return [Value(walk.shape(op.outputs[0]), Partial(), scale, is_zero=rows.is_zero or gradients.is_zero)]
