"""Callbacks of workers that share one folder: rank 0 writes, and all ranks restore the same.

Keras' callbacks have no notion of a chief: a second worker raises FileExistsError. A callback that stops only one
rank would leave the others waiting.
"""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras.src import utils

from tfring._keras import configuration, loop, resume
from tfring._keras.optimizers import optimizers_of
from tfring._keras.seam import ring_of_model
from tfring._keras.sharding import sharding_of, slots
from tfring.errors import ConfigurationError
from tfring.runtime import Ring

_OF_PREDICT = ("on_predict_begin", "on_predict_batch_begin", "on_predict_batch_end")
_LOWEST = int(np.iinfo(np.int64).min)


class LateCallback:
    """A callback that runs after all others, whatever its position in the list: it keeps the state they have left.

    After a step or an epoch, one collective asks what it `wants`. The largest number of any rank is `granted` to all.
    """

    granted = 0
    others: Sequence = ()  # the user's callbacks that are not LateCallbacks

    def wants(self) -> int:
        return 0

    def around_fit(self, model: Any) -> contextlib.AbstractContextManager:
        """Returns a context entered before `fit` makes its first iterator, and exited when `fit` returns or raises."""
        return contextlib.nullcontext()


class _SaveNothing:
    """Replaces the model while a ModelCheckpoint on a rank other than 0 decides what it would save."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def save(self, *args: Any, **kwargs: Any) -> None:
        with slots.full_values_of(self._model, keep=False):
            pass

    save_weights = save

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


@contextlib.contextmanager
def _adapt_to_ring(callback: Any) -> Iterator[None]:
    """Makes a ModelCheckpoint save on rank 0, and a SwapEMAWeights swap sharded averages too, inside the context."""
    ours: dict[str, Callable] = {}
    if isinstance(callback, keras.callbacks.ModelCheckpoint):
        ours = {"_save_model": functools.partial(_save_model, callback)}
    elif isinstance(callback, keras.callbacks.SwapEMAWeights):
        ours = {"_tf_swap_variables": slots.swap_averages, "_tf_finalize_ema_values": slots.keep_averages}
    found = [name for name in ours if name not in vars(callback)]  # otherwise an enclosing call did
    for name in found:
        vars(callback)[name] = functools.partial(ours[name], getattr(callback, name))
    try:
        yield
    finally:
        for name in found:
            del vars(callback)[name]


def _save_model(callback: Any, original: Callable[..., Any], epoch: int, batch: int | None, logs: Any) -> None:
    """Saves ModelCheckpoint's file on rank 0; the other ranks take part in what rank 0 needs from them."""
    ring = ring_of_model(callback.model)
    if ring is None:
        return original(epoch, batch, logs)
    if type(callback) is not keras.callbacks.ModelCheckpoint:
        # A subclass of ModelCheckpoint may use the file afterwards, so every rank writes it, and none finds a partial
        # file. Keras makes the folder if it sees none, although another rank may have made it in the meantime.
        tf.io.gfile.makedirs(os.path.dirname(os.path.abspath(callback._get_file_path(epoch, batch, logs))))
    elif not ring.cluster.is_chief:
        model, path = callback._model, callback.filepath
        callback._model, callback.filepath = _SaveNothing(model), os.path.basename(path)  # so no folder is made either
        try:
            return original(epoch, batch, logs)
        finally:
            callback._model, callback.filepath = model, path
    return original(epoch, batch, logs)


def callbacks_of_rank(callbacks: Sequence[Any], model: Any, ring: Ring) -> list:
    """Returns the callbacks that this rank runs: those that only write files run on rank 0."""
    sharded = "shard_optimizer=True" if ring.shard_optimizer else ""
    sharded = sharded or next((f"sharded {v.path!r}" for v in model.variables if sharding_of(v) is not None), "")
    if sharded and any(isinstance(c, keras.callbacks.BackupAndRestore) for c in callbacks):
        raise ConfigurationError(
            f"BackupAndRestore saves and restores on rank 0 only, but with {sharded} each rank has a shard. Use "
            "tfring.callbacks.Backup."
        )
    backup = keras.callbacks.BackupAndRestore
    if any(isinstance(c, backup) for c in callbacks):
        callbacks = [*(_OptimizerBuilder(ring, c) for c in callbacks if isinstance(c, backup)), *callbacks]
    if ring.cluster.is_chief:
        return list(callbacks)
    for callback in callbacks:  # a subclass of CSVLogger may do more than write, so it runs
        if isinstance(callback, keras.callbacks.CSVLogger) and type(callback) is not keras.callbacks.CSVLogger:
            callback.filename = os.devnull
    writers = (keras.callbacks.CSVLogger, keras.callbacks.TensorBoard)
    return [c for c in callbacks if type(c) not in writers and not isinstance(c, backup)]


