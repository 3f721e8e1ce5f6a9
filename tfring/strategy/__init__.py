"""Strategies of `tf.distribute` over the workers of a cluster."""

from tfring.strategy.ring import RingStrategy

__all__ = ["RingStrategy"]
