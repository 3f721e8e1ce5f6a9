"""Error feedback of `RingStrategy(compression=..., error_feedback=True)`: what rounding cuts off is sent a step later.

The loss is linear in the weights, so gradients are known numbers, which no weight and no rounding changes.
"""

import harness
import numpy as np
import pytest
from common import relative_error
from harness import workers

import tfring
from tfring.errors import ConfigurationError

WIDTH = 20_001  # so many float32 are not small, and make chunks of unequal length
SHARE = 4  # rows of a worker in a batch: their mean is exact
RATE = 2.0**-6


def optimizers():
    import keras

    o = keras.optimizers
    return {
        "sgd": lambda: o.SGD(RATE),
        "momentum": lambda: o.SGD(RATE, momentum=0.5, global_clipnorm=500.0),
        "adam": lambda: o.Adam(0.01),
    }


def rows_of_integers(n):
    """Rows whose gradients are exact in float32. Of three workers one has none of the last batch."""
    generator = np.random.default_rng(0)
    num_rows = 4 * n * SHARE + 2
    x = generator.integers(-999, 1000, (num_rows, WIDTH)).astype("float32")
    return x, generator.integers(1, 4, (num_rows, 1)).astype("float32")


def product(y_true, y_pred):
    import keras

    return keras.ops.mean(y_true * y_pred, axis=-1)


