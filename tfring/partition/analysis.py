"""Walks a traced step and finds how each tensor relates to the one that one process computes from the whole batch.

```
graph ─► operations, inputs first ─► small integers ─► a rule by the type of operation ─► Value of each tensor
                                          └─ shapes in terms of n        └─ none, or not exact: Unplaced, and why
marks.declare ─► Value as declared                  marks.expect ─► Finding, unless the Value fits
```

Tensors computed from an Unplaced tensor are Unplaced as well, so a finding names the first operation, which is where
the user has to look. If a rule does not place the results, inputs are converted, by the first conversions with which
the rule does place them. An operation without a rule is computed from the tensors of one process, on each replica. This
module changes nothing: the edits describe how `edit.apply` changes the graph.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tfring import _tf
from tfring.partition import constants, conversions, dims, marks, slices
from tfring.partition.conversions import Conversion
from tfring.partition.dims import Size
from tfring.partition.replicas import DifferentReplicasError, Twins, names_of_own
from tfring.partition.rules import DRAWS, RULES, SHUFFLES, NoRule
from tfring.partition.rules.layouts import DIAGONAL_NUMBERS, is_of_own_diagonal
from tfring.partition.rules.table import scale_of, shape_of, unscaled
from tfring.partition.types import (
    PER_COUNT,
    PER_MEAN,
    ROWS,
    UNSCALED,
    Drawn,
    Partial,
    Replicate,
    Shard,
    Unplaced,
    Value,
    has_row_counts,
    is_drawn,
    is_partial,
    is_replicated,
    is_sharded,
    kept_rows,
    own_rows,
    row_symbol,
)


class Finding(NamedTuple):
    """A tensor that is not what the step expects.

    Attributes:
      reason: A key of `report.REASONS`.
      op: The operation that made it so.
      name: Name of the tensor.
    """

    reason: str
    op: Any
    name: str


class Edit(NamedTuple):
    """A conversion of one input of an operation.

    Attributes:
      op: The operation.
      position: Position of the input.
      value: Value of the input.
      conversion: Conversion of the input.
      level: Number of exchanges between replicas that the input waits for.
    """

    op: Any
    position: int
    value: Value
    conversion: Conversion
    level: int


class Analysis(NamedTuple):
    """The findings and the conversions of a step.

    Attributes:
      findings: The tensors that differ from those of one process, each once.
      edits: The conversions that make the other tensors equal to those of one process, inputs first. Each entry has one
        edit for each replica of this process.
      values: A dict that maps the name of each tensor of the outermost graph to its value after the conversions.
      sources: For each replica of this process, a dict that maps each symbol to a tensor, its axis of this size, and
        whether this is the replica's part.
      levels: A dict that maps the name of each operation to the number of exchanges it waits for.
      writes_parts: Whether parts are written to a variable that holds one value, or one for each row.
    """

    findings: list[Finding]
    edits: list[tuple[Edit, ...]]
    values: dict[str, Value]
    sources: list[dict[str, Source]]
    levels: dict[str, int]
    writes_parts: bool


Source = tuple[Any, int, bool]
_Key = tuple[str, int, int]  # of edits that are twins: name of the operation, position of the input, number of the edit


def analyze(graph: Any, holds: Callable[[Any], str] = lambda handle: "copies") -> Analysis:
    """Analyzes the graph of a step.

    Args:
      graph: A FuncGraph with marks. Its inputs are assumed to be the same on all replicas, except declared ones.
      holds: A function that returns, for the handle of a variable, the values that replicas hold in it: "copies", which
        are made the same if they are not; "parts" of a sum; or their own "values", which are not made the same after
        the step.

    Returns:
      The analysis of the graph.

    Raises:
      DifferentReplicasError: If replicas of this process did not trace the same operations.
    """
    marked = dependency_names(graph, marks.expected)
    needed = marked | dependency_names(graph, Definitions().is_stateful)
    twins = Twins(graph, needed)
    levels: dict[_Key, int] = {}
    written_alike: set[Any] = set()
    for _ in range(_MOST_WALKS):
        walk = Walk(twins, needed, marked, levels)
        ins = [walk.input(tensor) for tensor in graph.inputs]
        for tensor, value in zip(graph.inputs, ins, strict=True):
            held = "copies" if value.handle is None else holds(tensor)
            if held == "parts":
                walk.contents[value.handle] = Value(None, Partial())
                walk.part_handles.add(value.handle)
            elif held == "values" or value.handle in written_alike:
                walk.written_alike.add(value.handle)
        values = walk.graph(graph, ins)
        if walk.read_in_bodies - written_alike:  # walks again, because inputs are not converted in bodies
            written_alike |= walk.read_in_bodies
            continue
        edits, levels = _group_twin_edits(walk, twins.count)
        if all(edit.level == levels[key] for key, twin_edits in edits.items() for edit in twin_edits):
            findings = list(dict.fromkeys(walk.findings))
            keys = walk.contents.keys() - walk.part_handles
            written = [walk.contents[key] for key in keys if not isinstance(key, str)]
            is_alike = all(is_replicated(value) or is_sharded(value) for value in written)
            return Analysis(findings, list(edits.values()), values, walk.sources, walk.levels, not is_alike)
    raise DifferentReplicasError("an operation of one replica waits for one of another")


_MOST_WALKS = 8  # levels of twins differ if TensorFlow orders operations of replicas, such as printing


def _group_twin_edits(walk: Walk, count: int) -> tuple[dict[_Key, tuple[Edit, ...]], dict[_Key, int]]:
    """Returns the edits of a walk, grouped by twins, and the level at which all edits of a group can be made."""
    found: dict[_Key, list[Edit]] = {}
    for edit, key in zip(walk.edits, walk.keys(), strict=True):
        found.setdefault(key, []).append(edit)
    for edits in found.values():
        if any((e.value, e.conversion) != (edits[0].value, edits[0].conversion) for e in edits) or len(edits) != count:
            raise DifferentReplicasError(f"conversions of {edits[0].op.name}")
    levels = {key: max(edit.level for edit in edits) for key, edits in found.items()}
    return {key: tuple(edits) for key, edits in found.items()}, levels


class Definitions:
    """Caches properties of operation types; it takes longer to get them from TensorFlow for each operation."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[bool, tuple[str, ...]]] = {}

    def of(self, op: Any) -> tuple[bool, tuple[str, ...]]:
        """Returns whether an operation is stateful, and the names of its arguments."""
        if op.type not in self._known:
            definition = op.op_def
            self._known[op.type] = definition.is_stateful, tuple(argument.name for argument in definition.input_arg)
        return self._known[op.type]

    def is_stateful(self, op: Any) -> bool:
        return self.of(op)[0]


