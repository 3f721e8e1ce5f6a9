"""Ranks of which one calls something else, also where it exchanges nothing with the others: an error on every rank.

    python tests/ring/fuzz_calls.py                                 # some seconds
    python tests/ring/fuzz_calls.py --rounds 200 --ranks 2 4 6 20   # the long run

In each round the ranks form a ring and draw a collective alike, except for one, which draws another call. Some that are
through with it compute on for a while; then all call a barrier. Each gets a MismatchError, from whichever of the two.
"""

from __future__ import annotations

import argparse
import collections
import pathlib
import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

import numpy as np
import ranks

COMPUTE_SECONDS = 0.3
_SIZES = (0, 10, 2000, 400_000)  # elements of float32: small ones, and more than a mailbox takes


class Call(NamedTuple):
    """Makes the calls of one rank."""

    text: str
    run: Callable[[Any], Any]


class Outcome(NamedTuple):
    """The end of a round on one rank: its error, and when its last call began and ended, in seconds of one clock."""

    did: str
    error: str
    began: float
    ended: float


def draw(rng: random.Random, rank: int, size: int, is_odd: bool) -> Call:
    """Draws a collective of all ranks; for the odd one perhaps a call of a few."""
    elements, root = rng.choice(_SIZES), rng.randrange(size)
    kinds = ["all_reduce", "reduce", "reduce_scatter", "broadcast", "barrier", "all_gather", "gather", "scatter"]
    kinds += ["all_to_all", "all_reduce_rows"]
    kind = rng.choice(kinds + ["send", "receive", "group", "group"] * is_odd)
    value = np.ones((elements // 8, 8), np.float32)
    rows_may_differ = kind in ("all_gather", "gather", "scatter", "all_to_all", "all_reduce_rows")
    text = kind if rows_may_differ else f"{kind} of {elements}"
    if kind == "barrier":
        return Call(kind, lambda ring: ring.barrier())
    if kind == "all_reduce_rows":
        return Call(text, lambda ring: ring.all_reduce_rows(value, np.arange(len(value))))
    if kind in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all"):
        return Call(text, lambda ring: getattr(ring, kind)(value))
    if kind in ("reduce", "broadcast", "gather"):
        return Call(f"{text}, root {root}", lambda ring: getattr(ring, kind)(value, root=root))
    if kind == "scatter":
        return Call(f"{text}, root {root}", lambda ring: ring.scatter(value, root=root))
    other = (rank + rng.randrange(1, size)) % size
    if kind == "send":
        return Call(f"{text} to {other}", lambda ring: ring.send(value, other))
    if kind == "receive":
        return Call(f"{text} from {other}", lambda ring: ring.receive(other, np.float32))
    members = sorted({rank, other, *rng.sample(range(size), rng.randrange(size))})
    return Call(f"{text}, ranks {members}", lambda ring: ring.group(members, "some").all_reduce(value))


def play(cluster: Any, seed: int, rounds: int) -> list[Outcome]:
    """One rank's part of some rounds."""
    outcomes = []
    for number in range(rounds):
        rng = random.Random(f"{seed} {number} {cluster.world_size}")
        odd = rng.randrange(cluster.world_size)
        transport = rng.choice(("shm", "tcp"))
        state = rng.getstate()
        usual = draw(rng, 0, cluster.world_size, False)
        rng.setstate(state)
        unusual = usual
        while unusual.text == usual.text:
            unusual = draw(rng, odd, cluster.world_size, True)
        mine = unusual if cluster.rank == odd else usual
        computes = random.Random(f"{seed} {number} {cluster.rank}").random() < 0.5
        ring = ranks.join(cluster, name=f"{cluster.ring} {number}", transport=transport)
        try:
            ring.barrier()
            error, began = "none", time.monotonic()
            try:
                mine.run(ring)
                if computes:
                    time.sleep(COMPUTE_SECONDS)
                began = time.monotonic()
                ring.barrier(name="the next")
            except Exception as caught:
                error = f"{type(caught).__name__}: {caught}"
            did = f"round {number} by {transport}: rank {cluster.rank} of {cluster.world_size} {mine.text}"
            outcomes.append(Outcome(did, error, began, time.monotonic()))
            # Whoever leaves early is missed before it is contradicted: another matter.
            time.sleep(0.05)
        finally:
            ring.close()
    return outcomes


def seconds_until_known(of_round: Sequence[Outcome]) -> float:
    """Returns how long after the last rank had entered its last call all ranks had their error."""
    return max(o.ended for o in of_round) - max(o.began for o in of_round)


def unexpected(outcomes: list[list[Outcome]], limit_seconds: float) -> list[str]:
    """Returns the rounds that did not end in a MismatchError on every rank in time, one text a round."""
    found = []
    for of_round in zip(*outcomes, strict=True):
        is_named = all(o.error.startswith("MismatchError") for o in of_round)
        if is_named and seconds_until_known(of_round) < limit_seconds:
            continue
        last = max(o.began for o in of_round)
        found.append("\n".join(f"{o.did}: {o.ended - last:.2f} s: {o.error}" for o in of_round))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=1.0, help="seconds until every rank knows")
    arguments = parser.parse_args()
    failed = 0
    with ranks.Group(max(arguments.ranks)) as group:
        for size in arguments.ranks:
            group.start(size, play, arguments.seed, arguments.rounds)
            outcomes = group.outcomes(30 * arguments.rounds)
            for rank, outcome in enumerate(outcomes):
                if isinstance(outcome, ranks.Failed):
                    print(f"rank {rank}: {outcome.trace or outcome}")
                    return 1
            found = unexpected(outcomes, arguments.limit)
            failed += len(found)
            for text in found:
                print(text, end="\n\n")
            seconds = sorted(map(seconds_until_known, zip(*outcomes, strict=True)))
            kinds = collections.Counter(o.error.split(":")[0] for rank in outcomes for o in rank)
            print(
                f"{size} ranks, {arguments.rounds} rounds, {len(found)} unexpected, errors {dict(kinds)}; all "
                f"know after {seconds[len(seconds) // 2]:.2f} s (median), {seconds[-1]:.2f} s (most)"
            )
    return 1 if failed else 0


if __name__ == "__main__":
    import fuzz_calls  # by the name under which ranks find `play`

    sys.exit(fuzz_calls.main())
