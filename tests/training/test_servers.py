"""Parameter servers: N workers and S servers equal one process, as a ring does, for every optimizer.

A test's processes are the ranks of a pool: the first are workers, the last servers.
"""

import logging
import os
import pathlib
import time

import harness
import numpy as np
import pytest
from common import (
    all_optimizers,
    assert_equal,
    history_error,
    is_reference,
    optimizer_settings,
    relative_error,
    skewed_ids,
)
from harness import workers

import tfring
from tfring.cluster.roles import Roles

VOCABULARY, DIM = 90, 8
ONE_SERVER = Roles(("127.0.0.1:1",), ("127.0.0.1:2",), False, 0, "a test")
REFUSED = {"MultiOptimizer", "ema", "loss_scale"}


def roles(num_servers):
    """The role of this process of the pool."""
    cluster = tfring.Cluster(
        *(int(os.environ[f"TFRING_{n}"]) for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")),
        1,
        tuple(os.environ["TFRING_ADDRESSES"].split(",")),
        "harness",
        int(os.environ["TFRING_LISTEN_FD"]),
    )
    num_workers = cluster.world_size - num_servers
    addresses = cluster.addresses
    is_server = cluster.rank >= num_workers
    index = cluster.rank - num_workers if is_server else cluster.rank
    return Roles(addresses[:num_workers], addresses[num_workers:], is_server, index, "harness", cluster.listen_fd)


def with_servers(work, num_servers, options, *args):
    """What a worker makes of `work(strategy, *args)`; None in a server, once it has served."""
    try:
        strategy = tfring.ParameterServerStrategy(roles=roles(num_servers), **options)
    except SystemExit as end:
        assert end.code == 0
        return None
    harness._strategies.add(strategy)
    result = work(strategy, *args)
    strategy.close()
    return result


def run(num_workers, num_servers, work, *args, timeout=400, **options):
    """The workers' results."""
    pool = workers(num_workers + num_servers)
    return pool.run(with_servers, work, num_servers, options, *args, timeout=timeout)[:num_workers]


def small_pieces():
    """Has tables be cut and pulled by rows that are as small as those of the tests."""
    from tfring._keras.optimizers import server_updater

    server_updater.ROWS_BYTES = 1
    server_updater.SPLIT_BYTES = 1 << 10


def embedding_model(optimizer, lookup="embedding"):
    """Mean of looked-up rows, then a dense layer; `lookup="one_hot"` is the same model with a dense table."""
    import keras

    ids = keras.Input((3,), dtype="int32")
    if lookup == "embedding":
        rows = keras.layers.Embedding(VOCABULARY, DIM, name="embedding_table")(ids)
    else:
        hot = keras.ops.one_hot(ids, VOCABULARY)
        rows = keras.layers.Dense(DIM, use_bias=False, name="embedding_table")(hot)
    hidden = keras.layers.Dense(4, activation="tanh")(keras.ops.mean(rows, axis=1))
    model = keras.Model(ids, keras.layers.Dense(1)(hidden))
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


def train_embeddings(strategy, names):
    """Trains with each optimizer under servers, and the one-hot model alone."""
    import keras

    small_pieces()
    x, y = skewed_ids(vocabulary=VOCABULARY)
    cases = {}
    for number, name in enumerate(names):
        make = {**all_optimizers(), **optimizer_settings()}[name]
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = embedding_model(make())
        start = model.get_weights()
        keras.utils.set_random_seed(2)
        history = model.fit(x, y, batch_size=20, epochs=2, shuffle=False, verbose=0).history
        errors = cases[name] = {"bits": b"".join(w.tobytes() for w in model.get_weights())}
        errors["changed"] = 0.0 if relative_error(model.get_weights(), start) > 1e-4 else 1.0
        if is_reference(strategy):
            alone = embedding_model(make(), "one_hot")
            alone.set_weights(start)
            alone.optimizer.build(alone.trainable_variables)
            want = alone.fit(x, y, batch_size=20, epochs=2, shuffle=False, verbose=0).history
            errors["weights"] = relative_error(model.get_weights(), alone.get_weights())
            errors["history"] = relative_error([history[k] for k in want], [want[k] for k in want])
        if number > 1:  # the first two, of which each worker compares one
            continue
        evaluated, predicted = model.evaluate(x, y, batch_size=20, verbose=0), model.predict(x, verbose=0)
        if "weights" in errors:
            errors["evaluate"] = relative_error([evaluated], [alone.evaluate(x, y, batch_size=20, verbose=0)])
            errors["predict"] = relative_error([predicted], [alone.predict(x, verbose=0)])
    return cases


KINDS = ["SGD momentum", "RMSprop", "Adam amsgrad", "AdamW", "Adagrad", "Ftrl"]  # a server runs all of them alike


@pytest.mark.parametrize(("n", "servers", "names"), [
    (3, 2, ["SGD momentum", "Adam amsgrad", "Adagrad"]),
    *(pytest.param(*case, marks=pytest.mark.long) for case in [(2, 1, KINDS), (4, 2, ["SGD", "Adam"])]),
])  # fmt: skip
def test_optimizers_equal_one_process(n, servers, names):
    assert_equal(run(n, servers, train_embeddings, names))


@pytest.mark.long
def test_other_optimizers_equal_one_process():
    assert_equal(run(2, 1, train_embeddings, [n for n in all_optimizers() if n not in (*REFUSED, *KINDS)]))


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.long) for part in (1, 2))])
def test_clipping_schedules_and_accumulation_equal_one_process(part):
    names = [name for name in optimizer_settings() if name not in (*REFUSED, "accumulation")][part::3]
    assert_equal(run(2, 2, train_embeddings, names))


