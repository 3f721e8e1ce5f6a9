"""Programs as users write them, against one process: convolutions, models without call(), odd outputs, saving."""

import contextlib
import os
import pathlib

import numpy as np
import pytest
from common import assert_equal, devices, relative_error, skewed_rows, train_both
from harness import strategy, workers

# -- a replica without rows --------------------------------------------------------------------------------------------


def images(num_rows, seed=0):
    generator = np.random.default_rng(seed)
    drift = np.linspace(0, 2, num_rows)[:, None, None, None]
    x = (generator.normal(size=(num_rows, 8, 8, 3)) + drift).astype("float32")
    return x, x.mean((1, 2, 3))[:, None] + generator.normal(size=(num_rows, 1)).astype("float32")


def make_convolutional(kind, run_eagerly):
    """A model of `[8, 8, 3]` images that dies on a batch without rows."""
    import keras

    layers = keras.layers

    class Patches(keras.layers.Layer):
        """As in Keras' vision transformer: a shape that cannot be inferred where there are no rows."""

        def call(self, x):
            return keras.ops.reshape(x, (keras.ops.shape(x)[0], -1, 12))

    bodies = {
        "conv2d": [layers.Conv2D(4, 3, activation="relu"), layers.GlobalMaxPooling2D()],
        "separable": [layers.SeparableConv2D(4, 3), layers.DepthwiseConv2D(3), layers.Flatten()],
        "conv1d": [layers.Reshape((64, 3)), layers.Conv1D(4, 3, strides=2), layers.GlobalAveragePooling1D()],
        "conv3d": [layers.Reshape((8, 8, 3, 1)), layers.Conv3D(4, 2), layers.Flatten()],
        "reshape": [Patches(), layers.Dense(4, activation="tanh"), layers.GlobalAveragePooling1D()],
    }
    body = bodies[kind] + [layers.Dense(1, kernel_regularizer="l2", activity_regularizer="l2")]
    model = keras.Sequential([layers.Input((8, 8, 3)), *body])
    model.compile(
        keras.optimizers.SGD(1e-3, momentum=0.9), "mse", metrics=["mae", keras.metrics.RootMeanSquaredError()],
        weighted_metrics=["mse"], run_eagerly=run_eagerly,
    )
    return model


def replicas_without_rows(kinds, run_eagerly):
    ring = strategy(**devices())
    x, y = images(41)
    results = {}
    for kind in kinds:
        results[kind] = train_both(
            ring, lambda kind=kind: make_convolutional(kind, run_eagerly), x, y, validation_data=(x[:21], y[:21]),
            evaluate=(x[:21], y[:21]), predict=x[:21],
        )
        results[kind].pop("history", None)  # of ragged batches
    return results


@pytest.mark.oldest
def test_replicas_without_rows():
    assert_equal(workers(3).run(replicas_without_rows, ["conv2d", "conv3d", "reshape"], False, timeout=300))


@pytest.mark.long
def test_replicas_without_rows_two_a_worker_and_eagerly():
    kinds = ["separable", "conv1d", "reshape"]
    assert_equal(workers(2, logical_cpus=2).run(replicas_without_rows, kinds, True, timeout=300))


# -- saving ------------------------------------------------------------------------------------------------------------


def fit_inside_the_scope(folder):
    import keras

    ring = strategy()
    x, y = skewed_rows()
    folder = pathlib.Path(folder)
    with ring.scope():
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(4), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(use_ema=True), "mse", metrics=["mae"])
        callbacks = [
            keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
            keras.callbacks.ModelCheckpoint(folder / "{epoch}.keras"),
            keras.callbacks.ModelCheckpoint(folder / "{epoch}.weights.h5", save_weights_only=True),
            keras.callbacks.BackupAndRestore(folder / "backup"),
        ]
        model.fit(x, y, batch_size=20, epochs=2, verbose=0, callbacks=callbacks)
        if ring.cluster.is_chief:
            model.save(folder / "chief.keras")
            model.export(folder / "exported", verbose=False)
        model.fit(x, y, batch_size=20, verbose=0)
        loaded = keras.models.load_model(folder / "1.keras")
        loaded.fit(x, y, batch_size=20, verbose=0)
    return [w.tobytes() for m in (model, loaded) for w in m.get_weights()]


@pytest.mark.oldest
def test_fit_inside_the_scope_saves(tmp_path):
    results = workers(2).run(fit_inside_the_scope, str(tmp_path))
    assert results[0] == results[1]