class Walk:
    """A walk over a graph and the functions in it; see `rules.table.Walk`."""

    def __init__(
        self, twins: Twins, needed: Collection[str], marked: Collection[str], levels: Mapping[_Key, int]
    ) -> None:
        self.rows: set[str] = {ROWS}
        self.contents: dict[Any, Value] = {}
        self.part_handles: set[Any] = set()  # handles of variables of which replicas hold parts
        self.written_alike: set[Any] = set()  # of variables that are written with the value of one process
        self.updated: set[Any] = set()  # of variables that tfring's own operations read or write
        self.read_in_bodies: set[Any] = set()  # of variables that bodies read, but that are not written alike
        self._twins = twins
        self._needed = needed  # names of operations that effects or marks depend on, effects included
        self._marked = marked  # names of operations that a mark depends on
        self._least_levels = levels  # of edits, which wait for their twins in other replicas
        self.findings: list[Finding] = []
        self.edits: list[Edit] = []
        self.sources: list[dict[str, Source]] = [{} for _ in range(twins.count)]
        self.levels: dict[str, int] = {}  # of operations of the outermost graph
        self._depth = 0  # of bodies
        self._scope = ""  # of the current body: the calls that lead to it
        self._levels_of_state: dict[Any, int] = {}
        self._bodies: dict = {}
        self._definitions = Definitions()
        self._positions: dict[Any, dict[str, int]] = {}  # in bodies, of operations by their names
        self._row_symbols: dict[Any, str] = {}  # symbols, by the concatenated sizes or the mask that they come from

    # -- graphs ----------------------------------------------------------------------------------------------------

    def input(self, tensor: Any) -> Value:
        """Returns the value of a graph's input: a variable, or the same on all replicas."""
        if tensor.dtype.name == "resource":
            return Value((), handle=(id(tensor.graph), tensor.name))
        return Value(self.shape(tensor))

    def graph(self, graph: Any, ins: Sequence[Value]) -> dict[str, Value]:
        """Returns the values of the tensors of a graph, by name, given those of its inputs."""
        known = {tensor.name: value for tensor, value in zip(graph.inputs, ins, strict=True)}
        own, ordered = names_of_own(graph), in_order(graph)
        if not self._depth:
            handles = {t.name for op in ordered if op.name in own for t in op.inputs if t.dtype.name == "resource"}
            self.updated = {value.handle for name, value in known.items() if name in handles}
        for op in ordered:
            if op.type == "Placeholder" and op.outputs[0].name in known:
                continue
            first_edit, contents = len(self.edits), self.contents
            ins = [known[tensor.name] for tensor in op.inputs]
            is_own = op.name in own
            is_kept = is_own and _may_write(op, ins)
            if is_kept:
                self.contents = dict(contents)  # restored below
            values = self._operation(op, ins, is_own, known)
            if self._depth == 0 and op.name in self._needed and (not op.outputs or op.type in _WITH_BODIES):
                self._find_effects(values if op.type == "While" and op.name not in self._marked else [])
            if is_kept:
                self.contents = contents
                for handle in {value.handle for value in ins if op.type not in _tf.READS} & contents.keys():
                    held = contents[handle]  # as before, but without the known numbers
                    contents[handle] = dataclasses.replace(held, const=None, is_zero=False, is_uniform=False)
            known.update((tensor.name, value) for tensor, value in zip(op.outputs, values, strict=True))
            if self._depth == 0:
                self._note(op, values, self.edits[first_edit:])
        return known

    def _find_effects(self, values: Sequence[Value]) -> None:
        """Finds effects, such as printing or writing, of values that one process does not have.

        Args:
          values: The results of a loop that runs only for its effects; some of its inputs may be converted.
        """
        effects = [self.contents.pop(key) for key in [key for key in self.contents if isinstance(key, str)]]
        for placement in (value.placement for value in [*effects, *values]):
            if isinstance(placement, Unplaced) and placement.reason != "own":
                self.findings.append(Finding(placement.reason, placement.op, "what the step writes or prints"))

    def body(self, op: Any, ins: Sequence[Value], attribute: str, position: int | None = None) -> list[Value]:
        """Walks the function of an attribute of an operation, or one function of several; returns its outputs."""
        graph = self._body(op, attribute, position)
        before, self._scope = self._scope, f"{self.label(op)}.{attribute}{'' if position is None else position}"
        self._depth += 1
        try:
            known = self.graph(graph, ins)
        finally:
            inside, self._scope = f"rows:{self._scope}/", before
            self._depth -= 1
        values = [known[tensor.name] for tensor in graph.outputs]
        # Outside of a body, the number of rows that a mask inside it keeps is not known.
        return [Value(v.shape, Unplaced(op)) if _depends_on(v, inside) else v for v in values]

    def _note(self, op: Any, values: Sequence[Value], edits: Sequence[Edit]) -> None:
        """Records the number of exchanges that results wait for, and the symbols that are their sizes."""
        level = max((edit.level + conversions.waits(edit.value, edit.conversion) for edit in edits), default=0)
        states = self._state_of(op)
        level = max(level, self._level(op, states))
        self.levels[op.name] = level
        sources = self.sources[self._twins.replica(op)]
        for state in states:  # operations on a state run in order
            self._levels_of_state[state] = level
        for tensor, value in zip(op.outputs, values, strict=True):
            if value.shape is None or value.is_list or isinstance(value.placement, Unplaced):
                continue
            for axis, size in enumerate(value.shape):
                if isinstance(size, int):
                    continue
                own = isinstance(value.placement, Shard) and value.placement.axis == axis
                name = next(iter(dims.symbols(size)), None)
                if name in sources or (is_sharded(value) and not own and name in self.rows):
                    continue
                if name is not None and size == dims.symbol(name) and (own or name not in self.rows):
                    sources[name] = (tensor, axis, own)

    def unchanged(self, op: Any) -> list[bool]:
        """Returns for each variable of a loop whether its body returns it unchanged."""
        graph = self._body(op, "body")
        return [_passed_on(out) is into for out, into in zip(graph.outputs, graph.inputs, strict=True)]

    def _state_of(self, op: Any) -> list[str | None]:
        """Returns the states that an operation reads or writes besides its inputs and outputs, in graph order."""
        found: list[str | None] = [tensor.name for tensor in op.inputs if tensor.dtype.name == "resource"]
        return found or ([None] if self._definitions.is_stateful(op) else [])

    def _level(self, op: Any, states: Sequence[str | None]) -> int:
        """Returns the number of exchanges that an operation waits for, without its edits."""
        before = [*(tensor.op.name for tensor in op.inputs), *(each.name for each in op.control_inputs)]
        levels = [self.levels.get(name, 0) for name in before] + [self._levels_of_state.get(s, 0) for s in states]
        return max(levels, default=0)

    def _body(self, op: Any, attribute: str, position: int | None = None) -> Any:
        function = op.get_attr(attribute)
        name = (function if position is None else function[position]).name
        if name not in self._bodies:
            self._bodies[name] = _tf.graph_of_function(op.graph, name)
        if self._bodies[name] is None:
            raise NoRule
        return self._bodies[name]

    # -- one operation ---------------------------------------------------------------------------------------------

    def _operation(self, op: Any, ins: Sequence[Value], is_own: bool, known: Mapping[str, Value]) -> list[Value]:
        declared = marks.declared(op)
        if declared == "looked up":
            return [self._looked_up(op, known.get(marks.like(op) or ""))]
        if declared is not None:
            return [self._declared(op, declared)]
        expected = marks.expected(op)
        if expected is not None:
            return [self._compared(op, ins[0], known.get(marks.like(op) or ""), *expected)]
        of_own = [isinstance(value.placement, Unplaced) and value.placement.reason == "own" for value in ins]
        if not is_own and any(of_own) and op.type in _SUMS and not all(of_own):
            return self._unplaced(op, ins, Unplaced(op))  # of gradients, some of which are tfring's own
        if is_own or (any(of_own) and op.type not in _WITH_BODIES):  # and is not declared
            if not is_own and not _is_linear_in_own(op, ins, of_own, self.rows):
                return self._unplaced(op, ins, Unplaced(op))  # gradients that the step changes
            return [self._own_result_value(op, tensor) for tensor in op.outputs]
        if any(map(_is_replica_id, op.outputs)):
            return [Value((), const=np.array(0))]
        for i, tensor in enumerate(op.inputs):
            if _is_replica_id(tensor) and op.name in self._marked and not self._depth:
                self._edit(op, i, ins[i], conversions.Numbers(()))  # the id in one process
        if op.type in _COLLECTIVES:
            self.findings.append(Finding("replicas", op, "what replicas exchange"))
        folded_shape = constants.folded_shape(op, ins)
        if folded_shape is not None and not any(map(self._has_all_rows, ins)):
            return [Value(numbers.shape, const=numbers) for numbers in folded_shape]
        folded_self_comparison = constants.folded_self_comparison(op)
        if folded_self_comparison is not None:
            return [Value(numbers.shape, const=numbers) for numbers in folded_self_comparison]
        unplaced = next((value.placement for value in ins if isinstance(value.placement, Unplaced)), None)
        if unplaced is not None and op.type not in _WITH_BODIES:
            return self._unplaced(op, ins, unplaced)
        if folded_shape is not None:
            return [self._size_of_any(value, numbers) for value, numbers in zip(ins, folded_shape, strict=True)]
        if any(map(is_drawn, ins)):
            values = self._values_from_drawn(op, ins)
            if values is not None:
                return values
            ins = self._convert_drawn_inputs(op, ins)
            unplaced = next((value.placement for value in ins if isinstance(value.placement, Unplaced)), None)
            if unplaced is not None:
                return self._unplaced(op, ins, unplaced)
        ins = self._with_totals(op, ins, [value.is_total is None for value in ins])
        computed = constants.folded_integers(op, ins, self.rows)
        if computed is not None:
            has_total = any(value.is_total for value in ins)
            self._with_totals(op, ins, [has_total and has_row_counts(value, self.rows) for value in ins])
            return [Value(numbers.shape, const=numbers, is_total=has_total) for numbers in computed]
        before = self._state()
        values = self._placed(op, ins)
        contents = before[0] if _may_write(op, ins) else None
        why = self._first_unplaced(values, contents)
        is_to_convert = not self._depth and op.name in self._needed
        if is_to_convert and op.type in _WITH_BODIES and (why is not None or self.findings != before[1]):
            held = {value.handle for value in ins} & before[0].keys() - self.part_handles
            self.read_in_bodies |= {handle for handle in held if not _is_same(before[0][handle])}
        if why is None or not is_to_convert or unplaced is not None or op.type.startswith("Tfring"):
            return values
        after = self._state()
        shares = {i for i, tensor in enumerate(op.inputs) if _is_share(tensor)}  # weights of tfring's sums
        for found in conversions.candidates(ins, _terms(op), self.rows):
            found = {i: conversion for i, conversion in found.items() if i not in shares}
            if any(_needs_other_dtype(op.inputs[i], ins[i], conversion) for i, conversion in found.items()):
                continue
            self._restore(before)
            given = [conversions.converted(v, found[i]) if i in found else v for i, v in enumerate(ins)]
            values_of_given = self._placed(op, given)
            if self._first_unplaced(values_of_given, contents) is None and self.findings == before[1]:
                for i, conversion in found.items():
                    self._edit(op, i, ins[i], conversion)
                return values_of_given
        self._restore(after)
        return values

    def _held(self, op: Any, ins: Sequence[Value], values: list[Value]) -> list[Value]:
        """Sets for results whether they are parts of a value that replicas hold in parts.

        A part of the batch that is added to such parts must be zero on a replica without rows; in bodies it is not.
        """
        if op.type == "ReadVariableOp":
            content = self.contents.get(ins[0].handle)
            [value] = values
            is_held = True if ins[0].handle in self.part_handles else value.is_held
            return [dataclasses.replace(value, is_held=is_held, adds_to=content)] if is_partial(value) else values
        if op.type in _WITH_BODIES or not any(is_partial(value) and value.is_held is not False for value in ins):
            return values
        found: bool | None = True
        terms = _terms(op)
        for i, value in enumerate(ins):
            is_added = is_partial(value) or (i in terms and not value.is_zero)
            if is_added and value.is_held is not True:
                found = None
        if found is None and not self._depth:
            raise NoRule
        adds_to = _adds_to(op, ins)
        return [dataclasses.replace(v, is_held=found, adds_to=adds_to) if is_partial(v) else v for v in values]

    def _of_kept(self, op: Any, ins: Sequence[Value], values: list[Value]) -> list[Value]:
        """Sets for results whether they are sums over rows that a mask keeps.

        A replica that has none of these rows holds no part of a mean over them, so other values are not multiplied by
        such a mean.
        """
        if op.type in _WITH_BODIES or op.type == "ReadVariableOp":
            return values
        given = [value for value in ins if not is_replicated(value) and not value.is_zero]
        rows = {own_rows(value, self.rows) for value in given}
        absent = rows | {value.none_of for value in given}
        absent.update(*(kept_rows(value.scale) for value in given))
        if any(not is_replicated(value) and kept_rows(value.scale) - absent for value in values):
            raise NoRule
        if len(rows) != 1 or not rows - {None, ROWS}:
            return values
        return [dataclasses.replace(v, none_of=next(iter(rows))) if v.placement == Partial() else v for v in values]

    def _own_result_value(self, op: Any, tensor: Any) -> Value:
        if tensor.dtype.name == "resource":
            return self.input(tensor)
        return self._unplaced(op, [], Unplaced(op, "own"))[tensor.value_index]

    def _values_from_drawn(self, op: Any, ins: Sequence[Value]) -> list[Value] | None:
        """Returns results that may be computed from numbers that replicas draw; None if all need the same numbers.

        Results that are computed from drawn numbers count as drawn.
        """
        if op.type == "IdentityN" or (op.type in (*DRAWS, *SHUFFLES) and not is_drawn(ins[0])):
            return self._placed(op, ins)
        once = [dataclasses.replace(value, placement=Replicate()) if is_drawn(value) else value for value in ins]
        held = [self.contents[value.handle] for value in ins if value.handle in self.contents]
        if op.type == "AssignVariableOp" and ins[0].handle in self.written_alike:
            return None
        given = once if op.type == "AssignVariableOp" else [*once, *held]
        if not all(is_replicated(v) and v.scale == UNSCALED and not has_row_counts(v, self.rows) for v in given):
            return None
        before = dict(self.contents)
        values = self._placed(op, once)
        for handle, content in self.contents.items():
            if before.get(handle) is not content:
                self.contents[handle] = self._as_drawn(content)
        return [self._as_drawn(value) for value in values]

    def _as_drawn(self, value: Value) -> Value:
        return dataclasses.replace(value, placement=Drawn()) if is_replicated(value) else value

    def _convert_drawn_inputs(self, op: Any, ins: Sequence[Value]) -> list[Value]:
        """Returns inputs converted to the numbers that the first replica has drawn, or to the rows of own numbers."""
        given = list(ins)
        for i, value in enumerate(ins):
            if is_drawn(value) and (self._depth or value.is_list):
                given[i] = Value(value.shape, Unplaced(op))
            elif is_drawn(value):
                conversion = self._rows_of_drawn(op.inputs[i].op, value) or conversions.Full()
                self._edit(op, i, value, conversion)
                given[i] = conversions.converted(value, conversion)
        return given

    def _rows_of_drawn(self, op: Any, value: Value) -> conversions.Conversion | None:
        """Returns the conversion to this replica's rows, if it has drawn independent numbers for all rows."""
        axes = [axis for axis, size in enumerate(value.shape or ()) if row_symbol(size, self.rows)]
        is_one = self._twins.count == 1 and len(axes) == 1
        return conversions.Own(axes[0]) if is_one and _draws_each_number(op) else None

    def _with_totals(self, op: Any, ins: Sequence[Value], which: Sequence[bool]) -> Sequence[Value]:
        """Returns the values, some of them converted to the numbers of the whole batch."""
        if not any(which):
            return ins
        if self._depth:
            unplaced = Unplaced(op)
            return [Value(v.shape, unplaced) if is_one else v for v, is_one in zip(ins, which, strict=True)]
        for i, value in enumerate(ins):
            if which[i]:
                self._edit(op, i, value, conversions.Numbers(()))
        return [dataclasses.replace(v, is_total=True) if is_one else v for v, is_one in zip(ins, which, strict=True)]

    def _state(self) -> tuple:
        return dict(self.contents), list(self.findings), set(self.rows), list(self.edits)

    def _restore(self, state: tuple) -> None:
        self.contents, self.findings, self.rows, self.edits = (
            dict(state[0]), list(state[1]), set(state[2]), list(state[3])
        )  # fmt: skip

    def _edit(self, op: Any, index: int, value: Value, conversion: Conversion) -> None:
        if op.name not in self._needed:
            return
        level = self.levels.get(op.inputs[index].op.name, 0)
        value = dataclasses.replace(value, adds_to=None)  # differs: each replica has its own variable
        self.edits.append(Edit(op, index, value, conversion, level))
        if self._least_levels:
            *_, key = self.keys()
            self.edits[-1] = self.edits[-1]._replace(level=max(level, self._least_levels.get(key, 0)))

    def keys(self) -> Iterator[_Key]:
        """Yields for each edit a key that it shares with its twins of other replicas."""
        numbers: dict[tuple[str, int], int] = {}
        for edit in self.edits:
            at = edit.op.name, edit.position
            numbers[at] = numbers.get(at, 0) + 1
            yield self._twins.name(edit.op), edit.position, numbers[at]

    def label(self, op: Any) -> str:
        """Returns the name of an operation in symbols: the same for twins, different for each call of a function."""
        if not self._depth:
            return f"{op.graph.name}/{self._twins.name(op)}"
        if op.graph not in self._positions:
            self._positions[op.graph] = {each.name: i for i, each in enumerate(op.graph.get_operations())}
        return f"{self._scope}/{self._positions[op.graph][op.name]}"

    def _first_unplaced(self, values: Sequence[Value], before: dict[Any, Value] | None = None) -> Unplaced | None:
        """Returns why a value is not placed, or the new content of a variable; None if all are placed."""
        placements = [value.placement for value in values]
        if before is not None:
            placements += [v.placement for handle, v in self.contents.items() if before.get(handle) is not v]
        return next((placement for placement in placements if isinstance(placement, Unplaced)), None)

    def _placed(self, op: Any, ins: Sequence[Value]) -> list[Value]:
        """Returns the values of an operation's results by its rule, or Unplaced if the rule does not apply."""
        try:
            values = self._of_kept(op, ins, self._held(op, ins, self._by_rule(op, ins)))
            self._fit_sizes(op, ins, values)
        except NoRule:
            return self._unplaced(op, ins, Unplaced(op))
        checked = [self._checked(op, tensor, value) for tensor, value in zip(op.outputs, values, strict=True)]
        is_same = all(_is_same(v) and v.handle is None and not has_row_counts(v, self.rows) for v in ins)
        is_function = is_same and not self._definitions.is_stateful(op) and op.type not in _WITH_BODIES
        if is_function and self._first_unplaced(checked) is not None:
            return [Value(self.shape(tensor)) for tensor in op.outputs]  # the rule derived another shape
        return checked

    # -- numbers of rows, if a replica may hold all rows ------------------------------------------------------------

    def _has_all_rows(self, value: Value) -> bool:
        """Returns True if a replica holds all rows of a value along at least one axis."""
        if value.shape is None:
            return False
        own = value.placement.axis if isinstance(value.placement, Shard) else None
        return any(has_row_symbol(size, self.rows) for axis, size in enumerate(value.shape) if axis != own)

    def _size_of_any(self, value: Value, numbers: Any) -> Value:
        """Returns the sizes of a value, possibly of all rows, or of both all rows and a replica's own."""
        is_total = (None if is_sharded(value) else True) if self._has_all_rows(value) else False
        return Value(numbers.shape, const=numbers, is_total=is_total)

    def _fit_sizes(self, op: Any, ins: Sequence[Value], values: list[Value]) -> None:
        """Converts the sizes that an operation gets to those that its results need, given their placement."""
        if not values:
            return
        # On a replica with one row, a gradient would also be summed along the axis of rows. Bodies that get all rows
        # have the axes of one process.
        sums = op.type == "Sum" and _are_axes_of_gradient(op.inputs[1]) and not self._depth
        if sums and ins[1].const is not None and (self._has_all_rows(ins[0]) or not is_sharded(ins[0])):
            self._edit(op, 1, ins[1], conversions.Numbers(()))
        if is_of_own_diagonal(op, ins):
            if self._depth:
                raise NoRule
            at = DIAGONAL_NUMBERS[op.type]
            number = dataclasses.replace(ins[at], const=None, indexed_rows=shape_of(ins[0])[-1])
            self._edit(op, at, number, conversions.Offset())
        if op.type not in _SIZES:
            return
        [result, *_] = values
        for i in _SIZES[op.type]:
            value = ins[i] if i < len(ins) else None
            if value is None or value.const is None:
                continue
            of_rows = [j for j, size in enumerate(np.ravel(value.const)) if has_row_symbol(size, self.rows)]
            if not of_rows:
                continue
            own = self._own_sizes(op, ins, result, i)
            if any((j in own) == value.is_total for j in of_rows):
                if self._depth:
                    raise NoRule
                self._edit(op, i, value, conversions.Numbers(own))

    def _own_sizes(self, op: Any, ins: Sequence[Value], result: Value, position: int) -> tuple[int, ...]:
        """Returns the positions of the sizes, in the input at a position, that must be those of this replica."""
        sizes = ins[position].const
        of = {"StridedSlice": ins[0], "StridedSliceGrad": result}.get(op.type)
        if of is not None:
            if not isinstance(of.placement, Shard):
                return ()
            if self._has_all_rows(of):
                raise NoRule
            is_of_limits = op.type == "StridedSlice" or position > 0
            axes = slices.axes(op, len(sizes), of.rank) if is_of_limits else list(range(of.rank))
            return tuple(i for i, axis in enumerate(axes) if axis == of.placement.axis)
        if not isinstance(result.placement, Shard):
            return ()
        if np.ndim(sizes):
            return (result.placement.axis,)
        return (0,) if op.type in ("Range", "UnsortedSegmentSum") else ()

    def _by_rule(self, op: Any, ins: Sequence[Value]) -> list[Value]:
        rule = RULES.get(op.type)
        is_stateful, arguments = self._definitions.of(op)
        if len(arguments) == len(ins):  # otherwise there are lists of inputs
            sizes = _SIZES.get(op.type, ())
            for i, (value, argument) in enumerate(zip(ins, arguments, strict=True)):
                if argument in _NUMBERS and value.const is None and not _is_same(value):
                    raise NoRule
                if argument in _VALUES and i not in sizes and has_row_counts(value, self.rows):
                    raise NoRule
        if rule is not None:
            try:
                return rule(self, op, ins)
            except NoRule:
                if any(value.handle is not None for value in ins) or op.type in _WITH_BODIES:
                    raise
        if any(value.is_empty or value.indexed_rows is not None for value in ins) or any(map(is_sharded, ins)):
            raise NoRule
        held = [self.contents[value.handle] for value in ins if value.handle in self.contents]
        if not all(is_replicated(content) and content.scale == UNSCALED for content in held):
            raise NoRule
        # The same inputs on all replicas give the same results.
        unscaled(self, [value for value in ins if value.handle is None])
        for value in ins:
            if value.handle in self.contents and op.type not in _tf.READS:
                self.contents[value.handle] = dataclasses.replace(self.contents[value.handle], is_zero=False)
        # Operations that draw random numbers or call Python may give different results.
        is_own = is_stateful and not any(value.handle is not None for value in ins)
        return [Value(self.shape(t), Drawn() if is_own and _is_exchanged(t.dtype) else Replicate()) for t in op.outputs]

    def _unplaced(self, op: Any, ins: Sequence[Value], placement: Unplaced) -> list[Value]:
        if not op.outputs:  # its effect is treated like a variable that it writes
            self.contents[op.name] = Value(None, placement)
        for value in ins:
            if value.handle is not None and op.type not in _tf.READS and op.type not in _WITH_BODIES:
                self.contents[value.handle] = Value(None, placement)
        # An open shape is not known either.
        shapes = [tensor.shape.as_list() if tensor.shape.is_fully_defined() else None for tensor in op.outputs]
        return [Value(None if shape is None else tuple(shape), placement) for shape in shapes]

    def _checked(self, op: Any, tensor: Any, value: Value) -> Value:
        """Compares a symbolic shape with the static one and the placement; returns Unplaced if they differ."""
        if value.shape is None or value.is_list or value.handle is not None:
            return value
        if is_sharded(value):
            size = value.shape[value.placement.axis]  # type: ignore[union-attr]
            if size is not None and sum(power for s, power in dims.symbols(size).items() if s in self.rows) > 1:
                return self._unplaced(op, [], Unplaced(op))[tensor.value_index]
        if tensor.shape.rank is None:
            return value
        pairs = list(zip(value.shape, tensor.shape.as_list(), strict=False))
        if len(value.shape) != tensor.shape.rank or any(isinstance(a, int) and b not in (a, None) for a, b in pairs):
            return self._unplaced(op, [], Unplaced(op))[tensor.value_index]
        return value

    # -- marks -----------------------------------------------------------------------------------------------------

    def _declared(self, op: Any, what: str) -> Value:
        [tensor] = op.outputs
        if what == "share":
            return Value((), Replicate(), PER_COUNT)
        if what in ("full", "mean"):
            is_mean = what == "mean"
            return Value(self.shape(tensor), Partial() if is_mean else Replicate(), PER_MEAN if is_mean else UNSCALED)
        if what == "drawn":
            return Value(self.shape(tensor), Drawn())
        if what in ("parts", "own"):
            return self._unplaced(op, [], Unplaced(op, what))[0]
        shape = self.shape(tensor, {0: dims.symbol(ROWS)})
        return Value(shape, Shard(0), PER_MEAN if what == "gradients of rows" else UNSCALED)

    def _looked_up(self, op: Any, ids: Value | None) -> Value:
        """Returns the value of looked-up rows, one for each id."""
        [tensor] = op.outputs
        if ids is None or ids.shape is None or isinstance(ids.placement, Unplaced) or is_partial(ids):
            return self._unplaced(op, [], Unplaced(op))[0]
        return Value(self.shape(tensor, dict(enumerate(ids.shape))), ids.placement)

    def _compared(self, op: Any, value: Value, like: Value | None, what: str, name: str) -> Value:
        """Returns the value of a marked tensor, converted to the expectation of the mark if possible."""
        if isinstance(value.placement, Unplaced):
            reason = value.placement.reason
            if reason == "own" and what in ("mean", "rows of gradients", "ids of gradients"):
                return value  # of a weight of a declared tensor, whose gradient is one of rows
            self.findings.append(Finding("rows" if reason == "own" else reason, value.placement.op, name))
            return value
        if value.is_zero and what not in ("same", "rows", "concatenated"):
            return value
        try:
            fits = _fits(value, scale_of(self, value), what)
        except NoRule:  # sizes, some of which depend on rows
            fits = False
        if what == "added":
            fits = like is not None and like.adds_to is not None and value.adds_to is like.adds_to
        fits = fits and value.indexed_rows is None
        if what == "ids of gradients" and like is not None:
            fits = fits and _are_rows_of(value, like)
        elif what in ("rows of gradients", "ids of gradients"):
            fits = fits and not self._has_all_rows(value)
        if fits:
            return value
        found = None
        if not self._depth:
            found = conversions.towards(value, what, self.rows, op.outputs[0].dtype.is_integer, like)
        if found is None or any(_needs_other_dtype(op.inputs[0], value, conversion) for conversion in found):
            self.findings.append(Finding("rows", root(op), name))
            return value
        for conversion in found:
            self._edit(op, 0, value, conversion)
            value = conversions.converted(value, conversion)
        return value

    # -- shapes ----------------------------------------------------------------------------------------------------

    def shape(
        self, tensor: Any, known: dict[int, Size] | None = None, like: Sequence[Size] | None = None
    ) -> tuple[Size, ...] | None:
        """Returns the sizes of an output: known ones, static ones, those of `like`, or new symbols."""
        if tensor.shape.rank is None:
            return None
        name = f"open:{self.label(tensor.op)}:{tensor.value_index}"
        sizes: list[Size] = []
        for axis, static in enumerate(tensor.shape.as_list()):
            size = (known or {}).get(axis, static)
            if size is None and like is not None and axis < len(like):
                size = like[axis]
            sizes.append(dims.symbol(f"{name}/{axis}") if size is None else size)
        return tuple(sizes)

    def new_rows(self, op: Any, of: Any = None) -> str:
        """Returns a symbol for rows that an operation makes. The same `of` gives the same symbol."""
        name = f"rows:{self.label(op)}"
        if of is not None and (self._depth or op.name in self._needed):  # others share no names with twins
            name = self._row_symbols.setdefault(of, name)
        self.rows.add(name)
        return name


