"""Joins the output of all workers into one that is easy to read.

Output of rank 0 is shown unchanged, with progress bars; but a line is held for a moment until it ends, because `print`
writes it in parts. Output of the others, and of rank 0 if lines are shown with their time, is shown in full lines that
begin with `[rank] `. Lines that were drawn over (carriage returns, backspaces: progress bars) are left out. Lines of
TensorFlow's log that every rank has, Python warnings, and a traceback that another rank has shown, are shown once.
All text is bytes, so any encoding works.
"""

from __future__ import annotations

import array
import collections
import contextlib
import datetime
import fcntl
import os
import re
import select
import stat
import termios
import time
from typing import BinaryIO

from tfring.launch import tracebacks

_LINE_SECONDS = 0.1  # after which an unfinished line of rank 0 is shown, such as a question
_MAX_LINE_BYTES = 64 * 1024  # a longer line is shown in parts
_MOST_LOG_LINES = 10_000  # distinct lines that are remembered
_KEPT_LINES = 400  # of a worker's standard error, to report why it failed
# A line of TensorFlow's log. If ranks log the same line, the part after the time and the thread is the same.
_LOG = re.compile(
    rb"(?:\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: [IWE]|[IWE]\d{4} \d\d:\d\d:\d+\.\d+ +\d+) (\S+:\d+\] .*)"
    rb"|(WARNING: All log messages before absl::InitializeLog\(\) .*|To enable the following instructions: .*)"
)
# A warning as Python writes it. A line of the source follows it, if there is one.
_WARNING = re.compile(rb"\S.*:\d+: (\w*Warning: .*)")
_PIPE_BYTES, _TERMINAL_BYTES = select.PIPE_BUF, 256  # an output ready for some bytes takes these without blocking
_MOST_PENDING_BYTES = 1 << 26  # output beyond it is dropped; only a job being stopped reaches it


