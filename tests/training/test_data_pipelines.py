"""tf.data pipelines as users write them: equal to one process, and each rank maps its own rows alone."""

import collections
import pathlib
import tempfile

import numpy as np
import pytest
from common import assert_equal, devices, history_error, is_reference, relative_error, skewed_rows
from harness import strategy, workers

ROWS, BATCH, EPOCHS = 83, 20, 2
calls = collections.Counter()


def counted(name):
    """A function for `map` that counts its calls, with a Python function's cost and its lack of a shape."""
    import tensorflow as tf

    def count(x):
        calls[name] += 1
        return x

    def fn(x, y):
        z = tf.numpy_function(count, [x], x.dtype)
        z.set_shape(x.shape)
        return 0.5 * z, y

    return fn


def rows():
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(skewed_rows(ROWS))


def pictures(folder):
    """JPEG files of two classes, 43 of them."""
    import tensorflow as tf

    if not folder.exists():
        generator = np.random.default_rng(0)
        for i in range(43):
            (folder / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
            image = generator.integers(0, 255, (12, 12, 3), dtype=np.uint8)
            (folder / "ab"[i % 2] / f"{i}.jpg").write_bytes(tf.io.encode_jpeg(image).numpy())
    return folder


def records(folder):
    """Three TFRecord files, of other lengths."""
    import tensorflow as tf

    x, y = skewed_rows(ROWS)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [str(folder / f"{i}.tfrecord") for i in range(3)]
    for path, part in zip(paths, np.split(np.arange(ROWS), [10, 40]), strict=True):
        with tf.io.TFRecordWriter(path) as writer:
            for i in part:
                writer.write(np.concatenate([x[i], y[i]]).tobytes())
    return paths


def parsed(record):
    import tensorflow as tf

    row = tf.ensure_shape(tf.io.decode_raw(record, tf.float32), [5])
    return row[:4], row[4:]


def csv(folder):
    folder.mkdir(parents=True, exist_ok=True)
    x, y = skewed_rows(ROWS)
    path = folder / "rows.csv"
    np.savetxt(path, np.concatenate([x, y], 1), fmt="%.4f", delimiter=",", header="a,b,c,d,y", comments="")
    return str(path)


def pipelines(folder):
    """Returns `(dataset, fit arguments)` by name; made again for each model."""
    import keras
    import tensorflow as tf

    auto = {"num_parallel_calls": tf.data.AUTOTUNE}

    def stateless(i, row):
        x, y = row
        return x + tf.random.stateless_normal([4], tf.stack([i, 7])), y

    def serial_random(x, y):
        return x + tf.random.normal([4], seed=5), y

    def center(x, y):  # looks at all rows of a batch
        return x - tf.reduce_mean(x, 0), y

    def views(x, y):
        return tf.concat([x, -x[::-1]], 0), tf.concat([y, y], 0)

    def kept(x, y):
        keep = x[:, 0] > 0
        return tf.boolean_mask(x, keep), tf.boolean_mask(y, keep)

    def halve(x, y):
        return 0.5 * x, y

    def labelled():
        x, y = skewed_rows(ROWS)
        return tf.data.Dataset.from_tensor_slices((x, (y > 0).astype("float32")))

    def zipped():
        x, y = map(tf.data.Dataset.from_tensor_slices, skewed_rows(ROWS))
        y = y.map(lambda y: 2 * y)
        x = x.map(lambda x: counted("zipped")(x, 0)[0], **auto)
        return tf.data.Dataset.zip((x, y)).shuffle(30, seed=1).batch(BATCH)

    made = {
        "map": lambda: rows().map(counted("map"), **auto).batch(BATCH),
        "serial maps": lambda: rows().map(halve).map(counted("serial maps")).batch(BATCH).prefetch(2),
        "one row a batch": lambda: rows().take(7).map(counted("one row a batch")).batch(1),
        "drop_remainder": lambda: rows().map(counted("drop_remainder"), **auto).batch(BATCH, drop_remainder=True),
        "shuffle before": lambda: rows().shuffle(30, seed=1).map(counted("shuffle before"), **auto).batch(BATCH),
        "shuffle between": lambda: rows().map(counted("shuffle between"), **auto).shuffle(30, seed=1).batch(BATCH),
        "shuffle of batches": lambda: rows().map(counted("shuffle of batches")).batch(BATCH).shuffle(3, seed=1),
        "repeat before": lambda: rows().map(counted("repeat before")).repeat(2).batch(BATCH),
        "zipped": zipped,
        "zipped, no map": lambda: tf.data.Dataset.zip(
            tuple(map(tf.data.Dataset.from_tensor_slices, skewed_rows(ROWS)))
        ).shuffle(30, seed=1).batch(BATCH),
        "cache": lambda: rows().map(counted("cache")).batch(BATCH).cache().repeat(2).take(7),
        "order left open": lambda: rows().map(halve, **auto, deterministic=False).batch(BATCH),
        "map of batches": lambda: rows().map(halve).batch(BATCH).map(center),
        "more rows of batches": lambda: rows().batch(BATCH).map(views),
        "fewer rows of batches": lambda: rows().map(halve).batch(BATCH).map(kept),
        "share": lambda: rows().map(counted("share")).apply(_share(BATCH)).map(halve, **auto).prefetch(2),
        "share, no map before": lambda: rows().apply(_share(BATCH)).map(halve, **auto).prefetch(2),
        "share, drop_remainder": lambda: rows().apply(_share(BATCH, True)).map(halve, **auto),
        "class weights, no map before": lambda: labelled().batch(BATCH),
        "stateless draws": lambda: rows().enumerate().map(stateless, **auto).batch(BATCH),
        "draws in order": lambda: rows().map(serial_random).batch(BATCH),
        "filter": lambda: rows().filter(lambda x, y: x[0] > 0).map(counted("filter")).batch(BATCH),
        "TFRecords": lambda: tf.data.TFRecordDataset(records(folder / "records")).map(parsed, **auto).batch(BATCH),
        "interleave": lambda: tf.data.Dataset.from_tensor_slices(records(folder / "records"))
        .interleave(tf.data.TFRecordDataset, cycle_length=2)
        .map(parsed)
        .batch(BATCH),
        "CSV": lambda: tf.data.experimental.make_csv_dataset(
            csv(folder / "csv"), BATCH, label_name="y", num_epochs=1, shuffle=False
        ).map(lambda x, y: (tf.stack(list(x.values()), 1), y[:, None])),
        "pictures": lambda: keras.utils.image_dataset_from_directory(
            str(pictures(folder / "pictures")), image_size=(8, 8), batch_size=8, seed=3, verbose=False
        ),
        "pictures, cached": lambda: keras.utils.image_dataset_from_directory(
            str(pictures(folder / "pictures")), image_size=(8, 8), batch_size=8, shuffle=False, verbose=False
        ).cache().prefetch(2),
    }
    weights = {"class_weight": {0: 1.0, 1: 3.0}}
    arguments = {
        "class weights, no map before": weights,
        "pictures": weights,
        "repeat before": {"steps_per_epoch": 8},
    }
    return {name: (make, arguments.get(name, {})) for name, make in made.items()}


def _share(*arguments):
    import tfring

    return tfring.data.share(*arguments)


# Maps are called at most once more a batch than this rank's rows: by a rank that has none.
COUNTED = ["map", "serial maps", "drop_remainder", "shuffle before", "shuffle between", "shuffle of batches", "share",
           "zipped"]


def train_pipelines(names, options):
    import keras

    ring = strategy(**devices())

    def model(of_pictures):
        flat = [keras.layers.Rescaling(1 / 255), keras.layers.Flatten()] if of_pictures else []
        model = keras.Sequential([*flat, keras.layers.Dense(1)])
        model.build((None, 8, 8, 3) if flat else (None, 4))
        model.compile(keras.optimizers.SGD(0.01), "mse", metrics=["mae"], **options)
        return model

    keras.utils.set_random_seed(1)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        made = pipelines(pathlib.Path(folder))
        models = {}  # by whether they are of pictures, which saves their traces
        for name in names or made:
            make, arguments = made[name]
            if ("pictures" in name) not in models:
                with ring.scope():
                    ours = model("pictures" in name)
                models["pictures" in name] = ours, model("pictures" in name), ours.get_weights()
            ours, alone, start = models["pictures" in name]
            ours.set_weights(start)
            calls.clear()
            got = ours.fit(make(), epochs=EPOCHS, verbose=0, **arguments).history
            count = calls[name]
            weights = ours.get_weights()
            results[name] = {"bits": b"".join(w.tobytes() for w in weights), "calls": count}
            if is_reference(ring):
                alone.set_weights(start)
                calls.clear()
                want = alone.fit(make(), epochs=EPOCHS, verbose=0, **arguments).history
                results[name]["history"] = history_error({"loss": got["loss"]}, {"loss": want["loss"]})
                results[name]["weights"] = relative_error(weights, alone.get_weights())
                results[name]["calls alone"] = calls[name]
    return results


def check(results, n):
    for case in results[0]:
        called = [result[case].pop("calls") for result in results]
        [alone] = [result[case].pop("calls alone") for result in results if "calls alone" in result[case]]
        if case in COUNTED:
            assert max(called) <= alone / n + EPOCHS * 5, (case, called, alone)
    assert_equal(results)


# What depends on where the cuts fall; the other cases differ in what is cut.
OVER_THREE = ["map", "one row a batch", "drop_remainder", "shuffle between", "shuffle of batches", "share", "pictures"]


@pytest.mark.parametrize(("n", "names"), [(2, None), pytest.param(3, OVER_THREE, marks=pytest.mark.long)])
def test_as_one_process_and_each_rank_maps_its_rows(n, names):
    check(workers(n).run(train_pipelines, names, {}, timeout=400), n)


def test_rows_are_cut_where_no_map_stands_before_the_batch():
    check(workers(2).run(train_pipelines, ["share, no map before", "class weights, no map before"], {}), 2)


@pytest.mark.long
def test_several_replicas_and_eager_steps():
    few = ["map", "shuffle between", "map of batches", "share", "one row a batch", "pictures"]
    check(workers(2, logical_cpus=2).run(train_pipelines, few, {}, timeout=300), 2)
    check(workers(2).run(train_pipelines, few[:3], {"run_eagerly": True}, timeout=300), 2)
