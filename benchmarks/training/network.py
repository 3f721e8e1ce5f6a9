"""Large gradients over links of 1 Gbit/s between network namespaces: which share does the backward pass hide?"""

from __future__ import annotations

import pathlib
import statistics
import sys
import tempfile

import contest

sys.path[:0] = [str(contest.ROOT), str(contest.ROOT / "tests" / "cluster" / "engines")]

import namespaces  # noqa: E402

from tfring.report import files, summary  # noqa: E402

WORKER = pathlib.Path(__file__).parent / "worker.py"
HOSTS, RATE, UNSHAPED_RATE = 4, 1_000_000_000, 100_000_000_000
ALL = 128 << 20  # bytes of a bucket that holds all gradients
BUCKETS = (None, 8 << 20, 32 << 20, ALL)  # None: as tfring chooses
FIGURES = ("milliseconds", "gradients", "gradients_hidden_share", "compute", "moving", "waiting")


def measure(rounds: int) -> dict | None:
    """For each size of a bucket and round, means over the ranks; None where there are no namespaces."""
    why_not = namespaces.why_not()
    if why_not:
        print(f"network: left out, {why_not}", file=sys.stderr)
        return None
    conditions = contest.conditions(realtime=False)
    runs: list[list] = [["unshaped", []], *([bucket_bytes, []] for bucket_bytes in BUCKETS)]
    with namespaces.hosts(HOSTS) as hosts:
        wanted = [("tfring", "tfring", sys.executable, "tensorflow")]
        with contest.started(WORKER, wanted, HOSTS, hosts) as ((contestant,), _):
            for round_number in range(rounds):
                for kind, found in runs:
                    for host in hosts:
                        host.shape(UNSHAPED_RATE if kind == "unshaped" else RATE)
                    found.append(trained(contestant, ALL if kind == "unshaped" else kind))
                print(f"network, round {round_number + 1} of {rounds}", file=sys.stderr)
            versions = contestant.facts
    return {"conditions": conditions, "versions": versions, "hosts": HOSTS, "rate": RATE, "runs": runs}


def trained(contestant, bucket_bytes: int | None) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        contestant.ask("traced", bucket_bytes, folder)
        steps = summary.document(files.read(pathlib.Path(folder)))["steps"]["train"]
    return {name: statistics.mean(rank[name] for rank in steps["ranks"].values()) for name in FIGURES}
