"""What the analysis of a step converts, what it finds that cannot be, and what it leaves alone."""

import numpy as np
import pytest
import tensorflow as tf
from checks import check

from tfring import partition
from tfring.partition import conversions, marks
from tfring.partition.dims import Dim
from tfring.partition.types import Partial

X = np.random.default_rng(1).normal(size=(8, 4))


def _shown(x):
    """Operations without results, of numbers of rows, which are known."""
    tf.print(tf.shape(x), output_stream="file:///dev/null")
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
    """Nothing is exchanged."""
    [value], analysis = check(loss, X, expected="mean", tolerance=1e-7)  # what guards a division is taken for zero
    assert not analysis.findings
    assert not any(conversions.needs_collective(edit.value, edit.conversion) for edit, _ in analysis.edits)
    assert value.placement == Partial()


def _logits(x):
    return tf.matmul(x, x + 1.0, transpose_b=True)


@pytest.mark.parametrize(
    "loss",
    [
        lambda x: tf.reduce_mean(_logits(x) * (1.0 - tf.eye(tf.shape(x)[0], dtype=x.dtype))),
        lambda x: tf.reduce_mean(tf.where(tf.eye(tf.shape(x)[0], dtype=tf.bool), _logits(x), _logits(x) ** 2)),
        lambda x: tf.reduce_mean(_logits(x) - tf.linalg.diag(tf.ones(tf.shape(x)[:1], x.dtype))),
        lambda x: tf.reduce_mean(tf.linalg.diag_part(tf.nn.log_softmax(_logits(x)))),
        lambda x: tf.reduce_mean(tf.nn.relu(_logits(x) - tf.linalg.diag_part(_logits(x))[:, None])),
        lambda x: tf.linalg.trace(_logits(x)) / tf.cast(tf.shape(x)[0], x.dtype),
    ],
)
def test_diagonals_of_pairs_of_rows_exchange_no_pairs(loss):
    def with_gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = loss(x)
        return value, tape.gradient(value, x)

    _, analysis = check(with_gradient, X, expected="same", tolerance=1e-7)
    assert not analysis.findings
    sent = [edit.value.shape for edit, _ in analysis.edits if conversions.needs_collective(edit.value, edit.conversion)]
    assert sent and all(sum(isinstance(size, Dim) for size in shape) <= 1 for shape in sent), sent


def test_the_diagonal_that_is_set_exchanges_no_pairs():
    """Except in its gradient, whose sizes TensorFlow computes in branches."""

    def without_diagonal(x):
        return tf.reduce_logsumexp(tf.linalg.set_diag(_logits(x), x[:, 0] - 1.0), 1)

    _, analysis = check(without_diagonal, X)
    sent = [edit.value.shape for edit, _ in analysis.edits if conversions.needs_collective(edit.value, edit.conversion)]
    assert sent and all(sum(isinstance(size, Dim) for size in shape) <= 1 for shape in sent), sent


@pytest.mark.parametrize(
    "function, operation",
    [
        (lambda x: tf.abs(tf.reduce_mean(tf.cast(x, tf.complex128))), "ComplexAbs"),
        (lambda x: tf.strings.reduce_join(tf.strings.as_string(x[:, 0]), 0), "ReduceJoin"),
    ],
)
def test_what_replicas_do_not_exchange_is_named(function, operation):
    """Neither complex numbers nor strings."""
    _, analysis = check(function, X)
    finding, _ = analysis.findings  # of each replica
    assert (finding.reason, finding.op.type, finding.name) == ("rows", operation, "result 0")
    text = partition.text_of_whole([finding], "a step")
    assert "test_analysis.py" in text and "result 0" in text and "See docs/exactness.md" in text


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

    _, analysis = check(outer, X)
    assert [finding.name for finding in analysis.findings] == ["a sum within"]


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

    _, analysis = check(step, X, sizes=[8])
    converted = [marks.expected(edit.op) for [edit] in analysis.edits]
    assert converted == [None, ("same", "result 0")]  # what the state is assigned, for tfring writes it, too
