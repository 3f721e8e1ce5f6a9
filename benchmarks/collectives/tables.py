"""From results.json to README.md: everything behind the marker there is written here."""

from __future__ import annotations

import pathlib
import statistics

README = pathlib.Path(__file__).parent / "README.md"
TRANSPORTS = {"tf_shm": "shared memory", "tf_tcp": "TCP", "np_shm": "shared memory", "np_tcp": "TCP"}
NETWORK_HEADINGS = {"auto": "auto", "ring": "ring", "server": "server"}
MARKER = "<!-- From here on written by run.py. -->\n"
K, M = 1 << 10, 1 << 20

HEADINGS = {
    "floor": "calling a function that does nothing",
    "tensorflow": "TensorFlow RING over gRPC",
    "tf_shm": "tfring, shared memory",
    "tf_tcp": "tfring, TCP",
    "horovod": "Horovod (gloo)",
    "np_shm": "tfring from NumPy, shared memory",
    "np_tcp": "tfring from NumPy, TCP",
    "gloo": "torch gloo",
    "mpich": "MPICH from mpi4py",
    "openmpi": "Open MPI from mpi4py",
    "sockets": "limit: raw sockets",
    "copy": "limit: a memory copy",
    "copy_new": "limit: a memory copy into new memory",
}


class Part:
    """The times of one part."""

    def __init__(self, result: dict) -> None:
        self.conditions, self.versions, self.missing = (result[key] for key in ("conditions", "versions", "missing"))
        self.times = {tuple(cell): values for *cell, values in result["times"]}

    def median(self, *cell) -> float | None:
        return statistics.median(self.times[cell]) if cell in self.times else None

    def ratio(self, slow: tuple, fast: tuple) -> float | None:
        """Returns the speedup: the median of the ratios within a round."""
        if slow not in self.times or fast not in self.times:
            return None
        return statistics.median(s / f for s, f in zip(self.times[slow], self.times[fast], strict=True))

    def sizes(self, op: str, dtype: str) -> list[int]:
        return sorted({size for _, o, d, size in self.times if (o, d) == (op, dtype)})


def write(results: dict, folder: pathlib.Path) -> None:
    """Writes README.md and its pictures into a folder."""
    head = README.read_text().partition(MARKER)[0]
    parts = {int(name): Part(result) for name, result in results.items() if name != "network"}
    network = results.get("network")
    sections = [targets(parts, network)]
    sections += [section(ranks, parts[ranks]) for ranks in sorted(parts)]
    if 2 in parts and draw(parts[2], folder):
        sections[1] += "\n\n![microseconds by size](all_reduce.png)"
    if network:
        sections.append(network_section(network))
        if draw_network(network, folder):
            sections[-1] += "\n\n![seconds by number of ranks](network.png)"
        sections.append("[The page on many hosts](../../docs/scale.md) simulates more of them.")
    (folder / README.name).write_text(head + MARKER + "\n" + "\n\n".join(sections) + "\n")


def section(ranks: int, part: Part) -> str:
    lines = [f"## {ranks} ranks on this machine", "", f"{part.conditions} Versions: {', '.join(part.versions)}."]
    if part.missing:
        lines.append(f"Left out: {'; '.join(part.missing)}.")
    for op, dtype in dict.fromkeys((op, dtype) for _, op, dtype, _ in part.times):
        sizes = part.sizes(op, dtype)
        lines += [
            "",
            f"**{op}, {dtype}**, microseconds, median of rounds",
            "",
            row("", map(size_text, sizes)),
            rule(sizes),
        ]
        for name, heading in HEADINGS.items():
            medians = [part.median(name, op, dtype, size) for size in sizes]
            if any(medians):
                lines.append(row(heading, [time_text(each) for each in medians]))
    return "\n".join(lines)


