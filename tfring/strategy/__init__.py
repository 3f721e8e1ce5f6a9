"""Strategies of `tf.distribute` over the workers of a cluster."""

from tfring.strategy.delayed import Delayed
from tfring.strategy.ring import RingStrategy
from tfring.strategy.servers import ParameterServerStrategy

__all__ = ["Delayed", "ParameterServerStrategy", "RingStrategy"]
