"""The padding of tfring and of the patch, held against each other: same rows, same bytes on the wire."""

import json
import pathlib
import subprocess

import numpy as np
import pytest
import tensorflow as tf

from tfring.reduction import sparse

VERSION = "1.15.5"


def gradient(num_rows, dim, index_type, seed):
    draw = np.random.default_rng(seed)
    values = draw.normal(size=[num_rows, dim]).astype(np.float32)
    return values, draw.integers(0, 1000, num_rows).astype(index_type)


def gradients():
    """(values, indices, capacity): none, one, some, all rows there is room for; ids that repeat, and id 0."""
    kinds = [(dim, kind) for dim in (1, 3) for kind in (np.int32, np.int64)]
    cases = [(*gradient(n, dim, kind, n), 6) for n in (0, 1, 4, 6) for dim, kind in kinds]
    values, _ = gradient(5, 2, np.int64, 9)
    return [*cases, (values, np.array([0, 7, 0, 7, 7]), 8)]


def by_tfring(values, indices, capacity):
    return [t.numpy() for t in sparse.pad_rows(tf.constant(values), tf.constant(indices), capacity)]


def slices(values, indices):
    return tf.IndexedSlices(tf.constant(values), tf.constant(indices), tf.constant([1000, values.shape[1]]))


def assert_same(one, other):
    for a, b in zip(one, other, strict=True):
        assert a.dtype == b.dtype
        assert a.tobytes() == b.tobytes()
        assert a.shape == b.shape


@pytest.mark.parametrize("values, indices, capacity", gradients())
def test_both_put_the_same_on_the_wire(patch, values, indices, capacity):
    padded = patch.pad_rows(slices(values, indices), capacity, "table")
    assert_same([padded.values.numpy(), padded.indices.numpy()], by_tfring(values, indices, capacity))


def test_each_takes_off_what_the_other_put_on(patch):
    workers = [gradient(3, 2, np.int64, 1), gradient(0, 2, np.int64, 2), gradient(5, 2, np.int64, 3)]
    real = [np.concatenate(part) for part in zip(*workers, strict=True)]

    gathered = [np.concatenate(part) for part in zip(*(by_tfring(*w, 5) for w in workers), strict=True)]
    taken_off = patch.unpad_rows(slices(*gathered), 5, "table")
    assert_same([taken_off.values.numpy(), taken_off.indices.numpy()], real)

    padded = [patch.pad_rows(slices(*w), 5, "table") for w in workers]
    gathered = [tf.concat([p.values for p in padded], 0), tf.concat([p.indices for p in padded], 0)]
    assert_same([t.numpy() for t in sparse.unpad_rows(*gathered)], real)


def test_too_many_rows_name_the_variable_and_the_options_on_every_worker(patch):
    @tf.function(input_signature=[tf.TensorSpec([None, 2]), tf.TensorSpec([None], tf.int64)])  # rows not known before
    def pad(values, indices):
        padded = patch.pad_rows(tf.IndexedSlices(values, indices, [1000, 2]), 4, "user_table:0")
        return padded.values, padded.indices

    with_room, without = pad(*gradient(4, 2, np.int64, 1)), pad(*gradient(7, 2, np.int64, 2))
    gathered = [tf.concat(part, 0) for part in zip(with_room, without, strict=True)]
    with pytest.raises(tf.errors.InvalidArgumentError) as failed:
        patch.unpad_rows(tf.IndexedSlices(*gathered, [1000, 2]), 4, "user_table:0")
    for word in ("user_table:0", "batch_size", "ids_per_example", "than the 4 ", "7"):
        assert word in str(failed.value)

    with pytest.raises(ValueError, match=r"user_table:0.*Rows: 7"):  # known when the graph is built
        patch.pad_rows(slices(*gradient(7, 2, np.int64, 2)), 4, "user_table:0")


ON_OLD_TENSORFLOW = """
import json, sys
import numpy as np
import tensorflow as tf
sys.path.insert(0, sys.argv[1])
import tfring_sparse_patch
with tf.compat.v1.Session() as session:
    for values, indices, dtype, dim, capacity in json.load(sys.stdin):
        values = tf.constant(np.array(values, np.float32).reshape([-1, dim]))
        slices = tf.IndexedSlices(values, tf.constant(np.array(indices, dtype)), tf.constant([1000, dim]))
        padded = tfring_sparse_patch.pad_rows(slices, capacity, "table")
        values, indices = session.run([padded.values, padded.indices])
        print("WIRE " + json.dumps([values.tobytes().hex(), indices.tobytes().hex(), str(indices.dtype)]))
"""


def test_the_patch_puts_the_same_on_the_wire_under_an_old_tensorflow(show, python37):
    root = pathlib.Path(__file__).parents[2]
    python = show.environment(VERSION, python37, str(root / ".cache" / "patches"))
    inputs = [[v.ravel().tolist(), i.tolist(), str(i.dtype), v.shape[1], capacity] for v, i, capacity in gradients()]
    old = subprocess.run(
        [python, "-c", ON_OLD_TENSORFLOW, str(root / "patches")],
        input=json.dumps(inputs),
        capture_output=True,
        text=True,
        timeout=120,
        env=show.clean_environment(VERSION),
    )
    wires = [json.loads(line[5:]) for line in old.stdout.splitlines() if line.startswith("WIRE ")]
    assert len(wires) == len(inputs), old.stderr[-3000:]
    for (values, indices, capacity), wire in zip(gradients(), wires, strict=True):
        by_us = by_tfring(values, indices, capacity)
        assert wire == [by_us[0].tobytes().hex(), by_us[1].tobytes().hex(), str(by_us[1].dtype)]
