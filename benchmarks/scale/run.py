"""Writes the tables of docs/scale.md: the schedules on measured networks, and on larger ones.

python benchmarks/scale/run.py --write
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re

import simulate
from simulate import Network

ROOT = pathlib.Path(__file__).parents[2]
PAGE = ROOT / "docs" / "scale.md"
DELAY = 20e-6  # one way between two hosts of a data center
SIZES = (("1 kB", 1e3), ("64 kB", 64e3), ("1 MB", 1e6), ("100 MB", 100e6), ("1 GB", 1e9))
RATES = (10e9, 100e9, 400e9)
HOSTS = (64, 256, 1024, 16384)
# Bytes of float32 gradients, and seconds of a step on one GPU that they wait for.
MODELS = (("ResNet-50", 102e6, 0.10), ("BERT-large", 1.34e9, 0.35), ("DLRM, its dense layers", 10e6, 0.005))


def measured() -> list[str]:
    """Returns the table of what was measured on imitated networks, beside the simulation."""
    network = json.loads((ROOT / "benchmarks" / "collectives" / "results.json").read_text())["network"]
    # Of a link's bits data gets 0.94: headers of Ethernet, IP and TCP.
    cases = [
        (f"{size / 2**20:.0f} MB, {rate / 1e6:,.0f} Mbit/s, {hosts} hosts, {placement}, {algorithm}", took,
         (size, ranks, Network(0.94 * rate, 1e-4), ranks // hosts, algorithm))
        for rate, size, placement, hosts, ranks, algorithm, took in network["shaped"] if algorithm != "server"
    ]  # fmt: skip
    slow = Network(10e9, 0.005, overhead=network["ping"] / 2 - 0.005)
    hosts, size = network["delayed_hosts"], network["delayed_bytes"]
    cases += [
        (f"1 kB, 5 ms one way, {hosts} hosts, {algorithm}", took, (size, hosts, slow, 1, algorithm))
        for algorithm, took in network["delayed"] if algorithm != "server"
    ]  # fmt: skip
    lines = ["| | simulated, s | measured, s | error |", "|---|---:|---:|---:|"]
    for name, took, (num_bytes, ranks, links, local, algorithm) in cases:
        seconds = simulate.all_reduce(num_bytes, ranks, links, local=local, algorithm=algorithm)
        lines.append(f"| {name} | {seconds:.3g} | {took:.3g} | {seconds / took - 1:+.0%} |")
    return lines


def sizes() -> list[str]:
    """Returns the table of milliseconds by size, rate and number of hosts."""
    heads = [name for name, _ in SIZES]
    lines = ["| Gbit/s | hosts | | " + " | ".join(heads) + " |", "|---:|---:|---|" + "---:|" * len(heads)]
    ways = {
        "tfring": simulate.by_formula,
        "ring alone": lambda size, hosts, network: simulate.by_formula(size, hosts, network, "ring"),
        "double binary trees": simulate.trees,
        "central server": simulate.server,
        "bound": simulate.bound,
    }
    for rate in RATES:
        for hosts in HOSTS:
            network = Network(rate, DELAY)
            for name, way in ways.items():
                cells = [milliseconds(way(size, hosts, network)) for _, size in SIZES]
                lines.append(f"| {rate / 1e9:.0f} | {hosts:,} | {name} | " + " | ".join(cells) + " |")
    return lines


def milliseconds(seconds: float) -> str:
    """Returns three digits, without an exponent."""
    return f"{1e3 * seconds:.3g}" if seconds < 0.9995 else f"{1e3 * seconds:,.0f}"


def steps() -> list[str]:
    """Returns the table of the part of a step that is left to wait for, behind a backward pass of two thirds of it."""
    lines = [
        "| | Gbit/s | " + " | ".join(f"{hosts:,} hosts" for hosts in HOSTS) + " |",
        "|---|---:|" + "---:|" * len(HOSTS),
    ]
    for name, size, seconds in MODELS:
        for rate in RATES:
            cells = []
            for hosts in HOSTS:
                took = simulate.by_formula(size, hosts, Network(rate, DELAY))
                cells.append(f"{max(took - 2 / 3 * seconds, 0.0) / seconds:.0%}")
            lines.append(f"| {name} | {rate / 1e9:.0f} | " + " | ".join(cells) + " |")
    return lines


def ranks() -> list[str]:
    """Returns the table of links and of the spread of a failure."""
    lines = ["| ranks | links of a rank | hops of a failure |", "|---:|---:|---:|"]
    for number in (16, 64, 256, 1024, 16384):
        lines.append(f"| {number:,} | {simulate.links(number)} | {simulate.hops_of_a_failure(number)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the tables into docs/scale.md")
    arguments = parser.parse_args()
    text = PAGE.read_text()
    for function in (sizes, steps, ranks, measured):
        table = "\n".join(function())
        print(table, end="\n\n")
        marks = rf"(<!-- {function.__name__} -->\n).*?(\n<!-- end -->)"
        text = re.sub(marks, lambda m, table=table: m[1] + table + m[2], text, flags=re.DOTALL)
    if arguments.write:
        PAGE.write_text(text)


if __name__ == "__main__":
    main()
