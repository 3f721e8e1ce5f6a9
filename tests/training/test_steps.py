"""Silent errors of other programs: ranks without rows, overflow on one rank, state, logs, stopping, randomness."""

import numpy as np
import pytest
from common import assert_equal, devices, history_error, relative_error, skewed_rows, train_both
from harness import strategy, workers

from tfring.cluster import detect
from tfring.report import files, summary


def bits(model):
    return b"".join(v.numpy().tobytes() for v in [*model.variables, *model.optimizer.variables])


def assert_same(results, what=lambda result: result):
    for rank, result in enumerate(results):
        assert what(result) == what(results[0]), f"rank {rank} differs from rank 0"


# -- a rank without rows -----------------------------------------------------------------------------------------------


def last_batch_of_one_row():
    import keras

    ring = strategy()
    x, y = skewed_rows(41)
    with ring.scope():
        model = keras.Sequential([
            keras.layers.Input((4,)),
            keras.layers.Dense(8, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(1),
        ])
        model.compile("adam", "mse", metrics=["mae", "r2_score"])
    seen = []
    logs = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append((batch, dict(logs), model.layers[1].get_weights()))
    )
    history = model.fit(x, y, batch_size=20, epochs=2, verbose=0, callbacks=[logs]).history
    statistics = [w.tobytes() for _, _, weights in seen for w in weights]
    return bits(model), history, [(batch, entry) for batch, entry, _ in seen], statistics


@pytest.mark.oldest
def test_a_rank_without_rows_spoils_nothing():
    results = workers(3).run(last_batch_of_one_row)
    for _, history, logs, _ in results:
        assert all(np.isfinite(values).all() for values in history.values()), history
        assert all(np.isfinite(list(entry.values())).all() for _, entry in logs), logs
    assert_same(results)  # weights, moving statistics and optimizer state; batch logs; statistics after each batch


# -- overflow on one rank ----------------------------------------------------------------------------------------------


def overflow_on_one_rank():
    import keras

    ring = strategy()
    x, y = skewed_rows(40)
    x[15:20] = 6e4  # rows of the last rank's share of the first batch; float16 overflows
    with ring.scope():
        layers = [keras.layers.Dense(8, dtype="mixed_float16"), keras.layers.Dense(1, dtype="mixed_float16")]
        model = keras.Sequential([keras.layers.Input((4,)), *layers])
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1e-3), initial_scale=2.0**10)
        model.compile(optimizer, "mse")
    before = model.get_weights()
    model.fit(x[:20], y[:20], batch_size=20, shuffle=False, verbose=0)
    skipped = all(np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True))
    scale = float(optimizer.dynamic_scale.numpy())
    model.fit(x[20:] / 100, y[20:] / 100, batch_size=20, shuffle=False, verbose=0)
    moved = not np.array_equal(before[0], model.get_weights()[0])
    finite = all(np.isfinite(w).all() for w in model.get_weights())
    return skipped, scale, moved, bits(model), finite


@pytest.mark.oldest
def test_overflow_on_one_rank_skips_the_step_on_all():
    for communication in ("ring", "tensorflow"):
        results = workers(3, communication).run(overflow_on_one_rank)
        for skipped, scale, moved, _, finite in results:
            assert (skipped, scale, moved, finite) == (True, 2.0**9, True, True)
        assert_same(results)


# -- stopping ----------------------------------------------------------------------------------------------------------


def small_model(optimizer="sgd", **options):
    import keras

    layers = [keras.layers.Input((4,)), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(optimizer, "mse", **options)
    return model


def stop_on_one_rank(steps_per_execution):
    import keras

    ring = strategy()
    x, y = skewed_rows()
    with ring.scope():
        model = small_model(steps_per_execution=steps_per_execution)
    batches = []

    def stop(batch, logs):
        batches.append(batch)
        if ring.cluster.rank == 1 and len(batches) == 2:
            model.stop_training = True

    stop_at_batch = keras.callbacks.LambdaCallback(on_train_batch_end=stop)
    model.fit(x, y, batch_size=10, epochs=3, verbose=0, callbacks=[stop_at_batch])
    stop_at_epoch = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: setattr(model, "stop_training", ring.cluster.rank == 2 and epoch == 1)
    )
    epochs = len(model.fit(x, y, batch_size=40, epochs=9, verbose=0, callbacks=[stop_at_epoch]).epoch)
    return batches, epochs, bits(model)


