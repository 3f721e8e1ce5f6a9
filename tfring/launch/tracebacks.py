"""Tracebacks in the output of workers: one that several ranks share is shown once, and mentioned at the end."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

# "Traceback (most recent call last):", "  + Exception Group Traceback (most recent call last):" but not the
# "    | Traceback (most recent call last):" within a group, and the line that faulthandler writes on a crash.
START = re.compile(rb"(?<!\| )Traceback \(most recent call last\):|Fatal Python error: ")
_FRAMES = re.compile(rb"\(most recent call last\):\r?$")  # of Python, and of the graph in TensorFlow's errors
_OF_FRAMES = re.compile(rb"  |[\s^~]*$")  # Python marks a place in a multi-line statement without an indent
_IN_USER_CODE = re.compile(rb"    [A-Za-z_.]+: ")
_CAUSE = re.compile(rb"^(During handling of the above exception|The above exception was the direct cause)")
_COLOR = re.compile(rb"\x1b\[[0-9;]*m")
_FEWEST_FRAMES = 4  # lines of frames that are worth folding if the message differs
_MOST_FRAMES = 2000
_MOST_MESSAGE_LINES = 50  # lines after frames that are compared
_MOST_SUMMARY = 300  # characters


class Fold(bytes):
    """The line shown in place of frames, or of a traceback, that another rank has shown."""


class Traceback(NamedTuple):
    """The rank that has shown some frames, and the lines that it has shown after them."""

    rank: int
    message: list[bytes]


class Folding:
    """Holds back the tracebacks of a stream until it is known whether another rank has shown the same.

    If the message differs, it is shown with one line in place of the frames. If all is the same, only that line is.

    Args:
      rank: Rank of the stream.
      known: Tracebacks that ranks have shown, by their frames. All streams share it.
    """

    def __init__(self, rank: int, known: dict[bytes, Traceback]) -> None:
        self._rank = rank
        self._known = known
        self._frames: list[bytes] = []  # that have not ended yet
        self._message: list[bytes] | None = None  # of this rank's traceback, for others to compare with
        self._other: Traceback | None = None  # another rank's, the same so far
        self._num_compared = 0  # lines of its message
        self._held: list[bytes] = []  # lines to show if the message differs
        self._fold: list[bytes] = []  # lines to show if it is the same

    @property
    def is_pending(self) -> bool:
        """True while a traceback may not have ended, so that `end` has to be called."""
        return bool(self._frames) or self._message is not None or self._other is not None

    def take(self, line: bytes) -> tuple[list[bytes], bool]:
        """Returns the lines to show now, and whether this line is among them or held back."""
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
        """Returns the lines to show if nothing has followed for a while."""
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
    """Returns the last traceback and what follows it, beginning with the error that caused it. Empty if none."""
    starts = [i for i, line in enumerate(lines) if START.search(line)]
    if not starts:
        return []
    start = starts.pop()
    while starts and any(_CAUSE.match(line) for line in lines[max(0, start - 2) : start]):
        start = starts.pop()
    return list(lines[start:])


def without_frames(lines: Sequence[bytes]) -> list[bytes]:
    """Returns a traceback without its frames and those of TensorFlow's graph in its message, shown before."""
    result: list[bytes] = []
    skips = False
    for line in lines:
        skips = skips and bool(_OF_FRAMES.match(line))
        if not skips:
            skips = bool(_FRAMES.search(line))
            result.append(line.rstrip() + b" above" if skips else line)
    return result


def is_same(one: Sequence[bytes], other: Sequence[bytes]) -> bool:
    """Returns whether two tracebacks have the same frames and the same message. More lines may follow one of them."""
    num_lines = max(_first_of_message(one), _first_of_message(other)) + 1
    shorter = min(len(one), len(other))
    return 1 < num_lines <= shorter and one[:shorter] == other[:shorter]


def summary(lines: Sequence[bytes]) -> str:
    """Returns the error of a traceback in one line: "ValueError: shapes differ."

    Errors of Keras and TensorFlow begin with a line that says little. In this case the next paragraph is added. A long
    text is cut after a sentence, or after a word.
    """
    first = _first_of_message(lines)
    words = list(lines[first : first + 1])
    if words and words[0].endswith(b"in user code:"):  # an error in a tf.function, with its frames before its text
        words = [line for line in lines[first + 1 :] if _IN_USER_CODE.match(line)][-1:] or words
    elif list(lines[first + 1 : first + 2]) == [b""]:
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
    """Returns the index of the line that begins the message of a traceback."""
    number = max((i for i, line in enumerate(lines) if START.search(line)), default=0) + 1
    while number < len(lines) and _OF_FRAMES.match(lines[number]):
        number += 1
    return number
