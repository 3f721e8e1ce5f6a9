"""One step late: each step applies the gradients of the step before, which are exchanged while it computes."""

import pathlib

import harness
import numpy as np
import pytest
from common import relative_error, skewed_ids, skewed_rows
from harness import workers
from test_delayed import EPSILON, assert_ranks_equal, bits, dense_model, embedding_model

import tfring
from tfring.errors import ConfigurationError

VOCABULARY, BATCH = 90, 20
ROWS = 4 * BATCH + 2  # of three workers one has none of the last batch


def optimizers():
    import keras

    o = keras.optimizers
    decay = keras.optimizers.schedules.ExponentialDecay(0.05, 3, 0.8)
    return {
        "sgd": lambda: o.SGD(0.05),
        "momentum": lambda: o.SGD(decay, momentum=0.9, nesterov=True),
        "adam": lambda: o.Adam(0.01, epsilon=EPSILON),
        "clipped": lambda: o.AdamW(0.01, weight_decay=0.2, global_clipnorm=0.05, epsilon=EPSILON),
        "clipnorm": lambda: o.SGD(0.05, momentum=0.9, clipnorm=0.02),
    }


def train(cases, late, lookup="embedding", sparse="never", epochs=2, **options):
    """The weights, history and number of updates of each case under one strategy."""
    import keras

    synchronization = None if late is None else tfring.OneStepLate(**late)
    strategy = harness.strategy(synchronization=synchronization, sparse=tfring.SparseOptions(dense=sparse))
    x, y = skewed_ids(ROWS, vocabulary=VOCABULARY)
    results = {}
    for name in cases:
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = embedding_model(optimizers()[name](), lookup, **options)
        history = model.fit(x, y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0).history
        updates = int(model.optimizer.iterations.numpy())
        results[name] = {"weights": model.get_weights(), "history": history, "updates": updates}
    strategy.close()
    return results


