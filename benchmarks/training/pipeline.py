"""Layers divided over the workers: the idle time of two stages by schedule, and the memory of stages."""

from __future__ import annotations

import contextlib
import pathlib
import sys

import contest

WORKER = pathlib.Path(__file__).parent / "worker.py"
STAGES = 2
# schedule, microbatches, whether the forward pass is computed anew
VARIANTS = (
    ("1f1b", 2, False),
    *((schedule, m, False) for m in (4, 8) for schedule in ("gpipe", "1f1b")),
    ("1f1b", 16, False),
    ("1f1b", 8, True),
)
MICROBATCHES = (1, 2, 4, 8, 16)
# The same behind the number of stages; one stage is the model itself.
MEMORY_VARIANTS = (
    (1, "1f1b", 8, False),
    *((stages, *each) for stages in (2, 4) for each in (("gpipe", 8, False), ("1f1b", 8, False), ("1f1b", 8, True))),
)


def measure(rounds: int) -> dict:
    """Seconds by rank, round by round, and bytes by stage.

    Returns:
      `microbatched`: of each number of microbatches, what all of a batch take on a worker that exchanges nothing;
      `times`: of each variant, a step; `memory`: of each variant, what steps take.
    """
    conditions = contest.conditions(realtime=False)
    whole: list[list] = [[] for _ in MICROBATCHES]
    times: list[list] = [[] for _ in VARIANTS]
    with started("microbatched", 1) as (alone,), started("piped", len(VARIANTS)) as running:
        questions = [
            *((found, alone, "measure_microbatches", m) for found, m in zip(whole, MICROBATCHES, strict=True)),
            *((*each, "measure_stages", *v) for *each, v in zip(times, running, VARIANTS, strict=True)),
        ]
        for round_number in range(rounds):
            for found, contestant, *question in questions if round_number % 2 == 0 else reversed(questions):
                found.append(contestant.ask(*question))
            print(f"pipeline, round {round_number + 1} of {rounds}", file=sys.stderr)
        versions = running[0].facts
    memory = []
    for stages, *variant in MEMORY_VARIANTS:
        with started("piped", 1, stages) as (contestant,):
            memory.append([stages, *variant, contestant.ask("memory_of_stages", *variant)])
        print(f"pipeline, memory of {stages} stages", file=sys.stderr)
    return {
        "conditions": conditions,
        "versions": versions,
        "microbatched": [list(pair) for pair in zip(MICROBATCHES, whole, strict=True)],
        "times": [[*variant, found] for variant, found in zip(VARIANTS, times, strict=True)],
        "memory": memory,
    }


@contextlib.contextmanager
def started(name: str, count: int, ranks: int = STAGES):
    """Several of a contestant, each with processes of its own."""
    with contest.started(WORKER, [(name, name, sys.executable, "tensorflow")] * count, ranks) as (running, _):
        yield running
