"""Pipeline: a model in stages over several workers trains as the model in one process does."""

import functools
import logging
import math
import time

import common
import numpy as np
import pytest
from common import history_error, is_reference, relative_error
from harness import strategy, workers

import tfring
from tfring._keras.sharding import sharding_of
from tfring.callbacks import variables
from tfring.sharding import at_stage, shard_along, shard_table

BATCH = 20
ROWS = 43  # the last batch has 3: fewer than microbatches


def data():
    """Two inputs and two targets, which drift with the row."""
    generator = np.random.default_rng(0)
    drift = np.linspace(0, 2, ROWS)[:, None]
    a = generator.normal(size=(ROWS, 4)) * (1 + drift) + drift
    b = generator.normal(size=(ROWS, 3)) - drift
    y = np.sin(a.sum(1, keepdims=True)) + b[:, :1]
    return {"a": a, "b": b}, {"y": y, "z": a[:, :2]}


def chain():
    """Sequential, of one input and one output."""
    import keras

    layers = [keras.layers.Dense(5, activation="tanh", name=name) for name in ("d1", "d2", "d3")]
    return keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1, name="d4")])


def squares():
    """A regularizer that leaves it to Keras to add its values up, and which files name."""
    import keras

    @keras.saving.register_keras_serializable()
    class Squares(keras.regularizers.Regularizer):
        """Leaves it to Keras to add its values up."""

        def __call__(self, weight):
            return 0.01 * weight**2

        def get_config(self):
            return {}

    return Squares()


def graph():
    """Skip connections over stages, an input that is used late, an output that is made early, losses of layers."""
    import keras

    layers = keras.layers
    a, b = keras.Input((4,), name="a"), keras.Input((3,), name="b")
    first = layers.Dense(6, activation="tanh", name="d1", kernel_regularizer=squares())(a)
    early = layers.Dense(2, name="z")(first)
    second = layers.Dense(6, activation="tanh", name="d2", activity_regularizer="l2")(first) + first
    third = layers.Dense(6, activation="tanh", name="d3")(second)
    third = layers.Concatenate(name="join")([third, first, layers.Dense(2, name="side")(b)])
    y = layers.Dense(1, name="y", kernel_regularizer="l2", bias_regularizer=squares())(third)
    return keras.Model({"a": a, "b": b}, {"y": y, "z": early})


def table():
    """With a sparse gradient in the first stage."""
    import keras

    layers = keras.layers
    inputs = keras.Input((4,))
    x = layers.Embedding(9, 3, name="rows")(keras.ops.cast(keras.ops.clip(inputs, 0, 8), "int32"))
    x = layers.LayerNormalization(name="d2")(layers.Flatten()(x))
    return keras.Model(inputs, layers.Dense(1, name="d4")(layers.Dense(4, activation="tanh", name="d3")(x)))


def divided(axis, update="rows"):
    """With sharded layers in both stages; outside of a strategy they are whole."""
    import keras

    layers = tfring.layers
    inputs = keras.Input((4,))
    ids = keras.ops.cast(keras.ops.clip(inputs, 0, 8), "int32")
    x = layers.ShardedEmbedding(9, 3, axis=axis, update=update, name="rows")(ids)
    x = keras.layers.Flatten()(x)
    x = layers.ShardedDense(6, "columns", gather_output=False, activation="tanh", axis=axis)(x)
    x = layers.ShardedDense(4, "rows", input_is_parallel=True, kernel_regularizer="l2", axis=axis)(x)
    x = layers.ShardedDense(5, "columns", activation="tanh", axis=axis, name="d3")(x)
    return keras.Model(inputs, keras.layers.Dense(1, name="d4")(x))


def nested():
    """With layers in a functional model, itself in one, in which a stage begins."""
    import keras

    def dense(name):
        return keras.layers.Dense(4, activation="tanh", name=name)

    inner = keras.Sequential([keras.Input((4,)), dense("d2"), dense("d3"), dense("d3b")], name="inner")
    inputs = keras.Input((4,))
    first = dense("d1")(inputs)
    backbone = keras.Model(inputs, inner(first) + first, name="backbone")
    inputs = keras.Input((4,))
    return keras.Model(inputs, keras.layers.Dense(1, name="d4")(backbone(inputs)))


def few_rows():
    """With a table of fewer rows than three workers."""
    import keras

    inputs = keras.Input((4,))
    ids = keras.ops.cast(keras.ops.clip(inputs, 0, 1), "int32")
    x = keras.layers.Flatten()(tfring.layers.ShardedEmbedding(2, 3, update="dense", name="rows")(ids))
    return keras.Model(inputs, keras.layers.Dense(1, name="d4")(x))