def train_few_variables(strategy, names):
    """Trains one model with each optimizer in turn: fewer variables than servers, and slots that Keras numbers."""
    import keras

    o = keras.optimizers
    make = {
        "accumulation": lambda: o.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2),
        "accumulation and clipvalue": lambda: o.Adam(0.1, clipvalue=0.1, gradient_accumulation_steps=3),
        "clipnorm": lambda: o.SGD(0.1, clipnorm=0.01),
        "global_clipnorm": lambda: o.SGD(0.1, global_clipnorm=0.01),
        "Nadam": lambda: o.Nadam(0.1),
    }
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(50, 3)).astype("float32"), rng.normal(size=(50, 1)).astype("float32")
    options = {"batch_size": 10, "epochs": 2, "shuffle": False, "verbose": 0}
    cases = {}
    for number, name in enumerate(names):
        with strategy.scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, use_bias=False)])
            model.compile(make[name](), "mse")
        alone = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, use_bias=False)])
        alone.compile(make[name](), "mse")
        alone.set_weights(model.get_weights())
        model.fit(x, y, **options)
        alone.fit(x, y, **options)
        strategy.pull()
        cases[f"{name} {number}"] = {
            "bits": b"".join(w.tobytes() for w in model.get_weights()),
            "weights": relative_error(model.get_weights(), alone.get_weights()),
            "slots": relative_error(variables_of(model.optimizer), variables_of(alone.optimizer)),
        }
    return cases


@pytest.mark.parametrize("names", [
    ["accumulation", "global_clipnorm"],
    pytest.param(["accumulation and clipvalue", "clipnorm"], marks=pytest.mark.long),
    pytest.param(["Nadam", "Nadam"], marks=pytest.mark.long),
])
def test_fewer_variables_than_servers_equal_one_process(names):
    assert_equal(run(2, 2, train_few_variables, names))


def two_models():
    """Two models with one layer in common."""
    import keras

    common, models = keras.layers.Dense(16), []
    for _ in range(2):
        inputs = keras.Input((5,))
        models.append(keras.Model(inputs, keras.layers.Dense(1)(common(inputs))))
    return models


def train_in_turn(models, x, y, batch_size):
    """Weights after each call of `fit` of two models, of which one is compiled with three optimizers in turn."""
    import keras

    first, second, third = keras.optimizers.SGD(0.05, momentum=0.9), keras.optimizers.Adam(0.05), keras.optimizers.SGD()
    for model, optimizer in zip(models, (first, second), strict=True):
        model.compile(optimizer, "mse")
    weights, options = [], {"batch_size": batch_size, "shuffle": False, "verbose": 0}
    for model in (models[0], models[1], models[0]):
        model.fit(x, y, **options)
        weights += models[0].get_weights() + models[1].get_weights()
    for optimizer in (third, first):
        models[0].compile(optimizer, "mse")
        models[0].fit(x, y, **options)
        weights += models[0].get_weights()
    return weights


def train_two_models(strategy, batch_size):
    small_pieces()
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 5)).astype("float32"), rng.normal(size=(40, 1)).astype("float32")
    with strategy.scope():
        models = two_models()
    alone = two_models()
    for model, other in zip(models, alone, strict=True):
        other.set_weights(model.get_weights())
    got, want = train_in_turn(models, x, y, batch_size), train_in_turn(alone, x, y, 20)
    return {"two models": {"weights": relative_error(got, want), "bits": b"".join(w.tobytes() for w in got)}}


