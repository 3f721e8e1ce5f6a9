"""One rank of one contestant: trains the models that run.py asks for, and says how long a step took."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import pathlib
import statistics
import time

import contest
import models
import numpy as np
from plain import Apart, Clock, Old, Plain, between, memory


def take_a_core(rank: int) -> None:
    """As under a scheduler that gives each worker a core of its own; with fewer cores than workers they take turns."""
    if "BENCHMARK_UNBOUND" in os.environ:  # threads.py says how many
        return
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    os.environ.update(TF_NUM_INTRAOP_THREADS="1", TF_NUM_INTEROP_THREADS="2", OMP_NUM_THREADS="1")


def describe_cluster(rank: int, ranks: int) -> None:
    """Sets the environment from which tfring reads the cluster of this contestant's processes."""
    os.environ.setdefault("TFRING_SECRET", "without one, a host takes no TCP")
    workers = list(contest.addresses())
    place = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}
    if ranks > 1:
        os.environ["TF_CONFIG"] = json.dumps(place)


class Tfring(Plain):
    """In a RingStrategy; the program is that of one process."""

    answers = (*Plain.answers, "traced")
    options: dict = {}

    def start(self) -> None:
        describe_cluster(self.rank, self.ranks)
        super().start()
        import tfring

        self.strategy = tfring.RingStrategy(**self.options)
        self.version += f", tfring {tfring.__version__}"

    def model(self, task):
        with self.strategy.scope():
            return super().model(task)

    def compiled(self, task):
        with self.strategy.scope():
            return super().compiled(task)

    def in_scope(self, make):
        with self.strategy.scope():
            return make()

    def bytes_sent(self):
        return self.strategy.bytes_sent()

    def seconds_waited(self) -> float:
        return self.strategy.seconds_waited()

    def traced(self, bucket_bytes: int | None, folder: str) -> None:
        """Trains the large model with buckets of that size, under a trace."""
        import tfring

        self.strategy = tfring.RingStrategy(trace=folder, bucket_bytes=bucket_bytes)
        try:
            self.ready(models.LARGE)  # which trains once
        finally:
            self.strategy.close()


