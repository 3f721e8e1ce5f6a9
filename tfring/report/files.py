"""Reads the files that ranks wrote (`tfring/ring/trace.py` has their format), and converts times to one clock."""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from tfring.errors import TfringError
from tfring.ring.trace import Request

SCHEMA = 1
_NAME = re.compile(r"(rank|server)-(\d+)\.jsonl")


class ReportError(TfringError):
    """There is nothing to report on: no files, or files that do not belong together."""


class Call(NamedTuple):
    """A collective of one rank. Times are in nanoseconds of rank 0's clock, durations in nanoseconds."""

    begin: int
    end: int
    waited: int
    added: int
    beside: int
    bytes: int
    sent: int
    received: int
    sequence: int
    kind: str
    algorithm: str
    last: int  # the rank it waited for, -1 for none
    code: int
    ring: str
    group: str
    name: str

    @property
    def moved(self) -> int:
        """Returns the remaining time, in which bytes were in transit."""
        return self.end - self.begin - self.waited - self.added


class Step(NamedTuple):
    """A call of a step function: `train_step`, `test_step`, or `predict`'s."""

    kind: str
    loop: int  # the pass over batches it belongs to
    begin: int
    end: int
    built: bool  # a graph was built in it


class Mark(NamedTuple):
    name: str
    at: int


class Rank(NamedTuple):
    """The trace of one rank, or of a parameter server by its number, which only has requests."""

    rank: int
    host: str
    calls: list[Call]  # ordered by begin, as are the others
    marks: list[Mark]
    steps: list[Step]
    requests: list[Request]
    totals: dict[str, Any]
    compiled: dict[str, dict[str, Any]]  # by kind of step, if XLA compiles it
    lines: dict[str, str]  # of the program, by the name of the collectives that they need
    ended: bool  # by itself
    uncertainty: int  # of its clock, nanoseconds


class Run(NamedTuple):
    """The traces of all ranks, and of parameter servers."""

    ranks: list[Rank]
    missing: list[int]
    servers: list[Rank]
    missing_servers: list[int]
    world_size: int
    num_servers: int
    started: float  # seconds since 1970
    steps_kept: int


def read(folder: pathlib.Path) -> Run:
    """Reads all ranks' files of a folder.

    Raises:
      ReportError: If there are none, one cannot be read, or they are from different runs.
    """
    found = sorted(
        (match[1], int(match[2]), path)
        for path in folder.glob("*")
        if (match := _NAME.fullmatch(path.name)) is not None
    )
    if not any(role == "rank" for role, _, _ in found):
        raise ReportError(
            f"{folder} holds no file rank-<rank>.jsonl of a trace. A run with "
            'RingStrategy(trace="folder") or TFRING_TRACE=folder writes them.'
        )
    heads: list[dict[str, Any]] = []
    ranks: dict[str, list[Rank]] = {"rank": [], "server": []}
    for role, _, path in found:
        lines = list(_lines(path))
        if not lines or lines[0].get("type") != "run" or lines[0].get("schema") != SCHEMA:
            raise ReportError(f"{path} is not a trace that this version of tfring reads.")
        heads.append({**lines[0], "role": role})
        ranks[role].append(_rank(lines))
    runs = {head["run"]: head for head in heads}
    if len(runs) > 1:
        parts = [
            f"{head['world_size']} ranks from {head['started']:.0f} s: "
            + ", ".join(f"{h['role']} {h['rank']}" for h in heads if h["run"] == run)
            for run, head in runs.items()
        ]
        raise ReportError(
            f"{folder} holds files of {len(runs)} runs ({'; '.join(parts)}). Keep the files of one, or give each "
            "run its own folder."
        )
    head = heads[0]
    world_size, num_servers = head["world_size"], head.get("num_servers", 0)
    missing = sorted(set(range(world_size)) - {rank.rank for rank in ranks["rank"]})
    return Run(
        _correct_waits(ranks["rank"], missing),
        missing,
        ranks["server"],
        sorted(set(range(num_servers)) - {server.rank for server in ranks["server"]}),
        world_size,
        num_servers,
        head["started"],
        head["steps_kept"],
    )