MODELS = {
    "chain": chain,
    "graph": graph,
    "table": table,
    "along model": functools.partial(divided, "model"),
    "along data": functools.partial(divided, "data"),
    "dense": functools.partial(divided, None, "dense"),
    "nested": nested,
    "few rows": few_rows,
}
OPTIMIZERS = ["RMSprop", "Adadelta", "Nadam", "Ftrl", "Lion", "ema"]
BEGINS = {1: [], 2: ["d3"], 3: ["d2", "d3"], 4: ["d2", "d3", "d4"]}


def optimizer(name):
    import keras

    return {
        **common.element_wise_optimizers(),
        **common.optimizer_settings(),
        "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.3),
        "adam": lambda: keras.optimizers.Adam(0.01, clipnorm=0.1),
        "adagrad": lambda: keras.optimizers.Adagrad(0.05),
        "plain": lambda: keras.optimizers.SGD(0.05),  # others take duplicate ids of one process one by one
        "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05, 0.9, global_clipnorm=0.1)),
        "accumulating": lambda: keras.optimizers.SGD(0.05, gradient_accumulation_steps=2),
        "swapped": lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.7),
    }[name]()


def compiled(model, kind, by="sgd", **options):
    import keras

    rmse = keras.metrics.RootMeanSquaredError()
    metrics = {"y": ["mae", rmse], "z": ["mae"]} if kind == "graph" else ["mae", rmse]
    model.compile(optimizer(by), "mse", metrics=metrics, **options)
    return model


def inputs_of(kind):
    import keras

    x, y = data()
    x, y = ({name: v.astype(keras.config.floatx()) for name, v in part.items()} for part in (x, y))
    return (x, y) if kind == "graph" else (x["a"], y["y"])


def outcome(model, kind, by, thorough):
    """History, evaluation, predictions, weights."""
    import keras

    x, y = inputs_of(kind)
    options = {"sample_weight": np.linspace(0.5, 2, ROWS).astype("float32")} if kind == "chain" else {}
    if by == "swapped":
        options |= {"callbacks": [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)], "validation_data": (x, y)}
    history = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, **options).history
    evaluated, predicted = {}, {}
    if thorough:
        evaluated = model.evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True)
        predicted = model.predict(x, batch_size=BATCH, verbose=0)
        predicted = predicted if kind == "graph" else {"y": predicted}
    return history, evaluated, predicted, model.get_weights()


def trained(mesh, cases, floatx):
    """For each case `(model, options of Pipeline, optimizer, options of compile)` what there is to compare."""
    import keras

    keras.config.set_floatx(floatx)
    ring = strategy(mesh=tfring.Mesh(**mesh))
    results = []
    for number, (kind, options, by, compile_options) in enumerate(cases):
        keras.utils.set_random_seed(3)
        with ring.scope():
            model = MODELS[kind]()
            start = model.get_weights()
            pipeline = tfring.parallel.Pipeline(model, BEGINS[ring.mesh.pipeline], **options)
            compiled(pipeline, kind, by, **compile_options)
        got = outcome(pipeline, kind, by, number == 0)
        found = {"bits": b"".join(np.ascontiguousarray(w).tobytes() for w in got[3]), "logs": repr(got[:2])}
        every = [*pipeline.weights, *pipeline.optimizer.variables]
        ring.assert_equal(every)
        found["held"] = sum(int(np.prod(v.shape)) for v in every)
        found["counted"] = pipeline.count_params(), pipeline.model.layers[-1].count_params()
        # Of that its part: others at other places of the mesh hold the same.
        shardings = [sharding_of(v) for v in every]
        holders = [1 if sharding is None else len(sharding.parts) for sharding in shardings]
        found["part"] = sum(int(np.prod(v.shape)) * n / ring.mesh.size for v, n in zip(every, holders, strict=True))
        if is_reference(ring):
            alone = MODELS[kind]()
            alone.set_weights(start)
            compiled(alone, kind, by)
            # Keras builds it while tracing else, where ScheduleFreeAdamW's copy of the weights is lost.
            alone.optimizer.build(alone.trainable_variables)
            want = outcome(alone, kind, by, number == 0)
            found["errors"] = [history_error(got[i], want[i]) for i in range(3)]
            found["errors"].append(relative_error(got[3], want[3]))
            assert found["counted"] == (alone.count_params(), alone.layers[-1].count_params())
            found["all"] = sum(v.numpy().size for v in [*alone.weights, *alone.optimizer.variables])
        results.append(found)
    return results


