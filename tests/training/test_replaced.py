"""The functions of Keras that are replaced are those of the table, each once and with the parameters expected."""

from __future__ import annotations

import keras
import pytest

import tfring._keras
from tfring import layers
from tfring._keras.replaced import REPLACED
from tfring._keras.seam import extended, installed, overridden, parameters, seam, version_of_keras
from tfring._keras.sharding import stages

pytestmark = pytest.mark.oldest

HERE = {key: f for key, f in REPLACED.items() if f.since <= version_of_keras() < f.before}


@pytest.fixture(scope="module", autouse=True)
def all_of_them():
    tfring._keras.install()
    stages.refuse_new_weights()
    assert layers.ShardedDense


def test_the_table_is_what_is_replaced():
    assert set(installed) == set(HERE)
    of_newest = [key for key, f in REPLACED.items() if f.before == (4, 0)]
    assert len(of_newest) <= 48, "more functions than there were: derive from a class of Keras'"


@pytest.mark.parametrize("key", HERE)
def test_parameters_are_those_expected(key):
    expected = HERE[key]
    assert parameters(installed[key]) in (expected.parameters, expected.formerly)
    assert expected.reason


def test_the_bases_override_methods_of_keras():
    assert {base.__name__ for base in extended} == {"RingVariable", "RingLayer", "OptimizerOfScope", "RingTrainer"}
    for base, theirs in extended.items():
        assert set(overridden(base)) >= {name for name in vars(base) if name in vars(theirs) and name[:2] != "__"}
        for name, method in overridden(base).items():
            assert parameters(method) == parameters(getattr(theirs, name)) or "*args" in parameters(method), name


def test_a_function_is_not_replaced_twice():
    with pytest.raises(AssertionError, match=r"is replaced once.*Received: .*Mean\.update_state"):
        seam(keras.metrics.Mean, "update_state")


def test_a_function_out_of_the_table_is_not_replaced():
    with pytest.raises(AssertionError, match=r"stands in the table.*Received: .*Sum\.update_state"):
        seam(keras.metrics.Sum, "update_state")