# Operations that add their inputs or concatenate them.
_SUMS = ("Add", "AddV2", "AddN", "Sub", "Select", "SelectV2", "Pack", "ConcatV2", "BiasAdd", "TensorScatterAdd")
_NO_TERMS = {"Select": 0, "SelectV2": 0, "ConcatV2": -1, "TensorScatterAdd": 1}


def _is_linear_in_own(op: Any, ins: Sequence[Value], of_own: Sequence[bool], rows: set[str]) -> bool:
    """Returns True if an operation on results of tfring's own operations keeps sums over replicas.

    It does in a backward pass, and if it multiplies by numbers that all replicas hold.
    """
    if _tf.is_of_backward_pass(op):
        return True
    if op.type == "Cast":
        return bool(op.outputs[0].dtype.is_floating)
    if op.type in (*_SUMS, *_tf.PASSES_ON, "Neg", "UnsortedSegmentSum"):
        return of_own[0]
    others = [value for value, is_one in zip(ins, of_own, strict=True) if not is_one]
    is_product = sum(of_own) == 1 and (op.type == "Mul" or (op.type == "RealDiv" and of_own[0]))
    return is_product and all(is_replicated(v) and v.scale == UNSCALED and not has_row_counts(v, rows) for v in others)


def _are_axes_of_gradient(axes: Any) -> bool:
    """Returns True if a gradient is summed along these axes, with or without an offset, as for einsum."""
    if axes.op.type == "AddV2":
        return any(map(_are_axes_of_gradient, axes.op.inputs))
    return axes.op.type == "BroadcastGradientArgs"


