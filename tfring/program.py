"""Distinguishes the user's program from the libraries that it calls."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
import threading
import traceback
import types
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from tfring.errors import TfringError

_P = ParamSpec("_P")
_R = TypeVar("_R")
_GRAPH_FRAME = re.compile(r'  File "([^"]+)", line \d+, in .*\n(?:    .*)?\n')  # in a message of TensorFlow


def folders_of(*modules: str) -> tuple[str, ...]:
    """Returns the folders of those of the packages that are imported, each with a separator at the end."""
    return tuple(os.path.dirname(sys.modules[name].__file__ or "") + os.sep for name in modules if name in sys.modules)


def stack() -> str:
    """Returns the stack of the main thread as in a traceback: frames of the program, and the innermost frame."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = traceback.extract_stack(frame)
    libraries = folders_of("tfring", "keras", "tensorflow", "contextlib")
    kept = [each for each in frames if each is frames[-1] or not each.filename.startswith(libraries)]
    return "".join(traceback.format_list(kept)).rstrip()


class ShortTraceback:
    """A context in which tracebacks of errors contain only frames of the program, as with Keras' filter.

    Frames of tfring, Keras and TensorFlow are removed, except a last frame of tfring that runs into an error. So are
    such frames of the graph's trace in the message of a failed operation, except the last one. An error of TensorFlow
    from which one of `tfring.errors` was made becomes its `__context__`. This is a class because the `with` of a
    generator would put the frames back.

    Args:
      filters: Whether to filter; False after `keras.config.disable_traceback_filtering()`. TensorFlow has its own
        switch. Defaults to True.
    """

    def __init__(self, filters: bool = True) -> None:
        self._filters = filters

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: types.TracebackType | None) -> None:
        tensorflow: Any = sys.modules.get("tensorflow")
        shows_all = tensorflow is not None and not tensorflow.debugging.is_traceback_filtering_enabled()
        if error is None or shows_all or not self._filters:
            return
        of_operations: Any = () if tensorflow is None else (tensorflow.errors.OpError,)
        if isinstance(error, TfringError) and isinstance(error.__cause__, of_operations):
            error.__context__ = error.__cause__
            error.__cause__ = None  # which also sets `__suppress_context__`
        if isinstance(error, of_operations):
            error._message = _without_library_frames(error.message)
        error.__traceback__ = _users_frames(trace, keeps_last=not isinstance(error, (TfringError, *of_operations)))


def short_traceback(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Returns a function whose tracebacks contain only frames of the program."""

    @functools.wraps(function)
    def shortened(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with ShortTraceback():
            return function(*args, **kwargs)

    return shortened


def _without_library_frames(message: str) -> str:
    libraries = (*folders_of("tfring", "keras", "tensorflow"), threading.__file__, contextlib.__file__)
    frames = list(_GRAPH_FRAME.finditer(message))
    for each in reversed(frames):
        if each[1].startswith(libraries) and each is not frames[-1]:
            message = message[: each.start()] + message[each.end() :]
    return message


def _users_frames(trace: types.TracebackType | None, keeps_last: bool) -> types.TracebackType | None:
    kept: types.TracebackType | None = None
    own, others = folders_of("tfring"), folders_of("keras", "tensorflow")
    entries = []
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    for entry in reversed(entries):  # without recursion: the traceback may be as deep as Python allows
        file = entry.tb_frame.f_code.co_filename
        is_last = keeps_last and entry is entries[-1]
        is_others = file.startswith(others) or file in (contextlib.__file__, __file__)
        if (file.startswith(own) and not is_last) or is_others:
            continue
        kept = types.TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return kept
