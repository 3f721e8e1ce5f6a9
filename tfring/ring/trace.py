"""Records the calls, steps and marks of this process in a file that `tfring report` reads.

```
core: records of calls, marks ─┐ taken every second
Python: steps, loops ──────────┴─► Recorder ─► folder/rank-<r>.jsonl
```

The file has one JSON object per line, so that it can be read after a crash:

```
{"type": "run", "schema": 1, "run": ..., "rank": 0, "world_size": 2, "host": ..., "steps_kept": 200, ...}
{"type": "clock", "at": ..., "offset": ..., "uncertainty": ..., ...}              distance from rank 0's clock
{"type": "calls", "fields": ["begin", "end", "waited", ...], "rows": [[...], ...]}    collectives, and marks
{"type": "steps", "fields": ["kind", "loop", "begin", "end", "built"], "rows": [...]}
{"type": "requests", "fields": ["begin", "end", "other", ...], "rows": [...]}         to and from parameter servers
{"type": "compiled", "kind": "train", "operations": 90, "by_xla": 86, ...}        with `jit_compile=True`
{"type": "totals", ...}                                                           of the whole run
{"type": "end"}                                                                   the process ended by itself
```

Times are nanoseconds of this host's CLOCK_MONOTONIC. Spans are kept for the first steps of each kind and `fit`; totals
are kept for all steps, and the next write overwrites their line. A parameter server writes server-<s>.jsonl.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import logging
import os
import pathlib
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from tfring._version import __version__
from tfring.errors import ConfigurationError
from tfring.ring import clocks, library
from tfring.ring.communicator import Communicator

SCHEMA = 1
STEPS_KEPT = 200  # of each kind in each fit, evaluate or predict
MOST_ROWS = 200_000  # of calls and marks in a file, some 30 MB
STEP_FIELDS = ("kind", "loop", "begin", "end", "built")
SERVERS = "servers"  # prefix of the rings of a worker and a server; their calls are written as requests
INPUT_BEGINS, INPUT_ENDS, READY = "input begins", "input ends", "ready"  # marks
_MOST_NAMES = 1000  # of collectives in the totals; further ones are counted as one
CAPACITY = 8192  # records between two reads
_WRITE_SECONDS = 1.0

_TYPES = {field[0]: field[1] for field in library.Record._fields_}
_CALL_FIELDS = list(_TYPES)
# The dtype of ctypes, but with text instead of lists of characters.
_CALL = np.dtype([(name, f"S{kind._length_}" if hasattr(kind, "_length_") else kind) for name, kind in _TYPES.items()])

_log = logging.getLogger("tfring")
_active: Recorder | None = None  # a process writes one trace at a time


class Request(NamedTuple):
    """A request of a worker to a parameter server, as one of the two sees it. Times are in nanoseconds.

    Attributes:
      other: The server, in a worker's file; the worker, in a server's file.
      kind: "push", "rows", ...
      sent: Bytes of this process's message.
      received: Bytes of the other process's message.
      waited: Time that the server waited for other workers during the request.
      whom: The worker that came last of those, -1 for none.
      served: The remaining time that the request spent in the server.
      queued: The part of `served` in which the request waited for its turn.
      staleness: Staleness of the gradient; -1 if there is none.
    """

    begin: int
    end: int
    other: int
    kind: str
    sent: int
    received: int
    waited: int
    whom: int
    served: int
    queued: int
    staleness: int

    @property
    def moved(self) -> int:
        """Returns the remaining time, in which bytes were in transit."""
        return max(0, self.end - self.begin - self.waited - self.served)


class Source(NamedTuple):
    """Gives a process the number of its run, and the offset of its clock from the common clock.

    Attributes:
      run: A function that returns the number of the run, the same in all processes.
      distance: A function that measures the offset of this process's clock.
    """

    run: Callable[[], int]
    distance: Callable[[], clocks.Distance]


def ring_source(communicator: Communicator | None) -> Source:
    """Returns a source for the ranks of a ring, None for a single rank. Its calls are collectives of all ranks."""

    def run() -> int:
        number = random.SystemRandom().getrandbits(62)
        return number if communicator is None else int(communicator.broadcast(np.array([number]), name=clocks.NAME)[0])

    return Source(run, lambda: clocks.distance(communicator))


def file_name(rank: int) -> str:
    """
    >>> file_name(3)
    'rank-3.jsonl'
    """
    return f"rank-{rank}.jsonl"


def server_file_name(server: int) -> str:
    """
    >>> server_file_name(1)
    'server-1.jsonl'
    """
    return f"server-{server}.jsonl"


def start(folder: str | os.PathLike, rank: int, world_size: int, source: Source, num_servers: int = 0) -> Recorder:
    """Begins a trace of this process, or joins the one that it writes to this folder. All ranks must call it.

    Args:
      folder: Folder of the files, created if it is missing. Files of an earlier run are overwritten.
      rank: Rank of this process.
      world_size: Number of workers that write to this folder.
      source: Source of all ranks.
      num_servers: Number of parameter servers that write to this folder as well.

    Raises:
      ConfigurationError: If the folder cannot be written, or this process writes a trace elsewhere.
    """
    global _active
    path = pathlib.Path(folder).absolute()
    if _active is not None and not _active.closed and not _active.is_forked:
        if _active.path.parent != path:
            raise ConfigurationError(
                f"This process already writes a trace to {_active.path.parent}, and trace={str(folder)!r} would be a "
                "second. Close the strategy that writes it, or use the same folder for both."
            )
        _active.users += 1
        return _active
    _active = Recorder(path / file_name(rank), rank, world_size, source, num_servers)
    return _active


def start_server(folder: str | os.PathLike, server: int, world_size: int, num_servers: int, source: Source) -> Recorder:
    """Begins the trace of this process, a parameter server. It has requests only.

    Args:
      folder: See `start`.
      server: Number of this server.
      world_size: Number of workers.
      num_servers: Number of servers.
      source: Source of this server.

    Raises:
      ConfigurationError: If the folder cannot be written.
    """
    path = pathlib.Path(folder).absolute() / server_file_name(server)
    return Recorder(path, server, world_size, source, num_servers, has_calls=False)


class Recorder:
    """Writes the trace of one process.

    Args:
      path: Path of the file.
      number: The rank, or the number of the server.
      world_size: Number of workers.
      source: Source of all ranks.
      num_servers: Number of parameter servers.
      has_calls: Whether to record the calls of the core; a server records requests only.

    Attributes:
      users: Number of users that began the trace, each of which must close it.
      building: True if a graph was traced during the step; set by the code that traces it.
    """

    def __init__(
        self,
        path: pathlib.Path,
        number: int,
        world_size: int,
        source: Source,
        num_servers: int = 0,
        has_calls: bool = True,
    ) -> None:
        self.path = path
        self.users = 1
        self.closed = False
        self.building = False
        self._owner = os.getpid()
        self._writes = True
        self._lock = threading.Lock()
        self._loop = self._entries = 0
        self._counts: dict[str, int] = {}  # of steps in the current entry, by kind
        self._last: tuple[str, int, int] | None = None  # the previous step: kind, loop, end
        self._steps: list[tuple[str, int, int, int, bool]] = []
        self._requests: list[Request] = []
        self._has_calls = has_calls
        self._keeps = True  # whether spans are kept, not only totals
        self._rows = 0
        self._totals = _Totals()
        self._totals_line = b""  # the last line of the file
        self._totals_at = 0  # and its offset
        self._buffer = (library.Record * CAPACITY)()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("wb")
        except OSError as error:
            raise ConfigurationError(
                f"`trace` is {path.parent}, a folder that cannot be written to ({error.strerror})."
            ) from error
        self._put(
            type="run",
            schema=SCHEMA,
            run=source.run(),
            rank=number,
            world_size=world_size,
            num_servers=num_servers,
            host=socket.gethostname(),
            pid=self._owner,
            tfring=__version__,
            started=time.time(),
            at=clocks.now(),
            steps_kept=STEPS_KEPT,
        )
        self.measure_clock(source)
        if has_calls:
            library.core().tfring_trace(CAPACITY)
        self._stop = threading.Event()
        threading.Thread(target=self._write_for_ever, name="tfring-trace", daemon=True).start()
        atexit.register(self._end)

    # -- events ----------------------------------------------------------------------------------------------------

    def measure_clock(self, source: Source) -> None:
        """Measures the offset of this process's clock. All ranks must call it."""
        self._put(type="clock", **source.distance()._asdict())

    @contextlib.contextmanager
    def entry(self, source: Source) -> Iterator[None]:
        """Enters `fit`, `evaluate` or `predict`. The outermost measures the clock at its end unless it failed."""
        self._entries += 1
        if self._entries == 1:
            self._counts.clear()
        try:
            yield
        finally:
            self._entries -= 1
            if self._entries == 0:
                self._keep(True)
                self._counts.clear()
                self.write()
        if self._entries == 0 and not self.closed:
            self.measure_clock(source)  # even if this rank's disk is full: the others do it

    def new_loop(self) -> None:
        """Begins a loop, such as an epoch. The time before it is not counted as a gap between steps."""
        self._loop += 1

    def compiled(self, kind: str, operations: int, by_xla: int, others: list[str]) -> None:
        """Records the number of operations of a kind of step that XLA compiles.

        Args:
          kind: "train", "test" or "predict".
          operations: Number of operations that were meant to be compiled.
          by_xla: Number of those for which XLA has a kernel.
          others: Types of the other operations.
        """
        self._put(type="compiled", kind=kind, operations=operations, by_xla=by_xla, others=others)

    def lines(self, name: str, lines: str) -> None:
        """Records the lines of the program, such as "train.py:12", that need the collectives of this name."""
        name = name.encode()[: _CALL["name"].itemsize - 1].decode(errors="ignore")  # as the core cuts it
        self._put(type="lines", name=name, lines=lines)

    @contextlib.contextmanager
    def step(self, kind: str) -> Iterator[None]:
        """Times one call of a step function. A call that raises, as at the end of the data, is not recorded."""
        number = self._counts.get(kind, 0)
        self._keep(number < STEPS_KEPT)
        self.building = False
        begin = clocks.now()
        yield
        end = clocks.now()
        self._counts[kind] = number + 1
        before = self._last
        between = begin - before[2] if before is not None and before[:2] == (kind, self._loop) else None
        self._totals.step(kind, end - begin, between, self.building)
        self._last = (kind, self._loop, end)
        if self._keeps:
            self._steps.append((kind, self._loop, begin, end, self.building))

    def request(self, request: Request) -> None:
        """Records a request to or from a parameter server. May be called by any thread."""
        if self._writes and not self.closed:
            self._requests.append(request)

    def close(self) -> None:
        """Ends the trace once all users have closed it."""
        self.users -= 1
        if self.users == 0:
            self._end()

    @property
    def is_forked(self) -> bool:
        """Returns True if this process was forked from the one that writes."""
        return os.getpid() != self._owner

    # -- the file --------------------------------------------------------------------------------------------------

    def _keep(self, spans: bool) -> None:
        if spans != self._keeps:
            self.write()  # earlier records, with the previous setting
            self._keeps = spans

    def write(self) -> None:
        """Writes the records that have not been written yet."""
        with self._lock:
            if self.closed or self.is_forked or not self._writes:
                return
            steps, self._steps = self._steps, []
            requests = self._requests[:]
            del self._requests[: len(requests)]  # more may have been appended since
            rows, lost = self._take() if self._has_calls else ([], 0)
            if not steps and not rows and not requests:
                return
            self._totals.calls(rows)
            self._totals.requests(requests)
            lines: list[dict[str, Any]] = []
            if rows and self._keeps and self._rows < MOST_ROWS:
                self._rows += len(rows)
                lines.append({"type": "calls", "fields": _CALL_FIELDS, "rows": rows})
            if requests and self._keeps and self._rows < MOST_ROWS:
                self._rows += len(requests)
                lines.append({"type": "requests", "fields": Request._fields, "rows": requests})
            if steps:
                lines.append({"type": "steps", "fields": STEP_FIELDS, "rows": steps})
            full = self._rows >= MOST_ROWS
            self._totals_line = _line({"type": "totals", "lost": lost, "full": full, **self._totals.as_dict()})
            self._append(*lines)

    def _take(self) -> tuple[list[list[Any]], int]:
        lost = ctypes.c_int64()
        count = library.core().tfring_take_records(self._buffer, CAPACITY, lost)
        taken = np.frombuffer(memoryview(self._buffer), _CALL, count)
        columns = []
        for field in _CALL_FIELDS:
            column = taken[field].tolist()
            if field == "kind":
                kinds = {**dict(enumerate(library.kinds())), library.MARK: "mark"}
                column = [kinds[number] for number in column]
            elif field == "algorithm":
                column = [library.ALGORITHM_NAMES[number] for number in column]
            elif taken[field].dtype.kind == "S":
                column = [text.decode(errors="replace") for text in column]
            columns.append(column)
        rows = [list(row) for row in zip(*columns, strict=True)]
        name, ring = _CALL_FIELDS.index("name"), _CALL_FIELDS.index("ring")
        rows = [row for row in rows if row[name] != clocks.NAME and not row[ring].startswith(SERVERS)]
        return rows, lost.value

    def _write_for_ever(self) -> None:
        while not self._stop.wait(_WRITE_SECONDS):
            self.write()

    def _put(self, **fields: Any) -> None:
        with self._lock:
            if self._writes and not self.closed:
                self._append(fields)

    def _append(self, *lines: dict[str, Any]) -> None:
        try:
            self._file.seek(self._totals_at)
            self._file.truncate()
            for fields in lines:
                self._file.write(_line(fields))
            self._totals_at = self._file.tell()
            self._file.write(self._totals_line)
            self._file.flush()
        except OSError as error:  # training continues
            self._writes = False
            self._end_calls()
            _log.warning("The trace ends here because %s cannot be written: %s", self.path, error.strerror)

    def _end(self) -> None:
        if self.closed or self.is_forked:
            return
        self._stop.set()
        self.write()
        self._put(type="end", at=clocks.now())
        with self._lock:
            self.closed = True
            self._file.close()
        self._end_calls()
        atexit.unregister(self._end)

    def _end_calls(self) -> None:
        if self._has_calls:
            library.core().tfring_trace(0)


