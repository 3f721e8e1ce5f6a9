"""Backup: an interrupted `fit` ends as if it had not been, whatever its data, optimizer and callbacks."""

import importlib.util
import os
import pathlib
import random
import re
import resource
import signal
import subprocess
import sys
import time
import zipfile

import numpy as np
import pytest
from common import devices, relative_error, skewed_ids, skewed_rows
from harness import strategy, workers

TESTS = pathlib.Path(__file__).parents[1]
IMPORTS = f"import pathlib, signal, sys; sys.path[:0] = {[str(TESTS / 'training'), str(TESTS)]!r}; import test_backup"
FILES = pathlib.Path(__file__).parents[2] / "tfring" / "callbacks" / "files.py"


def case(name):
    """`(make_model, fit's arguments, Backup's arguments, what interrupts it)`."""
    import keras
    import tensorflow as tf

    x, y = skewed_rows()
    x = x / 4
    rows = tf.data.Dataset.from_tensor_slices((x, y))
    layers, optimizers = keras.layers, keras.optimizers

    class Shuffled(keras.utils.PyDataset):
        def __init__(self):
            super().__init__()
            self.order = np.arange(len(x))

        def __len__(self):
            return 5

        def __getitem__(self, i):
            chosen = self.order[20 * i : 20 * i + 20]
            return x[chosen], y[chosen]

        def on_epoch_end(self):
            np.random.shuffle(self.order)

    class Shake(keras.callbacks.Callback):
        """Draws without a seed of its own."""

        def on_train_batch_end(self, batch, logs=None):
            bias = self.model.layers[0].bias
            bias.assign(bias.numpy() + 0.01 * keras.random.normal((8,)).numpy())

    def model(optimizer="adam", hidden=(), **kwargs):
        model = keras.Sequential([keras.Input((4,)), layers.Dense(8, activation="tanh"), *hidden, layers.Dense(1)])
        model.compile(optimizer() if callable(optimizer) else optimizer, "mse", metrics=["mae"], **kwargs)
        return model

    class OfSteps(keras.Model):
        """Its layers and two optimizers are built by its step, and `call` has another layer."""

        def __init__(self):
            super().__init__()
            self.hidden = keras.Sequential([layers.Dense(8, activation="tanh"), layers.Dropout(0.3)])
            self.last, self.of_call = layers.Dense(1), layers.Dense(2)
            self.second = optimizers.Adam(0.01)

        def call(self, x):
            return self.of_call(self.hidden(x))

        def train_step(self, data):
            rows, targets = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self.last(self.hidden(rows, training=True)) - targets) ** 2)
            first, second = self.last.trainable_variables[::-1], self.hidden.trainable_variables
            gradients = tape.gradient(loss, first + second)
            self.optimizer.apply(gradients[:2], first)
            self.second.apply(gradients[2:], second)
            return {"loss": loss, "squared": tf.reduce_mean(targets**2)}

    def of_steps():
        model = OfSteps()
        model.compile("adam")
        return model

    arrays = {"x": x, "y": y, "batch_size": 20}
    return {
        "built by its step": (of_steps, arrays, {"every_steps": 3}, {"step": 8}),
        "arrays": (
            lambda: model(hidden=[layers.BatchNormalization(), layers.Dropout(0.3)]),
            {
                **arrays,
                "validation_data": (x[:50], y[:50]),
                "callbacks": [
                    Shake(),
                    keras.callbacks.ReduceLROnPlateau(monitor="mae", mode="max", patience=1, factor=0.5),
                    keras.callbacks.EarlyStopping(monitor="loss", patience=9, restore_best_weights=True),
                ],
            },
            {"every_steps": 3},
            {"step": 13},
        ),
        "two steps an execution, unknown length": (
            lambda: model(steps_per_execution=2),
            {"x": rows.shuffle(50, seed=3).batch(20).filter(lambda x, y: True)},
            {"every_steps": 2},
            {"step": 5},
        ),
        "one iterator for all epochs": (
            model,
            {
                "x": rows.shuffle(83, seed=3).repeat().batch(20),
                "steps_per_epoch": 3,
                "validation_data": rows.shuffle(83, seed=4).repeat().batch(10),
                "validation_steps": 2,
                "callbacks": [keras.callbacks.ReduceLROnPlateau(monitor="val_loss", mode="max", patience=1)],
            },
            {"every_steps": 2},
            {"step": 8},
        ),
        "cached after a shuffle, in the second validation": (
            model,
            {"x": rows.shuffle(83, seed=3).cache().batch(20), "validation_data": (x, y)},
            {"every_steps": 5},
            {"validation": 5},
        ),
        "PyDataset, between two updates": (
            lambda: model(lambda: optimizers.Adam(gradient_accumulation_steps=3)),
            {"x": Shuffled(), "shuffle": True},
            {"every_steps": 2},
            {"step": 12},
        ),
        "eager, full disk": (
            lambda: model(hidden=[layers.Dropout(0.3)], run_eagerly=True),
            arrays,
            {"every_seconds": 1e-6},
            {"step": 9, "disk full after": 5},
        ),
        "SIGTERM, loss scale": (
            lambda: model(lambda: optimizers.LossScaleOptimizer(optimizers.SGD(0.01), dynamic_growth_steps=2)),
            arrays,
            {},
            {"sigterm": 8},
        ),
        "no randomness": (model, {**arrays, "shuffle": False}, {"every_steps": 3}, {"step": 9}),
        "accumulation without randomness": (
            lambda: model(lambda: optimizers.Adam(gradient_accumulation_steps=3)),
            {**arrays, "shuffle": False},
            {"every_steps": 2},
            {"step": 9},
        ),
    }[name]


