"""Writes files and folders beside their path and renames them, so that ranks that write one path do not mix them."""

from __future__ import annotations

import contextlib
import os
import pathlib
import tempfile
import time
from collections.abc import Iterator

_began = time.time()
_placed: dict[pathlib.Path, int] = {}  # folders that this process placed, and their inodes


@contextlib.contextmanager
def replace_files(path: pathlib.Path) -> Iterator[str]:
    """Yields a path beside this one. On exit each file written there, one or several, replaces the one of its name.

    Either ranks write the same bytes, or files that list the others, such as the index of a checkpoint, are moved last.
    """
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as made:
        yield os.path.join(made, path.name)
        _move(pathlib.Path(made), path.parent)


@contextlib.contextmanager
def replace_folder(path: pathlib.Path, is_chief: bool) -> Iterator[str]:
    """Yields a path beside this one. On exit the folder written there is moved to the path as a whole.

    If the folder at the path has entries that the new one lacks, rank 0 moves its files there one by one instead, and
    the other ranks move none.

    The folders of ranks differ inside, although they load as the same model. Rank 0's folder therefore remains, and
    another rank replaces only a folder that it placed itself or that is older than this process. At its own path the
    rank thus finds its own folder. At a shared path it does not disturb rank 0, which may read at once.
    """
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as made:
        new = pathlib.Path(made) / path.name
        yield str(new)
        if not new.is_dir():
            _move(pathlib.Path(made), path.parent)
        elif _holds_only(path, new):
            _place(new, path, is_chief)
        elif is_chief:
            _move(pathlib.Path(made), path.parent)


def _place(new: pathlib.Path, path: pathlib.Path, is_chief: bool) -> None:
    inode = new.stat().st_ino
    while True:
        try:
            os.rename(new, path)  # if the path does not exist or is an empty folder
            _placed[path] = inode
            return
        except OSError:
            if not path.is_dir():
                raise
        with contextlib.suppress(FileNotFoundError):  # another rank was faster
            if not is_chief and not _is_replaceable(path):
                return
            os.rename(path, tempfile.mkdtemp(dir=new.parent))


def _holds_only(path: pathlib.Path, new: pathlib.Path) -> bool:
    """Returns True if every entry of a folder is also in the new one. Otherwise the user keeps other files there."""
    return not path.exists() or (path.is_dir() and {p.name for p in path.iterdir()} <= {p.name for p in new.iterdir()})


def _is_replaceable(path: pathlib.Path) -> bool:
    status = path.stat()
    return _placed.get(path) == status.st_ino or status.st_mtime < _began


def _move(made: pathlib.Path, to: pathlib.Path) -> None:
    """Moves all files of a folder to their places in another, those that describe the others last."""
    new = [pathlib.Path(at) / name for at, _, names in os.walk(made) for name in names]
    for file in sorted(new, key=lambda file: file.name.endswith((".index", ".pb", ".json"))):
        target = to / file.relative_to(made)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(file, os.path.realpath(target))
