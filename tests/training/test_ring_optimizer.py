"""Optimizers of a RingStrategy are Keras' own to users, to Keras and to files."""

import copy
import functools
import json
import pickle
import re
import subprocess
import sys

import numpy as np
import pytest
from common import assert_equal, is_reference, relative_error, skewed_rows, train_both
from harness import strategy, workers


def makers():
    import keras

    o = keras.optimizers
    every = {
        "Adam": lambda: o.Adam(0.01, beta_1=0.8),
        "AdamW": lambda: o.AdamW(0.01, weight_decay=0.1),
        "SGD": lambda: o.SGD(0.01, momentum=0.9),
        "LossScaleOptimizer": lambda: o.LossScaleOptimizer(o.AdamW(0.01)),
    }
    if hasattr(o, "MultiOptimizer"):
        every["MultiOptimizer"] = lambda: o.MultiOptimizer(o.OptimizerMap(o.Adam(0.01), {"first.*": o.SGD(0.03)}))
    return every


@functools.cache
def own_classes():
    """Returns a user's optimizers: one with an own update, one with an own `apply`, one that hands on to another."""
    import keras

    @keras.saving.register_keras_serializable("mine")
    class Own(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            super().update_step(2 * gradient, variable, learning_rate)

    @keras.saving.register_keras_serializable("mine")
    class Applying(keras.optimizers.Adam):
        def apply(self, grads, trainable_variables=None):
            norm = keras.ops.sqrt(sum(keras.ops.sum(keras.ops.square(g)) for g in grads))
            return super().apply([g / norm for g in grads], trainable_variables)

    @keras.saving.register_keras_serializable("mine")
    class HandsOn(keras.optimizers.Optimizer):
        def __init__(self, inner=None, learning_rate=1.0, **options):
            super().__init__(learning_rate, **options)
            self.inner = inner or keras.optimizers.SGD(0.01, momentum=0.9)

        def apply(self, grads, trainable_variables=None):
            self.inner.apply([keras.ops.sign(g) for g in grads], trainable_variables)
            self._iterations.assign_add(1)

    return {"Own": lambda: Own(0.01), "Applying": lambda: Applying(0.01), "HandsOn": HandsOn}


def model_of(optimizer):
    import keras

    first = keras.layers.Dense(5, activation="tanh", name="first")
    model = keras.Sequential([keras.Input((4,)), first, keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    return model


# -- what Python and Keras see ---------------------------------------------------------------------------------------


def unnumbered(text):
    """Returns a text without the numbers of the names that Keras makes up."""
    return re.sub(r"_\d+", "", text)


def seen():
    """Returns where an optimizer of a ring shows otherwise than Keras' own, by name of the optimizer."""
    import keras

    before = {name: make() for name, make in makers().items()}
    ring = strategy()
    differences = {}
    for name, make in {**makers(), **own_classes()}.items():
        plain = make()
        with ring.scope():
            optimizer = make()
        cls = plain.__class__
        assert type(plain) is cls and type(optimizer) is not cls, name

        def config(one):
            return unnumbered(json.dumps(keras.saving.serialize_keras_object(one), default=str))

        kind = type(optimizer)
        assert config(optimizer) != config(keras.optimizers.RMSprop())
        with ring.scope():
            model = model_of(make())
            model.optimizer.build(model.trainable_variables)
        alone = model_of(make())
        alone.optimizer.build(alone.trainable_variables)
        clone = keras.models.clone_model(model)
        differences[name] = [
            what
            for what, is_same in {
                "isinstance": isinstance(optimizer, cls) and isinstance(optimizer, keras.optimizers.Optimizer),
                "class": optimizer.__class__ is cls,
                "names": (kind.__name__, kind.__qualname__, kind.__module__)
                == (cls.__name__, cls.__qualname__, cls.__module__),
                "once": name == "MultiOptimizer" or type(kind.from_config(optimizer.get_config())) is cls,
                "config": config(optimizer) == config(plain),
                "from_config": config(cls.from_config(optimizer.get_config())) == config(plain),
                "copy": type(copy.copy(optimizer)) is cls and type(copy.deepcopy(optimizer)) is cls,
                "pickle": name in own_classes() or type(pickle.loads(pickle.dumps(optimizer))) is cls,
                "compile": unnumbered(json.dumps(model.get_compile_config(), default=str))
                == unnumbered(json.dumps(alone.get_compile_config(), default=str)),
                "variables": [unnumbered(v.path) for v in model.optimizer.variables]
                == [unnumbered(v.path) for v in alone.optimizer.variables],
                "clone": not hasattr(clone, "optimizer") or type(clone.optimizer) is cls,  # Keras 3.8 compiles none
            }.items()
            if not is_same
        ]
        with ring.scope():
            again = kind.from_config(optimizer.get_config()) if name != "MultiOptimizer" else make()
        assert type(again) is kind, name
    assert all(type(one) is one.__class__ for one in before.values())
    return differences


@pytest.mark.oldest
def test_optimizers_look_like_keras_own():
    [found] = workers(1).run(seen)
    assert found == {name: [] for name in found} and len(found) > 6


# -- files -----------------------------------------------------------------------------------------------------------

LOADS = """
import json, os, sys
import keras, numpy as np, tensorflow as tf
x = np.ones((6, 4), "float32")


def loaded(folder, name):
    saved = keras.models.load_model(f"{folder}/{name}.keras")
    state = [v.numpy().tolist() for v in saved.optimizer.variables]
    predicted = [saved.predict(x, verbose=0).tolist()]
    fresh = keras.models.clone_model(saved)
    fresh.compile(saved.optimizer.__class__.from_config(saved.optimizer.get_config()), "mse")
    fresh.optimizer.build(fresh.trainable_variables)
    fresh.load_weights(f"{folder}/{name}.weights.h5")
    predicted.append(fresh.predict(x, verbose=0).tolist())
    restored = [v.numpy().tolist() for v in fresh.optimizer.variables]
    for v in [*fresh.variables, *fresh.optimizer.variables]:
        v.assign(np.zeros(v.shape, v.dtype))
    checkpoint = tf.train.Checkpoint(model=fresh, optimizer=fresh.optimizer)
    checkpoint.read(f"{folder}/{name}.checkpoint").assert_existing_objects_matched()
    predicted.append(fresh.predict(x, verbose=0).tolist())
    read = [v.numpy().tolist() for v in fresh.optimizer.variables]
    exported = tf.saved_model.load(f"{folder}/{name}")
    predicted.append(exported.serve(x).numpy().tolist())
    saved.fit(x, np.ones((6, 1)), verbose=0)
    return type(saved.optimizer).__module__, state, restored, read, predicted


folder, *names = sys.argv[1:]
print(json.dumps({name: loaded(folder, name) for name in names}))
assert not any("tfring" in module for module in sys.modules)
"""


def written(folder):
    import keras
    import tensorflow as tf

    ring = strategy()
    x, y = skewed_rows(20)
    kept = {}
    for name, make in makers().items():
        if name == "MultiOptimizer":
            continue  # which Keras itself does not load with its state
        keras.utils.set_random_seed(1)
        with ring.scope():
            model = model_of(make())
        model.fit(x, y, batch_size=10, verbose=0)
        model.save(f"{folder}/{name}.keras")
        model.save_weights(f"{folder}/{name}.weights.h5")
        tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(f"{folder}/{name}.checkpoint")
        model.export(f"{folder}/{name}", verbose=False)
        ones = np.ones((6, 4), "float32")
        kept[name] = [v.numpy() for v in model.optimizer.variables], model.predict(ones, verbose=0)
    return kept


def warned_of_parts(folder):
    """Returns how many warnings come with files after one, two and three steps of which two make an update."""
    import warnings

    import keras

    ring = strategy()
    x, y = skewed_rows(20)
    with ring.scope():
        model = model_of(keras.optimizers.SGD(1e-3, gradient_accumulation_steps=2))
    counts = []
    for step in range(3):
        model.train_on_batch(x, y)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            model.save_weights(f"{folder}/{step}.weights.h5")
            model.save(f"{folder}/{step}.keras")
        counts.append(sum("this worker's part of the gradients" in str(each.message) for each in said))
    return counts


def test_a_file_of_accumulated_gradients_comes_with_a_warning(tmp_path):
    assert workers(2).run(warned_of_parts, str(tmp_path)) == [[2, 0, 2]] * 2
    assert workers(1).run(warned_of_parts, str(tmp_path)) == [[0, 0, 0]]


def test_files_load_where_there_is_no_tfring(tmp_path):
    kept, _ = workers(2).run(written, str(tmp_path))
    command = [sys.executable, "-c", LOADS, str(tmp_path), *kept]
    run = subprocess.run(command, check=False, timeout=300, capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout.splitlines()[-1])
    assert found.keys() == kept.keys()
    for name, (state, predicted) in kept.items():
        module, *states, others = found[name]
        assert module.startswith("keras.")
        for other in states:
            assert relative_error(other, state) < 1e-6, name
        for other in others:
            assert relative_error([other], [predicted]) < 1e-5, name


# -- training --------------------------------------------------------------------------------------------------------


def trained():
    ring = strategy()
    x, y = skewed_rows(33)
    every = {**makers(), **own_classes()}
    return {name: train_both(ring, lambda make=make: model_of(make()), x / 4, y) for name, make in every.items()}


def test_optimizers_of_users_and_of_others():
    assert_equal(workers(2).run(trained))


def adopted():
    """Optimizers made outside the scope, in places of a model where a custom step uses them."""
    import keras
    import tensorflow as tf

    ring = strategy()
    x, y = skewed_rows(33)

    class Places(keras.Model):
        def __init__(self, make, scaled):
            super().__init__()
            self.first, self.second = keras.layers.Dense(5), keras.layers.Dense(1)
            self.by_layer = {"first": [make()], "second": keras.optimizers.LossScaleOptimizer(scaled)}

        def call(self, x):
            return self.second(self.first(x))

        def train_step(self, data):
            x, y = data
            scaled = self.by_layer["second"]
            with tf.GradientTape(persistent=True) as tape:
                loss = self.compute_loss(x, y, self(x))
                large = scaled.scale_loss(loss)
            own, others = self.first.trainable_variables, self.second.trainable_variables
            self.by_layer["first"][0].apply_gradients(zip(tape.gradient(loss, own), own, strict=True))
            scaled.apply_gradients(zip(tape.gradient(large, others), others, strict=True))
            return {"loss": loss}

    def make():
        model = Places(lambda: keras.optimizers.Adam(0.01), outside.pop())
        model.compile(loss="mse")
        return model

    outside = [keras.optimizers.SGD(0.01, momentum=0.9) for _ in range(2)]
    return {"places": train_both(ring, make, x / 4, y)}


def test_optimizers_in_lists_and_dicts_and_made_outside():
    assert_equal(workers(2).run(adopted))


def two():
    """Two strategies and no strategy in one process, in turns."""
    import keras

    rings = [strategy(), strategy(shard_optimizer=True)]
    x, y = skewed_rows(33)
    outcomes = []
    for turn in range(2):
        models = []
        for ring in rings:
            with ring.scope():
                keras.utils.set_random_seed(1)
                models.append(model_of(keras.optimizers.Adam(0.01)))
        keras.utils.set_random_seed(1)
        models.append(model_of(keras.optimizers.Adam(0.01)))
        for each in models if turn else reversed(models):
            each.fit(x, y, batch_size=20, epochs=2, shuffle=False, verbose=0)
        *others, alone = [model.get_weights() for model in models]
        outcomes += [relative_error(other, alone) for other in others]
        assert type(models[-1].optimizer) is keras.optimizers.Adam
        slots = [sum(int(np.prod(v.shape)) for v in model.optimizer.variables) for model in models]
        assert slots[1] < slots[0] == slots[2]
    return max(outcomes), is_reference(rings[0])


def test_two_strategies_and_none_in_one_process():
    for error, _ in workers(2).run(two):
        assert error < 1e-5


def of_tensorflow_1():
    """The largest difference of weights from one process, by the name of the optimizer."""
    import keras
    import tensorflow as tf

    class Model(keras.Model):
        def __init__(self, optimizer):
            super().__init__()
            self.layer, self.updates = keras.layers.Dense(1), optimizer

        def call(self, x):
            return self.layer(x)

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x) - y) ** 2)
            weights = [weight.value for weight in self.trainable_weights]
            self.updates.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            return {"mean": loss}

    ring = strategy()
    x, y = skewed_rows(19)

    def trained(make):
        keras.utils.set_random_seed(1)
        model = Model(make())
        model(x[:1])
        model.compile()
        model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
        return model.get_weights()

    makes = {
        "momentum": lambda: tf.compat.v1.train.MomentumOptimizer(0.01, 0.9),
        "adam": lambda: tf.compat.v1.train.AdamOptimizer(0.01),
    }
    differences = {}
    for name, make in makes.items():
        with ring.scope():
            weights = trained(make)
        differences[name] = relative_error(weights, trained(make))
    return differences


def test_optimizers_of_tensorflow_1():
    for differences in workers(2).run(of_tensorflow_1):
        assert max(differences.values()) < 1e-5, differences
