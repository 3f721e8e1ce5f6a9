"""A callback that rank 0 alone runs."""

from __future__ import annotations

from collections.abc import Callable

import keras

from tfring.functions import is_chief


def chief_only(callback: keras.callbacks.Callback | Callable[[], keras.callbacks.Callback]) -> keras.callbacks.Callback:
    """Returns the callback on rank 0, and one that does nothing on the other ranks.

    For callbacks that report to a service or write a file of their own; Keras' CSVLogger, TensorBoard and
    ModelCheckpoint need it not. The callback makes no call in which all ranks take part (`model.evaluate`,
    `tfring.barrier`). If it stops the training, all ranks stop.

    Args:
      callback: A Keras callback, or a function or class without arguments that makes one, which rank 0 alone calls.

    Raises:
      TypeError: It is neither, or makes no callback.

    >>> type(chief_only(keras.callbacks.TerminateOnNaN)).__name__
    'TerminateOnNaN'
    """
    if not isinstance(callback, keras.callbacks.Callback) and not callable(callback):
        raise TypeError(f"`callback` is {callback!r}, not a Keras callback or a function that makes one.")
    if not is_chief():
        return keras.callbacks.Callback()
    made = callback if isinstance(callback, keras.callbacks.Callback) else callback()
    if not isinstance(made, keras.callbacks.Callback):
        raise TypeError(f"`callback` {callback!r} made {made!r}, which is no Keras callback.")
    return made
