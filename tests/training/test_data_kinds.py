"""Own rows, generators, random rows, seeds, constants, arrays that differ: what ranks agree on, and what not."""

import contextlib
import pathlib
import tempfile

import numpy as np
import pytest
from common import assert_equal, devices, skewed_rows, train_both
from harness import strategy, workers
from test_data import BATCH, ROWS, array, recorder
from test_data_pipelines import records

from tfring.errors import MismatchError


def own_rows(policy, lengths):
    """Each rank's own rows, or with FILE all ranks' files: the rows seen, steps, and the loss."""
    import keras
    import tensorflow as tf

    ring = strategy(**devices())
    rank = ring.cluster.rank
    model, seen = recorder(ring)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = getattr(tf.data.experimental.AutoShardPolicy, policy)
    steps = []
    count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda step, logs: steps.append(step))
    with tempfile.TemporaryDirectory() as folder:
        if policy == "FILE":
            paths = records(pathlib.Path(folder))
            data = tf.data.TFRecordDataset(paths)
            data = data.map(lambda r: (tf.reshape(tf.io.decode_raw(r, tf.float32)[:1], [1]),) * 2)
        else:
            mine = array(100 * rank, lengths[rank])
            data = tf.data.Dataset.from_tensor_slices((mine, mine))
            if policy == "HINT":
                mine = array(0, sum(lengths))
                data = tf.data.Dataset.from_tensor_slices((mine, mine)).shard(tf.data.experimental.SHARD_HINT, rank)
        data = data.batch(BATCH).with_options(options)
        model.fit(data, epochs=2, verbose=0, callbacks=[count])
        evaluated = model.evaluate(data, verbose=0)
    return seen, len(steps), evaluated, [w.tobytes() for w in model.get_weights()]