def linear_model(strategy, optimizer, units=1):
    import keras

    with strategy.scope():
        model = keras.Sequential([
            keras.Input((WIDTH // units,)),
            keras.layers.Dense(units, kernel_initializer="zeros", use_bias=False),
        ])
        model.compile(optimizer, product)
    return model


def residuals(strategy, model):
    """The sum of the residuals of all workers."""
    found = [v.numpy() for v in tfring._keras.optimizers.residuals.residuals_of(model)]
    return [np.asarray(strategy.extended.world.all_reduce([r], name="residuals")[0]) for r in found]


# -- the same as the arithmetic in NumPy ---------------------------------------------------------------------------


def train(compression, names):
    strategy = harness.strategy(compression=compression, error_feedback=True, check_equal=True)
    x, y = rows_of_integers(strategy.world_size)
    found = {}
    for name in names:
        model = linear_model(strategy, optimizers()[name]())
        before = strategy.extended.gradients.bytes_sent()
        model.fit(x, y, batch_size=SHARE * strategy.world_size, epochs=2, shuffle=False, verbose=0)
        sent = strategy.extended.gradients.bytes_sent() - before
        found[name] = (model.get_weights()[0], residuals(strategy, model)[0], sent)
    strategy.close()
    return found


def simulate(n, compression, names):
    """One process: NumPy's gradients of each worker and its roundings, Keras' optimizer."""
    import keras
    import ml_dtypes

    x, y = rows_of_integers(n)
    wire = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}[compression]
    bounds = [i * (WIDTH // n) + min(i, WIDTH % n) for i in range(n + 1)]  # of the chunk whose sum a worker makes
    found = {}
    for name in names:
        weight = keras.Variable(np.zeros((WIDTH, 1), "float32"))
        optimizer = optimizers()[name]()
        kept = np.zeros((n, WIDTH), "float32")
        for begin in [*range(0, len(x), n * SHARE)] * 2:
            rows = range(begin, min(begin + n * SHARE, len(x)))
            total = np.zeros(WIDTH, "float32")
            sent = np.zeros((n, WIDTH), "float32")
            for i in range(n):
                mine = list(rows)[i * len(rows) // n : (i + 1) * len(rows) // n]
                owed = kept[i].copy()
                if mine:
                    mean = (x[mine] * (y[mine] / np.float32(len(mine)))).sum(0)
                    owed += mean * np.float32(len(mine) / len(rows))
                sent[i] = owed.astype(wire).astype("float32")
                kept[i] = owed - sent[i]
            total = sent.sum(0)
            rounded = total.astype(wire).astype("float32")
            for i in range(n):
                chunk = slice(bounds[i], bounds[i + 1])
                kept[i, chunk] += (total - rounded)[chunk]
            optimizer.apply([rounded[:, None]], [weight])
        found[name] = (weight.numpy(), kept.sum(0)[:, None])
    return found


@pytest.mark.parametrize(("n", "compression"), [(2, "bfloat16"), (3, "bfloat16"), (3, "float16")])
def test_it_equals_the_arithmetic_in_one_process(n, compression):
    names = ["sgd", "momentum", "adam"]
    everyone = workers(n).run(train, compression, names)
    [want] = workers(1).run(simulate, n, compression, names)
    num_steps = 2 * 5
    for name in names:
        for found in everyone:
            assert relative_error([found[name][0]], [want[name][0]]) <= 1e-6, name
            np.testing.assert_allclose(found[name][1], want[name][1], atol=1e-4)
        assert np.abs(want[name][1]).max() > 0.1  # something was cut off
        sent = num_steps * 2 * WIDTH * 2 * (n - 1) / n
        assert 0.99 * sent < np.mean([found[name][2] for found in everyone]) < 1.05 * sent + 2000 * num_steps


# -- what is lost without it ---------------------------------------------------------------------------------------

SMALL = {"bfloat16": 1 + 2.0**-10, "float16": 1.5e-8}  # below half of a unit, for two workers and for three
STEPS = 400


def fit_constant(strategy, model, small, num_steps, **options):
    """Trains on rows that are all alike: every other gradient is `small`, the others are 1000."""
    import tensorflow as tf

    batch = SHARE * strategy.world_size
    x = np.full((batch, WIDTH), 1000.0, "float32")
    x[:, ::2] = small
    rows = tf.data.Dataset.from_tensor_slices((x, np.ones((batch, 1), "float32")))
    model.fit(rows.repeat(num_steps).batch(batch), verbose=0, **options)


def accumulate(compression, feedback):
    """Moves weights by constant gradients: all large but one in two, which is the small one."""
    strategy = harness.strategy(compression=compression, error_feedback=feedback)
    model = linear_model(strategy, optimizers()["sgd"]())
    fit_constant(strategy, model, SMALL[compression], STEPS)
    moved = -model.get_weights()[0].astype("float64") / RATE
    kept = residuals(strategy, model)
    strategy.close()
    return moved[::2], moved[1::2], kept[0][::2] if kept else None


@pytest.mark.parametrize(("n", "compression"), [(2, "bfloat16"), (3, "float16")])
def test_small_parts_of_gradients_arrive(n, compression):
    """Of what is below a rounding nothing arrives without error feedback, and with it all but the last rounding."""
    small, large, kept = workers(n).run(accumulate, compression, True)[0]
    exact = STEPS * SMALL[compression]
    one = 6e-8 if compression == "float16" else 2.0**-7  # the widest gap between neighbours that are sent
    assert np.abs(small - exact).max() <= (n + 1) * one
    np.testing.assert_allclose(small + kept, exact, rtol=1e-5)  # no more is missing than the residuals hold
    np.testing.assert_allclose(large, STEPS * 1000.0, rtol=1e-3)

    small, large, kept = workers(n).run(accumulate, compression, False)[0]
    assert kept is None
    lost = STEPS * 2.0**-10 if compression == "bfloat16" else exact
    assert np.abs(small - exact).min() > 0.5 * lost > (n + 1) * one
    np.testing.assert_allclose(large, STEPS * 1000.0, rtol=1e-2)


# -- files ---------------------------------------------------------------------------------------------------------


def interrupted(folder, stop_at, epochs):
    """Epochs of five steps with a Backup; the first try ends behind a step."""
    import keras

    class Stops(keras.callbacks.Callback):
        seen = 0

        def on_train_batch_end(self, batch, logs=None):
            self.seen += 1
            if self.seen == stop_at:
                raise KeyboardInterrupt

    strategy = harness.strategy(compression="bfloat16", error_feedback=True)
    for stops in (True, False) if stop_at else (False,):
        model = linear_model(strategy, optimizers()["sgd"]())
        callbacks = [tfring.callbacks.Backup(folder, every_steps=3), *([Stops()] if stops else [])]
        try:
            fit_constant(strategy, model, SMALL["bfloat16"], 5, epochs=epochs, callbacks=callbacks)
        except KeyboardInterrupt:
            assert stops
    own = tfring._keras.optimizers.residuals.residuals_of(model)[0].numpy()
    return model.get_weights()[0], own, residuals(strategy, model)[0]


def test_a_backup_keeps_the_residuals(tmp_path):
    """On as many workers the same bits; on others nothing is lost but what the residuals hold."""
    whole = workers(2).run(interrupted, str(tmp_path / "whole"), None, 4)
    parts = workers(2).run(interrupted, str(tmp_path / "parts"), 8, 4)
    for (weights, own, _), (again, own_again, _) in zip(whole, parts, strict=True):
        assert weights.tobytes() == again.tobytes() and own.tobytes() == own_again.tobytes()
    assert np.abs(whole[0][2][::2]).min() > 0
    for n in (3, 1):
        epochs = {3: 5, 1: 6}[n]
        for weights, _, kept in workers(n).run(interrupted, str(tmp_path / "parts"), None, epochs):
            moved = -weights.astype("float64") / RATE
            np.testing.assert_allclose((moved + kept)[::2], 5 * epochs * SMALL["bfloat16"], rtol=1e-6)
            assert n > 1 or not kept.any()  # what one worker sends is not rounded


# -- what does not go together -------------------------------------------------------------------------------------


def other_ways():
    """Where nothing is rounded nothing is kept; accumulated gradients are rounded once, and tables that go dense."""
    import keras

    o = keras.optimizers
    found = {}
    for name, optimizer, sparse in (
        ("accumulated", o.SGD(RATE, gradient_accumulation_steps=3), "auto"),
        ("dense table", o.SGD(RATE), "always"),
        ("sparse table", o.SGD(RATE), "never"),
    ):
        strategy = harness.strategy(
            compression="bfloat16", error_feedback=True, sparse=tfring.SparseOptions(dense=sparse)
        )
        if name == "accumulated":
            model = linear_model(strategy, optimizer)
            fit_constant(strategy, model, SMALL["bfloat16"], 30)
            moved = -model.get_weights()[0][::2].astype("float64") / RATE
            found[name] = moved + residuals(strategy, model)[0][::2], residuals(strategy, model)[0][::2]
        else:
            with strategy.scope():
                table = keras.layers.Embedding(WIDTH, 2, embeddings_initializer="zeros")
                model = keras.Sequential([keras.Input((1,), dtype="int32"), table, keras.layers.Flatten()])
                model.compile(optimizer, product)
            ids = np.arange(64)[:, None]
            model.fit(ids, np.full((64, 2), 2 * 64 * SMALL["bfloat16"], "float32"), batch_size=64, epochs=30, verbose=0)
            moved = -model.get_weights()[0][:64].astype("float64") / RATE
            kept = residuals(strategy, model)[0]
            found[name] = moved + kept[:64], kept[:64]
        strategy.close()
    return found


def test_accumulated_gradients_and_tables():
    for found in workers(2).run(other_ways):
        total, kept = found["accumulated"]
        np.testing.assert_allclose(total, 10 * SMALL["bfloat16"], rtol=1e-5)
        assert kept.any()
        for name in ("dense table", "sparse table"):
            total, kept = found[name]
            np.testing.assert_allclose(total, 30 * SMALL["bfloat16"], rtol=1e-5)
            assert kept.any() == (name == "dense table")


def refuse(case):
    import keras

    o = keras.optimizers

    def of_strategy(**options):
        harness.strategy(**{"compression": "bfloat16", "error_feedback": True, **options})

    class Own(o.SGD):
        def apply(self, *args, **kwargs):
            return super().apply(*args, **kwargs)

    def of_optimizer(optimizer):
        strategy = harness.strategy(compression="float16", error_feedback=True)
        linear_model(strategy, optimizer)
        optimizer.build([])

    cases = {
        "no compression": lambda: of_strategy(compression=None),
        "delayed": lambda: of_strategy(synchronization=tfring.Delayed(4)),
        "mesh": lambda: of_strategy(mesh=tfring.Mesh(model=2)),
        "loss scale": lambda: of_optimizer(o.LossScaleOptimizer(o.SGD())),
        "own apply": lambda: of_optimizer(Own()),
    }
    if case is None:
        return list(cases)
    try:
        cases[case]()
    except ConfigurationError as error:
        return str(error)
    return None


REFUSED = {
    "no compression": "error_feedback=True with compression=None",
    "delayed": "synchronization=Delayed(every=4",
    "mesh": "with error_feedback=True",
    "loss scale": "a scale that changes from step to step",
    "own apply": "apply of its own, which reduces gradients twice",
}


def refuse_all():
    return {case: refuse(case) for case in refuse(None)}


def test_what_it_cannot_do_is_refused_by_name():
    for said in workers(2).run(refuse_all):
        assert said.keys() == REFUSED.keys()
        for case, words in REFUSED.items():
            assert said[case] is not None and words in said[case], (case, said[case])
