"""Which replica's gradient was not finite first: noted in each step by each replica for itself, without a collective.

Once gradients are reduced, a NaN of one replica is everybody's; so it has to be seen before.
"""

from __future__ import annotations

import weakref

import tensorflow as tf

from tfring.cross_device_ops import values_of

_watches: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # by strategy


class Watch:
    """What the replicas of this worker have noted.

    Attributes:
      names: of the variables, as the notes number them.
      notes: an int64 variable `[2]` a replica: the step, as its optimizer counts them, and the number of the variable
        whose gradient was not finite first; -1 where all were.
    """

    def __init__(self, strategy):
        self.names: list[str] = []
        self.notes = []
        for device in strategy.extended.worker_devices:
            with tf.device(device):
                self.notes.append(tf.Variable([-1, -1], dtype=tf.int64, trainable=False))


def begin(strategy) -> Watch:
    """From now on steps that are traced note what their replicas find."""
    _watches[strategy] = watch = Watch(strategy)
    return watch


def end(strategy) -> None:
    _watches.pop(strategy, None)


def note(strategy, optimizer, gradients, names, active) -> None:
    """Called with the gradients of each replica before they are reduced, in the cross-replica context.

    A LossScaleOptimizer's are left alone: it makes them infinite on purpose, and passes over such steps.
    """
    import keras

    watch = _watches.get(strategy)
    if watch is None or isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return
    chosen = [(g, name) for g, name in zip(gradients, names, strict=False) if g is not None]
    if not chosen:
        return
    first_number = len(watch.names)
    watch.names += [name for _, name in chosen]
    flags = None if active is None else values_of(active)
    step = tf.cast(values_of(optimizer._iterations.value)[0], tf.int64)  # `iterations` counts updates: fewer
    for replica, noted in enumerate(watch.notes):
        with tf.device(noted.device):
            bad = tf.stack([_is_bad(values_of(gradient)[replica]) for gradient, _ in chosen])
            if flags is not None:  # without rows a gradient is NaN, and nobody takes it
                bad = tf.logical_and(bad, flags[replica])
            is_first = tf.logical_and(tf.reduce_any(bad), noted[0] < 0)
            found = tf.stack([step, first_number + tf.argmax(tf.cast(bad, tf.int8))])
            noted.assign(tf.where(is_first, found, noted))


def _is_bad(gradient) -> tf.Tensor:
    values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    return tf.logical_not(tf.reduce_all(tf.math.is_finite(values)))
