"""Callbacks pointed at one shared folder by all workers, saving and loading, and every metric."""

import json
import os
import pathlib

import numpy as np
import pytest
from common import history_error, is_reference, relative_error, skewed_rows
from harness import strategy, workers
from test_steps import assert_same, bits, small_model


def shared_folder(folder):
    """The user's code, unchanged: each rank passes the same callbacks with the same paths."""
    import keras

    ring = strategy()
    folder = pathlib.Path(folder)
    x, y = skewed_rows()
    with ring.scope():
        model = small_model("adam", metrics=["mae"])
    callbacks = [
        keras.callbacks.ModelCheckpoint(folder / "best.keras", save_best_only=True, monitor="loss"),
        keras.callbacks.ModelCheckpoint(folder / "{epoch}.weights.h5", save_weights_only=True),
        keras.callbacks.BackupAndRestore(folder / "backup"),
        keras.callbacks.CSVLogger(folder / "log.csv"),
        keras.callbacks.TensorBoard(folder / "board", histogram_freq=1),
    ]
    model.fit(x, y, epochs=3, batch_size=20, verbose=0, callbacks=callbacks)
    want = model.get_weights()
    model.load_weights(folder / "3.weights.h5")
    same = all(np.array_equal(a, b) for a, b in zip(want, model.get_weights(), strict=True))
    with ring.scope():
        loaded = keras.models.load_model(folder / "best.keras")
    loaded.fit(x, y, epochs=1, batch_size=20, verbose=0)  # with its optimizer
    return same, bits(model), callbacks[0].best, bits(loaded)


def test_callbacks_of_all_ranks_share_a_folder(tmp_path):
    results = workers(3).run(shared_folder, str(tmp_path))
    assert_same(results)
    assert all(same for same, *_ in results)
    assert (tmp_path / "log.csv").read_text().count("\n") == 4  # a header and three epochs, once
    assert {p.name for p in tmp_path.iterdir()} >= {"best.keras", "1.weights.h5", "3.weights.h5", "log.csv", "board"}


def new_folders(folder):
    """ModelCheckpoint, and a class that extends it, into a folder for each epoch that is not there yet."""
    import keras

    ring = strategy()
    x, y = skewed_rows()

    class Checkpoint(keras.callbacks.ModelCheckpoint):
        pass

    with ring.scope():
        model = small_model("sgd")
    folders = [os.path.join(folder, kind, "{epoch}", "of", "m.keras") for kind in ("keras", "own")]
    callbacks = [keras.callbacks.ModelCheckpoint(folders[0]), Checkpoint(folders[1])]
    model.fit(x, y, epochs=10, batch_size=83, verbose=0, callbacks=callbacks)
    return bits(model)


def test_checkpoints_into_folders_that_are_made_for_them(tmp_path):
    assert_same(workers(3).run(new_folders, str(tmp_path)))
    for kind in ("keras", "own"):
        files = sorted(str(path.relative_to(tmp_path / kind)) for path in (tmp_path / kind).rglob("*.keras"))
        assert files == sorted(f"{epoch}/of/m.keras" for epoch in range(1, 11))


def extended_writers(folder):
    """Callbacks that extend Keras' writers and do more, in nested lists; which ranks have written what."""
    import keras

    ring = strategy()
    x, y = skewed_rows()

    class Rates(keras.callbacks.CSVLogger):
        def on_epoch_end(self, epoch, logs=None):
            logs["lr"] = float(self.model.optimizer.learning_rate)
            super().on_epoch_end(epoch, logs)

    class Steps(keras.callbacks.TensorBoard):
        def on_epoch_end(self, epoch, logs=None):
            logs["steps"] = int(self.model.optimizer.iterations)
            super().on_epoch_end(epoch, logs)

    def train(model, folder):
        stop = keras.callbacks.EarlyStopping("lr", patience=1, mode="min")
        callbacks = [[Steps(os.path.join(folder, "board")), Rates(os.path.join(folder, "log.csv"))], stop]
        return model.fit(x, y, epochs=4, batch_size=20, shuffle=False, verbose=0, callbacks=callbacks).history

    with ring.scope():
        model = small_model("adam")
    start = model.get_weights()
    history, errors = train(model, folder), []
    if is_reference(ring):
        alone = small_model("adam")
        alone.set_weights(start)
        want = train(alone, os.path.join(folder, "alone"))
        errors = [history_error(history, want), relative_error(model.get_weights(), alone.get_weights())]
    return (history, bits(model)), errors


