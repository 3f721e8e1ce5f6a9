"""From results.json to README.md: everything behind the marker there is written here."""

from __future__ import annotations

import pathlib
import statistics

import models

README = pathlib.Path(__file__).parent / "README.md"
MARKER = "<!-- From here on written by run.py. -->\n"
HEADINGS = {
    "plain": "Keras alone",
    "tfring": "tfring",
    "tensorflow": "TensorFlow's collectives",
    "horovod": "Horovod",
    "torch": "torch DDP on gloo",
}


class Part:
    """The times of one number of workers beside one."""

    def __init__(self, result: dict) -> None:
        self.conditions, self.versions, self.missing = (result[key] for key in ("conditions", "versions", "missing"))
        self.times = {tuple(cell): values for *cell, values in result["times"]}

    def seconds(self, *cell) -> float | None:
        values = self.times.get(cell)
        return statistics.median(value["seconds"] for value in values) if values else None

    def bytes(self, *cell) -> float | None:
        values = self.times.get(cell)
        return values[-1]["bytes"] if values else None

    def ratio(self, slow: tuple, fast: tuple) -> float | None:
        """How many times as fast: the median of the ratios within a round."""
        if slow not in self.times or fast not in self.times:
            return None
        pairs = zip(self.times[slow], self.times[fast], strict=True)
        return statistics.median(s["seconds"] / f["seconds"] for s, f in pairs)


def write(results: dict) -> None:
    head = README.read_text().partition(MARKER)[0]
    sections = [section(int(workers), Part(result)) for workers, result in results.items()]
    README.write_text(head + MARKER + "\n" + "\n\n".join(sections) + "\n")


def section(workers: int, part: Part) -> str:
    lines = [f"## {workers} workers beside one", "", f"{part.conditions} Versions: {'; '.join(part.versions)}."]
    if part.missing:
        lines.append(f"Left out: {'; '.join(part.missing)}.")
    lines += [
        "",
        f"Milliseconds a step (median of rounds) of one worker and of {workers}; the speed-up is the median of the "
        "ratios within a round.",
    ]
    names = [name for name in models.TASKS if any(cell[2] == name for cell in part.times)]
    for name in names:
        lines += ["", f"**{models.TASKS[name].title}**", ""]
        lines += [f"| | 1 worker | {workers} workers | speed-up | kB a step and worker |", "|---|---:|---:|---:|---:|"]
        for contestant, heading in HEADINGS.items():
            one, several = (contestant, 1, name), (contestant, workers, name)
            if part.seconds(*one) is None and part.seconds(*several) is None:
                continue
            if contestant == "tensorflow":
                one = ("tfring", 1, name)
            sent = part.bytes(*several)
            cells = [
                milliseconds(None if contestant == "tensorflow" else part.seconds(*one)),
                milliseconds(part.seconds(*several)),
                number(part.ratio(one, several)),
                "" if sent is None else f"{sent / 1e3:,.0f}",
            ]
            lines.append(f"| {heading} | " + " | ".join(cells) + " |")
    lines += ["", "tfring's rows a second over theirs, and one worker in the strategy over Keras alone:", ""]
    lines += [f"| | {' | '.join(h for n, h in HEADINGS.items() if n not in ('plain', 'tfring'))} | one worker |"]
    lines += ["|---|---:|---:|---:|---:|"]
    for name in names:
        peers = [n for n in HEADINGS if n not in ("plain", "tfring")]
        cells = [number(part.ratio((peer, workers, name), ("tfring", workers, name))) for peer in peers]
        cells.append(number(part.ratio(("plain", 1, name), ("tfring", 1, name))))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:,.1f}"


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