@pytest.mark.oldest
def test_stop_training_on_one_rank_stops_all_at_the_same_step():
    results = workers(3).run(stop_on_one_rank, 1)
    assert_same(results)
    assert len(results[0][0]) == 2 and results[0][1] == 2
    results = workers(3).run(stop_on_one_rank, 2)
    assert_same(results)
    assert len(results[0][0]) == 2


def plateau_and_early_stopping():
    import keras

    ring = strategy()
    x, y = skewed_rows()
    keras.utils.set_random_seed(1)
    with ring.scope():
        model = small_model(keras.optimizers.SGD(0.5))
    watch = [
        keras.callbacks.ReduceLROnPlateau(patience=1, factor=0.5),
        keras.callbacks.EarlyStopping(patience=2, restore_best_weights=True),
    ]
    history = model.fit(x, y, batch_size=20, epochs=20, verbose=0, validation_split=0.3, callbacks=watch)
    return history.history, bits(model)


@pytest.mark.oldest
def test_plateau_and_early_stopping_decide_alike():
    results = workers(3).run(plateau_and_early_stopping)
    assert_same(results)
    assert len(set(results[0][0]["learning_rate"])) > 1 and len(results[0][0]["loss"]) < 20


# -- randomness --------------------------------------------------------------------------------------------------------


def dropout_masks():
    import keras

    def masks(ring):
        keras.utils.set_random_seed(7)
        with ring.scope():
            layer = keras.layers.Dropout(0.5)

        def draw():
            return layer(keras.ops.ones((64,)), training=True)

        drawn = [ring.experimental_local_results(ring.run(draw)) for _ in range(3)]
        return [[np.asarray(m).astype(bool).tobytes() for m in step] for step in drawn]

    return masks(strategy(**devices())), masks(strategy(**devices()))


@pytest.mark.oldest
def test_replicas_draw_differently_and_reproducibly():
    for group in (workers(3), workers(2, logical_cpus=2)):
        results = group.run(dropout_masks)
        drawn = [mask for first, _ in results for step in first for mask in step]
        assert len(set(drawn)) == len(drawn), "two replicas or two steps drew the same mask"
        for first, second in results:
            assert first == second


def unseeded_noise():
    """A layer that draws from Keras' global seed: the bits of the weights, and on one worker the error of the loss."""
    import keras

    ring = strategy(**devices())

    class Noise(keras.layers.Layer):
        def call(self, x):
            return x + 0.1 * keras.random.normal((8,))

    class Called(keras.Model):  # which nothing has called before `fit`
        def __init__(self):
            super().__init__()
            self.parts = [keras.layers.Dense(8), Noise(), keras.layers.Dense(1)]

        def call(self, x):
            for part in self.parts:
                x = part(x)
            return x

    x, y = skewed_rows(40)

    def begin_anew():
        keras.backend.clear_session(free_memory=False)
        keras.utils.set_random_seed(7)

    def train(eagerly):
        model = Called()
        model.compile("sgd", "mse", run_eagerly=eagerly)
        return model, lambda: model.fit(x, y, epochs=2, batch_size=20, verbose=0, shuffle=False).history["loss"]

    results = []
    for eagerly in (False, True):
        begin_anew()
        with ring.scope():
            model, fit = train(eagerly)
        loss = fit()
        if ring.cluster.world_size == 1:
            begin_anew()
            assert history_error({"loss": loss}, {"loss": train(eagerly)[1]()}) <= 1e-5
        results.append([w.tobytes() for w in model.get_weights()])
    return results


@pytest.mark.oldest
@pytest.mark.parametrize(("n", "logical_cpus"), [(1, 1), (2, 2)])
def test_layers_that_draw_without_a_seed(n, logical_cpus):
    results = workers(n, logical_cpus=logical_cpus).run(unseeded_noise)
    assert all(result == results[0] for result in results)


# -- other ways to train -----------------------------------------------------------------------------------------------


