"""Calls of a `tf.distribute` user, on several processes: TensorFlow's and Keras' own cases, and custom loops."""

import numpy as np
import pytest
from harness import strategy, workers

GROUPS = [pytest.param(3, "ring", 1, marks=pytest.mark.oldest), (2, "ring", 2), (2, "tensorflow", 1)]


def ring_strategy():
    import tensorflow as tf

    # Asks what was configured, which starts nothing: TensorFlow's collective runtime has to come first.
    cpus = tf.config.get_logical_device_configuration(tf.config.list_physical_devices("CPU")[0])
    return strategy(**({"devices": [f"CPU:{i}" for i in range(len(cpus))]} if cpus else {}))


def library_cases():
    """TensorFlow's `strategy_test_lib`, as shipped in the wheel."""
    from tensorflow.python.distribute import strategy_test_lib

    ring = ring_strategy()

    class Cases(strategy_test_lib.DistributionTestBase):
        def runTest(self):  # the name unittest asks for
            pass

    cases = Cases()
    cases._test_minimize_loss_eager(ring)
    cases._test_call_and_merge_exceptions(ring)
    cases._test_trainable_variable(ring)
    return True


@pytest.mark.parametrize(("n", "communication", "logical_cpus"), GROUPS, scope="module")
def test_cases_of_strategy_test_lib(n, communication, logical_cpus):
    assert workers(n, communication, logical_cpus=logical_cpus).run(library_cases) == [True] * n


def contexts():
    import tensorflow as tf

    ring = ring_strategy()
    cluster, local = ring.cluster, len(ring.ring.devices)
    replicas = cluster.world_size * local
    assert isinstance(ring, tf.distribute.MultiWorkerMirroredStrategy)
    assert ring.num_replicas_in_sync == replicas
    assert ring.extended._in_multi_worker_mode()
    spec = ring.cluster_resolver.cluster_spec().as_dict()
    assert spec == {"worker": list(cluster.addresses)} and ring.cluster_resolver.task_id == cluster.rank
    ids = np.arange(cluster.rank * local, (cluster.rank + 1) * local)

    def local_results(value):
        return [np.asarray(v) for v in ring.experimental_local_results(value)]

    values = ring.experimental_distribute_values_from_function(lambda c: tf.constant(c.replica_id_in_sync_group + 1.0))
    assert local_results(values) == list(ids + 1.0)
    total = replicas * (replicas + 1) / 2
    assert float(ring.reduce("SUM", values, axis=None)) == total
    assert float(ring.reduce("MEAN", values, axis=None)) == total / replicas

    def replica_id():
        return tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.int32)

    ragged = ring.run(lambda: tf.range(replica_id() + 1))
    want = np.concatenate([np.arange(r + 1) for r in range(replicas)])
    np.testing.assert_array_equal(ring.gather(ragged, axis=0), want)
    assert float(ring.reduce("SUM", ragged, axis=0)) == want.sum()
    columns = ring.run(lambda: tf.ones([2, 1, 1]))
    assert ring.gather(columns, axis=1).shape == (2, replicas, 1)

    @tf.function
    def inside(x):
        def step(x):
            context = tf.distribute.get_replica_context()
            with tf.GradientTape() as tape:
                tape.watch(x)
                [summed, (doubled,)] = context.all_reduce("SUM", [x, (2 * x,)])
                y = summed * x + doubled
            gathered = context.all_gather(tf.reshape(x, [1]), axis=0)
            merged = context.merge_call(lambda s, v: s.reduce("MEAN", v, axis=None), args=(x,))
            return summed, doubled, tape.gradient(y, x), gathered, merged

        return ring.run(step, args=(x,))

    summed, doubled, gradient, gathered, merged = inside(values)
    assert local_results(summed) == [total] * local and local_results(doubled) == [2 * total] * local
    # d/dx_i of sum over replicas j of (s x_j + 2 s), with s the sum of all x
    assert local_results(gradient) == [total + i + 2 * replicas + total - i for i in ids]
    for rows in local_results(gathered):
        np.testing.assert_array_equal(rows, np.arange(1, replicas + 1))
    assert set(map(float, local_results(merged))) == {total / replicas}

    slices = ring.run(
        lambda: tf.distribute.get_replica_context().all_reduce(
            "SUM", tf.IndexedSlices(tf.ones([3, 2]), tf.constant([4, 1, 4]), tf.constant([6, 2]))
        )
    )
    for value in ring.experimental_local_results(slices):
        sparse = isinstance(value, tf.IndexedSlices)
        table = tf.math.unsorted_segment_sum(value.values, value.indices, 6) if sparse else value
        np.testing.assert_array_equal(table[:, 0], [0, replicas, 0, 0, 2 * replicas, 0])
    return True


