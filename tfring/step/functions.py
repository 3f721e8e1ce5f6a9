"""Shared by the functions that Keras calls with batches."""

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
    """Returns `body` as a tf.function that is traced again for other structures only."""
    # TensorFlow counts tracings by code, and takes the methods of several models for one function that is traced again.
    return tf.function(functools.partial(body), reduce_retracing=True, autograph=False)


def between_collectives(model: Any, kind: str, ring: Ring) -> Any:
    """Returns a step of a model whose operations between collectives XLA compiles, if the model was compiled for that.

    XLA has no operation of the ring, and so takes no step as a whole. What it has an operation for, it compiles in
    clusters: forward and backward passes between collectives, and the update. A trace tells which those are.

    Args:
      model: A Keras model, with `jit_compile`.
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


class OfIterator:
    """A function of an iterator, as a tf.function of the tensors in it.

    Of an iterator, TensorFlow asks before each call what kind it is and whether there is a graph for that.
    """

    def __init__(self, body: Any) -> None:
        self._body = body
        self._functions: dict = {}  # by kind of iterator
        self._iterator: weakref.ref | None = None
        self._call: tuple = ()  # function and tensors for that iterator

    def __call__(self, iterator: Any, *args: Any) -> Any:
        """Calls `body(iterator, *args)`; `args` are Python's."""
        function, tensors = self._of(iterator)
        return function(tensors, *args)

    def get_concrete_function(self, iterator: Any, *args: Any) -> Any:
        """Returns what `tf.function` does of these arguments."""
        function, tensors = self._of(iterator)
        return function.get_concrete_function(tensors, *args)

    def _of(self, iterator: Any) -> Any:
        """Returns the function for this kind of iterator, and the tensors in it."""
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
    """Replaces an Optional of Keras' generators by None."""
    return tf.nest.map_structure(
        lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, element
    )