@pytest.mark.parametrize(("options", "batch_size"), [({}, 20), ({"update": "async", "max_staleness": 0}, 10)])
def test_a_weight_has_one_place_whichever_optimizers_train_it(options, batch_size):
    assert_equal(run(2, 2, train_two_models, batch_size, **options))


def step_of_two_optimizers():
    """A model whose step updates the same variables by two optimizers."""
    import keras
    import tensorflow as tf

    class Twice(keras.Sequential):
        def compile(self, one, other, **options):
            super().compile(one, **options)
            self.other = other

        def train_step(self, data):
            x, y = data
            for optimizer in (self.optimizer, self.other):
                with tf.GradientTape() as tape:
                    loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
                gradients = tape.gradient(loss, self.trainable_variables)
                optimizer.apply(gradients, self.trainable_variables)
            return {"loss": loss}

    model = Twice([keras.Input((5,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), keras.optimizers.Adam(0.05), loss="mse")
    return model


def train_by_two_optimizers(strategy):
    import keras

    small_pieces()
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 5)).astype("float32"), rng.normal(size=(40, 1)).astype("float32")
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = step_of_two_optimizers()
    alone = step_of_two_optimizers()
    alone.set_weights(model.get_weights())
    for each in (model, alone):
        each.fit(x, y, batch_size=10, epochs=2, shuffle=False, verbose=0)
    got = model.get_weights()
    error = relative_error(got, alone.get_weights())
    return {"two optimizers": {"weights": error, "bits": b"".join(w.tobytes() for w in got)}}


def test_two_optimizers_update_the_same_variables_in_a_step():
    assert_equal(run(2, 2, train_by_two_optimizers))


