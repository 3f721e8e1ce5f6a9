"""Operations on each row, or along the last dimension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfring.partition.rules.table import (
    Walk,
    beside,
    common_scale,
    kept,
    refuse_extremes,
    refuse_if,
    rule,
    scale_of,
    scale_of_power,
    shape_of,
    shard_of,
    summed,
    unscaled,
)
from tfring.partition.types import UNSCALED, Partial, Replicate, Value, is_partial, is_sharded, times

# The inputs with rows along the first axis, and the input in which the operation is linear; None for none.
_BY_ROW: dict[str, tuple[Sequence[int], int | None]] = {
    "AdjustContrastv2": ((0,), None),
    "AdjustHue": ((0,), None),
    "AdjustSaturation": ((0,), None),
    "AvgPool": ((0,), 0),
    "AvgPool3D": ((0,), 0),
    "CropAndResize": ((), None),
    "DecodeRaw": ((0,), None),
    "DepthToSpace": ((0,), 0),
    "Dilation2D": ((0,), None),
    "ExtractImagePatches": ((0,), 0),
    "HSVToRGB": ((0,), None),
    "ImageProjectiveTransformV3": ((0, 1), 0),
    "InTopKV2": ((0, 1), None),
    "LRN": ((0,), None),
    "LRNGrad": ((0, 1, 2), 0),
    "MaxPool": ((0,), 0),
    "MaxPool3D": ((0,), 0),
    "MaxPool3DGrad": ((0, 1, 2), 2),
    "MaxPoolGrad": ((0, 1, 2), 2),
    "MaxPoolGradGrad": ((0, 1, 2), 2),
    "MaxPoolV2": ((0,), 0),
    "MaxPoolWithArgmax": ((0,), None),
    "QuantizeAndDequantizeV4": ((0,), None),
    "RGBToHSV": ((0,), None),
    "ResizeBicubic": ((0,), 0),
    "ResizeBicubicGrad": ((0, 1), 0),
    "ResizeBilinear": ((0,), 0),
    "ResizeBilinearGrad": ((0, 1), 0),
    "ResizeNearestNeighbor": ((0,), 0),
    "ResizeNearestNeighborGrad": ((0,), 0),
    "SoftmaxCrossEntropyWithLogits": ((0, 1), None),
    "SpaceToBatchND": ((), 0),
    "SpaceToDepth": ((0,), 0),
    "SparseSoftmaxCrossEntropyWithLogits": ((0, 1), None),
    "StringLower": ((0,), None),
    "StringToHashBucketFast": ((0,), None),
    "StringToNumber": ((0,), None),
    "AsString": ((0,), None),
    "LookupTableFindV2": ((1,), None),
}
_INNER = {"AdjustContrastv2": 3}  # the last dimensions, which belong together
# With other values of these attributes, the operation combines all rows.
_OF_EACH_ROW = {
    "MaxPoolWithArgmax": [("include_batch_in_index", False)],
    "QuantizeAndDequantizeV4": [("range_given", True)],
}
_LIKE_FIRST = ("SparseSoftmaxCrossEntropyWithLogits", "SoftmaxCrossEntropyWithLogits", "MaxPoolGrad", "StringLower")
# Element-wise operations: any axis may be that of rows.
_ANY_AXIS = ("AsString", "StringLower", "StringToHashBucketFast", "StringToNumber", "LookupTableFindV2", "DecodeRaw")


@rule(*_BY_ROW)
def by_row(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Computes each row of the result from the same rows of the inputs."""
    positions, linear = _BY_ROW[op.type]
    refuse_if(any(op.get_attr(name) is not wanted for name, wanted in _OF_EACH_ROW.get(op.type, ())))
    if op.type == "ImageProjectiveTransformV3" and not ins[3].is_zero:
        linear = None  # combined with the fill value
    rest = [value for i, value in enumerate(ins) if i != linear]
    refuse_if(any(is_sharded(value) for i, value in enumerate(ins) if i not in positions))
    unscaled(walk, [value for value in rest if value.handle is None])
    first = None if linear is None else ins[linear]
    is_linear = not op.type.startswith("MaxPool") and not any(map(is_sharded, rest))
    refuse_if(first is not None and is_partial(first) and (not is_linear or first.placement != Partial()))
    scale = () if first is None else scale_of(walk, first)
    given = [ins[i] for i in positions]
    beside(walk, given)
    sharded = [value for value in given if is_sharded(value)]
    if not sharded:
        placement = ins[0].placement if first is None else first.placement
        known = {0: given[0].shape[0]} if given and given[0].shape else {}
        return [Value(walk.shape(output, known), placement, scale) for output in op.outputs]
    rows = sharded[0]
    axis = shard_of(rows).axis
    refuse_if((axis and op.type not in _ANY_AXIS) or rows.rank <= _INNER.get(op.type, 0))
    of_all = [value.shape for value in given if not is_sharded(value)]  # one for all rows
    refuse_if(any(shape is None or shape[:1] not in ((), (1,)) for shape in of_all))
    refuse_if(any(value.placement != rows.placement for value in sharded))
    assert rows.shape is not None
    known = {axis: rows.shape[axis]}
    like = rows.shape if op.type in _LIKE_FIRST or op.type in _ANY_AXIS else None
    return [Value(walk.shape(output, known, like), rows.placement, scale) for output in op.outputs]


