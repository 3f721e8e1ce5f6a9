"""Training with one worker and with several, beside the peers. Makes results.json, README.md and figures.md.

    python benchmarks/training/run.py                         # 1 and 2 workers, and 4; twenty minutes on two cores
    python benchmarks/training/run.py --workers 2 --rounds 5
    python benchmarks/training/run.py --workers "" --network  # large gradients between hosts that are namespaces; root
    python benchmarks/training/run.py --workers "" --threads  # workers that are not bound, by their numbers of threads
    python benchmarks/training/run.py --workers "" --embeddings  # tables divided over the workers
    python benchmarks/training/run.py --workers "" --pipeline  # layers divided over the workers
    python benchmarks/training/run.py --workers "" --write    # the pages again, from results.json

Without --write all goes into a new folder. Every worker has one core, so that a second one could at most double the
rows a second. The global batch is the same with any number. Each contestant has processes of its own that live through
the run and sleep while others are measured; a round visits each with every model. At no real-time priority: there the
threads of a process do not take turns.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import statistics
import sys
from collections.abc import Iterator

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import contest  # noqa: E402
import embeddings  # noqa: E402
import models  # noqa: E402
import network  # noqa: E402
import pipeline  # noqa: E402
import tables  # noqa: E402
import threads  # noqa: E402

RESULTS = "results.json"
MODULES = {"horovod": "horovod.tensorflow", "torch": "torch"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", default="2,4", help="numbers of workers, each beside one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", default=",".join(models.TASKS))
    parser.add_argument("--contestants", default=",".join(tables.HEADINGS))
    parser.add_argument("--peers-python", default=sys.executable, help="has torch")
    parser.add_argument("--horovod-python", default=str(contest.HOROVOD_PYTHON))
    parser.add_argument("--network", action="store_true", help="large gradients between imitated hosts, too")
    parser.add_argument("--threads", action="store_true", help="the launcher's shares of threads and others, too")
    parser.add_argument("--embeddings", action="store_true", help="tables divided over the workers, too")
    parser.add_argument("--pipeline", action="store_true", help="layers divided over the workers, too")
    contest.add_write(parser)
    arguments = parser.parse_args()
    folder = contest.folder_of_results(arguments, HERE)
    file = folder / RESULTS
    results = json.loads(file.read_text())
    for workers in filter(None, arguments.workers.split(",")):
        for so_far in compare(int(workers), arguments):
            results[workers] = so_far
            file.write_text(json.dumps(results, indent=0) + "\n")
    if arguments.network:
        results["network"] = network.measure(arguments.rounds) or results.get("network")
        file.write_text(json.dumps(results, indent=0) + "\n")
    for name, part in (("threads", threads), ("embeddings", embeddings), ("pipeline", pipeline)):
        if getattr(arguments, name):
            results[name] = part.measure(arguments.rounds)
            file.write_text(json.dumps(results, indent=0) + "\n")
    tables.write(results, folder)


def compare(workers: int, arguments) -> Iterator[dict]:
    """Each contestant with one worker and with several: after each round the times so far, round by round."""
    pythons = {"horovod": arguments.horovod_python, "old": arguments.horovod_python, "torch": arguments.peers_python}
    wanted = [
        (name, tables.HEADINGS[name], pythons.get(name, sys.executable), MODULES.get(name, "tensorflow"))
        for name in arguments.contestants.split(",")
    ]
    conditions = contest.conditions(realtime=False)
    names = arguments.models.split(",")
    times: dict[tuple, list[dict]] = {}
    with contextlib.ExitStack() as stack:
        running = []
        for ranks in (1, workers):
            mine = [each for each in wanted if each[0] not in (tables.OF_ONE if ranks == 1 else {"plain"})]
            started = contest.started(HERE / "worker.py", mine, ranks)
            contestants, missing = stack.enter_context(started)
            running += [(ranks, contestant) for contestant in contestants]
        versions = sorted({fact for _, contestant in running for fact in contestant.facts})
        for round_number in range(arguments.rounds):
            for name in names:
                for ranks, contestant in running:
                    answers = contestant.ask("measure", name)
                    if all(isinstance(answer, dict) for answer in answers):
                        slowest = {**max(answers, key=lambda answer: answer["seconds"])}
                        of_all = zip(*(answer["steps"] for answer in answers), strict=True)
                        slowest["in_step"] = statistics.median(map(max, of_all))
                        del slowest["steps"]
                        times.setdefault((contestant.name, ranks, name), []).append(slowest)
            print(f"{workers} workers, round {round_number + 1} of {arguments.rounds}", file=sys.stderr)
            yield {
                "conditions": conditions,
                "versions": versions,
                "missing": missing,
                "times": [[*cell, values] for cell, values in times.items()],
            }


if __name__ == "__main__":
    main()
