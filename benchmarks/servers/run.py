"""Ring, servers and delayed synchronization: with a slow worker on one host, and on slow links between namespaces.

    python benchmarks/servers/run.py [slow] [network] [--steps N] [--write]

`--write` puts the tables into README.md.
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
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests" / "cluster" / "engines")]

import contest  # noqa: E402
import namespaces  # noqa: E402

STEP_SECONDS, SLOWER, WORKERS = 0.1, 5.0, 3
REPLICAS = "servers, sync, replicas"
WAYS = {
    "ring": {"strategy": "ring"},
    "servers, sync": {"strategy": "servers", "options": {"update": "sync"}},
    "servers, sync, 1 backup worker": {"strategy": "servers", "options": {"backup_workers": 1}},
    "servers, async": {"strategy": "servers", "options": {"update": "async"}},
    REPLICAS: {"strategy": "servers", "options": {"replicas": 2}},
    "servers, async, staleness 4": {"strategy": "servers", "options": {"update": "async", "max_staleness": 4}},
}
DELAYED = {
    "accumulated, 4 batches": {"strategy": "ring", "accumulate": 4},
    "delayed, k=4": {"strategy": "delayed", "every": 4},
    "delayed, k=16": {"strategy": "delayed", "every": 16},
}
MODELS = {"tables": "a table of 6.4 MB", "dense": "two kernels, 4 MB"}
RATES = {"1 Gbit/s": 1_000_000_000, "100 Mbit/s": 100_000_000}
PORT = 12345


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "-1",
    }


def result(output: str) -> dict:
    return json.loads(re.findall(r"RESULT (.*)", output)[0])


def on_this_host(wanted: dict, servers: int) -> dict:
    command = [sys.executable, "-m", "tfring.launch", "-n", str(WORKERS)]
    command += ["--servers", str(servers)] if wanted["strategy"] == "servers" else []
    command += [str(HERE / "worker.py"), json.dumps(wanted)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return result(done.stdout)


def slow(steps: int) -> list[str]:
    """Rows a second with all workers alike, and with one of them 5 times slower."""
    lines = [
        f"{WORKERS} workers that take {STEP_SECONDS * 1e3:.0f} ms a batch of 64 rows, by sleeping, and one server; "
        "rows a second. The others' sum is what the workers that are not slow have when all are alike.",
        "",
        "| | all alike | one 5 times slower | of the others' sum | mean staleness | dropped gradients |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, way in WAYS.items():
        if name == REPLICAS:  # takes two servers
            continue
        wanted = {**way, "models": ["small"], "steps": steps, "step_seconds": STEP_SECONDS}
        alike, one_slow = (on_this_host({**wanted, "slow": factor}, 1)["small"] for factor in (1.0, SLOWER))
        rates = alike["rows_a_second"], one_slow["rows_a_second"]
        staleness = f"{one_slow['staleness']:.1f}" if "staleness" in one_slow else ""
        dropped = f"{one_slow['dropped_gradients']:.0f}" if "dropped_gradients" in one_slow else ""
        others = rates[0] * (WORKERS - 1) / WORKERS
        cells = (name, f"{rates[0]:.0f}", f"{rates[1]:.0f}", f"{rates[1] / others:.2f}", staleness, dropped)
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], file=sys.stderr)
    return lines


def over_links(wanted: dict, workers: int, servers: int, rate: int) -> dict:
    """On hosts of one process each, whose links take `rate` bits a second."""
    with namespaces.hosts(workers + servers) as hosts:
        for host in hosts:
            host.shape(rate)
        addresses = [f"{host.ipv4}:{PORT}" for host in hosts]
        cluster = {"worker": addresses[:workers], **({"ps": addresses[workers:]} if servers else {})}
        processes = []
        for number, host in enumerate(hosts):
            kind, index = ("worker", number) if number < workers else ("ps", number - workers)
            task = {"cluster": cluster, "task": {"type": kind, "index": index}}
            command = host.command(sys.executable, str(HERE / "worker.py"), json.dumps(wanted))
            environ = {
                **environment(),
                "TF_CONFIG": json.dumps(task),
                "TFRING_SECRET": "of this benchmark alone",
                "TF_NUM_INTRAOP_THREADS": "1",
                "TF_NUM_INTEROP_THREADS": "2",
            }
            processes.append(
                subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            )
        outputs = [process.communicate(timeout=600) for process in processes]
        assert all(process.returncode == 0 for process in processes), outputs
    return result(outputs[0][0])


def network(steps: int) -> list[str]:
    """Seconds of a step on slow links."""
    why_not = namespaces.why_not()
    if why_not:
        print(f"network: left out, {why_not}", file=sys.stderr)
        return []
    steps = -(-steps // 16) * 16  # windows are complete
    columns = [(kind, rate) for kind in MODELS for rate in RATES]
    heads = [f"{MODELS[kind]}, {rate}" for kind, rate in columns] + [f"MB sent, {name}" for name in MODELS.values()]
    lines = [
        "2 workers, each process on a host of its own: milliseconds a batch and worker, and MB that a worker sends for "
        "one.",
        "",
        f"| | {' | '.join(heads)} |",
        f"|---|{'---:|' * len(heads)}",
    ]
    for name, way, servers in (
        ("ring", WAYS["ring"], 0),
        *((name, way, 0) for name, way in DELAYED.items()),
        ("2 servers, sync", WAYS["servers, sync"], 2),
        ("2 servers, async", WAYS["servers, async"], 2),
        ("2 servers, sync, replicas", WAYS[REPLICAS], 2),
        ("1 server, sync", WAYS["servers, sync"], 1),
    ):
        wanted = {**way, "models": list(MODELS), "steps": steps}
        told = {rate: over_links(wanted, 2, servers, bits) for rate, bits in RATES.items()}
        cells = [name, *(f"{told[rate][kind]['seconds'] * 1e3 / steps:.1f}" for kind, rate in columns)]
        cells += [f"{told['1 Gbit/s'][kind]['bytes_a_batch'] / 1e6:.3f}" for kind in MODELS]
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], file=sys.stderr, flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=["slow", "network"])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    readme = HERE / "README.md"
    for part in arguments.parts:
        lines = {"slow": slow, "network": network}[part](arguments.steps)
        text = "\n".join([*lines, "", f"{contest.conditions(False)}"])
        print(text)
        if arguments.write and lines:
            mark = f"<!-- {part} -->"
            before, _, after = readme.read_text().partition(mark)
            readme.write_text(f"{before}{mark}\n{text}\n{mark}{after.partition(mark)[2]}")


if __name__ == "__main__":
    main()
