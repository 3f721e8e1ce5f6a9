"""Backup: what was saved on one mesh goes on on another as one process would, between two updates too."""

import math
import shutil

import pytest
from common import history_error, relative_error, skewed_rows
from harness import strategy, workers

import tfring

MESHES = {
    "1": {"data": 1},
    "data 2": {"data": 2},
    "data 3": {"data": 3},
    "model 2": {"data": 1, "model": 2},
    "pipeline 2": {"data": 1, "pipeline": 2},
    "data 2 x model 2": {"data": 2, "model": 2},
    "data 2 x pipeline 2": {"data": 2, "pipeline": 2},
}
CASES = ("accumulation", "averages")
KINDS = ("plain", "sharded")


def size(mesh):
    return math.prod(MESHES[mesh].values())


def made(case, ring):
    """Dense layers in shards, and whole ones, in two stages where there are two."""
    import keras

    dense, sharded = keras.layers.Dense, tfring.layers.ShardedDense
    accumulates = case == "accumulation"
    with ring.scope():
        model = keras.Sequential(
            [
                keras.Input((4,)),
                sharded(6, "columns", gather_output=False, activation="tanh"),
                sharded(4, "rows", input_is_parallel=True),
                dense(5, activation="tanh", name="second"),
                dense(1),
            ]
        )
        if ring.mesh.pipeline > 1:
            model = tfring.parallel.Pipeline(model, ["second"], num_microbatches=2)
        options = {"gradient_accumulation_steps": 3} if accumulates else {"use_ema": True, "ema_momentum": 0.7}
        metrics = ["mae", keras.metrics.RootMeanSquaredError()]
        model.compile(keras.optimizers.Adam(0.02, **options), "mse", metrics=metrics)
    return model


def train(mesh, cases, folder, kind=None):
    """Returns for each of `cases`, `(name, folder of its backup)`, weights, history, steps; None where interrupted.

    Args:
      mesh: one of MESHES.
      cases: without a folder it trains without a backup; with one it goes on from there.
      folder: where to save, so as to be interrupted.
      kind: of the Backup that goes on.
    """
    import keras

    ring = strategy(mesh=tfring.Mesh(**MESHES[mesh]), check_equal=True)
    x, y = skewed_rows(83)
    outcomes = []

    class Count(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(batch)
            if folder is not None and len(seen) == 8:
                raise InterruptedError

    for case, from_folder in cases:
        keras.utils.set_random_seed(11)
        model, seen = made(case, ring), []
        best = {"min_delta": 0.02, "patience": 1, "restore_best_weights": True}
        stopping = keras.callbacks.EarlyStopping("mae", mode="min", **best)
        callbacks = [stopping, Count()]
        if folder is not None:
            options = [(kind, {"sharded": kind == "sharded"}) for kind in KINDS]
            callbacks += [tfring.callbacks.Backup(f"{folder}/{case}/{k}", every_steps=7, **o) for k, o in options]
        elif from_folder is not None:
            callbacks.append(tfring.callbacks.Backup(from_folder, every_steps=7, sharded=kind == "sharded"))
        try:
            history = model.fit(
                x / 4, y, batch_size=20, epochs=4, shuffle=False, verbose=0, callbacks=callbacks
            ).history
        except InterruptedError:
            outcomes.append(None)
        else:
            outcomes.append((model.get_weights(), history, len(seen)))
    return outcomes


def saved(then, cases, folder):
    """Trains on a mesh until it is interrupted, by a step after the backup."""
    outcomes = workers(size(then)).run(train, then, [(case, None) for case in cases], f"{folder}/{then}")
    assert outcomes == [[None] * len(cases)] * size(then)


def errors(now, found, folder, wholes):
    """The largest relative error on a mesh of each of `found`, `(mesh then, case, kind)`, on any rank."""
    worst = []
    for kind in sorted({kind for _, _, kind in found}):
        chosen = [(then, case) for then, case, k in found if k == kind]
        cases = []
        for then, case in chosen:
            copy = f"{folder}/on {now}/{then}/{case}/{kind}"
            shutil.copytree(f"{folder}/{then}/{case}/{kind}", copy)
            cases.append((case, copy))
        results = workers(size(now)).run(train, now, cases, None, kind)
        for number, (then, case) in enumerate(chosen):
            want, want_history, steps = wholes[case]
            for weights, history, seen in (rank[number] for rank in results):
                assert seen == steps - 7, (then, now, case, kind, seen, steps)
                error = max(relative_error(weights, want), history_error(history, want_history))
                worst.append(((then, case, kind), error))
    return {key: max(error for k, error in worst if k == key) for key in found}


def whole(cases):
    """Returns for each case what one process computes that nothing interrupts."""
    [outcomes] = workers(1).run(train, "1", [(case, None) for case in cases], None)
    return dict(zip(cases, outcomes, strict=True))


FAILED_BEFORE = [
    ("model 2", "1", "plain"),
    ("pipeline 2", "1", "sharded"),
    ("model 2", "data 2", "sharded"),
    ("data 2", "model 2", "plain"),
]


def compare(pairs, cases, folder):
    """Holds pairs of meshes `(then, now, kind)` to what one process computes."""
    wholes = whole(cases)
    for then in sorted({then for then, _, _ in pairs}):
        saved(then, cases, folder)
    for now in sorted({now for _, now, _ in pairs}):
        found = [(then, case, kind) for then, n, kind in pairs for case in cases if n == now]
        for key, error in errors(now, found, folder, wholes).items():
            assert error <= 1e-5, (key, now, error)


def test_pairs_of_meshes_between_two_updates(tmp_path):
    compare(FAILED_BEFORE, ["accumulation"], str(tmp_path))


@pytest.mark.long
def test_pairs_with_replicas_of_two_workers(tmp_path):
    """Each replica has accumulated shards of its own."""
    pairs = [("data 2 x model 2", "data 2", "sharded"), ("data 2 x model 2", "data 2 x pipeline 2", "plain")]
    compare(pairs, ["accumulation"], str(tmp_path))
