"""The figures of a run, as one document; docs/report.md describes its fields."""

from __future__ import annotations

import time
from typing import Any

from tfring.report import timeline
from tfring.report.files import Rank, Run

_SLOWEST = 8
_WORTH_TELLING = 0.05  # of a step
_MILLISECOND = 1e6  # nanoseconds


def document(run: Run) -> dict[str, Any]:
    """Returns the document that `--json` prints."""
    kinds = dict.fromkeys(step.kind for rank in run.ranks for step in rank.steps)
    uncertainty = max(rank.uncertainty for rank in run.ranks)
    found: dict[str, Any] = {
        "schema": 1,
        "world_size": run.world_size,
        "missing": run.missing,
        "hosts": sorted({rank.host for rank in run.ranks}),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(run.started)),
        "ended": [rank.rank for rank in run.ranks if rank.ended],
        "clock_uncertainty_microseconds": uncertainty / 1e3,
        "lost": {str(rank.rank): rank.totals.get("lost", 0) for rank in run.ranks},
        "steps_kept": run.steps_kept,
        "steps": {kind: _of_kind(run, kind) for kind in kinds},
        "whole_run": {str(rank.rank): _whole(rank) for rank in run.ranks},
        "collectives": _slowest(run),
        "compiled": run.ranks[0].compiled,
    }
    found["findings"] = [line for kind in kinds for line in findings(kind, found["steps"][kind])]
    found["findings"] += [_of_xla(kind, compiled) for kind, compiled in found["compiled"].items()]
    return found


def _of_kind(run: Run, kind: str) -> dict[str, Any]:
    return {"ranks": {str(rank.rank): _of_rank(rank, kind) for rank in run.ranks}}


def _of_rank(rank: Rank, kind: str) -> dict[str, Any]:
    """Mean milliseconds a step, of those in which no graph was built."""
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
    """Returns the totals of all steps, also of those without spans."""
    steps = {
        kind: {
            "count": total["count"] + total["built"],
            "milliseconds": (total["nanoseconds"] / max(total["count"], 1) + total["between"] / max(total["gaps"], 1))
            / _MILLISECOND,
        }
        for kind, total in rank.totals.get("steps", {}).items()
    }
    drawn = rank.totals.get("input", {"count": 0, "nanoseconds": 0})
    collectives = rank.totals.get("collectives", [])
    waits: dict[str, int] = {}
    for total in collectives:
        for who, waited in total["waited_for"].items():
            waits[who] = waits.get(who, 0) + waited
    return {
        "steps": steps,
        "input_milliseconds": drawn["nanoseconds"] / max(drawn["count"], 1) / _MILLISECOND,
        "collectives": sum(total["count"] for total in collectives),
        "seconds_in_collectives": sum(total["nanoseconds"] for total in collectives) / 1e9,
        "seconds_waited_for": {who: waited / 1e9 for who, waited in waits.items()},
        "bytes_sent": sum(total["sent"] for total in collectives),
    }


def _slowest(run: Run) -> list[dict[str, Any]]:
    """Returns the collectives that take most time besides waiting, by name, mean over ranks and calls."""
    by_name: dict[tuple, list] = {}
    for rank in run.ranks:
        for call in rank.calls:
            by_name.setdefault((call.ring, call.kind, call.name), []).append(call)
    found = []
    for (ring, kind, name), calls in by_name.items():
        number = len(calls)
        found.append(
            {
                "ring": ring,
                "kind": kind,
                "name": name,
                "calls": number / len(run.ranks),
                "bytes": max(call.bytes for call in calls),
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
    """Tells what XLA compiles of a kind of step.

    >>> _of_xla("train", {"operations": 9, "by_xla": 8, "others": ["TfringAllReduce"]})
    'train: XLA compiles 8 of 9 operations in clusters; it has none for TfringAllReduce, which runs between them.'
    """
    told = f"{kind}: XLA compiles {compiled['by_xla']} of {compiled['operations']} operations in clusters"
    others = compiled["others"]
    if not others:
        return f"{told}."
    runs = "runs" if len(others) == 1 else "run"
    return f"{told}; it has none for {', '.join(others)}, which {runs} between them."


_OWN = {
    "input": "its input takes",
    "Python": "Python between its steps takes",
    "dispatch": "starting its step takes",
    "compute": "its computing takes",
}


def findings(kind: str, steps: dict[str, Any]) -> list[str]:
    """Explains the figures of a kind of step, in a sentence or two."""
    ranks = {rank: row for rank, row in steps["ranks"].items() if row["count"]}
    if not ranks:
        return []
    step = max(row["milliseconds"] for row in ranks.values())
    told = []
    waited_for = {who: [row["waits_for"].get(who, 0.0) for rank, row in ranks.items() if rank != who] for who in ranks}
    whom = max(waited_for, key=lambda who: sum(waited_for[who]))
    waits = waited_for[whom]
    mean = sum(waits) / max(len(waits), 1)
    own_waiting = ranks[whom]["waiting"]
    others = [row for rank, row in ranks.items() if rank != whom]
    if not others:
        pass
    elif mean < _WORTH_TELLING * step and own_waiting < _WORTH_TELLING * step:
        told.append(f"{kind}: ranks hardly wait for each other: {mean:.2f} of {step:.2f} ms a step.")
    elif own_waiting > mean / 2:
        told.append(
            f"{kind}: no rank is slower than the others all the time: they wait for each other in turns, "
            f"{sum(row['waiting'] for row in ranks.values()) / len(ranks):.2f} of {step:.2f} ms a step."
        )
    else:
        more = {name: ranks[whom][name] - sum(row[name] for row in others) / len(others) for name in _OWN}
        cause = max(more, key=lambda name: more[name])
        why = ""
        if more[cause] > 0.2 * mean:
            why = f": {_OWN[cause]} {ranks[whom][cause]:.1f} ms a step, {more[cause]:.1f} more than that of the others"
        told.append(f"{kind}: rank {whom} is what the others wait for, {mean:.1f} of {step:.1f} ms a step{why}.")
    largest = max(_OWN, key=lambda name: sum(row[name] for row in ranks.values()))
    share = sum(row[largest] / max(row["milliseconds"], 1e-9) for row in ranks.values()) / len(ranks)
    passing = sum(row["moving"] + row["adding"] for row in ranks.values()) / len(ranks)
    told.append(
        f"{kind}: {100 * share:.0f} % of a step is {largest}, the mean of all ranks; sending, receiving and adding "
        f"take {passing:.2f} ms that nothing hides."
    )
    return told
