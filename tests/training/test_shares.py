"""Shares of datasets: cut from batches of any size, fingerprinted, and made once for all calls."""

import contextlib
import pathlib

import numpy as np
import pytest
from harness import strategy, workers

BATCH = 16


def ragged_rows(n):
    import tensorflow as tf

    return tf.data.Dataset.range(n).map(tf.range).filter(lambda row: True)


def with_one_row_at_least(num_rows):
    """Returns shapes, values and static shapes of components of a batch of `num_rows` rows, by kind."""
    import tensorflow as tf

    from tfring.data.rows import pad_empty_batch

    def ones(*shape, dtype=tf.float32):
        return tf.cast(tf.ones(shape), dtype)

    components = {
        "rows": (ones(num_rows, 3), [None, 3]),
        "bfloat16": (ones(num_rows, 2, dtype=tf.bfloat16), [None, 2]),
        "bool": (ones(num_rows, dtype=tf.bool), [None]),
        "inner size": (ones(num_rows, num_rows, 2), [None, None, 2]),
        "no inner size": (ones(num_rows, 0), [None, 0]),
        "no rank": (ones(num_rows, 4), None),
        "text": (tf.fill([num_rows], "a"), [None]),
        "constant": (tf.range(5), [None]),
        "static constant": (tf.range(6), [6]),
        "scalar": (tf.constant(7), []),
    }

    @tf.function(input_signature=[{name: tf.TensorSpec(shape, c.dtype) for name, (c, shape) in components.items()}])
    def filled(batch):
        batch = dict(batch)
        batch["ragged"] = tf.RaggedTensor.from_row_lengths(tf.zeros([0]), tf.zeros_like(batch["text"], tf.int64))
        batch["sparse"] = tf.sparse.from_dense(batch["rows"])
        batch, has_rows = pad_empty_batch(batch)
        static.update({name: component.shape for name, component in batch.items()})
        batch["sparse"] = tf.sparse.to_dense(batch["sparse"])
        return batch, has_rows

    static: dict = {}
    batch, has_rows = filled({name: component for name, (component, _) in components.items()})
    static = {name: None if shape.rank is None else shape.as_list() for name, shape in static.items()}
    batch["ragged"] = batch["ragged"].to_list()
    return bool(has_rows), {name: np.array(value).tolist() for name, value in batch.items()}, static


def test_a_batch_without_rows_gets_one_of_zeros():
    [(has_rows, batch, static)] = workers(1).run(with_one_row_at_least, 0)
    constants = {"constant": [0, 1, 2, 3, 4], "static constant": [0, 1, 2, 3, 4, 5], "scalar": 7}
    assert not has_rows
    assert batch == {
        "rows": [[0.0, 0.0, 0.0]],
        "bfloat16": [[0.0, 0.0]],
        "bool": [False],
        "inner size": [[[0.0, 0.0]]],
        "no inner size": [[]],
        "no rank": [[0.0, 0.0, 0.0, 0.0]],
        "text": [b""],
        "ragged": [[]],
        "sparse": [[0.0, 0.0, 0.0]],
        **constants,
    }
    assert static["rows"] == static["sparse"] == [None, 3]
    assert (static["inner size"], static["no rank"], static["static constant"]) == ([None, None, 2], None, [6])
    [(has_rows, batch, same)] = workers(1).run(with_one_row_at_least, 2)
    assert has_rows
    assert same == static
    assert batch == {
        "rows": [[1.0] * 3] * 2,
        "bfloat16": [[1.0] * 2] * 2,
        "bool": [True] * 2,
        "inner size": [[[1.0] * 2] * 2] * 2,
        "no inner size": [[]] * 2,
        "no rank": [[1.0] * 4] * 2,
        "text": [b"a"] * 2,
        "ragged": [[]] * 2,
        "sparse": [[1.0] * 3] * 2,
        **constants,
    }


