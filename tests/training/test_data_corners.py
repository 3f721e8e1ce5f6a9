"""Data at the corners: constants, rows that padding may not be, outputs without rows, random maps, early ends."""

import itertools

import numpy as np
import pytest
from common import assert_equal, history_error, is_reference, relative_error, skewed_rows
from harness import strategy, workers
from test_data import recorder

from tfring.cluster import detect
from tfring.errors import ConfigurationError

ROWS, BATCH = 33, 16  # the last batch has one row


def words():
    return np.array([f"w{i % 5}" for i in range(ROWS)])[:, None]


def regression(body=None, outputs=None):
    """A Dense layer on `[4]` features."""
    import keras

    inputs = keras.Input((4,))
    hidden = (body or (lambda x: x))(inputs)
    model = keras.Model(inputs, outputs(hidden) if outputs else keras.layers.Dense(1, name="out")(hidden))
    model.compile(keras.optimizers.SGD(0.01), "mse", metrics=["mae"])
    return model


def anchored():
    """Features beside anchors, which all rows look at."""
    import keras

    class Anchored(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def build(self, shapes):
            self.dense.build((None, 4))
            self.built = True

        def call(self, inputs):
            number = keras.ops.cast(keras.ops.shape(inputs["anchors"])[0], "float32")
            return self.dense(inputs["image"] + keras.ops.mean(inputs["anchors"], 0)) + number

    model = Anchored()
    model.build({"image": (None, 4), "anchors": (7, 4)})
    model.compile(keras.optimizers.SGD(0.01), "mse", metrics=["mae"])
    return model


def anchored_input():
    """A model of two inputs, of which one is seven anchors."""
    import keras

    class Shifted(keras.layers.Layer):
        def call(self, anchors, x):
            return x + keras.ops.mean(anchors, 0)

    anchors, image = keras.Input(batch_shape=(7, 4), name="anchors"), keras.Input((4,), name="image")
    model = keras.Model([anchors, image], keras.layers.Dense(1)(Shifted()(anchors, image)))
    model.compile(keras.optimizers.SGD(0.01), "mse", metrics=["mae"])
    return model


def of_words(lookup):
    import keras
    import tensorflow as tf

    class Numbers(keras.layers.Layer):
        def call(self, x):
            return tf.strings.to_number(tf.strings.substr(x, 1, 1))

    inputs = keras.Input((1,), dtype="string")
    if lookup:
        x = keras.layers.StringLookup(vocabulary=[f"w{i}" for i in range(5)], num_oov_indices=0)(inputs)
        x = keras.layers.Flatten()(keras.layers.Embedding(5, 3)(x))
    else:
        x = Numbers()(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1, name="out")(x))
    model.compile(keras.optimizers.SGD(0.01), "mse")
    return model


def cases():
    """Returns by name a model, and what makes `(data, more arguments)` of fit, evaluate and predict."""
    import ml_dtypes
    import tensorflow as tf

    x, y = skewed_rows(ROWS)
    rows = tf.data.Dataset.from_tensor_slices((x, y))
    beside = np.linspace(0, 1, 28, dtype="float32").reshape(7, 4)

    def with_anchors(x, y):
        return {"anchors": beside, "image": x}, y

    def batches(last=None):
        for begin in range(0, ROWS, BATCH):
            yield x[begin : begin + BATCH], y[begin : begin + BATCH], last

    strings = tf.data.Dataset.from_tensor_slices((words(), y))
    half = x.astype(ml_dtypes.bfloat16)
    return {
        "anchors": (anchored, lambda: ((rows.batch(BATCH).map(with_anchors),), {})),
        # Keras weighs the mean of losses by its first input, which are the anchors.
        "anchors, drop_remainder": (anchored, lambda: ((rows.batch(BATCH, True).map(with_anchors),), {})),
        "anchors, an input": (
            anchored_input,
            lambda: ((rows.batch(BATCH, True).map(lambda x, y: ((beside, x), y)),), {}),
        ),
        "lookup": (lambda: of_words(True), lambda: ((strings.batch(BATCH),), {})),
        "to_number, mapped": (
            lambda: of_words(False), lambda: ((strings.map(lambda x, y: (x, 2 * y)).batch(BATCH),), {})
        ),
        "generator of None": (regression, lambda: ((batches(),), {})),
        "bfloat16": (regression, lambda: ((half, y), {"batch_size": BATCH})),
    }


