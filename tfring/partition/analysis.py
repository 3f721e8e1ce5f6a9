"""Walks a traced step and finds what each tensor is of the one that one process computes from the whole batch.

```
graph ─► operations, inputs first ─► small integers ─► a rule by the type of operation ─► Value of each tensor
                                          └─ shapes in terms of n        └─ none, or not exact: Unplaced, and why
marks.declare ─► Value as declared                  marks.expect ─► Finding, unless the Value fits
```

A replica's step is analyzed as it is: nothing is changed. What is Unplaced stays so through all that is computed from
it, so a finding names the first operation, which is where the user has to look.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from tfring import _tf
from tfring.partition import constants, dims, marks
from tfring.partition.dims import Size
from tfring.partition.rules import RULES, Inexact, NoRule
from tfring.partition.rules.table import scale_of, unscaled
from tfring.partition.types import (
    PER_COUNT,
    PER_MEAN,
    ROWS,
    UNSCALED,
    Partial,
    Replicate,
    Shard,
    Unplaced,
    Value,
    is_partial,
    is_replicated,
    is_sharded,
)


class Finding(NamedTuple):
    """A tensor that is not what the step takes it for.

    Attributes:
      reason: a key of `report.REASONS`.
      op: the operation where it ceased to be.
      name: of the tensor.
    """

    reason: str
    op: Any
    name: str


def analyze(graph: Any, is_in_parts: Callable[[Any], bool] = lambda handle: False) -> list[Finding]:
    """Returns what in the graph of a step is not what one process would compute, each once.

    Args:
      graph: a FuncGraph that holds marks. Its inputs are taken to be the same on all replicas, but for those declared.
      is_in_parts: tells of the handle of a variable whether replicas hold parts of a sum in it.
    """
    walk = Walk()
    ins = [walk.input(tensor) for tensor in graph.inputs]
    for tensor, value in zip(graph.inputs, ins, strict=True):
        if value.handle is not None and is_in_parts(tensor):
            walk.contents[value.handle] = Value(None, Partial())
    walk.graph(graph, ins)
    return list(dict.fromkeys(walk.findings))


class Walk:
    """A walk over a graph and the functions in it; see `rules.table.Walk`."""

    def __init__(self) -> None:
        self.rows: set[str] = {ROWS}
        self.contents: dict[Any, Value] = {}
        self.findings: list[Finding] = []
        self._bodies: dict = {}
        self._before_update: dict[Any, Value] = {}

    # -- graphs ----------------------------------------------------------------------------------------------------

    def input(self, tensor: Any) -> Value:
        """Returns the value of a graph's input: a variable, or the same on all replicas."""
        if tensor.dtype.name == "resource":
            return Value((), handle=(id(tensor.graph), tensor.name))
        return Value(self.shape(tensor))

    def graph(self, graph: Any, ins: Sequence[Value]) -> dict[str, Value]:
        """Returns the values of the tensors of a graph, by name, given those of its inputs."""
        known = {tensor.name: value for tensor, value in zip(graph.inputs, ins, strict=True)}
        for op in in_order(graph):
            if op.type == "Placeholder" and op.outputs[0].name in known:
                continue
            values = self._operation(op, [known[tensor.name] for tensor in op.inputs])
            known.update((tensor.name, value) for tensor, value in zip(op.outputs, values, strict=True))
        return known

    def body(self, op: Any, ins: Sequence[Value], attribute: str) -> list[Value]:
        """Walks the function that an attribute of an operation names; returns its outputs."""
        graph = self._body(op, attribute)
        known = self.graph(graph, ins)
        return [known[tensor.name] for tensor in graph.outputs]

    def unchanged(self, op: Any) -> list[bool]:
        """Returns for each variable of a loop whether its body hands it on as it is."""
        graph = self._body(op, "body")
        return [_passed_on(out) is into for out, into in zip(graph.outputs, graph.inputs, strict=True)]

    def _body(self, op: Any, attribute: str) -> Any:
        name = op.get_attr(attribute).name
        if name not in self._bodies:
            self._bodies[name] = _tf.graph_of_function(op.graph, name)
        if self._bodies[name] is None:
            raise NoRule
        return self._bodies[name]

    # -- one operation ---------------------------------------------------------------------------------------------

    def _operation(self, op: Any, ins: Sequence[Value]) -> list[Value]:
        where = marks.updating(op)
        if where == "begin":
            self._before_update = dict(self.contents)
        elif where == "end":
            self.contents = self._before_update
        declared = marks.declared(op)
        if declared is not None:
            return [self._declared(op, declared)]
        expected = marks.expected(op)
        if expected is not None:
            self._compare(op, ins[0], *expected)
        of_shape = constants.of_shape(op, ins) or constants.of_itself(op)
        if of_shape is not None:
            return [Value(numbers.shape, const=numbers) for numbers in of_shape]
        unplaced = next((value.placement for value in ins if isinstance(value.placement, Unplaced)), None)
        if unplaced is not None and op.type not in _WITH_BODIES:
            return self._unplaced(op, ins, unplaced)
        computed = constants.of_operation(op, ins, self.rows)
        if computed is not None:
            return [Value(numbers.shape, const=numbers) for numbers in computed]
        try:
            values = self._by_rule(op, ins)
        except Inexact as found:
            return self._unplaced(op, ins, Unplaced(found.reason, op))
        except NoRule:
            return self._unplaced(op, ins, Unplaced("unknown", op))
        return [self._checked(op, tensor, value) for tensor, value in zip(op.outputs, values, strict=True)]

    def _by_rule(self, op: Any, ins: Sequence[Value]) -> list[Value]:
        rule = RULES.get(op.type)
        if rule is not None:
            try:
                return rule(self, op, ins)
            except NoRule:
                if any(value.handle is not None for value in ins) or op.type in _WITH_BODIES:
                    raise
        if any(value.is_empty or value.points_into for value in ins) or any(map(is_sharded, ins)):
            raise NoRule
        # Of the same on all replicas it makes the same.
        unscaled(self, [value for value in ins if value.handle is None])
        return [Value(self.shape(tensor)) for tensor in op.outputs]

    def _unplaced(self, op: Any, ins: Sequence[Value], placement: Unplaced) -> list[Value]:
        if op.type.startswith("Assign"):
            self.contents[ins[0].handle] = Value(None, placement)
        # Of an open shape nothing is known either.
        shapes = [tensor.shape.as_list() if tensor.shape.is_fully_defined() else None for tensor in op.outputs]
        return [Value(None if shape is None else tuple(shape), placement) for shape in shapes]

    def _checked(self, op: Any, tensor: Any, value: Value) -> Value:
        """Compares a symbolic shape with the static one, and with the placement; where they differ nothing is known."""
        if value.shape is None or value.is_list or value.handle is not None:
            return value
        has_rows = any(name in self.rows for size in value.shape for name in dims.symbols(size))
        if has_rows and not is_sharded(value):
            return self._unplaced(op, [], Unplaced("rows", op))[tensor.value_index]
        if tensor.shape.rank is None:
            return value
        pairs = list(zip(value.shape, tensor.shape.as_list(), strict=False))
        if len(value.shape) != tensor.shape.rank or any(isinstance(a, int) and b not in (a, None) for a, b in pairs):
            return self._unplaced(op, [], Unplaced("unknown", op))[tensor.value_index]
        return value

    # -- marks -----------------------------------------------------------------------------------------------------

    def _declared(self, op: Any, what: str) -> Value:
        [tensor] = op.outputs
        if what == "share":
            return Value((), Replicate(), PER_COUNT)
        if what in ("full", "mean"):
            is_mean = what == "mean"
            return Value(self.shape(tensor), Partial() if is_mean else Replicate(), PER_MEAN if is_mean else UNSCALED)
        if what in ("parts", "fixed"):
            return self._unplaced(op, [], Unplaced(what, op))[0]
        shape = self.shape(tensor, {0: dims.symbol(ROWS)})
        return Value(shape, Shard(0), PER_MEAN if what == "gradients of rows" else UNSCALED)

    def _compare(self, op: Any, value: Value, what: str, name: str) -> None:
        if isinstance(value.placement, Unplaced):
            self.findings.append(Finding(value.placement.reason, value.placement.op, name))
            return
        if value.is_zero:
            return
        try:
            scale = scale_of(self, value)
        except Inexact as found:
            self.findings.append(Finding(found.reason, op, name))
            return
        if not _fits(value, scale, what):
            self.findings.append(Finding(_why_not(value, scale, what), _root(op), name))

    # -- shapes ----------------------------------------------------------------------------------------------------

    def shape(
        self, tensor: Any, known: dict[int, Size] | None = None, like: Sequence[Size] | None = None
    ) -> tuple[Size, ...] | None:
        """Returns the sizes of an output: those known, static ones, those of `like`, or new symbols."""
        if tensor.shape.rank is None:
            return None
        sizes: list[Size] = []
        for axis, static in enumerate(tensor.shape.as_list()):
            size = (known or {}).get(axis, static)
            if size is None and like is not None and axis < len(like):
                size = like[axis]
            sizes.append(dims.symbol(f"open:{tensor.graph.name}/{tensor.name}/{axis}") if size is None else size)
        return tuple(sizes)

    def new_rows(self, op: Any) -> str:
        """Returns a new symbol of rows, which an operation makes."""
        name = f"rows:{op.graph.name}/{op.name}"
        self.rows.add(name)
        return name


