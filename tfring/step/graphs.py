"""Finds in a graph of which variable a tensor is the value. Eagerly nothing tells."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfring import _tf
from tfring.cross_device_ops import values_of


def _is_symbolic(value: Any) -> bool:
    """Returns True if `value` is a tensor of a graph."""
    return tf.is_tensor(value) and hasattr(value, "graph") and hasattr(value, "op")


def outermost(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor that functions around this one captured: of `tf.cond`, `tf.while_loop`."""
    while _is_symbolic(tensor) and tensor.op.type == "Placeholder":
        captures = getattr(tensor.graph, "captures", ())
        outside = next((external for external, internal in captures if internal is tensor), None)
        if outside is None:
            break
        tensor = outside
    return tensor


def _passed_on(tensor: tf.Tensor) -> Any:
    """The tensor that reaches this one through operations that leave its numbers as they are."""
    tensor = outermost(tensor)
    while _is_symbolic(tensor) and tensor.op.type in _tf.PASSES_ON:
        tensor = outermost(tensor.op.inputs[0])
    return tensor


def is_read(tensor: tf.Tensor, variable: Any) -> bool:
    """Returns True if a tensor is the value of a variable, or was when it was read."""
    tensor = _passed_on(tensor)
    if not _is_symbolic(tensor) or tensor.op.type != "ReadVariableOp":
        return False
    handle = outermost(tensor.op.inputs[0])
    return any(copy.handle is handle for copy in values_of(variable))


def read_of(tensor: tf.Tensor) -> tf.Operation:
    """The operation that read a variable, where `is_read`."""
    return _passed_on(tensor).op
