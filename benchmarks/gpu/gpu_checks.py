"""The checks of run.py, which starts this file as the program of a job: `gpu_checks.py FOLDER NAME ...`.

On a machine without a GPU two logical CPUs stand in for a host and its GPU: CPU:0 is the host, CPU:1 the device.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("", "tests", "tests/training", "benchmarks/training", "benchmarks")]

TOLERANCE = 1e-4  # of weights, logs and predictions, over the largest of each; TF32 is off
LOW_PRECISION = 2e-2  # with float16 and bfloat16
ROWS, BATCH = 81, 20  # the last batch has one row: of two workers one has none
FAILED = 3  # exit code of a rank whose check has failed: what follows needs a ring of its own
GRACE_SECONDS = 2  # for the other ranks, which end with this one, to write down what they have
HEAVY = ("MatMul", "Conv2D", "Einsum")  # in names of operations that belong on the device


class Check(NamedTuple):
    """A check.

    Attributes:
      name: what it is called by `--only`.
      job: the options of `tfring launch`; else one process without, with a device or two.
      seconds: its limit, without the start of the job.
      function: takes nothing, returns figures by name, raises where it fails.
    """

    name: str
    job: str
    seconds: float
    function: Callable[[], dict[str, Any]]


CHECKS: list[Check] = []
ALONE, TWO_DEVICES, ONE, TWO = "alone", "two devices", "-n 1", "-n 2"


def check(job: str, seconds: float, *cases: Any) -> Callable:
    """Adds a function to the checks, once for each case, which is its argument and follows its name."""

    def add(function: Callable) -> Callable:
        name = function.__name__.replace("_", " ")
        for case in cases or [None]:
            call = function if case is None else functools.partial(function, case)
            CHECKS.append(Check(name if case is None else f"{name} {case}", job, seconds, call))
        return function

    return add


# ------------------------------------------------------------------------------------------------------- devices


_devices: list[str] = []  # their names


def start(replicas: int) -> None:
    """Configures as many devices, before TensorFlow runs."""
    import tensorflow as tf

    logical = tf.config.LogicalDeviceConfiguration
    gpus = tf.config.list_physical_devices("GPU")
    if gpus and replicas > len(gpus):
        tf.config.set_logical_device_configuration(gpus[0], [logical(memory_limit=8192)] * replicas)
    if not gpus:
        [cpu] = tf.config.list_physical_devices("CPU")
        tf.config.set_logical_device_configuration(cpu, [logical()] * (1 + replicas))
    tf.config.experimental.enable_tensor_float_32_execution(False)
    _devices[:] = [f"GPU:{i}" if gpus else f"CPU:{1 + i}" for i in range(replicas)]


@contextlib.contextmanager
def ring(**options: Any) -> Iterator[Any]:
    """Yields a strategy whose replicas are on the devices."""
    import tfring

    strategy = tfring.RingStrategy(devices=_devices, **options)
    yield strategy
    strategy.close()


def equal(errors: dict[str, Any], tolerance: float = TOLERANCE) -> dict[str, Any]:
    """Returns the largest error of this rank, if it has compared with one process; raises where it is too large."""
    numbers = {name: float(error) for name, error in errors.items() if name != "bits"}
    if not numbers:
        return {}
    worst = max(numbers, key=lambda name: numbers[name] if numbers[name] == numbers[name] else float("inf"))
    if not numbers[worst] <= tolerance:
        raise AssertionError(f"{worst} differ from one process by {numbers[worst]:.1e}, more than {tolerance:.0e}")
    return {"error": numbers[worst]}


def both(strategy: Any, make: Callable, *data: Any, tolerance: float = TOLERANCE, **options: Any) -> dict[str, Any]:
    """Trains a model under the strategy and, on one of the ranks, in one process on the same device."""
    import common
    import tensorflow as tf

    def on_device() -> Any:
        with contextlib.nullcontext() if tf.distribute.has_strategy() else tf.device(_devices[0]):
            return make()

    return equal(common.train_both(strategy, on_device, *data, **options), tolerance)


# ---------------------------------------------------------------------------------------------------- 1: it trains


@check(ALONE, 60)
def device() -> dict[str, Any]:
    """TensorFlow computes on the GPU, by each of the libraries that a model needs."""
    import keras
    import numpy as np
    import tensorflow as tf

    [name] = _devices
    x = np.random.default_rng(0).normal(size=(64, 64)).astype("float32")
    with tf.device(name):
        product = tf.matmul(x, x)
        image = tf.reshape(tf.constant(x), [1, 64, 64, 1])
        convolved = tf.nn.conv2d(image, tf.ones([3, 3, 1, 1]), 1, "SAME")
        total = tf.reduce_sum(tf.sort(tf.random.normal([1000])))
    if name not in product.device or name not in convolved.device:
        raise AssertionError(f"computed on {product.device} and {convolved.device}, not on {name}")
    error = float(np.abs(product.numpy() - x.astype("float64") @ x).max() / np.abs(x @ x).max())
    build, gpus = tf.sysconfig.get_build_info(), tf.config.list_physical_devices("GPU")
    return {
        **equal({"matmul": error, "finite": 0.0 if np.isfinite(total) else np.inf}, 1e-5),
        "versions": f"TensorFlow {tf.__version__}, Keras {keras.__version__}, Python {sys.version.split()[0]}",
        "cuda": f"built for CUDA {build.get('cuda_version')}, cuDNN {build.get('cudnn_version')}",
        "gpu": [str(tf.config.experimental.get_device_details(gpu)) for gpu in gpus] or "none: a logical CPU stands in",
    }


TASKS = ("convolutions", "dense", "embeddings", "transformer")


def trained(name: str) -> dict[str, Any]:
    """Fits, evaluates and predicts; two steps and a third of five rows."""
    import numpy as np
    from models import TASKS as ALL

    task = ALL[name]
    batch = min(task.batch, 128)
    x, y = task.rows(np.random.default_rng(0), 2 * batch + 5)
    with ring() as strategy:
        options = {"batch_size": batch, "epochs": 1, "evaluate": (x, y), "predict": x}
        return both(strategy, lambda: compiled(task), x, y, **options)


def keras_of_reference() -> Any:
    """Returns Keras; outside of a strategy with an Embedding whose gradient is dense.

    Optimizers of Keras take ids that are there several times one by one, a strategy their sum.
    """
    import keras
    import tensorflow as tf

    class Embedding(keras.layers.Embedding):
        def call(self, ids: Any) -> Any:
            return keras.ops.take(self.embeddings * 1.0, ids, axis=0)

    if tf.distribute.has_strategy():
        return keras
    layers = types.SimpleNamespace(**{**vars(keras.layers), "Embedding": Embedding})
    return types.SimpleNamespace(**{**vars(keras), "layers": layers})


def compiled(task: Any, **options: Any) -> Any:
    import keras

    optimizer = keras.optimizers.get(task.optimizer)
    if hasattr(optimizer, "epsilon"):
        optimizer.epsilon = 1e-4  # with Keras' 1e-7, Adam makes a step of what rounding leaves of a gradient
    model = task.make(keras_of_reference())
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True) if task.classes else "mse"
    model.compile(optimizer, loss, **{"jit_compile": False, **options})
    return model


check(ONE, 40, *TASKS)(trained)


@check(TWO, 40, *TASKS)
def two_workers(name: str) -> dict[str, Any]:
    return trained(name)


# -------------------------------------------------------------------------------- 2: it equals one process on the GPU


def embedded(optimizer: Callable, **options: Any) -> Callable:
    """Makes a model of a table, whose ids are there many times, and dense layers."""

    def make() -> Any:
        import keras

        ids = keras.Input((3,), dtype="int32")
        rows = keras_of_reference().layers.Embedding(400, 64)(ids)  # more than SparseOptions makes dense
        hidden = keras.layers.Dense(8, activation="tanh")(keras.ops.mean(rows, axis=1))
        model = keras.Model(ids, keras.layers.Dense(1)(hidden))
        model.compile(optimizer(), "mse", metrics=["mae"], jit_compile=False, **options)
        model.optimizer.build(model.trainable_variables)  # Keras alone loses what ScheduleFreeAdamW builds in a step
        return model

    return make


def dense(optimizer: Callable | str = "sgd", *layers: Any, loss: Any = "mse") -> Callable:
    """Makes a model of two dense layers with others between."""

    def make() -> Any:
        import keras

        between = [layer() for layer in layers]
        outputs = keras.layers.Dense(1, dtype="float32")
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, activation="tanh"), *between, outputs])
        model.compile(optimizer() if callable(optimizer) else optimizer, loss, metrics=["mae"], jit_compile=False)
        return model

    return make


FIRST = ("Adam", "AdamW", "Adagrad", "SGD momentum", "Adam amsgrad", "RMSprop")
REST = ("Nadam", "Adamax", "Adadelta", "Ftrl", "Lion", "Adafactor", "Lamb", "Muon", "ScheduleFreeAdamW")
SETTINGS = ("clipnorm", "global_clipnorm", "clipvalue", "accumulation", "ema", "loss_scale", "schedule")


@check(TWO, 20, *FIRST, *SETTINGS[:3])
def optimizer(name: str) -> dict[str, Any]:
    import common
    import keras

    def make() -> Any:
        made = {**common.all_optimizers(), **common.optimizer_settings()}[name]()
        inner = getattr(made, "inner_optimizer", made)
        if isinstance(inner, keras.optimizers.Adam):
            inner.epsilon = 1e-4
        return made

    with ring() as strategy:
        return both(strategy, embedded(make), *common.skewed_ids(ROWS, 400))


@check(TWO, 20)
def SyncBatchNormalization() -> dict[str, Any]:
    import common
    import keras
    import tensorflow as tf

    import tfring

    def layer() -> Any:
        return tfring.SyncBatchNormalization() if tf.distribute.has_strategy() else keras.layers.BatchNormalization()

    with ring() as strategy:
        return both(strategy, dense("sgd", layer), *common.skewed_rows(ROWS))


@check(TWO, 20)
def BatchNormalization() -> dict[str, Any]:
    """Normalizes each replica's rows, as Keras has it: weights of ranks are equal, and not those of one process."""
    import common
    import keras

    with ring() as strategy:
        found = both(
            strategy,
            dense("sgd", keras.layers.BatchNormalization),
            *common.skewed_rows(ROWS),
            tolerance=float("inf"),
        )
        return {"differs": found["error"]} if found else {}


