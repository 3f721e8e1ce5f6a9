"""Distributed variables that are copied, and those of a graph of TensorFlow 1's kind."""

import numpy as np
import pytest
from harness import workers


def ring_strategy():
    import harness

    return harness.strategy()


def copies():
    """Copies of variables and layers are of the same strategy, and change on their own."""
    import copy

    import keras
    import tensorflow as tf

    ring = ring_strategy()
    size, rank = ring.cluster.world_size, ring.cluster.rank
    with ring.scope():
        summed = tf.Variable([1.0, 2.0], aggregation=tf.VariableAggregation.SUM)
        on_read = tf.Variable(
            0.0, synchronization=tf.VariableSynchronization.ON_READ, aggregation=tf.VariableAggregation.SUM
        )
        dense = keras.layers.Dense(1)
        dense.build((None, 2))
        inside = copy.deepcopy(summed)
    outside, [in_list], on_read_too, dense_too = map(copy.deepcopy, (summed, [summed], on_read, dense))
    for copied in (inside, outside, in_list):
        assert copied.distribute_strategy is ring
        ring.run(lambda copied=copied: copied.assign_add([rank + 1.0] * 2))
        np.testing.assert_allclose(copied.numpy(), np.add([1.0, 2.0], size * (size + 1) / 2))
    np.testing.assert_allclose(summed.numpy(), [1.0, 2.0])
    ring.run(lambda: on_read_too.assign_add(rank + 1.0))
    assert (float(on_read_too.read_value()), float(on_read.read_value())) == (size * (size + 1) / 2, 0.0)
    dense_too.kernel.assign([[1.0], [1.0]])
    assert not np.array_equal(dense.kernel.numpy(), dense_too.kernel.numpy())

    def in_function():
        return copy.deepcopy(summed).read_value()

    with pytest.raises(NotImplementedError, match="deepcopy"):
        tf.function(in_function)()
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope(), pytest.raises(RuntimeError, match="Mixing different"):
        copy.deepcopy(summed)


def graphs_without_order():
    """Variables of a `tf.Graph`, and collectives there, have no order that all ranks keep."""
    import tensorflow as tf

    ring = ring_strategy()
    kinds = [
        {},
        {"synchronization": tf.VariableSynchronization.ON_READ, "aggregation": tf.VariableAggregation.SUM},
    ]
    with ring.scope():
        eager = [tf.Variable(float(ring.cluster.rank), **kind) for kind in kinds]
    read = [float(tf.convert_to_tensor(v)) for v in eager]  # by which the ring has run ops eagerly
    for kind in kinds:
        refused = pytest.raises(ValueError, match=r"with tf.function.*outside of a tf.Graph")
        with tf.Graph().as_default(), refused, ring.scope():
            tf.convert_to_tensor(tf.Variable(1.0, **kind))
    with tf.Graph().as_default(), pytest.raises(ValueError, match="without eager execution"):
        ring.ring.world.all_reduce([tf.constant(1.0)], name="x")
    for variable, value in zip(eager, read, strict=True):
        assert float(tf.function(lambda variable=variable: tf.convert_to_tensor(variable))()) == value
    assert ring.ring.world.all_reduce([tf.constant(1.0)], name="x")[0] == ring.cluster.world_size


@pytest.mark.parametrize("task", [copies, graphs_without_order])
def test_over_two_workers(task):
    workers(2).run(task)
