"""Imports TensorFlow and Keras without garbage collections, as they make no garbage; calls functions after an import.

Ctrl-C during these imports, or while Python starts, ends a worker without a traceback: no line of it is the program's.

This module imports nothing of tfring, because `tfring launch` runs it in each worker before the program
(`launch/hook`).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

_LARGE = ("keras", "tensorflow")


def quicken() -> None:
    """Turns off garbage collection during later imports of TensorFlow and Keras, which saves a sixth of their time.

    The objects they create then belong to the oldest generation, as after collections. A collector that is off stays
    off.
    """
    _finder().large = _LARGE


def after_import(name: str, function: Callable[[Any], None]) -> None:
    """Calls a function with a module once it is imported, or immediately if it already is."""
    if name in sys.modules:
        function(sys.modules[name])
    else:
        _finder().waiting.setdefault(name, []).append(function)


def _finder() -> _Finder:
    for finder in sys.meta_path:
        if isinstance(finder, _Finder):
            return finder
    sys.meta_path.insert(0, finder := _Finder())
    return finder


class _Finder:
    """Finds modules as other finders do, to import large ones without collections and to call functions afterwards."""

    def __init__(self) -> None:
        self.large: tuple[str, ...] = ()
        self.waiting: dict[str, list[Callable[[Any], None]]] = {}  # by module: functions to call after its import

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self.large and name not in self.waiting:
            return None
        finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (find(name, path, target) for find in finders if find is not None)), None)
        loader: Any = getattr(spec, "loader", None)
        if hasattr(loader, "exec_module"):
            with contextlib.suppress(AttributeError):  # for a loader whose attributes cannot be set
                loader.exec_module = functools.partial(self._execute, loader, loader.exec_module)
        return spec

    def _execute(self, loader: Any, exec_module: Callable[[Any], None], module: Any) -> None:
        with contextlib.suppress(AttributeError):  # for a loader that was executed before
            del loader.exec_module
        with contextlib.ExitStack() as contexts:
            if module.__name__ in self.large:
                contexts.enter_context(pause_garbage_collection())
                contexts.enter_context(end_by_interrupt())
            exec_module(module)
        for function in self.waiting.pop(module.__name__, []):
            function(module)


@contextlib.contextmanager
def end_by_interrupt() -> Iterator[None]:
    """Makes Ctrl-C end the process inside the context, without a KeyboardInterrupt. A handler of the program stays."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def pause_garbage_collection(as_old: bool = True) -> Iterator[None]:
    """Turns off garbage collection inside the context.

    Args:
      as_old: Whether objects created meanwhile move to the oldest generation, for objects that never become garbage.
        Otherwise they stay new. Defaults to True.

    >>> import gc
    >>> with pause_garbage_collection():
    ...     gc.isenabled()
    False
    >>> gc.isenabled()
    True
    >>> for as_old in (True, False):
    ...     _ = gc.collect()
    ...     with pause_garbage_collection(as_old):
    ...         made = []
    ...     any(each is made for each in gc.get_objects(generation=2))
    True
    False
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if as_old and not gc.get_freeze_count():  # otherwise this would unfreeze what the program has frozen
            gc.freeze()
            gc.unfreeze()  # into the oldest generation
        gc.enable()
