"""The report: one document, and the text that shows it. docs/clusters.md describes the document's fields."""

from __future__ import annotations

import textwrap
from typing import Any

from tfring.cluster import parse_address
from tfring.doctor import findings, links

SCHEMA = 1
_MARKS = {links.CONNECTED: "+", links.REFUSED: "R", links.TIMED_OUT: "T", links.UNREACHABLE: "U"}
_OTHER = "x"
_MAX_MATRIX = 32
_LABEL = 14
_WIDTH = 112


def document(found: dict[str, Any]) -> dict[str, Any]:
    """Returns the document that `--json` prints."""
    facts = found["facts"]
    problems = [finding._asdict() for finding in findings.problems(found)]
    warnings = [finding._asdict() for finding in findings.warnings(found)]
    hosts = list(findings.ranks_by_host(facts).values())
    return {
        "schema": SCHEMA,
        "ready": not problems,
        "verdict": _verdict(found, len(hosts), problems),
        "problems": problems,
        "warnings": warnings,
        "cluster": {name: found[name] for name in ("source", "world_size", "num_servers", "addresses")},
        "hosts": hosts,
        "missing": [{"rank": rank, **why} for rank, why in found.get("missing", {}).items()],
        "ranks": [
            {
                **fact,
                "role": "worker" if rank < (found["world_size"] or 1) - found["num_servers"] else "parameter server",
                "used_interface": (findings.used_interface(found, rank) or {}).get("name"),
                "clock": found.get("clocks", {}).get(rank),
            }
            for rank, fact in facts.items()
        ],
        "connections": [
            {"from": rank, "to": other, **attempt}
            for rank, row in sorted(found.get("connections", {}).items())
            for other, attempt in sorted(row.items())
        ],
        "ring": found.get("ring"),
        "neighbours": [
            {**pair, "same_host": len({facts[rank]["host"] for rank in pair["ranks"]}) == 1}
            for pair in found.get("neighbours", [])
        ],
    }


def text(document: dict[str, Any]) -> str:
    """Returns the text for a person to read."""
    lines = [_title(document), *([""] if document["ranks"] else [])]
    lines += _software(document["ranks"])
    lines += _hosts(document)
    if document["cluster"]["world_size"] and document["cluster"]["world_size"] > 1:
        lines += _addresses(document)
        lines += _connections(document)
        lines += _clocks(document["ranks"])
        lines += _speeds(document)
    for name in ("warnings", "problems"):
        if document[name]:
            lines += ["", f"{name.capitalize()}:"]
            for number, finding in enumerate(document[name], 1):
                lines += _finding(number, finding)
    return "\n".join([*lines, "", *textwrap.wrap(document["verdict"], _WIDTH)])


def _verdict(found: dict[str, Any], num_hosts: int, problems: list[dict[str, Any]]) -> str:
    if problems:
        number = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
        return f"Not ready: {number}. See above for what to do."
    if found["world_size"] == 1:
        return f"Ready: 1 worker can train, alone ({found['source']})."
    num_servers = found["num_servers"]
    who = findings.counted(range(found["world_size"]), found["world_size"] - num_servers)
    return f"Ready: {who} on {num_hosts} host{'s' if num_hosts > 1 else ''} can train."


def _title(document: dict[str, Any]) -> str:
    cluster = document["cluster"]
    if cluster["world_size"] is None:
        return "tfring doctor: no cluster was found"
    if cluster["world_size"] == 1:
        return f"tfring doctor: this process alone ({cluster['source']})"
    ranks = findings.ranks_in_words(range(cluster["world_size"]))
    title = f"tfring doctor: {cluster['world_size']} processes ({ranks}), from {cluster['source']}"
    if cluster["num_servers"]:
        num_workers = cluster["world_size"] - cluster["num_servers"]
        servers = findings.ranks_in_words(range(num_workers, cluster["world_size"]))
        title += f"; {servers} {'are parameter servers' if cluster['num_servers'] > 1 else 'is the parameter server'}"
    return title


