"""Maps of batches: which treat each row by itself, so that a rank runs them on its own rows alone."""

import numpy as np
import pytest
import tensorflow as tf
from common import assert_equal, devices, relative_error
from harness import strategy, workers

from tfring import _tf
from tfring.data.rowwise import is_rowwise

WEIGHTS = np.linspace(-1, 1, 15).reshape(5, 3).astype("float32")


EXAMPLES = [
    tf.train.Example(features=tf.train.Features(feature={
        "x": tf.train.Feature(float_list=tf.train.FloatList(value=[i])),
        "s": tf.train.Feature(int64_list=tf.train.Int64List(value=range(i))),
    })).SerializeToString()
    for i in range(4)
]  # fmt: skip


def parsed(i, **features):
    return tf.io.parse_example(tf.gather(EXAMPLES, i), features)


def table():
    import keras

    return keras.layers.StringLookup(vocabulary=["0", "1", "2", "3"])


def rescaling():
    import keras

    return keras.layers.Rescaling(1 / 255, 0.5)


def normalization():
    import keras

    layer = keras.layers.Normalization()
    layer.adapt(of_rows()[0])
    return layer


def of_x(layer):
    return lambda x, i: (layer(x), i)


def of_ids(layer):
    return lambda x, i: (x, layer(tf.as_string(i)))


BY_ROW = {
    "rescaling": lambda: of_x(rescaling()),
    "normalization": lambda: of_x(normalization()),
    "cast and scale": lambda: (lambda x, i: (tf.cast(i, tf.float32)[:, None] / 3.0 + x, i)),
    "one_hot": lambda: (lambda x, i: (x, tf.one_hot(i, 4))),
    "reshape": lambda: (lambda x, i: (tf.reshape(x, [-1, 5, 1]), tf.expand_dims(i, -1))),
    "slices": lambda: (lambda x, i: (x[:, 1:3], x[..., 0])),
    "sum of columns": lambda: (lambda x, i: (tf.reduce_sum(x, -1), tf.argmax(x, 1))),
    "matmul": lambda: (lambda x, i: (tf.nn.relu(tf.matmul(x, WEIGHTS) + WEIGHTS[0]), i)),
    "concat and stack": lambda: (lambda x, i: (tf.concat([x, 2 * x], 1), tf.stack([i, i + 1], 1))),
    "transpose": lambda: (lambda x, i: (tf.transpose(tf.reshape(x, [-1, 5, 1]), [0, 2, 1]), i)),
    "gather": lambda: (lambda x, i: (tf.gather(WEIGHTS, i), i)),
    "where": lambda: (lambda x, i: (tf.where(x > 0, x, 0.0), tf.where(i == 1, i, -i))),
    "lookup": lambda: of_ids(table()),
    "images": lambda: (lambda x, i: (tf.image.resize(tf.reshape(x, [-1, 5, 1, 1]), [3, 2]), i)),
    "bytes": lambda: (lambda x, i: (x, tf.io.decode_raw(tf.as_string(i), tf.uint8))),
    "examples": lambda: (lambda x, i: (parsed(i, x=tf.io.FixedLenFeature([1], tf.float32)), i)),
    "a dict": lambda: (lambda x, i: ({"x": tf.square(x), "i": i}, i)),
}
WHOLE = {
    "mean of the batch": lambda x, i: (x - tf.reduce_mean(x, 0), i),
    "mean of all": lambda x, i: (x - tf.reduce_mean(x), i),
    "batch against itself": lambda x, i: (tf.matmul(x, x, transpose_b=True), i),
    "rows against columns": lambda x, i: (tf.cast(i, tf.float32) - tf.cast(i, tf.float32)[:, None], i),
    "reversed": lambda x, i: (tf.reverse(x, [0]), i),
    "mixed up": lambda x, i: (tf.gather(x, tf.range(tf.shape(x)[0])[::-1]), i),
    "shifted": lambda x, i: (x[1:], i[1:]),
    "every second": lambda x, i: (x[::2], i[::2]),
    "rows to columns": lambda x, i: (tf.reshape(x, [5, -1]), i),
    "rows of rows": lambda x, i: (tf.reshape(x, [-1, 1]), i),
    "transposed": lambda x, i: (tf.transpose(x), i),
    "number of rows": lambda x, i: (x / tf.cast(tf.shape(x)[0], tf.float32), i),
    "cumulative": lambda x, i: (tf.cumsum(x), i),
    "random": lambda x, i: (x + tf.random.uniform([5]), i),
    "random by row": lambda x, i: (x + tf.random.uniform(tf.shape(x)), i),
    "Python": lambda x, i: (tf.ensure_shape(tf.numpy_function(lambda v: v[::-1], [x], tf.float32), [None, 5]), i),
    "a constant": lambda x, i: (x, tf.range(4)),
    "a constant of as many rows": lambda x, i: (x + WEIGHTS.T.repeat(2, 0)[:5, :1], i),
    "stacked above the rows": lambda x, i: (tf.stack([x, x]), i),
    "one batch after another": lambda x, i: (tf.concat([x, x], 0), i),
    "sorted": lambda x, i: (tf.sort(x, 0), i),
    "examples with sparse features": lambda x, i: (
        tf.ensure_shape(parsed(i, s=tf.io.VarLenFeature(tf.int64))["s"].values[:, None], [None, 1]), i
    ),
    "printed": lambda x, i: (tf.raw_ops.Print(input=x, data=[x], message="rows"), i),
}


