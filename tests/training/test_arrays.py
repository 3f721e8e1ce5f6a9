"""Arrays are read where they stand: no copy, the rows of one process, and every value compared over ranks."""

import contextlib
import pathlib
import tempfile

import numpy as np
import pytest
import tensorflow as tf
from harness import strategy, workers

from tfring.errors import MismatchError

ROWS, WIDTH = 2_003, 160  # more than 1 MB, from which on an array is read in place

KINDS = {
    "plain": lambda x: x,
    "float64": lambda x: x.astype("float64"),
    "float16": lambda x: x.astype("float16"),
    "int8": lambda x: (10 * x).astype("int8").repeat(4, 1),
    "view": lambda x: np.concatenate([x[:1], x])[1:],
    "stride": lambda x: x.repeat(2, 0)[::2],
    "columns": lambda x: np.asfortranarray(x),
    "octets": lambda x: np.frombuffer(b"_" + x.tobytes(), np.uint8)[1:].view("float32").reshape(x.shape),
    "big endian": lambda x: x.astype(">f4"),
}


def rows_of(kind):
    x = np.random.default_rng(0).exponential(size=(ROWS, WIDTH)).astype("float32") - 1
    return KINDS[kind](x)


def train(kinds, shuffle):
    """Trains, evaluates and predicts on all ranks, and on rank 0 in plain Keras; batches are ragged."""
    ring = strategy()
    ours = outcome(ring.scope(), kinds, shuffle)
    return ours, outcome(contextlib.nullcontext(), kinds, shuffle) if ring.cluster.rank == 0 else None


def outcome(scope, kinds, shuffle):
    import keras

    keras.utils.set_random_seed(1)
    x = {kind.replace(" ", "_"): rows_of(kind) for kind in kinds}
    for array in x.values():
        array.flags.writeable = False
    y = np.sin(np.arange(ROWS, dtype="float32"))[:, None]
    with scope:
        inputs = {kind: keras.Input(array.shape[1:], name=kind) for kind, array in x.items()}
        outputs = {kind: keras.layers.Dense(1)(keras.layers.Rescaling(0.1)(each)) for kind, each in inputs.items()}
        model = keras.Model(inputs, outputs)
        model.compile(keras.optimizers.Adam(0.01), "mse")
    batch = (ROWS - 1) // 4  # so that a last batch has a row, or a few
    options = {"batch_size": batch, "verbose": 0}
    targets = dict.fromkeys(x, y)
    model.fit(x, targets, sample_weight=dict.fromkeys(x, y[:, 0] + 2), epochs=2, shuffle=shuffle, **options)
    evaluated = model.evaluate(x, targets, **options)
    return [*model.get_weights(), evaluated, *model.predict(x, **options).values()]


def test_kinds_of_arrays():
    compare(2, list(KINDS), False)


@pytest.mark.oldest
@pytest.mark.parametrize(("n", "shuffle"), [(2, True), (3, True), (4, "batch")])
def test_orders_of_rows(n, shuffle):
    compare(n, ["plain"], shuffle)


def compare(n, *arguments):
    results = workers(n).run(train, *arguments)
    for ours, _ in results:
        for one, other in zip(ours, results[0][1], strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("kind", "shuffle"), [*((kind, False) for kind in KINDS), ("plain", True)])
