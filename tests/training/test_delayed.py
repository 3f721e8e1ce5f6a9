"""Delayed synchronization: each worker trains on its own rows, and weights are averaged every few steps."""

import os
import pathlib
import signal
import zipfile

import harness
import numpy as np
import pytest
from common import relative_error, skewed_ids, skewed_rows
from harness import workers

import tfring
from tfring.errors import ConfigurationError

VOCABULARY, DIM, BATCH = 90, 8, 20
ROWS = 4 * BATCH + 2  # of three workers one has none of the last batch


EPSILON = 1e-4  # with Keras' 1e-7, Adam makes a step of what rounding leaves of a gradient that cancels to zero


def optimizers():
    import keras

    o = keras.optimizers
    return {
        "sgd": lambda: o.SGD(0.05),
        "momentum": lambda: o.SGD(0.02, momentum=0.9, nesterov=True),
        "adam": lambda: o.Adam(0.01, epsilon=EPSILON),
        "clipped": lambda: o.SGD(0.05, momentum=0.9, global_clipnorm=0.02),
        "decay": lambda: o.AdamW(0.01, weight_decay=0.2, epsilon=EPSILON),
    }


def embedding_model(optimizer, lookup="embedding", **compile_options):
    """Mean of looked-up rows, then dense layers; `lookup="one_hot"` is the same model with a dense table."""
    import keras

    ids = keras.Input((3,), dtype="int32")
    if lookup == "embedding":
        rows = keras.layers.Embedding(VOCABULARY, DIM, name="embedding_table")(ids)
    else:
        hot = keras.ops.one_hot(ids, VOCABULARY)
        rows = keras.layers.Dense(DIM, use_bias=False, name="embedding_table")(hot)
    hidden = keras.layers.Dense(4, activation="tanh")(keras.ops.mean(rows, axis=1))
    model = keras.Model(ids, keras.layers.Dense(1)(hidden))
    model.compile(optimizer, "mse", metrics=["mae"], **compile_options)
    return model


def delayed(every, outer=None, local_momentum="keep", tables="average"):
    import keras

    outer = outer and keras.optimizers.SGD(**outer)
    return tfring.Delayed(every, outer=outer, local_momentum=local_momentum, tables=tables)


def bits(model):
    return b"".join(weight.tobytes() for weight in model.get_weights())


def train(cases, delay, epochs=2, sparse="never"):
    """The weights, history and bytes sent of each case under one strategy."""
    import keras

    synchronization = delayed(**delay) if delay else None
    strategy = harness.strategy(synchronization=synchronization, sparse=tfring.SparseOptions(dense=sparse))
    x, y = skewed_ids(ROWS, vocabulary=VOCABULARY)
    results = {}
    for name in cases:
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = embedding_model(optimizers()[name]())
        before = strategy.bytes_sent()
        history = model.fit(x, y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0).history
        results[name] = {"weights": model.get_weights(), "history": history, "bytes": strategy.bytes_sent() - before}
    strategy.close()
    return results


def assert_ranks_equal(results):
    for other in results[1:]:
        for name, case in results[0].items():
            for mine, theirs in zip(case["weights"], other[name]["weights"], strict=True):
                assert mine.tobytes() == theirs.tobytes(), name
            assert case["history"] == other[name]["history"], name


@pytest.mark.parametrize(("n", "sparse"), [(3, "never"), (2, "always")])
def test_windows_of_one_step_equal_the_ring(n, sparse):
    ring = workers(n).run(train, ["sgd"], None, 2, sparse)
    local = workers(n).run(train, ["sgd"], {"every": 1}, 2, sparse)
    assert_ranks_equal(local)
    assert relative_error(local[0]["sgd"]["weights"], ring[0]["sgd"]["weights"]) <= 1e-6
    for name, values in ring[0]["sgd"]["history"].items():
        np.testing.assert_allclose(local[0]["sgd"]["history"][name], values, rtol=1e-5)