def assign_between_batches(strategy):
    """Weights that a callback assigns after a batch, that the program assigns between two, and that only swap."""
    import keras

    small_pieces()
    x, y = skewed_ids(vocabulary=VOCABULARY)
    options = {"batch_size": 20, "shuffle": False, "verbose": 0}
    cases = {}

    class Assigns(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.set_weights([w * 0 + 0.25 - 0.125 * batch for w in self.model.get_weights()])

    with strategy.scope():
        model = embedding_model(keras.optimizers.SGD(0.1, momentum=0.9))
    alone = embedding_model(keras.optimizers.SGD(0.1, momentum=0.9), "one_hot")
    alone.set_weights(model.get_weights())

    def compare(name):
        got = model.get_weights()
        errors = {"weights": relative_error(got, alone.get_weights()), "bits": b"".join(w.tobytes() for w in got)}
        cases[name] = errors

    for each in (model, alone):
        each.fit(x, y, callbacks=[Assigns()], epochs=2, **options)
    compare("by a callback")
    with strategy.scope():
        still = embedding_model(keras.optimizers.SGD(0.0))
    kernel = still.layers[-1].kernel
    for values in ([1.0, 2.0, 2.0, 1.0], [2.0, 1.0, 1.0, 2.0]):  # the same by Adler-32
        kernel.assign(np.array(values)[:, None])
        still.fit(x, y, **options)
        assert keras.ops.convert_to_numpy(kernel)[:, 0].tolist() == values
    share = slice(10 * strategy.cluster.rank, 10 * strategy.cluster.rank + 10)
    for _ in range(2):
        model.train_on_batch(x[:20][share], y[:20][share])
        alone.train_on_batch(x[:20], y[:20])
        for each in (model, alone):
            each.set_weights([w * 0 + 0.5 for w in each.get_weights()])
    strategy.pull()
    compare("between two train_on_batch")
    return cases


def test_what_is_assigned_between_batches_goes_to_the_servers():
    assert_equal(run(2, 2, assign_between_batches))


def table_read_twice(kind):
    """A model that looks rows up in a table and, by `kind`, reads it in another way too."""
    import keras
    import tensorflow as tf

    class ReadsTwice(keras.Model):
        def __init__(self):
            super().__init__()
            self.table, self.head = keras.layers.Embedding(VOCABULARY, DIM), keras.layers.Dense(1)

        def build(self, shape):
            self.table.build(shape)
            self.head.build((None, DIM))

        def call(self, ids):
            rows = keras.ops.mean(self.table(ids), axis=1)
            if kind == "gather":
                rows += tf.gather(self.table.embeddings, (ids[:, 0] + VOCABULARY // 2) % VOCABULARY)
            elif kind == "stop_gradient":
                rows *= 1 + keras.ops.mean(keras.ops.stop_gradient(self.table.embeddings * 1.0), axis=0)
            return self.head(rows)

    model = ReadsTwice()
    model.build((None, 3))
    losses = {"logarithm": lambda y, p: tf.math.log(tf.reduce_mean((y - p) ** 2))}

    def mean_of_table(y, p):  # read after the update
        return tf.reduce_mean(tf.convert_to_tensor(model.table.embeddings.value)) + 0.0 * p[:, 0]

    metrics = [mean_of_table] if kind == "metric" else []
    model.compile(keras.optimizers.SGD(0.3, momentum=0.9), losses.get(kind, "mse"), metrics=metrics)
    return model


def read_a_table_twice(strategy):
    small_pieces()
    x, y = skewed_ids(vocabulary=VOCABULARY)
    cases, said = {}, []
    listener = logging.Handler()
    listener.emit = said.append
    logging.getLogger("tfring").addHandler(listener)
    for kind in ("lookup alone", "gather", "stop_gradient", "metric", "logarithm"):
        with strategy.scope():
            model = table_read_twice(kind)
        alone = table_read_twice(kind)
        alone.set_weights(model.get_weights())
        logs = [
            each.fit(x, y, batch_size=10, epochs=2, shuffle=False, verbose=0).history for each in (model, alone)
        ]
        got = model.get_weights()
        cases[kind] = {
            "logs": history_error(*logs),
            "weights": relative_error(got, alone.get_weights()),
            "bits": b"".join(w.tobytes() for w in got),
        }
        group = [*strategy.ring.updater._groups.values()][-1]
        cases[kind]["by rows"] = float(any(group.by_rows) != (kind in ("lookup alone", "logarithm")))
        cases[kind]["steps of all rows"] = float(len(said))
    logging.getLogger("tfring").removeHandler(listener)
    return cases


def test_a_table_that_is_read_in_another_way_too_is_pulled_in_full():
    """And a loss that is no mean over rows is that of one process."""
    assert_equal(run(2, 2, read_a_table_twice))


def variables_of(optimizer):
    return [variable.numpy() for variable in optimizer.variables]


def save_and_go_on(strategy, folder):
    """An epoch under servers, a file, another epoch; weights assigned between. Files of other processes are loaded."""
    import keras

    small_pieces()
    x, y = skewed_ids(vocabulary=VOCABULARY)
    options = {"batch_size": 20, "shuffle": False, "verbose": 0}
    path = pathlib.Path(folder, f"saved-{strategy.cluster.rank}.keras")
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = embedding_model(keras.optimizers.Adam(0.01))
    start = model.get_weights()
    model.fit(x, y, **options)
    model.save(path)
    alone = embedding_model(keras.optimizers.Adam(0.01), "one_hot")
    alone.set_weights(start)
    alone.fit(x, y, **options)
    errors = {"slots": relative_error(variables_of(model.optimizer), variables_of(alone.optimizer))}
    loaded = keras.models.load_model(path)  # in one process
    errors["file"] = relative_error(variables_of(loaded.optimizer), variables_of(alone.optimizer))
    with strategy.scope():
        again = keras.models.load_model(path)  # onto servers, with its slots
    again.fit(x, y, **options)
    model.set_weights([w * 0.5 for w in model.get_weights()])
    model.fit(x, y, **options)
    before = alone.get_weights()
    alone.fit(x, y, **options)
    errors["loaded"] = relative_error(again.get_weights(), alone.get_weights())
    other = embedding_model(keras.optimizers.Adam(0.01), "one_hot")
    other.set_weights([w * 0.5 for w in before])
    other.optimizer.build(other.trainable_variables)
    for slot, value in zip(other.optimizer.variables, loaded.optimizer.variables, strict=True):
        slot.assign(value.numpy())
    other.fit(x, y, **options)
    errors["assigned"] = relative_error(model.get_weights(), other.get_weights())
    return {"files": {**errors, "bits": b""}}


def test_files_hold_the_slots_and_what_is_assigned_goes_to_the_servers(tmp_path):
    assert_equal(run(2, 2, save_and_go_on, str(tmp_path)))


def back_up_and_go_on(strategy, folder):
    """Two epochs, in between another model that goes on from a Backup."""
    import keras

    small_pieces()
    x, y = skewed_ids(vocabulary=VOCABULARY)
    start = []
    for epochs in (1, 2):
        keras.utils.set_random_seed(epochs)
        with strategy.scope():
            model = embedding_model(keras.optimizers.Adam(0.01))
        start = start or model.get_weights()
        backup = tfring.callbacks.Backup(folder)
        model.fit(x, y, batch_size=20, epochs=epochs, shuffle=False, verbose=0, callbacks=[backup])
    alone = embedding_model(keras.optimizers.Adam(0.01), "one_hot")
    alone.set_weights(start)
    alone.fit(x, y, batch_size=20, epochs=2, shuffle=False, verbose=0)
    bits = b"".join(w.tobytes() for w in model.get_weights())
    return {"backup": {"weights": relative_error(model.get_weights(), alone.get_weights()), "bits": bits}}


def test_a_backup_holds_the_slots(tmp_path):
    assert_equal(run(2, 2, back_up_and_go_on, str(tmp_path)))


def refusals(strategy):
    import keras

    optimizers = keras.optimizers
    x, y = skewed_ids(vocabulary=VOCABULARY)
    said = {}
    for name, optimizer in {
        "LossScaleOptimizer": optimizers.LossScaleOptimizer(optimizers.SGD(0.1)),
        "use_ema": optimizers.SGD(0.1, use_ema=True),
        "clipnorm": optimizers.SGD(0.1, clipnorm=1.0, gradient_accumulation_steps=2),
    }.items():
        with strategy.scope():
            model = embedding_model(optimizer)
        with pytest.raises(ValueError, match=r"^Servers "):
            try:
                model.fit(x, y, verbose=0)
            except ValueError as error:
                said[name] = str(error)
                raise
    with strategy.scope():
        ids = keras.Input((3,), dtype="int32")
        rows = keras.layers.Flatten()(tfring.layers.ShardedEmbedding(VOCABULARY, DIM)(ids))
        model = keras.Model(ids, keras.layers.Dense(1)(rows))
        model.compile("sgd", "mse")
    try:
        model.fit(x, y, verbose=0)
    except ValueError as error:
        said["shards it over workers"] = str(error)
    return said


def test_what_servers_cannot_do_is_refused_by_name():
    for said in run(2, 1, refusals):
        assert len(said) == 4
        assert all(name in text for name, text in said.items()), said


# -- asynchronous ------------------------------------------------------------------------------------------------------


def label(y_true, y_pred):
    """A metric whose mean over an epoch tells whether every row was seen once."""
    return y_true


def by_turns():
    import keras

    return keras.optimizers.SGD(0.03, momentum=0.9)


def train_by_turns(strategy, batch_size, slow_rank=None, epochs=2):
    """Trains on batches that workers take by turns; history, weights, how many batches this one took, histograms."""

    import keras

    small_pieces()
    x, y = skewed_ids(vocabulary=VOCABULARY)

    class Turns(keras.callbacks.Callback):
        batches = 0

        def on_train_batch_end(self, batch, logs=None):
            self.batches += 1
            if strategy.cluster.rank == slow_rank:
                time.sleep(0.5)

    keras.utils.set_random_seed(1)  # of other weights, a bias may be small enough to differ by its rounding
    with strategy.scope():
        model = embedding_model(by_turns())
        model.compile(by_turns(), "mse", metrics=[label])
    start, turns = model.get_weights(), Turns()
    fit = model.fit(x, y, batch_size=batch_size, epochs=epochs, shuffle=False, verbose=0, callbacks=[turns])
    return start, fit.history, model.get_weights(), turns.batches, strategy.histograms()


def rows_of(history):
    return {name: values for name, values in history.items() if name in ("loss", "label")}


def assert_every_row_once(results, batch_size, epochs=2):
    x, y = skewed_ids(vocabulary=VOCABULARY)
    for _, history, weights, _, _ in results:
        np.testing.assert_allclose(history["label"], [y.mean()] * epochs, rtol=1e-5)
        assert rows_of(history) == rows_of(results[0][1])
        assert relative_error(weights, results[0][2]) == 0
    assert sum(batches for *_, batches, _ in results) == epochs * -(-len(x) // batch_size)


@pytest.mark.parametrize("options", [{}, {"max_staleness": 1}, {"max_staleness": 0, "late": "drop"}])
def test_every_batch_is_trained_by_one_worker(options):
    results = run(3, 2, train_by_turns, 10, update="async", **options)
    assert_every_row_once(results, 10)
    *_, histograms = results[0]
    assert sum(histograms["staleness"].values()) == 9
    if options == {"max_staleness": 1}:
        assert set(histograms["staleness"]) <= {0, 1}


def one_batch(strategy):
    x, y = skewed_ids(vocabulary=VOCABULARY)
    with strategy.scope():
        model = embedding_model(by_turns())
        model.compile(by_turns(), "mse")
    start = model.get_weights()
    model.fit(x[:10], y[:10], batch_size=10, epochs=3, shuffle=False, verbose=0)
    return start, model.get_weights()


def test_workers_without_a_batch_have_the_weights_of_all():
    results = run(3, 2, one_batch, update="async", timeout=100)
    for start, weights in results:
        assert relative_error(weights, results[0][1]) == 0
        assert relative_error(weights, start) > 0


def test_a_bound_of_0_equals_one_process_on_all_workers_batches():
    results = run(2, 2, train_by_turns, 10, update="async", max_staleness=0)
    assert_every_row_once(results, 10)
    x, y = skewed_ids(vocabulary=VOCABULARY)
    alone = embedding_model(by_turns(), "one_hot")
    alone.set_weights(results[0][0])
    alone.fit(x, y, batch_size=20, epochs=2, shuffle=False, verbose=0)
    assert relative_error(results[0][2], alone.get_weights()) < 1e-5


def test_a_slow_worker_takes_fewer_batches():
    results = run(3, 1, train_by_turns, 4, 1, update="async")
    assert_every_row_once(results, 4)
    batches = [batches for *_, batches, _ in results]
    assert batches[1] < min(batches[0], batches[2])


def test_an_update_does_not_wait_for_backup_workers():
    results = run(3, 1, train_by_turns, 4, 1, backup_workers=1)
    assert_every_row_once(results, 4)
    assert results[0][1]["max_staleness"] != [0.0, 0.0]
    assert sum(results[0][1]["dropped_gradients"]) > 0


def exchange(strategy, folder):
    """What the functions for scripts return, in a graph too; a file that cannot be saved; other calls on a rank."""
    import keras
    import tensorflow as tf

    rank = tfring.rank()
    got = {
        "sum": tfring.all_reduce(rank + 1),
        "mean": tfring.all_reduce(tf.constant([1.5, rank]), "mean").numpy().tolist(),
        "max": tfring.all_reduce(np.arange(3) * rank, "max").tolist(),
        "values": tfring.all_gather({"rank": rank}),
        "rows": tfring.all_gather(np.full([rank, 2], rank)).tolist(),
        "broadcast": tfring.broadcast([rank, "text"], root=1),
        "array": tfring.broadcast(np.full([2], rank), root=2).tolist(),
    }
    in_graph = tf.function(lambda value: (tfring.all_reduce(value), tfring.broadcast(value, 2)))
    got["in a graph"] = [value.numpy().tolist() for value in in_graph(tf.constant([1.0, rank]))]
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    for barrier in (tfring.barrier, strategy.barrier):
        here = pathlib.Path(folder, f"rank 0 is at {barrier.__qualname__}")
        if rank == 0:
            time.sleep(1.0)
            here.write_text("")
        barrier()
        got[f"is after {barrier.__qualname__}"] = here.exists()
    model.fit(np.ones([40, 1]), np.ones([40, 1]), batch_size=4, verbose=0)
    tfring.save(model, folder + "/model.keras")
    got["is saved"] = pathlib.Path(folder, "model.keras").exists()
    try:
        tfring.save(model, folder + "/nowhere/model.keras")
    except OSError as error:
        got["not saved"] = "Rank 0 could not save" in str(error) or rank == 0
    try:
        tfring.all_reduce(1) if rank == 1 else tfring.all_gather(1)
    except tfring.errors.MismatchError as error:
        got["disagrees"] = "all_reduce" in str(error) and "all_gather" in str(error)
    return got


def test_functions_for_scripts_reach_workers_that_go_on_by_themselves(tmp_path):
    for got in run(3, 1, exchange, str(tmp_path), update="async"):
        assert got == {
            "sum": 6, "mean": [1.5, 1.0], "max": [0, 2, 4], "values": [{"rank": 0}, {"rank": 1}, {"rank": 2}],
            "rows": [[1, 1], [2, 2], [2, 2]], "broadcast": [1, "text"], "array": [2, 2],
            "in a graph": [[3.0, 3.0], [1.0, 2.0]], "is after barrier": True,
            "is after RingStrategy.barrier": True, "is saved": True, "not saved": True, "disagrees": True,
        }  # fmt: skip


def train_other_rows(kind):
    """Trains on rows whose order differs by worker; the error."""
    import keras
    import tensorflow as tf

    strategy = tfring.ParameterServerStrategy("async", roles=roles(1))
    harness._strategies.add(strategy)
    x = np.random.default_rng(0).normal(size=(60, 2)).astype("float32")
    if kind == "arrays":
        x = x[np.random.default_rng(strategy.rank).permutation(60)]
    data = (x, x[:, :1])
    if kind == "seeds":
        data = (tf.data.Dataset.from_tensor_slices(data).shuffle(60, seed=strategy.rank).batch(4),)
    if kind == "order":
        rows = tf.data.Dataset.from_tensor_slices(data)
        data = (rows.map(lambda x, y: (x, y), num_parallel_calls=2, deterministic=False).batch(4),)
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    try:
        model.fit(*data, verbose=0)
    except tfring.errors.TfringError as error:
        return str(error)
    finally:
        strategy.close()


def train_other_rows_or_serve(kind):
    try:
        return train_other_rows(kind)
    except (SystemExit, tfring.errors.PeerLostError):
        return "a server"


@pytest.mark.parametrize(("kind", "says"), [
    ("arrays", "`x` is not the same on every rank"), ("seeds", "All workers must draw the same batches"),
    ("order", "A dataset with deterministic=False in `map` or `batch`"),
])  # fmt: skip
def test_data_that_differ_by_worker_are_refused(kind, says):
    *of_workers, _ = workers(3).run(train_other_rows_or_serve, kind, timeout=200)
    assert all(says in error for error in of_workers), of_workers


def train_rows_of_slow_maps(strategy):
    """Trains on rows that Python makes in unequal times, in an order that the options leave open."""

    import keras
    import tensorflow as tf

    from tfring.data import distribute

    def slow(x):
        time.sleep(0.004 * np.random.default_rng([strategy.rank, int(x[0])]).random())
        return x

    x = np.arange(120, dtype="float32")[:, None]
    rows = tf.data.Dataset.from_tensor_slices((x, x))
    rows = rows.map(lambda x, y: (tf.ensure_shape(tf.numpy_function(slow, [x], x.dtype), [1]), y), num_parallel_calls=4)
    options = tf.data.Options()
    options.deterministic = False
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile(keras.optimizers.SGD(0.0), "mse", metrics=[label])
    pause = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: time.sleep(0.005))
    fit = model.fit(rows.prefetch(1).batch(4).with_options(options), epochs=2, verbose=0, callbacks=[pause])
    of_steps = distribute.distribute_for_keras(strategy.ring, rows.batch(4))
    return fit.history["label"], of_steps._cloned_datasets[0].options().autotune.enabled


def test_every_row_is_trained_once_where_options_leave_the_order_open():
    # Without the tuner, whose thread may keep an iterator, and with it the process, for as long as it was in use.
    assert run(2, 1, train_rows_of_slow_maps, update="async") == [([59.5, 59.5], False)] * 2


def check_workers_that_go_on_by_themselves(strategy):
    """What CheckFinite and `assert_equal` say, as each worker hears it."""
    import keras
    import tensorflow as tf

    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, name="only")])
        model.compile(keras.optimizers.SGD(0.001), "mse")
    rows = np.ones([40, 1], "float32")
    model.fit(rows, rows, batch_size=4, verbose=0)
    strategy.assert_equal(model.variables)
    messages = []

    def note(call):
        with pytest.raises((tf.errors.InvalidArgumentError, tfring.errors.TfringError)) as raised:
            call()
        messages.append(str(raised.value))

    if strategy.rank == 1:
        model.layers[0].bias.assign([7.0])
    note(lambda: strategy.assert_equal(model.variables))
    note(tf.function(lambda: strategy.assert_equal(model.variables), autograph=False))
    callbacks = [tfring.callbacks.CheckFinite(every_steps=1)]
    note(lambda: model.fit(rows * np.inf, rows, batch_size=4, verbose=0, callbacks=callbacks))
    return messages


