"""Ranks compare before they train: settings, models, vocabularies, tables, constants; each is named."""

import keras
import numpy as np
import pytest
from common import skewed_rows
from harness import strategy, workers

from tfring.errors import MismatchError

WORDS = ["ant", "bee", "cat", "dog"]


def by_rank(rank, values):
    """As a set of strings is listed: in an order of each process's own."""
    return list(values) if rank == 0 else list(values)[::-1]


def texts(num_rows=24):
    rng = np.random.default_rng(0)
    ids = rng.integers(0, len(WORDS), size=num_rows)
    return np.array(WORDS)[ids][:, None].astype(object), np.sin(ids)[:, None].astype("float32")


def texts_dataset():
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(texts()).batch(8)


def compiled(model, **options):
    model.compile(**{"optimizer": keras.optimizers.SGD(0.01), "loss": "mse", **options})
    return model


def dense(rank, **options):
    return compiled(keras.Sequential([keras.Input([4]), keras.layers.Dense(1)]), **options)


def of_inputs(rank):
    """Towers made in the order of a set, each for one input."""
    inputs = {name: keras.Input([4], name=name) for name in ("a", "b", "c")}
    towers = {name: keras.layers.Dense(2)(inputs[name]) for name in by_rank(rank, inputs)}
    outputs = keras.layers.Dense(1)(keras.layers.concatenate([towers[name] for name in "abc"]))
    return compiled(keras.Model(inputs, outputs))


def joined(rank):
    inputs = {name: keras.Input([4], name=name) for name in ("a", "b", "c")}
    outputs = keras.layers.Dense(1)(keras.layers.concatenate(by_rank(rank, inputs.values())))
    return compiled(keras.Model(inputs, outputs))


def of_words(rank):
    import tensorflow as tf

    lookup = keras.layers.StringLookup(vocabulary=by_rank(rank, WORDS))
    layers = [keras.Input([1], dtype=tf.string), lookup, keras.layers.Embedding(6, 2), keras.layers.Flatten()]
    return compiled(keras.Sequential([*layers, keras.layers.Dense(1)]))


class Tokenizer(keras.layers.Layer):
    """With the signature of keras-hub's tokenizers, which are no layers of Keras' but have a vocabulary."""

    def __init__(self, words, **kwargs):
        super().__init__(**kwargs)
        self.words = words

    def get_vocabulary(self):
        if self.words is None:
            raise ValueError("No vocabulary has been set for BertTokenizer.")
        return self.words

    def get_config(self):
        raise RuntimeError("a file is gone")


class Tokenized(keras.Model):
    """Holds tokenizers as keras-hub's models do, with their preprocessor."""

    def __init__(self, *vocabularies):
        super().__init__()
        self.tokenizers = [Tokenizer(words) for words in vocabularies]
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        return self.dense(x)


class Columns(keras.Model):
    """A model of one's own, that picks columns by name."""

    def __init__(self, columns):
        super().__init__()
        self.columns = columns
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        return self.dense(keras.ops.concatenate([x[name] for name in self.columns], 1))


def of_columns(rank):
    return compiled(Columns(by_rank(rank, "abc")))


class Projection(keras.Model):
    """A fixed random matrix, drawn without a seed."""

    def __init__(self, matrix):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self._matrix = matrix

    def call(self, x):
        return self.dense(x @ self._matrix)


def of_rank(rank):
    return np.random.default_rng(rank).normal(size=(4, 3)).astype("float32")


def in_graph(rank):
    return compiled(Projection(of_rank(rank)))


def captured(rank):
    import tensorflow as tf

    return compiled(Projection(tf.constant(of_rank(rank))))


def mapped(rank):
    import tensorflow as tf

    lookup = keras.layers.StringLookup(vocabulary=by_rank(rank, WORDS))
    return tf.data.Dataset.from_tensor_slices(texts()).map(lambda x, y: (lookup(x), y)).batch(8)


