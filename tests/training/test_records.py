"""TFRecords by number: equal to one process, each rank reads its own records alone."""

import os
import pathlib
import tempfile

import numpy as np
import pytest
import tensorflow as tf
from common import assert_equal, history_error, is_reference, relative_error, skewed_rows
from harness import strategy, workers

from tfring.data import pipeline
from tfring.data.plan import plan_of
from tfring.data.rows import ReplicaRange
from tfring.errors import MismatchError
from tfring.ring import ops

ROWS, BATCH, EPOCHS = 81, 20, 2


def write(folder, padding=0, cuts=(10, 10, 40)):
    """Four files, one of them without records; each record is longer than the one before."""
    x, y = skewed_rows(ROWS)
    folder.mkdir(parents=True, exist_ok=True)
    parts = np.split(np.arange(ROWS), cuts)
    paths = [str(folder / f"{i}.tfrecord") for i in range(len(parts))]
    for path, part in zip(paths, parts, strict=True):
        with tf.io.TFRecordWriter(path) as writer:
            for i in part:
                writer.write(np.concatenate([x[i], y[i]]).tobytes() + bytes(padding + i))
    return paths


def parsed(record):
    row = tf.ensure_shape(tf.io.decode_raw(tf.strings.substr(record, 0, 20), tf.float32), [5])
    return row[:4], row[4:]


def pipelines(paths):
    """Pipelines whose rows are numbers until a batch is cut, by name."""
    records, files = tf.data.TFRecordDataset, tf.data.Dataset.from_tensor_slices(paths)
    numbers = tf.data.Dataset.from_tensor_slices(np.arange(70))
    parallel = {"num_parallel_calls": 2}
    return {
        "one file": lambda: records(paths[3]).map(parsed).batch(BATCH),
        "files": lambda: records(paths).map(parsed, **parallel).batch(BATCH).prefetch(2),
        "nothing is mapped": lambda: records(paths).shuffle(9, seed=1).batch(BATCH),
        "shuffle": lambda: records(paths).shuffle(30, seed=3).map(parsed).batch(BATCH),
        "shuffle behind": lambda: records(paths).map(parsed).shuffle(30, seed=3).batch(BATCH, drop_remainder=True),
        "one order": lambda: records(paths)
        .shuffle(99, seed=3, reshuffle_each_iteration=False)
        .repeat(2)
        .map(parsed)
        .batch(BATCH),
        "skip, take, repeat": lambda: records(paths).skip(5).map(parsed).take(61).repeat(2).batch(BATCH),
        "of batches": lambda: records(paths).batch(BATCH).map(lambda r: tf.strings.length(r)),
        "zipped": lambda: tf.data.Dataset.zip((records(paths).map(parsed), numbers)).batch(BATCH),
        "list_files": lambda: records(tf.data.Dataset.list_files(paths, seed=3)).map(parsed).batch(BATCH),
        "files shuffled": lambda: records(files.shuffle(9, seed=2).repeat(2)).map(parsed).batch(BATCH),
        "parallel reads": lambda: records(paths, num_parallel_reads=2).map(parsed).batch(BATCH),
        "AUTOTUNE": lambda: records(paths, num_parallel_reads=tf.data.AUTOTUNE).map(parsed).batch(BATCH),
        "flat_map": lambda: files.flat_map(records).map(parsed).batch(BATCH),
        "interleave": lambda: files.interleave(lambda f: records(f), cycle_length=2, block_length=3)
        .shuffle(9, seed=1)
        .map(parsed)
        .batch(BATCH),
        "parallel interleave": lambda: files.shuffle(9, seed=2)
        .interleave(records, cycle_length=3, deterministic=True, **parallel)
        .map(parsed)
        .batch(BATCH),
    }