def train_by_losses_of_tensorflow(delay):
    """The weights, the history, and the numbers of replicas that a `train_step` with losses of `tf.nn` sees."""
    import keras
    import tensorflow as tf

    strategy = harness.strategy(synchronization=delayed(**delay) if delay else None)
    replicas = set()

    class Model(keras.Model):
        def train_step(self, data):
            x, y = data
            replicas.add(tf.distribute.get_strategy().num_replicas_in_sync)
            with tf.GradientTape() as tape:
                rows = tf.reduce_mean((y - self(x, training=True)) ** 2, -1)
                loss = tf.nn.compute_average_loss(rows) + tf.nn.compute_average_loss(rows, global_batch_size=BATCH)
                loss += tf.nn.scale_regularization_loss([tf.reduce_sum(v**2) for v in self.trainable_variables])
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss}

    x, y = skewed_ids(ROWS, vocabulary=VOCABULARY)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = embedding_model("sgd", lookup="one_hot")
        model = Model(model.inputs, model.outputs)
        model.compile(keras.optimizers.SGD(0.02))
    history = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
    return model.get_weights(), history["loss"], replicas


def test_losses_of_tensorflow_are_those_of_all_rows():
    [(wanted, losses, _), *_] = workers(3).run(train_by_losses_of_tensorflow, None)
    for weights, history, replicas in workers(3).run(train_by_losses_of_tensorflow, {"every": 1}):
        assert relative_error(weights, wanted) <= 1e-6
        np.testing.assert_allclose(history, losses, rtol=1e-5)
        assert replicas == {1}


def combined_by_diversity(differences, shares):
    """Combines the rows of each worker's differences as `tables="diversity"` says, one row after the other."""
    result = np.zeros_like(differences[0])
    for row in range(len(result)):
        of_row = [difference[row].ravel() for difference in differences]
        mean = sum(share * each for share, each in zip(shares, of_row, strict=True))
        alike = mean @ mean
        orthogonal = sum(share**2 * (each @ each) for share, each in zip(shares, of_row, strict=True))
        if orthogonal > 0:
            squares = sum(share * (each @ each) for share, each in zip(shares, of_row, strict=True))
            mean = mean * squares / max(alike, orthogonal)
        result[row] = mean.reshape(result[row].shape)
    return result