def _terms(op: Any) -> list[int]:
    """Returns the positions of inputs that an operation adds or concatenates."""
    if op.type not in _SUMS:
        return []
    positions = list(range(len(op.inputs)))
    if op.type in _NO_TERMS:
        positions.pop(_NO_TERMS[op.type])
    return positions


def _adds_to(op: Any, ins: Sequence[Value]) -> Any:
    """Returns the content of a variable if a result is its value, or that plus a part of the batch."""
    if op.type in _tf.PASSES_ON:
        return ins[0].adds_to
    others = [value for value in ins if value.adds_to is None]
    is_sum = op.type in ("Add", "AddV2") or (op.type == "Sub" and ins[0].adds_to is not None)
    is_added = is_sum and len(others) == 1 and others[0].is_held is False
    return next(value.adds_to for value in ins if value.adds_to is not None) if is_added else None


# The inputs that are sizes of results, or begins and ends of slices.
_SIZES: dict[str, tuple[int, ...]] = {
    **{name: (0,) for name in ("Fill", "RandomStandardNormal", "RandomUniform", "RandomUniformInt", "TruncatedNormal")},
    **{name: (0,) for name in ("AvgPoolGrad", "AvgPool3DGrad", "Conv2DBackpropInput", "Conv3DBackpropInputV2")},
    **{f"StatelessRandom{name}": (0,) for name in ("Uniform", "UniformV2", "UniformIntV2", "Normal", "NormalV2")},
    **{f"StatelessTruncatedNormal{name}": (0,) for name in ("", "V2")},
    **{name: (1,) for name in ("Reshape", "BroadcastTo", "Tile", "OneHot")},
    "DepthwiseConv2dNativeBackpropInput": (0,),
    "Range": (0, 1, 2),
    "ScatterNd": (2,),
    "Slice": (1, 2),
    "StridedSlice": (1, 2, 3),
    "StridedSliceGrad": (0, 1, 2, 3),
    "UnsortedSegmentSum": (2,),
    "ResourceStridedSliceAssign": (1, 2, 3),
}