ALL = [
    "arrays", "two steps an execution, unknown length", "one iterator for all epochs",
    "cached after a shuffle, in the second validation", "PyDataset, between two updates", "eager, full disk",
    "SIGTERM, loss scale", "built by its step",
]  # fmt: skip


def train(names, folder, kind):
    """Each case "whole", without Backup; "cut"; or "resumed", by a program that draws other random numbers."""
    import keras

    import tfring

    ring = strategy(**devices())
    outcomes = {}
    for number, name in enumerate(names):
        keras.utils.set_random_seed(7)
        if kind == "resumed":  # other initial weights, seeds of dropout, orders of arrays: all come from the backup
            random.seed(70 + number)
            np.random.seed(70 + number)
        make_model, arguments, options, interruption = case(name)
        with ring.scope():
            model = make_model()
        seen = {"step": 0, "validation": 0}

        class Interrupt(keras.callbacks.Callback):
            def count(self, what, seen=seen, interruption=interruption):
                seen[what] += 1
                if kind == "cut" and seen[what] == interruption.get(what):
                    raise InterruptedError

            def on_train_batch_end(self, batch, logs=None, seen=seen, interruption=interruption, name=name):
                self.count("step")
                if kind == "cut" and seen["step"] == 8 and interruption == {"sigterm": 8} and ring.cluster.rank == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                if kind == "cut" and seen["step"] > interruption.get("disk full after", 99) and ring.cluster.is_chief:
                    limit_files(4096)

            def on_test_batch_end(self, batch, logs=None):
                self.count("validation")

        callbacks = [] if kind == "whole" else [tfring.callbacks.Backup(pathlib.Path(folder, name), **options)]
        callbacks += [*arguments.pop("callbacks", []), Interrupt()]  # Backup runs last, wherever it stands
        try:
            history = model.fit(**arguments, epochs=4, verbose=0, callbacks=callbacks)
        except InterruptedError:
            outcomes[name] = "interrupted"
        except SystemExit as end:
            outcomes[name] = end.code
        else:
            rate = float(model.optimizer.learning_rate.numpy())
            outcomes[name] = (model.get_weights(), history.history, history.epoch, rate, seen["step"])
        finally:
            limit_files(resource.RLIM_INFINITY)
    return outcomes


