"""A worker's shards of a ShardedDense, which files hold in full; rejections; the calls of a step."""

import pathlib
import re

import numpy as np
import pytest
from common import relative_error, skewed_rows
from dense_models import BOTH, MODEL, ONE_SUM, PAIR, dense, model_of
from harness import strategy, workers

import tfring

# -- what a worker holds ---------------------------------------------------------------------------------------------


def pieces(mesh, seeds):
    """Shapes of weights and slots on this worker, and initial values; those of one process where it is alone."""
    import keras

    ring = strategy(mesh=mesh)
    keras.utils.set_random_seed(seeds[ring.cluster.rank % len(seeds)])
    with ring.scope():
        model = model_of(lambda: keras.optimizers.Adam(0.01), PAIR)()
    start = model.get_weights()
    x, y = skewed_rows()
    model.fit(x, y, verbose=0)
    slots = [tuple(v.shape) for v in model.optimizer.variables if "momentum" in v.path]
    return start, [tuple(v.shape) for v in model.weights], slots


@pytest.mark.parametrize("mesh", [tfring.Mesh(data=3), tfring.Mesh(data=1, model=3)], ids=str)
def test_what_a_worker_holds(mesh):
    [(want, _, _)] = workers(1).run(pieces, tfring.Mesh(), [5])
    of_units, of_features = [3, 2, 2], [3, 2, 2]  # of 7 each
    for rank, (start, shapes, slots) in enumerate(workers(3).run(pieces, mesh, [5, 6, 7])):
        assert shapes == slots
        assert shapes[:4] == [(4, of_units[rank]), (of_units[rank],), (of_features[rank], 5), (5,)]
        assert all(np.array_equal(a, b) for a, b in zip(start, want, strict=True))


# -- files -----------------------------------------------------------------------------------------------------------


def kept(model):
    store: dict = {}
    model.optimizer.save_own_variables(store)
    return model.get_weights(), [np.asarray(store[key]) for key in sorted(store, key=int)]


def saved(folder, mesh):
    import keras

    keras.utils.set_random_seed(3)
    with strategy(mesh=mesh).scope():
        model = model_of(lambda: keras.optimizers.Adam(0.01), ONE_SUM)()
    x, y = skewed_rows()
    callbacks = [keras.callbacks.ModelCheckpoint(f"{folder}/checkpoint.keras"), tfring.callbacks.Backup(folder)]
    model.fit(x, y, batch_size=20, shuffle=False, verbose=0, callbacks=callbacks)
    model.save(f"{folder}/every rank.keras")
    for name in ("model.keras", "model.weights.h5"):
        tfring.save(model, f"{folder}/{name}")
    return kept(model)


def loaded(folder, mesh):
    """Returns the state of models made of files; of the last after one more epoch, and of one from a backup."""
    import keras

    results = {}
    x, y = skewed_rows()
    options = {"batch_size": 20, "shuffle": False, "verbose": 0}

    def new():
        model = model_of(lambda: keras.optimizers.Adam(0.01), ONE_SUM)()
        model.optimizer.build(model.trainable_variables)
        return model

    with strategy(mesh=mesh).scope():
        for name in ("checkpoint.keras", "every rank.keras", "model.keras"):
            results[name] = kept(keras.models.load_model(f"{folder}/{name}"))
        model, restored = new(), new()
        model.load_weights(f"{folder}/model.weights.h5")
        results["model.weights.h5"] = kept(model)
    model.fit(x, y, **options)
    restored.fit(x, y, epochs=2, callbacks=[tfring.callbacks.Backup(folder)], **options)
    results |= {"trained": kept(model), "restored": kept(restored)}
    if mesh.size == 1:
        plain = new()
        assert not any(isinstance(layer, tfring.layers.ShardedDense) for layer in plain.layers)
        plain.load_weights(f"{folder}/model.weights.h5")
        results["plain"] = kept(plain)
    return results


@pytest.mark.parametrize("writers", [pytest.param(tfring.Mesh(data=3), marks=pytest.mark.long), BOTH], ids=str)
def test_files(writers, tmp_path):
    (want_weights, want_slots), *_ = workers(writers.size).run(saved, str(tmp_path), writers)
    trained = []
    for readers in (tfring.Mesh(data=1), tfring.Mesh(data=2), tfring.Mesh(data=1, model=3)):
        for results in workers(readers.size).run(loaded, str(tmp_path), readers):
            trained += [results.pop("trained"), results.pop("restored")]
            assert len(results) >= 4
            for name, (weights, slots) in results.items():
                assert relative_error(weights, want_weights) == 0, (readers, name)
                assert relative_error(slots, want_slots) == 0, (readers, name)
    for weights, slots in trained[1:]:
        assert relative_error(weights, trained[0][0]) < 1e-5
        assert relative_error(slots, trained[0][1]) < 1e-5


# -- what is refused -------------------------------------------------------------------------------------------------


