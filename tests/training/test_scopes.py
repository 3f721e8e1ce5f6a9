"""Models made inside the scope and outside: adopted, built in the scope, refused by name, or warned of."""

import contextlib
import warnings

import numpy as np
import pytest
from common import assert_equal, history_error, is_reference, relative_error, skewed_rows
from harness import strategy, workers

# -- loops outside of `run` --------------------------------------------------------------------------------------------


def loops_outside():
    """Returns the errors of loops that apply gradients outside of `run`, and the weights they leave unchanged."""
    import itertools

    import keras
    import tensorflow as tf

    ring = strategy()
    x, y = skewed_rows(8, seed=ring.cluster.rank)
    said = {}

    def attempt(graph, call, kind, optimizer_is_inside):
        with ring.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        with ring.scope() if optimizer_is_inside else contextlib.nullcontext():
            optimizer = keras.optimizers.SGD(0.1) if kind == "sgd" else keras.optimizers.Adam(0.1)
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer) if kind == "scaled" else optimizer
        if optimizer_is_inside:
            with ring.scope():
                optimizer.build(model.trainable_variables)
        before = model.get_weights()

        def step(x, y):
            with tf.GradientTape() as tape:
                loss = keras.ops.mean((y - model(x, training=True)) ** 2)
            pairs = list(zip(tape.gradient(loss, model.trainable_weights), model.trainable_weights, strict=True))
            optimizer.apply_gradients(pairs) if call == "pairs" else optimizer.apply(*zip(*pairs, strict=True))

        with pytest.raises(Exception, match=r"was (applied|made) outside") as error:
            (tf.function(step) if graph else step)(x, y)
        assert relative_error(model.get_weights(), before) == 0
        return str(error.value)

    for case in itertools.product((False, True), ("pairs", "apply"), ("sgd", "adam", "scaled"), (True, False)):
        said[case] = attempt(*case)
    return said


@pytest.mark.oldest
def test_gradients_applied_outside_of_run_are_refused():
    for said in workers(2).run(loops_outside):
        for (*_, optimizer_is_inside), text in said.items():
            assert ("`strategy.run(train_step" if optimizer_is_inside else "was made outside") in text, said


# -- made inside, built or composed outside ----------------------------------------------------------------------------


def functional():
    import keras

    return keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(2), keras.layers.Dense(1)]
    )


def recurrent():
    import keras

    return keras.Sequential([keras.layers.Reshape((4, 1)), keras.layers.LSTM(3), keras.layers.Dense(1)])


def subclassed():
    import keras

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.first, self.last = keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(1)

        def call(self, x):
            return self.last(self.first(x))

    return Model()


def reloaded():
    """A Sequential model in whose file Keras noted the rows of the first batch."""
    import pathlib
    import tempfile

    import keras

    model = recurrent()
    model(np.zeros((16, 4), "float32"))
    with tempfile.TemporaryDirectory() as folder:
        model.save(pathlib.Path(folder) / "model.keras")
        return keras.models.load_model(pathlib.Path(folder) / "model.keras")


def with_cleared_session():
    import keras

    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    return functional()


def composed(model, x):
    import keras

    return keras.Model(model.inputs, 2 * model.layers[-1].output)


def called(model, x):
    model(x[:16])
    return model


def built(model, x):
    model.build((16, 4))
    return model


def predicted(model, x):
    model.predict(x, verbose=0)
    return model


BOTH = [
    (functional, composed), (recurrent, built), (recurrent, predicted), (reloaded, called), (functional, called),
    (subclassed, called), (subclassed, predicted), (recurrent, called), (with_cleared_session, called),
]  # fmt: skip
BATCHES = {"batch_size": 11, "epochs": 2, "shuffle": False, "verbose": 0}  # of two workers' 6 and 5 rows; 1 and none
ROWS = 34


