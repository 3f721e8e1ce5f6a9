"""One seed for a run of `tfring launch`, and what a worker finds in place of standard input."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from test_launch import LAUNCH, TIMEOUT, launch, plain_environment, write

__all__ = ["launch", "plain_environment"]  # fixtures

DRAW = """
import random
import numpy as np
draws = random.random(), np.random.rand(), np.random.default_rng().random(), np.random.default_rng().random()
assert len(set(draws)) == 4
print("drawn", *draws)
assert "TFRING_SEED" not in os.environ and not [path for path in sys.path if "hook" in path]
assert os.environ["PYTHONPATH"] == os.environ["PATH_OF_TEST"]
"""

# First programs as people write them. What each learns is printed by rank 0.
PROGRAMS = """
import numpy as np, tensorflow as tf, keras, tfring
def model():
    made = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    made.compile("sgd", "mse")
    return made
def report(name, model):
    tfring.print_once("learned", name.replace(" ", "_"), *np.round(model.get_weights()[0].ravel(), 4))
x = np.random.normal(size=(50, 4)).astype("float32")             # unseeded NumPy
y = np.random.default_rng().normal(size=(50, 1)).astype("float32")
before = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(50).batch(10)
strategy = tfring.RingStrategy()
with strategy.scope():
    first, second, third, fourth, images = model(), model(), model(), model(), keras.Sequential([
        keras.Input((4, 4, 3)), keras.layers.Rescaling(1 / 255), keras.layers.Flatten(), keras.layers.Dense(1)])
    images.compile("sgd", "mse")
first.fit(x, y, epochs=2, verbose=0, shuffle=False)
report("arrays", first)
rows = np.random.permutation(50)                                 # as pandas' .sample(frac=1) does
second.fit(x[rows], y[rows], epochs=2, verbose=0, shuffle=False)
report("sample", second)
third.fit(before, epochs=2, verbose=0)                           # a dataset made before the strategy
report("before", third)
folder = here / "images"
if rank == 0:
    for number in range(12):
        path = folder / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(tf.io.encode_png(tf.cast(tf.fill([4, 4, 3], number * 20), tf.uint8)).numpy())
tfring.barrier()
fourth.fit(x, y, epochs=1, verbose=0)                            # in an order that Keras draws
report(f"shuffled by {world}", fourth)
after = tf.data.Dataset.range(9).shuffle(9)                      # each epoch another, and not one that fit has used
orders = [[int(i) for i in after] for _ in range(2)]
assert orders[0] != orders[1] and tfring.all_gather(orders) == [orders] * world
images.fit(keras.utils.image_dataset_from_directory(folder, image_size=(4, 4), batch_size=4), verbose=0)
report("images", images)
"""


@pytest.fixture(autouse=True)
def path(monkeypatch):
    paths = os.environ["PYTHONPATH"]
    for name in ("PYTHONPATH", "PATH_OF_TEST"):
        monkeypatch.setenv(name, os.pathsep.join([paths, *sys.path]))
    monkeypatch.delenv("TFRING_SEED", raising=False)


def draws(done):
    return [line.split("drawn ")[1] for line in done.stdout.splitlines()]


def test_all_ranks_draw_alike_and_each_run_otherwise(launch, monkeypatch):
    first, again = draws(launch(3, DRAW)), draws(launch(3, DRAW))
    assert len(first) == 3 and len(set(first)) == 1 and len(set(first) | set(again)) == 2


def test_a_seed_by_option_and_by_variable(launch, monkeypatch):
    by_option = draws(launch(2, DRAW, options=["--seed", "3"]))
    monkeypatch.setenv("TFRING_SEED", "3")
    assert by_option == draws(launch(2, DRAW)) and len(set(by_option)) == 1
    other = draws(launch(2, DRAW, options=["--seed", "4"]))
    assert by_option[0] not in other
    monkeypatch.setenv("TFRING_SEED", "none")
    assert len(set(draws(launch(2, DRAW)))) == 2
    monkeypatch.setenv("TFRING_SEED", "many")
    assert "TFRING_SEED='many' is not a whole number below 2**32, or none" in launch(2, DRAW, code=2).stderr


def test_without_the_launcher_from_the_import_on():
    code = "import tfring, random; print(random.random())"

    def run(seed):
        env = {**os.environ, "TFRING_SEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=TIMEOUT)

    assert run("3").stdout == run("3").stdout != run("4").stdout
    assert run("none").stdout != run("none").stdout
    assert run("-1").returncode == 0  # RingStrategy() refuses it, and `tfring launch`


def test_a_sitecustomize_of_the_user_runs_too(launch, tmp_path, monkeypatch):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import builtins; builtins.theirs = __name__")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"), prepend=os.pathsep)
    done = launch(1, "print(theirs, sys.modules['sitecustomize'].__file__)")
    assert done.stdout.split() == ["sitecustomize", str(tmp_path / "site" / "sitecustomize.py")]


def test_first_programs_train_as_in_one_process(launch, tmp_path):
    """And as in any number of processes with this seed."""

    def learned(n):
        done = launch(n, PROGRAMS, options=["--seed", "7"], timeout=400)
        lines = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("learned")]
        return {name: [float(number) for number in numbers] for name, *numbers in lines}

    one, two, again = learned(1), learned(2), learned(2)
    assert two == again and two.pop("shuffled_by_2") and one.pop("shuffled_by_1")
    assert one.keys() == two.keys() == {"arrays", "sample", "before", "images"}
    for name in one:
        assert one[name] == pytest.approx(two[name], abs=2e-4), name


ASK = """
if rank == 1 or "both" in sys.argv:
    breakpoint()
    import pdb
    pdb.set_trace()
print(rank, "has", input("name? "))
"""


def test_input_and_breakpoints_of_rank_0(tmp_path):
    script = write(tmp_path, "if rank == 1: sys.exit()\n" + ASK)
    command = [*LAUNCH, "-n", "2", script, "both"]
    done = subprocess.run(command, input="c\nc\nme\n", capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0 and "0 has me" in done.stdout and done.stdout.count("(Pdb)") == 2, done


def test_input_and_breakpoints_of_others(launch):
    done = launch(2, "if rank == 0: time.sleep(600)\n" + ASK, code=1)
    assert done.stderr.count("rank 1 passes by the breakpoint: standard input goes to rank 0 alone") == 2
    said = re.search(r"EOFError: (.*)", done.stderr)[1]
    assert said.startswith("input() on rank 1: standard input goes to rank 0 alone. Ask there") and "broadcast" in said


def test_what_tensorflow_says_of_itself_is_rank_0s(launch, monkeypatch):
    tell = "print(rank, os.environ.get('TF_CPP_MIN_LOG_LEVEL'))"
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    assert sorted(launch(2, tell).stdout.splitlines()) == ["0 None", "[1] 1 1"]
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")
    assert sorted(launch(2, tell).stdout.splitlines()) == ["0 0", "[1] 1 0"]