def others(paths):
    """Pipelines of which every rank reads all records, by name."""
    records, files = tf.data.TFRecordDataset, tf.data.Dataset.from_tensor_slices(paths)
    numbers = tf.data.Dataset.from_tensor_slices(np.arange(70))

    def skips_one(path):
        return records(path).skip(1)

    return {
        "compressed": lambda: records(paths, compression_type="GZIP"),
        "compressed, interleaved": lambda: files.interleave(lambda f: records(f, compression_type="GZIP")),
        "other functions": lambda: files.flat_map(skips_one),
        "chosen": lambda: records(paths).filter(lambda r: tf.strings.length(r) > 30),
        "zipped, interleaved": lambda: tf.data.Dataset.zip((files.interleave(records), numbers)),
        "a remote folder": lambda: records([*paths, "gs://tfring/0.tfrecord"]),
        "no file": lambda: records([*paths, f"{paths[0]}.missing"]),
        "no records": lambda: records([*paths, __file__]),
    }


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.long), 3])
def test_all_ranks_rows_are_the_batches_in_order(world_size, tmp_path):
    for name, make in pipelines(write(tmp_path)).items():
        parts = plan_of(make()).batching(by_number=True)
        assert parts is not None and parts.arrays is not None, name
        want = make()
        ranks = [pipeline.own_batches(parts, ReplicaRange(rank, 1, world_size)) for rank in range(world_size)]
        for epoch in range(EPOCHS):
            # A shuffle that was made once yields another order to each iterator.
            if epoch or any(word in name for word in ("shuffle", "list_files", "nothing", "interleave")):
                ranks = [
                    pipeline.own_batches(plan_of(make()).batching(by_number=True), ReplicaRange(rank, 1, world_size))
                    for rank in range(world_size)
                ]
                want = make()
            batches = [list(rank) for rank in ranks]
            whole = [tf.nest.flatten(batch) for batch in want]
            assert [len(own) for own in batches] == [len(whole)] * world_size, name
            for number, batch in enumerate(whole):
                total = len(batch[0])
                for rank, own in enumerate(batches):
                    about, rows = own[number]
                    begin, end = total * rank // world_size, total * (rank + 1) // world_size
                    if parts.whole:
                        begin, end = 0, total
                    assert about[0][0] == total, name
                    for got, component in zip(tf.nest.flatten(rows), batch, strict=True):
                        np.testing.assert_array_equal(got[: end - begin], component[begin:end], err_msg=name)


def test_an_order_left_open_is_one_on_all_ranks(tmp_path):
    files = tf.data.Dataset.from_tensor_slices(write(tmp_path))

    def make(deterministic):
        reads = files.interleave(
            tf.data.TFRecordDataset, cycle_length=2, num_parallel_calls=2, deterministic=deterministic
        )
        return reads.map(parsed).batch(BATCH)

    own = pipeline.own_batches(plan_of(make(False)).batching(by_number=True), ReplicaRange(0, 1, 2))
    for (_, (x, _)), (whole, _) in zip(own, make(True), strict=True):
        np.testing.assert_array_equal(x[: len(whole) // 2], whole[: len(whole) // 2])


def test_names_that_are_no_text(tmp_path):
    folder = bytes(tmp_path) + b"/\xff"
    os.mkdir(folder)
    [path] = write(tmp_path, cuts=())
    os.rename(path, folder + b"/0.tfrecord")
    dataset = tf.data.TFRecordDataset(tf.constant(folder + b"/0.tfrecord")).batch(BATCH)
    parts = plan_of(dataset).batching(by_number=True)
    for (_, got), want in zip(pipeline.own_batches(parts, ReplicaRange(0, 1, 1)), dataset, strict=True):
        np.testing.assert_array_equal(got, want)


def test_what_has_no_index_is_read_in_full(tmp_path):
    for name, make in others(write(tmp_path)).items():
        parts = plan_of(make().map(lambda *row: row[0]).batch(BATCH)).batching(by_number=True)
        assert parts.arrays is None, name


def bytes_read():
    for line in pathlib.Path("/proc/self/io").read_text().splitlines():
        if line.startswith("rchar"):
            return int(line.split()[1])
    raise AssertionError


def model_of_rows():
    import keras

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse")
    return model


def train(names):
    import keras

    ring = strategy()
    keras.utils.set_random_seed(1)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        made = pipelines(write(pathlib.Path(folder), padding=60_000))
        for name in names:
            with ring.scope():
                ours = model_of_rows()
            alone = model_of_rows()
            alone.set_weights(ours.get_weights())
            begin = bytes_read()
            history = ours.fit(made[name](), epochs=EPOCHS, verbose=0).history
            results[name] = {"read": bytes_read() - begin, "bits": b"".join(w.tobytes() for w in ours.get_weights())}
            predicted = ours.predict(made[name](), verbose=0)
            if is_reference(ring):
                begin = bytes_read()
                want = alone.fit(made[name](), epochs=EPOCHS, verbose=0).history
                results[name]["read alone"] = bytes_read() - begin
                results[name]["history"] = history_error(history, want)
                results[name]["weights"] = relative_error(ours.get_weights(), alone.get_weights())
                results[name]["predicted"] = relative_error([predicted], [alone.predict(made[name](), verbose=0)])
    return results


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.long)])
def test_each_rank_reads_its_own_records_alone(world_size):
    names = ["files", "shuffle", "skip, take, repeat", "parallel interleave"]
    results = workers(world_size).run(train, names)
    for name in names:
        read = [result[name].pop("read") for result in results]
        [alone] = [result[name].pop("read alone") for result in results if "read alone" in result[name]]
        # In each batch at most one row more; and what TensorFlow reads by the way.
        assert max(read) <= alone / world_size + EPOCHS * 12 * 60_100 + 500_000, (name, read, alone)
        assert min(read) > alone / world_size / 2, (name, read, alone)
    assert_equal(results)


