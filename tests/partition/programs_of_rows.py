"""Functions of rows that are edited, each run on replicas with uneven rows and on one without; a script.

Replicas are threads that wait for each other within operations, of which TensorFlow runs as many at once as it has
threads: it is told so before it starts.

    TF_NUM_INTEROP_THREADS=32 python tests/partition/programs_of_rows.py
"""

from __future__ import annotations

import functools
import sys

import numpy as np
import replicas
import tensorflow as tf

SIZES = ((5, 3), (4, 1, 3), (5, 0, 3, 0))

_random = np.random.default_rng(0)
X, Y = _random.normal(size=(8, 4)), _random.normal(size=(8, 1))
IDS = np.array([3, 1, 1, 0, 3, 2, 1, 3], np.int32)
W = tf.Variable(_random.normal(size=(4, 1)))


def _means(x):
    return tf.reduce_mean(x, 0), tf.math.reduce_variance(x, 0)


def _gradient(loss):
    def function(x, y, ids):
        with tf.GradientTape() as tape:
            value = loss(tf.matmul(x, W), y, ids)
        return value, tape.gradient(value, W)

    return function


def _in_a_loop(p, y, ids):
    def body(i, total):
        return i + 1, 0.9 * total + tf.reduce_sum((p - y)[i] ** 2)

    return tf.while_loop(lambda i, _: i < tf.shape(y)[0], body, (0, tf.zeros([], y.dtype)))[1]


def _recurrent(loss):
    """The gradient of a loss of the states `[n, 4, 4]` of a loop over columns, which keeps them in lists."""

    def function(x, y, ids):
        with tf.GradientTape() as tape:
            states = tf.scan(lambda h, v: tf.tanh(0.5 * h + v[:, None] * W[:, 0]), tf.transpose(x), tf.zeros_like(x))
            value = loss(tf.transpose(states, [1, 0, 2]), ids)
        return value, tape.gradient(value, W)

    return function


def _asserted(x, y, ids):
    tf.debugging.assert_less(x, tf.constant(1e6, x.dtype))
    return tf.reduce_mean(x)


def _negatives(p, y, ids):
    labels = tf.range(tf.shape(y)[0])
    logits = tf.matmul(p, y, transpose_b=True)
    both = [tf.nn.sparse_softmax_cross_entropy_with_logits(labels, each) for each in (logits, tf.transpose(logits))]
    return tf.reduce_mean(both[0] + both[1])


def _masked_negatives(p, y, ids):
    """Of pairs of rows with one id only the diagonal counts."""
    logits = tf.matmul(p, y, transpose_b=True)
    others = (ids[:, None] == ids[None, :]) & ~tf.eye(tf.shape(ids)[0], dtype=tf.bool)
    logits = tf.where(others, tf.constant(-1e3, logits.dtype), logits)
    own = tf.linalg.diag_part(tf.nn.log_softmax(logits))
    margins = tf.nn.relu(1.0 + logits - tf.linalg.diag_part(logits)[:, None])
    return tf.reduce_mean(tf.linalg.set_diag(margins, tf.zeros_like(own))) - tf.reduce_mean(own)


def _kept(p, y, ids):
    kept = ids > 1
    errors = tf.boolean_mask(p, kept) - tf.boolean_mask(y, kept)
    return tf.reduce_sum(errors**2) / tf.cast(tf.size(errors), y.dtype)


def _pairs(p, y, ids):
    """Of two masks, which keep as many rows, but not on each replica; one row is kept beside all."""
    one, three = (tf.boolean_mask(p - y, ids == i) for i in (1, 3))
    errors = tf.nn.softmax_cross_entropy_with_logits(tf.nn.softmax(one @ _V[None, :4]), three @ _V[None, :4])
    joined = tf.stack([one, three]), tf.concat([one, three], 1), tf.matmul(one, three, transpose_a=True)
    beside = tf.where(p > 0, p, tf.boolean_mask(y, ids == 0)) + tf.boolean_mask(p, ids == 2)
    return tf.add_n([tf.reduce_sum(each**2) for each in (*joined, one * three, errors, beside)])


def _in_places_of_others(p, y, ids):
    """Values of one mask at numbers of another, which keeps as many rows, but not on each replica."""
    one, three = (tf.boolean_mask(p - y, ids == i)[:, 0] for i in (1, 3))
    places = tf.cast(tf.boolean_mask(y[:, 0], ids == 3) > 0, tf.int32)
    return tf.add_n([tf.reduce_sum(each**2) for each in (
        tf.math.unsorted_segment_sum(one, places, 2),
        tf.scatter_nd(places[:, None], one, [2]),
        tf.tensor_scatter_nd_add(tf.zeros([2], p.dtype), places[:, None], one),
        tf.gather(one[:, None] * _V[:2], places, batch_dims=1) * three,
        tf.math.bincount(places, tf.stop_gradient(one), minlength=2, dtype=p.dtype),
    )])  # fmt: skip


