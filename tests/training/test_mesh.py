"""Workers on the axes of a mesh: those of one replica train on the same rows, and all equal one process."""

import itertools

import numpy as np
import pytest
from common import assert_equal, skewed_rows, train_both
from harness import strategy, workers

import tfring
from tfring.cluster.mesh import AXES
from tfring.errors import ConfigurationError, MismatchError


def test_every_rank_has_its_place():
    for sizes in itertools.product((1, 2, 3), repeat=3):
        mesh = tfring.Mesh(**dict(zip(AXES, sizes, strict=True)))
        ranks = range(mesh.size)
        assert mesh.of(mesh.size) == mesh
        assert sorted({mesh.coordinates(rank) for rank in ranks}) == [mesh.coordinates(rank) for rank in ranks]
        for rank, axis in itertools.product(ranks, AXES):
            line = mesh.ranks(axis, rank)
            assert line[mesh.coordinate(axis, rank)] == rank
            assert all(mesh.ranks(axis, other) == line for other in line)
            others = [a for a in AXES if a != axis]
            assert len({tuple(mesh.coordinate(a, other) for a in others) for other in line}) == 1
        assert mesh.ranks("world", 0) == tuple(ranks)


OTHER_SIZE, NO_NUMBER = "workers, but there are", "not an integer of at least 1"


@pytest.mark.parametrize(("make", "problem", "given"), [
    (lambda: tfring.Mesh(data=3).of(4), OTHER_SIZE, "4: data x model x pipeline"),
    (lambda: tfring.Mesh(model=3).of(4), OTHER_SIZE, "4: data x model x pipeline"),
    (lambda: tfring.Mesh(model=4, pipeline=2).of(4), OTHER_SIZE, "4: data x model x pipeline"),
    (lambda: tfring.Mesh(model=0), NO_NUMBER, "`model` of the mesh is 0"),
    (lambda: tfring.Mesh(pipeline=1.5), NO_NUMBER, "`pipeline` of the mesh is 1.5"),
    (lambda: tfring.Mesh(model=None), NO_NUMBER, "`model` of the mesh is None"),
    (lambda: tfring.RingStrategy(mesh=tfring.Mesh(model=2)), OTHER_SIZE, "1: data x model x pipeline"),
    (lambda: tfring.RingStrategy(mesh={"model": 2}), "not a tfring.Mesh", "`mesh` is {'model': 2}"),
])  # fmt: skip
def test_refuses_other_sizes(make, problem, given):
    with pytest.raises(ConfigurationError, match=problem) as error:
        make()
    assert given in str(error.value)


def make_model(dropout):
    """Without dropout: with everything of which replicas have to bring something together."""

    def make():
        import keras

        class Sum(keras.metrics.Metric):
            """Sums over the rows, and no ratio: anything counted twice shows."""

            def __init__(self):
                super().__init__(name="sum")
                self.total = self.add_weight(name="total", initializer="zeros")

            def update_state(self, y_true, y_pred, sample_weight=None):
                self.total.assign_add(keras.ops.sum(keras.ops.abs(y_pred)))

            def result(self):
                return self.total

        inputs = keras.Input((4,))
        hidden = keras.layers.Dense(8, activation="tanh")(inputs)
        hidden = keras.layers.Dropout(0.5)(hidden) if dropout else tfring.SyncBatchNormalization()(hidden)
        ids = keras.layers.Lambda(lambda x: keras.ops.cast(keras.ops.abs(x), "int32") % 300)(inputs)
        rows = keras.layers.Flatten()(keras.layers.Embedding(300, 64)(ids))
        outputs = keras.layers.Dense(1)(keras.layers.Concatenate()([hidden, rows]))
        model = keras.Model(inputs, outputs)
        optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
        model.compile(optimizer, "mse", metrics=["mae", Sum()])
        return model

    return make


def plain(mesh):
    ring = strategy(mesh=mesh)
    assert ring.num_replicas_in_sync == mesh.data == ring.ring.control.world_size
    x, y = skewed_rows()
    results = {"state": train_both(ring, make_model(dropout=False), x, y, evaluate=(x, y), predict=x)}
    if mesh.data == 1:  # the first replica draws what one process draws
        results["dropout"] = train_both(ring, make_model(dropout=True), x, y, shuffle=True)
    return results


@pytest.mark.parametrize("mesh", [
    tfring.Mesh(data=1, model=2),
    pytest.param(tfring.Mesh(data=1, pipeline=3), marks=pytest.mark.long),
    tfring.Mesh(data=2, model=2),
    pytest.param(tfring.Mesh(data=2, pipeline=2), marks=pytest.mark.long),
], ids=str)  # fmt: skip
def test_equals_one_process(mesh):
    assert_equal(workers(mesh.size).run(plain, mesh))


def of_one_replica():
    """Exercises the exchanges between workers that train on the same rows."""
    import keras
    import tensorflow as tf

    ring = strategy(mesh=tfring.Mesh(model=2))
    rank = ring.cluster.rank
    with ring.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    weights = model.get_weights()
    x, y = skewed_rows()

    class Stops(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = rank == 1 and batch == 1

    model.fit(x, y, batch_size=20, epochs=3, verbose=0, shuffle=False, callbacks=[Stops()])
    steps = int(model.optimizer.iterations.numpy())
    other = tf.data.Dataset.from_tensors((x + rank, y)).unbatch().batch(20)
    with pytest.raises(tf.errors.InvalidArgumentError, match="drew different batches"):
        model.fit(other, verbose=0)
    with pytest.raises(MismatchError, match="`x` is not the same on every rank"):
        model.predict(x + rank, verbose=0)
    return weights, steps, model.get_weights()


def test_workers_of_one_replica_agree():
    results = workers(2).run(of_one_replica)
    assert [steps for _, steps, _ in results] == [2, 2]
    for mine, first in zip(results[1][::2], results[0][::2], strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(mine, first, strict=True))


def refused(settings):
    with pytest.raises(ConfigurationError, match=r"model=2, pipeline=1.* exclude each other") as caught:
        strategy(mesh=tfring.Mesh(data=1, model=2), **settings)
    return str(caught.value)


@pytest.mark.parametrize(("settings", "communication"), [
    ({"shard_optimizer": True}, "ring"),
    ({"devices": ["CPU:0", "CPU:1"]}, "ring"),
    ({}, "tensorflow"),
])  # fmt: skip
def test_refuses_what_a_mesh_does_not_do(settings, communication):
    told = workers(2, communication).run(refused, settings)
    named = next(iter(settings), "communication")
    assert all(named in text.rpartition(" with ")[2] for text in told)
