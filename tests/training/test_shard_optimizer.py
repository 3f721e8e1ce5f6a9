"""`shard_optimizer`: N workers equal one process, each with its share of the slots; files hold whole slots."""

import math

import numpy as np
import pytest
from common import assert_equal, devices, relative_error, skewed_ids, train_both
from harness import strategy, workers

import tfring
from tfring.reduction.cuts import plan_cut

VOCABULARY, DIM = 300, 5  # rows enough for four ranks to cut the table between rows
ENGINES = [(3, {}), (2, {"communication": "tensorflow"}), (2, {"logical_cpus": 2})]


def test_cuts():
    for world_size in (2, 3, 4, 7):
        for shape in ((), (1,), (2,), (5, 3), (0, 4), (64 * world_size,), (64 * world_size + 1, 2), (3, 3, 5, 2)):
            cut = plan_cut(shape, world_size)
            whole = np.arange(math.prod(shape))
            lined_up = whole.reshape(cut.lined_up)
            pieces = [lined_up[begin:end] for begin, end in cut.bounds]
            assert [piece.shape for piece in pieces] == [cut.shape_of(rank) for rank in range(world_size)]
            assert np.array_equal(np.concatenate(pieces).reshape(-1), whole)
            assert cut.by_rows == (bool(shape) and (shape[0] >= 64 * world_size or len(shape) == 1))
            assert len({piece.size for piece in pieces}) <= 2


def optimizers():
    """Every optimizer of Keras that is not refused, by name."""
    import keras

    o = keras.optimizers
    newer = {
        "ScheduleFreeAdamW": lambda: o.ScheduleFreeAdamW(0.01),
        "MultiOptimizer": lambda: o.MultiOptimizer(o.OptimizerMap(o.Adam(0.01), {"embedding.*": o.SGD(0.03)})),
    }
    return {
        "SGD": lambda: o.SGD(0.03),
        "SGD momentum": lambda: o.SGD(0.01, momentum=0.9, nesterov=True),
        "RMSprop": lambda: o.RMSprop(0.003, momentum=0.9, centered=True),
        "Adam": lambda: o.Adam(0.01, amsgrad=True),
        "AdamW": lambda: o.AdamW(0.01, weight_decay=0.01),
        "Adadelta": lambda: o.Adadelta(0.1),
        "Adagrad": lambda: o.Adagrad(0.05),
        "Adamax": lambda: o.Adamax(0.01),
        "Nadam": lambda: o.Nadam(0.01),
        "Ftrl": lambda: o.Ftrl(0.05, l1_regularization_strength=0.01),
        "Lion": lambda: o.Lion(0.01),
        **{name: make for name, make in newer.items() if hasattr(o, name)},
    }


def excluding(optimizer):
    optimizer.exclude_from_weight_decay(var_names=["bias", "embeddings", "table"])
    return optimizer


def settings():
    """Optimizers by what is set of them."""
    import keras

    o = keras.optimizers

    def sgd(**options):
        return lambda: o.SGD(0.05, momentum=0.9, **options)

    return {
        "clipnorm": sgd(clipnorm=0.01),
        "global_clipnorm": sgd(global_clipnorm=0.01),
        "clipvalue": sgd(clipvalue=0.001),
        "weight_decay": lambda: excluding(o.AdamW(0.01, weight_decay=0.5)),
        "accumulation": sgd(gradient_accumulation_steps=2, global_clipnorm=0.1),
        "ema": sgd(use_ema=True, ema_momentum=0.7, ema_overwrite_frequency=3),
        "ema of accumulated": sgd(use_ema=True, ema_momentum=0.7, gradient_accumulation_steps=2),
        "loss_scale": lambda: o.LossScaleOptimizer(o.SGD(0.05, momentum=0.9, global_clipnorm=0.1)),
        "loss_scale accumulated": lambda: o.LossScaleOptimizer(o.SGD(0.05, gradient_accumulation_steps=2)),
        "schedule": lambda: o.Adam(o.schedules.ExponentialDecay(0.1, 3, 0.5)),
    }


def model_of(optimizer, dtype=None, lookup=None, **options):
    """Mean of looked-up rows, then dense layers. Outside a scope the table is dense, unless `lookup` says."""

    def make():
        import keras
        import tensorflow as tf

        looked_up = tf.distribute.has_strategy() if lookup is None else lookup
        ids = keras.Input((3,), dtype="int32")
        if looked_up:
            rows = keras.layers.Embedding(VOCABULARY, DIM, name="embedding_table", dtype=dtype)(ids)
        else:
            hot = keras.ops.one_hot(ids, VOCABULARY, dtype="float64" if dtype == "float64" else None)
            rows = keras.layers.Dense(DIM, use_bias=False, name="embedding_table", dtype=dtype)(hot)
        mean = keras.ops.mean(rows, axis=1)
        hidden = keras.layers.Dense(7, activation="tanh", kernel_constraint="max_norm", dtype=dtype)(mean)
        model = keras.Model(ids, keras.layers.Dense(1, dtype=dtype)(hidden))
        model.compile(optimizer(), "mse", **options)
        return model

    return make