def _software(ranks: list[dict[str, Any]]) -> list[str]:
    def versions(rank: dict[str, Any]) -> str:
        names = {"tfring": "tfring", "TensorFlow": "tensorflow", "Keras": "keras", "Python": "python"}
        return ", ".join(f"{name} {rank[key] or '(none)'}" for name, key in names.items())

    def library(rank: dict[str, Any]) -> str:
        about = rank["library"]
        return "cannot be used" if about["problem"] else f"{about['path']}, version {about['interface']}"

    return _same(ranks, "Versions", versions) + _same(ranks, "Compiled ring", library)


def _same(ranks: list[dict[str, Any]], label: str, of: Any) -> list[str]:
    """Returns a line for each distinct text, with the ranks that have it unless all do."""
    said: dict[str, list[int]] = {}
    for rank in ranks:
        said.setdefault(of(rank), []).append(rank["rank"])
    alike = len(said) == 1
    return [
        _line(label if not number else "", words if alike else f"{words} ({findings.ranks_in_words(of_ranks)})")
        for number, (words, of_ranks) in enumerate(said.items())
    ]


def _hosts(document: dict[str, Any]) -> list[str]:
    ranks = {rank["rank"]: rank for rank in document["ranks"]}
    num_workers = (document["cluster"]["world_size"] or 1) - document["cluster"]["num_servers"]
    lines = []
    for number, on_host in enumerate(document["hosts"]):
        first = ranks[on_host[0]]
        num_cpus = findings.cpus_of([ranks[rank] for rank in on_host])
        share = f"{num_cpus / len(on_host):.2g} each"
        cpus = f"{num_cpus} CPU{'s' if num_cpus > 1 else ''} for {findings.counted(on_host, num_workers)} ({share})"
        where = findings.ranks_in_words(on_host) if len(ranks) > 1 else ""
        lines.append(_line("" if number else "Hosts", f"{first['hostname']}: {where}{', ' if where else ''}{cpus}"))
        used = {ranks[rank]["used_interface"] for rank in on_host}
        for each in {each["name"]: each for each in first["interfaces"]}.values():
            same = [other["address"] for other in first["interfaces"] if other["name"] == each["name"]]
            addresses = ", ".join(address for address in same if "%" not in address) or same[0]
            speed = f", {each['speed_megabits'] / 1000:g} Gb/s" if each["speed_megabits"] else ""
            mark = ", used by the ranks" if each["name"] in used else ""
            lines.append(_line("", f"  {each['name']} {addresses}{speed}, MTU {each['mtu']}{mark}"))
        memory = first["shared_memory"]
        if memory["dev_shm_bytes"] is not None and memory["needed_bytes"]:
            free = f"{_bytes(memory['dev_shm_free_bytes'])} of {_bytes(memory['dev_shm_bytes'])} free"
            needs = f"each worker needs {_bytes(memory['needed_bytes'])} to exchange data, none of it in /dev/shm"
            lines.append(_line("", f"  memory: {needs} ({free})"))
    return lines


def _addresses(document: dict[str, Any]) -> list[str]:
    addresses = document["cluster"]["addresses"]
    missing = {each["rank"] for each in document["missing"]}
    hosts: dict[str, list[int]] = {}
    for rank, address in enumerate(addresses):
        hosts.setdefault(parse_address(address).host, []).append(rank)
    lines = []
    for number, ranks in enumerate(hosts.values()):
        there = ", ".join(f"{addresses[rank]}{' (never connected)' if rank in missing else ''}" for rank in ranks[:8])
        more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
        lines.append(_line("" if number else "Addresses", f"{findings.ranks_in_words(ranks)}: {there}{more}"))
    return lines


def _connections(document: dict[str, Any]) -> list[str]:
    kinds = {(each["from"], each["to"]): each["kind"] for each in document["connections"]}
    good = sum(kind == links.CONNECTED for kind in kinds.values())
    size = document["cluster"]["world_size"]
    lines = [_line("Connections", f"{good} of {size * (size - 1)} connections from one rank to another work (TCP)")]
    if good == size * (size - 1) or size > _MAX_MATRIX:
        return lines
    width = len(str(size - 1))
    lines.append(_line("", f"from {'':{width}} to {' '.join(f'{to:>{width}}' for to in range(size))}"))
    for rank in range(size):
        row = [" " if to == rank else _mark(kinds.get((rank, to))) for to in range(size)]
        lines.append(_line("", f"{rank:>{5 + width}}    {' '.join(f'{mark:>{width}}' for mark in row)}"))
    legend = [f"{mark} {kind}" for kind, mark in _MARKS.items() if kind in kinds.values()]
    others = sorted({kind for kind in kinds.values() if kind not in _MARKS})
    legend += [f"{_OTHER} {', '.join(others)}"] if others else []
    legend += ["? not tried"] if len(kinds) < size * (size - 1) else []
    lines.append(_line("", ", ".join(legend)))
    return lines


