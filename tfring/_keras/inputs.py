"""Makes all ranks draw the same batches, even if the user shuffles without a seed.

Each rank slices its share from the same global batch, so the order must be the same on all ranks. Keras shuffles
arrays and PyDatasets with each process's own random numbers, and so does `dataset.shuffle(n)`: with two workers, a
quarter of the rows would be missed and a quarter seen twice in each epoch. Here ranks agree on a seed before data is
drawn.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src import tree
from keras.src.trainers.data_adapters import array_data_adapter, array_slicing, py_dataset_adapter

from tfring import _tf, config, seeding
from tfring._keras.seam import seam
from tfring.data.arrays import ArrayBatches, InPlace, in_place, mapped
from tfring.data.cache_files import own_file as own_cache_file
from tfring.runtime import Ring
from tfring.seeding import PlacedSeeds
from tfring.setting import setting

_local = threading.local()
_num_seeds = itertools.count()  # number of seeds that this process has drawn


def agreed_seed(ring: Ring) -> int:
    """Returns a random seed, the same on every rank: that of rank 0.

    The seed comes from TFRING_DATA_SEED, with which a restarted job draws what it drew before; otherwise from the run's
    seed; otherwise from the system. Python's generator, from which Keras seeds layers, stays as in one process.
    """
    given = config.read("TFRING_DATA_SEED")
    given = seeding.current() if given is None else given
    seed = random.SystemRandom().getrandbits(62)
    if given is not None:
        seed = random.Random(f"{given}/{next(_num_seeds)}").getrandbits(62)
    [agreed] = ring.world.broadcast([tf.constant(seed, tf.int64)], name="seed of the data")
    return int(agreed)


def global_seed(ring: Ring) -> int | None:
    """Returns TensorFlow's global seed (`keras.utils.set_random_seed`) if all ranks have the same, otherwise None."""
    seed = _tf.eager_context.global_seed()
    agreed = ring.world.agreed(-1 if seed is None else int(seed), name="global seed")
    return None if agreed is None or agreed < 0 else agreed


def shuffling_by(seed: int | None) -> AbstractContextManager:
    """Shuffles Keras' arrays with this seed inside the context; None leaves them to Keras."""
    return setting(_local, "seed", seed)


def dataset_of(adapter: Any, ring: Ring) -> Any:
    """Returns the dataset of Keras' data adapter; for arrays of several replicas, `ArrayBatches`, or its `full`.

    Arrays are in Keras' order, or inside `shuffling_by` in the order of its seed. A ring with an updater gets `full`.
    """
    seed = getattr(_local, "seed", None)
    # A worker of asynchronous servers is alone in its steps, but not in its order of rows.
    is_keras_own = ring.is_alone and seed is None
    if is_keras_own or not isinstance(adapter, array_data_adapter.ArrayDataAdapter):
        return adapter.get_tf_dataset()
    batches = array_batches(adapter, seed)
    return batches.full() if ring.is_alone or ring.updater is not None else batches


def agreed_order(dataset: Any, ring: Ring) -> Any:
    """Returns a PyDataset of another's batches, in an order that rank 0 draws each epoch, as Keras does."""
    class AgreedOrder(py_dataset_adapter.PyDataset):
        def __init__(self) -> None:
            super().__init__(
                workers=dataset.workers,
                use_multiprocessing=dataset.use_multiprocessing,
                max_queue_size=dataset.max_queue_size,
            )
            self._order = None

        @property
        def num_batches(self) -> int | None:
            return dataset.num_batches

        def __len__(self) -> int:
            return len(dataset)

        def __getitem__(self, index: int) -> Any:
            return dataset[index if self._order is None else self._order[index]]

        def on_epoch_begin(self) -> None:
            if not self._drawn_ahead:
                self._shuffle()
            dataset.on_epoch_begin()

        def on_epoch_end(self) -> None:  # Keras calls it before the first epoch, too
            dataset.on_epoch_end()
            if self._drawn_ahead:
                self._shuffle()

        @property
        def _drawn_ahead(self) -> bool:
            """Returns True if threads or processes request batches before an epoch begins."""
            return dataset.workers > 1 or dataset.use_multiprocessing

        def _shuffle(self) -> None:
            if dataset.num_batches is not None:
                order = list(range(dataset.num_batches))
                random.shuffle(order)
                collectives = ring.world
                [agreed] = collectives.broadcast([tf.constant(order, tf.int64)], name="order of batches")
                self._order = agreed.numpy().tolist()

    return AgreedOrder()


