"""Time of a step on slow links: ring, servers and delayed synchronization, with 2 to 6 workers and 1 to 4 servers.

    python benchmarks/servers/links.py [--write]     # --write: links.json, links.png and the tables of README.md

Each process has a host of its own, a network namespace, whose link takes so many bits a second in each direction; the
delay is that of delay.py. A job trains on all four networks in turn.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import subprocess
import sys
from collections.abc import Collection

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "collectives")]

import contest  # noqa: E402
from delay import delayed  # noqa: E402
from run import PORT, environment, namespaces  # noqa: E402

WORKERS, SERVERS = (2, 4, 6), (1, 2, 4)
NETWORKS = {  # bits a second, seconds of delay each way
    "1 Gbit/s": (1_000_000_000, 0.0),
    "100 Mbit/s": (100_000_000, 0.0),
    "1 Gbit/s, 5 ms": (1_000_000_000, 0.005),
    "100 Mbit/s, 5 ms": (100_000_000, 0.005),
}
# Behind the switch, a Python program that takes some 20 microseconds a frame; connections made before keep to 1500.
MTU = 16000
SECONDS, MOST_STEPS, END_SECONDS = 5.0, 32, 120  # of a measurement; of the end
WAYS: dict[str, tuple[dict, int]] = {
    "ring": ({"strategy": "ring"}, 0),
    "delayed, k=4": ({"strategy": "delayed", "every": 4}, 0),
    "delayed, k=16": ({"strategy": "delayed", "every": 16}, 0),
    **{
        f"{servers} server{'s'[: servers - 1]}, {update}": (
            {"strategy": "servers", "options": {"update": update}},
            servers,
        )
        for update in ("sync", "async")
        for servers in SERVERS
    },
}
WEIGHTS_BYTES = 4 * (8 * 1000 + 1000 * 1000 + 1000 + 1000 + 1000 + 1)  # of worker.py's "dense"


def formula(way: str, workers: int, rate: float) -> float:
    """Returns the seconds in which a step's bytes pass a link: of a worker in a ring, of a server."""
    wanted, servers = WAYS[way]
    bits = 8 * WEIGHTS_BYTES
    if servers:
        return 2 * bits * workers / servers / rate
    return 2 * bits * (workers - 1) / workers / rate / wanted.get("every", 1)


