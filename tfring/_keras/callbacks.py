"""Callbacks pointed at one shared folder by all workers: rank 0 writes, all ranks restore the same.

Keras' callbacks know no chief: a second worker raises FileExistsError. And a callback that stops one rank would
leave the others waiting.
"""

from __future__ import annotations

import warnings

import numpy as np
import tensorflow as tf

from tfring._keras import outside
from tfring._keras.seam import ring_of_model, seam


class _SaveNothing:
    """Stands for the model while ModelCheckpoint of another rank than 0 decides what it would save."""

    def __init__(self, model):
        self._model = model

    def save(self, *args, **kwargs):
        pass

    def save_weights(self, *args, **kwargs):
        pass

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


def for_rank(callbacks, strategy) -> list:
    """The callbacks this rank runs: those that only write files run on rank 0."""
    import keras

    writers = (keras.callbacks.CSVLogger, keras.callbacks.TensorBoard, keras.callbacks.BackupAndRestore)
    if strategy.cluster.is_chief:
        return list(callbacks)
    return [c for c in callbacks if not isinstance(c, writers)]


def agreement(strategy):
    """A callback that runs last: what one rank decided, all ranks know.

    It is also what makes a file that rank 0 wrote in a callback complete before any rank goes on.
    """
    import keras

    control = strategy.extended.control

    def any_rank(flag: bool, name: str) -> bool:
        [agreed] = control.all_reduce([tf.constant([int(flag)])], "max", name=name)
        return bool(agreed[0] > 0)

    def learning_rates(model, stop: bool = False) -> bool:
        """Gives every rank rank 0's learning rates, as callbacks left them, and returns whether any rank stops."""
        rates = [o for o in outside.optimizers_of(model) if _own_rate(o) is not None]
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
        def on_train_begin(self, logs=None):
            # BackupAndRestore has restored on rank 0, if at all.
            model = self.model
            epoch = getattr(model, "_initial_epoch", None)
            state = tf.constant([-1 if epoch is None else int(epoch), int(_restored(self))], tf.int64)
            [state] = control.broadcast([state], name="restored epoch")
            epoch, restored = (int(x) for x in state)
            if epoch >= 0:
                model._initial_epoch = epoch
            if restored:
                broadcast_variables(strategy, model)

        def on_epoch_begin(self, epoch, logs=None):
            learning_rates(self.model)

        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = any_rank(self.model.stop_training, "stop_training")

        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = learning_rates(self.model, stop=self.model.stop_training)

        def on_test_batch_end(self, batch, logs=None):
            self.model.stop_evaluating = any_rank(self.model.stop_evaluating, "stop_evaluating")

        def on_predict_batch_end(self, batch, logs=None):
            self.model.stop_predicting = any_rank(self.model.stop_predicting, "stop_predicting")

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
    """The variables of a model and its optimizer, each once."""
    variables = list(model.variables)
    if model.optimizer is not None:
        variables += model.optimizer.variables
    return list({id(v): v for v in variables}.values())


def broadcast_variables(strategy, model) -> None:
    """Gives every rank rank 0's weights and optimizer state."""
    if model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    for variable in all_variables(model):
        [value] = strategy.extended.control.broadcast(
            [tf.convert_to_tensor(np.asarray(variable.numpy()))], name="restored variable"
        )
        variable.assign(value)
