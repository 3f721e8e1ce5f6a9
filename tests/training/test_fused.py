"""Updates that tfring computes in fewer passes over memory are Keras' own."""

import collections

import numpy as np
import pytest
from common import relative_error
from harness import strategy, workers

SHAPES = ((1003, 33), (7,), ())
ROWS = np.array([5, 900, 17, 0])


def makers():
    import keras

    o = keras.optimizers
    decay = o.schedules.ExponentialDecay(0.1, 2, 0.5)
    return {
        "Adam": lambda: o.Adam(0.01),
        "Adam, other betas, clipped": lambda: o.Adam(0.01, beta_1=0.8, beta_2=0.95, epsilon=1e-5, clipnorm=1.0),
        "Adam amsgrad": lambda: o.Adam(0.01, amsgrad=True),
        "Adam of a schedule": lambda: o.Adam(decay),
        "AdamW": lambda: o.AdamW(0.01, weight_decay=0.1),
        "Adagrad": lambda: o.Adagrad(0.05),
        "Adagrad, decay": lambda: o.Adagrad(0.05, weight_decay=0.1),
    }


def gradients(dtype, sparse):
    """Returns gradients of five steps, from subnormal to large numbers."""
    import tensorflow as tf

    rng = np.random.default_rng(0)

    def one(shape):
        exponents = rng.integers(-44, 4, size=shape).astype("float64")
        return tf.constant((rng.normal(size=shape) * 10.0**exponents).astype(dtype))

    for _ in range(5):
        table = one(SHAPES[0])
        if sparse:
            table = tf.IndexedSlices(tf.gather(table, ROWS), tf.constant(ROWS), tf.constant(SHAPES[0], tf.int64))
        yield [table, *(one(shape) for shape in SHAPES[1:])]


def trained(make, dtype, sparse, ring):
    """Weights and slots, and how many operations of each kind a step has."""
    import keras
    import tensorflow as tf

    rng = np.random.default_rng(1)
    weights = [keras.Variable(rng.normal(size=shape), dtype=dtype) for shape in SHAPES]
    optimizer = make()
    optimizer.build(weights)

    @tf.function
    def step(gradients):
        def apply():
            optimizer.apply(list(gradients), weights)

        apply() if ring is None else ring.run(apply)

    steps = list(gradients(dtype, sparse))
    kinds = collections.Counter(op.type for op in step.get_concrete_function(steps[0]).graph.get_operations())
    for each in steps:
        step(each)
    return [v.numpy() for v in [*weights, *optimizer.variables]], kinds


def compared(dtype, sparse):
    """The largest error of each optimizer's results, whether they have Keras' bits, and the operations of its step."""
    ring = strategy()
    found = {}
    for name, make in makers().items():
        want, _ = trained(make, dtype, sparse, None)
        with ring.scope():
            got, kinds = trained(make, dtype, sparse, ring)
        same = all(a.tobytes() == b.tobytes() for a, b in zip(got, want, strict=True))
        found[name] = (relative_error(got, want), same, kinds)
    return found


@pytest.mark.oldest
@pytest.mark.parametrize(("dtype", "sparse"), [
    ("float32", False), ("float64", False), ("float32", True), ("float64", True), ("bfloat16", False),
])
def test_as_keras(dtype, sparse):
    [found] = workers(1).run(compared, dtype, sparse)
    for name, (error, same_bits, kinds) in found.items():
        by_rows = name.startswith("Adagrad") and sparse
        # TensorFlow's graphs multiply by a reciprocal root where they see a division by one, as they do here.
        assert error <= 1e-6 if by_rows else same_bits, (name, error)
        is_native = name.startswith("Adam") and "amsgrad" not in name and dtype != "bfloat16"
        assert kinds["TfringAdam"] == (len(SHAPES) - sparse if is_native else 0), (name, kinds)
        assert kinds["TfringAdamRows"] == (sparse if is_native else 0), (name, kinds)
        if is_native and "schedule" not in name:
            assert kinds["Pow"] == 2, kinds  # of each beta, once for all weights
        assert ("ResourceScatterUpdate" in kinds) == by_rows, (name, kinds)


