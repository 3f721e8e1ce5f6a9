"""Memory that two ranks of a host share, without a name in the file system.

For each link a rank creates an anonymous memory file, sealed so that no process can change its size, and a pipe as its
doorbell. Both are handed to the peer through the Unix socket that connects the two ranks, and the peer validates them
before it uses them. This needs no space in /dev/shm (64 MB in a container by default) and leaves nothing behind,
however a process ends. `native/shm_channel.cc` describes the content.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Sequence

HEADER_BYTES = 4096
CAPACITY_BYTES = 1024 * 1024
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Mailbox:
    """This rank's mailbox of one link. Its descriptors are open until `detach` or `close`."""

    def __init__(self) -> None:
        """Raises OSError if the system does not provide such memory."""
        self.memory_fd = os.memfd_create("tfring-mailbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            size = HEADER_BYTES + CAPACITY_BYTES
            os.ftruncate(self.memory_fd, size)
            os.posix_fallocate(self.memory_fd, 0, size)  # fails now, instead of with a bus error later
            fcntl.fcntl(self.memory_fd, fcntl.F_ADD_SEALS, _SEALS)
            reader, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                # Both ends in one descriptor, so that there is no end of file when the peer has left.
                self.doorbell_fd = os.open(f"/proc/self/fd/{reader}", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            except BaseException:
                os.close(self._writer)
                raise
            finally:
                os.close(reader)
        except BaseException:
            os.close(self.memory_fd)
            raise

    @property
    def for_peer(self) -> tuple[int, int]:
        """Returns the descriptors to hand over to the peer: the memory, and the writing end of the doorbell."""
        return self.memory_fd, self._writer

    def detach(self) -> tuple[int, int]:
        """Returns both descriptors, memory and doorbell, which the caller then owns."""
        fds = (self.memory_fd, self.doorbell_fd)
        if self._writer >= 0:
            os.close(self._writer)
        self.memory_fd = self.doorbell_fd = self._writer = -1
        return fds

    def close(self) -> None:
        for fd in self.detach():
            if fd >= 0:
                os.close(fd)


def check(fds: Sequence[int]) -> None:
    """Validates the descriptors that a peer handed over as its mailbox.

    Raises:
      ValueError: If they are not a mailbox.
      OSError: If they cannot be inspected.
    """
    if len(fds) != 2:
        raise ValueError(f"{len(fds)} descriptors were received instead of memory and a doorbell")
    memory, doorbell = fds
    try:
        seals = fcntl.fcntl(memory, fcntl.F_GET_SEALS)
    except OSError:
        raise ValueError("the first descriptor is not a memory file") from None
    if seals & _SEALS != _SEALS:
        raise ValueError("the memory file is not sealed")
    if os.fstat(memory).st_size != HEADER_BYTES + CAPACITY_BYTES:
        raise ValueError("the memory file has the wrong size")
    if fcntl.fcntl(memory, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDWR:
        raise ValueError("the memory file is not open for reading and writing")
    if not stat.S_ISFIFO(os.fstat(doorbell).st_mode):
        raise ValueError("the doorbell is not a pipe")
    if fcntl.fcntl(doorbell, fcntl.F_GETFL) & os.O_ACCMODE != os.O_WRONLY:
        raise ValueError("the doorbell is not the write end of a pipe")
    # With its own reading end the doorbell can be rung without SIGPIPE after the peer has died.
    both = os.open(f"/proc/self/fd/{doorbell}", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    os.dup2(both, doorbell, inheritable=False)
    os.close(both)
