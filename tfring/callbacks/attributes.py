"""What other callbacks keep in simple attributes: EarlyStopping's `wait` and `best_weights`, a counter of your own.

Kept are those that have changed since training began, if they are numbers, texts, arrays, or lists and dicts of them.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

_ARRAY, _TUPLE = "__array__", "__tuple__"
_OF_KERAS = ("model", "_model", "params", "validation_data")


class Attributes:
    """Those of a list of callbacks, from the moment this is made.

    >>> class Counting(keras.callbacks.Callback):
    ...     seen = 0
    >>> callback = Counting()
    >>> attributes = Attributes([callback])
    >>> callback.seen = 3
    >>> attributes.changed([])
    {'Counting 0': {'seen': 3}}
    """

    def __init__(self, callbacks: Sequence[keras.callbacks.Callback]):
        self._callbacks: dict[str, keras.callbacks.Callback] = {}
        number: Counter = Counter()  # not the place in the list: ranks other than 0 leave some out
        for callback in callbacks:
            name = type(callback).__name__
            self._callbacks[f"{name} {number[name]}"] = callback
            number[name] += 1
        self._before = {key: _pickled(callback) for key, callback in self._callbacks.items()}

    def changed(self, arrays: list[np.ndarray]) -> dict[str, dict[str, Any]]:
        """As JSON has them, by class and number of the callback; appends the arrays among them to `arrays`."""
        states: dict[str, dict[str, Any]] = {}
        for key, callback in self._callbacks.items():
            now, before = _pickled(callback), self._before[key]
            names = [name for name in now if now[name] != before.get(name)]
            if names:
                states[key] = {name: _to_json(vars(callback)[name], arrays) for name in names}
        return states

    def set(self, states: dict[str, dict[str, Any]], arrays: Sequence[np.ndarray]) -> None:
        """Sets what `changed` gave, on the callbacks there are."""
        for key, state in states.items():
            if key in self._callbacks:
                vars(self._callbacks[key]).update({name: _from_json(value, arrays) for name, value in state.items()})


def _pickled(callback) -> dict[str, bytes]:
    """The simple attributes, to compare."""
    return {
        name: pickle.dumps(value)
        for name, value in vars(callback).items()
        if name not in _OF_KERAS and _is_simple(value)
    }


def _is_simple(value) -> bool:
    if isinstance(value, (list, tuple)):
        return type(value) in (list, tuple) and all(map(_is_simple, value))
    if isinstance(value, dict):
        return type(value) is dict and all(type(k) is str for k in value) and all(map(_is_simple, value.values()))
    if isinstance(value, (np.ndarray, np.generic)):
        return value.dtype.isbuiltin == 1 and not value.dtype.hasobject
    return value is None or type(value) in (bool, int, float, str)


def _to_json(value, arrays):
    if isinstance(value, tuple):
        return {_TUPLE: _to_json(list(value), arrays)}
    if isinstance(value, list):
        return [_to_json(v, arrays) for v in value]
    if isinstance(value, dict):
        return {k: _to_json(v, arrays) for k, v in value.items()}
    if isinstance(value, (np.ndarray, np.generic)):
        arrays.append(np.asarray(value))
        return {_ARRAY: len(arrays) - 1}
    return value


def _from_json(value, arrays):
    if isinstance(value, list):
        return [_from_json(v, arrays) for v in value]
    if isinstance(value, dict):
        if value.keys() == {_ARRAY}:
            return arrays[value[_ARRAY]][()]  # a scalar where there is no dimension
        if value.keys() == {_TUPLE}:
            return tuple(_from_json(value[_TUPLE], arrays))
        return {k: _from_json(v, arrays) for k, v in value.items()}
    return value
