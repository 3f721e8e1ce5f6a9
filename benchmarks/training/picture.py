"""training.png beside this file: the speed-ups of all models."""

from __future__ import annotations

import pathlib

import models

COLOURS = {"tfring": "#1f6f8b", "sharded": "#7fb7c9", "tensorflow": "#d98c3f", "horovod": "#9a9a9a", "torch": "#c2c2c2"}


def draw(parts: dict, headings: dict[str, str], one_of: dict[str, str], folder: pathlib.Path) -> bool:
    """False where there is no matplotlib.

    Args:
      parts: by number of workers, see `tables.Part`.
      headings: what contestants are called.
      one_of: whose single worker a contestant is compared with, where it has none.
      folder: where the picture goes.
    """
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, every = pyplot.subplots(len(parts), figsize=(11, 3.2 * len(parts)), squeeze=False)
    for axes, (workers, part) in zip(every[:, 0], parts.items(), strict=True):
        names = [name for name in models.TASKS if ("tfring", workers, name) in part.times]
        for number, (contestant, colour) in enumerate(COLOURS.items()):
            one = one_of.get(contestant, contestant)
            ratios = [part.ratio((one, 1, name), (contestant, workers, name)) for name in names]
            places = [i + 0.16 * (number - 2) for i in range(len(names))]
            axes.bar(places, [ratio or 0 for ratio in ratios], 0.15, color=colour, label=headings[contestant])
        most = [part.ratio(("plain", 1, name), ("apart", workers, name)) for name in names]
        for i, ratio in enumerate(most):
            label = "workers that exchange nothing" if i == 0 else None
            if ratio:
                axes.hlines(ratio, i - 0.42, i + 0.42, color="black", linewidth=1, label=label)
        axes.set_xticks(range(len(names)), names)
        axes.set_ylabel(f"{workers} workers over 1")
        axes.spines[["top", "right"]].set_visible(False)
    every[0, 0].legend(fontsize=8, ncols=6, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    figure.tight_layout()
    figure.savefig(folder / "training.png", dpi=110)
    return True
