"""Reads from a graph from which variables a value was computed. Eagerly nothing tells."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfring.cross_device_ops import values_of

_PASSES = ("Identity", "Cast", "Reshape", "StopGradient", "EnsureShape", "Squeeze", "ExpandDims")


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
          state; "" for all else.
        """
        if not self.any_in(value):
            return "none"
        if is_read(value, variable):
            return "added"
        tensor = _passed_on(value)
        if not is_symbolic(tensor) or tensor.op.type not in ("AddV2", "Add", "Sub"):
            return ""
        kinds = [self.kind(variable, t) for t in tensor.op.inputs]
        is_added = kinds == ["added", "none"] or (kinds == ["none", "added"] and tensor.op.type != "Sub")
        return "added" if is_added else ""


_Known = weakref.WeakKeyDictionary[tf.Graph, dict[int, bool]]  # by graph, and in it by the identity of an operation


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