@check(TWO, 20, "mixed_float16", "mixed_bfloat16")
def precision(policy: str) -> dict[str, Any]:
    import common
    import keras

    keras.config.set_dtype_policy(policy)
    try:
        with ring() as strategy:
            x, y = common.skewed_rows(ROWS)
            return both(strategy, dense(lambda: keras.optimizers.SGD(0.01)), x / 4, y / 4, tolerance=LOW_PRECISION)
    finally:
        keras.config.set_dtype_policy("float32")


@check(TWO, 20)
def shard_optimizer() -> dict[str, Any]:
    import common
    import keras

    with ring(shard_optimizer=True) as strategy:
        optimizer = functools.partial(keras.optimizers.AdamW, 0.01, epsilon=1e-4)
        return both(strategy, embedded(optimizer), *common.skewed_ids(ROWS, 400))


def on_mesh(mesh: dict[str, int], kind: str, options: dict[str, Any], by: str) -> dict[str, Any]:
    import harness
    import test_pipeline

    harness._communication = "ring"
    [found] = test_pipeline.trained(mesh, [(kind, options, by, {})], "float32")
    harness._strategies.pop().close()
    return equal(dict(enumerate(found["errors"]))) if "errors" in found else {}


@check(TWO, 30)
def ShardedEmbedding_and_ShardedDense() -> dict[str, Any]:
    return on_mesh({"data": 1, "model": 2}, "along model", {}, "sgd")


