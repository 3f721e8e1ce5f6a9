"""ShardedDense: N workers, each with its columns or rows of the kernel, equal one process on the whole batch."""

import numpy as np
import pytest
from common import assert_equal, element_wise_optimizers, optimizer_settings, relative_error, skewed_rows, train_both
from dense_models import ALONE, BOTH, MODEL, ONE_SUM, PAIR, dense, model_of
from harness import strategy, workers

import tfring


def optimizers():
    """Every optimizer that is not refused, by name."""
    return {**element_wise_optimizers(), **optimizer_settings()}


def fitted(mesh, cases, dtype=None):
    """`cases`: the layers, the name of the optimizer, what `compile` is given."""
    import keras

    keras.config.set_floatx(dtype or "float32")
    ring = strategy(**({} if mesh is None else {"mesh": mesh}))
    x, y = skewed_rows()
    results = {}
    for name, optimizer, *compiled in cases:
        layers = ONE_SUM if name == "one sum" else ALONE[name]
        make = model_of(optimizers()[optimizer], layers, **dict(compiled))
        also = {"evaluate": (x, y), "predict": x} if optimizer == "SGD" else {}
        results[name, optimizer] = train_both(ring, make, x, y, **also)
    return results


CASES = [
    ("columns", "SGD"),
    ("rows", "global_clipnorm"),
    ("pair", "Adam"),
    ("rows first", "Adagrad"),
    ("one sum", "SGD momentum"),
]


@pytest.mark.parametrize(("n", "communication", "cases"), [
    (3, "ring", CASES), pytest.param(4, "ring", CASES[2:3], marks=pytest.mark.long),
    pytest.param(2, "tensorflow", CASES[:2], marks=pytest.mark.long),
])  # fmt: skip
def test_equals_one_process(n, communication, cases):
    assert_equal(workers(n, communication).run(fitted, None, cases))


@pytest.mark.parametrize(("mesh", "cases"), [
    pytest.param(MODEL, [("columns", "Adam"), ("one sum", "global_clipnorm")], marks=pytest.mark.oldest),
    (BOTH, [("columns", "SGD"), ("pair", "Adam")]),
    pytest.param(BOTH, [("one sum", "global_clipnorm")], marks=pytest.mark.long),
    (tfring.Mesh(data=1, model=3), [("pair", "SGD")]),
], ids=str)  # fmt: skip
def test_equals_one_process_on_a_mesh(mesh, cases):
    assert_equal(workers(mesh.size).run(fitted, mesh, cases))


@pytest.mark.parametrize("cases", [
    [("pair", "loss_scale"), ("columns", "Adam", ("run_eagerly", True))],
    pytest.param([("rows first", "clipnorm")], marks=pytest.mark.long),
], ids=str)  # fmt: skip
def test_in_float64(cases):
    assert_equal(workers(BOTH.size).run(fitted, BOTH, cases, "float64"), tolerance=1e-12)


def by_each_optimizer(mesh, names):
    import keras

    keras.config.set_floatx("float64")
    ring = strategy(mesh=mesh)
    x, y = skewed_rows(num_rows=43)
    kinds = optimizers()

    def built(name):
        def make():
            model = model_of(kinds[name], PAIR)()
            # Keras alone builds it while tracing, where ScheduleFreeAdamW's copy of the weights is lost.
            model.optimizer.build(model.trainable_variables)
            return model

        return make

    return {name: train_both(ring, built(name), x, y, epochs=1, batch_size=15) for name in names}


@pytest.mark.parametrize("mesh", [MODEL], ids=str)
def test_optimizers(mesh):
    names = ["Adam amsgrad", "Ftrl", "Lion", "RMSprop", "clipvalue", "ema", "weight_decay"]
    assert_equal(workers(2).run(by_each_optimizer, mesh, names), tolerance=1e-12)


# -- products --------------------------------------------------------------------------------------------------------


def products(mesh):
    """The largest errors of outputs and gradients in a loop of one's own, whose gradients are summed over replicas.

    Each data coordinate has rows of its own, of another number; the last has none in the second step.
    """
    import keras
    import tensorflow as tf

    ring = strategy(mesh=mesh)
    rank, num_replicas = ring.ring.control.rank, ring.num_replicas_in_sync
    generator = np.random.default_rng(0)
    shape = (3, 5)  # of what a row has, besides features
    errors = {}

    def train_step(layer, x, factors):
        with tf.GradientTape() as tape:
            tape.watch(x)
            outputs = layer(x)
            loss = tf.reduce_sum(outputs * factors[: tf.shape(outputs)[0]])
        variables = layer.trainable_variables
        of_inputs, *gradients = tape.gradient(loss, [x, *(v.value for v in variables)])
        layer.optimizer.apply(gradients, variables)
        return outputs, of_inputs

    for split in ("columns", "rows"):
        weights = [generator.normal(size=(4, 7)).astype("float32"), generator.normal(size=7).astype("float32")]
        options = {"kernel_regularizer": None, "activation": "softmax"}
        with ring.scope():
            layer = tfring.layers.ShardedDense(7, split, **options)
            layer.build((None, *shape, 4))
            layer.optimizer = keras.optimizers.SGD(0.1)
        alone = keras.layers.Dense(7, **options)
        alone.build((None, *shape, 4))
        alone.optimizer = keras.optimizers.SGD(0.1)
        for each in (layer, alone):
            each.set_weights(weights)
        worst = {"outputs": 0.0, "inputs": 0.0}
        for number in range(3):
            counts = [2 + replica for replica in range(num_replicas)]
            if number == 1 and num_replicas > 1:
                counts[-1] = 0
            everyones = [generator.normal(size=(n, *shape, 4)).astype("float32") for n in counts]
            factors = [generator.normal(size=(n + 1, *shape, 7)).astype("float32") for n in counts]
            mine = tf.constant(everyones[rank])
            outputs, of_inputs = ring.run(train_step, (layer, mine, tf.constant(factors[rank])))
            want = train_step(alone, tf.constant(np.concatenate(everyones)), tf.constant(np.concatenate(
                [f[:n] for f, n in zip(factors, counts, strict=True)]
            )))  # fmt: skip
            begin = sum(counts[:rank])
            for what, got, whole in zip(worst, (outputs, of_inputs), want, strict=True):
                error = relative_error([got[: counts[rank]]], [whole[begin : begin + counts[rank]]])
                worst[what] = max(worst[what], error)
        errors[split] = {**worst, "weights": relative_error(layer.get_weights(), alone.get_weights())}
    return errors


