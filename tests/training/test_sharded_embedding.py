"""ShardedEmbedding: N workers, each with its rows of the table, equal one process on the whole batch."""

import functools
import pathlib
import re

import numpy as np
import pytest
from common import assert_equal, element_wise_optimizers, is_reference, optimizer_settings, relative_error, train_both
from harness import strategy, workers

import tfring
from tfring.layers.row_numbers import RowNumbers
from tfring.sharding import BY_ROWS, KINDS, shard_table, shard_tables

VOCABULARY, DIM = 30, 5


def test_shardings_of_a_table():
    for world_size in (1, 2, 3, 4, 7):
        for rows in (1, 2, 3, 7, 8, 30):
            for kind in BY_ROWS:
                sharding = shard_table((rows, 2), world_size, kind)
                numbers = RowNumbers(sharding, [rows])
                assert (numbers.firsts, numbers.steps, numbers.end) == ([0], [1], rows)
                whole = np.arange(rows)
                pieces = [whole[sharding.slices(rank)[0]] for rank in range(world_size)]
                assert sorted(np.concatenate(pieces)) == list(whole)
                for rank, piece in enumerate(pieces):
                    assert sharding.shape_of(rank) == (len(piece), 2)
                    assert len(piece) <= -(-rows // world_size)
                    assert np.all(numbers.owner(piece) == rank)
                    assert np.array_equal(numbers.row_of_owner(piece), np.arange(len(piece)))
                    for begin in range(rows):
                        for end in (begin + 1, begin + 5, rows):
                            within = whole[begin:end][sharding.within(rank, begin, min(end, rows))]
                            assert np.array_equal(within, piece[(piece >= begin) & (piece < end)])
    with pytest.raises(tfring.errors.ConfigurationError, match="`placement` is 'hash'"):
        shard_table((4, 2), 2, "hash")


def test_shardings_of_several_tables():
    sizes = (2, 5, 1, 7, 3)
    for world_size in (1, 2, 3, 4, 7):
        for owners in ((0, None, 1, None, 0), (None, 1, None, 0, 1), (2, 2, 0, 1, 0), (None,) * 5):
            owners = [None if owner is None else owner % world_size for owner in owners]
            sharding = shard_tables((18, 2), world_size, list(zip(sizes, owners, strict=True)))
            numbering = RowNumbers(sharding, sizes)
            whole = np.arange(18)
            pieces = [np.concatenate([whole[part] for part in sharding.slices(rank)]) for rank in range(world_size)]
            assert sorted(np.concatenate(pieces)) == list(whole)
            assert [sharding.shape_of(rank) for rank in range(world_size)] == [(len(piece), 2) for piece in pieces]
            begin = 0
            for size, owner, first, step in zip(sizes, owners, numbering.firsts, numbering.steps, strict=True):
                numbers = first + step * np.arange(size)
                assert numbers.max() < numbering.end
                places = zip(numbering.owner(numbers), numbering.row_of_owner(numbers), strict=True)
                assert [pieces[rank][row] for rank, row in places] == list(range(begin, begin + size))
                assert owner is None or set(numbering.owner(numbers)) == {owner}
                for rank, piece in enumerate(pieces):
                    for last in (begin + 1, begin + size):
                        within = whole[begin:last][sharding.within(rank, begin, last)]
                        assert np.array_equal(within, piece[(piece >= begin) & (piece < last)])
                begin += size
            assert numbering.end < world_size * (max(map(len, pieces)) + 1)  # so int32 holds them as long as it can


def skewed_ids(num_rows=43, ids_per_row=3, seed=0):
    """Ids of which few are frequent, among them the first and the last, drifting with the row; and targets."""
    generator = np.random.default_rng(seed)
    ids = np.minimum(generator.zipf(1.5, size=(num_rows, ids_per_row)) - 1, VOCABULARY - 1)
    ids[num_rows // 2 :] = VOCABULARY - 1 - ids[num_rows // 2 :]
    y = np.sin(ids).sum(axis=1, keepdims=True) + 0.1 * generator.normal(size=(num_rows, 1))
    return ids.astype("int32"), y


def optimizers():
    """Every optimizer that is not refused, by name."""
    return {**element_wise_optimizers(), **optimizer_settings()}


def of_rows():
    """Those that update rows alone."""
    return {name: make for name, make in optimizers().items() if name not in ("accumulation", "ema")}


def model_of(optimizer, dtype=None, alone="dense", compiled=(), **options):
    """Under a strategy with a sharded table; alone with it too, or with a Dense layer whose gradient is dense."""

    def make():
        import keras
        import tensorflow as tf

        ids = keras.Input((3,), dtype="int32")
        if tf.distribute.has_strategy() or alone == "sharded":
            rows = tfring.layers.ShardedEmbedding(VOCABULARY, DIM, dtype=dtype, **options)(ids)
        elif alone == "embedding":
            rows = keras.layers.Embedding(VOCABULARY, DIM, dtype=dtype)(ids)
        else:
            hot = keras.ops.one_hot(ids, VOCABULARY, dtype="float64" if dtype == "float64" else None)
            rows = keras.layers.Dense(DIM, use_bias=False, dtype=dtype)(hot)
        hidden = keras.layers.Dense(7, activation="tanh", dtype=dtype)(keras.ops.mean(rows, axis=1))
        model = keras.Model(ids, keras.layers.Dense(1, dtype=dtype)(hidden))
        model.compile(optimizer(), "mse", metrics=["mae"], **dict(compiled))
        return model

    return make


# -- training equals one process -------------------------------------------------------------------------------------


def plain(other):
    import keras

    ring = strategy()
    x, y = skewed_ids()
    results = {}
    for update, placement in (("rows", "interleaved"), ("dense", other)):
        make = model_of(lambda: keras.optimizers.SGD(0.05), alone="embedding", update=update, placement=placement)
        also = {"evaluate": (x, y), "predict": x} if update == "rows" else {}
        results[update] = train_both(ring, make, x, y, **also)
    return results


@pytest.mark.parametrize(
    ("n", "communication", "placement"),
    [
        (3, "ring", "columns"),
        pytest.param(4, "ring", "range", marks=pytest.mark.long),
        pytest.param(2, "tensorflow", "columns", marks=pytest.mark.long),
    ],
)
def test_equals_one_process(n, communication, placement):
    assert_equal(workers(n, communication).run(plain, placement))


def fitted(dtype, cases):
    """`cases`: name of the optimizer, how tables are updated, what `compile` is given."""
    import keras

    keras.config.set_floatx(dtype or "float32")
    ring = strategy()
    x, y = skewed_ids()
    kinds = optimizers()
    return {
        case: train_both(ring, model_of(kinds[case[0]], dtype, "dense" if case[1] == "dense" else "sharded",
                                        dict(case[2:]).items(), update=case[1]), x, y)
        for case in cases
    }  # fmt: skip


@pytest.mark.parametrize(("n", "dtype", "cases"), [
    (2, "float64", [("global_clipnorm", "dense"), ("weight_decay", "rows", ("run_eagerly", True))]),
    (3, None, [("accumulation", "dense"), ("Adam", "rows", ("steps_per_execution", 3))]),
    pytest.param(3, None, [("loss_scale", "rows")], marks=pytest.mark.long),
    pytest.param(4, None, [("ema", "dense"), ("Adagrad", "rows"), ("loss_scale", "dense")], marks=pytest.mark.long),
])
def test_fit(n, dtype, cases):
    assert_equal(workers(n).run(fitted, dtype, cases), tolerance=1e-12 if dtype == "float64" else 1e-5)


def updates(update, names, shard_optimizer):
    """The largest errors after three updates in a loop of one's own; in the second the last rank has no row.

    Compared with one process whose table is a plain variable with a dense gradient. Where rows alone are updated, those
    without a gradient, and their slots, are given back there what they held.
    """
    import keras
    import tensorflow as tf

    keras.config.set_floatx("float64")
    ring = strategy(shard_optimizer=shard_optimizer)
    rank, world_size = ring.cluster.rank, ring.cluster.world_size
    generator = np.random.default_rng(0)
    start = [generator.normal(size=shape) for shape in ((VOCABULARY, DIM), (7, 3))]
    ids = np.minimum(generator.zipf(1.5, size=(3, world_size, 11)) - 1, VOCABULARY - 1)
    factors = generator.normal(size=(3, world_size, 11, DIM))
    dense = generator.normal(size=(3, world_size, 7, 3))
    num_rows = np.full((3, world_size), 11)
    num_rows[1, -1] = 11 if world_size == 1 else 0

    def train_step(optimizer, layer, weight, number, ids):
        variables = [layer.trainable_weights[0], weight]
        with tf.GradientTape() as tape:
            rows = layer(ids) * factors[number, rank, : ids.shape[0]]
            loss = tf.reduce_sum(rows) + tf.reduce_sum(weight * tf.constant(dense[number, rank]))
            loss = optimizer.scale_loss(loss)
        optimizer.apply(tape.gradient(loss, [v.value for v in variables]), variables)

    def state(optimizer):
        inner = getattr(optimizer, "inner_optimizer", None)
        return [*optimizer.variables, *(inner.variables if inner else [])]

    def ours(optimizer):
        layer = tfring.layers.ShardedEmbedding(VOCABULARY, DIM, update=update, weights=start[0])
        weight = keras.Variable(start[1], name="weight")
        for number in range(3):
            mine = tf.constant(ids[number, rank, : num_rows[number, rank]])
            ring.run(functools.partial(train_step, optimizer, layer, weight, number), (mine,))
        return [layer.get_weights()[0], weight.numpy()]

    def alone(optimizer):
        table, weight = keras.Variable(start[0], name="embeddings"), keras.Variable(start[1], name="weight")
        optimizer.build([table, weight])
        for number in range(3):
            gradient = np.zeros((VOCABULARY, DIM))
            total = np.zeros((7, 3))
            for r in range(world_size):
                count = num_rows[number, r]
                np.add.at(gradient, ids[number, r, :count], factors[number, r, :count])
                total += dense[number, r] if count else 0
            scale = float(optimizer.scale_loss(tf.constant(1.0, tf.float64)))
            tables = {id(v): v for v in [table, *state(optimizer)] if v.shape == (VOCABULARY, DIM)}.values()
            before = [v.numpy() for v in tables]
            optimizer.apply([tf.constant(scale * gradient), tf.constant(scale * total)], [table, weight])
            if update == "rows":
                touched = np.unique(np.concatenate([ids[number, r, : num_rows[number, r]] for r in range(world_size)]))
                for variable, value in zip(tables, before, strict=True):
                    value[touched] = variable.numpy()[touched]
                    variable.assign(value)
        return [table.numpy(), weight.numpy()]

    def stored(optimizer):
        store: dict = {}
        optimizer.save_own_variables(store)
        return [np.asarray(store[key]) for key in sorted(store)]

    errors = {}
    for name in names:
        with ring.scope():
            optimizer = optimizers()[name]()
            weights, slots = ours(optimizer), stored(optimizer)
        if name == "accumulation":  # of other variables by each worker for itself
            slots = []
        errors[name] = {"bits": b"".join(np.ascontiguousarray(w).tobytes() for w in [*weights, *slots])}
        if is_reference(ring):
            optimizer = optimizers()[name]()
            want_weights, want_slots = alone(optimizer), stored(optimizer)
            errors[name]["weights"] = relative_error(weights, want_weights)
            errors[name]["slots"] = relative_error(slots, want_slots if slots else [])
    return errors


def names_of(kinds):
    return list(kinds())


@pytest.mark.parametrize(("n", "update", "shard_optimizer"), [
    (3, "dense", False),
    (3, "rows", False),
    (1, "rows", False),
    (2, "rows", True),
])
def test_updates(n, update, shard_optimizer):
    names = workers(1).run(names_of, optimizers if update == "dense" else of_rows)[0]
    assert len(names) >= 16
    if shard_optimizer:
        names = ["Adam", "global_clipnorm", "loss_scale"]
    assert_equal(workers(n).run(updates, update, names, shard_optimizer), tolerance=1e-12)


# -- lookups ---------------------------------------------------------------------------------------------------------


def lookups():
    """The largest errors of what the layer makes of ids, eagerly on all ranks, each with ids of its own."""
    import keras
    import tensorflow as tf

    ring = strategy()
    rank = ring.cluster.rank
    table = np.random.default_rng(0).normal(size=(VOCABULARY, DIM)).astype("float32")
    ids = np.random.default_rng(rank).integers(0, VOCABULARY, size=(4, 2 + rank, 3))  # of another size on each rank
    weights = np.random.default_rng(rank + 9).normal(size=ids.shape).astype("float32")

    def layer(**options):
        with ring.scope():
            return tfring.layers.ShardedEmbedding(VOCABULARY, DIM, weights=table, **options)

    rows = table[ids]
    known = weights * (ids != 0)
    mean = (rows * known[..., None]).sum(-2) / known.sum(-1, keepdims=True)
    keep = np.arange(3) < np.arange(2 + rank)[:, None]  # of the first example, in rows of 0, 1, 2 ids
    ragged = tf.RaggedTensor.from_row_lengths(ids[0][keep], keep.sum(-1))
    sparse = tf.SparseTensor(np.argwhere(keep), ids[0][keep], keep.shape)
    kept_sum = (rows[0] * (weights[0] * keep)[..., None]).sum(-2)
    kept_mean = (rows[0] * keep[..., None]).sum(-2) / np.maximum(keep.sum(-1, keepdims=True), 1)
    cases = {
        "plain": (layer()(ids), rows),
        "int64": (layer(placement="range")(tf.constant(ids, tf.int64)), rows),
        "float": (layer()(ids.astype("float32")), rows),
        "none": (layer()(ids[:, :0]), rows[:, :0]),
        "mixed": (layer(dtype="mixed_float16")(ids), rows.astype("float16")),
        "sum": (layer(combiner="sum")(ids), rows.sum(-2)),
        "mean": (layer(combiner="mean")(ids), rows.mean(-2)),
        "weighted mean": (layer(combiner="mean", mask_zero=True)(ids, id_weights=weights), mean),
        "sqrtn": (layer(combiner="sqrtn")(ids), rows.sum(-2) / np.float32(3**0.5)),
        "ragged": (layer(combiner="sum")(ragged, id_weights=ragged.with_values(weights[0][keep])), kept_sum),
        "sparse": (layer(combiner="mean")(sparse), kept_mean.astype("float32")),
    }
    masks = [layer(mask_zero=True).compute_mask(tf.constant(ids)), layer(combiner="sum").compute_mask(tf.constant(ids))]
    assert np.array_equal(masks[0], ids != 0)
    assert masks[1] is None
    symbolic = layer(combiner="sum")(keras.Input((None, 3), dtype="int32"))
    assert symbolic.shape == (None, None, DIM)
    for name, (got, want) in cases.items():
        assert tuple(got.shape) == want.shape, name
        assert got.dtype == want.dtype, name
    return {name: relative_error([got], [want]) for name, (got, want) in cases.items()}


@pytest.mark.parametrize("n", [1, 3])
def test_lookups(n):
    for errors in workers(n).run(lookups):
        assert max(errors.values()) < 1e-5, errors


def two_inputs():
    """One table for two inputs, another frozen, in one model; and one whose layers are built in the first step."""
    import keras

    ring = strategy()
    x, y = skewed_ids()
    inputs = {"a": x, "b": x[::-1].copy()}

    def table(**options):
        import tensorflow as tf

        if tf.distribute.has_strategy():
            return tfring.layers.ShardedEmbedding(VOCABULARY, DIM, **options)
        return keras.layers.Embedding(VOCABULARY, DIM, **options)

    def shared():
        a, b = keras.Input((3,), dtype="int32", name="a"), keras.Input((3,), dtype="int32", name="b")
        of_both = table()
        frozen = table(embeddings_initializer="normal", trainable=False)
        rows = keras.ops.concatenate([of_both(a), of_both(b), frozen(b)], axis=-1)
        model = keras.Model([a, b], keras.layers.Dense(1)(keras.ops.mean(rows, axis=1)))
        model.compile(keras.optimizers.SGD(0.05), "mse")
        return model

    class Late(keras.Model):
        def __init__(self):
            super().__init__()
            self.table, self.last = table(), keras.layers.Dense(1)

        def call(self, ids):
            return self.last(keras.ops.mean(self.table(ids), axis=1))

    def late():
        model = Late()
        model.build((None, 3))
        model.compile(keras.optimizers.SGD(0.05), "mse")
        return model

    with ring.scope():
        unbuilt = Late()
        unbuilt.compile("sgd", "mse")
    unbuilt.fit(x, y, batch_size=20, verbose=0)
    assert unbuilt.table.get_weights()[0].shape == (VOCABULARY, DIM)
    return {"shared": train_both(ring, shared, inputs, y), "late": train_both(ring, late, x, y)}


def test_models():
    assert_equal(workers(2).run(two_inputs))


def initial(seeds):
    """Tables as they are made, on all ranks; small ones and, with smaller limits, ones that are drawn in blocks."""
    import keras

    from tfring._keras.sharding import tables

    tables_made = []
    limits = tables.WHOLE_ELEMENTS, tables.BLOCK_ELEMENTS
    try:
        for limit in (limits, (10, 7 * DIM)):
            tables.WHOLE_ELEMENTS, tables.BLOCK_ELEMENTS = limit
            for placement in KINDS:
                keras.utils.set_random_seed(seeds[strategy().cluster.rank % len(seeds)])
                with strategy().scope():
                    layer = tfring.layers.ShardedEmbedding(VOCABULARY, DIM, placement=placement)
                    layer.build()
                tables_made.append(layer.get_weights()[0])
        layer = keras.layers.Embedding(VOCABULARY, DIM, embeddings_initializer="glorot_uniform")
        try:
            tfring.layers.ShardedEmbedding.from_config(layer.get_config()).build()
        except tfring.errors.ConfigurationError as error:
            message = str(error)
    finally:
        tables.WHOLE_ELEMENTS, tables.BLOCK_ELEMENTS = limits
    keras.utils.set_random_seed(seeds[0])
    layer = keras.layers.Embedding(VOCABULARY, DIM)
    layer.build()
    return [*tables_made, layer.get_weights()[0]], message


def test_initial_values():
    [(alone, message)] = workers(1).run(initial, [5])
    assert "its initializer GlorotUniform" in message
    assert np.unique(alone[len(KINDS)]).size > VOCABULARY * DIM // 2  # blocks are not drawn alike
    for seeds in ([5], [5, 6, 7]):  # rank 0's hold
        for made, _ in workers(3).run(initial, seeds):
            for number, want in enumerate([alone[-1]] * len(KINDS) + [alone[len(KINDS)]] * len(KINDS)):
                assert np.array_equal(made[number], want), number


def elements(update):
    """Elements of the table and its slots on this worker."""
    import keras

    x, y = skewed_ids()
    with strategy().scope():
        model = model_of(lambda: keras.optimizers.Adam(0.01), update=update)()
    model.fit(x, y, verbose=0)
    layer = next(layer for layer in model.layers if isinstance(layer, tfring.layers.ShardedEmbedding))
    held = [int(np.prod(v.shape)) for v in model.optimizer.variables if "embeddings" in v.path]
    return int(np.prod(layer.embeddings.shape)), held


@pytest.mark.parametrize("update", ["rows", "dense"])
def test_what_a_worker_holds(update):
    counts = workers(4).run(elements, update)
    assert [table for table, _ in counts] == [8 * DIM, 8 * DIM, 7 * DIM, 7 * DIM]
    assert all(held == [table, table] for table, held in counts)


# -- files -----------------------------------------------------------------------------------------------------------

FILES = ["model.keras", "model.weights.h5", "every rank.keras"]


def new_model(kind="sharded", **options):
    import keras

    return model_of(lambda: keras.optimizers.Adam(0.01), alone=kind, placement="range", **options)()


def kept(model):
    store: dict = {}
    model.optimizer.save_own_variables(store)
    return model.get_weights(), [store[key] for key in sorted(store, key=int)]


def saved(folder):
    import keras

    keras.utils.set_random_seed(3)
    with strategy().scope():
        model = new_model()
    x, y = skewed_ids()
    callbacks = [keras.callbacks.ModelCheckpoint(f"{folder}/checkpoint.keras")]
    model.fit(x, y, batch_size=20, shuffle=False, verbose=0, callbacks=callbacks)
    model.save(f"{folder}/every rank.keras")
    for name in ("model.keras", "model.weights.h5"):
        tfring.save(model, f"{folder}/{name}")
    return kept(model)


def loaded(folder, trains):
    """Returns the state of models made of files; the last is trained on."""
    import keras

    results = {}
    x, y = skewed_ids()
    with strategy().scope():
        for name in [*FILES, "checkpoint.keras"]:
            if name.endswith(".weights.h5"):
                model = new_model()
                model.optimizer.build(model.trainable_variables)
                model.load_weights(f"{folder}/{name}")
            else:
                model = keras.models.load_model(f"{folder}/{name}")
            results[name] = kept(model)
    if trains:
        model.fit(x, y, batch_size=20, shuffle=False, verbose=0)
        results["trained"] = kept(model)
    if strategy().cluster.world_size == 1:
        plain = new_model("embedding")
        plain.optimizer.build(plain.trainable_variables)
        plain.load_weights(f"{folder}/model.weights.h5")
        results["plain"] = kept(plain)
    return results


@pytest.mark.parametrize(("writers", "readers"), [(3, [1, 2]), (1, [2])])
def test_files(writers, readers, tmp_path):
    (want_weights, want_slots), *_ = workers(writers).run(saved, str(tmp_path))
    trained = []
    for n in readers:
        results = workers(n).run(loaded, str(tmp_path), True)
        trained.append(results[0]["trained"])
        for rank in results:
            assert len(rank) >= len(FILES) + 2
            for name, (weights, slots) in rank.items():
                if name != "trained":
                    assert relative_error(weights, want_weights) == 0, (n, name)
                    assert relative_error(slots, want_slots) == 0, (n, name)
    for weights, slots in trained[1:]:
        assert relative_error(weights, trained[0][0]) < 1e-5
        assert relative_error(slots, trained[0][1]) < 1e-5


def backed_up(folder, num_epochs, update):
    import keras

    keras.utils.set_random_seed(3)
    accumulated = {"gradient_accumulation_steps": 2} if update == "dense" else {}
    with strategy().scope():
        model = model_of(lambda: keras.optimizers.Adam(0.01, **accumulated), update=update)()
    x, y = skewed_ids()
    backup = tfring.callbacks.Backup(folder, sharded=update == "rows")
    model.fit(x, y, batch_size=20, epochs=num_epochs, shuffle=False, verbose=0, callbacks=[backup])
    return model.get_weights()


@pytest.mark.parametrize("update", ["rows", pytest.param("dense", marks=pytest.mark.long)])
def test_backup(update, tmp_path):
    folder = tmp_path / "interrupted"
    workers(3).run(backed_up, str(folder), 1, update)
    want = workers(3).run(backed_up, str(tmp_path / "at once"), 2, update)[0]
    for weights in workers(2).run(backed_up, str(folder), 2, update):
        assert relative_error(weights, want) < 1e-5


# -- models whose tables become sharded ------------------------------------------------------------------------------


def converted():
    import keras

    ring = strategy()
    x, y = skewed_ids()

    def original():
        ids = keras.Input((3,), dtype="int32")
        small = keras.layers.Embedding(VOCABULARY - 1, 2, name="small")(ids % (VOCABULARY - 1))
        large = keras.layers.Embedding(VOCABULARY, DIM, name="large")
        inner = keras.Sequential([keras.Input((3,), dtype="int32"), large])
        rows = keras.ops.concatenate([small, inner(ids)], axis=-1)
        return keras.Model(ids, keras.layers.Dense(1)(keras.ops.mean(rows, axis=1)))

    class Hiding(keras.layers.Layer):
        def __init__(self, **options):
            super().__init__(**options)
            self.table = keras.layers.Embedding(VOCABULARY, DIM, name="hidden")

        def build(self, input_shape):
            self.table.build(input_shape)

        def call(self, ids):
            return self.table(ids)

    def make():
        import tensorflow as tf

        model = original()
        if tf.distribute.has_strategy():
            weights = model.get_weights()
            model = tfring.parallel.shard_embeddings(model, min_rows=VOCABULARY)
            assert relative_error(model.get_weights(), weights) == 0
            kinds = {layer.name: type(layer).__name__ for layer in model._flatten_layers()}
            assert (kinds["large"], kinds["small"]) == ("ShardedEmbedding", "Embedding")
        model.compile(keras.optimizers.SGD(0.05), "mse")
        return model

    hiding = keras.Sequential([keras.Input((3,), dtype="int32"), Hiding()])
    with pytest.raises(ValueError, match="hidden"):
        tfring.parallel.shard_embeddings(hiding, min_rows=VOCABULARY)
    return {"converted": train_both(ring, make, x, y)}


def test_shard_embeddings():
    assert_equal(workers(2).run(converted))


# -- what is refused -------------------------------------------------------------------------------------------------


def bad_id():
    """The error on this rank where one rank alone has an id that no row belongs to; in a step, and eagerly."""
    import keras
    import tensorflow as tf

    messages = []
    for eager in (False, True):
        ring = strategy()
        with ring.scope():
            model = model_of(lambda: keras.optimizers.SGD(0.05), compiled={"run_eagerly": eager}.items())()
        x, y = skewed_ids()
        x[19] = VOCABULARY + 5  # of the last rank, in the first batch
        try:
            model.fit(x, y, batch_size=20, shuffle=False, verbose=0)
        except tf.errors.InvalidArgumentError as error:
            messages.append(str(error))
        ring.close()
    return messages


@pytest.mark.parametrize(("n", "communication"), [(1, "ring"), (3, "ring"), (2, "tensorflow")])
def test_ids_without_a_row(n, communication):
    for messages in workers(n, communication).run(bad_id):
        assert len(messages) == 2
        for eager, message in enumerate(messages):  # eagerly each rank has the ids of the whole batch
            assert f"has {VOCABULARY} rows, with ids from 0 to {VOCABULARY - 1}" in message
            assert f"no row for id {VOCABULARY + 5}" in message
            assert "'embedding" in message
            assert n == 1 or ("of rank" if eager else f"of rank {n - 1}") in message


def refused(folder):
    """The errors of what cannot be right, by name."""
    import keras
    import tensorflow as tf

    class Subclass(keras.optimizers.Adam):
        pass

    x, y = skewed_ids()
    ring = strategy()
    o = keras.optimizers
    errors = {}

    def attempt(name, function):
        try:
            function()
        except tfring.errors.ConfigurationError as error:
            errors[name] = str(error)

    def layer(*args, **options):
        return tfring.layers.ShardedEmbedding(VOCABULARY, DIM, *args, **options)

    def fit(optimizer, update="dense", **options):
        with ring.scope():
            model = model_of(optimizer, update=update)()
        model.fit(x, y, verbose=0, **options)
        return model

    rows = layer()
    rows.build()
    for make in (o.Adafactor, o.Lamb, getattr(o, "Muon", o.Lamb), Subclass):
        attempt(make.__name__, lambda make=make: fit(lambda: make(0.01)))
    attempt("ema", lambda: fit(lambda: o.SGD(0.01, use_ema=True), "rows"))
    attempt("accumulation", lambda: fit(lambda: o.SGD(0.01, gradient_accumulation_steps=2), "rows"))
    attempt("regularizer", lambda: layer(embeddings_regularizer="l2"))
    attempt("constraint", lambda: layer(embeddings_constraint="max_norm"))
    attempt("lora", lambda: layer(lora_rank=2))
    attempt("combiner", lambda: layer(combiner="max"))
    attempt("update", lambda: layer(update="some"))
    attempt("placement", lambda: layer(placement="hash"))
    attempt("enable_lora", lambda: layer().enable_lora(2))
    attempt("quantize", lambda: rows.quantize("int8"))
    attempt("ragged", lambda: layer()(tf.ragged.constant([[1], [2, 3]])))
    attempt("sparse", lambda: layer()(keras.Input((3,), dtype="int32", sparse=True)))
    attempt("restore", lambda: fit(o.Adam, callbacks=[keras.callbacks.BackupAndRestore(folder)]))
    model = fit(o.Adam)
    table = next(each for each in model.layers if isinstance(each, tfring.layers.ShardedEmbedding))
    attempt("h5", lambda: model.save(f"{folder}/model.h5"))
    attempt("export", lambda: model.export(f"{folder}/exported"))
    attempt("checkpoint", lambda: tf.train.Checkpoint(model=model).save(f"{folder}/checkpoint"))
    attempt("outside", lambda: model.optimizer.apply([tf.zeros(v.shape) for v in model.trainable_variables]))
    with pytest.raises(ValueError, match="id_weights"):
        table(x, id_weights=x)
    with ring.scope():
        larger = keras.Sequential([keras.Input((3,)), tfring.layers.ShardedEmbedding(VOCABULARY + 1, DIM)])
        smaller = keras.Sequential([keras.Input((3,)), tfring.layers.ShardedEmbedding(VOCABULARY, DIM)])
    tfring.save(larger, f"{folder}/larger.weights.h5")
    message = rf"a table of shape \({VOCABULARY + 1}, {DIM}\), but .* of shape \({VOCABULARY}, {DIM}\)"
    with pytest.raises(ValueError, match=message):
        smaller.load_weights(f"{folder}/larger.weights.h5")

    def used_otherwise():
        optimizer = o.SGD(0.01)
        optimizer.build(rows.trainable_variables)
        optimizer.apply([tf.zeros(rows.embeddings.shape)], rows.trainable_variables)

    attempt("dense gradient", used_otherwise)
    return errors


def replicas():
    layer = tfring.layers.ShardedEmbedding(VOCABULARY, DIM)
    error = pytest.raises(tfring.errors.ConfigurationError, match="this process has 2 replicas")
    with strategy(devices=["CPU:0", "CPU:1"]).scope(), error:
        layer.build()


def test_what_is_refused(tmp_path):
    workers(1, logical_cpus=2).run(replicas)
    for errors in workers(2).run(refused, str(tmp_path)):
        for name in ("Adafactor", "Lamb", "Subclass"):
            assert errors[name].startswith(f"{name} ")
            assert "element_wise = True" in errors[name]
        assert 'update="dense"' in errors["ema"]
        assert "gradient_accumulation_steps=2" in errors["accumulation"]
        for name, argument in (("regularizer", "embeddings_regularizer"), ("lora", "lora_rank")):
            assert argument in errors[name]
        assert "embeddings_constraint" in errors["constraint"]
        assert "is 'max', not one of" in errors["combiner"]
        assert "`update` is 'some'" in errors["update"]
        assert "`placement` is 'hash'" in errors["placement"]
        assert "enable_lora" in errors["enable_lora"]
        assert "quantize" in errors["quantize"]
        assert "Ragged ids of" in errors["ragged"]
        assert "Sparse ids of" in errors["sparse"]
        assert "Use tfring.callbacks.Backup" in errors["restore"]
        assert ".weights.h5" in errors["h5"]
        assert "tfring.save(model, path)" in errors["export"]
        assert "tfring.save(model, path)" in errors["checkpoint"]
        assert "strategy.run" in errors["outside"]
        assert "a dense gradient" in errors["dense gradient"]


# -- the document ----------------------------------------------------------------------------------------------------

DOCUMENT = pathlib.Path(__file__).parents[2] / "docs" / "sharded_embeddings.md"


def blocks():
    return re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(), re.DOTALL | re.MULTILINE)


def play(folder, blocks):
    import keras

    given = {"keras": keras, "tfring": tfring, "strategy": strategy(), "folder": folder}
    for block in blocks:
        exec(block, given)
    shapes = {name: given[name].get_weights()[0].shape for name in ("layer", "large")}
    printed = all(str(given[plan]) in DOCUMENT.read_text() for plan in ("plan", "mixed"))
    return shapes, printed, relative_error(given["again"].get_weights(), given["model"].get_weights())


def test_programs_in_the_document(tmp_path):
    assert len(blocks()) == 6
    for shapes, printed, error in workers(2).run(play, str(tmp_path), blocks()):
        assert shapes == {"layer": (100_000, 16), "large": (50_000, 8)}
        assert printed
        assert error == 0