@pytest.mark.parametrize(("n", "communication", "logical_cpus"), GROUPS, scope="module")
def test_contexts_and_collectives(n, communication, logical_cpus):
    assert workers(n, communication, logical_cpus=logical_cpus).run(contexts) == [True] * n


def variables():
    import tensorflow as tf

    ring = ring_strategy()
    rank = ring.cluster.rank
    with ring.scope():
        mirrored = tf.Variable(float(rank + 5))
        on_read = tf.Variable(
            0.0, synchronization=tf.VariableSynchronization.ON_READ, aggregation=tf.VariableAggregation.SUM,
            trainable=False,
        )
        summed = tf.Variable(1.0, aggregation=tf.VariableAggregation.SUM)

    def step():
        on_read.assign_add(tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32) + 1)
        summed.assign(tf.identity(2.0))

    ring.run(step)
    replicas = ring.num_replicas_in_sync
    assert float(mirrored.numpy()) == 5.0  # rank 0's
    assert float(on_read.read_value()) == replicas * (replicas + 1) / 2
    assert float(summed.numpy()) == 2.0 * replicas
    return True


@pytest.mark.parametrize(("n", "communication", "logical_cpus"), GROUPS, scope="module")
def test_variables(n, communication, logical_cpus):
    assert workers(n, communication, logical_cpus=logical_cpus).run(variables) == [True] * n


def keras_optimizer_cases():
    """The cases of Keras' optimizer_distribute_test: every replica has the same gradient."""
    import keras
    import tensorflow as tf

    ring = ring_strategy()
    replicas = ring.num_replicas_in_sync
    sgd = keras.optimizers.SGD

    def apply(optimizer, *pairs, in_function):
        def step():
            optimizer.apply_gradients([(tf.constant(g) / replicas, v) for g, v in pairs])

        tf.function(lambda: ring.run(step))() if in_function else ring.run(step)

    for in_function in (False, True):
        with ring.scope():
            v = keras.Variable([1.0, 2.0, 3.0, 4.0])
            ema = keras.Variable([[3.0, 4.0], [5.0, 6.0]])
            accumulated = keras.Variable([[1.0, 2.0], [3.0, 4.0]])
            decayed, excluded = keras.Variable(2.0), keras.Variable(3.0, name="exclude")
            momentum = sgd(0.5, momentum=0.06)
            averaging = sgd(1.0, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=3)
            accumulating = sgd(1.0, gradient_accumulation_steps=3)
            decaying = sgd(1.0, weight_decay=0.004)
            decaying.exclude_from_weight_decay(var_names=["exclude"])
            momentum.build([v])
            averaging.build([ema])
            accumulating.build([accumulated])
            decaying.build([decayed, excluded])
        apply(momentum, ([1.0, 6.0, 7.0, 2.0], v), in_function=in_function)
        np.testing.assert_allclose(v.numpy(), [0.5, -1.0, -0.5, 3.0], rtol=1e-6)
        ones = [[1.0, 1.0], [1.0, 1.0]]
        for want in ([[2.0, 3.0], [4.0, 5.0]], [[1.0, 2.0], [3.0, 4.0]], [[1.71, 2.71], [3.71, 4.71]]):
            apply(averaging, (ones, ema), in_function=in_function)
            np.testing.assert_allclose(ema.numpy(), want, rtol=1e-6)
        for step, want in enumerate(([[1.0, 2.0], [3.0, 4.0]],) * 2 + ([[0.0, 1.0], [1.0, 2.0]],)):
            apply(accumulating, ([[1.0, 1.0], [2.0, 2.0]], accumulated), in_function=in_function)
            np.testing.assert_allclose(accumulated.numpy(), want, rtol=1e-6, err_msg=f"step {step}")
        apply(decaying, (0.0, decayed), (0.0, excluded), in_function=in_function)
        np.testing.assert_allclose([decayed.numpy(), excluded.numpy()], [2.0 - 0.008, 3.0], rtol=1e-6)
    return True


@pytest.mark.parametrize(("n", "communication", "logical_cpus"), GROUPS, scope="module")
def test_cases_of_keras_optimizers(n, communication, logical_cpus):
    assert workers(n, communication, logical_cpus=logical_cpus).run(keras_optimizer_cases) == [True] * n