def _mark(kind: str | None) -> str:
    return "?" if kind is None else _MARKS.get(kind, _OTHER)


def _clocks(ranks: list[dict[str, Any]]) -> list[str]:
    clocks = [(rank["clock"], rank["rank"]) for rank in ranks if rank["clock"]]
    if not clocks:
        return []
    worst, rank = max(clocks, key=lambda each: abs(each[0]["offset_seconds"]))
    offset, uncertainty = worst["offset_seconds"], worst["uncertainty_seconds"]
    return [_line("Clocks", f"rank {rank}'s differs most from rank 0's: {_signed(offset)} (± {_seconds(uncertainty)})")]


def _speeds(document: dict[str, Any]) -> list[str]:
    ring = document["ring"]
    if ring is None:
        return [_line("Ring", "not tried, because of the problems below")]
    if "problem" in ring:
        return [_line("Ring", "does not form")]
    size = _bytes(ring["all_reduce_bytes"])
    took = f"takes {_seconds(ring['all_reduce_seconds'])}; each rank sends {ring['gigabytes_per_second']:.3g} GB/s"
    lines = [_line("Ring", f"all ranks connected in {_seconds(ring['seconds_to_form'])}")]
    lines.append(_line("", f"all_reduce, the sum over all ranks, of {size} {took}"))
    lines.append(_line("", f"algorithm of all_reduce: {_algorithms(ring['algorithms'])}"))
    for number, pair in enumerate(document["neighbours"]):
        first, second = pair["ranks"]
        if "problem" in pair:
            words = "failed"
        else:
            apart = "one machine" if pair["transport"] == "shm" else "two hosts"  # containers may share memory
            shares = "one host" if pair["same_host"] else apart
            way = {"shm": "shared memory", "tcp": "TCP"}[pair["transport"]]
            latency, speed = _seconds(pair["latency_seconds"]), pair["gigabytes_per_second"]
            words = f"{shares}, {way}, latency {latency}, {speed:.3g} GB/s each way"
        lines.append(_line("" if number else "Neighbours", f"ranks {first} and {second}: {words}"))
    return lines


def _algorithms(found: list[dict[str, Any]]) -> str:
    """
    >>> _algorithms([{"up_to_bytes": 16384, "algorithm": "flat"}, {"up_to_bytes": None, "algorithm": "ring"}])
    'flat up to 16.4 kB, ring above'
    """
    *small, large = found
    smaller = [f"{each['algorithm']} up to {_bytes(each['up_to_bytes'])}, " for each in small]
    return "".join(smaller) + large["algorithm"] + (" above" if small else "")


def _finding(number: int, finding: dict[str, str]) -> list[str]:
    label = f"  {number}. "
    lines: list[str] = []
    for part in (finding["what"], finding["do"]):
        for line in filter(None, part.splitlines()):
            lead = " " * (len(label) + len(line) - len(line.lstrip()))
            wrapped = textwrap.wrap(line.strip(), _WIDTH - len(lead), break_on_hyphens=False, break_long_words=False)
            if line.startswith(" "):  # a command, to be pasted
                wrapped = [line.strip()]
            lines += [lead + words for words in wrapped]
    lines[0] = label + lines[0][len(label) :]
    return lines


def _line(label: str, words: str) -> str:
    return f"{label:<{_LABEL}}{words}".rstrip()


def _bytes(number: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if number < 1000 or unit == "GB":
            return f"{number:.3g} {unit}"
        number /= 1000
    raise AssertionError


def _seconds(number: float) -> str:
    for factor, unit in ((1, "s"), (1e3, "ms")):
        if number * factor >= 1:
            return f"{number * factor:.3g} {unit}"
    return f"{number * 1e6:.3g} us"


def _signed(number: float) -> str:
    return f"{'-' if number < 0 else '+'}{_seconds(abs(number))}"