class _OptimizerBuilder(keras.callbacks.Callback):
    """Makes all ranks build the optimizer if BackupAndRestore is about to build it on rank 0 in order to restore it.

    Args:
      ring: The workers.
      backup: The BackupAndRestore.
    """

    def __init__(self, ring: Ring, backup: Any) -> None:
        super().__init__()
        self._ring, self._backup = ring, backup

    def on_train_begin(self, logs: Any = None) -> None:
        optimizer = self.model.optimizer
        if optimizer is None or optimizer.built:
            return
        finds = self._ring.cluster.is_chief and utils.file_utils.exists(self._backup._weights_path)
        if self._ring.world.largest([int(finds)], name="a backup to restore")[0]:
            optimizer.build(self.model.trainable_variables)


class CallbackTraits(NamedTuple):
    """The needs of the callbacks of a call. The largest of each number over all ranks applies.

    Attributes:
      reads_train: Whether a callback may read the logs of a training batch.
      reads_test: Whether a callback may read the logs of a test batch.
      watches_train: Whether a callback does something before each training batch.
      watches_test: Whether a callback does something before each test batch.
      watches_predict: Whether a callback sees batches of `predict`.
      any_callback: Whether there is any callback.
      begins_epochs: Whether a callback does something before each epoch.
      rates: A digest of the optimizers' learning rates.
      minus_rates: The negative of `rates`, so that `largest` tells whether all ranks have the same.
    """

    reads_train: int
    reads_test: int
    watches_train: int
    watches_test: int
    watches_predict: int
    any_callback: int
    begins_epochs: int
    rates: int
    minus_rates: int

    def reads(self, kind: str) -> bool:
        """Returns whether the logs of a batch of this kind, "train" or "test", may be read."""
        return bool(self.reads_train if kind == "train" else self.reads_test)


def traits_of(name: str, model: Any, callbacks: Any, verbose: Any) -> CallbackTraits:
    """Returns the needs of this rank's callbacks.

    Args:
      name: "fit", "evaluate" or "predict".
      model: The Keras model.
      callbacks: The callbacks that the user passes.
      verbose: Verbosity mode, as in Keras. Rank 0's progress bar reads logs.
    """
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return CallbackTraits(1, 1, 1, 1, 1, 1, 1, 0, 0)
    given = [] if callbacks is None else keras.tree.flatten(callbacks)
    shown = {"fit": "train", "evaluate": "test"}.get(name) if verbose in ("auto", 1, True) else None
    rates = configuration.number([_own_rate(o) for o in optimizers_of(model)]) if name == "fit" else 0
    return CallbackTraits(
        reads_train=int(shown == "train" or any(_reads_logs(c, "train") for c in given)),
        reads_test=int(shown == "test" or any(_reads_logs(c, "test") for c in given)),
        watches_train=int(any(_has_batch_begin_hook(c, "train") for c in given)),
        watches_test=int(any(_has_batch_begin_hook(c, "test") for c in given)),
        watches_predict=int(any(_has_override(c, *_OF_PREDICT) for c in given)),
        any_callback=int(bool(given)),
        begins_epochs=int(any(_has_override(c, "on_epoch_begin") for c in given)),
        rates=rates,
        minus_rates=-rates,
    )