def make_custom(kind):
    import keras
    import tensorflow as tf

    class OwnStep(keras.Model):
        def __init__(self):
            super().__init__()
            self.hidden = keras.layers.Dense(8, activation="tanh")
            self.out = keras.layers.Dense(1)
            self.count = self.add_weight(shape=(), initializer="zeros", trainable=False, name="count")

        def call(self, x):
            return self.out(self.hidden(x))

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            self.count.assign_add(1.0)
            self._loss_tracker.update_state(loss)
            return {"count": self.count.value}

    def make():
        if kind == "own train_step":
            model = OwnStep()
            model.build((None, 4))
            model.compile(keras.optimizers.Adam(0.01), "mse")
            return model
        inputs = keras.Input((4,))
        hidden = keras.layers.Dense(8, activation="tanh", kernel_regularizer="l2")(inputs)
        first = keras.layers.Dense(1, name="a")(hidden)
        second = keras.layers.Dense(3, activation="softmax", name="b")(hidden)
        model = keras.Model(inputs, {"a": first, "b": second})
        model.compile(
            keras.optimizers.Adam(0.01),
            {"a": "mse", "b": "sparse_categorical_crossentropy"},
            loss_weights={"a": 0.3, "b": 1.0},
            metrics={"a": ["mae"], "b": ["accuracy"]},
            weighted_metrics={"b": ["accuracy"]},
        )
        return model

    return make


def custom_models():
    ring = strategy()
    x, y = skewed_rows()
    labels = (np.arange(len(x)) % 3).astype("int32")
    targets = {"a": y, "b": labels}
    weights = {"a": np.linspace(0, 1, len(x)), "b": np.linspace(2, 0, len(x))}
    return {
        "own train_step": train_both(ring, make_custom("own train_step"), x, y),
        "two outputs": train_both(ring, make_custom("two outputs"), x, targets, evaluate=(x, targets)),
        "two outputs, weighted": train_both(ring, make_custom("two outputs"), x, targets, sample_weight=weights),
    }


def trace_and_collect():
    """Returns whether Python looks for garbage when a step is traced, and afterwards; and after a step that raises."""
    import gc

    import keras

    ring, seen = strategy(), []

    class Notes(keras.Model):
        def call(self, x):
            return self.dense(x)

        def train_step(self, data):
            seen.append(gc.isenabled())
            if self.fails:
                raise LookupError("in a trace")
            return super().train_step(data)

    def fit(fails):
        with ring.scope():
            model = Notes()
            model.fails, model.dense = fails, keras.layers.Dense(1)
            model.compile("sgd", "mse")
        model.fit(*skewed_rows(), batch_size=19, verbose=0)

    fit(False)
    after = [gc.isenabled()]
    with pytest.raises(LookupError):
        fit(True)
    return set(seen), [*after, gc.isenabled()]


def test_a_first_step_is_traced_without_collections():
    assert workers(2).run(trace_and_collect) == [({False}, [True, True])] * 2


@pytest.mark.oldest
def test_own_train_step_and_several_outputs():
    assert_equal(workers(3).run(custom_models, timeout=300))


def on_batch(bounds):
    """Each worker its own share, of unequal sizes; one process the whole."""
    import keras

    ring = strategy()
    rank = ring.cluster.rank
    x, y = skewed_rows(40)
    mine = slice(bounds[rank], bounds[rank + 1])
    keras.utils.set_random_seed(1)  # Adam makes much of a gradient that is almost zero
    with ring.scope():
        model = small_model(keras.optimizers.Adam(0.01), metrics=["mae"])
    alone = small_model(keras.optimizers.Adam(0.01), metrics=["mae"])
    alone.set_weights(model.get_weights())
    for _ in range(3):
        got = model.train_on_batch(x[mine], y[mine])
        want = alone.train_on_batch(x, y)
    tested = model.test_on_batch(x[mine], y[mine])
    rows = model.predict_on_batch(x[mine])
    assert rows.shape == (len(x[mine]), 1)
    assert relative_error([rows], [alone.predict_on_batch(x[mine])]) < 1e-5
    errors = {
        "weights": relative_error(model.get_weights(), alone.get_weights()),
        "logs": relative_error([got], [want]),
        "test": relative_error([tested], [alone.test_on_batch(x, y)]),
    }
    return {"on_batch": {**errors, "bits": bits(model)}}


@pytest.mark.oldest
def test_on_batch_methods_take_each_workers_own_share():
    assert_equal(workers(3).run(on_batch, [0, 5, 38, 40]))