def _convolved(p, y, ids):
    """Convolves rows that a mask keeps, on one replica none: TensorFlow's kernels return wrong shapes of none."""
    kept = tf.boolean_mask(tf.cast((p - y) * _V[:8], tf.float32), ids == 0)
    weights = tf.cast(W, tf.float32)
    wide = tf.nn.conv1d(kept[..., None], tf.reshape(weights[:3], [3, 1, 1]), 2, "SAME") + weights[3]
    back = tf.nn.conv1d_transpose(kept[..., None], tf.ones([3, 1, 1]), [tf.shape(kept)[0], 16, 1], 2, "SAME")
    return tf.cast(tf.reduce_mean(tf.reduce_mean(wide**2, 1)) + tf.reduce_mean(back), p.dtype)


def _listed(rows_of, is_joined=True):
    """Returns a loss of the items of a list, which are written one by one."""

    def loss(p, y, ids):
        rows = rows_of(p - y, ids)
        array = tf.TensorArray(p.dtype, len(rows), infer_shape=False, element_shape=[None, 1])
        for i, each in enumerate(rows):
            array = array.write(i, each)
        items = [array.read(i) for i in range(len(rows))]
        means = [tf.reduce_mean(each**2) + tf.reduce_sum((each[1:] - each[:-1]) ** 2) for each in items]
        return tf.add_n(means) + (tf.reduce_sum(array.concat() ** 3) if is_joined else 0.0)

    return loss


def _listed_or_zeros(p, y, ids):
    """Reads an item from a list of zeros of all rows, or from one of kept rows, as a condition decides."""

    def item(rows):
        return tf.TensorArray(p.dtype, 1, infer_shape=False, element_shape=[None, 1]).write(0, rows).flow

    kept = tf.boolean_mask(p - y, ids == 1)
    flow = tf.cond(tf.reduce_sum(y) > 9.0, lambda: item(tf.zeros_like(p)), lambda: item(kept))
    array = tf.TensorArray(p.dtype, flow=flow, infer_shape=False)
    return tf.reduce_mean(array.read(0) ** 2) + tf.reduce_sum(p**2)


def _selection_or_nothing(p, y, ids):
    kept = tf.where(y[:, 0] > 9.0)[:, 0]
    return tf.cond(tf.size(kept) > 0, lambda: tf.reduce_mean(tf.gather(p, kept)), lambda: 0.5 * tf.reduce_sum(p))


def _of_kept(function):
    """Returns results of masks that keep a row of one replica alone, and none at all."""
    return lambda x, y, ids: [function(tf.boolean_mask(x, ids == i)) for i in (0, 9)]


# A function, and how many exchanges it takes.
def _up_to_the_longest(p, y, ids):
    return tf.reduce_mean((p - tf.range(4, dtype=p.dtype))[:, : tf.reduce_max(ids)] ** 2)


_V = tf.range(12, dtype=tf.float64)


def _by_a_count(x, y, ids):
    """Numbers that depend on all rows, and say how much is taken, where, and how long results are."""
    n = tf.reduce_sum(tf.cast(x[:, 0] > 0, tf.int32))
    taken = (_V[:n], tf.slice(_V, [n], [2]), tf.sort(_V)[n], tf.split(_V, [n, 12 - n])[0], tf.math.top_k(_V, n)[0])
    made = (tf.fill([n], 2.0), tf.eye(n), tf.range(n), tf.one_hot(2, n), tf.tile(_V, [n]), tf.repeat(_V, n))
    moved = (tf.pad(_V, [[n, 0]]), tf.roll(_V, n, 0), tf.linalg.band_part(tf.ones([5, 5]), n, 0))
    shaped = (tf.reshape(_V[: n * 2], [n, 2]), tf.scatter_nd([[n]], [1.0], [12]))
    counted = (tf.math.bincount(ids, minlength=n), tf.math.unsorted_segment_mean(x, ids, n + 3))
    drawn = (tf.random.stateless_uniform([3], [1, 2], 0, n + 1, tf.int32), tf.random.stateless_normal([3], [n, 2]))
    return taken, made, moved, shaped, counted, drawn


