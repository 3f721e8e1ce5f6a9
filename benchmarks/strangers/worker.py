"""One of two ranks that train: answers run.py's questions."""

from __future__ import annotations

import os
import time

import contest

BATCH = 64


def main() -> None:
    _, rank, _, ports = contest.place()
    addresses = [f"127.0.0.1:{port}" for port in ports]
    os.environ.setdefault("TFRING_SECRET", "without one, a host takes no TCP")

    import keras
    import numpy as np
    import tensorflow as tf

    import tfring
    from tfring.cluster import Cluster

    keras.utils.set_random_seed(1)
    strategy = tfring.RingStrategy(cluster=Cluster.from_hosts(addresses, rank=rank))
    with strategy.scope():
        layers = [keras.layers.Dense(256, "relu"), keras.layers.Dense(256, "relu"), keras.layers.Dense(8)]
        model = keras.Sequential(layers)
        model.compile("adam", "mse")
    random = np.random.default_rng(1)
    x, y = random.normal(size=(BATCH, 128)).astype("float32"), random.normal(size=(BATCH, 8)).astype("float32")
    data = tf.data.Dataset.from_tensors((x, y)).repeat()

    def train(steps: int, realtime: bool) -> tuple[float, float]:
        """Seconds by the clock, and of this process's CPU."""
        with contest.realtime(realtime):
            began = time.perf_counter(), time.process_time()
            model.fit(data, steps_per_epoch=steps, verbose=0)
            return time.perf_counter() - began[0], time.process_time() - began[1]

    contest.serve(
        rank,
        facts=lambda: [f"TensorFlow {tf.__version__}", f"Keras {keras.__version__}"],
        port=lambda: ports[rank],
        train=train,
    )


if __name__ == "__main__":
    main()
