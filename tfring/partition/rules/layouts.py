"""Operations that change the shape or order of elements: views, concatenation, slices, repetition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tfring.partition import dims, slices
from tfring.partition.dims import Dim, Size
from tfring.partition.rules.table import (
    NoRule,
    Walk,
    beside,
    common_scale,
    kept,
    refuse_extremes,
    refuse_if,
    replicated,
    rule,
    shape_of,
    shard_of,
    summed,
    unscaled,
)
from tfring.partition.types import (
    Placement,
    Shard,
    Value,
    is_partial,
    is_sharded,
    row_symbol,
)


@rule("Reshape", takes_row_indices=True)
def reshape(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Reshapes. Rows stay rows if the dimensions before them stay before them."""
    value, sizes = ins
    if sizes.const is None or value.shape is None:
        if not is_sharded(value) and sizes.const is None:
            return [kept(walk, value, walk.shape(op.outputs[0]))]
        raise NoRule
    shape = np.ravel(sizes.const).tolist()
    if -1 in shape:
        rest = dims.divide(dims.product(value.shape), dims.product(size for size in shape if size != -1))
        refuse_if(rest is None and is_sharded(value))
        shape[shape.index(-1)] = rest
    static = op.outputs[0].shape
    shape = [static[i] if size is None and static.rank is not None else size for i, size in enumerate(shape)]
    if None in shape:
        refuse_if(is_sharded(value))
        return [
            kept(walk, value, walk.shape(op.outputs[0], {i: size for i, size in enumerate(shape) if size is not None}))
        ]
    if not is_sharded(value):
        return [kept(walk, value, tuple(shape))]
    placement = _reshaped(walk, value, shape)
    is_uniform = value.is_uniform and shape[placement.axis] == value.shape[shard_of(value).axis]
    return [kept(walk, value, tuple(shape), placement, indexed_rows=value.indexed_rows, is_uniform=is_uniform)]


def _reshaped(walk: Walk, value: Value, shape: Sequence[Size]) -> Shard:
    assert value.shape is not None
    axis, blocks = shard_of(value)
    rows = row_symbol(value.shape[axis], walk.rows)
    if isinstance(blocks, tuple):
        if axis == 0 and shape and shape[0] == value.shape[0]:
            return Shard(0, blocks)
        raise NoRule
    found = [i for i, size in enumerate(shape) if rows is not None and rows in dims.symbols(size)]
    refuse_if(not found)  # rows become columns, or their number is assumed to be fixed
    before = dims.multiply(dims.product(value.shape[:axis]), blocks)
    outer = dims.divide(before, dims.product(shape[: found[0]]))
    refuse_if(outer is None or dims.divide(shape[found[0]], dims.multiply(outer, dims.symbol(rows or ""))) is None)
    return Shard(found[0], outer)