@rule("BiasAdd", "BiasAddV1")
def bias_add(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Adds a bias along the channels."""
    value, bias = ins
    refuse_if(is_sharded(bias))
    if is_sharded(value):
        channels = 1 if op.type == "BiasAdd" and op.get_attr("data_format") == b"NCHW" else value.rank - 1
        refuse_if(shard_of(value).axis == channels or (is_partial(bias) and not bias.is_zero))
        return [Value(value.shape, value.placement, common_scale(walk, ins))]
    refuse_extremes(ins)
    placement, scale = summed(walk, ins)
    return [Value(value.shape, placement, scale)]


@rule("AvgPoolGrad", "AvgPool3DGrad")
def average_pool_gradient(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Computes a gradient that is linear in the incoming gradient."""
    sizes, value = ins
    refuse_extremes([value])
    refuse_if(is_sharded(value) and shard_of(value).axis)
    shape = walk.shape(op.outputs[0]) if sizes.const is None else tuple(sizes.const.tolist())
    return [kept(walk, value, shape, is_uniform=False)]


@rule("Softmax", "LogSoftmax", "TopKV2", "NthElement", "FFT", "RFFT", "IRFFT", "FFT2D", "IFFT2D")
def along_last_axis(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Combines entries along the last axis, which must not be that of rows."""
    value = ins[0]
    unscaled(walk, ins)
    shape = shape_of(value)
    last = 2 if op.type.endswith("2D") else 1
    refuse_if(is_sharded(value) and shard_of(value).axis >= value.rank - last)
    keeps = op.type in ("Softmax", "LogSoftmax", "FFT", "FFT2D", "IFFT2D")
    known = dict(enumerate(shape if keeps else shape[:-1]))
    if op.type == "TopKV2" and ins[1].const is not None:
        known[value.rank - 1] = ins[1].const.item()
    return [Value(walk.shape(output, known), value.placement) for output in op.outputs]


_OF_MATRICES = (
    *("QrV2", "Qr", "Svd", "SelfAdjointEigV2", "MatrixSolve", "MatrixTriangularSolve", "MatrixSolveLs", "Cholesky"),
    *("MatrixDeterminant", "LogMatrixDeterminant", "MatrixInverse"),
)


@rule(*_OF_MATRICES)
def matrices(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Computes results for each matrix in the last two dimensions."""
    unscaled(walk, ins)
    beside(walk, ins)
    value = ins[0]
    if not any(map(is_sharded, ins)):
        return [Value(walk.shape(output)) for output in op.outputs]
    for given in ins:
        refuse_if(not is_sharded(given) or given.shape is None or shard_of(given).axis >= given.rank - 2)
        refuse_if(given.placement != value.placement or given.rank != value.rank)
    assert value.shape is not None
    known = dict(enumerate(value.shape[:-2]))
    return [Value(walk.shape(output, known), value.placement) for output in op.outputs]


@rule("ComplexAbs", "Angle")
def of_complex(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Computes the absolute value of complex numbers, which has their scale, or the angle, which has none."""
    [value] = ins
    refuse_if(is_partial(value))
    scale = scale_of_power(walk, value, 1 if op.type == "ComplexAbs" else 0)
    return [Value(value.shape, value.placement, scale)]


@rule("Complex")
def complex_(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Combines real and imaginary parts, linear in both."""
    unscaled(walk, ins)
    beside(walk, ins)
    refuse_if(any(value.placement != ins[0].placement for value in ins))
    return [Value(ins[0].shape, ins[0].placement, times((), ()))]


@rule("Assert")
def assert_(walk: Walk, op: Any, ins: Sequence[Value]) -> list[Value]:
    """Asserts a condition that is the same on all replicas, or one for all rows. A failure shows the replica's data."""
    refuse_if(ins[0].placement not in (Replicate(), Partial("min")) or scale_of(walk, ins[0]) != UNSCALED)
    return []
