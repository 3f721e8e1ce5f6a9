"""The random states of Python, NumPy, Keras and TensorFlow in this process, as JSON values."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import tensorflow as tf

from tfring import _tf
from tfring._keras import randomness


def take() -> dict[str, Any]:
    """Returns the current states.

    >>> import random
    >>> before = take()
    >>> number = random.random()
    >>> give(before)
    >>> random.random() == number
    True
    """
    numpy: Any = np.random.get_state()
    kind, keys, *rest = numpy
    context = _tf.eager_context.context()
    # TensorFlow numbers its operations by `_rng` once it has a global seed.
    tensorflow = None if context._seed is None else [context._seed, context._rng.getstate()]
    return {
        "python": random.getstate(),
        "numpy": [kind, keys.tolist(), *rest],
        "tensorflow": tensorflow,
        "keras": randomness.take_global_seed(),
    }


def give(states: dict[str, Any]) -> None:
    """Sets the states that `take` returned, also after a round trip through JSON.

    Keras' state is not set here, because that needs the strategy.
    """
    random.setstate(_state_of_python(states["python"]))
    np.random.set_state(tuple(states["numpy"]))
    if states["tensorflow"] is not None:
        seed, state = states["tensorflow"]
        context = _tf.eager_context.context()
        if context._seed != seed:
            tf.random.set_seed(seed)
        context._rng.setstate(_state_of_python(state))


def _state_of_python(state: Any) -> tuple:
    version, numbers, gauss = state
    return version, tuple(numbers), gauss
