"""The figures of a run, as one document; docs/report.md describes its fields."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from tfring.report import timeline
from tfring.report.files import Rank, Run
from tfring.ring.trace import Request

_SLOWEST = 8
_WORTH_TELLING = 0.05  # of a step
_SLOWER = 1.5  # times the others' step, if no rank waits
_MILLISECOND = 1e6  # nanoseconds


def document(run: Run) -> dict[str, Any]:
    """Returns the document that `--json` prints."""
    kinds = dict.fromkeys(step.kind for rank in run.ranks for step in rank.steps)
    uncertainty = max(each.uncertainty for each in (*run.ranks, *run.servers))
    found: dict[str, Any] = {
        "schema": 1,
        "world_size": run.world_size,
        "missing": run.missing,
        "hosts": sorted({each.host for each in (*run.ranks, *run.servers)}),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(run.started)),
        "ended": [rank.rank for rank in run.ranks if rank.ended],
        "ended_servers": [server.rank for server in run.servers if server.ended],
        "clock_uncertainty_microseconds": uncertainty / 1e3,
        "lost": {str(rank.rank): rank.totals.get("lost", 0) for rank in run.ranks},
        "steps_kept": run.steps_kept,
        "steps": {kind: _of_kind(run, kind) for kind in kinds},
        "whole_run": {str(rank.rank): _whole(rank) for rank in run.ranks},
        "collectives": _slowest(run),
        "num_servers": run.num_servers,
        "missing_servers": run.missing_servers,
        "servers": {str(server.rank): _of_server(run, server) for server in run.servers},
        "requests": _of_workers(run),
        "compiled": run.ranks[0].compiled,
    }
    found["findings"] = [line for kind in kinds for line in findings(kind, found["steps"][kind])]
    if "train" in kinds:
        found["findings"] += findings_of_servers(found["steps"]["train"], found["requests"])
    found["findings"] += [_of_xla(kind, compiled) for kind, compiled in found["compiled"].items()]
    return found


def _of_server(run: Run, server: Rank) -> dict[str, Any]:
    """Returns the requests as a server sees them, without those of steps in which a graph was built."""
    graphs = {rank.rank: _graph_build_intervals(rank) for rank in run.ranks}
    counted = [r for r in server.requests if not any(a <= r.begin < b for a, b in graphs.get(r.other, []))]
    return {"host": server.host, "requests": _by_kind(counted)}


def _of_workers(run: Run) -> dict[str, dict[str, Any]]:
    """Returns the requests to each server as workers see them, over all workers."""
    counted: dict[int, list[Request]] = {server: [] for server in range(run.num_servers)}
    for rank in run.ranks:
        graphs = _graph_build_intervals(rank)
        for request in rank.requests:
            if not any(begin <= request.begin < end for begin, end in graphs):
                counted[request.other].append(request)
    return {str(server): _by_kind(requests) for server, requests in counted.items()}


def _graph_build_intervals(rank: Rank) -> list[tuple[int, int]]:
    return [(step.begin, step.end) for step in rank.steps if step.built]


def _by_kind(requests: list[Request]) -> dict[str, Any]:
    """Returns counts, and means per request. The kind with the longest total comes first."""
    by_kind: dict[str, list[Request]] = {}
    for request in requests:
        by_kind.setdefault(request.kind, []).append(request)
    found = {}
    for kind, of_kind in sorted(by_kind.items(), key=lambda item: -sum(r.end - r.begin for r in item[1])):
        number = len(of_kind)
        waits: dict[str, int] = {}
        for request in of_kind:
            waits[str(request.whom)] = waits.get(str(request.whom), 0) + request.waited
        means = {
            "milliseconds": sum(r.end - r.begin for r in of_kind),
            "waiting": sum(r.waited for r in of_kind),
            "queued": sum(r.queued for r in of_kind),
            "working": sum(r.served - r.queued for r in of_kind),
            "moving": sum(r.moved for r in of_kind),
        }
        staleness = [r.staleness for r in of_kind if r.staleness >= 0]
        found[kind] = {
            "count": number,
            **{name: total / number / _MILLISECOND for name, total in means.items()},
            "sent": sum(r.sent for r in of_kind) / number,
            "received": sum(r.received for r in of_kind) / number,
            "waits_for": {
                who: total / number / _MILLISECOND for who, total in sorted(waits.items(), key=lambda item: -item[1])
            },
            "staleness": sum(staleness) / len(staleness) if staleness else None,
            "max_staleness": max(staleness, default=None),
        }
    return found


def _of_kind(run: Run, kind: str) -> dict[str, Any]:
    return {"ranks": {str(rank.rank): _of_rank(rank, kind) for rank in run.ranks}}


def _of_rank(rank: Rank, kind: str) -> dict[str, Any]:
    """Returns mean milliseconds per step, over those in which no graph was built."""
    of_kind = [each for each in timeline.steps(rank) if each.step.kind == kind]
    counted = [each for each in of_kind if not each.step.built]
    sums = dict.fromkeys(timeline.CATEGORIES, 0)
    waits: dict[str, int] = {}
    for each in counted:
        for span in each.spans:
            sums[span.category] += span.end - span.begin
            if span.category == "waiting":
                waits[str(span.whom)] = waits.get(str(span.whom), 0) + span.end - span.begin
    number = max(len(counted), 1)
    gradients = sum(each.gradients for each in counted)
    hidden = min(sum(each.hidden for each in counted), sum(each.beside for each in counted))
    return {
        "count": len(counted),
        "built": len(of_kind) - len(counted),
        "milliseconds": sum(each.until - each.step.begin for each in counted) / number / _MILLISECOND,
        **{name: total / number / _MILLISECOND for name, total in sums.items()},
        "waits_for": {
            who: total / number / _MILLISECOND for who, total in sorted(waits.items(), key=lambda item: -item[1])
        },
        "gradients": gradients / number / _MILLISECOND,
        "gradients_hidden_share": hidden / gradients if gradients else None,
    }


def _whole(rank: Rank) -> dict[str, Any]:
    """Returns the totals of all steps, including those without spans."""
    steps = {
        kind: {
            "count": total["count"] + total["built"],
            "milliseconds": (total["nanoseconds"] / max(total["count"], 1) + total["between"] / max(total["gaps"], 1))
            / _MILLISECOND,
        }
        for kind, total in rank.totals.get("steps", {}).items()
    }
    drawn = rank.totals.get("input", {"count": 0, "nanoseconds": 0})
    collectives, requests = rank.totals.get("collectives", []), rank.totals.get("requests", [])
    waits: dict[str, int] = {}
    for total in (*collectives, *requests):
        for who, waited in total["waited_for"].items():
            waits[who] = waits.get(who, 0) + waited
    return {
        "steps": steps,
        "input_milliseconds": drawn["nanoseconds"] / max(drawn["count"], 1) / _MILLISECOND,
        "collectives": sum(total["count"] for total in collectives),
        "seconds_in_collectives": sum(total["nanoseconds"] for total in collectives) / 1e9,
        "seconds_waited_for": {who: waited / 1e9 for who, waited in waits.items()},
        "requests": sum(total["count"] for total in requests),
        "seconds_in_requests": sum(total["nanoseconds"] for total in requests) / 1e9,
        "bytes_sent": sum(total["sent"] for total in (*collectives, *requests)),
    }


def _slowest(run: Run) -> list[dict[str, Any]]:
    """Returns the collectives that take the most time besides waiting, by name, as means over ranks and calls."""
    by_name: dict[tuple, list] = {}
    for rank in run.ranks:
        for call in rank.calls:
            by_name.setdefault((call.ring, call.kind, call.name), []).append(call)
    found = []
    for (ring, kind, name), calls in by_name.items():
        number = len(calls)
        lines = run.ranks[0].lines.get(name)
        found.append(
            {
                "ring": ring,
                "kind": kind,
                "name": f"{name} ({lines})" if lines else name,
                "calls": number / len(run.ranks),
                "bytes": max(call.bytes for call in calls),
                "sent": sum(call.sent for call in calls) / number,
                "algorithm": max(call.algorithm for call in calls),
                "milliseconds": sum(call.end - call.begin for call in calls) / number / _MILLISECOND,
                "waiting": sum(call.waited for call in calls) / number / _MILLISECOND,
                "moving": sum(call.moved for call in calls) / number / _MILLISECOND,
                "adding": sum(call.added for call in calls) / number / _MILLISECOND,
            }
        )
    found.sort(key=lambda each: -each["calls"] * (each["moving"] + each["adding"]))
    return found[:_SLOWEST]


def _of_xla(kind: str, compiled: dict[str, Any]) -> str:
    """Describes which operations of a kind of step XLA compiles.

    >>> _of_xla("train", {"operations": 9, "by_xla": 8, "others": ["TfringAllReduce"]})
    'train: XLA compiles 8 of 9 operations in clusters; it has no kernel for TfringAllReduce, which runs between them.'
    """
    told = f"{kind}: XLA compiles {compiled['by_xla']} of {compiled['operations']} operations in clusters"
    others = compiled["others"]
    if not others:
        return f"{told}."
    runs = "runs" if len(others) == 1 else "run"
    return f"{told}; it has no kernel for {', '.join(others)}, which {runs} between them."


_OWN = {
    "input": "its input takes",
    "Python": "Python between its steps takes",
    "dispatch": "starting its step takes",
    "compute": "its computing takes",
}


class SlowRank(NamedTuple):
    """A rank that is slower than the others, and what takes longer on it: a key of `_OWN`, or ""."""

    rank: str
    milliseconds: float  # per step: the others' wait for it, or the excess of its own step
    is_waited_for: bool
    cause: str


def slow_rank(ranks: dict[str, dict[str, Any]]) -> SlowRank | None:
    """Returns the rank that the others wait for, or that is slower while none waits. None if there is none."""
    whom, mean = _waited_for(ranks)
    others = [row for rank, row in ranks.items() if rank != whom]
    step = max(row["milliseconds"] for row in ranks.values())
    if not others:
        return None
    if mean < _WORTH_TELLING * step and ranks[whom]["waiting"] < _WORTH_TELLING * step:
        slowest = max(ranks, key=lambda rank: ranks[rank]["milliseconds"])
        others = [row for rank, row in ranks.items() if rank != slowest]
        more = ranks[slowest]["milliseconds"] - sum(row["milliseconds"] for row in others) / len(others)
        if not _slow("", ranks):
            return None
        return SlowRank(slowest, more, False, _cause(ranks[slowest], others, 0.2 * more))
    if ranks[whom]["waiting"] > mean / 2:
        return None
    return SlowRank(whom, mean, True, _cause(ranks[whom], others, 0.2 * mean))


def _waited_for(ranks: dict[str, dict[str, Any]]) -> tuple[str, float]:
    """Returns the rank that the others wait for most, and their mean wait in milliseconds per step."""
    waits = {who: [row["waits_for"].get(who, 0.0) for rank, row in ranks.items() if rank != who] for who in ranks}
    whom = max(waits, key=lambda who: sum(waits[who]))
    return whom, sum(waits[whom]) / max(len(waits[whom]), 1)


def findings(kind: str, steps: dict[str, Any]) -> list[str]:
    """Explains the figures of a kind of step, in a sentence or two."""
    ranks = {rank: row for rank, row in steps["ranks"].items() if row["count"]}
    if not ranks:
        return []
    step = max(row["milliseconds"] for row in ranks.values())
    told = []
    whom, mean = _waited_for(ranks)
    own_waiting = ranks[whom]["waiting"]
    others = [row for rank, row in ranks.items() if rank != whom]
    if not others:
        pass
    elif mean < _WORTH_TELLING * step and own_waiting < _WORTH_TELLING * step:
        told.append(f"{kind}: ranks hardly wait for each other: {mean:.2f} of {step:.2f} ms a step.")
        told += _slow(kind, ranks)
    elif own_waiting > mean / 2:
        told.append(
            f"{kind}: no rank is slower than the others all the time: they wait for each other in turns, "
            f"{sum(row['waiting'] for row in ranks.values()) / len(ranks):.2f} of {step:.2f} ms a step."
        )
    else:
        why = _why(ranks[whom], others, 0.2 * mean)
        told.append(f"{kind}: the others wait for rank {whom}, {mean:.1f} of {step:.1f} ms a step{why}.")
    largest = max(_OWN, key=lambda name: sum(row[name] for row in ranks.values()))
    share = sum(row[largest] / max(row["milliseconds"], 1e-9) for row in ranks.values()) / len(ranks)
    passing = sum(row["moving"] + row["adding"] for row in ranks.values()) / len(ranks)
    told.append(
        f"{kind}: {100 * share:.0f} % of a step is {largest} (mean of all ranks); sending, receiving and adding "
        f"take {passing:.2f} ms that nothing overlaps."
    )
    return told


def _why(row: dict[str, Any], others: list[dict[str, Any]], least: float) -> str:
    """Describes what takes a rank longer than the others, if the excess is more than `least` milliseconds."""
    cause = _cause(row, others, least)
    if not cause:
        return ""
    more = row[cause] - sum(other[cause] for other in others) / len(others)
    return f": {_OWN[cause]} {row[cause]:.1f} ms a step, {more:.1f} more than that of the others"


def _cause(row: dict[str, Any], others: list[dict[str, Any]], least: float) -> str:
    """Returns the key of `_OWN` in which a rank exceeds the others most, or "" if the excess is not over `least`."""
    more = {name: row[name] - sum(other[name] for other in others) / len(others) for name in _OWN}
    cause = max(more, key=lambda name: more[name])
    return cause if more[cause] > least else ""


def _slow(kind: str, ranks: dict[str, dict[str, Any]]) -> list[str]:
    """Names a rank that is slower than the others and that no rank waits for, as with asynchronous updates."""
    slowest = max(ranks, key=lambda rank: ranks[rank]["milliseconds"])
    row, others = ranks[slowest], [row for rank, row in ranks.items() if rank != slowest]
    mean = sum(other["milliseconds"] for other in others) / len(others)
    if row["milliseconds"] < _SLOWER * mean:
        return []
    why = _why(row, others, 0.2 * (row["milliseconds"] - mean))
    return [
        f"{kind}: rank {slowest} is slower than the others, {row['milliseconds']:.1f} ms a step against "
        f"{mean:.1f}, and no rank waits for it{why}."
    ]


_SERVERS_OWN = {
    "working": "its processing takes",
    "queued": "its wait for its turn takes",
    "moving": "the transfer of its messages takes",
}


def findings_of_servers(steps: dict[str, Any], requests: dict[str, dict[str, Any]]) -> list[str]:
    """Explains the figures of parameter servers, in a sentence or two. `requests` are as workers see them."""
    rows = [row for row in steps["ranks"].values() if row["count"]]
    pushes = {server: kinds["push"] for server, kinds in requests.items() if "push" in kinds}
    if not rows or not pushes:
        return []
    step = sum(row["milliseconds"] for row in rows) / len(rows)
    took = {server: sum(row[name] for name in _SERVERS_OWN) for server, row in pushes.items()}
    slowest = max(took, key=lambda server: took[server])
    others = [row for server, row in pushes.items() if server != slowest]
    told = []
    if others:
        mean = sum(sum(row[name] for name in _SERVERS_OWN) for row in others) / len(others)
        if took[slowest] - mean > _WORTH_TELLING * step:
            more = {
                name: pushes[slowest][name] - sum(row[name] for row in others) / len(others) for name in _SERVERS_OWN
            }
            cause = max(more, key=lambda name: more[name])
            told.append(
                f"train: workers wait for server {slowest}: a push takes {took[slowest]:.1f} ms there, not "
                f"counting its wait for other workers, and {mean:.1f} elsewhere; {_SERVERS_OWN[cause]} "
                f"{pushes[slowest][cause]:.1f} ms, {more[cause]:.1f} more."
            )
    queued = sum(row["queued"] for row in pushes.values()) / len(pushes)
    if queued > _WORTH_TELLING * step:
        told.append(
            f"train: a push waits {queued:.1f} ms for its turn on a server, in steps of {step:.1f} ms: more servers "
            "share the updates."
        )
    return told