@check(TWO, 30)
def pipeline() -> dict[str, Any]:
    return on_mesh({"data": 1, "pipeline": 2}, "chain", {"num_microbatches": 2}, "sgd")


@check(TWO, 20)
def delayed() -> dict[str, Any]:
    """Windows of one step of SGD are those of a ring."""
    import common
    import keras
    import tensorflow as tf

    import tfring

    x, y = common.skewed_ids(ROWS, 400)
    make = embedded(functools.partial(keras.optimizers.SGD, 0.05))

    def weights() -> list:
        keras.utils.set_random_seed(1)
        model = make()
        model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
        return model.get_weights()

    with ring(synchronization=tfring.Delayed(1)) as strategy:
        with strategy.scope():
            got = weights()
        with tf.device(_devices[0]):
            return equal({"weights": common.relative_error(got, weights())})


@check(TWO, 20)
def gather_for_loss() -> dict[str, Any]:
    import common
    import programs

    make = programs.compiled(programs.loss_of_own_anchors, net=programs.embedded, jit_compile=False)
    with ring() as strategy:
        return both(strategy, make, *common.skewed_rows(ROWS - 1))  # of one row alone the loss has no gradient


@check(TWO, 20)
def custom_loop() -> dict[str, Any]:
    """`strategy.run` on the rows of this worker, against a tape in this process on all rows."""
    import common
    import keras
    import tensorflow as tf

    x, y = common.skewed_rows(ROWS)
    rows = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)

    def make() -> Any:
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])
        model.optimizer = keras.optimizers.SGD(0.01)
        model.optimizer.build(model.trainable_variables)
        return model

    def step(model: Any, element: Any) -> Any:
        features, targets = element
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((model(features, training=True) - targets) ** 2) / BATCH
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply(gradients, model.trainable_variables)
        return loss

    with ring() as strategy:
        with strategy.scope():
            model = make()

        @tf.function
        def of_all(element: Any) -> Any:
            return strategy.run(functools.partial(step, model), args=(element,))

        for element in strategy.experimental_distribute_dataset(rows):
            of_all(element)
        with tf.device(_devices[0]):
            alone = make()
            for element in rows:
                step(alone, element)
        return equal({"weights": common.relative_error(model.get_weights(), alone.get_weights())})


