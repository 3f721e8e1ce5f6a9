"""Tells a RingStrategy from other strategies, for code below the one that makes it."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, cast

import tensorflow as tf

if TYPE_CHECKING:
    from tfring.strategy.ring import RingStrategy

_of_several_workers: list[weakref.ref[RingStrategy]] = []  # the newest last


class RingMarker:
    """A base class of RingStrategy, and of nothing else."""


def ring_of(strategy: Any) -> RingStrategy | None:
    """The strategy, if it is a RingStrategy; else None."""
    return cast("RingStrategy", strategy) if isinstance(strategy, RingMarker) else None


def current_ring() -> RingStrategy | None:
    """The RingStrategy in whose scope this code runs; None where there is none."""
    return ring_of(tf.distribute.get_strategy()) if tf.distribute.has_strategy() else None


def remember(strategy: RingStrategy) -> None:
    """Notes that this process takes part in the ring of a strategy, until `forget`."""
    forget(strategy)
    if strategy.cluster.world_size > 1:
        _of_several_workers.append(weakref.ref(strategy))


def forget(strategy: RingStrategy) -> None:
    """Notes that a strategy has left its ring."""
    _of_several_workers[:] = [ref for ref in _of_several_workers if ref() not in (None, strategy)]


def ring_of_process() -> RingStrategy | None:
    """The newest RingStrategy of several workers that this process holds open; None where there is none."""
    found = (ref() for ref in reversed(_of_several_workers))
    return next((strategy for strategy in found if strategy is not None), None)
