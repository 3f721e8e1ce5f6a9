"""Lets all workers call `keras.utils.get_file` at once: files appear complete, and one worker per host downloads."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from keras.src.utils import file_utils

from tfring._keras.seam import seam
from tfring.cluster import detection
from tfring.errors import ConfigurationError


def install() -> None:
    @seam(file_utils, "urlretrieve")
    def urlretrieve(original: Callable[..., Any], url: str, filename: str, *args: Any, **kwargs: Any) -> Any:
        if not _has_others():
            return original(url, filename, *args, **kwargs)
        before = _identity(filename)
        with _locked(filename):
            if _identity(filename) != before:  # it changed while this worker waited
                return filename, None
            with tempfile.TemporaryDirectory(prefix=".download-", dir=os.path.dirname(filename)) as folder:
                made = os.path.join(folder, "file")
                result = original(url, made, *args, **kwargs)
                os.replace(made, filename)
                return result

    @seam(file_utils, "extract_archive")
    def extract_archive(
        original: Callable[..., Any], file_path: Any, path: Any = ".", archive_format: Any = "auto"
    ) -> bool:
        if not _has_others():
            return original(file_path, path, archive_format)
        path = os.path.abspath(path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with _locked(path), tempfile.TemporaryDirectory(prefix=".extract-", dir=os.path.dirname(path)) as folder:
            is_archive = original(file_path, folder, archive_format)
            if is_archive:
                _move(folder, path)
            return is_archive


def _has_others() -> bool:
    """Returns True if the environment says that this process is one of several workers."""
    try:
        found = detection.find(os.environ)
    except ConfigurationError:  # RingStrategy() will raise it
        return False
    return found is not None and found.world_size > 1


def _identity(path: str) -> tuple | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
    """Waits for workers of this host that hold the lock of a path; continues without it if there are no locks."""
    import fcntl

    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            folder, name = os.path.split(path)
            fd = os.open(os.path.join(folder, f".{name}.lock"), os.O_RDWR | os.O_CREAT, 0o644)
            stack.callback(os.close, fd)
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield


def _move(folder: str, to: str) -> None:
    """Moves the contents of a folder into another; each file replaces the existing one."""
    os.makedirs(to, exist_ok=True)
    for at, names, files in os.walk(folder):
        target = os.path.normpath(os.path.join(to, os.path.relpath(at, folder)))
        for name in list(names):
            if os.path.islink(os.path.join(at, name)):
                names.remove(name)
                files.append(name)
            else:
                os.makedirs(os.path.join(target, name), exist_ok=True)
        for name in files:
            os.replace(os.path.join(at, name), os.path.join(target, name))
