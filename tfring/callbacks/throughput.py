"""Logs of speed: rows per second of all workers, the share of time they waited for each other, bytes they sent."""

from __future__ import annotations

import time
from typing import Any

import keras
import tensorflow as tf

from tfring._keras.seam import ring_of_model

_NOT_COUNTED = float("nan")


class Throughput(keras.callbacks.Callback):
    """Adds the speed of each epoch to its logs, for CSVLogger, TensorBoard and the history. It is equal on all ranks.

    Put it before the callbacks that write logs. It costs one small collective per epoch. The time is measured from the
    beginning of the epoch to its end, including input, other callbacks and `validation_data`.

    Args:
      batch_size: Number of rows of a global batch. If given, `samples_per_second` is logged; a last batch with fewer
        rows counts as a full one. Defaults to None.

    Logs:
      `steps_per_second`, updates of the weights; `samples_per_second`, rows of all workers; `waiting`, the share of the
      time, from 0 to 1, that a worker's collectives waited for others, averaged over workers; `megabytes_sent`, by all
      workers. The last two are logged if the engine counts them: neither with communication="tensorflow", and no
      `waiting` with parameter servers (asynchronous ones add `waited_seconds`). A worker of asynchronous parameter
      servers logs its own figures.

    Raises:
      ValueError: If `batch_size` is not an integer of at least 1, or the model has no optimizer, whose updates are
        counted.

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
            raise ValueError(f"`batch_size` is {batch_size!r}, not an integer of at least 1, or None.")
        self.batch_size = batch_size

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if getattr(self.model, "optimizer", None) is None:
            raise ValueError(
                "The model has no optimizer, but Throughput counts optimizer updates. Pass an optimizer to `compile`."
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
        if waited == waited:  # not NaN: it is counted
            logs["waiting"] = min(1.0, waited / seconds)
        if sent == sent:
            logs["megabytes_sent"] = sent / 1e6

    def _now(self) -> tuple[float, float, float, float]:
        """Returns the clock's seconds, updates, seconds waited and bytes sent; NaN if one is not counted."""
        optimizer: Any = self.model.optimizer
        ring = ring_of_model(self.model)
        counts = (0.0, 0) if ring is None else (ring.seconds_waited(), ring.bytes_sent())
        waited, sent = (_NOT_COUNTED if count is None else float(count) for count in counts)
        return time.monotonic(), float(optimizer.iterations.numpy()), waited, sent
