"""Weights of a pipeline: each rank holds the weights of its stage and their slots, and nothing of other stages.

A weight of another stage is an empty shard (`sharding.py`) of a weight that one rank of the pipeline axis owns. For a
sharded layer the ranks of its stage own it: shards along two axes, "pipeline+model" or "pipeline+data". So its slots
are empty, files contain full values, and a rank that loads a file keeps its own shards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfring._keras.seam import seam, undo
from tfring._keras.sharding import full_shape, is_sharded_along, mark_shard, sharding_of
from tfring._keras.sharding.tables import update_of
from tfring.errors import ConfigurationError
from tfring.runtime import Ring
from tfring.sharding import at_stage


def give(ring: Ring, variable: Any, stage: int) -> None:
    """Leaves a Keras variable, or its shards, to the workers of a stage; frees the memory on the others."""
    assert not is_sharded_along(variable, "pipeline")
    sharding = at_stage(full_shape(variable), sharding_of(variable), stage, ring.mesh.pipeline)
    if ring.mesh.coordinate("pipeline", ring.cluster.rank) != stage:
        shape = sharding.shape_of(ring.mesh.coordinate(sharding.axis, ring.cluster.rank))
        with ring.scope(), ring.variables_of_worker():
            variable._initialize(np.zeros(shape, variable.value.dtype.as_numpy_dtype))
        variable._shape = shape
        variable._ndim = len(shape)
    mark_shard(variable, ring, sharding)


@functools.cache
def refuse_new_weights() -> None:
    """Prevents layers whose weights were given to a stage from making others, from now on."""
    undo.append(refuse_new_weights.cache_clear)

    @seam(keras.layers.Layer, "add_weight")
    def add_weight(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        others = getattr(self, "_trainable_variables", ())  # there are none before a layer's __init__
        if any(is_sharded_along(variable, "pipeline") for variable in others):
            raise full_weights_error(f"another weight of {type(self).__name__} {self.name!r}")
        return original(self, *args, **kwargs)


def full_weights_error(received: str) -> ConfigurationError:
    """Returns the error for features that need full weights: no worker of a pipeline has all of them."""
    return ConfigurationError(
        f"A worker of a Pipeline has the weights of its stage only, but LoRA and quantization need all: {received}. "
        "Save the model, load it in one process, and call enable_lora() or quantize() there."
    )


def no_gradient(variable: Any) -> tf.Tensor | tf.IndexedSlices:
    """Returns zeros for the gradient of a variable that nothing depends on here."""
    if update_of(variable) is None:
        return tf.zeros(variable.shape, variable.dtype)
    rows = tf.zeros((0, *variable.shape[1:]), variable.dtype)
    return tf.IndexedSlices(rows, tf.zeros([0], tf.int32), tf.constant(tuple(variable.shape), tf.int32))


def is_symbolic() -> bool:
    """Returns True if Keras only asks for shapes."""
    from keras.src.backend.common import symbolic_scope

    return symbolic_scope.in_symbolic_scope()


def repeated_write_error(variable: Any, num_microbatches: int, recompute: bool) -> ConfigurationError:
    """Returns the error for state that a layer writes in each pass of a step with several passes."""
    return ConfigurationError(
        f"A layer of a Pipeline writes {variable.path!r}, and would write it in each pass of a step "
        f"(num_microbatches={num_microbatches}, recompute={recompute}). Freeze the layer (`trainable = False`), or use "
        "num_microbatches=1 and recompute=False."
    )
