"""One rank of one contestant: answers run.py's questions. A question names a collective, a dtype and a size.

Sizes are nccl-tests': the buffer of an all_reduce, broadcast or reduce; all that a rank gets in an all_gather, all that
it gives in a reduce_scatter or all_to_all; what a round trip carries each way.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import threading
import time

import contest

BUDGET_SECONDS = 0.12  # for the calls of one measurement
MAX_CALLS = 300
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
KEPT_BYTES = 16 << 20  # larger buffers are made anew each time: those of all contestants would not fit the machine
ROW = 64  # items of a row of all_to_all


class Contestant:
    """Makes `call(op, dtype, size)`, and keeps what it made."""

    def __init__(self, rank: int, ranks: int, ports: list[int]) -> None:
        self.rank, self.ranks, self.ports = rank, ranks, ports
        self.made: dict = {}

    def of(self, *cell):
        if cell not in self.made:
            self.made[cell] = self.call(*cell)
        return self.made[cell]

    def drop(self, *cell):
        del self.made[cell]

    def facts(self) -> list[str]:
        return []


class Floor(Contestant):
    """A tf.function of one identity op: what a call costs by itself."""

    def __init__(self, *place) -> None:
        super().__init__(*place)
        import tensorflow as tf

        self.tf = tf
        self.function = tf.function(tf.identity)

    def call(self, op, dtype, size):
        return functools.partial(self.function, self.tf.ones([size // ITEM_BYTES[dtype]], dtype))

    def facts(self):
        return [f"TensorFlow {self.tf.__version__}"]

    def synchronise(self):
        pass


class TensorFlow(Floor):
    """tf.distribute's all-reduce over gRPC."""

    def __init__(self, rank, ranks, ports) -> None:
        workers = [f"127.0.0.1:{port}" for port in ports]
        os.environ["TF_CONFIG"] = json.dumps(
            {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}
        )
        super().__init__(rank, ranks, ports)
        tf = self.tf
        options = tf.distribute.experimental.CommunicationOptions(
            implementation=tf.distribute.experimental.CommunicationImplementation.RING
        )
        strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)

        def replica(value):
            context = tf.distribute.get_replica_context()
            return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.identity(value), options)

        self.function = tf.function(lambda value: strategy.run(replica, (value,)))

    def synchronise(self):
        self.of("all_reduce", "float32", 4)()


