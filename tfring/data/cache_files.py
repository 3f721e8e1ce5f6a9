"""Files of `dataset.cache(filename)`, one per worker: TensorFlow lets only one process at a time write a file."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfring.data.plan import plan_of
from tfring.errors import ConfigurationError
from tfring.runtime import Ring, ring_of_process


def own_file(filename: Any) -> Any:
    """Returns the name of this worker's file, or `filename` if it is empty or there are no other workers."""
    ring = ring_of_process()
    if ring is None or (isinstance(filename, str) and not filename):
        return filename
    filename = tf.convert_to_tensor(filename, tf.string)
    return tf.where(tf.strings.length(filename) > 0, filename + _suffix(ring), filename)


def check(ring: Ring, dataset: tf.data.Dataset) -> None:
    """Rejects a dataset made before the strategy that workers of one host would cache in the same file.

    Raises:
      ConfigurationError: If the dataset is such a one, on every rank.
    """
    cluster, world = ring.cluster, ring.world
    if not tf.executing_eagerly() or world.world_size == 1 or cluster.num_nodes == cluster.world_size:
        return
    files = [file for file in _files(dataset) if file and not file.endswith(_suffix(ring))]
    if not files:
        return
    digest = int(tf.strings.to_hash_bucket_fast("\n".join(files), tf.int32.max))
    if world.agreed(digest, name="files of caches") is not None:
        raise ConfigurationError(
            f"The file of dataset.cache({files[0]!r}), made before the strategy, is the same for all workers, but "
            "TensorFlow lets only one process write it. Make the dataset after `tfring.RingStrategy()`, which gives "
            "each worker its own name, or put the rank into the name. (docs/data.md)"
        )


def _suffix(ring: Ring) -> str:
    return f".{ring.cluster.rank}-of-{ring.cluster.world_size}"


def _files(dataset: tf.data.Dataset) -> list[str]:
    """Returns the files, or "", of the caches in a pipeline."""
    return [step.arguments["filename"] for step in plan_of(dataset).steps if step.kind == "cache"]