def test_batches_are_those_of_keras(kind, shuffle):
    import keras
    from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

    from tfring._keras import inputs

    keras.utils.set_random_seed(shuffle + 1)
    x = rows_of(kind)
    adapter = ArrayDataAdapter((x, {"small": x[:, :3]}), np.arange(len(x)), batch_size=ROWS // 3, shuffle=shuffle)
    batches = inputs.array_batches(adapter, None)
    for _ in range(2):
        in_pass = [number for indices, _ in batches.next_pass() for number in indices.numpy().tolist() if number >= 0]
        assert in_pass == np.concatenate([y for _, y in adapter.get_tf_dataset()]).tolist()
    for ours, theirs in zip(batches.full(), adapter.get_tf_dataset(), strict=True):
        tf.nest.assert_same_structure(ours, theirs)
        for one, other in zip(tf.nest.flatten(ours), tf.nest.flatten(theirs), strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)


def test_an_order_of_tfrings_own_is_another_in_each_pass():
    from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

    from tfring._keras import inputs

    def passes(seed, shuffle=True):
        x = np.arange(30, dtype="int32")
        adapter = ArrayDataAdapter({"x": x}, batch_size=8, shuffle=shuffle)
        batches = inputs.array_batches(adapter, seed)
        for _ in range(3):
            elements = list(batches.next_pass())
            assert all(arrays["x"].numpy().tolist() == x.tolist() for _, arrays in elements)
            yield np.concatenate([indices.numpy() for indices, _ in elements]).tolist()

    ours = list(passes(1 << 61))
    assert ours == list(passes(1 << 61)) != list(passes(1))
    assert ours[0] != ours[1] != ours[2] != ours[0]
    for of_pass in ours:
        assert sorted(of_pass) == [-1, -1, *range(30)] and of_pass[-2:] == [-1, -1]
    in_order = [*range(30), -1, -1]
    assert list(passes(1, shuffle=False)) == [in_order] * 3


def memory(field):
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(status.partition(f"{field}:")[2].split()[0])


def train_on_much(path):
    """Returns the most memory that a `fit` took beside the array, with one in memory and one in a file."""
    import keras

    with strategy().scope():
        model = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    taken = []
    for large in (np.ones((300_000, WIDTH), "float32"), np.load(path, mmap_mode="r")):
        for x in (large[:20_000], large):  # first what a `fit` takes in any case
            before = memory("RssAnon")
            pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak is that of what follows
            files = memory("RssFile")
            model.fit(x, x[:, :1], batch_size=4_000, verbose=0)
            peak = memory("VmHWM") - max(memory("RssFile"), files)
        taken.append(peak - before)
    return taken


def test_arrays_are_not_copied():
    with tempfile.TemporaryDirectory() as folder:
        path = str(pathlib.Path(folder, "rows.npy"))
        np.save(path, np.ones((300_000, WIDTH), "float32"))
        for in_memory, in_file in workers(2).run(train_on_much, path):
            assert in_memory < 100 << 20, (in_memory, in_file)  # of 192 MB
            assert in_file < 100 << 20, (in_memory, in_file)


def fit_with_one_other_value(rows):
    import keras

    ring = strategy()
    x = np.zeros((rows, 256), "float32")
    x[rows // 2 + 1, 100] = ring.cluster.rank  # in no block of 64 MB that are evenly spread
    with ring.scope():
        model = keras.Sequential([keras.Input((256,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    try:
        model.fit(x, x[:, :1], batch_size=1_000, steps_per_epoch=2, verbose=0)
    except MismatchError as error:
        return str(error)


@pytest.mark.parametrize("rows", [100, 200_000])
def test_one_other_value_is_seen(rows):
    for message in workers(2).run(fit_with_one_other_value, rows):
        assert message.startswith("model.fit: `x` is not the same on every rank"), message
        assert "on rank 0, the same beginning, but other values after it, on rank 1." in message, message


def fit_short_and_long():
    """Returns how many functions of pipelines were traced, after `fit` of some and of other numbers of rows."""
    import keras

    from tfring.data import arrays

    with strategy().scope():
        model = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x = rows_of("plain")
    traced = []
    for rows, batch in ((8, 2), (9, 4), (2_000, 100), (ROWS, 500)):
        model.fit(x[:rows], x[:rows, :1], batch_size=batch, verbose=0)
        model.evaluate(x[:rows], x[:rows, :1], batch_size=batch, verbose=0)
        traced.append(len(arrays._functions))
    return traced


def test_nothing_is_traced_anew_for_other_numbers_of_rows():
    for small, again, large, larger in workers(2).run(fit_short_and_long):
        assert small == again and large == larger, (small, again, large, larger)


def test_rows_around_the_head():
    from tfring.ring import ops

    array = tf.reshape(tf.range(24.0), [4, 2, 3])
    flat = tf.reshape(array, [-1])
    for head in range(25):
        rows = ops.gather_rows(flat[:head], flat[head:], array[:0], tf.constant([3, 0, 1, 1, 2], tf.int64))
        np.testing.assert_array_equal(rows, tf.gather(array, [3, 0, 1, 1, 2]))
    for index in (-1, 4):
        with pytest.raises(tf.errors.InvalidArgumentError, match=f"index {index} is not from 0 to 3, the last row"):
            ops.gather_rows(flat[:2], flat[2:], array[:0], tf.constant([index], tf.int64))
    with pytest.raises(tf.errors.InvalidArgumentError, match="do not make up full rows"):
        ops.gather_rows(flat[:2], flat[3:], array[:0], tf.constant([0], tf.int64))
