"""Files of a backup, each complete or absent.

    epoch-00003-step-00000120.npz       a plain zip file: `numpy.load` and `python -m zipfile` read it
      state.json                          the position of training, and descriptions of the arrays
      0.npy, 1.npy, ...                   arrays
    epoch-00003-step-00000120-9f1c27ab-rank-1.npz    the shards of rank 1, if each rank writes its own
      7.npy, ...                          shards of arrays missing in the first file; its state.json says which part

A file is written under a temporary name, synced to the disk, then renamed; the first file comes last. A zip file has a
CRC-32 of each member and its table of contents at the end, so a file that is cut or changed is recognized.
Names of shard files have a random part, so that two backups after the same step are not mixed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import lzma
import math
import os
import pathlib
import re
import secrets
import socket
import struct
import sys
import time
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any

import numpy as np

from tfring import blocks

_NAME = re.compile(r"epoch-(\d+)-step-(\d+)\.npz")
_SHARDS = re.compile(r"(epoch-\d+-step-\d+)-[0-9a-f]{8}-rank-\d+\.npz")
_STATE = "state.json"
_LOCK = ".job"  # names the process that uses the folder, and is removed when it ends
_LOCK_TRIES, _LOCK_PAUSE_SECONDS = 10, 0.5  # a process that was killed may have been in a write
_NOT_WHOLE = (  # exceptions of zipfile and numpy for an incomplete file
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error),
    *(ValueError, LookupError, EOFError, RuntimeError, TypeError, OverflowError, MemoryError),
)


@contextlib.contextmanager
def held(folder: pathlib.Path) -> Iterator[str]:
    """Locks a folder for this process, and yields the other process that holds the lock, or an empty string.

    It locks nothing if the folder cannot be written or has no locks, as on some network file systems.
    """
    path = folder / _LOCK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file, holder = _lock(path)
    except OSError:
        yield ""
        return
    with file:
        if holder:
            yield holder
            return
        with contextlib.suppress(OSError):  # on a full disk the lock is still held
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()} ({' '.join(sys.argv)})")
            file.flush()
        try:
            yield ""
        finally:
            path.unlink(missing_ok=True)


def _lock(path: pathlib.Path) -> tuple[IO[str], str]:
    """Returns the open file and the process that holds it; an empty string if this process holds it from now on."""
    for attempt in range(_LOCK_TRIES):
        file = open(path, "a+", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666))  # noqa: SIM115
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):  # otherwise its holder has just removed it
                return file, ""
        except BlockingIOError:
            if attempt == _LOCK_TRIES - 1:
                file.seek(0)
                return file, file.read() or "another process"
            time.sleep(_LOCK_PAUSE_SECONDS)
        except FileNotFoundError:
            pass
        except BaseException:
            file.close()
            raise
        file.close()
    raise OSError(f"{path} is repeatedly created and removed")


def write(
    folder: pathlib.Path, epoch: int, step: int, state: dict, arrays: Sequence[np.ndarray | None], keep: int
) -> None:
    """Writes a file and removes all but the newest `keep`.

    Args:
      folder: The folder, created if it does not exist.
      epoch: Number of epochs done.
      step: Number of further steps done.
      state: A dict that can be written as JSON. Its `num_arrays` is the number of arrays. If some arrays are None, its
        `pieces` names the files to which ranks have written them, and `pieces` of their `variables` says which rank has
        which shard.
      arrays: The arrays. None for an array whose shards ranks have written.
      keep: Number of files to keep.

    Raises:
      OSError: If the file cannot be written. Earlier files remain.
    """
    members = [(f"{number}.npy", array) for number, array in enumerate(arrays) if array is not None]
    try:
        _write(folder, f"{_stem(epoch, step)}.npz", [(_STATE, json.dumps(state, default=_plain)), *members])
    finally:
        remove_all_but(folder, keep)


def write_shards(folder: pathlib.Path, epoch: int, step: int, rank: int, shards: dict[int, np.ndarray]) -> str:
    """Writes a rank's shards of some arrays, by their numbers, and returns the name of the file.

    Raises:
      OSError: If the file cannot be written.
    """
    name = f"{_stem(epoch, step)}-{secrets.token_hex(4)}-rank-{rank}.npz"
    _write(folder, name, [(f"{number}.npy", shard) for number, shard in shards.items()])
    return name


def _write(folder: pathlib.Path, name: str, members: Iterable[tuple[str, str | np.ndarray]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    beside = path.with_suffix(f".{secrets.token_hex(4)}.part")
    try:
        with open(beside, "wb", opener=_new) as file:
            with zipfile.ZipFile(file, "w") as archive:
                for member_name, content in members:
                    if isinstance(content, str):
                        archive.writestr(member_name, content)
                        continue
                    with archive.open(member_name, "w", force_zip64=True) as member:
                        _write_array(member, content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    _sync(folder)


def _write_array(member: IO[bytes], array: np.ndarray) -> None:
    """Writes an array in NumPy's format, without NumPy's copies of 16 MiB at a time."""
    header = np.lib.format.header_data_from_array_1_0(array)
    np.lib.format.write_array_header_1_0(member, header)
    octets = (array.T if header["fortran_order"] else array).reshape(-1).view(np.uint8)
    for begin in range(0, octets.size, blocks.BLOCK_BYTES):
        member.write(octets[begin : begin + blocks.BLOCK_BYTES].data)


def _new(path: str, flags: int) -> int:
    """Opens a file that must not exist yet and follows no link: others may write to the folder."""
    return os.open(path, flags | os.O_EXCL | os.O_NOFOLLOW, 0o666)


def remove_all_but(folder: pathlib.Path, keep: int) -> None:
    """Removes old backups, shards that no remaining backup names, and unfinished files."""
    files = _found(folder)
    named: set[str | None] = set()
    unread: set[str] = set()
    for path in files[:keep]:
        try:
            with zipfile.ZipFile(path) as archive:
                named.update(json.loads(archive.read(_STATE)).get("pieces", ()))
        except (*_NOT_WHOLE, OSError):
            unread.add(path.stem)
    matches = [match for path in folder.glob("*.npz") if (match := _SHARDS.fullmatch(path.name))]
    shards = [folder / match[0] for match in matches if match[0] not in named and match[1] not in unread]
    for old in [*files[keep:], *shards, *folder.glob("*.part")]:
        old.unlink(missing_ok=True)


def newest(folder: pathlib.Path) -> tuple[pathlib.Path, dict[str, Any], list[np.ndarray]] | None:
    """Returns the newest complete file, its state and its arrays; None if there is no file.

    Raises:
      OSError: If there are files, and none is complete and readable.
    """
    problems = []
    for path in _found(folder):
        try:
            return path, *_read(path)
        except (*_NOT_WHOLE, OSError) as error:
            problems.append(f"{path.name}: {error}")
    if problems:
        raise OSError(
            f"no backup in {str(folder)!r} is complete. {'; '.join(problems)}. Put a complete one there, or remove "
            "these files to begin from the start."
        )
    return None


def _read(path: pathlib.Path) -> tuple[dict[str, Any], list[np.ndarray]]:
    with contextlib.ExitStack() as stack:
        archive = stack.enter_context(zipfile.ZipFile(path))
        state = json.loads(archive.read(_STATE))
        others = [
            None if name is None else stack.enter_context(zipfile.ZipFile(path.with_name(name)))
            for name in state.get("pieces", ())
        ]
        here = set(archive.namelist())
        names = [f"{number}.npy" for number in range(state["num_arrays"])]
        arrays = [
            _read_array(archive, name) if name in here else _assemble(others, name, state["variables"][number])
            for number, name in enumerate(names)
        ]
    return state, arrays


def _assemble(archives: Sequence[Any], name: str, variable: dict) -> np.ndarray:
    """Assembles a full value from the shards of ranks, in its original shape; one per replica if replicas differ."""
    shards = variable["pieces"]
    held = [_read_array(archives[rank], name) for rank, *_ in shards["of"]]
    replicas = 1 + max(replica for *_, replica in shards["of"])
    whole = blocks.allocate([replicas, *shards["lined_up"]], held[0].dtype)
    rows_of = [np.moveaxis(each, shards["dimension"], 0) for each in whole]  # views
    for shard, (_, slices, replica) in zip(held, shards["of"], strict=True):
        rows = np.moveaxis(shard, shards["dimension"], 0)
        blocks.write_rows(rows, 0, [rows_of[replica][slice(*part)] for part in slices])
    return whole.reshape([replicas, *variable["shape"]] if variable["of_each_replica"] else variable["shape"])


def _stem(epoch: int, step: int) -> str:
    return f"epoch-{epoch:05}-step-{step:08}"


def _plain(value: Any) -> Any:
    """Converts numbers in logs that are not Python's."""
    return np.asarray(value).tolist()


