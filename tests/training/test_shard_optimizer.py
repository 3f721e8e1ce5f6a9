"""`shard_optimizer`: N workers equal one process, each with its share of the slots; files hold whole slots."""

import math

import numpy as np
import pytest
from common import (
    assert_equal,
    devices,
    element_wise_optimizers,
    is_reference,
    optimizer_settings,
    relative_error,
    skewed_ids,
    skewed_rows,
    train_both,
)
from harness import strategy, workers

import tfring
from tfring.sharding import plan_shards

VOCABULARY, DIM = 300, 5  # rows enough for four ranks to cut the table between rows


def test_plan_of_shards():
    for world_size in (2, 3, 4, 7):
        many = 64 * world_size
        for shape in ((), (1,), (2,), (5, 3), (0, 4), (many - 1, 2), (many,), (many, 2), (many + 1, 2), (3, 3, 5, 2)):
            sharding = plan_shards(shape, world_size)
            whole = np.arange(math.prod(shape))
            lined_up = whole.reshape(sharding.lined_up)
            pieces = [lined_up[part] for rank in range(world_size) for part in sharding.slices(rank)]
            assert [piece.shape for piece in pieces] == [sharding.shape_of(rank) for rank in range(world_size)]
            assert [len(piece) for piece in pieces] == [sharding.count(rank) for rank in range(world_size)]
            assert np.array_equal(np.concatenate(pieces).reshape(-1), whole)
            assert sharding.by_rows == (bool(shape) and (shape[0] >= many or len(shape) == 1))
            assert len({piece.size for piece in pieces}) <= 2


def excluding(optimizer):
    optimizer.exclude_from_weight_decay(var_names=["bias", "embeddings", "table"])
    return optimizer


