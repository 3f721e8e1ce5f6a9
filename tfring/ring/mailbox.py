"""Memory that two ranks of a host share, without a name in the file system.

A rank makes an anonymous memory file and a pipe as its doorbell; a neighbour opens both through
`/proc/<pid>/fd`. That works between processes of one user in one PID namespace, needs no room in /dev/shm (64
MB in a container by default) and leaves nothing behind, however a process ends. `native/shm_channel.cc` says
what is inside.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import secrets
from typing import Any

HEADER_BYTES = 4096
CAPACITY_BYTES = 1024 * 1024
_NONCE_BYTES = 16


def host_identity() -> str:
    """Equal for processes that can reach each other's descriptors: same boot, same PID namespace."""
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


class Mailbox:
    """This rank's mailbox. Its descriptors are open until `detach` or `close`."""

    def __init__(self) -> None:
        """Raises OSError where the system gives no such memory."""
        self.memory_fd = os.memfd_create("tfring-mailbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            size = HEADER_BYTES + CAPACITY_BYTES
            os.ftruncate(self.memory_fd, size)
            os.posix_fallocate(self.memory_fd, 0, size)  # now, or as a bus error later
            fcntl.fcntl(self.memory_fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self.nonce = secrets.token_bytes(_NONCE_BYTES)
            os.pwrite(self.memory_fd, self.nonce, 0)
            reader, writer = os.pipe2(os.O_CLOEXEC)
            try:
                # Both ends in one descriptor: no end of file when the neighbours have left.
                self.doorbell_fd = os.open(
                    f"/proc/self/fd/{reader}", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC
                )
            finally:
                os.close(reader)
                os.close(writer)
        except BaseException:
            os.close(self.memory_fd)
            raise

    def facts(self) -> dict[str, Any]:
        """What a neighbour needs to `attach`."""
        return {
            "pid": os.getpid(),
            "memory_fd": self.memory_fd,
            "doorbell_fd": self.doorbell_fd,
            "nonce": self.nonce.hex(),
        }

    def detach(self) -> tuple[int, int]:
        """Hands over both descriptors: memory, doorbell."""
        fds, self.memory_fd, self.doorbell_fd = (self.memory_fd, self.doorbell_fd), -1, -1
        return fds

    def close(self) -> None:
        for fd in self.detach():
            if fd >= 0:
                os.close(fd)


def attach(facts: dict[str, Any]) -> tuple[int, int]:
    """Opens a neighbour's mailbox.

    Returns:
        Descriptors the caller owns: memory, doorbell.

    Raises:
        OSError, ValueError, KeyError, TypeError: It cannot be reached, or it is another process's.
    """
    directory = f"/proc/{int(facts['pid'])}/fd"
    memory_fd = os.open(f"{directory}/{int(facts['memory_fd'])}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.pread(memory_fd, _NONCE_BYTES, 0) != bytes.fromhex(facts["nonce"]):
            raise ValueError("the descriptor is of another file")
        if os.fstat(memory_fd).st_size != HEADER_BYTES + CAPACITY_BYTES:
            raise ValueError("the mailbox is of another size")
        doorbell_fd = os.open(
            f"{directory}/{int(facts['doorbell_fd'])}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC
        )
    except BaseException:
        with contextlib.suppress(OSError):
            os.close(memory_fd)
        raise
    return memory_fd, doorbell_fd
