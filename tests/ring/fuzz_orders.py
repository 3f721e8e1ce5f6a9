"""Random programs whose order of collectives graphs or threads leave open: right, or an error, never a wrong number.

    python tests/ring/fuzz_orders.py                            # a minute
    python tests/ring/fuzz_orders.py --rounds 100 --ranks 2 3 4

Graphs: the ranks differentiate one random program with collectives, in branches and loops; what lies between them
differs from rank to rank. Gradients are those of one process that multiplies where the ranks sum.
Threads: each calls collectives of a communicator of its own, in an order of its own; or all those of one, under names
of their own, which is a MismatchError wherever ranks pair two.
"""

from __future__ import annotations

import argparse
import pathlib
import random
import sys
import threading
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

import numpy as np
import ranks

from tfring.errors import MismatchError

NUM_WEIGHTS = 3
CALLS = 12  # of a thread


def losses(rng: random.Random, size: int, ring: Any, unequal: random.Random) -> Any:
    """Returns a function of weights: a random program, over the ring or, where it is None, in one process.

    It calls no `tf.function`: the order of its gradient and of others under one tape is the tape's (collectives.md).
    """
    import tensorflow as tf

    from tfring.ring import ops

    def longer(x: Any) -> Any:
        for _ in range(unequal.randrange(4)):
            x = x * 1.0
        return x

    def collective(kind: str, x: Any) -> Any:
        """Returns `size` times x, x of any rank being the same."""
        if ring is None:
            return size * x
        if kind == "all_reduce":
            return ops.all_reduce(ring, x)
        if kind == "all_gather":
            return tf.reduce_sum(tf.reshape(ops.all_gather(ring, x), [size, -1]), 0)
        if kind == "gradients of two":
            return sum(ops.all_reduce(ring, [longer(x / 2), longer(x / 2)]))
        return ops.all_gather(ring, ops.reduce_scatter(ring, x))

    kinds = ["all_reduce", "all_gather", "gradients of two", "reduce_scatter"]
    plan = []
    for i in range(rng.randrange(2, 7)):
        sources = rng.sample(range(NUM_WEIGHTS + i), rng.randrange(1, 3))
        plan.append((rng.choice(kinds), rng.choice(["plain", "plain", "cond", "loop"]), sources))
    factors = [rng.choice([0.0, 1.0, 10.0]) for _ in plan]

    def program(weights: Any) -> Any:
        results = list(weights)
        for kind, where, sources in plan:
            x = longer(tf.tanh(tf.add_n([results[s] for s in sources])))
            if where == "cond":
                y = tf.cond(tf.reduce_sum(x) < 1e9, lambda x=x, k=kind: collective(k, x), lambda x=x: x)
            elif where == "loop":
                _, y = tf.while_loop(
                    lambda i, y: i < 2,
                    lambda i, y, k=kind: (i + 1, tf.ensure_shape(collective(k, tf.tanh(y)), [4])),
                    (tf.constant(0), x),
                )
            else:
                y = collective(kind, x)
            results.append(longer(tf.ensure_shape(y, [4])))
        return tf.add_n([factor * tf.reduce_sum(y) for factor, y in zip(factors, results[NUM_WEIGHTS:], strict=True)])

    return program


def play_graphs(cluster: Any, seed: int, rounds: int) -> list[str]:
    """Returns the rounds whose gradients are wrong on this rank."""
    import tensorflow as tf

    wrong = []
    size = cluster.world_size
    with ranks.join(cluster, name=f"{cluster.ring} graphs") as ring:
        weights = [tf.Variable(np.linspace(-1, i, 4), dtype=tf.float64) for i in range(NUM_WEIGHTS)]
        for number in range(rounds):
            found = []
            for where in (ring, None):
                rng = random.Random(f"{seed} {number} {size}")
                in_function = rng.random() < 0.5
                program = losses(rng, size, where, random.Random(f"{number} {cluster.rank}"))

                def gradients(program: Any = program) -> Any:
                    with tf.GradientTape() as tape:
                        loss = program(weights)
                    return tape.gradient(loss, weights, unconnected_gradients="zero")

                run = tf.function(gradients, autograph=False) if in_function else gradients
                found.append([each.numpy() for each in run()])
            for got, right in zip(*found, strict=True):
                if not np.allclose(got, right, rtol=1e-9):
                    wrong.append(f"round {number}, in_function={in_function}, rank {cluster.rank}: {got} for {right}")
    return wrong


def play_threads(cluster: Any, seed: int, rounds: int) -> list[str]:
    """Returns what is wrong of some rounds on this rank: numbers, or errors that are not called for."""
    wrong: list[str] = []
    for number in range(rounds):
        rng = random.Random(f"{seed} {number}")
        num_threads, shared = rng.randrange(2, 4), rng.random() < 0.5
        names = [f"{cluster.ring} {number} {0 if shared else t}" for t in range(num_threads)]
        rings = {name: ranks.join(cluster, name=name) for name in dict.fromkeys(names)}

        def call_all(
            thread: int, number: int = number, names: list = names, rings: dict = rings, shared: bool = shared
        ) -> None:
            mine = random.Random(f"{seed} {number} {thread}")
            ring = rings[names[thread]]
            for i in range(CALLS):
                elements, kind = mine.choice((1, 500, 50_000)), mine.choice(("all_reduce", "all_gather", "all_to_all"))
                value = np.full(elements * cluster.world_size, 1 + thread)
                try:
                    got = getattr(ring, kind)(value, name=f"thread {thread}")
                except MismatchError:
                    if not shared:
                        wrong.append(f"round {number}, thread {thread}, call {i}: a mismatch in a ring of its own")
                    return
                except Exception as error:
                    wrong.append(f"round {number}, thread {thread}, call {i}: {type(error).__name__}: {error}")
                    return
                got = got[0] if kind == "all_to_all" else got
                right = (1 + thread) * (cluster.world_size if kind == "all_reduce" else 1)
                if set(np.unique(got).tolist()) != {right}:
                    wrong.append(f"round {number}, thread {thread}, call {i}: {np.unique(got)} for {right}")

        order = random.Random(f"{seed} {number} {cluster.rank}").sample(range(num_threads), num_threads)
        threads = [threading.Thread(target=call_all, args=(thread,)) for thread in order]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for ring in rings.values():
            ring.close()
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    failed = 0
    with ranks.Group(max(arguments.ranks)) as group:
        for size in arguments.ranks:
            for play in (play_threads, play_graphs):
                group.start(size, play, arguments.seed, arguments.rounds)
                outcomes = group.outcomes(120 + 30 * arguments.rounds)
                texts = [str(text) for one in outcomes for text in (one if isinstance(one, list) else [one])]
                failed += len(texts)
                texts.append(f"{size} ranks, {arguments.rounds} rounds of {play.__name__}: {len(texts)} wrong")
                print("\n".join(texts))
    return 1 if failed else 0


if __name__ == "__main__":
    import fuzz_orders  # by the name under which ranks find what they play

    sys.exit(fuzz_orders.main())