def made_in_and_out():
    """Each model made in the scope and finished outside of it, and all alone on one rank: errors, as `train_both`."""
    import keras

    ring = strategy()
    x, y = skewed_rows(ROWS)

    def train(scope, make, finish):
        keras.utils.set_random_seed(1)
        with scope:
            model = make()
        model = finish(model, x)
        model.compile(keras.optimizers.SGD(0.003, momentum=0.9), "mse", metrics=["mae"])
        history = model.fit(x, y, **BATCHES).history
        assert float(model.optimizer.learning_rate) == np.float32(0.003) and int(model.optimizer.iterations) == 8
        return history, model.get_weights()

    results = {}
    for make, finish in BOTH:
        history, weights = train(ring.scope(), make, finish)
        errors = results[f"{make.__name__} {finish.__name__}"] = {"bits": b"".join(w.tobytes() for w in weights)}
        if is_reference(ring):
            other, others = train(contextlib.nullcontext(), make, finish)
            errors.update(history=history_error(history, other), weights=relative_error(weights, others))
    return results


def test_models_made_inside_and_finished_outside():
    assert_equal(workers(2).run(made_in_and_out, timeout=300))


def made_outside():
    import keras

    from tfring.errors import ConfigurationError

    ring = strategy()
    x, y = skewed_rows(33)
    with ring.scope():
        base = functional()
    model = keras.Model(base.inputs, keras.layers.Dense(1, name="head")(base.layers[-1].output))
    model.compile("sgd", "mse")
    with pytest.raises(ConfigurationError, match="were made outside of its strategy's scope: Dense 'head'"):
        model.fit(x, y, verbose=0)
    lstm = recurrent()
    lstm.build((None, 4))
    with ring.scope():
        model = keras.Sequential([keras.Input((4,)), *lstm.layers])
        model.compile("sgd", "mse")
    with pytest.raises(ConfigurationError, match=r"scope: LSTM 'lstm\w*', Dense"):  # and not its cell
        model.fit(x, y, verbose=0)
    made, built = keras.optimizers.Adam(), keras.optimizers.Adam()
    built.build(functional().trainable_variables)
    with ring.scope():
        model = functional()
        model.compile(made, "mse")
        with pytest.raises(ConfigurationError, match=r"Adam 'adam\w*' was .* built there.* Make it inside"):
            model.compile(built, "mse")
        model.compile(made, "mse")
    model.fit(x, y, verbose=0)
    sent = ring.bytes_sent()
    model = functional()
    model.compile("sgd", "mse")
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        for _ in range(2):
            model.fit(x, y, verbose=0)
    for call in ("compile", "fit", "evaluate", "predict"):
        given = {"compile": ("sgd", "mse"), "predict": (x,)}.get(call, (x, y))
        with ring.scope(), pytest.raises(ConfigurationError, match=rf"{call}\(\) runs in the scope .* made outside\."):
            getattr(model, call)(*given)
    assert model.evaluate(x, y, verbose=0) > 0 and len(model.predict(x, verbose=0)) == 33
    alone = keras.Variable([1.0, 2.0])
    keras.optimizers.SGD(0.5).apply([np.ones(2, "float32")], (v for v in [alone]))  # drawn from once
    assert alone.numpy().tolist() == [0.5, 1.5]
    return ring.bytes_sent() - sent, [str(w.message) for w in noted if w.filename == __file__]


@pytest.mark.oldest
def test_models_made_outside():
    for sent, (said,) in workers(2).run(made_outside):
        assert sent == 0 and "made outside the scope: it trains alone on each of 2 workers" in said


def numbers_of_variables():
    import keras

    with strategy().scope():
        number, several = keras.Variable(1.5), keras.Variable([1.0, 2.0])
    errors = []
    for kind in (float, int):
        with pytest.raises(TypeError) as raised:
            kind(several)
        errors.append(str(raised.value))
    return float(number), int(number), errors