def custom_loop():
    """A loop written as TensorFlow's guide has it, dividing by the global batch itself."""
    import keras
    import tensorflow as tf

    ring = ring_strategy()
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(83, 4)).astype("float32"), generator.normal(size=(83, 1)).astype("float32")
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(20)
    keras.utils.set_random_seed(1)  # Adam makes much of a gradient that is almost zero
    with ring.scope():
        layers = [keras.layers.Input((4,)), keras.layers.Dense(3, activation="tanh"), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        optimizer = keras.optimizers.Adam(0.01)
        optimizer.build(model.trainable_variables)
    alone = keras.models.clone_model(model)
    alone.set_weights(model.get_weights())
    alone.compile(keras.optimizers.Adam(0.01), keras.losses.MeanSquaredError(reduction="sum"))

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((model(x) - y) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def epoch(iterator):
        total = 0.0
        for _ in range(5):
            total += ring.reduce("SUM", ring.run(step, args=next(iterator)), axis=None)
        return total

    totals = [float(epoch(iter(ring.experimental_distribute_dataset(batches)))) for _ in range(2)]
    for _ in range(2):
        alone.fit(batches, verbose=0)
    error = max(np.abs(a - b).max() for a, b in zip(model.get_weights(), alone.get_weights(), strict=True))
    assert error < 1e-5, error
    return totals, [w.tobytes() for w in model.get_weights()]


@pytest.mark.parametrize(("n", "communication", "logical_cpus"), GROUPS, scope="module")
def test_a_custom_loop(n, communication, logical_cpus):
    results = workers(n, communication, logical_cpus=logical_cpus).run(custom_loop)
    assert all(result == results[0] for result in results)


def python_control_flow():
    """AutoGraph converts a step in `run`, and a loop over a distributed dataset, as under TensorFlow's strategies."""
    import keras
    import tensorflow as tf
    from tensorflow.python.autograph.impl import conversion

    import tfring

    ring = ring_strategy()
    keras.utils.set_random_seed(1)
    x = np.linspace(-3, 2, 18, dtype="float32").reshape(18, 1) ** 3
    data = tf.data.Dataset.from_tensor_slices((x, 2 * x + 1)).batch(6)
    with ring.scope():
        model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(1e-3)
        optimizer.build(model.trainable_variables)
    alone = keras.models.clone_model(model)
    alone.set_weights(model.get_weights())

    def gradients_of(model, count, x, y):
        with tf.GradientTape() as tape:
            errors = tf.abs(model(x) - y)
            if count % 2 == 0:
                errors = errors**2
            loss = tf.reduce_sum(errors) / 6
        return loss, tape.gradient(loss, model.trainable_variables)

    def step(x, y):
        loss, gradients = gradients_of(model, optimizer.iterations, x, y)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        found = tf.constant(0)
        for row in x:
            if row[0] > 0:
                found += 1
        return loss, found

    @tf.function
    def epoch(dataset):
        total, found = 0.0, 0
        for x, y in dataset:
            losses, counts = ring.run(step, args=(x, y))
            total += ring.reduce("SUM", losses, axis=None)
            found += tfring.all_reduce(ring.reduce("SUM", counts, axis=None), "max")
        return total, found

    @tf.function
    def epoch_alone():
        total = 0.0
        for count, (x, y) in data.enumerate():
            loss, gradients = gradients_of(alone, count, x, y)
            for variable, gradient in zip(alone.trainable_variables, gradients, strict=True):
                variable.assign_sub(1e-3 * gradient)
            total += loss
        return total

    want = epoch_alone()
    total, found = epoch(ring.experimental_distribute_dataset(data))
    np.testing.assert_allclose(total, want, rtol=1e-5)
    assert int(found) == np.sum(x > 0)
    for ours, theirs in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    outside = tf.function(lambda: optimizer.apply(model.trainable_variables, model.trainable_variables))
    with pytest.raises(tfring.errors.ConfigurationError, match=r"(?s)in user code.*was applied outside"):
        outside()
    for own in (tfring.all_reduce, ring.reduce, ring.run, optimizer.apply_gradients):  # to convert them takes seconds
        assert conversion.is_allowlisted(own), own
    return True


@pytest.mark.parametrize(("n", "communication", "logical_cpus"), GROUPS, scope="module")
def test_python_control_flow_in_a_step(n, communication, logical_cpus):
    assert workers(n, communication, logical_cpus=logical_cpus).run(python_control_flow) == [True] * n


def exchanges_in_branches():
    """Replicas that take different branches, or one branch in different steps, get an error before they exchange."""
    import keras
    import tensorflow as tf

    import tfring

    ring = ring_strategy()
    with ring.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
        optimizer = keras.optimizers.SGD(0.5)
        optimizer.build(model.trainable_variables)
    one = [tf.ones([1, 1])]

    def apply(scale=1.0):
        optimizer.apply([scale * gradient for gradient in one], model.trainable_variables)

    def skipped(step, skip):
        if step != skip:
            apply()

    def either(step, skip):
        if step == skip:
            apply(2.0)
        else:
            apply()

    def in_a_loop(step, skip):
        if step != skip:
            for _ in tf.range(2):
                apply()

    def summed(step, skip):
        if step != skip:
            [total] = ring.all_reduce_gradients(one)
            tf.debugging.assert_equal(total, [[float(ring.world_size)]])

    def gathered(step, skip):
        if step != skip:
            tf.debugging.assert_equal(tf.shape(tfring.gather_for_loss(one[0]))[0], ring.world_size)

    def around(step, skip):
        if step != skip:
            ring.run(apply)

    def loop(function):
        def steps(skip):
            for step in tf.range(4):
                ring.run(function, (step, skip))

        return tf.function(steps)

    def each(function):
        def steps(skip):
            for step in range(4):
                ring.run(function, (tf.constant(step), skip))

        return steps

    functions = [skipped, either, in_a_loop, summed, gathered]
    ways = {function.__name__: each(tf.function(function)) for function in functions}
    ways |= {f"{function.__name__} in a tf.function": loop(function) for function in functions}
    ways |= {f"{function.__name__} eagerly": each(function) for function in (either, skipped)}

    @tf.function
    def around_run(skip):
        for step in tf.range(4):
            around(step, skip)

    ways = {"around run": around_run, **ways}
    for name, way in ways.items():
        weights = model.get_weights()[0]
        way(tf.constant(1))
        updates = {"either": 5, "skipped": 3, "in_a_loop": 6, "around": 3}.get(name.split()[0], 0)
        moved = model.get_weights()[0] - weights
        np.testing.assert_allclose(moved, -0.5 * ring.world_size * updates, rtol=1e-5, err_msg=name)
        if name == "either eagerly":  # nothing tells an update of Python's `else` from that of its `if`
            continue
        # TensorFlow's collectives of two iterations of a loop never meet, and a failed step ends them.
        if ring.ring.communication == "tensorflow" and name != "skipped eagerly":
            continue
        with pytest.raises(tf.errors.InvalidArgumentError, match="different branches") as raised:
            way(tf.constant(ring.rank))
        assert "all_reduce('sum'" in raised.value.message.replace("\\", ""), name
        ring.assert_equal(model.variables)
    return True


@pytest.mark.parametrize(("n", "communication"), [(3, "ring"), (2, "ring"), (2, "tensorflow")])
def test_exchanges_in_branches(n, communication):
    assert workers(n, communication).run(exchanges_in_branches) == [True] * n


def own_and_first_values():
    """A variable that nothing aggregates starts alike on each replica; one of the first replica is equal on all."""
    import tensorflow as tf

    ring = ring_strategy()
    how = tf.VariableAggregation.ONLY_FIRST_REPLICA
    with ring.scope():
        own = tf.Variable(2.0, trainable=False, synchronization=tf.VariableSynchronization.ON_READ)
        first, count = (tf.Variable(zero, trainable=False, aggregation=how) for zero in (0.0, 0))
        is_set = tf.Variable(False, trainable=False, aggregation=how)
        table = tf.Variable(tf.zeros([9, 2]), trainable=False, aggregation=how)

    def step(number):
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        first.assign(number)
        count.assign_add(tf.cast(number, tf.int32))
        is_set.assign(tf.equal(number, 1.0))
        table.scatter_add(tf.IndexedSlices(tf.fill([1, 2], number), tf.reshape(replica, [1])))
        own.assign_add(1.0)
        return own * number

    values = ring.experimental_distribute_values_from_function(lambda c: c.replica_id_in_sync_group + 1.0)
    total = ring.num_replicas_in_sync * (ring.num_replicas_in_sync + 1) / 2
    for call, run in enumerate((ring.run, tf.function(ring.run)), 1):
        assert float(ring.reduce("SUM", run(step, args=(values,)), axis=None)) == (2 + call) * total
        assert (float(first), int(count), bool(is_set.numpy())) == (1.0, call, True)
        np.testing.assert_array_equal(table, [[call, call]] + 8 * [[0, 0]])
    return True


@pytest.mark.parametrize(("n", "communication", "logical_cpus"), GROUPS, scope="module")
def test_variables_of_a_replica_s_own_and_of_the_first(n, communication, logical_cpus):
    assert workers(n, communication, logical_cpus=logical_cpus).run(own_and_first_values) == [True] * n


def models_built_in_steps():
    """Models and optimizers that a step builds, one after the other: replicas have lists of Keras in turns."""
    import keras
    import tensorflow as tf

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(2, kernel_initializer="ones")

        def call(self, x):
            return self.dense(x)

    ring = ring_strategy()
    found = []
    for _ in range(4):
        with ring.scope():
            model = Model()
            optimizer = keras.optimizers.Adam(0.1)

        def step(x, model=model, optimizer=optimizer):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(model(x))
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

        ring.run(step, args=(tf.ones([2, 3]),))
        found.append([weight.tobytes() for weight in model.get_weights()])
    with ring.scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=["mae"])
    model.fit(np.ones((8, 3)), np.ones((8, 1)), verbose=0)
    return found


@pytest.mark.parametrize(("n", "communication", "logical_cpus"), GROUPS, scope="module")
def test_models_that_steps_build_one_after_the_other(n, communication, logical_cpus):
    for found in workers(n, communication, logical_cpus=logical_cpus).run(models_built_in_steps):
        assert len({tuple(weights) for weights in found}) == 1


def rowless_replicas():
    """One row for all replicas: the mean over the rows of a replica without any is NaN, and so is its gradient."""
    import keras
    import tensorflow as tf

    ring = ring_strategy()
    keras.utils.set_random_seed(1)
    with ring.scope():
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)
    kernel, _ = model.get_weights()

    @tf.function  # handed to `run` as it is, which TensorFlow allows
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x)) * tf.reduce_sum(model.trainable_variables[0])
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    for x in ring.experimental_distribute_dataset(tf.data.Dataset.from_tensors(tf.ones([1, 4]))):
        ring.run(step, args=(x,))
    np.testing.assert_allclose(model.get_weights()[0], kernel - 0.1 * 2 * kernel.sum(), rtol=1e-5)


