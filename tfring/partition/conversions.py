"""Conversions of an operation's inputs, so that its results are those of one process.

| conversion | a replica gets | from | costs |
|---|---|---|---|
| Rescaled | its rows or its part, with scale 1 | rows, a part | a product |
| Counted | a part; zeros without rows of the batch | a part; a number of rows | nothing |
| First | a part: the tensor on the first replica, zeros on others | the same on all; any | nothing; the cost of Full |
| FirstRows | the tensor on the first replica, none of its rows on others | the same on all replicas | nothing |
| Offset | numbers of rows in the whole batch | numbers of its own rows | a sum |
| Numbers | sizes of the whole batch, or its own | sizes | nothing |
| Own(axis) | its rows | the same on all replicas; a part | a slice; an all_reduce before |
| Full | the tensor of one process | rows; a part; a scaled tensor | an all_gather; an all_reduce |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from tfring.partition.dims import symbols
from tfring.partition.types import (
    PER_MEAN,
    ROWS,
    UNSCALED,
    Partial,
    Replicate,
    Scale,
    Shard,
    Unplaced,
    Value,
    has_row_counts,
    is_drawn,
    is_partial,
    is_replicated,
    is_sharded,
    row_symbol,
)


@dataclasses.dataclass(frozen=True)
class Rescaled:
    """Rows or a part, multiplied by shares of rows.

    Attributes:
      scale: The scale of the result.
    """

    scale: Scale = UNSCALED


@dataclasses.dataclass(frozen=True)
class Counted:
    """A part of the batch, with zeros on a replica without rows, to combine with values held in parts."""


@dataclasses.dataclass(frozen=True)
class First:
    """The tensor of one process on the first replica, zeros on the others, so that the sum is the tensor.

    Attributes:
      is_held: Whether it is combined with values that replicas hold in parts.
    """

    is_held: bool = False


@dataclasses.dataclass(frozen=True)
class FirstRows:
    """The tensor that all hold on the first replica, none of its rows on the others, so that they concatenate to it."""


@dataclasses.dataclass(frozen=True)
class Offset:
    """Numbers of rows, counted from the first of the whole batch."""


@dataclasses.dataclass(frozen=True)
class Numbers:
    """Sizes.

    Attributes:
      own: The positions of the sizes that are this replica's; the others are those of the whole batch.
    """

    own: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Own:
    """This replica's rows.

    Attributes:
      axis: The axis of the rows.
    """

    axis: int


@dataclasses.dataclass(frozen=True)
class Full:
    """The tensor of one process."""


Conversion = Rescaled | Counted | First | FirstRows | Offset | Numbers | Own | Full

_FULL = Full()


def needs_collective(value: Value, conversion: Conversion) -> bool:
    """Returns True if the conversion of a value needs an exchange between replicas."""
    if isinstance(conversion, Full):
        return value.const is None
    is_there = _is_whole(value) or (isinstance(conversion, Own) and is_drawn(value))
    return isinstance(conversion, (Own, First)) and value.const is None and not is_there


def waits(value: Value, conversion: Conversion) -> bool:
    """Returns True if a conversion waits for other replicas: for their values, or their rows that a mask keeps."""
    return needs_collective(value, conversion) or any(name != ROWS for name in symbols_of(value, conversion))


def symbols_of(value: Value, conversion: Conversion) -> list[str]:
    """Returns the symbols that a conversion needs the values of."""
    found = [name for name, _ in value.scale]
    if isinstance(conversion, Rescaled):
        found += [name for name, _ in conversion.scale]
    if isinstance(conversion, Counted):
        return found
    sizes = list(np.ravel(value.const)) if value.const is not None else []
    if value.indexed_rows is not None:
        sizes.append(value.indexed_rows)
    if isinstance(conversion, Own) and value.shape is not None:
        sizes.append(value.shape[conversion.axis])
    return found + [name for size in sizes for name in symbols(size)]


def _is_whole(value: Value) -> bool:
    return is_replicated(value) and value.scale == UNSCALED and not value.indexed_rows


def converted(value: Value, conversion: Conversion) -> Value:
    """Returns a value after a conversion."""
    match conversion:
        case Rescaled(scale):
            return dataclasses.replace(value, scale=scale)
        case Counted():
            return Value(value.shape, Partial(), is_zero=value.is_zero, is_held=True)
        case First(is_held):
            return Value(value.shape, Partial(), is_zero=value.is_zero, is_list=value.is_list, is_held=is_held)
        case FirstRows():
            return dataclasses.replace(value, shape=None, placement=Shard(0), const=None)
        case Offset():
            return dataclasses.replace(value, indexed_rows=None, is_uniform=False)
        case Numbers(own):
            return dataclasses.replace(value, is_total=not own)
        case Own(axis):
            return Value(value.shape, Shard(axis), is_zero=value.is_zero, is_list=value.is_list)
        case Full():
            numbers = {"const": value.const, "is_total": value.const is not None}
            return Value(value.shape, **numbers, is_zero=value.is_zero, is_list=value.is_list)


def can_convert(value: Value) -> bool:
    """Returns True if a value is a tensor, or a list of tensors, with a known placement."""
    is_tensor = value.handle is None and (not value.is_list or (value.shape is not None and value.const is None))
    return is_tensor and not value.is_empty and not isinstance(value.placement, Unplaced)


def _is_possible(value: Value, conversion: Conversion) -> bool:
    """Returns True if a conversion of a value is possible."""
    if value.is_held is not False:
        return value.is_held is True and value.placement == Partial() and value.scale == UNSCALED
    if is_replicated(value):  # possibly no replica has rows that each of two masks keeps
        return value.const is not None or sum(name != ROWS for name, _ in value.scale) < 2
    if not is_sharded(value):
        return True
    assert isinstance(value.placement, Shard)
    if value.indexed_rows == "?":
        return False
    return isinstance(value.placement.blocks, int) or isinstance(conversion, (Rescaled, Offset, Numbers))


def candidates(ins: Sequence[Value], terms: Collection[int], rows: set[str]) -> Iterator[dict[int, Conversion]]:
    """Yields conversions of the inputs of an operation, by position, cheaper ones first.

    Args:
      ins: The inputs.
      terms: The positions of the inputs in which the operation is jointly linear, as a sum is.
      rows: The symbols of rows.
    """
    seen: set = set()
    for found in _candidates(ins, terms, rows):
        key = frozenset(found.items())
        if found and key not in seen and all(_is_possible(ins[i], conversion) for i, conversion in found.items()):
            seen.add(key)
            yield found


def _candidates(ins: Sequence[Value], terms: Collection[int], rows: set[str]) -> Iterator[dict[int, Conversion]]:
    given = [(i, value) for i, value in enumerate(ins) if can_convert(value)]
    values = dict(given)
    local: dict[int, Conversion] = {}
    scaled: dict[int, Conversion] = {}  # those that all replicas hold
    for i, value in given:
        if value.indexed_rows is not None:
            local[i] = Offset()
        elif has_row_counts(value, rows):
            scaled[i] = _FULL
        elif value.const is None and value.scale != UNSCALED and not value.is_zero:
            (scaled if is_replicated(value) else local)[i] = Rescaled() if not is_replicated(value) else _FULL
    normal = {**local, **scaled}
    yield local
    yield normal
    parts = [i for i, value in given if is_partial(value)]
    held = [i for i, value in given if is_replicated(value) and i not in scaled and not value.is_zero]
    sharded = [i for i, value in given if is_sharded(value)]
    if parts and not sharded:
        yield {**local, **{i: First() for i in held}}
    if any(values[i].is_held for i in parts) and not sharded:
        # Values that replicas hold in parts stay in parts; other terms are added once.
        added = [(i, value) for i, value in given if i in terms and not value.is_held and not value.is_zero]
        yield {i: added_to_held(value, rows) for i, value in added}
    full_parts = {**normal, **dict.fromkeys(parts, _FULL)}
    if not sharded and len({values[i].shape for i in parts}) == 1:  # as many bytes, and results are full
        yield full_parts
    for i in reversed(parts):
        yield {i: _FULL}
    for i in reversed(parts):
        yield {**normal, i: _FULL}
    if not sharded:
        yield full_parts
    else:
        for own in _own(given, sharded, rows):
            yield {**full_parts, **own}
        yield full_parts
        for i in reversed(sharded):
            yield {**full_parts, i: _FULL}
    yield {i: _FULL for i, value in given if not _is_whole(value) or has_row_counts(value, rows)}


def added_to_held(value: Value, rows: set[str]) -> Conversion:
    """Returns the conversion of a part, or of a replicated value, that is added to a value held in parts."""
    if value.placement == Partial():
        return Counted()
    scale = value.over(rows)
    is_number_of_rows = value.const is not None and scale and [power for _, power in scale] == [-1]
    return Counted() if is_number_of_rows else First(is_held=True)  # each replica has its own number


def _own(given: Sequence[tuple[int, Value]], sharded: Sequence[int], rows: set[str]) -> Iterator[dict[int, Conversion]]:
    """Yields the inputs with all rows to slice to this replica's rows, next to inputs that have only its rows."""
    values = dict(given)
    symbols = set()
    for i in sharded:
        value = values[i]
        assert isinstance(value.placement, Shard)
        if value.shape is not None:
            symbols.add(row_symbol(value.shape[value.placement.axis], rows))
    for wanted in (symbols - {None}, rows):  # the same rows, then any rows, such as those that a mask keeps
        found: dict[int, list[int]] = {}
        for i, value in given:
            if i in sharded or value.shape is None or value.const is not None:
                continue
            if isinstance(value.placement, (Replicate, Partial)):
                axes = [axis for axis, size in enumerate(value.shape) if row_symbol(size, rows) in wanted]
                if axes:
                    found[i] = axes
        if found:
            yield {i: Own(axes[0]) for i, axes in found.items()}
            yield {i: Own(axes[-1]) for i, axes in found.items()}
            for i, axes in found.items():
                for axis in axes:
                    yield {i: Own(axis)}


