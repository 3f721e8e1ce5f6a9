"""Lets rank 0 alone print Keras' progress bars and summaries; `TFRING_PRINT=all` lets every rank print."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

from tfring import config as settings
from tfring._keras.seam import ring_of_model, seam
from tfring._keras.sharding import full_shapes
from tfring.runtime import Ring
from tfring.setting import setting

_local = threading.local()


def on_rank_0(ring: Ring | None) -> AbstractContextManager:
    """Makes Keras print only on rank 0 of `ring` inside the context; with None, as it does without a strategy."""
    return setting(_local, "silent", getattr(_local, "silent", False) or _is_silent(ring))


def replaced(text: str, other: str) -> AbstractContextManager:
    """Makes Keras print `other` instead of `text` inside the context: a path instead of the one beside it."""
    return setting(_local, "replaced", (*getattr(_local, "replaced", ()), (text, other)))


def _is_silent(ring: Ring | None) -> bool:
    return ring is not None and not ring.cluster.is_chief and settings.read("TFRING_PRINT") == "rank0"


def install() -> None:
    import keras
    from keras.src.utils import io_utils, summary_utils

    @seam(io_utils, "print_msg")
    def print_msg(original: Callable[..., Any], message: Any, *args: Any, **kwargs: Any) -> None:
        for text, other in getattr(_local, "replaced", ()):
            message = str(message).replace(text, other)
        if not getattr(_local, "silent", False):
            original(message, *args, **kwargs)

    @seam(summary_utils, "count_params")
    def count_params(original: Callable[..., Any], weights: Iterable[Any]) -> int:
        with full_shapes():
            return original(weights)

    signature = inspect.signature(keras.Model.summary)

    @seam(keras.Model, "summary")
    def summary(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
        ring = ring_of_model(self)
        has_printer = signature.bind(self, *args, **kwargs).arguments.get("print_fn") is not None
        if ring is None or has_printer or not _is_silent(ring):
            with full_shapes():
                original(self, *args, **kwargs)
