"""Replaces functions of Keras for objects of a RingStrategy, undoes that, and knows which entry method runs."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

from tfring._keras.replaced import REPLACED
from tfring.errors import ConfigurationError
from tfring.runtime import Ring, ring_of

installed: dict[str, Callable] = {}  # the originals, by their names in `REPLACED`
extended: dict[type, type] = {}  # our bases of Keras' classes, with the bases of Keras that they replace
undo: list[Callable[[], Any]] = []  # functions that undo changes; the last change is undone first


def seam(owner: Any, name: str) -> Callable[[Callable], Callable]:
    """Decorates `replacement(original, *args, **kwargs)` to stand in for `owner.name`, a function of `REPLACED`.

    A function is replaced in the module that defines it, and in all modules that hold it under its name: TensorFlow
    executes modules of its API again under other names, before or after this. A function of another library is replaced
    in `owner`.
    """
    path = owner.__name__ if inspect.ismodule(owner) else f"{owner.__module__}.{owner.__qualname__}"
    key = f"{path}.{name}"
    if key not in REPLACED or key in installed:
        raise AssertionError(f"{key} is replaced twice, or has no row in the table of replaced.py.")

    def install(replacement: Callable) -> Callable:
        original = installed[key] = getattr(owner, name)

        @functools.wraps(original)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            return replacement(original, *args, **kwargs)

        is_its_own = (getattr(original, "__module__", None) or path).split(".")[0] == path.split(".")[0]
        modules = list(sys.modules.values()) if is_its_own else []
        others = [m for m in modules if getattr(m, "__dict__", {}).get(name) is original]
        undo.append(functools.partial(installed.pop, key))
        for holder in [owner, *others]:
            put(holder, name, replaced)
        return replacement

    return install


def put(owner: Any, name: str, value: Any) -> None:
    """Sets an attribute until `restore`."""
    had, before = name in vars(owner), vars(owner).get(name)
    if name == "__new__" and not had:  # once it was set and deleted, Python rejects a constructor's arguments
        had, before = True, lambda cls, *args, **kwargs: object.__new__(cls)
    undo.append(lambda: setattr(owner, name, before) if had else delattr(owner, name))
    setattr(owner, name, value)


def extend(cls: type, base: type) -> None:
    """Makes a class of Keras derive from `base` instead of the class that `base` derives from.

    Raises:
      ConfigurationError: If another library has put its own class there.
    """
    [replaced] = base.__bases__
    if replaced not in cls.__bases__:
        raise ConfigurationError(
            f"Another library has changed the bases of {cls.__module__}.{cls.__qualname__} to "
            f"{', '.join(f'{each.__module__}.{each.__qualname__}' for each in cls.__bases__)}, without "
            f"{replaced.__module__}.{replaced.__qualname__} of tfring. Make the strategy before that library is used, "
            "or do without it."
        )
    exchange(cls, replaced, base)
    extended[base] = replaced
    undo.append(lambda: extended.pop(base))
    undo.append(lambda: exchange(cls, base, replaced))


def exchange(cls: type, base: type, other: type) -> None:
    """Makes a class derive from `other` instead of `base`."""
    cls.__bases__ = tuple(other if each is base else each for each in cls.__bases__)


def restore() -> None:
    """Undoes all changes, so that Keras is as it was. Objects made under a strategy are of no use afterwards."""
    while undo:
        undo.pop()()


def parameters(function: Callable) -> str:
    """Returns the names of a function's parameters in the format of `REPLACED`.

    >>> parameters(lambda x, *args, y=1, **kwargs: None)
    'x, *args, y, **kwargs'
    """
    stars: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return ", ".join(stars.get(p.kind, "") + p.name for p in inspect.signature(function).parameters.values())


def overridden(base: type) -> dict[str, Callable]:
    """Returns the methods of a class in `extended` that override Keras' methods."""
    theirs = extended[base]
    return {name: f for name, f in vars(base).items() if inspect.isfunction(f) and hasattr(theirs, name)}


def changed() -> list[str]:
    """Returns the functions of Keras with other parameters than replacements and overriding methods expect."""
    functions = [key for key, original in installed.items() if parameters(original) != REPLACED[key].parameters]
    methods = [(base, name, parameters(method)) for base in extended for name, method in overridden(base).items()]
    return functions + [
        f"{extended[base].__module__}.{extended[base].__qualname__}.{name}"
        for base, name, taken in methods
        if "*args" not in taken and taken != parameters(getattr(extended[base], name))
    ]


def ring_of_model(model: Any) -> Ring | None:
    """Returns the ring in whose scope a model was made; None for any other model."""
    return ring_of(getattr(model, "_distribute_strategy", None))


_entries: list[str] = []  # running calls of fit, evaluate or predict, innermost last


def state_of_thread() -> dict:
    """Returns the state that Keras keeps for this thread: the dtype policy, counters of names, open scopes."""
    from keras.src.backend.common import global_state

    return vars(global_state.GLOBAL_STATE_TRACKER)


@contextlib.contextmanager
def use_thread_state(other: dict) -> Iterator[None]:
    """Gives this thread the state of another thread, which waits for it, inside the context.

    Several threads may do so, and run in turns. Each has lists of its own: those of open scopes, and that of variables
    to initialize, which Keras replaces once it has done so. Only what a thread has changed is given back.
    """
    mine = state_of_thread()
    before, taken = dict(mine), _with_own_lists(other)
    mine.clear()
    mine.update(_with_own_lists(taken))
    try:
        yield
    finally:
        other.update((name, value) for name, value in mine.items() if not _is_same(value, taken.get(name)))
        mine.clear()
        mine.update(before)


def _with_own_lists(state: dict) -> dict:
    return {name: list(value) if isinstance(value, list) else value for name, value in state.items()}


def _is_same(one: Any, other: Any) -> bool:
    """Returns True for one object, or for two lists of the same objects."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))
    return one is other


@contextlib.contextmanager
def entered(name: str) -> Iterator[None]:
    """Notes that `fit`, `evaluate` or `predict` runs inside the context."""
    _entries.append(name)
    try:
        yield
    finally:
        _entries.pop()


def entry_under_way(name: str) -> bool:
    """Returns True if the innermost of `fit`, `evaluate` and `predict` that runs is `name`."""
    return bool(_entries) and _entries[-1] == name
