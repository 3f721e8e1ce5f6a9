"""Whatever a program calls a loss, N workers train as one process: gradients are weighed by rows, losses are not."""

import numpy as np
import pytest
from common import assert_equal, devices, relative_error, skewed_rows, train_both
from harness import strategy, workers
from programs import compiled, programs

# Programs whose metrics are fed one number a batch: eagerly their logs are those of a replica's rows.
LOGS_OF_THEIR_OWN = "compute_loss", "guide", "vae", "gan", "low level", "by hand", "of rows", "average", "unreduced"


def train(names, batch_size=20):
    """Trains the programs named on all workers, and on one rank alone: relative errors by program."""
    import tensorflow as tf

    ring = strategy(**devices())
    found = programs()
    cases = {}
    end = 2 * batch_size + 1  # of 41 rows as many as leave one for the last batch
    for name in names:
        make, *given = found[name]
        data, options = tf.nest.map_structure(lambda rows: rows[:end] if len(rows) == 41 else rows, given)
        cases[name] = train_both(ring, make, *data, **{"epochs": 1, "batch_size": batch_size, **options})
        if "eager" in name and any(part in name for part in LOGS_OF_THEIR_OWN):
            cases[name].pop("history", None)
    return cases


SOME = [
    "mean", "updated by hand", "guide", "gan", "sum", "unreduced, guide", "masked", "masked, by weights",
    "contrastive", "own anchors", "clipped by hand", "add_loss of Keras' sum",
]  # fmt: skip


@pytest.mark.oldest
def test_programs():
    assert_equal(workers(3).run(train, SOME, timeout=300))


# Each a setting of Keras beside a program that the other tests train.
VARIANTS = [
    "mean, accumulated", "mean, scaled", "unreduced, scaled", "guide, weighted", "mean of rows", "sum, low level",
    "masked, weighted", "contrastive, eager", "masked, eager",
]  # fmt: skip


@pytest.mark.long
def test_variants():
    assert_equal(workers(2).run(train, VARIANTS, 19, timeout=400))


@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.long)])
def test_other_programs(part):
    three = ["circle", "circle of Keras", "synchronized normalization"]  # roundings of other batches lead these apart
    names = [name for name in programs() if name not in (*SOME, *VARIANTS, *three)]
    assert len(names) > 12
    # Batches of 19: shares of 10 and 9 rows, and of 1 and 0 in the last.
    assert_equal(workers(2).run(train, names[part::2], 19, timeout=400))
    assert_equal(workers(3).run(train, three[part::2]))


@pytest.mark.long
def test_programs_with_two_replicas_a_worker():
    names = ["mean, eager", "contrastive, eager", "mean, accumulated", "masked", "own anchors", "clipped by hand"]
    assert_equal(workers(2, logical_cpus=2).run(train, names, timeout=300))


@pytest.mark.long
def test_programs_over_tensorflow():
    assert_equal(workers(3, "tensorflow").run(train, ["masked", "contrastive"], timeout=300))


def left_behind(_):
    """Returns what layers have added, behind an eager step of one worker and of Keras alone."""
    import contextlib

    import keras

    x, y = skewed_rows(20)
    found = []
    for scope in (strategy().scope(), contextlib.nullcontext()):
        with scope:
            keras.utils.set_random_seed(1)
            layers = [keras.layers.Dense(3, activity_regularizer="l2"), keras.layers.Dense(1)]
            model = keras.Sequential([keras.Input((4,)), *layers])
            model.compile("sgd", "mse", run_eagerly=True)
        model.train_on_batch(x, y)
        found.append([float(loss) for loss in model.losses])
    return found


def test_what_layers_add_is_there_behind_an_eager_step():
    [[got, want]] = workers(1).run(left_behind, None)
    assert len(want) == 1
    np.testing.assert_allclose(got, want, rtol=1e-6)


# -- loops of the user's own -------------------------------------------------------------------------------------------


