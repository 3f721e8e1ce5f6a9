"""From a `tf.data.Dataset` of global batches to a `tf.distribute.DistributedDataset` of this worker's shares."""

from __future__ import annotations

import hashlib
from typing import Any

import tensorflow as tf

from tfring import _tf
from tfring.data import cache_files
from tfring.data.arrays import ArrayBatches
from tfring.data.own_batches import split_own_batches
from tfring.data.plan import plan_of
from tfring.data.shares import Cut, Shares, WorkerDataset, single_shares, worker_dataset
from tfring.errors import MismatchError
from tfring.ring.collectives import Collectives
from tfring.runtime import Ring

_Policy = tf.data.experimental.AutoShardPolicy
_SLICED_POLICIES = (_Policy.AUTO, _Policy.DATA)
# For iterating over the dataset itself. TensorFlow's multi-device iterator draws ahead from its own thread: it draws
# rows from a generator that no step asked for, and at its end waits forever for the threads of a PyDataset.
_WITHOUT_MULTI_DEVICE_ITERATOR = tf.distribute.InputOptions(
    experimental_fetch_to_device=False,
    experimental_replication_mode=tf.distribute.InputReplicationMode.PER_REPLICA,
)


def is_sliced(dataset: Any) -> bool:
    """Returns True if tfring slices the batches; FILE and HINT are TensorFlow's, OFF means this worker's own rows."""
    return isinstance(dataset, (tf.data.Dataset, ArrayBatches)) and _policy(dataset) in _SLICED_POLICIES


def distribute(
    ring: Ring, dataset: tf.data.Dataset, options: tf.distribute.InputOptions | None = None
) -> tf.distribute.DistributedDataset:
    """Distributes a sliced dataset for `tf.distribute`'s own iterators, which yield one value per replica."""
    cache_files.check(ring, dataset)
    cardinality = agreed_cardinality(ring.world, int(dataset.cardinality()))
    _compare_seeds(ring.world, _digest_of_seeds(ring.world, dataset))
    shares = single_shares(dataset, *_replica_layout(ring))
    if options is None and len(ring.devices) == 1 and ring.is_on_cpu:
        options = _WITHOUT_MULTI_DEVICE_ITERATOR
    workers = _tf.workers_by_options(ring.strategy.extended, options)
    distributed = _distributed(shares, workers, ring, options, cardinality)
    distributed._tfring_dataset = dataset
    return distributed


def undistributed(dataset: Any) -> Any:
    """Returns the dataset behind a result of `distribute`, so that Keras' steps can compare batches between ranks.

    Returns anything else unchanged.
    """
    return getattr(dataset, "_tfring_dataset", dataset) if not isinstance(dataset, tf.data.Dataset) else dataset


def distribute_for_keras(
    ring: Ring, dataset: tf.data.Dataset | ArrayBatches, *, ahead: int = 2
) -> tf.distribute.DistributedDataset:
    """Distributes any dataset for the Keras steps of `tfring._keras`, as `Shares` except with policies FILE and HINT.

    A single replica on a single worker gets the batches as they are. The result is cached with a `tf.data.Dataset` that
    tfring distributes, for the next call. If the dataset consists of slices of arrays, or is an `ArrayBatches`, its
    arrays have already been compared between ranks (_keras/agreement.py).

    Args:
      ring: The workers.
      dataset: A dataset of global batches; with policy OFF, of this worker's own rows.
      ahead: Number of batches to draw before they are requested. Defaults to 2.
    """
    if not ring.is_alone and not is_sliced(dataset) and _policy(dataset) != _Policy.OFF:
        distributed = ring.strategy.experimental_distribute_dataset(dataset)
        if distributed.cardinality >= 0:  # the number before TensorFlow made more and smaller batches
            _tf.set_cardinality(distributed, tf.data.UNKNOWN_CARDINALITY)
        return distributed
    if isinstance(dataset, ArrayBatches):
        made = _make(ring, dataset, ahead)
    else:
        made = plan_of(dataset).kept(("distributed", ring, ahead), lambda: _make(ring, dataset, ahead))
    distributed, cardinality, seeds = made
    if not ring.is_alone:
        _compare_seeds(ring.world, seeds)
        _tf.set_cardinality(distributed, agreed_cardinality(ring.world, cardinality))
    return distributed