class Surface:
    """A terminal, file or pipe that shows lines of several ranks and rank 0's unfinished line.

    Output that cannot be written at once is kept, and written by `flush`, so that no reader blocks the caller.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._is_terminal = os.isatty(fd)
        self._is_file = stat.S_ISREG(os.fstat(fd).st_mode)
        self._unfinished = b""
        self._pending = bytearray()
        self._problem: OSError | None = None

    def write_line(self, line: bytes) -> None:
        """Shows a full line. An unfinished line is drawn again below it on a terminal, and ended otherwise."""
        if not self._unfinished:
            self._write(line + b"\n")
        elif self._is_terminal:
            self._write(b"\r\x1b[K" + line + b"\n" + self._unfinished)
        else:
            self._write(b"\n" + line + b"\n")
            self._unfinished = b""

    def write_raw(self, data: bytes) -> None:
        """Shows data that may end within a line."""
        self._write(data)
        last = data.rpartition(b"\n")[2] if b"\n" in data else self._unfinished + data
        self._unfinished = last.rpartition(b"\r")[2][-_MAX_LINE_BYTES:]

    @property
    def num_pending(self) -> int:
        """Number of bytes that are still to be written."""
        return len(self._pending)

    def take_problem(self) -> OSError | None:
        """Returns, once, the reason why nothing more is written: the disk is full, or the terminal is gone."""
        problem, self._problem = self._problem, None
        return problem

    def flush(self) -> None:
        """Writes as much as can be written without blocking.

        Raises:
          BrokenPipeError: If no process reads any more.
        """
        written = 0
        try:
            with memoryview(self._pending) as view:
                while written < len(view) and (self._is_file or _takes_some(self.fd)):
                    size = len(view) if self._is_file else _TERMINAL_BYTES if self._is_terminal else _PIPE_BYTES
                    written += os.write(self.fd, view[written : written + size])
        except BlockingIOError:  # another process made our output non-blocking
            pass
        except BrokenPipeError:
            self.fd, written = -1, len(self._pending)
            raise
        except OSError as error:
            self._problem = error
            self.fd, written = -1, len(self._pending)
        finally:
            del self._pending[:written]

    def _write(self, data: bytes) -> None:
        if self.fd >= 0 and len(self._pending) < _MOST_PENDING_BYTES:
            self._pending += data
            self.flush()


def _takes_some(fd: int) -> bool:
    """Returns True if a short write does not block."""
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(0))


def surfaces() -> tuple[Surface, Surface]:
    """Returns the surfaces of standard output and standard error. They are the same if both go to one place."""
    out, err = os.fstat(1), os.fstat(2)
    one = (out.st_dev, out.st_ino, out.st_rdev) == (err.st_dev, err.st_ino, err.st_rdev)
    surface = Surface(1)
    return surface, surface if one else Surface(2)


class Stream:
    """Standard output or standard error of one worker, read from a pipe, or fed by its host (`fd` is None)."""

    def __init__(
        self,
        rank: int,
        fd: int | None,
        surface: Surface,
        log: BinaryIO | None,
        shown: Shown,
        name: str | None = None,
        timestamps: bool = False,
    ) -> None:
        self.fd = fd
        self._timestamps = timestamps
        self._is_raw = rank == 0 and not timestamps
        self._prefix = prefix(rank if name is None else name)
        self.lines: collections.deque[bytes] = collections.deque(maxlen=_KEPT_LINES)
        self.traceback_at: float | None = None  # when the last traceback began, on the monotonic clock
        self._rank = rank
        self._surface = surface
        self._log = log
        self._shown = shown
        self.show_rest_at: float | None = None  # when `show_rest` is to be called
        self._rest = b""  # the unfinished line
        self._not_shown = b""  # output of rank 0 that is still to be shown
        self._tracebacks = tracebacks.Folding(rank, shown.tracebacks)
        self._folds_log = False  # whether the last line of the log was left out
        self._folds_source = False  # whether the line of the source of a warning is left out
        self._others_before_line = 0
        self._others_before_traceback = 0
        if fd is not None:
            os.set_blocking(fd, False)

    def pump(self) -> bool:
        """Shows the output available now, not later output. Returns False once the worker has closed its end."""
        if self.fd is None:
            return True
        left = max(1, _num_readable(self.fd))
        while left > 0:
            try:
                data = os.read(self.fd, min(left, 1 << 16))
            except BlockingIOError:
                return True
            if not data:
                return False
            self.take(data)
            left -= len(data)
        return True

    def close(self) -> None:
        """Shows the output available, and the last line if it is unfinished."""
        self.pump()
        self.show_rest()
        if self._rest:
            self._finish_line(self._rest)
            self._rest = b""
        if self.fd is not None:
            with contextlib.suppress(OSError):
                os.close(self.fd)

    def get_failure_output(self) -> tuple[list[bytes], bool]:
        """Returns the last traceback, or without one the last lines, and whether other ranks have shown lines since."""
        lines = list(self.lines)
        traceback = tracebacks.last(lines)
        since = self._others_before_traceback if traceback else self._others_before_line
        return traceback or lines[-20:], self._shown.by_others(self._rank) > since

    def last_traceback(self) -> list[bytes]:
        """Returns the last traceback, without lines of TensorFlow's log. Empty if there is none."""
        return tracebacks.last([line for line in self.lines if not _LOG.match(line)])

    def take(self, data: bytes) -> None:
        """Shows output of the worker."""
        if self._log:
            try:
                self._log.write(data)
            except OSError as error:
                self._log = None
                self._surface.write_line(f"tfring launch: the log of rank {self._rank} ends here: {error}".encode())
        if self._is_raw:
            self._show_raw(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _MAX_LINE_BYTES:
            lines.append(self._rest)
            self._rest = b""
        for line in lines:
            self._finish_line(line)

    def show_rest(self) -> None:
        """Shows a traceback that has not ended, and an unfinished line of rank 0."""
        self.show_rest_at = None
        self._show(self._tracebacks.end())
        if self._not_shown:
            self._surface.write_raw(self._not_shown)
            self._not_shown = b""

    def _show_raw(self, data: bytes) -> None:
        text = self._not_shown + data
        whole_bytes = text.rfind(b"\n") + 1
        if _drawn_over(text[whole_bytes:]):
            whole_bytes = len(text)
        if whole_bytes:
            self.show_rest_at = None
            *lines, rest = text[:whole_bytes].split(b"\n")
            for line in lines:
                self._show(self._folded(line))
            if rest:
                self._show(self._tracebacks.end())
                self._surface.write_raw(rest)
        self._not_shown = text[whole_bytes:]
        if (self._not_shown or self._tracebacks.is_pending) and self.show_rest_at is None:
            self.show_rest_at = time.monotonic() + _LINE_SECONDS

    def _folded(self, line: bytes) -> list[bytes]:
        """Returns the lines to show after this line arrived: this line, this line after those held back, or none."""
        log = _LOG.match(line)
        lines: list[bytes] = []
        if not log:
            lines, is_done = self._tracebacks.take(line)
            if is_done:
                return lines
        folds_source, self._folds_source = self._folds_source, False
        if folds_source and line.startswith(b"  "):
            return lines
        if _WARNING.match(line):
            self._folds_source = self._shown.count_log_line(self._rank, line)
            return lines if self._folds_source else [*lines, line]
        if log:
            self._folds_log = self._shown.count_log_line(self._rank, log.group(1) or log.group(2))
        elif not line.startswith(b"\t"):  # a message's second line
            self._folds_log = False
        return lines if self._folds_log else [*lines, line]

    def _show(self, lines: list[bytes]) -> None:
        for line in lines:
            if self._is_raw:
                self._surface.write_raw(line + b"\n")
            else:
                self._surface.write_line(self._now() + self._prefix + line)
            if not isinstance(line, tracebacks.Fold):
                self._shown.count(self._rank)

    def _now(self) -> bytes:
        """Returns the time in UTC, if lines are shown with it."""
        now = datetime.datetime.now(datetime.UTC)
        return f"{now:%H:%M:%S}.{now.microsecond // 1000:03} ".encode() if self._timestamps else b""

    def _finish_line(self, line: bytes) -> None:
        line = line.removesuffix(b"\r")
        drawn_over = _drawn_over(line)
        self._others_before_line = self._shown.by_others(self._rank)
        traceback = tracebacks.START.search(line)
        if traceback:
            self.traceback_at = time.monotonic()
            self._others_before_traceback = self._others_before_line
            if drawn_over:  # it began after a progress bar
                line, drawn_over = line[traceback.start() :], False
        self.lines.append(line.rpartition(b"\r")[2])
        if not self._is_raw and not drawn_over:
            self._show(self._folded(line))
            if self._tracebacks.is_pending:
                self.show_rest_at = time.monotonic() + _LINE_SECONDS


class Shown:
    """Counts the lines that each rank has shown, and records which lines of the log and tracebacks were shown."""

    def __init__(self) -> None:
        self._lines: collections.Counter[int] = collections.Counter()
        self._log: collections.Counter[bytes] = collections.Counter()
        self._log_of_rank: collections.Counter[tuple[int, bytes]] = collections.Counter()
        self.tracebacks: dict[bytes, tracebacks.Traceback] = {}

    def count_log_line(self, rank: int, text: bytes) -> bool:
        """Counts a line of a rank's log. Returns True if others have shown it as often as this rank has printed it."""
        if len(self._log_of_rank) > _MOST_LOG_LINES:
            self._log.clear()
            self._log_of_rank.clear()
        self._log_of_rank[rank, text] += 1
        if self._log_of_rank[rank, text] <= self._log[text]:
            return True
        self._log[text] += 1
        return False

    def repeated_warnings(self) -> list[str]:
        """Returns a sentence for each warning that several ranks printed, which was shown once."""
        ranks = collections.Counter(text for _, text in self._log_of_rank)
        found = []
        for text, number in ranks.items():
            warning = _WARNING.match(text)
            if warning and number > 1:
                shown = warning[1].decode(errors="replace")
                found.append(f"{number} ranks printed this warning, which is shown once above: {shown}")
        return found

    def count(self, rank: int) -> None:
        self._lines[rank] += 1

    def by_others(self, rank: int) -> int:
        return self._lines.total() - self._lines[rank]


def _num_readable(fd: int) -> int:
    number = array.array("i", [0])
    fcntl.ioctl(fd, termios.FIONREAD, number)
    return number[0]


def _drawn_over(line: bytes) -> bool:
    return b"\r" in line or b"\b" in line


def prefix(rank: int | str) -> bytes:
    return f"[{rank}] ".encode()
