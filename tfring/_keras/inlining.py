"""Traces a user's `tf.function` that a step calls into the step, as if it were not decorated.

While a step is traced, it notes what its replicas write, and knows their shares of the batch. A separate function is
traced once and is also called from the graphs of other steps, which would then have no notes, or find tensors of
another graph.

A function that Keras calls while it holds values beside the variables is traced in place as well: when Keras builds a
model, and when results of metrics are computed from sums over replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from keras.src.backend.common.stateless_scope import in_stateless_scope

from tfring import _tf, step
from tfring._keras.seam import seam

_OF_LIBRARIES = ("tensorflow.", "keras.", "tfring.")  # they write nothing, or know about steps


def install() -> None:
    @seam(_tf.PolymorphicFunction, "__call__")
    def call(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        running = step.current()
        in_step = running is not None and running.active is not None
        if running is not None and running.share is None and tf.executing_eagerly():
            in_step = False  # a custom loop, to which the function may belong
        # While Keras holds values beside the variables, a separate graph would keep the values of one moment.
        if not (in_step or in_stateless_scope()) or not _is_of_user(self):
            return original(self, *args, **kwargs)
        return _tf.call_unwrapped(self, *_cast_to_signature(self, args), **kwargs)


def _is_of_user(function: Any) -> bool:
    if type(function) is not _tf.PolymorphicFunction or _tf.is_compiled_by_xla(function):
        return False
    return not (function.python_function.__module__ or "").startswith(_OF_LIBRARIES)


def _cast_to_signature(function: Any, args: Sequence[Any]) -> list:
    """Returns arguments as the tensors that an `input_signature` declares."""
    signature = function.input_signature
    if signature is None or len(signature) < len(args):
        return list(args)

    def tensor(spec: Any, value: Any) -> Any:
        return tf.convert_to_tensor(value, spec.dtype) if isinstance(spec, tf.TensorSpec) else value

    return [tf.nest.map_structure(tensor, spec, arg) for spec, arg in zip(signature, args, strict=False)]
