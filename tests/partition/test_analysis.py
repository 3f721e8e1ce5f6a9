"""What the analysis of a step finds, of which operation, and what it does not."""

import numpy as np
import pytest
import tensorflow as tf
from checks import check

from tfring import partition

X = np.random.default_rng(1).normal(size=(8, 4))


def _findings(function):
    def marked(x):
        partition.expect(function(x), "mean", "the loss")
        return x

    return check(marked, X).findings


def _shown(x):
    """Operations without results, of numbers that are known and of rows."""
    tf.print(tf.shape(x), x[0], output_stream="file:///dev/null")
    tf.py_function(lambda shape: None, [tf.shape(x)], [])
    return tf.reduce_mean(x)


def _twice(x):
    return tf.function(lambda y: tf.reduce_mean(y * 2.0), autograph=False)(x)


@pytest.mark.parametrize(
    "loss",
    [
        tf.reduce_mean,
        lambda x: tf.reduce_sum(x) / tf.cast(tf.shape(x)[0], x.dtype),
        lambda x: tf.reduce_sum(x) / (tf.cast(tf.shape(x)[0], x.dtype) + 1e-7),
        lambda x: tf.reduce_sum(x) / tf.maximum(tf.cast(tf.shape(x)[0], x.dtype), 1.0),
        lambda x: tf.reduce_mean(tf.nn.softmax(x)) * 3.0 + tf.constant(1.0, x.dtype),
        lambda x: tf.reduce_mean(tf.concat([x, tf.tanh(x)], 0)),
        lambda x: tf.cond(tf.constant(2.0) > 1.0, lambda: tf.reduce_mean(x), lambda: tf.zeros([], x.dtype)),
        lambda x: tf.while_loop(
            lambda i, a: i < 3, lambda i, a: (i + 1, a + tf.reduce_mean(x)), (0, tf.zeros([], x.dtype))
        )[1],
        _twice,
        _shown,
        tf.recompute_grad(lambda x: tf.reduce_mean(x**2)),
    ],
)
def test_means_over_rows_are_what_they_are(loss):
    assert _findings(loss) == []


@pytest.mark.parametrize(
    "loss, reason, operation",
    [
        (tf.reduce_sum, "sum", "Sum"),
        (lambda x: tf.reduce_sum(x, 1), "vector", "Sum"),
        (lambda x: tf.math.log(tf.reduce_mean(x**2)), "formula", "Log"),
        (lambda x: tf.reduce_mean(x) * tf.reduce_mean(x**2), "formula", "Mul"),
        (lambda x: tf.reduce_sum(x) / tf.reduce_sum(x**2), "formula", "RealDiv"),
        (lambda x: tf.reduce_mean(x - tf.reduce_mean(x, 0)), "beside", "Sub"),
        (lambda x: tf.reduce_mean(tf.matmul(x, x, transpose_b=True)), "rows", "MatMul"),
        (lambda x: tf.reduce_mean(tf.boolean_mask(x, x[:, 0] > 0.0)), "kept", "Mean"),
        (lambda x: tf.reduce_max(x), "over rows", "Max"),
        (lambda x: tf.reduce_mean(tf.math.top_k(x[:, 0], 2)[0]), "over rows", "TopKV2"),
        (lambda x: tf.reduce_mean(x[:2]), "chosen", "StridedSlice"),
        (lambda x: tf.reduce_mean(tf.cast(tf.range(tf.shape(x)[0]), x.dtype)), "numbers", "Mean"),
        (lambda x: tf.reduce_sum(x) + tf.reduce_mean(x), "mixed", "AddV2"),
        (lambda x: tf.cond(tf.reduce_sum(x) > 0.0, lambda: 1.0, lambda: 2.0), "condition", "StatelessIf"),
        (lambda x: tf.numpy_function(lambda a: a.mean(), [x], x.dtype), "unknown", "PyFunc"),
    ],
)
def test_the_operation_is_named(loss, reason, operation):
    [finding] = _findings(loss)
    assert (finding.reason, finding.op.type) == (reason, operation)
    text = partition.text_of_whole([finding], "a step")
    assert "the loss" in text and "See docs/exactness.md" in text


def test_marks_stay_where_functions_are_copied():
    """A gradient of a nested function is made from a copy of its graph."""

    @tf.function(autograph=False)
    def inner(y):
        partition.expect(tf.reduce_sum(y), "mean", "a sum within")
        return tf.reduce_mean(y**2)

    def outer(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = inner(x)
        return tape.gradient(loss, x)

    assert [finding.name for finding in check(outer, X).findings] == ["a sum within"]


def test_what_is_tfrings_own_leaves_variables_as_they_were():
    """Such as an optimizer's update, which comes of collectives, and is the same on all replicas."""
    variable = tf.Variable(np.ones(4))

    def step(x):
        with partition.own():
            variable.assign(tf.math.log(tf.reduce_mean(x**2, 0)))
        partition.expect(variable.value(), "same", "the weight")
        variable.assign(tf.reduce_mean(x, 0))
        partition.expect(variable.value(), "same", "the state")
        return x

    assert [finding.name for finding in check(step, X).findings] == ["the state"]