def prepared(name: str, callbacks: Any, model: Any, ring: Ring, traits: CallbackTraits) -> list:
    """Returns the callbacks of `fit`, `evaluate` or `predict`, in the order they run on this rank.

    Args:
      name: "fit", "evaluate" or "predict".
      callbacks: The callbacks that the user passes.
      model: The Keras model.
      ring: The workers.
      traits: The needs of the callbacks of all ranks.
    """
    callbacks = callbacks_of_rank([] if callbacks is None else keras.tree.flatten(callbacks), model, ring)
    if ring.updater is not None and name == "fit":
        callbacks = ring.updater.callbacks(callbacks)
    last = [c for c in callbacks if isinstance(c, LateCallback)] if name == "fit" else []
    if ring.world.world_size == 1 and not last:
        return callbacks
    others = [c for c in callbacks if c not in last]
    callbacks = [*others, Agreement(ring, name, last, traits)]
    if last and not any(isinstance(c, keras.callbacks.History) for c in others):
        callbacks.append(keras.callbacks.History())  # otherwise Keras would append it after them
    for callback in last:
        callback.others = others
    return callbacks + last


@contextlib.contextmanager
def around(name: str, callbacks: Any, model: Any) -> Iterator[None]:
    """Prepares callbacks and model for the run of `fit`, `evaluate` or `predict` inside the context."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(loop.unread_logs(model))
        if name == "fit":
            stack.enter_context(resume.fit_under_way())
            for callback in callbacks if isinstance(callbacks, list) else ():
                if isinstance(callback, LateCallback):
                    stack.enter_context(callback.around_fit(model))
        for callback in getattr(callbacks, "callbacks", callbacks) or ():  # also those of a CallbackList
            stack.enter_context(_adapt_to_ring(callback))
        yield


def _has_override(callback: Any, *methods: str) -> bool:
    """Returns True if a callback overrides any of these methods of Keras' base class."""
    return not all(utils.is_default(getattr(callback, method)) for method in methods)


def _has_batch_begin_hook(callback: Any, kind: str) -> bool:
    """Returns True if a callback does something before each batch; Keras' TensorBoard only counts and profiles."""
    if type(callback) is keras.callbacks.TensorBoard:
        return False
    return _has_override(callback, f"on_{kind}_batch_begin", *(["on_batch_begin"] if kind == "train" else []))


def _reads_logs(callback: Any, kind: str) -> bool:
    """Returns True if a callback may read the logs of a batch."""
    if not _has_override(callback, f"on_{kind}_batch_end", *(["on_batch_end"] if kind == "train" else [])):
        return False
    every = {
        keras.callbacks.ModelCheckpoint: "save_freq",
        keras.callbacks.BackupAndRestore: "save_freq",
        keras.callbacks.TensorBoard: "update_freq",
    }.get(type(callback))
    return every is None or getattr(callback, every) != "epoch"


