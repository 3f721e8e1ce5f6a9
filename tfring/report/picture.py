"""A picture of a few steps of the first ranks: what each rank does, and its collectives below."""

from __future__ import annotations

from tfring.report import timeline
from tfring.report.files import Rank, ReportError, Run

_COLORS = {
    "input": "tab:purple",
    "Python": "tab:brown",
    "dispatch": "tab:olive",
    "compute": "tab:green",
    "waiting": "tab:red",
    "server": "tab:orange",
    "moving": "tab:blue",
    "adding": "tab:cyan",
}
_TITLES = {"moving": "send, receive", "adding": "add", "waiting": "wait for another rank", "server": "server"}
_STEPS = 3
_MOST_RANKS = 8


def draw(run: Run, file: str) -> None:
    """Draws up to 3 steps from the middle of the first rank's longest loop, for up to 8 ranks.

    Raises:
      ReportError: If there are no steps, or matplotlib is missing.
    """
    try:
        import matplotlib
    except ImportError:
        raise ReportError("--plot needs matplotlib, which is not installed. Type:\n  pip install matplotlib") from None

    matplotlib.use("Agg")
    from matplotlib import patches, pyplot

    begin, end, title = _window(run.ranks[0])
    ranks = run.ranks[:_MOST_RANKS]
    rings = sorted({call.ring for rank in ranks for call in rank.calls if begin <= call.begin < end})
    lanes = [(rank, lane) for rank in ranks for lane in ("step", *rings)]
    figure, axes = pyplot.subplots(figsize=(11, 0.6 + 0.42 * len(lanes)))
    for row, (rank, lane) in enumerate(lanes):
        if lane == "step":
            spans = [span for each in timeline.steps(rank) for span in each.spans]
        else:
            spans = [span for call in rank.calls if call.ring == lane for span in timeline.spans_of(call)]
        for category, color in _COLORS.items():
            bars = [
                ((max(span.begin, begin) - begin) / 1e6, (min(span.end, end) - max(span.begin, begin)) / 1e6)
                for span in spans
                if span.category == category and span.begin < end and span.end > begin
            ]
            axes.broken_barh(bars, (-row - 0.4, 0.8), color=color, linewidth=0)
        if lane == "step" and row:
            axes.axhline(-row + 0.5, color="black", linewidth=0.6)
    axes.set_yticks([-row for row in range(len(lanes))])
    axes.set_yticklabels([f"rank {rank.rank}" if lane == "step" else lane for rank, lane in lanes])
    axes.set(xlim=(0, (end - begin) / 1e6), ylim=(-len(lanes) + 0.5, 0.5), xlabel="milliseconds", title=title)
    legend = [patches.Patch(color=color, label=_TITLES.get(name, name)) for name, color in _COLORS.items()]
    axes.legend(handles=legend, ncol=len(legend), loc="upper center", bbox_to_anchor=(0.5, -1.2 / (1 + len(lanes))))
    figure.savefig(file, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


def _window(rank: Rank) -> tuple[int, int, str]:
    loops: dict[int, list[timeline.StepOfRank]] = {}
    for each in timeline.steps(rank):
        if not each.step.built:
            loops.setdefault(each.step.loop, []).append(each)
    if not loops:
        raise ReportError("There are no steps to draw.")
    steps = max(loops.values(), key=len)
    first = max(0, len(steps) // 2 - 1)
    chosen = steps[first : first + _STEPS]
    kind = chosen[0].step.kind
    return chosen[0].step.begin, chosen[-1].until, f"{len(chosen)} {kind} step{'s' * (len(chosen) > 1)}"
