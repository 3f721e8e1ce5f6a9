"""Lists of tensors, which TensorFlow uses in loops: a list has the placement of its stacked items."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tfring.partition import dims
from tfring.partition.constants import array, same_numbers
from tfring.partition.rules.table import NoRule, Walk, refuse_if, replicated, rule, scale_of, shard_of
from tfring.partition.types import Placement, Shard, Value, has_rows_of, is_replicated, is_sharded, row_symbol


@rule("TensorListReserve", "EmptyTensorList")
def reserve(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Creates a list without items."""
    count = ins[1].const
    refuse_if(count is not None and row_symbol(count.item(), walk.rows) and not ins[1].is_total)  # an item for each row
    length = (count.item(),) if count is not None and op.type == "TensorListReserve" else None
    return [Value(length, is_list=True, is_empty=True)]


@rule("TensorListFromTensor")
def from_tensor(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Creates a list of the items along the first axis."""
    value = ins[0]
    refuse_if(is_sharded(value) and shard_of(value).axis == 0)  # an item for each row
    return [Value(value.shape, value.placement, scale_of(walk, value), is_zero=value.is_zero, is_list=True)]


@rule("TensorListSetItem", "TensorListPushBack")
def put(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Puts an item like the others into a list."""
    items, item = ins[0], ins[2 if op.type == "TensorListSetItem" else 1]
    if op.type == "TensorListSetItem":
        replicated(walk, [ins[1]])
    is_new = items.is_empty or items.is_zero
    placement: Placement = item.placement
    if isinstance(placement, Shard):
        placement = Shard(placement.axis + 1, placement.blocks)
    length = items.shape[0] if items.shape else dims.symbol(f"open:{walk.label(op)}/length")
    shape = None if item.shape is None else (length, *item.shape)
    is_same = same_numbers(items.const, item.const) and items.is_total == item.is_total
    is_pushed = op.type == "TensorListPushBack"  # otherwise items that have not been set are zeros
    if item.const is not None and is_pushed and (is_new or is_same):
        return [Value(shape, placement, const=item.const, is_list=True, is_total=item.is_total)]
    is_alike = items.placement == placement or (is_replicated(item) and not is_sharded(items))
    if item.is_zero and not is_new and is_alike:
        return [items]
    scale = scale_of(walk, item)
    refuse_if(not is_new and (items.placement, items.scale) != (placement, scale))
    refuse_if(not items.is_empty and not has_rows_of(items, Value(shape, placement)))
    return [Value(shape, placement, scale, is_zero=item.is_zero and is_new, is_list=True)]


@rule("TensorListGetItem", "TensorListStack", "TensorListPopBack")
def take(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Returns an item, all items stacked, or the other items and the last."""
    items = ins[0]
    if op.type == "TensorListGetItem":
        replicated(walk, [ins[1]])
    output = op.outputs[-1]
    stacked = op.type == "TensorListStack"
    placement: Placement = items.placement
    if isinstance(placement, Shard) and not stacked:
        refuse_if(placement.axis == 0)
        placement = Shard(placement.axis - 1, placement.blocks)
    known = None
    if items.shape is not None:
        sizes, static = items.shape if stacked else items.shape[1:], output.shape
        has_length = stacked and static.rank and static[0] is not None
        known = {i: size for i, size in enumerate(sizes) if not (has_length and i == 0)}
    elif is_sharded(items):
        raise NoRule
    const = None if stacked else items.const
    is_zero = items.is_zero or items.is_empty
    scale = scale_of(walk, items) if stacked else items.scale
    taken = Value(walk.shape(output, known), placement, scale, const, is_zero=is_zero, is_total=items.is_total)
    return [items, taken] if op.type == "TensorListPopBack" else [taken]


@rule("TensorListLength", "TensorListElementShape")
def describe(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Returns numbers that are the same on all replicas, or the shape of an item."""
    [items] = ins[:1]
    if op.type == "TensorListElementShape" and items.shape is not None and not items.is_empty:
        return [Value((items.rank - 1,), const=array(list(items.shape[1:])))]
    return [Value(walk.shape(op.outputs[0]))]


@rule("OptionalFromValue", takes_row_indices=True)
def optional(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Returns a value that a branch passes to its gradient, as a list with one item."""
    refuse_if(len(ins) != 1)
    return [dataclasses.replace(ins[0], is_list=True)]


@rule("OptionalNone")
def no_optional(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Returns an empty list, from the branch that is not taken."""
    return [Value(None, is_list=True, is_empty=True)]


@rule("OptionalGetValue", takes_row_indices=True)
def optional_value(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Returns the value, in the branch that had it."""
    [value] = ins
    refuse_if(value.is_empty or len(op.outputs) != 1)
    return [dataclasses.replace(value, is_list=False)]