# Names, in definitions of operations, of inputs that determine the amount or position of a part of another input, or
# the size of results. Results for inputs that differ from those of one process do not belong to the whole batch.
_NUMBERS = frozenset(
    (
        *("axis", "dim", "dimension", "dims", "perm", "reduction_indices", "split_dim"),
        *("begin", "end", "strides", "start", "limit", "delta", "shift", "n", "k"),
        *("shape", "size", "size_splits", "multiples", "paddings", "block_shape", "crop_size", "depth"),
        *("fft_length", "filter_sizes", "input_sizes", "ksize", "maxval", "minval", "orig_input_shape", "output_shape"),
        *("num", "num_cols", "num_elements", "num_lower", "num_rows", "num_samples", "num_segments", "num_upper"),
        *("element_shape", "max_num_elements"),
    )
)
# These inputs, and those that select entries, must have the numbers of rows of the whole batch.
_VALUES = _NUMBERS - {"element_shape"} | {"index", "indices", "segment_ids"}


def _is_same(value: Value) -> bool:
    """Returns True if all replicas hold the value of one process, or the value is Unplaced (with its reason)."""
    if isinstance(value.placement, Unplaced):
        return True
    return is_replicated(value) and value.scale == UNSCALED and value.indexed_rows is None


# Operations of `tf.random.normal`, `tf.nn.dropout` and similar functions on drawn numbers.
_OF_EACH_NUMBER = (
    *("Identity", "Cast", "Mul", "AddV2", "Add", "Sub", "RealDiv", "Greater", "GreaterEqual", "Less", "Floor"),
)