def containers_of_themselves(folder):
    """Trains and saves models that hold lists and dicts in each other, as graphs and trees with parents do."""
    import keras

    ring = strategy()
    x, y = skewed_rows()

    class Knots(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)
            self.optimizers = {"of a part": keras.optimizers.SGD(0.1)}
            node: dict = {}
            node["children"] = shared = [node]
            for _ in range(40):
                shared = [shared, shared]
            vars(self).update(node=node, shared=shared)  # Keras would copy what an assignment gives

        def call(self, x):
            return self.dense(x)

    losses = []
    for number, scope in enumerate([ring.scope(), contextlib.nullcontext()]):
        with scope:
            model = Knots()
            model.compile("sgd", "mse")
        losses += model.fit(x, y, verbose=0).history["loss"]
        model.save(os.path.join(folder, f"{number}-{ring.cluster.rank}.keras"))
    return losses


@pytest.mark.filterwarnings("ignore:.*was made outside the scope")
def test_models_that_hold_containers_of_themselves(tmp_path):
    results = workers(2).run(containers_of_themselves, str(tmp_path), timeout=90)
    assert np.isfinite(results).all() and results[0][0] == results[1][0]


def save_at_the_end(folder):
    """The ends of scripts: every rank saves to one path and reads it back at once."""
    import keras

    import tfring

    ring = strategy()
    folder = pathlib.Path(folder)
    x, y = skewed_rows()
    keras.utils.set_random_seed(1)
    with ring.scope():
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(500), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    model.fit(x, y, batch_size=20, verbose=0)
    want = model.predict(x, verbose=0)
    for i in range(5):
        for path in (folder / "model.keras", folder / "model.h5", folder / f"{ring.cluster.rank}.keras"):
            model.save(path)
            keras.models.load_model(path, compile=False)
        model.save_weights(folder / "model.weights.h5")
        model.load_weights(folder / "model.weights.h5")
        tfring.save(model, folder / f"once-{i}.keras")
        once = keras.models.load_model(folder / f"once-{i}.keras")
        assert relative_error(once.get_weights(), model.get_weights()) == 0
        # On some CPUs products of fewer rows have other last bits.
        assert relative_error([once.predict(x, verbose=0)], [want]) < 1e-6
    keras.saving.save_model(model, folder / "functional.keras")
    tfring.save(model, folder / "once.weights.h5")
    model.load_weights(folder / "once.weights.h5")
    import tensorflow as tf

    reloaded = keras.models.load_model(folder / "model.keras")  # outside the scope
    served = []
    for _ in range(2):
        for one in (model, reloaded):
            tfring.save(one, folder / "again.keras")
            keras.models.load_model(folder / "again.keras")
            one.save_weights(folder / "again.weights.h5")
            one.load_weights(folder / "again.weights.h5")
            one.export(folder / "exported", verbose=False)
            own = folder / f"own-{ring.cluster.rank}"
            one.export(own, verbose=False)
            keras.saving.save_model(one, own / "folder", zipped=False)
            ring.barrier()
            for path in (folder / "exported", own):
                exported = tf.saved_model.load(path)
                served.append(exported.serve(x).numpy())
            ring.barrier()
        checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        manager = tf.train.CheckpointManager(checkpoint, folder / "checkpoints", max_to_keep=2)
        for _ in range(4):
            checkpoint.restore(manager.save()).assert_consumed()
            ring.barrier()  # as training keeps ranks in step: one that is ahead deletes what another reads
        assert tf.train.latest_checkpoint(folder / "checkpoints") == manager.latest_checkpoint
    worst = max(relative_error([rows], [want]) for rows in served)
    refused = ""
    try:
        tfring.save(model, folder / "missing" / "model.keras")
    except OSError as error:
        refused = str(error)
    return worst, refused, sorted(p.name for p in folder.iterdir() if p.name[0] == ".")


@pytest.mark.oldest
def test_every_rank_saves_and_reads_back(tmp_path):
    results = workers(3).run(save_at_the_end, str(tmp_path))
    assert all(error < 1e-5 for error, _, _ in results)
    assert "No such file" in results[0][1] and "missing/model.keras" in results[0][1]
    assert all("Rank 0 could not save" in refused for _, refused, _ in results[1:])


