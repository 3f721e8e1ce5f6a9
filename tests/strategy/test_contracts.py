"""Contracts of `tf.distribute`: TensorFlow's and Keras' own distribution cases which RingStrategy once failed."""

import numpy as np
import pytest
from harness import strategy, workers

import tfring

# Four inter-op threads: iterating a dataset within a function with two devices a worker stands still with two threads,
# under MirroredStrategy as well.
GROUPS = [
    (1, "ring", 2),
    pytest.param((2, "ring", 2), marks=pytest.mark.oldest),
    (3, "ring", 1),
    (2, "tensorflow", 1),
]


def run(group, *functions):
    """Runs the functions one after the other in one task, and gives their results by rank."""
    n, communication, logical_cpus = group
    env = {"TF_NUM_INTEROP_THREADS": "4"} if logical_cpus > 1 else None
    return workers(n, communication, logical_cpus=logical_cpus, env=env).run(_call, functions)


def _call(functions):
    ring = ring_strategy()
    for function in functions:
        function(ring)


def ring_strategy(**kwargs):
    import tensorflow as tf

    cpus = tf.config.get_logical_device_configuration(tf.config.list_physical_devices("CPU")[0])
    return strategy(**kwargs, **({"devices": [f"CPU:{i}" for i in range(len(cpus))]} if cpus else {}))


def replica_id():
    import tensorflow as tf

    return tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.int32)


def of_replicas(ring, value):
    """Returns the values of the replicas of this worker, as NumPy arrays."""
    return [np.asarray(v) for v in ring.experimental_local_results(value)]


def as_value(ring, function):
    """`function(global replica)` on each replica, as a PerReplica (or a tensor)."""
    return ring.experimental_distribute_values_from_function(lambda c: function(c.replica_id_in_sync_group))


# -- reductions -------------------------------------------------------------------------------------------------------

SMALL, LARGE = 30, 5000  # rows of 8 floats: at most 64 KiB, and more


def ids_of(replica, replicas, num_table_rows):
    """Few ids, the last one among them; on the last replica all ids: its own rows would call for a dense sum."""
    return [*range(replica), *(range(num_table_rows) if replica == replicas - 1 else []), num_table_rows - 1]


def rows_of(replica, replicas, num_table_rows):
    """IndexedSlices of ones, of another static length on each replica."""
    import tensorflow as tf

    ids = ids_of(replica, replicas, num_table_rows)
    return tf.IndexedSlices(tf.ones([len(ids), 8]), tf.constant(ids), tf.constant([num_table_rows, 8]))


def table_of(replicas, num_table_rows):
    table = np.zeros([num_table_rows, 8])
    for replica in range(replicas):
        np.add.at(table, ids_of(replica, replicas, num_table_rows), 1)
    return table


def sparse_rows_of_unequal_length(ring):
    import tensorflow as tf

    replicas = ring.num_replicas_in_sync
    for num_table_rows in (SMALL, LARGE):
        want = table_of(replicas, num_table_rows)
        values = as_value(ring, lambda i: rows_of(i, replicas, num_table_rows))  # noqa: B023
        reduced = ring.extended.reduce_to("SUM", values, values)
        many = ring.extended.batch_reduce_to("MEAN", [(values, values), (values, values)])

        @tf.function
        def in_function():
            context = tf.distribute.get_replica_context()
            mine = rows_of(int(tf.get_static_value(replica_id())), replicas, num_table_rows)  # noqa: B023
            return context.all_reduce("SUM", [mine, tf.constant(1.0)])

        in_replicas, ones = ring.run(in_function)
        assert all(one == replicas for one in of_replicas(ring, ones))
        for result, count in ((reduced, 1), (many[1], replicas), (in_replicas, 1)):
            for slices in ring.experimental_local_results(result):
                assert isinstance(slices, tf.IndexedSlices), slices  # IndexedSlices for IndexedSlices
                assert len(slices.indices) == num_table_rows  # each id once
                np.testing.assert_allclose(tf.convert_to_tensor(slices), want / count, rtol=1e-6)


def an_embedding_with_unequal_static_shares(ring):
    import keras
    import tensorflow as tf

    replicas = ring.num_replicas_in_sync
    for num_table_rows in (SMALL, LARGE):
        with ring.scope():
            layer = keras.layers.Embedding(num_table_rows, 8, embeddings_initializer="zeros")
            layer.build()
            optimizer = keras.optimizers.SGD(1.0)
            optimizer.build(layer.trainable_variables)

        @tf.function
        def step():
            ids = rows_of(int(tf.get_static_value(replica_id())), replicas, num_table_rows).indices  # noqa: B023
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(layer(ids))  # noqa: B023
            gradients = tape.gradient(loss, layer.trainable_variables)  # noqa: B023
            optimizer.apply_gradients(zip(gradients, layer.trainable_variables, strict=True))  # noqa: B023

        ring.run(step)
        want = table_of(replicas, num_table_rows)
        np.testing.assert_allclose(layer.get_weights()[0], -want, rtol=1e-6)