def made_of_rows():
    """Returns by name what makes a dataset of batches of `n` rows, whatever steps it has."""
    import tensorflow as tf

    def rows(n):
        return tf.data.Dataset.range(n)

    def slices(n):
        return tf.data.Dataset.from_tensor_slices(np.arange(n))

    def texts(n):
        return tf.data.Dataset.from_tensor_slices(["a" * i for i in range(n)])

    def zipped(*datasets):
        return tf.data.Dataset.zip(datasets).map(lambda a, b: 100 * tf.cast(a, tf.int32) + b)

    def shuffled(n):
        return rows(n).shuffle(5, seed=3).map(lambda x: -x).batch(4).shuffle(3, seed=2)

    return {
        "no map": lambda n: rows(n).batch(4),
        "map": lambda n: rows(n).map(lambda x: 2 * x).batch(5),
        "map, batches of 8": lambda n: rows(n).map(lambda x: 2 * x).batch(8),
        "repeated": lambda n: rows(n).map(lambda x: 2 * x).batch(4, drop_remainder=True).repeat(2),
        "rows of many shapes": lambda n: ragged_rows(n).map(tf.size).batch(4),
        "batches of many shapes": lambda n: ragged_rows(n).map(tf.size).batch(4).map(lambda b: b - tf.reduce_min(b)),
        "map of batches": lambda n: rows(n).batch(4).map(lambda batch: batch - tf.reduce_min(batch)),
        "shuffled": shuffled,
        "slices": lambda n: slices(n).batch(4),
        "slices, repeated": lambda n: slices(n).repeat(2).batch(4, drop_remainder=True).prefetch(1),
        "slices, shuffled": lambda n: slices(n).shuffle(5, seed=3).skip(1).batch(4).shuffle(3, seed=2).take(2),
        "mapped slices": lambda n: texts(n).map(tf.strings.length).batch(5).prefetch(2),
        "mapped slices, shuffled": lambda n: texts(n).map(tf.strings.length).shuffle(5, 3).repeat(2).batch(4, True),
        "mapped slices, batches": lambda n: texts(n).shuffle(4, seed=1).batch(8).map(tf.strings.length),
        "mapped slices, all": lambda n: texts(n).map(tf.strings.length).batch(4).map(lambda b: b - tf.reduce_min(b)),
        "zipped slices": lambda n: zipped(slices(n), texts(n).map(tf.strings.length, 2)).shuffle(5, seed=3).batch(4),
        "zipped slices of a dict": lambda n: tf.data.Dataset.zip({"b": slices(n + 2), "a": (texts(n), slices(n))})
        .map(lambda row: tf.cast(row["b"], tf.int32) - tf.strings.length(row["a"][0])).batch(4),
        "enumerated": lambda n: texts(n).map(tf.strings.length).enumerate(7).map(
            lambda i, x: tf.cast(i, tf.int32) * x).batch(5),
    }


def cut(name, sizes, worlds):
    """Returns for each size and number of workers and replicas the batches, and what all shares of each hold."""
    from tfring.data import shares
    from tfring.data.plan import plan_of

    make, results = made_of_rows()[name], []
    for n in sizes:
        for world_size, replicas in worlds:
            batches = [np.array(batch).tolist() for batch in make(n).as_numpy_iterator()]
            rows, prints = [[] for _ in batches], [set() for _ in batches]
            for rank in range(world_size):
                by_number = "slices" in name
                drawn = shares.worker_dataset(make(n), rank, replicas, world_size, compare=True, by_number=by_number)
                assert bool(plan_of(make(n)).arrays) == ("slices" in name)
                assert isinstance(drawn.cut, shares.GatherRows) == name.startswith("slices"), name
                drawn = list(drawn.shares())
                assert len(drawn) == len(batches), (name, n, world_size, replicas)
                for number, share in enumerate(drawn):
                    prints[number].add(int(share.fingerprint))
                    for part, count in zip(share.parts, share.rows, strict=True):
                        assert len(part) >= 1
                        rows[number] += np.array(part)[: int(count)].tolist()
            results.append((n, world_size, replicas, batches, rows, prints))
    return results


# In a full batch of 8 rows the middle of 5 workers has one row, in one of 7 rows it may have two.
@pytest.mark.parametrize(
    ("name", "sizes", "worlds"),
    [
        ("no map", [1, 11], [(2, 1), (3, 2)]),
        ("map", [1, 4, 13], [(2, 1), (3, 1), (7, 2)]),
        ("map, batches of 8", [7, 15], [(5, 1), (5, 2)]),
        ("repeated", [11], [(2, 1), (3, 2)]),
        ("rows of many shapes", [11], [(3, 1)]),
        ("batches of many shapes", [11], [(2, 1)]),
        ("map of batches", [11], [(2, 1)]),
        ("shuffled", [13], [(2, 2)]),
        ("slices", [1, 11], [(2, 1), (3, 2)]),
        ("slices, repeated", [11], [(2, 1), (3, 1)]),
        ("slices, shuffled", [2, 13], [(3, 2)]),
        ("mapped slices", [1, 13], [(2, 1), (7, 2)]),
        ("mapped slices, shuffled", [11], [(2, 1), (3, 1)]),
        ("mapped slices, batches", [15], [(5, 1)]),
        ("mapped slices, all", [11], [(2, 1)]),
        ("zipped slices", [2, 11], [(3, 1)]),
        ("zipped slices of a dict", [11], [(2, 1)]),
        ("enumerated", [13], [(2, 1)]),
    ],
)
def test_shares_of_all_workers_are_the_batch(name, sizes, worlds):
    [results] = workers(1).run(cut, name, sizes, worlds)
    for n, world_size, replicas, batches, rows, prints in results:
        case = f"{n} rows, {world_size} workers of {replicas}"
        assert rows == batches, case
        assert all(len(of_batch) == 1 and 0 not in of_batch for of_batch in prints), case