def _draws_each_number(op: Any) -> bool:
    """Returns True if an operation draws independent numbers, or computes each result from one such number."""
    while op.type in _OF_EACH_NUMBER:
        tensors = [tensor for tensor in op.inputs if tensor.shape.rank != 0]
        if len(tensors) != 1:
            return False
        op = tensors[0].op
    return op.type in DRAWS


def _is_replica_id(tensor: Any) -> bool:
    """Returns True for the tensor that TensorFlow returns as `replica_id_in_sync_group`."""
    return tensor.op.type == "Const" and "replica_id_in_sync_group" in tensor.op.name.rpartition("/")[2]


def _depends_on(value: Value, prefix: str) -> bool:
    """Returns True if numbers in a value, or its scale, have a symbol with this prefix."""
    names = {name for name, _ in value.scale}
    if value.const is not None:
        names.update(name for size in np.ravel(value.const) for name in dims.symbols(size))
    return any(name.startswith(prefix) for name in names)


def dependency_names(graph: Any, is_end: Callable[[Any], Any]) -> set[str]:
    """Returns the names of operations of a kind, and of all operations they are computed from."""
    todo = [op for op in graph.get_operations() if is_end(op)]
    found = {op.name for op in todo}
    while todo:
        for tensor in todo.pop().inputs:
            if tensor.op.name not in found:
                found.add(tensor.op.name)
                todo.append(tensor.op)
    return found