def test_callbacks_that_extend_writers_run_on_every_rank(tmp_path):
    found, errors = zip(*workers(2).run(extended_writers, str(tmp_path)), strict=True)
    assert found == found[:1] * 2 and sorted(found[0][0]) == ["loss", "lr", "steps"]
    assert found[0][0]["steps"] == [5, 10] and max(map(max, filter(None, errors))) <= 1e-5, errors
    assert (tmp_path / "log.csv").read_text().count("\n") == 3


def interrupted(folder, resume, is_own_step):
    import keras
    import tensorflow as tf

    ring = strategy()
    x, y = skewed_rows()
    keras.utils.set_random_seed(3)

    class OwnStep(keras.Model):
        def train_step(self, data):  # which builds the optimizer
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": loss}

    with ring.scope():
        model = small_model("adam")
        if is_own_step:
            model = OwnStep(model.inputs, model.outputs)
            model.compile("adam", "mse")

    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 1 and not resume:
                raise KeyboardInterrupt

    epochs = []
    seen = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: epochs.append(epoch))
    # The backup is in a folder of rank 0's: the others restore what rank 0 restored.
    mine = os.path.join(folder, str(ring.cluster.rank))
    try:
        model.fit(
            x, y, epochs=5, batch_size=20, verbose=0, shuffle=False,
            callbacks=[keras.callbacks.BackupAndRestore(mine, delete_checkpoint=False), Stop(), seen],
        )
    except KeyboardInterrupt:
        return epochs, None
    return epochs, bits(model)


@pytest.mark.parametrize("is_own_step", [False, True])
def test_backup_and_restore_resumes_all_ranks(tmp_path, is_own_step):
    uninterrupted = workers(2).run(interrupted, str(tmp_path / "whole"), True, is_own_step)
    assert [epochs for epochs, _ in uninterrupted] == [[0, 1, 2, 3, 4]] * 2
    stopped = workers(2).run(interrupted, str(tmp_path / "cut"), False, is_own_step)
    assert [epochs for epochs, _ in stopped] == [[0, 1]] * 2
    resumed = workers(2).run(interrupted, str(tmp_path / "cut"), True, is_own_step)
    assert resumed[0][0][0] >= 1 and resumed[0][0] == resumed[1][0]
    assert_same(resumed)
    assert resumed[0][1] == uninterrupted[0][1]


def save_on_rank_0_alone(folder):
    import keras

    ring = strategy()
    x, y = skewed_rows()
    path = os.path.join(folder, "model.keras")
    keras.utils.set_random_seed(3)
    with ring.scope():
        model = small_model("adam", metrics=["mae"])
    model.fit(x, y, epochs=1, batch_size=20, verbose=0)
    if ring.cluster.is_chief:
        model.save(path)
    ring.barrier()
    alone = keras.models.load_model(path)
    same = all(np.array_equal(a, b) for a, b in zip(model.get_weights(), alone.get_weights(), strict=True))
    return same, relative_error([model.predict(x, verbose=0)], [alone.predict(x, verbose=0)]) < 1e-6


def test_rank_0_may_save_alone(tmp_path):
    assert workers(3).run(save_on_rank_0_alone, str(tmp_path)) == [(True, True)] * 3


