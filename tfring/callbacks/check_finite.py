"""`CheckFinite`: ends training that has produced NaN or infinity, and reports where it began."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import keras
import tensorflow as tf

from tfring._keras.callbacks import all_variables
from tfring._keras.seam import ring_of_model
from tfring.cross_device_ops import values_of
from tfring.errors import ConfigurationError, NotFiniteError
from tfring.step import finite


class CheckFinite(keras.callbacks.Callback):
    """Ends `fit` when a gradient or a variable is NaN or infinite, and names the first one and its replica.

    In each step every replica checks its own gradients before they are reduced. This costs a pass over them and no
    communication. Every `every_steps` steps, and at the end of each epoch, the ranks share their results and check
    weights, optimizer state and moving statistics. Put it before callbacks that save.

    Args:
      every_steps: Number of steps between two checks of all ranks. Defaults to 100.

    Raises:
      ConfigurationError: If `every_steps` is below 1; in `fit`, if the model was not made in the scope of a
        RingStrategy.
      NotFiniteError: In `fit`, on every rank, if a gradient or a variable is not finite.

    Gradients may be infinite under a LossScaleOptimizer, so only variables are checked then.

    >>> import tfring
    >>> with tfring.RingStrategy().scope():
    ...     model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, name="last")], name="model")
    ...     model.compile("sgd", "mse")
    >>> x = tf.constant([[1.0], [float("inf")]])
    >>> try:
    ...     _ = model.fit(x, x, callbacks=[CheckFinite()], verbose=0)
    ... except tfring.errors.NotFiniteError as error:
    ...     print(str(error)[:48])
    The gradient of model/last/kernel was not finite
    """

    def __init__(self, every_steps: int = 100) -> None:
        super().__init__()
        if every_steps < 1:
            raise ConfigurationError(f"`every_steps` is {every_steps!r}, not 1 or more.")
        self._every_steps = every_steps
        self._ring: Any = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._ring = ring_of_model(self.model)
        if self._ring is None:
            raise ConfigurationError(
                "CheckFinite was given a model made outside of the scope of a `tfring.RingStrategy`."
            )
        self._steps = 0
        self._watch = finite.begin(self._ring)
        self.model.make_train_function(force=True)  # a function traced earlier does not watch

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._steps += self.model.steps_per_execution
        if self._steps >= self._every_steps:
            self._check()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self._steps:
            self._check()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        finite.end(self._ring)
        self.model.train_function = None

    def _check(self) -> None:
        """Checks on all ranks, with one collective."""
        self._steps = 0
        variables = [v for v in all_variables(self.model) if v.value.dtype.is_floating]
        replicas = range(len(self._ring.devices))
        mine = [
            tf.concat([self._watch.notes[r], [_first_bad([values_of(v.value)[r] for v in variables])]], 0)
            for r in replicas
        ]
        everyone = self._ring.world.gather_equal(tf.stack(mine), name="what is not finite").numpy()
        # A worker that trains by itself has only its own notes.
        is_by_itself = len(everyone) < self._ring.cluster.world_size
        first = self._ring.cluster.rank if is_by_itself else 0
        others = " This worker does not know about the others: one that names an earlier step came first."
        others = others if is_by_itself else ""
        noted = [(step, number, replica) for replica, (step, number, _) in enumerate(everyone, first) if step >= 0]
        if noted:
            step, number, replica = min(noted)
            self._raise(
                f"The gradient of {self._watch.names[number]} was not finite on replica {{}} at step {step}, before "
                "any other. Look at that replica's rows, at its loss, and at operations such as a logarithm of 0."
                + others,
                replica,
            )
        bad = [(number, replica) for replica, (_, _, number) in enumerate(everyone, first) if number >= 0]
        if bad:
            number, replica = min(bad)
            self._raise(
                f"{variables[number].path} is not finite on replica {{}}, the first such variable, although every "
                "gradient was finite: an update was too large, or moving statistics were computed from infinite values."
                + others,
                replica,
            )

    def _raise(self, text: str, replica: int) -> NoReturn:
        finite.end(self._ring)
        self.model.train_function = None
        per_worker = len(self._ring.devices)
        raise NotFiniteError(text.format(f"{replica} (rank {replica // per_worker})"))


@tf.function(reduce_retracing=True, autograph=False)
def _first_bad(values: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns an int64 scalar: the number of the first value that is not finite, -1 if all are finite."""
    bad = tf.stack([tf.logical_not(tf.reduce_all(tf.math.is_finite(value))) for value in values])
    return tf.where(tf.reduce_any(bad), tf.argmax(tf.cast(bad, tf.int8)), -1)