def settings():
    """Optimizers by what is set of them."""
    import keras

    o = keras.optimizers
    return {
        **optimizer_settings(),
        "weight_decay": lambda: excluding(o.AdamW(0.01, weight_decay=0.5)),
        "ema of accumulated": lambda: o.SGD(
            0.05, momentum=0.9, use_ema=True, ema_momentum=0.7, gradient_accumulation_steps=2
        ),
        "loss_scale accumulated": lambda: o.LossScaleOptimizer(o.SGD(0.05, gradient_accumulation_steps=2)),
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
    return strategy(shard_optimizer=True, **devices(), **options)


def updates(names):
    """The largest errors after three updates in a loop of one's own, from gradients that differ from rank to rank."""
    import keras
    import tensorflow as tf

    keras.config.set_floatx("float64")
    ring = sharded(sparse=tfring.SparseOptions(dense="never"))
    rank, world_size = ring.cluster.rank, ring.cluster.world_size
    shapes = [(VOCABULARY, DIM), (7, 3), (), (2,), (64 * world_size + 1, 2)]
    generator = np.random.default_rng(0)
    start = [generator.normal(size=shape) for shape in shapes]
    ids = generator.integers(0, VOCABULARY, size=(3, world_size, 40))
    ids[..., :8] = 11
    rows = generator.normal(size=(3, world_size, 40, DIM))
    dense = [[generator.normal(size=(world_size, *shape)) for shape in shapes[1:]] for _ in range(3)]

    def variables():
        return [keras.Variable(value, name=f"weight_{i}", dtype="float64") for i, value in enumerate(start)]

    def apply(optimizer, number, rank, weights):
        table = [tf.constant(array[number, rank]) for array in (rows, ids)]
        table = tf.IndexedSlices(*table, tf.constant(shapes[0], tf.int64))
        optimizer.apply([table, *(tf.constant(of_ranks[rank]) for of_ranks in dense[number])], weights)

    def trained(name, alone):
        optimizer = {**element_wise_optimizers(), **settings()}[name]()
        weights = variables()
        for number in range(3):
            if not alone:
                ring.run(apply, (optimizer, number, rank, weights))
                continue
            table = np.zeros(shapes[0])
            np.add.at(table, ids[number].reshape(-1), rows[number].reshape(-1, DIM))
            optimizer.apply([tf.constant(g) for g in (table, *(g.sum(0) for g in dense[number]))], weights)
        store: dict = {}
        optimizer.save_own_variables(store)
        return [w.numpy() for w in weights], [store[key] for key in sorted(store)]

    errors = {}
    for name in names:
        keras.utils.set_random_seed(1)
        with ring.scope():
            weights, slots = trained(name, alone=False)
        if "accumul" in name:  # by each worker for itself
            slots = []
        errors[name] = {"bits": b"".join(np.ascontiguousarray(w).tobytes() for w in [*weights, *slots])}
        if is_reference(ring):
            want_weights, want_slots = trained(name, alone=True)
            errors[name]["weights"] = relative_error(weights, want_weights)
            errors[name]["slots"] = relative_error(slots, want_slots if slots else [])
    return errors


def names_of(kinds):
    return list(kinds())


@pytest.mark.oldest
def test_updates():
    names = [*workers(1).run(names_of, element_wise_optimizers)[0], *workers(1).run(names_of, settings)[0]]
    assert len(names) >= 21
    assert_equal(workers(3).run(updates, names), tolerance=1e-12)


def train(names, dense):
    ring = sharded(sparse=tfring.SparseOptions(dense=dense))
    x, y = skewed_ids(vocabulary=VOCABULARY)
    kinds = {**element_wise_optimizers(), **settings()}
    return {name: train_both(ring, model_of(kinds[name]), x, y) for name in names}


TWO_REPLICAS = ["global_clipnorm", "ema of accumulated", "loss_scale"]


@pytest.mark.parametrize(("n", "options", "dense", "names"), [
    (3, {}, "never", ["SGD momentum", "clipnorm", "accumulation", "loss_scale accumulated"]),
    pytest.param(4, {}, "auto", ["weight_decay", "ema"], marks=pytest.mark.long),
    pytest.param(2, {"communication": "tensorflow"}, "auto", ["global_clipnorm", "loss_scale"], marks=pytest.mark.long),
    pytest.param(2, {"logical_cpus": 2}, "never", TWO_REPLICAS, marks=pytest.mark.long),
])
def test_fit(n, options, dense, names):
    results = workers(n, **options).run(train, names, dense)
    assert set(results[0]) == set(names)
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
            self.sums = [self.add_variable_from_reference(variable, "sum") for variable in variables]

        def update_step(self, gradient, variable, learning_rate):
            total = self.sums[self._get_variable_index(variable)]
            self.assign_add(total, gradient)
            self.assign_sub(variable, keras.ops.sign(total) * keras.ops.cast(learning_rate, variable.dtype))

    ring = sharded()
    x, y = skewed_ids(vocabulary=VOCABULARY)
    return {"own": train_both(ring, model_of(lambda: Signs(0.01)), x, y)}


def test_custom_optimizers():
    assert_equal(workers(2).run(custom_optimizers))


# -- files -----------------------------------------------------------------------------------------------------------

FILES = ["model.keras", "model.weights.h5", "checkpoint.keras", "every rank.keras", "model.h5"]


def plain_or_sharded():
    return sharded() if strategy().cluster.world_size > 1 else strategy()


def new_model(**options):
    import keras

    layers = [keras.layers.Dense(VOCABULARY, activation="tanh"), keras.layers.Dense(7), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile(keras.optimizers.Adam(0.001, epsilon=1e-4, **options), keras.losses.MeanSquaredError())
    return model


def kept(model):
    """Weights, and the whole state of the optimizer."""
    store: dict = {}
    model.optimizer.save_own_variables(store)
    return model.get_weights(), [store[key] for key in sorted(store, key=int)]


def saved(folder, num_epochs):
    """Trains a model and saves it in every way there is; returns what it then holds."""
    import keras

    keras.utils.set_random_seed(3)
    with plain_or_sharded().scope():
        model = new_model(use_ema=True)
    x, y = skewed_rows()
    last = [keras.callbacks.ModelCheckpoint(f"{folder}/checkpoint.keras")]
    model.fit(x, y, batch_size=20, epochs=num_epochs, shuffle=False, verbose=0, callbacks=last)
    model.save(f"{folder}/every rank.keras")
    for name in ("model.keras", "model.weights.h5", "model.h5"):  # after the last Keras forgets how it was compiled
        tfring.save(model, f"{folder}/{name}")
    return kept(model)


def loaded(folder, names, trains):
    """Returns the state of models made of files, and trained on."""
    import keras

    results = {}
    x, y = skewed_rows()
    with plain_or_sharded().scope():
        for name in names:
            if name.endswith(".weights.h5"):
                model = new_model(use_ema=True)
                model.optimizer.build(model.trainable_variables)
                model.load_weights(f"{folder}/{name}")
            else:
                model = keras.models.load_model(f"{folder}/{name}")
            if trains:
                model.fit(x, y, batch_size=20, shuffle=False, verbose=0)
            results[name] = kept(model)
            if name == "model.h5":  # whose slots Keras does not load into a Sequential
                results[name] = model.get_weights(), in_h5_file(f"{folder}/{name}")
    return results


def in_h5_file(path):
    """The optimizer's state."""
    import h5py

    with h5py.File(path) as file:
        group = file["optimizer_weights"]
        return [np.asarray(group[name]) for name in group.attrs["weight_names"]]


@pytest.mark.parametrize(("writers", "readers"), [(4, [3]), pytest.param(4, [1], marks=pytest.mark.long), (1, [3])])
def test_files(writers, readers, tmp_path):
    [want_weights, want_slots], *others = workers(writers).run(saved, str(tmp_path), 1)
    assert all(relative_error(slots, want_slots) == 0 for _, slots in others)
    for n in readers:
        for rank in workers(n).run(loaded, str(tmp_path), FILES, False):
            for name, (weights, slots) in rank.items():
                if "checkpoint" not in name:  # which was written before `fit` put the averages in the weights
                    assert relative_error(weights, want_weights) == 0, (n, name)
                assert relative_error(slots, want_slots) == 0, (n, name)
    further = [workers(n).run(loaded, str(tmp_path), FILES[:1], True)[0][FILES[0]] for n in {writers, *readers}]
    for weights, slots in further[1:]:
        assert relative_error(weights, further[0][0]) < 1e-5
        assert relative_error(slots, further[0][1]) < 1e-5


def backed_up(folder, num_epochs):
    import keras

    keras.utils.set_random_seed(3)
    with plain_or_sharded().scope():
        model = new_model()
    x, y = skewed_rows()
    backup = tfring.callbacks.Backup(folder)
    history = model.fit(x, y, batch_size=20, epochs=num_epochs, shuffle=False, verbose=0, callbacks=[backup])
    return history.epoch, *kept(model)


@pytest.mark.parametrize(("before", "after"), [(4, 3), pytest.param(4, 1, marks=pytest.mark.long), (1, 2)])
def test_backup(before, after, tmp_path):
    folder = tmp_path / "interrupted"
    workers(before).run(backed_up, str(folder), 1)
    _, want_weights, want_slots = workers(1).run(backed_up, str(tmp_path / "at once"), 2)[0]
    results = workers(after).run(backed_up, str(folder), 2)
    for epochs, weights, slots in results:
        assert epochs == [0, 1]
        assert relative_error(weights, want_weights) < 1e-5
        assert relative_error(slots, want_slots) < 1e-5


def swapped():
    """Logs of validation with averaged weights, and the weights afterwards; under the strategy and alone."""
    import keras

    x, y = skewed_rows()
    keras.utils.set_random_seed(3)
    with sharded().scope():
        model = new_model(use_ema=True)
    alone = new_model(use_ema=True)
    alone.set_weights(model.get_weights())
    options = {"batch_size": 20, "epochs": 2, "shuffle": False, "verbose": 0, "validation_data": (x[:40], y[:40])}
    outcomes = []
    for each in (model, alone):
        swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
        history = each.fit(x, y, callbacks=[swap], **options).history
        outcomes.append([*each.get_weights(), history["loss"], history["val_loss"]])
    return relative_error(*outcomes)


def test_swapped_averages():
    assert max(workers(2).run(swapped)) < 1e-5


# -- what is refused -------------------------------------------------------------------------------------------------


def refused(folder):
    """The errors of what cannot be right, by name."""
    import keras
    import tensorflow as tf

    class Subclass(keras.optimizers.Adam):
        pass

    x, y = skewed_ids(vocabulary=VOCABULARY)
    ring = sharded()
    o = keras.optimizers
    errors = {}

    def attempt(name, function):
        try:
            function()
        except tfring.errors.ConfigurationError as error:
            errors[name] = str(error)

    def fit(optimizer, **options):
        with ring.scope():
            model = model_of(optimizer, lookup=False)()
        model.fit(x, y, verbose=0, **options)
        return model

    for make in (o.Adafactor, o.Lamb, getattr(o, "Muon", o.Lamb), Subclass):
        attempt(make.__name__, lambda make=make: fit(lambda: make(0.01)))
    attempt("restore", lambda: fit(o.Adam, callbacks=[keras.callbacks.BackupAndRestore(folder)]))
    model = fit(o.Adam)
    attempt("checkpoint", lambda: tf.train.Checkpoint(optimizer=model.optimizer).save(f"{folder}/checkpoint"))
    attempt("outside", lambda: model.optimizer.apply([tf.zeros(v.shape) for v in model.trainable_variables]))
    attempt("compression", lambda: strategy(shard_optimizer=True, compression="bfloat16"))
    return errors


def test_what_is_refused(tmp_path):
    for errors in workers(2).run(refused, str(tmp_path)):
        for name in ("Adafactor", "Lamb", "Subclass"):
            assert errors[name].startswith(f"{name} ")
            assert "element_wise = True" in errors[name]
        assert "Use tfring.callbacks.Backup" in errors["restore"]
        assert "tfring.save(model, path)" in errors["checkpoint"]
        assert "strategy.run" in errors["outside"]
        assert "compression='bfloat16'" in errors["compression"]
