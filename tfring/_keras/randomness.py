"""Makes random layers draw differently on each replica, or as in one process, reproducibly from one seed.

The state of a SeedGenerator is a mirrored variable, so under Keras every replica draws the same dropout mask.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from tfring import partition, step
from tfring._keras.seam import seam
from tfring.cross_device_ops import values_of
from tfring.runtime import Ring, current_ring
from tfring.setting import setting

_local = threading.local()  # .recorded, .replayed: seeds drawn, or to be drawn again

_GOLDEN_RATIO = 0x9E3779B9  # odd: multiples of it modulo 2**32 are all different


def install() -> None:
    from keras.src.random import seed_generator

    @seam(seed_generator, "global_seed_generator")
    def generator_of_unseeded_operations(original: Callable[..., Any]) -> Any:
        """Returns the generator of the thread of `fit`, also in replicas' own threads: Keras keeps one per thread."""
        context = tf.distribute.get_replica_context()
        if current_ring() is None or context is None:
            return original()

        def in_thread_of_fit(strategy: tf.distribute.Strategy) -> Any:
            with tf.init_scope(), strategy.scope():  # in which it has to be made
                return original()

        return context.merge_call(in_thread_of_fit)

    @seam(seed_generator.SeedGenerator, "next")
    def next_seed(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        replayed = getattr(_local, "replayed", None)
        if replayed is not None:
            return replayed.pop(0)
        step.written_alike(self.state)
        seed = of_replica(original(self, *args, **kwargs))
        recorded = getattr(_local, "recorded", None)
        if recorded is not None:
            recorded.append(seed)
        return seed

    def of_replica(seed: tf.Tensor) -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        ring, running = current_ring(), step.weighing()
        if ring is None or context is None:
            return seed
        if ring.random == "global" and running is not None and running.is_plain:
            return seed  # as in one process: the analysis divides its numbers for all rows
        replica = context.replica_id_in_sync_group
        if not isinstance(replica, int) or replica > 0:
            with partition.own():
                offset = tf.cast(replica, tf.uint32) * tf.constant(_GOLDEN_RATIO, tf.uint32)
                seed += tf.bitcast(tf.stack([offset, tf.constant(0, tf.uint32)]), seed.dtype)
        return seed if running is None else partition.declare(seed, "drawn")


def recorded() -> AbstractContextManager[list]:
    """Yields the list of the seeds that layers draw inside the context."""
    return setting(_local, "recorded", [])


def replayed(seeds: Iterable[Any]) -> AbstractContextManager:
    """Makes the same layers, if called again inside the context, draw these seeds again and no others."""
    return setting(_local, "replayed", list(seeds))


def take_global_seed() -> list[int] | None:
    """Returns the state that Keras' random operations without a seed draw from; None if none has drawn yet."""
    from keras.src.backend.common import global_state

    generator = global_state.get_global_attribute("global_seed_generator")
    return None if generator is None else values_of(generator.state.value)[0].numpy().tolist()


def give_global_seed(ring: Ring, state: list[int]) -> None:
    """Sets the state that `take_global_seed` returned."""
    from keras.src.random import seed_generator

    before = random.getstate()
    with ring.scope():
        variable = seed_generator.global_seed_generator().state  # a new one draws its seed from Python's `random`
    random.setstate(before)
    for copy in values_of(variable.value):
        copy.assign(tf.constant(state, copy.dtype))
