"""Embeddings: N workers equal the dense one-hot model in one process, for every optimizer and shape of gradient."""

import re

import numpy as np
import pytest
from common import all_optimizers, assert_equal, devices, is_reference, relative_error, skewed_ids
from harness import strategy, workers

import tfring

VOCABULARY, DIM = 30, 8
ENGINES = [(2, "ring"), (3, "ring"), pytest.param(4, "ring", marks=pytest.mark.long), (3, "tensorflow")]


def known_optimizers():
    """Names of the optimizer classes Keras exports, so that a new one is not forgotten."""
    import keras

    base = {"Optimizer", "LossScaleOptimizer", "OptimizerMap"}
    classes = [getattr(keras.optimizers, name) for name in dir(keras.optimizers)]
    return {c.__name__ for c in classes if isinstance(c, type)} - base


def test_no_optimizer_is_forgotten():
    assert known_optimizers() == {name.split()[0] for name in all_optimizers()}


def embedding_model(optimizer, ids_per_row, lookup="embedding"):
    """Mean of looked-up rows, then a dense layer; `lookup="one_hot"` is the same model with a dense table."""
    import keras

    ids = keras.Input((ids_per_row,), dtype="int32")
    if lookup == "embedding":
        rows = keras.layers.Embedding(VOCABULARY, DIM, name="embedding_table")(ids)
    else:
        hot = keras.ops.one_hot(ids, VOCABULARY)
        rows = keras.layers.Dense(DIM, use_bias=False, name="embedding_table")(hot)
    hidden = keras.layers.Dense(4, activation="tanh")(keras.ops.mean(rows, axis=1))
    model = keras.Model(ids, keras.layers.Dense(1)(hidden))
    model.compile(optimizer(), "mse")
    return model


def train_optimizers(names, dense):
    """Trains the same steps under the strategy and as the one-hot model alone, for each optimizer."""
    import keras

    ring = strategy(sparse=tfring.SparseOptions(dense=dense), **devices())
    x, y = skewed_ids()
    cases = {}
    for name in names:
        optimizer = all_optimizers()[name]
        keras.utils.set_random_seed(1)  # some make much of a gradient that is almost zero
        with ring.scope():
            model = embedding_model(optimizer, x.shape[1])
        first = model.get_weights()[0]
        want = None
        if is_reference(ring):
            alone = embedding_model(optimizer, x.shape[1], "one_hot")
            alone.set_weights(model.get_weights())
            # Keras alone builds it while tracing, where ScheduleFreeAdamW's copy of the weights is lost.
            alone.optimizer.build(alone.trainable_variables)
            alone.fit(x, y, batch_size=20, epochs=2, shuffle=False, verbose=0)
            want = alone.get_weights()
        model.fit(x, y, batch_size=20, epochs=2, shuffle=False, verbose=0)
        untouched = np.array_equal(model.get_weights()[0][0], first[0])
        decays = "AdamW" in name or "Lamb" in name or "Ftrl" in name or "Muon" in name
        assert untouched or decays, f"{name}: id 0 never occurs, yet its row changed"
        cases[name] = {"bits": b"".join(w.tobytes() for w in model.get_weights())}
        if want is not None:
            cases[name]["weights"] = relative_error(model.get_weights(), want)
    return cases


@pytest.mark.parametrize(("n", "communication"), ENGINES)
def test_every_optimizer(n, communication):
    # They see the sum, not how it came about: one with and one without state are enough elsewhere.
    names = list(all_optimizers()) if (n, communication) == (2, "ring") else ["SGD", "Adam"]
    results = workers(n, communication).run(train_optimizers, names, "never", timeout=400)
    assert_equal(results, tolerance=1e-5)


@pytest.mark.parametrize(("n", "logical_cpus"), [(1, 1), (2, 2)])
def test_alone_and_with_two_replicas_a_worker(n, logical_cpus):
    results = workers(n, logical_cpus=logical_cpus).run(train_optimizers, ["SGD", "RMSprop", "Adam"], "never")
    assert_equal(results)


