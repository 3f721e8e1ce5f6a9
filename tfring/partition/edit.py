"""Edits the graph of a step so that replicas together compute the results of one process.

Conversions that need other replicas are made in rounds: those of one round wait for the same exchanges, and use one
collective for each dtype. All replicas trace the same step, so they make the same calls in the same order.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import tensorflow as tf

from tfring import _tf
from tfring.partition import dims, marks
from tfring.partition.analysis import Analysis, Edit, Source
from tfring.partition.conversions import (
    Conversion,
    Counted,
    First,
    FirstRows,
    Full,
    Numbers,
    Offset,
    Own,
    Rescaled,
    needs_collective,
    symbols_of,
)
from tfring.partition.dims import Size
from tfring.partition.report import users_line
from tfring.partition.types import (
    ROWS,
    Partial,
    Scale,
    Shard,
    Value,
    is_drawn,
    is_partial,
    is_sharded,
    times,
)


class Exchange(Protocol):
    """Exchanges tensors between processes, which have reduced or concatenated the tensors of their replicas.

    Attributes:
      rows: Number of rows of the batch on each replica, an int64 tensor of shape `[replicas]`.
      replica: The position of this process's first replica; its other replicas follow.
    """

    rows: tf.Tensor
    replica: int

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: str, *, name: str) -> list[tf.Tensor]:
        """Reduces tensors of one dtype over processes, by "sum", "max" or "min"."""

    def all_gather(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        """Concatenates each tensor over processes along the first axis."""

    def note_lines(self, name: str, lines: str) -> None:
        """Notes the lines of the program, such as "train.py:12", that need the exchange of this name."""

    def others(self) -> list[tf.Operation]:
        """Returns operations of the graph, in order, that processes run in one order with these exchanges."""


class Counts(NamedTuple):
    """Numbers of rows, int64 scalars: on this replica, on all replicas, and on those before this one."""

    own: tf.Tensor
    total: tf.Tensor
    before: tf.Tensor


def apply(analysis: Analysis, exchange: Exchange) -> list[tf.Operation]:
    """Converts inputs of operations in the graph that is being built.

    TensorFlow keeps stateful operations in the order in which they were built. These exchanges are built last, but must
    come before operations that use their results, so control dependencies put them at the position of their round.

    Args:
      analysis: Analysis of the graph.
      exchange: Exchange between replicas.

    Returns:
      Operations after which all exchanges have been made.
    """
    editor = _Editor(analysis, exchange)
    others = exchange.others() if analysis.edits else []
    for level, edits in itertools.groupby(sorted(analysis.edits, key=_level), key=_level):
        before = [op for op in others if analysis.levels.get(op.name, 0) <= level]
        behind = [op for op in others if analysis.levels.get(op.name, 0) > level]
        editor.round(list(edits), before)
        if behind and editor.last:
            _tf.add_control_inputs(behind[0], editor.last)
    return editor.last


def _level(edits: Sequence[Edit]) -> int:
    return max(edit.level for edit in edits)


class _Editor:
    """Converts the tensors of all replicas of this process, in rounds."""

    def __init__(self, analysis: Analysis, exchange: Exchange) -> None:
        self._exchange = exchange
        first, rows = exchange.replica, exchange.rows
        self._replicas = [_Replica(sources, rows, first + i) for i, sources in enumerate(analysis.sources)]
        self._rounds = 0
        self._before: list[tf.Operation] = []
        self.last: list[tf.Operation] = []

    def round(self, conversions: Sequence[Sequence[Edit]], before: Sequence[tf.Operation]) -> None:
        """Makes conversions that wait for the same exchanges, and for the last operation of `before`."""
        self._before = list(before[-1:])
        self._count_rows([edits[0] for edits in conversions])
        self._reduce(conversions)
        self._gather(conversions)
        for edits in conversions:
            for replica, edit in zip(self._replicas, edits, strict=True):
                replica.convert(edit)

    def _count_rows(self, edits: Sequence[Edit]) -> None:
        """Exchanges the numbers of rows that a round needs."""
        sources = self._replicas[0].sources
        counts = self._replicas[0].counts
        needed = dict.fromkeys(name for edit in edits for name in symbols_of(edit.value, edit.conversion))
        new = [name for name in needed if name not in counts and name in sources and sources[name][2]]
        if not new:
            return
        own = [tf.stack([tf.where(r.active, r.size(name), 0) for name in new]) for r in self._replicas]
        [every] = self._exchanged(self._exchange.all_gather, "numbers of rows", [], [tf.stack(own)])
        for replica, sizes in zip(self._replicas, own, strict=True):
            for i, name in enumerate(new):
                before = tf.reduce_sum(every[: replica.position, i])
                replica.counts[name] = Counts(sizes[i], tf.reduce_sum(every[:, i]), before)

    def _needing(self, conversions: Sequence[Sequence[Edit]], are_rows: bool) -> list[Sequence[Edit]]:
        """Returns one conversion of each tensor for which other replicas have a part, or rows."""
        found: dict[str, Sequence[Edit]] = {}
        for edits in conversions:
            edit = edits[0]
            is_needed = needs_collective(edit.value, edit.conversion) and is_sharded(edit.value) == are_rows
            tensor = self._replicas[0].input(edit)
            if is_needed and not self._replicas[0].has_full(tensor):
                found.setdefault(tensor.name, edits)
        return list(found.values())

    def _reduce(self, conversions: Sequence[Sequence[Edit]]) -> None:
        groups: dict[tuple[str, tf.DType], list[Sequence[Edit]]] = {}
        for edits in self._needing(conversions, are_rows=False):
            placement = edits[0].value.placement
            op = placement.op if isinstance(placement, Partial) else "sum"
            dtype = self._replicas[0].input(edits[0]).dtype
            groups.setdefault((op, _sent_as(dtype)), []).append(edits)
        for (op, dtype), tensors in groups.items():
            parts = []
            for edits in tensors:
                each = [
                    tf.cast(replica.part(replica.input(edit), edit.value, op), dtype)
                    for replica, edit in zip(self._replicas, edits, strict=True)
                ]
                parts.append(functools.reduce(_REDUCTIONS[op], each))
            reduced = self._exchanged(self._exchange.all_reduce, op, tensors, parts, op)
            for edits, result in zip(tensors, reduced, strict=True):
                for replica, edit in zip(self._replicas, edits, strict=True):
                    tensor = replica.input(edit)
                    replica.note_full(tensor, tf.cast(result, tensor.dtype))

    def _gather(self, conversions: Sequence[Sequence[Edit]]) -> None:
        tensors = self._needing(conversions, are_rows=True)
        if not tensors:
            return
        sent = []
        for edits in tensors:
            pairs = zip(self._replicas, edits, strict=True)
            each = [replica.rows_first(replica.input(edit), edit.value) for replica, edit in pairs]
            rows = each[0] if len(each) == 1 else tf.concat(each, 0)
            sent.append(tf.cast(rows, tf.uint8) if rows.dtype == tf.bool else rows)
        gathered = self._exchanged(self._exchange.all_gather, "rows", tensors, sent)
        for edits, all_rows in zip(tensors, gathered, strict=True):
            for replica, edit in zip(self._replicas, edits, strict=True):
                tensor = replica.input(edit)
                replica.note_full(tensor, replica.rows_back(tf.cast(all_rows, tensor.dtype), tensor, edit.value))

    def _exchanged(
        self, exchange: Callable[..., list[tf.Tensor]], what: str, conversions: Sequence[Sequence[Edit]], *args: Any
    ) -> list[tf.Tensor]:
        """Returns the results of an exchange for these conversions, which runs after the previous ones."""
        self._rounds += 1
        name = f"step, exchange {self._rounds}: {what}{_purpose(conversions)}"
        ops = [edit.op for edit, *_ in conversions if not marks.expected(edit.op)]
        lines = list(dict.fromkeys(line for op in ops if (line := users_line(op)) is not None))
        if lines:  # not in the name: ranks compare names, and may run different files
            self._exchange.note_lines(name, _first(lines))
        with tf.control_dependencies([*self._before, *self.last]):
            results = exchange(*args, name=name)
        self.last = [result.op for result in results]
        return results


_REDUCTIONS = {"sum": tf.add, "max": tf.maximum, "min": tf.minimum}
_NAMED = 3


def _purpose(conversions: Sequence[Sequence[Edit]]) -> str:
    """Returns the operations for which replicas exchange tensors, for `tfring report` and errors.

    An example is " of batch x batch for LogicalAnd": the number of bytes grows with the square of the batch.
    """
    if not conversions:
        return ""
    edits = [edit for edit, *_ in conversions]
    types = list(dict.fromkeys("a result" if marks.expected(edit.op) else edit.op.type for edit in edits))
    is_square = any(dims.symbols(dims.product(edit.value.shape or ())).get(ROWS, 0) > 1 for edit in edits)
    return f"{' of batch x batch' * is_square} for {_first(types)}"


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


class _Replica:
    """Converts the tensors of one replica of this process.

    Args:
      sources: See `Analysis`.
      rows: See `Exchange`.
      position: Position of the replica among all replicas.
    """

    def __init__(self, sources: dict[str, Source], rows: tf.Tensor, position: int) -> None:
        self.sources = sources
        self.position = position
        self.active = rows[position] > 0
        self.counts = {ROWS: Counts(rows[position], tf.reduce_sum(rows), tf.reduce_sum(rows[:position]))}
        self._made: dict[tuple[str, Any], tf.Tensor] = {}  # by tensor and conversion

    def input(self, edit: Edit) -> tf.Tensor:
        """Returns the tensor to convert; for a list, its stacked items."""
        tensor = edit.op.inputs[edit.position]
        if not edit.value.is_list:
            return tensor
        key = tensor.name, "stacked"
        if key not in self._made:
            items = _tf.spec_of_items(tensor)
            assert items is not None
            self._made[key] = tf.raw_ops.TensorListStack(
                input_handle=tensor, element_shape=_sizes(items.shape), element_dtype=items.dtype
            )
        return self._made[key]

    def has_full(self, tensor: tf.Tensor) -> bool:
        """Returns True if the full tensor is available."""
        return (tensor.name, "full") in self._made

    def note_full(self, tensor: tf.Tensor, full: tf.Tensor) -> None:
        """Stores the full tensor."""
        self._made[tensor.name, "full"] = full

    def convert(self, edit: Edit) -> None:
        """Replaces an input of an operation by the converted one."""
        tensor = self.input(edit)
        key = tensor.name, _key(edit.value, edit.conversion)
        if key not in self._made:
            made = self._converted(tensor, edit.value, edit.conversion)
            made.set_shape(tensor.shape)  # the number of rows is open
            if edit.value.is_list:
                made = tf.raw_ops.TensorListFromTensor(tensor=made, element_shape=_sizes(made.shape[1:]))
            self._made[key] = made
        _tf.update_input(edit.op, edit.position, self._made[key])

    # -- numbers of rows -------------------------------------------------------------------------------------------

    def size(self, name: str) -> tf.Tensor:
        """Returns the value of a symbol for this replica's tensor, int64."""
        tensor, axis, _ = self.sources[name]
        return tf.shape(tensor, tf.int64)[axis]

    def _number(self, size: Size, is_own: bool) -> tf.Tensor:
        """Returns a size of this replica's tensor or of the tensor of the whole batch, int64."""
        assert size is not None
        if isinstance(size, int):
            return tf.constant(size, tf.int64)
        number = tf.constant(size.coefficient, tf.int64)
        for name, power in size.powers:
            # A replica without rows computes on a padding row, and uses its size.
            factor = self.counts[name].total if name in self.counts and not is_own else self.size(name)
            for _ in range(power):
                number *= factor
        return number

    def _factor(self, scale: Scale) -> tf.Tensor | None:
        """Returns the product of powers of the shares of rows, float64; None for 1."""
        factor = None
        for name, power in scale:
            # If a mask keeps no row of the batch, a replica computes the result of one process for no rows.
            share = tf.where(self.counts[name].total > 0, self._share(name), 1.0)
            if power < 0:
                share = tf.math.reciprocal_no_nan(share)
            share = share if abs(power) == 1 else share ** float(abs(power))
            factor = share if factor is None else factor * share
        return factor

    def _share(self, name: str) -> tf.Tensor:
        """Returns this replica's share of rows, float64; 0 if there are none."""
        counts = self.counts[name]
        return tf.math.divide_no_nan(tf.cast(counts.own, tf.float64), tf.cast(counts.total, tf.float64))

    def _scaled(self, tensor: tf.Tensor, scale: Scale) -> tf.Tensor:
        return _times(tensor, self._factor(scale))

    # -- tensors for other replicas ------------------------------------------------------------------------------------

    def part(self, tensor: tf.Tensor, value: Value, op: str) -> tf.Tensor:
        """Returns the contribution of this replica to a reduction; a replica without rows contributes nothing."""
        if value.is_held:
            return tensor
        if is_drawn(value):  # the first draws the numbers of one process, even without rows
            return tensor if self.position == 0 else tf.zeros_like(tensor)
        if value.const is not None:  # its own number of rows
            return tf.where(self.active, tensor, tf.zeros_like(tensor))
        factor = self._factor(value.scale)
        if not is_partial(value):
            weight = self._weight(value.scale)
            factor = weight if factor is None else factor * weight
        tensor = _times(tensor, factor)
        if op == "sum":
            return tf.where(self.active, tensor, tf.zeros_like(tensor))
        if tensor.dtype == tf.bool:
            tensor = tf.cast(tensor, tf.int32)
        lowest = tensor.dtype.min if op == "max" else tensor.dtype.max
        if tensor.dtype.is_floating:
            lowest = -np.inf if op == "max" else np.inf
        return tf.where(self.active, tensor, tf.cast(lowest, tensor.dtype))

    def _weight(self, scale: Scale) -> tf.Tensor:
        """Returns the weight with which a replica adds a replicated value, float64: its share of the rows in the scale.

        A replica that has none of the rows that a mask keeps holds no function of their number.
        """
        weight = self._share(ROWS)
        for name in (name for name, _ in scale if name != ROWS):
            weight = tf.where(self.counts[name].total > 0, self._share(name), weight)
        return weight

    def rows_first(self, tensor: tf.Tensor, value: Value) -> tf.Tensor:
        """Returns rows along the first axis, with rows of blocks adjacent; no rows for a replica without rows."""
        assert isinstance(value.placement, Shard)
        axis, blocks = value.placement
        if value.indexed_rows is not None:
            tensor = self._offset(tensor, value)
        tensor = self._scaled(tensor, value.scale)
        if axis or blocks != 1:
            sizes = tf.shape(tensor)
            outer = tf.reduce_prod(sizes[:axis]) * blocks
            tensor = tf.reshape(tensor, [outer, sizes[axis] // blocks, tf.reduce_prod(sizes[axis + 1 :])])
            tensor = tf.transpose(tensor, [1, 0, 2])
        return tensor[: tf.where(self.active, tf.shape(tensor)[0], 0)]

    def rows_back(self, rows: tf.Tensor, tensor: tf.Tensor, value: Value) -> tf.Tensor:
        assert isinstance(value.placement, Shard)
        axis, blocks = value.placement
        if not axis and blocks == 1:
            return rows
        sizes = tf.shape(tensor)
        shape = tf.concat([sizes[:axis], [tf.shape(rows)[0] * blocks], sizes[axis + 1 :]], 0)
        return tf.reshape(tf.transpose(rows, [1, 0, 2]), shape)

    # -- conversions -------------------------------------------------------------------------------------------------

    def _is_first(self) -> tf.Tensor:
        """Returns a tensor: True if this is the first replica that has rows."""
        return self.active & (self.counts[ROWS].before == 0)

    def _converted(self, tensor: tf.Tensor, value: Value, conversion: Conversion) -> tf.Tensor:
        match conversion:
            case Rescaled(scale):
                return self._scaled(tensor, times(value.scale, scale, -1))
            case Counted():
                return self.part(tensor, value, "sum")
            case First():
                full = self._full(tensor, value)
                return tf.where(self._is_first(), full, tf.zeros_like(full))
            case FirstRows():
                return tensor[: tf.where(self._is_first(), tf.shape(tensor)[0], 0)]
            case Offset():
                return self._offset(tensor, value)
            case Numbers(own):
                return self._sizes(value, tensor.dtype, own)
            case Own(axis):
                return self._own_rows(self._made.get((tensor.name, "full"), tensor), value, axis)
        return tf.identity(self._full(tensor, value))

    def _full(self, tensor: tf.Tensor, value: Value) -> tf.Tensor:
        """Returns the tensor of one process, from an exchange or because all replicas hold it."""
        if value.const is not None:
            return self._sizes(value, tensor.dtype, ())
        return self._made.get((tensor.name, "full"), tensor)

    def _offset(self, tensor: tf.Tensor, value: Value) -> tf.Tensor:
        [rows] = [name for name in dims.symbols(value.indexed_rows) if name in self.counts]
        rest = dims.divide(value.indexed_rows, dims.symbol(rows))
        offset = self._first_row(rows) * self._number(rest, is_own=False)
        return tensor + tf.cast(offset, tensor.dtype)

    def _sizes(self, value: Value, dtype: tf.DType, own: Sequence[int]) -> tf.Tensor:
        numbers = [self._number(size, i in own) for i, size in enumerate(np.ravel(value.const).tolist())]
        if not numbers:
            return tf.zeros(np.shape(value.const), dtype)
        return tf.cast(tf.reshape(tf.stack(numbers), np.shape(value.const)), dtype)

    def _own_rows(self, tensor: tf.Tensor, value: Value, axis: int) -> tf.Tensor:
        assert value.shape is not None
        size = value.shape[axis]
        [rows] = [name for name in dims.symbols(size) if name in self.counts]
        each = self._number(dims.divide(size, dims.symbol(rows)), is_own=False)
        sizes = tf.shape(tensor, tf.int64)
        begins = tf.one_hot(axis, tensor.shape.rank, self._first_row(rows) * each, tf.constant(0, tf.int64))
        is_rows = tf.one_hot(axis, tensor.shape.rank, True, False)
        return tf.slice(tensor, begins, tf.where(is_rows, self.size(rows) * each, sizes))

    def _first_row(self, rows: str) -> tf.Tensor:
        """Returns the number of this replica's first row, int64; if it has no rows, that of an existing row."""
        counts = self.counts[rows]
        return tf.minimum(counts.before, counts.total - tf.minimum(self.size(rows), counts.total))


def _sizes(shape: tf.TensorShape) -> int | list[int]:
    """Returns the sizes of items of a list, -1 for open ones."""
    return -1 if shape.rank is None else [-1 if size is None else size for size in shape]


def _times(tensor: tf.Tensor, factor: tf.Tensor | None) -> tf.Tensor:
    """Returns a product; 0 if the factor is 0, whatever the tensor."""
    if factor is None:
        return tensor
    if tensor.dtype.is_floating or tensor.dtype.is_complex:
        return tf.math.multiply_no_nan(tensor, tf.cast(factor, tensor.dtype))
    return tf.cast(tf.round(tf.cast(tensor, tf.float64) * factor), tensor.dtype)


def _sent_as(dtype: tf.DType) -> tf.DType:
    if dtype.is_floating:
        return dtype
    return tf.int32 if dtype.size < 4 else dtype


def _key(value: Value, conversion: Conversion) -> Any:
    """Returns the key of a converted tensor. Conversions to the same full tensor have one key."""
    return conversion if not isinstance(conversion, Full) else ("as full", value.const is None)