@pytest.mark.parametrize(("n", "logical_cpus", "lengths"), [
    (2, 1, [40, 40]), pytest.param(3, 1, [45, 20, 1], marks=pytest.mark.oldest), (2, 2, [50, 31]), (2, 1, [25, 0]),
])  # fmt: skip
def test_own_rows_are_all_seen(n, logical_cpus, lengths):
    results = workers(n, logical_cpus=logical_cpus).run(own_rows, "OFF", lengths)
    # of a batch of B rows min(B, n) steps
    steps = max(rows // BATCH * n + min(rows % BATCH, n) for rows in lengths)
    for rank, (seen, taken, evaluated, weights) in enumerate(results):
        assert sorted(seen) == sorted([*range(100 * rank, 100 * rank + lengths[rank])] * 2)
        assert taken == 2 * steps
        assert evaluated == results[0][2] and weights == results[0][3]


def test_files_are_shared_out():
    from common import skewed_rows

    results = workers(2).run(own_rows, "FILE", [0, 0])
    want = sorted([int(v) for v in skewed_rows(83)[0][:, 0]] * 2)
    assert sorted(row for seen, *_ in results for row in seen) == want
    assert all(seen for seen, *_ in results)


def endless_generators():
    """As in Keras' examples: both never end, and validation draws a few batches after each epoch."""
    ring = strategy()
    drawn = {"train": 0, "validation": 0}

    def generate(what):
        generator = np.random.default_rng(1)
        while True:
            drawn[what] += 1
            x = generator.normal(size=(10, 1)).astype("float32")
            yield x, x

    model, _ = recorder(ring)
    validation = {"validation_data": generate("validation"), "validation_steps": 2}
    model.fit(generate("train"), steps_per_epoch=3, epochs=4, verbose=0, **validation)
    model.fit(generate("train"), steps_per_epoch=3, epochs=1, verbose=0)
    return drawn, [w.tobytes() for w in model.get_weights()]


def test_generators_are_drawn_from_alike():
    for _ in range(3):
        results = workers(2).run(endless_generators)
        assert results[0] == results[1]
        assert results[0][0]["train"] <= 4 * 3 + 3 + 2 * 2


def unseeded_augmentation():
    """The commonest image pipeline: random numbers without a seed in a parallel map."""
    import keras
    import tensorflow as tf

    ring = strategy(**devices())
    model, seen = recorder(ring)
    x = array()
    flip = keras.layers.RandomFlip()
    auto = tf.data.AUTOTUNE

    def noise(x, y):
        return x + tf.random.uniform([1], 0, 0.5), y + tf.reduce_sum(0 * flip(tf.zeros([4, 4, 1]), training=True))

    data = tf.data.Dataset.from_tensor_slices((x, x)).shuffle(50).map(noise, num_parallel_calls=auto)
    model.fit(data.batch(BATCH).prefetch(auto), epochs=2, verbose=0)
    by_row = list(seen)
    del seen[:]
    data = tf.data.Dataset.from_tensor_slices((x, x)).batch(BATCH).map(
        lambda x, y: (x + tf.random.uniform(tf.shape(x), 0, 0.5), y), num_parallel_calls=auto
    )
    model.fit(data, epochs=2, verbose=0)
    return by_row, seen


@pytest.mark.parametrize(("n", "logical_cpus"), [pytest.param(3, 1, marks=pytest.mark.oldest), (2, 2)])
def test_random_maps_without_a_seed_train(n, logical_cpus):
    results = workers(n, logical_cpus=logical_cpus).run(unseeded_augmentation)
    for kind in range(2):
        assert sorted(row for result in results for row in result[kind]) == sorted([*range(ROWS)] * 2)


def other_rows_in_the_middle(kind):
    """Rank 1 has one other row in the middle of a batch."""
    import tensorflow as tf

    ring = strategy()
    model, _ = recorder(ring)
    x = array()
    x[BATCH // 2] += ring.cluster.rank
    rows = tf.data.Dataset.from_tensor_slices((x, x))
    data = {
        "plain slices": rows.batch(BATCH),
        "slices, mapped batches": rows.batch(BATCH).map(lambda x, y: (2 * x, y)),
        "mapped slices": rows.shuffle(ROWS, seed=1).map(lambda x, y: (x, y)).batch(BATCH),
        "zipped slices": tf.data.Dataset.zip((rows.map(lambda x, y: x), rows.map(lambda x, y: y))).batch(BATCH),
        "rows": rows.filter(lambda x, y: True).batch(BATCH),
        "mapped": rows.filter(lambda x, y: True).map(lambda x, y: (x, y)).batch(BATCH),
        "strings": rows.map(lambda x, y: (tf.strings.as_string(x), y)).filter(lambda x, y: True)
        .map(lambda x, y: (tf.strings.to_number(x), y)).batch(BATCH),
    }[kind]
    try:
        model.fit(data, verbose=0)
    except (tf.errors.InvalidArgumentError, MismatchError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", ["rows", "mapped", "strings"])
def test_one_other_row_is_found(kind):
    for message in workers(2).run(other_rows_in_the_middle, kind):
        assert "The ranks drew different batches" in message


@pytest.mark.parametrize("kind", ["plain slices", "slices, mapped batches", "mapped slices", "zipped slices"])
def test_one_other_row_of_slices_is_found(kind):
    for message in workers(2).run(other_rows_in_the_middle, kind):
        assert message.startswith("model.fit: `array 0 of x` is not the same on every rank"), message
        assert "AutoShardPolicy.OFF" in message


def newcomers():
    """Arrays that are others on each rank: the error of each call, of a model that is not built."""
    import keras

    ring = strategy()

    def new_model():
        with ring.scope():
            model = keras.Sequential([keras.layers.Dense(1)])
            model.compile(loss="mse")
        return model

    same = np.ones((64, 4), "float32")
    other = np.random.default_rng(0).random((64, 4))
    other[-1] += ring.cluster.rank  # and not what an error shows of an array, its beginning
    calls = {
        "x": lambda model: model.fit(other, same, verbose=0),
        "y": lambda model: model.fit(same, y=other[:, :1], verbose=0, validation_split=0.2),
        "rows": lambda model: model.fit(same[: 60 + ring.cluster.rank], same[: 60 + ring.cluster.rank], verbose=0),
        "validation_data[1]": lambda model: model.fit(same, same, validation_data=(same, other), verbose=0),
        "sample_weight": lambda model: model.evaluate(same, same, sample_weight=other[:, 0], verbose=0),
        "x['b']": lambda model: model.predict({"a": same, "b": other}, verbose=0),
        "missing": lambda model: model.fit(same, same, sample_weight=[None, same[:, 0]][ring.cluster.rank], verbose=0),
        "object": lambda model: model.fit(_frame(other), same, verbose=0),
    }
    found = {}
    for what, call in calls.items():
        try:
            call(new_model())
        except Exception as error:
            found[what] = type(error).__name__, str(error)
    new_model().fit(same, same[:, :1], verbose=0)  # the ring is as good as before
    return found


def _frame(values):
    """Stands for pandas' data: an object with `shape` and `iloc` that NumPy can read."""

    class Frame:
        def __init__(self):
            self.shape, self.iloc = values.shape, values

        def __array__(self, dtype=None, copy=None):
            return np.asarray(values, dtype)

    return Frame()


WHAT = {"x": "`x`", "y": "`y`", "rows": "(61, 4)", "validation_data[1]": "`validation_data[1]`",
        "sample_weight": "model.evaluate: `sample_weight`", "x['b']": "`x['b']`", "missing": "nothing on rank 0",
        "object": "`x`"}


@pytest.mark.oldest
def test_arrays_that_differ_are_named_at_the_door():
    for found in workers(2).run(newcomers):
        assert found.keys() == WHAT.keys()
        for what, (kind, text) in found.items():
            assert kind == "MismatchError" and WHAT[what] in text and len(text) < 800, (what, text)
            assert "keras.utils.set_random_seed" in text and "random_state" in text


def seeded():
    """`set_random_seed` at the top of the program: initial weights and the order of rows, here and in one process."""
    import keras
    import tensorflow as tf

    x = array()

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return -(-ROWS // BATCH)

        def __getitem__(self, i):
            return x[i * BATCH : (i + 1) * BATCH], x[i * BATCH : (i + 1) * BATCH]

    def program(make_strategy):
        keras.utils.set_random_seed(1)
        model, seen = recorder(make_strategy())
        model.predict(x[:1], verbose=0)
        weights = [w.tolist() for w in model.get_weights()]
        orders = []
        for arguments in [{"x": x, "y": x}, {"x": x, "y": x, "shuffle": "batch"}, {"x": Batches()}]:
            for _ in range(2):
                del seen[:]
                model.fit(**arguments, batch_size=BATCH if "y" in arguments else None, epochs=2, verbose=0)
                orders.append(list(seen))
        return weights, orders, keras.layers.Dense(1).kernel_initializer.seed

    return program(tf.distribute.get_strategy), program(lambda: strategy(**devices()))


@pytest.mark.parametrize(("n", "logical_cpus"), [pytest.param(2, 1, marks=pytest.mark.oldest), (2, 2)])
def test_a_seed_at_the_top_means_what_it_means_in_one_process(n, logical_cpus):
    results = workers(n, logical_cpus=logical_cpus).run(seeded)
    for alone, ours in results:
        assert alone == results[0][0]
        assert ours[0] == alone[0] and ours[2] == alone[2]  # weights of this model and of the next
    for number, order in enumerate(results[0][0][1]):
        shares = [ours[1][number] for _, ours in results]
        for epoch in range(2):
            rows = order[epoch * ROWS : (epoch + 1) * ROWS]
            assert sorted(rows) == list(range(ROWS))
        assert sorted(row for share in shares for row in share) == sorted(order)
        # A rank's rows are a part of each batch: in the order of one process.
        place = {}
        for position, row in enumerate(order):
            place.setdefault(row, []).append(position // ROWS * 100 + position % ROWS // BATCH)
        for share in shares:
            epochs = share[: len(share) // 2], share[len(share) // 2 :]
            for epoch, rows in enumerate(epochs):
                batches = [place[row][epoch] for row in rows]
                assert batches == sorted(batches), (number, epoch)


def constants():
    import keras
    import tensorflow as tf

    ring = strategy(**devices())
    seen = []

    class Anchored(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, inputs):
            rows, anchors = inputs
            tf.py_function(lambda shape: seen.append(tuple(shape.numpy())), [tf.shape(anchors)], [])
            return self.dense(rows) + tf.reduce_sum(anchors)

    with ring.scope():
        model = Anchored()
        model.compile(loss="mse")
    x = array()
    data = tf.data.Dataset.from_tensor_slices((x, x)).batch(BATCH)
    model.fit(data.map(lambda x, y: ((x, tf.ones([7, 4])), y)), verbose=0)
    with_constant = tf.data.Dataset.zip((data, tf.data.Dataset.from_tensors(tf.ones([7, 4])).repeat()))
    model.fit(with_constant.map(lambda xy, a: ((xy[0], a), xy[1])), verbose=0)
    unknown = data.map(lambda x, y: ((x, tf.ones(tf.random.uniform([1], 5, 6, tf.int32))[:, None]), y))
    try:
        model.fit(unknown, verbose=0)
    except tf.errors.InvalidArgumentError as error:
        return seen, str(error)
    raise AssertionError("no error")


def test_constants_beside_the_rows_stay_whole():
    for n, logical_cpus in ((2, 1), (2, 2)):
        for seen, message in workers(n, logical_cpus=logical_cpus).run(constants):
            assert set(seen) == {(7, 4)}
            assert "The first component of a batch has a different number of rows" in message


def random_batches():
    """A PyDataset whose batches come from NumPy's random numbers, unseeded."""
    import keras
    import tensorflow as tf

    ring = strategy()
    model, _ = recorder(ring)
    np.random.seed(ring.cluster.rank)

    class Batches(keras.utils.PyDataset):
        def __init__(self, seed):
            super().__init__()
            self.seed = seed

        def __len__(self):
            return 3

        def __getitem__(self, index):
            generator = np.random if self.seed is None else np.random.default_rng([self.seed, index])
            rows = generator.normal(size=(10, 1))
            return rows, rows

    model.fit(Batches(1), verbose=0)
    try:
        model.fit(Batches(None), verbose=0)
    except tf.errors.InvalidArgumentError as error:
        return str(error)
    raise AssertionError("no error")


def test_random_batches_of_a_pydataset_are_told_what_to_do():
    for message in workers(2).run(random_batches):
        assert "PyDataset" in message and "np.random.default_rng([seed, index])" in message


def shared_service(address):
    """A stream of the tf.data service that ranks draw from first come, first served: each has rows of its own."""
    import tensorflow as tf

    ring = strategy()
    service = tf.data.experimental.service
    servers = []
    if ring.cluster.is_chief:
        servers = [service.DispatchServer(service.DispatcherConfig(port=0))]
        target = servers[0].target
        servers += [service.WorkerServer(service.WorkerConfig(dispatcher_address=target.split("://")[1]))]
        pathlib.Path(address).write_text(target)
    ring.barrier()
    target = pathlib.Path(address).read_text()
    model, seen = recorder(ring)
    x = array()
    data = tf.data.Dataset.from_tensor_slices((x, x)).batch(BATCH)
    data = data.apply(service.distribute("distributed_epoch", target, job_name="rows"))
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    model.fit(data.with_options(options), verbose=0)
    ring.barrier()
    return seen


def test_the_data_service_gives_each_row_to_one_rank(tmp_path):
    results = workers(2).run(shared_service, str(tmp_path / "address"))
    assert sorted(row for seen in results for row in seen) == list(range(ROWS))


def refused():
    import tensorflow as tf

    import tfring

    ring = strategy()
    model, _ = recorder(ring)
    rows = tf.data.Dataset.from_tensor_slices((array(), array()))
    try:
        model.fit(rows.apply(tfring.data.share(BATCH)).filter(lambda x, y: True), verbose=0)
    except tfring.errors.ConfigurationError as error:
        return str(error)
    raise AssertionError("no error")


def test_share_says_what_may_follow():
    assert "Filter" in workers(2).run(refused)[0]


def make_with_optional_inputs():
    """A model of which an input may be left out, in the manner of keras-hub's and of Keras' `optional=True`."""
    import keras

    class Sum(keras.layers.Layer):
        def call(self, inputs):
            first, second = inputs
            return first if second is None else first + second

        def compute_output_shape(self, shapes):
            return shapes[0]

    inputs = [keras.Input((4,), name="a"), keras.Input((4,), name="b", optional=True)]
    model = keras.Model(inputs, keras.layers.Dense(1)(Sum()(inputs)))
    model.compile(keras.optimizers.SGD(0.01), "mse", metrics=["mae"])
    return model


def inputs_of_none():
    ring = strategy()
    x, y = skewed_rows(41)
    return {
        kind: train_both(ring, make_with_optional_inputs, given, y, evaluate=(given, y), predict=given)
        for kind, given in {"left out": [x, None], "given": [x, x]}.items()
    }


def test_optional_inputs_are_left_out():
    assert_equal(workers(3).run(inputs_of_none))


def predicted_of_sparse():
    """Rows that a model which is not built yet predicts of a sparse tensor."""
    import keras
    import tensorflow as tf

    ring = strategy()
    x = skewed_rows(41)[0] * (np.arange(41)[:, None] % 3 == 0)
    with ring.scope():
        model = keras.Sequential([keras.layers.Dense(1, kernel_initializer="ones")])
    got = model.predict(tf.sparse.from_dense(x), batch_size=20, verbose=0)
    np.testing.assert_allclose(got, x.sum(1, keepdims=True), rtol=1e-5)
    return got.tobytes()


def test_a_model_that_is_not_built_predicts_of_sparse_rows():
    results = workers(3).run(predicted_of_sparse)
    assert results == results[:1] * 3


def make_without_build(kind):
    """A model of one's own, without `build`, that takes sparse or ragged rows and no others."""
    import keras
    import tensorflow as tf

    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1, kernel_initializer="ones")

        def call(self, x):
            if kind == "sparse":
                return self.dense(tf.sparse.sparse_dense_matmul(x, tf.ones([4, 2])))
            return self.dense(tf.reduce_sum(x, 1)[:, None] + tf.cast(x.row_lengths(), tf.float32)[:, None])

    model = Own()
    model.compile(keras.optimizers.SGD(0.001), "mse")
    return model


def fit_without_build(kind):
    import tensorflow as tf

    ring = strategy()
    x, y = skewed_rows(41)
    lengths = [0, 1, 2] * 13 + [1, 1]
    rows = tf.sparse.from_dense(x) if kind == "sparse" else tf.RaggedTensor.from_row_lengths(x[:, 0], lengths)
    data = tf.data.Dataset.from_tensor_slices((rows, y)).batch(20)
    found = []
    for scope in [ring.scope(), contextlib.nullcontext()]:
        with scope:
            model = make_without_build(kind)
        model.fit(data, epochs=2, verbose=0)
        found.append(np.concatenate([w.ravel() for w in model.get_weights()]))
    return found


@pytest.mark.filterwarnings("ignore:.*was made outside the scope")
@pytest.mark.parametrize("kind", ["sparse", "ragged"])
def test_models_without_build_take_sparse_and_ragged_rows(kind):
    for got, alone in workers(2).run(fit_without_build, kind):
        np.testing.assert_allclose(got, alone, rtol=1e-5)
        assert abs(got - np.round(got)).max() > 1e-3  # it trained