def limit_files(octets):
    """Lets files of this process grow no larger, as those on a disk that is full."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (octets, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def assert_same_end(whole, resumed, names):
    for rank, (wholes, resumeds) in enumerate(zip(whole, resumed, strict=True)):
        for name in names:
            (weights, logs, epochs, rate, steps), (want, *rest, steps_of_whole) = resumeds[name], wholes[name]
            where = f"rank {rank}, {name}"
            assert [w.tobytes() for w in weights] == [w.tobytes() for w in want], where
            assert (logs, epochs, rate) == tuple(rest), where
            assert 0 < steps < steps_of_whole, where


def test_the_same_end_bit_for_bit(tmp_path):
    folder = str(tmp_path)
    whole = workers(2).run(train, ALL, folder, "whole", timeout=300)
    cut = workers(2).run(train, ALL, folder, "cut", timeout=300)
    assert cut == [{name: 75 if "SIGTERM" in name else "interrupted" for name in ALL}] * 2
    files = {name: sorted(path.name for path in (tmp_path / name).iterdir()) for name in ALL}
    assert files["PyDataset, between two updates"][-1] == "epoch-00001-step-00000005.npz"  # the tenth step
    assert files["eager, full disk"][-1] < "epoch-00001-step-00000001.npz"  # which it had no room for, and went on
    resumed = workers(2).run(train, ALL, folder, "resumed", timeout=300)
    assert_same_end(whole, resumed, ALL)
    for name in ALL:
        assert 1 <= len(list((tmp_path / name).iterdir())) <= 2


def stop_with_a_full_disk(folder):
    """SIGTERM in the third step, when the disk has no room for the second backup."""
    import contextlib
    import io

    import keras

    import tfring

    ring = strategy()
    model, arguments, _, _ = case("no randomness")
    with ring.scope():
        model = model()

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 2 and ring.cluster.is_chief:
                limit_files(4096)
                os.kill(os.getpid(), signal.SIGTERM)

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), pytest.raises(SystemExit) as end:
            backup = tfring.callbacks.Backup(folder, every_steps=2)
            model.fit(**arguments, epochs=4, verbose=0, callbacks=[backup, Stop()])
    finally:
        limit_files(resource.RLIM_INFINITY)
    return end.value.code, said.getvalue()


def test_a_full_disk_at_sigterm_is_reported(tmp_path):
    (code, said), others = workers(2).run(stop_with_a_full_disk, str(tmp_path))
    assert code == 143 and others == (143, "")
    assert re.search(r"SIGTERM: training could not be saved in \S+ \(.*Errno 27.*\), and ends with exit code 143", said)
    assert "is saved" not in said
    assert [path.name for path in tmp_path.iterdir()] == ["epoch-00000-step-00000002.npz"]


@pytest.mark.long
def test_two_replicas_a_worker(tmp_path):
    names = ["arrays", "PyDataset, between two updates"]
    two = workers(2, logical_cpus=2)
    whole, _, resumed = (two.run(train, names, str(tmp_path), kind) for kind in ("whole", "cut", "resumed"))
    assert_same_end(whole, resumed, names)


@pytest.mark.parametrize(("then", "now"), [(2, 3), pytest.param(3, 1, marks=pytest.mark.long)])
def test_on_another_number_of_workers(tmp_path, then, now):
    names = ["no randomness", "accumulation without randomness"]
    whole = workers(now).run(train, names, str(tmp_path), "whole")[0]
    workers(then).run(train, names, str(tmp_path), "cut")
    for resumed in workers(now).run(train, names, str(tmp_path), "resumed"):
        for name in names:
            (weights, logs, _, _, steps), (want, want_logs, *_) = resumed[name], whole[name]
            assert relative_error(weights, want) <= 1e-5, name
            assert relative_error(logs.values(), want_logs.values()) <= 1e-5, name
            assert 0 < steps < 20, name


def ended(folder):
    """One process: what happens once training has ended, and to another model."""
    import keras

    import tfring
    from tfring import seeding

    x, y = skewed_rows()
    ring = strategy()
    folder = pathlib.Path(folder)

    def fit(epochs, units=3, **kwargs):
        with ring.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(units), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        backup = tfring.callbacks.Backup(folder, **kwargs)
        return model, model.fit(x, y, epochs=epochs, verbose=0, callbacks=[backup])

    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tfring.callbacks.Backup, "_say", lambda backup, text: lines.append(text))
        patch.setattr(seeding, "_seed", 7)  # as `tfring launch --seed 7` does
        model, first = fit(2)
        again, nothing = fit(2)
        assert len(lines) == 2 and lines[0].endswith(".npz"), lines
        patch.setattr(seeding, "_seed", 8)
        fit(2)
        assert "had seed 7, and this one has 8: " in lines[2] and "tfring launch --seed 7" in lines[2], lines
    assert again.get_weights()[0].tobytes() == model.get_weights()[0].tobytes()
    assert nothing.history == first.history and nothing.epoch == [0, 1]
    _, longer = fit(3, keep=1)
    assert longer.history["loss"][:2] == first.history["loss"] and longer.epoch == [0, 1, 2]
    assert [path.name for path in folder.iterdir()] == ["epoch-00003-step-00000000.npz"]
    (file,) = folder.iterdir()
    with np.load(file) as archive:  # a plain file
        assert archive["0"].shape == (4, 3)

    with pytest.raises(tfring.errors.ConfigurationError, match=r"differs is .*kernel.*\(4, 3\).*\(4, 5\)"):
        fit(4, units=5)
    alone = keras.Sequential([keras.layers.Dense(1)])
    alone.compile("sgd", "mse")
    with pytest.raises(tfring.errors.ConfigurationError, match="made outside of the scope"):
        alone.fit(x, y, verbose=0, callbacks=[tfring.callbacks.Backup(folder)])
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(OSError, match=r"no backup in .* is complete"):
        fit(4)
    return True


def in_a_folder_of_another_job(folder):
    import tfring

    model, arguments, _, _ = case("no randomness")
    with strategy().scope():
        model = model()
    backup = tfring.callbacks.Backup(folder)
    with pytest.raises(tfring.errors.ConfigurationError) as raised:
        model.fit(**arguments, epochs=1, verbose=0, callbacks=[backup])
    return str(raised.value)


def test_two_jobs_with_one_folder(tmp_path):
    """The second is refused on all ranks, also under another name of the folder; once the first is gone, it is not."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    program = f"""{IMPORTS}