def table_mapped(rank):
    import tensorflow as tf

    pairs = tf.lookup.KeyValueTensorInitializer(by_rank(rank, WORDS), tf.range(4, dtype=tf.int64))
    table = tf.lookup.StaticVocabularyTable(pairs, 1)
    return tf.data.Dataset.from_tensor_slices(texts()).map(lambda x, y: (table.lookup(x), y)).batch(8)


class Grouped(keras.Model):
    """Looks texts up in a table, several of which have one value."""

    def __init__(self, words, numbers):
        import tensorflow as tf

        super().__init__()
        self.table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(words, numbers), -1)
        self.embedding, self.dense = keras.layers.Embedding(3, 2), keras.layers.Dense(1)

    def call(self, x):
        return self.dense(self.embedding(self.table.lookup(x) + 1))


def noisy(rank):
    import tensorflow as tf

    noise = of_rank(rank)[:, 0]
    return tf.data.Dataset.from_tensor_slices(skewed_rows(24)).map(lambda x, y: (x + noise, y)).batch(8)


def of_ids(rank):
    layers = [keras.Input([1]), keras.layers.Embedding(6, 2), keras.layers.Flatten(), keras.layers.Dense(1)]
    return compiled(keras.Sequential(layers))


def three_inputs():
    x, y = skewed_rows(24)
    return {name: x * factor for name, factor in (("a", 1), ("b", 2), ("c", 3))}, y


# model, arguments of fit by rank, what the error names
CASES = {
    "vocabulary": (of_words, lambda rank: (texts_dataset(),), "`vocabulary of string_lookup`"),
    "tokenizer": (
        lambda rank: compiled(Tokenized(None, by_rank(rank, WORDS))),
        lambda rank: skewed_rows(24),
        "`vocabulary of tokenizer",
    ),
    "towers": (of_inputs, lambda rank: three_inputs(), "`layer "),
    "joined": (joined, lambda rank: three_inputs(), "`layer 1`"),
    "columns": (of_columns, lambda rank: three_inputs(), "`columns of columns`"),
    "constant": (in_graph, lambda rank: skewed_rows(24), "constant of shape (4, 3), float32 (0)`"),
    "captured": (captured, lambda rank: skewed_rows(24), "constant of shape (4, 3), float32 (0)`"),
    "mapped": (of_ids, lambda rank: (mapped(rank),), "`lookup table (0)"),
    "table mapped": (of_ids, lambda rank: (table_mapped(rank),), "`lookup table (0)"),
    "noise mapped": (dense, lambda rank: (noisy(rank),), "constant of shape (4,), float32 (0)"),
    "loss": (lambda rank: dense(rank, loss=["mse", "mae"][min(rank, 1)]), lambda rank: skewed_rows(24), "`loss`"),
    "clipnorm": (
        lambda rank: dense(rank, optimizer=keras.optimizers.Adam(clipnorm=[None, 0.01][min(rank, 1)])),
        lambda rank: skewed_rows(24),
        "`clipnorm of optimizer 0, Adam`",
    ),
    "executions": (
        lambda rank: dense(rank, steps_per_execution=1 + rank),
        lambda rank: skewed_rows(24),
        "`steps_per_execution`",
    ),
}


def refused():
    ring = strategy()
    rank = ring.cluster.rank
    messages = {}
    for case, (make_model, arguments, _) in CASES.items():
        with ring.scope():
            model = make_model(rank)
        try:
            given = arguments(rank)
            model.fit(*given, batch_size=8 if len(given) == 2 else None, shuffle=False, verbose=0)
            messages[case] = "trained"
        except MismatchError as error:
            messages[case] = str(error)
    with ring.scope():
        model = dense(rank)
    for name, value in {"epochs": 1 + rank, "class_weight": {0: 1.0 + rank}, "batch_size": 8 + rank}.items():
        with pytest.raises(MismatchError) as raised:
            model.fit(*skewed_rows(24), verbose=0, **{name: value})
        messages[name] = str(raised.value)
    model.fit(*skewed_rows(24), verbose=0)  # the ring may be used on
    with ring.scope():
        batchwise = dense(rank, optimizer=keras.optimizers.SGD(0.1, nesterov=bool(rank)))
    with pytest.raises(MismatchError) as raised:
        batchwise.train_on_batch(*skewed_rows(8))
    messages["train_on_batch"] = str(raised.value)
    return messages


