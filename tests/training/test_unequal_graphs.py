"""One rank's graph has more operations in a branch, where its tape would come to the collectives in another order."""

import pytest
from common import assert_equal, skewed_rows, train_both
from harness import strategy, workers


def branches(with_detour):
    import keras
    import tensorflow as tf

    import tfring

    ring = strategy()
    detours = {"rank": ring.cluster.rank}

    class Detour(keras.layers.Layer):
        def call(self, x):
            for _ in range(7 if with_detour and detours["rank"] == 1 else 0):
                x = tf.identity(x)
            return x

    def of_all_rows(y, p):
        rows, outputs = tfring.gather_for_loss((y, p))
        return tf.reduce_mean((rows - outputs) ** 2) + 0.1 * tf.reduce_sum(tf.reduce_mean(outputs, 0) ** 2)

    def make(sharded):
        inputs = keras.Input((4,))
        outputs = {}
        for name in ("a", "b"):
            x = keras.layers.Dense(6, name=f"in_{name}")(inputs)
            x = tfring.SyncBatchNormalization(name=f"first_{name}")(x)
            if name == "a":
                x = Detour(name="detour")(x)
            dense = tfring.layers.ShardedDense if sharded else keras.layers.Dense
            x = dense(6, activation="tanh", name=f"dense_{name}")(x)
            x = tfring.SyncBatchNormalization(name=f"second_{name}")(x)
            outputs[name] = keras.layers.Dense(1, name=name)(x)
        # Both together: the tape comes to both branches at once.
        outputs["both"] = keras.layers.Add(name="both")([outputs["a"], outputs["b"]])
        model = keras.Model(inputs, outputs)
        losses = {"a": of_all_rows, "b": of_all_rows, "both": "mse"}
        model.compile(keras.optimizers.SGD(1e-3), losses)
        return model

    x, y = skewed_rows(41)
    targets = {"a": y, "b": y[::-1].copy(), "both": y + 1}
    return {
        "replicated": train_both(ring, lambda: make(False), x, targets, evaluate=(x, targets)),
        "sharded": train_both(ring, lambda: make(True), x, targets, evaluate=(x, targets)),
    }


@pytest.mark.parametrize(("world_size", "detour"), [pytest.param(2, 1, marks=pytest.mark.oldest), (3, 1)])
def test_branches_that_one_rank_visits_otherwise(world_size, detour):
    assert_equal(workers(world_size).run(branches, detour, timeout=300))
