"""Says what a run did and what to look at, in the sentences before the tables of a report."""

from __future__ import annotations

from typing import Any

from tfring.report import summary

_COMMUNICATION = ("waiting", "server", "moving", "adding")
_MUCH = 0.2  # share of a step that is worth a change
_EXCHANGE, _SQUARE = "step, exchange ", " of batch x batch for "  # in names of collectives, see partition/edit.py
_DID = {"train": "trained", "test": "evaluated", "predict": "predicted"}
_OF_ONE_RANK = {
    "input": "Its input is slow: look at the files that it reads and their preprocessing (docs/data.md).",
    "Python": "It spends the time in Python between its steps: look for a callback that does more on this rank.",
    "dispatch": "It is slow to start its steps: look for other programs on its cores.",
    "compute": "It computes longer: look for a slower machine, other programs on its cores, or more rows.",
    "": "Look for other programs on its cores.",
}
_WHOLE = "the whole batch"  # the name of an exchange of its rows
_OF_WHOLE_STEPS = (
    "Some steps are computed from the whole batch on each rank, because their rows cannot be divided. More workers do "
    "not make them faster; rank 0 has logged which line is the cause (docs/exactness.md, Steps of the whole batch)."
)
_LARGER = "use a larger batch, or "
_OF_ALL = {
    "input": "Most of the rest is input: prefetch, cache, or let more threads prepare the batches (docs/data.md).",
    "Python": "Most of the rest is Python between the steps: set `steps_per_execution`, or remove callbacks.",
    "dispatch": f"Most of the rest is the start of steps: {_LARGER}set `steps_per_execution`.",
    "compute": "Most of the rest is computing, which is what a step is for.",
}


def of(found: dict[str, Any]) -> list[str]:
    """Returns the sentences for a document of `summary.document`: on training steps, or otherwise the first kind."""
    kind = "train" if "train" in found["steps"] else next(iter(found["steps"]), None)
    ranks = {} if kind is None else {r: row for r, row in found["steps"][kind]["ranks"].items() if row["count"]}
    if kind is None or not ranks:
        return [_without_steps(found["whole_run"])]
    totals = [row["steps"][kind] for row in found["whole_run"].values() if row["steps"].get(kind, {}).get("count")]
    step = max(total["milliseconds"] for total in totals) if totals else _mean(ranks, "milliseconds")
    number = max([total["count"] for total in totals] or [row["count"] for row in ranks.values()])
    told = [
        f"The run {_DID.get(kind, kind)} for {number} steps, {1e3 / max(step, 1e-6):.3g} per second, so "
        f"{number * step / 1e3:.3g} s not counting the tracing of graphs."
    ]
    if len(ranks) == 1:
        return [*told, _OF_ALL[_largest(ranks)].replace("of the rest", "of a step")]
    share = sum(_mean(ranks, name) for name in _COMMUNICATION) / max(_mean(ranks, "milliseconds"), 1e-6)
    waiting = _mean(ranks, "waiting") / max(_mean(ranks, "milliseconds"), 1e-6)
    told.append(
        f"Exposed communication (not overlapped by computation) takes {100 * share:.0f} % of a step: "
        f"{100 * waiting:.0f} % is waiting for other ranks, the rest transfers (means of all ranks)."
    )
    exchanges = _of_exchanges(found["collectives"])
    has_whole_steps = any(each["name"].startswith(_WHOLE) for each in found["collectives"])
    if has_whole_steps:
        told.append(_OF_WHOLE_STEPS)
    grows_with_batch = bool(exchanges) or has_whole_steps
    slow = summary.slow_rank(ranks)
    if slow is not None:
        others = "the others wait for it" if slow.is_waited_for else "no rank waits for it"
        told.append(f"Rank {slow.rank} is slow, by {slow.milliseconds:.3g} ms a step, and {others}.")
        told.append(_OF_ONE_RANK[slow.cause])
    elif waiting >= _MUCH:
        fewer = "or start fewer on a host" if grows_with_batch else "start fewer on a host, or use a larger batch"
        told.append(
            "No rank is slower than the others; they wait for each other in turns. Give each its own cores "
            f"(`tfring launch --bind cores`), {fewer}."
        )
        told += exchanges
    elif share >= _MUCH and found["num_servers"]:
        told.append(
            "No rank is slower than the others. Look at the requests to the servers below: more servers share the "
            "updates."
        )
    elif share >= _MUCH:
        less = "" if grows_with_batch else ', use a larger batch, or send less (`compression="bfloat16"`)'
        told.append(f"No rank is slower than the others. Measure the network (`tfring bench`){less}.")
        told += exchanges
    else:
        rest = _OF_ALL[_largest(ranks)]
        told += ["No rank is slower than the others.", rest.replace(_LARGER, "") if grows_with_batch else rest]
    return told


def _of_exchanges(collectives: list[dict[str, Any]]) -> list[str]:
    """Returns a sentence on the largest exchange of a step if most bytes are those of exchanges; otherwise none."""
    sent: dict[str, float] = {}
    for each in collectives:
        sent[each["name"]] = sent.get(each["name"], 0) + each["calls"] * each["sent"]
    exchanges = {name: number for name, number in sent.items() if name.startswith(_EXCHANGE)}
    if 2 * sum(exchanges.values()) <= sum(sent.values()):
        return []
    largest = max(exchanges, key=lambda name: exchanges[name])
    grows = ", which grows with the square of the batch" if _SQUARE in largest else ""
    return [
        "Most bytes are those of values that a step needs from all ranks (docs/exactness.md), first of all "
        f'"{largest}"{grows}.'
    ]


def _mean(ranks: dict[str, dict[str, Any]], name: str) -> float:
    return float(sum(row[name] for row in ranks.values()) / len(ranks))


def _largest(ranks: dict[str, dict[str, Any]]) -> str:
    return max(_OF_ALL, key=lambda name: _mean(ranks, name))


def _without_steps(ranks: dict[str, dict[str, Any]]) -> str:
    number = max(row["collectives"] for row in ranks.values())
    seconds = max(row["seconds_in_collectives"] for row in ranks.values())
    waiting = max(sum(row["seconds_waited_for"].values()) for row in ranks.values())
    return (
        f"The run made no steps of `fit`, `evaluate` or `predict`, but {number} collectives. They took {seconds:.3g} s "
        f"on the slowest rank; a rank waited for others for at most {waiting:.3g} s."
    )
