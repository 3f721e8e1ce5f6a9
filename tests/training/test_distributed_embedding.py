"""DistributedEmbedding: many tables in one exchange equal one layer of one process for each table."""

import numpy as np
import pytest
from common import history_error, is_reference, relative_error
from harness import strategy, workers

import tfring

SIZES = {"items": (30, 5), "users": (17, 5), "tags": (23, 2), "genres": (4, 5)}
COMBINERS = {"items": "mean", "users": "sum", "tags": "sqrtn", "genres": "mean"}
PLAN = {"items": "whole", "users": "rows", "tags": "columns", "genres": "replicated"}
BY_ROWS = {"items": "rows", "users": "rows", "tags": "rows", "genres": "replicated"}
OTHERS = {"items": "columns", "users": "whole", "tags": "whole", "genres": "whole"}
FEATURES = {  # its table, how its ids are laid out, and how many ids an example has at most
    "item": ("items", "one", 1),
    "history": ("items", "ragged", 4),
    "user": ("users", "dense", 2),
    "tag": ("tags", "sparse", 3),
    "genre": ("genres", "dense", 3),
}
BATCH = 20


def new_layer(**options):
    layers = tfring.layers
    tables = {name: layers.TableConfig(name, *size, combiner=COMBINERS[name]) for name, size in SIZES.items()}
    features = {name: layers.FeatureConfig(name, tables[table]) for name, (table, _, _) in FEATURES.items()}
    return layers.DistributedEmbedding(features, **{"plan": PLAN, **options})


def initial_tables():
    generator = np.random.default_rng(7)
    return {name: generator.normal(size=size).astype("float32") for name, size in SIZES.items()}


