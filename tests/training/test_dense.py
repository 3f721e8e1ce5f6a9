"""Dense models: N workers equal one process on the same global batches, whatever `fit` and `compile` are told."""

import numpy as np
import pytest
from common import assert_equal, devices, skewed_rows, train_both
from harness import strategy, workers

from tfring.cluster import Mesh
from tfring.reduction import buckets


def tower(optimizer, loss="mse", dtype=None, compile_options=None, **dense_options):
    import keras

    def make():
        layers = [keras.layers.Dense(8, activation="tanh", dtype=dtype, **dense_options) for _ in range(2)]
        model = keras.Sequential([keras.layers.Input((4,), dtype=dtype), *layers, keras.layers.Dense(1, dtype=dtype)])
        compiled = {"metrics": ["mae"], **(compile_options or {})}
        model.compile(optimizer(), loss, **compiled)
        return model

    return make


def training_options(only, check_equal=False):
    import keras

    ring = strategy(check_equal=check_equal, **devices())
    x, y = skewed_rows()
    weights = np.linspace(0, 2, len(x)).astype("float32")
    cases = {}

    def sgd(**options):
        return lambda: keras.optimizers.SGD(0.05, momentum=0.9, **options)

    def case(name, make, *data, **options):
        if name in only:
            cases[name] = train_both(ring, make, *(data or (x, y)), **options)

    case("plain", tower(sgd()), evaluate=(x, y), predict=x, validation_split=0.3)
    case("sample_weight", tower(sgd()), sample_weight=weights, validation_data=(x[:33], y[:33], weights[:33]))
    labels = (np.arange(len(x)) % 3).astype("float32")[:, None]
    case("class_weight", tower(sgd()), x, labels, class_weight={0: 0.2, 1: 3.0, 2: 1.0})
    case("steps_per_execution", tower(sgd(), compile_options={"steps_per_execution": 3}), evaluate=(x, y), predict=x)
    case("run_eagerly", tower(sgd(), compile_options={"run_eagerly": True}), evaluate=(x, y), predict=x)
    case("clipnorm, weight_decay", tower(sgd(clipnorm=0.01, weight_decay=0.01)))
    case("clipvalue, use_ema", tower(sgd(clipvalue=0.001, use_ema=True, ema_overwrite_frequency=3)))
    # The update of the second epoch's last batch: the ranks without a row in it contribute what they have accumulated.
    accumulated = sgd(gradient_accumulation_steps=2, global_clipnorm=0.1, use_ema=True, ema_overwrite_frequency=3)
    case("accumulation", tower(accumulated), x[:41], y[:41])
    case("loss_scale", tower(lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05))))
    case("regularizers", tower(sgd(), kernel_regularizer="l2", activity_regularizer="l2"))
    case("sum", tower(lambda: keras.optimizers.SGD(1e-4), loss=keras.losses.MeanSquaredError(reduction="sum")))
    case("fewer rows than workers", tower(sgd()), x[:1], y[:1], evaluate=(x[:1], y[:1]), predict=x[:1])
    one_row = {"evaluate": (x[:41], y[:41]), "predict": x[:41], "validation_data": (x[:33], y[:33])}
    case("a last batch of one row", tower(sgd()), x[:41], y[:41], **one_row)
    return cases


def float64():
    import keras

    ring = strategy()
    x, y = (a.astype("float64") for a in skewed_rows())
    keras.config.set_floatx("float64")
    make = tower(lambda: keras.optimizers.Adam(0.01), dtype="float64")
    return {"float64": train_both(ring, make, x, y)}


def test_training_options():
    assert_equal(workers(2).run(training_options, IN_KERAS, timeout=400))


IN_KERAS = ["plain", "sample_weight", "class_weight", "run_eagerly", "sum"]
IN_KERAS += ["clipnorm, weight_decay", "clipvalue, use_ema"]
# What differs in the collectives a step makes and in how rows are cut, not in what Keras does with the results.
OTHERWISE = ["steps_per_execution", "accumulation", "loss_scale", "a last batch of one row"]


@pytest.mark.parametrize(("n", "options", "more"), [
    (3, {}, ["fewer rows than workers"]),
    pytest.param(2, {}, [], marks=pytest.mark.long),
    pytest.param(4, {}, ["fewer rows than workers"], marks=pytest.mark.long),
    pytest.param(3, {"communication": "tensorflow"}, [], marks=pytest.mark.long),
    pytest.param(2, {"logical_cpus": 2}, ["run_eagerly", "clipnorm, weight_decay"], marks=pytest.mark.long),
])
def test_training_options_otherwise(n, options, more):
    results = workers(n, **options).run(training_options, [*OTHERWISE, *more], True, timeout=400)
    assert set(results[0]) == {*OTHERWISE, *more}
    assert_equal(results)


@pytest.mark.oldest
def test_regularizers():  # Keras before 3.14 adds up those of activities over the rows
    assert_equal(workers(3).run(training_options, ["regularizers"]))


def test_float64():
    assert_equal(workers(3).run(float64), tolerance=1e-12)