def test_checks_of_workers_that_go_on_by_themselves():
    results = run(2, 1, check_workers_that_go_on_by_themselves, update="async")
    for rank, (differ, in_a_step, finite) in enumerate(results):
        assert 'Variables: ["sequential/only/bias"]; replicas: [1]' in differ, differ
        assert "called in a step, where workers of asynchronous updates hold different weights" in in_a_step, in_a_step
        assert f"replica {rank} (rank {rank})" in finite and "one that names an earlier step" in finite, finite


def train_with_an_update_that_fails(update):
    """The error of a worker, where the third update fails on the servers."""
    import keras
    import tensorflow as tf

    @keras.saving.register_keras_serializable("test_servers")
    class FailsLater(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            is_early = tf.debugging.assert_less(self.iterations.value, np.int64(2), "it fails here")
            with tf.control_dependencies([is_early]):
                super().update_step(tf.identity(gradient), variable, learning_rate)

    try:
        strategy = tfring.ParameterServerStrategy(update, roles=roles(1))
    except (SystemExit, tfring.errors.PeerLostError):
        return "a server"
    harness._strategies.add(strategy)
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(FailsLater(0.1), "mse")
    try:
        model.fit(np.ones([60, 2]), np.ones([60, 1]), batch_size=4, verbose=0)
    except tfring.errors.TfringError as error:
        return str(error)
    finally:
        strategy.close()


@pytest.mark.parametrize("update", ["sync", "async"])
def test_an_update_that_fails_ends_all_workers(update):
    *of_workers, _ = workers(3).run(train_with_an_update_that_fails, update, timeout=100)
    assert all("it fails here" in error for error in of_workers), of_workers


def train_float16_statistics(strategy):
    """Moving statistics and metrics of a float16 model, of 6000 rows whose mean is 20: their product is no float16."""
    import keras

    with strategy.scope():
        normalize = keras.layers.BatchNormalization(momentum=0.0, dtype="float16")
        model = keras.Sequential([keras.Input((2,)), normalize, keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.0), "mse")
    model.fit(np.full([6000, 2], 20.0), np.ones([6000, 1]), batch_size=1000, verbose=0)
    return normalize.moving_mean.numpy().tolist()


def test_statistics_of_float16_are_weighed_in_float64():
    assert run(2, 1, train_float16_statistics, update="async") == [[20.0, 20.0]] * 2


def train_with_broken_links(strategy, folder):
    """Breaks the link to a server after each kind of request, before the reply; compares with one process."""
    import keras

    small_pieces()
    client, seen, broken = strategy.ring.updater.client, {}, []

    def break_after(server, connection):
        send = connection.send

        def breaking(head, arrays=()):
            send(head, arrays)
            count = seen[server, head["op"]] = seen.get((server, head["op"]), 0) + 1
            if head["op"] not in ("join", "leave") and count in (1, 4):
                broken.append((server, head["op"]))
                connection._communicator.abort(tfring.errors.PeerLostError("broken by the test"))

        connection.send = breaking
        return connection

    joined_again = client._joined_again
    client._joined_again = lambda server, deadline: break_after(server, joined_again(server, deadline))
    for server, connection in enumerate(client._connections):
        break_after(server, connection)
    x, y = skewed_ids(vocabulary=VOCABULARY)
    options = {"batch_size": 10, "epochs": 2, "shuffle": False, "verbose": 0}
    with strategy.scope():
        model = embedding_model(keras.optimizers.Adam(0.01))
    alone = embedding_model(keras.optimizers.Adam(0.01), "one_hot")
    alone.set_weights(model.get_weights())
    model.fit(x, y, **options)
    alone.fit(x, y, **options)
    return broken, relative_error(model.get_weights(), alone.get_weights())


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_request_is_answered_once_though_the_link_breaks_before_the_reply(tmp_path, replicas):
    settings = {"update": "async", "snapshot_dir": str(tmp_path), "snapshot_seconds": 1000.0}
    if replicas == 2:
        settings = {"update": "async", "replicas": 2}
    [(broken, error)] = run(1, 2, train_with_broken_links, str(tmp_path), **settings)
    assert {(0, "push"), (1, "push"), (0, "claim"), (0, "meet"), (0, "create"), (1, "rows")} <= set(broken), broken
    assert error < 1e-5


@pytest.mark.parametrize(("options", "says"), [
    ({"snapshot_dir": "/tmp"}, '`snapshot_dir` cannot be used with update="sync"'),
    ({"update": "async", "snapshot_dir": "/tmp", "snapshot_seconds": 0}, "`snapshot_seconds` is 0, not a"),
    ({"replicas": 3}, "`replicas` is 3, not 1 or 2"),
    ({"replicas": True}, "`replicas` is True, not 1 or 2"),
    ({"update": "async", "replicas": 2, "snapshot_dir": "/tmp"}, "leave out one of them"),
    ({"replicas": 2, "roles": ONE_SERVER}, "`replicas=2` needs two servers or more"),
])
def test_settings_of_what_survives_are_checked(options, says):
    with pytest.raises(ValueError, match=says):
        tfring.ParameterServerStrategy(**options)