def data(num_rows=41, seed=0):
    """For each feature ids, of which few are frequent, weights, and which of them count; and targets."""
    generator = np.random.default_rng(seed)
    found = {}
    for name, (table, layout, width) in FEATURES.items():
        ids = np.minimum(generator.zipf(1.5, size=(num_rows, width)) - 1, SIZES[table][0] - 1).astype("int32")
        ids[num_rows // 2 :] = SIZES[table][0] - 1 - ids[num_rows // 2 :]
        lengths = generator.integers(0 if layout == "ragged" else 1, width + 1, size=(num_rows, 1))
        keep = np.arange(width) < lengths if layout in ("ragged", "sparse") else np.ones(ids.shape, bool)
        # Padding names ids that the example has anyway, so that no other row has a gradient where it is looked up.
        ids = np.where(keep, ids, found["item"][0] if layout == "ragged" else ids[:, :1])
        found[name] = ids, generator.uniform(0.5, 2, size=ids.shape).astype("float32") * keep, keep
    y = sum(np.sin(ids * weights).sum(1, keepdims=True) for ids, weights, _ in found.values())
    return found, y.astype("float32")


def laid_out(layout, values, keep):
    import tensorflow as tf

    if layout == "ragged":
        return tf.RaggedTensor.from_row_lengths(values[keep], keep.sum(1))
    if layout == "sparse":
        return tf.SparseTensor(np.argwhere(keep), values[keep], keep.shape)
    return values[:, 0] if layout == "one" else values


def inputs_of(features):
    ids = {name: laid_out(FEATURES[name][1], ids, keep) for name, (ids, _, keep) in features.items()}
    weights = {name: laid_out(FEATURES[name][1], weights, keep) for name, (_, weights, keep) in features.items()}
    return {"ids": ids, "weights": weights}


def in_order(named):
    return [named[name] for name in FEATURES]


# -- training equals one process --------------------------------------------------------------------------------------


def recommender(optimizer, table=None, **options):
    """A model of one DistributedEmbedding, or of one layer `table(name)` for each table, on padded ids."""
    import keras

    class Separate(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.tables = {name: table(name) for name in SIZES}

        def call(self, ids, weights):
            results = {}
            for name, (table, _, _) in FEATURES.items():
                given, combiner = weights[name][..., None], COMBINERS[table]
                total = keras.ops.sum(self.tables[table](ids[name]) * given, 1)
                size = keras.ops.sum(given if combiner == "mean" else given**2, 1)
                size = {"sum": 1.0, "mean": size, "sqrtn": keras.ops.sqrt(size)}[combiner]
                results[name] = keras.ops.divide_no_nan(total, size)
            return results

        def set_embedding_tables(self, values):
            for name, layer in self.tables.items():
                layer.build()
                layer.set_weights([values[name]])

        def get_embedding_tables(self):
            return {name: layer.get_weights()[0] for name, layer in self.tables.items()}

    class Recommender(keras.Model):
        def __init__(self):
            super().__init__()
            self.embed = Separate() if table else new_layer(**options)
            self.last = keras.layers.Dense(1)

        def call(self, inputs):
            rows = self.embed(inputs["ids"], inputs["weights"])
            return self.last(keras.ops.concatenate(in_order(rows), axis=-1))

    model = Recommender()
    model.embed.set_embedding_tables(initial_tables())
    model.last.build((None, sum(SIZES[table][1] for table, _, _ in FEATURES.values())))
    model.last.set_weights([np.random.default_rng(3).normal(size=w.shape) for w in model.last.get_weights()])
    model.compile(optimizer(), "mse", metrics=["mae"])
    return model


def cases():
    """Plans, optimizers, what they update of divided tables, and the layer of one process that is the same for a table;
    None for the same layer.
    """
    import keras

    def embedding(name):
        return keras.layers.Embedding(*SIZES[name])

    def sharded(name):  # for which an id counts once: Keras' own has optimizers square its gradients one by one
        return tfring.layers.ShardedEmbedding(*SIZES[name], update="dense" if PLAN[name] == "replicated" else "rows")

    def dense(name):
        return tfring.layers.ShardedEmbedding(*SIZES[name], update="dense")

    o = keras.optimizers
    return {
        "momentum": (BY_ROWS, lambda: o.SGD(0.02, momentum=0.9), "dense", embedding),
        "Adagrad": (PLAN, lambda: o.Adagrad(0.05), "rows", sharded),
        "Adam": (PLAN, lambda: o.Adam(0.01, global_clipnorm=0.1), "rows", None),
        "dense Adam": (OTHERS, lambda: o.Adam(0.01), "dense", dense),
    }


def fitted(names):
    """Errors against one process with a layer for each table, and how many all_to_all there were."""
    import tensorflow as tf

    ring = strategy()
    features, y = data()
    results = {}

    def outcome(model, inputs):
        dataset = tf.data.Dataset.from_tensor_slices((inputs, y)).batch(BATCH)
        history = model.fit(dataset, epochs=2, verbose=0).history
        tables = model.embed.get_embedding_tables()
        return history, [*(tables[name] for name in SIZES), *model.last.get_weights()], model(inputs)

    for name in names:
        plan, optimizer, update, table = cases()[name]
        with ring.scope():
            model = recommender(optimizer, update=update, plan=plan)
        control = ring.ring.control.communicator
        before = control.statistics()["collectives"].get("all_to_all", 0)
        history, weights, predicted = outcome(model, inputs_of(features))
        results[name] = {"bits": b"".join(w.tobytes() for w in weights)}
        results[name]["exchanges"] = control.statistics()["collectives"]["all_to_all"] - before
        if is_reference(ring):
            padded = {"ids": {k: v[0] for k, v in features.items()}, "weights": {k: v[1] for k, v in features.items()}}
            want_history, want_weights, want_predicted = outcome(
                recommender(optimizer, table, **({} if table else {"update": update, "plan": plan})), padded
            )
            results[name]["errors"] = [
                history_error(history, want_history),
                relative_error(weights, want_weights),
                relative_error([predicted], [want_predicted]),
            ]
    return results


@pytest.mark.parametrize(("n", "names"), [
    (3, ["Adagrad"]),
    pytest.param(2, ["momentum"], marks=pytest.mark.long),
    pytest.param(2, ["Adam", "dense Adam"], marks=pytest.mark.oldest),
])  # fmt: skip
def test_equals_one_layer_for_each_table(n, names):
    results = workers(n).run(fitted, names)
    for name in names:
        # Of two widths, and one by columns: three in each of six steps of training, two of inference.
        widths = 3 if name == "dense Adam" else 2
        assert all(rank[name]["exchanges"] == widths * (3 * 6 + 2) for rank in results)
        errors = [error for rank in results for error in rank[name].get("errors", ())]
        assert len(errors) == 3
        assert max(errors) < 1e-5, (name, errors)
        assert len({rank[name]["bits"] for rank in results}) == 1


# -- lookups ----------------------------------------------------------------------------------------------------------


def feature(name, table):
    from keras_rs.layers import FeatureConfig

    return FeatureConfig(name, table, (8, 2), (8, 5))


def lookups():
    """The largest errors of what the layer makes of ids, eagerly on all ranks, each with ids of its own."""
    import keras
    import tensorflow as tf
    from keras_rs.layers import TableConfig

    ring = strategy()
    rank = ring.cluster.rank
    values = initial_tables()
    generator = np.random.default_rng(rank)
    items = TableConfig("items", *SIZES["items"], combiner=None)
    users = TableConfig("users", *SIZES["users"])
    genres = TableConfig("genres", *SIZES["genres"])
    nested = {
        "b": [feature("last", items), (feature("user", users),)],
        "a": {"any": feature("any", items), "genre": feature("genre", genres)},
    }
    ids = {name: generator.integers(0, 4, size=(2 + rank, 3)) for name in ("last", "user", "any", "genre")}
    plans = [dict.fromkeys(("items", "users", "genres"), "rows")]
    plans.append({**plans[0], "genres": "replicated"})
    plans += [OTHERS, {"items": "whole", "users": "columns", "genres": "columns"}]
    plans = [{name: plan[name] for name in plans[0]} for plan in plans]
    n = ring.cluster.world_size
    owned = [(name, *SIZES[name], "whole", 0, owner % n) for name, owner in (("items", 2), ("users", 1), ("genres", 2))]
    plans.append(tfring.parallel.TablePlan(n, tuple(tfring.parallel.PlannedTable(*table) for table in owned)))
    with ring.scope():
        layers = [tfring.layers.DistributedEmbedding(nested, plan=plan) for plan in plans]
        for layer in (layers[0], layers[3], layers[4]):
            layers.append(tfring.layers.DistributedEmbedding.from_config(layer.get_config()))
        single = tfring.layers.DistributedEmbedding(feature("user", users))
        half = tfring.layers.DistributedEmbedding(feature("user", users), dtype="mixed_float16")
        for layer in (*layers, single, half):
            layer.build()
    errors = []
    for layer in layers:
        layer.set_embedding_tables({name: values[name] for name in ("items", "users", "genres")})
        found = layer(
            {
                "b": [ids["last"][:, 0], (tf.constant(ids["user"], tf.int32),)],
                "a": {"any": ids["any"][:0], "genre": ids["genre"].astype("float32")},
            }
        )
        errors.append(relative_error(
            [found["b"][0], found["b"][1][0], found["a"]["any"], found["a"]["genre"]],
            [values["items"][ids["last"][:, 0]], values["users"][ids["user"]].mean(1), np.zeros((0, 3, 5)),
             values["genres"][ids["genre"]].mean(1)],
        ))  # fmt: skip
        assert list(layer.get_embedding_tables()) == ["items", "genres", "users"]
        assert relative_error([layer.get_embedding_tables()["users"]], [values["users"]]) == 0
    for layer in (single, half):
        layer.set_embedding_tables({"users": values["users"]})
    assert half(ids["user"]).dtype == "float16"
    inputs = keras.Input((3,), dtype="int32", sparse=True)
    sparse = tf.SparseTensor(np.argwhere(ids["user"] >= 0), ids["user"].ravel().astype("int32"), ids["user"].shape)
    found = [single(ids["user"][:, 0]), keras.Model(inputs, single(inputs))(sparse)]
    errors.append(relative_error(found, [values["users"][ids["user"][:, 0]], values["users"][ids["user"]].mean(1)]))
    weights = generator.uniform(1, 2, size=ids["user"].shape).astype("float32")
    bundle = tf.data.Dataset.from_tensors((ids["user"], weights)).map(single.preprocess).get_single_element()
    errors.append(relative_error([single(bundle)], [single(ids["user"], weights)]))
    symbols = keras.Input((3,), dtype="int32")
    symbolic = layers[0](layers[0].preprocess({"b": [symbols, (symbols,)], "a": {"any": symbols, "genre": symbols}}))
    shapes = layers[0].compute_output_shape({"b": [(None, 3), ((8,),)], "a": {"any": (2, 3), "genre": (2, 3)}})
    held = [layers[number].weights[0].shape[0] for number in (4, 7)]
    return errors, [symbolic["b"][0].shape, symbolic["b"][1][0].shape], shapes["b"][1][0], held


@pytest.mark.parametrize("n", [1, pytest.param(3, marks=pytest.mark.oldest)])
def test_lookups(n):
    results = workers(n).run(lookups)
    for errors, symbolic, shape, _ in results:
        assert max(errors) < 1e-5, errors
        assert symbolic == [(None, 3, 5), (None, 5)]
        assert shape == (8, 5)
    # Whole tables are at the owners that the plan names; made again of a config, dealt by bytes.
    assert [held for *_, held in results] == ([[51, 51]] if n == 1 else [[0, 30], [17, 17], [34, 4]])


def initial():
    """Tables as they are made, equal to those of a layer each; with smaller limits some are drawn in blocks."""
    import keras

    from tfring._keras.sharding import tables

    def draw(name):
        return keras.initializers.VarianceScaling(mode="fan_out", seed=SIZES[name][0])

    made = []
    limits = tables.WHOLE_ELEMENTS, tables.BLOCK_ELEMENTS
    try:
        for limit in (limits, (40, 35)):
            tables.WHOLE_ELEMENTS, tables.BLOCK_ELEMENTS = limit
            own = {name: tfring.layers.TableConfig(name, *size, draw(name)) for name, size in SIZES.items()}
            kind = keras.layers.Embedding if limit == limits else tfring.layers.ShardedEmbedding
            with strategy().scope():
                layer = tfring.layers.DistributedEmbedding(
                    [tfring.layers.FeatureConfig(name, table) for name, table in own.items()], plan=PLAN
                )
                others = [kind(*size, embeddings_initializer=draw(name)) for name, size in SIZES.items()]
                for other in others:
                    other.build()
            got = layer.get_embedding_tables()
            assert relative_error(got.values(), [other.get_weights()[0] for other in others]) == 0
            made.append(got)
    finally:
        tables.WHOLE_ELEMENTS, tables.BLOCK_ELEMENTS = limits
    return made


def test_initial_values():
    [alone] = workers(1).run(initial)
    for made in workers(3).run(initial):
        for got, want in zip(made, alone, strict=True):
            assert all(np.array_equal(got[name], want[name]) for name in SIZES)


# -- files ------------------------------------------------------------------------------------------------------------


def dense_model(optimizer=None, **options):
    """Functional, on dense ids."""
    import keras

    inputs = {name: keras.Input((width,), dtype="int32", name=name) for name, (_, _, width) in FEATURES.items()}
    rows = new_layer(name="tables", **options)(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.ops.concatenate(in_order(rows), axis=-1)))
    model.compile(optimizer or keras.optimizers.Adam(0.01), "mse")
    return model


def held(model):
    store: dict = {}
    model.optimizer.save_own_variables(store)
    tables = model.get_layer("tables").get_embedding_tables()
    return tables, [np.asarray(store[key]) for key in sorted(store, key=int)]


def trained(folder, loads):
    """Returns the state of a model after one epoch and after two; or of models made of its files, trained on."""
    import keras

    keras.utils.set_random_seed(3)
    features, y = data()
    x = {name: ids for name, (ids, _, _) in features.items()}
    options = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    results = []
    ring = strategy()
    with ring.scope():
        model = keras.models.load_model(f"{folder}/model.keras") if loads else dense_model()
        again, other = dense_model(), dense_model(plan=dict.fromkeys(SIZES, "rows"))
        swapped = dense_model(plan={**PLAN, "items": "rows", "users": "whole"})
    if not loads:
        model.fit(x, y, callbacks=[tfring.callbacks.Backup(f"{folder}/backup")], **options)
        tfring.save(model, f"{folder}/model.keras")
        model.save_weights(f"{folder}/model.weights.h5")
    results.append(held(model))
    model.fit(x, y, initial_epoch=1, epochs=2, **options)
    results.append(held(model))
    if loads:
        again.fit(x, y, epochs=2, callbacks=[tfring.callbacks.Backup(f"{folder}/backup")], **options)
        results.append(held(again))
        again.optimizer.build(again.trainable_variables)
        again.load_weights(f"{folder}/model.weights.h5")
        other.load_weights(f"{folder}/model.weights.h5", skip_mismatch=True)  # whose optimizer has other slots
        with ring.scope():
            swapped.optimizer.build(swapped.trainable_variables)
        swapped.load_weights(f"{folder}/model.weights.h5")  # in the same, which have the same rows in the same order
        results += [held(again), held(swapped), held(other)]
    return results


def test_files(tmp_path):
    (first, second), *_ = workers(2).run(trained, str(tmp_path), False)
    for n in (1, 3):
        for loaded, gone_on, restored, weights, swapped, other in workers(n).run(trained, str(tmp_path), True):
            for got in (loaded, weights, swapped):
                assert relative_error(got[0].values(), first[0].values()) == 0
                assert relative_error(got[1], first[1]) == 0
            assert relative_error(other[0].values(), first[0].values()) == 0
            for got in (gone_on, restored):
                assert relative_error(got[0].values(), second[0].values()) < 1e-5
                assert relative_error(got[1], second[1]) < 1e-5


# -- what is refused --------------------------------------------------------------------------------------------------


def bad_id():
    """The error on this rank where one rank alone has an id of a neighbour's row; in a step, and eagerly."""
    import tensorflow as tf

    messages = []
    features, y = data()
    x = {name: ids for name, (ids, _, _) in features.items()}
    for eager, name, id in ((False, "history", 30), (True, "user", -1), (False, "tag", 23)):
        ring = strategy()
        with ring.scope():
            model = dense_model("sgd")
        model.compile("sgd", "mse", run_eagerly=eager) if eager else None
        wrong = {**x, name: x[name].copy()}
        wrong[name][19, 1] = id  # of the last rank, in the first batch
        try:
            model.fit(wrong, y, batch_size=BATCH, shuffle=False, verbose=0)
        except tf.errors.InvalidArgumentError as error:
            messages.append(str(error))
        ring.close()
    return messages


@pytest.mark.parametrize("n", [1, 2])
def test_ids_without_a_row(n):
    for in_step, eagerly, by_columns in workers(n).run(bad_id):
        assert "'items" in in_step
        assert "has 30 rows, with ids from 0 to 29, and no row for id 30" in in_step
        assert "'users' has 17 rows, with ids from 0 to 16, and no row for id -1" in eagerly
        assert "'tags" in by_columns
        assert "has 23 rows, with ids from 0 to 22, and no row for id 23" in by_columns
        assert n == 1 or all(f"of rank {n - 1}" in message for message in (in_step, by_columns))
        assert n == 1 or "of rank" in eagerly  # each has the ids of the whole batch


def refused(folder):
    """The errors of what cannot be right, by name."""
    import keras
    import keras_rs
    import tensorflow as tf

    Table, Feature, Layer = tfring.layers.TableConfig, tfring.layers.FeatureConfig, tfring.layers.DistributedEmbedding
    errors = {}

    def attempt(name, function, error=tfring.errors.ConfigurationError):
        with pytest.raises(error) as raised:
            function()
        errors[name] = str(raised.value)

    def items(**options):
        return Table("items", 30, 5, **options)

    attempt("optimizer", lambda: items(optimizer="adam"))
    attempt("combiner", lambda: items(combiner="max"))
    attempt("placement", lambda: items(placement="sparsecore"))
    attempt("optimizer of others", lambda: Layer(feature("a", keras_rs.layers.TableConfig("b", 3, 2, optimizer="sgd"))))
    attempt("no config", lambda: Layer({"a": Feature("a", items()), "b": "items"}))
    attempt("no table", lambda: Layer([feature("a", "items")]))
    attempt("names", lambda: Layer([Feature("a", items()), Feature("b", items())]))
    attempt("plan", lambda: Layer(Feature("a", items()), plan={"users": "rows"}))
    attempt("plan of all", lambda: Layer(Feature("a", items()), plan="rows"))
    attempt("kind", lambda: Layer(Feature("a", items()), plan={"items": "hash"}))
    attempt("update", lambda: Layer(Feature("a", items()), update="some"))
    attempt("initializer", lambda: Layer(Feature("a", Table("large", 1 << 24, 2, "glorot_uniform"))).build())

    layer = Layer([Feature("a", items())])
    ids = tf.constant([[1, 2]])
    attempt("structure", lambda: layer({"a": ids}), ValueError)
    attempt("weights", lambda: layer([ids], [tf.ragged.constant([[1.0]])]), ValueError)
    attempt("tables", lambda: layer.set_embedding_tables({"items": np.zeros((3, 5))}), ValueError)
    each = Layer(Feature("a", items(combiner=None)))
    attempt("ragged", lambda: each(tf.ragged.constant([[1], [2, 3]])))
    attempt("weights of each", lambda: each(ids, tf.ones([1, 2])), ValueError)
    attempt("three", lambda: layer([tf.ragged.constant([[[1], [2]]])]))
    with strategy().scope():
        model = dense_model()
    attempt("checkpoint", lambda: tf.train.Checkpoint(model=model).save(f"{folder}/checkpoint"))

    def lookups(*names):
        inputs = {name: keras.Input((2,), dtype="int32") for name in names}
        return keras.Model(inputs, Layer({name: Feature(name, Table(name, 30, 5)) for name in names})(inputs))

    with strategy().scope():
        one, two = lookups("a"), lookups("a", "b")
    tfring.save(one, f"{folder}/one.weights.h5")
    attempt("file", lambda: two.load_weights(f"{folder}/one.weights.h5"), ValueError)
    with strategy().scope():
        by_lamb = dense_model(keras.optimizers.Lamb(0.01))
    features, y = data()
    attempt("Lamb", lambda: by_lamb.fit({name: ids for name, (ids, _, _) in features.items()}, y, verbose=0))
    return errors


def test_what_is_refused(tmp_path):
    for errors in workers(2).run(refused, str(tmp_path)):
        for name, by in {"optimizer": "adam", "optimizer of others": "sgd"}.items():
            assert f"optimizer='{by}'" in errors[name] and "Give the table optimizer=None" in errors[name]
        assert "`combiner` of 'items' is 'max'" in errors["combiner"]
        assert "placement='sparsecore'" in errors["placement"]
        assert "`feature_configs` has 'items', a FeatureConfig without name, table" in errors["no config"]
        assert "`feature_configs` has 'items', a TableConfig without name, vocabulary_size" in errors["no table"]
        assert "share a name: items, items" in errors["names"]
        assert "`plan` is {'users': 'rows'} for tables items" in errors["plan"]
        assert "`plan` is 'rows' for tables items" in errors["plan of all"]
        assert "The file has 1 tables, but" in errors["file"]
        assert "('replicated', 'rows', 'whole', 'columns')" in errors["kind"] and "'items': 'hash'" in errors["kind"]
        assert "`update` is 'some'" in errors["update"]
        assert "its initializer GlorotUniform" in errors["initializer"]
        assert "`inputs` have the structure a, but `feature_configs` have 0" in errors["structure"]
        assert "The weights are ragged, but their ids are dense" in errors["weights"]
        assert "have shapes {'items': (3, 5)}, but its own have {'items': (30, 5)}" in errors["tables"]
        assert "Ragged ids of 'a' have shape (2, None) and combiner=None" in errors["ragged"]
        assert "whose table 'items' has combiner=None" in errors["weights of each"]
        assert " have shape (1, None, None)" in errors["three"]
        assert "tfring.save(model, path)" in errors["checkpoint"]
        assert "Lamb '" in errors["Lamb"]