class Tfring(Contestant):
    """From NumPy."""

    def __init__(self, rank, ranks, ports, transport) -> None:
        super().__init__(rank, ranks, ports)
        os.environ.setdefault("TFRING_SECRET", "without one, a host takes no TCP")
        from tfring import __version__

        self.version = __version__
        self.ring = self.connect(transport)

    def connect(self, transport, name="world"):
        from tfring.cluster import Cluster
        from tfring.ring.communicator import Communicator

        cluster = Cluster.from_hosts(contest.addresses(), self.rank)
        return Communicator.connect(cluster, name, transport=transport)

    def call(self, op, dtype, size):
        import numpy as np

        count = size // ITEM_BYTES[dtype]
        if dtype == "bfloat16":
            import ml_dtypes

            dtype = ml_dtypes.bfloat16
        ring, value = self.ring, np.zeros(count, dtype)
        if op == "all_gather":
            value = value[: len(value) // self.ranks]
        if op == "all_to_all":
            value = value.reshape(-1, ROW)
        if op == "round_trip":
            return functools.partial(self.round_trip, value)
        if op == "all_reduce":  # as gloo and MPI: into memory that is there
            return functools.partial(ring.all_reduce, value, out=np.empty_like(value))
        return functools.partial(getattr(ring, op), value)

    def round_trip(self, value):
        if self.rank == 0:
            self.ring.send(value, 1)
            self.ring.receive(1, value.dtype, value.shape)
        elif self.rank == 1:
            self.ring.send(self.ring.receive(0, value.dtype, value.shape), 0)

    def facts(self):
        return [f"tfring {self.version}"]

    def synchronise(self):
        self.ring.barrier()


class Network(Tfring):
    """On hosts of its own, by an algorithm of tfring, or through a server: rank 0, to which all send."""

    def __init__(self, rank, ranks, ports) -> None:
        super().__init__(rank, ranks, ports, "auto")
        self.rings = {"auto": self.ring}

    def call(self, algorithm, dtype, size):
        import numpy as np

        value = np.zeros(size // ITEM_BYTES[dtype], dtype)
        if algorithm == "server":
            return functools.partial(self.serve, value)
        if algorithm not in self.rings:
            os.environ["TFRING_ALGORITHM"] = algorithm
            self.rings[algorithm] = self.connect("auto", algorithm)
        return functools.partial(self.rings[algorithm].all_reduce, value)

    def serve(self, value):
        if self.rank != 0:
            self.ring.send(value, 0)
            return self.ring.receive(0, value.dtype, value.shape)
        total = value.copy()
        for rank in range(1, self.ranks):
            total += self.ring.receive(rank, value.dtype, value.shape)
        for rank in range(1, self.ranks):
            self.ring.send(total, rank)
        return total

    def repeated(self, algorithm: str, size: int, loops: int, calls: int) -> list[float]:
        """Seconds a call takes, on average over those of a loop; of each loop."""
        call = self.of(algorithm, "float32", size)
        times = []
        for _ in range(loops + 1):
            self.ring.barrier()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            times.append((time.perf_counter() - start) / calls)
        return times[1:]


class TfringFunction(Floor):
    """Inside a tf.function."""

    def __init__(self, rank, ranks, ports, transport) -> None:
        super().__init__(rank, ranks, ports)
        from tfring.ring import ops

        self.ring = Tfring(rank, ranks, ports, transport).ring
        self.function = self.tf.function(lambda value: ops.all_reduce(self.ring, value, name="benchmark"))

    def synchronise(self):
        self.ring.barrier()


class Horovod(Floor):
    def __init__(self, *place) -> None:
        super().__init__(*place)
        import horovod
        import horovod.tensorflow as hvd

        hvd.init()
        self.version = horovod.__version__
        self.function = self.tf.function(lambda value: hvd.allreduce(value, op=hvd.Sum, name=value.dtype.name))

    def facts(self):
        return [f"Horovod {self.version} on TensorFlow {self.tf.__version__}"]

    def synchronise(self):
        self.of("all_reduce", "float32", 4)()


class Gloo(Contestant):
    """Into buffers that are there already, as MPICH; tfring and TensorFlow return new ones."""

    def __init__(self, rank, ranks, ports) -> None:
        super().__init__(rank, ranks, ports)
        import torch
        import torch.distributed as distributed

        torch.set_num_threads(1)
        self.torch, self.distributed = torch, distributed
        distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{ports[0]}", rank=rank, world_size=ranks)

    def call(self, op, dtype, size):
        whole = self.torch.zeros(size // ITEM_BYTES[dtype], dtype=getattr(self.torch, dtype))
        share = whole[: len(whole) // self.ranks].clone()
        distributed = self.distributed
        return {
            "all_reduce": lambda: distributed.all_reduce(whole),
            "broadcast": lambda: distributed.broadcast(whole, 0),
            "reduce": lambda: distributed.reduce(whole, 0),
            "all_gather": lambda: distributed.all_gather_into_tensor(whole, share),
            "reduce_scatter": lambda: distributed.reduce_scatter_tensor(share, whole),
            "all_to_all": functools.partial(distributed.all_to_all_single, whole.clone(), whole),
            "round_trip": lambda: self.round_trip(whole),
        }[op]

    def round_trip(self, value):
        if self.rank < 2:
            for sends in (self.rank == 0, self.rank == 1):
                (self.distributed.send if sends else self.distributed.recv)(value, 1 - self.rank)

    def facts(self):
        return [f"torch {self.torch.__version__}"]

    def synchronise(self):
        self.distributed.barrier()


class Mpi(Contestant):
    """MPICH, or Open MPI."""

    def __init__(self, *place) -> None:
        super().__init__(*place)
        from mpi4py import MPI

        self.mpi, self.world = MPI, MPI.COMM_WORLD

    def call(self, op, dtype, size):
        import numpy as np

        world = self.world
        whole, other = (np.zeros(size // ITEM_BYTES[dtype], dtype) for _ in range(2))
        share = whole[: len(whole) // self.ranks].copy()
        return {
            "all_reduce": lambda: world.Allreduce(whole, other),
            "broadcast": lambda: world.Bcast(whole),
            "reduce": lambda: world.Reduce(whole, other),
            "all_gather": lambda: world.Allgather(share, other),
            "reduce_scatter": lambda: world.Reduce_scatter_block(whole, share),
            "all_to_all": lambda: world.Alltoall(whole, other),
            "round_trip": lambda: self.round_trip(whole),
        }[op]

    def round_trip(self, value):
        if self.rank < 2:
            for sends in (self.rank == 0, self.rank == 1):
                (self.world.Send if sends else self.world.Recv)(value, 1 - self.rank)

    def facts(self):
        first = self.mpi.Get_library_version().splitlines()[0].rstrip("\0")
        return [first.partition(",")[0].replace(" v", " ") if "Open MPI" in first else "MPICH " + first.split()[-1]]

    def synchronise(self):
        self.world.Barrier()


class Sockets(Contestant):
    """The limit of TCP on this machine: what a ring all-reduce moves, and nothing else.

    Each rank sends 2(N-1)/N of the bytes to the next and gets as many from the one before, at once.
    """

    def __init__(self, rank, ranks, ports) -> None:
        super().__init__(rank, ranks, ports)
        with socket.create_server(("127.0.0.1", ports[rank])) as server:
            self.next = self.dial(ports[(rank + 1) % ranks])
            self.previous, _ = server.accept()

    def dial(self, port):
        for _ in range(contest.START_SECONDS * 10):
            try:
                connection = socket.create_connection(("127.0.0.1", port))
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return connection
            except ConnectionRefusedError:
                time.sleep(0.1)
        raise TimeoutError(port)

    def call(self, op, dtype, size):
        moved = max(1, 2 * (self.ranks - 1) * size // self.ranks)
        return functools.partial(self.move, bytearray(moved), bytearray(moved))

    def move(self, outgoing, incoming):
        if len(outgoing) <= 1 << 16:
            self.next.sendall(outgoing)
            self.fill(incoming)
            return
        sending = threading.Thread(target=self.next.sendall, args=(outgoing,))
        sending.start()
        self.fill(incoming)
        sending.join()

    def fill(self, buffer):
        left = memoryview(buffer)
        while left:
            left = left[self.previous.recv_into(left) :]

    def synchronise(self):
        self.move(b"x", bytearray(1))


class Copy(Contestant):
    """The limit of shared memory: every rank copies as many bytes as the collective has, all at once."""

    def __init__(self, *place, new: bool = False) -> None:
        super().__init__(*place)
        self.new = new

    def call(self, op, dtype, size):
        import numpy as np

        whole, other = (np.zeros(size, np.uint8) for _ in range(2))
        return whole.copy if self.new else lambda: np.copyto(other, whole)

    def synchronise(self):
        pass


MAKERS = {
    "floor": Floor,
    "tensorflow": TensorFlow,
    "tf_tcp": lambda *place: TfringFunction(*place, "tcp"),
    "tf_shm": lambda *place: TfringFunction(*place, "shm"),
    "np_tcp": lambda *place: Tfring(*place, "tcp"),
    "np_shm": lambda *place: Tfring(*place, "shm"),
    "network": Network,
    "horovod": Horovod,
    "gloo": Gloo,
    "mpich": Mpi,
    "openmpi": Mpi,
    "sockets": Sockets,
    "copy": Copy,
    "copy_new": lambda *place: Copy(*place, new=True),
}


def measure(contestant, op: str, dtype: str, size: int) -> float:
    """Seconds a call takes, on average over as many as fit the budget."""
    call = contestant.of(op, dtype, size)
    # Sizes, not times, decide how many, for times differ from rank to rank. Sleepers take a moment to be themselves.
    least = 2 if size <= KEPT_BYTES else 1
    calls = max(least, min(MAX_CALLS, int(BUDGET_SECONDS / (0.0004 + size * 1e-9))))
    for _ in range(max(1, calls // 10)):
        call()
    contestant.synchronise()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    took = (time.perf_counter() - start) / calls
    if size > KEPT_BYTES:
        del call
        contestant.drop(op, dtype, size)
    return took


def main() -> None:
    name, *where = contest.place()
    contestant = MAKERS[name](*where)

    def timed(op: str, dtype: str, size: int) -> float | str:
        try:
            contestant.of(op, dtype, size)
        except Exception as error:  # it has no such collective
            return str(error) or type(error).__name__
        return measure(contestant, op, dtype, size)

    repeated = getattr(contestant, "repeated", None)
    contest.serve(where[0], facts=contestant.facts, measure=timed, repeated=repeated)


if __name__ == "__main__":
    main()
