"""A user's `tf.function` that a step calls is traced into the step, as if it were not decorated.

A step notes what its replicas write, and knows their shares of the batch, while it is traced. A function of its own is
traced once and called from other steps' graphs, too, which would know of nothing then, or find tensors of another.

A function that Keras calls where it holds values beside the variables is traced in place as well: as it builds a model,
and as results of metrics are computed from sums over replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from keras.src.backend.common.stateless_scope import in_stateless_scope

from tfring import _tf, step
from tfring._keras.seam import seam

_OF_LIBRARIES = ("tensorflow.", "keras.", "tfring.")  # which write nothing, or know of steps


def install() -> None:
    @seam(_tf.PolymorphicFunction, "__call__")
    def call(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        running = step.current()
        in_step = running is not None and running.active is not None
        if running is not None and running.share is None and tf.executing_eagerly():
            in_step = False  # a loop of the user's own, whose function it may be
        # Where Keras holds values beside the variables, a graph of its own would hold those of one moment.
        if not (in_step or in_stateless_scope()) or not _is_of_user(self):
            return original(self, *args, **kwargs)
        return _tf.call_unwrapped(self, _as_declared(self, args), kwargs)


def _is_of_user(function: Any) -> bool:
    if type(function) is not _tf.PolymorphicFunction or _tf.is_compiled_by_xla(function):
        return False
    return not (function.python_function.__module__ or "").startswith(_OF_LIBRARIES)


def _as_declared(function: Any, args: Sequence[Any]) -> list:
    """Arguments as the tensors that an `input_signature` asks for."""
    signature = function.input_signature
    if signature is None or len(signature) < len(args):
        return list(args)

    def tensor(spec: Any, value: Any) -> Any:
        return tf.convert_to_tensor(value, spec.dtype) if isinstance(spec, tf.TensorSpec) else value

    return [tf.nest.map_structure(tensor, spec, arg) for spec, arg in zip(signature, args, strict=False)]
