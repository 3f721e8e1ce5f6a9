"""State, metrics, functions and optimizers that programs write themselves: as in one process, or refused by name."""

import warnings

import pytest
from common import assert_equal, devices, skewed_rows, train_both
from harness import strategy, workers
from own_state import net, programs, refused, warned

from tfring.errors import ConfigurationError


def train(names, batch_size=20):
    """Trains the programs named on all workers, and on one rank alone too: relative errors by program."""
    ring = strategy(**devices())
    found = programs()
    cases = {}
    for name in names:
        make, (x, y) = found[name]
        some = 2 * batch_size + 1  # in the last batch one worker has no row
        data = {"validation_data": (x[:some], y[:some]), "evaluate": (x, y)}
        cases[name] = train_both(ring, make, x, y, epochs=2, batch_size=batch_size, **data)
    return cases


ON_THREE = ["accumulated by hand", "tf.Variable", "metrics that assign", "means and counts"]


def test_programs():
    # Batches of 19: shares of 10 and 9 rows, and of 4 and 3 in the last.
    assert_equal(workers(2).run(train, [name for name in programs() if name not in ON_THREE], 19, timeout=500))


@pytest.mark.oldest
def test_programs_on_three_workers():
    assert_equal(workers(3).run(train, ON_THREE, timeout=400))


def in_a_branch():
    """Returns what a program is told whose optimizer stands in a `tf.cond`."""
    ring = strategy(**devices())
    make, (x, y) = programs()["accumulated by hand"]
    with ring.scope():
        model = make()
    with pytest.raises(ConfigurationError) as raised:
        model.fit(x, y, verbose=0)
    return str(raised.value)


@pytest.mark.long
def test_programs_with_two_replicas_a_worker():
    group = workers(2, logical_cpus=2)
    assert_equal(group.run(train, [name for name in programs() if name != "accumulated by hand"], timeout=500))
    assert all("gradient_accumulation_steps" in text for text in group.run(in_a_branch))


# -- what is refused, and what is said, of steps that are not edited: by the runtime of TensorFlow -----------------


def said():
    """Returns what each program is told."""
    import keras
    import tensorflow as tf

    x, y = skewed_rows(23)
    ring = strategy(**devices())
    found = {}

    def attempt(name, make):
        with ring.scope():
            model = make()
        try:
            model.fit(x, y, batch_size=20, verbose=0)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"

    for name, make in refused().items():
        attempt(name, make)

    class Summing(keras.Model):
        def train_step(self, data):
            self.total.assign_add(tf.reduce_sum(data[0]))
            return super().train_step(data)

    def summing():
        model = Summing(*net())
        model.compile(keras.optimizers.SGD(0.05), "mse")
        model.total = model.add_weight(shape=(), initializer="zeros", trainable=False, name="total")
        return model

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        attempt("sum", summing)
    found["warned"] = [str(w.message) for w in caught if "several replicas" in str(w.message)]
    return found


def test_what_cannot_be_one_value_is_named():
    for rank, found in enumerate(workers(2, "tensorflow").run(said)):
        assert "'welford/mean'" in found["welford"] and "gather_for_loss" in found["welford"], found["welford"]
        assert "ConfigurationError" in found["welford"]
        for name, variable in {"queue": "/memory'", "scatter": "/memory'", "scatter_update": "'other:0'"}.items():
            text = found[f"rows, {name}"]
            assert "ConfigurationError" in text and variable in text and "gather_for_loss(rows)" in text, text
        assert "sum" not in found, found["sum"]
        assert len(found["warned"]) == (rank == 0), found["warned"]
        assert all("total" in text and "a part of the batch" in text for text in found["warned"])


def formulas():
    """Returns what is said of each program that trains on: of those that are not one process', and of one that is."""
    x, y = skewed_rows(23)
    ring = strategy(**devices())
    found = {}
    for name, (make, _) in warned().items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with ring.scope():
                model = make()
            model.fit(x, y, batch_size=20, verbose=0)
        found[name] = [str(w.message) for w in caught if "replica" in str(w.message)]
    return found


def test_what_follows_from_no_mean_is_warned_of_once():
    first, *others = workers(2, "tensorflow").run(formulas)
    for name, (_, text) in warned().items():
        assert not any(other[name] for other in others), (name, others)
        assert len(first[name]) == (text is not None), (name, first[name])
        assert text is None or text in first[name][0], first[name]