def measure(way: str, workers: int, networks: Collection[str]) -> dict[str, float]:
    """Returns the seconds of a step on each of these networks."""
    wanted, servers = WAYS[way]
    with namespaces.hosts(workers + servers) as hosts, contextlib.ExitStack() as stack:
        addresses = [f"{host.ipv4}:{PORT}" for host in hosts]
        cluster = {"worker": addresses[:workers], **({"ps": addresses[workers:]} if servers else {})}
        processes = []
        for number, host in enumerate(hosts):
            kind, index = ("worker", number) if number < workers else ("ps", number - workers)
            environ = {
                **environment(),
                "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}}),
                "TFRING_SECRET": "of this benchmark alone",
                "TF_NUM_INTRAOP_THREADS": "1",
                "TF_NUM_INTEROP_THREADS": "2",
            }
            command = host.command(sys.executable, str(HERE / "worker.py"), json.dumps({**wanted, "models": ["dense"]}))
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            process = subprocess.Popen(command, env=environ, text=True, **pipes)
            stack.callback(process.kill)
            processes.append(process)
        training = processes[:workers]

        def steps(number: int) -> float:
            for process in training:
                print(number, file=process.stdin, flush=True)
            told = [json.loads(process.stdout.readline().removeprefix("RESULT ")) for process in training]
            return max(each["seconds"] for each in told) / number

        steps(wanted.get("every", 1))  # traces
        found, switch = {}, None
        for network, (rate, seconds) in NETWORKS.items():
            if network not in networks:
                continue
            if seconds and switch is None:
                switch = stack.enter_context(delayed(hosts, seconds, rate, MTU))
            elif seconds:
                switch(seconds, rate)
            else:
                for host in hosts:
                    host.shape(rate)
            every = wanted.get("every", 1)
            number = min(MOST_STEPS, max(4, int(SECONDS / formula(way, workers, rate))))
            found[network] = steps(-(-number // every) * every)
        for process in training:
            process.stdin.close()
        for process in processes:
            assert process.wait(END_SECONDS) == 0, process.args
    return found


def tables(found: dict) -> str:
    lines = [
        f"Two kernels, {WEIGHTS_BYTES / 1e6:.1f} MB; a batch of 64 rows a worker. Milliseconds a batch and worker, and "
        "beside them those in which the bytes pass a link, by the formulas: 2X(N-1)/(N B) in a ring, a kth of it with "
        "windows of k steps, 2XN/(S B) with S servers. All processes share two cores."
    ]
    for network, (rate, _) in NETWORKS.items():
        heads = [f"{workers} workers" for workers in WORKERS]
        lines += ["", f"| {network} | {' | '.join(heads)} |", f"|---|{'---:|' * len(heads)}"]
        for way in WAYS:
            cells = []
            for workers in WORKERS:
                took = found["steps"][way][str(workers)][network] * 1e3
                cells.append(f"{took:.0f} ({formula(way, workers, rate) * 1e3:.0f})")
            lines.append(f"| {way} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(found: dict, path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, rooms = pyplot.subplots(2, 2, figsize=(11, 8), sharex=True)
    for axes, (network, (rate, _)) in zip(rooms.flat, NETWORKS.items(), strict=True):
        for number, way in enumerate(WAYS):
            color, is_async = f"C{number if number < 6 else number - 3}", way.endswith("async")
            points = [found["steps"][way][str(workers)][network] for workers in WORKERS]
            style = {"marker": "x" if is_async else "o", "linestyle": "", "color": color}
            axes.plot(WORKERS, points, label=way, **style)
            if not is_async:
                finely = [2 + step / 10 for step in range(41)]
                axes.plot(finely, [formula(way, workers, rate) for workers in finely], color=color, linewidth=1)
        axes.set(title=network, yscale="log", xticks=WORKERS, xlabel="workers", ylabel="seconds a step")
        axes.grid(alpha=0.3)
    rooms[0, 1].legend(fontsize=8, bbox_to_anchor=(1.02, 1), loc="upper left", title="lines: the formulas")
    figure.savefig(path, dpi=110, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="links.json, links.png and the tables of README.md")
    parser.add_argument("--only", default="", help="ways that hold this; for the others stands what links.json holds")
    parser.add_argument("--network", choices=NETWORKS, help="this alone; for the others stands what links.json holds")
    parser.add_argument("--redraw", action="store_true", help="measures nothing: what links.json holds")
    arguments = parser.parse_args()
    if why_not := namespaces.why_not():
        sys.exit(f"links.py needs network namespaces: {why_not}")
    file = HERE / "links.json"
    is_part = arguments.redraw or arguments.only or arguments.network
    found = json.loads(file.read_text()) if is_part else {"steps": {}}
    if not arguments.redraw:
        found["conditions"] = f"{contest.conditions(False)}"
    for way in WAYS if not arguments.redraw else ():
        for workers in WORKERS if arguments.only in way else ():
            took = measure(way, workers, [arguments.network] if arguments.network else NETWORKS)
            found["steps"].setdefault(way, {}).setdefault(str(workers), {}).update(took)
            print(way, workers, took, file=sys.stderr, flush=True)
            if arguments.write:
                file.write_text(json.dumps(found, indent=1) + "\n")
    text = f"{tables(found)}\n\n{found['conditions']}"
    print(text)
    if arguments.write:
        draw(found, HERE / "links.png")
        readme, mark = HERE / "README.md", "<!-- links -->"
        before, _, after = readme.read_text().partition(mark)
        readme.write_text(f"{before}{mark}\n{text}\n{mark}{after.partition(mark)[2]}")


if __name__ == "__main__":
    main()
