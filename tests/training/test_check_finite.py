"""CheckFinite names the variable and the replica where NaN or infinity began."""

import numpy as np
import pytest
from common import devices, skewed_ids, skewed_rows
from harness import strategy, workers


def programs():
    """Returns each rank's error, by program; None without an error."""
    import keras

    import tfring

    ring = strategy(**devices())
    replicas = ring.num_replicas_in_sync
    x, y = skewed_rows(80)
    first_of_last = 20 + (replicas - 1) * 20 // replicas  # the row of the second batch with which the last one begins
    ids, _ = skewed_ids(80)
    bad_y = y.copy()
    bad_y[first_of_last] = np.nan

    def dense():
        return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="a"), keras.layers.Dense(1, name="b")])

    def embedding():
        input = keras.Input((3,), dtype="int32")
        looked_up = keras.layers.Embedding(30, 2, name="table")(input)
        return keras.Model(input, keras.layers.Dense(1)(keras.layers.Flatten()(looked_up)))

    def said(make_model, x, y, optimizer="sgd", before=(), **kwargs):
        with ring.scope():
            model = make_model()
            model.compile(optimizer, "mse")
        kwargs = {"batch_size": 20, "epochs": 4, "shuffle": False, "verbose": 0, **kwargs}
        for rows in before:
            model.fit(x[:20], rows[:20], **kwargs)
        try:
            model.fit(x, y, callbacks=[tfring.callbacks.CheckFinite(2)], **kwargs)
        except tfring.errors.NotFiniteError as error:
            return str(error)

    scaled = keras.optimizers.LossScaleOptimizer
    return {
        "one row": said(dense, x, bad_y),
        "traced before": said(dense, x, bad_y, before=[y]),
        "embedding": said(embedding, ids, bad_y),
        "found at the end of an epoch": said(dense, x[20:40], bad_y[20:40]),
        "eager": said(dense, x, bad_y, epochs=1),
        "too large an update": said(dense, x, y, keras.optimizers.SGD(1e38)),
        "scaled loss": said(dense, x, y, scaled(keras.optimizers.SGD(1e-4), initial_scale=1e38)),
        "replicas without rows": said(dense, x[:21], y[:21], keras.optimizers.SGD(1e-4)),
        "accumulated": said(dense, x, bad_y, keras.optimizers.SGD(1e-4, gradient_accumulation_steps=2)),
        "fine": said(dense, x, y, keras.optimizers.SGD(1e-4)),
    }


@pytest.mark.parametrize("logical_cpus", [pytest.param(1, marks=pytest.mark.long), 2])
def test_the_first_variable_and_replica_are_named(logical_cpus):
    results = workers(2, logical_cpus=logical_cpus).run(programs)
    assert results[0] == results[1]
    said = results[0]
    replica = 2 * logical_cpus - 1
    for name in ("one row", "eager", "accumulated"):
        assert f"a/kernel was not finite on replica {replica} (rank 1) at step 1, before any other." in said[name], name
    assert f"on replica {replica} (rank 1) at step 5, before any other." in said["traced before"]
    assert f"table/embeddings was not finite on replica {replica} (rank 1) at step 1" in said["embedding"]
    assert f"a/kernel was not finite on replica {replica} (rank 1) at step 0" in said["found at the end of an epoch"]
    assert "not finite on replica 0 (rank 0)" in said["too large an update"]
    assert [said[name] for name in ("scaled loss", "replicas without rows", "fine")] == [None] * 3