class Divided(Tfring):
    """With tables that are divided over the workers, those of one width in one exchange."""

    answers = (*Tfring.answers, "memory_of")

    def model(self, task):
        with self.strategy.scope():
            return task.make(self.keras, self.embedded)

    def embedded(self, keras, sizes, width):
        from tfring.layers import DistributedEmbedding, FeatureConfig, TableConfig

        ids = [keras.Input((), dtype="int32") for _ in sizes]
        tables = [TableConfig(f"table_{n}", size, width, combiner=None) for n, size in enumerate(sizes)]
        return ids, DistributedEmbedding([FeatureConfig(table.name, table) for table in tables])(ids)

    def memory_of(self, rows: int) -> dict:
        """Trains a model whose one table has so many rows: what that took of memory at most, and seconds a step."""
        import tfring

        self._trained_with(1_000, tfring)  # what TensorFlow and Keras take for any model
        resident = memory("VmRSS")
        pathlib.Path("/proc/self/clear_refs").write_text("5")
        begin = time.perf_counter()
        seconds = self._trained_with(rows, tfring)
        return {
            "taken": memory("VmHWM") - resident,
            "share": 2 * -(-rows // self.ranks) * models.LARGE_WIDTH * 4,  # of the weights and of Adagrad's slots
            "seconds": seconds,
            "all_seconds": time.perf_counter() - begin,
        }

    def _trained_with(self, rows, tfring) -> float:
        keras, batch, steps = self.keras, 1024, 12
        generator = np.random.default_rng(0)
        ids = generator.integers(rows, size=(batch * steps, 8)).astype("int32")
        with self.strategy.scope():
            table = tfring.layers.ShardedEmbedding(rows, models.LARGE_WIDTH, combiner="sum")
            model = keras.Sequential([keras.Input((8,), dtype="int32"), table, keras.layers.Dense(1)])
            model.compile("adagrad", "mse")
        model.fit(ids[:batch], ids[:batch, :1] % 2, batch_size=batch, verbose=0)
        clock = Clock(model)
        model.fit(ids, ids[:, :1] % 2, batch_size=batch, verbose=0)
        return statistics.median(between(clock.begun))


class DividedApart(Divided):
    """Each on its share of the rows of tables and of the batch, and nothing exchanged."""

    answers = Divided.answers[:-1]

    def __init__(self, rank: int, ranks: int, ports: list[int]) -> None:
        self.parts = ranks
        super().__init__(0, 1, ports[rank : rank + 1])

    def task(self, name: str) -> models.Task:
        return models.tables_task(self.parts)


class Meeting(Apart):
    """Each on its share of the rows; one number is reduced in each step, for which workers wait for each other."""

    def start(self) -> None:
        describe_cluster(self.rank, self.ranks)
        super().start()
        from tfring import Communicator
        from tfring.cluster import detect

        self.communicator = Communicator.connect(detect())

    def model(self, task):
        made, tf = super().model(task), self.tf

        def meet():
            return self.communicator.all_reduce(np.zeros(1, np.float32))

        class Met(type(made)):
            def train_step(self, data):
                logs = super().train_step(data)
                tf.numpy_function(meet, [], tf.float32)
                return logs

        made.__class__ = Met
        return made


class Microbatched(Plain):
    """The whole deep model on each worker, a microbatch a step, and nothing exchanged: what stages compute in all."""

    answers = (*Plain.answers, "measure_microbatches")

    def measure_microbatches(self, number: int) -> float:
        """Seconds for all microbatches of a batch, of which there are so many."""
        return number * self.measure(f"deep {number}")["seconds"]

    def task(self, name: str) -> models.Task:
        number = int(name.split()[1])
        return dataclasses.replace(models.DEEP_TASK, batch=models.DEEP_TASK.batch // number, steps=3 * number + 2)


class Piped(Tfring):
    """In stages, each worker one."""

    answers = (*Tfring.answers, "measure_stages", "memory_of_stages")

    def start(self) -> None:
        super().start()
        import tfring

        self.strategy.close()
        self.strategy = tfring.RingStrategy(mesh=tfring.Mesh(data=1, pipeline=self.ranks))

    def measure_stages(self, schedule: str, num_microbatches: int, recompute: bool) -> float:
        """Seconds of a step."""
        self.settings = {"schedule": schedule, "num_microbatches": num_microbatches, "recompute": recompute}
        return self.measure("deep")["seconds"]

    def memory_of_stages(self, schedule: str, num_microbatches: int, recompute: bool) -> int:
        """Bytes that steps of many rows take at most, beyond what the process has that has trained on few."""
        self.settings = {"schedule": schedule, "num_microbatches": num_microbatches, "recompute": recompute}
        ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD: what is freed of large blocks is given back at once
        x, y = dataclasses.replace(models.DEEP_TASK, batch=models.MANY_ROWS, steps=1).data()
        with self.strategy.scope():
            model = self.model(models.DEEP_TASK)
            model.compile(models.DEEP_TASK.optimizer, "mse")

        def fit(rows):
            model.fit(x[:rows], y[:rows], batch_size=rows, epochs=2, shuffle=False, verbose=0)

        fit(models.FEW_ROWS)  # which traces the step
        resident = memory("VmRSS")
        pathlib.Path("/proc/self/clear_refs").write_text("5")
        fit(models.MANY_ROWS)
        return memory("VmHWM") - resident

    def model(self, task):
        from tfring.parallel import Pipeline

        begins = [f"layer_{models.DEPTH * stage // self.ranks}" for stage in range(1, self.ranks)]
        return Pipeline(super().model(task), begins, **self.settings)


class Sharded(Tfring):
    options = {"shard_optimizer": True}


class OnTensorFlow(Tfring):
    options = {"communication": "tensorflow"}


class Horovod(Apart):
    def start(self) -> None:
        import horovod
        import horovod.tensorflow.keras as hvd
        import tensorflow as tf

        hvd.init()
        self.tf, self.keras, self.hvd = tf, tf.keras, hvd
        self.version = f"Horovod {horovod.__version__} on TensorFlow {tf.__version__}"

    compile_options = {"experimental_run_tf_function": False}

    def optimizer(self, optimizer):
        return self.hvd.DistributedOptimizer(optimizer)

    def callbacks(self):
        return [self.hvd.callbacks.BroadcastGlobalVariablesCallback(0), self.hvd.callbacks.MetricAverageCallback()]


class Torch(Plain):
    """torch's DistributedDataParallel on gloo, for the models that are easily said in torch."""

    def start(self) -> None:
        import torch
        import torch.distributed as distributed

        torch.set_num_threads(1)
        self.torch = torch
        self.version = f"torch {torch.__version__}"
        if self.ranks > 1:
            first = f"tcp://127.0.0.1:{self.ports[0]}"
            distributed.init_process_group("gloo", init_method=first, rank=self.rank, world_size=self.ranks)

    def ready(self, task):
        torch = self.torch
        nn = torch.nn
        name = next(name for name, each in models.TASKS.items() if each.title == task.title)
        makers = {
            "dense": lambda: [
                *(part for _ in range(3) for part in (nn.Linear(512, 512), nn.ReLU())), nn.Linear(512, 1),
            ],
            "convolutions": lambda: [
                nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
                nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 8 * 64, 10),
            ],
        }  # fmt: skip
        if name not in makers:
            raise NotImplementedError(f"{name} is not written in torch")
        torch.manual_seed(1)
        model = nn.Sequential(*makers[name]())
        if self.ranks > 1:
            model = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        loss_of = nn.CrossEntropyLoss() if task.classes else nn.MSELoss()
        x, y = map(torch.from_numpy, models.shares(task.data(), self.rank, self.ranks, task.batch))
        if name == "convolutions":
            x = x.permute(0, 3, 1, 2).contiguous()
        rows = task.batch // self.ranks

        def train(steps=task.steps):
            begun = []
            for begin in range(0, steps * rows, rows):
                begun.append(time.perf_counter())
                optimizer.zero_grad()
                loss = loss_of(model(x[begin : begin + rows]), y[begin : begin + rows])
                loss.backward()
                optimizer.step()
                loss.item()
            return between(begun)

        train()
        return train

    def fits(self, task):
        return self.ready(task)


MAKERS = {
    "plain": Plain,
    "apart": Apart,
    "meeting": Meeting,
    "tfring": Tfring,
    "sharded": Sharded,
    "divided": Divided,
    "divided_apart": DividedApart,
    "piped": Piped,
    "microbatched": Microbatched,
    "tensorflow": OnTensorFlow,
    "horovod": Horovod,
    "old": Old,
    "torch": Torch,
}


def main() -> None:
    name, *where = contest.place()
    take_a_core(where[0])
    contestant = MAKERS[name](*where)
    contest.serve(where[0], **{name: getattr(contestant, name) for name in contestant.answers})


if __name__ == "__main__":
    main()
