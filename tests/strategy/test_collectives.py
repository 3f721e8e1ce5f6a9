"""Collectives other than sums, the same over the compiled ring, TensorFlow's runtime, and for one process."""

import dataclasses

import numpy as np
import pytest
from harness import strategy, workers

ENGINES = [pytest.param(3, "ring", marks=pytest.mark.oldest), (1, "ring")]
ENGINES += [pytest.param(n, "tensorflow", marks=pytest.mark.oldest) for n in (2, 3)]
DTYPES = ("float32", "bfloat16", "float16", "float64", "int32", "int64", "uint8", "uint64", "bool", "complex64")


def rows_for(source, to, dtype):
    """A different number of rows from each rank to each, none among them."""
    numbers = 100 * source + 10 * to + np.arange((source + 2 * to) % 4)[:, None] + np.array([0.0, 0.5])
    return (numbers % 3 > 1 if dtype == "bool" else numbers).astype(dtype)


def exchange(dtype, in_function):
    import tensorflow as tf

    ring = strategy().ring.control
    rank, size = ring.rank, ring.world_size
    numpy_type = tf.as_dtype(dtype).as_numpy_dtype
    blocks = [rows_for(rank, to, numpy_type) for to in range(size)]
    mine, counts = np.concatenate(blocks), [len(block) for block in blocks]
    root = size - 1

    def every_call(mine, counts):
        return {
            "all_to_all": ring.all_to_all(mine, counts, name="rows"),
            "shares": ring.all_to_all(mine[:2], name="shares")[0],
            "gather": ring.gather(mine, root, name="gathered"),
            "scatter": ring.scatter(mine, counts, root, name="scattered"),
            "shared": ring.scatter(mine, name="shared"),
            "nothing": ring.all_to_all(mine[:0], name="nothing")[0],
        }

    if in_function:  # of shapes that tracing does not know
        every_call = tf.function(
            every_call, input_signature=[tf.TensorSpec([None, 2], dtype), tf.TensorSpec([size], tf.int64)]
        )
    found = every_call(tf.constant(mine), tf.constant(counts, tf.int64))
    found = tf.nest.map_structure(lambda each: each.numpy(), found)

    def check(name, *expected):
        np.testing.assert_array_equal(found[name], np.concatenate([mine[:0], *expected]), err_msg=name)
        assert found[name].dtype == numpy_type

    everyones = [np.concatenate([rows_for(r, to, numpy_type) for to in range(size)]) for r in range(size)]
    rows, received = found["all_to_all"]
    np.testing.assert_array_equal(received, [len(rows_for(r, rank, numpy_type)) for r in range(size)])
    found["all_to_all"] = rows
    check("all_to_all", *(rows_for(r, rank, numpy_type) for r in range(size)))
    check("shares", *(np.array_split(each[:2], size)[rank] for each in everyones))
    check("gather", *(everyones if rank == root else []))
    check("scatter", rows_for(root, rank, numpy_type))
    check("shared", np.array_split(everyones[0], size)[rank])
    check("nothing")