def private_all_reduce_of_nests(ring):
    import tensorflow as tf

    replicas = ring.num_replicas_in_sync

    def replica_fn():
        slices = tf.IndexedSlices(tf.ones([1, 1]), tf.constant([3]), tf.constant([5, 1]))
        return ring.extended._replica_ctx_all_reduce("SUM", {"a": tf.identity(1.0), "b": (slices, tf.identity(2.0))})

    for call in (lambda: ring.run(replica_fn), tf.function(lambda: ring.run(replica_fn))):
        result = call()
        assert all(v == replicas for v in of_replicas(ring, result["a"]))
        assert all(v == 2 * replicas for v in of_replicas(ring, result["b"][1]))
        for slices in ring.experimental_local_results(result["b"][0]):
            np.testing.assert_array_equal(tf.convert_to_tensor(slices)[:, 0], [0, 0, 0, replicas, 0])


def one_tensor_of_all_replicas(ring):
    """Keras' gradient accumulation test: TensorFlow takes one object that all replicas hand over for one value."""
    import keras
    import tensorflow as tf

    replicas = ring.num_replicas_in_sync
    gradient = tf.constant([[1.0, 1.0], [2.0, 2.0]])
    for steps in (None, 3):
        with ring.scope():
            variable = keras.Variable([[1.0, 2.0], [3.0, 4.0]])
            optimizer = keras.optimizers.SGD(1.0, gradient_accumulation_steps=steps)
        for _ in range(steps or 1):
            ring.run(lambda: optimizer.apply_gradients([(gradient, variable)]))  # noqa: B023
        want = np.array([[1.0, 2.0], [3.0, 4.0]]) - replicas * gradient
        np.testing.assert_allclose(variable.numpy(), want, rtol=1e-6)

    def merged(value):
        return tf.distribute.get_replica_context().merge_call(lambda s, v: s.reduce("SUM", v, axis=None), args=(value,))

    with ring.scope():
        summed = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM)
    two = tf.constant(2.0)
    ring.run(lambda: summed.assign(two))
    assert summed.numpy() == 2 * replicas
    for op, count in (("SUM", replicas), ("MEAN", 1)):
        for value in of_replicas(ring, ring.run(lambda: tf.distribute.get_replica_context().all_reduce(op, two))):  # noqa: B023
            assert value == 2 * count
    assert all(value == 2 * replicas for value in of_replicas(ring, ring.run(lambda: merged(two))))
    gathered = ring.run(lambda: tf.distribute.get_replica_context().all_gather(gradient, axis=0))
    assert all(len(value) == 2 * replicas for value in of_replicas(ring, gathered))
    # A host's own value counts once a worker, as in MultiWorkerMirroredStrategy.
    if ring.cluster.world_size > 1:
        assert ring.reduce("SUM", two, axis=None) == 2 * ring.cluster.world_size


def results_on_the_devices_of_the_workers(ring):
    """The arguments of a function have no device yet."""
    import tensorflow as tf

    devices = ring.ring.devices
    if len(devices) == 1:
        return
    values = as_value(ring, lambda i: tf.ones([]))

    @tf.function
    def reduce(values):
        assert values.values[0].device == ""
        pair = ring.extended.batch_reduce_to("SUM", [(values, values), (values, devices[1])])
        alone = ring.extended.reduce_to("SUM", values, values)
        assert [v.device for v in pair[0].values] == [v.device for v in alone.values] == list(devices)
        assert pair[1].device == devices[1]
        return [*pair[0].values, pair[1], *alone.values]

    assert all(v == ring.num_replicas_in_sync for v in reduce(values))


REDUCTIONS = [
    sparse_rows_of_unequal_length,
    an_embedding_with_unequal_static_shares,
    private_all_reduce_of_nests,
    one_tensor_of_all_replicas,
    results_on_the_devices_of_the_workers,
]


@pytest.mark.parametrize("group", GROUPS, ids=str, scope="module")
def test_reductions(group):
    run(group, *REDUCTIONS)


# -- variables --------------------------------------------------------------------------------------------------------