def every_metric():
    """Each metric class on skewed, ragged shares against one process on everything."""
    import keras

    ring = strategy()
    generator = np.random.default_rng(0)
    rows = 83
    drift = np.linspace(0.05, 0.95, rows)
    probability = np.clip(drift + 0.2 * generator.normal(size=rows), 0.01, 0.99).astype("float32")[:, None]
    binary = (generator.random(rows) < drift).astype("float32")[:, None]
    scores = np.concatenate([probability, 1 - probability, probability**2], axis=1)
    scores /= scores.sum(1, keepdims=True)
    labels = generator.integers(0, 3, rows)[:, None].astype("float32")
    one_hot = np.eye(3, dtype="float32")[labels[:, 0].astype(int)]
    m = keras.metrics
    groups = {
        "regression": (probability, binary + drift[:, None].astype("float32"), [
            m.MeanSquaredError(), m.RootMeanSquaredError(), m.MeanAbsoluteError(), m.MeanAbsolutePercentageError(),
            m.MeanSquaredLogarithmicError(), m.CosineSimilarity(), m.LogCoshError(), m.R2Score(),
        ]),
        "binary": (probability, binary, [
            m.BinaryAccuracy(), m.BinaryCrossentropy(), m.AUC(), m.AUC(curve="PR", name="pr"), m.Precision(),
            m.Recall(), m.TruePositives(), m.TrueNegatives(), m.FalsePositives(), m.FalseNegatives(), m.Accuracy(),
            m.PrecisionAtRecall(0.5), m.RecallAtPrecision(0.5), m.SensitivityAtSpecificity(0.5),
            m.SpecificityAtSensitivity(0.5), m.Hinge(), m.SquaredHinge(), m.BinaryIoU(), m.Poisson(), m.KLDivergence(),
            m.F1Score(threshold=0.5), m.FBetaScore(threshold=0.5),
        ]),
        "categorical": (scores, one_hot, [
            m.CategoricalAccuracy(), m.CategoricalCrossentropy(), m.TopKCategoricalAccuracy(k=2), m.CategoricalHinge(),
            m.OneHotIoU(3, [0, 1]), m.OneHotMeanIoU(3), m.F1Score(average="macro"),
        ]),
        "sparse categorical": (scores, labels, [
            m.SparseCategoricalAccuracy(), m.SparseCategoricalCrossentropy(), m.SparseTopKCategoricalAccuracy(k=2),
            m.MeanIoU(3, sparse_y_pred=False), m.IoU(3, [0, 2], sparse_y_pred=False),
        ]),
    }
    tested = {type(metric).__name__ for *_, metrics in groups.values() for metric in metrics}
    errors, found = {}, {}
    for name, (x, y, metrics) in groups.items():
        configs = [(type(metric), metric.get_config()) for metric in metrics]

        def make(configs=configs, width=x.shape[1]):
            model = keras.Sequential([keras.layers.Input((width,)), keras.layers.Identity()])
            model.compile(metrics=[cls.from_config(config) for cls, config in configs], loss="mse")
            return model

        with ring.scope():
            model = make()
        got = model.evaluate(x, y, batch_size=20, verbose=0, return_dict=True)
        found.update({f"{name} {k}": np.asarray(value).tolist() for k, value in got.items()})
        if is_reference(ring):
            want = make().evaluate(x, y, batch_size=20, verbose=0, return_dict=True)
            errors.update({f"{name} {k}": relative_error([got[k]], [want[k]]) for k in want})
    return tested, found, errors


# Wrappers and bases that need a function or another metric, and those fed by `Mean` above.
NOT_TESTED = {"Metric", "Mean", "Sum", "MeanMetricWrapper", "ConcordanceCorrelation", "PearsonCorrelation"}


@pytest.mark.parametrize("communication", ["ring", pytest.param("tensorflow", marks=pytest.mark.long)])
def test_every_metric(communication):
    import keras

    known = {name for name in dir(keras.metrics) if isinstance(getattr(keras.metrics, name), type)}
    aliases = {name for name in known if getattr(keras.metrics, name).__name__ != name}
    results = workers(3, communication).run(every_metric)
    errors = {name: error for *_, errors in results for name, error in errors.items()}
    for tested, found, _ in results:
        assert known - aliases - NOT_TESTED == tested
        assert found == results[0][1] and found.keys() == errors.keys()
    assert max(errors.values()) <= 1e-5, json.dumps(errors, indent=1)