# -- expectations of a step --------------------------------------------------------------------------------------------


def towards(
    value: Value, what: str, rows: set[str], is_integer: bool, like: Value | None = None
) -> list[Conversion] | None:
    """Returns the conversions after which a value meets the expectation of a mark; None if there are none.

    Args:
      value: A value that does not meet it.
      what: One of `marks.EXPECTATIONS`.
      rows: The symbols of rows.
      is_integer: Whether the tensor has integers, which shares of rows would round.
      like: For ids, the values of their rows, if known.
    """
    if not can_convert(value):
        return None
    found = _conversions_for_mark(value, what, rows, is_integer, like)
    return found if found and _is_possible(value, found[0]) else None


def _conversions_for_ids(value: Value, has_rows: bool, values: Value | None) -> list[Conversion] | None:
    """Returns the conversions after which a replica has the ids of its rows of gradients."""
    if value.indexed_rows is not None and (values is None or value.placement == values.placement):
        return [Offset()]
    if values is None:
        return [Own(0)] if has_rows and not is_sharded(value) else [_FULL]
    if not is_sharded(values):
        return [_FULL]
    whole: list[Conversion] = [] if _is_whole(value) else [_FULL]
    return [*whole, Own(0)] if has_rows and values.placement == Shard(0) else None


def _conversions_for_mark(
    value: Value, what: str, rows: set[str], is_integer: bool, like: Value | None
) -> list[Conversion] | None:
    axis = 0 if value.shape and row_symbol(value.shape[0], rows) else None
    if what == "ids of gradients":
        return _conversions_for_ids(value, axis is not None, like)
    if what == "concatenated":
        rows_of_own = towards(value, "rows", rows, is_integer)
        return rows_of_own or ([FirstRows()] if _is_whole(value) else [_FULL, FirstRows()])
    if what in ("rows", "gradients of rows", "rows of gradients"):
        scale = UNSCALED if what == "rows" else PER_MEAN
        if is_sharded(value):
            is_first = value.placement == Shard(0) or what == "rows of gradients"
            if not is_first:
                return None
            return [Offset()] if value.indexed_rows is not None else [Rescaled(scale)]
        if axis is not None:
            return [Own(0), *([Rescaled(scale)] if scale else [])]
        if what != "rows of gradients":
            return None
        return [Rescaled(scale)] if value.placement == Partial() else [_FULL]
    if is_sharded(value):
        return [_FULL] if what == "same" else None
    if what == "mean" and value.placement == Partial() and not is_integer and value.is_held is False:
        return [Rescaled(PER_MEAN)]
    if what == "sum":
        return None if value.is_held else [added_to_held(value, rows)]
    return [_FULL]
