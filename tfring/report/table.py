"""The report as text."""

from __future__ import annotations

import textwrap
from typing import Any

from tfring.report.timeline import CATEGORIES

_TITLES = {"moving": "send/recv", "server": "servers"}
_KINDS = ("push", "commit", "rows", "pull", "claim", "meet")  # of requests that a step or an epoch makes
_WIDTH = 112  # of sentences
_MOST_RANKS = 16  # shown one by one


def text(found: dict[str, Any]) -> str:
    """
    >>> print(_columns([["rank", "ms"], ["0", "10.25"]]))
    rank     ms
       0  10.25
    """
    parts = [_head(found), "\n".join(textwrap.wrap(" ".join(found["summary"]), _WIDTH))]
    for kind, steps in found["steps"].items():
        parts.append(_steps(kind, steps["ranks"], found))
    if not found["steps"]:
        parts.append("The files have no steps of Keras' loops, only collectives.")
    if found["collectives"]:
        parts.append(_collectives(found["collectives"]))
    if found["num_servers"]:
        parts.append(_requests("Requests as workers see them", found["requests"]))
        of_servers = {server: row["requests"] for server, row in found["servers"].items()}
        parts.append(_requests("Requests as servers see them", of_servers, is_server=True))
    parts.append(_whole_run(found["whole_run"]))
    parts.append("\n".join(found["findings"]))
    return "\n\n".join(part for part in parts if part)


def _head(found: dict[str, Any]) -> str:
    hosts = found["hosts"]
    num_servers = found["num_servers"]
    servers = f" and {num_servers} server{'s' * (num_servers > 1)}" if num_servers else ""
    lines = [
        f"tfring report: {found['world_size']} rank{'s' * (found['world_size'] > 1)}{servers} on {len(hosts)} "
        f"host{'s' * (len(hosts) > 1)}, started {found['started']}; clocks agree within "
        f"{found['clock_uncertainty_microseconds']:.0f} us"
    ]
    for name, size, more in (("rank", found["world_size"], ""), ("server", num_servers, "_servers")):
        missing = found[f"missing{more}"]
        if missing:
            numbers = ", ".join(map(str, missing))
            lines.append(
                f"Missing: the files of {name} {numbers}. Each {name} writes on its own host; copy them into one "
                "folder."
            )
        broken = sorted(set(range(size)) - set(missing) - set(found[f"ended{more}"]))
        if broken:
            lines.append(
                f"Cut short: {name} {', '.join(map(str, broken))} has not ended by itself (crashed, killed, still "
                "running)."
            )
    lost = {rank: number for rank, number in found["lost"].items() if number}
    if lost:
        lines.append("Lost for lack of space: " + ", ".join(f"{n} records of rank {rank}" for rank, n in lost.items()))
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
    shown = [name for name in CATEGORIES if name != "server" or found["num_servers"]]
    rows = [["rank", "step", *(_TITLES.get(name, name) for name in shown), "gradients hidden"]]
    for rank, row in ranks.items():
        share = row["gradients_hidden_share"]
        hidden = "-" if share is None else f"{100 * share:.0f} %"
        rows.append([rank, *(f"{row[name]:.2f}" for name in ("milliseconds", *shown)), hidden])
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


def _requests(title: str, servers: dict[str, dict[str, Any]], is_server: bool = False) -> str:
    moving = "sending" if is_server else _TITLES["moving"]
    names = {"milliseconds": "ms", "waiting": "waiting", "queued": "queued", "working": "working", "moving": moving}
    rows = [["server", "kind", "calls", "sent", "received", *names.values(), "staleness"]]
    waits = []
    for server, kinds in servers.items():
        for kind in (kind for kind in kinds if kind in _KINDS):
            row = kinds[kind]
            stale = "" if row["staleness"] is None else f"{row['staleness']:.2f} (to {row['max_staleness']})"
            figures = (f"{row[name]:.3f}" for name in names)
            sizes = (f"{row[name]:.0f}" for name in ("sent", "received"))
            rows.append([server, kind, str(row["count"]), *sizes, *figures, stale])
            for who, milliseconds in list(row["waits_for"].items())[:3]:
                if is_server and milliseconds >= 0.005 and who != "-1":
                    waits.append(f"server {server} waits {milliseconds:.2f} ms a {kind} for rank {who}")
    if len(rows) == 1:
        return ""
    return "\n".join([f"{title}, bytes and milliseconds a request:", _columns(rows, left=2), *waits])


def _whole_run(ranks: dict[str, dict[str, Any]]) -> str:
    lines = []
    for rank, row in list(ranks.items())[:_MOST_RANKS]:
        steps = ", ".join(
            f"{total['count']} {kind} steps of {total['milliseconds']:.2f} ms" for kind, total in row["steps"].items()
        )
        waits = sum(row["seconds_waited_for"].values())
        requests = f"{row['requests']} requests to servers in {row['seconds_in_requests']:.2f} s, "
        lines.append(
            f"rank {rank}: {steps + '; ' if steps else ''}{requests if row['requests'] else ''}"
            f"{row['collectives']} collectives in "
            f"{row['seconds_in_collectives']:.2f} s, {waits:.2f} of them waiting; "
            f"{row['bytes_sent'] / 1e6:.1f} MB sent"
        )
    return "Whole run:\n" + "\n".join(lines) if lines else ""


def _columns(rows: list[list[str]], left: int = 0) -> str:
    """Returns rows of right-aligned columns; the first `left` columns are left-aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
