"""SyncBatchNormalization inside `fit`, its collectives counted, shared each k-th step, and under MirroredStrategy."""

import harness
import keras
import numpy as np
import pytest
import shards
from harness import workers

import tfring

LAYERS = 2
IMAGES = dict(shape=(6, 6, 3), rows=44)  # batches of 20, 20 and 4: unequal shards for 3 ranks
ROWS = dict(shape=(5,), rows=41)  # batches of 20, 20 and 1: in the last, most ranks have no row


def skewed(shape, rows):
    generator = np.random.default_rng(0)
    drift = np.linspace(0, 2, rows).reshape([rows] + [1] * len(shape))
    x = generator.normal(size=(rows, *shape)) * (1 + drift) + drift
    return x.astype("float32"), generator.integers(0, 4, rows)


def network(shape, normalization, with_input=True, **compile_options):
    layers = [keras.Input(shape)] if with_input else []
    for _ in range(LAYERS):
        if len(shape) == 3:
            layers.append(keras.layers.Conv2D(4, 3, padding="same", use_bias=False))
        else:
            # Its loss is the replica's own, though replicas of a worker meet in the normalization behind it.
            layers.append(keras.layers.Dense(8, use_bias=False, activity_regularizer=keras.regularizers.L2(0.1)))
        layers += [normalization(), keras.layers.ReLU()]
    return compiled(keras.Sequential([*layers, keras.layers.Flatten(), keras.layers.Dense(4)]), **compile_options)


def compiled(model, **options):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"], **options)
    return model


def collectives(strategy):
    """All-gathers, all-reduces and broadcasts of the ring's channels so far."""
    counts = [channel.communicator.statistics()["collectives"] for channel in strategy.ring.channels]
    return np.array([[c["all_gather"], c["all_reduce"], c["broadcast"]] for c in counts])


def fit(data, options, compile_options, converted=False, devices=None):
    """In a worker: fits under the ring, and on the last rank alone too: what they differ by, and the results' bits."""
    strategy = harness.strategy(devices=devices)
    x, y = skewed(**data)
    keras.utils.set_random_seed(1)

    def plain():
        return keras.layers.BatchNormalization(momentum=0.8)

    with strategy.scope():
        if converted:
            model = tfring.layers.to_sync_batch_normalization(network(data["shape"], plain), **options)
            compiled(model, **compile_options)
        else:
            model = network(
                data["shape"], lambda: tfring.SyncBatchNormalization(momentum=0.8, **options), **compile_options
            )
    start = model.get_weights()

    def outcome(model):
        loss = model.fit(x, y, batch_size=20, epochs=2, shuffle=False, verbose=0).history["loss"]
        results = [*model.get_weights(), loss, model.predict(x, verbose=0), model.evaluate(x, y, verbose=0)]
        return [np.asarray(result) for result in results]

    got = outcome(model)
    bits = b"".join(result.tobytes() for result in got)
    if strategy.cluster.rank < strategy.cluster.world_size - 1:
        return None, bits
    alone = network(data["shape"], plain)
    alone.set_weights(start)
    error = max(np.abs(a - b).max() / np.abs(b).max() for a, b in zip(got, outcome(alone), strict=True))
    return error, bits


def assert_fitted(results):
    assert results[-1][0] < 1e-5
    assert len({bits for _, bits in results}) == 1


@pytest.mark.parametrize(
    ("world_size", "communication", "data", "options", "compile_options"),
    [
        (2, "ring", IMAGES, {}, {"steps_per_execution": 2}),
        (3, "ring", IMAGES, {}, {}),
        (3, "ring", ROWS, {}, {"run_eagerly": True}),
        (4, "ring", ROWS, {"synchronization": "central"}, {}),
        pytest.param(3, "tensorflow", ROWS, {}, {}, marks=pytest.mark.long),
    ],
)
def test_fit_equals_one_process(world_size, communication, data, options, compile_options):
    assert_fitted(workers(world_size, communication).run(fit, data, options, compile_options))