class Simulated:
    """Delayed synchronization of N workers in one process: a model of each, and NumPy's averages."""

    def __init__(self, n, name, every, outer=None, local_momentum="keep", tables="average"):
        import keras

        keras.utils.set_random_seed(1)
        self.models = [embedding_model(optimizers()[name](), "one_hot", run_eagerly=True) for _ in range(n)]
        self.every, self.local_momentum, self.tables = every, local_momentum, tables
        outer = {"learning_rate": 1.0, "momentum": 0.0, "nesterov": False, "global_clipnorm": None, **(outer or {})}
        self.outer = outer
        for model in self.models:
            model.optimizer.build(model.trainable_variables)
        self.norms = []

    def begin(self, weights):
        for model in self.models:
            model.set_weights(weights)
        self.anchor = [np.float64(w) for w in weights]
        self.velocity = [np.zeros_like(w) for w in self.anchor]
        self._open()

    def _open(self):
        self.steps, self.rows = 0, np.zeros(len(self.models))

    def slots(self, model):
        return [v for v in model.optimizer.variables if "iteration" not in v.path and "learning_rate" not in v.path]

    def step(self, x, y):
        n = len(self.models)
        for i, model in enumerate(self.models):
            share = slice(i * len(x) // n, (i + 1) * len(x) // n)
            if len(x[share]):
                model.train_on_batch(x[share], y[share])
            else:  # a gradient of zeros
                variables = model.trainable_variables
                model.optimizer.apply([np.zeros(v.shape, "float32") for v in variables], variables)
            self.rows[i] += len(x[share])
        self.steps += 1
        if self.steps == self.every:
            self.synchronize()

    def synchronize(self):
        if not self.steps:
            return
        shares = self.rows / self.rows.sum()
        weights = [model.get_weights() for model in self.models]
        gradients = [
            sum(share * (anchor - w[i]) for share, w in zip(shares, weights, strict=True))
            for i, anchor in enumerate(self.anchor)
        ]
        if self.tables == "diversity":
            gradients[0] = combined_by_diversity([self.anchor[0] - w[0] for w in weights], shares)
        norm = np.sqrt(sum(np.square(g).sum() for g in gradients))
        self.norms.append(norm)
        limit = self.outer["global_clipnorm"] or norm
        gradients = [g * limit / max(norm, limit) for g in gradients]
        rate, momentum = self.outer["learning_rate"], self.outer["momentum"]
        for i, gradient in enumerate(gradients):
            self.velocity[i] = momentum * self.velocity[i] - rate * gradient
            ahead = momentum * self.velocity[i] - rate * gradient
            self.anchor[i] = self.anchor[i] + (ahead if self.outer["nesterov"] else self.velocity[i])
        slots = [[s.numpy() for s in self.slots(model)] for model in self.models]
        for model in self.models:
            model.set_weights([np.float32(a) for a in self.anchor])
            for k, slot in enumerate(self.slots(model)):
                if self.local_momentum == "average":
                    slot.assign(sum(share * each[k] for share, each in zip(shares, slots, strict=True)))
                elif self.local_momentum == "reset":
                    slot.assign(np.zeros(slot.shape))
        self._open()


NESTEROV = {"learning_rate": 0.7, "momentum": 0.9, "nesterov": True}
CASES = [
    ({"every": 4}, ["sgd", "momentum", "adam", "clipped", "decay"]),
    ({"every": 4, "outer": NESTEROV}, ["momentum"]),
    ({"every": 3, "outer": {"learning_rate": 1.0, "global_clipnorm": 0.05}}, ["sgd"]),
    ({"every": 2, "local_momentum": "average"}, ["adam"]),
    ({"every": 2, "local_momentum": "reset"}, ["momentum"]),
    ({"every": 4, "tables": "diversity"}, ["decay"]),
]


def train_cases(cases):
    return [train(names, delay) for delay, names in cases]


THREE = [({"every": 3, "outer": NESTEROV}, ["adam"]), ({"every": 2, "local_momentum": "average"}, ["momentum"])]
THREE += [({"every": 4, "tables": "diversity"}, ["adam"]), ({"every": 2, "local_momentum": "reset"}, ["clipped"])]
THREE += [({"every": 3, "outer": {"learning_rate": 1.0, "global_clipnorm": 0.05}}, ["sgd"])]
THREE += [({"every": 2, "tables": "diversity"}, ["sgd"])]


@pytest.mark.parametrize(("n", "cases"), [(3, THREE), pytest.param(2, CASES, marks=pytest.mark.long)])
def test_windows_equal_a_simulation(n, cases):
    everyone = workers(n).run(train_cases, cases, timeout=400)
    [simulated] = workers(1).run(simulate, n, cases, timeout=400)
    for number, (delay, names) in enumerate(cases):
        results = [rank[number] for rank in everyone]
        assert_ranks_equal(results)
        for name in names:
            want = simulated[number][name]
            assert relative_error(results[0][name]["weights"], want["weights"]) <= 2e-5, (delay, name)
            np.testing.assert_allclose(results[0][name]["history"]["difference_norm"], want["norms"], rtol=1e-4)


def simulate(n, cases):
    import keras

    x, y = skewed_ids(ROWS, vocabulary=VOCABULARY)
    results = []
    for delay, names in cases:
        of_case = {}
        for name in names:
            keras.utils.set_random_seed(1)
            start = embedding_model("sgd").get_weights()
            simulated = Simulated(n, name, **delay)
            simulated.begin(start)
            norms = []
            for _ in range(2):
                for begin in range(0, ROWS, BATCH):
                    simulated.step(x[begin : begin + BATCH], y[begin : begin + BATCH])
                simulated.synchronize()
                norms.append(np.mean(simulated.norms))
                simulated.norms = []
            of_case[name] = {"weights": simulated.models[0].get_weights(), "norms": norms}
        results.append(of_case)
    return results


# -- rows of tables by diversity -----------------------------------------------------------------------------------


def combine(cases):
    """What becomes of the differences of workers with shares."""
    import tensorflow as tf

    from tfring._keras.optimizers.row_diversity import combined, with_squares

    results = []
    for differences, shares in cases:
        rows = [tf.constant(each) for each in differences]
        sums = tf.add_n([with_squares(each, tf.constant(s, tf.float64)) for each, s in zip(rows, shares, strict=True)])
        results.append(combined(sums, rows[0].shape[1:], rows[0].dtype).numpy())
    return results


def test_rows_are_combined_by_their_diversity():
    generator = np.random.default_rng(0)
    row, other = generator.normal(size=(2, 5, 2, 3)).astype("float32")
    zeros = np.zeros_like(row)
    ragged = [0.5, 0.3, 0.2]
    tiny = np.float32(1e-25) * row  # the squares of which are zeros
    rows = [row, other, row - other / 2]
    x, y = np.eye(2, dtype="float32")[:, None]
    cases = [
        ([zeros, row, zeros], ragged),
        ([row, row, row], ragged),
        ([x, y], [0.5, 0.5]),
        ([row, other, zeros], [0.5, 0.5, 0.0]),
        ([row, other], [0.5, 0.5]),
        ([row, -row * 0.999], [0.5, 0.5]),
        ([tiny, zeros], [0.5, 0.5]),
        ([row.astype("float16") * np.float16(1e-4), zeros.astype("float16")], [0.5, 0.5]),
        (rows, ragged),
    ]
    [found] = workers(1).run(combine, cases)
    alone, alike, orthogonal, with_none, without_it, opposed, underflow, half, mixed = found
    np.testing.assert_allclose(alone, row, rtol=1e-6)  # in full, whatever its share
    np.testing.assert_allclose(alike, row, rtol=1e-6)
    np.testing.assert_allclose(orthogonal, x + y, rtol=1e-6)
    np.testing.assert_array_equal(with_none, without_it)  # a worker without rows
    np.testing.assert_allclose(opposed, row * 0.001, rtol=2e-3)  # no more than the sum
    np.testing.assert_allclose(underflow, tiny / 2, rtol=1e-6)  # the mean
    assert half.dtype == np.float16
    np.testing.assert_allclose(half, cases[7][0][0], rtol=1e-2)
    np.testing.assert_allclose(mixed, combined_by_diversity(rows, ragged), rtol=1e-5)


def compress(compression):
    """The weights after one window."""
    import keras

    synchronization = delayed(4, tables="diversity")
    sparse = tfring.SparseOptions(dense="always")
    strategy = harness.strategy(synchronization=synchronization, sparse=sparse, compression=compression)
    x, y = skewed_ids(4 * BATCH, vocabulary=VOCABULARY)
    keras.utils.set_random_seed(1)
    with strategy.scope():  # wide enough that what is sent is not small
        table = keras.layers.Embedding(VOCABULARY, 192)
        layers = [table, keras.layers.Flatten(), keras.layers.Dense(64, activation="tanh"), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((3,), dtype="int32"), *layers])
        model.compile(keras.optimizers.Adam(1e-3), "mse")
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    strategy.assert_equal(model.variables)
    return model.get_weights()