def _by_a_mean(x, y, ids):
    """Numbers that stand beside rows or other tensors, and parameters of distributions."""
    m = tf.reduce_mean(tf.abs(x))
    beside = (
        tf.one_hot(ids, 3, m, -m),
        tf.pad(x, [[0, 0], [1, 0]], constant_values=m),
        tf.linalg.diag(x, padding_value=m),
    )
    one = tf.cast(m, tf.float32)
    drawn = (
        tf.random.stateless_binomial([9], [1, 2], tf.round(99 * one), 0.5),
        tf.random.stateless_poisson([9], [1, 2], 9 * one),
    )
    return beside, drawn, tf.clip_by_value(x, -m, m), tf.histogram_fixed_width(x, [-m, m], nbins=5)


def _beside_parts(x, y, ids):
    """Parts of a sum, and means over a replica's rows, beside constants."""
    found = []
    for p in (tf.reduce_sum(x, 0), tf.reduce_mean(x, 0)):
        found += [tf.linalg.diag(p, padding_value=1.0), tf.linalg.set_diag(tf.eye(4, dtype=p.dtype), p)]
        found += [tf.pad(p, [[1, 2]], constant_values=1.0), tf.concat([p, _V], 0), tf.stack([p, _V[:4]])]
        found += [
            tf.where([True, False] * 2, p, 1.0),
            tf.tensor_scatter_nd_update(p, [[1]], [2.0]),
            1.0 - p,
            _V[:4] + 0.1 * p,
        ]
        found += [
            tf.cast(10.0 * p, tf.int32),
            tf.math.unsorted_segment_max(p, [0, 0, 1, 1], 2),
            tf.reduce_prod(p),
            p * x,
        ]
        found += [tf.while_loop(lambda i, z: i < 3, lambda i, z: (i + 1, z + 1.0), (0, p))[1]]
    return found


CONVOLVED = _gradient(_convolved)