def draw(part: Part, folder: pathlib.Path) -> bool:
    """all_reduce.png beside this file, if there is matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, both = pyplot.subplots(1, 2, figsize=(13, 4.8), sharey=True)
    inside = ("tf_shm", "tf_tcp", "tensorflow", "horovod")
    outside = ("np_shm", "np_tcp", "gloo", "mpich", "openmpi")
    for axes, names, title in zip(both, (inside, outside), ("in a tf.function", "from arrays"), strict=True):
        for name in names:
            sizes = [s for s in part.sizes("all_reduce", "float32") if part.median(name, "all_reduce", "float32", s)]
            times = [part.median(name, "all_reduce", "float32", size) * 1e6 for size in sizes]
            axes.plot(sizes, times, "o-" if name in TRANSPORTS else "s--", label=HEADINGS[name])
        axes.set(xscale="log", yscale="log", xlabel="bytes", title=f"all_reduce of 2 ranks, {title}")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    both[0].set_ylabel("microseconds")
    figure.savefig(folder / "all_reduce.png", dpi=110, bbox_inches="tight")
    pyplot.close(figure)
    return True


def targets(parts: dict[int, Part], network: dict | None) -> str:
    """The issue's targets: what was wanted, what was measured."""
    lines = ["## Targets", "", "Ratios within one run: how many times as fast tfring is.", ""]
    lines += [row("", ["at least", "measured", ""]), rule("123")]

    def target(what: str, least: float, measured: float | None) -> None:
        said = ["not measured", ""]
        if measured is not None:
            said = [number(measured), "reached" if measured >= least else "**not reached**"]
        lines.append(row(what, [number(least), *said]))

    def compared(ranks, what, fast, slow, least, size, op="all_reduce"):
        if ranks in parts:
            ratio = parts[ranks].ratio((slow, op, "float32", size), (fast, op, "float32", size))
            target(f"{what}, as {HEADINGS[slow].removeprefix('limit: ')}", least, ratio)

    for slow, least in (("tensorflow", 25), ("horovod", 5), ("gloo", 4), ("mpich", 3)):
        compared(2, "64 MB, 2 ranks, shared memory, `tf.function`", "tf_shm", slow, least, 64 * M)
    for name in ("tf_shm", "tf_tcp"):
        if 2 in parts:
            cells = [(name, "all_reduce", dtype, 64 * M) for dtype in ("float32", "float16")]
            target(f"64 MB of float16 as of float32, 2 ranks, {TRANSPORTS[name]}", 1, parts[2].ratio(*cells))
    for slow, least in (("tensorflow", 8), ("horovod", 1.6), ("gloo", 1.2), ("sockets", 0.85)):
        compared(2, "64 MB, 2 ranks, TCP, `tf.function`", "tf_tcp", slow, least, 64 * M)
    for fast, least in (("np_shm", 3), ("np_tcp", 1.3)):
        for slow in ("gloo", "mpich"):
            compared(4, f"64 MB, 4 ranks, {TRANSPORTS[fast]}", fast, slow, least, 64 * M)
    for ranks in (2, 4):
        for size in (4, 4 * K):
            compared(ranks, f"{size_text(size)}, {ranks} ranks, from NumPy", "np_shm", "gloo", 3, size)
            compared(ranks, f"{size_text(size)}, {ranks} ranks, from NumPy", "np_shm", "mpich", 0.5, size)
    compared(4, "all_to_all of 1,024 rows of 64, 4 ranks", "np_shm", "mpich", 1, 256 * K, "all_to_all")
    for rate, size, placement, hosts, ranks, algorithm, seconds in (network or {}).get("shaped", ()):
        if (rate, hosts, algorithm) == (1e9, 4, "auto"):
            what = f"share of 2X(N-1)/(N B): {rate_text(rate)}, {hosts} hosts, {size_text(size)}, {placement}"
            target(what, 0.92, 2 * size * 8 * (ranks - 1) / ranks / rate / seconds)
    for algorithm, seconds in (network or {}).get("delayed", ()):
        if algorithm == "auto":
            target("1 kB, 8 hosts, 5 ms: three one-way delays as its time", 1, 1.5 * network["ping"] / seconds)
    return "\n".join(lines)


def network_section(network: dict) -> str:
    """Each way on each network, beside what the network itself takes."""
    lines = ["## Networks imitated", "", f"{network['conditions']}", ""]
    lines += [
        "Hosts are network namespaces on one bridge, both directions of their links shaped by `tc ... tbf`; a frame "
        "of 1,514 bytes carries 1,448 of data, so no program sees more than 95.6 % of B. N ranks on H hosts, X bytes, "
        "seconds. Two levels send 2X(H-1)/H through each host's link, a ring ordered by host 2X(N-1)/N, a server 2X "
        'for every rank elsewhere through its own. "auto" is what tfring chooses, two levels where '
        "a host has several ranks.",
        "",
    ]
    shaped: dict[tuple, dict[str, float]] = {}
    for rate, size, placement, num_hosts, ranks, algorithm, seconds in network["shaped"]:
        shaped.setdefault((rate, size, placement, num_hosts, ranks), {})[algorithm] = seconds
    columns = ["2X(H-1)/(H B)", "2X(N-1)/(N B)", *NETWORK_HEADINGS.values(), "2XN/B"]
    lines += [row("", columns), rule(columns)]
    for (rate, size, placement, num_hosts, ranks), seconds_of in shaped.items():
        buffer = 2 * size * 8 / rate
        across = buffer * (num_hosts - 1) / num_hosts
        cells = [across, buffer * (ranks - 1) / ranks, *map(seconds_of.get, NETWORK_HEADINGS), buffer * ranks]
        what = f"{rate_text(rate)}, {size_text(size)}, {num_hosts} hosts, {placement}"
        lines.append(row(what, ["" if cell is None else f"{cell:.2f}" for cell in cells]))
    lines += [
        "",
        "1 kB among 8 hosts behind a switch that holds every frame for 5 ms (delay.py; this kernel has no netem). A "
        f"datagram takes {network['ping'] * 500:.1f} ms one way. Milliseconds a call, one call after the other:",
        "",
    ]
    columns = [NETWORK_HEADINGS.get(algorithm, algorithm) for algorithm, _ in network["delayed"]]
    lines += [row("", columns), rule(columns)]
    lines.append(row("ms", [f"{seconds * 1e3:.1f}" for _, seconds in network["delayed"]]))
    lines.append(row("one-way delays", [f"{seconds / network['ping'] * 2:.1f}" for _, seconds in network["delayed"]]))
    return "\n".join(lines)


def rate_text(rate: float) -> str:
    return f"{rate / 1e9:g} Gbit/s" if rate >= 1e9 else f"{rate / 1e6:g} Mbit/s"


def row(first: str, cells) -> str:
    return f"| {first} | " + " | ".join(cells) + " |"


def rule(cells) -> str:
    return "|---" + "|---:" * len(list(cells)) + "|"


def size_text(size: int) -> str:
    for unit, suffix in ((K * M, "GB"), (M, "MB"), (K, "kB")):
        if size >= unit:
            return f"{size // unit} {suffix}"
    return f"{size} B"


def time_text(seconds: float | None) -> str:
    if seconds is None:
        return ""
    value = seconds * 1e6
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def number(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def draw_network(network: dict, folder: pathlib.Path) -> bool:
    """network.png beside this file, if there is matplotlib."""
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
    return True