@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.long)])
def test_what_differs_between_ranks_is_named_before_they_train(n):
    first, *others = workers(n).run(refused)
    assert others == [first] * (n - 1)
    names = {case: name for case, (_, _, name) in CASES.items()}
    names.update({name: f"`{name}`" for name in ("epochs", "class_weight", "batch_size")})
    names["train_on_batch"] = "`nesterov of optimizer 0, SGD`"
    wrong = {case: first[case] for case, name in names.items() if name not in first[case]}
    assert not wrong, wrong
    assert all("on rank 0" in text and "sorted(set(" in text for text in first.values()), first
    assert "'ant', 'bee', 'cat' on rank 0" in first["vocabulary"], first["vocabulary"]
    assert "1 on rank 0, 2 on rank 1" in first["epochs"], first["epochs"]


class Own(keras.Model):
    """A functional model of a class of one's own, whose attribute `output_names` Keras sets."""


def alike():
    """Ranks that differ in names that Keras counts, and in learning rates, which are rank 0's."""
    ring = strategy()
    rank = ring.cluster.rank
    if rank:
        keras.Sequential([keras.Input([4]), keras.layers.Dense(3), keras.layers.Dense(3)])
    with ring.scope():
        inputs = keras.Input([4])
        outputs = keras.layers.Dense(1)(keras.layers.Dense(2)(inputs) + keras.layers.Dense(2)(inputs))
        model = compiled(Own(inputs, outputs), optimizer=keras.optimizers.SGD(0.01 / (1 + rank)))
    traces = []
    step = model.train_step
    model.train_step = lambda data: traces.append(1) or step(data)
    model.fit(*skewed_rows(24), batch_size=8, epochs=3, verbose=rank)
    return len(traces), [w.tobytes() for w in model.get_weights()]


def test_names_that_keras_counts_need_not_be_the_same():
    first, *others = workers(2).run(alike)
    assert others == [first]
    assert first[0] == 1  # comparing graphs traces none twice


def of_groups():
    """A table in which many keys have one value: the order of its entries differs between processes."""
    ring = strategy()
    words = [f"word {number}" for number in range(40)]
    with ring.scope():
        model = compiled(Grouped(words, [number % 2 for number in range(40)]))
    model.fit(texts_dataset(), verbose=0)
    return [w.tobytes() for w in model.get_weights()]


def test_a_table_whose_values_repeat_is_the_same():
    first, other = workers(2).run(of_groups)
    assert first == other


def chosen_by_a_lambda():
    """Ranks on which a lambda closes over a name that Keras counts otherwise."""
    ring = strategy()
    if ring.cluster.rank:
        keras.Sequential([keras.Input([4]), keras.layers.Dense(3)])
    with ring.scope():
        layer = keras.layers.Dense(1)
        counted, sgd = layer.name, keras.optimizers.SGD(0.01)
        every = keras.optimizers.MultiOptimizer(lambda variable: sgd if counted else variable)
        model = compiled(keras.Sequential([keras.Input([4]), layer]), optimizer=every)
    model.fit(*skewed_rows(24), batch_size=8, verbose=0)
    return counted, [w.tobytes() for w in model.get_weights()]


def test_what_a_lambda_closes_over_need_not_be_the_same():
    (name, weights), (other, others) = workers(2).run(chosen_by_a_lambda)
    assert name != other and weights == others


def tokenized():
    ring = strategy()
    with ring.scope():
        model = compiled(Tokenized(WORDS, None))
    model.fit(*skewed_rows(24), batch_size=8, verbose=0)
    return [w.tobytes() for w in model.get_weights()]


def test_what_cannot_be_read_of_a_layer_is_not_compared():
    first, other = workers(2).run(tokenized)
    assert first == other