with test_backup.load_files().held(pathlib.Path(sys.argv[1])) as holder:
    print("held", holder, flush=True)
    sys.stdin.read()
"""
    command = [sys.executable, "-c", program, str(tmp_path / "folder"), "--of-the-first"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout.readline().split() == ["held"]
        messages = workers(2).run(in_a_folder_of_another_job, str(tmp_path / "link"))
        first.kill()
    for message in messages:
        assert message.startswith("Another job uses "), message
        assert f"process {first.pid} on " in message and "--of-the-first" in message, message
    with load_files().held(tmp_path / "folder") as holder:
        assert holder == ""
    assert not list((tmp_path / "folder").iterdir())


def test_when_training_has_ended(tmp_path):
    assert workers(1).run(ended, str(tmp_path / "backup")) == [True]


# ----------------------------------------------------------------------------------------------------------- pieces


def sharded_model(ring, optimizer):
    import keras

    import tfring

    with ring.scope():
        model = keras.Sequential([
            keras.Input((3,), dtype="int32"),
            tfring.layers.ShardedEmbedding(30, 4),
            keras.layers.Flatten(),
            tfring.layers.ShardedDense(8, split="rows", use_bias=False),
            keras.layers.Dense(1),
        ])
        model.compile(optimizer(), "mse")
    return model


def train_sharded(folder, kind, mesh=None):
    """The weights at the end, or None where training was "cut"; both kinds of backup with it."""
    import keras

    import tfring

    ring = strategy(mesh=tfring.Mesh(**(mesh or {})), shard_optimizer=not mesh)
    keras.utils.set_random_seed(3)
    model = sharded_model(ring, lambda: keras.optimizers.Adam(0.01))

    class Interrupt(keras.callbacks.Callback):
        seen = 0

        def on_train_batch_end(self, batch, logs=None):
            self.seen += 1
            if kind == "cut" and self.seen == 6:
                raise InterruptedError

    backups = [tfring.callbacks.Backup(f"{folder}/sharded", every_steps=2, sharded=True)]
    if kind == "cut":
        backups.append(tfring.callbacks.Backup(f"{folder}/whole", every_steps=2))
    x, y = skewed_ids()
    try:
        model.fit(x, y, batch_size=20, epochs=2, shuffle=False, verbose=0, callbacks=[*backups, Interrupt()])
    except InterruptedError:
        return None
    return model.get_weights()


def test_each_rank_writes_its_pieces(tmp_path):
    """Put together they are what rank 0 writes otherwise; training goes on from them on any mesh."""
    mesh = {"data": 2, "model": 2}
    assert workers(4).run(train_sharded, str(tmp_path), "cut", mesh) == [None] * 4
    files = load_files()
    (_, state, arrays), (_, whole_state, wholes) = (files.newest(tmp_path / kind) for kind in ("sharded", "whole"))
    assert [a.tobytes() for a in arrays] == [a.tobytes() for a in wholes]
    assert [name is not None for name in state["pieces"]] == [True, True, False, False]  # the others have the same
    divided = [n for n, v in enumerate(state["variables"]) if "pieces" in v]
    assert len(divided) == 3 * 2  # a table and a kernel, with Adam's two slots
    assert (state["format"], whole_state["format"]) == (4, 3)
    for name in state["pieces"][:2]:
        with np.load(tmp_path / "sharded" / name) as pieces:
            assert sorted(map(int, pieces)) == divided
            assert all(pieces[n].size == arrays[int(n)].size / 2 for n in pieces)
    whole = workers(2).run(train_sharded, str(tmp_path / "new"), "at once")[0]
    for weights in workers(2).run(train_sharded, str(tmp_path), "resumed"):
        assert relative_error(weights, whole) < 1e-5
    assert len(list((tmp_path / "sharded").iterdir())) == 2 * 3  # as ever the newest two


def test_a_piece_that_is_not_whole_or_not_there(tmp_path):
    workers(2).run(train_sharded, str(tmp_path), "cut")
    files, folder = load_files(), tmp_path / "sharded"
    path, state, arrays = files.newest(folder)
    piece = folder / state["pieces"][1]
    good = piece.read_bytes()
    for damaged in (good[:-9], bytes([*good[:300], good[300] ^ 1, *good[301:]])):
        piece.write_bytes(damaged)
        assert files.newest(folder)[0] < path
    piece.write_bytes(good)
    assert [a.tobytes() for a in files.newest(folder)[2]] == [a.tobytes() for a in arrays]
    piece.unlink()
    before, earlier_state, _ = files.newest(folder)
    assert before < path
    (folder / earlier_state["pieces"][0]).unlink()
    with pytest.raises(OSError, match=r"no backup in .*sharded' is complete. epoch-.*rank-1.npz.*rank-0.npz"):
        files.newest(folder)
    results = workers(2).run(train_from_broken_pieces, str(tmp_path))
    for text in results:
        assert "no backup in" in text and text.endswith("remove these files to begin from the start.")


def train_from_broken_pieces(folder):
    with pytest.raises(OSError) as raised:
        train_sharded(folder, "resumed")
    return str(raised.value)


def without_room_on_rank_1(folder):
    """A disk that is full for one rank's pieces: nothing of that backup stays, and training goes on."""
    import warnings

    import keras

    import tfring

    ring = strategy(shard_optimizer=True)
    model = sharded_model(ring, lambda: keras.optimizers.SGD(0.01))
    write = tfring.callbacks.files.os.fsync
    seen = []

    def full(descriptor):
        seen.append(descriptor)
        if ring.cluster.rank == 1 and len(seen) > 2:
            raise OSError(28, "No space left on device")
        write(descriptor)

    x, y = skewed_ids()
    backup = tfring.callbacks.Backup(folder, every_steps=2, sharded=True)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        patch.setattr(tfring.callbacks.files.os, "fsync", full)
        model.fit(x, y, batch_size=20, epochs=1, shuffle=False, verbose=0, callbacks=[backup])
    return [str(each.message) for each in said if "could not save" in str(each.message)]