# -- the reported case, and the shapes that broke others --------------------------------------------------------------


def reduce_gradients(per_step, options, dtype, rank):
    """Reduces `per_step[step][rank]` = ids, through the optimizer's way, step by step in ONE traced function.

    Returns the dense sum of what came back for each step; the ids of all ranks must come back once each, and no other.
    """
    import tensorflow as tf

    ring = strategy(sparse=tfring.SparseOptions(**options))
    traces = []

    @tf.function(input_signature=[tf.TensorSpec([None, DIM], dtype), tf.TensorSpec([None], tf.int64)])
    def reduce(values, ids):
        traces.append(1)
        slices = tf.IndexedSlices(values, ids, tf.constant([VOCABULARY, DIM], tf.int64))
        [summed] = ring.ring.gradient_ops.sum_over_workers([slices], name="test", value_names=["table"])
        if isinstance(summed, tf.IndexedSlices):
            return tf.math.unsorted_segment_sum(summed.values, summed.indices, VOCABULARY), summed.indices
        return summed, None

    results = []
    for ids_by_rank in per_step:
        ids = np.asarray(ids_by_rank[rank], "int64")
        total, reduced_ids = reduce(tf.constant(rows_of(ids, rank), dtype), ids)
        if reduced_ids is not None:
            assert sorted(reduced_ids.numpy()) == sorted({int(i) for rank_ids in ids_by_rank for i in rank_ids})
        results.append(total.numpy().astype("float64"))
    assert len(traces) == 1
    return results


def rows_of(ids, rank):
    generator = np.random.default_rng([len(ids), rank])
    return np.round(generator.normal(size=(len(ids), DIM)) * 4) / 4  # quarters: sums are exact in every dtype


def expected(ids_by_rank):
    table = np.zeros((VOCABULARY, DIM))
    for rank, ids in enumerate(ids_by_rank):
        np.add.at(table, np.asarray(ids, int), rows_of(ids, rank))
    return table


def batch_with_unique_ids(num_unique, batch=1024, seed=0):
    generator = np.random.default_rng(seed)
    chosen = 1 + generator.permutation(VOCABULARY - 1)[:num_unique]
    return np.concatenate([chosen, generator.choice(chosen, batch - num_unique)])


OPTIONS = [
    {"dense": "never", "batch_size": 1024},
    {"dense": "never", "batch_size": 1024, "ids_per_example": 3},
    {"dense": "never"},
    {"dense": "never", "reduction": "owner"},
    {"dense": "auto", "batch_size": 1024},
    {"dense": "always"},
]


def check_steps(n, communication, per_step, options, dtype="float32"):
    calls = [per_step, options, dtype]
    for got in workers(n, communication).run(reduce_gradients, *calls, per_rank=list(range(n))):
        for step, table in enumerate(got):
            np.testing.assert_array_equal(table, expected(per_step[step]), err_msg=f"step {step}")


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("communication", ["ring", "tensorflow"])
def test_inconsistent_output_shapes(communication, options):
    """tensorflow #34250: table [30, 8], batch 1024, 22, 20, 16 unique ids on one rank and others on the next."""
    counts = [(22, 17), (20, 25), (16, 16), (22, 1)]
    per_step = [
        [batch_with_unique_ids(c, seed=10 * step + rank) for rank, c in enumerate(row)]
        for step, row in enumerate(counts)
    ]
    check_steps(2, communication, per_step, options)


@pytest.mark.parametrize("communication", ["ring", "tensorflow"])
def test_ranks_without_rows_and_a_short_last_batch(communication):
    per_step = [
        [batch_with_unique_ids(20), [], [5, 5, 5]],
        [[], [], []],
        [[], [29], []],
        [batch_with_unique_ids(9, batch=100), batch_with_unique_ids(3, batch=100, seed=1), [0]],
    ]
    for options in ({"dense": "never", "batch_size": 1024}, {"dense": "never"}):
        check_steps(3, communication, per_step, options)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_dtypes(dtype):
    per_step = [[batch_with_unique_ids(12, 64), batch_with_unique_ids(7, 64, 1)]]
    check_steps(2, "ring", per_step, {"dense": "never"}, dtype)


