"""Helpers for the functions that Keras calls with batches."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfring.runtime import Ring
from tfring.step import trace


def graph_function(body: Any) -> Any:
    """Returns `body` as a tf.function that is only traced again for other structures."""
    # TensorFlow counts traces by code, and would count the methods of several models as one function that is retraced.
    return tf.function(functools.partial(body), reduce_retracing=True, autograph=False)


def between_collectives(model: Any, kind: str, ring: Ring) -> Any:
    """Returns a step of a model. With `jit_compile`, XLA compiles its operations between collectives.

    XLA does not support the ring's operations, so it cannot compile a whole step. It compiles the operations that it
    supports in clusters: forward and backward passes between collectives, and the update. A trace lists them.

    Args:
      model: A Keras model, with its attribute `jit_compile`.
      kind: "train", "test" or "predict".
      ring: The workers.
    """
    step = getattr(model, f"{kind}_step")
    if not model.jit_compile:
        return step

    def compiled(element: Any) -> Any:
        with tf.xla.experimental.jit_scope():
            results = step(element)
        trace.compiled(ring, kind)
        return results

    return compiled


class IteratorFunction:
    """Wraps a function of an iterator as a tf.function of the tensors in it.

    For an iterator argument, TensorFlow would check before each call its type and whether a graph for it exists.
    """

    def __init__(self, body: Any) -> None:
        self._body = body
        self._functions: dict = {}  # by type spec of the iterator
        self._iterator: weakref.ref | None = None
        self._call: tuple = ()  # function and tensors for that iterator

    def __call__(self, iterator: Any, *args: Any) -> Any:
        """Calls `body(iterator, *args)`; `args` are Python values."""
        function, tensors = self._of(iterator)
        return function(tensors, *args)

    def get_concrete_function(self, iterator: Any, *args: Any) -> Any:
        """Returns the concrete function of `tf.function` for these arguments."""
        function, tensors = self._of(iterator)
        return function.get_concrete_function(tensors, *args)

    def _of(self, iterator: Any) -> Any:
        """Returns the function for this type of iterator, and the tensors in it."""
        if self._iterator is None or self._iterator() is not iterator:
            spec = tf.type_spec_from_value(iterator)
            if spec not in self._functions:

                def of_tensors(tensors: Sequence[Any], *args: Any) -> Any:
                    return self._body(tf.nest.pack_sequence_as(spec, tensors, expand_composites=True), *args)

                self._functions[spec] = graph_function(of_tensors)
            self._call = self._functions[spec], tf.nest.flatten(iterator, expand_composites=True)
            self._iterator = weakref.ref(iterator)
        return self._call


def to_tensor(leaf: Any) -> Any:
    """Returns an argument of `..._on_batch` as a tensor."""
    return tf.convert_to_tensor(leaf) if isinstance(leaf, (np.ndarray, np.generic, list, float, int)) else leaf


def without_optionals(element: Any) -> Any:
    """Replaces each Optional of Keras' generators with None."""
    return tf.nest.map_structure(
        lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, element
    )