def test_shardings_of_a_stage():
    """Ranks of the stage hold what they hold without one, those of other stages nothing; along one axis more."""
    columns, rows = shard_along((7, 5), 1, 3, "model"), shard_along((7, 5), 0, 2)
    for sharding in (None, columns, rows, shard_table((7, 5), 2, "interleaved")):
        for num_stages, stage in ((2, 0), (2, 1), (4, 2)):
            found = at_stage((7, 5), sharding, stage, num_stages)
            num_ranks = 1 if sharding is None else len(sharding.parts)
            assert found.axis == ("pipeline" if sharding is None else f"pipeline+{sharding.axis}")
            assert len(found.parts) == num_stages * num_ranks
            for rank in range(len(found.parts)):
                of_stage, place = divmod(rank, num_ranks)
                if of_stage != stage:
                    assert found.count(rank) == 0 and found.shape_of(rank).count(0) == 1
                    assert found.slices(rank) == (slice(0, 0, 1),)
                elif sharding is None:
                    assert found.shape_of(rank) == (7, 5) and found.slices(rank) == (slice(0, 7, 1),)
                else:
                    assert found.shape_of(rank) == sharding.shape_of(place)
                    assert found.slices(rank) == sharding.slices(place)
    assert [at_stage((), None, 1, 2).shape_of(rank) for rank in (0, 1)] == [(0,), ()]


@pytest.mark.parametrize(
    ("mesh", "cases", "floatx"),
    [
        pytest.param(
            {"pipeline": 2},
            [
                ("graph", {"num_microbatches": 4, "recompute": True}, "sgd", {}),
                ("chain", {"num_microbatches": 1}, "adam", {}),
                ("table", {"num_microbatches": 2, "schedule": "gpipe"}, "plain", {}),
            ],
            "float32",
            marks=pytest.mark.oldest,
        ),
        ({"pipeline": 3}, [("graph", {"num_microbatches": 4}, "adam", {})], "float32"),
        pytest.param(
            {"pipeline": 3},
            [
                ("graph", {"num_microbatches": 4, "schedule": "gpipe", "recompute": True}, "adagrad", {}),
                ("chain", {"num_microbatches": 4}, "accumulating", {}),
                ("chain", {"num_microbatches": 3}, "sgd", {"run_eagerly": True}),
            ],
            "float32",
            marks=pytest.mark.long,
        ),
        ({"pipeline": 2}, [("nested", {"num_microbatches": 2}, "swapped", {})], "float32"),
        pytest.param(
            {"pipeline": 2},
            [("chain", {"num_microbatches": 2}, by, {}) for by in OPTIMIZERS],
            "float32",
            marks=pytest.mark.long,
        ),
        ({"data": 3}, [("few rows", {}, "Ftrl", {})], "float32"),
        ({"pipeline": 3}, [("chain", {"num_microbatches": 4}, "adam", {})], "float64"),
        (
            {"pipeline": 2, "data": 2},
            [
                ("along data", {"num_microbatches": 2, "recompute": True}, "adagrad", {}),
                ("chain", {"num_microbatches": 8}, "scaled", {"steps_per_execution": 2}),
            ],
            "float32",
        ),
        (
            {"pipeline": 2, "model": 2},
            [("along model", {"num_microbatches": 2, "schedule": "gpipe", "recompute": True}, "scaled", {})],
            "float32",
        ),
        pytest.param(
            {"pipeline": 2, "data": 2}, [("graph", {"num_microbatches": 4}, "sgd", {})], "float32",
            marks=pytest.mark.long,
        ),
        pytest.param(
            {"pipeline": 2, "model": 2},
            [("dense", {"num_microbatches": 4}, "adam", {}), ("along model", {"num_microbatches": 4}, "plain", {})],
            "float32",
            marks=pytest.mark.long,
        ),
        pytest.param(
            {"pipeline": 2, "data": 2, "model": 2},
            [("along model", {"num_microbatches": 2}, "scaled", {})],
            "float32",
            marks=pytest.mark.long,
        ),
    ],
    ids=[
        *("two", "three", "three otherwise", "nested", "optimizers", "few rows"),
        *("float64", "data", "model", "data otherwise", "model otherwise", "all three"),
    ],
)
def test_equals_one_process(mesh, cases, floatx):
    size = math.prod(mesh.values())
    results = workers(size).run(trained, mesh, cases, floatx)
    for number, case in enumerate(cases):
        of_case = [rank[number] for rank in results]
        [reference] = [found for found in of_case if "errors" in found]
        assert max(reference["errors"]) < (1e-5 if floatx == "float32" else 1e-12), (case, reference["errors"])
        for what in ("bits", "logs", "counted"):
            assert len({found[what] for found in of_case}) == 1, (case, what)
        # All of them together, each weight and slot on one stage and there in pieces, hold what one process does.
        assert sum(found["part"] for found in of_case) == pytest.approx(reference["all"], abs=1e-6), case
        assert max(found["held"] for found in of_case) < reference["all"]