def dataset_before_prefetch(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the dataset without its `prefetch`, if that is its last step."""
    step = _tf.dataset_step(dataset)
    return step.before if step.kind == "prefetch" else dataset


def array_batches(adapter: Any, seed: int | None) -> ArrayBatches:
    """Returns the same as `ArrayDataAdapter.get_tf_dataset`, with fewer maps and without copying the arrays.

    Args:
      adapter: An ArrayDataAdapter.
      seed: Seed of its shuffle, which has another order each epoch. None leaves the order to TensorFlow's global seed,
        from which Keras' own operation draws.
    """
    rows, batch_size = adapter._num_samples, adapter._batch_size
    by_row = bool(adapter._shuffle) and adapter._shuffle != "batch"  # in Keras, "batch" shuffles rows within a batch
    order = _Order(rows, batch_size, by_row, seed)
    options = tf.data.Options()
    options.autotune.enabled = False
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    options.experimental_optimization.apply_default_optimizations = False  # they take longer than they save
    arrays = tree.lists_to_tuples(tree.map_structure(_ready, adapter._inputs))
    take = _TakeRows(keras.config.floatx())
    return ArrayBatches(order.of_pass, order.drawn, arrays, take, options, -(-rows // batch_size))


@dataclasses.dataclass(frozen=True)
class _Order:
    """The order of the rows of arrays.

    Attributes:
      rows: Number of rows.
      batch_size: Number of rows of a batch.
      by_row: Whether to shuffle the rows.
      seed: Seed of the shuffle, which has another order each pass. None for Keras' order.
    """

    rows: int
    batch_size: int
    by_row: bool
    seed: int | None

    def of_pass(self, number: int) -> np.ndarray:
        """Returns the rows of each batch, int64 `[batches, batch_size]`, with -1 after the last row."""
        batches = -(-self.rows // self.batch_size)
        indices = np.full(batches * self.batch_size, -1, np.int64)
        rows = indices[: self.rows]
        if self.by_row and self.seed is None:
            rows[:] = _keras_order(self.rows, _tf.eager_context.global_seed())
        else:
            rows[:] = np.arange(self.rows)
        if self.by_row and self.seed is not None:
            # Not a Generator, which may draw other numbers in each release of NumPy.
            np.random.RandomState([self.seed & 0xFFFFFFFF, self.seed >> 32, number]).shuffle(rows)
        return indices.reshape(batches, self.batch_size)

    def drawn(self) -> tf.data.Dataset:
        """Returns the dataset of the rows of each batch. With `by_row` and `seed` each iterator has another order."""
        order: Any = _in_order
        if self.by_row:
            is_own = self.seed is not None
            order = _shuffled if is_own else _InKerasOrder(*_keras_seeds(_tf.eager_context.global_seed()))
        sizes = tf.data.Dataset.from_tensors((tf.constant(self.rows, tf.int64), tf.constant(self.batch_size, tf.int64)))
        seeds = tf.data.Dataset.random(seed=self.seed or 0, rerandomize_each_iteration=True).take(1)
        indices = mapped(tf.data.Dataset.zip((seeds, sizes)), order)
        return _tf.unbatched(indices.prefetch(1))


@functools.lru_cache(maxsize=4)
def _keras_order(rows: int, global_seed: int | None) -> np.ndarray:
    """Returns the order in which Keras shuffles arrays, int64 `[rows]`. It is the same in each pass and call."""
    [order] = _Order(rows, rows, True, None).drawn().as_numpy_iterator()
    return order


def _shuffled(seed: tf.Tensor, sizes: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
    indices = tf.random.experimental.stateless_shuffle(tf.range(sizes[0]), tf.stack([seed, 0]))
    return _in_batches(indices, sizes[1])


def _in_order(_: tf.Tensor, sizes: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
    return _in_batches(tf.range(sizes[0]), sizes[1])


@dataclasses.dataclass(frozen=True)
class _InKerasOrder:
    """Shuffles with the seeds of the operation in Keras' dataset."""

    seed: int
    seed2: int

    def __call__(self, _: tf.Tensor, sizes: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        indices = tf.raw_ops.RandomShuffle(value=tf.range(sizes[0]), seed=self.seed, seed2=self.seed2)
        return _in_batches(indices, sizes[1])


@functools.cache
def _keras_seeds(global_seed: int | None) -> tuple[int, int]:
    """Returns the seeds of Keras' operation that shuffles arrays. They follow from TensorFlow's global seed."""
    adapter = array_data_adapter.ArrayDataAdapter(np.zeros([2, 1]), shuffle=True)
    [shuffle] = _tf.operations_of(adapter.get_tf_dataset(), "RandomShuffle")
    return shuffle.get_attr("seed"), shuffle.get_attr("seed2")


def _in_batches(indices: tf.Tensor, batch_size: Any) -> tf.Tensor:
    """Returns the rows of each batch, `[batches, batch_size]`, with -1 after the last row."""
    missing = -tf.size(indices, tf.int64) % batch_size
    padded = tf.pad(indices, [[0, missing]], constant_values=-1)
    return tf.reshape(padded, tf.stack([tf.constant(-1, tf.int64), batch_size]))


@dataclasses.dataclass(frozen=True)
class _TakeRows:
    """Takes rows of arrays, in the dtypes that Keras gives them: floats in `floatx`."""

    floatx: str

    def __call__(self, arrays: Any, indices: tf.Tensor) -> Any:
        def take_one(x: Any) -> Any:
            if isinstance(x, InPlace):
                rows = x.rows(indices)
                return tf.cast(rows, self.floatx) if rows.dtype.is_floating else rows
            if isinstance(x, array_slicing.TensorflowSparseWrapper):
                return array_slicing.slice_tensorflow_sparse_wrapper(x, indices)
            if isinstance(x, (list, tuple, dict)):
                return None
            return tf.gather(x, indices, axis=0) if tf.is_tensor(x) else x

        return tree.traverse(take_one, arrays)


def _ready(array: Any) -> Any:
    """Returns an array in a form that `tf.data` accepts: in place, or as Keras converts it."""
    if isinstance(array, np.ndarray) and isinstance(ready := in_place(array), InPlace):
        return ready
    converted = array_slicing.convert_to_sliceable(array, target_backend="tensorflow")
    return in_place(converted) if isinstance(converted, np.ndarray) else converted


def install() -> None:
    """Gives unseeded `tf.data` transformations a seed that all ranks share, and each worker its own cache file."""

    @seam(_tf.data_random_seed, "get_seed")
    def get_seed(original: Callable[..., Any], seed: int | None) -> Any:
        agreed = getattr(_local, "seed", None)
        if agreed is not None and seed == agreed:  # whatever global seed this rank may have
            return tf.constant(agreed, tf.int64), tf.constant(agreed >> 31, tf.int64)
        # With a global seed (keras.utils.set_random_seed) seeds are the same on every rank already.
        if seed is not None or _shared.base is None or _tf.eager_context.global_seed() is not None:
            return original(seed)
        return original(_shared.next_seed())

    seam(_tf.dataset_kernels, "shuffle_dataset_v3")(_tf.shuffled_with_generator)

    @seam(_tf.Dataset, "cache")
    def cache(original: Callable[..., Any], self: Any, filename: Any = "", name: str | None = None) -> Any:
        return original(self, own_cache_file(filename), name)


_shared = PlacedSeeds()


def share_seeds(ring: Ring) -> None:
    """Makes unseeded `tf.data` transformations shuffle in the same way on all ranks of `ring` from now on."""
    base = agreed_seed(ring)
    _shared.begin(base if seeding.current() is None else None)  # otherwise the run's seed does so from the start
