"""Steps of any kind have the result of one process, whether their rows can be divided or not."""

import contextlib
import itertools
import logging
import pathlib
import pickle

import harness
import keras
import numpy as np
import pytest
import tensorflow as tf
from common import assert_equal, devices, train_both
from harness import workers

import tfring
from tfring import partition
from tfring.partition import conversions

ROWS, BATCH = 19, 8  # the last batch has three rows

_made = {}  # by one process


def _data():
    random = np.random.default_rng(5)
    x = random.normal(size=(ROWS, 6)).astype("float32") * np.exp(random.normal(size=(ROWS, 1))).astype("float32")
    return x, (x[:, :1] * 0.5 + random.normal(size=(ROWS, 1))).astype("float32")


def _alone(task, *args):
    """Returns what one process makes of a task, which all cases of a test are compared with."""
    key = pickle.dumps((task, args))
    if key not in _made:
        [_made[key]] = workers(1).run(task, *args)
    return _made[key]


def _in_turn(*cases):
    """Returns parameters of cases of which each runs every third program, and long ones that run all.

    The first three run all programs between them, so these are steps that are edited.
    """
    return [
        *[(*case, slice(i % 3, None, 3)) for i, case in enumerate(cases)],
        *[pytest.param(*case, slice(None), marks=pytest.mark.long) for case in cases],
    ]


def _usual_and_long(*cases, usual=1):
    """Returns parameters of cases, all but the first ones long."""
    return [*cases[:usual], *(pytest.param(*case, marks=pytest.mark.long) for case in cases[usual:])]


@contextlib.contextmanager
def _logged():
    """Yields the messages that tfring logs of steps that each worker computes, in part, from the rows of all."""
    logger, texts = logging.getLogger("tfring"), []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())
    logger.addHandler(handler)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)


def _of_whole_batch(texts):
    return [text for text in texts if "each worker computes the whole batch" in text]


class Adds(keras.layers.Layer):
    """Adds the mean of some rows to the loss."""

    def call(self, x):
        self.add_loss(tf.reduce_mean(tf.gather(x**2, tf.where(x[:, 0] > 0.0)[:, 0])))
        return x


class OneLayer(keras.Model):
    """One dense layer, whose loss is a function of the model, inputs and targets, as is what it writes to its state."""

    def __init__(self, loss_of, between=None, write=None):
        super().__init__()
        self.dense = keras.layers.Dense(1, kernel_initializer="ones")
        self.adds = Adds()
        self.loss_of = loss_of
        self.between = between
        self.write = write
        self.scales = tf.constant([[0.5], [1.0], [1.5], [2.0], [2.5], [3.0]])
        self.tracker = keras.metrics.Mean()
        self.state = self.add_weight(shape=(), initializer="zeros", trainable=False, name="state")
        self.queue = tf.Variable(tf.zeros([16, 6]), trainable=False)
        self.centers = self.add_weight(shape=(2, 6), initializer="zeros", trainable=False, name="centers")

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data[:2]
        with tf.GradientTape() as tape:
            loss = self.loss_of(self, x, y)
        gradients = tape.gradient(loss, self.trainable_variables)
        if self.between is not None:
            gradients = self.between(self, gradients)
        if self.write is not None:
            self.write(self, x, y)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        of_metric = {"tracked": self.tracker.result(), "total": self.tracker.total}
        return {"own": tf.reduce_mean(loss), "rows": tf.abs(y[:, 0]), **of_metric}


class Part(keras.layers.Layer):
    """What a step writes to, beside the layer of its model."""

    def __init__(self, model, name):
        super().__init__(name=name.replace(":", " of").replace(" ", "_"))
        self.tracker = keras.metrics.Mean()
        self.state = self.add_weight(shape=(), initializer="zeros", trainable=False, name="state")
        self.queue = tf.Variable(tf.zeros([16, 6]), trainable=False)
        self.centers = self.add_weight(shape=(2, 6), initializer="zeros", trainable=False, name="centers")
        self.dense = model.dense


class Together(OneLayer):
    """Writes to a part of its own for each of `STATES`."""

    def __init__(self):
        super().__init__(LOSSES["mean"], write=self.write_parts)
        self.parts = {name: Part(self, name) for name in STATES}

    def write_parts(self, _, x, y):
        for name, part in self.parts.items():
            STATES[name](part, x, y)

    def train_step(self, data):
        logs = super().train_step(data)
        for part in self.parts.values():
            logs |= {f"{part.name} tracked": part.tracker.result(), f"{part.name} total": part.tracker.total}
        return logs


def _error(model, x, y):
    return model(x) - y


def _classes(y):
    return tf.cast(y[:, 0] > 0.2, tf.int32)


def _to_prototypes(m, x, y):
    outputs = m(x)
    prototypes = tf.math.unsorted_segment_mean(outputs, _classes(y), 2)
    return tf.reduce_mean((outputs - tf.gather(prototypes, _classes(y))) ** 2)


def _by_rare_classes(m, x, y):
    """Weighs rows by their class' frequency; one class is in no row."""
    classes = _classes(y)
    weights = 1.0 / (tf.reduce_sum(tf.one_hot(classes, 3), 0) + 1e-6)
    weights = 1e6 * weights / tf.reduce_sum(weights)
    return tf.reduce_mean(tf.gather(weights, classes)[:, None] * _error(m, x, y) ** 2)


def _of_pairs(m, x, y):
    """Compares rows in pairs, after a `tf.squeeze` that removes no rows where there is one."""
    outputs, targets = tf.squeeze(m(x)), tf.squeeze(y)
    return tf.reduce_mean(tf.nn.relu(1.0 - (outputs[:, None] - outputs) * (targets[:, None] - targets)))


def _enqueue(m, x, y):
    places = (tf.cast(m.state, tf.int32) + tf.range(tf.shape(x)[0])) % 16
    m.queue.scatter_nd_update(places[:, None], x)
    m.queue.scatter_nd_add([[3]], x[:1])
    m.state.assign_add(tf.cast(tf.shape(x)[0], tf.float32))
    m.centers.assign(tf.gather(m.queue, [3, 15]) + tf.gather_nd(m.queue, [[0], [9]]))


def _added(m, x, y):
    outputs = m.adds(m(x))
    [added] = m.adds.losses
    m.adds._clear_losses()  # as Keras' own step does
    return tf.reduce_mean((outputs - y) ** 2) + added


LOSSES = {
    "product": lambda m, x, y: tf.reduce_mean(_error(m, x, y) ** 2) * tf.reduce_mean(tf.abs(m(x))),
    "largest of means": lambda m, x, y: tf.reduce_max(
        tf.stack([tf.reduce_mean(_error(m, x, y) ** 2), tf.reduce_mean(tf.abs(_error(m, x, y)))])
    ),
    "products of rows": lambda m, x, y: tf.reduce_mean(tf.tanh(tf.matmul(m(x), y, transpose_b=True)) ** 2),
    "prototypes": _to_prototypes,
    "rare classes": _by_rare_classes,
    "squeezed pairs": _of_pairs,
    "added mean of gathered rows": _added,
    "mean": lambda m, x, y: tf.reduce_mean(_error(m, x, y) ** 2),
    "mean by the number of rows": lambda m, x, y: (
        tf.reduce_sum(_error(m, x, y) ** 2) / tf.cast(tf.shape(x)[0], tf.float32)
    ),
    "gathered ratio": lambda m, x, y: (lambda e, t: tf.reduce_sum(tf.abs(e)) / tf.reduce_sum(tf.abs(t)))(
        *tfring.gather_for_loss((_error(m, x, y), y))
    ),
    "penalty": lambda m, x, y: tf.reduce_mean(_error(m, x, y) ** 2) + tf.nn.l2_loss(m.dense.kernel),
    "penalty scaled by a constant": lambda m, x, y: (
        tf.reduce_mean(_error(m, x, y) ** 2) + tf.reduce_sum((m.dense.kernel * m.scales) ** 2)
    ),
    "sum over the global batch": lambda m, x, y: tf.reduce_sum(_error(m, x, y) ** 2) * (1 / BATCH),
    "kept rows": lambda m, x, y: tf.reduce_mean(tf.boolean_mask(_error(m, x, y) ** 2, y[:, 0] > 0.0)),
    "ratio": lambda m, x, y: tf.reduce_sum(_error(m, x, y) ** 2) / tf.reduce_sum(y**2),
    "log": lambda m, x, y: tf.math.log(tf.reduce_mean(_error(m, x, y) ** 2)),
    "root": lambda m, x, y: tf.sqrt(tf.reduce_mean(_error(m, x, y) ** 2)),
    "vector": lambda m, x, y: tf.reduce_sum(_error(m, x, y) ** 2, 1),
    "in-batch negatives": lambda m, x, y: tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(tf.range(tf.shape(x)[0]), tf.matmul(m(x), y, transpose_b=True))
    ),
    "negatives both ways": lambda m, x, y: tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(tf.range(tf.shape(x)[0]), tf.matmul(y, m(x), transpose_b=True))
    ),
    "hardest": lambda m, x, y: tf.reduce_max(_error(m, x, y) ** 2),
    "minibatch": lambda m, x, y: tf.reduce_mean(_error(m, x, y)[:2] ** 2),
    "standardized": lambda m, x, y: tf.reduce_mean(
        (m((x - tf.reduce_mean(x, 0)) / (tf.math.reduce_std(x, 0) + 0.1)) - y) ** 2
    ),
    "sorted": lambda m, x, y: tf.reduce_mean(tf.abs(tf.sort(m(x)[:, 0]) - tf.sort(y[:, 0]))),
    "condition on a mean": lambda m, x, y: (lambda loss: tf.cond(loss > 1.0, lambda: loss, lambda: loss**2))(
        tf.reduce_mean(_error(m, x, y) ** 2)
    ),
    "loop over rows": lambda m, x, y: tf.while_loop(
        lambda i, _: i < tf.shape(x)[0],
        lambda i, total: (i + 1, 0.9 * total + tf.reduce_sum(_error(m, x, y)[i] ** 2)),
        (0, tf.zeros([])),
    )[1],
    "no rule": lambda m, x, y: tf.reduce_mean(
        _error(m, x, y) ** 2 * tf.ensure_shape(tf.numpy_function(lambda v: v - v.max(), [y], tf.float32), [None, 1])
    ),
    "reduced by itself": lambda m, x, y: (
        lambda c: c.all_reduce("sum", tf.reduce_sum(_error(m, x, y) ** 2))
        / c.all_reduce("sum", tf.cast(tf.size(y), tf.float32))
    )(tf.distribute.get_replica_context()),
    "by the number of replicas": lambda m, x, y: tf.reduce_mean(
        tf.math.log(1.0 + tf.distribute.get_replica_context().all_reduce("mean", tf.reduce_mean(_error(m, x, y) ** 2)))
        / tf.distribute.get_strategy().num_replicas_in_sync
    ),
    "gathered by itself": lambda m, x, y: tf.reduce_mean(
        tf.abs(_error(m, x, y) - tf.transpose(tf.distribute.get_replica_context().all_gather(_error(m, x, y), 0)))
    ),
    "up to the largest": lambda m, x, y: tf.reduce_mean(
        (x * tf.transpose(m.dense.kernel) - y)[:, : tf.reduce_max(tf.math.count_nonzero(x > 0, 1, dtype=tf.int32))] ** 2
    ),
    "noise of a seed": lambda m, x, y: tf.reduce_mean(
        _error(m, x + tf.random.stateless_normal(tf.shape(x), [1, 2]), y) ** 2
    ),
}


