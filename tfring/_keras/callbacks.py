"""Callbacks pointed at one shared folder by all workers: rank 0 writes, all ranks restore the same.

Keras' callbacks know no chief: a second worker raises FileExistsError. And a callback that stops one rank would
leave the others waiting.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfring._keras import loop, place, slots
from tfring._keras.optimizers import optimizers_of
from tfring._keras.seam import ring_of_model, seam
from tfring._keras.sharding import cut_of
from tfring.errors import ConfigurationError


class RunsLast:
    """A callback that runs after all others, wherever it stands in the list: it keeps what they have left.

    What it `wants` after a step or an epoch is asked in one collective; the largest number of any rank is `granted` to
    all.
    """

    granted = 0
    others: Sequence = ()  # the user's callbacks that are none of these

    def wants(self) -> int:
        return 0

    def around_fit(self, model) -> contextlib.AbstractContextManager:
        """Entered before `fit` makes its first iterator, and left when it ends, however it ends."""
        return contextlib.nullcontext()


class _SaveNothing:
    """Stands for the model while ModelCheckpoint of another rank than 0 decides what it would save."""

    def __init__(self, model):
        self._model = model

    def save(self, *args, **kwargs):
        with slots.whole_pieces(self._model, keep=False):
            pass

    save_weights = save

    def __getattr__(self, name):
        return getattr(self._model, name)


def install():
    import keras

    @seam(keras.callbacks.ModelCheckpoint, "_save_model")
    def save_model(original, self, *args, **kwargs):
        strategy = ring_of_model(self.model)
        # What extends ModelCheckpoint may go on to use the file: there every rank writes, and none finds half of one.
        if strategy is None or strategy.cluster.is_chief or type(self) is not keras.callbacks.ModelCheckpoint:
            return original(self, *args, **kwargs)
        model, self._model = self._model, _SaveNothing(self._model)
        try:
            return original(self, *args, **kwargs)
        finally:
            self._model = model


def for_rank(callbacks, model, strategy) -> list:
    """The callbacks this rank runs: those that only write files run on rank 0."""
    import keras

    in_pieces = "shard_optimizer=True" if strategy.shard_optimizer else ""
    in_pieces = in_pieces or next((f"{v.path!r} in pieces" for v in model.variables if cut_of(v) is not None), "")
    if in_pieces and any(isinstance(c, keras.callbacks.BackupAndRestore) for c in callbacks):
        raise ConfigurationError(
            "BackupAndRestore saves and restores on rank 0 alone, which has a piece of each slot. Received: "
            f"BackupAndRestore with {in_pieces}. Use tfring.callbacks.Backup."
        )
    if strategy.cluster.is_chief:
        return list(callbacks)
    for callback in callbacks:  # what extends CSVLogger may do more than write, so it runs
        if isinstance(callback, keras.callbacks.CSVLogger) and type(callback) is not keras.callbacks.CSVLogger:
            callback.filename = os.devnull
    writers = (keras.callbacks.CSVLogger, keras.callbacks.TensorBoard)
    backup = keras.callbacks.BackupAndRestore
    return [c for c in callbacks if type(c) not in writers and not isinstance(c, backup)]


def arranged(name, callbacks, model, strategy, verbose) -> list:
    """The callbacks of `fit`, `evaluate` or `predict`, in the order they run on this rank."""
    import keras

    callbacks = for_rank([] if callbacks is None else keras.tree.flatten(callbacks), model, strategy)
    if strategy.updater is not None and name == "fit":
        callbacks = strategy.updater.callbacks(callbacks)
    last = [c for c in callbacks if isinstance(c, RunsLast)] if name == "fit" else []
    if strategy.extended.world.world_size == 1 and not last:
        return callbacks
    others = [c for c in callbacks if c not in last]
    callbacks = [*others, agreement(strategy, name, callbacks, verbose)]
    if last and not any(isinstance(c, keras.callbacks.History) for c in others):
        callbacks.append(keras.callbacks.History())  # which Keras would put behind them
    for callback in last:
        callback.others = others
    return callbacks + last


@contextlib.contextmanager
def around(name, callbacks, model):
    """While `fit`, `evaluate` or `predict` runs with these callbacks."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(loop.unread_logs(model))
        if name == "fit":
            stack.enter_context(place.fit_under_way())
            for callback in callbacks if isinstance(callbacks, list) else ():
                if isinstance(callback, RunsLast):
                    stack.enter_context(callback.around_fit(model))
        yield


def _is_own(callback, *methods) -> bool:
    """Whether a callback has more in these methods than Keras' base class."""
    from keras.src import utils

    return not all(utils.is_default(getattr(callback, method)) for method in methods)


def _watches_begin(callback, kind: str) -> bool:
    """Whether a callback does something before each batch; those of Keras only count batches."""
    import keras

    if type(callback) is keras.callbacks.TensorBoard:
        return False
    return _is_own(callback, f"on_{kind}_batch_begin", *(["on_batch_begin"] if kind == "train" else []))


def _reads_logs(callback, kind: str) -> bool:
    """Whether a callback may read the logs of a batch."""
    import keras

    if not _is_own(callback, f"on_{kind}_batch_end", *(["on_batch_end"] if kind == "train" else [])):
        return False
    every = {
        keras.callbacks.ModelCheckpoint: "save_freq",
        keras.callbacks.BackupAndRestore: "save_freq",
        keras.callbacks.TensorBoard: "update_freq",
    }.get(type(callback))
    return every is None or getattr(callback, every) != "epoch"


