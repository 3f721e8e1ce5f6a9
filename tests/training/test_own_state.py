"""State, metrics, functions and optimizers that programs write themselves: as in one process, or refused by name."""

import pytest
from common import assert_equal, devices, skewed_rows, train_both
from harness import strategy, workers
from own_state import combining, programs

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


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.long) for part in (1, 2))])
def test_programs(part):
    # Batches of 19: shares of 10 and 9 rows, and of 4 and 3 in the last.
    assert_equal(workers(2).run(train, [name for name in programs() if name not in ON_THREE][part::3], 19, timeout=500))


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


# -- steps that are not edited: by the runtime of TensorFlow -----------------------------------------------------------


def train_combining():
    """As `train`, of programs that are not edited there and whose rows cannot be divided."""
    x, y = skewed_rows(43)
    ring = strategy(**devices())
    return {name: train_both(ring, make, x, y, evaluate=(x, y)) for name, make in combining().items()}


def test_programs_that_combine_rows():
    assert_equal(workers(2, "tensorflow").run(train_combining, timeout=500))