def test_rows_by_diversity_are_not_compressed():
    plain, *_ = workers(2).run(compress, None)
    first, second = workers(2).run(compress, "float16")
    assert [w.tobytes() for w in first] == [w.tobytes() for w in second]
    assert first[0].tobytes() == plain[0].tobytes()
    assert first[1].tobytes() != plain[1].tobytes()  # of a dense layer
    assert relative_error(first, plain) <= 2e-3


def save_in_window(path, delay, steps):
    """Saves behind some steps of a window."""
    import keras

    strategy = harness.strategy(synchronization=delayed(**delay))
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = embedding_model(optimizers()["adam"]())
    x, y = skewed_ids(ROWS, vocabulary=VOCABULARY)
    rank, n = strategy.rank, strategy.world_size
    for begin in range(0, steps * BATCH, BATCH):
        share = slice(begin + rank * BATCH // n, begin + (rank + 1) * BATCH // n)
        model.train_on_batch(x[share], y[share])
    tfring.save(model, path)
    strategy.assert_equal(model.variables)


def simulate_and_read(path, n, delay, steps):
    """The weights of a simulation and those of the file."""
    import keras

    keras.utils.set_random_seed(1)
    start = embedding_model("sgd").get_weights()
    simulated = Simulated(n, "adam", **delay)
    simulated.begin(start)
    x, y = skewed_ids(ROWS, vocabulary=VOCABULARY)
    for begin in range(0, steps * BATCH, BATCH):
        simulated.step(x[begin : begin + BATCH], y[begin : begin + BATCH])
    simulated.synchronize()
    return simulated.models[0].get_weights(), keras.models.load_model(path).get_weights()


def test_a_file_of_an_open_window_holds_rows_by_diversity(tmp_path):
    path, delay = str(tmp_path / "model.keras"), {"every": 100, "tables": "diversity"}
    workers(2).run(save_in_window, path, delay, 3)
    [(want, found)] = workers(1).run(simulate_and_read, path, 2, delay, 3)
    assert relative_error(found, want) <= 2e-5


# -- where a window ends early -------------------------------------------------------------------------------------


def dense_model(optimizer, **compile_options):
    import keras

    model = keras.Sequential([
        keras.Input((4,)),
        keras.layers.Dense(64, activation="tanh"),
        keras.layers.BatchNormalization(),
        keras.layers.Dense(1),
    ])
    model.compile(optimizer, "mse", **compile_options)
    return model


def bytes_of_steps(every, accumulate=None):
    """Bytes of a window's steps, of a model whose weights outnumber all else that is sent."""
    import keras

    strategy = harness.strategy(synchronization=delayed(every) if every else None)
    x, y = skewed_rows(24 * 8)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4096), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(1e-4, gradient_accumulation_steps=accumulate), "mse")
    model.fit(x[:8], y[:8], batch_size=8, shuffle=False, verbose=0)
    before = strategy.bytes_sent()
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    return (strategy.bytes_sent() - before) / 24