def refused(folder, mesh):
    """The errors of what cannot be right, by name."""
    import keras
    import tensorflow as tf

    x, y = skewed_rows()
    ring = strategy(mesh=mesh)
    errors = {}

    def attempt(name, function, error=tfring.errors.ConfigurationError):
        with pytest.raises(error) as raised:
            function()
        errors[name] = str(raised.value)

    def layer(*args, **options):
        return tfring.layers.ShardedDense(7, *args, **options)

    def built(*args, shape=(None, 4), **options):
        with ring.scope():
            made = layer(*args, **options)
            made.build(shape)
        return made

    def model(optimizer=keras.optimizers.Adam):
        with ring.scope():
            return model_of(lambda: optimizer(0.01), PAIR)()

    attempt("split", lambda: layer("heads"))
    attempt("axis", lambda: layer(axis="pipeline"))
    attempt("lora", lambda: layer(lora_rank=2))
    attempt("enable_lora", lambda: layer().enable_lora(2))
    attempt("quantize", lambda: built().quantize("int8"))
    attempt("regularizer", lambda: layer(kernel_regularizer=keras.regularizers.OrthogonalRegularizer()))
    attempt("constraint", lambda: layer(kernel_constraint=keras.constraints.MaxNorm(2)))
    attempt("of bias", lambda: layer(bias_regularizer=lambda bias: 0.0))
    layer("rows", bias_regularizer=lambda bias: 0.0)
    attempt("rows not gathered", lambda: layer("rows", gather_output=False))
    attempt("columns of parts", lambda: layer("columns", input_is_parallel=True))
    attempt("softmax", lambda: layer(gather_output=False, activation="softmax"))
    attempt("activity", lambda: layer(gather_output=False, activity_regularizer="l2"))
    attempt("too few", lambda: built("rows", shape=(None, 1)))
    attempt("Lamb", lambda: model(keras.optimizers.Lamb).fit(x, y, verbose=0))
    attempt("restore", lambda: model().fit(x, y, verbose=0, callbacks=[keras.callbacks.BackupAndRestore(folder)]))
    in_pieces = model()
    with ring.scope():
        in_pieces.optimizer.build(in_pieces.trainable_variables)
    attempt("h5", lambda: in_pieces.save(f"{folder}/model.h5"))
    attempt("export", lambda: in_pieces.export(f"{folder}/exported"))
    composed_outside = keras.Sequential([keras.Input((4,)), built()])  # which belongs to no strategy yet
    attempt("export of composed", lambda: composed_outside.export(f"{folder}/exported"))
    attempt("checkpoint", lambda: tf.train.Checkpoint(model=in_pieces).save(f"{folder}/checkpoint"))
    attempt("saved model", lambda: tf.saved_model.save(in_pieces, f"{folder}/saved_model"))
    attempt("outside", lambda: in_pieces.optimizer.apply([tf.zeros(v.shape) for v in in_pieces.trainable_variables]))
    if ring.cluster.is_chief:
        other = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6), keras.layers.Dense(5)])
        other.save_weights(f"{folder}/other.weights.h5")
    ring.barrier()
    with ring.scope():
        of_7 = keras.Sequential([keras.Input((4,)), dense(7, "columns"), dense(5, "rows")])
    attempt("file", lambda: of_7.load_weights(f"{folder}/other.weights.h5"), ValueError)
    if mesh.model > 1:
        parts = [5, 2] if ring.ring.along("model").rank == 0 else [2, 5]
        attempt("features", lambda: built("rows", input_is_parallel=True, shape=(None, parts[0])))
    return errors


@pytest.mark.parametrize("mesh", [tfring.Mesh(data=2), BOTH], ids=str)
def test_what_is_refused(mesh, tmp_path):
    for errors in workers(mesh.size).run(refused, str(tmp_path), mesh):
        for name, received in {
            "split": "`split` is 'heads'",
            "axis": "`axis` is 'pipeline'",
            "lora": "`lora_rank` of a ShardedDense with units=7",
            "regularizer": "kernel_regularizer=OrthogonalRegularizer",
            "constraint": "kernel_constraint=MaxNorm",
            "of bias": "bias_regularizer=<lambda>",
            "rows not gathered": "gather_output=False",
            "columns of parts": "input_is_parallel=True",
            "softmax": "activation='softmax'",
            "activity": "activity_regularizer",
            "too few": "shape (1, 7)",
            "Lamb": "Lamb",
            "restore": "BackupAndRestore saves",
            "h5": "/kernel'",
            "export": "/kernel'",
            "export of composed": f"/kernel' is sharded over {mesh.size} workers",
            "checkpoint": "'dense",
            "saved model": "'dense",
            "outside": "Adam",
            "file": "shape (4, 6)",
        }.items():
            assert received in errors[name], (name, errors[name])
        assert "tf.saved_model.save would write only this rank's shard" in errors["saved model"]
        assert "`enable_lora` needs the full kernel" in errors["enable_lora"]
        assert "`quantize` needs the full kernel" in errors["quantize"]
        assert mesh.model == 1 or "features [5, 2]" in errors["features"]