def agreement(strategy, name, callbacks, verbose):
    """A callback that runs after the user's: what one rank decided, all ranks know.

    It is also what makes a file that rank 0 wrote in a callback complete before any rank goes on.

    Args:
      strategy: the RingStrategy.
      name: "fit", "evaluate" or "predict".
      callbacks: the user's, on this rank.
      verbose: what Keras is told.
    """
    import keras

    control = strategy.extended.world
    last = [c for c in callbacks if isinstance(c, RunsLast)] if name == "fit" else []
    kinds = {"fit": ["train", "test"], "evaluate": ["test"], "predict": []}[name]
    shown = {"fit": "train", "evaluate": "test"}.get(name) if verbose in ("auto", 1, True) else None
    reads = [kind == shown or any(_reads_logs(c, kind) for c in callbacks) for kind in kinds]
    watches = [any(_watches_begin(c, kind) for c in callbacks) for kind in kinds]

    def largest(numbers: list[int], name: str) -> list[int]:
        """The largest of each over all ranks."""
        [agreed] = control.all_reduce([tf.constant(numbers)], "max", name=name)
        return agreed.numpy().tolist()

    def learning_rates(model, stop: bool = False) -> bool:
        """Gives every rank rank 0's learning rates, as callbacks left them, and returns whether any rank stops."""
        rates = [o for o in optimizers_of(model) if _own_rate(o) is not None]
        mine = [_own_rate(o) for o in rates]
        sent = mine if strategy.cluster.is_chief else [-np.inf] * len(mine)
        [agreed] = control.all_reduce([tf.constant([float(stop), *sent], tf.float64)], "max", name="learning rates")
        stop, *agreed = agreed.numpy()
        for optimizer, own, rate in zip(rates, mine, agreed, strict=True):
            if own != rate:
                warnings.warn(
                    f"A callback set another learning rate on rank {strategy.cluster.rank} ({own}) than on rank 0 "
                    f"({rate}); rank 0's holds. Received: {type(optimizer).__name__} {optimizer.name!r}. Decide on "
                    "what is equal on all ranks: logs, the epoch, a seeded random number.",
                    stacklevel=2,
                )
                optimizer.learning_rate = rate
        return bool(stop > 0)

    class Agreement(keras.callbacks.Callback):
        _at_once: frozenset = frozenset()  # kinds of batches after which ranks agree, before callbacks see the next

        def _begin(self, *numbers):
            """Agrees on which callbacks there are on any rank; returns the largest of the numbers."""
            agreed = largest([*map(int, reads), *map(int, watches), *numbers], "callbacks")
            loop.leave_unread(self.model, [k for k, read in zip(kinds, agreed, strict=False) if not read])
            watched = {k for k, watch in zip(kinds, agreed[len(kinds) :], strict=False) if watch}
            self._at_once = frozenset(watched | ({"train"} if last else set()))
            return agreed[2 * len(kinds) :]

        def on_train_begin(self, logs=None):
            # BackupAndRestore has restored on rank 0, if at all.
            model = self.model
            mine = [-2, 0]
            if strategy.cluster.is_chief:
                epoch = getattr(model, "_initial_epoch", None)
                mine = [-1 if epoch is None else int(epoch), int(_restored(self))]
            epoch, restored = self._begin(*mine)
            if epoch >= 0:
                model._initial_epoch = epoch
            if restored:
                broadcast_variables(strategy, model)

        def on_test_begin(self, logs=None):
            if name == "evaluate":
                self._begin()

        def on_epoch_begin(self, epoch, logs=None):
            learning_rates(self.model)

        def _agree(self):
            wanted = [int(self.model.stop_training), *(c.wants() for c in last)]
            stop, *granted = largest(wanted, "stop_training")
            self.model.stop_training = bool(stop)
            for callback, number in zip(last, granted, strict=True):
                callback.granted = number

        def on_train_batch_end(self, batch, logs=None):
            # Else in the next status (`loop.py`). Without this method Keras would run callbacks in another thread.
            if "train" in self._at_once:
                self._agree()

        def on_epoch_end(self, epoch, logs=None):
            learning_rates(self.model)
            self._agree()

        def on_test_batch_end(self, batch, logs=None):
            if "test" in self._at_once:
                [stop] = largest([int(self.model.stop_evaluating)], "stop_evaluating")
                self.model.stop_evaluating = bool(stop)

        def on_predict_batch_end(self, batch, logs=None):
            [stop] = largest([int(self.model.stop_predicting)], "stop_predicting")
            self.model.stop_predicting = bool(stop)

        def on_train_end(self, logs=None):
            strategy.barrier()

    return Agreement()


def _own_rate(optimizer) -> float | None:
    """The learning rate as the optimizer holds it; None where a schedule computes it."""
    import keras

    rate = getattr(optimizer, "_learning_rate", None)
    return float(rate.numpy()) if isinstance(rate, keras.Variable) else None


def _restored(callback) -> bool:
    """Whether this rank's callbacks restored the model before training: BackupAndRestore found a backup."""
    return bool(getattr(callback.model, "_initial_epoch", None))


def all_variables(model) -> list:
    """Returns the variables of a model and of the optimizers it holds, those of its own first, each once."""
    optimizers = [model.optimizer] if model.optimizer is not None else []
    variables = [*model.variables, *(v for o in [*optimizers, *optimizers_of(model)] for v in o.variables)]
    return list({id(v): v for v in variables}.values())


def broadcast_variables(strategy, model) -> None:
    """Gives every rank rank 0's weights and optimizer state."""
    if model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    for variable in all_variables(model):
        [value] = strategy.extended.world.broadcast(
            [tf.convert_to_tensor(np.asarray(variable.numpy()))], name="restored variable"
        )
        variable.assign(value)
