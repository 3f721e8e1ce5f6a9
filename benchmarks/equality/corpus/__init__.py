"""Programs as users write them into a training step, by name: `PROGRAMS`; and `trained`, a task that trains them.

A program is a function that makes a compiled model, decorated with the data that it trains on:

    @program(rows)
    def ratio_of_sums():
        ...
        return model

A loss of targets and predictions may be written in several places of a program, each of which is a program:

    @loss("compile", "step", "compute_loss", "add_loss", "class")
    def ratio_of_sums(y, p):
        return tf.reduce_sum(tf.abs(y - p)) / tf.reduce_sum(tf.abs(y))

No program draws random numbers for each row.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import pathlib
import pkgutil
import re
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import harness
import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tfring import errors

# Batches of 7, 7 and 2 rows: 3 and 4 rows on two workers; 2, 2 and 3 on three, of which one has none of the last batch.
ROWS, BATCH, EPOCHS = 16, 7, 2
FEWER = 12  # of another epoch: batches of 7 and 5
CLASSES, FEATURES, IDS, LENGTH = 3, 6, 9, 5


class Program(NamedTuple):
    """A function that makes a compiled model, one that makes x and y, and more arguments of `fit`."""

    make: Callable[[], Any]
    data: Callable[[], tuple]
    fit: dict


class Trained(NamedTuple):
    """What has become of a program on a rank.

    Attributes:
      values: of variables and of logs at the end of each epoch, by name.
      said: what is logged of a step of the whole batch, if there was one.
      error: the type and the first line of an exception, if there was one.
      is_refused: whether tfring raised it on purpose.
      seconds: that it took.
    """

    values: dict[str, Any]
    said: str | None
    error: str | None
    is_refused: bool
    seconds: float


PROGRAMS: dict[str, Program] = {}


def program(data: Callable[[], tuple], **fit: Any) -> Callable:
    """Adds a program, called by its module and function."""

    def add(make: Callable[[], Any]) -> Callable[[], Any]:
        _add(make, "", make, data, fit)
        return make

    return add


def loss(*places: str, data: Callable[[], tuple] | None = None, outputs: int = 1, activation: str | None = None):
    """Adds a program for each place where a loss of targets and predictions may stand."""

    def add(fn: Callable) -> Callable:
        for place in places:
            _add(fn, f" in {place}", lambda place=place: PLACES[place](fn, outputs, activation), data or rows, {})
        return fn

    return add


def _add(fn: Callable, more: str, make: Callable[[], Any], data: Callable[[], tuple], fit: dict) -> None:
    name = f"{fn.__module__.rpartition('.')[2]}.{fn.__name__}{more}"
    if name in PROGRAMS:
        raise ValueError(f"two programs of one name: {name}")
    PROGRAMS[name] = Program(make, data, fit)


# ------------------------------------------------------------------------------------------------ data


def rows() -> tuple:
    """Returns features of which rows differ in scale, and one target a row."""
    random = np.random.default_rng(5)
    scale = np.clip(np.exp(random.normal(size=(ROWS, 1))), 0.3, 2.5)
    x = random.normal(size=(ROWS, FEATURES)) * scale
    y = x[:, :1] * 0.5 + 0.5 * random.normal(size=(ROWS, 1)) + 0.3
    return x.astype("float32"), y.astype("float32")


def classes() -> tuple:
    """Returns features and a class a row; batches and replicas have other fractions of the classes."""
    x, _ = rows()
    return x, np.array([0, 0, 1, 2, 1, 1, 2, 0, 0, 0, 2, 1, 0, 2, 1, 2], "int32")


def one_hot() -> tuple:
    x, y = classes()
    return x, np.eye(CLASSES, dtype="float32")[y]


def binary() -> tuple:
    x, _ = rows()
    return x, np.array([0, 0, 1, 0, 1, 1, 1, 0, 0, 1, 1, 1, 0, 0, 1, 0], "float32")[:, None]


def labels() -> tuple:
    """Returns features and several labels a row, each yes or no."""
    x, y = rows()
    return x, (x[:, :CLASSES] + y > 0.4).astype("float32")


def same() -> tuple:
    """Returns features, which are the targets, too."""
    x, _ = rows()
    return x, x


def ids() -> tuple:
    """Returns rows of ids that end in zeros, and one target a row."""
    random = np.random.default_rng(3)
    lengths = random.integers(1, LENGTH + 1, size=ROWS)
    x = random.integers(1, IDS, size=(ROWS, LENGTH)) * (np.arange(LENGTH) < lengths[:, None])
    return x.astype("int32"), rows()[1]


def next_ids() -> tuple:
    """Returns rows of ids, and the ids that follow them; 0 is no id."""
    x, _ = ids()
    return x, np.concatenate([x[:, 1:], np.zeros((ROWS, 1), "int32")], 1)


def pairs() -> tuple:
    """Returns a user and an item a row, and how much the user likes it."""
    random = np.random.default_rng(8)
    x = random.integers(0, 5, size=(ROWS, 2)).astype("int32")  # of IDS, so that batches hold some several times
    return x, (np.sin(x[:, :1] * 1.3) + 0.3 * x[:, 1:]).astype("float32")


def images() -> tuple:
    random = np.random.default_rng(6)
    x = random.normal(size=(ROWS, 6, 6, 2)) * np.clip(np.exp(random.normal(size=(ROWS, 1, 1, 1))), 0.3, 2.5)
    return x.astype("float32"), classes()[1]


def masks() -> tuple:
    """Returns images and which of their pixels belong to an object; some have none."""
    x, _ = images()
    return x, (x[..., :1] > np.linspace(0.0, 1.5, ROWS)[:, None, None, None]).astype("float32")


def steps_of_play() -> tuple:
    """Returns a state a row, and beside it an action, a reward, and whether the episode ended."""
    x, y = rows()
    action = np.arange(ROWS) * 5 % CLASSES
    return x, np.stack([action, y[:, 0], np.arange(ROWS) % 4 == 3], 1).astype("float32")


def times() -> tuple:
    """Returns features, and a time and whether an event was seen at it."""
    x, y = rows()
    return x, np.concatenate([np.abs(y) * 3 + 0.1, binary()[1]], 1).astype("float32")


# ---------------------------------------------------------------------------------------------- models


def dense(outputs: int = 1, activation: str | None = None, width: int = 5, features: int = FEATURES) -> keras.Model:
    return keras.Sequential(
        [layers.Input((features,)), layers.Dense(width, "tanh"), layers.Dense(outputs, activation=activation)]
    )


def sgd(rate: float = 0.05, **options: Any) -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(rate, **options)


def compiled(model: keras.Model, loss: Any = None, optimizer: Any = None, **options: Any) -> keras.Model:
    model.compile(optimizer or sgd(), loss=loss, **{"jit_compile": False, **options})
    return model


class Stepped(keras.Model):
    """A network whose step takes the gradients of `loss_of(y, predictions)`."""

    def __init__(self, net: keras.Model, loss_of: Callable) -> None:
        super().__init__()
        self.net, self.loss_of = net, loss_of

    def call(self, x: Any) -> Any:
        return self.net(x)

    def train_step(self, data: Any) -> dict:
        x, y = data
        with tf.GradientTape() as tape:
            value = self.loss_of(y, self(x, training=True))
        gradients = tape.gradient(value, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"own": value}


def _in_step(fn: Callable, outputs: int, activation: str | None) -> keras.Model:
    return compiled(Stepped(dense(outputs, activation), fn))


def _in_compile(fn: Callable, outputs: int, activation: str | None) -> keras.Model:
    return compiled(dense(outputs, activation), fn)


def _in_class(fn: Callable, outputs: int, activation: str | None) -> keras.Model:
    class Own(keras.losses.Loss):
        def call(self, y_true, y_pred):
            return fn(y_true, y_pred)

    return compiled(dense(outputs, activation), Own())


def _in_compute_loss(fn: Callable, outputs: int, activation: str | None) -> keras.Model:
    class Own(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return fn(y, y_pred)

    net = dense(outputs, activation)
    return compiled(Own(net.inputs, net.outputs))


def _in_add_loss(fn: Callable, outputs: int, activation: str | None) -> keras.Model:
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.net = dense(outputs, activation)

        def train_step(self, data):
            return super().train_step((data, None))

        def call(self, data):
            x, y = data
            p = self.net(x)
            self.add_loss(fn(y, p))
            return p

    return compiled(Own())


PLACES = {
    "step": _in_step,
    "compile": _in_compile,
    "class": _in_class,
    "compute_loss": _in_compute_loss,
    "add_loss": _in_add_loss,
}

# -------------------------------------------------------------------------------------------- training


def trained(names: list[str], devices: int = 1, progress: str | None = None) -> list[Trained]:
    """Trains programs one after another on a worker; for `harness.workers(n).run`.

    Args:
      names: of programs.
      devices: logical CPU devices of this worker, with a replica on each.
      progress: a file in which the first rank keeps the number of programs begun.
    """
    results = []
    for number, name in enumerate(names):
        if progress is not None:
            pathlib.Path(progress).write_text(str(number))
        results.append(_trained(PROGRAMS[name], devices))
        keras.backend.clear_session(free_memory=False)
    return results


def _trained(program: Program, devices: int) -> Trained:
    begin = time.monotonic()
    keras.utils.set_random_seed(11)
    values: dict[str, Any] = {}
    error, is_refused = None, False
    strategy = harness.strategy(devices=[f"CPU:{i}" for i in range(devices)])
    with warnings.catch_warnings(), _logged() as texts:
        warnings.simplefilter("ignore")
        try:
            with strategy.scope():
                model = program.make()
            x, y = program.data()
            options = {"batch_size": BATCH, "epochs": EPOCHS, "shuffle": False, "verbose": 0, **program.fit}
            history = model.fit(x, y, **options).history
            if "sample_weight" in options:
                options["sample_weight"] = options["sample_weight"][:FEWER]
            more = model.fit(x[:FEWER], y[:FEWER], **{**options, "epochs": 1}).history
            for number, variable in enumerate(_variables(model)):
                name = getattr(variable, "path", variable.name)
                values[f"{number} {name}"] = np.array(tf.convert_to_tensor(variable))
            for name, numbers in history.items():
                each = [np.ravel(tf.convert_to_tensor(number)) for number in [*numbers, *more[name]]]
                values[f"log {name}"] = np.concatenate(each)
        except Exception as raised:
            text = str(raised).strip() or repr(raised)
            error = f"{type(raised).__name__}: {_first_line(text)}"
            is_refused = isinstance(raised, errors.TfringError) or "The replicas wrote different" in text
            if os.environ.get("CORPUS_TRACEBACK"):
                traceback.print_exc()
        finally:
            strategy.close()
    said = [text for text in texts if "each worker computes the whole batch" in text]
    return Trained(values, "\n".join(said) or None, error, is_refused, time.monotonic() - begin)


@contextlib.contextmanager
def _logged() -> Iterator[list[str]]:
    """Yields the messages that tfring logs."""
    logger, texts = logging.getLogger("tfring"), []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())
    logger.addHandler(handler)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)


def _variables(model: keras.Model) -> list:
    """Returns the variables of a model, the learning rate, and what TensorFlow's variables a model has of its own."""
    found = [*model.trainable_variables, *model.non_trainable_variables]
    found += [value for value in vars(model).values() if isinstance(value, tf.Variable)]
    rate = getattr(model.optimizer, "learning_rate", None)
    if isinstance(rate, keras.Variable):
        found.append(rate)
    numeric = [variable for variable in found if "string" not in str(variable.dtype)]
    return list({id(variable): variable for variable in numeric}.values())


def _first_line(text: str) -> str:
    """Returns the first line that says what was wrong, without what Keras and TensorFlow put before it."""
    lines = [re.sub(r"\x1b\[\d+m", "", line).strip() for line in text.splitlines()]
    lines = [line for line in lines if line]
    first = 0
    if lines[0].startswith("Graph execution error"):
        first = max((i + 1 for i, line in enumerate(lines[:-1]) if line.startswith(("Node:", "File "))), default=0)
    elif lines[0].startswith("Exception encountered") and len(lines) > 1:
        first = 1
    elif lines[0].startswith("in user code"):
        first = next((i for i in reversed(range(len(lines))) if re.match(r"\w+: ", lines[i])), 0)
    return lines[first][:300]


for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