def train(names):
    import keras

    ring = strategy()
    results = {}
    for name, (make, data) in cases().items():
        if name not in names:
            continue

        def outcome(model, start, name=name, data=data):
            model.set_weights(start)
            arguments, more = data()
            history = model.fit(*arguments, shuffle=False, verbose=0, **more).history
            arguments, _ = data()
            evaluated = model.evaluate(*arguments, verbose=0, **more)
            arguments, _ = data()
            return model.get_weights(), history, [evaluated], [model.predict(arguments[0], verbose=0, **more)]

        keras.utils.set_random_seed(1)
        with ring.scope():
            model = make()
        start = model.get_weights()
        got = outcome(model, start)
        results[name] = {"bits": b"".join(w.tobytes() for w in got[0])}
        if is_reference(ring):
            want = outcome(make(), start)
            results[name].update(weights=relative_error(got[0], want[0]), history=history_error(got[1], want[1]))
            results[name].update(evaluate=relative_error(got[2], want[2]), predict=relative_error(got[3], want[3]))
    return results


@pytest.mark.parametrize(("n", "names"), [
    (3, ["anchors", "lookup", "generator of None"]),  # cut unevenly
    (2, ["anchors, drop_remainder", "anchors, an input", "to_number, mapped", "bfloat16"]),
])  # fmt: skip
def test_as_one_process(n, names):
    assert_equal(workers(n).run(train, names, timeout=400))


def outputs_of_predict():
    """Returns what `predict` makes of outputs whose first dimension is not that of the rows."""
    import keras
    import tensorflow as tf

    ring = strategy()
    x, _ = skewed_rows(ROWS)
    codes = np.arange(20, dtype="float32").reshape(5, 4)

    class Outputs(keras.Model):
        def call(self, x):
            parts = {"by time": tf.transpose(tf.stack([x, 2 * x, 3 * x], 1), [1, 0, 2]), "codes": tf.constant(codes)}
            parts["patches"] = tf.reshape(x, [-1, 2])
            return {**parts, "rows": x}

    class Mean(keras.Model):
        def call(self, x):
            return {"rows": x, "mean": tf.reduce_mean(x, 0)}

    with ring.scope():
        model, mean = Outputs(), Mean()
        model.compile()
        mean.compile()
    got = model.predict(x, batch_size=11, verbose=0)  # of which ranks have 5 and 6
    dataset = tf.data.Dataset.from_tensor_slices(x).batch(11, drop_remainder=True)
    of_dataset = model.predict(dataset, verbose=0)
    one = model.predict(x[:1], verbose=0)
    found = mean.predict(x, verbose=0)["mean"]
    alone = Outputs()
    alone.compile()
    same = [
        {name: np.array_equal(a[name], b[name]) for name in b}
        for a, b in [
            (got, alone.predict(x, batch_size=11, verbose=0)),
            (of_dataset, alone.predict(dataset, verbose=0)),
            (one, alone.predict(x[:1], verbose=0)),
        ]
    ]
    return same, found, np.mean(x[:32], 0)


@pytest.mark.parametrize("communication", ["ring", "tensorflow"])
def test_outputs_that_are_not_one_a_row(communication):
    for same, found, mean in workers(2, communication).run(outputs_of_predict):
        assert all(all(of.values()) for of in same), same
        np.testing.assert_allclose(found[: len(mean)], mean, rtol=1e-5)