def checkpoint_used_at_once(folder):
    """As WandbModelCheckpoint: the file is read on each rank as soon as ModelCheckpoint has returned."""
    import keras

    ring = strategy()
    x, y = skewed_rows()
    path = os.path.join(folder, "best.keras")
    loaded = []

    class Uploads(keras.callbacks.ModelCheckpoint):
        def on_epoch_end(self, epoch, logs=None):
            super().on_epoch_end(epoch, logs)
            loaded.append(keras.models.load_model(path).get_weights())

    with ring.scope():
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(x, y, batch_size=20, epochs=3, verbose=0, callbacks=[Uploads(path)])
    return len(loaded), all(np.array_equal(a, b) for a, b in zip(loaded[-1], model.get_weights(), strict=True))


def test_a_checkpoint_is_whole_on_every_rank(tmp_path):
    assert workers(3).run(checkpoint_used_at_once, str(tmp_path)) == [(3, True)] * 3


def export_without_a_ring(folder):
    """Exports a model of no strategy, as one that was loaded, in a process that has no other to print for."""
    import keras
    import tensorflow as tf

    strategy()
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    model.export(folder, verbose=False)
    exported, x = tf.saved_model.load(folder), np.ones((2, 4), "float32")
    return relative_error([exported.serve(x)], [model(x)])


def test_a_model_of_no_strategy_is_exported(tmp_path):
    assert workers(1).run(export_without_a_ring, str(tmp_path / "exported"))[0] < 1e-5


# -- variables of every dtype ------------------------------------------------------------------------------------------

DTYPES = ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64",
          "float16", "bfloat16", "float32", "float64", "complex64", "complex128")  # fmt: skip