def astray():
    """The errors of parts that go where they may not, by what was received; and losses where they may."""
    import keras

    ring = strategy(mesh=MODEL)
    x, y = skewed_rows()
    layers = keras.layers

    def columns(units=6, **options):
        return tfring.layers.ShardedDense(units, gather_output=False, **options)

    def rows(units=1, **options):
        return tfring.layers.ShardedDense(units, "rows", input_is_parallel=True, **options)

    def compiled(*parts):
        with ring.scope():
            model = keras.Sequential([keras.Input((4,)), *(part() for part in parts)])
            model.compile("sgd", "mse")
        return model

    def gated():
        inputs = keras.Input((4,))
        hidden = keras.Sequential([columns(activation="relu"), layers.Dropout(0.1)])(inputs) * columns()(inputs) + 1.0
        outputs = rows()(hidden)
        return keras.Model(inputs, outputs)

    errors = []
    for parts in (
        (columns, lambda: layers.Dense(1, name="last")),
        (columns, lambda: layers.Dropout(0.1), lambda: layers.LayerNormalization(name="norm"), rows),
        (columns, lambda: layers.Activation("relu")),
        (lambda: layers.Dense(6), lambda: rows(name="rows")),
        (columns, lambda: rows(4), lambda: rows(name="again")),
        (lambda: keras.Sequential([columns()]), lambda: layers.Dense(1, name="behind")),
    ):
        with pytest.raises(tfring.errors.ConfigurationError) as raised:
            compiled(*parts)
        errors.append(str(raised.value))
    models = [compiled(columns, lambda: layers.Activation("relu"), rows, lambda: layers.Dense(1)), compiled(gated)]
    return errors, [model.evaluate(x, y, verbose=0) for model in models]


def test_parts_that_go_astray():
    (errors, losses), (_, others) = workers(2).run(astray)
    received = [
        "parts of 'dense.*' go to Dense 'last'",
        "parts of 'dense.*' go to LayerNormalization 'norm'",
        "parts of 'dense.*' are among the outputs of model 'sequential",
        "'rows' with input_is_parallel=True gets full inputs",
        "'again' with input_is_parallel=True gets full inputs",
        "parts of 'dense.*' go to Dense 'behind'",
    ]
    for error, words in zip(errors, received, strict=True):
        assert re.search(f"has no partner: {words}", error), error
    assert losses == others


def replicas():
    layer = tfring.layers.ShardedDense(4)
    error = pytest.raises(tfring.errors.ConfigurationError, match="this process has 2 replicas")
    with strategy(devices=["CPU:0", "CPU:1"]).scope(), error:
        layer.build((None, 4))


def test_several_replicas_are_refused():
    workers(1, logical_cpus=2).run(replicas)


# -- the document ----------------------------------------------------------------------------------------------------

DOCUMENT = pathlib.Path(__file__).parents[2] / "docs" / "sharded_dense.md"


def blocks():
    return re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(), re.DOTALL | re.MULTILINE)


def play(blocks, mesh):
    import keras

    given = {"keras": keras, "tfring": tfring, "strategy": strategy(mesh=mesh)}
    for block in blocks:
        exec(block, given)
    x = given["x"]
    errors = []
    for name in ("block", "attention"):
        model = given[name]
        x = keras.random.normal((4, *model.input_shape[1:]), seed=1)
        errors.append(relative_error([model.predict(x, verbose=0)], [model(x)]))
    return [tuple(v.shape) for v in given["model"].layers[-1].weights], max(errors)


@pytest.mark.parametrize("mesh", [tfring.Mesh(data=2), MODEL], ids=str)
def test_programs_in_the_document(mesh):
    assert len(blocks()) == 3
    for rank, (shapes, error) in enumerate(workers(2).run(play, blocks(), mesh)):
        assert shapes == [[(32, 501), (501,)], [(32, 500), (500,)]][rank]
        assert error < 1e-5


def bytes_of(mesh, split):
    """Bytes this worker sends in a call and in its gradient."""
    import keras
    import tensorflow as tf

    ring = strategy(mesh=mesh)
    with ring.scope():
        layer = tfring.layers.ShardedDense(1_200, split)
        layer.build((None, 600))
    x = tf.constant(np.ones((300, 600), "float32"))
    counts = []

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            before = ring.bytes_sent()
            outputs = layer(x)
            counts.append(ring.bytes_sent() - before)
        before = ring.bytes_sent()
        tape.gradient(outputs, [x, layer.kernel.value])
        counts.append(ring.bytes_sent() - before)

    keras.config.set_floatx("float32")
    ring.run(step, (x,))
    return counts


@pytest.mark.parametrize("mesh", [tfring.Mesh(data=2), tfring.Mesh(data=1, model=3)], ids=str)
def test_costs_in_the_document(mesh):
    n, b, f, u = mesh.size, 300, 600, 1_200
    own = {"columns": [b * f + b * u / n] * 2, "rows": [b * f / n + b * u] * 2}
    same = {"columns": [b * u / n, 2 * b * f / n], "rows": [2 * b * u / n, b * f / n]}
    for split, elements in (own if mesh.model == 1 else same).items():
        for counts in workers(n).run(bytes_of, mesh, split):
            for count, of_each_other in zip(counts, elements, strict=True):
                assert count == pytest.approx(4 * (n - 1) * of_each_other, rel=0.01)
