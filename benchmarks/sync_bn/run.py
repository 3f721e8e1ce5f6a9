"""A training step of a network with 20 synchronized batch normalizations, tfring against its peers, in one run.

    python benchmarks/sync_bn/run.py                         # two ranks on this machine
    python benchmarks/sync_bn/run.py --ranks 4 --horovod-python PATH

A step is forward and backward of 20 times Conv2D, batch normalization, ReLU; no gradients are exchanged, so that the
layer's own communication is all there is. Every contestant also runs the same network with plain batch normalization
in the same processes, and its communication time is the difference of the two. The processes of all contestants live
through the whole run and sleep while others are measured; the table shows medians over rounds.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import statistics
import sys

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import contest  # noqa: E402

# name: heading; measured in this order in each round
CONTESTANTS = {
    "keras": "Keras `synchronized=True`, TensorFlow RING over gRPC",
    "horovod": "Horovod `SyncBatchNormalization` (gloo)",
    "tfring": "tfring, all-reduce (shared memory)",
    "tfring_tcp": "tfring, all-reduce (TCP)",
    "tfring_central": 'tfring, `synchronization="central"`',
    "tfring_every_4": "tfring, `sync_every=4`",
    "tfring_tensorflow": 'tfring, `communication="tensorflow"`',
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    contest.add_arguments(parser, CONTESTANTS)
    arguments = parser.parse_args()
    load_before = os.getloadavg()[0]
    wanted = []
    for name in arguments.contestants.split(","):
        horovod = name == "horovod"
        python = arguments.horovod_python if horovod else sys.executable
        wanted.append((name, CONTESTANTS[name], python, "horovod.tensorflow" if horovod else "tensorflow"))
    times = {}
    with contest.started(HERE / "worker.py", wanted, arguments.ranks) as (running, missing):
        collectives = {contestant.name: contestant.ask("collectives")[0] for contestant in running}
        for round_number in range(arguments.rounds + 1):
            for contestant in running:
                for synchronized in (True, False):
                    # A step takes as long as its slowest rank. The first round warms up.
                    seconds = max(contestant.ask("measure", synchronized, arguments.realtime))
                    if round_number > 0:
                        times.setdefault((contestant.name, synchronized), []).append(seconds * 1e3)
            print(f"round {round_number} of {arguments.rounds}", file=sys.stderr)

    print(f"\n{arguments.ranks} ranks, ms a step, median of {arguments.rounds} interleaved rounds\n")
    print("| | collectives a step | ms a step | without sharing | communication | Keras / this |")
    print("|---|---|---|---|---|---|")
    spent = {c.name: [s - p for s, p in zip(times[c.name, True], times[c.name, False], strict=True)] for c in running}
    for c in running:
        ratio = ""
        if "keras" in spent:
            # Within a round, so that a slow spell of the machine stands on both sides.
            ratios = [k / own for k, own in zip(spent["keras"], spent[c.name], strict=True) if own > 0]
            ratio = f"{statistics.median(ratios):.1f}"
        medians = [statistics.median(v) for v in (times[c.name, True], times[c.name, False], spent[c.name])]
        cells = [f"{collectives[c.name]:g}", *(f"{value:.1f}" for value in medians), ratio]
        print(f"| {CONTESTANTS[c.name]} | {' | '.join(cells)} |")
    print()
    facts = [fact for contestant in running for fact in contestant.facts]
    contest.print_conditions(arguments.realtime, facts, missing, load_before)


if __name__ == "__main__":
    main()
