"""Reads from a graph how a value was computed: from which variables, and whether from rows. Eagerly nothing tells."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfring.cross_device_ops import values_of

_PASSES = ("Identity", "Cast", "Reshape", "StopGradient", "EnsureShape", "Squeeze", "ExpandDims")
_LARGER, _SMALLER = ("Greater", "GreaterEqual"), ("Less", "LessEqual")


def is_symbolic(value: Any) -> bool:
    """Returns True if `value` is a tensor of a graph."""
    return tf.is_tensor(value) and hasattr(value, "graph") and hasattr(value, "op")


def outermost(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor that functions around this one captured: of `tf.cond`, `tf.while_loop`."""
    while is_symbolic(tensor) and tensor.op.type == "Placeholder":
        captures = getattr(tensor.graph, "captures", ())
        outside = next((external for external, internal in captures if internal is tensor), None)
        if outside is None:
            break
        tensor = outside
    return tensor


def _passed_on(tensor: tf.Tensor, kinds: Any = _PASSES) -> Any:
    """The tensor that reaches this one through operations that leave its numbers as they are."""
    tensor = outermost(tensor)
    while is_symbolic(tensor) and tensor.op.type in kinds:
        tensor = outermost(tensor.op.inputs[0])
    return tensor


def handles_of(variable: Any) -> set:
    """The identities of the handles of a variable's copies."""
    return {id(copy.handle) for copy in values_of(variable)}


def is_read(tensor: tf.Tensor, variable: Any) -> bool:
    """Returns True if a tensor is the value of a variable, or was when it was read."""
    tensor = _passed_on(tensor)
    if not is_symbolic(tensor) or tensor.op.type != "ReadVariableOp":
        return False
    return id(outermost(tensor.op.inputs[0])) in handles_of(variable)


def read_of(tensor: tf.Tensor) -> tf.Operation:
    """The operation that read a variable, where `is_read`."""
    return _passed_on(tensor).op


def is_same_everywhere(variable: Any, value: Any) -> bool:
    """Returns True if a value was computed from constants and the variable alone."""
    todo, seen = [value], set()
    while todo:
        tensor = outermost(todo.pop())
        if not is_symbolic(tensor):
            return False  # captured
        op = tensor.op
        if id(op) in seen or op.type == "Const" or is_read(tensor, variable):
            continue
        seen.add(id(op))
        if not op.inputs or op.op_def.is_stateful or op.type == "Placeholder":
            return False
        todo.extend(op.inputs)
    return True


def last_step(variable: Any, value: Any) -> str:
    """The last operation on a variable and something else: "max", "min", "add", or "" for any other."""
    last = _passed_on(value)
    if not is_symbolic(last):
        return ""
    op = last.op
    if op.type in ("SelectV2", "Select"):
        return _choice(variable, op)
    if not any(is_read(tensor, variable) for tensor in op.inputs):
        return ""
    return {"Maximum": "max", "Minimum": "min", "AddV2": "add", "Add": "add", "Sub": "add"}.get(op.type, "")


def _choice(variable: Any, op: tf.Operation) -> str:
    """Returns "max" or "min" for `where(x > variable, x, variable)` and its like, else ""."""
    condition, chosen, other = map(_passed_on, op.inputs)
    if not is_symbolic(condition) or condition.op.type not in (*_LARGER, *_SMALLER):
        return ""

    def same(a: Any, b: Any) -> Any:
        return a is b or (is_read(a, variable) and is_read(b, variable))

    left, right = map(_passed_on, condition.op.inputs)
    if not (is_read(left, variable) or is_read(right, variable)):
        return ""
    is_larger = condition.op.type in _LARGER
    if same(left, chosen) and same(right, other):
        return "max" if is_larger else "min"
    if same(left, other) and same(right, chosen):
        return "min" if is_larger else "max"
    return ""


def puts_rows_in(value: Any) -> bool:
    """Returns True if a value is a queue or a memory: its last operation appends rows to others or replaces them."""
    last = _passed_on(value, (*_PASSES, "StridedSlice", "Slice", "Transpose"))
    if not is_symbolic(last):
        return False
    return last.op.type in ("ConcatV2", "TensorScatterUpdate") or last.op.type.startswith("ResourceScatter")


def is_count(increment: Any) -> bool:
    """Returns True if a float is made of integers, booleans or one-hot rows: a number of rows."""
    tensor = increment
    while is_symbolic(tensor) and tensor.op.type in (*_PASSES, "Sum"):
        if tensor.op.type == "Cast" and not tensor.op.inputs[0].dtype.is_floating:
            return True
        tensor = outermost(tensor.op.inputs[0])
    return is_symbolic(tensor) and tensor.op.type == "OneHot"


