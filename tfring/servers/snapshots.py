"""Snapshots of a server in a folder: the last snapshot and the posts of worker 0, as messages. Nothing is pickled.

    server-0.snapshot    written beside and renamed: always the full previous one, or the full new one
    server-0.posts       grows: a length of 8 bytes before each message; a truncated last one is ignored
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfring.errors import ConfigurationError
from tfring.servers import messages

Message = tuple[dict[str, Any], list[np.ndarray]]


class Snapshots:
    """Writes and reads the snapshots of one server.

    Args:
      folder: Folder of the snapshots. It is created if missing. A restarted server finds the same folder.
      server: Number of the server.

    Raises:
      ConfigurationError: If the folder cannot be written.
    """

    def __init__(self, folder: str, server: int) -> None:
        self.folder = pathlib.Path(folder)
        self._file = self.folder / f"server-{server}.snapshot"
        self._beside = self.folder / f"server-{server}.snapshot.part"
        self._posts = self.folder / f"server-{server}.posts"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._beside.write_bytes(b"")
            self._beside.unlink()
        except OSError as error:
            raise ConfigurationError(
                f"`snapshot_dir` is {folder!r}, a folder that this server cannot write to: {error}."
            ) from None

    def begin(self, job: str) -> None:
        """Begins the posts of a job, and removes those of an earlier job."""
        self._posts.write_bytes(b"")
        self.post({"job": job})

    def write(self, head: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> None:
        """Replaces the snapshot.

        Raises:
          OSError: If it cannot be written. The previous snapshot is still there.
        """
        message = messages.pack(head, arrays)
        with self._beside.open("wb") as file:
            file.write(message.data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(self._beside, self._file)

    def post(self, head: Mapping[str, Any], arrays: Sequence[np.ndarray] = ()) -> None:
        """Appends a post of worker 0.

        Raises:
          OSError: If it cannot be written.
        """
        message = messages.pack(head, arrays)
        with self._posts.open("ab") as file:
            file.write(message.nbytes.to_bytes(8, "little"))
            file.write(message.data)

    def read(self, job: str) -> tuple[Message, list[Message]] | None:
        """Returns the snapshot of a job and its posts, or None if the folder has none of this job."""
        try:
            snapshot = messages.unpack(np.fromfile(self._file, np.uint8))
            begin, *posts = self._read_posts()
        except (OSError, ValueError):
            return None
        return (snapshot, posts) if snapshot[0].get("job") == begin[0].get("job") == job else None

    def _read_posts(self) -> list[Message]:
        content = np.fromfile(self._posts, np.uint8)
        found, position = [], 0
        while position + 8 <= content.size:
            length = int.from_bytes(content[position : position + 8].tobytes(), "little")
            if position + 8 + length > content.size:
                break
            # A copy is aligned for arrays of any dtype.
            found.append(messages.unpack(content[position + 8 : position + 8 + length].copy()))
            position += 8 + length
        if position < content.size:  # truncated: the next post would be read as the rest of it
            os.truncate(self._posts, position)
        return found
