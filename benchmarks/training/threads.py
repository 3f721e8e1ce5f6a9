"""Workers that share a host's cores, by the threads that each has: are the launcher's shares the right ones?"""

from __future__ import annotations

import contextlib
import os
import pathlib
import sys

import contest

from tfring.cpus import available_cpus, thread_variables

WORKER = pathlib.Path(__file__).parent / "worker.py"
WORKERS = (1, 2, 4)
MODELS = ("convolutions", "dense", "jpeg", "dlrm")


def settings(workers: int) -> dict[str, dict[str, str]]:
    """Variables of the environment of each worker, by what they are called."""
    cores = str(available_cpus())
    share = thread_variables(workers, int(cores), {})

    def threads(intra: str, inter: str) -> dict[str, str]:
        return {"TF_NUM_INTRAOP_THREADS": intra, "TF_NUM_INTEROP_THREADS": inter, "OMP_NUM_THREADS": intra}

    return {
        "as `tfring launch`": share,
        "TensorFlow's defaults": {name: "" for name in share},
        "one inter-op": threads(share["TF_NUM_INTRAOP_THREADS"], "1"),
        "all cores inter-op": threads(share["TF_NUM_INTRAOP_THREADS"], str(2 * int(cores))),
        "as launched, tf.data the share": {**share, "BENCHMARK_DATA_THREADS": share["TF_NUM_INTRAOP_THREADS"]},
    }


def measure(rounds: int) -> dict:
    """Seconds of the median step, round by round, of each number of workers, setting and model."""
    conditions = contest.conditions(realtime=False)
    times: list[list] = []
    versions: list[str] = []
    for workers in WORKERS:
        with contextlib.ExitStack() as stack:
            running = []
            for title, variables in settings(workers).items():
                wanted = [("tfring", "tfring", sys.executable, "tensorflow")]
                with _environment({"BENCHMARK_UNBOUND": "1", **variables}):
                    (contestant,), _ = stack.enter_context(contest.started(WORKER, wanted, workers))
                running.append((title, contestant))
            versions = running[0][1].facts
            cells = {(title, name): [] for title, _ in running for name in MODELS}
            for round_number in range(rounds):
                for name in MODELS:
                    for title, contestant in running:
                        answers = contestant.ask("measure", name)
                        cells[title, name].append(max(answer["seconds"] for answer in answers))
                print(f"threads, {workers} workers, round {round_number + 1} of {rounds}", file=sys.stderr)
            times += [[workers, *cell, values] for cell, values in cells.items()]
    return {"conditions": conditions, "versions": versions, "times": times}


@contextlib.contextmanager
def _environment(variables: dict[str, str]):
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