def test_with_many_threads_keras_own():
    [found] = workers(1, env={"TF_NUM_INTRAOP_THREADS": "8"}).run(compared, "float32", False)
    for name, (error, _, kinds) in found.items():
        assert error == 0 and "TfringAdam" not in kinds, name


def refused():
    import tensorflow as tf

    from tfring.ring import ops

    weight, *slots = (tf.Variable([1.0, 2.0]) for _ in range(3))
    scalars = [0.5, 0.5, 0.25, 0.0]
    said = []
    for gradient, numbers in (([1.0, 2.0, 3.0], scalars), ([1.0, 2.0], scalars[:3])):
        with pytest.raises(tf.errors.InvalidArgumentError) as error:
            ops.adam(weight, *slots, gradient, numbers)
        said.append(error.value.message)
    for values, ids, numbers in (
        ([1.0, 2.0], [0], scalars), ([1.0], [0], scalars[:3]), ([1.0, 2.0], [1, 1], scalars), ([1.0], [2], scalars),
        ([1.0], [-1], scalars),
    ):  # fmt: skip
        with pytest.raises(tf.errors.InvalidArgumentError) as error:
            ops.adam(weight, *slots, tf.IndexedSlices(tf.constant(values), tf.constant(ids)), numbers)
        said.append(error.value.message)
    return said, weight.numpy().tolist()


def test_a_gradient_of_another_shape_is_refused():
    [((shape, scalars, rows, scalars_of_rows, *ids), weight)] = workers(1).run(refused)
    assert "Adam got a gradient of 12 bytes for a weight of 8" in shape
    assert "It needs four scalars" in scalars and "It needs four scalars" in scalars_of_rows
    assert "Adam got rows of 8 bytes with 1 ids for a weight with rows of 4 bytes" in rows
    for said in ids:
        assert "Adam got an id twice, or one that is not from 0 to 1, the last row" in said
    assert weight == [1.0, 2.0]


def rates_of_weights(ring):
    """Weights that a subclass updates with a learning rate each, after two eager updates and two of a function."""
    import contextlib

    import keras
    import tensorflow as tf

    class ByWeight(keras.optimizers.Adam):
        def update_step(self, gradient, variable, learning_rate):
            super().update_step(gradient, variable, learning_rate * (1 + self._get_variable_index(variable)))

    with contextlib.nullcontext() if ring is None else ring.scope():
        weights = [keras.Variable(np.ones(3)) for _ in range(8)]
        optimizer = ByWeight(0.01)
        optimizer.build(weights)

    def apply():
        optimizer.apply([tf.constant([1.0, -2.0, 0.5])] * len(weights), weights)

    def step():
        apply() if ring is None else ring.run(apply)

    for update in (step, step, tf.function(step), tf.function(step)):
        update()
    return [weight.numpy() for weight in weights]


def rates_of_both():
    return rates_of_weights(strategy()), rates_of_weights(None)


def test_each_weight_may_have_a_learning_rate_of_its_own():
    [(got, want)] = workers(1).run(rates_of_both)
    assert [a.tolist() for a in got] == [a.tolist() for a in want]
    assert len({tuple(a) for a in got}) == len(got)


def applied_outside(ring):
    """Weights after Adagrad, called outside of `run`, has had rows of a table, and of a weight with an id twice."""
    import contextlib

    import keras
    import tensorflow as tf

    import tfring

    with contextlib.nullcontext() if ring is None else ring.scope():
        layer = tfring.layers.ShardedEmbedding(9, 1, embeddings_initializer="ones")
        layer.build()
        weights = [layer.weights[0], keras.Variable(np.ones((9, 1), "float32"))]
        optimizer = keras.optimizers.Adagrad(0.5)
        optimizer.build(weights)
    rows = tf.IndexedSlices(tf.constant([[1.0], [2.0]]), tf.constant([1, 1]), tf.constant([9, 1], tf.int64))
    optimizer.apply([rows, rows], weights)
    return [weight.numpy() for weight in weights]


def test_what_the_ring_has_not_summed_is_left_to_keras():
    [same] = workers(1).run(compare_outside)
    assert same


def compare_outside():
    return all(np.array_equal(a, b) for a, b in zip(applied_outside(strategy()), applied_outside(None), strict=True))