@pytest.mark.parametrize(("world_size", "engine"), ENGINES)
def test_rows_are_exchanged(world_size, engine):
    workers(world_size, engine).run(exchange, "float32", True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("engine", ["ring", "tensorflow"])
def test_rows_of_every_dtype_are_exchanged(engine, dtype):
    workers(3, engine).run(exchange, dtype, False)


def gradients_and_sums():
    import tensorflow as tf

    ring = strategy().ring.control
    rank, size = ring.rank, ring.world_size
    x = tf.Variable(np.arange(size * 2, dtype=np.float32) + 10 * rank)
    counts = [0] * size
    counts[(rank + 1) % size] = 2 * size  # all to the next one

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            rows, _ = ring.all_to_all(tf.convert_to_tensor(x), tf.constant(counts), name="rows")
            loss = tf.reduce_sum(rows**2) * (rank + 1)
        return tape.gradient(loss, x), ring.reduce([x[:3], x[3:4]], 0, "max", name="largest")

    gradient, largest = step()
    np.testing.assert_array_equal(gradient, 2 * x.numpy() * ((rank + 1) % size + 1))
    values = np.arange(4) + 10 * (size - 1) if rank == 0 else np.zeros(4)
    np.testing.assert_array_equal(np.concatenate(largest), values)


@pytest.mark.parametrize(("world_size", "engine"), [(3, "ring"), (3, "tensorflow"), (2, "tensorflow")])
def test_gradients_go_back_and_sums_to_the_root(world_size, engine):
    workers(world_size, engine).run(gradients_and_sums)


def in_groups():
    import tensorflow as tf

    ring = strategy().ring.control
    group = ring.group([2, 0], "ends")
    found = []
    if ring.rank != 1:
        assert group.rank == {2: 0, 0: 1}[ring.rank] and group.world_size == 2
        found = group.all_reduce([tf.constant([ring.rank, 1])], name="sum")[0].numpy().tolist()
    if ring.rank == 0:
        ring.send(tf.constant([[1.5], [2.5]]), 1, name="rows")
    if ring.rank == 1:
        found = ring.receive(0, tf.float32, [None, 1], name="rows").numpy().tolist()
    ring.barrier(name="end")
    return found


def test_groups_and_pairs_over_the_ring():
    assert workers(3).run(in_groups) == [[2, 2], [[1.5], [2.5]], [2, 2]]


def refused():
    import tensorflow as tf

    from tfring.errors import ConfigurationError

    ring = strategy().ring.control
    said = []
    for call in (
        lambda: ring.group([0], "mine"),
        lambda: ring.send(tf.zeros([1]), 1 - ring.rank, name="rows"),
        lambda: ring.receive(1 - ring.rank, tf.float32, name="rows"),
    ):
        with pytest.raises(ConfigurationError, match='RingStrategy\\(communication="ring"\\)') as error:
            call()
        said.append(str(error.value).partition(" is not")[0])
    for wrong in (lambda: ring.gather(tf.zeros([2]), 2, name="r"), lambda: ring.reduce([tf.zeros([2])], -1, name="r")):
        with pytest.raises(ValueError, match=r"`root` is .*, not from 0 to 1"):
            wrong()
    with pytest.raises(tf.errors.InvalidArgumentError, match='all_to_all "rows": `counts` do not add up'):
        ring.all_to_all(tf.zeros([3]), [1, 1], name="rows")
    return said


def test_what_tensorflow_has_not_is_refused_with_what_has_it():
    assert workers(2, "tensorflow").run(refused) == [['group "mine"', 'send "rows"', 'receive "rows"']] * 2


def of_another_cluster():
    """The error of a second strategy over TensorFlow's collectives, and where it could be and is."""
    import tfring

    cluster = strategy().cluster
    addresses = cluster.addresses[::-1]
    other = dataclasses.replace(cluster, addresses=addresses, listen_fd=None)
    with pytest.raises(tfring.errors.ConfigurationError) as error:
        tfring.RingStrategy(other, communication="tensorflow")
    return str(error.value), str(addresses), str(cluster.addresses)


def test_a_process_joins_one_cluster_of_tensorflow():
    for error, other, own in workers(2, "tensorflow").run(of_another_cluster):
        assert f"is in the cluster {own}" in error and f"it cannot join {other}" in error


def too_late():
    import tensorflow as tf

    import tfring

    cluster = dataclasses.replace(strategy().cluster, listen_fd=None)
    assert tf.constant(1).numpy() == 1
    message = "TensorFlow has run in this process before RingStrategy"
    with pytest.raises(tfring.errors.ConfigurationError, match=message):
        tfring.RingStrategy(cluster, communication="tensorflow")


def test_collectives_of_tensorflow_come_first():
    workers(2).run(too_late)


def alone():
    import tensorflow as tf

    ring = strategy().ring.control
    assert ring.group([0], "mine") is ring
    assert ring.reduce([tf.constant(2.0)], name="sum")[0].numpy() == 2.0
    for call in (
        lambda: ring.group([0, 1], "more"),
        lambda: ring.send(tf.zeros([1]), 0, name="rows"),
        lambda: ring.receive(0, tf.float32, name="rows"),
    ):
        with pytest.raises(ValueError, match=r"has no peer|different ranks"):
            call()


def test_a_process_alone_has_nobody_to_send_to():
    workers(1).run(alone)