def _needs_other_dtype(tensor: Any, value: Value, conversion: Conversion) -> bool:
    """Returns True if replicas do not exchange tensors of this dtype."""
    dtype = tensor.dtype
    if value.is_list:
        items = _tf.spec_of_items(tensor)
        if items is None:
            return True
        dtype = items.dtype
    return conversions.needs_collective(value, conversion) and not _is_exchanged(dtype)


def _is_exchanged(dtype: Any) -> bool:
    return dtype.is_floating or dtype.is_integer or dtype.is_bool


# Operations of a step, or a layer, that exchanges tensors of replicas by itself.
_COLLECTIVES = tuple(
    f"Tfring{kind}"
    for kind in ("AllReduce", "Reduce", "AllGatherRows", "AllReduceRows", "ReduceScatter", "Exchange", "Broadcast")
)


def has_row_symbol(size: Size, rows: set[str]) -> bool:
    """Returns True if a size depends on rows."""
    return any(name in rows for name in dims.symbols(size))


def _may_write(op: Any, ins: Sequence[Value]) -> bool:
    """Returns True if an operation, or its body, may change the content of variables, or has an effect."""
    return not op.outputs or op.type in _WITH_BODIES or any(value.handle is not None for value in ins)


# Operations with bodies, and IdentityN: not every input affects all outputs.
_WITH_BODIES = (
    "PartitionedCall",
    "StatefulPartitionedCall",
    "If",
    "StatelessIf",
    "Case",
    "StatelessCase",
    "While",
    "StatelessWhile",
    "IdentityN",
)


