"""Checks, for debugging, that all replicas hold the same bits.

Each replica computes a 64-bit digest of each variable; one all_gather exchanges the digests of all variables.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfring.cross_device_ops import values_of
from tfring.errors import ConfigurationError
from tfring.runtime import Ring

_ADVICE = (
    "Something changed a variable on some replicas only: a callback or a custom step that assigns what its own rank "
    "computed, or an op that is not reproducible."
)


def digest(value: tf.Tensor) -> tf.Tensor:
    """Returns an int64 scalar computed from the bits of a tensor, of any dtype except string.

    >>> bool(digest(tf.constant([0.0])) == digest(tf.constant([-0.0])))
    False
    """
    if value.dtype == tf.bool:
        value = tf.cast(value, tf.uint8)
    octets = tf.reshape(tf.bitcast(value, tf.uint8), [1, -1])
    return tf.bitcast(tf.fingerprint(octets), tf.int64)[0]


def assert_equal(ring: Ring, variables: Sequence, names: Sequence[str], is_sharded: Sequence[bool]) -> None:
    """Compares mirrored variables of TensorFlow on all replicas; other variables are skipped.

    `is_sharded` tells for each variable whether ranks along axes other than "data" hold other shards. If so, it is
    compared along "data" only.

    Raises:
      tf.errors.InvalidArgumentError: On every rank, if replicas differ. The message names the variables and replicas.
    """
    chosen = [
        (variable, name, is_sharded)
        for variable, name, is_sharded in zip(variables, names, is_sharded, strict=True)
        if isinstance(variable, tf.distribute.DistributedValues)
        and variable.synchronization != tf.VariableSynchronization.ON_READ
        and variable.dtype != tf.string
    ]
    peers = ring.peers
    goes_on_by_itself = peers is not ring.world
    if not chosen or (ring.is_alone and not goes_on_by_itself):
        return
    if goes_on_by_itself and not tf.executing_eagerly():
        raise ConfigurationError(
            "`strategy.assert_equal` was called in a step, where workers of asynchronous updates hold different "
            "weights: each has pulled at a different time. Call it between two calls of `fit`, on all workers. "
            "(docs/parameter_servers.md)"
        )
    replicas = len(ring.devices)
    mine = [tf.stack([digest(tf.convert_to_tensor(values_of(v)[r])) for v, *_ in chosen]) for r in range(replicas)]
    everyone = peers.gather_equal(tf.stack(mine), name="digests of variables")
    first_on_line = [ring.mesh.ranks("data", rank)[0] for rank in range(ring.mesh.size)]
    first_of_line = tf.gather(everyone, [rank * replicas for rank in first_on_line for _ in range(replicas)])
    wanted = tf.where(tf.constant([is_sharded for *_, is_sharded in chosen]), first_of_line, everyone[:1])
    differs = tf.not_equal(everyone, wanted)  # [replicas, variables]
    text = tf.strings.format(
        "Some replicas hold different bits than replica 0. Variables: {}; replicas: {} (rank = replica // {}). "
        + _ADVICE,
        (
            tf.boolean_mask(tf.constant([name for _, name, _ in chosen]), tf.reduce_any(differs, 0)),
            tf.where(tf.reduce_any(differs, 1))[:, 0],
            replicas,
        ),
        summarize=10,
    )
    tf.debugging.Assert(tf.logical_not(tf.reduce_any(differs)), [text], summarize=1)