def early_ends():
    """Rank 1 has rows 0 to 24 of 64."""
    import tensorflow as tf

    from tfring.errors import MismatchError

    ring = strategy()
    with ring.scope():
        model = regression()
    x, y = skewed_rows(64)
    count = [64, 24][ring.cluster.rank]
    x, y = x[:count], y[:count]

    def known():
        return tf.data.Dataset.from_tensors((x, y)).unbatch().batch(8)

    def unknown():
        return known().filter(lambda x, y: True)

    def generate():
        for begin in range(0, count, 8):
            yield x[begin : begin + 8], y[begin : begin + 8]

    distribute = ring.experimental_distribute_dataset
    messages = {}
    for name, call in {
        "fit": lambda: model.fit(known(), verbose=0),
        "unknown length": lambda: model.fit(unknown(), verbose=0),
        "evaluate": lambda: model.evaluate(known(), verbose=0),
        "generator": lambda: model.fit(generate(), verbose=0),
        "steps_per_epoch": lambda: model.fit(known(), steps_per_epoch=6, verbose=0),
        "distributed": lambda: model.fit(distribute(known()), verbose=0),
        "distributed, evaluate": lambda: model.evaluate(distribute(unknown()), verbose=0),
        "predict": lambda: model.predict(known(), verbose=0),
        "predict, unknown length": lambda: model.predict(unknown(), verbose=0),
    }.items():
        try:
            call()
            messages[name] = "no error"
        except MismatchError as error:
            messages[name] = str(error)
    x, y = skewed_rows(8)
    model.fit(x, y, verbose=0)  # the ring is as good as before
    return messages


def test_data_that_ends_early_on_one_rank_is_told():
    for messages in workers(2).run(early_ends):
        for name, message in messages.items():
            assert message.startswith("The data of one rank has ended while another still has rows."), (name, message)
            assert "x[rank::n]" in message and "AutoShardPolicy.OFF" in message


def refusals():
    import tensorflow as tf

    ring = strategy()
    with ring.scope():
        model = regression()
    x, y = skewed_rows(96)
    rank, n = ring.cluster.rank, ring.cluster.world_size
    messages = []

    for call in (
        lambda: model.fit(x[rank::n], y[rank::n], verbose=0),
        lambda: model.fit(tf.data.Dataset.from_tensor_slices((x, y)).shard(n, rank).batch(8), verbose=0),
    ):
        try:
            call()
        except Exception as error:
            messages.append(str(error))
    return messages


def test_rows_cut_by_hand_are_refused_by_name():
    for arrays, shard in workers(2).run(refusals):
        assert "tfring slices" in arrays and "x[rank::n]" in arrays
        assert "gives each its share" in shard and "dataset.shard" in shard


def of_labelled_and_unlabelled_rows():
    """Weights, logs and messages of a step whose batches have 8 labelled rows and 24 others."""
    import keras
    import tensorflow as tf

    class Semi(keras.Model):
        def __init__(self):
            super().__init__()
            self.hidden = keras.layers.Dense(5, activation="tanh")
            self.last = keras.layers.Dense(1)

        def call(self, x):
            return self.last(self.hidden(x))

        def train_step(self, data):
            (labelled, y), unlabelled = data
            with tf.GradientTape() as tape:
                both = self(tf.concat([labelled, unlabelled], 0))
                error = tf.reduce_mean((both[: tf.shape(labelled)[0]] - y) ** 2)
                others = self(unlabelled)
                likeness = tf.reduce_mean(tf.matmul(others, self(labelled), transpose_b=True) ** 2)
                loss = error + 0.3 * likeness + 0.1 * tf.math.reduce_std(others)
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": loss, "error": error}

    x, y = skewed_rows(120)
    keras.utils.set_random_seed(2)
    with strategy().scope():
        model = Semi()
        model.compile(keras.optimizers.SGD(0.01))
    labelled = tf.data.Dataset.from_tensor_slices((x[:32], y[:32])).batch(8, drop_remainder=True)
    unlabelled = tf.data.Dataset.from_tensor_slices(x[24:]).batch(24, drop_remainder=True)
    history = model.fit(tf.data.Dataset.zip((labelled, unlabelled)), epochs=2, verbose=0).history
    found = [*model.get_weights(), *map(np.array, history.values())]
    try:
        model.fit(tf.data.Dataset.zip((labelled, unlabelled.unbatch().batch(24))), verbose=0)
        said = "no error"
    except Exception as error:
        said = str(error)
    return found, said