def own_loop(counts):
    """In a custom loop: rows of all replicas with the sum of gradients; gradients of all, clipped."""
    import tensorflow as tf

    import tfring

    ring = strategy(**devices())
    bounds = np.cumsum([0, *counts])
    x = np.arange(2.0 * bounds[-1], dtype="float32").reshape(-1, 2) + 1
    with ring.scope():
        weights = tf.Variable([[1.0], [2.0]])
        table = tf.Variable(tf.ones([100, 2]))

    def share(context):
        i = context.replica_id_in_sync_group
        return x[bounds[i] : bounds[i + 1]]

    rows = ring.experimental_distribute_values_from_function(share)

    @tf.function
    def step(rows):
        def replica(rows):
            with tf.GradientTape() as tape:
                everyone, numbers, _ = tfring.gather_for_loss((rows @ weights, tf.cast(rows, tf.int32), None))
                loss = tf.reduce_sum(everyone**2) * (1.0 + tf.reduce_sum(rows))  # another factor on each replica
            gradient = tape.gradient(loss, weights)
            with tf.GradientTape() as tape:
                looked_up = tf.gather(table, tf.cast(rows[:, 0], tf.int32))
                loss = tf.reduce_sum(looked_up * rows)
            gradients = ring.all_reduce_gradients([tape.gradient(loss, table), None, tf.reduce_sum(rows)[None]])
            assert isinstance(gradients[0], tf.IndexedSlices) and gradients[1] is None
            return gradient, everyone, numbers, tf.convert_to_tensor(gradients[0]), gradients[2]

        return ring.run(replica, (rows,))

    results = [ring.experimental_local_results(values) for values in step(rows)]
    return [[np.asarray(v) for v in values] for values in results]


