"""Tells the user's program from the libraries that it calls."""

from __future__ import annotations

import os
import sys
import threading
import traceback


def folders_of(*modules: str) -> tuple[str, ...]:
    """Returns the folders of those packages that are imported, with a separator at the end."""
    return tuple(os.path.dirname(sys.modules[name].__file__ or "") + os.sep for name in modules if name in sys.modules)


def stack() -> str:
    """Returns where the main thread is, as a traceback has it: the program's frames, and the innermost of any."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = traceback.extract_stack(frame)
    libraries = folders_of("tfring", "keras", "tensorflow", "contextlib")
    kept = [each for each in frames if each is frames[-1] or not each.filename.startswith(libraries)]
    return "".join(traceback.format_list(kept)).rstrip()