PROGRAMS = {
    "rows": (lambda x, y, ids: 2.0 * x + y, 1),  # that all replicas have them is what is expected of a result
    "means": (lambda x, y, ids: _means(x), 2),
    "standardized": (lambda x, y, ids: (lambda m, v: tf.reduce_sum(((x - m) / tf.sqrt(v)) ** 3, 0))(*_means(x)), 3),
    "sum over a constant": (_gradient(lambda p, y, ids: tf.reduce_sum((p - y) ** 2) / 8.0), 1),
    "ratio": (_gradient(lambda p, y, ids: tf.reduce_sum(p * y) / tf.reduce_sum(p**2)), 2),
    "logarithm": (_gradient(lambda p, y, ids: tf.math.log(tf.reduce_mean((p - y) ** 2))), 2),
    "largest": (_gradient(lambda p, y, ids: tf.reduce_max(tf.abs(p - y))), 3),
    "up to the longest": (_gradient(_up_to_the_longest), None),
    "gathered places": (
        _gradient(lambda p, y, ids: tf.reduce_mean(tf.gather_nd(p * _V[:4] - y, tf.where(p * _V[:4] > 0.5)) ** 2)), None
    ),
    "by a count": (_by_a_count, None),
    "by a mean": (_by_a_mean, None),
    "beside parts": (_beside_parts, None),
    "kept rows": (_gradient(_kept), None),
    "pairs of kept rows": (_gradient(_pairs), None),
    "in the places of others": (_gradient(_in_places_of_others), None),
    "convolution of kept rows": (CONVOLVED, None),
    "list of two masks": (_gradient(_listed(lambda p, ids: [tf.boolean_mask(p, ids == i) for i in (1, 3)])), None),
    "list of all rows and of twice as many": (_gradient(_listed(lambda p, ids: [p, tf.repeat(p, 2, 0)], False)), None),
    "list of zeros and kept rows": (
        _gradient(_listed(lambda p, ids: [tf.zeros_like(p), tf.boolean_mask(p, ids == 1), p])), None
    ),
    "list of zeros, or of kept rows": (_gradient(_listed_or_zeros), None),
    "none are kept": (_gradient(_selection_or_nothing), None),
    "negatives": (_gradient(_negatives), None),
    "masked negatives": (_gradient(_masked_negatives), None),
    "loop": (_gradient(_in_a_loop), None),
    "a state of each row": (_recurrent(lambda states, ids: tf.reduce_mean(tf.gather(states, ids, batch_dims=1))), None),
    "states up to the largest": (
        _recurrent(lambda states, ids: tf.reduce_mean(states[:, : tf.reduce_max(ids)] ** 2)), None
    ),
    "states of sorted rows": (_recurrent(lambda states, ids: tf.reduce_sum(tf.sort(states, 0)[0])), None),
    "first rows": (lambda x, y, ids: tf.reduce_mean(x[:3], 0), None),
    "centers": (lambda x, y, ids: tf.math.divide_no_nan(
        tf.math.unsorted_segment_sum(x, ids, 4), tf.cast(tf.math.bincount(ids, minlength=4), x.dtype)[:, None]
    ), 3),
    "centers of ids that may be none": (
        lambda x, y, ids: [
            0.5 * W[:, 0] + tf.math.divide_no_nan(
                tf.reduce_sum(tf.boolean_mask(x, ids == i), 0), tf.cast(tf.math.count_nonzero(ids == i), x.dtype)
            )
            for i in (0, 3, 9)
        ],
        None,
    ),
    "number of kept rows": (_of_kept(lambda k: tf.math.log1p(tf.sqrt(tf.cast(tf.shape(k)[0], k.dtype)))), None),
    "by the number of kept rows": (
        _of_kept(lambda k: tf.exp(-1.0 / tf.cast(tf.shape(k)[0], k.dtype)) * tf.reduce_sum(W)), None
    ),
    "kept rows of kept rows": (
        lambda x, y, ids: tf.reduce_sum(
            tf.boolean_mask(tf.boolean_mask(x, ids > 0), tf.boolean_mask(y[:, 0], ids > 0) > -9.0), 0
        ),
        None,
    ),
    "mean of kept rows, or none": (_of_kept(lambda k: tf.reduce_mean(k, 0)), None),
    "numbers of rows": (lambda x, y, ids: (tf.shape(x)[0] // 3, tf.range(tf.shape(x)[0]), tf.size(x) % 5), None),
    "mean of integers": (lambda x, y, ids: tf.reduce_mean(ids), 1),
    "sorted": (lambda x, y, ids: (tf.sort(x[:, 0]), tf.argsort(y[:, 0])), 1),
    "noise of a seed": (lambda x, y, ids: x + tf.random.stateless_normal(tf.shape(x), [1, 2], dtype=x.dtype), 1),
    "permuted by a seed": (
        lambda x, y, ids: tf.gather(x, tf.random.experimental.stateless_shuffle(tf.range(tf.shape(x)[0]), [3, 4])), 1
    ),
    "numbers of a seed for each row": (
        lambda x, y, ids: tf.reduce_mean(tf.tanh(x + tf.random.normal(tf.shape(x), seed=5, dtype=x.dtype))), 1
    ),
    "rows of a seed": (
        lambda x, y, ids: tf.gather(x, tf.random.stateless_uniform([4], [1, 2], 0, tf.shape(x)[0], tf.int32)), None
    ),
    "entries by the number of rows": (
        lambda x, y, ids: (
            tf.gather(tf.range(20), tf.shape(x)[0]),
            tf.stack([tf.shape(x)[0], 2 * tf.shape(x)[0], 3]),
            tf.random.stateless_categorical(x, 3, [1, 2]),
        ),
        None,
    ),
    "an assertion": (_asserted, None),
    "no rule": (lambda x, y, ids: tf.numpy_function(lambda v: v - v.max(), [x], x.dtype, stateful=False), 1),
    "outer product": (lambda x, y, ids: tf.matmul(x, x, transpose_b=True), 2),
    "outer sum": (lambda x, y, ids: tf.reduce_sum(tf.nn.relu(x[:, None] - x[None]), [0, 1]), 2),
    "concatenated": (
        lambda x, y, ids: tf.reduce_mean(tf.concat([x, x * 2.0, tf.gather(x, tf.where(ids > 1)[:, 0])], 0), 0), None
    ),
}  # fmt: skip


def _on_numbers(function, x):
    return function(tf.range(tf.shape(x)[0]))


def _twice(i):
    return tf.tile(i[:, None], [1, 2])


# Of the numbers of the rows, int32 `[rows]`: whatever an operation makes of them is made of those of all rows.
OF_NUMBERS = {
    "abs": tf.abs,
    "add": lambda i: i + tf.reverse(i, [0]),
    "broadcast": lambda i: tf.broadcast_to(i[:, None], [tf.size(i), 3]),
    "cast": lambda i: [tf.cast(i, dtype) for dtype in (tf.bool, tf.float16, tf.float32, tf.int64)],
    "complex": lambda i: tf.abs(tf.complex(tf.cast(i, tf.float32), 1.0)),
    "concatenate": lambda i: tf.concat([i[:, None], i[:, None]], 1),
    "count": lambda i: tf.math.bincount(i, minlength=8, maxlength=8),
    "cumulate": lambda i: tf.cumsum(tf.tile(i[:, None], [1, 2]), 1),
    "diagonal": lambda i: tf.linalg.diag(i[:, None] + 1),
    "divide": lambda i: [i // 2, i % 3, 1 / (i + 1)],
    "expand": lambda i: tf.squeeze(i[:, None, None], [1]),
    "exponential": lambda i: (lambda f: [tf.exp(-f), tf.sqrt(f), f**2])(tf.cast(i, tf.float32)),
    "gather": lambda i: [tf.gather(_twice(i), [1, 0], axis=1), tf.gather(X[:, 0], i), tf.gather(i, i)],
    "gather entries": lambda i: tf.gather_nd(X, tf.stack([_twice(i), tf.zeros_like(_twice(i))], -1)),
    "gather of each row": lambda i: tf.gather(tf.tile(i[:, None], [1, 3]), tf.zeros_like(i)[:, None], batch_dims=1),
    "in a branch": lambda i: tf.cond(tf.size(i) > 3, lambda: i * 2, lambda: i),
    "in a function": lambda i: tf.function(lambda j: (j, j + 1))(i),
    "in a loop": lambda i: tf.while_loop(lambda k, _: k < 3, lambda k, j: (k + 1, j + i), (0, i))[1],
    "list": lambda i: tf.map_fn(lambda k: i + k, tf.range(3)),
    "negative": tf.negative,
    "one hot": lambda i: tf.one_hot(i, 8),
    "pad": lambda i: tf.pad(i[:, None], [[0, 0], [1, 0]]),
    "product": lambda i: tf.cast(i, tf.float64)[:, None] @ tf.ones([1, 2], tf.float64),
    "reduce": lambda i: [tf.reduce_sum(i), tf.reduce_max(i), tf.reduce_mean(tf.cast(i, tf.float32)), tf.argmax(i)],
    "repeat": lambda i: tf.repeat(i, 2),
    "reverse": lambda i: tf.reverse(i[:, None], [1]),
    "round": lambda i: [tf.sign(i), tf.round(tf.cast(i, tf.float32) / 2)],
    "scatter": lambda i: [
        tf.tensor_scatter_nd_add(tf.zeros([8]), i[:, None], tf.ones([tf.size(i)])),
        tf.scatter_nd(i[:, None], i, [8]),
        tf.math.unsorted_segment_sum(i, i % 2, 2),
    ],
    "select": lambda i: tf.where(i > 2, i, 0),
    "slice": lambda i: tf.tile(i[:, None], [1, 3])[:, 1:],
    "sort": lambda i: [tf.sort(-i), tf.argsort(-i)],
    "split": lambda i: [*tf.split(tf.tile(i[:, None], [1, 4]), 2, 1), *tf.unstack(tf.tile(i[:, None], [1, 2]), axis=1)],
    "square": tf.square,
    "transpose": lambda i: tf.transpose(i[:, None]),
    "where": lambda i: tf.where(i > 2)[:, 0],
}

NAMES = {  # of what is exchanged, as `tfring report` shows them
    "convolution of kept rows": [
        "step, exchange 1: numbers of rows", "step, exchange 2: rows for Conv2D, Conv2DBackpropInput",
        "step, exchange 3: sum for MatMul", "step, exchange 4: sum for a result",
    ],
    "outer product": ["step, exchange 1: rows for MatMul", "step, exchange 2: rows of batch x batch for a result"],
    "sorted": ["step, exchange 1: rows for TopKV2"],
    "an assertion": ["step, exchange 1: min for If", "step, exchange 2: sum for a result"],
}  # fmt: skip


def main(whole):
    """Runs each program with one of the sizes, or with all."""
    for number, (name, (function, exchanges)) in enumerate(PROGRAMS.items()):
        for sizes in SIZES if whole else [SIZES[number % 3]]:
            tolerance = 1e-5 if function is CONVOLVED else 1e-8  # of float32
            analysis, exchanged = replicas.run(function, X, Y, IDS, sizes=sizes, tolerance=tolerance)
            assert not analysis.findings, (name, analysis.findings)
            assert exchanges in (None, len(exchanged)), (name, exchanged)
            assert exchanged == NAMES.get(name, exchanged), name
    for number, (name, of_numbers) in enumerate(OF_NUMBERS.items()):
        for sizes in SIZES if whole else [SIZES[number % 3]]:
            analysis, _ = replicas.run(functools.partial(_on_numbers, of_numbers), X, sizes=sizes, tolerance=1e-8)
            assert not analysis.findings, (name, analysis.findings)


if __name__ == "__main__":
    main("whole" in sys.argv[1:])