@check("-n 2 --servers 1", 60)
def servers() -> dict[str, Any]:
    import test_servers

    import tfring

    strategy = tfring.ParameterServerStrategy()  # where this process is the server it serves, and ends
    cases = test_servers.train_embeddings(strategy, ["Adam", "SGD momentum"])
    strategy.close()
    errors = {f"{name}, {what}": error for name, found in cases.items() for what, error in found.items()}
    return equal({name: error for name, error in errors.items() if not name.endswith(("bits", "changed"))})


@check("-n 2 --max-restarts 1", 60)
def backup() -> dict[str, Any]:
    """A `fit` of which rank 1 is killed once ends with the weights of one process."""
    import common
    import keras

    import tfring

    folder = pathlib.Path(sys.argv[1], "backup")

    class Kill(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 3 and os.environ["TFRING_RESTART"] == "0" and os.environ["TFRING_RANK"] == "1":
                os.kill(os.getpid(), signal.SIGKILL)

    x, y = common.skewed_rows(ROWS)
    options = {"batch_size": BATCH, "epochs": 2, "shuffle": False, "verbose": 0}
    with ring() as strategy:
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = dense("sgd")()
        model.fit(x, y, callbacks=[tfring.callbacks.Backup(folder, every_steps=2), Kill()], **options)
        keras.utils.set_random_seed(1)
        alone = dense("sgd")()
        alone.fit(x, y, **options)
        found = equal({"weights": common.relative_error(model.get_weights(), alone.get_weights())})
        return {**found, "restarts": os.environ["TFRING_RESTART"]}


@check(TWO_DEVICES, 60, *TASKS[:3])
def two_replicas(name: str) -> dict[str, Any]:
    """Two logical GPUs in one process."""
    return trained(name)


# ------------------------------------------------------------------------------------------------- 3: where it runs


@check(TWO, 60, "convolutions", "embeddings", "transformer")
def where(name: str) -> dict[str, Any]:
    """Counts operations of a training step by device, and copies, beside the bytes that a step sends."""
    import numpy as np
    from models import TASKS as ALL
    from tensorflow.python.eager import context

    task = ALL[name]
    x, y = task.rows(np.random.default_rng(0), 64)
    with ring() as strategy:
        with strategy.scope():
            model = compiled(task)
        context.enable_run_metadata()
        context.context().enable_graph_collection()
        model.fit(x, y, batch_size=32, verbose=0)
        graphs = context.export_run_metadata().function_graphs
        context.disable_run_metadata()
        sent = strategy.bytes_sent()
        model.fit(x, y, batch_size=32, verbose=0)
        sent = strategy.bytes_sent() - sent
    step = max(graphs, key=lambda graph: sum(len(part.node) for part in graph.partition_graphs))
    host, copies, of_device, heavy = collections.Counter(), collections.Counter(), 0, []
    for node in (node for part in step.partition_graphs for node in part.node):
        if node.op in ("_Send", "_Recv"):
            copies["to host" if (node.op == "_Recv") == node.device.endswith("CPU:0") else "to device"] += 1
        elif node.device.endswith("CPU:0") and node.op not in ("Const", "NoOp", "_Arg", "_Retval"):
            host[node.op] += 1
            heavy += [node.name] * any(word in node.op for word in HEAVY)
        else:
            of_device += 1
    if heavy:
        raise AssertionError(f"computed on the host: {', '.join(heavy)[:300]}")
    ours = {op: count for op, count in host.items() if op.startswith("Tfring")}
    others = dict(host.most_common())
    return {
        "on device": of_device,
        "on host": sum(host.values()),
        "ours": ours,
        "others on host": {op: count for op, count in others.items() if op not in ours},
        "copies": {way: count // 2 for way, count in copies.items()},
        "bytes sent a step": sent // 2,
        "bytes of weights": sum(int(np.prod(weight.shape)) * 4 for weight in model.trainable_weights),
    }


# --------------------------------------------------------------------------------------------------- 4: what it costs

MEGABYTES = (1, 16, 100)
REPEATS = 10


def median_of(call: Callable[[], Any]) -> float:
    call()
    seconds = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


@check(ALONE, 30)
def copies() -> dict[str, Any]:
    """Gigabytes a second between host and device: of NumPy's memory, which is pageable, and within a tf.function,
    where TensorFlow takes pinned memory.
    """
    import numpy as np
    import tensorflow as tf

    [name] = _devices
    found = {}
    for size in MEGABYTES:
        array = np.ones(size * 250_000, np.float32)
        with tf.device(name):
            there = tf.Variable(array)

        @tf.function
        def to_host(there: tf.Variable = there) -> tf.Tensor:
            with tf.device(there.device):
                value = there + 0.0
            with tf.device("CPU:0"):
                return value[-1]  # of all of it, which is there

        @tf.function
        def back(there: tf.Variable = there) -> tf.Tensor:
            with tf.device("CPU:0"):
                value = tf.fill(there.shape, tf.cast(tf.timestamp(), tf.float32))
            with tf.device(there.device):
                return value[-1]

        def from_numpy(array: np.ndarray = array) -> Any:
            with tf.device(name):
                return float(tf.constant(array)[-1])

        rates = {
            "to NumPy": there.numpy,
            "from NumPy": from_numpy,
            "to host": lambda call=to_host: float(call()),
            "from host": lambda call=back: float(call()),
        }
        found[f"{size} MB"] = {way: round(size / 1e3 / median_of(call), 2) for way, call in rates.items()}
    return {"GB/s": found}


@check(TWO, 40)
def sums() -> dict[str, Any]:
    """Milliseconds of gradients of a device, summed over two workers and back on it; and of the sum in host memory."""
    import tensorflow as tf

    import tfring

    [name] = _devices
    found = {}
    with ring():
        communicator = tfring.Communicator.connect(tfring.cluster.detect(), "sums")
        for size in MEGABYTES:
            for place in (name, "CPU:0"):
                with tf.device(place):
                    there = tf.Variable(tf.ones([size * 250_000]))

                @tf.function
                def summed(there: tf.Variable = there, place: str = place) -> tf.Tensor:
                    total = communicator.all_reduce(there + 0.0)
                    with tf.device(place):
                        return tf.reduce_sum(total[-1:])

                where = "host" if place == "CPU:0" else "device"
                found[f"{size} MB, {where}"] = round(1e3 * median_of(lambda call=summed: float(call())), 2)
        communicator.close()
    return {"ms": found}


def step_times(name: str, strategy: Any, **options: Any) -> dict[str, Any]:
    """Milliseconds of a step, those in which collectives waited, and of a `fit` of two steps."""
    import keras
    import numpy as np
    from models import TASKS as ALL
    from plain import Clock, between

    task = ALL[name]
    keras.utils.set_random_seed(1)
    x, y = task.rows(np.random.default_rng(0), 12 * task.batch)

    def first(rows: int) -> tuple:
        return ([part[:rows] for part in x] if isinstance(x, list) else x[:rows]), y[:rows]

    with strategy.scope() if strategy else contextlib.nullcontext():
        model = compiled(task, **options)
    given = {"batch_size": task.batch, "verbose": 0, "shuffle": False}
    model.fit(*first(3 * task.batch), **given)
    clock = Clock(model)
    waited = strategy.seconds_waited() if strategy else 0.0
    begin = time.perf_counter()
    model.fit(x, y, **given)
    total = time.perf_counter() - begin
    found = {"step": 1e3 * statistics.median(between(clock.begun))}
    found["share waited"] = ((strategy.seconds_waited() if strategy else 0.0) - waited) / total
    found["fit of 2 steps"] = 1e3 * median_of(lambda: model.fit(*first(2 * task.batch), **given))
    return {what: round(value, 3) for what, value in found.items()}


COSTS = ("convolutions", "dense", "transformer")


@check(ALONE, 60, *COSTS)
def keras_alone(name: str) -> dict[str, Any]:
    import tensorflow as tf

    with tf.device(_devices[0]):
        return step_times(name, None)


@check(ALONE, 90, *COSTS)
def keras_alone_by_XLA(name: str) -> dict[str, Any]:
    import tensorflow as tf

    with tf.device(_devices[0]):
        return step_times(name, None, jit_compile=True)


def ring_times(name: str, **options: Any) -> dict[str, Any]:
    with ring() as strategy:
        return step_times(name, strategy, **options)


@check(ONE, 60, *COSTS)
def one_worker(name: str) -> dict[str, Any]:
    return ring_times(name)


@check(TWO, 60, *COSTS)
def two_at_once(name: str) -> dict[str, Any]:
    return ring_times(name)


@check(TWO, 90, *COSTS)
def two_by_XLA(name: str) -> dict[str, Any]:
    return ring_times(name, jit_compile=True)


# --------------------------------------------------------------------------------------------------------- 5: the rest


def run(*words: Any, seconds: float = 50, **environment: str) -> subprocess.CompletedProcess:
    """Runs a command of tfring, which ends within its limit."""
    command = [sys.executable, "-m", "tfring", *map(str, words)]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=seconds,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **environment},
    )


