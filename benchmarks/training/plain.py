"""Keras by itself: how steps are timed, and what contestants of worker.py share."""

from __future__ import annotations

import os
import pathlib
import statistics
import tempfile
import time

import call_times
import models


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

    answers = ("facts", "measure", "call")

    def __init__(self, rank: int, ranks: int, ports: list[int]) -> None:
        self.rank, self.ranks, self.ports = rank, ranks, ports
        self.made: dict = {}
        self.calls: list[call_times.Calls] = []
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
            self.calls = [call_times.Calls(self.keras, self.tf, self.in_scope, self.folder.name)]
        return self.calls[0].seconds(name)

    def in_scope(self, make):
        return make()

    def task(self, name: str) -> models.Task:
        return {**models.TASKS, "tables": models.TABLES_TASK, "deep": models.DEEP_TASK}[name]

    def ready(self, task: models.Task):
        """A function that trains the model through its data and returns seconds from step to step; it has run once."""
        keras = self.keras
        keras.utils.set_random_seed(1)
        model = self.model(task)
        losses = keras.losses
        loss = losses.SparseCategoricalCrossentropy(from_logits=True) if task.classes else losses.MeanSquaredError()
        model.compile(self.optimizer(keras.optimizers.get(task.optimizer)), loss, **self.compile_options)
        data, batch = self.share(task)
        given = (self.decoded(data, batch),) if task.jpeg else data
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

    compile_options: dict = {}

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

    def decoded(self, data, batch):
        tf = self.tf
        files = [tf.io.encode_jpeg(tf.cast(image * 255, tf.uint8)).numpy() for image in data[0]]

        def decode(file, label):
            image = tf.io.decode_jpeg(file, channels=3)
            return tf.image.resize(tf.cast(image, tf.float32) / 255, [64, 64]), label

        options = tf.data.Options()
        if "BENCHMARK_DATA_THREADS" in os.environ:
            options.threading.private_threadpool_size = int(os.environ["BENCHMARK_DATA_THREADS"])
        return tf.data.Dataset.from_tensor_slices((files, data[1])).map(decode).batch(batch).with_options(options)


class Apart(Plain):
    """Each on its share of the rows, and nothing exchanged: what workers could buy at most."""

    def share(self, task):
        return models.shares(task.data(), self.rank, self.ranks, task.batch), task.batch // self.ranks


class Old(Apart):
    """As Apart, in tf.keras."""

    def start(self) -> None:
        import tensorflow as tf

        self.tf, self.keras = tf, tf.keras
        self.version = f"tf.keras of TensorFlow {tf.__version__}"