def on_batches():
    """The largest difference of what `train_on_batch` and `test_on_batch` return from one process."""
    import keras

    ring = strategy(mesh=tfring.Mesh(pipeline=2))
    x, y = inputs_of("chain")

    def returned(model):
        results = [model.train_on_batch(x[:rows], y[:rows]) for rows in (19, 11, 2)]
        return [*results, model.test_on_batch(x[:7], y[:7])]

    keras.utils.set_random_seed(3)
    with ring.scope():
        model = chain()
        pipeline = tfring.parallel.Pipeline(model, ["d2"], num_microbatches=3)
        compiled(pipeline, "chain")
    keras.utils.set_random_seed(3)
    alone = chain()
    compiled(alone, "chain")
    return relative_error(returned(pipeline), returned(alone))


def test_logs_of_batches_whose_microbatches_differ():
    assert max(workers(2).run(on_batches)) < 1e-5


def in_float16():
    """Returns the scales of the loss after training, of a Pipeline and of its model in one process."""
    import keras

    ring = strategy(mesh=tfring.Mesh(pipeline=2))
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(40, 4)), np.tile([[2.9], [-2.9]], [20, 1])  # large, with a mean of 0

    def scale_of(model):
        model.compile(keras.optimizers.SGD(0.01), "mse")
        model.fit(x, y, batch_size=10, shuffle=False, verbose=0)
        return float(model.optimizer.dynamic_scale.numpy())

    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        keras.utils.set_random_seed(1)  # of one process, too, other weights may overflow
        with ring.scope():
            pipeline = tfring.parallel.Pipeline(chain(), ["d2"], num_microbatches=4)
        keras.utils.set_random_seed(1)
        return scale_of(pipeline), scale_of(chain())
    finally:
        keras.mixed_precision.set_global_policy("float32")


def test_microbatches_of_float16_overflow_no_earlier_than_the_batch():
    for of_pipeline, alone in workers(2).run(in_float16):
        assert of_pipeline == alone == 2.0**15


def with_dropout(recompute):
    """Weights after training with dropout in all stages, and what is predicted."""
    import keras

    ring = strategy(mesh=tfring.Mesh(pipeline=2))
    x, y = inputs_of("chain")
    keras.utils.set_random_seed(3)
    with ring.scope():
        layers = []
        for number in range(4):
            layers += [keras.layers.Dense(6, activation="tanh", name=f"d{number}"), keras.layers.Dropout(0.4)]
        model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)])
        pipeline = tfring.parallel.Pipeline(model, ["d2"], num_microbatches=2, recompute=recompute)
        compiled(pipeline, "chain")
    history = pipeline.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
    of_model = variables.variables_of(pipeline)
    taken = variables.take(ring.ring, pipeline, of_model).arrays
    pairs = zip(of_model, taken, strict=False)  # rank 0 has them
    draws = [int(array.view("int64").ravel()[1]) for v, array in pairs if "seed_generator" in v.path]
    return pipeline.get_weights(), pipeline(x[:5]).numpy(), history["loss"], draws


def test_dropout_is_the_same_when_computed_again():
    kept = workers(2).run(with_dropout, False)
    again = workers(2).run(with_dropout, True)
    assert relative_error(kept[0][0], kept[1][0]) == 0
    assert relative_error(again[0][0], kept[0][0]) < 1e-5
    assert relative_error(again[1][1:3], kept[0][1:3]) < 1e-5
    draws = 2 * 3 * 2  # epochs, steps and microbatches
    assert kept[0][3] == again[0][3] == [draws] * 4  # a backup has those of all stages


# -- files ------------------------------------------------------------------------------------------------------------