def _lines(path: pathlib.Path) -> Iterator[dict[str, Any]]:
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines):
        try:
            if line:
                yield json.loads(line)
        except ValueError:
            if number < len(lines) - 1:  # the last may be cut short by a crash
                raise ReportError(f"{path}, line {number + 1}, is not JSON.") from None


def _rank(lines: list[dict[str, Any]]) -> Rank:
    kinds = ("clock", "calls", "steps", "requests", "compiled", "lines", "totals")
    of = {kind: [line for line in lines if line["type"] == kind] for kind in kinds}
    clocks = [(line["at"], line["offset"]) for line in of["clock"]]

    def to_rank_0(at: int) -> int:
        return at - round(_between(clocks, at))

    calls, marks = [], []
    for line in of["calls"]:
        for row in line["rows"]:
            fields = dict(zip(line["fields"], row, strict=True))
            fields["begin"], fields["end"] = to_rank_0(fields["begin"]), to_rank_0(fields["end"])
            if fields["kind"] == "mark":
                marks.append(Mark(fields["name"], fields["begin"]))
            else:
                calls.append(Call(**fields))
    steps = [
        Step(kind, loop, to_rank_0(begin), to_rank_0(end), built)
        for line in of["steps"]
        for kind, loop, begin, end, built in line["rows"]
    ]
    requests = [
        Request(to_rank_0(row[0]), to_rank_0(row[1]), *row[2:]) for line in of["requests"] for row in line["rows"]
    ]
    return Rank(
        lines[0]["rank"],
        lines[0]["host"],
        sorted(calls),
        sorted(marks, key=lambda mark: mark.at),
        sorted(steps, key=lambda step: step.begin),
        sorted(requests),
        of["totals"][-1] if of["totals"] else {},
        {line["kind"]: {key: line[key] for key in ("operations", "by_xla", "others")} for line in of["compiled"]},
        {line["name"]: line["lines"] for line in of["lines"]},
        any(line["type"] == "end" for line in lines),
        max((line["uncertainty"] for line in of["clock"]), default=0),
    )


def _between(clocks: list[tuple[int, int]], at: int) -> float:
    """Returns the offset at a moment, by linear interpolation between measured ones.

    >>> _between([(0, 100), (10, 200)], 5), _between([(0, 100), (10, 200)], 20), _between([], 5)
    (150.0, 200, 0)
    """
    if not clocks:
        return 0
    later = next((i for i, (when, _) in enumerate(clocks) if when >= at), None)
    if later is None or later == 0:
        return clocks[-1 if later is None else 0][1]
    (t0, a), (t1, b) = clocks[later - 1 : later + 1]
    return a + (b - a) * (at - t0) / max(t1 - t0, 1)


_SYNCHRONOUS = ("all_reduce", "all_gather", "all_to_all", "reduce_scatter", "barrier")  # end only after all ranks began


def _correct_waits(ranks: list[Rank], missing: list[int]) -> list[Rank]:
    """Returns the ranks with the waiting that a rank itself cannot see.

    In a ring a rank receives only from the previous one, which may be on time and have nothing to pass on yet. If the
    calls of all ranks are available, the rank that began last is the one that the others waited for.
    """
    if missing or len(ranks) < 3:
        return ranks
    began: dict[tuple, list[tuple[int, int]]] = {}
    for rank in ranks:
        for call in rank.calls:
            if call.kind in _SYNCHRONOUS and not call.group:
                began.setdefault((call.ring, call.kind, call.name, call.sequence), []).append((call.begin, rank.rank))

    def corrected(call: Call) -> Call:
        all_begins = began.get((call.ring, call.kind, call.name, call.sequence), [])
        if call.kind not in _SYNCHRONOUS or call.group or len(all_begins) < len(ranks):
            return call
        begin, last = max(all_begins)
        waited = min(begin - call.begin, call.end - call.begin - call.added)
        return call._replace(waited=waited, last=last) if waited > call.waited else call

    return [rank._replace(calls=[corrected(call) for call in rank.calls]) for rank in ranks]