def _clipped(model, gradients):
    return tf.clip_by_global_norm(gradients, 0.1)[0]


def _clipped_together(model, gradients):
    return _clipped(model, tf.distribute.get_strategy().all_reduce_gradients(gradients))


BETWEEN = {
    "clipped": _clipped,
    "clipped together": _clipped_together,
    "signs": lambda model, gradients: [tf.sign(g) for g in gradients],
    "projected": lambda model, gradients: [
        g - v * tf.reduce_sum(g * v) / (tf.reduce_sum(v * v) + 0.1)
        for g, v in zip(gradients, model.trainable_variables, strict=True)
    ],
}

def _if_large(then):
    """Writes in a branch, where what is added counts once."""
    return lambda s, x, y: tf.cond(tf.reduce_max(y) > 1.0, lambda: then(s, y), lambda: (s.assign_add(0.0), 0)[1])


# What becomes of a metric's state, of which replicas hold parts: the step returns it, too.
METRICS = {
    "sum": lambda s, x, y: s.assign(s + tf.reduce_sum(y)),
    "moving mean": lambda s, x, y: s.assign(0.9 * s + 0.1 * tf.reduce_mean(y)),
    "largest": lambda s, x, y: s.assign(tf.maximum(s, tf.reduce_max(y))),
    "largest and sum": lambda s, x, y: s.assign(tf.maximum(s + tf.reduce_sum(y), tf.reduce_max(y))),
    "rows and one": lambda s, x, y: s.assign_add(tf.cast(tf.shape(y)[0], tf.float32) + 1.0),
    "last number of rows": lambda s, x, y: s.assign(tf.cast(tf.shape(y)[0], tf.float32)),
    "root": lambda s, x, y: s.assign(s + tf.sqrt(tf.reduce_sum(y**2))),
    "twice": lambda s, x, y: (s.assign(s + tf.reduce_sum(y)), s.assign(s * 0.5 + tf.reduce_max(y))),
    "kept rows": lambda s, x, y: s.assign(s + tf.reduce_mean(tf.boolean_mask(y, y > -1.0))),
    "in a branch": _if_large(lambda s, y: (s.assign(s + tf.reduce_sum(y)), 0)[1]),
    "in a loop": lambda s, x, y: tf.while_loop(
        lambda i: i < 3, lambda i: (s.assign(s + tf.reduce_sum(y)), (i + 1,))[1], (0,)
    ),
}

# What a step writes, of which each replica sees some rows, and what it draws once for all of them.
STATES = {
    "rows of a queue": _enqueue,
    "largest": lambda m, x, y: m.state.assign(tf.maximum(m.state, tf.reduce_max(y))),
    "count": lambda m, x, y: m.state.assign_add(tf.cast(tf.shape(y)[0], tf.float32)),
    "decayed sum": lambda m, x, y: m.state.assign(0.5 * m.state + tf.reduce_sum(y)),
    "spread": lambda m, x, y: m.state.assign(tf.math.reduce_std(y)),
    "last row": lambda m, x, y: m.state.assign(y[-1, 0]),
    "class centers": lambda m, x, y: m.centers.assign(
        0.9 * m.centers + 0.1 * tf.math.unsorted_segment_mean(x, _classes(y), 2)
    ),
    "sums by scatter": lambda m, x, y: m.centers.assign(
        tf.tensor_scatter_nd_add(m.centers.value, _classes(y)[:, None], x)
    ),
    "covariance": lambda m, x, y: m.centers.assign(
        (lambda d: tf.matmul(d[:, :2], d, transpose_a=True) / tf.cast(tf.shape(x)[0], tf.float32))(
            x - tf.reduce_mean(x, 0)
        )
    ),
    "statistics of the first batch": lambda m, x, y: (
        m.centers.assign(
            tf.where(m.state == 0.0, tf.stack([tf.reduce_mean(x, 0), tf.math.reduce_std(x, 0)]), m.centers.value)
        ),
        m.state.assign(1.0),
    ),
    "moving mean of gathered rows": lambda m, x, y: m.state.assign(
        0.9 * m.state + 0.1 * tf.reduce_mean(tf.gather(y, tf.where(y[:, 0] > 0.0)[:, 0]))
    ),
    "a metric with a weight": lambda m, x, y: m.tracker.update_state(tf.reduce_mean(y), sample_weight=2.0),
    "a metric of maxima": lambda m, x, y: m.tracker.update_state(tf.reduce_max(y)),
    "a metric of kept rows": lambda m, x, y: m.tracker.update_state(tf.boolean_mask(y, y > -1.0)),
    "a metric of the last batch": lambda m, x, y: (m.tracker.reset_state(), m.tracker.update_state(y)),
    **{f"metric: {name}": lambda m, x, y, write=write: write(m.tracker.total, x, y) for name, write in METRICS.items()},
    "a weight, before the optimizer": lambda m, x, y: m.dense.kernel.assign_add(0.01 * tf.reduce_sum(x, 0)[:, None]),
    "if any": lambda m, x, y: tf.cond(
        tf.reduce_max(y) > 1.0, lambda: m.state.assign(tf.reduce_max(y)), lambda: m.state.assign(-1.0)
    ),
}


def _fit(name, check_equal=False, devices=1, run_eagerly=False):
    """Returns all weights after two epochs, the logs, and what was logged of steps of the whole batch."""
    strategy = harness.strategy(check_equal=check_equal, devices=[f"CPU:{i}" for i in range(devices)])
    x, y = _data()
    with _logged() as texts:
        with strategy.scope():
            loss = LOSSES.get(name, LOSSES["mean"])
            model = (
                Together()
                if name == "all states"
                else OneLayer(OTHERS.get(name, loss), BETWEEN.get(name), STATES.get(name))
            )
            model.dense.build((None, 6))  # before a step reads its kernel
            model.compile(keras.optimizers.SGD(0.05), run_eagerly=run_eagerly)
        history = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
    said = _of_whole_batch(texts)
    logs = [np.ravel(value) for values in history.values() for value in values]
    return [v.numpy() for v in model.weights], logs, said


def _all(names, devices=1, run_eagerly=False):
    return {name: _fit(name, devices=devices, run_eagerly=run_eagerly) for name in names}


@pytest.mark.parametrize(
    ("world_size", "devices", "run_eagerly", "part"),
    _in_turn((2, 1, False), (3, 1, False), (2, 2, False), (2, 1, True), (2, 2, True)),
)
def test_whatever_a_step_computes_equals_one_process(world_size, devices, run_eagerly, part):
    """Batches of 8, 8 and 3 rows; of four replicas one has no row of the last."""
    states = STATES if part == slice(None) else ["all states"]
    names = [*[*LOSSES, *BETWEEN][part], *states]
    one = {name: _alone(_fit, name) for name in names}
    several = workers(world_size, logical_cpus=devices).run(_all, names, devices, run_eagerly)
    for name in names:
        weights, logs, said = several[0][name]
        assert one[name][2] == [] and bool(said) == run_eagerly, (name, said)
        for got, wanted in zip([*weights, *logs], [*one[name][0], *one[name][1]], strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5, err_msg=name)
        for other in several[1:]:
            assert [w.tobytes() for w in other[name][0]] == [w.tobytes() for w in weights], name


class FreeStep(OneLayer):
    """A step that is a function of the model, inputs and targets, which returns the logs."""

    def __init__(self, step):
        super().__init__(None)
        self.step = step
        self.dense.build((None, 6))

    def train_step(self, data):
        return self.step(self, *data[:2])

    def update(self, x, y, change=lambda gradients: gradients):
        """Takes a step of the optimizer; returns the loss and the gradients."""
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.dense(x) - y) ** 2)
        gradients = change(tape.gradient(loss, self.dense.trainable_weights))
        self.optimizer.apply_gradients(zip(gradients, self.dense.trainable_weights, strict=True))
        return loss, gradients


def _logs(m, x, y, **others):
    return {"loss": m.update(x, y)[0], **others}


def _result_and_reset(m, x, y):
    m.tracker.update_state(y)
    result = m.tracker.result()
    m.tracker.reset_state()
    return _logs(m, x, y, result=result)


def _result_and_update(m, x, y):
    result = m.tracker.result()
    m.tracker.update_state(y)
    return _logs(m, x, y, result=result, later=m.tracker.result())


def _weight_and_update(m, x, y):
    m.state.assign(tf.reduce_mean(y))
    before = tf.identity(m.state)
    tf.cond(before > -99.0, lambda: m.state.assign(7.0), lambda: m.state.assign(8.0))
    m.queue[0, 0].assign(tf.reduce_sum(y))
    return _logs(m, x, y, before=before, kernel=tf.identity(m.dense.kernel[0, 0]), after=m.state)


def _flag(m, x, y):
    m.state.assign(7.0 + 0.0 * tf.reduce_mean(y))
    return _logs(m, x, y, flag=tf.cast(tf.cast(m.state, tf.bool), tf.float32), whole=tf.cast(m.state / 2.0, tf.int32))


def _zeros_and_update(m, x, y):
    m.state.assign(0.0)
    m.optimizer.apply([tf.reduce_mean(y) - 2.0], [m.state])
    with tf.GradientTape() as tape:
        loss = m.state * tf.reduce_sum((m.dense(x) - y) ** 2)
    m.optimizer.apply(tape.gradient(loss, m.dense.trainable_weights), m.dense.trainable_weights)
    return {"loss": loss, "state": m.state * 1.0}


def _in_loop(m, x, y, part):
    def body(i, _):
        return i + 1, m.update(*part(i, x, y))[0]

    return {"loss": tf.while_loop(lambda i, _: i < 2, body, (0, tf.zeros([])))[1]}


def _in_branch(m, x, y):
    chosen = tf.cond(
        tf.reduce_mean(x) > -99.0, lambda: m.update(x[1:], y[1:])[0], lambda: m.update(tf.sort(x, 0), y)[0]
    )
    return {"loss": chosen}


def _rate_in_branch(m, x, y):
    rate = m.optimizer.learning_rate
    tf.cond(tf.reduce_mean(x) > -99.0, lambda: rate.assign(0.9 * rate), lambda: rate.assign(rate))
    return _logs(m, x, y, rate=rate)


