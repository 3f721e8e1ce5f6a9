"""StridedSlice in terms of NumPy indexing, and broadcast shapes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from tfring.partition.dims import Dim, Size


class Part(NamedTuple):
    """One dimension of a StridedSlice.

    Attributes:
      kind: "all", "some" or "one" of its entries, or a "new" dimension.
      begin, end, stride: Limits of "some". None if it begins or ends with the dimension.
    """

    kind: str
    begin: Any = None
    end: Any = None
    stride: Any = 1


class Index(NamedTuple):
    """A StridedSlice: its NumPy index, and its parts in the order of the dimensions of the result."""

    key: tuple
    parts: list[Part]


def axes(op: Any, count: int, rank: int) -> list[int | None]:
    """Returns the axis for each number of a StridedSlice's limits, given the rank of its tensor; None for no axis."""
    masks = {name: op.get_attr(f"{name}_mask") for name in ("ellipsis", "new_axis")}
    is_none = [bool((masks["ellipsis"] | masks["new_axis"]) >> i & 1) for i in range(count)]
    found: list[int | None] = []
    axis = 0
    for i in range(count):
        found.append(None if is_none[i] else axis)
        axis += rank - is_none.count(False) if masks["ellipsis"] >> i & 1 else not is_none[i]
    return found


def parse(op: Any, limits: Sequence[Any], rank: int) -> Index:
    """Parses a StridedSlice or its gradient.

    Args:
      op: The operation.
      limits: Arrays of the begins, the ends and the strides.
      rank: Rank of the tensor.
    """
    begin, end, strides = limits
    masks = {name: op.get_attr(f"{name}_mask") for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")}

    def has(name: str, position: int) -> bool:
        return bool(masks[name] >> position & 1)

    count = len(begin)
    taken = sum(not has("new_axis", i) and not has("ellipsis", i) for i in range(count))
    parts: list[Part] = []
    for i in range(count):
        if has("ellipsis", i):
            parts += [Part("all")] * (rank - taken)
        elif has("new_axis", i):
            parts.append(Part("new"))
        elif has("shrink_axis", i):
            parts.append(Part("one", begin[i]))
        else:
            first = None if has("begin", i) else begin[i]
            last = None if has("end", i) else end[i]
            is_all = first in (None, 0) and last is None and strides[i] == 1
            parts.append(Part("all") if is_all else Part("some", first, last, strides[i]))
    parts += [Part("all")] * (rank - sum(part.kind != "new" for part in parts))
    return Index(tuple(map(_numpy, parts)), parts)


def _numpy(part: Part) -> Any:
    if part.kind == "new":
        return None
    return part.begin if part.kind == "one" else slice(part.begin, part.end, part.stride)


def sizes(shapes: Iterable[Sequence[Size]]) -> tuple[Size, ...]:
    """Returns the shape to which all shapes are broadcast. Known sizes take precedence over open ones."""
    shapes = list(shapes)
    rank = max(map(len, shapes))
    result: list[Size] = []
    for column in zip(*[(1,) * (rank - len(shape)) + tuple(shape) for shape in shapes], strict=True):
        others = [size for size in column if size != 1]
        known = [size for size in others if not _is_open(size)]
        result.append((known or others or [1])[0])
    return tuple(result)


def _is_open(size: Size) -> bool:
    return size is None or (isinstance(size, Dim) and size.powers[0][0].startswith("open:"))