def alone(dtype):
    """Returns the sums of one worker without a ring: native ones, and those where nothing is compiled."""
    import pathlib
    from unittest import mock

    import tensorflow as tf

    from tfring.ring import library
    from tfring.ring.collectives import LocalCollectives

    tables = [[7, 3, 7, -2, 3, 7], [], [5]]
    values = [tf.cast(tf.reshape(tf.range(2.0 * len(ids)), [-1, 2]) + 0.1, dtype) for ids in tables]
    indices = [tf.constant(ids, tf.int64) for ids in tables]
    for active in (None, tf.constant(True), tf.constant(False)):
        results = []
        for place in (library.OPS, pathlib.Path("missing")):
            with mock.patch.object(library, "OPS", place):
                pairs, numbers = LocalCollectives().sum_rows(values, indices, name="test", active=active)
            results.append([tf.cast(v, "float64").numpy().tolist() for v, _ in pairs])
            results[-1] += [ids.numpy().tolist() for _, ids in pairs] + [numbers.numpy().tolist()]
        assert results[0] == results[1]
        want = [[7, 3, -2], [], [5], [3, 0, 1]] if active is None or active else [[], [], [], [0, 0, 0]]
        assert results[0][3:] == want


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_alone_with_and_without_the_ring(dtype):
    workers(1).run(alone, dtype)


def operations(num_tables):
    """Counts the operations of the traced gradients of this number of tables, and the collectives that ran."""
    import tensorflow as tf

    ring = strategy(sparse=tfring.SparseOptions(dense="never"))

    @tf.function
    def reduce(values, ids):
        slices = [tf.IndexedSlices(values, ids, tf.constant([VOCABULARY, DIM])) for _ in range(num_tables)]
        return [each.values for each in ring.ring.gradient_ops.sum_over_workers(slices, name="test")]

    arguments = tf.ones([6, DIM]), tf.range(6)
    graph = reduce.get_concrete_function(*arguments).graph
    communicator = ring.ring.gradients.communicator
    before = sum(communicator.statistics()["collectives"].values())
    reduce(*arguments)
    kinds = [op.type for op in graph.get_operations() if op.type not in ("Const", "Placeholder", "Identity")]
    return kinds, sum(communicator.statistics()["collectives"].values()) - before