def saved(folder, kind, mesh):
    """Trains, saves in every way, and goes on."""
    import keras

    keras.utils.set_random_seed(3)
    ring = strategy(mesh=tfring.Mesh(**mesh))
    with ring.scope():
        pipeline = compiled(tfring.parallel.Pipeline(MODELS[kind](), ["d3"], num_microbatches=2), kind, "adam")
    x, y = inputs_of(kind)
    options = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    backup = tfring.callbacks.Backup(f"{folder}/backup", sharded=kind != "graph")
    checkpoint = keras.callbacks.ModelCheckpoint(f"{folder}/checkpoint.weights.h5", save_weights_only=True)
    pipeline.fit(x, y, callbacks=[backup, checkpoint], **options)
    tfring.save(pipeline, f"{folder}/model.keras")
    pipeline.save_weights(f"{folder}/model.weights.h5")
    first = pipeline.get_weights()
    pipeline.fit(x, y, initial_epoch=1, epochs=2, **options)
    return first, pipeline.get_weights()


def loaded(folder, kind, stages):
    """The weights of models made of the files, at once and after another epoch."""
    import keras

    ring = strategy(mesh=tfring.Mesh(pipeline=stages))

    def divided(model):
        return tfring.parallel.Pipeline(model, BEGINS.get(stages, ["d3"]), num_microbatches=2)

    x, y = inputs_of(kind)
    options = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    results = []
    squares()  # so that the file finds it
    with ring.scope():
        whole = keras.models.load_model(f"{folder}/model.keras")
        given = whole.get_weights()
        restored, weights, checkpoint = (compiled(divided(MODELS[kind]()), kind, "adam") for _ in range(3))
        for model, file in ((weights, "model"), (checkpoint, "checkpoint")):
            model.optimizer.build(model.trainable_variables)
            model.load_weights(f"{folder}/{file}.weights.h5")
            results.append(model.get_weights())
    weights.fit(x, y, initial_epoch=1, epochs=2, **options)
    restored.fit(x, y, epochs=2, callbacks=[tfring.callbacks.Backup(f"{folder}/backup")], **options)
    return given, *results, weights.get_weights(), restored.get_weights()


@pytest.mark.parametrize(
    ("kind", "mesh", "into"),
    [
        pytest.param("graph", {"pipeline": 2}, (1, 3), marks=pytest.mark.oldest),
        ("along model", {"pipeline": 2, "model": 2}, (2,)),
        pytest.param("along model", {"pipeline": 2, "model": 2}, (1,), marks=pytest.mark.long),
    ],
    ids=["stages", "stages in pieces", "of pieces in one process"],
)
def test_files(tmp_path, kind, mesh, into):
    (first, second), *_ = workers(math.prod(mesh.values())).run(saved, str(tmp_path), kind, mesh)
    for stages in into:
        for given, weights, checkpoint, gone_on, restored in workers(stages).run(loaded, str(tmp_path), kind, stages):
            for got in (given, weights, checkpoint):
                assert relative_error(got, first) == 0
            for got in (gone_on, restored):
                assert relative_error(got, second) < 1e-5


# -- what is refused --------------------------------------------------------------------------------------------------


STEPS = ("call", "train_step", "test_step", "predict_step", "compute_loss", "compute_metrics")


