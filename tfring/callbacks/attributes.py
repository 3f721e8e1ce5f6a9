"""Keeps simple attributes of other callbacks: EarlyStopping's `wait` and `best_weights`, a counter of your own.

Attributes are kept if they have changed since training began and are numbers, strings, bytes, arrays, tensors,
functions of `keras.ops` or NumPy, or lists, tuples, dicts, sets, deques and counters of them. For other attributes that
hold data, a warning says that they are lost, except in Keras' own callbacks.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import numbers
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

_OF_KERAS = ("model", "_model", "params", "validation_data")
_FACTORIES = {kind.__name__: kind for kind in (int, float, bool, str, list, dict, set, tuple, deque)}
_MODULES = {"keras.ops": keras.ops, "numpy": np}  # their functions are kept by name
_DATA = (Collection, numbers.Number, tf.Tensor, tf.Variable, np.generic, datetime.date, datetime.timedelta)


class Attributes:
    """Tracks the attributes of a list of callbacks from the moment it is created.

    >>> class Counting(keras.callbacks.Callback):
    ...     seen = 0
    >>> callback = Counting()
    >>> attributes = Attributes([callback])
    >>> callback.seen = 3
    >>> attributes.changed([])
    {'Counting 0': {'seen': 3}}
    """

    def __init__(self, callbacks: Sequence[keras.callbacks.Callback]) -> None:
        self._callbacks: dict[str, keras.callbacks.Callback] = {}
        number: Counter = Counter()  # not the position in the list: ranks other than 0 leave some out
        for callback in callbacks:
            name = type(callback).__name__
            self._callbacks[f"{name} {number[name]}"] = callback
            number[name] += 1
        self._before = {key: _digests(callback) for key, callback in self._callbacks.items()}
        self._lost: set[tuple[str, str]] = set()  # those already warned about

    def changed(self, arrays: list[np.ndarray]) -> dict[str, dict[str, Any]]:
        """Returns the changed attributes as JSON values, by class and number of the callback.

        Appends the arrays among them to `arrays`. Warns once about each attribute that cannot be kept.
        """
        states: dict[str, dict[str, Any]] = {}
        for key, callback in self._callbacks.items():
            now, before = _digests(callback), self._before[key]
            for name in (name for name in now if now[name] != before.get(name)):
                encoder = _Encoder(len(arrays))
                encoded = encoder.encode(vars(callback)[name])
                if encoder.unknown:
                    self._warn(key, callback, name, encoder.unknown[0])
                else:
                    states.setdefault(key, {})[name] = encoded
                    arrays += encoder.arrays
        return states

    def set(self, states: dict[str, dict[str, Any]], arrays: Sequence[np.ndarray]) -> None:
        """Sets the attributes that `changed` returned, on the callbacks that exist."""
        for key, state in states.items():
            if key in self._callbacks:
                vars(self._callbacks[key]).update({name: _decode(value, arrays) for name, value in state.items()})

    def _warn(self, key: str, callback: keras.callbacks.Callback, name: str, value: Any) -> None:
        is_keras = type(callback).__module__.partition(".")[0] == "keras"  # they reset their own state
        if is_keras or (key, name) in self._lost:
            return
        self._lost.add((key, name))
        warnings.warn(
            f"Backup does not save {type(callback).__name__}.{name}, a {type(vars(callback)[name]).__name__} that "
            f"holds a {type(value).__name__}: after a restart it is what the program makes it. Backup saves numbers, "
            "strings, arrays, and lists, dicts and sets of these.",
            stacklevel=3,
        )


def _digests(callback: keras.callbacks.Callback) -> dict[str, bytes]:
    """Returns a dict of digests, by name, of the attributes that hold data."""
    digests = {}
    for name, value in vars(callback).items():
        encoder = _Encoder()
        if name in _OF_KERAS:
            continue
        encoded = encoder.encode(value)
        if encoder.unknown and not (isinstance(value, _DATA) or dataclasses.is_dataclass(value)):
            continue  # a file, a thread, a model
        digest = hashlib.blake2b(json.dumps(encoded).encode())
        for array in encoder.arrays:
            digest.update(f"{array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        digests[name] = digest.digest()
    return digests


class _Encoder:
    """Encodes values as JSON, and collects those that JSON cannot represent.

    Attributes:
      arrays: Arrays in the order of their numbers, which begin with `first`.
      unknown: Values that are not kept.
    """

    def __init__(self, first: int = 0) -> None:
        self.arrays: list[np.ndarray] = []
        self.unknown: list = []
        self._first = first
        self._around: set[int] = set()  # containers of the current value, which may contain themselves

    def encode(self, value: Any) -> Any:
        if id(value) in self._around:
            self.unknown.append(value)
            return None
        self._around.add(id(value))
        try:
            return self._encode(value)
        finally:
            self._around.remove(id(value))

    def _encode(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if kind is list:
            return self._each(value)
        if kind is dict and all(type(key) is str and not key.startswith("__") for key in value):
            return {key: self.encode(v) for key, v in value.items()}
        if kind in (tuple, bytes, bytearray, set, frozenset, dict, OrderedDict, Counter, deque):
            return {f"__{kind.__name__}__": self._content(value)}
        if kind is defaultdict and (factory := value.default_factory) in (None, *_FACTORIES.values()):
            return {"__defaultdict__": [factory and factory.__name__, self._each(value.items())]}
        if isinstance(value, (np.ndarray, np.generic)) and (value.dtype.kind in "biufc" or value.dtype.isbuiltin == 2):
            return self._array("array", np.asarray(value))
        if tf.is_tensor(value) and hasattr(value, "numpy") and isinstance(value, tf.Tensor) and value.dtype.size:
            return self._array("tensor", value.numpy())
        for name, module in _MODULES.items():
            if callable(value) and getattr(module, getattr(value, "__name__", ""), None) is value:
                return {"__function__": [name, value.__name__]}
        self.unknown.append(value)
        return [kind.__qualname__, id(value)]

    def _each(self, values: Iterable[Any]) -> list:
        return [self.encode(v) for v in values]

    def _content(self, value: Any) -> Any:
        if isinstance(value, (bytes, bytearray)):
            return value.decode("latin-1")
        if isinstance(value, (set, frozenset)):
            return sorted(self._each(value), key=json.dumps)
        if isinstance(value, deque):
            return [value.maxlen, self._each(value)]
        return self._each(value.items() if isinstance(value, dict) else value)

    def _array(self, tag: str, array: np.ndarray) -> dict:
        self.arrays.append(array)
        return {f"__{tag}__": self._first + len(self.arrays) - 1}


def _decode(value: Any, arrays: Sequence[np.ndarray]) -> Any:
    if isinstance(value, list):
        return [_decode(v, arrays) for v in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if not tag.startswith("__"):
        return {key: _decode(v, arrays) for key, v in value.items()}
    content = value[tag]
    if tag == "__array__":
        return arrays[content][()]  # a scalar if there is no dimension
    if tag == "__tensor__":
        return tf.constant(arrays[content])
    if tag == "__function__":
        return getattr(_MODULES[content[0]], content[1])
    if tag == "__bytes__":
        return content.encode("latin-1")
    if tag == "__bytearray__":
        return bytearray(content.encode("latin-1"))
    content = _decode(content, arrays)
    if tag == "__defaultdict__":
        return defaultdict(_FACTORIES.get(content[0]), content[1])
    if tag == "__deque__":
        return deque(content[1], content[0])
    kinds = (tuple, set, frozenset, dict, OrderedDict, Counter)
    [kind] = [kind for kind in kinds if tag == f"__{kind.__name__}__"]
    return kind(dict(content) if kind is Counter else content)
