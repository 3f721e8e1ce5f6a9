"""Tables divided over the model axis, whose workers have the same ids, or over the data axis of a mesh."""

import numpy as np
import pytest
from common import assert_equal, relative_error, skewed_ids, train_both
from harness import strategy, workers

import tfring

VOCABULARY, DIM = 30, 5
MODEL = tfring.Mesh(data=1, model=2)
BOTH = tfring.Mesh(data=2, model=2)


def model_of(optimizer, kind="sharded", **options):
    """Alone, with what computes the same: a table of its own with the same updates, or a dense gradient."""

    def make():
        import keras
        import tensorflow as tf

        ids = keras.Input((3,), dtype="int32")
        table = keras.layers.Embedding
        if tf.distribute.has_strategy() or kind == "sharded":
            table = tfring.layers.ShardedEmbedding
        own = options if table is not keras.layers.Embedding else {}
        rows = table(VOCABULARY, DIM, **own)(ids)
        model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(rows)))
        model.compile(optimizer(), "mse")
        return model

    return make


def fitted(mesh, axis, names):
    import keras

    ring = strategy(mesh=mesh)
    o = keras.optimizers
    x, y = skewed_ids(num_rows=43, vocabulary=VOCABULARY)
    cases = {
        "rows": model_of(lambda: o.Adam(0.01, global_clipnorm=0.1), axis=axis, update="rows"),
        "dense": model_of(lambda: o.Adam(0.01), axis=axis, update="dense", placement="range"),
        "as Keras": model_of(lambda: o.SGD(0.05), "keras", axis=axis),
        "loss scale": model_of(lambda: o.LossScaleOptimizer(o.Adagrad(0.05)), axis=axis, placement="columns"),
        "accumulated": model_of(lambda: o.SGD(0.05, gradient_accumulation_steps=2), axis=axis, update="dense"),
    }
    return {name: train_both(ring, cases[name], x, y, predict=x) for name in names}


@pytest.mark.parametrize(("mesh", "axis", "names"), [
    pytest.param(MODEL, None, ["rows", "accumulated"], marks=pytest.mark.oldest),
    (tfring.Mesh(data=1, model=3), "model", ["as Keras"]),
    (BOTH, None, ["rows", "loss scale"]),
    pytest.param(BOTH, "data", ["rows"], marks=pytest.mark.long),
    (tfring.Mesh(data=2), "model", ["dense"]),  # which has one worker: each has the whole table
], ids=str)  # fmt: skip
def test_equals_one_process(mesh, axis, names):
    assert_equal(workers(mesh.size).run(fitted, mesh, axis, names))


def many_tables(mesh, axis):
    """A DistributedEmbedding of two tables in one weight and one by columns, trained; and what a worker holds of it."""
    import keras

    ring = strategy(mesh=mesh)
    x, y = skewed_ids(num_rows=43, vocabulary=VOCABULARY)

    def make():
        Table, Feature = tfring.layers.TableConfig, tfring.layers.FeatureConfig
        plan = {"a": "whole", "b": "rows", "c": "columns"}
        combiners = {"a": "sum", "b": "mean", "c": "sqrtn"}
        features = [Feature(name, Table(name, VOCABULARY, DIM, combiner=combiners[name])) for name in plan]
        layer = tfring.layers.DistributedEmbedding(features, plan=plan, axis=axis)
        ids = keras.Input((3,), dtype="int32")
        model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Concatenate()(layer([ids] * 3))))
        model.compile(keras.optimizers.Adagrad(0.05), "mse")
        return model

    with ring.scope():
        model = make()
    again = type(model.layers[1]).from_config(model.layers[1].get_config())
    assert again.axis == axis
    return {"tables": train_both(ring, make, x, y)}, [tuple(w.shape) for w in model.layers[1].weights]


@pytest.mark.parametrize(("mesh", "axis"), [(MODEL, None), (BOTH, "data")], ids=str)
def test_many_tables(mesh, axis):
    results = workers(mesh.size).run(many_tables, mesh, axis)
    for rank, (_, held) in enumerate(results):  # "a" is at the first
        first = mesh.coordinate(axis or "model", rank) == 0
        assert held == [(VOCABULARY * 3 // 2 if first else VOCABULARY // 2, DIM), (VOCABULARY, 3 if first else 2)]
    assert_equal([result for result, _ in results])


def saved(folder, mesh):
    import keras

    keras.utils.set_random_seed(3)
    x, y = skewed_ids(num_rows=43, vocabulary=VOCABULARY)
    with strategy(mesh=mesh).scope():
        model = model_of(lambda: keras.optimizers.Adam(0.01))()
    model.fit(x, y, batch_size=20, shuffle=False, verbose=0, callbacks=[tfring.callbacks.Backup(folder)])
    tfring.save(model, f"{folder}/model.keras")
    return kept(model)


def kept(model):
    store: dict = {}
    model.optimizer.save_own_variables(store)
    return [*model.get_weights(), *(np.asarray(store[key]) for key in sorted(store, key=int))]


def loaded(folder, mesh):
    import keras

    x, y = skewed_ids(num_rows=43, vocabulary=VOCABULARY)
    options = {"batch_size": 20, "shuffle": False, "verbose": 0}
    with strategy(mesh=mesh).scope():
        model = keras.models.load_model(f"{folder}/model.keras")
        restored = model_of(lambda: keras.optimizers.Adam(0.01))()
    first = kept(model)
    model.fit(x, y, **options)
    restored.fit(x, y, epochs=2, callbacks=[tfring.callbacks.Backup(folder)], **options)
    return first, kept(model), kept(restored)


def test_files(tmp_path):
    want, *others = workers(4).run(saved, str(tmp_path), BOTH)
    assert all(relative_error(other, want) == 0 for other in others)
    second = []
    for mesh in (tfring.Mesh(data=1), MODEL, tfring.Mesh(data=3)):
        for first, trained, restored in workers(mesh.size).run(loaded, str(tmp_path), mesh):
            assert relative_error(first, want) == 0
            second += [trained, restored]
    assert all(relative_error(each, second[0]) < 1e-5 for each in second)


def bad_id():
    import keras
    import tensorflow as tf

    with strategy(mesh=MODEL).scope():
        model = model_of(lambda: keras.optimizers.SGD(0.05))()
    x, y = skewed_ids(num_rows=20, vocabulary=VOCABULARY)
    x[3] = VOCABULARY
    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        model.fit(x, y, batch_size=20, verbose=0)
    return str(raised.value)


def test_ids_without_a_row():
    for message in workers(2).run(bad_id):
        assert f"no row for id {VOCABULARY}" in message


def test_another_axis_is_refused():
    for kind in (lambda **o: tfring.layers.ShardedEmbedding(3, 2, **o),):
        with pytest.raises(tfring.errors.ConfigurationError, match="`axis` is 'pipeline'"):
            kind(axis="pipeline")