def _fits(value: Value, scale: Any, what: str) -> bool:
    """Returns True if a value meets an expectation."""
    if what == "ids of gradients":
        return not is_partial(value)
    if what in ("rows", "concatenated", "gradients of rows", "rows of gradients"):
        if is_replicated(value):
            return scale == UNSCALED and what == "rows of gradients"
        if is_partial(value):
            return value.placement == Partial() and scale == PER_MEAN and what == "rows of gradients"
        if what in ("rows", "concatenated"):  # in the order of rows, so without blocks
            return value.placement == Shard(0) and scale == UNSCALED
        return isinstance(value.placement, Shard) and value.placement.axis == 0 and scale == PER_MEAN
    if what == "same":
        return is_replicated(value) and scale == UNSCALED
    if what == "mean":
        return value.is_held is False and (value.placement, scale) in ((Partial(), PER_MEAN), (Replicate(), UNSCALED))
    assert what in ("sum", "added")
    return value.is_held is True and (value.placement, scale) == (Partial(), UNSCALED)


def _are_rows_of(ids: Value, values: Value) -> bool:
    """Returns True if a replica has the ids of its rows of gradients: of its own rows, or of all rows."""
    if values.is_zero or isinstance(values.placement, Unplaced):
        return True
    return ids.placement == values.placement if is_sharded(ids) else not is_sharded(values)


def root(op: Any) -> Any:
    """Returns the operation whose result reaches another through views: the one to report to a user."""
    passes = ("Identity", "Cast", "Reshape", "StopGradient", "SelectV2", "Squeeze", "IdentityN")
    while op.type in passes and len(op.inputs):
        op = op.inputs[1 if op.type == "SelectV2" else 0].op
    return op


def _is_share(tensor: Any) -> bool:
    while tensor.op.type in ("Identity", "Cast") and marks.declared(tensor.op) is None:
        tensor = tensor.op.inputs[0]
    return marks.declared(tensor.op) == "share"


def _passed_on(tensor: Any) -> Any:
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor


def in_order(graph: Any) -> Iterable[Any]:
    """Returns operations in creation order, but inputs first: gradients of loops add inputs to earlier loops."""
    done: set[str] = set()
    ordered = []
    for last in graph.get_operations():
        if last.name in done:
            continue
        done.add(last.name)
        todo = [(last, iter([*(tensor.op for tensor in last.inputs), *last.control_inputs]))]
        while todo:
            op, before = todo[-1]
            following = next((each for each in before if each.name not in done), None)
            if following is None:
                ordered.append(op)
                todo.pop()
            else:
                done.add(following.name)
                todo.append((following, iter([*(t.op for t in following.inputs), *following.control_inputs])))
    return ordered
