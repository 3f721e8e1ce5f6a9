"""The report: one document, the table that shows it, the plot. docs/clusters.md describes the document's fields."""

from __future__ import annotations

import json
from typing import Any

from tfring.bench.limits import Limit
from tfring.bench.options import Options
from tfring.cluster import Cluster, parse_address

SCHEMA = 1
_COLUMNS = ("collective", "size", "count", "dtype", "time", "algorithm", "algbw", "busbw", "of limit")
_UNITS = ("", "bytes", "", "", "us", "", "GB/s", "GB/s", "")
_LEGEND = (
    "time: of one call; algbw: size / time; busbw: what the slowest connection carries; of limit: busbw / limit.\n"
    "In training, all_reduce sums gradients; all_gather, reduce_scatter and all_to_all serve sharded layers; broadcast "
    "copies\ninitial weights."
)
_WIDTHS = (14, 11, 10, 8, 10, 9, 7, 7, 8)


def document(cluster: Cluster, options: Options, limit: Limit) -> dict[str, Any]:
    """Returns the document that `--json` prints, without results."""
    hosts: dict[str, list[int]] = {}
    for rank, address in enumerate(cluster.addresses):
        hosts.setdefault(parse_address(address).host, []).append(rank)
    return {
        "schema": SCHEMA,
        "cluster": {"source": cluster.source, "world_size": cluster.world_size, "hosts": list(hosts.values())},
        "dtype": options.dtype,
        "limit": {"kind": limit.kind, "gigabytes_per_second": limit.bytes_per_second / 1e9},
        "results": [],
    }


def as_json(document: dict[str, Any]) -> str:
    return json.dumps(document)


def head(document: dict[str, Any]) -> str:
    """Returns the text above the lines of results."""
    cluster, limit = document["cluster"], document["limit"]
    hosts = len(cluster["hosts"])
    where = f"{cluster['world_size']} ranks on {hosts} host{'s' if hosts > 1 else ''}, from {cluster['source']}"
    reached_by = {
        "raw socket": "plain sockets reach when every rank sends to the next and receives as much",
        "memory copy": "copying memory reaches when every rank copies",
    }
    speed = f"{limit['gigabytes_per_second']:.3g} GB/s per rank, which {reached_by[limit['kind']]}, all at once"
    return f"tfring bench: {where}\nLimit: {speed}\n{_LEGEND}\n\n{_line(_COLUMNS)}\n{_line(_UNITS)}"


def line(result: dict[str, Any]) -> str:
    """Returns one row of the table."""
    cells = (
        result["op"],
        str(result["size"]),
        str(result["count"]),
        result["dtype"],
        _three(result["microseconds"]),
        result["algorithm"],
        _three(result["algbw"]),
        _three(result["busbw"]),
        f"{100 * result['share_of_limit']:.0f} %",
    )
    return _line(cells)


def plot(document: dict[str, Any], file: str) -> None:
    """Plots bus bandwidth over size, one line per collective, with the limit."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for op in dict.fromkeys(result["op"] for result in document["results"]):
        points = [(result["size"], result["busbw"]) for result in document["results"] if result["op"] == op]
        axes.plot(*zip(*points, strict=True), marker="o", label=op)
    limit = document["limit"]
    axes.axhline(limit["gigabytes_per_second"], color="black", linestyle="--", label=f"limit: {limit['kind']}")
    axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel="bus bandwidth, GB/s")
    axes.set_title(f"{document['cluster']['world_size']} ranks, {document['dtype']}")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(file, dpi=120, bbox_inches="tight")


def _line(cells: tuple[str, ...]) -> str:
    first, *others = (
        f"{cell:<{w}}" if n in (0, 3, 5) else f"{cell:>{w}}"
        for n, (cell, w) in enumerate(zip(cells, _WIDTHS, strict=True))
    )
    return "  ".join((first, *others)).rstrip()


def _three(value: float) -> str:
    """
    >>> _three(0.012345), _three(1.2345), _three(123456.0)
    ('0.012', '1.23', '123456')
    """
    return (
        f"{value:.3f}"
        if value < 1
        else f"{value:.2f}"
        if value < 10
        else f"{value:.1f}"
        if value < 1000
        else f"{value:.0f}"
    )