def in_buckets():
    """A network of several hosts has small buckets for the first layers; here small enough for a small model."""
    import keras

    from tfring.reduction.dense import BucketSizes

    results, calls = {}, []
    for sizes in (BucketSizes(), BucketSizes(600, 40), BucketSizes(64), BucketSizes(1)):
        ring = strategy()
        ring.ring.gradient_ops._buckets = sizes
        make = tower(lambda: keras.optimizers.SGD(0.05, global_clipnorm=0.1))
        results[str(sizes)] = train_both(ring, make, *skewed_rows())
        calls.append(ring.ring.gradients.communicator.statistics()["collectives"]["all_reduce"])
        ring.close()
    assert [number // calls[0] for number in calls] == [1, 3, 4, 6], calls
    return results


def test_buckets_of_all_sizes():
    assert_equal(workers(2).run(in_buckets, timeout=400))


def test_a_plan_of_buckets():
    generator = np.random.default_rng(0)
    for _ in range(200):
        number = int(generator.integers(1, 30))
        sizes = generator.integers(0, 100, number).tolist()
        dtypes = generator.choice(["float32", "float16"], number).tolist()
        most, last = (int(generator.integers(1, 300)) for _ in range(2))
        plan = buckets.plan_buckets(sizes, dtypes, most, last)
        assert sorted(i for bucket in plan for i in bucket.indices) == list(range(number))
        ready = [bucket.indices[-1] for bucket in plan]  # the backward pass goes from the last to the first
        assert ready == sorted(ready, reverse=True)
        for dtype in set(dtypes):
            limit = min(most, last)
            *rest, first = reversed([bucket for bucket in plan if bucket.dtype == dtype])
            for bucket in (*rest, first):
                assert bucket.num_bytes == sum(sizes[i] for i in bucket.indices)
                assert list(bucket.indices) == sorted(bucket.indices, reverse=True)
                assert bucket.num_bytes - sizes[bucket.indices[0]] < limit  # the last to come closes it
                assert bucket.num_bytes >= limit or bucket is first
                limit = min(most, 2 * limit)


def compressed(compression):
    """Weights before and after, exact and rounded, as one vector each; and how many bytes of gradients were sent."""
    import keras

    x, y = skewed_rows(num_features=128)

    def flat(model):
        return np.concatenate([w.ravel() for w in model.get_weights()])

    def train(how):
        ring = strategy(compression=how)
        keras.utils.set_random_seed(1)
        with ring.scope():  # wide enough that its gradients are not small
            layers = [keras.layers.Dense(256, activation="tanh"), keras.layers.Dense(1)]
            model = keras.Sequential([keras.layers.Input((128,)), *layers])
            model.compile(keras.optimizers.SGD(0.001), "mse")
        start = flat(model)
        model.fit(x, y, batch_size=20, epochs=2, verbose=0, shuffle=False)
        sent = ring.ring.gradients.bytes_sent()
        ring.close()
        return start, flat(model), sent

    start, exact, sent = train(None)
    _, rounded, fewer = train(compression)
    return start, exact, rounded, sent, fewer


@pytest.mark.parametrize(("n", "compression", "unit"), [(2, "float16", 2**-11), (3, "bfloat16", 2**-8)])
def test_compression(n, compression, unit):
    """Half the bytes; what weights have moved by is off by some roundings, and all ranks are off alike."""
    results = workers(n).run(compressed, compression)
    start, exact, rounded, sent, fewer = results[0]
    assert 0.49 * sent < fewer < 0.51 * sent
    assert all(np.array_equal(rounded, of[2]) for of in results)
    error = np.abs(rounded - exact).max() / np.abs(exact - start).max()
    assert unit / 100 < error < 4 * unit


def test_compressions_that_there_are_not():
    import tfring
    from tfring.errors import ConfigurationError

    with pytest.raises(ConfigurationError, match="`compression` is 'float8', not one of"):
        tfring.RingStrategy(compression="float8")
    with pytest.raises(ConfigurationError, match="TensorFlow's collectives send float32 uncompressed"):
        tfring.RingStrategy(compression="float16", communication="tensorflow")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"communication": "nccl"}, "`communication` is 'nccl', not one of"),
        ({"bucket_bytes": 0}, "`bucket_bytes` is 0, not an integer of at least 1, or None"),
        ({"bucket_bytes": "4 MB"}, "`bucket_bytes` is '4 MB', not an integer"),
        (
            {"communication": "tensorflow", "trace": "some/folder"},
            "trace='some/folder' and communication='tensorflow' exclude each other",
        ),
        (  # before workers are sought
            {"mesh": Mesh(model=2), "shard_optimizer": True},
            r"mesh=Mesh\(.*model=2.*\) and shard_optimizer=True exclude each other.* Leave out one",
        ),
        ({"devices": ["GPU:99"]}, r"`devices` is \['GPU:99'\], but this process has .*CPU:0"),
    ],
)
def test_settings_that_there_are_not(settings, message):
    import tfring

    with pytest.raises(tfring.errors.ConfigurationError, match=message):
        tfring.RingStrategy(**settings)
