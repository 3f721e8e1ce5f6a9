"""Extends an optimizer's class with a class of tfring, while `__class__` and files name Keras' own.

```
AdamW of Keras   AdamW ─► Adam ─► Optimizer ─► TFOptimizer ─► BaseOptimizer
of a ring        AdamW ─► RingAdam ─► Adam ─► RingOptimizer ─► Optimizer ─► TFOptimizer ─► BaseOptimizer
a user's class   ReducedForOverrides ─► Mine ─► AdamW ─► RingAdam ─► Adam ─► RingOptimizer ─► ...
```

So a user's methods come first, and `super()` in them finds the ring's, which come before those that all Keras
optimizers share. The class is made once and has the name of the class that it extends. The property `__class__` returns
that class, which Keras uses to write files, pickle and copy. Python's `type` returns the class made here.
"""

from __future__ import annotations

import weakref
from typing import Any

_kinds: dict[type, type[Any]] = {}  # ring's classes, by the Keras classes that they extend
_made: weakref.WeakValueDictionary[type, type] = weakref.WeakValueDictionary()  # by the class that each extends
_assign_class = object.__dict__["__class__"].__set__

_OVERRIDABLE = ("apply", "apply_gradients")


def register(keras_class: type, cls: type) -> None:
    """Registers the class that extends a Keras class, for its optimizers and those of its subclasses."""
    _kinds[keras_class] = cls


def ring_class(cls: type[Any]) -> type:
    """Returns the class of a ring's optimizers for a class of Keras or of a user."""
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