def simulate(n, cases, late, epochs=2):
    """One process: gradients of each worker's rows by a tape, NumPy's mean of them, Keras' optimizer a step late."""
    import keras
    import tensorflow as tf

    x, y = skewed_ids(ROWS, vocabulary=VOCABULARY)
    limit = late.get("clip_local_norm")
    results = {}
    for name in cases:
        keras.utils.set_random_seed(1)
        weights = embedding_model("sgd").get_weights()
        model = embedding_model(optimizers()[name](), "one_hot")
        model.set_weights(weights)
        variables = model.trainable_variables
        model.optimizer.build(variables)

        def gradient(xs, ys, model=model, variables=variables):
            total = [np.zeros(v.shape) for v in variables]
            for i in range(n):
                mine = slice(i * len(xs) // n, (i + 1) * len(xs) // n)
                if not len(xs[mine]):
                    continue
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(tf.square(model(xs[mine]) - ys[mine]))
                own = [np.float64(g) for g in tape.gradient(loss, [v.value for v in variables])]
                norm = np.sqrt(sum(np.square(g).sum() for g in own))
                scale = 1 if limit is None else min(1, limit / norm)
                total = [t + g * scale * len(xs[mine]) / len(xs) for t, g in zip(total, own, strict=True)]
            return [tf.constant(t, tf.float32) for t in total]

        held, num_updates = None, 0
        for _ in range(epochs):
            for begin in range(0, ROWS, BATCH):
                new = gradient(x[begin : begin + BATCH], y[begin : begin + BATCH])
                if held is None and num_updates < late.get("warmup_steps", 0):
                    held, new = new, None
                if held is not None:
                    model.optimizer.apply(held, variables)
                    num_updates += 1
                held = new
            if held is not None:
                model.optimizer.apply(held, variables)
                num_updates += 1
            held = None
        results[name] = {"weights": model.get_weights(), "updates": num_updates}
    return results


EVERY = ["sgd", "momentum", "adam", "clipped", "clipnorm"]
CASES = [
    (2, EVERY, {}, "never"),
    (3, ["momentum", "clipnorm"], {"warmup_steps": 3}, "never"),
    (3, ["adam", "clipped"], {"clip_local_norm": 0.1}, "always"),
    pytest.param(
        4, ["momentum", "clipped"], {"warmup_steps": 7, "clip_local_norm": 0.3}, "never", marks=pytest.mark.long
    ),
]


@pytest.mark.parametrize(("n", "cases", "late", "sparse"), CASES)
def test_it_equals_a_simulation(n, cases, late, sparse):
    results = workers(n).run(train, cases, late, "embedding", sparse, timeout=400)
    assert_ranks_equal(results)
    [want] = workers(1).run(simulate, n, cases, late, timeout=400)
    for name in cases:
        assert relative_error(results[0][name]["weights"], want[name]["weights"]) <= 1e-5, name
        assert results[0][name]["updates"] == want[name]["updates"] == 2 * 5
    if not late:  # and it is not the ring
        [ring] = workers(1).run(train, ["sgd"], None)
        assert relative_error(results[0]["sgd"]["weights"], ring["sgd"]["weights"]) > 1e-3


def test_a_warm_up_that_does_not_end_is_the_ring():
    names = ["momentum", "clipped"]
    late = workers(3).run(train, names, {"warmup_steps": 1000})
    [alone] = workers(1).run(train, names, None)
    for name in names:
        assert relative_error(late[0][name]["weights"], alone[name]["weights"]) <= 1e-5, name


def test_ways_to_run_steps_are_the_same():
    plain = workers(2).run(train, ["adam"], {"warmup_steps": 2})[0]
    for options in ({"steps_per_execution": 2}, {"run_eagerly": True}):
        for found in workers(2).run(train_with, options):
            assert relative_error(found["adam"]["weights"], plain["adam"]["weights"]) <= 1e-5, options


def train_with(options):
    return train(["adam"], {"warmup_steps": 2}, **options)


def test_one_worker():
    names = ["adam", "clipnorm"]
    [found] = workers(1).run(train, names, {"warmup_steps": 2})
    [want] = workers(1).run(simulate, 1, names, {"warmup_steps": 2})
    for name in names:
        assert relative_error(found[name]["weights"], want[name]["weights"]) <= 1e-5, name


def wide(late, compression):
    """Weights of a model whose gradients are not small, or of one with a large table; and the bytes of a step."""
    import keras

    found = {}
    for name in ("dense", "table"):
        strategy = harness.strategy(
            synchronization=tfring.OneStepLate() if late else None,
            compression=compression,
            sparse=tfring.SparseOptions(dense="never"),
        )
        keras.utils.set_random_seed(1)
        with strategy.scope():
            if name == "dense":
                x, y = skewed_rows(ROWS, num_features=128)
                layers = [keras.Input((128,)), keras.layers.Dense(256, activation="tanh"), keras.layers.Dense(1)]
            else:
                x, y = skewed_ids(ROWS, vocabulary=VOCABULARY)
                layers = [keras.Input((3,), dtype="int32"), keras.layers.Embedding(20_000, 8), keras.layers.Flatten()]
                layers.append(keras.layers.Dense(1))
            model = keras.Sequential(layers)
            model.compile(keras.optimizers.SGD(0.001, momentum=0.9), "mse")
        start = np.concatenate([w.ravel() for w in model.get_weights()])
        model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
        moved = np.concatenate([w.ravel() for w in model.get_weights()]) - start
        found[name] = moved, strategy.extended.gradients.bytes_sent() / 10
        strategy.close()
    return found


def test_compression_and_rows_of_tables():
    ring, plain, compressed = (
        workers(2).run(wide, *arguments)[0] for arguments in ((False, None), (True, None), (True, "bfloat16"))
    )
    for name in ("dense", "table"):
        assert plain[name][1] < 1.05 * ring[name][1]  # no more than the ring sends
    assert plain["table"][1] < 20_000 * 8 * 4 / 20
    assert compressed["dense"][1] < 0.55 * plain["dense"][1]
    error = np.abs(compressed["dense"][0] - plain["dense"][0]).max() / np.abs(plain["dense"][0]).max()
    assert 2**-8 / 100 < error < 4 * 2**-8


# -- the exchange runs behind the computation ----------------------------------------------------------------------


def exchanges_in_forward(late, warmup_steps=0):
    """Of each step, whether gradients were sent while a layer in front of all weights waited for that."""
    import time

    import keras
    import tensorflow as tf

    strategy = harness.strategy(synchronization=tfring.OneStepLate(warmup_steps=warmup_steps) if late else None)
    sent, seen = [0], []

    def wait(x):
        num_exchanges = len(seen) - warmup_steps  # so many have come before, or were not hidden
        limit = time.monotonic() + (20 if late and num_exchanges > 0 else 0.3)
        while strategy.extended.gradients.bytes_sent() == sent[0] and time.monotonic() < limit:
            time.sleep(0.002)
        seen.append(strategy.extended.gradients.bytes_sent() > sent[0])
        return x

    class Waits(keras.layers.Layer):
        def call(self, inputs):
            waited = tf.numpy_function(wait, [inputs], tf.float32)
            waited.set_shape(inputs.shape)
            return tf.stop_gradient(waited)

    class Counts(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            sent[0] = strategy.extended.gradients.bytes_sent()

    x, y = skewed_rows(6 * 4, num_features=6)
    with strategy.scope():  # what waits until the loop has read its weights waits for the layer
        layers = [keras.layers.Reshape((2, 3)), keras.layers.SimpleRNN(3), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((6,)), Waits(), *layers])
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
    model.fit(x, y, batch_size=4, verbose=0, callbacks=[Counts()], shuffle=False)
    strategy.close()
    return seen


def test_the_exchange_runs_beside_the_forward_pass():
    for seen in workers(2).run(exchanges_in_forward, True):
        assert seen == [False, True, True, True, True, True]
    for seen in workers(2).run(exchanges_in_forward, True, 2):
        assert seen == [False, False, False, True, True, True]
    for seen in workers(2).run(exchanges_in_forward, False):
        assert seen == [False] * 6


# -- where something is outstanding ----------------------------------------------------------------------------------


def read_early(folder):
    """What each way of reading weights between two steps finds."""
    import keras

    strategy = harness.strategy(synchronization=tfring.OneStepLate())
    folder = pathlib.Path(folder)
    x, y = skewed_rows(ROWS)
    with strategy.scope():
        keras.utils.set_random_seed(1)
        model = dense_model(keras.optimizers.SGD(0.01, momentum=0.9))
    rank, n = strategy.rank, strategy.world_size
    num_steps = 0
    found = {}

    def train():
        nonlocal num_steps
        for begin in range(0, 2 * BATCH, BATCH):
            model.train_on_batch(x[begin : begin + BATCH][rank::n], y[begin : begin + BATCH][rank::n])
        assert int(model.optimizer.iterations.numpy()) == num_steps + 1  # and one is outstanding
        num_steps += 2

    def check(name):
        strategy.assert_equal(model.variables)
        assert int(model.optimizer.iterations.numpy()) == num_steps, name
        found[name] = bits(model)

    ways = {
        "synchronize": lambda: strategy.synchronize(model),
        "evaluate": lambda: model.evaluate(x, y, batch_size=BATCH, verbose=0),
        "predict": lambda: model.predict(x, verbose=0),
        "test_on_batch": lambda: model.test_on_batch(x[:BATCH], y[:BATCH]),
        "save": lambda: tfring.save(model, folder / "all.keras"),
        "save_weights": lambda: model.save_weights(folder / f"{rank}.weights.h5"),
    }
    for name, way in ways.items():
        train()
        way()
        check(name)
    before = strategy.bytes_sent()
    strategy.synchronize(model)  # nothing is outstanding
    assert strategy.bytes_sent() == before
    loaded = keras.models.load_model(folder / "all.keras")  # in one process, of a plain optimizer
    assert len(loaded.optimizer.variables) == len(model.optimizer.variables)
    loaded.load_weights(folder / f"{rank}.weights.h5")
    assert bits(loaded) == bits(model)

    class Stops(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1 and rank == n - 1:
                self.model.stop_training = True

    model.fit(x, y, batch_size=BATCH, verbose=0, epochs=3, callbacks=[Stops()], shuffle=False)
    num_steps += 2
    check("stopped")
    return found


def test_what_is_outstanding_is_applied_before_weights_are_read(tmp_path):
    first, *others = workers(3).run(read_early, str(tmp_path))
    for other in others:
        assert other == first
    assert len(set(first.values())) == len(first)  # training went on in between


def save_on_one_rank(folder):
    import keras

    strategy = harness.strategy(synchronization=tfring.OneStepLate())
    x, y = skewed_rows(ROWS)
    with strategy.scope():
        model = dense_model("sgd")

    class Saves(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1 and strategy.is_chief:
                self.model.save_weights(pathlib.Path(folder, "alone.weights.h5"))

    try:
        model.fit(x, y, batch_size=BATCH, verbose=0, shuffle=False, callbacks=[Saves()])
    except tfring.errors.MismatchError as error:
        return str(error)
    return None


def test_one_rank_that_saves_between_two_steps_is_told(tmp_path):
    for said in workers(2).run(save_on_one_rank, str(tmp_path), timeout=60):
        assert "steps of held gradients" in said and "status" in said, said


def interrupted(folder, stop_at):
    """Two epochs with a Backup between steps; the first try ends behind a step."""
    import keras

    class Stops(keras.callbacks.Callback):
        seen = 0

        def on_train_batch_end(self, batch, logs=None):
            self.seen += 1
            if self.seen == stop_at:
                raise KeyboardInterrupt

    strategy = harness.strategy(synchronization=tfring.OneStepLate(warmup_steps=2))
    x, y = skewed_rows(ROWS)
    for stops in (True, False) if stop_at else (False,):
        with strategy.scope():
            keras.utils.set_random_seed(1)
            model = dense_model("adam")
        callbacks = [tfring.callbacks.Backup(folder, every_steps=3), *([Stops()] if stops else [])]
        try:
            model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
        except KeyboardInterrupt:
            assert stops
    return bits(model)


def test_a_backup_is_complete(tmp_path):
    whole = workers(2).run(interrupted, str(tmp_path / "whole"), None)
    parts = workers(2).run(interrupted, str(tmp_path / "parts"), 8)
    assert whole == parts and whole[0] == whole[1]


# -- what cannot be done is refused --------------------------------------------------------------------------------


def refuse(case):
    import keras

    o = keras.optimizers

    class Own(o.SGD):
        def apply(self, *args, **kwargs):
            return super().apply(*args, **kwargs)

    class Alternating(keras.Model):
        def __init__(self):
            super().__init__()
            self.layers_of_parts = [keras.layers.Dense(1), keras.layers.Dense(1)]

        def call(self, inputs):
            return self.layers_of_parts[1](self.layers_of_parts[0](inputs))

        def train_step(self, data):
            import tensorflow as tf

            x, y = data
            for part in self.layers_of_parts:
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(tf.square(self(x) - y))
                weights = part.trainable_variables
                self.optimizer.apply(tape.gradient(loss, weights), weights)
            return {"loss": loss}

    def compiled(optimizer="sgd", model=dense_model, **options):
        strategy = harness.strategy(synchronization=tfring.OneStepLate())
        x, y = skewed_rows(8)
        with strategy.scope():
            made = model(optimizer, **options)
        made.fit(x, y, batch_size=4, verbose=0)

    def alternating(optimizer):
        model = Alternating()
        model.build((None, 4))
        model.compile(optimizer)
        model.optimizer.build(model.trainable_variables)
        return model

    def own_loop():
        import tensorflow as tf

        strategy = harness.strategy(synchronization=tfring.OneStepLate())
        with strategy.scope():
            optimizer, variable = o.SGD(0.1), keras.Variable([1.0])
        strategy.run(lambda: optimizer.apply([tf.constant([1.0])], [variable]))

    def of_strategy(**options):
        harness.strategy(synchronization=tfring.OneStepLate(), **options)

    cases = {
        "warmup_steps": lambda: tfring.OneStepLate(warmup_steps=-1),
        "clip_local_norm": lambda: tfring.OneStepLate(clip_local_norm=0),
        "mesh": lambda: of_strategy(mesh=tfring.Mesh(model=2)),
        "shard_optimizer": lambda: of_strategy(shard_optimizer=True),
        "tensorflow": lambda: tfring.RingStrategy(synchronization=tfring.OneStepLate(), communication="tensorflow"),
        "error_feedback": lambda: of_strategy(compression="bfloat16", error_feedback=True),
        "jit_compile": lambda: compiled(jit_compile=True),
        "ema": lambda: compiled(o.SGD(use_ema=True)),
        "accumulation": lambda: compiled(o.SGD(gradient_accumulation_steps=2)),
        "loss scale": lambda: compiled(o.LossScaleOptimizer(o.SGD())),
        "own apply": lambda: compiled(Own()),
        "parts of weights": lambda: compiled(model=alternating),
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
    "warmup_steps": "`warmup_steps` is a whole number",
    "clip_local_norm": "`clip_local_norm` is a norm above 0",
    "mesh": "with mesh=",
    "shard_optimizer": "with shard_optimizer=True",
    "tensorflow": 'with communication="tensorflow"',
    "error_feedback": "synchronization=OneStepLate(",
    "jit_compile": "Received: jit_compile=True",
    "ema": "use_ema=True",
    "accumulation": "gradient_accumulation_steps=2",
    "loss scale": "an optimizer around others",
    "own apply": "apply of its own",
    "parts of weights": "gradients of 2 of 2 weights",
    "own loop": "a loop of your own",
}


def refuse_all():
    return {case: refuse(case) for case in refuse(None)}


def test_what_it_cannot_do_is_refused_by_name():
    for said in workers(2).run(refuse_all):
        assert said.keys() == REFUSED.keys()
        for case, words in REFUSED.items():
            assert said[case] is not None and words in said[case], (case, said[case])


def other_warm_up(warmup_steps):
    strategy = harness.strategy(synchronization=tfring.OneStepLate(warmup_steps=warmup_steps))
    x, y = skewed_rows(ROWS)
    with strategy.scope():
        model = dense_model("sgd")
    try:
        model.fit(x, y, verbose=0)
    except tfring.errors.MismatchError as error:
        return str(error)
    return None


def test_ranks_with_other_settings_are_told():
    for said in workers(2).run(other_warm_up, per_rank=[4, 8]):
        assert "warmup_steps of OneStepLate" in said and "4 on rank 0, 8 on rank 1" in said
