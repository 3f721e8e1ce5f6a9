"""Keras' iterator over the batches of `fit`, `evaluate` and `predict`, for models of a RingStrategy."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from keras.src.backend.tensorflow import trainer
from keras.src.trainers.data_adapters import (
    array_data_adapter,
    generator_data_adapter,
    py_dataset_adapter,
    tf_dataset_adapter,
)

from tfring._keras import inputs, predict, resume
from tfring._keras.loop import Loop
from tfring._keras.seam import seam
from tfring.data.distribute import distribute_for_keras, undistributed
from tfring.data.plan import plan_of
from tfring.runtime import ring_of
from tfring.step import trace


def install() -> None:
    """Makes Keras create a RingEpochIterator whenever it creates an iterator for a RingStrategy."""

    @seam(trainer.TFEpochIterator, "__new__")
    def choose(
        original: Callable[..., Any], cls: type, distribute_strategy: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        is_ring = cls is trainer.TFEpochIterator and ring_of(distribute_strategy) is not None
        return original(RingEpochIterator if is_ring else cls)


class RingEpochIterator(trainer.TFEpochIterator):
    """Draws this worker's shares of batches, which all ranks draw in the same order.

    Attributes:
      data_adapter: Keras' data adapter.
      loop: The loop of `fit` or `evaluate` over the batches, once the model is built for it; otherwise None.
      source: The data before it is distributed: a `tf.data.Dataset`, an `ArrayBatches`, or a dataset that the program
        has distributed.
      position: The `resume.Position` at which the next pass resumes; None to start at the beginning.
    """

    data_adapter: Any

    def __init__(self, distribute_strategy: Any, *args: Any, **kwargs: Any) -> None:
        ring = ring_of(distribute_strategy)
        assert ring is not None  # ensured by the function that makes it
        seed = None
        self.loop: Loop | None = None
        if kwargs.get("shuffle") and ring.cluster.world_size > 1:
            if isinstance(kwargs.get("x"), py_dataset_adapter.PyDataset):
                kwargs.update(x=inputs.agreed_order(kwargs["x"], ring), shuffle=False)
            elif inputs.global_seed(ring) is None:  # otherwise all ranks have Keras' order, as in one process
                seed = inputs.agreed_seed(ring)
        with inputs.shuffling_by(seed):
            # Skips the constructor of TFEpochIterator, which distributes the dataset as `tf.distribute` does.
            super(trainer.TFEpochIterator, self).__init__(*args, **kwargs)
            self._distribute_strategy, self._ring = distribute_strategy, ring
            given = inputs.dataset_of(self.data_adapter, ring)
            dataset = undistributed(given)
            is_distributed = isinstance(dataset, tf.distribute.DistributedDataset)
            was_distributed = isinstance(given, tf.distribute.DistributedDataset)
            self.source = dataset
            self._tfring_batch_size = None if was_distributed else _rows_of_a_batch(self.data_adapter)
            self._yields_alike = not is_distributed and (
                self._has_arrays_in_order(seed)
                or (isinstance(dataset, tf.data.Dataset) and plan_of(dataset).is_alike_in_each_pass)
            )
            self._begins = False
            self.position: resume.Position | None = None
            ahead = 2
            if isinstance(self.data_adapter, generator_data_adapter.GeneratorDataAdapter):
                # Batches that are drawn ahead are lost to the next iterator, and their number differs between ranks.
                ahead, dataset = 0, inputs.dataset_before_prefetch(dataset)
            if not is_distributed:
                if ring.updater is not None and isinstance(dataset, tf.data.Dataset):
                    dataset = ring.updater.claimed(dataset)
                dataset = distribute_for_keras(ring, dataset, ahead=ahead)
            if isinstance(self.data_adapter, tf_dataset_adapter.TFDatasetAdapter):
                self.data_adapter = tf_dataset_adapter.TFDatasetAdapter(dataset)  # counts the batches of all ranks
                self._num_batches = self.data_adapter.num_batches
            self._distributed_dataset = dataset
        resume.note_data(self)

    @contextlib.contextmanager
    def catch_stop_iteration(self) -> Iterator[None]:
        """Ends a pass through the data on all ranks after the same batch; see `loop.py`."""
        loop, self.loop = self.loop, None  # so that no other call enters it meanwhile
        keras_loop = super().catch_stop_iteration()
        inside = keras_loop if loop is None else loop.end_on_all_ranks(keras_loop)
        updater = self._ring.updater
        try:
            with inside if updater is None else updater.around_pass(self, loop, inside):
                yield
        finally:
            self.loop = loop

    def __next__(self) -> tuple:
        *numbers, iterator = super().__next__()
        return (*numbers, predict.wrap_predict_iterator(iterator, self._distributed_dataset))

    def _enumerate_iterator(self) -> Iterator[tuple]:
        trace.begin_loop(self._ring)
        position, self.position = self.position, None
        return self.begin_pass() if position is None else resume.fast_forwarded(self, position)

    def begin_pass(self) -> Iterator[tuple]:
        """Returns the steps of a pass through the data, as Keras enumerates them."""
        self._begins = True
        return super()._enumerate_iterator()

    def _has_arrays_in_order(self, seed: int | None) -> bool:
        """Returns True for arrays that Keras does not shuffle: they keep their order or have one of tfring's own."""
        adapter = self.data_adapter
        return isinstance(adapter, array_data_adapter.ArrayDataAdapter) and (not adapter._shuffle or seed is not None)

    def _get_iterator(self) -> Any:
        # At the end of an epoch Keras makes one more iterator, which shuffles count. No step draws from it if an epoch
        # is the whole dataset.
        begins, self._begins = self._begins, False
        needed = begins or self.steps_per_epoch or not self._yields_alike
        return super()._get_iterator() if needed else ()


def _rows_of_a_batch(adapter: Any) -> int | None:
    """Returns the number of rows of a full batch of Keras' adapter, or of its arrays if they have fewer."""
    rows = getattr(adapter, "_num_samples", None)
    return adapter.batch_size if rows is None else min(adapter.batch_size, rows)