def test_a_variable_is_a_number_only_without_dimensions():
    for one, whole, errors in workers(2).run(numbers_of_variables):
        assert (one, whole) == (1.5, 1)
        assert all("Only scalar arrays can be converted to Python scalars" in error for error in errors), errors


def loop_outside(through_gradients):
    import keras
    import tensorflow as tf

    ring = strategy()
    x, y = skewed_rows()
    model, optimizer = functional(), keras.optimizers.SGD()
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x) - y) ** 2)
            gradients = tape.gradient(loss, model.trainable_variables)
            if through_gradients:
                optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            else:
                optimizer.apply(gradients, model.trainable_variables)
    assert ring.cluster.world_size == 2
    return [str(w.message) for w in noted]


@pytest.mark.parametrize("through_gradients", [False, True])
def test_a_loop_whose_model_and_optimizer_were_made_outside(through_gradients):
    for (said,) in workers(2).run(loop_outside, through_gradients):
        assert "was made outside the scope: its model trains alone on each of 2 workers" in said


# -- what runs eagerly -------------------------------------------------------------------------------------------------


def with_numpy(part):
    import keras
    import tensorflow as tf

    class Scale(keras.layers.Layer):
        def call(self, x):
            return x * np.float32(np.asarray(x).shape[-1] if part == "layer" else 4)

    def loss(y, y_pred):
        return tf.reduce_mean(tf.square(y - y_pred), -1) * (np.ones_like(y_pred.numpy())[0, 0] if part == "loss" else 1)

    def metric(y, y_pred):
        return tf.constant(np.abs(np.asarray(y) - np.asarray(y_pred)).mean(-1)) if part == "metric" else abs(y - y_pred)

    layers = [Scale(), keras.layers.Dense(3, activation="tanh"), keras.layers.Dense(1)]
    model = keras.Sequential(layers if part == "layer" else [keras.Input((4,)), *layers])
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=[metric], run_eagerly=True)
    return model


def numpy_in_steps():
    import keras

    ring = strategy()
    x, y = skewed_rows(ROWS)
    results = {}
    for part in ("layer", "loss", "metric"):
        keras.utils.set_random_seed(1)
        with ring.scope():
            model = with_numpy(part)
        history = model.fit(x, y, **BATCHES).history
        errors = results[part] = {"bits": b"".join(w.tobytes() for w in model.get_weights())}
        if is_reference(ring):
            keras.utils.set_random_seed(1)
            alone = with_numpy(part)
            errors["history"] = history_error(history, alone.fit(x, y, **BATCHES).history)
            errors["weights"] = relative_error(model.get_weights(), alone.get_weights())
    return results


@pytest.mark.oldest
def test_steps_that_run_eagerly_may_call_numpy():
    assert_equal(workers(2).run(numpy_in_steps))


def of_another_strategy(by_keras, method):
    """A model made under another strategy of one device, TensorFlow's or Keras' own, within a worker."""
    import keras
    import tensorflow as tf

    ring = strategy()
    x, y = skewed_rows()
    mirrored = tf.distribute.MirroredStrategy(["CPU:0"])
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=["cpu:0"]) if by_keras else None)
    with contextlib.nullcontext() if by_keras else mirrored.scope():
        model = functional()
        model.compile("sgd", "mse")
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        for _ in range(2):
            model.fit(x, y, verbose=0) if method == "fit" else model.train_on_batch(x, y)
    keras.distribution.set_distribution(None)
    return ring.cluster.world_size, [str(w.message) for w in noted if w.filename == __file__]


@pytest.mark.parametrize(
    ("by_keras", "name", "method"),
    [(False, "MirroredStrategy", "fit"), (True, "DataParallel", "fit"), (False, "MirroredStrategy", "train_on_batch")],
)
def test_a_model_of_another_strategy(by_keras, name, method):
    for _, (said,) in workers(2).run(of_another_strategy, by_keras, method):
        assert f"belongs to a {name}: it trains alone on each of 2 workers" in said