def count_in_graph(_):
    """In a worker: the collectives in the graph of a forward and backward pass, by what the layer does."""
    import tensorflow as tf

    strategy = harness.strategy()

    def collectives_of(trainable=True, training=True):
        with strategy.scope():
            layer = tfring.SyncBatchNormalization(trainable=trainable)
            layer.build((None, 3))

        def replica(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(layer(x, training=training) ** 2)
            return tape.gradient(loss, x)

        step = tf.function(lambda x: strategy.run(replica, (x,)), autograph=False)
        graph = step.get_concrete_function(tf.TensorSpec([4, 3])).graph.as_graph_def()
        nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
        return sum(node.op.startswith(("CollectiveGather", "CollectiveReduce", "CollectiveBcast")) for node in nodes)

    return collectives_of(), collectives_of(trainable=False), collectives_of(training=False)


def test_collectives_in_the_graph_of_tensorflow():
    assert workers(3, "tensorflow").run(count_in_graph, None) == [(2, 0, 0)] * 3


def test_a_converted_model_trains_like_one_process():
    assert_fitted(workers(3).run(fit, ROWS, {}, {}, True))


def fit_with_a_mask(_):
    """In a worker: as `fit`, of sequences whose padding an Embedding masks; other lengths on each rank."""
    strategy = harness.strategy()
    generator = np.random.default_rng(0)
    rows, length = 41, 7
    tokens = generator.integers(1, 9, (rows, length)) + (np.arange(rows)[:, None] // 7) * 9
    tokens[np.arange(length) >= 1 + np.arange(rows)[:, None] % length] = 0
    labels = generator.integers(0, 4, rows)

    def masked(normalization):
        x = keras.Input((length,), dtype="int32")
        y = normalization(momentum=0.8)(keras.layers.Embedding(64, 5, mask_zero=True)(x))
        return compiled(keras.Model(x, keras.layers.Dense(4)(keras.layers.GlobalAveragePooling1D()(y))))

    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = masked(tfring.SyncBatchNormalization)
    alone = masked(keras.layers.BatchNormalization)
    alone.set_weights(model.get_weights())
    with shards.exact_masks():
        for m in (model, alone):
            m.fit(tokens, labels, batch_size=20, epochs=2, shuffle=False, verbose=0)
    pairs = zip(model.get_weights(), alone.get_weights(), strict=True)
    return max(np.abs(a - b).max() / np.abs(b).max() for a, b in pairs)


def test_fit_with_a_mask_from_an_embedding():
    assert max(workers(3).run(fit_with_a_mask, None)) < 1e-5


def fit_and_save(folder):
    """In a worker: trains, rank 0 saves; what the trained model and the one read back under the ring predict."""
    strategy = harness.strategy()
    x, y = skewed(**ROWS)
    keras.utils.set_random_seed(1)
    # Without an Input the model is built while Keras traces its first step.
    with strategy.scope():
        model = network(
            ROWS["shape"],
            lambda: tfring.SyncBatchNormalization(momentum=0.8, synchronization="central", sync_every=2),
            with_input=False,
        )
    model.fit(x, y, batch_size=20, verbose=0)
    if strategy.cluster.is_chief:
        model.save(f"{folder}/model.keras")
    strategy.barrier()
    with strategy.scope():
        read = keras.saving.load_model(f"{folder}/model.keras")
    predictions = model.predict(x, verbose=0), read.predict(x, verbose=0)
    read.fit(x, y, batch_size=20, verbose=0)
    return *predictions, b"".join(w.tobytes() for w in read.get_weights())


def test_a_model_saved_by_workers_loads_anywhere(tmp_path):
    results = workers(3).run(fit_and_save, str(tmp_path))
    alone = keras.saving.load_model(tmp_path / "model.keras")
    means = [layer.moving_mean for layer in alone.layers if isinstance(layer, tfring.SyncBatchNormalization)]
    assert any(np.abs(mean).max() > 0.1 for mean in means)
    want = alone.predict(skewed(**ROWS)[0], verbose=0)
    for trained, read, _ in results:
        for got in (trained, read):
            np.testing.assert_allclose(got, want, atol=1e-5)
    assert len({bits for *_, bits in results}) == 1


def fit_and_count(normalization, infers=False, **options):
    strategy = harness.strategy()
    x, y = skewed(**ROWS)
    with strategy.scope():
        model = network(ROWS["shape"], lambda: getattr(*normalization)(**options))
    model.fit(x, y, batch_size=20, verbose=0)  # 3 steps
    before = collectives(strategy)
    model.fit(x, y, batch_size=20, epochs=2, verbose=0)  # 6
    trained = collectives(strategy)
    if infers:
        model.evaluate(x, y, verbose=0)
        model.predict(x, verbose=0)
    return trained - before, collectives(strategy) - trained


def count(_):
    """In a worker: the collectives of 6 steps, and of evaluate and predict, with and without the layer."""
    with_layer, evaluated = fit_and_count((tfring, "SyncBatchNormalization"), infers=True)
    without, evaluated_without = fit_and_count((keras.layers, "LayerNormalization"), infers=True)
    central, _ = fit_and_count((tfring, "SyncBatchNormalization"), synchronization="central")
    third, _ = fit_and_count((tfring, "SyncBatchNormalization"), sync_every=3)
    frozen, _ = fit_and_count((tfring, "SyncBatchNormalization"), trainable=False)
    return {
        "training": with_layer - without,
        "inference": evaluated - evaluated_without,
        "central": central[:2] - without,
        "central lines": central[2:],
        "each third step": third - without,
        "frozen": frozen - without,
    }


def test_collectives_are_one_forward_and_one_backward():
    steps = 6
    for rank, counts in enumerate(workers(3).run(count, None)):
        once_each = [[2 * LAYERS * steps, 0, 0], [0, 0, 0]]  # all-gathers of the control ring, nothing else
        np.testing.assert_array_equal(counts["training"], once_each)
        np.testing.assert_array_equal(counts["inference"], np.zeros((2, 3)))
        np.testing.assert_array_equal(counts["frozen"], np.zeros((2, 3)))
        np.testing.assert_array_equal(counts["each third step"], np.array(once_each) // 3)
        np.testing.assert_array_equal(counts["central"], np.zeros((2, 3)))
        line = [0, 0, 2 * 2 * LAYERS * steps]  # there and back
        np.testing.assert_array_equal(counts["central lines"], [line] * (2 if rank == 0 else 1))


def share_each_third_step(devices=None, synchronization="all_reduce", kind="ring"):
    """In a worker: outputs, inputs' gradients and moving averages of 20 steps with sync_every=3."""
    strategy = harness.strategy(devices=devices) if kind == "ring" else mirrored_strategy()
    shape = (12, 4, 5)
    with strategy.scope():
        layer = tfring.SyncBatchNormalization(
            momentum=0.8, synchronization=synchronization, sync_every=3, center=False, scale=False
        )
        layer.build(shape)
    replicas = len(strategy.extended.worker_devices)
    rank = strategy.cluster.rank if kind == "ring" else 0
    mine = shards.bounds(shape[0], strategy.num_replicas_in_sync)[rank * replicas :][:replicas]
    got = shards.train(layer, shards.batches(shape), strategy, mine)
    [bits] = shards.bits(layer)
    return mine, got, bits, [w.name for w in layer.weights]


@pytest.mark.parametrize(
    ("world_size", "devices", "how"),
    [
        (3, None, ("all_reduce",)),
        (3, None, ("central",)),
        (2, ["CPU:0", "CPU:1"], ("all_reduce",)),
        (1, ["CPU:0", "CPU:1"], ("all_reduce", "mirrored")),
    ],
)
def test_sharing_each_third_step(world_size, devices, how):
    results = workers(world_size, logical_cpus=len(devices or [0])).run(share_each_third_step, devices, *how)
    assert len({bits for _, _, bits, _ in results}) == 1

    def alone(batches):
        layer = keras.layers.BatchNormalization(momentum=0.8, center=False, scale=False)
        layer.build((None, 4, 5))
        return shards.train(layer, batches)

    whole = alone(shards.batches((12, 4, 5)))
    for mine, got, _, names in results:
        begin, end = mine[0][0], mine[-1][1]
        local = [alone((x[b:e], slope[b:e], mask) for x, slope, mask in shards.batches((12, 4, 5))) for b, e in mine]
        for step in range(shards.STEPS):
            for name in ("outputs", "d_inputs"):
                if step % 3 == 2:
                    want = whole[name][step][begin:end]
                else:
                    want = np.concatenate([part[name][step] for part in local])
                np.testing.assert_allclose(got[name][step], want, atol=1e-5, err_msg=f"{name}, step {step}")
        # The averages have taken in, exactly, the 18 steps up to the last sharing.
        shared = alone(list(shards.batches((12, 4, 5)))[:18])
        assert names == ["moving_mean", "moving_variance"]
        for name in names:
            np.testing.assert_allclose(got[name], shared[name], rtol=1e-5, atol=1e-5)


def test_fit_with_two_replicas_a_worker():
    assert_fitted(workers(2, logical_cpus=2).run(fit, ROWS, {}, {}, False, ["CPU:0", "CPU:1"]))


mirrored = []


def mirrored_strategy():
    """This process's: TensorFlow takes the collectives of a second one for those of the first."""
    import tensorflow as tf

    if not mirrored:
        mirrored.append(tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]))
    return mirrored[0]


def compare_mirrored(case):
    """In a worker: MirroredStrategy, and a RingStrategy alone, over two devices."""
    for strategy in (mirrored_strategy(), harness.strategy(devices=["CPU:0", "CPU:1"])):
        data = dict(shape=(11, 4, 5), dtype="float64", masked=case["masked"])
        with strategy.scope():
            layer = tfring.SyncBatchNormalization(dtype="float64")
            layer.build(data["shape"])
        alone = keras.layers.BatchNormalization(dtype="float64")
        alone.build(data["shape"])
        pieces = shards.bounds(11, 2, case["empty"])
        got = shards.train(layer, shards.batches(**data), strategy, pieces, case["eager"])
        with shards.exact_masks():
            want = shards.train(alone, shards.batches(**data))
        shards.assert_close(got, want, tolerance=1e-10)
        assert len(shards.bits(layer)) == 1


@pytest.mark.parametrize(
    "case",
    [
        dict(masked=False, empty=(), eager=False),
        dict(masked=True, empty=(), eager=True),
        dict(masked=True, empty=(0,), eager=False),
    ],
    ids=str,
)
def test_mirrored_strategy(case):
    workers(1, logical_cpus=2).run(compare_mirrored, case)