def _accumulated(m, x, y):
    m.state.assign_add(tf.reduce_mean(y))
    return _logs(m, x, y, square=tf.cond(tf.reduce_mean(x) > -99.0, lambda: m.state * m.state, lambda: m.state * 1.0))


def _text_of_metric(m, x, y):
    m.tracker.update_state(y)
    return _logs(m, x, y, text=tf.strings.as_string(m.tracker.count))


# Steps, each with whether it is divided between replicas.
STEPS = {
    "a metric's result, and then its reset": (_result_and_reset, True),
    "a metric's result, and then its update": (_result_and_update, True),
    "what variables held before a branch": (_weight_and_update, True),
    "a variable cast to others": (_flag, True),
    "zeros, and an update of them": (_zeros_and_update, True),
    "minibatches in a loop": (lambda m, x, y: _in_loop(m, x, y, lambda i, x, y: (x[i : i + 2], y[i : i + 2])), True),
    "sorted rows in a loop": (lambda m, x, y: _in_loop(m, x, y, lambda i, x, y: (tf.sort(x, 0), y)), True),
    "an update in a branch": (_in_branch, True),
    "a check of kept rows": (
        lambda m, x, y: _logs(
            m, x, y, kept=tf.debugging.check_numerics(tf.reduce_mean(tf.boolean_mask(y, y >= tf.reduce_max(y))), "kept")
        ),
        True,
    ),
    "a rate that a branch assigns": (_rate_in_branch, True),
    "a part that a branch squares": (_accumulated, True),
    "a metric's state as a string": (_text_of_metric, True),
    "a string": (lambda m, x, y: _logs(m, x, y, text=tf.strings.as_string(tf.reduce_max(y))), True),
    "strings of rows": (lambda m, x, y: _logs(m, x, y, text=tf.strings.as_string(y)), False),
    "a complex number": (lambda m, x, y: _logs(m, x, y, z=tf.complex(tf.reduce_mean(y), 1.0)), True),
    "an unknown rank": (
        lambda m, x, y: _logs(m, x, y, largest=tf.compat.v1.placeholder_with_default(tf.reduce_max(y), None)),
        True,
    ),
    "rows along the second axis": (lambda m, x, y: _logs(m, x, y, rows=tf.transpose(x)[:2]), True),
    "ragged rows": (lambda m, x, y: _logs(m, x, y, rows=tf.ragged.boolean_mask(x, x > 0.0)), True),
    "slices": (lambda m, x, y: _logs(m, x, y, part=tf.IndexedSlices(tf.reduce_mean(x, 0, True), [0], [2, 6])), True),
}


def _steps(names, devices=1, run_eagerly=False):
    """Returns weights and the logs of each batch, and what was logged of whole batches, by name."""
    x, y = _data()
    found = {}
    for name in names:
        batches = []
        with _logged() as texts:
            with harness.strategy(devices=[f"CPU:{i}" for i in range(devices)]).scope():
                model = FreeStep(STEPS[name][0])
                model.compile(keras.optimizers.SGD(0.05), run_eagerly=run_eagerly)
                model.optimizer.build([*model.dense.trainable_weights, model.state])
            noting = keras.callbacks.LambdaCallback(
                on_train_batch_end=lambda _, logs, to=batches: to.append(dict(logs))
            )
            model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, callbacks=[noting])
        weights = [v.numpy() for v in model.weights]
        logs = [_as_array(logs[key]) for logs in batches for key in sorted(logs)]
        found[name] = weights, logs, _of_whole_batch(texts)
    return found


def _as_array(value):
    value = value.to_tensor() if isinstance(value, tf.RaggedTensor) else value
    return np.asarray(tf.convert_to_tensor(value))


@pytest.mark.parametrize(
    ("world_size", "devices", "run_eagerly", "part"),
    _in_turn((2, 1, False), (3, 1, False), (2, 2, False), (3, 1, True)),
)
def test_what_a_step_returns_and_updates_at_any_moment(world_size, devices, run_eagerly, part):
    of_one = ["minibatches in a loop", "sorted rows in a loop", "an update in a branch"]
    names = [name for name in STEPS if name not in of_one][part]
    if devices == 1:  # else TensorFlow cannot run replicas of a worker together, of which an error tells
        names += of_one
    if run_eagerly:
        names = [name for name in names if name != "an unknown rank"]
    one = _alone(_steps, names)
    several = workers(world_size, logical_cpus=devices).run(_steps, names, devices, run_eagerly)
    for name in names:
        weights, logs, said = several[0][name]
        assert bool(said) == (run_eagerly or not STEPS[name][1]), (name, said)
        for got, wanted in zip([*weights, *logs], [*one[name][0], *one[name][1]], strict=True):
            assert got.shape == wanted.shape, name
            if got.dtype.kind in "OS":
                assert got.tolist() == wanted.tolist(), name
            else:
                np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5, err_msg=name)
        for other in several[1:]:
            for got, wanted in zip([*other[name][0], *other[name][1]], [*weights, *logs], strict=True):
                np.testing.assert_array_equal(got, wanted, err_msg=name)


# What becomes of gradients of a layer on sparse rows, each with whether the step is divided.
CHANGES = {
    "nothing": (lambda gradients: gradients, True),
    "halves": (lambda gradients: [0.5 * tf.convert_to_tensor(g) for g in gradients], True),
    "signs": (lambda gradients: [tf.sign(tf.convert_to_tensor(g)) for g in gradients], False),
    "whole numbers": (
        lambda gradients: [tf.cast(tf.cast(8.0 * tf.convert_to_tensor(g), tf.int32), tf.float32) for g in gradients],
        False,
    ),
    "clipped": (lambda gradients: [tf.clip_by_value(tf.convert_to_tensor(g), -0.3, 0.3) for g in gradients], False),
    "normalized": (lambda gradients: [g / tf.norm(g) for g in map(tf.convert_to_tensor, gradients)], False),
}


def _changed(devices=1):
    """Returns weights of a layer on sparse rows whose gradients a step changes, and what was logged."""
    x, y = _data()
    rows = tf.sparse.from_dense(np.where(np.abs(x) > 0.7, x, 0))
    data = tf.data.Dataset.from_tensor_slices((rows, y)).batch(BATCH)
    found = {}
    for name, (change, _) in CHANGES.items():
        with _logged() as texts:
            with harness.strategy(devices=[f"CPU:{i}" for i in range(devices)]).scope():
                model = FreeStep(lambda m, x, y, change=change: {"loss": m.update(x, y, change)[0]})
                model.compile(keras.optimizers.SGD(0.05))
            model.fit(data, epochs=2, verbose=0)
        found[name] = [v.numpy() for v in model.weights], _of_whole_batch(texts)
    return found


@pytest.mark.parametrize(("world_size", "devices"), _usual_and_long((3, 1), (2, 1)))
def test_gradients_of_sparse_rows_that_a_step_changes(world_size, devices):
    one = _alone(_changed)
    several = workers(world_size, logical_cpus=devices).run(_changed, devices)
    for name, (_, is_divided) in CHANGES.items():
        assert bool(several[0][name][1]) != is_divided, (name, several[0][name][1])
        for found in several:
            for got, wanted in zip(found[name][0], one[name][0], strict=True):
                np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5, err_msg=name)


def _of_batch(user, item, ids):
    logits = tf.matmul(user, item(ids), transpose_b=True)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(tf.range(tf.shape(logits)[0]), logits))


def _of_kept(user, item, ids):
    keep = ids % 2 == 1
    return _of_batch(tf.boolean_mask(user, keep), item, tf.boolean_mask(ids, keep))


def _of_sampled(user, item, ids):
    """Negatives that all rows share, beside a row's own positive."""
    positive = tf.reduce_sum(user * item(ids), 1, keepdims=True)
    negatives = tf.matmul(user, item(tf.constant([3, 1, 4, 1, 5])), transpose_b=True)
    return -tf.reduce_mean(tf.nn.log_softmax(tf.concat([positive, negatives], 1))[:, 0])


def _of_earlier_rows(user, item, ids):
    """Gradients of all rows, of two lookups."""
    first, second = item(ids), item((ids + 1) % 9)
    return tf.reduce_mean(tf.cumsum(first, 0) * user) + tf.reduce_mean(tf.cumsum(second, 0) ** 2)


def _of_hardest(user, item, ids):
    """Pairs of rows, of which there is a largest, and three lookups."""
    anchors, others = item(ids), item((ids * 2) % 9)
    pairs = tf.matmul(anchors, others, transpose_b=True) - 1e3 * tf.eye(tf.shape(ids)[0])
    return tf.reduce_mean(tf.reduce_max(pairs, 1) - tf.reduce_sum(user * item((ids + 4) % 9), 1))


class SharedTable(keras.Model):
    """Two towers of one table, which is looked up for the rows of the batch and for what rows are compared with."""

    def __init__(self, loss):
        super().__init__()
        self.item = keras.layers.Embedding(9, 4, embeddings_initializer=keras.initializers.RandomUniform(-1, 1, seed=1))
        self.user = keras.layers.Dense(4, kernel_initializer=keras.initializers.GlorotUniform(seed=2))
        self.user.build((None, 4))
        self.of_towers = loss

    def train_step(self, data):
        history, ids = data
        with tf.GradientTape() as tape:
            loss = self.of_towers(self.user(tf.reduce_mean(self.item(history), 1)), self.item, ids)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"of towers": loss}


class ChangesRows(SharedTable):
    """Two lookups, whose rows of gradients the step reverses twice: a replica needs those of all for it."""

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = _of_earlier_rows(tf.ones([1, 4]), self.item, data[1])
        [rows] = tape.gradient(loss, self.item.trainable_variables)
        rows = tf.IndexedSlices(tf.reverse(tf.reverse(rows.values, [0]), [0]), rows.indices, rows.dense_shape)
        self.optimizer.apply([rows], self.item.trainable_variables)
        return {"of towers": loss}


