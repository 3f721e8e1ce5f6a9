"""Records the first gradient that is not finite: in each step, on each replica, without a collective.

Once gradients are reduced, a NaN of one replica is on all replicas, so it has to be detected before that.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfring.cross_device_ops import values_of
from tfring.runtime import Ring

_watches: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # by ring


class Watch:
    """The records of this worker's replicas.

    Attributes:
      names: Names of the variables. Their positions are the numbers in `notes`.
      notes: One int64 variable of shape `[2]` per replica: the step, as counted by its optimizer, and the number of the
        first variable whose gradient was not finite; -1 if all were finite.
    """

    def __init__(self, ring: Ring) -> None:
        self.names: list[str] = []
        self.notes = []
        for device in ring.devices:
            with tf.device(device):
                self.notes.append(tf.Variable([-1, -1], dtype=tf.int64, trainable=False))


def begin(ring: Ring) -> Watch:
    """Makes steps that are traced from now on record what their replicas find."""
    _watches[ring] = watch = Watch(ring)
    return watch


def end(ring: Ring) -> None:
    _watches.pop(ring, None)


def note(ring: Ring, optimizer: Any, gradients: Sequence[Any], names: Sequence[str], active: Any) -> None:
    """Records each replica's first gradient that is not finite, in the cross-replica context, before the reduction."""
    watch = _watches.get(ring)
    if watch is None:
        return
    chosen = [(g, name) for g, name in zip(gradients, names, strict=False) if g is not None]
    if not chosen:
        return
    first_number = len(watch.names)
    watch.names += [name for _, name in chosen]
    flags = None if active is None else values_of(active)
    step = tf.cast(values_of(optimizer._iterations.value)[0], tf.int64)  # `iterations` counts updates, which are fewer
    for replica, noted in enumerate(watch.notes):
        with tf.device(noted.device):
            bad = tf.stack([_is_bad(values_of(gradient)[replica]) for gradient, _ in chosen])
            if flags is not None:  # without rows a gradient is NaN, but it is not used
                bad = tf.logical_and(bad, flags[replica])
            is_first = tf.logical_and(tf.reduce_any(bad), noted[0] < 0)
            found = tf.stack([step, first_number + tf.argmax(tf.cast(bad, tf.int8))])
            noted.assign(tf.where(is_first, found, noted))


def _is_bad(gradient: Any) -> tf.Tensor:
    values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    return tf.logical_not(tf.reduce_all(tf.math.is_finite(values)))