# Of these and of an IdentityN, one input does not go into all outputs.
_WITH_BODIES = (
    "PartitionedCall",
    "StatefulPartitionedCall",
    "If",
    "StatelessIf",
    "While",
    "StatelessWhile",
    "IdentityN",
)


def _fits(value: Value, scale: Any, what: str) -> bool:
    """Returns True if a value is what is expected."""
    if what in ("rows", "gradients of rows", "rows of gradients"):
        if is_replicated(value):
            return scale == UNSCALED and what == "rows of gradients"
        if is_partial(value):
            return value.placement == Partial() and scale == PER_MEAN and what == "rows of gradients"
        is_first = isinstance(value.placement, Shard) and value.placement.axis == 0
        return is_first and scale == (UNSCALED if what == "rows" else PER_MEAN)
    if what == "same":
        return is_replicated(value) and scale == UNSCALED
    if what == "mean":
        return (value.placement, scale) in ((Partial(), PER_MEAN), (Replicate(), UNSCALED))
    if what == "sum":
        return (value.placement, scale) in ((Partial(), UNSCALED), (Replicate(), PER_COUNT))
    return value.placement in (Partial(what), Replicate()) and scale == UNSCALED


def _why_not(value: Value, scale: Any, what: str) -> str:
    if is_sharded(value):
        return "rows" if what in ("rows", "max", "min") else "vector"
    if any(name != ROWS for name, _ in scale):
        return "kept"
    if isinstance(value.placement, Partial) and value.placement.op in ("max", "min"):
        return "over rows"
    if what in ("mean", "rows of gradients") and is_partial(value) and scale == UNSCALED:
        return "sum"
    if what in ("sum", "same"):
        return "not a sum" if what == "sum" else "not the same"
    return "counts" if is_replicated(value) else "mixed"


def _root(op: Any) -> Any:
    """Returns the operation whose result reaches another through views: the one to tell a user of."""
    passes = ("Identity", "Cast", "Reshape", "StopGradient", "SelectV2", "Squeeze", "IdentityN")
    while op.type in passes and len(op.inputs):
        op = op.inputs[1 if op.type == "SelectV2" else 0].op
    return op


def _passed_on(tensor: Any) -> Any:
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor


def in_order(graph: Any) -> Iterable[Any]:
    """Returns operations as they were made, but inputs first: gradients of loops add inputs to loops made before."""
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
