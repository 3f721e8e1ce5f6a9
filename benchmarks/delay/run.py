"""Quality of ring, servers and delayed synchronization after as many epochs: MovieLens-100K and digits.

    python benchmarks/delay/run.py [quality] [links] [--only WORDS] [--write]

`--write` puts the curves into curves.json and *.png, and the tables into README.md. `--only` trains the ways whose name
begins so, and takes the others from curves.json. `links` is MovieLens on links of 100 Mbit/s between network
namespaces, as root.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples"), str(ROOT / "tests" / "cluster" / "engines")]

import contest  # noqa: E402
import movielens_data  # noqa: E402
import namespaces  # noqa: E402

WORKERS = 4
EPOCHS = {"movielens": 6, "digits": 12}
NESTEROV = {"learning_rate": 0.7, "momentum": 0.9, "nesterov": True}  # of DiLoCo
CLIPPED = {**NESTEROV, "global_clipnorm": 0.5}
OUTER = {
    "Nesterov 0.5": {"learning_rate": 1.0, "momentum": 0.5, "nesterov": True},
    "Nesterov 0.5, rate 0.5": {"learning_rate": 0.5, "momentum": 0.5, "nesterov": True},
    "Nesterov 0.9, rate 0.1": {"learning_rate": 0.1, "momentum": 0.9, "nesterov": True},
}


def delayed_ways() -> dict[str, dict]:
    ways: dict[str, dict] = {"ring": {}}
    for compression in ("bfloat16", "float16"):
        ways[f"ring, {compression}"] = {"compression": compression}
    for every in (1, 4, 16):
        ways[f"k={every}, averaging"] = {"every": every}
        ways[f"k={every}, Nesterov 0.9"] = {"every": every, "outer": NESTEROV}
        if every > 1:
            ways[f"k={every}, Nesterov 0.9, clipped"] = {"every": every, "outer": CLIPPED}
    ways["k=16, averaging, slots averaged"] = {"every": 16, "local_momentum": "average"}
    ways["k=8, averaging"] = {"every": 8}
    ways["k=8, Nesterov 0.5"] = {"every": 8, "outer": OUTER["Nesterov 0.5"]}
    ways["k=4, Nesterov 0.5, rate 0.5"] = {"every": 4, "outer": OUTER["Nesterov 0.5, rate 0.5"]}
    ways.update((f"k=16, {name}", {"every": 16, "outer": outer}) for name, outer in OUTER.items())
    ways.update((f"tables by diversity, k={every}", {"every": every, "tables": "diversity"}) for every in (4, 8, 16))
    return ways


SERVERS: dict[str, dict] = {
    "servers, sync": {"servers": {"update": "sync"}},
    **{
        f"async, staleness {bound}": {"servers": {"update": "async", "max_staleness": bound}}
        for bound in (0, 2, 8, None)
    },
    "async, staleness None, one slow": {"servers": {"update": "async"}, "slow": True},
}


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "-1",
        "TFRING_SEED": "1",
    }


def results_in(output: str) -> list[dict]:
    return [json.loads(line) for line in re.findall(r"RESULT (.*)", output)]


def launch(ways: dict[str, dict], servers: int) -> list[dict]:
    command = [sys.executable, "-m", "tfring.launch", "-n", str(WORKERS)]
    command += ["--servers", str(servers)] if servers else []
    command += [str(HERE / "train.py"), json.dumps({"ways": ways, "epochs": EPOCHS})]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return results_in(done.stdout)


def over_links(rate: int, command, threads: int) -> list[dict]:
    """Returns what rank 0 prints, of two processes on hosts whose links take `rate` bits a second.

    `command(rank)` returns a process's script and arguments.
    """
    with namespaces.hosts(2) as hosts:
        for host in hosts:
            host.shape(rate)
        processes = []
        for number, host in enumerate(hosts):
            workers = [f"{each.ipv4}:12345" for each in hosts]
            task = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": number}}
            environ = {
                **environment(),
                "TF_CONFIG": json.dumps(task),
                "TFRING_SECRET": "of this benchmark alone",
                "TF_NUM_INTRAOP_THREADS": "1",
                "TF_NUM_INTEROP_THREADS": str(threads),
            }
            full = host.command(sys.executable, *command(number))
            processes.append(
                subprocess.Popen(full, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            )
        outputs = [process.communicate(timeout=900) for process in processes]
        assert all(process.returncode == 0 for process in processes), outputs
    return results_in(outputs[0][0])


def links() -> list[str]:
    """Rows of MovieLens a second, on two hosts; on links that hardly count, too: no delay makes more of them."""
    slow = {"ring": {}, **{f"k={every}": {"every": every} for every in (4, 8, 16)}}
    slow["k=8, tables by diversity"] = {"every": 8, "tables": "diversity"}
    lines = ["2 workers on links of 100 Mbit/s, the fastest of 4 epochs.", ""]
    lines += ["| | rows a second | over the ring | kB a batch | RMSE |", "|---|---:|---:|---:|---:|"]
    movielens_data.fetch()  # from within the namespaces nothing is reached
    base = None
    for ways, bits in ((slow, 100_000_000), ({"ring, 10 Gbit/s": {}, "k=8, 10 Gbit/s": {"every": 8}}, 10_000_000_000)):
        asked = json.dumps({"ways": ways, "epochs": {"movielens": 4}})
        for told in over_links(bits, lambda _, asked=asked: [str(HERE / "train.py"), asked], 2):
            rate = told["num_rows"] / min(told["epoch_seconds"])
            base = base or rate
            cells = [told["way"], f"{rate:.0f}", f"{rate / base:.2f}", f"{told['bytes_a_step'] / 1e3:.1f}"]
            lines.append(f"| {' | '.join([*cells, format(told['curve'][-1], '.4f')])} |")
    return lines


def quality(write: bool, only: str) -> list[str]:
    """Curves of every way, which are kept as they come."""
    results: list[dict] = []
    if only:
        results = [told for told in json.loads((HERE / "curves.json").read_text()) if not told["way"].startswith(only)]
    of_delay = [(way, settings) for way, settings in delayed_ways().items() if way.startswith(only)]
    launches = [(dict(of_delay[begin : begin + 6]), 0) for begin in range(0, len(of_delay), 6)]
    launches += [({way: settings}, 1) for way, settings in SERVERS.items() if way.startswith(only)]
    order = [*delayed_ways(), *SERVERS]
    for ways, servers in launches:
        results = sorted(results + launch(ways, servers), key=lambda told: order.index(told["way"]))
        print("\n".join(table(results)[4:]), file=sys.stderr, flush=True)
        if write:
            (HERE / "curves.json").write_text(json.dumps(results, indent=1) + "\n")
    if write:
        plot(results)
    return table(results)


def table(results: list[dict]) -> list[str]:
    of = {(told["way"], told["data"]): told for told in results}
    lines = [
        f"{WORKERS} workers, {EPOCHS['movielens']} epochs of MovieLens-100K (AdamW 0.002, batches of 1024 rows) and "
        f"{EPOCHS['digits']} of digits (SGD 0.02, momentum 0.9, batches of 64); asynchronous workers take batches of a "
        "quarter of that, each its own. Held-out rows; kB that rank 0 sends a batch.",
        "",
        "| | RMSE, last | RMSE, best | kB | accuracy, last | accuracy, best | kB | staleness |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for way in dict.fromkeys(told["way"] for told in results):
        ratings, images = of[way, "movielens"], of[way, "digits"]
        sent = [f"{told['bytes_a_step'] / 1e3:.1f}" for told in (ratings, images)]
        cells = [way, f"{ratings['curve'][-1]:.4f}", f"{min(ratings['curve']):.4f}", sent[0]]
        cells += [f"{images['curve'][-1]:.3f}", f"{max(images['curve']):.3f}", sent[1]]
        cells.append(f"{ratings['staleness']:.1f}" if "staleness" in ratings else "")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def plot(results: list[dict]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    labels = {"movielens": "RMSE of held-out ratings", "digits": "accuracy on held-out images"}
    for data, label in labels.items():
        figure, axes = pyplot.subplots(1, 2, figsize=(12, 5.5), layout="constrained", sharey=True)
        for each in axes:
            each.set_prop_cycle(color=pyplot.get_cmap("tab20").colors)
        for told in (each for each in results if each["data"] == data):
            is_servers = told["way"].startswith(("servers", "async"))
            shown = axes if told["way"] == "ring" else [axes[int(is_servers)]]
            style = dict(color="black", linewidth=2) if told["way"] == "ring" else dict(linewidth=1)
            for each in shown:
                each.plot(range(1, len(told["curve"]) + 1), told["curve"], marker=".", label=told["way"], **style)
        ring = next(t["curve"] for t in results if t["data"] == data and t["way"] == "ring")
        worst = min(ring) - 0.15 if data == "digits" else max(ring) + 0.05
        for each, title in zip(axes, ("delayed synchronization", "parameter servers"), strict=True):
            each.set(xlabel="epoch", ylabel=label, title=title)
            each.set_ylim(*((worst, 1.0) if data == "digits" else (min(ring) - 0.02, worst)))
            each.grid(alpha=0.3)
            each.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncol=3)
        figure.savefig(HERE / f"{data}.png", dpi=110)
        pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=["quality", "links"])
    parser.add_argument("--only", default="")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    readme = HERE / "README.md"
    for part in arguments.parts:
        why_not = None if part == "quality" else namespaces.why_not()
        if why_not:
            print(f"{part}: left out, {why_not}", file=sys.stderr)
            continue
        conditions = contest.conditions(False)
        lines = quality(arguments.write, arguments.only) if part == "quality" else links()
        text = "\n".join([*lines, "", conditions])
        print(text)
        if arguments.write and lines:
            mark = f"<!-- {part} -->"
            before, _, after = readme.read_text().partition(mark)
            readme.write_text(f"{before}{mark}\n{text}\n{mark}{after.partition(mark)[2]}")


if __name__ == "__main__":
    main()
