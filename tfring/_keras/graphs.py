"""Reads from a graph how a value was computed: from which variables, and whether from rows. Eagerly nothing tells."""

from __future__ import annotations

import tensorflow as tf

from tfring.cross_device_ops import values_of

_PASSES = ("Identity", "Cast", "Reshape", "StopGradient", "EnsureShape", "Squeeze", "ExpandDims")
_LARGER, _SMALLER = ("Greater", "GreaterEqual"), ("Less", "LessEqual")


def is_symbolic(value) -> bool:
    """Whether `value` is a tensor of a graph."""
    return tf.is_tensor(value) and hasattr(value, "graph") and hasattr(value, "op")


def outermost(tensor):
    """The tensor that functions around this one captured: of `tf.cond`, `tf.while_loop`."""
    while is_symbolic(tensor) and tensor.op.type == "Placeholder":
        captures = getattr(tensor.graph, "captures", ())
        outside = next((external for external, internal in captures if internal is tensor), None)
        if outside is None:
            break
        tensor = outside
    return tensor


def _passed_on(tensor, kinds=_PASSES):
    """The tensor that reaches this one through operations that leave its numbers as they are."""
    tensor = outermost(tensor)
    while is_symbolic(tensor) and tensor.op.type in kinds:
        tensor = outermost(tensor.op.inputs[0])
    return tensor


def handles_of(variable) -> set:
    """The identities of the handles of a variable's copies."""
    return {id(copy.handle) for copy in values_of(variable)}


def is_read(tensor, variable) -> bool:
    """Whether a tensor is what a variable holds, or was when it was read."""
    tensor = _passed_on(tensor)
    if not is_symbolic(tensor) or tensor.op.type != "ReadVariableOp":
        return False
    return id(outermost(tensor.op.inputs[0])) in handles_of(variable)


def read_of(tensor):
    """The operation that read a variable, where `is_read`."""
    return _passed_on(tensor).op


def is_same_everywhere(variable, value) -> bool:
    """Whether a value was computed from constants and the variable alone."""
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


def last_step(variable, value) -> str:
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


def _choice(variable, op) -> str:
    """Returns "max" or "min" for `where(x > variable, x, variable)` and its like, else ""."""
    condition, chosen, other = map(_passed_on, op.inputs)
    if not is_symbolic(condition) or condition.op.type not in (*_LARGER, *_SMALLER):
        return ""

    def same(a, b):
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


def puts_rows_in(value) -> bool:
    """Whether a value is a queue or a memory: its last operation puts rows beside others or in their place."""
    last = _passed_on(value, (*_PASSES, "StridedSlice", "Slice", "Transpose"))
    if not is_symbolic(last):
        return False
    return last.op.type in ("ConcatV2", "TensorScatterUpdate") or last.op.type.startswith("ResourceScatter")


def is_count(increment) -> bool:
    """Whether a float is made of integers or booleans: a number of rows."""
    tensor = increment
    while is_symbolic(tensor) and tensor.op.type in (*_PASSES, "Sum"):
        if tensor.op.type == "Cast" and not tensor.op.inputs[0].dtype.is_floating:
            return True
        tensor = outermost(tensor.op.inputs[0])
    return False


def is_sum_of_rows(increment) -> bool:
    """Whether a number is the sum of something with a row each."""
    last = _passed_on(increment)
    return is_symbolic(last) and last.op.type == "Sum" and last.shape.rank == 0 and last.op.inputs[0].shape.rank != 0


def increment_of(variable, value):
    """Returns what was added to a variable, where `last_step` is "add"."""
    op = _passed_on(value).op
    return next((t for t in op.inputs if not is_read(t, variable)), op.inputs[-1])


def is_mean_of_rows(value) -> bool:
    """Whether a number is made of means over the rows of a batch, and of what does not depend on rows, linearly."""
    tensor = _passed_on(value, ("Identity", "Cast", "StopGradient", "Neg"))
    if _is_constant(tensor):
        return True
    op = tensor.op
    match op.type:
        case "Mean":
            return _has_rows(op.inputs[0]) and _is_over_rows(op)
        case "Sum" if not _has_rows(op.inputs[0]):
            return is_mean_of_rows(op.inputs[0])
        case "DivNoNan" | "RealDiv":
            divided, by = _passed_on(op.inputs[0]), op.inputs[1]
            if _is_shape_of_rows(by):  # Keras' means
                return divided.op.type == "Sum" and _has_rows(divided.op.inputs[0])
            return _is_constant(by) and is_mean_of_rows(op.inputs[0])
        case "AddV2" | "Add" | "Sub" | "AddN":
            return all(map(is_mean_of_rows, op.inputs))
        case "Mul":
            one, other = op.inputs
            return (_is_constant(one) and is_mean_of_rows(other)) or (_is_constant(other) and is_mean_of_rows(one))
        case "SelectV2":  # of a replica without rows
            return is_mean_of_rows(op.inputs[1])
    return False


def _has_rows(tensor) -> bool:
    return bool(tensor.shape.rank) and tensor.shape[0] is None


def _is_over_rows(op) -> bool:
    axes = tf.get_static_value(op.inputs[1])
    return axes is not None and bool({0, -op.inputs[0].shape.rank} & set(axes.reshape(-1).tolist()))


def _is_shape_of_rows(tensor) -> bool:
    """Whether a number was computed from a shape that has rows."""
    todo = [tensor]
    while todo:
        op = outermost(todo.pop()).op
        if op.type == "Shape":
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

    def __init__(self, is_state):
        self._is_state = is_state
        self._known: dict = {}  # by the identity of an operation, it and whether it depends on such state

    def any_in(self, value) -> bool:
        """Whether a value was computed from such state."""
        todo = [outermost(value)]
        while todo:
            tensor = todo[-1]
            if not is_symbolic(tensor) or id(tensor.op) in self._known:
                todo.pop()
                continue
            inputs = [outermost(t) for t in tensor.op.inputs]
            unknown = [t for t in inputs if is_symbolic(t) and id(t.op) not in self._known]
            if unknown:
                todo.extend(unknown)
            else:
                self._known[id(tensor.op)] = tensor.op, any(map(self._is_known, inputs))
        return self._is_known(outermost(value))

    def _is_known(self, tensor) -> bool:
        if is_symbolic(tensor):
            return self._known[id(tensor.op)][1]
        return tensor.dtype == tf.resource and self._is_state(tensor)

    def kind(self, variable, value) -> str:
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


def _is_constant(tensor) -> bool:
    """Whether a value comes from constants and from variables that all replicas share."""
    todo, seen = [tensor], set()
    while todo:
        tensor = outermost(todo.pop())
        if not is_symbolic(tensor):
            continue
        op = tensor.op
        if id(op) in seen or op.type == "ReadVariableOp":
            continue
        seen.add(id(op))
        if op.op_def.is_stateful or op.type == "Placeholder":
            return False
        todo.extend(op.inputs)
    return True
