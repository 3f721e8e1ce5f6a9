"""Backup: what other callbacks hold, and optimizers that a model holds besides its own, after a restart."""

import collections
import tracemalloc
import warnings

import numpy as np
import pytest
from common import skewed_rows
from harness import strategy, workers

# ------------------------------------------------------------------------------------------- callbacks that watch


def watch(folder):
    """Returns by kind logs and rate at the end of a training that goes on after a failure, and of one without."""
    import keras

    import tfring

    ring = strategy()
    x, y = skewed_rows()

    def fit(callback, backup, end=None):
        keras.utils.set_random_seed(4)
        with ring.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(3e-3), "mse")

        def interrupt(epoch, logs):
            if epoch == end:
                raise InterruptedError

        callbacks = [callback, keras.callbacks.LambdaCallback(on_epoch_end=interrupt)]
        callbacks += [tfring.callbacks.Backup(backup)] if backup else []
        history = model.fit(x, y, batch_size=50, epochs=12, shuffle=False, verbose=0, callbacks=callbacks)
        return history.history, float(model.optimizer.learning_rate.numpy())

    kinds = {
        "stopping": lambda: keras.callbacks.EarlyStopping("loss", min_delta=0.15, patience=1),
        "plateau": lambda: keras.callbacks.ReduceLROnPlateau("loss", min_delta=0.15, patience=1, factor=0.5),
    }
    outcomes = {}
    for kind, make in kinds.items():
        with pytest.raises(InterruptedError):
            fit(make(), f"{folder}/{kind}", end=3)
        outcomes[kind] = fit(make(), f"{folder}/{kind}"), fit(make(), None)
    return outcomes


def test_callbacks_that_watch_a_metric_go_on(tmp_path):
    [outcomes] = workers(1).run(watch, str(tmp_path))
    for resumed, whole in outcomes.values():
        assert resumed == whole
    assert 4 < len(outcomes["stopping"][1][0]["loss"]) < 12 and outcomes["plateau"][1][1] < 3e-3


# -------------------------------------------------------------------------------------------------- attributes


def keep():
    """Returns what callbacks keep through JSON, and what a warning says is lost."""
    import json

    import keras
    import tensorflow as tf

    from tfring.callbacks.attributes import Attributes

    class Keeps(keras.callbacks.Callback):
        pass

    values = {
        "by_epoch": {1: 2.5, 2: [1, (2, "x")]},
        "ordered": collections.OrderedDict(b=1, a=2),
        "lists": collections.defaultdict(list, {3: [1]}),
        "octets": b"\x00\xff",
        "seen": {3, 1, "x"},
        "last": collections.deque([1, 2], maxlen=2),
        "counts": collections.Counter("aab"),
        "tagged": {"__array__": 1},
        "array": np.arange(3),
        "rounded": tf.constant([1.5, 2], tf.bfloat16).numpy(),
        "tensor": tf.constant([1.0, 2.0]),
        "better": keras.ops.less,
    }
    before, after = Keeps(), Keeps()
    attributes, arrays = Attributes([before]), []
    vars(before).update(values)
    states = json.loads(json.dumps(attributes.changed(arrays)))
    Attributes([after]).set(states, arrays)
    for name, value in values.items():
        found = vars(after)[name]
        assert isinstance(found, type(value)) and np.all(found == value), name
    assert after.lists["new"] == [] and after.last.maxlen == 2

    circle = []
    circle.append(circle)
    before.objects, before.circle, before.file = [object()], circle, pathlib_path()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        attributes.changed([])
        attributes.changed([])
    return [str(warning.message) for warning in said]


def pathlib_path():
    import pathlib

    return pathlib.Path()


def test_attributes_are_kept_or_warned_of():
    [said] = workers(1).run(keep)
    assert [text.partition("not save ")[2].split(":")[0] for text in said] == [
        "Keeps.objects, a list that holds a object",
        "Keeps.circle, a list that holds a list",
    ]


def hold_a_large_array():
    """Returns what is held besides an array of a callback, and the most that a save takes."""
    import keras

    from tfring.callbacks.attributes import Attributes

    callback = keras.callbacks.Callback()
    callback.best = np.zeros(8 << 20)
    tracemalloc.start()
    try:
        attributes = Attributes([callback])
        callback.best[0] = 1
        attributes.changed([])
        return tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()


def test_a_large_array_of_a_callback_is_not_copied():
    [(held, most)] = workers(1).run(hold_a_large_array)
    assert held < 1 << 20 and most < 1 << 20


# -------------------------------------------------------------------------------------------------- optimizers


def train_a_gan(how, folder, end):
    """The weights, when a model's own step has trained with optimizers held as attributes or in a dict."""
    import keras
    import tensorflow as tf

    import tfring

    ring = strategy()
    keras.utils.set_random_seed(5)

    class Pair(keras.Model):
        def __init__(self):
            super().__init__()
            self.first, self.second = keras.layers.Dense(4), keras.layers.Dense(1)

        def call(self, x):
            return self.second(self.first(x))

        def compile(self, first, second):
            super().compile(loss="mse")
            if how == "attributes":
                self.first_optimizer, self.second_optimizer = first, second
            else:
                self.optimizers = {"by layer": [first, second]}

        def train_step(self, data):
            x, y = data
            with tf.GradientTape(persistent=True) as tape:
                loss = self.compute_loss(x, y, self(x))
            both = self.optimizers["by layer"] if how == "dict" else (self.first_optimizer, self.second_optimizer)
            for layer, optimizer in zip((self.first, self.second), both, strict=True):
                weights = layer.trainable_variables
                optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            return {"loss": loss}

    def interrupt(batch, logs):
        steps.append(batch)
        if len(steps) == end:
            raise InterruptedError

    steps = []
    x, y = skewed_rows()
    with ring.scope():
        model = Pair()
        model.compile(keras.optimizers.Adam(0.02), keras.optimizers.SGD(1e-3, momentum=0.9))
    callbacks = [keras.callbacks.LambdaCallback(on_train_batch_end=interrupt)]
    callbacks += [tfring.callbacks.Backup(folder, every_steps=2)] if folder else []
    try:
        model.fit(x / 4, y, batch_size=20, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
    except InterruptedError:
        return None
    return [weight.tobytes() for weight in model.get_weights()], len(steps)


def train_gans(folder, kind):
    hows = ("attributes", "dict")
    return [train_a_gan(how, None if kind == "whole" else f"{folder}/{how}", 7 if kind == "cut" else 0) for how in hows]


def test_optimizers_that_a_model_holds_by_itself(tmp_path):
    whole = workers(2).run(train_gans, str(tmp_path), "whole")
    assert workers(2).run(train_gans, str(tmp_path), "cut") == [[None, None]] * 2
    resumed = workers(2).run(train_gans, str(tmp_path), "resumed")
    for wants, founds in zip(whole, resumed, strict=True):
        for (want, _), (found, steps) in zip(wants, founds, strict=True):
            assert found == want and steps == 4
