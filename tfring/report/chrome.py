"""One trace of all ranks in Chrome's format, which Perfetto opens: one process per rank.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from typing import Any

from tfring.report import timeline
from tfring.report.files import Call, Run

_PYTHON, _DOES, _INPUT, _FIRST_RING = 1, 2, 3, 4  # threads
_FIRST_SERVER = 100  # the thread of a rank's requests to server 0
_WAITS = "wait for rank {}"


def trace(run: Run) -> dict[str, Any]:
    """Returns the document. Times are in microseconds since the first event."""
    begins = [call.begin for rank in run.ranks for call in rank.calls]
    begins += [step.begin for rank in run.ranks for step in rank.steps]
    begins += [request.begin for each in (*run.ranks, *run.servers) for request in each.requests]
    zero = min(begins, default=0)
    rings = sorted({call.ring for rank in run.ranks for call in rank.calls})
    threads = {ring: _FIRST_RING + number for number, ring in enumerate(rings)}
    events: list[dict[str, Any]] = []
    for rank in (*run.ranks, *run.servers):
        is_server = rank in run.servers
        pid = rank.rank + run.world_size * is_server

        def span(thread: int, name: str, begin: int, end: int, category: str, pid: int = pid, **arguments: Any) -> None:
            event = {"ph": "X", "pid": pid, "tid": thread, "ts": (begin - zero) / 1e3, "dur": (end - begin) / 1e3}
            events.append({"name": name, "cat": category, **event, **({"args": arguments} if arguments else {})})

        names = {_PYTHON: "Python: steps", _DOES: "what the step does", _INPUT: "input"}
        names.update({thread: f"collectives: {ring}" for ring, thread in threads.items()})
        role, other = ("server", "rank") if is_server else ("rank", "server")
        others = {request.other for request in rank.requests}
        names = {} if is_server else names
        names.update({_FIRST_SERVER + number: f"requests: {other} {number}" for number in sorted(others)})
        events.append(_named("process_name", pid, 0, name=f"{role} {rank.rank} ({rank.host})"))
        events.append(_named("process_sort_index", pid, 0, sort_index=pid))
        for thread, name in names.items():
            events.append(_named("thread_name", pid, thread, name=name))
            events.append(_named("thread_sort_index", pid, thread, sort_index=thread))
        for number, each in enumerate(timeline.steps(rank)):
            step = each.step
            span(_PYTHON, f"{step.kind} step", step.begin, each.until, "step", number=number, loop=step.loop)
            name = f"{step.kind}_function" + (" (builds its graph)" if step.built else "")
            span(_PYTHON, name, step.begin, step.end, "step")
            if each.until > step.end:
                span(_PYTHON, "Python", step.end, each.until, "Python")
            for part in each.spans:
                name = _WAITS.format(part.whom) if part.category == "waiting" else part.category
                span(_DOES, name, part.begin, part.end, part.category)
        for part in timeline.inputs(rank):
            span(_INPUT, "wait for the next batch", part.begin, part.end, "input")
        for request in rank.requests:
            thread = _FIRST_SERVER + request.other
            details = {name: getattr(request, name) for name in ("sent", "received", "staleness")}
            span(thread, request.kind, request.begin, request.end, "request", **details)
            for part in timeline.spans_of_request(request):
                name = _WAITS.format(part.whom) if part.category == "waiting" else part.category
                span(thread, name, part.begin, part.end, part.category)
        for call in rank.calls:
            thread = threads[call.ring]
            span(thread, f"{call.kind} {call.name}", call.begin, call.end, "collective", **_arguments(call))
            for part in timeline.spans_of(call):
                name = _WAITS.format(part.whom) if part.category == "waiting" else part.category
                span(thread, name, part.begin, part.end, part.category)
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "producer": "tfring report",
            "clock_uncertainty_microseconds": max(each.uncertainty for each in (*run.ranks, *run.servers)) / 1e3,
        },
        "traceEvents": events,
    }


def _named(name: str, pid: int, tid: int, /, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": pid, "tid": tid, "ts": 0, "args": arguments}


def _arguments(call: Call) -> dict[str, Any]:
    """Returns the details that a click on the span shows."""
    return {
        "bytes": call.bytes,
        "algorithm": call.algorithm,
        "sent": call.sent,
        "received": call.received,
        "sequence": call.sequence,
        "waited_us": call.waited / 1e3,
        "moved_us": call.moved / 1e3,
        "added_us": call.added / 1e3,
        "last": call.last,
        **({"group": call.group} if call.group else {}),
        **({"failed": call.code} if call.code else {}),
    }
