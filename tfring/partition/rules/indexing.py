"""Operations on rows by their numbers: lookups, their gradients, segments, masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tfring.partition import dims
from tfring.partition.dims import Dim
from tfring.partition.rules.table import (
    NoRule,
    Walk,
    beside,
    common_scale,
    kept,
    refuse_extremes,
    refuse_if,
    refuse_row_indices,
    replicated,
    rule,
    scale_of,
    shard_of,
    unscaled,
)
from tfring.partition.types import (
    UNSCALED,
    Partial,
    Replicate,
    Shard,
    Value,
    is_partial,
    is_replicated,
    is_sharded,
    row_symbol,
)


@rule("Range")
def range_(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Returns the numbers of this replica's rows, if the limit is their number."""
    begin, end, step = (None if value.const is None else value.const.item() for value in ins)
    refuse_if(not all(map(is_replicated, ins)))
    rows = row_symbol(end, walk.rows)
    if rows is None:
        if any(value.const is None and not value.is_zero for value in ins):
            unscaled(walk, ins)
        elif isinstance(end, Dim) and any(name in walk.rows for name in dims.symbols(end)):
            raise NoRule
        return [Value(walk.shape(op.outputs[0]))]
    refuse_if(begin != 0 or step != 1)
    return [Value((end,))] if ins[1].is_total else [Value((end,), Shard(0), indexed_rows=end)]


def _origin(walk: Walk, mask: Any) -> str:
    """Returns a key that is the same for masks that are recognized to keep the same rows."""
    while mask.op.type in ("Identity", "Reshape", "Squeeze"):
        mask = mask.op.inputs[0]
    return f"{walk.label(mask.op)}:{mask.value_index}"


