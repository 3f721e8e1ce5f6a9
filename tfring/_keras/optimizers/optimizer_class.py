"""Puts a class of our own behind an optimizer's class, while `__class__` and files name Keras' own.

```
AdamW of Keras   AdamW ─► Adam ─► Optimizer ─► TFOptimizer ─► BaseOptimizer
of a ring        AdamW ─► RingAdam ─► Adam ─► RingOptimizer ─► Optimizer ─► TFOptimizer ─► BaseOptimizer
a user's of it   ReducedForOverrides ─► Mine ─► AdamW ─► RingAdam ─► Adam ─► RingOptimizer ─► ...
```

So a user's methods come first and `super()` in them finds the ring's, which come before those of every optimizer of
Keras. The class is made once and has the name of the one it is made of; the property `__class__` returns that one, by
which Keras writes files, pickles and copies. Python's `type` returns the class made here.
"""

from __future__ import annotations

import weakref
from typing import Any

_kinds: dict[type, type[Any]] = {}  # ring's classes, by those of Keras that they extend
_made: weakref.WeakValueDictionary[type, type] = weakref.WeakValueDictionary()  # by the class each is made of
_assign_class = object.__dict__["__class__"].__set__

_OVERRIDABLE = ("apply", "apply_gradients")


def register(keras_class: type, cls: type) -> None:
    """Notes the class behind optimizers of a class of Keras and of its subclasses, which extends it."""
    _kinds[keras_class] = cls


def ring_class(cls: type[Any]) -> type:
    """Returns the class of a ring's optimizers for a class of Keras or of a user's."""
    made = _made.get(cls)
    if made is None:
        base = max((base for base in _kinds if issubclass(cls, base)), key=lambda base: len(base.__mro__))
        kind = _kinds[base]
        bases: tuple[type, ...] = (kind,) if cls is base else (cls, kind)
        overrides = frozenset(name for name in _OVERRIDABLE if _is_users(cls, name))
        if overrides:
            bases = (kind.in_front_of_overrides, *bases)
        body = {
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "__doc__": cls.__doc__,
            "__class__": property(lambda self: cls, _assign_class),
            "_unpickle_model": property(lambda self: cls._unpickle_model),
            "_overrides": overrides,
        }
        metaclass: Any = type(cls)
        made = _made[cls] = metaclass(cls.__name__, bases, body)
    return made


def join_ring(optimizer: Any) -> None:
    """Gives an optimizer its ring's class."""
    cls = optimizer.__class__
    if type(optimizer) is cls:
        _assign_class(optimizer, ring_class(cls))


def leave_ring(optimizer: Any) -> None:
    """Gives an optimizer the class it had before `join_ring`."""
    _assign_class(optimizer, optimizer.__class__)


def _is_users(cls: type, name: str) -> bool:
    return any(name in vars(owner) for owner in cls.__mro__ if not owner.__module__.startswith("keras."))
