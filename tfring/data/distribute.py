"""From a `tf.data.Dataset` of global batches to a `tf.distribute.DistributedDataset` of this worker's shares."""

from __future__ import annotations

import tensorflow as tf

from tfring import _tf
from tfring.data.shares import Shares, single_shares, worker_shares

_SLICED_POLICIES = (
    tf.data.experimental.AutoShardPolicy.AUTO,
    tf.data.experimental.AutoShardPolicy.DATA,
)
# For iterating over the dataset itself. TensorFlow's multi-device iterator draws ahead from a thread of its own: it
# takes rows that nobody asked for from a generator, and waits for ever for the threads of a PyDataset at its end.
_WITHOUT_MULTI_DEVICE_ITERATOR = tf.distribute.InputOptions(
    experimental_fetch_to_device=False,
    experimental_replication_mode=tf.distribute.InputReplicationMode.PER_REPLICA,
)


def is_sliced(dataset: tf.data.Dataset) -> bool:
    """Whether tfring slices the dataset's batches; FILE, HINT and OFF are left to TensorFlow."""
    if not isinstance(dataset, tf.data.Dataset):
        return False
    return dataset.options().experimental_distribute.auto_shard_policy in _SLICED_POLICIES


def distribute(strategy, dataset: tf.data.Dataset, options=None):
    """Distributes a sliced dataset for `tf.distribute`'s own iterators, which yield one value a replica."""
    extended = strategy.extended
    cardinality = agreed_cardinality(extended.control, int(dataset.cardinality()))
    shares = single_shares(dataset, *_place(strategy))
    if options is None and len(extended.worker_devices) == 1 and extended._local_device_type == "CPU":
        options = _WITHOUT_MULTI_DEVICE_ITERATOR
    workers = extended._input_workers_with_options(options)
    return _distributed(shares, workers, strategy, options, cardinality)


def distribute_for_keras(strategy, dataset: tf.data.Dataset):
    """Distributes any dataset for Keras' steps of `tfring._keras`; a sliced one yields `Shares`."""
    if not is_sliced(dataset):
        return strategy.experimental_distribute_dataset(dataset)
    extended = strategy.extended
    cardinality = agreed_cardinality(extended.control, int(dataset.cardinality()))
    shares = worker_shares(dataset, *_place(strategy))
    workers = _tf.input_lib.InputWorkers([(extended._worker_device, extended.worker_devices[:1])])
    return _distributed(shares, workers, strategy, _WITHOUT_MULTI_DEVICE_ITERATOR, cardinality)


def agreed_cardinality(collectives, cardinality: int) -> int:
    """Keras takes as many steps as the dataset says: the longest of any rank, unknown where one is unknown."""
    if not tf.executing_eagerly() or collectives.world_size == 1:
        return cardinality
    [bounds] = collectives.all_reduce([tf.constant([cardinality, -cardinality])], "max", name="cardinality")
    longest, shortest = int(bounds[0]), -int(bounds[1])
    return longest if shortest >= 0 or shortest == longest else tf.data.UNKNOWN_CARDINALITY


def _place(strategy) -> tuple[int, int, int]:
    """Rank, replicas a worker, number of workers."""
    return strategy.cluster.rank, len(strategy.extended.worker_devices), strategy.cluster.world_size


def _distributed(dataset, input_workers, strategy, options, cardinality):
    """Wraps a worker's dataset as a `tf.distribute.DistributedDataset` of `cardinality` global batches."""
    result = _tf.input_lib.DistributedDataset(
        input_workers,
        strategy,
        components=[dataset],
        element_spec=_tf.input_lib._create_distributed_tensor_spec(strategy, dataset.element_spec),
        enable_get_next_as_optional=_tf.input_lib._enable_get_next_as_optional(strategy, dataset, cardinality),
        options=options,
    )
    result._cardinality = cardinality  # counted in global batches, also with several replicas a worker
    if isinstance(dataset.element_spec, Shares):
        one = _tf.distribute_values.PerReplicaSpec  # all of a worker's shares are one value to TensorFlow
        result._element_spec = tf.nest.map_structure(one, dataset.element_spec)
    return result