@pytest.mark.parametrize("logical_cpus", [1, pytest.param(2, marks=pytest.mark.oldest)])
def test_own_loops_sum(logical_cpus):
    counts = {1: [3, 0, 2], 2: [3, 0, 2, 1]}[logical_cpus]
    results = workers(len(counts) // logical_cpus, logical_cpus=logical_cpus).run(own_loop, counts)
    x = np.arange(2.0 * sum(counts), dtype="float32").reshape(-1, 2) + 1
    outputs = x @ [[1.0], [2.0]]
    factor = sum(1 + part.sum() for part in np.split(x, np.cumsum(counts)[:-1]))
    table = np.zeros((100, 2))
    np.add.at(table, x[:, 0].astype(int), x)
    totals = 0.0
    for gradients, everyone, numbers, tables, sums in results:
        totals = totals + sum(gradients)
        for replica in range(logical_cpus):
            np.testing.assert_allclose(everyone[replica], outputs, rtol=1e-6)
            np.testing.assert_array_equal(numbers[replica], x.astype("int32"))
            np.testing.assert_allclose(tables[replica], table, rtol=1e-6)
            np.testing.assert_allclose(sums[replica], [x.sum()], rtol=1e-6)
    np.testing.assert_allclose(totals, factor * (x.T @ (2 * outputs)), rtol=1e-5)


def sums_of_gradients_to_an_optimizer(in_graph):
    """What an optimizer says of sums over replicas; how it moves by sums that are divided, and by the tape's."""
    import keras
    import tensorflow as tf

    ring, moved = strategy(**devices()), {}
    for how in ("as they are", "divided", "of the tape"):
        with ring.scope():
            variables = [keras.Variable([1.0]), keras.Variable(tf.ones([3, 1]))]
            optimizer = keras.optimizers.SGD(1.0)
            optimizer.build(variables)

        def replica(how=how, variables=variables, optimizer=optimizer):
            with tf.GradientTape() as tape:
                loss = 3 * variables[0][0] + tf.reduce_sum(tf.gather(variables[1].value, [0, 0]))
            gradients = tape.gradient(loss, [v.value for v in variables])
            if how != "of the tape":
                gradients = ring.all_reduce_gradients(gradients)
            if how == "divided":
                gradients = [tf.convert_to_tensor(g) / ring.num_replicas_in_sync for g in gradients]
            optimizer.apply(gradients, variables)

        try:
            ring.run(tf.function(replica) if in_graph else replica)
            moved[how] = [v.numpy() for v in variables]
        except Exception as error:  # AutoGraph raises an error of its own, with these words
            moved[how] = str(error)
    return moved


@pytest.mark.parametrize("in_graph", [False, True])
def test_an_optimizer_refuses_what_is_summed_over_replicas(in_graph):
    for moved in workers(2).run(sums_of_gradients_to_an_optimizer, in_graph):
        assert "the optimizer sums over replicas as well" in moved["as they are"]
        for divided, of_tape in zip(moved["divided"], moved["of the tape"], strict=True):
            np.testing.assert_allclose(divided, of_tape)
        np.testing.assert_allclose(moved["of the tape"][0], [-5.0])


# -- collectives of tf.distribute in a step ----------------------------------------------------------------------------


def through_collectives(y, p):
    """A loss of what all replicas hold, through TensorFlow's own collectives; one process: of its rows."""
    import tensorflow as tf

    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return tf.reduce_mean((p - tf.reduce_mean(p, 0) - y) ** 2) + tf.reduce_mean(p**3)
    total, rows = context.all_reduce("SUM", [tf.reduce_sum(p, 0), tf.cast(tf.shape(p)[0], p.dtype)])
    everyone = context.all_gather(p, 0)
    return tf.reduce_mean((p - total / rows - y) ** 2) + tf.reduce_mean(everyone**3)


def train_through_collectives():
    return {"collectives": train_both(strategy(**devices()), compiled(through_collectives), *skewed_rows(43), epochs=1)}


def test_collectives_of_tensorflow_weigh_gradients():
    for group in (workers(3), workers(2, logical_cpus=2)):
        assert_equal(group.run(train_through_collectives))


# -- alone -------------------------------------------------------------------------------------------------------------


def test_alone_nothing_is_gathered():
    import tensorflow as tf

    import tfring

    rows = tf.constant([[1.0, 2.0]])
    assert tfring.gather_for_loss(rows) is rows
    assert tfring.gather_for_loss({"a": rows, "b": None})["b"] is None
    with pytest.raises(ValueError, match="scalar"):
        tfring.gather_for_loss(tf.constant(1.0))
    with pytest.raises(TypeError, match="to_tensor"):
        tfring.gather_for_loss(tf.ragged.constant([[1.0], []]))
    ring = tfring.RingStrategy()
    assert ring.run(lambda: ring.all_reduce_gradients([rows, None]))[1] is None
    with ring.scope(), pytest.raises(RuntimeError, match="cross-replica"):
        ring.all_reduce_gradients([rows])
    assert relative_error([tfring.gather_for_loss(rows)], [rows]) == 0


def in_no_step():
    """Losses and metrics that the program calls itself, in the scope and outside of it."""
    import keras

    def values():
        labels, scores = [0, 1, 1, 0], [0.1, 0.9, 0.3, 0.4]
        iou = keras.metrics.MeanIoU(2), keras.metrics.BinaryIoU(), keras.metrics.IoU(2, [0]), keras.metrics.AUC()
        for _ in range(2):
            for metric in iou:
                metric.update_state(labels, [0, 1, 0, 0] if "Binary" not in type(metric).__name__ else scores)
        mean = keras.metrics.MeanSquaredError()
        mean.update_state(labels, scores)
        loss = keras.losses.MeanSquaredError()(np.ones((4, 1)), np.zeros((4, 1)))
        return [float(loss), *(float(metric.result()) for metric in (*iou, mean))]

    with strategy().scope():
        got = values()
    return got, values()


def test_losses_and_metrics_in_no_step_are_those_of_all_their_rows():
    for got, alone in workers(3).run(in_no_step):
        assert got == pytest.approx(alone) and got[0] == 1
