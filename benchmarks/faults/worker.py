"""One rank of a scenario: collectives until something goes wrong, then one line of JSON about it.

While saving, it is `fit` with a Backup; the model's weights count the steps they have been through.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import sys
import time

import numpy as np

from tfring import cluster
from tfring.errors import TfringError
from tfring.ring.communicator import Communicator
from tfring.transport.listener import Listener

SAVED_STEPS = 12
SAVED_UNITS = 8192  # 32 MB of weights
LIVES_ON_SECONDS = 30


def main(fault: str, moment: str, seconds: float, late: float) -> None:
    logging.basicConfig(format="%(message)s", stream=sys.stdout)
    me = cluster.detect()
    Listener.of(me)
    say("there")
    report: dict = {"error": None}
    if fault.startswith("an operation"):
        from tfring.ring import ops

        ops._ops()
    before = what_is_open()
    try:
        if "not yet started" not in moment:
            Communicator.connect(me, "what a process opens once").close()
            before = what_is_open()
        with Communicator.connect(me, "first") as first:
            first.barrier()
            signal.signal(signal.SIGUSR1, lambda *_: strike(fault, seconds))
            say("connecting")
            time.sleep(late)
            report["asked"] = time.time()
            with Communicator.connect(me, "second", beside=first) as communicator:
                if fault == "an operation fails, its process lives on":
                    pass_round(first, communicator, report)
                train(communicator, fault, moment, report)
    except TfringError as error:
        report.update(error=type(error).__name__, message=str(error))
    report.setdefault("when", time.time())
    first = communicator = None
    gc.collect()
    left = len(what_is_open() - before)
    with open("/proc/self/maps") as maps:
        left += "tfring-mailbox" in maps.read()
    print(json.dumps({**report, "left": left}), flush=True)


def pass_round(first: Communicator, second: Communicator, report: dict) -> None:
    """Sends a tensor from rank 1 to rank 1 through all others, each in a tf.function, as stages of a pipeline do.

    What rank 1 sends an operation makes, which fails when the rank is struck; it waits for what comes back beside it.
    """
    import tensorflow as tf

    from tfring.ring import ops

    rank, size = first.rank, first.world_size
    struck: list[int] = []
    signal.signal(signal.SIGUSR1, lambda *_: struck.append(1))

    def make(value: np.ndarray) -> np.ndarray:
        if struck:
            raise LookupError("in an operation")
        return value

    @tf.function
    def step() -> tf.Tensor:
        came = ops.receive(first if rank == 2 % size else second, (rank - 1) % size, tf.float32, [1000])
        if rank == 1:  # the two are of different rings, so neither waits for the other
            ops.send(first, tf.numpy_function(make, [tf.ones(1000)], tf.float32), 2 % size)
        else:
            ops.send(second, came, (rank + 1) % size)
        return came

    step()
    say("under way")
    try:
        while True:
            step()
    except tf.errors.OpError as error:
        report["when"] = time.time()
        failure = second.failure() or first.failure() or error
        for ring in (first, second):  # as `fit` does
            ring.abort(failure)
        if struck:
            time.sleep(LIVES_ON_SECONDS)
        raise failure from error


def train(communicator: Communicator, fault: str, moment: str, report: dict) -> None:
    value = np.ones(250_000, np.float32)
    communicator.all_reduce(value, name="step")
    if fault == "kill -9, a forked child lives on" and os.fork() == 0:
        time.sleep(20)
        os._exit(0)
    communicator.barrier()
    struck: list[int] = []
    if fault == "exit":  # as a program ends: out of its own code, not out of a collective that a signal interrupts
        signal.signal(signal.SIGUSR1, lambda *_: struck.append(1))
    say("under way")
    if moment == "between steps":
        while communicator.failure() is None:
            sys.exit(3) if struck else time.sleep(0.005)
        report["when"] = time.time()
        communicator.barrier()
    deadline = time.monotonic() + float(os.environ["FAULT_SECONDS"])
    steps = 0
    while True:
        # Of one mind about the end, so that nobody is left waiting.
        over = communicator.all_reduce(np.array(time.monotonic() > deadline, np.int32), "max", name="over")
        if over:
            break
        communicator.all_reduce(value, name="step")
        steps += 1
        if struck:
            sys.exit(3)
    report["steps"] = steps


def train_with_backup() -> None:
    import keras

    import tfring

    rows = np.ones((4 * SAVED_STEPS, 1024), np.float32)

    def fit(strategy: tfring.RingStrategy, units: int, **arguments) -> keras.Model:
        with strategy.scope():
            # Ones in, and -1/units as each weight's gradient: each step adds that, in numbers that are exact.
            layer = keras.layers.Dense(units, use_bias=False, kernel_initializer="zeros")
            model = keras.Sequential([keras.Input((1024,)), layer])
            model.compile(keras.optimizers.SGD(1.0), lambda y, predicted: -predicted, jit_compile=False)
        model.fit(rows, np.ones((len(rows), units)), batch_size=4, shuffle=False, verbose=0, **arguments)
        return model

    strategy = tfring.RingStrategy()
    fit(strategy, 1)
    strategy.close()
    before = what_is_open()
    report: dict = {"error": None}
    strategy = tfring.RingStrategy()
    say("under way")
    try:
        backup = tfring.callbacks.Backup(os.environ["FAULT_FOLDER"], every_steps=1)
        (weights,) = fit(strategy, SAVED_UNITS, callbacks=[backup]).get_weights()
        report["steps"] = " and ".join(f"{steps:g}" for steps in SAVED_UNITS * np.unique(weights))
    except TfringError as error:
        report.update(error=type(error).__name__, message=str(error))
    report.setdefault("when", time.time())
    strategy.close()
    gc.collect()
    print(json.dumps({**report, "left": len(what_is_open() - before)}), flush=True)


def train_over_tensorflow(fault: str, seconds: float) -> None:
    """The same loop over the collectives of MultiWorkerMirroredStrategy."""
    me = cluster.detect()
    os.environ["TF_CONFIG"] = json.dumps(
        {"cluster": {"worker": list(me.addresses)}, "task": {"type": "worker", "index": me.rank}}
    )
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    value = tf.ones([250_000])
    step = tf.function(lambda: strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("sum", value)))
    step()
    signal.signal(signal.SIGUSR1, lambda *_: strike(fault, seconds))
    say("under way")
    report: dict = {"error": None, "left": 0}
    try:
        while True:
            step()
    except (tf.errors.OpError, RuntimeError) as error:
        report.update(error=type(error).__name__, message=" ".join(str(error).split()), when=time.time())
    print(json.dumps(report), flush=True)
    os._exit(0)


def strike(fault: str, seconds: float) -> None:
    if fault == "slow":
        time.sleep(seconds)
    elif fault == "exit":
        sys.exit(3)
    else:
        raise LookupError("in the user's code")


def what_is_open() -> set[str]:
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    return found


def say(what: str) -> None:
    print(what, flush=True)


if __name__ == "__main__":
    if os.environ["FAULT_ENGINE"] == "tensorflow":
        train_over_tensorflow(sys.argv[1], float(sys.argv[3]))
    elif os.environ["FAULT_FOLDER"]:
        train_with_backup()
    else:
        main(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4]))
