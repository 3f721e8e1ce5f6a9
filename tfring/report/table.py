"""The report as text."""

from __future__ import annotations

from typing import Any

from tfring.report.timeline import CATEGORIES

_TITLES = {"moving": "send/recv"}
_MOST_RANKS = 16  # told of one by one


def text(found: dict[str, Any]) -> str:
    """
    >>> print(_columns([["rank", "ms"], ["0", "10.25"]]))
    rank     ms
       0  10.25
    """
    parts = [_head(found)]
    for kind, steps in found["steps"].items():
        parts.append(_steps(kind, steps["ranks"], found))
    if not found["steps"]:
        parts.append("No steps of Keras' loops are in the files; the collectives are.")
    if found["collectives"]:
        parts.append(_collectives(found["collectives"]))
    parts.append(_whole_run(found["whole_run"]))
    parts.append("\n".join(found["findings"]))
    return "\n\n".join(part for part in parts if part)


def _head(found: dict[str, Any]) -> str:
    hosts = found["hosts"]
    lines = [
        f"tfring report: {found['world_size']} rank{'s' * (found['world_size'] > 1)} on {len(hosts)} "
        f"host{'s' * (len(hosts) > 1)}, started {found['started']}; clocks agree within "
        f"{found['clock_uncertainty_microseconds']:.0f} us"
    ]
    if found["missing"]:
        ranks = ", ".join(map(str, found["missing"]))
        lines.append(
            f"Missing: the files of rank {ranks}. Each rank writes on its own host; bring them into one folder."
        )
    present = set(range(found["world_size"])) - set(found["missing"])
    broken = sorted(present - set(found["ended"]))
    if broken:
        lines.append(
            f"Cut short: rank {', '.join(map(str, broken))} has not ended by itself (crashed, killed, still running)."
        )
    lost = {rank: number for rank, number in found["lost"].items() if number}
    if lost:
        lines.append("Lost for want of room: " + ", ".join(f"{n} records of rank {rank}" for rank, n in lost.items()))
    return "\n".join(lines)


def _steps(kind: str, ranks: dict[str, dict[str, Any]], found: dict[str, Any]) -> str:
    counts = [row["count"] for row in ranks.values()]
    built = max(row["built"] for row in ranks.values())
    title = f"{kind}: mean milliseconds of {max(counts)} steps"
    whole = max(row["steps"].get(kind, {"count": 0})["count"] for row in found["whole_run"].values())
    if whole > max(counts) + built:
        title += f" of {whole}, at most the first {found['steps_kept']} of each fit"
    if built:
        title += f" (without {built} in which a graph was built)"
    rows = [["rank", "step", *(_TITLES.get(name, name) for name in CATEGORIES), "gradients hidden"]]
    for rank, row in ranks.items():
        share = row["gradients_hidden_share"]
        hidden = "-" if share is None else f"{100 * share:.0f} %"
        rows.append([rank, *(f"{row[name]:.2f}" for name in ("milliseconds", *CATEGORIES)), hidden])
    lines = [title, _columns(rows)]
    for rank, row in list(ranks.items())[:_MOST_RANKS]:
        waits = [
            f"{milliseconds:.2f} of it for rank {who}"
            for who, milliseconds in list(row["waits_for"].items())[:3]
            if milliseconds >= 0.005 and who != "-1"
        ]
        if waits:
            lines.append(f"rank {rank} waits {row['waiting']:.2f} ms a step, {', '.join(waits)}")
    return "\n".join(lines)


def _collectives(collectives: list[dict[str, Any]]) -> str:
    rows = [["ring", "kind", "name", "calls", "bytes", "algorithm", "ms", "waiting", "send/recv", "adding"]]
    for each in collectives:
        algorithm = "" if each["algorithm"] == "auto" else each["algorithm"]
        rows.append(
            [
                *(each["ring"], each["kind"], each["name"], f"{each['calls']:.0f}", str(each["bytes"]), algorithm),
                *(f"{each[name]:.3f}" for name in ("milliseconds", "waiting", "moving", "adding")),
            ]
        )
    return "Slowest collectives, milliseconds a call:\n" + _columns(rows, left=3)


def _whole_run(ranks: dict[str, dict[str, Any]]) -> str:
    lines = []
    for rank, row in list(ranks.items())[:_MOST_RANKS]:
        steps = ", ".join(
            f"{total['count']} {kind} steps of {total['milliseconds']:.2f} ms" for kind, total in row["steps"].items()
        )
        waits = sum(row["seconds_waited_for"].values())
        lines.append(
            f"rank {rank}: {steps + '; ' if steps else ''}{row['collectives']} collectives in "
            f"{row['seconds_in_collectives']:.2f} s, {waits:.2f} of them waiting; "
            f"{row['bytes_sent'] / 1e6:.1f} MB sent"
        )
    return "Whole run:\n" + "\n".join(lines) if lines else ""


def _columns(rows: list[list[str]], left: int = 0) -> str:
    """Right-aligned, but the first `left` columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