@check(ALONE, 60)
def launcher() -> dict[str, Any]:
    """One worker on one GPU sees it; two share it and are told."""
    show = "import os; print('sees', os.environ.get('CUDA_VISIBLE_DEVICES'))"
    path = pathlib.Path(sys.argv[1], "show.py")
    path.write_text(show)
    done = {n: run("launch", "-n", n, path, CUDA_VISIBLE_DEVICES="0") for n in (1, 2)}
    if done[1].stdout.count("sees 0") != 1 or done[2].stdout.count("sees 0") != 2:
        raise AssertionError(f"{done[1].stdout}{done[2].stdout}{done[2].stderr}")
    if "2 workers on a host with 1 GPU" not in done[2].stderr:
        raise AssertionError(f"no warning: {done[2].stderr}")
    return {}


@check(ONE, 40)
def tensorflow_engine() -> dict[str, Any]:
    """`communication="tensorflow"`, of one rank: NCCL takes one rank a GPU."""
    import common

    with ring(communication="tensorflow") as strategy:
        return both(strategy, dense("sgd"), *common.skewed_rows(ROWS))


@check(ALONE, 60)
def out_of_memory() -> dict[str, Any]:
    """Ends the job, whose report names the rank."""
    path = pathlib.Path(sys.argv[1], "memory.py")
    path.write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "import tensorflow as tf, tfring\n"
        "strategy = tfring.RingStrategy()\n"
        "if strategy.rank == 1:\n"
        "    tf.zeros([1 << 42])\n"  # 16 TB
        "tfring.barrier()\n"
    )
    begin = time.monotonic()
    done = run("launch", "-n", 2, path)
    if done.returncode == 0 or "rank 1" not in done.stderr or "ResourceExhausted" not in done.stderr:
        raise AssertionError(f"exit code {done.returncode}: {done.stderr[-500:]}")
    return {"seconds": round(time.monotonic() - begin, 1)}


for _name in (*SETTINGS[3:], *REST):  # least likely to differ
    CHECKS.append(Check(f"optimizer {_name}", TWO, 20, functools.partial(optimizer, _name)))


# ------------------------------------------------------------------------------------------------------------ a rank


def main(folder: str, *names: str) -> int:
    """Runs checks of one kind of job, and writes what each found to a file of this rank."""
    of_name = {each.name: each for each in CHECKS}
    start(2 if of_name[names[0]].job == TWO_DEVICES else 1)
    with pathlib.Path(folder, f"rank-{os.environ.get('TFRING_RANK', '0')}.jsonl").open("a") as file:

        def note(name: str, **what: Any) -> None:
            print(json.dumps({"name": name, **what}), file=file, flush=True)

        for name in names:
            begin = time.monotonic()
            try:
                figures = of_name[name].function()
            except Exception as error:
                traceback.print_exc()
                sys.stderr.flush()
                note(name, error=f"{type(error).__name__}: {error}"[:2000])
                time.sleep(GRACE_SECONDS)
                return FAILED
            note(name, seconds=round(time.monotonic() - begin, 2), figures=figures)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
