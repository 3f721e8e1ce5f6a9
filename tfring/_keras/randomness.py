"""Random layers draw differently on each replica, reproducibly from one seed.

The state of a SeedGenerator is a mirrored variable, so under Keras every replica draws the same dropout mask.
"""

from __future__ import annotations

import tensorflow as tf

from tfring import step
from tfring._keras.seam import seam
from tfring.recognition import current_ring

_GOLDEN_RATIO = 0x9E3779B9  # odd: multiples of it modulo 2**32 are all different


def install():
    from keras.src.random import seed_generator

    @seam(seed_generator, "global_seed_generator")
    def generator_of_unseeded_operations(original):
        """Keras keeps it by thread, and replicas run in threads of their own: theirs is that of the thread of `fit`."""
        context = tf.distribute.get_replica_context()
        if current_ring() is None or context is None:
            return original()

        def in_thread_of_fit(strategy):
            with tf.init_scope(), strategy.scope():  # where it is to be made
                return original()

        return context.merge_call(in_thread_of_fit)

    @seam(seed_generator.SeedGenerator, "next")
    def next_seed(original, self, *args, **kwargs):
        step.written_alike(self.state)
        seed = original(self, *args, **kwargs)
        context = tf.distribute.get_replica_context()
        if current_ring() is None or context is None:
            return seed
        replica = context.replica_id_in_sync_group
        if isinstance(replica, int) and replica == 0:
            return seed
        offset = tf.cast(replica, tf.uint32) * tf.constant(_GOLDEN_RATIO, tf.uint32)
        return seed + tf.bitcast(tf.stack([offset, tf.constant(0, tf.uint32)]), seed.dtype)


def global_seed_state():
    """The Keras variable that random operations without a seed draw from; made where there is none."""
    from keras.src.random import seed_generator

    return seed_generator.global_seed_generator().state