def on_one_batch(sizes):
    """All workers the same batch, of as many rows as there are workers, more or fewer; one process, too."""
    import keras

    ring = strategy(**devices())
    x, y = skewed_rows(40)
    labels = (y > 0).astype("float32")
    weights = np.linspace(0.5, 2, 40).astype("float32")

    def make():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, "sigmoid", kernel_initializer="ones")])
        model.compile("sgd", "mse", metrics=["mae", keras.metrics.TruePositives()], weighted_metrics=["mse"])
        return model

    with ring.scope():
        model = make()
    alone = make()
    found = []
    for size in sizes:
        for method in ("train_on_batch", "test_on_batch"):
            got, want = (
                getattr(each, method)(x[:size], labels[:size], sample_weight=weights[:size], return_dict=True)
                for each in (model, alone)
            )
            found.append(relative_error(list(got.values()), list(want.values())))
        found.append(relative_error(model.get_weights(), alone.get_weights()))
        found.append(relative_error([model.predict_on_batch(x[:size])], [alone.predict_on_batch(x[:size])]))
    return {"on one batch": {"errors": max(found), "bits": bits(model)}}


@pytest.mark.oldest
def test_on_batch_methods_cut_the_batch_that_all_workers_are_given():
    assert_equal(workers(3).run(on_one_batch, [40, 3, 1, 40]))
    assert_equal(workers(2, logical_cpus=2).run(on_one_batch, [40, 3, 1]))


def compiled_by_xla(folder):
    import keras
    from tensorflow.python.eager import context

    ring = strategy(trace=folder)
    x, y = skewed_rows(41)

    def make():
        layers = [keras.layers.Dense(8, "tanh"), keras.layers.LayerNormalization(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.layers.Input((4,)), *layers])
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"], jit_compile=True)
        return model

    with context.collect_graphs() as graphs:
        errors = train_both(ring, make, x, y, evaluate=(x, y))
        with ring.scope():
            model = make()
        model.predict(x, verbose=0)
    return errors, sum(any(node.op == "_XlaRun" for node in graph.node) for graph in graphs)


def test_xla_compiles_what_lies_between_collectives(tmp_path):
    results = workers(2).run(compiled_by_xla, str(tmp_path))
    assert all(compiled >= 3 for _, compiled in results)  # steps of fit, evaluate and predict
    assert_equal([{"jit": errors} for errors, _ in results])
    document = summary.document(files.read(tmp_path))
    compiled = document["compiled"]
    assert set(compiled) == {"train", "test", "predict"}
    assert all(each["operations"] / 2 < each["by_xla"] <= each["operations"] for each in compiled.values())
    assert any("AllReduce" in name for name in compiled["train"]["others"])
    assert any("operations in clusters; it has no kernel for" in line for line in document["findings"])


# -- the debug switch --------------------------------------------------------------------------------------------------


def one_bit_off(check_equal):
    """Rank 2 moves one weight by one bit, once, after the third step."""
    import keras
    import tensorflow as tf

    ring = strategy(check_equal=check_equal, **devices())
    x, y = skewed_rows()
    with ring.scope():
        model = small_model(keras.optimizers.Adam(0.01), metrics=["mae"], steps_per_execution=2)
    model.fit(x, y, batch_size=20, epochs=1, verbose=0)  # with nothing wrong

    def disturb(batch, logs):
        copy = ring.experimental_local_results(model.layers[0].kernel.value)[-1]
        value = copy.numpy()
        value[0, 0] = np.nextafter(value[0, 0], np.float32(np.inf))
        if ring.cluster.rank == ring.cluster.world_size - 1:
            copy.assign(value)

    watch = keras.callbacks.LambdaCallback(on_train_batch_end=disturb)
    try:
        model.fit(x, y, batch_size=20, epochs=1, verbose=0, callbacks=[watch])
    except tf.errors.InvalidArgumentError as error:
        return model.layers[0].kernel.path, str(error)
    return None


@pytest.mark.oldest
@pytest.mark.parametrize("logical_cpus", [1, 2])
def test_debug_switch_names_the_variable_and_the_replica(logical_cpus):
    last = {1: 2, 2: 3}[logical_cpus]
    for kernel, message in workers(4 - logical_cpus, logical_cpus=logical_cpus).run(one_bit_off, True):
        assert kernel in message and f"replicas: [{last}]" in message, message


def test_without_the_debug_switch_nothing_is_compared():
    assert workers(3).run(one_bit_off, None) == [None] * 3


def test_tasks_know_their_rank():
    assert detect().world_size == 1  # this process is no worker
