"""Keras by itself: how steps are timed, and what contestants of worker.py share."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import statistics
import tempfile
import time

import call_times
import models
import numpy as np

PROGRAM_STEPS = (12, 12, 24, 12, 12, 24, 12, 60)


def between(times: list[float]) -> list[float]:
    """From one to the next, but for the first, when buffers are filled."""
    return [times[i + 1] - times[i] for i in range(1, len(times) - 1)]


class Clock:
    """A model's train function that notes when each step begins. A callback for it costs ranks a collective a step."""

    def __init__(self, model) -> None:
        self.function = model.train_function
        self.begun: list[float] = []
        model.train_function = self

    def __call__(self, iterator):
        self.begun.append(time.perf_counter())
        return self.function(iterator)

    def __getattr__(self, name):
        return getattr(self.function, name)


def memory(field: str) -> int:
    """Bytes of this process: VmRSS what it has now, VmHWM the most it had."""
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(status.partition(f"{field}:")[2].split()[0])


class Plain:
    """Keras 3 by itself."""

    answers = ("facts", "measure", "call", "program")

    def __init__(self, rank: int, ranks: int, ports: list[int]) -> None:
        self.rank, self.ranks, self.ports = rank, ranks, ports
        self.made: dict = {}
        self.calls: list[call_times.Calls] = []
        self.programs: dict = {}
        self.start()

    def start(self) -> None:
        os.environ["KERAS_BACKEND"] = "tensorflow"
        import keras
        import tensorflow as tf

        self.tf, self.keras = tf, keras
        self.version = f"Keras {keras.__version__} on TensorFlow {tf.__version__}"

    def facts(self) -> list[str]:
        return [self.version]

    def measure(self, name: str) -> dict | str:
        """The steps of a `fit`, their median, the bytes this rank sent, and what memory it took beside the model's.

        The first call makes the model and warms up.
        """
        if name not in self.made:
            try:
                self.made[name] = self.ready(self.task(name))
            except NotImplementedError as error:
                return str(error)
        sent = self.bytes_sent()
        resident = memory("VmRSS")
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak is that of what follows
        steps = self.made[name]()
        return {
            "steps": steps,
            "seconds": statistics.median(steps),
            "memory": memory("VmHWM") - resident,
            "bytes": None if sent is None else (self.bytes_sent() - sent) / self.task(name).steps,
        }

    def call(self, name: str) -> float:
        """Returns the seconds of a call from beginning to end; see call_times.py."""
        if not self.calls:
            self.folder = tempfile.TemporaryDirectory(prefix="calls-")
            self.calls = [call_times.Calls(self, self.folder.name)]
        return self.calls[0].seconds(name)

    def program(self, name: str) -> tuple[float, float, float]:
        """Trains a whole program: some `fit` calls after another, of PROGRAM_STEPS steps.

        Returns its seconds, those of the processor in them, and those in which collectives waited for other ranks.
        """
        if name not in self.programs:
            self.programs[name] = self.fits(dataclasses.replace(models.TASKS[name], steps=max(PROGRAM_STEPS)))
            self.programs[name](PROGRAM_STEPS[0])  # which builds the step
        begin = time.perf_counter(), time.process_time(), self.seconds_waited()
        for steps in PROGRAM_STEPS:
            self.programs[name](steps)
        end = time.perf_counter(), time.process_time(), self.seconds_waited()
        return tuple(after - before for before, after in zip(begin, end, strict=True))

    def fits(self, task: models.Task):
        """Returns a function that makes one call of `fit` of so many steps."""
        model = self.compiled(task)
        most = task.steps
        if task.jpeg:  # pictures would not fit in memory before they are encoded
            task = dataclasses.replace(task, steps=min(PROGRAM_STEPS))
        (x, y), batch = self.share(task)
        if task.jpeg:
            x, y = self.encoded(x) * (most // task.steps), np.tile(y, most // task.steps)

        def given(steps):
            rows = steps * batch
            first = [part[:rows] for part in x] if isinstance(x, list) and not task.jpeg else x[:rows]
            return (self.decoded(first, y[:rows], batch),) if task.jpeg else (first, y[:rows])

        data = {steps: given(steps) for steps in set(PROGRAM_STEPS)}
        options = {} if task.jpeg else {"batch_size": batch}
        return lambda steps: model.fit(*data[steps], verbose=0, callbacks=self.callbacks(), **options)

    def in_scope(self, make):
        return make()

    def task(self, name: str) -> models.Task:
        return {**models.TASKS, "tables": models.TABLES_TASK, "deep": models.DEEP_TASK}[name]

    def ready(self, task: models.Task):
        """A function that trains the model through its data and returns seconds from step to step; it has run once."""
        model = self.compiled(task)
        data, batch = self.share(task)
        given = (self.decoded(self.encoded(data[0]), data[1], batch),) if task.jpeg else data
        options = {} if task.jpeg else {"batch_size": batch, "shuffle": False}

        def fit():
            model.fit(*given, epochs=1, verbose=0, callbacks=self.callbacks(), **options)

        fit()  # which builds the step
        clock = Clock(model)

        def train():
            clock.begun.clear()
            fit()
            return between(clock.begun)

        return train

    def compiled(self, task: models.Task):
        """Returns the compiled model."""
        keras = self.keras
        keras.utils.set_random_seed(1)
        model = self.model(task)
        losses = keras.losses
        loss = losses.SparseCategoricalCrossentropy(from_logits=True) if task.classes else losses.MeanSquaredError()
        model.compile(self.optimizer(keras.optimizers.get(task.optimizer)), loss, **self.compile_options)
        return model

    compile_options: dict = {}
    part, parts = 0, 1  # of the rows that the program itself takes for this process

    def model(self, task):
        return task.make(self.keras)

    def optimizer(self, optimizer):
        return optimizer

    def callbacks(self) -> list:
        return []

    def share(self, task):
        """This rank's rows, and how many of them make a step."""
        return task.data(), task.batch

    def bytes_sent(self):
        return None

    def seconds_waited(self) -> float:
        return 0.0

    def encoded(self, images) -> list[bytes]:
        tf = self.tf
        return [tf.io.encode_jpeg(tf.cast(image * 255, tf.uint8)).numpy() for image in images]

    def decoded(self, files, labels, batch):
        tf = self.tf

        def decode(file, label):
            image = tf.io.decode_jpeg(file, channels=3)
            return tf.image.resize(tf.cast(image, tf.float32) / 255, [64, 64]), label

        options = tf.data.Options()
        if "BENCHMARK_DATA_THREADS" in os.environ:
            options.threading.private_threadpool_size = int(os.environ["BENCHMARK_DATA_THREADS"])
        return tf.data.Dataset.from_tensor_slices((files, labels)).map(decode).batch(batch).with_options(options)


class Apart(Plain):
    """Each on its share of the rows, and nothing exchanged: what workers could buy at most."""

    def __init__(self, rank: int, ranks: int, ports: list[int]) -> None:
        self.part, self.parts = rank, ranks
        super().__init__(rank, ranks, ports)

    def share(self, task):
        return models.shares(task.data(), self.rank, self.ranks, task.batch), task.batch // self.ranks


class Old(Apart):
    """As Apart, in tf.keras."""

    def start(self) -> None:
        import tensorflow as tf

        self.tf, self.keras = tf, tf.keras
        self.version = f"tf.keras of TensorFlow {tf.__version__}"