def _make(
    ring: Ring, dataset: tf.data.Dataset | ArrayBatches, ahead: int
) -> tuple[tf.distribute.DistributedDataset, int, int | None]:
    """Returns the distributed dataset, its length on this rank, and the digest of its seeds if ranks compare them."""
    cardinality, seeds = int(dataset.cardinality()), None
    if not isinstance(dataset, ArrayBatches):
        cache_files.check(ring, dataset)
    rank, replicas, world_size = _replica_layout(ring)
    drawn: Any = dataset
    if ring.is_alone:
        pass
    elif is_sliced(dataset):
        if not isinstance(dataset, ArrayBatches):
            seeds = _digest_of_seeds(ring.world, dataset)
        several = ring.cluster.world_size > 1
        drawn = worker_dataset(dataset, rank, replicas, world_size, compare=several, by_number=True)
        if ahead and isinstance(drawn.cut, Cut):  # prefetching row numbers alone saves nothing
            drawn = drawn._replace(dataset=drawn.dataset.prefetch(ahead))
    else:
        drawn, cardinality = split_own_batches(dataset, replicas, world_size)
    workers = _tf.workers_of_one_iterator(ring.strategy.extended)
    return _distributed(drawn, workers, ring, _WITHOUT_MULTI_DEVICE_ITERATOR, cardinality), cardinality, seeds


def agreed_cardinality(collectives: Collectives, cardinality: int) -> int:
    """Returns the number of steps for Keras: that of the longest dataset of any rank, unknown if one is unknown."""
    if not tf.executing_eagerly() or collectives.world_size == 1:
        return cardinality
    longest, minus_shortest = collectives.largest([cardinality, -cardinality], name="cardinality")
    return longest if minus_shortest <= 0 or -minus_shortest == longest else tf.data.UNKNOWN_CARDINALITY


def _digest_of_seeds(collectives: Collectives, dataset: tf.data.Dataset) -> int | None:
    """Returns a digest of the seeds of shuffles if random numbers reach every component that ranks would compare."""
    plan = plan_of(dataset)
    if not tf.executing_eagerly() or collectives.world_size == 1 or not all(plan.depends_on_randomness):
        return None
    return int.from_bytes(hashlib.blake2b(repr(plan.seeds).encode(), digest_size=7).digest(), "little")


def _compare_seeds(collectives: Collectives, digest: int | None) -> None:
    """Compares the digests of `_digest_of_seeds` between ranks.

    Raises:
      MismatchError: If they differ, on every rank. The ring remains usable.
    """
    if digest is not None and collectives.agreed(digest, name="seeds of shuffles") is None:
        raise MismatchError(
            "The dataset is shuffled with different seeds on different ranks. Every rank must draw the same rows in "
            "the same order: tfring slices each rank's share from them. Use the same seed on all ranks "
            "(`dataset.shuffle(n, seed=1)`, `keras.utils.set_random_seed(1)` before data is made), or make the dataset "
            "after the strategy. (docs/data.md)"
        )


def _untuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Disables TensorFlow's tuner, unless the user has set it: an iterator that it tunes may take long to end.

    The tuner's thread misses the wake-up at the iterator's end and sleeps until its next round, which is as far away as
    the iterator is old, up to a minute (Model::OptimizeLoop checks IsCancelled, which is true only after the callbacks
    of the cancellation have run). At the end of an epoch all ranks wait for the one that sleeps longest. Without the
    tuner AUTOTUNE means min(16, threads).
    """
    if dataset.options().autotune.enabled is not None:
        return dataset
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def _policy(dataset: tf.data.Dataset | ArrayBatches) -> tf.data.experimental.AutoShardPolicy:
    return dataset.options().experimental_distribute.auto_shard_policy


def _replica_layout(ring: Ring) -> tuple[int, int, int]:
    """Returns this worker's rank among workers with different rows, its replicas, and the number of such workers."""
    return ring.control.rank, len(ring.devices), ring.control.world_size


def _distributed(
    drawn: tf.data.Dataset | WorkerDataset,
    input_workers: Any,
    ring: Ring,
    options: tf.distribute.InputOptions | None,
    cardinality: int,
) -> tf.distribute.DistributedDataset:
    dataset = drawn.dataset if isinstance(drawn, WorkerDataset) else drawn
    if not ring.is_alone or ring.updater is not None:  # other ranks wait at the end of an epoch, or the job does
        dataset = _untuned(dataset)
    if isinstance(drawn, WorkerDataset):
        specs = drawn.element_spec(), drawn.shares_spec()
        return _tf.distributed_dataset(
            dataset, input_workers, ring.strategy, options, cardinality,
            one_value_a_worker=True, then=drawn.cut, then_spec=specs, next_pass=drawn.next_pass,
        )  # fmt: skip
    shares = isinstance(dataset.element_spec, Shares)  # to TensorFlow a worker's shares are one value
    return _tf.distributed_dataset(
        dataset, input_workers, ring.strategy, options, cardinality, one_value_a_worker=shares
    )