def scatter_of_variables_with_aggregation(ring):
    import tensorflow as tf

    replicas = ring.num_replicas_in_sync
    ids = np.arange(replicas)
    total = np.arange(1, replicas + 1, dtype="float32")  # replica i holds i + 1 under id i; the last row is nobody's
    start = np.full(replicas + 1, 12.0, "float32")
    for aggregation, count in (("SUM", 1), ("MEAN", replicas)):
        for name, operation in (
            ("scatter_add", np.add),
            ("scatter_sub", np.subtract),
            ("scatter_mul", np.multiply),
            ("scatter_div", np.divide),
        ):
            with ring.scope():
                variable = tf.Variable(start, aggregation=getattr(tf.VariableAggregation, aggregation))

            @tf.function
            def scatter():
                value = tf.cast(replica_id() + 1, tf.float32)[None]
                slices = tf.IndexedSlices(value, replica_id()[None], dense_shape=(replicas + 1,))
                return getattr(variable, name)(slices)  # noqa: B023

            want = start.copy()
            want[ids] = operation(want[ids], total / count)
            for value in of_replicas(ring, ring.run(scatter)):
                np.testing.assert_allclose(value, want, rtol=1e-6, err_msg=f"{name} {aggregation}")
    with ring.scope():
        first = tf.Variable([1.0, 5.0], aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)
        summed = tf.Variable([1.0, 5.0], aggregation=tf.VariableAggregation.SUM)
    slices = tf.IndexedSlices(tf.constant([3.0]), tf.constant([1]), tf.constant([2]))
    for name, want in (("scatter_min", 3.0), ("scatter_max", 5.0), ("scatter_update", 3.0)):
        first.assign([1.0, 5.0])
        for value in of_replicas(ring, ring.run(tf.function(lambda: getattr(first, name)(slices)))):  # noqa: B023
            np.testing.assert_array_equal(value, [1.0, want])
        with pytest.raises(NotImplementedError, match=name):
            ring.run(lambda: getattr(summed, name)(slices))  # noqa: B023


def variables_read_in_every_context(ring):
    import tensorflow as tf

    replicas = ring.num_replicas_in_sync
    first = ring.cluster.rank * len(ring.ring.devices)
    mine = [first + i + 1.0 for i in range(len(ring.ring.devices))]

    def in_merge(variable):
        return tf.distribute.get_replica_context().merge_call(lambda s: variable.read_value())

    def both(function):
        return [ring.run(function), ring.run(tf.function(function)), tf.function(lambda: ring.run(function))()]

    for aggregation, count in (("SUM", 1), ("MEAN", replicas)):
        with ring.scope():
            v = tf.Variable(
                0.0,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=getattr(tf.VariableAggregation, aggregation),
                trainable=False,
            )
        ring.run(lambda: v.assign(tf.cast(replica_id() + 1, tf.float32)))  # noqa: B023
        whole = replicas * (replicas + 1) / 2 / count
        for result in both(lambda: v.read_value()) + both(lambda: v + 0.0):  # noqa: B023
            assert of_replicas(ring, result) == mine
        assert v.read_value() == v.value() == tf.identity(v) == v + 0.0 == tf.function(lambda: v + 0.0)() == whole  # noqa: B023
        for result in both(lambda: in_merge(v)):  # noqa: B023
            assert set(map(float, of_replicas(ring, result))) == {whole}

    with ring.scope():
        mirrored = tf.Variable(2.0, aggregation=tf.VariableAggregation.MEAN)

    def step(x):
        mirrored.assign_add(x)
        return mirrored.read_value(), mirrored * x

    values = as_value(ring, lambda i: tf.constant(i + 1.0))
    read, product = ring.run(tf.function(step), args=(values,))
    mean = (replicas + 1) / 2
    assert of_replicas(ring, read) == [2 + mean] * len(mine)
    assert of_replicas(ring, product) == [(2 + mean) * m for m in mine]


def functions_that_reduce_are_not_saved(ring):
    """Read in a function, the variable would need its peers wherever the SavedModel is loaded."""
    import tempfile

    import tensorflow as tf

    if ring.num_replicas_in_sync == 1:
        return
    for aggregation in ("SUM", "MEAN"):
        with ring.scope():
            v = tf.Variable(
                [1.0, 1.0],
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=getattr(tf.VariableAggregation, aggregation),
            )
        signature = tf.function(v.read_value).get_concrete_function()
        with tempfile.TemporaryDirectory() as folder, pytest.raises(ValueError, match="signature"):
            tf.saved_model.save(v, folder, signatures=signature)