def sharded(**options):
    return strategy(shard_optimizer=True, check_equal=True, **devices(), **options)


def train(names, dense):
    ring = sharded(sparse=tfring.SparseOptions(dense=dense))
    x, y = skewed_ids(vocabulary=VOCABULARY)
    kinds = {**optimizers(), **settings()}
    return {name: train_both(ring, model_of(kinds[name]), x, y) for name in names if name in kinds}


def test_optimizers():
    results = workers(3).run(train, ALL, "never", timeout=400)
    assert len(results[0]) >= 11
    assert_equal(results)


ALL = ["SGD", "SGD momentum", "RMSprop", "Adam", "AdamW", "Adadelta", "Adagrad", "Adamax", "Nadam", "Ftrl", "Lion"]
ALL += ["ScheduleFreeAdamW", "MultiOptimizer"]
SETTINGS = ["clipnorm", "global_clipnorm", "clipvalue", "weight_decay", "accumulation", "ema", "ema of accumulated"]
SETTINGS += ["loss_scale", "loss_scale accumulated", "schedule"]


@pytest.mark.oldest
def test_settings():
    results = workers(4).run(train, SETTINGS, "never", timeout=400)
    assert len(results[0]) == len(SETTINGS)
    assert_equal(results)


@pytest.mark.parametrize(("n", "options"), ENGINES)
def test_dense_tables(n, options):
    results = workers(n, **options).run(train, ["Adam", "global_clipnorm", "ema", "loss_scale"], "auto", timeout=400)
    assert_equal(results)


def float64():
    import keras

    ring = sharded()
    keras.config.set_floatx("float64")
    x, y = skewed_ids(vocabulary=VOCABULARY)
    clipped = model_of(lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.1), "float64")
    return {
        "clipped": train_both(ring, clipped, x, y),
        "eager": train_both(ring, model_of(settings()["ema"], "float64", run_eagerly=True), x[:20], y[:20]),
    }


def test_float64():
    assert_equal(workers(2).run(float64), tolerance=1e-12)


def small_floats():
    import keras

    ring = sharded()
    x, y = skewed_ids(vocabulary=VOCABULARY)
    return {
        dtype: train_both(ring, model_of(lambda: keras.optimizers.SGD(0.05, momentum=0.9), dtype), x, y, epochs=1)
        for dtype in ("bfloat16", "mixed_bfloat16", "mixed_float16")
    }


def test_small_floats():
    assert_equal(workers(2).run(small_floats), tolerance=0.05)


def assigned_weights():
    """Weights that a user assigns between two updates, which go on from there."""
    import keras

    keras.utils.set_random_seed(1)
    ring = sharded()
    x, y = skewed_ids(vocabulary=VOCABULARY)
    with ring.scope():
        model = model_of(lambda: keras.optimizers.Adam(0.01, use_ema=True), lookup=False)()
    alone = model_of(lambda: keras.optimizers.Adam(0.01, use_ema=True), lookup=False)()
    other = [w + 0.5 for w in model.get_weights()]
    alone.set_weights(model.get_weights())
    for each in (model, alone):
        each.fit(x, y, batch_size=20, shuffle=False, verbose=0)
        each.set_weights(other)
        each.fit(x, y, batch_size=20, shuffle=False, verbose=0)
    return relative_error(model.get_weights(), alone.get_weights())


def test_assigned_weights():
    assert max(workers(2).run(assigned_weights)) < 1e-5


def elements():
    """Elements of slots, of pieces and of weights on this worker, and how many variables are neither."""
    import keras

    ring = sharded()
    with ring.scope():
        model = keras.Sequential([keras.Input((70,)), keras.layers.Dense(130), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.01), "mse")
    x = np.ones((8, 70), "float32")
    model.fit(x, x[:, :1], verbose=0)
    slots = [int(np.prod(v.shape)) for v in model.optimizer.variables]
    return sum(slots), model.count_params()


def test_slots_are_shared_out():
    counts = workers(4).run(elements)
    weights = counts[0][1]
    others = 2  # the iteration, the learning rate
    assert sum(slots - others for slots, _ in counts) == 2 * weights
    assert max(slots - others for slots, _ in counts) <= 2 * weights / 4 * 1.02




def custom_optimizers():
    import keras

    class Signs(keras.optimizers.Optimizer):
        element_wise = True

        def build(self, variables):
            super().build(variables)
            self.sums = self.add_optimizer_variables(variables, "sum")

        def update_step(self, gradient, variable, learning_rate):
            total = self.sums[self._get_variable_index(variable)]
            self.assign_add(total, gradient)
            self.assign_sub(variable, keras.ops.sign(total) * keras.ops.cast(learning_rate, variable.dtype))

    ring = sharded()
    x, y = skewed_ids(vocabulary=VOCABULARY)
    return {"own": train_both(ring, model_of(lambda: Signs(0.01)), x, y)}


def test_custom_optimizers():
    assert_equal(workers(2).run(custom_optimizers))