def refused(folder):
    """The errors of what cannot be right, by name."""
    import keras
    import tensorflow as tf

    layers = keras.layers
    errors = {}
    ring = strategy(mesh=tfring.Mesh(pipeline=2))

    def attempt(name, function, error=tfring.errors.ConfigurationError):
        with pytest.raises(error) as raised, ring.scope():
            function()
        errors[name] = str(raised.value)

    def made(model, stages=("d3",), **options):
        return tfring.parallel.Pipeline(model, list(stages), **options)

    def sequence(*parts):
        return keras.Sequential([keras.Input((4,)), *parts, layers.Dense(1, name="d3")])

    class Own(keras.Model):
        def call(self, inputs):
            return inputs

    def own_step(name):
        kind = type("OwnStep", (keras.Model,), {name: lambda self, *args, **kwargs: {}})
        inputs = keras.Input((4,))
        return kind(inputs, layers.Dense(1, name="d3")(layers.Dense(2)(inputs)))

    def tied():
        inputs = keras.Input((4,))
        shared = layers.Dense(4, name="shared")
        return keras.Model(inputs, shared(layers.Dense(4, name="d3")(shared(inputs))))

    def masked():
        inputs = keras.Input((4,), dtype="int32")
        rows = layers.Embedding(9, 3, mask_zero=True)(inputs)
        return keras.Model(inputs, layers.GlobalAveragePooling1D()(layers.Dense(1, name="d3")(rows)))

    def sparse():
        inputs = keras.Input((4,), sparse=True)
        return keras.Model(inputs, layers.Dense(1, name="d3")(keras.ops.negative(inputs)))

    def scalar():
        inputs = keras.Input((4,))
        mean = keras.ops.mean(inputs)
        return keras.Model(inputs, layers.Dense(1, name="d3")(layers.Dense(2)(inputs) * mean) * mean)

    def of_batch_size():
        inputs = keras.Input(batch_shape=(20, 4))
        return keras.Model(inputs, layers.Dense(1, name="d3")(layers.Dense(2)(inputs)))

    def twice():
        model = chain()
        made(model)
        made(model)

    def fitted(model, **options):
        x, y = inputs_of("chain")
        pipeline = made(model, num_microbatches=2)
        pipeline.compile(**{"optimizer": "sgd", "loss": "mse", **options})
        pipeline.fit(x, y, batch_size=BATCH, verbose=0)

    def changed(name):
        model = chain()
        getattr(model.get_layer("d4"), name)(*{"enable_lora": [2], "quantize": ["int8"]}[name])
        return model

    weighted = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    attempt("name", lambda: made(chain(), ["d9"]))
    attempt("string", lambda: tfring.parallel.Pipeline(chain(), "d3"))
    attempt("count", lambda: tfring.parallel.Pipeline(chain(), 2))
    attempt("layers", lambda: made(chain(), [layers.Dense(1)]))
    attempt("order", lambda: made(chain(), ["d3", "d2"]))
    attempt("first", lambda: made(chain(), ["d1"]))
    attempt("same", lambda: made(chain(), ["d3", "d3"]))
    attempt("number", lambda: made(chain(), ["d2", "d3"]))
    attempt("subclass", lambda: made(Own()))
    attempt("not built", lambda: made(keras.Sequential([layers.Dense(1), layers.Dense(1, name="d3")])))
    for step in STEPS:
        attempt(step, lambda step=step: made(own_step(step)))
    attempt("tied", lambda: made(tied()))
    attempt("mask", lambda: made(masked()))
    attempt("sparse", lambda: made(sparse()))
    attempt("scalar", lambda: fitted(scalar()))
    attempt("rows", lambda: made(of_batch_size()))
    attempt("normalization", lambda: made(sequence(layers.BatchNormalization(name="bn"))))
    attempt("schedule", lambda: made(chain(), schedule="zigzag"))
    attempt("microbatches", lambda: made(chain(), num_microbatches=0))
    attempt("twice", twice)
    attempt("loss", lambda: fitted(chain(), loss=weighted))
    attempt("Lamb", lambda: fitted(chain(), optimizer=keras.optimizers.Lamb()))
    attempt("jit", lambda: fitted(chain(), jit_compile=True))
    attempt("quantize", lambda: made(chain()).quantize("int8"))
    attempt("LoRA", lambda: made(chain()).model.get_layer("d4").enable_lora(2))
    for name in ("enable_lora", "quantize"):
        attempt(f"{name} before", lambda name=name: made(changed(name)))
    outside = chain()
    attempt("outside", lambda: made(outside))
    with ring.scope():
        pipeline = compiled(made(chain()), "chain", "adam")
        pipeline.optimizer.build(pipeline.trainable_variables)
    attempt("no rows", lambda: pipeline(tf.constant(2.5)))
    for name, part in {"pipeline": pipeline, "model": pipeline.model, "optimizer": pipeline.optimizer}.items():
        attempt(f"checkpoint of {name}", lambda part=part: tf.train.Checkpoint(part=part).save(f"{folder}/checkpoint"))
    return errors