def _read_array(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    with archive.open(name) as member:
        shape, is_fortran, dtype = _read_header(member, name)
        if dtype.hasobject:
            raise ValueError(f"{name} contains objects")
        if math.prod(shape) * dtype.itemsize > archive.getinfo(name).file_size:  # before memory is allocated
            raise ValueError(f"{name} is shorter than its array")
        array = blocks.allocate(shape[::-1] if is_fortran else shape, dtype)
        octets = array.reshape(-1).view(np.uint8)
        filled = 0
        while filled < octets.size and (read := member.read(min(blocks.BLOCK_BYTES, octets.size - filled))):
            octets[filled : filled + len(read)] = np.frombuffer(read, np.uint8)
            filled += len(read)
        if filled < octets.size:
            raise ValueError(f"{name} is shorter than its array")
        if member.read(1):  # this also checks the CRC
            raise ValueError(f"{name} is longer than its array")
        return array.T if is_fortran else array


def _read_header(member: IO[bytes], name: str) -> tuple:
    """Returns the shape, order and dtype of an array.

    Raises:
      ValueError: If it is not a header. NumPy raises any error of Python's parser then.
    """
    version = np.lib.format.read_magic(member)
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    try:
        return read_header(member)
    except zipfile.BadZipFile:
        raise
    except Exception as error:
        raise ValueError(f"{name} has no header: {error}") from error


def _found(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the backups in a folder, newest first."""
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
