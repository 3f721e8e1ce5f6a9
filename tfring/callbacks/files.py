"""Files of a backup: whole or not there at all.

    epoch-00003-step-00000120.npz       a plain zip file: `numpy.load` and `python -m zipfile` read it
      state.json                          where training was, and what the arrays are
      0.npy, 1.npy, ...                   arrays

A file is written beside, brought to the disk, then renamed. The zip format has a CRC-32 of each member, and its table
of contents at the end of the file; so a file that is cut or changed is told from a whole one.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import zipfile
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfring import blocks

_NAME = re.compile(r"epoch-(\d+)-step-(\d+)\.npz")
_STATE = "state.json"
_NOT_WHOLE = (zipfile.BadZipFile, ValueError, KeyError, EOFError, RuntimeError)  # as zipfile and numpy put it


def write(folder: pathlib.Path, epoch: int, step: int, state: dict, arrays: Sequence[np.ndarray], keep: int) -> None:
    """Writes a file and removes all but the newest `keep`.

    Raises:
      OSError: it cannot be written; what was there before still is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"epoch-{epoch:05}-step-{step:08}.npz"
    beside = path.with_suffix(".part")
    try:
        with beside.open("wb") as file:
            with zipfile.ZipFile(file, "w") as archive:
                archive.writestr(_STATE, json.dumps(state, default=_plain))
                for number, array in enumerate(arrays):
                    with archive.open(f"{number}.npy", "w", force_zip64=True) as member:
                        np.lib.format.write_array(member, array, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    _sync(folder)
    for old in [*_found(folder)[keep:], *folder.glob("*.part")]:  # parts: of a process that was killed
        old.unlink(missing_ok=True)


def newest(folder: pathlib.Path) -> tuple[pathlib.Path, dict[str, Any], list[np.ndarray]] | None:
    """The newest whole file, its state and its arrays; None where there is no file.

    Raises:
      OSError: there are files, and none is whole or can be read.
    """
    problems = []
    for path in _found(folder):
        try:
            with zipfile.ZipFile(path) as archive:
                state = json.loads(archive.read(_STATE))
                arrays = [_read_array(archive, f"{n}.npy") for n in range(state["num_arrays"])]
            return path, state, arrays
        except (*_NOT_WHOLE, OSError) as error:
            problems.append(f"{path.name}: {error}")
    if problems:
        raise OSError(f"no backup in {str(folder)!r} is whole. {'; '.join(problems)}")
    return None


def _plain(value):
    """Numbers that are not Python's, in logs."""
    return np.asarray(value).tolist()


def _read_array(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    with archive.open(name) as member:
        version = np.lib.format.read_magic(member)
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, is_fortran, dtype = read_header(member)
        if dtype.hasobject:
            raise ValueError(f"{name} has objects")
        array = blocks.room(shape[::-1] if is_fortran else shape, dtype)
        octets = array.reshape(-1).view(np.uint8)
        filled = 0
        while filled < octets.size and (read := member.read(min(blocks.BLOCK_BYTES, octets.size - filled))):
            octets[filled : filled + len(read)] = np.frombuffer(read, np.uint8)
            filled += len(read)
        if filled < octets.size:
            raise ValueError(f"{name} is shorter than its array")
        if member.read(1):  # which also has the CRC checked
            raise ValueError(f"{name} is longer than its array")
        return array.T if is_fortran else array


def _found(folder: pathlib.Path) -> list[pathlib.Path]:
    """Newest first."""
    if not folder.is_dir():
        return []
    matches = [match for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [folder / match[0] for match in sorted(matches, key=lambda match: (int(match[1]), int(match[2])))[::-1]]


def _sync(folder: pathlib.Path) -> None:
    with contextlib.suppress(OSError):  # some network file systems cannot
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