def a_strategy_set_for_the_whole_program(ring):
    import keras
    import tensorflow as tf

    tf.distribute.experimental_set_strategy(ring)
    try:
        assert tf.distribute.get_strategy() is ring
        variable = tf.Variable(1.0)
        model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(np.ones([6, 2], "float32"), np.ones([6, 1], "float32"), batch_size=6, epochs=1, verbose=0)
        total = ring.reduce("SUM", ring.run(lambda: variable + 1.0), axis=None)
    finally:
        tf.distribute.experimental_set_strategy(None)
    assert isinstance(variable, tf.distribute.DistributedValues)
    assert isinstance(model.layers[0].kernel.value, tf.distribute.DistributedValues)
    assert total == 2.0 * ring.num_replicas_in_sync


VARIABLES = [
    scatter_of_variables_with_aggregation,
    variables_read_in_every_context,
    functions_that_reduce_are_not_saved,
    a_strategy_set_for_the_whole_program,
]


@pytest.mark.parametrize("group", GROUPS, ids=str, scope="module")
def test_variables(group):
    run(group, *VARIABLES)


# -- data -------------------------------------------------------------------------------------------------------------


def ragged_and_sparse_batches(ring):
    import tensorflow as tf

    lengths = np.arange(20) % 4
    ragged = tf.RaggedTensor.from_row_lengths(np.repeat(np.arange(20, dtype="float32"), lengths), lengths)
    rows = {"dense": ragged.to_tensor(), "ragged": ragged, "sparse": ragged.to_sparse()}
    batches = tf.data.Dataset.from_tensor_slices(rows).batch(8)
    distributed = ring.experimental_distribute_dataset(batches)
    for name, spec in distributed.element_spec.items():
        for one in getattr(spec, "_value_specs", [spec]):
            assert one.shape.as_list() == ([None, None] if name == "ragged" else [None, 3]), (name, one)

    def add(batch):
        total = tf.reduce_sum(batch["dense"]) + tf.reduce_sum(batch["ragged"]) + tf.sparse.reduce_sum(batch["sparse"])
        return tf.ensure_shape(total, [])

    @tf.function
    def whole(iterator):
        total, batches, more = 0.0, 0, tf.constant(True)
        while more:
            batch = iterator.get_next_as_optional()
            more = batch.has_value()
            if more:
                total += ring.reduce("SUM", ring.run(add, args=(batch.get_value(),)), axis=None)
                batches += 1
        return total, batches, iterator.get_next_as_optional().has_value()

    total, seen, more = whole(iter(distributed))
    assert total == 3 * (np.arange(20) * lengths).sum() and seen == 3 and not more


def keras_epoch_iterator_counts_batches(ring):
    from keras.src.backend.tensorflow.trainer import TFEpochIterator

    x = np.random.default_rng(0).random((100, 16))
    for rows, want in ((100, range(7)), (96, range(6))):
        arrays = {"x": x[:rows], "y": x[:rows, :4], "sample_weight": x[:rows, 0]}
        iterator = TFEpochIterator(**arrays, batch_size=16, shuffle=True, distribute_strategy=ring)
        steps = []
        for step, *_, batches in iterator:
            steps.append(step)
            next(batches)
        assert steps == list(want)


@pytest.mark.parametrize("group", GROUPS, ids=str, scope="module")
def test_data(group):
    run(group, ragged_and_sparse_batches, keras_epoch_iterator_counts_batches)


def test_dense_is_chosen_by_what_every_rank_knows():
    import tensorflow as tf

    from tfring.reduction.sparse import goes_dense

    def chosen(num_table_rows, num_rows, *, world_size=2, **options):
        slices = tf.IndexedSlices(tf.ones([num_rows, 8]), tf.range(num_rows), tf.constant([num_table_rows, 8]))
        return goes_dense(slices, tfring.SparseOptions(**options), world_size)

    for num_rows in (1, 5000):
        assert chosen(2048, num_rows) and not chosen(2049, num_rows)  # 64 KiB
        assert not chosen(2049, num_rows, batch_size=1600) and chosen(2049, num_rows, batch_size=1700)
        assert chosen(10**6, num_rows, dense="always") and not chosen(30, num_rows, dense="never")
        assert not chosen(30, num_rows, world_size=1)


# -- logs --------------------------------------------------------------------------------------------------------------


def test_logs_name_no_other_strategy():
    import logging

    import tensorflow as tf

    seen = []
    logger, handler = tf.get_logger(), logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        tfring.RingStrategy()
        logger.info("heard")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert "heard" in seen and not any("MirroredStrategy" in text for text in seen), seen