def _line(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


class _Totals:
    """Totals of the whole run, in nanoseconds and counts."""

    def __init__(self) -> None:
        self._steps: dict[str, dict[str, int]] = {}
        self._collectives: dict[tuple[str, str, str], dict[str, Any]] = {}
        self._requests: dict[tuple[int, str], dict[str, Any]] = {}
        self._input = self._inputs = 0
        self._input_began: int | None = None

    def step(self, kind: str, took: int, between: int | None, built: bool) -> None:
        total = self._steps.setdefault(kind, {"count": 0, "nanoseconds": 0, "built": 0, "gaps": 0, "between": 0})
        if built:  # takes seconds, once
            total["built"] += 1
            return
        total["count"] += 1
        total["nanoseconds"] += took
        if between is not None:
            total["gaps"] += 1
            total["between"] += between

    def calls(self, rows: list[list[Any]]) -> None:
        for begin, end, waited, added, _, num_bytes, sent, received, _, kind, _, last, _, ring, _, name in rows:
            if kind == "mark":
                self._mark(name, begin)
                continue
            key = (ring, kind, name)
            if len(self._collectives) >= _MOST_NAMES and key not in self._collectives:
                key = ("", "", "others")
            total = self._collectives.get(key)
            if total is None:
                total = self._collectives[key] = {
                    **dict(zip(("ring", "kind", "name"), key, strict=True)),
                    **dict.fromkeys(("count", "nanoseconds", "waited", "added", "bytes", "sent", "received"), 0),
                    "waited_for": {},
                }
            total["count"] += 1
            total["nanoseconds"] += end - begin
            total["waited"] += waited
            total["added"] += added
            total["bytes"] += num_bytes
            total["sent"] += sent
            total["received"] += received
            if last >= 0:
                total["waited_for"][str(last)] = total["waited_for"].get(str(last), 0) + waited

    def requests(self, requests: list[Request]) -> None:
        for each in requests:
            total = self._requests.get((each.other, each.kind))
            if total is None:
                total = self._requests[each.other, each.kind] = {
                    "other": each.other,
                    "kind": each.kind,
                    "waited_for": {},
                    "staleness": {},
                    **dict.fromkeys(("count", "nanoseconds", "waited", "served", "queued", "sent", "received"), 0),
                }
            total["count"] += 1
            total["nanoseconds"] += each.end - each.begin
            for name in ("waited", "served", "queued", "sent", "received"):
                total[name] += getattr(each, name)
            if each.whom >= 0:
                total["waited_for"][str(each.whom)] = total["waited_for"].get(str(each.whom), 0) + each.waited
            if each.staleness >= 0:
                total["staleness"][str(each.staleness)] = total["staleness"].get(str(each.staleness), 0) + 1

    def _mark(self, name: str, at: int) -> None:
        if name == INPUT_BEGINS:
            self._input_began = at
        elif name == INPUT_ENDS and self._input_began is not None:
            self._inputs += 1
            self._input += at - self._input_began
            self._input_began = None

    def as_dict(self) -> dict[str, Any]:
        return {
            "steps": self._steps,
            "input": {"count": self._inputs, "nanoseconds": self._input},
            "collectives": list(self._collectives.values()),
            "requests": list(self._requests.values()),
        }
