"""`chief_only`: a callback that only rank 0 runs."""

from __future__ import annotations

from collections.abc import Callable

import keras

from tfring.functions import is_chief


def chief_only(callback: keras.callbacks.Callback | Callable[[], keras.callbacks.Callback]) -> keras.callbacks.Callback:
    """Returns the callback on rank 0, and one that does nothing on the other ranks.

    Use it for callbacks that report to a service or write their own file. Keras' CSVLogger, TensorBoard and
    ModelCheckpoint do not need it. The callback must not make calls in which all ranks take part (`model.evaluate`,
    `tfring.barrier`). If it stops training, all ranks stop.

    Args:
      callback: A Keras callback, or a function or class without arguments that returns one. Only rank 0 calls it.

    Raises:
      TypeError: If `callback` is neither, or does not return a callback.

    >>> type(chief_only(keras.callbacks.TerminateOnNaN)).__name__
    'TerminateOnNaN'
    """
    if not isinstance(callback, keras.callbacks.Callback) and not callable(callback):
        raise TypeError(f"`callback` is {callback!r}, not a Keras callback or a function that makes one.")
    if not is_chief():
        return keras.callbacks.Callback()
    made = callback if isinstance(callback, keras.callbacks.Callback) else callback()
    if not isinstance(made, keras.callbacks.Callback):
        raise TypeError(f"`callback` {callback!r} made {made!r}, which is not a Keras callback.")
    return made
