"""Computes what a rank does at each moment of a step, from spans that overlap.

```
call of the step function  |dispatch|..input..|         compute          |     compute    |  Python |
collectives                                   |wait|move|      |wait|move|add|
                                                         a collective that leaves during the backward pass: compute
```
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from typing import NamedTuple

from tfring.report.files import Call, Rank, Step
from tfring.ring.trace import INPUT_BEGINS, INPUT_ENDS, READY, Request

GRADIENTS = "gradients"  # the ring that carries them
CATEGORIES = ("input", "Python", "dispatch", "compute", "waiting", "server", "moving", "adding")
_ORDER = ("compute", "Python", "dispatch", "input", "waiting", "server", "moving", "adding")
_ABOVE = {name: n for n, name in enumerate(_ORDER)}


class Span(NamedTuple):
    """A span of a step, in nanoseconds of rank 0's clock."""

    begin: int
    end: int
    category: str
    whom: int = -1  # the rank waited for; the server, for "server" and for "moving" of a request


class StepOfRank(NamedTuple):
    step: Step
    until: int  # begin of the next step of its loop; otherwise its own end
    spans: list[Span]  # one after the other, from begin to until
    gradients: int  # nanoseconds of collectives of gradients
    hidden: int  # nanoseconds of them before the last gradient was ready
    beside: int  # CPU time of other threads meanwhile


def inputs(rank: Rank) -> list[Span]:
    """Returns the spans in which a step waited for its batch."""
    found = []
    begin = None
    for mark in rank.marks:
        if mark.name == INPUT_BEGINS:
            begin = mark.at
        elif mark.name == INPUT_ENDS and begin is not None:
            found.append(Span(begin, mark.at, "input"))
            begin = None
    return found


def spans_of(call: Call) -> list[Span]:
    """Returns a collective's waiting, moving and adding, one after the other. In reality the last two alternate."""
    met = call.begin + call.waited
    moved = met + call.moved
    cut = [
        Span(call.begin, met, "waiting", call.last),
        Span(met, moved, "moving"),
        Span(moved, call.end, "adding"),
    ]
    return [span for span in cut if span.end > span.begin]


def spans_of_request(request: Request) -> list[Span]:
    """Returns a request's way to the server, its waiting for other workers, the server's time, and the way back.

    >>> spans_of_request(Request(0, 10, 1, "push", 60, 20, 3, 2, 3, 0, 0))
    [Span(begin=0, end=3, category='moving', whom=1), Span(begin=3, end=6, category='waiting', whom=2), \
Span(begin=6, end=9, category='server', whom=1), Span(begin=9, end=10, category='moving', whom=1)]
    """
    came = request.begin + request.moved * request.sent // max(1, request.sent + request.received)
    met = came + request.waited
    done = met + request.served
    cut = [
        Span(request.begin, came, "moving", request.other),
        Span(came, met, "waiting", request.whom),
        Span(met, done, "server", request.other),
        Span(done, request.end, "moving", request.other),
    ]
    return [span for span in cut if span.end > span.begin]


def last_overlapping_requests(requests: list[Request]) -> list[Request]:
    """Returns the last request to end of each group of requests to several servers that overlap in time.

    >>> make = lambda begin, end: Request(begin, end, 0, "push", 0, 0, 0, -1, 0, 0, 0)
    >>> [(r.begin, r.end) for r in last_overlapping_requests([make(0, 4), make(1, 9), make(2, 5), make(10, 11)])]
    [(1, 9), (10, 11)]
    """
    found: list[Request] = []
    for request in requests:
        if not found or request.begin >= found[-1].end:
            found.append(request)
        elif request.end > found[-1].end:
            found[-1] = request
    return found


def steps(rank: Rank) -> Iterator[StepOfRank]:
    """Yields each step of a rank, with its spans."""
    waits = inputs(rank)
    begins_of_waits = [span.begin for span in waits]
    begins_of_calls = [call.begin for call in rank.calls]
    times_of_marks = [mark.at for mark in rank.marks]
    requests = last_overlapping_requests(rank.requests)
    begins_of_requests = [request.begin for request in requests]
    for number, step in enumerate(rank.steps):
        following = rank.steps[number + 1] if number + 1 < len(rank.steps) else None
        goes_on = following is not None and following[:2] == step[:2]
        until = following.begin if goes_on and following is not None else step.end
        window = slice(bisect.bisect_left(begins_of_calls, step.begin), bisect.bisect_left(begins_of_calls, until))
        calls = rank.calls[window]
        marks = rank.marks[bisect.bisect_left(times_of_marks, step.begin) : bisect.bisect_left(times_of_marks, until)]
        drawn = waits[bisect.bisect_left(begins_of_waits, step.begin) : bisect.bisect_left(begins_of_waits, until)]
        ready = _gradients_ready(calls, {mark.name: mark.at for mark in marks})
        first = drawn[0].begin if drawn else step.begin  # only this shows when TensorFlow has begun
        base = [
            Span(step.begin, min(first, step.end), "dispatch"),
            Span(step.begin, step.end, "compute"),
            Span(step.end, until, "Python"),
        ]
        gradients = [call for call in calls if call.ring == GRADIENTS]
        length = sum(call.end - call.begin for call in gradients)
        hidden = sum(max(0, min(call.end, ready) - call.begin) for call in gradients)
        beside = sum(call.beside for call in gradients)
        hides = beside >= hidden / 8  # otherwise no thread computed meanwhile: the one that would was waiting
        busy = [
            span._replace(begin=max(span.begin, ready)) if hides and call.ring == GRADIENTS else span
            for call in calls
            for span in spans_of(call)
        ]
        asked = bisect.bisect_left(begins_of_requests, step.begin), bisect.bisect_left(begins_of_requests, until)
        busy += [span for request in requests[slice(*asked)] for span in spans_of_request(request)]
        yield StepOfRank(
            step, until, flattened([*base, *drawn, *busy], step.begin, until), length, hidden if hides else 0, beside
        )


def _gradients_ready(calls: list[Call], marks: dict[str, int]) -> int:
    """Returns the time from which the last bucket of a step could be sent, regardless of its turn."""
    times = [min(call.begin, marks.get(f"{READY} {call.name}", call.begin)) for call in calls if call.ring == GRADIENTS]
    return max(times, default=0)


def flattened(spans: list[Span], begin: int, end: int) -> list[Span]:
    """Returns the uppermost span at each moment, in the order of `_ABOVE`. No two spans overlap.

    >>> flattened([Span(0, 9, "compute"), Span(2, 4, "input"), Span(3, 6, "waiting", 1)], 0, 8)
    [Span(begin=0, end=2, category='compute', whom=-1), Span(begin=2, end=3, category='input', whom=-1), \
Span(begin=3, end=6, category='waiting', whom=1), Span(begin=6, end=8, category='compute', whom=-1)]
    """
    changes = []
    for number, span in enumerate(spans):
        a, b = max(span.begin, begin), min(span.end, end)
        if b > a:
            changes += [(a, 1, number), (b, 0, number)]
    changes.sort()
    open_now: set[int] = set()
    flat: list[Span] = []
    for (at, opens, number), (then, _, _) in zip(changes, [*changes[1:], (end, 0, -1)], strict=True):
        open_now.add(number) if opens else open_now.discard(number)
        if then <= at or not open_now:
            continue
        top = spans[max(open_now, key=lambda n: (_ABOVE[spans[n].category], -n))]
        if flat and flat[-1].end == at and flat[-1][2:] == top[2:]:
            flat[-1] = flat[-1]._replace(end=then)
        else:
            flat.append(Span(at, then, top.category, top.whom))
    return flat