def rows_drawn(world_size):
    """Returns for each worker and dataset which rows its maps see."""
    import tensorflow as tf

    from tfring.data import shares

    def seeing(rows):
        def see(x):
            rows.append(int(x))
            return x

        return lambda x: tf.ensure_shape(tf.numpy_function(see, [x], tf.int64), [])

    def drawn(dataset, rank):
        return shares.worker_dataset(dataset, rank, 1, world_size, compare=True, by_number=True).dataset

    found = []
    for rank in range(world_size):
        slices, (own, zipped) = tf.data.Dataset.from_tensor_slices(np.arange(60)), ([], [])
        list(drawn(slices.map(seeing(own), 2).shuffle(60, seed=1).batch(12), rank))
        list(drawn(tf.data.Dataset.zip((slices.map(seeing(zipped)), slices)).shuffle(60, seed=1).batch(12), rank))
        found.append((sorted(own), sorted(zipped)))
    return found


def test_a_worker_maps_its_own_rows_alone():
    [found] = workers(1).run(rows_drawn, 3)
    for kind in range(2):
        assert sorted(row for rank in found for row in rank[kind]) == list(range(60))
        assert [len(rank[kind]) for rank in found] == [20, 20, 20]


def shares_of_zeros():
    """Returns the rows and the fingerprint of an element, and of zeros of its shapes in place of one."""
    import tensorflow as tf

    from tfring.data import shares
    from tfring.data.arrays import rows_of_tensors
    from tfring.data.rows import ReplicaRange

    place, arrays = ReplicaRange(0, 2, 4), (tf.range(40.0),)
    cuts = {
        "numbers": (shares.GatherRows(place, (False,), rows_of_tensors), (tf.zeros([8], tf.int64), arrays)),
        "rows": (shares.Cut(place, (False,), True, None, False, True), tf.zeros([8, 3])),
    }
    found = {}
    for name, (cut, element) in cuts.items():
        shares_of = [tf.function(lambda drawn, c=cut, e=element: c(e, drawn))(tf.constant(d)) for d in (True, False)]
        found[name] = [([int(count) for count in each.rows], int(each.fingerprint)) for each in shares_of]
    return found


def test_zeros_at_the_end_of_the_data_have_no_rows():
    [found] = workers(1).run(shares_of_zeros)
    for (rows, fingerprint), at_the_end in found.values():
        assert rows == [2, 2] and fingerprint != 0
        assert at_the_end == ([0, 0], 0)


def fingerprints(batches):
    import tensorflow as tf

    from tfring.data import fingerprint

    return [int(fingerprint.of_batch(tf.constant(batch))) for batch in batches]


