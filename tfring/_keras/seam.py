"""Replaces functions of Keras for objects of a RingStrategy, and knows which entry runs."""

from __future__ import annotations

import contextlib
import functools

from tfring.recognition import ring_of


def seam(owner, name):
    """Decorates `replacement(original, *args, **kwargs)` to stand in for `owner.name`."""

    def install(replacement):
        original = getattr(owner, name)

        @functools.wraps(original)
        def replaced(*args, **kwargs):
            return replacement(original, *args, **kwargs)

        setattr(owner, name, replaced)
        return replacement

    return install


def version_of_keras() -> tuple[int, int]:
    """Major and minor."""
    import keras

    major, minor = keras.__version__.split(".")[:2]
    return int(major), int(minor)


def ring_of_model(model):
    """The RingStrategy in whose scope a model was made."""
    return ring_of(getattr(model, "_distribute_strategy", None))


_entries: list[str] = []  # fit, evaluate or predict under way, innermost last


@contextlib.contextmanager
def entered(name: str):
    """While `fit`, `evaluate` or `predict` runs."""
    _entries.append(name)
    try:
        yield
    finally:
        _entries.pop()


def entry_under_way(name: str) -> bool:
    """Returns True if the innermost of `fit`, `evaluate` and `predict` that runs is `name`."""
    return bool(_entries) and _entries[-1] == name