@rule("ExpandDims", takes_row_indices=True)
def expand_dims(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Adds a dimension."""
    value, axis = ins
    if axis.const is None or value.shape is None:
        raise NoRule
    at = int(np.ravel(axis.const)[0]) % (value.rank + 1)
    shape = (*value.shape[:at], 1, *value.shape[at:])
    return [kept(walk, value, shape, _moved(value, lambda rows: rows + (at <= rows)), indexed_rows=value.indexed_rows)]


@rule("Squeeze", takes_row_indices=True)
def squeeze(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Removes dimensions of 1."""
    [value] = ins
    sizes, given = shape_of(value), op.get_attr("squeeze_dims")
    refuse_if(not given and is_sharded(value))  # would remove the dimension of rows on a replica with one row
    gone = {axis % value.rank for axis in given} if given else {i for i, size in enumerate(sizes) if size == 1}
    shape = tuple(size for i, size in enumerate(sizes) if i not in gone)
    placement = _moved(value, lambda rows: rows - sum(axis < rows for axis in gone))
    return [kept(walk, value, shape, placement, indexed_rows=value.indexed_rows)]


@rule("Transpose", takes_row_indices=True)
def transpose(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Permutes dimensions."""
    value, permutation = ins
    if permutation.const is None or value.shape is None:
        raise NoRule
    order = [int(axis) for axis in permutation.const]
    shape = tuple(value.shape[axis] for axis in order)
    return [kept(walk, value, shape, _moved(value, order.index), indexed_rows=value.indexed_rows)]


def _moved(value: Value, move: Any) -> Placement:
    """Returns the placement with the axis of rows, if there is one, mapped by `move`."""
    return Shard(move(shard_of(value).axis), shard_of(value).blocks) if is_sharded(value) else value.placement


@rule("ConcatV2")
def concat(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Concatenates along an axis other than that of rows, or blocks of rows one after another."""
    *values, axis = ins
    refuse_if(axis.const is None or any(value.shape is None for value in values))
    at = int(axis.const) % values[0].rank
    size = dims.total(value.shape[at] for value in values)  # type: ignore[index]
    shape = list(values[0].shape or ())
    for value in values:
        shape = [
            mine if row_symbol(mine, walk.rows) or isinstance(size_, Dim) else size_
            for mine, size_ in zip(value.shape or (), shape, strict=True)
        ]
    if all(is_sharded(value) and shard_of(value).axis == at for value in values) and len(values) > 1:
        blocks = [block for value in values for block in _blocks(value, at)]
        sizes = tuple(value.shape[at] for value in values)  # type: ignore[index]
        shape[at] = dims.symbol(walk.new_rows(op, sizes)) if size is None else size
        is_even = all(block == blocks[0] for block in blocks)
        return [Value(tuple(shape), Shard(at, len(blocks) if is_even else tuple(blocks)), common_scale(walk, values))]
    if any(is_sharded(value) and shard_of(value).axis == at for value in values):
        raise NoRule  # each replica would add the replicated values once more
    known = {i: mine for i, mine in enumerate(shape) if i != at}
    if size is not None:
        known[at] = size
    placement, scale = _joined(walk, values)
    return [Value(walk.shape(op.outputs[0], known), placement, scale, is_zero=all(v.is_zero for v in values))]


def _blocks(value: Value, axis: int) -> Sequence[Size]:
    """Returns the sizes of the consecutive blocks of rows."""
    blocks = shard_of(value).blocks
    if isinstance(blocks, tuple):
        return blocks
    block = dims.divide(value.shape[axis], blocks)  # type: ignore[index]
    refuse_if(not isinstance(blocks, int) or block is None)
    return [block] * blocks


@rule("Pack")
def pack(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Stacks along a new axis."""
    refuse_if(any(value.shape is None for value in ins))
    at = op.get_attr("axis") % (ins[0].rank + 1)
    placement, scale = _joined(walk, ins)
    like = next((v for v in ins if is_sharded(v)), ins[0]).shape or ()
    if isinstance(placement, Shard):
        placement = Shard(placement.axis + (at <= placement.axis), placement.blocks)
    shape = (*like[:at], len(ins), *like[at:])
    return [Value(shape, placement, scale, is_zero=all(value.is_zero for value in ins))]


def _joined(walk: Walk, values: Sequence[Value]) -> tuple[Placement, Any]:
    """Returns the placement and scale of concatenated or stacked values."""
    sharded = [value for value in values if is_sharded(value)]
    if not sharded:
        return summed(walk, values)
    refuse_if(any(is_partial(value) and not value.is_zero for value in values))
    beside(walk, sharded)
    first = next((value for value in sharded if not value.is_uniform), sharded[0])
    axis = shard_of(first).axis
    for value in values:
        if is_sharded(value):
            if shard_of(value).axis != axis or (
                shard_of(value).blocks != shard_of(first).blocks and not value.is_uniform
            ):
                raise NoRule
        elif value.rank > axis and value.shape[axis] != 1:  # type: ignore[index]
            raise NoRule
    return first.placement, common_scale(walk, values)


@rule("Unpack")
def unpack(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Unstacks along an axis other than that of rows."""
    [value] = ins
    sizes = shape_of(value)
    at = op.get_attr("axis") % value.rank
    refuse_if(is_sharded(value) and shard_of(value).axis == at)
    shape = tuple(size for axis, size in enumerate(sizes) if axis != at)
    return [kept(walk, value, shape, _moved(value, lambda rows: rows - (at < rows))) for _ in op.outputs]


@rule("Split", "SplitV")
def split(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Splits along an axis other than that of rows, or into the blocks of rows."""
    axis, value = (ins[0], ins[1]) if op.type == "Split" else (ins[2], ins[0])
    if axis.const is None or value.shape is None:
        raise NoRule
    at = int(np.ravel(axis.const)[0]) % value.rank
    placement = value.placement
    size = dims.divide(value.shape[at], len(op.outputs)) if op.type == "Split" else None
    if is_sharded(value) and shard_of(value).axis == at:
        refuse_if(shard_of(value).blocks != len(op.outputs) or op.type == "SplitV")
        placement = Shard(at)
    known = {i: mine for i, mine in enumerate(value.shape) if i != at}
    if size is not None:
        known[at] = size
    return [kept(walk, value, walk.shape(output, known), placement) for output in op.outputs]


@rule("Pad", "PadV2", "MirrorPad", "MirrorPadGrad")
def pad(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Pads dimensions other than that of rows."""
    value, paddings = ins[:2]
    if paddings.const is None or value.shape is None:
        raise NoRule
    known: dict[int, Size] = {}
    sign = -1 if op.type == "MirrorPadGrad" else 1
    for axis, (before, after) in enumerate(paddings.const):
        size = dims.add(dims.add(value.shape[axis], dims.multiply(sign, before)), dims.multiply(sign, after))
        if size is not None:
            known[axis] = size
    refuse_if(is_sharded(value) and any(paddings.const[shard_of(value).axis] != 0))
    replicated(walk, [paddings])
    if op.type == "MirrorPadGrad":
        refuse_extremes([value])
    if op.type == "PadV2" and not ins[2].is_zero:
        refuse_if(is_partial(value))
        unscaled(walk, [value, ins[2]])
    is_zero = value.is_zero and (op.type != "PadV2" or ins[2].is_zero)
    return [kept(walk, value, walk.shape(op.outputs[0], known), is_uniform=False, is_zero=is_zero)]


@rule("ReverseV2", "Roll", "Cumsum", "Cumprod", "CumulativeLogsumexp")
def along_axes(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Operates along axes other than that of rows."""
    value, axes = ins[0], ins[-1]
    refuse_if(axes.const is None or not value.shape)
    over = {int(axis) % value.rank for axis in np.ravel(axes.const)}
    refuse_if(is_sharded(value) and shard_of(value).axis in over)
    replicated(walk, ins[1:])
    is_linear = op.type not in ("Cumprod", "CumulativeLogsumexp")
    if not is_linear:
        unscaled(walk, [value])
    if op.type == "Cumsum":
        refuse_extremes([value])
    return [kept(walk, value, value.shape, is_uniform=False, is_zero=value.is_zero and is_linear)]


# -- repetition --------------------------------------------------------------------------------------------------------


@rule("BroadcastTo")
def broadcast_to(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Repeats a value, for each row if the shape has rows."""
    value, sizes = ins
    return [_broadcast_to_sizes(walk, op, value, sizes)]


@rule("Fill")
def fill(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Repeats a number."""
    sizes, value = ins
    return [_broadcast_to_sizes(walk, op, value, sizes)]


def _broadcast_to_sizes(walk: Walk, op: Any, value: Value, sizes: Value) -> Value:
    """Returns a value broadcast to sizes, which may not be known."""
    if sizes.const is not None:
        return _repeated(walk, value, np.ravel(sizes.const).tolist(), sizes.is_total)
    refuse_if(is_sharded(value))
    shape = walk.shape(op.outputs[0])
    if shape is None or any(row_symbol(size, walk.rows) or isinstance(size, Dim) for size in shape):
        raise NoRule  # whether it has rows is not known
    return kept(walk, value, shape)


def _repeated(walk: Walk, value: Value, shape: Sequence[Size], is_total: bool | None) -> Value:
    """Returns a value broadcast to a shape, of the whole batch or of this replica's rows."""
    sizes = shape_of(value)
    if is_total and not is_sharded(value):
        return kept(walk, value, tuple(shape))
    offset = len(shape) - value.rank
    with_rows = [axis for axis, size in enumerate(shape) if row_symbol(size, walk.rows)]
    if is_sharded(value):
        axis, blocks = shard_of(value)
        refuse_if(shape[axis + offset] != sizes[axis])  # the shape has a different number of rows
        return kept(walk, value, tuple(shape), Shard(axis + offset, blocks))
    if not with_rows:
        return kept(walk, value, tuple(shape))
    refuse_if((is_partial(value) and not value.is_zero) or len(with_rows) > 1)
    [axis] = with_rows
    refuse_if(axis >= offset and sizes[axis - offset] != 1)
    return kept(walk, value, tuple(shape), Shard(axis), is_uniform=True)


@rule("Tile")
def tile(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Repeats along axes; for each row, if a multiple is the number of rows."""
    value, multiples = ins
    if multiples.const is None or value.shape is None:
        raise NoRule
    times = np.ravel(multiples.const).tolist()
    shape = [dims.multiply(size, count) for size, count in zip(value.shape, times, strict=True)]
    if is_sharded(value):
        axis, blocks = shard_of(value)
        if times[axis] != 1:
            if times[axis] == 0:
                return [Value(tuple(shape), is_zero=True)]
            if isinstance(times[axis], int) and not isinstance(blocks, tuple):
                return [kept(walk, value, tuple(shape), Shard(axis, dims.multiply(blocks, times[axis])))]
            raise NoRule
        return [kept(walk, value, tuple(shape))]
    if not any(row_symbol(count, walk.rows) for count in times):
        return [kept(walk, value, walk.shape(op.outputs[0], {i: s for i, s in enumerate(shape) if s is not None}))]
    return [_repeated(walk, value, shape, multiples.is_total)]


# -- slices ------------------------------------------------------------------------------------------------------------


@rule("StridedSlice", takes_row_indices=True)
def strided_slice(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Slices dimensions other than that of rows."""
    value, *limits = ins
    sizes = shape_of(value)
    if any(limit.const is None for limit in limits):
        refuse_if(is_sharded(value))
        return [kept(walk, value, walk.shape(op.outputs[0]))]
    parts = slices.parse(op, [np.ravel(limit.const) for limit in limits], value.rank).parts
    known: dict[int, Size] = {}
    placement, axis, at = value.placement, 0, 0
    for part in parts:
        if part.kind == "new":
            known[at] = 1
            at += 1
            continue
        size = sizes[axis]
        if is_sharded(value) and axis == shard_of(value).axis:
            refuse_if(not _is_all(part, size))
            placement = Shard(at, shard_of(value).blocks)
            part = slices.Part("all")
        axis += 1
        if part.kind == "one":
            continue
        found = size if part.kind == "all" else _length(part, size)
        if found is not None:
            known[at] = found
        at += 1
    return [kept(walk, value, walk.shape(op.outputs[0], known), placement, indexed_rows=value.indexed_rows)]


def _length(part: slices.Part, size: Size) -> Size:
    """Returns the number of entries of a dimension that are taken."""
    if isinstance(size, int) and all(isinstance(n, int) or n is None for n in part[1:]):
        return len(range(*slice(part.begin, part.end, part.stride).indices(size)))
    return size if _is_all(part, size) else None


def _is_all(part: slices.Part, size: Size) -> bool:
    """Returns True if all entries of a dimension of this size are taken."""
    is_one_by_one = part.kind in ("all", "some") and part.stride == 1
    return is_one_by_one and part.begin in (None, 0) and part.end in (None, size)


@rule("StridedSliceGrad")
def strided_slice_gradient(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Puts a slice back into zeros."""
    sizes, begin, end, strides, value = ins
    if sizes.const is None:
        refuse_if(is_sharded(value))
        return [kept(walk, value, walk.shape(op.outputs[0]))]
    shape = tuple(np.ravel(sizes.const).tolist())
    if not is_sharded(value):
        return [kept(walk, value, shape)]
    refuse_if(any(limit.const is None for limit in (begin, end, strides)))
    parts = slices.parse(op, [np.ravel(limit.const) for limit in (begin, end, strides)], len(shape)).parts
    axis = at = 0
    for part in parts:
        if part.kind != "new":
            if part.kind != "one" and at == shard_of(value).axis:
                refuse_if(not _is_all(part, shape[axis]) or value.shape is None or value.shape[at] != shape[axis])
                return [kept(walk, value, shape, Shard(axis, shard_of(value).blocks), is_uniform=False)]
            axis += 1
        at += part.kind != "one"
    raise NoRule


@rule("Slice")
def slice_(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Slices dimensions other than that of rows, or takes one of several blocks of rows."""
    value, begin, size = ins
    if value.shape is None:
        raise NoRule
    if begin.const is None or size.const is None:
        refuse_if(is_sharded(value))
        return [kept(walk, value, walk.shape(op.outputs[0]))]
    begins = np.ravel(begin.const).tolist()
    given = zip(value.shape, begins, np.ravel(size.const).tolist(), strict=True)
    shape = [dims.subtract(mine, first) if count == -1 else count for mine, first, count in given]
    known = {i: count for i, count in enumerate(shape) if count is not None}
    if not is_sharded(value):
        return [kept(walk, value, walk.shape(op.outputs[0], known))]
    axis, blocks = shard_of(value)
    if shape[axis] == value.shape[axis] and begins[axis] == 0:
        return [kept(walk, value, walk.shape(op.outputs[0], known))]
    if isinstance(blocks, tuple):
        return [kept(walk, value, walk.shape(op.outputs[0], known), _block(blocks, axis, begins[axis], shape[axis]))]
    block = dims.divide(value.shape[axis], blocks)
    if block is not None and shape[axis] == block and dims.modulo(begins[axis], block) == 0:
        return [kept(walk, value, walk.shape(op.outputs[0], known), Shard(axis))]
    raise NoRule


def _block(blocks: Sequence[Size], axis: int, begin: Size, size: Size) -> Shard:
    """Returns the placement of one of unequal blocks."""
    at: Size = 0
    for block in blocks:
        if at == begin and block == size:
            return Shard(axis)
        at = dims.add(at, block)
    raise NoRule


@rule("MatrixDiagV3", "MatrixDiagPartV3", "MatrixDiag", "MatrixDiagPart", "MatrixBandPart", "MatrixSetDiagV3")
def diagonals(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Reads or sets diagonals and bands in the last dimensions."""
    value = ins[0]
    if value.shape is None:
        raise NoRule
    inner = 1 if op.type in ("MatrixDiagV3", "MatrixDiag") else 2
    if is_of_own_diagonal(op, ins):
        if op.type == "MatrixDiagPartV3":
            return [kept(walk, value, shape_of(value)[:-1])]
        refuse_if(not is_sharded(ins[1]))
    else:
        refuse_if(is_sharded(value) and shard_of(value).axis >= value.rank - inner)
    if op.type == "MatrixSetDiagV3":
        placement, scale = _joined(walk, ins[:2])
        return [Value(value.shape, placement, scale)]
    padding = ins[-1] if op.type in ("MatrixDiagV3", "MatrixDiagPartV3") else None
    if padding is not None and not padding.is_zero:  # is combined with the values
        replicated(walk, [padding])
        unscaled(walk, [value, padding])
        refuse_if(is_partial(value))
    known = dict(enumerate(value.shape[: value.rank - inner]))
    if op.type == "MatrixBandPart":
        known = dict(enumerate(value.shape))
        replicated(walk, ins[1:])
    if op.type == "MatrixDiagV3" and all(each.const is not None and each.const.size == 1 for each in ins[1:4]):
        diagonal, *sizes = (each.const.item() for each in ins[1:4])
        if diagonal == 0 and sizes == [-1, -1]:
            known |= {value.rank - 1: value.shape[-1], value.rank: value.shape[-1]}
    is_zero = value.is_zero and (padding is None or padding.is_zero)
    return [kept(walk, value, walk.shape(op.outputs[0], known), is_zero=is_zero)]


def is_of_own_diagonal(op: Any, ins: Sequence[Value]) -> bool:
    """Returns True for the main diagonal of a square matrix of all rows, of which a replica has the rows it owns.

    In these, the diagonal begins at the column of the replica's first row: the analysis adds it to the input `k`.
    """
    if op.type not in DIAGONAL_NUMBERS or not is_sharded(ins[0]) or ins[0].shape is None:
        return False
    value = ins[0]
    *_, height, width = shape_of(value)
    is_of_rows = shard_of(value) == Shard(value.rank - 2) and height == width
    number = ins[DIAGONAL_NUMBERS[op.type]].const
    return is_of_rows and number is not None and number.size == 1 and number.item() == 0


DIAGONAL_NUMBERS = {"MatrixDiagPartV3": 1, "MatrixSetDiagV3": 2}  # the position of the diagonal's number
