"""Determines whether a map of batches treats each row independently, from the graph of its function.

```
images [rows, h, w, 3] ─► Cast ─► Mul ─► AddV2 ─► rows      each row of the output is made from that row of the input
                     1/255 ───────┘        │
                    offset [3] ────────────┘                 values that are the same for all rows
labels [rows] ────────────────────────────────► rows
```

Each tensor is rows, alike for all rows, or neither. Only operations that are known here turn rows into rows, so a
function that computes the mean of a batch, shuffles it, or calls an unknown operation needs whole batches.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfring import _tf

_UNARY = {
    "Abs", "AsString", "Cast", "Ceil", "Cos", "Erf", "Exp", "Expm1", "Floor", "Identity", "IsFinite", "IsInf", "IsNan",
    "Log", "Log1p", "LogicalNot", "Neg", "OnesLike", "PreventGradient", "Reciprocal", "Relu", "Relu6", "Rint", "Round",
    "Rsqrt", "Sigmoid", "Sign", "Sin", "Snapshot", "Softplus", "Sqrt", "Square", "StopGradient", "StringLower",
    "StringToHashBucketFast", "StringToNumber", "StringUpper", "Tanh", "ZerosLike",
}  # fmt: skip
_BROADCAST = {
    "Add", "AddV2", "BitwiseAnd", "BitwiseOr", "Div", "DivNoNan", "Equal", "FloorDiv", "FloorMod", "Greater",
    "GreaterEqual", "Less", "LessEqual", "LogicalAnd", "LogicalOr", "Maximum", "Minimum", "Mod", "Mul", "MulNoNan",
    "NotEqual", "Pow", "RealDiv", "SelectV2", "SquaredDifference", "Sub", "TruncateDiv", "TruncateMod",
}  # fmt: skip
_OF_IMAGES = {  # the first input is [rows, height, width, channels]
    "AdjustContrastv2", "AdjustHue", "AdjustSaturation", "HSVToRGB", "RGBToHSV", "ResizeArea", "ResizeBicubic",
    "ResizeBilinear", "ResizeNearestNeighbor",
}  # fmt: skip
_REDUCTIONS = {"All", "Any", "ArgMax", "ArgMin", "Max", "Mean", "Min", "Prod", "Sum"}
_READS = {"ReadVariableOp", "LookupTableFindV2", "LookupTableSizeV2", "Assert"}  # stateful, but alike for all rows


def is_rowwise(function: Any, element_spec: Any) -> bool:
    """Returns True if each row of a map's outputs is made from that row of its inputs alone.

    Args:
      function: The function of the map, as TensorFlow traced it.
      element_spec: Spec of its arguments: dense tensors whose first dimension counts rows. If that is static
        (`drop_remainder`), the function was traced for that number of rows and accepts no other.
    """
    specs = tf.nest.flatten(element_spec)
    if not all(isinstance(spec, tf.TensorSpec) and spec.shape.rank and spec.shape[0] is None for spec in specs):
        return False
    if not all(isinstance(spec, tf.TensorSpec) for spec in tf.nest.flatten(function.output_structure)):
        return False
    graph = function.function.graph
    rows = {id(tensor) for tensor in graph.inputs[: len(specs)]}
    alike = {id(tensor) for tensor in graph.inputs[len(specs) :]}
    for operation in graph.get_operations():
        if _tf.is_stateful(operation.type) and operation.type not in _READS and operation.inputs:
            return False
        outputs = {id(tensor) for tensor in operation.outputs}
        if outputs <= rows | alike:  # an input of the function
            continue
        if all(id(tensor) in alike for tensor in operation.inputs):
            if not _tf.is_stateful(operation.type) or operation.type in _READS:
                alike |= outputs
        elif _makes_rows(operation, rows, alike):
            rows |= outputs
    return all(id(tensor) in rows for tensor in graph.outputs)


def _makes_rows(operation: tf.Operation, rows: set[int], alike: set[int]) -> bool:
    """Returns True if the outputs of an operation are rows, given that some of its inputs are."""
    inputs = list(operation.inputs)
    is_rows = [id(tensor) in rows for tensor in inputs]
    if not all(of_rows or id(tensor) in alike for tensor, of_rows in zip(inputs, is_rows, strict=True)):
        return False
    first, *others = inputs
    rank = first.shape.rank
    kind = operation.type
    if kind in _UNARY:
        return True
    if kind in _BROADCAST:
        return _are_broadcast(inputs, is_rows)
    if kind in ("LookupTableFindV2", "GatherV2"):  # the table is alike for all rows, the ids are rows
        is_table = not is_rows[0] and is_rows[1] and not any(is_rows[2:])
        return is_table and (kind != "GatherV2" or (_value(inputs[2]) == 0 and operation.get_attr("batch_dims") == 0))
    if not is_rows[0] or rank is None:
        return False
    if kind == "ConcatV2":
        return all(is_rows[:-1]) and _avoids_rows(inputs[-1], rank)
    if kind == "Pack":
        return all(is_rows) and operation.get_attr("axis") % (rank + 1) != 0
    if any(is_rows[1:]):
        return False
    match kind:
        case _ if kind in _OF_IMAGES:
            return rank == 4
        case "OneHot":
            return operation.get_attr("axis") % (rank + 1) != 0
        case "ExpandDims":
            return _avoids_rows(others[0], rank + 1)
        case "Squeeze":
            axes = operation.get_attr("squeeze_dims")
            return bool(axes) and all(axis % rank != 0 for axis in axes)
        case "Reshape":
            return _keeps_rows(first, others[0])
        case "DecodeRaw":
            return rank == 1
        case "ParseExampleV2":  # outputs that are not dense have no rows
            is_dense = operation.get_attr("num_sparse") == 0 and not operation.get_attr("ragged_value_types")
            return is_dense and rank == 1
        case "MatMul":
            return not operation.get_attr("transpose_a")
        case "BiasAdd":
            return operation.get_attr("data_format") == b"NHWC" and rank > 1
        case "Transpose":
            order = _value(others[0])
            return order is not None and order[0] == 0
        case "StridedSlice":
            return _slices_rows_whole(operation, others)
        case _ if kind in _REDUCTIONS:
            return _avoids_rows(others[0], rank)
    return False


def _value(tensor: tf.Tensor) -> Any:
    return tf.get_static_value(tensor)


def _avoids_rows(axes: tf.Tensor, rank: int) -> bool:
    """Returns True if there are axes, all of them static, and none is that of the rows."""
    values = _value(axes)
    if values is None:
        return False
    flat = values.reshape(-1).tolist()
    return bool(flat) and all(axis % rank != 0 for axis in flat)


def _are_broadcast(inputs: list[tf.Tensor], is_rows: list[bool]) -> bool:
    """Returns True if broadcasting combines each row only with itself, or with values that are alike for all rows."""
    ranks = [tensor.shape.rank for tensor in inputs]
    if None in ranks:
        return False
    rank = max(r for r, of_rows in zip(ranks, is_rows, strict=True) if of_rows)
    for tensor, of_rows in zip(inputs, is_rows, strict=True):
        is_whole = tensor.shape.rank == rank
        if of_rows and not is_whole:  # its rows would be combined with columns of another
            return False
        if not of_rows and (tensor.shape.rank > rank or (is_whole and tensor.shape[0] != 1)):
            return False
    return True


def _keeps_rows(tensor: tf.Tensor, shape: tf.Tensor) -> bool:
    """Returns True if a static shape `[-1, ...]` has the number of elements of a row after its first dimension."""
    sizes = _value(shape)
    of_row = tensor.shape[1:].num_elements()
    if sizes is None or of_row is None or sizes.size == 0 or sizes[0] != -1:
        return False
    return int(sizes[1:].prod()) == of_row


def _slices_rows_whole(operation: tf.Operation, others: list[tf.Tensor]) -> bool:
    """Returns True for `x[:, ...]` and `x[..., i]` of two dimensions or more."""
    if (operation.get_attr("new_axis_mask") | operation.get_attr("shrink_axis_mask")) & 1:
        return False
    if operation.get_attr("ellipsis_mask") & 1:
        begin = _value(others[0])
        return begin is not None and len(begin) - 1 < operation.inputs[0].shape.rank
    strides = _value(others[2])
    is_full = operation.get_attr("begin_mask") & operation.get_attr("end_mask") & 1
    return bool(is_full) and strides is not None and strides[0] == 1
