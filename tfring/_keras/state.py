"""State that a step writes on each replica, such as moving statistics, is brought together at the end of the step.

Keras keeps a BatchNormalization's moving mean as a mirrored variable that each replica writes for itself, so that
ranks evaluate and save different models. Here the step notes what its replicas wrote; afterwards each such variable
becomes the mean over replicas, weighted by rows. Moving averages are linear in what they average, so this is the
moving average of the mean; a replica without rows, whose statistics are NaN, has no weight.
"""

from __future__ import annotations

import inspect
import threading

import tensorflow as tf

from tfring import _tf, step
from tfring._keras.seam import seam
from tfring.recognition import current_ring


def install():
    import keras
    from keras.src.backend.tensorflow import core

    if "synchronization" not in inspect.signature(keras.Variable.__init__).parameters:
        _sum_metrics_when_read(keras.metrics.Metric, core.Variable)

    @seam(core.Variable, "_direct_assign")
    def direct_assign(original, self, value):
        running = step.current()
        if running is not None and current_ring() and tf.distribute.get_replica_context() and _is_state(self):
            running.written.append(self)
        return original(self, value)


def _sum_metrics_when_read(metric, keras_variable):
    """Keras before 3.10 sums `total + value` over replicas at each write, so earlier batches count again and again."""
    making_metric = threading.local()

    @seam(metric, "add_variable")
    def add_variable(original, self, *args, **kwargs):
        making_metric.now = True
        try:
            variable = original(self, *args, **kwargs)
        finally:
            making_metric.now = False
        variable._tfring_of_metric = True  # for one that Keras initializes later
        return variable

    def creator(next_creator, **kwargs):
        return next_creator(**{**kwargs, "synchronization": tf.VariableSynchronization.ON_READ})

    @seam(keras_variable, "_initialize")
    def initialize(original, self, value):
        of_metric = getattr(making_metric, "now", False) or getattr(self, "_tfring_of_metric", False)
        if not of_metric or current_ring() is None:
            return original(self, value)
        with tf.variable_creator_scope(creator):
            return original(self, value)


def _is_state(variable) -> bool:
    value = variable._value
    return (
        isinstance(value, _tf.distribute_values.MirroredVariable)
        and not isinstance(value, _tf.distribute_values.SyncOnReadVariable)
        and value.aggregation == tf.VariableAggregation.NONE
        and value.dtype.is_floating
        and not step.is_written_alike(variable)
    )


def mean_over_replicas(strategy, values, shares):
    """The mean over all replicas, weighted by rows, of float values that each replica holds.

    Args:
      strategy: the RingStrategy.
      values: list of lists: for each value one tensor a replica of this worker.
      shares: float64 `[replicas_per_worker]`.

    Returns:
      One tensor a value, the same bits on every rank; all travel in one collective a dtype.
    """
    weighted = []
    for replicas in values:
        terms = [
            tf.math.multiply_no_nan(v, tf.cast(shares[i], v.dtype)) for i, v in enumerate(replicas)
        ]
        weighted.append(tf.add_n(terms))
    return strategy.extended._cross_device_ops.sum_over_workers(weighted, name="state")


def average_written_state(strategy, variables, shares):
    """Makes every replica's copy of `variables` the mean of all, weighted by rows."""
    if not variables or strategy.num_replicas_in_sync == 1:
        return
    copies = [[tf.convert_to_tensor(v) for v in variable.value.values] for variable in variables]
    for variable, mean in zip(variables, mean_over_replicas(strategy, copies, shares), strict=True):
        strategy.extended.update(variable.value, lambda v, m: v.assign(m), args=(mean,))
