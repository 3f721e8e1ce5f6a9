"""Chooses the exchange of a layer from the strategy it runs under and from its user's choice."""

from __future__ import annotations

import weakref

import tensorflow as tf

from tfring.layers import central
from tfring.layers.exchange import LocalStatistics, ReplicaStatistics, RingStatistics
from tfring.runtime import ring_of

_num_layers: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # keyed by a strategy's extended


def next_layer_number() -> int:
    """Counts the layers built under the strategy in scope: all ranks build the same layers in the same order."""
    if not tf.distribute.has_strategy():
        return 0
    extended = tf.distribute.get_strategy().extended
    _num_layers[extended] = number = _num_layers.get(extended, 0) + 1
    return number


def prepare(synchronization: str) -> None:
    """Connects an exchange. Called when a layer is built, at the same point on every rank."""
    if synchronization == "central" and tf.distribute.has_strategy():
        ring = ring_of(tf.distribute.get_strategy())
        if ring is not None:
            central.connect(ring)


def of_replica(synchronization: str, number: int) -> LocalStatistics:
    """Returns the exchange of the replica that this code runs in."""
    context = tf.distribute.get_replica_context()
    ring = None if context is None else ring_of(context.strategy)
    if context is None or (ring.num_replicas if ring else context.num_replicas_in_sync) == 1:
        return LocalStatistics()
    if ring is None:
        return ReplicaStatistics(context)
    key = f"batch normalization {number}"
    if synchronization == "central":
        return central.CentralStatistics(ring, key)
    return RingStatistics(ring, key)