def test_a_step_sends_a_part_of_the_bytes():
    """Also where Keras accumulates gradients, which is exact: one exchange an update."""
    [ring, *_], [eighth, *_], [accumulated, *_] = (
        workers(2).run(bytes_of_steps, *arguments) for arguments in ((None,), (8,), (None, 8))
    )
    assert ring > 4096 * 6 * 4 / 2
    assert eighth < ring / 8 * 1.2
    assert accumulated < ring / 8 * 1.2


def write_in_a_window():
    """Returns a variable of the first replica, written by a worker that trains by itself, and the bytes it sent."""
    import tensorflow as tf

    strategy = harness.strategy(synchronization=delayed(100, NESTEROV))
    with strategy.scope():
        first = tf.Variable(0.0, trainable=False, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)
    before = strategy.bytes_sent()
    strategy.run(lambda: first.assign(strategy.rank + 1.0))
    return float(first), strategy.bytes_sent() - before


def test_a_window_leaves_a_variable_of_the_first_replica_to_each_worker():
    assert workers(2).run(write_in_a_window) == [(1.0, 0), (2.0, 0)]


def end_early(folder):
    """What each way of reading weights in the middle of a window finds."""
    import keras

    strategy = harness.strategy(synchronization=delayed(100, NESTEROV))
    folder = pathlib.Path(folder)
    x, y = skewed_rows(ROWS)
    options = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    with strategy.scope():
        keras.utils.set_random_seed(1)
        model = dense_model(keras.optimizers.SGD(0.01, momentum=0.9))
    batches = [(x[b : b + BATCH], y[b : b + BATCH]) for b in range(0, 2 * BATCH, BATCH)]
    rank, n = strategy.rank, strategy.world_size

    def train():
        for xs, ys in batches:
            model.train_on_batch(xs[rank::n], ys[rank::n])
        kernel = strategy.ring.world.all_gather(model.weights[0].numpy(), name="kernels").numpy()
        assert not np.array_equal(kernel[:4], kernel[4:8])  # a window is open

    def is_synchronized():
        strategy.assert_equal(model.variables)
        return bits(model)

    found = {}
    train()
    strategy.synchronize(model)
    found["synchronize"] = is_synchronized()
    before = strategy.bytes_sent()
    strategy.synchronize(model)  # no window is open
    assert strategy.bytes_sent() == before
    train()
    found["evaluated"] = np.float64(model.evaluate(x, y, batch_size=BATCH, verbose=0)).tobytes()
    found["evaluate"] = is_synchronized()
    train()
    found["predicted"] = model.predict(x, verbose=0).tobytes()
    found["predict"] = is_synchronized()
    train()
    model.test_on_batch(*batches[0])
    found["test_on_batch"] = is_synchronized()
    train()
    model.predict_on_batch(batches[0][0])
    found["predict_on_batch"] = is_synchronized()
    train()
    tfring.save(model, folder / "all.keras")
    found["save"] = is_synchronized()
    train()
    model.save_weights(folder / f"{rank}.weights.h5")
    found["save_weights"] = is_synchronized()
    loaded = keras.models.load_model(folder / "all.keras")  # in one process, of a plain optimizer
    loaded.load_weights(folder / f"{rank}.weights.h5")
    assert bits(loaded) == bits(model)
    assert len(loaded.optimizer.variables) == len(model.optimizer.variables)
    with zipfile.ZipFile(folder / "all.keras") as file:
        assert b"_outer" not in file.read("model.weights.h5")

    class Reads(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            found["epoch"] = is_synchronized()
            found["difference_norm"] = np.float64(logs["difference_norm"]).tobytes()

    class Stops(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1 and rank == n - 1:
                self.model.stop_training = True

    model.fit(x, y, validation_data=(x, y), callbacks=[Reads()], **options)
    model.fit(x, y, callbacks=[Stops()], epochs=3, **options)
    found["stopped"] = is_synchronized()
    files = keras.callbacks.ModelCheckpoint(str(folder / "checkpoint-{batch}.weights.h5"), save_freq=2)
    files.save_weights_only = True
    model.fit(x, y, callbacks=[files], **options)
    found["checkpoints"] = sorted(path.name for path in folder.glob("checkpoint-*"))
    return found


def test_a_window_that_ends_early_is_synchronized(tmp_path):
    first, *others = workers(3).run(end_early, str(tmp_path))
    for other in others:
        assert other == first
    assert first["checkpoints"] == ["checkpoint-2.weights.h5", "checkpoint-4.weights.h5"]


def save_on_one_rank(folder):
    strategy = harness.strategy(synchronization=delayed(100))
    x, y = skewed_rows(ROWS)
    with strategy.scope():
        model = dense_model("sgd")

    import keras

    class Saves(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1 and strategy.is_chief:
                self.model.save_weights(pathlib.Path(folder, "alone.weights.h5"))

    try:
        model.fit(x, y, batch_size=BATCH, verbose=0, shuffle=False, callbacks=[Saves()])
    except tfring.errors.MismatchError as error:
        return str(error)
    return None


def test_one_rank_that_saves_in_a_window_is_told(tmp_path):
    for said in workers(2).run(save_on_one_rank, str(tmp_path), timeout=60):
        assert "rows of a window" in said and "status" in said, said


def weights_and_statistics(options):
    """Ways to run steps: all are the same training."""
    import keras

    strategy = harness.strategy(synchronization=delayed(3, NESTEROV))
    x, y = skewed_rows(ROWS)
    with strategy.scope():
        keras.utils.set_random_seed(1)
        model = dense_model(keras.optimizers.SGD(0.01, momentum=0.9), **options)
    model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    strategy.assert_equal(model.variables)
    return model.get_weights()


def test_steps_in_a_loop_and_eager_steps_are_the_same():
    plain, *_ = workers(2).run(weights_and_statistics, {})
    for options in ({"steps_per_execution": 2}, {"run_eagerly": True}):
        for weights in workers(2).run(weights_and_statistics, options):
            assert relative_error(weights, plain) <= 1e-5, options


def interrupted(folder, stop_at, local_momentum, tables):
    """Two epochs with a Backup in the middle of windows; the first try ends behind a step."""
    import keras

    strategy = harness.strategy(synchronization=delayed(4, NESTEROV, local_momentum, tables))
    has_table = tables == "diversity"
    x, y = skewed_ids(ROWS, vocabulary=VOCABULARY) if has_table else skewed_rows(ROWS)

    class Stops(keras.callbacks.Callback):
        seen = 0

        def on_train_batch_end(self, batch, logs=None):
            self.seen += 1
            if self.seen == stop_at:
                raise KeyboardInterrupt

    for stops in (True, False):
        with strategy.scope():
            keras.utils.set_random_seed(1)
            model = (embedding_model if has_table else dense_model)(keras.optimizers.SGD(0.01, momentum=0.9))
        callbacks = [tfring.callbacks.Backup(folder, every_steps=3), *([Stops()] if stops else [])]
        try:
            model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
        except KeyboardInterrupt:
            assert stops and stop_at
            continue
        break
    return bits(model)


@pytest.mark.parametrize(("local_momentum", "tables"), [
    ("average", "average"), ("keep", "diversity"), pytest.param("keep", "average", marks=pytest.mark.long),
])  # fmt: skip
def test_a_backup_keeps_the_outer_momentum_and_each_workers_own(local_momentum, tables, tmp_path):
    whole = workers(2).run(interrupted, str(tmp_path / "whole"), None, local_momentum, tables)
    parts = workers(2).run(interrupted, str(tmp_path / "parts"), 8, local_momentum, tables)
    assert whole == parts and whole[0] == whole[1]


def preempted(folder, at, saved_at, every_steps):
    """SIGTERM after a step, such as one in the middle of a window, then again; returns the weights and the logs."""
    import keras

    strategy = harness.strategy(synchronization=delayed(4, NESTEROV))
    x, y = skewed_rows(ROWS)

    class Stops(keras.callbacks.Callback):
        seen = 0

        def on_train_batch_end(self, batch, logs=None):
            self.seen += 1
            if self.seen == at and strategy.rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    for callbacks in ([Stops()], []):
        with strategy.scope():
            keras.utils.set_random_seed(1)
            model = dense_model(keras.optimizers.SGD(0.01, momentum=0.9))
        callbacks.append(tfring.callbacks.Backup(folder, every_steps=every_steps, grace_seconds=200))
        try:
            history = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
        except SystemExit:
            assert at and callbacks[0].seen == saved_at
            continue
        break
    return bits(model), history.history


@pytest.mark.parametrize(("every_steps", "at", "saved_at"), [
    (None, 2, 4), (3, 5, 5), *(pytest.param(*case, marks=pytest.mark.long) for case in [(3, 2, 3), (6, 2, 4)]),
])  # fmt: skip
def test_sigterm_in_a_window_changes_nothing(every_steps, at, saved_at, tmp_path):
    """The window ends as it would have, and is counted in the logs of its epoch; so do those after the restart."""
    whole = workers(2).run(preempted, str(tmp_path / "whole"), None, None, every_steps)
    parts = workers(2).run(preempted, str(tmp_path / "parts"), at, saved_at, every_steps)
    assert whole == parts and len(whole[0][1]["difference_norm"]) == 2


def train_alone():
    """With one worker an outer optimizer is that of Lookahead; plain averaging changes nothing."""
    import keras

    x, y = skewed_rows(ROWS)
    results = {}
    ways = {"none": None, "plain": delayed(3), "lookahead": delayed(3, {"learning_rate": 0.5})}
    for name, synchronization in ways.items():
        strategy = harness.strategy(synchronization=synchronization)
        with strategy.scope():
            keras.utils.set_random_seed(1)
            model = dense_model(optimizers()["adam"]())
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
        results[name] = model.get_weights()
        strategy.close()
    return results


def test_one_worker():
    [found] = workers(1).run(train_alone)
    assert relative_error(found["plain"], found["none"]) <= 5e-6  # anchor - (anchor - weights) rounds in each window
    assert relative_error(found["lookahead"], found["none"]) > 1e-3


# -- what cannot be done is refused --------------------------------------------------------------------------------


def refuse(case):
    import keras

    o = keras.optimizers

    def compiled(optimizer="sgd", model=dense_model, **options):
        strategy = harness.strategy(synchronization=tfring.Delayed(4))
        x, y = skewed_rows(8)
        with strategy.scope():
            made = model(optimizer, **options)
        made.fit(x, y, batch_size=4, verbose=0)

    def of_layers(*layers):
        def model(optimizer, **options):
            made = keras.Sequential([keras.Input((4,)), *(layer() for layer in layers), keras.layers.Dense(1)])
            made.compile(optimizer, "mse", **options)
            return made

        return model

    def gathering(y_true, y_pred):
        return keras.losses.mean_squared_error(*tfring.gather_for_loss((y_true, y_pred)))

    def contrastive(optimizer):
        model = of_layers()(optimizer)
        model.compile(optimizer, gathering)
        return model

    def own_loop():
        import tensorflow as tf

        strategy = harness.strategy(synchronization=tfring.Delayed(4))
        with strategy.scope():
            optimizer, variable = o.SGD(0.1), keras.Variable([1.0])
        strategy.run(lambda: optimizer.apply([tf.constant([1.0])], [variable]))

    def of_strategy(**options):
        harness.strategy(synchronization=tfring.Delayed(4), **options)

    cases = {
        "every": lambda: tfring.Delayed(0),
        "local_momentum": lambda: tfring.Delayed(2, local_momentum="drop"),
        "tables": lambda: tfring.Delayed(2, tables="sum"),
        "outer": lambda: tfring.Delayed(2, outer="sgd"),
        "outer around": lambda: tfring.Delayed(2, outer=o.LossScaleOptimizer(o.SGD())),
        "outer ema": lambda: tfring.Delayed(2, outer=o.SGD(use_ema=True)),
        "no Delayed": lambda: harness.strategy(synchronization=8),
        "mesh": lambda: of_strategy(mesh=tfring.Mesh(model=2)),
        "shard_optimizer": lambda: of_strategy(shard_optimizer=True),
        "check_equal": lambda: of_strategy(check_equal=True),
        "tensorflow": lambda: tfring.RingStrategy(synchronization=tfring.Delayed(4), communication="tensorflow"),
        "jit_compile": lambda: compiled(jit_compile=True),
        "SyncBatchNormalization": lambda: compiled(model=of_layers(tfring.SyncBatchNormalization)),
        "synchronized": lambda: compiled(model=of_layers(lambda: keras.layers.BatchNormalization(synchronized=True))),
        "ema": lambda: compiled(o.SGD(use_ema=True)),
        "accumulation": lambda: compiled(o.SGD(gradient_accumulation_steps=2)),
        "loss scale": lambda: compiled(o.LossScaleOptimizer(o.SGD())),
        "Ftrl": lambda: compiled(o.Ftrl()),
        "gather_for_loss": lambda: compiled(model=contrastive),
        "own loop": own_loop,
    }
    if case is None:
        return list(cases)
    try:
        cases[case]()
    except ConfigurationError as error:
        return str(error)
    return None


REFUSED = {
    "every": "not a number of steps",
    "local_momentum": "not one of ('keep'",
    "tables": "not one of ('average', 'diversity')",
    "outer": "not a Keras optimizer",
    "outer around": "does not update by one averaged difference",
    "outer ema": "use_ema",
    "no Delayed": "not a tfring.Delayed",
    "mesh": " and mesh=",
    "shard_optimizer": " and shard_optimizer=True",
    "check_equal": " and check_equal=True",
    "tensorflow": " and communication='tensorflow'",
    "jit_compile": "a model with jit_compile=True",
    "SyncBatchNormalization": "a model with SyncBatchNormalization",
    "synchronized": "a model with BatchNormalization",
    "ema": "use_ema=True",
    "accumulation": "gradient_accumulation_steps=2",
    "loss scale": "other optimizers inside it",
    "Ftrl": "slots from which weights are recomputed",
    "gather_for_loss": "gather_for_loss",
    "own loop": "a custom training loop",
}


def refuse_all():
    return {case: refuse(case) for case in refuse(None)}


def test_what_it_cannot_do_is_refused_by_name():
    for said in workers(2).run(refuse_all):
        assert said.keys() == REFUSED.keys()
        for case, words in REFUSED.items():
            assert said[case] is not None, case
            assert words in said[case], (case, said[case])


def refuse_devices():
    try:
        harness.strategy(synchronization=tfring.Delayed(4), devices=["CPU:0", "CPU:1"])
    except ConfigurationError as error:
        return str(error)
    return None


def test_several_devices_are_refused():
    [said] = workers(1, logical_cpus=2).run(refuse_devices)
    assert said is not None and "a worker is one replica" in said


def other_window(options):
    strategy = harness.strategy(synchronization=tfring.Delayed(**options))
    x, y = skewed_rows(ROWS)
    with strategy.scope():
        model = dense_model("sgd")
    try:
        model.fit(x, y, verbose=0)
    except tfring.errors.MismatchError as error:
        return str(error)
    return None


def test_ranks_with_other_windows_are_told():
    for said in workers(2).run(other_window, per_rank=[{"every": 4}, {"every": 8}]):
        assert "every of Delayed" in said and "4 on rank 0, 8 on rank 1" in said
    for said in workers(2).run(other_window, per_rank=[{"every": 4}, {"every": 4, "tables": "diversity"}]):
        assert "tables of Delayed" in said and "average" in said and "diversity" in said