@pytest.mark.parametrize("world_size", [2, 3])
def test_labelled_and_unlabelled_rows(world_size):
    [(one, _)] = workers(1).run(of_labelled_and_unlabelled_rows)
    for several, said in workers(world_size).run(of_labelled_and_unlabelled_rows):
        assert "or a smaller batch" in said, said
        assert relative_error(several, one) < 1e-5


def of_batches_of_a_fixed_size():
    """Returns weights, and predictions, of models that know how many rows a batch has."""
    import keras
    import tensorflow as tf

    ring = strategy()
    x, y = skewed_rows(32)
    rows = tf.data.Dataset.from_tensor_slices((x, y)).batch(8, drop_remainder=True)

    class Noisy(keras.Model):
        def train_step(self, data):
            x, y = data
            return super().train_step((x + tf.reshape(tf.range(x.shape[0] * 4.0), (x.shape[0], 4)), y))

    class Constant(keras.Model):
        def call(self, inputs):
            return super().call(inputs) + tf.range(8.0)[:, None]

    found = []
    for kind in (Noisy, Constant):
        inputs = keras.Input((4,))
        with ring.scope():
            model = kind(inputs, keras.layers.Dense(1, kernel_initializer="ones")(inputs))
            model.compile(keras.optimizers.SGD(1e-4), "mse")
        model.fit(rows, verbose=0)
        found += [*model.get_weights(), model.predict(x, batch_size=8, verbose=0), model.predict(rows, verbose=0)]
    return found