def test_what_is_refused(tmp_path):
    for errors in workers(2).run(refused, str(tmp_path)):
        assert "`stages` has 'd9'" in errors["name"] and "'d1', 'd2', 'd3', 'd4'" in errors["name"]
        assert "`stages` is 'd3'" in errors["string"] and "`stages` is [<Dense" in errors["layers"]
        assert "`stages` is 2, not a list of the names of the layers" in errors["count"]
        assert "`stages` is ['d3', 'd2']" in errors["order"]
        assert "`stages` is ['d1']" in errors["first"]
        assert "`stages` is ['d3', 'd3']" in errors["same"]
        assert "`stages` has 2 names, which make 3 stages" in errors["number"]
        assert "a Own" in errors["subclass"] and "that is not built" in errors["not built"]
        assert all(f"of class OwnStep has its own `{step}`" in errors[step] for step in STEPS)
        assert "used by 'shared' in stage 1 and by 'shared' in stage 2" in errors["tied"]
        assert "A masked tensor between stages 1 and 2" in errors["mask"]
        assert "A sparse or ragged tensor between stages 1 and 2" in errors["sparse"]
        assert "A scalar between stages 1 and 2" in errors["scalar"] and "made by 'mean'" in errors["scalar"]
        assert "a fixed number of rows" in errors["rows"]
        assert "BatchNormalization 'bn' computes statistics" in errors["normalization"]
        assert "`schedule` is 'zigzag'" in errors["schedule"] and "`num_microbatches` is 0" in errors["microbatches"]
        assert "is already in a Pipeline" in errors["twice"]
        assert "reduction='mean_with_sample_weight'" in errors["loss"]
        assert "Lamb '" in errors["Lamb"] and "jit_compile=True" in errors["jit"]
        assert "need all: quantize(). Save the model" in errors["quantize"]
        assert "need all: another weight of Dense 'd4'. Save the model" in errors["LoRA"]
        assert all("Dense 'd4' has such weights" in errors[f"{n} before"] for n in ("enable_lora", "quantize"))
        assert "made outside" in errors["outside"]
        assert "slices a batch by rows" in errors["no rows"] and "shape=()" in errors["no rows"]
        for part, received in {"pipeline": "weight", "model": "weight", "optimizer": "slot"}.items():
            error = errors[f"checkpoint of {part}"]
            assert f"shard of a {received}" in error and "tfring.save(model, path)" in error
        assert " of Pipeline 'pipeline_of_" in errors["checkpoint of pipeline"]
        assert " of Adam 'adam'. Save" in errors["checkpoint of optimizer"]


def one_thread():
    """Returns the end of training with each schedule where TensorFlow has one thread for both channels."""
    ring = strategy(mesh=tfring.Mesh(pipeline=2))
    x, y = inputs_of("chain")
    with ring.scope():
        with pytest.raises(tfring.errors.ConfigurationError, match="has 1 inter-op threads"):
            tfring.parallel.Pipeline(chain(), ["d3"], num_microbatches=2)
        pipeline = compiled(tfring.parallel.Pipeline(chain(), ["d3"], num_microbatches=2, schedule="gpipe"), "chain")
    return pipeline.fit(x, y, batch_size=BATCH, verbose=0).history


def test_one_thread_for_both_channels():
    first, second = workers(2, env={"TF_NUM_INTEROP_THREADS": "1"}).run(one_thread)
    assert first == second and np.isfinite(first["loss"]).all()


def in_one_process():
    """The largest difference to the model itself, without a strategy."""
    import keras

    keras.utils.set_random_seed(3)
    model = graph()
    copy = keras.models.clone_model(model)
    copy.set_weights(model.get_weights())
    pipeline = compiled(tfring.parallel.Pipeline(model, ["d2", "d3"], num_microbatches=4), "graph")
    got, want = (outcome(each, "graph", "sgd", True) for each in (pipeline, compiled(copy, "graph")))
    return max([*(history_error(got[i], want[i]) for i in range(3)), relative_error(got[3], want[3])])


def test_one_process_without_a_strategy():
    [error] = workers(1).run(in_one_process)
    assert error < 1e-6


def refused_in_a_step(what):
    """Returns the errors of this rank: of one found by one stage, the others learn when its rank leaves."""
    import keras

    class Counting(keras.layers.Layer):
        def build(self, shape):
            self.total = self.add_weight(shape=(4,), trainable=False, name="total")

        def call(self, x):
            self.total.assign(keras.ops.mean(x, 0))
            return x

    def of_all(y_true, y_pred):
        return keras.ops.square(tfring.gather_for_loss(y_true) - y_pred)

    ring = strategy(mesh=tfring.Mesh(pipeline=2))
    x, y = inputs_of("chain")
    with ring.scope():
        first = Counting(name="counting") if what.startswith("state") else keras.layers.Dense(4)
        model = keras.Sequential([keras.Input((4,)), first, keras.layers.Dense(1, name="d3")])
        pipeline = tfring.parallel.Pipeline(model, ["d3"], num_microbatches=2)
        pipeline.compile("sgd", of_all if what == "loss" else "mse")
    try:
        (pipeline.evaluate if what.endswith("evaluate") else pipeline.fit)(x, y, batch_size=BATCH, verbose=0)
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        ring.close()