def fit_with_another_record(which, rank):
    ring = strategy()
    with tempfile.TemporaryDirectory() as folder:
        paths = write(pathlib.Path(folder) / "train")
        if rank == 1:
            written = list(tf.data.TFRecordDataset(paths[2]).as_numpy_iterator())
            with tf.io.TFRecordWriter(paths[2]) as writer:
                for i, record in enumerate(written):
                    writer.write(bytes([record[0] ^ 1]) + record[1:] if i == which else record)
        with ring.scope():
            model = model_of_rows()
        try:
            model.fit(tf.data.TFRecordDataset(paths).map(parsed).batch(BATCH), verbose=0)
        except MismatchError as error:
            return str(error)
    return ""


def test_ranks_with_other_files_say_so():
    for text in workers(2).run(fit_with_another_record, 3, per_rank=[0, 1]):
        assert "`file 2 of x` is not the same on every rank" in text
        assert "30 records of 1335 bytes in train/2.tfrecord" in text, text


def fit_while_files_change():
    import keras

    ring = strategy()
    with tempfile.TemporaryDirectory() as folder:
        paths = write(pathlib.Path(folder))

        def add(epoch, logs):
            with tf.io.TFRecordWriter(paths[3]) as writer:
                writer.write(b"another")

        with ring.scope():
            model = model_of_rows()
        dataset = tf.data.TFRecordDataset(paths).map(parsed).batch(BATCH)
        changes = keras.callbacks.LambdaCallback(on_epoch_end=add)
        try:
            model.fit(dataset, epochs=2, verbose=0, callbacks=[changes])
        except Exception as error:
            return str(error)
    return ""


def test_files_that_change_are_found():
    for text in workers(2).run(fit_while_files_change):
        assert "3.tfrecord has changed since its records were counted" in text, text


def test_damage_is_found_where_it_is_read(tmp_path):
    [path] = write(tmp_path, cuts=())
    written = list(tf.data.TFRecordDataset(path).as_numpy_iterator())
    index = ops.index_records(path)
    assert index[:, 1].tolist() == list(map(len, written))
    places = np.concatenate([np.zeros([ROWS, 1], np.int64), index[:, :2]], 1)
    raw = bytearray(pathlib.Path(path).read_bytes())
    sizes = [len(raw)]
    order = [80, 0, 7, 7]
    assert ops.read_records([path], sizes, places[order]).numpy().tolist() == [written[i] for i in order]
    raw[index[7, 0] + 12] ^= 1
    pathlib.Path(path).write_bytes(raw)
    assert ops.read_records([path], sizes, places[[6, 8]]).numpy().tolist() == [written[6], written[8]]
    corrupted = f"corrupted record at {index[7, 0]}"
    with pytest.raises(tf.errors.DataLossError, match=corrupted):
        ops.read_records([path], sizes, places[[6, 7]])
    with pytest.raises(tf.errors.DataLossError, match="corrupted record at"):  # as TensorFlow says
        list(tf.data.TFRecordDataset(path))
    with pytest.raises(tf.errors.DataLossError, match="has changed since its records were counted"):
        ops.read_records([path], [sizes[0] - 1], places[[6]])
    raw[index[7, 0]] ^= 1
    pathlib.Path(path).write_bytes(raw)
    with pytest.raises(tf.errors.DataLossError, match=corrupted):
        ops.index_records(path)
    pathlib.Path(path).write_bytes(raw[: index[7, 0] - 2])
    with pytest.raises(tf.errors.DataLossError, match=f"truncated record at {index[6, 0]}"):
        ops.index_records(path)
    with pytest.raises(tf.errors.NotFoundError):
        ops.index_records(f"{path}.missing")
    with pytest.raises(tf.errors.InvalidArgumentError, match="number of a file that does not exist"):
        ops.read_records([path], sizes, [[1, 0, 5]])
