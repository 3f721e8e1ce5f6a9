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
import datetime
import os
import pathlib
import secrets
import statistics
import subprocess
import sys
import time
from multiprocessing import connection

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "all_reduce"))

from run import _can_import, _free_ports, _machine  # noqa: E402  the other benchmark's

START_SECONDS = 240
MEASURE_SECONDS = 180

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


class Contestant:
    """The processes of one contestant, each with a connection to this one."""

    def __init__(self, name, python, ranks, listener, key):
        self.name = name
        environment = {
            **os.environ,
            "PYTHONPATH": str(HERE.parents[1]),
            "TFRING_BENCHMARK": f"{listener.address[1]} {key.hex()}",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "CUDA_VISIBLE_DEVICES": "-1",
        }
        worker = [python, str(HERE / "worker.py"), name, str(ranks), ",".join(map(str, _free_ports(ranks)))]
        if name == "horovod":
            horovodrun = str(pathlib.Path(python).parent / "horovodrun")
            commands = [[horovodrun, "-np", str(ranks), "--gloo", *worker]]
        else:
            commands = [[*worker, str(rank)] for rank in range(ranks)]
        self.processes = [
            subprocess.Popen(
                c, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
            )
            for c in commands
        ]
        self.pipes = {}
        deadline = time.monotonic() + START_SECONDS
        while len(self.pipes) < ranks:
            if not connection.wait([listener._listener._socket], 1):
                if time.monotonic() > deadline or any(process.poll() is not None for process in self.processes):
                    raise RuntimeError(f"{name} did not start\n{self.errors()}")
                continue
            pipe = listener.accept()
            self.pipes[pipe.recv()] = pipe
        self.facts, self.collectives = self.ask("facts")[0]

    def ask(self, *question):
        """Puts a question to all ranks; their answers, by rank."""
        for pipe in self.pipes.values():
            pipe.send(question)
        answers = []
        for rank in sorted(self.pipes):
            if not self.pipes[rank].poll(MEASURE_SECONDS):
                raise RuntimeError(f"{self.name}: rank {rank} did not answer {question}\n{self.errors()}")
            try:
                answers.append(self.pipes[rank].recv())
            except EOFError:
                raise RuntimeError(f"{self.name}: rank {rank} died\n{self.errors()}") from None
        return answers

    def errors(self):
        self.close()
        return "\n".join(process.stderr.read().decode()[-3000:] for process in self.processes)

    def close(self):
        for process in self.processes:
            process.kill()
            process.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--contestants", default=",".join(CONTESTANTS))
    parser.add_argument("--horovod-python", default=str(HERE.parent / "all_reduce" / ".horovod" / "bin" / "python"))
    parser.add_argument(
        "--realtime",
        action="store_true",
        help="measure at real-time priority (needs root), where the machine has other things to do",
    )
    arguments = parser.parse_args()
    load_before = os.getloadavg()[0]
    running, missing, times = [], [], {}
    key = secrets.token_bytes(16)
    with connection.Listener(("127.0.0.1", 0), backlog=64, authkey=key) as listener:
        try:
            for name in arguments.contestants.split(","):
                python = arguments.horovod_python if name == "horovod" else sys.executable
                module = "horovod.tensorflow" if name == "horovod" else "tensorflow"
                if not _can_import(python, module):
                    missing.append(f"{CONTESTANTS[name]} (no {module} for {python})")
                    continue
                running.append(Contestant(name, python, arguments.ranks, listener, key))
                print(f"started {name}", file=sys.stderr)
            for round_number in range(arguments.rounds + 1):
                for contestant in running:
                    for synchronized in (True, False):
                        # A step takes as long as its slowest rank. The first round warms up.
                        seconds = max(contestant.ask("measure", synchronized, arguments.realtime))
                        if round_number > 0:
                            times.setdefault((contestant.name, synchronized), []).append(seconds * 1e3)
                print(f"round {round_number} of {arguments.rounds}", file=sys.stderr)
        finally:
            for contestant in running:
                contestant.close()

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
        cells = [f"{c.collectives:g}", *(f"{value:.1f}" for value in medians), ratio]
        print(f"| {CONTESTANTS[c.name]} | {' | '.join(cells)} |")
    print(f"\nMachine: {_machine()}. Date: {datetime.date.today()}.")
    print(f"Load {load_before:.1f} at the start{', measured at real-time priority' * arguments.realtime}.")
    print("Versions: " + ", ".join(sorted({fact for c in running for fact in c.facts})) + ".")
    if missing:
        print("Left out: " + "; ".join(missing) + ".")


if __name__ == "__main__":
    main()