def test_all_tables_of_a_step_are_one_operation():
    for kinds, collectives in workers(2).run(operations, 9):
        assert kinds.count("TfringAllReduceRows") == 1 and collectives == 1
        assert len(kinds) <= 4, kinds  # and what takes the numbers of rows, which nobody asked for


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reduction": "all"}, "`reduction` is 'all', not auto, gather or owner"),
        ({"dense": "maybe"}, '`dense` is \'maybe\', not "auto", "never" or "always"'),
        ({"batch_size": 0}, "`batch_size` is 0, not an integer of at least 1, or None"),
        ({"batch_size": 2.5}, "`batch_size` is 2.5, not an integer of at least 1, or None"),
        ({"ids_per_example": 0}, "`ids_per_example` is 0, not an integer of at least 1"),
        ({"ids_per_example": None}, "`ids_per_example` is None, not an integer of at least 1"),
    ],
    ids=str,
)
def test_options_are_checked(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        tfring.SparseOptions(**options)


def test_options_take_numbers_of_numpy():
    assert tfring.SparseOptions(np.int64(8), np.int32(3)).capacity(None) == 24


def one_table_twice_and_one_frozen():
    import keras

    ring = strategy(sparse=tfring.SparseOptions(dense="never"))
    x, y = skewed_ids()

    def make(lookup):
        ids = keras.Input((x.shape[1],), dtype="int32")
        if lookup == "embedding":
            table = keras.layers.Embedding(VOCABULARY, DIM, name="table")
            frozen = keras.layers.Embedding(VOCABULARY, DIM, name="frozen", trainable=False)
        else:
            table = keras.layers.Dense(DIM, use_bias=False, name="table")
            frozen = keras.layers.Dense(DIM, use_bias=False, name="frozen", trainable=False)

        def look(layer, ids):
            return layer(ids if lookup == "embedding" else keras.ops.one_hot(ids, VOCABULARY))

        first, second = look(table, ids), look(table, (ids + 3) % VOCABULARY)
        rows = keras.ops.concatenate([first, second, look(frozen, ids)], axis=-1)
        model = keras.Model(ids, keras.layers.Dense(1)(keras.ops.mean(rows, axis=1)))
        model.compile(keras.optimizers.Adam(0.01, global_clipnorm=0.5), "mse")
        return model

    keras.utils.set_random_seed(1)
    with ring.scope():
        model = make("embedding")
    alone = make("one_hot")
    alone.set_weights(model.get_weights())
    for m in (model, alone):
        m.fit(x, y, batch_size=20, epochs=2, shuffle=False, verbose=0)
    return {
        "twice": {
            "weights": relative_error(model.get_weights(), alone.get_weights()),
            "bits": b"".join(w.tobytes() for w in model.get_weights()),
        }
    }


def test_one_table_looked_up_twice_and_one_frozen():
    assert_equal(workers(2).run(one_table_twice_and_one_frozen), tolerance=1e-5)


def reduced_types(num_table_rows):
    """Types in which four ids of a table come back where "auto" decides."""
    import tensorflow as tf

    ring = strategy(sparse=tfring.SparseOptions(batch_size=4))
    slices = tf.IndexedSlices(tf.ones([4, DIM]), tf.range(4), tf.constant([num_table_rows, DIM]))
    [summed] = ring.ring.gradient_ops.sum_over_workers([slices], name="test")
    return "sparse" if isinstance(summed, tf.IndexedSlices) else "dense"


def test_small_tables_go_dense():
    assert workers(2).run(reduced_types, 4) == ["dense"] * 2
    assert workers(2).run(reduced_types, 10_000) == ["sparse"] * 2


def inactive(dense, rank):
    """Rank 1 has no rows: what it looked up all the same, and its NaN, do not count."""
    import tensorflow as tf

    ring = strategy(sparse=tfring.SparseOptions(batch_size=4, dense=dense))
    values = tf.fill([2, DIM], float("nan") if rank == 1 else 1.0)
    slices = tf.IndexedSlices(values, tf.constant([rank, 5]), tf.constant([VOCABULARY, DIM]))
    active = tf.constant(rank != 1)
    [summed] = ring.ring.gradient_ops.sum_over_workers([slices], name="test", active=active)
    return tf.convert_to_tensor(summed).numpy()


@pytest.mark.parametrize("dense", ["never", "always"])
@pytest.mark.parametrize("communication", ["ring", "tensorflow"])
def test_a_rank_that_is_not_active_adds_no_rows(communication, dense):
    want = np.zeros([VOCABULARY, DIM])
    want[[0, 2, 5]] = [[1.0], [1.0], [2.0]]
    for got in workers(3, communication).run(inactive, dense, per_rank=[0, 1, 2]):
        np.testing.assert_array_equal(got, want)


def too_many_rows():
    import tensorflow as tf

    ring = strategy(sparse=tfring.SparseOptions(batch_size=4, dense="never"))
    slices = tf.IndexedSlices(tf.ones([6, DIM]), tf.range(6), tf.constant([VOCABULARY, DIM]))
    try:
        ring.ring.gradient_ops.sum_over_workers([slices], name="test", value_names=["user_table"])
    except tf.errors.InvalidArgumentError as error:
        return str(error)
    raise AssertionError("no error")


def test_more_rows_than_capacity_is_an_error_that_says_what_to_do():
    for message in workers(2).run(too_many_rows):
        for part in ("user_table", "capacity of 4", "batch_size=4", "ids_per_example=1", "SparseOptions("):
            assert part in message, message
