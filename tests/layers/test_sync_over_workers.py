"""SyncBatchNormalization on 2, 3 and 4 workers equals keras.layers.BatchNormalization on the whole batch."""

import functools

import harness
import numpy as np
import pytest
import shards
from harness import workers

# name: shape, and what differs from float32, axis -1, unequal shards, one rank each
CASES = {
    "rows": dict(shape=(13, 5)),
    "sequences, axis 1": dict(shape=(11, 4, 6), axis=1),
    "images": dict(shape=(11, 3, 4, 5)),
    "images, channels first": dict(shape=(11, 5, 3, 4), axis=1),
    "volumes": dict(shape=(11, 2, 3, 2, 4)),
    "volumes, channels in the middle": dict(shape=(11, 2, 5, 3, 2), axis=2),
    "more rows than a block": dict(shape=(700, 2)),
    "float64": dict(shape=(11, 3, 5), dtype="float64", tolerance=1e-10),
    "float16": dict(shape=(11, 3, 5), dtype="float16", tolerance=4e-3),
    "bfloat16": dict(shape=(11, 3, 5), dtype="bfloat16", tolerance=3e-2),
    "mixed_float16": dict(
        shape=(11, 3, 5), dtype="float16", policy="mixed_float16", tolerance=4e-3, weights_tolerance=1e-5
    ),
    "mixed_bfloat16": dict(
        shape=(11, 3, 5), dtype="bfloat16", policy="mixed_bfloat16", tolerance=3e-2, weights_tolerance=1e-5
    ),
    "mask": dict(shape=(11, 6, 5), masked=True),
    "mask, float64": dict(shape=(11, 6, 5), masked=True, dtype="float64", tolerance=1e-10),
    "no gamma, no beta": dict(shape=(11, 5), layer=dict(scale=False, center=False, momentum=0.9, epsilon=1e-5)),
    "a rank without rows": dict(shape=(11, 3, 5), empty=(1,)),
    "rank 0 without rows, float64": dict(shape=(11, 5), dtype="float64", tolerance=1e-10, empty=(0,)),
    "one rank has all rows": dict(shape=(11, 5), empty=(0, 1, 3)),
    "eager": dict(shape=(11, 3, 5), eager=True),
    "central": dict(shape=(11, 3, 5), layer=dict(synchronization="central")),
    "central, mask, float64, a rank without rows": dict(
        shape=(11, 6, 5),
        masked=True,
        dtype="float64",
        tolerance=1e-10,
        empty=(1,),
        layer=dict(synchronization="central"),
    ),
}
EVERYWHERE = [
    "images",
    "mask, float64",
    "a rank without rows",
    "central, mask, float64, a rank without rows",
]


def options_of(case):
    return {"axis": case.get("axis", -1), "dtype": case.get("policy") or case.get("dtype"), **case.get("layer", {})}


def batches_of(case):
    dtype = case.get("dtype", "float32")
    dtype = np.dtype("float32" if dtype == "bfloat16" else dtype)
    return shards.batches(case["shape"], dtype=dtype, axis=case.get("axis", -1), masked=case.get("masked", False))


def train_alone(case):
    """In a worker: trains Keras' own layer on the whole batch."""
    import keras

    options = options_of(case)
    options.pop("synchronization", None)
    alone = keras.layers.BatchNormalization(**options)
    alone.build(case["shape"])
    with shards.exact_masks():
        return shards.train(alone, batches_of(case))


def compare(case, devices, want):
    """In a worker: trains the layer on its shards, compares it with `want`, and returns the bits of the weights."""
    import tfring

    strategy = harness.strategy(devices=devices)
    with strategy.scope():
        synchronized = tfring.SyncBatchNormalization(**options_of(case))
        synchronized.build(case["shape"])
    replicas = len(strategy.ring.devices)
    mine = shards.bounds(case["shape"][0], strategy.num_replicas_in_sync, case.get("empty", ()))
    mine = mine[strategy.cluster.rank * replicas :][:replicas]
    got = shards.train(synchronized, batches_of(case), strategy, mine, case.get("eager", False))
    rows = slice(mine[0][0], mine[-1][1])
    shards.assert_close(got, want, rows, case.get("tolerance", 1e-5), case.get("weights_tolerance"))
    [bits] = shards.bits(synchronized)
    return bits


@functools.cache
def alone(name):
    [want] = workers(1).run(train_alone, CASES[name])
    return want


def assert_equal(name, group, devices=None):
    want = alone(name)
    assert len(set(group.run(compare, CASES[name], devices, want))) == 1


@pytest.mark.parametrize("name", CASES)
def test_three_workers(name):
    assert_equal(name, workers(3))


@pytest.mark.parametrize("name", EVERYWHERE)
@pytest.mark.parametrize("world_size", [2, 4])
def test_other_world_sizes(world_size, name):
    assert_equal(name, workers(world_size))


@pytest.mark.parametrize("name", [*EVERYWHERE, "eager"])
def test_two_replicas_a_worker(name):
    assert_equal(name, workers(2, logical_cpus=2), ["CPU:0", "CPU:1"])


def variances_about(means):
    """In a worker: the variance one step takes of N(mean, 1), and its relative error, for each mean."""
    import tfring

    strategy = harness.strategy()
    rank, errors, variances = strategy.cluster.rank, [], []
    [(begin, end)] = shards.bounds(4096, strategy.num_replicas_in_sync)[rank : rank + 1]
    for mean in means:
        x = (np.random.default_rng(0).normal(size=(4096, 8)) + mean).astype("float32")
        with strategy.scope():
            layer = tfring.SyncBatchNormalization(momentum=0.0)
            layer.build(x.shape)
        strategy.run(lambda x, layer=layer: layer(x, training=True), (x[begin:end],))
        variances.append(layer.moving_variance.numpy())
        errors.append(np.abs(variances[-1] / x.astype("float64").var(0) - 1).max())
    return errors, np.stack(variances).tobytes()


def test_variance_about_a_large_mean():
    results = workers(3).run(variances_about, [0, 10, 1e2, 1e3, 1e4, 1e5])
    assert len({bits for _, bits in results}) == 1
    assert max(results[0][0]) < 1e-5, results[0][0]


@pytest.mark.parametrize("name", EVERYWHERE)
def test_tensorflow_collectives(name):
    assert_equal(name, workers(3, "tensorflow"))