def test_a_full_disk_of_one_rank(tmp_path):
    of_rank_0, of_rank_1 = workers(2).run(without_room_on_rank_1, str(tmp_path / "full"))
    assert len(of_rank_0) == 2 and all("rank 1: [Errno 28]" in text for text in of_rank_0) and not of_rank_1
    names = sorted(path.name for path in (tmp_path / "full").iterdir())
    assert len(names) == 3 and names[-1] == "epoch-00000-step-00000002.npz", names


def with_a_disk_that_waits_for_the_next_step(folder):
    """Returns whether the step after each save was made while the file was on its way to the disk."""
    import keras

    import tfring

    ring = strategy()
    model, arguments, _, _ = case("no randomness")
    with ring.scope():
        model = model()
    sync, steps, met = os.fsync, [], []

    class Count(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            steps.append(batch)

    def slow(descriptor):
        if not pathlib.Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_dir():
            saved, deadline = min(2 * (len(met) + 1), 4), time.monotonic() + 20
            while len(steps) <= saved and time.monotonic() < deadline:
                time.sleep(0.01)
            met.append(len(steps) > saved)
        sync(descriptor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", slow)
        backup = tfring.callbacks.Backup(folder, every_steps=2)
        model.fit(**arguments, epochs=1, verbose=0, callbacks=[backup, Count()])
        names = sorted(os.listdir(folder))
    return met, names


def test_training_goes_on_while_a_backup_is_written(tmp_path):
    (met, names), (_, seen_by_1) = workers(2).run(with_a_disk_that_waits_for_the_next_step, str(tmp_path))
    assert met[:2] == [True, True] and len(met) == 3, met
    assert names[-1] == "epoch-00001-step-00000000.npz", (names, seen_by_1)  # `fit` has waited for the last


def on_disks_of_their_own(folder):
    import tfring

    with pytest.raises(tfring.errors.ConfigurationError) as raised:
        train_sharded(f"{folder}/{strategy().cluster.rank}", "resumed")
    return str(raised.value)


def test_a_folder_that_a_rank_does_not_see(tmp_path):
    for text in workers(2).run(on_disks_of_their_own, str(tmp_path)):
        assert "Rank 1 does not see files that rank 0 writes to " in text


# ------------------------------------------------------------------------------------------------------------ files


def load_files():
    """`tfring.callbacks.files` without TensorFlow."""
    spec = importlib.util.spec_from_file_location("backup_files", FILES)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def content(number):
    generator = np.random.default_rng(number)
    arrays = [generator.normal(size=shape) for shape in ((50, 20), (), (0, 3))]
    return {"number": number, "num_arrays": len(arrays)}, arrays


def assert_whole(found):
    _, state, arrays = found
    want_state, want = content(state["number"])
    assert state == want_state
    assert [a.tobytes() for a in arrays] == [a.tobytes() for a in want]
    return state["number"]


def test_a_damaged_file_is_found_out_and_the_one_before_is_used(tmp_path):
    files = load_files()
    for number in (1, 2, 3):
        files.write(tmp_path, 0, number, *content(number), keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"epoch-00000-step-0000000{n}.npz" for n in (2, 3)]
    newest = tmp_path / "epoch-00000-step-00000003.npz"
    good = newest.read_bytes()
    generator = random.Random(0)
    used = []
    for _ in range(300):
        damaged = bytearray(good)
        damaged[generator.randrange(len(good))] ^= 1 << generator.randrange(8)
        newest.write_bytes(damaged)
        used.append(assert_whole(files.newest(tmp_path)))
    assert used.count(2) > 280  # some bits mean nothing, such as the date of a member
    for length in (0, 1, len(good) // 2, len(good) - 1):
        newest.write_bytes(good[:length])
        assert assert_whole(files.newest(tmp_path)) == 2
    begin = good.index(b"\x93NUMPY")
    for bit in range(8 * begin, 8 * (begin + 80)):  # of the header of the first array
        newest.write_bytes(bytes([*good[: bit // 8], good[bit // 8] ^ 1 << bit % 8, *good[bit // 8 + 1 :]]))
        assert assert_whole(files.newest(tmp_path)) == 2
    newest.write_bytes(good)
    assert assert_whole(files.newest(tmp_path)) == 3


def test_a_link_that_somebody_put_there_is_not_followed(tmp_path):
    files, folder, other = load_files(), tmp_path / "backup", tmp_path / "other"
    folder.mkdir()
    other.write_text("untouched")
    (folder / "epoch-00000-step-00000001.part").symlink_to(other)
    files.write(folder, 0, 1, *content(1), keep=2)
    assert other.read_text() == "untouched"
    assert [path.name for path in folder.iterdir()] == ["epoch-00000-step-00000001.npz"]


def test_a_large_array_is_read_where_temporary_files_have_no_room(tmp_path):
    files, large = load_files(), np.arange(3 << 20, dtype=np.float64)
    files.write(tmp_path, 0, 1, {"num_arrays": 1}, [large], keep=2)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    limit_files(4096)
    try:
        _, _, [found] = files.newest(tmp_path)
    finally:
        limit_files(before)
    assert (found == large).all() and not isinstance(found, np.memmap)
    assert isinstance(files.newest(tmp_path)[2][0], np.memmap)


@pytest.mark.parametrize(
    ("array", "octets", "said"),
    [
        (np.zeros(3), np.zeros(2).tobytes(), "0.npy is shorter than its array"),
        (np.zeros(3), np.zeros(4).tobytes(), "0.npy is longer than its array"),
        (np.zeros(3, object), b"", "0.npy contains objects"),
    ],
    ids=["shorter", "longer", "objects"],
)
def test_an_array_that_is_not_what_its_header_says(tmp_path, array, octets, said):
    with zipfile.ZipFile(tmp_path / "epoch-00001-step-00000000.npz", "w") as archive:
        archive.writestr("state.json", '{"num_arrays": 1}')
        with archive.open("0.npy", "w") as member:
            np.lib.format.write_array_header_1_0(member, np.lib.format.header_data_from_array_1_0(array))
            member.write(octets)
    with pytest.raises(OSError, match=rf"no backup in .* is complete. epoch-00001-.*: {said}. Put a complete one"):
        load_files().newest(tmp_path)


def test_a_step_that_does_not_end_after_sigterm_is_reported(tmp_path):
    program = f"""import os; os.environ["CUDA_VISIBLE_DEVICES"] = ""
{IMPORTS}; import keras, os, tfring, time
model, arguments, _, _ = test_backup.case("no randomness")
with tfring.RingStrategy().scope():
    model = model()
class Stop(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(300)
backup = tfring.callbacks.Backup(sys.argv[1], grace_seconds=0.5)
model.fit(**arguments, verbose=0, callbacks=[backup, Stop()])
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=240)
    assert done.returncode == 143 and "is saved" not in done.stderr, done.stderr
    assert "could not be saved" in done.stderr and "the current step has not ended within 0.5 s" in done.stderr
    assert not list(tmp_path.glob("*.npz"))


def test_a_kill_during_a_write_loses_nothing(tmp_path):
    """A process that does nothing but write, killed at twenty random moments."""
    program = f"""{IMPORTS}
files, folder, number = test_backup.load_files(), pathlib.Path(sys.argv[1]), int(sys.argv[2])
while True:
    number += 1
    files.write(folder, 0, number, *test_backup.content(number), keep=2)
    print(number, flush=True)
"""
    files, number, generator = load_files(), 0, random.Random(0)
    for _ in range(20):
        command = [sys.executable, "-c", program, str(tmp_path), str(number)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            process.stdout.readline()
            time.sleep(generator.uniform(0, 0.02))
            process.kill()
            said = [int(line) for line in process.stdout.read().split()]
        for path in tmp_path.glob("*.npz"):
            assert zipfile.ZipFile(path).testzip() is None  # under its name a file is complete
        found = assert_whole(files.newest(tmp_path))
        assert found >= max(said, default=number + 1)
        number = found
    files.write(tmp_path, 0, number + 1, *content(number + 1), keep=2)
    assert len(list(tmp_path.iterdir())) == 2  # nothing half is left


def test_a_full_disk_leaves_what_was_there(tmp_path):
    files = load_files()
    files.write(tmp_path, 0, 1, *content(1), keep=2)
    program = f"""{IMPORTS}; import resource
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))  # a disk that is full after so many bytes
try:
    test_backup.load_files().write(pathlib.Path(sys.argv[1]), 0, 2, *test_backup.content(2), keep=2)
except OSError:
    sys.exit(9)
"""
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False).returncode == 9
    assert [path.name for path in tmp_path.iterdir()] == ["epoch-00000-step-00000001.npz"]
    assert assert_whole(files.newest(tmp_path)) == 1