def increment_of(variable: Any, value: Any) -> Any:
    """Returns what was added to a variable, where `last_step` is "add"."""
    op = _passed_on(value).op
    return next((t for t in op.inputs if not is_read(t, variable)), op.inputs[-1])


def is_difference(value: Any) -> bool:
    """Returns True if the last operation, where `last_step` is "add", subtracts what `increment_of` returns."""
    return _passed_on(value).op.type == "Sub"


def kind_of(value: Any, share: tf.Tensor | None = None) -> str:
    """Tells what a value that has no rows is of the rows of a batch.

    Args:
      value: a tensor of a graph.
      share: that of this replica's rows; what is weighed by it is a part of a sum, and what is divided by it of a mean.

    Returns:
      "constant": it does not depend on rows; "mean": it is linear in means over rows; "sum": in sums over rows, or in
      numbers of rows; "other": a product, a ratio, a root or the like of these; "" where the graph does not tell.
    """

    passes = (*_PASSES, "Neg", "BroadcastTo")
    share = _passed_on(share, passes)

    def kind(tensor: tf.Tensor) -> str:
        tensor = _passed_on(tensor, passes)
        if tensor is share:
            return "share"
        if not is_symbolic(tensor) or tensor.op.type in ("ZerosLike", "OnesLike") or _is_constant(tensor):
            return "constant"
        if _is_shape_of_rows(tensor):
            return "count"
        op = tensor.op
        if _has_rows(tensor) or "gradient_tape/" in op.name:
            return ""
        if op.type in ("Mean", "Sum") and (not _has_rows(op.inputs[0]) or _is_over_rows(op)):
            return op.type.lower() if _has_rows(op.inputs[0]) else kind(op.inputs[0])
        if _adds_rows(op):
            return "sum"
        match op.type:
            case "AddV2" | "Add" | "Sub" | "AddN":
                return _kind_of_sum(set(map(kind, op.inputs)))
            case "SelectV2":  # of a replica without rows
                return _kind_of_sum(set(map(kind, op.inputs[1:])))
            case "Cumsum" | "ReverseV2" | "Transpose" | "Tile" if not _has_rows(op.inputs[0]):
                return kind(op.inputs[0])
            case "Pack" | "StridedSlice" | "ConcatV2":
                return _kind_of_sum({kind(t) for t in op.inputs if not t.dtype.is_integer})
            case "Mul" | "MulNoNan":
                return _kind_of_product(*map(kind, op.inputs))
            case "RealDiv" | "DivNoNan":
                return _kind_of_ratio(*map(kind, op.inputs))
            case "Max" | "Min" | "Prod" | "All" | "Any" | "ArgMax" | "ArgMin":
                return "other"
        calls = any(value.HasField("func") for value in op.node_def.attr.values())
        if calls or op.op_def.is_stateful or not op.inputs or any(map(_has_rows, op.inputs)):
            return ""
        return "" if "" in map(kind, op.inputs) else "other"

    found = kind(value)
    return {"count": "sum", "share": "sum"}.get(found, found)


def is_mean_of_rows(value: Any, share: tf.Tensor | None = None) -> bool:
    """Returns True if a number is linear in means over the rows of a batch, and in what depends on no row."""
    return kind_of(value, share) in ("mean", "constant")


def _kind_of_sum(kinds: set) -> str:
    kinds = {"sum" if kind in ("count", "share") else kind for kind in kinds} - {"constant"}
    if len(kinds) <= 1:
        return kinds.pop() if kinds else "constant"
    return "" if "" in kinds else "other"


def _kind_of_product(one: str, other: str) -> str:
    if "constant" in (one, other):
        return other if one == "constant" else one
    if "" in (one, other):
        return ""
    if {one, other} == {"count"}:
        return "count"
    return "sum" if {one, other} & {"count", "share"} else "other"


def _kind_of_ratio(one: str, other: str) -> str:
    if other == "constant":
        return one
    if "" in (one, other):
        return ""
    return "mean" if one in ("sum", "count") and other in ("count", "share") else "other"


def _adds_rows(op: tf.Operation) -> bool:
    """Returns True if an operation, whose result has no rows, adds up values of rows."""
    inputs = [t for t in op.inputs if t.shape.rank]
    match op.type:
        case "MatMul":
            return inputs[0].shape[0 if op.get_attr("transpose_a") else 1] is None
        case "BatchMatMulV2":
            return inputs[0].shape[-2 if op.get_attr("adj_x") else -1] is None
        case "Einsum" | "UnsortedSegmentSum" | "ScatterNd" | "DenseBincount" | "Bincount":
            return any(map(_has_rows, inputs))
    return False