@pytest.mark.parametrize("mesh", [tfring.Mesh(data=3), BOTH, tfring.Mesh(data=1)], ids=str)
def test_products(mesh):
    for rank, errors in enumerate(workers(mesh.size).run(products, mesh)):
        for split, worst in errors.items():
            assert max(worst.values()) < 1e-5, (rank, split, worst)


def mixed(mesh):
    """Losses, weights and dtypes of a model of 16-bit floats, and those of one process."""
    import keras

    x, y = skewed_rows()
    ring = strategy(mesh=mesh)
    results = {}
    for kind in ("mixed_float16", "mixed_bfloat16"):
        keras.utils.set_random_seed(0)  # how far roundings lead apart goes by the weights
        layers = [(units, split, {**options, "dtype": kind}) for units, split, options in PAIR]
        make = model_of(lambda: keras.optimizers.SGD(0.01), layers)
        with ring.scope():
            model = make()
        alone = make()
        alone.set_weights(model.get_weights())
        losses = [m.fit(x, y, batch_size=20, shuffle=False, verbose=0).history["loss"][0] for m in (model, alone)]
        layer = next(layer for layer in model.layers if isinstance(layer, tfring.layers.ShardedDense))
        results[kind] = losses, layer(x[:4]).dtype.name, layer.kernel.dtype, relative_error(
            model.get_weights(), alone.get_weights()
        )  # fmt: skip
    return results


@pytest.mark.parametrize("mesh", [tfring.Mesh(data=2), MODEL], ids=str)
def test_mixed_precision(mesh):
    for results in workers(2).run(mixed, mesh):
        for kind, ((loss, want), outputs, weights, error) in results.items():
            assert (outputs, weights) == (kind.removeprefix("mixed_"), "float32")
            epsilon = 2.0**-10 if kind == "mixed_float16" else 2.0**-7
            assert abs(loss - want) < epsilon * want
            assert error < (0.003 if kind == "mixed_float16" else 0.02)


def regularized(mesh):
    """With a regularizer of weights in pieces, whose loss is that of the whole, and a constraint."""
    import keras

    r = keras.regularizers
    options = {"kernel_regularizer": r.L2(0.1), "kernel_constraint": "non_neg", "bias_regularizer": r.L1L2(0.1, 0.2)}
    ring = strategy(mesh=mesh)
    x, y = skewed_rows()
    results = {}
    for split in ("columns", "rows"):
        make = model_of(lambda: keras.optimizers.SGD(0.01), [(7, split, options)])
        results[split] = train_both(ring, make, x, y, evaluate=(x, y))
    return results


@pytest.mark.parametrize("mesh", [MODEL, pytest.param(BOTH, marks=pytest.mark.long)], ids=str)
def test_regularizers(mesh):
    assert_equal(workers(mesh.size).run(regularized, mesh))


def subclassed(mesh):
    """Layers that are built while the first step is traced."""
    import keras
    import tensorflow as tf

    x, y = skewed_rows()

    class Late(keras.Model):
        def __init__(self):
            super().__init__()
            self.first = dense(6, "columns", activation="relu", gather_output=False)
            self.second = dense(1, "rows", input_is_parallel=True)

        def call(self, inputs):
            return self.second(self.first(inputs))

    ring = strategy(mesh=mesh)
    with ring.scope():
        model = Late()
        model.compile(keras.optimizers.SGD(0.001), "mse")
    first = model.fit(x, y, batch_size=83, verbose=0).history["loss"][0]
    assert tf.distribute.has_strategy() is False
    alone = Late()
    alone(x[:1])
    alone.compile(keras.optimizers.SGD(0.001), "mse")
    alone.set_weights(model.get_weights())
    losses = [m.evaluate(x, y, verbose=0) for m in (model, alone)]
    return first, *losses


@pytest.mark.parametrize("mesh", [tfring.Mesh(data=2), MODEL], ids=str)
def test_layers_built_late(mesh):
    for first, loss, want in workers(2).run(subclassed, mesh):
        assert loss == pytest.approx(want, rel=1e-5)
        assert loss < first
