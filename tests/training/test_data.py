"""Every row of the data exactly once an epoch over all workers, whatever kind it is and however it is shuffled."""

import numpy as np
import pytest
from common import devices
from harness import strategy, workers

from tfring import partition, step

ROWS, BATCH = 203, 20


def array(offset=0, rows=ROWS):
    return np.arange(offset, offset + rows, dtype="float32")[:, None]


def recorder(ring, **options):
    """A model that writes down the rows its steps see."""
    import keras
    import tensorflow as tf

    seen = []

    class Recorder(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x):
            return self.dense(tf.cast(x, "float32"))

        def train_step(self, data):
            def write(rows):
                seen.extend(int(r) for r in rows.numpy().ravel())

            running = step.current()  # where a replica has no rows, it computes on one that does not count
            with partition.own():
                tf.py_function(write, [running.drop_if_empty(data[0]) if running else data[0]], [])
            return super().train_step(data)

    with ring.scope():
        model = Recorder()
        model.compile(**{"loss": "mse", "optimizer": "sgd", **options})
    return model, seen


def unseeded(x):
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices((x, x)).shuffle(len(x)).batch(BATCH)


def make_data(kind):
    """`(fit arguments, rows an epoch)` of a kind of data; called after the strategy was made."""
    import keras
    import tensorflow as tf

    x = array()
    slices = tf.data.Dataset.from_tensor_slices((x, x))
    epoch = range(ROWS)
    if kind == "arrays, shuffled":
        return {"x": x, "y": x, "batch_size": BATCH}, epoch
    if kind == "arrays, shuffled by batch":
        return {"x": x, "y": x, "batch_size": BATCH, "shuffle": "batch"}, epoch
    if kind == "arrays, few":
        return {"x": x[:2], "y": x[:2], "batch_size": BATCH}, range(2)
    if kind == "dataset, unseeded shuffle":
        return {"x": unseeded(x)}, epoch
    if kind == "dataset, drop_remainder":
        return {"x": slices.batch(BATCH, drop_remainder=True)}, range(ROWS // BATCH * BATCH)
    if kind == "dataset, interleave":
        files = tf.data.Dataset.range(7).interleave(
            lambda i: tf.data.Dataset.range(i * 29, (i + 1) * 29).map(lambda r: (tf.cast(r, tf.float32)[None],) * 2),
            cycle_length=3,
        )
        return {"x": files.shuffle(50).batch(BATCH)}, epoch
    if kind == "dataset, repeated":
        return {"x": slices.batch(BATCH).repeat(), "steps_per_epoch": 11}, epoch
    if kind == "dataset, from_generator":
        spec = tf.TensorSpec([None, 1])

        def batches():
            for begin in range(0, ROWS, BATCH):
                yield x[begin : begin + BATCH], x[begin : begin + BATCH]

        return {"x": tf.data.Dataset.from_generator(batches, output_signature=(spec, spec))}, epoch
    if kind == "generator":
        def generate():
            for begin in range(0, 2 * ROWS, BATCH):
                rows = np.arange(begin, min(begin + BATCH, 2 * ROWS), dtype="float32")[:, None] % ROWS
                yield rows, rows

        return {"x": generate(), "epochs": 1}, [*range(ROWS)] * 2
    assert kind in ("PyDataset", "PyDataset, two threads", "PyDataset, two processes")

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return -(-ROWS // BATCH)

        def __getitem__(self, i):
            return x[i * BATCH : (i + 1) * BATCH], x[i * BATCH : (i + 1) * BATCH]

    return {"x": Batches(workers=2 if "two" in kind else 1, use_multiprocessing="processes" in kind)}, epoch


KINDS = [
    "arrays, shuffled",
    "arrays, shuffled by batch",
    "arrays, few",
    "dataset, unseeded shuffle",
    "dataset, drop_remainder",
    "dataset, interleave",
    "dataset, repeated",
    "dataset, from_generator",
    "generator",
    "PyDataset",
    "PyDataset, two threads",
    "PyDataset, two processes",  # forked from one that is in a ring
]


def rows_seen(kinds):
    import tensorflow as tf

    ring = strategy(**devices())
    tf.random.set_seed(ring.cluster.rank)  # a seed of each rank's own does not part what tfring shuffles
    model, _ = recorder(ring)
    arguments, _ = make_data("arrays, shuffled")
    model.fit(**arguments, verbose=0)
    tf.random.set_seed(None)
    results = {}
    model, seen = recorder(ring)
    for kind in kinds:
        arguments, epoch = make_data(kind)
        epochs = arguments.pop("epochs", 2)
        orders = []
        for _ in range(epochs):
            del seen[:]
            model.fit(**arguments, epochs=1, verbose=0)
            orders.append(list(seen))
        results[kind] = orders, list(epoch), bool("shuffle" in kind)
    return results


@pytest.mark.parametrize(("n", "logical_cpus"), [(3, 1), pytest.param(2, 2, marks=pytest.mark.long)])
def test_every_row_once(n, logical_cpus):
    results = workers(n, logical_cpus=logical_cpus).run(rows_seen, KINDS, timeout=300)
    for kind in KINDS:
        for number in range(len(results[0][kind][0])):
            seen = sorted(row for result in results for row in result[kind][0][number])
            assert seen == sorted(results[0][kind][1]), f"{kind}, epoch {number}"
        if kind in ("arrays, shuffled", "dataset, unseeded shuffle"):
            orders = [result[kind][0] for result in results]
            assert orders[0][0] != sorted(orders[0][0]), f"{kind}: not shuffled"
            assert orders[0][0] != orders[0][1], f"{kind}: the same order in both epochs"


def rows_of_three_epochs(kinds):
    ring = strategy()
    results = {}
    model, seen = recorder(ring)
    for kind in kinds:
        del seen[:]
        model.fit(**make_data(kind)[0], epochs=3, verbose=0)
        results[kind] = list(seen)
    return results


@pytest.mark.oldest
def test_every_row_in_each_epoch_of_one_fit():
    kinds = ["arrays, shuffled", "dataset, interleave", "dataset, from_generator", "PyDataset"]  # two of unknown length
    results = workers(2).run(rows_of_three_epochs, kinds)
    for kind in kinds:
        assert sorted(row for result in results for row in result[kind]) == sorted([*range(ROWS)] * 3), kind


def differing_lengths(lengths, rank):
    """Each worker has a dataset of its own, of another length: `distribute_datasets_from_function`."""
    import tensorflow as tf

    ring = strategy()
    model, seen = recorder(ring)
    mine = array(100 * rank, lengths[rank])
    data = ring.distribute_datasets_from_function(
        lambda context: tf.data.Dataset.from_tensor_slices((mine, mine)).batch(10)
    )
    history = model.fit(data, epochs=1, verbose=0).history
    evaluated = model.evaluate(
        ring.distribute_datasets_from_function(
            lambda context: tf.data.Dataset.from_tensor_slices((mine, mine)).batch(10)
        ),
        verbose=0,
    )
    want = model.dense(np.concatenate([array(100 * r, n) for r, n in enumerate(lengths)]))
    exact = float(np.mean((want.numpy() - np.concatenate([array(100 * r, n) for r, n in enumerate(lengths)])) ** 2))
    return seen, history["loss"], evaluated, exact, [w.tobytes() for w in model.get_weights()]


@pytest.mark.parametrize("lengths", [[25, 50, 5], [0, 30, 11]])
def test_workers_that_run_out_early_neither_hang_nor_distort(lengths):
    results = workers(3).run(differing_lengths, lengths, per_rank=[0, 1, 2])
    for rank, (seen, loss, evaluated, exact, weights) in enumerate(results):
        assert seen == list(range(100 * rank, 100 * rank + lengths[rank]))
        assert np.isfinite(loss).all() and loss == results[0][1] and weights == results[0][4]
        assert abs(evaluated - exact) <= 1e-5 * exact


def own_random_numbers():
    """An input pipeline that draws other rows on each rank, unseen by tfring."""
    import tensorflow as tf

    ring = strategy()
    model, _ = recorder(ring)
    order = np.random.default_rng(ring.cluster.rank).permutation(ROWS)
    x = array()[order]
    try:
        model.fit(tf.data.Dataset.from_tensors((x, x)).unbatch().batch(BATCH), verbose=0)
    except tf.errors.InvalidArgumentError as error:
        return str(error)
    raise AssertionError("no error")


def test_ranks_that_draw_other_batches_are_told():
    for message in workers(2).run(own_random_numbers):
        assert "The ranks drew different batches" in message and "AutoShardPolicy.OFF" in message


def predictions(n_rows):
    import keras

    ring = strategy(**devices())
    with ring.scope():
        inputs = keras.Input((1,))
        model = keras.Model(inputs, {"twice": inputs * 2, "pair": keras.layers.Concatenate()([inputs, inputs])})
        model.compile(steps_per_execution=2)
    x = array(rows=n_rows)
    rows = model.predict(x, batch_size=BATCH, verbose=0)
    return bool(np.array_equal(rows["twice"], 2 * x) and np.array_equal(rows["pair"], np.concatenate([x, x], 1)))


@pytest.mark.parametrize("rows", [1, 41, ROWS])
def test_predict_returns_all_rows_in_order(rows):
    assert workers(3).run(predictions, rows) == [True] * 3
    assert workers(2, logical_cpus=2).run(predictions, rows) == [True] * 2


def scalars():
    import tensorflow as tf

    ring = strategy()
    try:
        ring.experimental_distribute_dataset(tf.data.Dataset.range(10))
    except ValueError as error:
        return str(error)
    raise AssertionError("no error")


def test_an_unbatched_dataset_is_refused():
    for message in workers(2).run(scalars):
        assert "dataset.batch(global_batch_size)" in message


def tuning():
    """Returns True if TensorFlow's tuner runs, for a dataset without the option, and for one with it."""
    import tensorflow as tf

    from tfring.data.distribute import distribute_for_keras

    ring = strategy()
    asks = tf.data.Options()
    asks.autotune.enabled = True
    datasets = [tf.data.Dataset.range(8).batch(4), tf.data.Dataset.range(8).batch(4).with_options(asks)]
    ways = [lambda d: distribute_for_keras(ring.ring, d), ring.experimental_distribute_dataset]
    return [[way(d)._cloned_datasets[0].options().autotune.enabled for d in datasets] for way in ways]


@pytest.mark.oldest
def test_epochs_do_not_wait_for_the_tuner_of_tensorflow():
    assert workers(2).run(tuning) == [[[False, True]] * 2] * 2