def _has_rows(tensor: tf.Tensor) -> bool:
    return bool(tensor.shape.rank) and tensor.shape[0] is None


def _is_over_rows(op: tf.Operation) -> bool:
    axes = tf.get_static_value(op.inputs[1])
    return axes is not None and bool({0, -op.inputs[0].shape.rank} & set(axes.reshape(-1).tolist()))


def _is_shape_of_rows(tensor: tf.Tensor) -> bool:
    """Returns True if a number was computed from a shape that has rows."""
    todo = [tensor]
    while todo:
        op = outermost(todo.pop()).op
        if op.type in ("Shape", "Size"):
            return _has_rows(op.inputs[0])
        if op.type not in (*_PASSES, "Prod", "Mul", "StridedSlice", "Pack", "GatherV2"):
            continue
        todo.extend(t for t in op.inputs if is_symbolic(t))
    return False


class StateReads:
    """Finds what depends on variables of which each replica has its own, such as the state of metrics.

    Args:
      is_state: tells whether a handle is that of such a variable.
    """

    def __init__(self, is_state: Any) -> None:
        self._is_state = is_state
        self._known = _Known()

    def any_in(self, value: Any) -> bool:
        """Returns True if a value was computed from such state."""
        return _depends(value, self._source, self._known)

    def _source(self, tensor: tf.Tensor) -> bool | None:
        return None if is_symbolic(tensor) else tensor.dtype == tf.resource and self._is_state(tensor)

    def kind(self, variable: Any, value: Any) -> str:
        """Tells how a value depends on the variable it is written to.

        Returns:
          "none": not at all, nor on other such state; "added": the variable, and something that does not depend on such
          state; "linear": the variable times a constant, and such things; "" for all else.
        """
        if not self.any_in(value):
            return "none"
        if is_read(value, variable):
            return "added"
        tensor = _passed_on(value)
        if not is_symbolic(tensor):
            return ""
        op = tensor.op
        kinds = [self.kind(variable, t) for t in op.inputs]
        match op.type, kinds:
            case _ if "" in kinds:
                return ""
            case ("AddV2" | "Add"), (["none", "added"] | ["added", "none"]):
                return "added"
            case "Sub", ["added", "none"]:
                return "added"
            case ("AddV2" | "Add" | "Sub" | "Neg"), _:
                return "linear"
            case ("Mul" | "MulNoNan" | "RealDiv" | "DivNoNan"), [_, "none"]:
                return "linear" if _is_constant(op.inputs[1]) else ""
            case "Mul", ["none", _]:
                return "linear" if _is_constant(op.inputs[0]) else ""
        return ""


def _is_constant(tensor: tf.Tensor) -> bool:
    """Returns True if a value comes from constants and from variables that all replicas share."""
    return not _depends(tensor, _may_differ, _not_constant)


def _may_differ(tensor: tf.Tensor) -> bool | None:
    if not is_symbolic(tensor) or tensor.op.type == "ReadVariableOp":
        return False
    return True if tensor.op.op_def.is_stateful or tensor.op.type == "Placeholder" else None


_Known = weakref.WeakKeyDictionary[tf.Graph, dict[int, bool]]  # by graph, and in it by the identity of an operation
_not_constant = _Known()  # kept: the state of a deep model is written from most of its graph, again and again


def _depends(value: Any, source: Callable[[tf.Tensor], bool | None], known: _Known) -> bool:
    """Returns True if a value was computed from a source.

    Args:
      value: a tensor.
      source: tells of a tensor whether it is one; None where its operation's inputs tell.
      known: what has been found before, to which this adds.
    """

    def found(tensor: tf.Tensor) -> bool | None:
        if not is_symbolic(tensor):
            return source(tensor)
        of_graph, key = known.setdefault(tensor.op.graph, {}), id(tensor.op)
        if key not in of_graph:
            answer = source(tensor)
            if answer is None:
                return None
            of_graph[key] = answer
        return of_graph[key]

    first = outermost(value)
    todo = [first]
    while todo:
        if found(todo[-1]) is not None:
            todo.pop()
            continue
        op = todo[-1].op
        inputs = [outermost(t) for t in op.inputs]
        unknown = [t for t in inputs if found(t) is None]
        if unknown and not any(map(found, inputs)):
            todo.extend(unknown)
        else:
            known.setdefault(op.graph, {})[id(op)] = any(map(found, inputs))
    return bool(found(first))