@rule("Where")
def where(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Returns the numbers of the rows of this replica that a mask keeps."""
    [value] = ins
    unscaled(walk, ins)
    if is_replicated(value):
        return [Value(walk.shape(op.outputs[0]))]
    if value.shape is None or value.placement != Shard(0) or value.rank > 1:
        raise NoRule
    rows = row_symbol(value.shape[0], walk.rows)
    kept_rows = walk.new_rows(op, ("kept by", _origin(walk, op.inputs[0])))
    points = value.shape[0] if rows else "?"
    return [Value((dims.symbol(kept_rows), value.rank), Shard(0), indexed_rows=points)]


@rule("OneHot")
def one_hot(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Adds a last dimension."""
    value = ins[0]
    unscaled(walk, [value, *ins[2:]])
    depth = None if ins[1].const is None else ins[1].const.item()
    if value.shape is None or op.get_attr("axis") not in (-1, value.rank):
        raise NoRule
    refuse_if(row_symbol(depth, walk.rows) and not ins[1].is_total)
    known = {**dict(enumerate(value.shape)), **({} if depth is None else {value.rank: depth})}
    return [Value(walk.shape(op.outputs[0], known), value.placement)]


@rule("GatherV2", "Gather", takes_row_indices=True)
def gather(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Gathers rows of a table by ids, or this replica's rows by their numbers."""
    value, ids = ins[:2]
    if value.shape is None or ids.shape is None or (op.type == "GatherV2" and ins[2].const is None):
        raise NoRule
    batch = op.get_attr("batch_dims") if op.type == "GatherV2" else 0
    at = int(ins[2].const) % max(1, value.rank) if op.type == "GatherV2" else 0
    if batch < 0:
        batch += ids.rank
    shape = (*value.shape[:at], *ids.shape[batch:], *value.shape[at + 1 :])
    unscaled(walk, [ids])
    if batch:
        return [_of_each_row(walk, value, ids, batch, shape)]
    if not is_sharded(ids):
        if not is_sharded(value):
            return [kept(walk, value, shape)]
        refuse_if(shard_of(value).axis == at)
        axis = shard_of(value).axis + (ids.rank - 1 if at < shard_of(value).axis else 0)
        return [kept(walk, value, shape, Shard(axis, shard_of(value).blocks), indexed_rows=value.indexed_rows)]
    placement = Shard(at + shard_of(ids).axis, shard_of(ids).blocks)
    if ids.indexed_rows is not None:
        refuse_if(value.placement != Shard(at) or value.shape[at] != ids.indexed_rows)
        return [kept(walk, value, shape, placement, indexed_rows=value.indexed_rows, is_uniform=False)]
    refuse_if(is_sharded(value) or is_partial(value))
    return [kept(walk, value, shape, placement)]


def _of_each_row(walk: Walk, value: Value, ids: Value, batch: int, shape: tuple) -> Value:
    """Returns the entries of each row that the row's ids select."""
    if is_sharded(value) and is_sharded(ids):
        refuse_if(value.placement != ids.placement or shard_of(value).axis >= batch)
        beside(walk, [value, ids])
        refuse_row_indices([ids])
        return kept(walk, value, shape, is_uniform=False, indexed_rows=value.indexed_rows)
    refuse_if(is_sharded(value) or is_sharded(ids))
    return kept(walk, value, shape)


@rule("ResourceGather", "ResourceGatherNd")
def resource_gather(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Gathers rows of a variable by ids."""
    handle, ids = ins
    content = walk.contents.get(handle.handle, Value(None))
    unscaled(walk, [ids])
    if ids.shape is None or (op.type == "ResourceGather" and op.get_attr("batch_dims")):
        raise NoRule
    taken = ids.shape if op.type == "ResourceGather" else ids.shape[:-1]
    shape = walk.shape(op.outputs[0], dict(enumerate(taken)))
    refuse_if(not is_replicated(content))
    return [Value(shape, ids.placement, content.scale)]


@rule("GatherNd")
def gather_nd(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Gathers entries by their indices."""
    value, ids = ins
    unscaled(walk, [ids])
    if ids.shape is None or value.shape is None or not isinstance(ids.shape[-1], int):
        raise NoRule
    shape = (*ids.shape[:-1], *value.shape[ids.shape[-1] :])
    refuse_if(is_sharded(value))
    if is_sharded(ids):
        refuse_if(is_partial(value))
        return [kept(walk, value, shape, ids.placement)]
    return [kept(walk, value, shape)]


@rule("UnsortedSegmentSum", takes_row_indices=True)
def segment_sum(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Adds up rows by ids: a part of the sum over all rows, or gathered rows at their original positions."""
    value, ids, count = ins
    refuse_row_indices([value])
    refuse_extremes([value])
    unscaled(walk, [ids])
    if not is_sharded(value) and not is_sharded(ids):
        return [kept(walk, value, walk.shape(op.outputs[0]))]
    if not is_sharded(ids) or ids.shape is None or value.shape is None:
        raise NoRule
    if value.placement != ids.placement and not value.is_uniform and not (is_replicated(value) and not value.shape):
        raise NoRule
    beside(walk, [value, ids])
    size = None if count.const is None else count.const.item()
    known = {i + 1: mine for i, mine in enumerate(value.shape[ids.rank :])}
    if ids.indexed_rows is not None:
        refuse_if(size != ids.indexed_rows or ids.placement != Shard(0))
        return [kept(walk, value, walk.shape(op.outputs[0], {0: size, **known}), Shard(0), is_uniform=False)]
    if size is not None:
        known[0] = size
    return [kept(walk, value, walk.shape(op.outputs[0], known), Partial(), is_uniform=False)]


@rule("ScatterNd")
def scatter_nd(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Adds up rows at indices: a part of the sum over all rows."""
    ids, value, sizes = ins
    unscaled(walk, [ids])
    refuse_extremes([value])
    shape = walk.shape(op.outputs[0], None if sizes.const is None else dict(enumerate(np.ravel(sizes.const))))
    if not is_sharded(ids) and not is_sharded(value):
        return [kept(walk, value, shape)]
    refuse_if(not is_sharded(ids) or ids.placement != Shard(0) or not (value.placement == Shard(0) or value.is_uniform))
    refuse_if(shape is not None and any(row_symbol(size, walk.rows) for size in shape))
    beside(walk, [ids, value])
    return [kept(walk, value, shape, Partial(), is_uniform=False)]


@rule("TensorScatterAdd", "TensorScatterSub")
def tensor_scatter_add(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Adds rows at indices to a tensor. Rows of a batch give a part, combined with a part or zeros."""
    value, ids, updates = ins
    refuse_extremes(ins)
    unscaled(walk, [ids])
    scale = common_scale(walk, [value, updates])
    if not is_sharded(ids) and not is_sharded(updates) and not is_sharded(value):
        refuse_if(any(map(is_partial, ins)))
        return [Value(value.shape, Replicate(), scale)]
    refuse_if(is_sharded(value) or not (value.is_zero or is_partial(value)) or ids.placement != Shard(0))
    refuse_if(updates.placement != Shard(0) and not updates.is_uniform)
    beside(walk, [ids, updates])
    return [Value(value.shape, Partial(), scale)]


@rule("DenseBincount", "Bincount")
def bincount(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Counts or adds up weights: a part of the sum over all rows, or for each row."""
    value = ins[0]
    unscaled(walk, [value])
    replicated(walk, ins[1:2])
    weights = ins[2]
    has_none = weights.shape == (0,)
    refuse_if(not has_none and weights.placement != value.placement and not (is_sharded(value) and weights.is_uniform))
    beside(walk, [value, weights])
    scale = UNSCALED if has_none else scale_of(walk, weights)
    if not is_sharded(value):
        return [Value(walk.shape(op.outputs[0]), scale=scale)]
    if op.type == "Bincount" or value.placement == Shard(value.rank - 1):
        refuse_if(op.type == "DenseBincount" and op.get_attr("binary_output"))  # a test, not a sum
        return [Value(walk.shape(op.outputs[0]), Partial(), scale)]
    refuse_if(value.placement != Shard(0))
    assert value.shape is not None
    return [Value(walk.shape(op.outputs[0], {0: value.shape[0]}), Shard(0), scale)]


@rule("HistogramFixedWidth")
def histogram(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Counts: a part of the counts over all rows."""
    value, *bins = ins
    unscaled(walk, [value])
    replicated(walk, bins)
    return [Value(walk.shape(op.outputs[0]), Partial() if is_sharded(value) else Replicate())]


@rule("LowerBound", "UpperBound", "SearchSorted")
def search(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Searches each value in sorted values: the same ones for all, or those of each row."""
    unscaled(walk, ins)
    beside(walk, ins)
    is_of_rows = is_sharded(ins[0]) or (is_sharded(ins[1]) and shard_of(ins[1]).axis != ins[1].rank - 1)
    refuse_if(is_of_rows and not ins[0].placement == ins[1].placement == Shard(0))
    return [Value(walk.shape(op.outputs[0], like=ins[1].shape), ins[1].placement)]


@rule(
    *("Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2", "UnsortedSegmentMax", "UnsortedSegmentMin"),
    *("UnsortedSegmentProd", "TensorScatterUpdate", "TensorScatterMax", "TensorScatterMin"),
)
def of_all(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Combines all entries, so there is no rule."""
    raise NoRule
