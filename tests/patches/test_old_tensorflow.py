"""The bug and the patch on a real TensorFlow 1.15.5, two workers; needs a Python 3.7 and the package index.

The whole table (six versions, three modes, four cases, seven optimizers) is `python3 patches/show/show.py`.
"""

import pathlib
import re
import subprocess

import pytest

VERSION, MODE = "1.15.5", "loop"
CACHE = str(pathlib.Path(__file__).parents[2] / ".cache" / "patches")


@pytest.fixture(scope="module")
def cells(show, python37, tmp_path_factory):
    return show.Cells(CACHE, python37, kept=str(tmp_path_factory.mktemp("cells")))


def trained_or_text(show, cells, case, fix):
    cells.show(VERSION, MODE, fix, [case] if isinstance(case, str) else case)
    return cells.load(VERSION, MODE, case, fix)


@pytest.fixture
def pair(show, python37, tmp_path):
    """Runs two workers on a configuration; gives their (status, tables, text)."""

    def run(**config):
        python = show.environment(VERSION, python37, CACHE)
        config = {"mode": MODE, "cases": ["equal"], "optimizers": ["SGD"], "fix": "runtime", **config}
        return show.run(VERSION, python, config, [0, 1], str(tmp_path / "log"), 60)

    return run


@pytest.mark.parametrize(
    "case, text",
    [
        # Of ids or of rows, whichever the runtime comes to first.
        ("equal", r"Inconsistent output shapes, got \[22(,8)?\], but expected is \[20(,8)?\]"),
        ("different", "Shape mismatch in the collective instance"),
    ],
)
def test_unpatched_it_fails_with_the_known_text(show, cells, case, text):
    result = trained_or_text(show, cells, case, "none")
    assert result["outcome"] == "failed"
    assert re.search(text, result["text"])


def test_patched_every_optimizer_equals_one_process(show, cells):
    cells.show(VERSION, MODE, "runtime", show.CASES)
    for case in show.CASES:
        result = cells.load(VERSION, MODE, case, "runtime")
        assert result["outcome"] == "trained", result
        assert result["workers_agree"]
        assert set(result["optimizers"]) == set(show.OPTIMIZERS)
        for optimizer, compared in result["optimizers"].items():
            assert compared["error"] <= show.ROUNDING, (case, optimizer)
            assert compared["row_0_untouched"], (case, optimizer)


def test_too_many_rows_stop_every_worker_with_the_same_words(pair):
    # Worker 0 has 10 rows, worker 1 has 11; the room for 10 comes from the attribute of the published recipe.
    outcomes = pair(cases=["different"], global_batch_size=10)
    for status, tables, text in outcomes:
        assert status not in (0, None)
        assert not tables
        for word in ("gradient of sgd:0 has more rows than the 10 ", "batch_size", "ids_per_example"):
            assert word in text


def test_ids_per_example_makes_the_room(pair):
    outcomes = pair(cases=["different"], apply={"batch_size": 10, "ids_per_example": 2})
    assert [list(tables) for _, tables, _ in outcomes] == [["different"], ["different"]]


def test_undone_it_fails_as_before(show, pair):
    outcomes = pair(undo=True)
    assert "Inconsistent output shapes" in show.symptom(outcomes)


TWO_REPLICAS = """
import sys
import tensorflow as tf
from tensorflow.python.distribute.collective_all_reduce_strategy import CollectiveAllReduceStrategy
sys.path.insert(0, sys.argv[1])
import tfring_sparse_patch
tfring_sparse_patch.apply(batch_size=5)
strategy = CollectiveAllReduceStrategy._from_local_devices(("/device:CPU:0", "/device:CPU:1"))
with strategy.scope():
    table = tf.compat.v1.get_variable("table", initializer=tf.zeros([8, 2]), use_resource=True)
    optimizer = tf.keras.optimizers.SGD(1.0)
    def step():
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        ids = tf.cond(tf.equal(replica, 0), lambda: tf.constant([1, 2, 3]), lambda: tf.constant([5]))
        gradient, = tf.gradients(tf.reduce_sum(tf.gather(table, ids)), [table])
        return optimizer.apply_gradients([(gradient, table)])
    train = strategy.experimental_local_results(strategy.experimental_run_v2(step))
    config = strategy.update_config_proto(tf.compat.v1.ConfigProto(device_count={"CPU": 2}))
    with tf.compat.v1.Session(config=config) as session:
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(train)
        tables = session.run(list(strategy.experimental_local_results(table)))
print([t[:, 0].tolist() for t in tables])
"""


def test_two_replicas_in_one_worker_gather_from_each_other(show, python37):
    python = show.environment(VERSION, python37, CACHE)
    patches = str(pathlib.Path(show.__file__).parents[1])
    done = subprocess.run(
        [python, "-c", TWO_REPLICAS, patches],
        capture_output=True,
        text=True,
        timeout=120,
        env=show.clean_environment(VERSION),
    )
    moved = [0.0, -1.0, -1.0, -1.0, 0.0, -1.0, 0.0, 0.0]
    assert done.stdout.splitlines()[-1:] == [str([moved, moved])], done.stderr[-3000:]
