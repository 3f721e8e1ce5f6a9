"""An alpha-beta model: alpha for every message that waits for another, beta for every byte through a host's link.

Fitted to two figures of the imitated networks, checked against all others, and drawn to 1,024 hosts.
"""

from __future__ import annotations

import math
import pathlib
import sys
from collections.abc import Callable

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

from tfring.ring import schedule

FITTED_HOSTS = 4
PAPER_ALPHA, PAPER_RATE = 50e-6, 10e9  # one way between two hosts of a data centre; bits a second

# Of N hosts with a rank each, X bytes: (delays, bytes through a host's link in one direction).
COSTS: dict[str, Callable[[int, float], tuple[float, float]]] = {
    "flat": lambda n, x: (1, (n - 1) * x),
    "bruck": lambda n, x: (math.ceil(math.log2(n)), (n - 1) * x),
    "ring": lambda n, x: (2 * (n - 1), 2 * (n - 1) / n * x),
    "halving": lambda n, x: (2 * math.ceil(math.log2(n)), 2 * (n - 1) / n * x),
    "server": lambda n, x: (2, 2 * (n - 1) * x),
}


def seconds(algorithm: str, hosts: int, size: float, alpha: float, rate: float) -> float:
    delays, num_bytes = COSTS[algorithm](hosts, size)
    return delays * alpha + num_bytes * 8 / rate


def shaped_bytes(algorithm: str, hosts: int, ranks: int, size: float) -> float:
    """Through the busiest host's link, with several ranks a host."""
    local = ranks // hosts
    if algorithm == "server":
        return 2 * (ranks - local) * size
    two_level = algorithm == "two_level" or (algorithm == "auto" and local > 1)
    members = hosts if two_level else ranks
    return 2 * (members - 1) / members * size


def checked(network: dict) -> list[tuple[str, float, float]]:
    """Returns names with the model's and the measured values; first the two to which it is fitted."""
    rates = sorted({rate for rate, *_ in network["shaped"]}, reverse=True)
    fitted = next(
        [size, took]
        for rate, size, _, hosts, ranks, algorithm, took in network["shaped"]
        if (rate, hosts, ranks, algorithm) == (rates[0], FITTED_HOSTS, FITTED_HOSTS, "auto")
    )
    # Of B that data gets.
    share = shaped_bytes("auto", FITTED_HOSTS, FITTED_HOSTS, fitted[0]) * 8 / rates[0] / fitted[1]
    delayed = dict(network["delayed"])
    hosts, size = network["delayed_hosts"], network["delayed_bytes"]
    alpha = delayed["bruck"] / COSTS["bruck"](hosts, size)[0]
    found = []
    for rate, size, placement, num_hosts, ranks, algorithm, took in network["shaped"]:
        model = shaped_bytes(algorithm, num_hosts, ranks, size) * 8 / rate / share
        found.append((f"{rate / 1e6:,.0f} Mbit/s, {num_hosts} hosts, {placement}, {algorithm}", model, took))
    for algorithm, took in network["delayed"]:
        found.append((f"1 kB, delay, {algorithm}", COSTS[chosen(algorithm, hosts, 1024)](hosts, 0)[0] * alpha, took))
    return found


def chosen(algorithm: str, hosts: int, size: int) -> str:
    return schedule.choose_all_reduce(size, hosts, 1) if algorithm == "auto" else algorithm


def crossover(hosts: int) -> float:
    """The size from which a ring takes less time than Bruck's."""
    low, high = 1.0, 1e12
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        bruck, ring = (seconds(each, hosts, middle, PAPER_ALPHA, PAPER_RATE) for each in ("bruck", "ring"))
        low, high = (middle, high) if bruck < ring else (low, middle)
    return low


def size_text(size: int) -> str:
    return f"{size >> 20} MB" if size >= 1 << 20 else f"{size >> 10} kB"