def test_a_number_of_rows_that_is_written_into_the_program_is_that_of_the_batch():
    [one] = workers(1).run(of_batches_of_a_fixed_size)
    for several in workers(3).run(of_batches_of_a_fixed_size):
        for got, wanted in zip(several, one, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


def cached_in_files(folder):
    """Returns what a model sees in each epoch of datasets that are cached in a file, and what is refused."""
    import keras
    import tensorflow as tf

    x = np.arange(40, dtype="float32")[:, None]
    rows = tf.data.Dataset.from_tensor_slices((x, 0 * x)).map(lambda x, y: (x, y))
    rank = detect().rank
    made_before = {name: rows.cache(f"{folder}/{name}").batch(10) for name in ("before", f"own {rank}")}
    ring = strategy()
    with ring.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile(keras.optimizers.SGD(0.0), "mse", metrics=["mae"])
    off = tf.data.Options()
    off.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    datasets = {
        "rows": rows.cache(f"{folder}/rows").batch(10),
        "batches": rows.batch(10).cache(tf.constant(f"{folder}/batches")),
        "own rows": rows.shard(2, rank).cache(f"{folder}/own rows").batch(10).with_options(off),
        "in memory": rows.cache().batch(10).cache(""),
        "snapshot": rows.snapshot(f"{folder}/snapshot").batch(10),
        "own names": made_before[f"own {rank}"],
    }
    seen = {name: model.fit(data, epochs=3, verbose=0).history["mae"] for name, data in datasets.items()}
    messages = []
    for use in (lambda data: model.fit(data, verbose=0), ring.experimental_distribute_dataset):
        with pytest.raises(ConfigurationError) as raised:
            use(made_before["before"])
        messages.append(str(raised.value))
    return seen, messages


def test_each_worker_caches_in_a_file_of_its_own(tmp_path):
    for seen, messages in workers(2).run(cached_in_files, str(tmp_path)):
        for name, means in seen.items():
            assert means == pytest.approx([19.5] * 3), name
        for message in messages:
            assert message.startswith("The file of dataset.cache("), message
            assert "after `tfring.RingStrategy()`" in message
    assert (tmp_path / "rows.0-of-2.index").exists() and (tmp_path / "rows.1-of-2.index").exists()


def one_after_another(names):
    """Trains, validates, predicts and evaluates on one shuffled dataset, as one process does: relative errors."""
    import keras
    import tensorflow as tf

    ring = strategy()
    rows = tf.data.Dataset.from_tensor_slices(skewed_rows(ROWS))
    pipelines = {
        "rows": lambda: rows.shuffle(50, seed=1).batch(8),
        "batches": lambda: rows.batch(8).shuffle(50, seed=1),
        "mapped": lambda: rows.map(lambda x, y: (2 * x, y)).shuffle(50, seed=1).batch(8),
        "unknown length": lambda: rows.filter(lambda x, y: True).shuffle(50, seed=1).batch(8),
    }

    def outcome(model, make, repeated):
        dataset = make().repeat() if repeated else make()
        steps = {"steps": 2} if repeated else {}
        of_fit = {"steps_per_epoch": 3, "validation_steps": 2} if repeated else {}
        history = model.fit(dataset, epochs=2, validation_data=dataset, verbose=0, **of_fit).history
        predicted = model.predict(dataset, verbose=0, **steps)
        evaluated = model.evaluate(dataset, verbose=0, **steps)
        model.fit(dataset, verbose=0, **({"steps_per_epoch": 2} if repeated else {}))
        return history, model.get_weights(), [evaluated], [predicted, model.predict(dataset, verbose=0, **steps)]

    results = {}
    for name, repeated in names:
        make = pipelines[name]
        keras.utils.set_random_seed(1)
        with ring.scope():
            model = regression()
        start = model.get_weights()
        history, weights, *others = outcome(model, make, repeated)
        case = results[f"{name}, {repeated}"] = {"bits": b"".join(w.tobytes() for w in weights)}
        if is_reference(ring):
            alone = regression()
            alone.set_weights(start)
            want = outcome(alone, make, repeated)
            case.update(history=history_error(history, want[0]), weights=relative_error(weights, want[1]))
            case.update(evaluate=relative_error(others[0], want[2]), predict=relative_error(others[1], want[3]))
    return results


def test_shuffled_datasets_go_on_as_in_one_process():
    names = itertools.product(("rows", "batches", "mapped", "unknown length"), (False, True))
    assert_equal(workers(2).run(one_after_another, list(names), timeout=400))


def made_before_the_strategy(make):
    """Returns what `make` returns of datasets whose shuffles TensorFlow makes by itself."""
    from tensorflow.python.ops import gen_dataset_ops

    from tfring._keras import seam

    replaced = gen_dataset_ops.shuffle_dataset_v3
    gen_dataset_ops.shuffle_dataset_v3 = seam.installed["tensorflow.python.ops.gen_dataset_ops.shuffle_dataset_v3"]
    try:
        return make()
    finally:
        gen_dataset_ops.shuffle_dataset_v3 = replaced


def read_before_fit():
    """Reads shuffled datasets before `fit` and between two: relative errors to one process."""
    import keras
    import tensorflow as tf

    ring = strategy()
    rows = tf.data.Dataset.from_tensor_slices(skewed_rows(ROWS))
    pipelines = {
        "rows": lambda: rows.shuffle(50, seed=1).batch(8),
        "mapped": lambda: rows.map(lambda x, y: (2 * x, y)).shuffle(50, seed=1).batch(8),
        "batches": lambda: rows.batch(8).shuffle(50, seed=1),
    }

    def trained(model, dataset):
        keras.layers.Normalization().adapt(dataset.map(lambda x, y: x))
        losses = model.fit(dataset, epochs=2, verbose=0).history["loss"]
        for _ in dataset.take(1):
            pass
        losses += model.fit(dataset.map(lambda x, y: (x, 2 * y)), verbose=0).history["loss"]
        losses += model.fit(dataset, verbose=0).history["loss"]
        return [np.array(losses), *model.get_weights()]

    results = {}
    for name, make in pipelines.items():
        for when, made in (("before", made_before_the_strategy), ("behind", lambda make: make())):
            keras.utils.set_random_seed(1)
            with ring.scope():
                model = regression()
            start = model.get_weights()
            got = trained(model, made(make))
            case = results[f"{name} {when}"] = {"bits": b"".join(w.tobytes() for w in got)}
            if is_reference(ring):
                alone = regression()
                alone.set_weights(start)
                case.update(weights=relative_error(got, trained(alone, made(make))))
    return results


def test_datasets_that_are_read_before_fit():
    assert_equal(workers(2).run(read_before_fit))


def random_pipelines(folder):
    """Returns by name rows 0 to 32, to which maps add random numbers below 0.5, and labels."""
    import tensorflow as tf

    rows = np.arange(ROWS, dtype="float32")[:, None]
    dataset = tf.data.Dataset

    def noise(x, y, seed=None):
        return x + tf.random.uniform([1], 0, 0.5, seed=seed), y

    def mapped(begin=0, end=ROWS, **options):
        return dataset.from_tensor_slices((rows, rows)).skip(begin).take(end - begin).map(noise, **options)

    def views():
        images = dataset.from_tensor_slices(rows).shuffle(50, seed=1)
        return [images.map(lambda x: noise(x, x)[0], num_parallel_calls=2).batch(BATCH) for _ in range(2)]

    return {
        "padded_batch": lambda: mapped().padded_batch(BATCH),
        "filter": lambda: mapped().filter(lambda x, y: y[0] >= 0).batch(BATCH),
        "unbatch": lambda: mapped().batch(4).unbatch().batch(BATCH),
        "cache": lambda: mapped().cache().shuffle(40).batch(BATCH),
        "bucket": lambda: mapped().bucket_by_sequence_length(lambda x, y: tf.shape(x)[0], [3], [BATCH, BATCH]),
        "sample_from_datasets": lambda: dataset.sample_from_datasets([mapped(0, 20), mapped(20)]).batch(BATCH),
        "zip, as in mixup": lambda: dataset.zip((mapped().batch(BATCH), mapped().shuffle(50).batch(BATCH))).map(
            lambda a, b: (0 * b[0] + a[0], a[1])
        ),
        "zip, as in SimSiam": lambda: dataset.zip(tuple(views())),
        "concatenate": lambda: mapped(0, 7).concatenate(mapped(7)).batch(BATCH),
        "enumerate": lambda: mapped().enumerate().map(lambda i, xy: xy).batch(BATCH),
        "snapshot": lambda: mapped().snapshot(f"{folder}/snapshot").batch(BATCH),
        "a seed, in parallel": lambda: dataset.from_tensor_slices((rows, rows)).map(
            lambda x, y: noise(x, y, 5), num_parallel_calls=2
        ).cache().batch(BATCH),
    }


def random_maps():
    import tempfile

    import tensorflow as tf

    ring = strategy()
    model, seen = recorder(ring)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, make in random_pipelines(folder).items():
            del seen[:]
            model.fit(make(), epochs=2, verbose=0)
            results[name] = list(seen)
    rank = ring.cluster.rank
    rows = np.arange(ROWS, dtype="float32")[:, None]
    messages = []
    for shuffled in (
        tf.data.Dataset.from_tensor_slices((rows, rows)).shuffle(50, seed=1 + rank).map(
            lambda x, y: (x + tf.random.uniform([1]), y + tf.random.uniform([1]))
        ).cache().batch(BATCH),
        tf.data.Dataset.from_tensor_slices((rows, rows))
        .map(lambda x, y: (x + tf.random.uniform([1], 0, 40), y)).filter(lambda x, y: x[0] < 40).batch(BATCH),
    ):
        try:
            model.fit(shuffled, verbose=0)
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
    return results, messages


@pytest.mark.parametrize("n", [pytest.param(2, marks=pytest.mark.long), 3])
def test_random_maps_before_anything_train_each_row_once(n):
    results = workers(n).run(random_maps)
    for name in results[0][0]:
        seen = sorted(row for rows, _ in results for row in rows[name])
        assert seen == sorted([*range(ROWS)] * 2), name
    for _, (seeds, chosen) in results:
        assert "is shuffled with different seeds on different ranks" in seeds
        assert "The ranks drew different batches" in chosen
