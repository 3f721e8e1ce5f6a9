"""Files of tables that are large: written and read in blocks, so that no rank holds a whole table in memory."""

import contextlib
import gc
import hashlib
import pathlib
import threading
import tracemalloc

import numpy as np
import pytest
from harness import strategy, workers

import tfring
from tfring import blocks

ROWS, WIDTH = 1_000_001, 8  # of uneven pieces
WHOLE_BYTES = 2 * ROWS * WIDTH * 4  # of the largest weight, two tables in one
LIMIT = 1.25 * WHOLE_BYTES  # for a worker's own piece, a few times, and blocks; the whole besides would be twice that


def made():
    import keras

    inputs = keras.Input((3,), dtype="int32")
    rows = tfring.layers.ShardedEmbedding(ROWS, WIDTH, combiner="sum", embeddings_initializer="normal", name="rows")
    many = tfring.layers.DistributedEmbedding(
        {
            name: tfring.layers.FeatureConfig(name, tfring.layers.TableConfig(name, ROWS, WIDTH, combiner="sum"))
            for name in ("first", "second")
        }
    )
    found = [rows(inputs), *many({"first": inputs, "second": inputs}).values()]
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()(found)))
    model.compile(keras.optimizers.Adagrad(0.05), "mse")
    return model


def data():
    generator = np.random.default_rng(0)
    return generator.integers(0, ROWS, (40, 3)).astype("int32"), generator.normal(size=(40, 1)).astype("float32")


class Memory:
    """The most that Python's and NumPy's objects take, beyond what they took before, by what was done."""

    def __init__(self):
        self.peaks = {}

    def of(self, what, function):
        tracemalloc.start()
        try:
            result = function()
            self.peaks[what] = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        return result


def digests(model):
    return [hashlib.sha256(weight).hexdigest() for weight in model.get_weights()]


def forget(model):
    for variable in model.weights:
        variable.value.assign(variable.value * 0)


def saved(folder):
    """The digests of what was saved, and what it took."""
    import keras

    keras.utils.set_random_seed(3)
    ring, memory = strategy(), Memory()
    with ring.scope():
        model = made()
    backup = tfring.callbacks.Backup(f"{folder}/backup")
    memory.of("Backup", lambda: model.fit(*data(), batch_size=20, verbose=0, callbacks=[backup]))
    memory.of("save", lambda: tfring.save(model, f"{folder}/model.keras"))
    memory.of("save_weights", lambda: tfring.save(model, f"{folder}/model.weights.h5"))
    return digests(model), memory.peaks


def loaded(folder):
    """The digests of weights by where they came from, the least of slots, and what it took."""
    import keras

    ring, memory, found = strategy(), Memory(), {}
    with ring.scope():
        model = keras.models.load_model(f"{folder}/model.keras")  # which draws a table of this size whole at first
        found["load_model"] = digests(model)
        least = min(float(v.numpy().min()) for v in model.optimizer.variables if v.shape.rank)
        forget(model)
        memory.of("load_weights", lambda: model.load_weights(f"{folder}/model.weights.h5"))
        found["load_weights"] = digests(model)
    forget(model)
    restore = tfring.callbacks.Backup(f"{folder}/backup")
    memory.of("restore", lambda: model.fit(*data(), batch_size=20, verbose=0, callbacks=[restore]))
    found["restore"] = digests(model)
    return found, least, memory.peaks


@pytest.mark.parametrize("size", [3, pytest.param(1, marks=pytest.mark.long)])
def test_no_rank_holds_a_whole_table(tmp_path, size):
    (wanted, _), *_ = results = workers(2).run(saved, str(tmp_path))
    for _, peaks in results:
        assert max(peaks.values()) < LIMIT, peaks
    for found, least, peaks in workers(size).run(loaded, str(tmp_path)):
        assert all(digests == wanted for digests in found.values())
        assert least >= 0.1 - 1e-7  # where Adagrad's slots begin
        assert size == 1 or max(peaks.values()) < LIMIT, peaks


SHARD_BYTES = 96 << 20
WIDE = 64
BESIDE_BYTES = 24 * blocks.BLOCK_BYTES  # some travel, some are written, malloc keeps some; and what `fit` takes


def anonymous_bytes():
    """Returns the memory of this process that is no file's: objects, tensors, and what they have freed but it keeps."""
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) << 10


@contextlib.contextmanager
def memory_of(what, peaks):
    """Sets `peaks[what]` to the most that this process takes beside what it took before, by samples."""
    gc.collect()
    before, ended = anonymous_bytes(), threading.Event()
    peaks[what] = 0

    def watch():
        while not ended.wait(0.002):
            peaks[what] = max(peaks[what], anonymous_bytes() - before)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield
    finally:
        ended.set()
        watching.join()


def peaks_of_files(folder):
    """Returns the most that each way to write and read a table of two shards takes, once a small one has gone first."""
    import keras

    ring, peaks = strategy(), {}
    ids, targets = data()
    for rows in (1000, 2 * SHARD_BYTES // 4 // WIDE):
        path = f"{folder}/{rows}"
        with ring.scope():
            inputs = keras.Input((3,), dtype="int32")
            table = tfring.layers.ShardedEmbedding(rows, WIDE, combiner="sum", embeddings_initializer="zeros")
            model = keras.Model(inputs, keras.layers.Dense(1)(table(inputs)))
            model.compile("sgd", "mse")

        def fit(epochs, *callbacks, model=model, rows=rows):
            model.fit(ids % rows, targets, batch_size=20, epochs=epochs, verbose=0, callbacks=callbacks)

        fit(1)
        with memory_of("save", peaks):
            tfring.save(model, f"{path}.keras")
        with memory_of("save_weights", peaks):
            tfring.save(model, f"{path}.weights.h5")
        with memory_of("load_weights", peaks):
            model.load_weights(f"{path}.weights.h5")
        for kind in ("plain", "sharded"):
            for what, epochs in (("Backup", 1), ("restored Backup", 2)):
                with memory_of(f"{what}, {kind}", peaks):
                    fit(epochs, tfring.callbacks.Backup(f"{path}/{kind}", sharded=kind == "sharded"))
    return peaks


@pytest.mark.long
def test_files_take_some_blocks_beside_shards(tmp_path):
    own = {"TFRING_QUIET": "1"}  # processes of its own: what other tests have left to malloc is another each time
    for peaks in workers(2, env=own).run(peaks_of_files, str(tmp_path)):
        assert max(peaks.values()) < BESIDE_BYTES, {what: f"{peak / 1e6:.0f} MB" for what, peak in peaks.items()}
