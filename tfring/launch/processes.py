"""Leaves no process behind, with the means of Linux: death signals, subreapers, the tree under /proc."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
import signal
import time

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)

# Processes left of a job first may end by themselves (multiprocessing's resource tracker does), then get these signals.
_LAST_CHANCES = ((None, 0.5), (signal.SIGTERM, 1.0), (signal.SIGKILL, 5.0))
_POLL_SECONDS = 0.02


def die_with_parent(parent: int) -> None:
    """Makes the kernel send SIGKILL to this process when its parent dies, however it dies."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        os._exit(128 + signal.SIGKILL)


def adopt_orphans() -> None:
    """Makes this process the parent of every descendant whose own parent dies, so that none is lost."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def reap() -> dict[int, int]:
    """Collects the children that have ended. Returns exit codes by process id, negative for a signal."""
    ended = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended[pid] = os.waitstatus_to_exitcode(status)
    return ended


def descendants(of: int) -> list[int]:
    """Returns the ids of the processes below `of`, without zombies."""
    children: dict[int, list[int]] = {}
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                # "4242 (any name (even this)) S 4200 ..."
                state, parent = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
                children.setdefault(int(parent), []).append(int(entry.name) if state != "Z" else 0)
    found, todo = [], [of]
    while todo:
        for child in children.get(todo.pop(), []):
            if child:
                found.append(child)
                todo.append(child)
    return found


def end_descendants() -> None:
    """Ends every process below this one."""
    for signum, seconds in _LAST_CHANCES:
        deadline = time.monotonic() + seconds
        signalled: set[int] = set()
        while True:
            reap()
            left = descendants(os.getpid())
            if not left:
                return
            if signum is not None:
                for pid in set(left) - signalled:
                    send_signal(pid, signum)
                signalled.update(left)
            if time.monotonic() >= deadline:
                break
            time.sleep(_POLL_SECONDS)


def send_signal(pid: int, signum: int, *, to_group: bool = False) -> None:
    """Sends a signal to a process, or to the group that it leads. It may be gone already."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        (os.killpg if to_group else os.kill)(pid, signum)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}, {value}): {os.strerror(code)}")
