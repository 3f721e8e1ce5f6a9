"""One rank of one contestant: answers run.py's questions."""

from __future__ import annotations

import json
import os
import time
from types import SimpleNamespace

import contest

BUDGET_SECONDS = 0.3  # for the calls of one measurement
MAX_CALLS = 400


class Floor:
    """A tf.function of one identity op: what a call costs by itself."""

    def __init__(self, rank: int, ranks: int, ports: list[int]) -> None:
        import tensorflow as tf

        self._tf = tf
        self._function = tf.function(tf.identity)
        self._values = {}

    def value(self, size: int):
        if size not in self._values:
            self._values[size] = self._tf.ones([size // 4])
        return self._values[size]

    def call(self, size: int) -> None:
        self._function(self.value(size))

    def facts(self) -> list[str]:
        return [f"TensorFlow {self._tf.__version__}"]

    def synchronise(self) -> None:
        pass


class TensorFlow(Floor):
    """tf.distribute's all-reduce over gRPC."""

    def __init__(self, rank: int, ranks: int, ports: list[int]) -> None:
        workers = [f"127.0.0.1:{port}" for port in ports]
        os.environ["TF_CONFIG"] = json.dumps(
            {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}
        )
        super().__init__(rank, ranks, ports)
        tf = self._tf
        options = tf.distribute.experimental.CommunicationOptions(
            implementation=tf.distribute.experimental.CommunicationImplementation.RING
        )
        strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)

        def replica(value):
            context = tf.distribute.get_replica_context()
            return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.identity(value), options)

        self._function = tf.function(lambda value: strategy.run(replica, (value,)))

    def synchronise(self) -> None:
        self.call(4)


class Tfring(Floor):
    def __init__(self, rank: int, ranks: int, ports: list[int], transport: str) -> None:
        super().__init__(rank, ranks, ports)
        from tfring import __version__
        from tfring.ring import ops
        from tfring.ring.communicator import Communicator

        self._version = __version__
        addresses = tuple(f"127.0.0.1:{port}" for port in ports)
        cluster = SimpleNamespace(rank=rank, world_size=ranks, addresses=addresses, listen_fd=None)
        self._ring = Communicator.connect(cluster, transport=transport)
        self._function = self._tf.function(lambda value: ops.all_reduce(self._ring, value, name="benchmark"))

    def facts(self) -> list[str]:
        return [*super().facts(), f"tfring {self._version}"]

    def synchronise(self) -> None:
        self._ring.barrier()


class Horovod(Floor):
    def __init__(self, rank: int, ranks: int, ports: list[int]) -> None:
        super().__init__(rank, ranks, ports)
        import horovod
        import horovod.tensorflow as hvd

        hvd.init()
        self._version = horovod.__version__
        self._function = self._tf.function(lambda value: hvd.allreduce(value, op=hvd.Sum, name="benchmark"))

    def facts(self) -> list[str]:
        return [f"Horovod {self._version} on TensorFlow {self._tf.__version__}"]

    def synchronise(self) -> None:
        self.call(4)


class Gloo:
    """In place, which the TensorFlow contestants may not do."""

    def __init__(self, rank: int, ranks: int, ports: list[int]) -> None:
        import torch
        import torch.distributed as distributed

        torch.set_num_threads(1)
        self._torch, self._distributed = torch, distributed
        distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{ports[0]}", rank=rank, world_size=ranks)
        self._values = {}

    def value(self, size: int):
        if size not in self._values:
            self._values[size] = self._torch.zeros(size // 4)
        return self._values[size]

    def call(self, size: int) -> None:
        self._distributed.all_reduce(self.value(size))

    def facts(self) -> list[str]:
        return [f"torch {self._torch.__version__}"]

    def synchronise(self) -> None:
        self._distributed.barrier()


class Mpich:
    def __init__(self, rank: int, ranks: int, ports: list[int]) -> None:
        import numpy as np
        from mpi4py import MPI

        self._np, self._mpi = np, MPI
        self._values = {}

    def value(self, size: int):
        if size not in self._values:
            self._values[size] = (self._np.zeros(size // 4, "f4"), self._np.zeros(size // 4, "f4"))
        return self._values[size]

    def call(self, size: int) -> None:
        self._mpi.COMM_WORLD.Allreduce(*self.value(size))

    def facts(self) -> list[str]:
        return ["MPICH " + self._mpi.Get_library_version().splitlines()[0].split()[-1].rstrip("\0")]

    def synchronise(self) -> None:
        self._mpi.COMM_WORLD.Barrier()


MAKERS = {
    "floor": Floor,
    "tensorflow": TensorFlow,
    "tfring_tcp": lambda *place: Tfring(*place, "tcp"),
    "tfring_shm": lambda *place: Tfring(*place, "shm"),
    "horovod": Horovod,
    "gloo": Gloo,
    "mpich": Mpich,
}


def measure(contestant, size: int, calls: dict[int, int]) -> float:
    """Seconds a call takes, on average over as many as fit the budget; all ranks make the same number."""
    contestant.value(size)
    if size not in calls:
        # Sizes, not times, decide: times differ from rank to rank.
        calls[size] = max(2, min(MAX_CALLS, int(BUDGET_SECONDS / (0.001 + size * 2e-9))))
    contestant.call(size)
    contestant.synchronise()
    start = time.perf_counter()
    for _ in range(calls[size]):
        contestant.call(size)
    return (time.perf_counter() - start) / calls[size]


def peak_memory(contestant, size: int) -> int:
    """By how much the process grows at most during calls, with its input there already."""
    contestant.call(4)
    contestant.value(size)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets VmHWM
    before = _status_bytes("VmRSS")
    for _ in range(3):
        contestant.call(size)
    return max(0, _status_bytes("VmHWM") - before)


def _status_bytes(field: str) -> int:
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(field):
                return int(line.split()[1]) * 1024
    raise LookupError(field)


def main() -> None:
    name, *where = contest.place()
    contestant = MAKERS[name](*where)
    calls: dict[int, int] = {}

    def timed(size: int, at_realtime: bool) -> float:
        with contest.realtime(at_realtime):
            return measure(contestant, size, calls)

    contest.serve(
        where[0], facts=contestant.facts, measure=timed, memory=lambda size: peak_memory(contestant, size)
    )


if __name__ == "__main__":
    main()
