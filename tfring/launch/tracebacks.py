"""Tracebacks among what workers print: one that several ranks share is shown once, and mentioned at the end."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

# "Traceback (most recent call last):", "  + Exception Group Traceback (most recent call last):" but not the
# "    | Traceback (most recent call last):" within a group, and what faulthandler writes of a crash.
START = re.compile(rb"(?<!\| )Traceback \(most recent call last\):|Fatal Python error: ")
_FRAMES = re.compile(rb"\(most recent call last\):\r?$")  # of Python, and of the graph in TensorFlow's errors
_OF_FRAMES = re.compile(rb"  |[\s^~]*$")  # Python marks a place in a line of many lines without an indent
_CAUSE = re.compile(rb"^(During handling of the above exception|The above exception was the direct cause)")
_COLOR = re.compile(rb"\x1b\[[0-9;]*m")
_FEWEST_FRAMES = 4  # lines of frames that are worth folding by themselves
_MOST_FRAMES = 2000
_MOST_MESSAGE_LINES = 50  # after frames, that are compared
_MOST_SUMMARY = 300  # characters


class Fold(bytes):
    """The line that is shown in place of frames, or a traceback, that another rank has shown."""


class Traceback(NamedTuple):
    """Frames that a rank has shown, and the lines it has shown after them."""

    rank: int
    message: list[bytes]


class Folding:
    """Holds back the tracebacks of a stream until it is known whether another rank has shown the same.

    Where the message differs, it is shown with one line in place of the frames; where all is the same, that line is.

    Args:
      rank: Whose stream it is.
      known: Tracebacks that ranks have shown, by their frames; shared by all streams.
    """

    def __init__(self, rank: int, known: dict[bytes, Traceback]) -> None:
        self._rank = rank
        self._known = known
        self._frames: list[bytes] = []  # that have not ended yet
        self._message: list[bytes] | None = None  # of this rank's traceback, for others to compare with
        self._other: Traceback | None = None  # the same one of another rank, so far
        self._num_compared = 0  # lines of its message
        self._held: list[bytes] = []  # what is shown where the message is another
        self._fold: list[bytes] = []  # what is shown where it is the same

    @property
    def is_pending(self) -> bool:
        """True until `end` may be called: a traceback may not have ended."""
        return bool(self._frames) or self._message is not None or self._other is not None

    def take(self, line: bytes) -> tuple[list[bytes], bool]:
        """Returns the lines to show now, and whether this one is among them or held back."""
        if self._frames and _OF_FRAMES.match(line) and len(self._frames) < _MOST_FRAMES:
            self._frames.append(line)
            return [], True
        lines = self._end_of_frames()
        if _FRAMES.search(line):
            self._frames = [line]
            return lines, True
        if self._other is not None:
            self._held.append(line)
            expected = self._other.message[self._num_compared : self._num_compared + 1]
            self._num_compared += 1
            if expected not in ([], [line]) or self._num_compared > _MOST_MESSAGE_LINES:
                lines += self._show_held()
            return lines, True
        if self._message is not None:
            self._message.append(line)
            if len(self._message) == _MOST_MESSAGE_LINES:
                self._message = None
        return lines, False

    def end(self) -> list[bytes]:
        """Returns the lines to show when nothing has followed for a while."""
        lines = self._end_of_frames()
        self._message = None
        if self._other is None:
            return lines
        if not self._num_compared:  # the message is still to come
            held, self._held, self._fold = self._held, [], []
            return lines + held
        num_more = max(0, self._num_compared - len(self._other.message))
        fold = self._fold
        held = self._show_held()
        return [*lines, *fold, *held[len(held) - num_more :]]

    def _end_of_frames(self) -> list[bytes]:
        frames, self._frames = self._frames, []
        if len(frames) < 2:
            return [*self._show_held(), *frames] if frames else []
        found = self._known.setdefault(b"\n".join(frames), Traceback(self._rank, []))
        if found.rank == self._rank:
            self._message = None if found.message else found.message
            return [*self._show_held(), *frames]
        fold = Fold(frames[0].rstrip() + b" as of rank %d, above" % found.rank)
        if self._other is None:
            self._fold = [fold]
        self._message, self._other, self._num_compared = None, found, 0
        self._held += frames if len(frames) < _FEWEST_FRAMES else [fold]
        return []

    def _show_held(self) -> list[bytes]:
        held, self._held, self._other = self._held, [], None
        return held


def last(lines: Sequence[bytes]) -> list[bytes]:
    """Returns the last traceback and what follows it, from the error that caused it; empty where there is none."""
    starts = [i for i, line in enumerate(lines) if START.search(line)]
    if not starts:
        return []
    start = starts.pop()
    while starts and any(_CAUSE.match(line) for line in lines[max(0, start - 2) : start]):
        start = starts.pop()
    return list(lines[start:])


def without_frames(lines: Sequence[bytes]) -> list[bytes]:
    """A traceback without its frames and those of TensorFlow's graph in its message, which were shown before."""
    result: list[bytes] = []
    skips = False
    for line in lines:
        skips = skips and bool(_OF_FRAMES.match(line))
        if not skips:
            skips = bool(_FRAMES.search(line))
            result.append(line.rstrip() + b" above" if skips else line)
    return result


def is_same(one: Sequence[bytes], other: Sequence[bytes]) -> bool:
    """Returns whether two tracebacks have the same frames and the same message; more may follow one of them."""
    num_lines = max(_first_of_message(one), _first_of_message(other)) + 1
    shorter = min(len(one), len(other))
    return 1 < num_lines <= shorter and one[:shorter] == other[:shorter]


def summary(lines: Sequence[bytes]) -> str:
    """Returns the error of a traceback in a line: "ValueError: shapes differ."

    Keras and TensorFlow begin with a line that tells little; then the next paragraph is added. A long one is cut after
    a sentence, or a word.
    """
    first = _first_of_message(lines)
    words = list(lines[first : first + 1])
    if list(lines[first + 1 : first + 2]) == [b""]:
        paragraphs = [line for line in lines[first + 1 :] if not _OF_FRAMES.match(line) and not _FRAMES.search(line)]
        words += paragraphs[:1]
    text = _COLOR.sub(b"", b" ".join(word.strip() for word in words)).decode(errors="replace")
    if len(text) > _MOST_SUMMARY:
        text = text[:_MOST_SUMMARY]
        sentences = text.rpartition(". ")[0]
        if not sentences:
            return f"{text.rpartition(' ')[0]} ..."
        text = sentences
    return f"{text.rstrip('.')}."


def _first_of_message(lines: Sequence[bytes]) -> int:
    """Returns the number of the line that begins the message of a traceback."""
    number = max((i for i, line in enumerate(lines) if START.search(line)), default=0) + 1
    while number < len(lines) and _OF_FRAMES.match(lines[number]):
        number += 1
    return number
