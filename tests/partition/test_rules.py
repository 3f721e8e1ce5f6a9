"""Every rule by brute force: the operation on all rows, and on the rows of replicas, for all kinds of inputs."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from checks import check, on_replicas

from tfring.partition.rules import RULES
from tfring.partition.types import Partial, Replicate, Shard

SIZES = ((5, 3), (3, 1, 4))


def _kinds(x, y):
    """Returns tensors `[..., 4]` of every placement and several scales, from `x [n, 3, 4]` and `y [n, 4]`."""
    count = tf.cast(tf.shape(x)[0], x.dtype)
    weights = tf.constant(np.linspace(-1.0, 2.0, 12).reshape(3, 4))
    return {
        "replicated": weights,
        "number": tf.constant(1.5, x.dtype),
        "zeros": tf.zeros([3, 4], x.dtype),
        "count": count,
        "rows": x,
        "rows of two dimensions": y,
        "gradients of rows": x / count,
        "rows along 1": tf.transpose(x, [1, 0, 2]),
        "blocks": tf.concat([x, x * 2.0], 0),
        "uniform": tf.ones(tf.shape(x), x.dtype),
        "sum": tf.reduce_sum(x, 0),
        "mean": tf.reduce_mean(x, 0),
        "largest": tf.reduce_max(x, 0),
    }


_UNARY = {
    name: function
    for name, function in {
        "Neg": tf.negative,
        "Cast": lambda t: tf.cast(t, tf.complex128),
        "Abs": tf.abs,
        "Sign": tf.sign,
        "Square": tf.square,
        "Sqrt": lambda t: tf.sqrt(tf.abs(t)),
        "Rsqrt": lambda t: tf.math.rsqrt(tf.abs(t)),
        "Relu": tf.nn.relu,
        "Tanh": tf.tanh,
        "Exp": tf.exp,
        "Softmax": tf.nn.softmax,
        "ZerosLike": tf.zeros_like,
        "OnesLike": tf.ones_like,
        "Reciprocal": tf.math.reciprocal,
        "Pow": lambda t: t**3,
        "IsFinite": tf.math.is_finite,
        "Sum 0": lambda t: tf.reduce_sum(t, 0),
        "Sum -1": lambda t: tf.reduce_sum(t, -1, keepdims=True),
        "Sum": tf.reduce_sum,
        "Mean 0": lambda t: tf.reduce_mean(t, 0),
        "Mean": tf.reduce_mean,
        "Max 0": lambda t: tf.reduce_max(t, 0),
        "Max": tf.reduce_max,
        "Prod": lambda t: tf.reduce_prod(t, -1),
        "Any": lambda t: tf.reduce_any(t > 0.0, 0),
        "All": lambda t: tf.reduce_all(t > 0.0, 0),
        "ArgMax": lambda t: tf.argmax(t, -1) if t.shape.rank else None,
        "L2Loss": tf.nn.l2_loss,
        "TopK": lambda t: tf.math.top_k(t, 2)[0],
        "Transpose": tf.transpose,
        "Reshape": lambda t: tf.reshape(t, [-1, 4]),
        "Reshape by shape": lambda t: tf.reshape(t, tf.concat([tf.shape(t)[:1], [-1]], 0)),
        "ExpandDims": lambda t: tf.expand_dims(t, 1),
        "Squeeze": lambda t: tf.squeeze(tf.expand_dims(t, 0), 0),
        "Concat -1": lambda t: tf.concat([t, t], -1),
        "Concat 0": lambda t: tf.concat([t, t], 0),
        "Pack": lambda t: tf.stack([t, t], 1),
        "Unpack": lambda t: tf.unstack(t, axis=-1)[1],
        "Split": lambda t: tf.split(t, 2, -1)[1],
        "SplitV": lambda t: tf.split(t, [1, 3], -1)[1],
        "Pad": lambda t: tf.pad(t, [[0, 0]] * (t.shape.rank - 1) + [[1, 2]]),
        "Pad with ones": lambda t: tf.pad(t, [[0, 0]] * (t.shape.rank - 1) + [[1, 2]], constant_values=1.0),
        "Reverse": lambda t: tf.reverse(t, [-1]),
        "Reverse 0": lambda t: tf.reverse(t, [0]),
        "Cumsum": lambda t: tf.cumsum(t, -1) if t.shape.rank else None,
        "Cumsum 0": lambda t: tf.cumsum(t, 0) if t.shape.rank else None,
        "Tile": lambda t: tf.tile(t, [1] * (t.shape.rank - 1) + [2]),
        "Tile 0": lambda t: tf.tile(t, [2] + [1] * (t.shape.rank - 1)),
        "StridedSlice": lambda t: t[..., 1:3],
        "StridedSlice one": lambda t: t[..., 0],
        "StridedSlice of rows": lambda t: t[:2],
        "StridedSlice new": lambda t: t[:, None],
        "Slice": lambda t: tf.slice(t, [0] * t.shape.rank, [-1] * (t.shape.rank - 1) + [2]),
        "Gather": lambda t: tf.gather(t, [0, 2], axis=-1),
        "Gather of rows": lambda t: tf.gather(t, [0, 0]),
        "OneHot": lambda t: tf.one_hot(tf.cast(t > 0.0, tf.int32), 3),
        "BroadcastTo": lambda t: tf.broadcast_to(t, tf.concat([[2], tf.shape(t)], 0)),
        "Fill": lambda t: tf.fill(tf.shape(t), tf.constant(2.0, t.dtype)),
        "MatrixDiagPart": lambda t: tf.linalg.diag_part(t) if t.shape.rank > 1 else None,
        "Einsum 2": lambda t: tf.einsum("ij->ji", t) if t.shape.rank == 2 else None,
        "BiasAddGrad": lambda t: tf.raw_ops.BiasAddGrad(out_backprop=t) if t.shape.rank > 1 else None,
        "While": lambda t: tf.while_loop(lambda i, a: i < 2, lambda i, a: (i + 1, a + t), (0, t))[1],
        "While, nonlinear": lambda t: tf.while_loop(lambda i, a: i < 2, lambda i, a: (i + 1, tf.tanh(a) + t), (0, t))[
            1
        ],
        "If": lambda t: tf.cond(tf.constant(0.5) > 0.1, lambda: t * 2.0, lambda: t),
        "If, by itself": lambda t: tf.cond(tf.reduce_sum(t) > 0.0, lambda: t * 2.0, lambda: t),
        "Call": lambda t: tf.function(lambda a: tf.reduce_mean(a, 0) * 2.0, autograph=False)(t),
    }.items()
}
_BINARY = {
    "AddV2": tf.add,
    "Sub": tf.subtract,
    "Mul": tf.multiply,
    "RealDiv": tf.divide,
    "DivNoNan": tf.math.divide_no_nan,
    "Maximum": tf.maximum,
    "Minimum": tf.minimum,
    "SquaredDifference": tf.math.squared_difference,
    "Greater": tf.greater,
    "Select": lambda a, b: tf.where(a > 0.0, a, b),
    "Select by a number": lambda a, b: tf.where(tf.constant(True), a + b, b),
    "AddN": lambda a, b: tf.add_n([a, b]) if a.shape.rank == b.shape.rank else None,
    "MatMul transposed": lambda a, b: tf.matmul(a, b, transpose_b=True) if a.shape.rank == b.shape.rank == 2 else None,
    "MatMul over rows": lambda a, b: tf.matmul(a, b, transpose_a=True) if a.shape.rank == b.shape.rank == 2 else None,
    "BatchMatMul": lambda a, b: tf.matmul(a, b, transpose_b=True) if a.shape.rank == b.shape.rank == 3 else None,
    "Einsum": lambda a, b: tf.einsum("aij,aij->ij", a, b) if a.shape.rank == b.shape.rank == 3 else None,
    "Einsum, a number": lambda a, b: tf.einsum("aij,ij->a", a, b) if (a.shape.rank, b.shape.rank) == (3, 2) else None,
    "BiasAdd": lambda a, b: tf.nn.bias_add(a, tf.reduce_sum(b, range(b.shape.rank - 1))) if b.shape.rank else None,
    "TanhGrad": lambda a, b: tf.raw_ops.TanhGrad(y=a, dy=b) if a.shape.rank == b.shape.rank else None,
    "ReluGrad": lambda a, b: tf.raw_ops.ReluGrad(gradients=a, features=b) if a.shape.rank == b.shape.rank else None,
    "Pack": lambda a, b: tf.stack([a, b]) if a.shape.rank == b.shape.rank else None,
    "Concat": lambda a, b: tf.concat([a, b], -1) if a.shape.rank == b.shape.rank and a.shape.rank else None,
    "Concat 0": lambda a, b: tf.concat([a, b], 0) if a.shape.rank == b.shape.rank and a.shape.rank else None,
}


def _arrays(sizes):
    random = np.random.default_rng(3)
    rows = sum(sizes)
    ids = random.integers(0, 3, rows).astype(np.int32)
    mask = np.tile([1, 0, 1], rows)[:rows].astype(np.int32)
    mask[np.cumsum(sizes) - 1] = 1
    scales = np.exp(random.normal(size=(rows, 1)))  # skewed: no mean is the mean of means
    return random.normal(size=(rows, 3, 4)) * scales[..., None], random.normal(size=(rows, 4)) * scales, ids, mask


def _made(make):
    """Returns what `make()` returns; None where TensorFlow has no such operation."""
    try:
        return make()
    except (ValueError, tf.errors.InvalidArgumentError, TypeError):
        return None


@pytest.mark.parametrize("sizes", [SIZES[0], pytest.param(SIZES[1], marks=pytest.mark.long)], ids=str)
@pytest.mark.parametrize("name", _UNARY)
def test_of_one_input(name, sizes):
    def function(x, y, *_):
        results = [_made(lambda t=t: _UNARY[name](t)) for t in _kinds(x, y).values()]
        return [result for result in results if result is not None]

    _, analysis = check(function, *_arrays(sizes), sizes=sizes)
    # What is complex is not exchanged.
    assert not analysis.findings or name == "Cast"


@pytest.mark.parametrize("name", _BINARY)
def test_of_two_inputs(name):
    sizes, operation = (5, 3), _BINARY[name]
    whole = _arrays(sizes)
    replicas = [[array[:5] for array in whole], [array[5:] for array in whole]]
    kinds = [_kinds(*map(tf.constant, arrays[:2])) for arrays in (whole, *replicas)]
    pairs = [(a, b) for a in kinds[0] for b in kinds[0] if all(_runs(operation, each[a], each[b]) for each in kinds)]

    def function(x, y, *_):
        of_rows = _kinds(x, y)
        return [operation(of_rows[a], of_rows[b]) for a, b in pairs]

    values, analysis = check(function, *whole, sizes=sizes)
    assert len(values) == len(pairs) and not analysis.findings


def _runs(operation, a, b):
    """Returns True if an operation takes such inputs."""
    try:
        return operation(a, b) is not None
    except (ValueError, TypeError, tf.errors.InvalidArgumentError):
        return False


def _of_rows_by_number(x, y, ids, mask):
    weights = tf.constant(np.linspace(-1.0, 2.0, 12).reshape(3, 4))
    kept = tf.where(tf.cast(mask, tf.bool))[:, 0]
    return [
        tf.gather(weights, ids),
        tf.gather(y, kept),
        tf.reduce_sum(tf.gather(y, kept), 0),
        tf.reduce_mean(tf.boolean_mask(y, mask > 0), 0),
        tf.cast(tf.shape(kept)[0], tf.float64),
        tf.math.unsorted_segment_sum(y, ids, 3),
        tf.math.unsorted_segment_mean(y, ids, 3),
        tf.math.unsorted_segment_max(y, ids, 3),
        tf.scatter_nd(ids[:, None], y, [3, 4]),
        tf.tensor_scatter_nd_add(tf.zeros([3, 4], tf.float64), ids[:, None], y),
        tf.tensor_scatter_nd_add(weights, ids[:, None], y),
        tf.one_hot(ids, 3, dtype=tf.float64),
        tf.reduce_sum(tf.one_hot(ids, 3, dtype=tf.float64), 0),
        tf.gather(y, ids, batch_dims=1),
        tf.gather_nd(weights, ids[:, None]),
        tf.math.bincount(ids, minlength=3, maxlength=3),
        tf.gather(y, tf.range(tf.shape(y)[0])),
        tf.cast(tf.range(tf.shape(y)[0]), tf.float64) * y[:, 0],
        tf.reduce_sum(tf.range(tf.shape(y)[0])),
        tf.nn.sparse_softmax_cross_entropy_with_logits(ids, y),
        tf.nn.softmax_cross_entropy_with_logits(tf.nn.softmax(y), y),
        tf.unique(ids)[0],
        tf.sort(y, 0),
        tf.sort(y, 1),
        tf.linalg.inv(tf.matmul(x, x, transpose_b=True) + tf.eye(3, dtype=tf.float64)),
        tf.linalg.inv(tf.matmul(y, y, transpose_a=True) + tf.eye(4, dtype=tf.float64)),
    ]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_of_rows_by_their_numbers(sizes):
    values, _ = check(_of_rows_by_number, *_arrays(sizes), sizes=sizes)
    assert [type(value.placement) for value in values] == [
        *(Shard, Shard, Partial, Partial, Replicate, Partial, Partial, Replicate, Partial, Partial, Replicate, Shard),
        *(Partial, Shard, Shard, Partial, Shard, Shard, Partial, Shard, Shard, Replicate, Replicate, Shard, Shard),
        Replicate,
    ]


def _of_numbers_of_rows(x, y):
    """Numbers of rows that are of another axis than that of rows, and sizes that may be 0."""
    rows, columns = tf.shape(x)[0], tf.tile(y, [1, 6])
    averages = tf.reduce_mean(y, 0)
    none = tf.boolean_mask(averages, averages > 9.0)
    with tf.GradientTape() as tape:
        tape.watch(y)
        loss = tf.reduce_sum(tf.tile(y, [1, 6])[:, rows : 2 * rows] ** 2)
        beside = [tf.concat([tf.cumsum(y, 0), y, tf.reverse(y, [0])], 1), tf.concat([y, tf.sort(y, axis=0)], 1)]
        loss += sum(tf.reduce_mean(tf.tanh(each)) for each in beside)
    return [
        columns[:, :rows],
        columns[:, rows:],
        columns[..., : 2 * rows],
        columns[:, None, rows::2],
        columns[:rows, :rows],
        tf.transpose(columns)[:rows],
        tf.transpose(columns)[rows:, :rows],
        tape.gradient(loss, y),
        tf.where(tf.shape(none)[0] > 0, tf.reduce_sum(y), averages[0]),
        tf.where(tf.equal(tf.size(none), 0), averages[0], tf.reduce_sum(y)),
        tf.maximum(tf.size(none), 1),
        tf.reduce_sum(y, 0)[:, None] * tf.linalg.diag(tf.zeros([4], y.dtype), padding_value=1.0),
        tf.reduce_sum(x, 0)[:, :3] + tf.linalg.diag(tf.zeros([3], y.dtype), padding_value=1.0),
    ]


VARIABLES = [tf.Variable(tf.zeros([4], tf.float64)) for _ in range(6)]
ROWS = tf.Variable(tf.zeros([1, 4], tf.float64), shape=[None, 4])


def _written(x, y, ids, keep):
    """What variables and lists hold after they were written in several ways."""
    zeros, ones, rows = tf.zeros([4], y.dtype), tf.ones([4], y.dtype), tf.shape(y)[0]
    held = [VARIABLES[i] for i in range(6)]
    for variable in held[:5]:
        variable.assign(zeros)
    held[0].assign_add(ones)
    held[1].assign_sub(ones)
    held[2].scatter_nd_add([[1]], [2.0])
    held[3][1:3].assign(ones[:2])
    tf.cond(tf.reduce_sum(y) > -1e9, lambda: held[4].assign_add(ones), lambda: held[4].assign_add(zeros))
    held[5].assign(tf.reduce_max(y, 0))
    held[5].assign_add(tf.reduce_max(-2.0 * y, 0))
    ROWS.assign(y)
    of_rows = tf.TensorArray(tf.int32, 2, clear_after_read=False).write(0, rows)
    items = tf.TensorArray(y.dtype, 4, clear_after_read=False).unstack(tf.transpose(y))
    with tf.GradientTape() as tape:
        tape.watch(zeros)
        count = tf.cast(rows, y.dtype)
        list_of = tf.TensorArray(y.dtype, 4, clear_after_read=False).unstack(zeros)
        loss = list_of.read(0) * count + list_of.read(0) * count + list_of.read(1) * count
    return [
        *(tf.reduce_sum(y, 0) + variable.read_value() for variable in held[:5]),
        tf.reduce_sum(y, 0) * held[3].read_value(),
        held[5].read_value(),
        tf.reduce_mean(ROWS.read_value(), 0),
        of_rows.write(1, rows).stack(),
        of_rows.write(1, tf.constant(0)).read(1),
        items.read(tf.reduce_max(ids)),
        items.write(tf.reduce_max(ids), y[:, 0] * 2.0).stack(),
        tape.gradient(loss, zeros),
    ]


def _of_other_kinds(x, y, ids, keep):
    """Casts that keep no order, rows that are alike until they are reshaped, ids that are scaled, divisors of zero."""
    rows, kept_ids, images = tf.shape(y)[0], tf.boolean_mask(ids, keep > 0.0), tf.cast(x[:, :, :, None], tf.float32)
    count = tf.cast(tf.size(tf.where(keep > 0.0)), y.dtype)
    weights = tf.constant(np.arange(12.0).reshape(3, 4))
    alike = tf.reshape(tf.tile(weights[None], [rows, 1, 1]), [-1, 4])
    largest = tf.reduce_max(y, 0)
    chosen = tf.boolean_mask(largest, largest > tf.sort(largest)[1])

    def with_fill(given):
        names = {"transforms": [[1.0, 0, 1, 0, 1, 1, 0, 0]], "output_shape": [3, 4], "fill_value": 2.0}
        return tf.raw_ops.ImageProjectiveTransformV3(
            images=given, **names, interpolation="NEAREST", fill_mode="CONSTANT"
        )

    part = tf.reduce_sum(tf.boolean_mask(y, keep > 0.0), 0) / tf.cast(rows, y.dtype)
    is_large = tf.reduce_sum(y) > 1e9
    return [
        tf.cast(tf.reduce_min(tf.boolean_mask(y, keep > 0.0), 0), tf.int32),
        tf.cast(tf.reduce_max(tf.cast(y, tf.int32), 0), tf.bool),
        tf.cast(tf.reduce_max(ids * 130), tf.uint8),
        -tf.reduce_max(kept_ids),
        alike + tf.reshape(tf.transpose(x, [1, 0, 2]), [-1, 4]),
        tf.reshape(tf.tile(weights[:, None], [1, rows, 1]), [-1, 4]) * tf.reshape(x, [-1, 4]),
        tf.gather(tf.range(100), ids * rows),
        tf.gather(tf.range(100), tf.abs(rows)),
        tf.math.unsorted_segment_sum(y, ids * rows, 20),
        tf.math.divide_no_nan(2.0 * count, count) * y,
        tf.size(tf.boolean_mask(y, keep > 0.0)) // tf.shape(tf.boolean_mask(y, keep > 0.0))[0],
        tf.where(tf.shape(chosen[:3])[0] > 2, tf.reduce_sum(y), largest[0]),
        tf.where(tf.shape(y[:9])[0] > 8, tf.reduce_sum(y), largest[0]),
        with_fill(images / tf.cast(rows, tf.float32)),
        with_fill(tf.reduce_max(images, 0, keepdims=True)),
        tf.linalg.triangular_solve(tf.linalg.diag(tf.abs(y) + 1.0), y[:, None, :, None]),
        tf.gather(tf.transpose(x, [1, 0, 2]), tf.stack([ids % 2] * 3), axis=2, batch_dims=1),
        tf.tensor_scatter_nd_add(tf.zeros_like(y), ids[:, None], y),
        tf.raw_ops.MirrorPadGrad(input=largest, paddings=[[1, 1]], mode="REFLECT"),
        tf.raw_ops.Div(x=tf.reduce_sum(ids), y=3),
        tf.raw_ops.BiasAddGrad(out_backprop=tf.transpose(y)[None, :, :, None], data_format="NCHW"),
        tf.raw_ops.BiasAddGrad(out_backprop=tf.transpose(y)[:, :, None, None], data_format="NCHW"),
        tf.cond(is_large, lambda: tf.ones([4], y.dtype), lambda: part) / count,
        tf.cond(is_large, lambda: tf.size(kept_ids), lambda: tf.size(tf.where(keep < 1.0))),
        tf.searchsorted(tf.sort(y, 1), y),
        tf.searchsorted(tf.sort(y[:, 0]), y[:, 1]),
        tf.reduce_sum(y, 0) + tf.reduce_prod(tf.zeros([0, 4], y.dtype), 0),
    ]


def _gradients(function, *given):
    with tf.GradientTape() as tape:
        tape.watch(given)
        loss = function(*given)
    return tape.gradient(loss, given)


def _moved(x, y, ids, keep):
    """Gradients of rows that lie elsewhere than they came from, and of a table of as many rows and more."""
    count = tf.shape(y)[0]
    table = tf.constant(np.linspace(-1.0, 2.0, 400).reshape(100, 4))
    kernel = tf.constant(np.linspace(-1.0, 1.0, 9).reshape(3, 3, 1, 1))
    zeros = tf.TensorArray(y.dtype, 2, element_shape=[None, 4]).write(0, y).write(1, tf.zeros_like(tf.sort(y, 0)))
    of_none = tf.reduce_prod(tf.zeros_like(y)[:, :0], 1)

    def beside(rows):
        return tf.reduce_sum(tf.tanh(tf.matmul(rows, tf.stop_gradient(y), transpose_a=True)))

    def picture(kernel, y):
        return tf.nn.conv2d(y[None, ..., None], kernel, 1, "SAME")[0, :, :, 0]

    return [
        *_gradients(lambda y: beside(y[::-1]), y),
        *_gradients(lambda y: tf.reduce_mean((tf.stack([y, y[::-1]], 1) - tf.stop_gradient(y)[:, None]) ** 2), y),
        *_gradients(lambda y: beside(tf.pad(y, [[1, 0], [0, 0]])[:-1]), y),
        *_gradients(lambda table: beside(table[:count]), table),
        *_gradients(lambda table: beside(table[3 : 3 + count]), table),
        *_gradients(lambda table: tf.reduce_sum(tf.einsum("bi,bi->b", table[:count], y)), table),
        *_gradients(lambda kernel, y: beside(picture(kernel, y)), kernel, y),
        zeros.stack(),
        tf.ensure_shape(y, [8, 4]) * 2.0,
        tf.raw_ops.ApproximateEqual(x=y / tf.cast(count, y.dtype), y=y * 1.2 / tf.cast(count, y.dtype), tolerance=0.05),
        of_none + y[:, 0] / tf.cast(count, y.dtype),
    ]


def _divided(x, y, ids, mask):
    """Operations that no replica computes from the rows of all."""
    vectors, at = tf.transpose(x, [0, 2, 1]), tf.cast(tf.reduce_sum(y) > 0.0, tf.int32)
    return [
        tf.linalg.cross(vectors, tf.tanh(vectors)),
        tf.linalg.cross(vectors, tf.constant([[[1.0, 2.0, 3.0]] * 4], x.dtype)[0] + tf.zeros_like(vectors)),
        tf.linalg.cross(tf.transpose(vectors, [1, 0, 2]), tf.transpose(vectors, [1, 0, 2]) ** 2),
        tf.linalg.cross(tf.reduce_mean(vectors, 0), tf.constant([[1.0, 2.0, 3.0]] * 4, x.dtype)),
        tf.histogram_fixed_width(tf.sigmoid(y[:, 0]), tf.constant([0.0, 1.0], y.dtype), 5),
        tf.histogram_fixed_width(y, tf.constant([-1.0, 1.0], y.dtype), 5),
        tf.switch_case(at + 1, [lambda: y, lambda: y * 2.0, lambda: tf.tanh(y)]),
        tf.switch_case(at, [lambda: tf.reduce_mean(y, 0), lambda: tf.zeros([4], y.dtype), lambda: y[0] * 0.0]),
        tf.switch_case(at, [lambda: tf.reduce_sum(y), lambda: tf.reduce_sum(y**2), lambda: tf.reduce_sum(-y)]),
    ]


@tf.function(autograph=False)
def _kept(rows, mask):
    return tf.boolean_mask(rows, mask)


def _beside_kept_rows(x, y, keep):
    """What is of all rows beside what is of those that a mask keeps, of which the last replica has none."""
    kept, count = tf.boolean_mask(y, keep > 0.0), tf.cast(tf.size(tf.where(keep > 0.0)), y.dtype)
    total, mean = tf.reduce_sum(y, 0), tf.reduce_mean(kept, 0)
    others = _kept(y, keep < 1.0)  # other rows than those of the other call
    both = [_kept(y, keep > 0.0), others]
    largest, is_large = tf.reduce_max(y, 0, keepdims=True), tf.reduce_sum(y) > 1e9
    with tf.GradientTape() as tape:
        tape.watch(y)
        loss = tf.reduce_sum(tf.abs(y)) / count + tf.reduce_mean(tf.boolean_mask(y, keep > 0.0) ** 2) * count
    return [
        tf.math.divide_no_nan(tf.reduce_sum(tf.abs(y)), count),
        tf.math.divide_no_nan(tf.abs(y), count),
        tf.reduce_mean(y, 0) * (count / tf.cast(tf.shape(y)[0], y.dtype)),
        total / tf.sqrt(count),
        total * tf.math.rsqrt(count) ** 3,
        y * count,
        y + count,
        tf.gather(tf.range(4.0, dtype=y.dtype) / count, tf.cast(keep, tf.int32) + 1),
        tf.matmul(y, tf.eye(4, dtype=y.dtype) * count),
        tf.einsum("ij,k->ik", y, tf.stack([count, 2.0 * count])),
        tf.fill([tf.shape(y)[0]], count),
        mean * count,
        mean + 1.0 / count,
        count * (1.0 / count),
        tf.reduce_sum(kept, 0) / count,
        tf.reduce_sum(kept, 0) / count * y,
        mean * tf.sign(count),
        tf.cast(tf.math.is_finite(1.0 / count), y.dtype),
        tf.argmax(tf.constant([0.0, 1.0], y.dtype) * count),
        (tf.constant([2.0], y.dtype) * count) ** 0,
        total * count**2,
        tf.reduce_sum(kept, 0) / tf.cast(tf.size(kept), y.dtype),
        tf.concat([total[:1], tf.reshape(count, [1])], 0),
        tf.stack([y[:, 0], tf.zeros_like(y[:, 1]) + count], 1),
        tf.maximum(y, count),
        tf.where(keep > 0.0, y[:, 0] / count, count),
        tape.gradient(loss, y),
        tf.nn.conv1d(largest[:, :, None], tf.constant([[[1.0]], [[-0.7]]], y.dtype), 1, "SAME"),
        tf.nn.conv1d(y[:1, :, None] * 0.0 + 1.0, tf.reshape(largest[:, :2], [2, 1, 1]), 1, "SAME"),
        tf.nn.bias_add(largest, tf.reduce_max(y * 2.0, 0)),
        tf.reduce_sum(tf.cond(is_large, lambda: kept, lambda: tf.zeros_like(y)) - 1.0, 0),
        tf.reduce_mean(tf.cond(is_large, lambda: kept, lambda: y) ** 2),
        tf.reduce_mean(tf.cond(is_large, lambda: kept, lambda: tf.boolean_mask(y, keep < 1.0)) ** 2),
        tf.concat(both, 0),
        tf.reduce_mean(both[0], 0) + tf.reduce_mean(others, 0),
        tf.reduce_sum(both[0], 0) / tf.cast(tf.shape(others)[0], y.dtype),
        tf.nn.depthwise_conv2d(
            largest[:, :, None, None], tf.constant([[[[1.0]]], [[[-0.7]]]], y.dtype), [1] * 4, "SAME"
        ),
        tf.tile(y, [0, 1]),
        tf.repeat(tf.sort(y, 0), tf.cast(keep, tf.int32) + 1, axis=0),
    ]


def _beside_each_other(x, y, ids, mask):
    """Inputs whose placements, scales or axes of rows differ, and numbers that are no longer what they were."""
    rows, zeros, each = tf.shape(y)[0], tf.zeros([4], y.dtype), tf.cast(y > 0.0, tf.int32)
    count, none = tf.cast(rows, y.dtype), tf.boolean_mask(y[:, 0], mask > 1)
    with tf.GradientTape() as tape:
        tape.watch(y)
        gram = tf.einsum("...i,ji->...j", y, y)
    return [
        tf.tensor_scatter_nd_add(tf.reduce_mean(y, 0), ids[:, None], y[:, 0]),
        tf.tensor_scatter_nd_add(zeros, [[1]], [count]),
        tf.tensor_scatter_nd_add(zeros, ids[:, None], tf.sort(y[:, 0])),
        tf.tensor_scatter_nd_add(zeros, tf.sort(ids)[:, None], y[:, 0]),
        tf.math.bincount(tf.transpose(each), minlength=2, maxlength=2, axis=-1),
        tf.math.bincount(each, minlength=2, maxlength=2, axis=-1),
        tf.math.bincount(tf.sort(ids), weights=y[:, 0], minlength=3, maxlength=3),
        tf.cast(tf.cast(tf.reduce_sum(each, 0), tf.bool), y.dtype),
        tf.cast(tf.cast(rows, tf.bool), y.dtype),
        tf.einsum("ij->i", tf.reduce_max(x, 0)),
        tf.cond(
            tf.reduce_any(mask > 0),
            lambda: tf.reduce_mean(tf.boolean_mask(y[:, 0], mask > 0)),
            lambda: tf.constant(0.0, y.dtype),
        ),
        tf.raw_ops.Bucketize(input=tf.reduce_sum(y, 0), boundaries=[-1.0, 0.0, 1.0]),
        tf.argmax(tf.stack([rows, 4])),
        tf.fill([rows], rows),
        tf.raw_ops.Bincount(arr=each, size=2, weights=y),
        tf.zeros([tf.cast(tf.cast(tf.constant(259), tf.uint8), tf.int32)]),
        tf.cast(count / 4.0, tf.int32),
        tf.cast(tf.cast(tf.reduce_sum(each * 100, 0), tf.uint8), tf.int32),
        tf.maximum(tf.size(none), 1),
        tf.sort(y[:, 0])[: tf.maximum(tf.size(none), 1)],
        tf.nn.bias_add(tf.transpose(y), tf.sort(y[:, 0])),
        tf.reduce_sum(y, 0) + tf.math.cumulative_logsumexp(zeros),
        tf.reduce_sum(y, 0) + tf.math.cumprod(zeros, exclusive=True),
        tf.gather(y, tf.cond(tf.reduce_sum(y) > 1e9, lambda: tf.range(rows), lambda: tf.zeros_like(ids))),
        tf.gather(y, tf.while_loop(lambda i, _: i < 1, lambda i, at: (i + 1, 0 * at), (0, tf.range(rows)))[1]),
        gram,
        tape.gradient(gram, y),
    ]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_of_inputs_that_do_not_lie_alike(sizes):
    check(_beside_each_other, *_arrays(sizes), sizes=sizes)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_beside_kept_rows(sizes):
    check(_beside_kept_rows, *_arrays(sizes)[:2], np.array([1.0, 1, 0, 1, 0, 0, 0, 0]), sizes=sizes)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_of_numbers_of_rows(sizes):
    check(_of_numbers_of_rows, *_arrays(sizes)[:2], sizes=sizes)


@pytest.mark.parametrize("function", [_written, _of_other_kinds, _moved])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_of_what_is_written_and_of_other_kinds(sizes, function):
    x, y, ids = _arrays(sizes)[:3]
    check(function, x, y, ids, np.array([1.0, 1, 0, 1, 0, 0, 0, 0]), sizes=sizes, tolerance=1e-6)


def _drawn(y, ids):
    """Random numbers, also of operations without rules, that functions, loops and lists hand on."""

    @tf.custom_gradient
    def twice(a):
        return a * 2.0, lambda d: d * 2.0

    @tf.function(autograph=False)
    def called(a):
        return a * 2.0

    gamma, normal = tf.random.gamma([], 0.4, dtype=y.dtype), tf.random.normal([3])
    items = tf.TensorArray(tf.float32, 2).write(0, normal).write(1, tf.random.normal([3]))
    table = tf.reshape(tf.range(400.0), [100, 4]) / 97.0
    given = ids[:, None], tf.cast(y, tf.float32), 5, 100
    return [
        gamma,
        tf.reduce_mean(gamma * y + (1.0 - gamma) * tf.reverse(y, [0])),
        tf.random.poisson([3], 2.0),
        tf.raw_ops.ParameterizedTruncatedNormal(shape=[3], means=[0.0], stdevs=[1.0], minvals=[-1.0], maxvals=[1.0]),
        tf.random.log_uniform_candidate_sampler(tf.cast(ids, tf.int64)[:, None], 1, 5, True, 100)[0],
        tf.reduce_mean(tf.nn.sampled_softmax_loss(table, tf.zeros([100]), *given)),
        tf.reduce_mean(tf.nn.nce_loss(table, tf.zeros([100]), *given)),
        tf.numpy_function(lambda: np.random.default_rng().normal(size=3), [], tf.float64),
        called(normal),
        twice(normal),
        tf.cond(tf.reduce_sum(y) > -1e9, lambda: normal, lambda: -normal),
        tf.while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, a + normal), (0, tf.zeros([3])))[1],
        tf.map_fn(lambda i: tf.random.normal([2]), tf.range(3), fn_output_signature=tf.float32),
        items.stack(),
        *(tf.cond(tf.random.uniform([]) > 0.5, lambda: 1.0, lambda: 2.0) for _ in range(8)),
    ]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_what_is_drawn_is_the_same_on_all_replicas(sizes):
    y, ids = _arrays(sizes)[1:3]
    replicas, analysis = on_replicas(_drawn, y, ids, sizes=sizes)
    found = {finding.name for finding in analysis.findings}
    assert found <= {"result 12"}  # a loop draws
    for other in replicas[1:]:
        for i, (first, mine) in enumerate(zip(replicas[0], other, strict=True)):
            assert f"result {i}" in found or (first == mine).all(), i


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_divided(sizes):
    values, _ = check(_divided, *_arrays(sizes), sizes=sizes)
    kinds = [Shard, Shard, Shard, Partial, Partial, Partial, Shard, None, Partial]
    assert [type(v.placement) for v, kind in zip(values, kinds, strict=True) if kind] == [k for k in kinds if k]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_of_images(sizes):
    """Convolutions, pools and their gradients, by rows."""
    random = np.random.default_rng(5)
    images = random.normal(size=(sum(sizes), 8, 8, 2)).astype(np.float32)
    kernel = tf.constant(random.normal(size=(3, 3, 2, 4)).astype(np.float32))

    def function(images):
        with tf.GradientTape() as tape:
            tape.watch([images, kernel])
            outputs = tf.nn.conv2d(images, kernel, 1, "SAME")
            pooled = tf.nn.max_pool2d(outputs, 2, 2, "VALID") + tf.nn.avg_pool2d(outputs, 2, 2, "VALID")
            resized = tf.image.resize(pooled, [5, 5])
            loss = tf.reduce_mean(resized**2)
        return [outputs, pooled, resized, loss, *tape.gradient(loss, [images, kernel])]

    values, _ = check(function, images, sizes=sizes, tolerance=1e-5)
    assert [type(value.placement) for value in values] == [Shard, Shard, Shard, Partial, Shard, Partial]


def test_a_state_is_what_was_written():
    """A variable holds what the step wrote last, on one branch or both."""
    variable = tf.Variable(np.ones(4), dtype=tf.float64)

    def function(x, y, *_):
        before = variable + 0.0
        variable.assign(tf.reduce_mean(y, 0))
        of_mean = variable * 2.0
        variable.assign(tf.ones([4], tf.float64))
        tf.cond(tf.constant(0.5) > 0.1, lambda: variable.assign(tf.reduce_mean(y, 0) * 2.0), lambda: variable.value())
        of_branch = variable * 1.0
        variable.assign(tf.ones([4], tf.float64))
        return [before, of_mean, of_branch]

    values, _ = check(function, *_arrays((5, 3)), sizes=(5, 3))
    assert [type(value.placement) for value in values[:2]] == [Replicate, Partial]
    assert not isinstance(values[2].placement, Replicate)


def test_the_table_is_long():
    """Families keep their rules: one that is lost would only be found by a program that warns without need."""
    assert len(RULES) > 250