def _fit_towers(devices=1):
    strategy = harness.strategy(devices=[f"CPU:{i}" for i in range(devices)])
    random, found = np.random.default_rng(8), {}
    history, ids = (random.zipf(1.6, shape) % 9 for shape in ((ROWS, 3), ROWS))
    losses = (_of_batch, _of_kept, _of_sampled, _of_earlier_rows, _of_hardest)
    for make, loss in [*((SharedTable, loss) for loss in losses), (ChangesRows, None)]:
        with _logged() as texts, strategy.scope():
            model = make(loss)
            model.item.build(None)
            model.compile(keras.optimizers.Adagrad(0.1))
            logs = model.fit(history, ids, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
        found[make.__name__, loss] = [*logs["of towers"], *model.get_weights()], texts
    return found


@pytest.mark.parametrize(("world_size", "devices"), _usual_and_long((3, 1), (2, 2), (2, 1)))
def test_a_table_that_is_looked_up_for_rows_and_for_the_whole_batch(world_size, devices):
    """Gradients of a replica's own rows and parts of those of all rows go to one table."""
    one, several = _alone(_fit_towers), workers(world_size, logical_cpus=devices).run(_fit_towers, devices)[0]
    for name, (wanted, _) in one.items():
        got, texts = several[name]
        assert texts == [], name
        for value, other in zip(got, wanted, strict=True):
            np.testing.assert_allclose(value, other, rtol=1e-5, atol=1e-5, err_msg=str(name))


class LargestOutside(keras.metrics.Metric):
    """A metric, and a loss, whose state is a variable of TensorFlow's."""

    def __init__(self):
        super().__init__(name="largest")
        self.largest = tf.Variable(0.0, trainable=False)

    def update_state(self, y, p, sample_weight=None):
        self.largest.assign(tf.maximum(self.largest, tf.reduce_max(tf.abs(y))))

    def result(self):
        return self.largest * 1.0

    def reset_state(self):
        self.largest.assign(0.0)


class OverMoving(keras.losses.Loss):
    def __init__(self):
        super().__init__()
        self.moving, self.queue = (tf.Variable(tf.ones(shape), trainable=False) for shape in ((), (4,)))

    def call(self, y, p):
        self.moving.assign(0.5 * self.moving + 0.5 * tf.reduce_mean(tf.abs(y)))
        self.queue.assign(tf.concat([y[:2, 0], self.queue], 0)[:4])
        return tf.square(p - y) / self.moving + tf.reduce_mean(tf.square(self.queue))


def _fit_outside(devices=1):
    """What is made outside of the scope, and written by a step."""
    strategy = harness.strategy(devices=[f"CPU:{i}" for i in range(devices)])
    x, y = _data()
    loss, largest = OverMoving(), LargestOutside()
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(keras.optimizers.SGD(0.05), loss, metrics=[largest])
    logs = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
    return [*logs["loss"], *logs["largest"], loss.moving.numpy(), loss.queue.numpy(), *model.get_weights()]


@pytest.mark.parametrize(("world_size", "devices"), _usual_and_long((3, 1), (2, 1)))
def test_variables_that_are_made_outside_of_the_scope_are_those_of_one_process(world_size, devices):
    one = _alone(_fit_outside)
    for found in workers(world_size, logical_cpus=devices).run(_fit_outside, devices):
        for got, wanted in zip(found, one, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


class BuiltByTheStep(OneLayer):
    """A layer and a metric that have no variables before the first step, and a variable that begins with its rows."""

    def __init__(self):
        super().__init__(LOSSES["log"])
        self.first, self.score = keras.layers.Dense(6, kernel_initializer="ones"), keras.metrics.R2Score()
        self.begun = None

    def build(self, input_shape):
        """Builds nothing."""

    def call(self, x):
        return self.dense(self.first(x))

    def train_step(self, data):
        if self.begun is None:
            mean = tf.VariableAggregation.MEAN
            self.begun = tf.Variable(lambda: tf.reduce_mean(tf.abs(data[0])), trainable=False, aggregation=mean)
        logs = super().train_step(data)
        self.score.update_state(data[1], self(data[0]))
        return {**logs, "score": self.score.result(), "begun": tf.identity(self.begun)}


class Sharded(OneLayer):
    """Layers whose weights are sharded, which look up rows of ids and of the whole table."""

    def __init__(self):
        negatives = LOSSES["in-batch negatives"]
        super().__init__(lambda m, x, y: negatives(m, x, y) + tf.reduce_mean(m.table(tf.range(9)) ** 2))
        self.table = tfring.layers.ShardedEmbedding(9, 4, embeddings_initializer="glorot_uniform")
        self.sharded = tfring.layers.ShardedDense(3, split="columns", kernel_regularizer="l2")

    def call(self, x):
        rows = self.sharded(self.table(tf.cast(tf.abs(x) * 7.0, tf.int32) % 9))
        return self.dense(tf.math.l2_normalize(tf.reduce_sum(rows, 1), 1)) + tf.add_n(self.sharded.losses)


def _other_models(model=1):
    """Returns predictions, weights and logs of models on a mesh, whose rows are divided."""
    strategy = harness.strategy(mesh=tfring.Mesh(model=model))
    x, y = _data()
    found = []
    for kind in (BuiltByTheStep, Sharded):
        keras.utils.set_random_seed(3)
        with _logged() as texts:
            with strategy.scope():
                model = kind()
                model.compile(keras.optimizers.SGD(0.05))
            history = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
            found.append(model.predict(x, batch_size=BATCH, verbose=0))
        assert _of_whole_batch(texts) == []
        found += [*model.get_weights(), *(np.ravel(value) for values in history.values() for value in values)]
    return found


class Teacher(OneLayer):
    """A layer that the step alone calls, which is no layer of the model before."""

    def __init__(self):
        super().__init__(self.of_teacher)
        self.teacher = keras.layers.Dense(1, kernel_initializer="ones", trainable=False)

    def of_teacher(self, _, x, y):
        target = self.teacher(x)
        return tf.reduce_mean((self.dense(x) - y - tf.reduce_mean(target)) ** 2)


def _of_teacher(devices=1):
    strategy = harness.strategy(devices=[f"CPU:{i}" for i in range(devices)])
    x, y = _data()
    with strategy.scope():
        model = Teacher()
        model.compile(keras.optimizers.SGD(0.05))
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    return model.get_weights()


def test_a_layer_that_a_step_builds_on_several_replicas_of_a_worker():
    """Copies of a variable are initialized before the step runs, those of other replicas, too."""
    one, several = _alone(_of_teacher), workers(2, logical_cpus=2).run(_of_teacher, 2)[0]
    for got, wanted in zip(several, one, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("world_size", "model"), [(2, 1), (4, 2)])
def test_layers_that_a_step_builds_and_sharded_ones(world_size, model):
    one, several = _alone(_other_models), workers(world_size).run(_other_models, model)[0]
    for got, wanted in zip(several, one, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


def _fixed(names):
    """Returns the weights of models trained on batches of a fixed size, and what was logged of whole batches."""
    strategy = harness.strategy()
    x, y = _data()
    rows = tf.data.Dataset.from_tensor_slices((x, y)).batch(7, drop_remainder=True)
    found = {}
    for name in names:
        with _logged() as texts:
            with strategy.scope():
                model = OneLayer(LOSSES.get(name, _by_static_rows))
                model.compile(keras.optimizers.SGD(0.05))
            if name in LOSSES:
                model.fit(rows, epochs=2, verbose=0)
            model.train_on_batch(x[:9], y[:9])
        found[name] = [v.numpy() for v in model.weights], _of_whole_batch(texts)
    return found


def _by_static_rows(m, x, y):
    """The mean by the number of rows, which is known before the step runs."""
    return tf.reduce_sum(_error(m, x, y) ** 2) / (1.0 * x.shape[0])


def test_batches_of_a_fixed_size():
    """Shares of four and three rows, of five and four; a step that takes their number for static has that of all."""
    names = ["sum over the global batch", "kept rows", "negatives both ways", "minibatch", "static rows"]
    one, several = _alone(_fixed, names), workers(2).run(_fixed, names)[0]
    for name in names:
        assert one[name][1] == [], name
        assert bool(several[name][1]) == (name == "static rows"), (name, several[name][1])
        for got, wanted in zip(several[name][0], one[name][0], strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5, err_msg=name)


def _beside_a_metric(m, x, y):
    """Adds a part of the batch to a metric's state, of which replicas hold parts until it is read."""
    return tf.math.log(tf.reduce_mean(_error(m, x, y) ** 2)) * (m.tracker.total + tf.reduce_sum(y))


def _numbered(m, x, y):
    """Negatives of all replicas, among which each finds its own rows."""
    context = tf.distribute.get_replica_context()
    count = tf.shape(x)[0]
    begin = tf.reduce_sum(context.all_gather(count[None], 0)[: context.replica_id_in_sync_group])
    logits = tf.matmul(m(x), tfring.gather_for_loss(y), transpose_b=True)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(begin + tf.range(count), logits))


OTHERS = {"metric": _beside_a_metric, "numbered": _numbered}


def test_a_step_that_numbers_rows_by_replica_equals_one_process():
    one, several = _alone(_fit, "numbered")[0], workers(2).run(_fit, "numbered")[0][0]
    for got, wanted in zip(several, one, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


def _of_whole_batches():
    """Returns weights and logs of steps whose rows cannot be divided, and what was logged of them."""
    return *_fit("metric"), *_parts("ragged"), *_parts("sparse"), _several_steps()


def _parts(kind):
    """Returns weights and logs where components are ragged or sparse, strings and constants beside the rows."""
    strategy = harness.strategy()
    x, y = _data()
    dense = np.where(np.abs(x) > 0.7, x, 0)
    words = np.array([f"{'word' * (i % 3)}\xe9{i}" for i in range(ROWS)])
    ragged = tf.RaggedTensor.from_tensor(x).with_row_splits_dtype(tf.int64)
    ragged = tf.ragged.boolean_mask(ragged, np.abs(x) > 0.7)
    part = ragged if kind == "ragged" else tf.sparse.from_dense(dense)
    data = tf.data.Dataset.from_tensor_slices((part, words, y)).batch(BATCH)
    data = data.map(lambda part, words, y: ({"part": part, "words": words, "scale": tf.constant([2.0, 3.0, 4.0])}, y))
    with strategy.scope():
        model = OfParts()
        model.compile(keras.optimizers.SGD(0.05))
    history = model.fit(data, epochs=2, verbose=0).history
    return [v.numpy() for v in model.weights], [np.ravel(value) for values in history.values() for value in values]


class OfParts(OneLayer):
    """A loss over parts and strings of rows, which is a function of a mean."""

    def __init__(self):
        super().__init__(self.of_parts)
        self.dense.build((None, 6))

    def of_parts(self, _, x, y):
        dense = x["part"].to_tensor() if isinstance(x["part"], tf.RaggedTensor) else tf.sparse.to_dense(x["part"])
        lengths = tf.cast(tf.strings.length(x["words"], unit="UTF8_CHAR"), tf.float32)
        rows = tf.reduce_sum(dense, 1, keepdims=True) * x["scale"][1] + lengths[:, None]
        return tf.math.log(tf.reduce_mean((self.dense(tf.tile(rows, [1, 6])) - y) ** 2)) ** 2


def _several_steps():
    """Returns weights and metrics after steps that are executed together."""
    strategy = harness.strategy()
    x, y = _data()
    with strategy.scope():
        model = OneLayer(_beside_a_metric, None, lambda m, x, y: m.state.assign(tf.math.reduce_std(y)))
        model.compile(keras.optimizers.Adam(0.05), steps_per_execution=2)
    model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    return [v.numpy() for v in [*model.weights, *model.optimizer.variables]]


@pytest.mark.parametrize(("world_size", "devices"), _usual_and_long((3, 1), (2, 2), (2, 1), usual=2))
def test_a_step_whose_rows_cannot_be_divided_is_that_of_the_whole_batch(world_size, devices):
    one = _alone(_of_whole_batches)
    several = workers(world_size, logical_cpus=devices).run(_of_whole_batches)
    found, wanted = (tf.nest.flatten([*each[:2], *each[3:]]) for each in (several[0], one))
    for got, expected in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    for other in several[1:]:
        assert [w.tobytes() for w in tf.nest.flatten([other[0], other[-1]])] == [
            w.tobytes() for w in tf.nest.flatten([several[0][0], several[0][-1]])
        ]
        assert other[2] == []  # what is logged is logged on the first rank
    [text] = several[0][2]
    assert "each worker computes the whole batch" in text
    assert "It reaches the gradient of" in text and pathlib.Path(__file__).name in text
    assert one[2] == []


class Seen(keras.metrics.Metric):
    """Whether any target was as large."""

    def __init__(self):
        super().__init__(name="seen")
        self.any = self.add_variable(shape=(), initializer="zeros", dtype="bool", name="any")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.any.assign(tf.logical_or(self.any.value, tf.reduce_any(y_true > 1.9)))

    def result(self):
        return self.any


def _seen():
    """Returns what a boolean state of a metric is in logs, and read by the program afterwards."""
    x, y = _data()
    with harness.strategy().scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=[Seen()])
    logged = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history["seen"]
    [metric] = [m for m in model._compile_metrics.metrics if m.name == "seen"]
    return [bool(value) for value in logged], bool(tf.convert_to_tensor(metric.result())), bool((y > 1.9).any())


def test_a_boolean_state_of_a_metric():
    """The rows that are as large are one worker's."""
    assert workers(2).run(_seen) == [([True, True], True, True)] * 2


class Begun(keras.metrics.Metric):
    """The largest target or the sum of all, and a value with which the state begins."""

    def __init__(self, begin, is_reset, is_sum):
        super().__init__(name="begun")
        self.begin, self.is_reset, self.is_sum = begin, is_reset, is_sum
        self.total = self.add_variable(shape=(), initializer=keras.initializers.Constant(begin), name="total")

    def update_state(self, y_true, y_pred, sample_weight=None):
        both = self.total + tf.reduce_sum(y_true), tf.maximum(self.total, tf.reduce_max(y_true))
        self.total.assign(both[0] if self.is_sum else both[1])

    def result(self):
        return 1.0 * self.total

    def reset_state(self):
        if self.is_reset:
            self.total.assign(self.begin)


def _begun(devices=1):
    """Returns logs of metrics whose states begin with other values than zeros."""
    x, y = _data()
    found = []
    for begin, is_reset, is_sum in itertools.product((1.0, 100.0), (False, True), (False, True)):
        with harness.strategy(devices=[f"CPU:{i}" for i in range(devices)]).scope():
            model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse", metrics=[Begun(begin, is_reset, is_sum)])
        found.append(model.train_on_batch(x, y, return_dict=True)["begun"])
        found += model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history["begun"]
    return [float(value) for value in found]


@pytest.mark.parametrize(("world_size", "devices"), _usual_and_long((2, 2), (3, 1), (2, 1)))
def test_a_metrics_first_value_counts_once(world_size, devices):
    one, several = _alone(_begun), workers(world_size, logical_cpus=devices).run(_begun, devices)
    for found in several:
        np.testing.assert_allclose(found, one, rtol=1e-5, atol=1e-5)


def _begun_and_reset():
    """Returns logs of a metric whose state begins with 100, and is reset to zeros."""
    x, y = _data()
    found = []
    for call in ("fit", "train_on_batch", "evaluate"):
        with harness.strategy().scope():
            model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
            metric = Begun(100.0, False, True)
            metric.reset_state = lambda metric=metric: metric.total.assign(0.0)
            model.compile("sgd", "mse", metrics=[metric])
        if call == "evaluate":
            found.append(model.evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True)["begun"])
        elif call == "train_on_batch":
            found.append(model.train_on_batch(x, y, return_dict=True)["begun"])
        found += model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history["begun"]
    return [float(value) for value in found], float(y.sum())


def test_a_metric_is_first_reset_after_it_was_built_as_in_one_process():
    for found, total in workers(2).run(_begun_and_reset):
        first = 100.0 + total
        wanted = [first, total, first, total, total, first, total, total]
        np.testing.assert_allclose(found, wanted, rtol=1e-5)


# What `predict` returns of inputs `[rows, 6]`.
PREDICTIONS = {
    "of each row": lambda x: 2.0 * x,
    "scaled": lambda x: x / tf.reduce_max(x),
    "standardized": lambda x: (x - tf.reduce_mean(x, 0)) / (tf.math.reduce_std(x, 0) + 0.1),
    "products": lambda x: tf.reduce_sum(tf.matmul(x, x, transpose_b=True) ** 2, 1, keepdims=True),
    "softmax over rows": lambda x: tf.nn.softmax(x, axis=0),
    "ranks": lambda x: tf.argsort(tf.argsort(x[:, 0])),
    "sums": lambda x: {"a": tf.cumsum(x, 0), "b": x[:, :2]},
    "best rows": lambda x: tf.boolean_mask(x, x[:, 0] >= tf.reduce_mean(x[:, 0])),
    "means": lambda x: (x, tf.reduce_mean(x, 0)),
    "a number of each batch": lambda x: {"x": x, "largest": tf.reduce_max(x), "nan": tf.math.log(-tf.reduce_max(x))},
    "no rule": lambda x: tf.ensure_shape(tf.numpy_function(lambda v: v - v.max(), [x], tf.float32), [None, 6]),
    "entries at tiled numbers of rows": lambda x: tf.gather_nd(
        x, tf.stack([tf.tile(tf.range(tf.shape(x)[0])[:, None], [1, 2]), tf.tile([[1, 3]], [tf.shape(x)[0], 1])], -1)
    ),
    "functions of numbers of rows": lambda x: [f(_numbers(x)) for f in (tf.negative, tf.square, tf.sqrt, tf.abs)],
    "which ids there are": lambda x: (
        x[:, 0] + tf.cast(tf.reduce_sum(tf.math.bincount(_ids(x), None, 4, 4, binary_output=True)), tf.float32)
    ),
    "places of maxima": lambda x: tf.reshape(
        tf.nn.max_pool_with_argmax(_images(x), (2, 3), 1, "VALID", include_batch_in_index=True)[1], [-1]
    ),
    "numbers as they are": lambda x: tf.range(tf.shape(x)[0]),
    "contrast over the rows": lambda x: tf.image.adjust_contrast(tf.reshape(x, [-1, 2, 3]), 2.0),
    "inverse of a kernel": lambda x: tf.linalg.inv(tf.exp(-tf.reduce_sum((x[:, None] - x) ** 2, -1))) @ x,
    "the third of the rows": lambda x: x - tf.raw_ops.NthElement(input=x[:, 0], n=2),
    "quantized": lambda x: tf.quantization.quantize_and_dequantize_v2(x, 0.0, 0.0, num_bits=4, range_given=False),
    "rotated": lambda x: keras.ops.image.affine_transform(
        _images(x), tf.concat([x, tf.zeros_like(x[:, :2])], 1)
    ),
    "a table": lambda x: tf.gather(tf.math.unsorted_segment_sum(x, tf.cast(x[:, 0] > 0.0, tf.int32), 2), [1, 0, 1]),
    "zeros of some rows": lambda x: (tf.zeros_like(tf.sort(x, 0)[: tf.shape(x)[0] // 2 + 1]), x),
    "two views": lambda x: tf.concat([x, -x], 0),
    "three views": lambda x: (tf.tile(x, [3, 1]), tf.concat([x[:, :2], x[:, 2:4], tf.reverse(x[:, :2], [0])], 0)),
}


def _numbers(x):
    return tf.cast(tf.range(tf.shape(x)[0]), tf.float32)


def _images(x):
    return tf.reshape(x, [-1, 2, 3, 1])


def _ids(x):
    return tf.cast(x[:, 0] > 0.0, tf.int32) + 2 * tf.cast(x[:, 1] > 0.0, tf.int32)


def _spectrum(x):
    """Returns what no collective carries the parts of, so each worker computes it."""
    return tf.abs(tf.transpose(tf.signal.fft(tf.cast(tf.transpose(x), tf.complex64))))


class Returns(keras.Model):
    """Returns a function of its inputs."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, x):
        return self.function(x)


def _predictions(names, options, devices=1):
    """Returns what `predict` returns, and what was logged of whole batches."""
    strategy = harness.strategy(devices=[f"CPU:{i}" for i in range(devices)], **options.get("strategy", {}))
    x, _ = _data()
    callbacks = [keras.callbacks.LambdaCallback(on_predict_batch_end=lambda batch, logs: None)]
    found = {}
    for name in names:
        with _logged() as texts:
            with strategy.scope():
                model = Returns(PREDICTIONS.get(name, _spectrum))
                model.compile(**options.get("compile", {}))
            given = {"callbacks": callbacks} if options.get("callbacks") else {}
            outputs = model.predict(x, batch_size=BATCH, verbose=0, **given)
        found[name] = tf.nest.flatten(outputs), _of_whole_batch(texts)
    return found


@pytest.mark.parametrize(
    ("world_size", "devices", "options", "part"),
    _in_turn(
        (2, 1, {}),
        (2, 1, {"compile": {"steps_per_execution": 2}}),
        (3, 1, {"callbacks": True}),
        (3, 1, {"compile": {"run_eagerly": True}}),
        (2, 2, {}),
        (2, 2, {"callbacks": True, "compile": {"run_eagerly": True}}),
    ),
    ids=str,
)
def test_predictions_that_combine_rows_equal_one_process(world_size, devices, options, part):
    names = [*PREDICTIONS][part]
    if "steps_per_execution" in options.get("compile", {}):
        names = [name for name in names if name != "a number of each batch"]  # Keras does not concatenate these
    one = _alone(_predictions, names, {})
    several = workers(world_size, logical_cpus=devices).run(_predictions, names, options, devices)
    for name in names:
        outputs, said = several[0][name]
        assert said == [], name
        for got, wanted in zip(outputs, one[name][0], strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5, err_msg=name)
        for other in several[1:]:
            for got, wanted in zip(other[name][0], outputs, strict=True):
                np.testing.assert_array_equal(got, wanted, err_msg=name)


def _of_unknown_rank():
    x, _ = _data()
    with harness.strategy().scope():
        model = Returns(lambda x: tf.numpy_function(lambda v: 2.0 * v, [x], tf.float32))
        model.compile()
    with pytest.raises(tfring.errors.ConfigurationError, match=r"tensor of unknown rank.*set_shape"):
        model.predict(x, batch_size=BATCH, verbose=0)
    return True


def test_predictions_of_unknown_rank_are_refused():
    assert workers(2).run(_of_unknown_rank) == [True, True]


@pytest.mark.parametrize("devices", [1, 2])
def test_predictions_whose_rows_cannot_be_divided_are_those_of_the_whole_batch(devices):
    one, _ = _alone(_predictions, ["spectrum"], {})["spectrum"]
    several = workers(2, logical_cpus=devices).run(_predictions, ["spectrum"], {}, devices)
    assert len(several[0]["spectrum"][1]) == 1  # rank 0 says so
    for found in several:
        outputs, _ = found["spectrum"]
        np.testing.assert_allclose(outputs[0], one[0], rtol=1e-5, atol=1e-5)


class Centered(keras.layers.Layer):
    """Writes to its state in each call, also in `predict`."""

    def build(self, shape):
        self.mean = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False)
        self.rows = self.add_weight(shape=(), dtype="int64", initializer="zeros", trainable=False)
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)
        self.sums = tf.Variable(tf.zeros(shape[-1]), trainable=False)

    def call(self, x):
        self.mean.assign(0.9 * self.mean + 0.1 * keras.ops.mean(x, 0))
        self.rows.assign_add(keras.ops.cast(keras.ops.shape(x)[0], "int64"))
        self.calls.assign_add(1.0)
        self.sums.assign_add(tf.reduce_sum(x, 0))
        return x - self.mean


def _predict_and_write(has_strategy=True, devices=1, run_eagerly=False):
    """Returns predictions and the state that they leave, of three batches and one by itself."""
    strategy = harness.strategy(devices=[f"CPU:{i}" for i in range(devices)])
    with strategy.scope() if has_strategy else contextlib.nullcontext():
        model = keras.Sequential([keras.Input((6,)), Centered()])
        model.compile("sgd", "mse", run_eagerly=run_eagerly)
    x, _ = _data()
    found = [model.predict(x, batch_size=BATCH, verbose=0), model.predict_on_batch(x[:5])]
    return [*found, *model.get_weights(), model.layers[0].sums.numpy()]


@pytest.mark.parametrize(("world_size", "devices", "run_eagerly"), [(2, 1, False), (3, 2, False), (3, 1, True)])
def test_state_that_predict_writes(world_size, devices, run_eagerly):
    one = _alone(_predict_and_write, False)
    for several in workers(world_size, logical_cpus=devices).run(_predict_and_write, True, devices, run_eagerly):
        for got, wanted in zip(several, one, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


class EncoderAlone(keras.Model):
    """A model whose `call` uses one of the layers that its step trains, and another one."""

    def __init__(self, initializer):
        super().__init__()
        self.encoder = keras.layers.Dense(3, kernel_initializer=initializer)
        self.head = keras.layers.Dense(1, kernel_initializer=initializer)
        self.of_call = keras.layers.Dense(2, kernel_initializer=initializer)

    def call(self, x):
        return self.of_call(self.encoder(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self.head(self.encoder(x))
            loss = tf.reduce_mean((y_pred - tf.cast(y, y_pred.dtype)) ** 2)
        weights = self.trainable_variables
        scaled = [0.5 * gradient for gradient in tape.gradient(loss, weights)]
        self.optimizer.apply_gradients(zip(scaled, weights, strict=True))
        return {"loss": loss, **self.compute_metrics(x, y, y_pred)}


class MakesLayers(keras.layers.Layer):
    """A layer that makes its layers when it is built, with the names and of the dtype policy that one process has."""

    def __init__(self, initializer):
        super().__init__()
        self.initializer = initializer

    def build(self, shape):
        self.last = keras.layers.Dense(3, kernel_initializer=self.initializer)
        self.policy = self.add_weight(shape=(), initializer="zeros", trainable=False, name=self.last.compute_dtype)

    def call(self, x):
        return self.last(x)


class OfMadeLayers(EncoderAlone):
    """Its first layer makes others."""

    def __init__(self, initializer):
        super().__init__(initializer)
        self.encoder = MakesLayers(initializer)


class OfLatents(EncoderAlone):
    """A GAN, in which `call` makes rows of latent vectors: it does not take the rows that `fit` gets."""

    def call(self, x):
        tf.debugging.assert_equal(tf.shape(x)[1], 2)
        return self.encoder(x)


LEFT_TO_THE_STEP = {"encoder": EncoderAlone, "latents": OfLatents, "made": OfMadeLayers}


def _fit_what_the_step_builds(has_strategy=True, devices=1, run_eagerly=False):
    """Returns of each model its logs, and paths and values of its variables and of its optimizer's."""
    found = {}
    for name, kind in LEFT_TO_THE_STEP.items():
        keras.utils.clear_session()
        keras.config.set_dtype_policy("float64" if name == "made" else "float32")
        draws = np.random.default_rng(3)  # initial values have the order in which layers are built
        metrics = [keras.metrics.MeanAbsoluteError(name="mae")]  # which the step holds
        strategy = harness.strategy(devices=[f"CPU:{i}" for i in range(devices)])
        with strategy.scope() if has_strategy else contextlib.nullcontext():
            model = kind(lambda shape, dtype=None, draws=draws: tf.constant(draws.normal(size=shape), dtype))
            model.compile("adam", "mse", metrics=metrics, run_eagerly=run_eagerly)
        x, y = _data()
        fitted = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
        variables = [*model.variables, *model.optimizer.variables]
        found[name] = {**fitted.history, **{v.path: v.numpy() for v in variables}}
        keras.config.set_dtype_policy("float32")
    return found


@pytest.mark.parametrize(
    ("world_size", "devices", "run_eagerly"), [(2, 1, False), (3, 1, False), (2, 2, False), (2, 1, True)]
)
def test_what_is_left_to_the_step_is_built_as_in_one_process(world_size, devices, run_eagerly):
    """Weights of the layers that it calls, in their order, and under the paths that they have there."""
    one = _alone(_fit_what_the_step_builds, False, 1, run_eagerly)
    for several in workers(world_size, logical_cpus=devices).run(_fit_what_the_step_builds, True, devices, run_eagerly):
        for name, wanted in one.items():
            assert list(several[name]) == list(wanted)
            for part, value in wanted.items():
                np.testing.assert_allclose(several[name][part], value, rtol=1e-5, atol=1e-5, err_msg=f"{name}: {part}")


class ReadAsOne(OneLayer):
    """Writes variables of TensorFlow's of which each replica holds a part, or a value of its own."""

    def __init__(self):
        super().__init__(lambda m, x, y: tf.reduce_mean((m(x) - y) ** 2))
        how, on_read = tf.VariableAggregation, tf.VariableSynchronization.ON_READ
        made = {"added": how.SUM, "counted": how.SUM, "steps": how.SUM, "assigned": how.SUM, "means": how.MEAN}
        self.held = {
            name: tf.Variable(4.0, trainable=False, synchronization=on_read, aggregation=aggregation)
            for name, aggregation in {**made, "first": how.ONLY_FIRST_REPLICA}.items()
        }

    def train_step(self, data):
        x, _ = data
        self.held["added"].assign_add(tf.reduce_sum(x))
        self.held["counted"].assign_sub(tf.cast(tf.shape(x)[0], tf.float32))
        self.held["steps"].assign_add(1.0)
        self.held["assigned"].assign(tf.reduce_sum(x**2))
        self.held["means"].assign_add(tf.reduce_mean(x))
        self.held["first"].assign(tf.reduce_max(x))
        return super().train_step(data)


def _fit_read_as_one(has_strategy=True, devices=1, run_eagerly=False):
    strategy = harness.strategy(devices=[f"CPU:{i}" for i in range(devices)])
    with strategy.scope() if has_strategy else contextlib.nullcontext():
        model = ReadAsOne()
        model.compile("sgd", run_eagerly=run_eagerly)
    x, y = (values[:18] for values in _data())  # the last batch has two rows
    model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    with strategy.scope() if has_strategy else contextlib.nullcontext():
        values = {name: float(tf.convert_to_tensor(variable)) for name, variable in model.held.items()}
        steps = model.optimizer.iterations.value  # which all replicas hold
        return {**values, "steps so far": int(steps) + float(steps) + np.asarray(steps).sum()}


@pytest.mark.parametrize(("world_size", "devices", "run_eagerly"), [(3, 1, False), (2, 2, False), (3, 1, True)])
def test_variables_that_are_read_as_one(world_size, devices, run_eagerly):
    one = _alone(_fit_read_as_one, False)
    for several in workers(world_size, logical_cpus=devices).run(_fit_read_as_one, True, devices, run_eagerly):
        assert several == pytest.approx(one, rel=1e-5, abs=1e-5)


class UpdatedInPart(OneLayer):
    """A step that updates some weights, in another order than the model has them; `call` builds all layers or not."""

    def __init__(self, builds_all):
        super().__init__(lambda m, x, y: tf.reduce_mean((m(x) - y) ** 2))
        self.builds_all = builds_all
        self.last = keras.layers.Dense(1, kernel_initializer="ones", name="last")

    def call(self, x):
        return self.last(self.dense(self.adds(x) if self.builds_all else x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(self, x, y)
        updated = [*self.last.trainable_variables[::-1], self.dense.kernel]
        self.optimizer.apply(tape.gradient(loss, updated), updated)
        return {"loss": loss}


def _slots(devices, builds_all):
    """Returns the names of an optimizer's variables, in their order, and how often the step was traced."""
    traced = []
    with harness.strategy(devices=[f"CPU:{i}" for i in range(devices)]).scope():
        model = UpdatedInPart(builds_all)
        loss_of = model.loss_of
        model.loss_of = lambda *args: traced.append(1) or loss_of(*args)
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9))
    x, y = _data()
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    return [v.path.split("/")[-1] for v in model.optimizer.variables], len(traced)


@pytest.mark.parametrize(("devices", "builds_all"), [(1, True), (1, False), (2, True)])
def test_an_optimizer_is_built_for_the_weights_that_a_step_updates(devices, builds_all):
    """As Keras builds it in one process: files hold its variables by their number."""
    for names, traced in workers(2, logical_cpus=devices).run(_slots, devices, builds_all):
        slots = [f"updated_in_part_{weight}_momentum" for weight in ("last_bias", "last_kernel", "dense_kernel")]
        assert names == ["iteration", "learning_rate", *slots], names
        assert traced == 2 * devices  # the second time with all variables made, as TensorFlow does


class ScalesItsLoss(keras.Model):
    """A step whose Python looks at what it has made before: an optimizer that scales the loss, a variable."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1, kernel_initializer="ones")
        self.shift = None
        self.traced = 0

    def call(self, x):
        if self.shift is None:
            self.shift = tf.Variable(tf.zeros([6]), trainable=False)
            self.shift.assign(tf.reduce_mean(x, 0))  # of the first trace alone
        return self.dense(x - self.shift)

    def train_step(self, data):
        self.traced += 1
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x) - y) ** 2) * (2.0 if self.optimizer.built else 1.0)
            scaled = self.optimizer.scale_loss(loss)
        self.optimizer.apply(tape.gradient(scaled, self.trainable_variables), self.trainable_variables)
        return {"loss": loss, "scaled": scaled}


def _fit_what_it_has_made(has_strategy=True):
    with harness.strategy().scope() if has_strategy else contextlib.nullcontext():
        model = ScalesItsLoss()
        model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05), dynamic_growth_steps=2))
    x, y = _data()
    history = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
    logs = [np.array(history[name]) for name in ("loss", "scaled")]
    return [*logs, model.shift.numpy(), *model.get_weights()], model.traced


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_step_that_makes_variables_is_traced_again(world_size):
    one, traced = _alone(_fit_what_it_has_made, False)
    for several, also_traced in workers(world_size).run(_fit_what_it_has_made):
        assert also_traced == traced == 2
        for got, wanted in zip(several, one, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


class MadeInCall(keras.layers.Layer):
    """A variable of TensorFlow's that the first `call` makes, and each adds the mean of its rows to."""

    seen = None

    def call(self, x):
        if self.seen is None:
            self.seen = tf.Variable(1.0 + tf.random.stateless_uniform([6], [1, 2]), trainable=False)
        self.seen.assign_add(tf.reduce_mean(x, 0))
        return x * self.seen


def _fit_what_call_makes(devices):
    with harness.strategy(devices=[f"CPU:{i}" for i in range(devices)]).scope():
        made = MadeInCall()
        model = keras.Sequential([made, keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile(keras.optimizers.SGD(0.05), "mse")
    x, y = _data()
    history = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
    predictions = model.predict(x, batch_size=BATCH, verbose=0)
    return [history["loss"], made.seen.numpy(), predictions, *model.get_weights()]


@pytest.mark.parametrize("devices", [1, 2])
def test_a_variable_that_the_first_call_makes(devices):
    one = _alone(_fit_what_call_makes, 1)
    assert np.all(one[1] != 1.0)
    for several in workers(2, logical_cpus=devices).run(_fit_what_call_makes, devices):
        for got, wanted in zip(several, one, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


def _draw_of_a_seed(devices):
    """Predictions that differ by row by numbers that TensorFlow draws of a seed."""
    with harness.strategy(devices=[f"CPU:{i}" for i in range(devices)]).scope():
        model = Returns(lambda x: x + tf.random.normal(tf.shape(x), seed=5))
    keras.utils.set_random_seed(1)
    return model.predict(np.zeros([7, 2], "float32"), batch_size=7, verbose=0)


@pytest.mark.parametrize("devices", [1, 2])
def test_what_tensorflow_draws_of_a_seed_is_drawn_for_all_rows(devices):
    one = _alone(_draw_of_a_seed, 1)
    for several in workers(2, logical_cpus=devices).run(_draw_of_a_seed, devices):
        np.testing.assert_array_equal(several, one)


class Draws(keras.Model):
    """A step that returns a number that TensorFlow draws of a seed."""

    def train_step(self, data):
        return {"drawn": tf.random.uniform((), seed=3)}


def _drawn_in_executions(has_strategy):
    with harness.strategy().scope() if has_strategy else contextlib.nullcontext():
        model = Draws()
        model.compile("sgd", "mse", steps_per_execution=3, jit_compile=False)
    drawn = []
    callback = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: drawn.append(logs["drawn"]))
    keras.utils.set_random_seed(1)
    model.fit(*_data(), batch_size=4, epochs=2, verbose=0, callbacks=[callback])
    return [float(number) for number in drawn]


def test_steps_of_one_execution_draw_of_a_seed_as_in_one_process():
    plain = _alone(_drawn_in_executions, False)
    assert len(set(plain)) == 4
    for world_size in (1, 2):
        assert workers(world_size).run(_drawn_in_executions, True) == [plain] * world_size


class Forward(keras.Model):
    """A step with derivatives in forward mode, which it may differentiate once more."""

    def __init__(self, is_differentiated):
        super().__init__()
        self.net = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
        self.is_differentiated = is_differentiated

    def call(self, x):
        return self.net(x)

    def train_step(self, data):
        x, y = data
        weights = self.trainable_variables
        with tf.GradientTape() as tape:
            with tf.autodiff.ForwardAccumulator([w.value for w in weights], [tf.ones(w.shape) for w in weights]) as acc:
                loss = tf.reduce_mean((self.net(x) - y) ** 2)
            slope = acc.jvp(loss)
            total = loss + 0.1 * slope**2 if self.is_differentiated else loss
        self.optimizer.apply(tape.gradient(total, weights), weights)
        return {"loss": loss, "slope": slope}


def _fit_forward():
    strategy = harness.strategy()
    found = []
    with _logged() as texts:
        for is_differentiated in (False, True, False):  # TensorFlow keeps functions of forward derivatives
            keras.utils.set_random_seed(1)
            with strategy.scope():
                model = Forward(is_differentiated)
                model.compile("sgd")
            history = model.fit(*_data(), batch_size=BATCH, shuffle=False, verbose=0).history
            found += [history["loss"], history["slope"], *model.get_weights()]
    return found, texts


def test_derivatives_in_forward_mode():
    one, _ = _alone(_fit_forward)
    for several, texts in workers(2).run(_fit_forward):
        assert texts == []
        for got, wanted in zip(several, one, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


def test_steps_and_predictions_are_edited_on_the_runtime_of_tensorflow():
    names = ["scaled", "standardized", "softmax over rows"]
    one = _alone(_predictions, names, {})
    for found in workers(2, communication="tensorflow").run(_predictions, names, {}):
        for name in names:
            assert found[name][1] == [], name
            np.testing.assert_allclose(found[name][0], one[name][0], rtol=1e-5, atol=1e-5, err_msg=name)
    names = ["ratio", "standardized", "in-batch negatives", "reduced by itself", "clipped together", "spread"]
    one, several = _alone(_all, names), workers(2, communication="tensorflow").run(_all, names)[0]
    for name in names:
        assert several[name][2] == [], name
        for got, wanted in zip(tf.nest.flatten(several[name][:2]), tf.nest.flatten(one[name][:2]), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5, err_msg=name)


def _effects(folder, devices=1):
    """Returns what Python functions in a step were given, what was printed, and what written for TensorBoard."""
    strategy = harness.strategy(devices=[f"CPU:{i}" for i in range(devices)])
    x, y = _data()
    folder = pathlib.Path(folder, str(strategy.rank))
    writer = tf.summary.create_file_writer(str(folder / "events"))
    losses, rows = [], []

    def write(model, x, y):
        loss = tf.reduce_mean(_error(model, x, y) ** 2)
        tf.debugging.assert_greater(tf.abs(y), 0.0)
        tf.debugging.assert_greater(tf.reduce_sum(tf.ones_like(y)), 2.5)  # of the last batch's three rows, too
        tf.py_function(lambda value: losses.append(value.numpy()), [loss], [])
        tf.numpy_function(lambda values: rows.append(values.copy()), [y], [])
        tf.print(tf.reduce_max(y), output_stream=f"file://{folder / 'printed'}")
        with writer.as_default(step=model.optimizer.iterations):
            tf.cond(loss > 0.0, lambda: tf.summary.scalar("loss", loss), lambda: False)
            tf.summary.histogram("rows", y)

    with strategy.scope():
        model = OneLayer(LOSSES["mean"], None, write)
        model.compile(keras.optimizers.SGD(0.05))
    model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    writer.flush()
    [events] = (folder / "events").iterdir()
    written = [value for event in tf.compat.v1.train.summary_iterator(str(events)) for value in event.summary.value]
    printed = [float(line) for line in (folder / "printed").read_text().splitlines()]
    return losses, rows, printed, [tf.make_ndarray(value.tensor) for value in written]


@pytest.mark.parametrize(("world_size", "devices"), _usual_and_long((3, 1), (2, 2), (2, 1), usual=2))
def test_what_a_step_does_besides_is_what_one_process_does(world_size, devices, tmp_path):
    """Each replica does it with the loss and the rows of all."""
    *effects, written = _alone(_effects, str(tmp_path / "one"))
    several = workers(world_size, logical_cpus=devices).run(_effects, str(tmp_path / "several"), devices)
    for rank, found in enumerate(several):
        of_replicas = [[each for each in effect for _ in range(devices)] for effect in effects]
        wanted = tf.nest.flatten([*of_replicas, [] if rank else written])  # the first replica writes summaries
        assert len(tf.nest.flatten(found)) == len(wanted)
        for got, expected in zip(tf.nest.flatten(found), wanted, strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def _by_strings():
    """Returns how many strings of rows a step has put into a table, and what was logged of steps of the whole batch."""
    strategy = harness.strategy()
    x, y = _data()
    table = tf.lookup.experimental.MutableHashTable(tf.string, tf.float32, 0.0)
    with _logged() as texts:
        with strategy.scope():
            model = OneLayer(LOSSES["mean"], None, lambda m, x, y: table.insert(tf.strings.as_string(y[:, 0]), y[:, 0]))
            model.compile(keras.optimizers.SGD(0.05))
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    return table.size().numpy(), _of_whole_batch(texts)


def test_what_a_step_does_with_strings_of_rows_is_that_of_the_whole_batch():
    """Replicas do not exchange strings."""
    (size, [text]), (other, _) = workers(2).run(_by_strings)
    assert size == other == ROWS
    assert "It reaches what the step writes or prints" in text and "LookupTableInsertV2" in text


def _by_texts():
    """Returns results of models that vectorize texts, and what was logged of steps of the whole batch."""
    ring = harness.strategy(**devices())
    x, y = _data()
    words = [np.argsort(row)[: 1 + int(3 * abs(row[0]))] for row in x]
    texts = tf.constant([" ".join("abcdef"[j] * (1 + j) for j in row) for row in words])
    found = {}
    with _logged() as logged:
        for name, options in {
            "to the longest": {},
            "of a length": {"output_sequence_length": 3, "split": "character"},
            "of pairs": {"ngrams": 2, "standardize": None},
        }.items():

            def make(options=options):
                vectorize = keras.layers.TextVectorization(**options)
                vectorize.adapt(texts)
                row = keras.Input((), dtype="string")
                words = 0.1 + keras.layers.Embedding(40, 3)(vectorize(row))  # padding counts
                outputs = keras.layers.Dense(1)(keras.layers.GlobalAveragePooling1D()(words))
                model = keras.Model(row, outputs)
                model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
                return model

            found[name] = train_both(ring, make, texts, y, batch_size=ROWS - 2, evaluate=(texts, y), predict=texts)
    return found, _of_whole_batch(logged)


@pytest.mark.parametrize(("n", "logical_cpus"), [(3, 1), (2, 2)])
def test_layers_that_vectorize_texts_are_divided(n, logical_cpus):
    results = workers(n, logical_cpus=logical_cpus).run(_by_texts)
    assert_equal([found for found, _ in results])
    assert not any(texts for _, texts in results), results


def _draws(run_eagerly, batch_size):
    """Returns states that are drawn in each step, by TensorFlow and by Keras."""
    strategy = harness.strategy()
    x, y = _data()
    tf.random.set_seed(3 + strategy.rank)

    states = []
    for draw in (lambda model: tf.random.normal([]), lambda model: keras.random.normal([], seed=model.seeds)):
        with strategy.scope():
            model = OneLayer(LOSSES["mean"], None, lambda m, x, y, draw=draw: m.state.assign(draw(m)))
            model.seeds = keras.random.SeedGenerator(1)
            model.compile(keras.optimizers.SGD(0.05), run_eagerly=run_eagerly)
        model.fit(x, y, batch_size=batch_size, verbose=0)
        states.append(model.state.numpy())
    return states


@pytest.mark.parametrize("batch_size", [BATCH, ROWS - 2])  # of the last two rows the first of three replicas has none
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_what_is_drawn_for_all_rows_is_the_same_on_all_ranks(run_eagerly, batch_size):
    _, one = _alone(_draws, run_eagerly, batch_size)
    several = workers(3).run(_draws, run_eagerly, batch_size)
    for drawn in zip(*several, strict=True):
        assert len(set(drawn)) == 1 and drawn[0] != 0.0
    assert several[0][1] == one


def _of_random_layers(random):
    """Returns weights and losses of models whose layers draw for each row."""
    strategy = harness.strategy(random=random)
    x, y = _data()
    layers = keras.layers
    keras.utils.set_random_seed(9)
    found = []
    for layer in (
        layers.Dropout(0.5),
        layers.GaussianNoise(0.3),
        layers.SpatialDropout1D(0.4),
        layers.LSTM(4, dropout=0.3, recurrent_dropout=0.2),
    ):
        with strategy.scope():
            between = [layers.Dense(12, "tanh"), layers.Reshape((3, 4)), layer, layers.Flatten(), layers.Dense(1)]
            model = keras.Sequential([layers.Input((6,)), *between])
            model.compile(keras.optimizers.SGD(0.05), "mse")
        start = model.get_weights()
        history = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
        found += [*start, *model.get_weights(), np.array(history["loss"])]
    return found


def test_random_layers_draw_as_one_process_where_that_is_asked_for():
    """Dropout, noise, dropout of an axis, and dropout in a recurrent layer."""
    one = _alone(_of_random_layers, "replica")
    several = workers(3).run(_of_random_layers, "global")[0]
    for got, wanted in zip(several, one, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
    other = workers(3).run(_of_random_layers, "replica")[0]
    assert max(np.max(np.abs(got - wanted)) for got, wanted in zip(other, one, strict=True)) > 1e-3


def _of_layers_on_parts(kind):
    """Returns weights and logs of Keras' layers on sparse or ragged rows, and what was logged."""
    strategy = harness.strategy()
    x, y = _data()
    keras.utils.set_random_seed(3)
    with _logged() as texts:
        with strategy.scope():
            if kind == "sparse":
                rows = tf.sparse.from_dense(x * (x > 0))
                inputs = keras.Input((6,), sparse=True)
                h = keras.layers.Dense(3, "tanh")(inputs)
            else:
                rows = tf.RaggedTensor.from_row_lengths(np.arange(3 * ROWS) % 9, [3] * ROWS)
                inputs = keras.Input((None,), dtype="int64", ragged=True)
                h = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(9, 4)(inputs))
            model = keras.Model(inputs, keras.layers.Dense(1)(h))
            model.compile(keras.optimizers.SGD(0.05), lambda y, p: tf.reduce_sum((y - p) ** 2) / tf.reduce_sum(y**2))
        start, data = model.get_weights(), tf.data.Dataset.from_tensor_slices((rows, y)).batch(BATCH)
        losses = model.fit(data, epochs=2, verbose=0).history["loss"]
    return [*start, *model.get_weights(), np.array(losses)], _of_whole_batch(texts)


@pytest.mark.parametrize("kind", ["sparse", "ragged"])
def test_layers_of_keras_on_sparse_and_ragged_rows_are_divided(kind):
    one, several = _alone(_of_layers_on_parts, kind), workers(3).run(_of_layers_on_parts, kind)[0]
    assert several[1] == []
    for got, wanted in zip(several[0], one[0], strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


def _plain(kind):
    """Returns what is logged of a fit, an evaluate and a predict of a model as people build it."""
    strategy = harness.strategy()
    random = np.random.default_rng(2)
    layers = keras.layers
    ids = random.integers(0, 9, size=(ROWS, 5))
    images = random.normal(size=(ROWS, 8, 8, 3)).astype("float32")
    classes = random.integers(0, 3, ROWS)
    with _logged() as texts:
        with strategy.scope():
            match kind:
                case "images":
                    parts = [
                        *(layers.Input((8, 8, 3)), layers.Conv2D(4, 3), layers.BatchNormalization(), layers.ReLU()),
                        *(tfring.layers.SyncBatchNormalization(), layers.MaxPooling2D(), layers.Dropout(0.2)),
                        *(layers.UpSampling2D(), layers.GlobalAveragePooling2D(), layers.Dense(3)),
                    ]
                    x = images
                case "sequences":
                    parts = [
                        *(layers.Input((5,)), layers.Embedding(9, 4, mask_zero=True)),
                        *(layers.Bidirectional(layers.LSTM(3, return_sequences=True)), layers.GRU(3), layers.Dense(3)),
                    ]
                    x = ids
                case "attention":
                    inputs = layers.Input((5,))
                    h = layers.Embedding(9, 4)(inputs)
                    h = layers.LayerNormalization()(h + layers.MultiHeadAttention(2, 2)(h, h, use_causal_mask=True))
                    h = layers.Dense(4, "gelu", kernel_regularizer="l2", activity_regularizer="l2")(h)
                    parts, x = keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling1D()(h))), ids
            model = parts if isinstance(parts, keras.Model) else keras.Sequential(parts)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.Adam(0.01, global_clipnorm=1.0), loss, metrics=["accuracy"])
        weights = np.linspace(0.5, 2.0, ROWS)
        model.fit(x, classes, sample_weight=weights, batch_size=BATCH, epochs=1, verbose=0)
        model.evaluate(x, classes, batch_size=BATCH, verbose=0)
        model.predict(x, batch_size=BATCH, verbose=0)
    return texts


@pytest.mark.parametrize("kind", ["images", "sequences", "attention"])
def test_plain_models_are_divided(kind):
    assert workers(2).run(_plain, kind)[0] == []


def _exchanges():
    """Returns of plain models how many inputs of their steps wait for other replicas."""
    from tfring._keras import exactness

    strategy = harness.strategy()
    layers, losses, optimizers = keras.layers, keras.losses, keras.optimizers
    random = np.random.default_rng(2)
    rows, images = random.normal(size=(ROWS, 6)), random.normal(size=(ROWS, 8, 8, 3))
    ids, classes = random.integers(1, 9, size=(ROWS, 5)), random.integers(0, 3, ROWS)

    def net(shape, *between, outputs=3):
        return keras.Sequential([layers.Input(shape), *between, layers.Dense(outputs)])

    def attention():
        inputs = layers.Input((5,))
        h = layers.Embedding(9, 4)(inputs)
        h = layers.LayerNormalization()(h + layers.MultiHeadAttention(2, 2)(h, h))
        return keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling1D()(h)))

    def two_outputs():
        inputs = layers.Input((6,))
        h = layers.Dense(4, "gelu", kernel_regularizer="l2", activity_regularizer="l2")(inputs)
        return keras.Model(inputs, [layers.Dense(6, name="a")(h), layers.Dense(1, name="b")(h)])

    of_classes = losses.SparseCategoricalCrossentropy(from_logits=True)
    adam = optimizers.Adam(0.01, global_clipnorm=1.0, use_ema=True, gradient_accumulation_steps=2)
    pool = layers.GlobalAveragePooling2D
    plain = {
        "dense": (lambda: net((6,), layers.Dense(4, "relu")), rows, classes, {"loss": of_classes}),
        "dropout": (lambda: net((6,), layers.Dropout(0.3)), rows, classes, {"loss": of_classes, "metrics": ["acc"]}),
        "clipped and averaged": (lambda: net((6,), outputs=1), rows, rows[:, :1], {"optimizer": adam, "loss": "huber"}),
        "convolutions": (
            lambda: net((8, 8, 3), layers.Conv2D(4, 3), layers.BatchNormalization(), layers.ReLU(), pool()),
            *(images, classes, {"loss": of_classes}),
        ),
        "synchronized": (
            lambda: net((8, 8, 3), layers.Conv2D(4, 3), tfring.layers.SyncBatchNormalization(), pool()),
            *(images, classes, {"loss": of_classes}),
        ),
        "embeddings": (lambda: net((5,), layers.Embedding(9, 4), layers.Flatten()), ids, classes, {"loss": of_classes}),
        "lstm": (lambda: net((5,), layers.Embedding(9, 4), layers.LSTM(3)), ids, classes, {"loss": of_classes}),
        "attention": (attention, ids, classes, {"loss": of_classes, "metrics": ["accuracy"]}),
        "autoencoder": (lambda: net((6,), layers.Dense(2, "tanh"), outputs=6), rows, rows, {"loss": "mae"}),
        "two outputs": (
            *(two_outputs, rows, (rows, rows[:, :1])),
            {"loss": {"a": "mse", "b": "mse"}, "loss_weights": {"a": 1.0, "b": 0.3}, "metrics": {"a": ["mae"]}},
        ),
    }  # fmt: skip
    found = {}
    analyze_graph = partition.analyze
    with pytest.MonkeyPatch.context() as patch:
        for name, (make, x, y, options) in plain.items():
            counts = found[name] = []

            def analyze(*args, counts=counts, **kwargs):
                analysis = analyze_graph(*args, **kwargs)
                assert not analysis.findings
                counts.append(sum(conversions.waits(edit.value, edit.conversion) for edit, *_ in analysis.edits))
                return analysis

            patch.setattr(exactness.partition, "analyze", analyze)
            with strategy.scope():
                model = make()
                model.compile(**{"optimizer": "sgd", **options})
            weights = None if isinstance(y, tuple) else np.linspace(0.5, 2.0, ROWS)
            model.fit(x, y, sample_weight=weights, batch_size=BATCH, verbose=0)
            model.evaluate(x, y, batch_size=BATCH, verbose=0)
    return found


def test_plain_models_exchange_nothing_more():
    for counts in workers(2).run(_exchanges):
        assert len(counts) == 10 and all(found == [0, 0] for found in counts.values()), counts
