"""The functions of Keras that are replaced are those of the table, each once and with the parameters expected."""

from __future__ import annotations

import inspect
import subprocess
import sys

import keras
import pytest

import tfring._keras
from tfring import layers
from tfring._keras.replaced import REPLACED
from tfring._keras.seam import extended, installed, overridden, parameters, seam
from tfring._keras.sharding import stages

pytestmark = pytest.mark.oldest

@pytest.fixture(scope="module", autouse=True)
def all_of_them():
    tfring._keras.install()
    stages.refuse_new_weights()
    assert layers.ShardedDense


def test_the_table_is_what_is_replaced():
    assert set(installed) == set(REPLACED)
    assert len(REPLACED) <= 30, "more functions than there were: derive from a class of Keras'"


@pytest.mark.parametrize("key", REPLACED)
def test_parameters_are_those_expected(key):
    expected = REPLACED[key]
    assert parameters(installed[key]) == expected.parameters
    assert expected.reason


def test_the_bases_override_methods_of_keras():
    assert {base.__name__ for base in extended} == {"RingVariable", "RingLayer", "ScopedOptimizer", "RingTrainer"}
    for base, theirs in extended.items():
        methods = {name for name, value in vars(base).items() if inspect.isfunction(value) and name[:2] != "__"}
        assert set(overridden(base)) >= methods & set(vars(theirs))
        for name, method in overridden(base).items():
            assert parameters(method) == parameters(getattr(theirs, name)) or "*args" in parameters(method), name


def test_a_function_is_not_replaced_twice():
    with pytest.raises(AssertionError, match=r"Embedding\.call is replaced twice"):
        seam(keras.layers.Embedding, "call")


def test_a_function_out_of_the_table_is_not_replaced():
    with pytest.raises(AssertionError, match=r"Sum\.update_state is .* has no row"):
        seam(keras.metrics.Sum, "update_state")


PROGRAM = """
import importlib, sys, urllib.request
import keras, tensorflow as tf
from tfring._keras import install, seam
from tfring._keras.replaced import REPLACED

CLASSES = (keras.Model, keras.layers.Layer, keras.Variable, keras.optimizers.Optimizer)

def owner_of(key):
    path, _, name = key.rpartition(".")
    try:
        return importlib.import_module(path), name
    except ImportError:
        module, _, cls = path.rpartition(".")
        return getattr(importlib.import_module(module), cls), name

HERE = [owner_of(key) for key in REPLACED]
ATTRIBUTES = [(keras.layers.Layer, name) for name in ("_losses",)]
MODULES = [m for m in list(sys.modules.values()) if m.__name__.split(".")[0] in ("keras", "tensorflow", "urllib")]

def state():
    attributes = [vars(owner).get(name) for owner, name in HERE + ATTRIBUTES if name != "__new__"]  # `fit` shows it
    held = [m.__dict__[name] for m in MODULES for _, name in HERE if name in m.__dict__]
    return [c.__bases__ for c in CLASSES], attributes, held

before = state()
import tfring
assert state() == before, "import tfring changes Keras"
"""

RESTORED = """
import tfring.layers
before = state()  # with what the modules of tfring import
install()
changed = state()
assert [a is b for a, b in zip(changed[0], before[0])] == [False] * len(CLASSES)
assert changed[1] != before[1] and urllib.request.urlretrieve.__module__ == "urllib.request"
from tfring._keras.sharding import stages
stages.refuse_new_weights()
seam.restore()
assert state() == before and not seam.installed and not seam.extended
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(tf.ones([4, 2]), tf.ones([4, 1]), verbose=0)
install()
stages.refuse_new_weights()
assert set(seam.installed) == set(REPLACED)
"""

ANOTHER_LIBRARY = """
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer

class Theirs(TensorFlowTrainer):
    pass

keras.Model.__bases__ = tuple(Theirs if c is TensorFlowTrainer else c for c in keras.Model.__bases__)
import tfring.layers
before = state()
for _ in range(2):
    try:
        tfring.RingStrategy()
    except tfring.errors.ConfigurationError as error:
        assert error.args[0].startswith("Another library has changed the bases of keras"), error
        assert "__main__.Theirs" in error.args[0], error
    else:
        raise AssertionError("RingTrainer is silently absent")
    assert state() == before, "half of it is left"
"""


@pytest.mark.parametrize("program", [RESTORED, ANOTHER_LIBRARY], ids=["restored", "another library"])
def test_what_is_changed_is_taken_back(program):
    done = subprocess.run([sys.executable, "-c", PROGRAM + program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
