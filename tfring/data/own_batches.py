"""A worker's own rows (AutoShardPolicy.OFF): each batch is split into one step per worker of the job.

`tf.distribute` treats batches as global even if each worker has its own rows: of a batch of B rows a worker trains
B // workers in a step, so that all workers together train B.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfring import _tf
from tfring.data.plan import as_element, plan_of
from tfring.data.rows import bounds, check_equal_rows, cut_rows, forget_rows, num_rows, slice_rows
from tfring.data.shares import Shares


def split_own_batches(
    dataset: tf.data.Dataset, replicas_per_worker: int, world_size: int
) -> tuple[tf.data.Dataset, int]:
    """Returns a dataset of `Shares`, and their number.

    Args:
      dataset: Batches of this worker's rows. Their number may differ between workers.
      replicas_per_worker: Replicas on each worker.
      world_size: Number of workers.
    """
    options = dataset.options()
    constants = plan_of(dataset).constants

    def cut(*components: Any) -> tf.data.Dataset:
        batch = check_equal_rows(forget_rows(as_element(components, dataset.element_spec), constants))
        rows = tf.cast(num_rows(batch), tf.int64)
        steps = tf.minimum(rows, world_size)  # none without rows

        def part(i: tf.Tensor) -> Shares:
            own = slice_rows(batch, *bounds(rows, i, steps))
            cuts = [bounds(num_rows(own), replica, replicas_per_worker) for replica in range(replicas_per_worker)]
            parts, counts = cut_rows(own, cuts)
            return Shares(parts, counts, tf.constant(0, tf.int64))

        return tf.data.Dataset.range(steps).map(part)

    shares = dataset.flat_map(cut).with_options(options)
    return shares.prefetch(2), _number_of_steps(dataset, world_size)


def _number_of_steps(dataset: tf.data.Dataset, world_size: int) -> int:
    """Returns the number of steps of all batches, or UNKNOWN_CARDINALITY if batches or rows cannot be counted."""
    if int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY:
        return tf.data.INFINITE_CARDINALITY
    _, batch = _tf.last_steps(dataset, lambda step: step.kind in ("prefetch", "nothing", "cache", "map"))
    step = _tf.dataset_step(batch)
    rows = int(step.before.cardinality()) if step.kind == "batch" else -1
    if rows < 0:
        return tf.data.UNKNOWN_CARDINALITY
    full, rest = divmod(rows, step.arguments["batch_size"])
    rest = 0 if step.arguments["drop_remainder"] else rest
    return full * min(step.arguments["batch_size"], world_size) + min(rest, world_size)
