"""Logs of speed: rows a second of all workers, the share of time they waited for each other, bytes they sent."""

from __future__ import annotations

import time
from typing import Any

import keras
import tensorflow as tf

from tfring._keras.seam import ring_of_model

_NOT_COUNTED = float("nan")


class Throughput(keras.callbacks.Callback):
    """Adds to the logs of each epoch how fast it was, equal on all ranks: for CSVLogger, TensorBoard and the history.

    It stands before the callbacks that write logs, and costs one small collective an epoch. The time is that from the
    epoch's begin to its end, with input, other callbacks and `validation_data`.

    Args:
      batch_size: The rows of a global batch; with it there is `samples_per_second`, in which a last batch with fewer
        rows counts as a full one. Default: None.

    Logs:
      `steps_per_second`, updates of weights; `samples_per_second`, rows of all workers; `waiting`, the share of the
      time, from 0 to 1, that a worker's collectives waited for others, the mean over workers; `megabytes_sent`, of all
      workers. The last two where the engine counts them: not with communication="tensorflow", and with parameter
      servers no `waiting`, for their own logs tell it. A worker of asynchronous parameter servers logs its own figures.

    Raises:
      ValueError: `batch_size` is no whole number from 1, or the model has no optimizer, whose updates are counted.

    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> history = model.fit(tf.ones((64, 2)), tf.ones((64, 1)), batch_size=8, verbose=0, callbacks=[Throughput(8)])
    >>> sorted(set(history.history) - {"loss"})
    ['megabytes_sent', 'samples_per_second', 'steps_per_second', 'waiting']
    """

    def __init__(self, batch_size: int | None = None) -> None:
        super().__init__()
        is_count = isinstance(batch_size, int) and not isinstance(batch_size, bool) and batch_size >= 1
        if batch_size is not None and not is_count:
            raise ValueError(f"`batch_size` is {batch_size!r}, not a whole number, 1 or more, or None.")
        self.batch_size = batch_size

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if getattr(self.model, "optimizer", None) is None:
            raise ValueError(
                "The model has no optimizer, whose updates Throughput counts. Pass an optimizer to `compile`."
            )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._before = self._now()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        seconds, updates, waited, sent = (now - before for now, before in zip(self._now(), self._before, strict=True))
        ring = ring_of_model(self.model)
        world = None if ring is None else ring.world
        if world is not None and world.world_size > 1:
            size = world.world_size
            [total] = world.all_reduce([tf.constant([seconds, waited, sent], tf.float64)], name="throughput")
            seconds, waited, sent = (total.numpy() / [size, size, 1]).tolist()
        logs = {} if logs is None else logs
        logs["steps_per_second"] = updates / seconds
        if self.batch_size is not None:
            optimizer: Any = getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)  # of scaled losses
            batches = updates * (optimizer.gradient_accumulation_steps or 1)
            logs["samples_per_second"] = batches * self.batch_size / seconds
        if waited == waited:  # is counted
            logs["waiting"] = min(1.0, waited / seconds)
        if sent == sent:
            logs["megabytes_sent"] = sent / 1e6

    def _now(self) -> tuple[float, float, float, float]:
        """Returns seconds of the clock, updates, seconds waited and bytes sent; NaN where they are not counted."""
        optimizer: Any = self.model.optimizer
        ring = ring_of_model(self.model)
        counts = (0.0, 0) if ring is None else (ring.seconds_waited(), ring.bytes_sent())
        waited, sent = (_NOT_COUNTED if count is None else float(count) for count in counts)
        return time.monotonic(), float(optimizer.iterations.numpy()), waited, sent