class Agreement(keras.callbacks.Callback):
    """Runs after the user's callbacks, and tells all ranks what one rank decides.

    It also ensures that a file that rank 0 wrote in a callback at the end of an epoch or of training is complete before
    any rank continues. Without user callbacks it only sends learning rates, once, if they differ between ranks: the
    loop itself agrees on its end (`loop.py`).

    Args:
      ring: The workers.
      name: "fit", "evaluate" or "predict".
      last: The callbacks that run after this one.
      traits: The needs of the callbacks of all ranks.
    """

    def __init__(self, ring: Ring, name: str, last: Sequence[LateCallback], traits: CallbackTraits) -> None:
        super().__init__()
        self._ring = ring
        self._world = ring.world
        self._name, self._last, self._traits = name, last, traits
        self._rates_agree = traits.rates == -traits.minus_rates

    def _leave_unread(self) -> None:
        kinds = {"fit": ("train", "test"), "evaluate": ("test",)}[self._name]
        loop.leave_unread(self.model, [kind for kind in kinds if not self._traits.reads(kind)])

    # -- training --------------------------------------------------------------------------------------------------

    def on_train_begin(self, logs: Any = None) -> None:
        self._leave_unread()
        if not self._traits.any_callback and self._rates_agree:
            return
        # If BackupAndRestore has restored, it has done so on rank 0.
        mine = [-2, 0]
        if self._ring.cluster.is_chief:
            epoch = getattr(self.model, "_initial_epoch", None)
            mine = [-1 if epoch is None else int(epoch), int(_restored(self))]
        epoch, restored = self._agree("callbacks", mine)
        if epoch >= 0:
            self.model._initial_epoch = epoch
        if restored:
            broadcast_variables(self._ring, self.model)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self._traits.begins_epochs:
            self._agree("learning rates")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        # Otherwise the next status agrees on it (`loop.py`). Without this method Keras would run callbacks in another
        # thread.
        if self._traits.watches_train or self._last:
            self._decide()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._traits.any_callback:
            self._decide(with_rates=True)

    def on_train_end(self, logs: Any = None) -> None:
        if self._traits.any_callback:
            self._ring.peers.barrier(name="barrier")

    def _decide(self, *, with_rates: bool = False) -> None:
        """Agrees, in one collective, on whether training stops and on what the late callbacks want."""
        mine = [int(self.model.stop_training), *(c.wants() for c in self._last)]
        name = "stop_training"
        stop, *granted = self._agree(name, mine) if with_rates else self._world.largest(mine, name=name)
        self.model.stop_training = bool(stop)
        for callback, number in zip(self._last, granted, strict=True):
            callback.granted = number

    def _agree(self, name: str, numbers: Sequence[int] = ()) -> list[int]:
        """Gives every rank the learning rates that callbacks left on rank 0; returns the largest of each number."""
        own_rates = [(o, _own_rate(o)) for o in optimizers_of(self.model)]
        optimizers = [o for o, rate in own_rates if rate is not None]
        mine = [rate for _, rate in own_rates if rate is not None]
        is_chief = self._ring.cluster.is_chief
        bits = [int(np.float64(rate).view(np.int64)) if is_chief else _LOWEST for rate in mine]
        agreed = self._world.largest([*numbers, *bits], name=name)
        rates = np.array(agreed[len(numbers) :], np.int64).view(np.float64).tolist()
        for optimizer, own, rate in zip(optimizers, mine, rates, strict=True):
            if own != rate:
                warnings.warn(
                    f"The learning rate of {type(optimizer).__name__} {optimizer.name!r} is {own} on rank "
                    f"{self._ring.cluster.rank} and {rate} on rank 0. All ranks now use that of rank 0. Set the same "
                    "rate on all ranks; in a callback, compute it from what all ranks share: logs, the epoch, a seeded "
                    "random number.",
                    stacklevel=2,
                )
                optimizer.learning_rate = rate
        return agreed[: len(numbers)]

    # -- evaluation and prediction ---------------------------------------------------------------------------------

    def on_test_begin(self, logs: Any = None) -> None:
        if self._name == "evaluate":
            self._leave_unread()

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._traits.watches_test:
            [stop] = self._world.largest([int(self.model.stop_evaluating)], name="stop_evaluating")
            self.model.stop_evaluating = bool(stop)

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._traits.watches_predict:
            [stop] = self._world.largest([int(self.model.stop_predicting)], name="stop_predicting")
            self.model.stop_predicting = bool(stop)


def _own_rate(optimizer: Any) -> float | None:
    """Returns the learning rate that the optimizer holds, or None if a schedule computes it."""
    rate = getattr(optimizer, "_learning_rate", None)
    return float(rate.numpy()) if isinstance(rate, keras.Variable) else None


def _restored(callback: Any) -> bool:
    """Returns True if this rank's callbacks restored the model before training: BackupAndRestore found a backup."""
    return bool(getattr(callback.model, "_initial_epoch", None))


def all_variables(model: Any) -> list:
    """Returns the variables of a model and of the optimizers it holds, each once, the model's own first."""
    optimizers = [model.optimizer] if model.optimizer is not None else []
    variables = [*model.variables, *(v for o in [*optimizers, *optimizers_of(model)] for v in o.variables)]
    return list({id(v): v for v in variables}.values())


def broadcast_variables(ring: Ring, model: Any) -> None:
    """Gives every rank the weights and optimizer state of rank 0."""
    for variable in all_variables(model):
        [value] = ring.world.broadcast(
            [tf.convert_to_tensor(np.asarray(variable.numpy()))], name="restored variable"
        )
        variable.assign(value)