def combines_rows(what):
    """Returns the errors of this rank, or the losses, where a stage combines rows of the batch, or seems to."""
    import keras
    import tensorflow as tf

    def centered(x):
        return x - keras.ops.mean(x, 0)

    def of_numpy(x):
        return tf.ensure_shape(tf.numpy_function(lambda v: 2.0 * v, [x], x.dtype), [None, 4])

    def scaled_by_row(x):
        return x / (1.0 + keras.ops.max(keras.ops.abs(x), 1, keepdims=True))

    def relative(y_true, y_pred):
        return tf.reduce_sum(tf.abs(y_true - y_pred)) / tf.reduce_sum(tf.abs(y_true))

    def by_row(y_true, y_pred):
        return tf.reduce_sum(tf.abs(y_true - y_pred), 1) / (1.0 + tf.reduce_max(tf.abs(y_true), 1))

    ring = strategy(mesh=tfring.Mesh(pipeline=2))
    x, y = inputs_of("chain")
    with ring.scope():
        functions = {"centered": centered, "numpy": of_numpy}
        between = keras.layers.Lambda(functions.get(what.partition(",")[0], scaled_by_row), output_shape=(4,))
        layers = [keras.layers.Dense(4, kernel_regularizer="l2"), between, keras.layers.Dropout(0.1)]
        model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1, name="d3")])
        pipeline = tfring.parallel.Pipeline(model, ["d3"], num_microbatches=2)
        pipeline.compile("sgd", relative if what == "relative" else by_row)
    logged = []
    logging.getLogger("tfring").addFilter(lambda record: logged.append(record.getMessage()) or True)
    try:
        if what == "centered, predict":
            return pipeline.predict(x, batch_size=BATCH, verbose=0)
        return pipeline.fit(x, y, batch_size=BATCH, verbose=0).history["loss"], logged
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        ring.close()


@pytest.mark.parametrize(
    ("what", "rank"), [("centered", 0), ("centered, predict", 0), ("relative", 1), ("by row", None), ("numpy", None)]
)
def test_a_stage_that_combines_rows_is_refused_with_the_line(what, rank):
    found = workers(2).run(combines_rows, what)
    if rank is None:
        assert found[0][0] == found[1][0], found
        assert np.isfinite(found[0][0][0])
        said = "may combine the rows of all: test_pipeline.py:" in " ".join(found[0][1])
        assert said == (what == "numpy")
        return
    kind, text = found[rank]
    assert kind == "ConfigurationError", text
    assert f"stage {rank + 1} combines the rows of all: test_pipeline.py:" in text
    assert f" in {what.partition(',')[0]} (" in text and "num_microbatches=1" in text
    assert found[1 - rank][0] == "PeerLostError"


def fails_in_a_step(stage):
    """Returns what this rank raises and when, where an operation of one stage does not take what it gets."""
    import keras
    import tensorflow as tf

    class Checked(keras.layers.Layer):
        def call(self, x):
            return tf.debugging.check_numerics(x, "not a number here")

    ring = strategy(mesh=tfring.Mesh(pipeline=2))
    x, y = inputs_of("chain")
    x[-1] = np.nan
    with ring.scope():
        layers = [keras.layers.Dense(4, name="d1"), keras.layers.Dense(1, name="d2")]
        layers.insert(2 * stage, Checked(name="checked"))
        model = keras.Sequential([keras.Input((4,)), *layers])
        pipeline = tfring.parallel.Pipeline(model, ["d2"], num_microbatches=2)
        pipeline.compile("sgd", "mse")
    try:
        pipeline.fit(x, y, batch_size=BATCH, verbose=0, shuffle=False)
    except Exception as error:
        return type(error).__name__, str(error), time.time()
    finally:
        if stage == 0:  # which waits for gradients when it fails, and is not missed because it leaves
            time.sleep(8)
        ring.close()


@pytest.mark.parametrize("stage", [0, 1])
def test_an_operation_that_fails_in_one_stage_ends_the_step_of_all(stage):
    results = workers(2).run(fails_in_a_step, stage)
    kind, message, _ = results[stage]
    assert kind == "InvalidArgumentError" and "not a number here" in message, results
    kind, message, _ = results[1 - stage]
    how = f"rank {stage} gave up in " if stage == 0 else f"rank {stage} "
    assert kind == "PeerLostError" and message.startswith(how), results
    assert abs(results[0][2] - results[1][2]) < 5, results


@pytest.mark.parametrize(("what", "rank"), [("loss", 1), ("state", 0), ("state, evaluate", 0)])
def test_what_a_stage_refuses_in_a_step(what, rank):
    results = workers(2).run(refused_in_a_step, what)
    kind, message = results[rank]
    assert kind == "ConfigurationError"
    assert ("gather_for_loss needs all rows" if what == "loss" else "total', and would write it") in message
    kind, message = results[1 - rank]
    assert kind == "PeerLostError" and f"rank {rank} has stage {rank + 1} of 2" in message
