"""Tables divided over the workers: steps of a recommender beside the replicated form, and memory by size."""

from __future__ import annotations

import contextlib
import pathlib
import sys

import contest

WORKER = pathlib.Path(__file__).parent / "worker.py"
WORKERS = (2, 4)
CONTESTANTS = ("tfring", "divided", "divided_apart", "tensorflow")
ROWS = (1_000_000, 5_000_000, 20_000_000)  # of one table
MEMORY_WORKERS = 4


def measure(rounds: int) -> dict:
    """Returns, by number of workers and contestant, the answers of its slowest worker; of each table those of all."""
    conditions = contest.conditions(realtime=False)
    times: list[list] = []
    versions: list[str] = []
    for workers in WORKERS:
        with started(CONTESTANTS, workers) as running:
            versions = running[0].facts
            found = {contestant.name: [] for contestant in running}
            for round_number in range(rounds):
                for contestant in running:
                    answers = contestant.ask("measure", "tables")
                    slowest = max(answers, key=lambda answer: answer["seconds"])
                    found[contestant.name].append({name: slowest[name] for name in ("seconds", "bytes")})
                print(f"embeddings, {workers} workers, round {round_number + 1} of {rounds}", file=sys.stderr)
            times += [[workers, name, values] for name, values in found.items()]
    taken = []
    for rows in ROWS:
        with started(["divided"], MEMORY_WORKERS) as (contestant,):
            taken.append([rows, contestant.ask("memory_of", rows)])
        print(f"embeddings, a table of {rows:,} rows", file=sys.stderr)
    return {"conditions": conditions, "versions": versions, "times": times, "memory": taken}


@contextlib.contextmanager
def started(names, workers):
    wanted = [(name, name, sys.executable, "tensorflow") for name in names]
    with contest.started(WORKER, wanted, workers) as (running, _):
        yield running
