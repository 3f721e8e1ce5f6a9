"""Finds, in a graph, the variable that a tensor is read from and operations that may write it; not in eager mode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfring import _tf
from tfring.cross_device_ops import values_of


def _is_symbolic(value: Any) -> bool:
    """Returns True if `value` is a tensor of a graph."""
    return tf.is_tensor(value) and hasattr(value, "graph") and hasattr(value, "op")


def outermost(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the outermost tensor that a tensor was captured from, through functions of `tf.cond`, `tf.while_loop`."""
    while _is_symbolic(tensor) and tensor.op.type == "Placeholder":
        captures = getattr(tensor.graph, "captures", ())
        outside = next((external for external, internal in captures if internal is tensor), None)
        if outside is None:
            break
        tensor = outside
    return tensor


def is_last_value(tensor: tf.Tensor, variable: Any) -> bool:
    """Returns True if a tensor is the value of a variable, read after all operations of its graph that write it."""
    is_cast = False
    tensor = outermost(tensor)
    while _is_symbolic(tensor) and tensor.op.type in _tf.PASSES_ON:
        is_cast |= tensor.op.type == "Cast"  # which may have rounded the numbers
        tensor = outermost(tensor.op.inputs[0])
    if is_cast or not _is_symbolic(tensor) or tensor.op.type != "ReadVariableOp":
        return False
    handle = outermost(tensor.op.inputs[0])
    is_of_variable = any(copy.handle is handle for copy in values_of(variable))
    operations = tensor.graph.get_operations()
    return is_of_variable and not writes_any(operations[operations.index(tensor.op) + 1 :], [handle])


def handles_read(operations: Sequence[tf.Operation]) -> list | None:
    """Returns the handles of the variables that operations read; None if they may write one of these."""
    found = {id(handle): handle for op in operations for handle in _handles(op)}
    return None if writes_any(operations, list(found.values())) else list(found.values())


def writes_any(operations: Sequence[tf.Operation], handles: Sequence[tf.Tensor]) -> bool:
    """Returns True if one of the operations may write a variable of these handles, as loops and branches may."""
    wanted = set(map(id, handles))
    return any(id(h) in wanted for op in operations if op.type not in _tf.READS for h in _handles(op))


def _handles(op: tf.Operation) -> list:
    return [outermost(tensor) for tensor in op.inputs if tensor.dtype == tf.resource]
