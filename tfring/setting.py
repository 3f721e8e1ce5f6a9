"""Sets an attribute temporarily."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

_NOTHING = object()


@contextlib.contextmanager
def setting(holder: Any, name: str, value: Any) -> Iterator[Any]:
    """Sets an attribute inside the context, even if it does not exist; afterwards restores its state from before.

    Yields:
      The value.
    """
    before = getattr(holder, name, _NOTHING)
    setattr(holder, name, value)
    try:
        yield value
    finally:
        if before is _NOTHING:
            delattr(holder, name)
        else:
            setattr(holder, name, before)
