"""Trains the movie recommender with 1, 2 and 4 workers, prints a table, checks that the figures agree.

    python examples/compare_workers.py

Arguments it does not know go to movielens.py. Exit code 1 where a metric, in any epoch, differs by more than
1e-3.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys

EXAMPLE = pathlib.Path(__file__).with_name("movielens.py")
TOLERANCE = 1e-3


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4], metavar="N")
    parser.add_argument("--output-dir", type=pathlib.Path, default=pathlib.Path("results"))
    args, for_example = parser.parse_known_args()

    runs = [train(n, args.output_dir, for_example) for n in args.workers]
    print("\n" + table(runs))
    save_plot(runs, args.output_dir / "movielens_by_workers.png")
    difference = largest_difference(runs)
    agree = difference <= TOLERANCE
    print(f"\nlargest difference {difference:.1e}: {'within' if agree else 'MORE THAN'} {TOLERANCE:.0e}")
    return 0 if agree else 1


def train(num_workers: int, output_dir: pathlib.Path, for_example: list[str]) -> dict:
    """Runs the example and returns its figures."""
    output_dir.mkdir(parents=True, exist_ok=True)
    file = output_dir / f"movielens_{num_workers}_workers.json"
    command = [sys.executable, "-m", "tfring.launch", "-n", str(num_workers), str(EXAMPLE), *for_example]
    command += ["--output-dir", str(output_dir), "--json", str(file)]
    print(f"\n== workers: {num_workers}", flush=True)
    environ = {"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ}  # fewer notes of TensorFlow on its start
    code = subprocess.run(command, env=environ).returncode
    if code:
        sys.exit(code)
    return json.loads(file.read_text())


def table(runs: list[dict]) -> str:
    """The figures as Markdown, with the predictors that know less first."""
    rows = [
        ["", "RMSE", "NDCG@10", "seconds an epoch", "MB sent by each worker"],
        ["---", "---:", "---:", "---:", "---:"],
    ]
    for name, metrics in runs[0]["baselines"].items():
        rows.append([name, *shown(metrics), "", ""])
    for run in runs:
        name = f"{run['workers']} worker" + "s" * (run["workers"] > 1)
        seconds = f"{statistics.median(run['epoch_seconds']):.2f}"
        sent = run["bytes_sent"]
        megabytes = "not counted" if sent is None else f"{max(sent) / 1e6:.1f}"
        rows.append([name, *shown(run["metrics"]), seconds, megabytes])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def shown(metrics: dict[str, float]) -> list[str]:
    return [f"{metrics['rmse']:.4f}", f"{metrics['ndcg_at_10']:.4f}"]


def largest_difference(runs: list[dict]) -> float:
    """Over the final metrics and both learning curves, the largest distance between any two runs."""
    figures = [
        [*run["metrics"].values(), *run["history"]["train_rmse"], *run["history"]["held_out_rmse"]]
        for run in runs
    ]
    return max(max(values) - min(values) for values in zip(*figures, strict=True))


def save_plot(runs: list[dict], path: pathlib.Path) -> None:
    """Learning curves, which lie on one another, and what they cost."""
    try:
        import matplotlib
    except ImportError:
        print("\nno plot: matplotlib is missing (pip install matplotlib)")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (curves, traffic) = plt.subplots(1, 2, figsize=(10, 4), width_ratios=(2, 1), layout="constrained")
    for i, run in enumerate(runs):
        epochs = range(1, run["epochs"] + 1)
        width = 2 + 3 * (len(runs) - 1 - i)  # thinner on top of thicker
        label = f"workers: {run['workers']}"
        curves.plot(epochs, run["history"]["held_out_rmse"], linewidth=width, label=label)
    biases_only = runs[0]["baselines"]["biases only"]["rmse"]
    curves.axhline(biases_only, color="tab:gray", linestyle="--", label="biases only")
    curves.set(xlabel="epoch", ylabel="RMSE on held-out ratings", title="MovieLens-100K")
    curves.legend()
    names = [str(run["workers"]) for run in runs]
    traffic.bar(names, [max(run["bytes_sent"] or [0]) / 1e6 for run in runs], color="tab:blue")
    traffic.set(xlabel="workers", title="MB sent by each worker")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"\nplot: {path}")


if __name__ == "__main__":
    sys.exit(main())