def test_fingerprints_of_long_strings_see_every_byte():
    long = bytes(range(256)) * 120  # as long as a small picture

    def changed(at):
        return long[:at] + bytes([long[at] ^ 1]) + long[at + 1 :]

    size = len(long)
    seen = [changed(at) for at in (0, 1023, 1024, 1024 + 64, size // 2 + 512, size - 1024, size - 1)]
    others = [[b"a", row] for row in (*seen, long[:-1], long + b"b")]
    others += [[long, b"a"], [b"b", long], [b"a", long, b""], [b"", b"a" + long]]
    [[as_it_is, *found]] = workers(1).run(fingerprints, [[b"a", long], *others])
    assert as_it_is not in found
    assert len(set(found)) == len(found)


def test_fingerprints_of_short_strings_see_all_of_them_but_folders():
    here, there = [b"/data/a/1.jpg", b"text"], [b"gs://bucket/of/another/a/1.jpg", b"text"]
    others = [[b"/data/b/1.jpg", b"text"], [b"/data/a/2.jpg", b"text"], [b"/data/a/1.jpg", b"test"], here[::-1]]
    [[first, second, *found]] = workers(1).run(fingerprints, [here, there, *others])
    assert first == second
    assert first not in found and len(set(found)) == len(found)


def test_fingerprints_of_numbers_see_whole_rows_and_parts_of_long_ones():
    short, long = np.zeros([3, 4096], "float32"), np.zeros([3, 64, 1024], "uint8")

    def changed(rows, *at):
        rows = rows.copy()
        rows[at] = 1
        return rows

    short_ones = [short, *(changed(short, row, at) for row in range(3) for at in (0, 1, 777, 4095))]
    [found] = workers(1).run(fingerprints, short_ones)
    assert len(set(found)) == len(found)
    ends = [(2, 0, 0), (1, 3, 1023), (1, 60, 0), (0, 63, 1023)]  # the first and the last 4096 bytes
    some = [(1, 30, at) for at in range(8)]  # of so many in a row at least one
    [[as_it_is, *found]] = workers(1).run(fingerprints, [long, *(changed(long, *at) for at in ends + some)])
    assert as_it_is not in found[: len(ends)] and len(set(found[: len(ends)])) == len(ends)
    assert any(one != as_it_is for one in found[len(ends) :])
    assert found.count(as_it_is) > 0  # the price, docs/data.md


@contextlib.contextmanager
def counting():
    """Counts the functions that are traced and the iterators that are made."""
    import tensorflow as tf

    counts = {"functions": 0, "iterators": 0}
    graph, dataset = tf.__internal__.FuncGraph, tf.data.Dataset
    init, iterate = graph.__init__, dataset.__iter__

    def counted_init(self, *args, **kwargs):
        counts["functions"] += 1
        init(self, *args, **kwargs)

    def counted_iterate(self):
        counts["iterators"] += 1
        return iterate(self)

    graph.__init__, dataset.__iter__ = counted_init, counted_iterate
    try:
        yield counts
    finally:
        graph.__init__, dataset.__iter__ = init, iterate


def second_calls(folder):
    """Returns what second calls trace and make, by name; of arrays beside those of Keras alone."""
    import keras
    import tensorflow as tf

    ring = strategy()
    x = np.random.default_rng(0).normal(size=(40, 4)).astype("float32")

    def model():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    with ring.scope():
        ours = model()
    alone = model()

    def slices():
        return tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(BATCH)

    def doubled(x, y):
        return 2 * x, y

    def mapped():
        return tf.data.Dataset.from_tensor_slices((x, x[:, :1])).map(doubled).batch(BATCH)

    def zipped():
        return tf.data.Dataset.zip(*map(tf.data.Dataset.from_tensor_slices, (x, x[:, :1]))).map(doubled).batch(BATCH)

    def records():
        path = pathlib.Path(folder, str(ring.rank), "data", "rows")  # ranks compare the last two names
        path.parent.mkdir(parents=True)
        with tf.io.TFRecordWriter(str(path)) as writer:
            for row in x:
                writer.write(row.tobytes())
        rows = tf.data.TFRecordDataset(str(path)).repeat().take(len(x))  # so that their number is known
        rows = rows.map(lambda row: tf.ensure_shape(tf.io.decode_raw(row, "float32"), [4]))
        return rows.map(lambda row: (row, row[:1])).batch(BATCH)

    kept = {"slices": slices(), "mapped": mapped(), "zipped": zipped(), "records": records()}
    calls = {
        "fit": lambda model, data: model.fit(data, verbose=0),
        "two epochs": lambda model, data: model.fit(data, epochs=2, verbose=0),
        "validation": lambda model, data: model.fit(data, validation_data=data, verbose=0),
        "evaluate": lambda model, data: model.evaluate(data, verbose=0),
        "predict": lambda model, data: model.predict(data, verbose=0),
    }
    counts = {}
    for kind, data in kept.items():
        for name, call in calls.items():
            call(ours, data)
            with counting() as count:
                call(ours, data)
            counts[f"{name} of {kind}"] = count
    for name, call in calls.items():
        data = slices()  # made again, of the same structure
        with counting() as count:
            call(ours, data)
        counts[f"{name} of slices made again"] = count
    of_arrays = {}
    for name, model in {"ours": ours, "alone": alone}.items():
        model.fit(x, x[:, :1], batch_size=BATCH, shuffle=False, verbose=0)
        with counting() as count:
            model.fit(x, x[:, :1], batch_size=BATCH, shuffle=False, verbose=0)
        of_arrays[name] = count["functions"]
    return counts, of_arrays


def test_second_calls_trace_nothing_and_make_one_iterator_a_pass(tmp_path):
    for counts, of_arrays in workers(2).run(second_calls, str(tmp_path)):
        for name, count in counts.items():
            passes = 2 if name.startswith(("two epochs", "validation")) else 1
            assert count == {"functions": 0, "iterators": passes}, name
        assert of_arrays["ours"] == 0 < of_arrays["alone"]