def variables_of_every_dtype(folder):
    import keras
    import tensorflow as tf

    ring = strategy(check_equal=True)
    rank = ring.cluster.rank

    class Holder(keras.layers.Layer):
        def build(self, shape):
            for dtype in DTYPES:
                if "complex" in dtype:  # which Keras' variables do not know
                    continue
                self.add_weight(
                    shape=(3,), dtype=dtype, trainable=False, name=f"of_{dtype}",
                    initializer=lambda shape, dtype: tf.cast(tf.constant([0, 1, 100 + rank]), dtype),
                )  # fmt: skip

        def call(self, x):
            return x

    with ring.scope():
        plain = [tf.Variable(tf.cast([0, 1, 2**7 - 1 - rank], d), trainable=False) for d in DTYPES]
        model = keras.Sequential([keras.layers.Input((4,)), Holder(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    ring.assert_equal(plain)
    x, y = skewed_rows()
    backup = keras.callbacks.BackupAndRestore(os.path.join(folder, str(rank)), delete_checkpoint=False)
    model.fit(x, y, batch_size=20, epochs=1, verbose=0, callbacks=[backup])
    model.fit(x, y, batch_size=20, epochs=2, verbose=0, callbacks=[backup])  # restores on rank 0, and tells the others
    values = [v.numpy() for v in [*plain, *model.variables]]
    return [(v.dtype.name, np.atleast_1d(v.astype("complex128")).ravel()[:3].tolist()) for v in values]


@pytest.mark.parametrize("communication", ["ring", "tensorflow"])
def test_variables_of_every_dtype(tmp_path, communication):
    results = workers(2, communication).run(variables_of_every_dtype, str(tmp_path))
    assert results[0] == results[1]
    for dtype, (got, values) in zip(DTYPES, results[0], strict=False):
        assert got == dtype and values == [0, 1, 1 if dtype == "bool" else 127]


# -- models without call() ---------------------------------------------------------------------------------------------


def make_gan(lazy, call=False):
    """As in Keras' examples: two networks, two optimizers, a train_step, and no call()."""
    import keras

    ops = keras.ops

    class Gan(keras.Model):
        def __init__(self):
            super().__init__()
            first = [] if lazy else [keras.Input((4,))]
            self.generator = keras.Sequential([*first, keras.layers.Dense(4, activation="tanh")])
            self.critic = keras.Sequential([*first, keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])

        def compile(self, of_generator, of_critic, **options):
            super().compile(**options)
            self.of_generator, self.of_critic = of_generator, of_critic
            self.tracker = keras.metrics.Mean(name="critic_loss")

        @property
        def metrics(self):
            return [self.tracker]

        def train_step(self, data):
            import tensorflow as tf

            noise, real = data
            mse = keras.losses.MeanSquaredError()
            with tf.GradientTape() as tape:
                fake = self.generator(noise)
                real_score, fake_score = self.critic(real), self.critic(fake)
                loss = mse(ops.ones_like(real_score), real_score) + mse(ops.zeros_like(fake_score), fake_score)
            weights = self.critic.trainable_weights
            self.of_critic.apply(tape.gradient(loss, weights), weights)
            with tf.GradientTape() as tape:
                score = self.critic(self.generator(noise))
                generator_loss = mse(ops.ones_like(score), score)
            weights = self.generator.trainable_weights
            self.of_generator.apply(tape.gradient(generator_loss, weights), weights)
            self.tracker.update_state(ops.mean(ops.abs(real_score), axis=-1))
            return {"critic_loss": self.tracker.result()}

    model = Gan()
    model.compile(keras.optimizers.Adam(1e-3), keras.optimizers.SGD(1e-2, momentum=0.9))
    return model


def without_call(lazy):
    import keras

    ring = strategy(**devices())
    x, _ = skewed_rows(80)
    y = x[::-1] * 2
    errors = []

    def trained():
        keras.utils.set_random_seed(1)
        model = make_gan(lazy)
        keras.utils.set_random_seed(1)
        if not lazy:
            model.set_weights([w / 2 + 0.1 * np.sin(np.arange(w.size)).reshape(w.shape) for w in model.get_weights()])
        return model

    with ring.scope():
        model = trained()
    history = model.fit(x, y, epochs=2, batch_size=20, verbose=0, shuffle=False).history
    result = [w.tobytes() for w in model.get_weights()]
    if ring.cluster.is_chief and not lazy:
        alone = trained()
        want = alone.fit(x, y, epochs=2, batch_size=20, verbose=0, shuffle=False).history
        errors = [relative_error(model.get_weights(), alone.get_weights()), relative_error(*map(list, (
            history.values(), want.values())))]  # fmt: skip
    return result, errors


@pytest.mark.parametrize("logical_cpus", [
    pytest.param(1, marks=pytest.mark.oldest), pytest.param(2, marks=pytest.mark.long),
])  # fmt: skip
def test_models_without_call(logical_cpus):
    group = workers(2, logical_cpus=logical_cpus)
    results = group.run(without_call, False)
    assert max(results[0][1]) <= 1e-5, results[0][1]
    assert results[0][0] == results[1][0]
    results = group.run(without_call, True)
    assert results[0][0] == results[1][0] and len(results[0][0]) == 6


# -- what predict returns ----------------------------------------------------------------------------------------------


def predicted(num_rows, run_eagerly):
    import keras
    import tensorflow as tf

    ring = strategy(**devices())

    class Outputs(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(2, kernel_initializer="ones")

        def call(self, x):
            lengths = tf.cast(x[:, 0], tf.int32) % 4
            ragged = tf.RaggedTensor.from_row_lengths(tf.repeat(x, lengths, axis=0), lengths)
            nested = tf.ragged.stack([ragged, ragged * 2], axis=1) if num_rows > 1 else ragged
            sparse = tf.sparse.from_dense(tf.where(x > 5, x, 0.0))
            return {"dense": [self.dense(x), (x > 3,)], "ragged": ragged, "nested": nested, "sparse": sparse}

    x = (np.arange(num_rows * 3) % 11).reshape(-1, 3).astype("float32")

    def outputs(model):
        model.compile(run_eagerly=run_eagerly)
        got = model.predict(x, batch_size=5, verbose=0)
        dense = [got["dense"][0], got["dense"][1][0]]
        return [a.tolist() for a in dense], *(
            v.to_list() if isinstance(v, tf.RaggedTensor) else tf.sparse.to_dense(v).numpy().tolist()
            for v in (got["ragged"], got["nested"], got["sparse"])
        )

    with ring.scope():
        model = Outputs()
    return outputs(model), outputs(Outputs()) if ring.cluster.is_chief else None


@pytest.mark.oldest
def test_predict_returns_any_structure():
    every = [workers(3).run(predicted, num_rows, False) for num_rows in (1, 13, 21)]
    for results in (*every, workers(2, logical_cpus=2).run(predicted, 13, True)):
        want = results[0][1]
        assert want is not None and all(got == want for got, _ in results)


# -- fixed batch shapes ------------------------------------------------------------------------------------------------


def stateful(batch_of_the_model):
    """An LSTM that remembers from batch to batch, made for `batch_of_the_model` rows, in batches of 24."""
    import keras

    ring = strategy(**devices())
    generator = np.random.default_rng(0)
    x = generator.normal(size=(72, 5, 3)).astype("float32")
    y = x.sum((1, 2))[:, None]

    def make():
        layers = [keras.layers.LSTM(4, stateful=True), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input(batch_shape=(batch_of_the_model, 5, 3)), *layers])
        model.compile(keras.optimizers.SGD(1e-2), "mse", metrics=["mae"])
        return model

    def outcome(model):
        trained = model.fit(x, y, batch_size=24, epochs=2, shuffle=False, verbose=0).history
        weights = model.get_weights()
        evaluated = model.evaluate(x, y, batch_size=24, verbose=0)
        states = [np.array(state) for state in model.layers[0].states]
        predicted = [model.predict(x, batch_size=24, verbose=0), model.predict_on_batch(x[:24])]
        return weights, predicted, [[trained[k] for k in sorted(trained)], evaluated, *states]

    keras.utils.set_random_seed(1)
    with ring.scope():
        model = make()
    if batch_of_the_model != 24:
        said = []
        for call in (lambda: outcome(model), lambda: model.predict(x, batch_size=24, verbose=0)):
            try:
                call()
            except ValueError as error:
                said.append(str(error))
        return said
    start = model.get_weights()
    got = outcome(model)
    alone = make()
    alone.set_weights(start)
    want = outcome(alone)
    return [
        max(relative_error(a, b) for a, b in zip(*map(lambda o: o[i], (got, want)), strict=True)) for i in range(3)
    ]  # fmt: skip


@pytest.mark.oldest
def test_fixed_batch_shapes_are_of_the_whole_batch():
    for n, options in ((3, {}), (2, {"logical_cpus": 2})):
        for errors in workers(n, **options).run(stateful, 24):
            assert max(errors) <= 1e-5, errors
    for said in workers(2).run(stateful, 12):
        assert len(said) == 2
        for message in said:
            assert "A batch has 24 rows, but the model has the fixed batch shape 12" in message


def fit_fewer_rows_than_a_batch():
    import keras

    keras.utils.set_random_seed(1)
    inputs = keras.Input((4,), batch_size=4)
    model = keras.Model(inputs, keras.layers.Dense(1, kernel_initializer="ones")(inputs))
    model.compile("sgd", "mse", metrics=["mae"])
    x = np.random.default_rng(0).normal(size=(4, 4)).astype("float32")
    fitted = model.fit(x, x[:, :1], epochs=2, verbose=0, validation_data=(x, x[:, 1:2])).history  # batches of up to 32
    return [*fitted.values(), *model.get_weights(), model.predict(x, verbose=0)]


def in_and_outside_of_the_scope():
    with strategy(**devices()).scope():
        got = fit_fewer_rows_than_a_batch()
    return {"fewer rows": relative_error(got, fit_fewer_rows_than_a_batch())}


def test_a_fixed_batch_shape_of_all_rows():
    for errors in workers(2).run(in_and_outside_of_the_scope):
        assert errors["fewer rows"] <= 1e-5, errors


# -- printing ----------------------------------------------------------------------------------------------------------


def printed(print_on):
    import contextlib
    import io

    import keras

    os.environ["TFRING_PRINT"] = print_on
    ring = strategy()
    x, y = skewed_rows(40)
    text = io.StringIO()
    lines = []
    with contextlib.redirect_stdout(text):
        with ring.scope():
            model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        model.summary()
        model.summary(print_fn=lambda line, **_: lines.append(line))
        stop = keras.callbacks.EarlyStopping(monitor="loss", patience=0, min_delta=1e9, verbose=1)
        model.fit(x, y, batch_size=20, epochs=3, verbose=2, callbacks=[stop])
        model.evaluate(x, y, verbose=1)
        model.predict(x, verbose=1)
        print("of the user")
    return text.getvalue(), len(lines)


def test_keras_prints_on_rank_0():
    (first, asked), *others = workers(3).run(printed, "rank0")
    for words in ("Total params", "Epoch 1/3", "Epoch 2: early stopping", "of the user"):
        assert words in first
    assert asked and others == [("of the user\n", asked)] * 2
    for text, _ in workers(2).run(printed, "all"):
        assert "Total params" in text and "Epoch 1/3" in text


def predicted_eagerly():
    import keras
    import tensorflow as tf

    ring = strategy()
    x, _ = skewed_rows(41)
    with ring.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="ones")])
    tf.config.run_functions_eagerly(True)
    got = model.predict(x, batch_size=20, verbose=0)
    np.testing.assert_allclose(got, x.sum(1, keepdims=True), rtol=1e-5)
    return got.tobytes()


def test_predict_where_functions_run_eagerly():
    results = workers(2).run(predicted_eagerly)
    assert results[0] == results[1]