def of_rows():
    x = np.random.default_rng(0).normal(size=(5, 5)).astype("float32")
    return x, np.array([0, 3, 1, 1, 2])


def is_by_row(function):
    x, i = of_rows()
    batches = tf.data.Dataset.from_tensor_slices((x, i)).batch(5)
    mapped = batches.map(function)
    return is_rowwise(_tf.dataset_step(mapped).arguments["function"], batches.element_spec), mapped


@pytest.mark.oldest
@pytest.mark.parametrize("name", BY_ROW)
def test_a_map_that_treats_rows_apart_is_known(name):
    function = BY_ROW[name]()
    known, mapped = is_by_row(function)
    assert known
    x, i = of_rows()
    by_row = tf.data.Dataset.from_tensor_slices((x, i)).batch(1).map(function)  # and it is true
    [whole] = mapped.as_numpy_iterator()
    parts = list(by_row.as_numpy_iterator())
    tf.nest.map_structure(
        lambda whole, *parts: np.testing.assert_allclose(whole, np.concatenate(parts), 1e-6), whole, *parts
    )


@pytest.mark.parametrize("name", WHOLE)
def test_a_map_that_looks_at_other_rows_is_not_taken_for_one_of_rows(name):
    assert not is_by_row(WHOLE[name])[0]


def test_elements_that_are_no_dense_tensors_are_mapped_whole():
    batches = tf.data.Dataset.from_tensors(tf.ragged.constant([[1.0], [2.0, 3.0]]))
    mapped = batches.map(lambda x: 2 * x)
    assert not is_rowwise(_tf.dataset_step(mapped).arguments["function"], batches.element_spec)


def of_static_batches():
    import keras

    def batches():
        x = np.linspace(0, 1, 88, dtype="float32").reshape(22, 4)
        rows = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).map(lambda x, y: (2 * x, y))
        return rows.batch(5, drop_remainder=True).map(lambda x, y: (x / 3, y))

    def make():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    def outcome(model):
        model.fit(batches(), verbose=0)
        return [*model.get_weights(), model.predict(batches(), verbose=0)]

    alone = outcome(make())
    with strategy(**devices()).scope():
        model = make()
    found = outcome(model)
    return {"static": {"all": relative_error(found, alone), "bits": b"".join(value.tobytes() for value in found)}}


def test_maps_of_batches_of_a_static_size_train_and_predict():
    assert_equal(workers(2).run(of_static_batches))


def pictures(folder):
    """Keras' own pipeline of pictures, scaled a batch at a time as its guides do; 11 pictures, batches of 4."""
    import keras

    mapped = []

    def of_keras():
        data = keras.utils.image_dataset_from_directory(folder, batch_size=4, image_size=(6, 5), seed=3, verbose=False)
        scale = keras.layers.Rescaling(1 / 255)
        return data.map(lambda x, y: (scale(x), y), num_parallel_calls=tf.data.AUTOTUNE).prefetch(2)

    def make():
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Input((6, 5, 3)), keras.layers.Flatten(), keras.layers.Dense(2)]
        model = keras.Sequential(layers)
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    alone = make()
    alone.fit(of_keras(), epochs=2, verbose=0)
    ring = strategy(**devices())
    with ring.scope():
        model = make()
    model.fit(of_keras(), epochs=2, verbose=0)

    def count(row):
        mapped.append(row.item())
        return row

    rows = tf.data.Dataset.range(11).map(lambda row: tf.ensure_shape(tf.numpy_function(count, [row], tf.int64), []))
    with ring.scope():
        other = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
        other.compile("sgd", "mse")
    batches = rows.batch(4).map(lambda row: (tf.cast(row, tf.float32)[:, None] / 11, row))
    other.fit(batches, verbose=0)
    weights = model.get_weights()
    bits = b"".join(weight.tobytes() for weight in weights)
    return {"weights": relative_error(weights, alone.get_weights()), "bits": bits}, mapped


@pytest.mark.parametrize(("n", "logical_cpus"), [(2, 1), (3, 1)])
def test_pictures_of_a_folder_are_decoded_by_share(tmp_path, n, logical_cpus):
    generator = np.random.default_rng(0)
    for number in range(11):
        path = tmp_path / str(number % 2) / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        pixels = generator.integers(0, 255, (9, 8, 3)).astype("uint8")
        path.write_bytes(tf.io.encode_png(pixels).numpy())
    results = workers(n, logical_cpus=logical_cpus).run(pictures, str(tmp_path))
    assert_equal([{"pictures": errors} for errors, _ in results])
    assert sum(len(mapped) for _, mapped in results) <= 11 + n  # each row on one rank, and at most one in excess
    assert {row for _, mapped in results for row in mapped} == set(range(11))