def section(network: dict) -> str:
    lines = [
        "## Scale, on paper",
        "",
        "An alpha-beta model, fitted to two of the figures above (1 Gbit/s, four hosts, one rank each, auto: the share "
        "of B that data gets; Bruck's 1 kB with delay: alpha) and checked against the others.",
        "",
        "| | model | measured | error |",
        "|---|---:|---:|---:|",
    ]
    for what, model, took in checked(network):
        unit, factor = ("s", 1) if took > 0.2 else ("ms", 1e3)
        lines.append(
            f"| {what} | {model * factor:.3g} {unit} | {took * factor:.3g} {unit} | {100 * (model / took - 1):+.0f} % |"
        )
    lines += [
        "",
        f"To {PAPER_RATE / 1e9:.0f} Gbit/s and {PAPER_ALPHA * 1e6:.0f} microseconds one way, milliseconds of an "
        "all_reduce among hosts with one rank each. From the size in the second column on, a ring is faster than "
        "Bruck's algorithm; at the size in the third tfring changes from that to halving and doubling.",
        "",
    ]
    sizes = (1 << 10, 64 << 10, 1 << 20, 64 << 20)
    columns = [f"{name}, {size_text(size)}" for size in sizes for name in ("auto", "ring")]
    lines += ["| hosts | ring from | tfring's | " + " | ".join(columns) + " |", "|---:" * (3 + len(columns)) + "|"]
    for hosts in (8, 64, 256, 1024):
        cells = [f"{crossover(hosts) / 1e3:,.0f} kB", f"{schedule.SMALL_BYTES // hosts:,} B"]
        for size in sizes:
            for name in (chosen("auto", hosts, size), "ring"):
                cells.append(f"{seconds(name, hosts, size, PAPER_ALPHA, PAPER_RATE) * 1e3:.3g}")
        lines.append(f"| {hosts:,} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "The ring's 2(N-1) delays are most of its time below a few MB from 64 hosts on: there halving and doubling "
        "(2 log2 N delays, the ring's bytes) takes its place, up to 16 KiB times N.",
    ]
    return "\n".join(lines)


def draw(network: dict, folder: pathlib.Path) -> bool:
    """network.png and scale.png beside this file, if there is matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    rate = max(rate for rate, *_ in network["shaped"])
    rows = [row for row in network["shaped"] if row[0] == rate]
    size = rows[0][1]
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    members = [2, 3, 4, 5, 6, 7, 8]
    axes.plot(members, [2 * size * (n - 1) / n * 8 / rate for n in members], label="2X(N-1)/(N B)")
    axes.plot(members, [2 * size * n * 8 / rate for n in members], label="2XN/B", linestyle="--")
    for number, (algorithm, local) in enumerate((a, n) for n in (1, 2) for a in ("auto", "ring", "server")):
        points = [(n, t) for _, _, _, hosts, n, a, t in rows if a == algorithm and n // hosts == local]
        if points:
            color = f"C{number}"
            style = {"linestyle": "", "marker": "os^"[number % 3], "markerfacecolor": color if local == 1 else "none"}
            label = f"{algorithm}, {('one rank', 'two ranks')[local - 1]} a host"
            axes.plot(*zip(*points, strict=True), color=color, label=label, **style)
    axes.set(xlabel="ranks", ylabel="seconds", yscale="log")
    axes.set_title(f"all_reduce of {size >> 20} MB, {rate / 1e9:g} Gbit/s")
    axes.legend(fontsize=8, bbox_to_anchor=(1.02, 1), loc="upper left")
    axes.grid(alpha=0.3)
    figure.savefig(folder / "network.png", dpi=110, bbox_inches="tight")

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    hosts = [2**k for k in range(1, 11)]
    for size, style in ((1 << 10, ":"), (1 << 20, "-"), (64 << 20, "--")):
        for number, name in enumerate(("bruck", "ring", "halving", "server")):
            times = [seconds(name, n, size, PAPER_ALPHA, PAPER_RATE) for n in hosts]
            axes.plot(hosts, times, style, color=f"C{number}", label=f"{name}, {size >> 10:,} kB")
    axes.set(xscale="log", yscale="log", xlabel="hosts", ylabel="seconds")
    axes.set_title(f"the model at {PAPER_RATE / 1e9:.0f} Gbit/s, {PAPER_ALPHA * 1e6:.0f} us one way")
    axes.legend(fontsize=6, ncol=3)
    axes.grid(alpha=0.3)
    figure.savefig(folder / "scale.png", dpi=110, bbox_inches="tight")
    return True