@pytest.mark.parametrize(("n", "communication", "logical_cpus"), GROUPS, scope="module")
def test_a_replica_without_rows_adds_nothing_in_a_custom_loop(n, communication, logical_cpus):
    workers(n, communication, logical_cpus=logical_cpus).run(rowless_replicas)


def unequal_policies(policy):
    """FILE, OFF: TensorFlow's own sharding, over tfring's iterators."""
    import tensorflow as tf

    ring = ring_strategy()
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = getattr(tf.data.experimental.AutoShardPolicy, policy)
    data = tf.data.Dataset.range(24).batch(6).with_options(options)
    seen = []
    for batch in ring.experimental_distribute_dataset(data):
        seen.extend(int(v) for value in ring.experimental_local_results(batch) for v in value)
    return seen


def test_sharding_that_the_user_asked_for_is_left_alone():
    first, second = workers(2).run(unequal_policies, "OFF")
    assert sorted(first) == sorted(second) == list(range(24))
    first, second = workers(2).run(unequal_policies, "DATA")
    assert sorted(first + second) == list(range(24)) and len(first) == len(second)


def operations():
    import tensorflow as tf

    ring = ring_strategy()
    control, rank = ring.ring.control, ring.cluster.rank
    wanted = {"sum": [5.0, 5.0], "max": [3.0, 4.0], "min": [2.0, 1.0], "product": [6.0, 4.0]}
    for dtype in ("float32", "bfloat16", "int8", "uint32"):
        mine = tf.cast(tf.constant([[2.0, 4.0], [3.0, 1.0]][rank]), dtype)
        for op, want in wanted.items():
            [got] = control.all_reduce([mine], op, name=op)
            assert got.dtype == dtype and tf.cast(got, "float32").numpy().tolist() == want, (dtype, op)
    return True


@pytest.mark.parametrize("communication", ["ring", "tensorflow"])
def test_operations_of_both_engines(communication):
    assert workers(2, communication).run(operations) == [True] * 2
