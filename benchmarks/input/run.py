"""An epoch of `fit` where the input is the work: one worker and two, which map half of the rows each.

    python benchmarks/input/run.py                   # prints the table of docs/data.md
    python benchmarks/input/run.py --write           # and writes it there

Two inputs: 203 rows that each wait 5 ms in a serial map, and 1,024 JPEG files of 256 x 256. Each worker has one core,
as if it had a host of its own: TensorFlow runs maps without state on all cores, and one worker would use both.
Shown is the shortest of three epochs after the first.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parents[2]
INPUTS = {"waiting": "203 rows, 5 ms of waiting each", "jpeg": "1,024 JPEG files of 256 x 256"}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the table into docs/data.md")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        seconds = {n: measure(n, folder) for n in (1, 2)}
    lines = ["| input | 1 worker, s | 2 workers, s | ratio |", "|---|---:|---:|---:|"]
    for name, text in INPUTS.items():
        one, two = seconds[1][name], seconds[2][name]
        lines.append(f"| {text} | {one:.2f} | {two:.2f} | {two / one:.2f} |")
    table = "\n".join(lines)
    print(table)
    if arguments.write:
        page = ROOT / "docs" / "data.md"
        marks = r"(<!-- benchmarks/input/run.py -->\n).*?(\n<!-- end -->)"
        page.write_text(re.sub(marks, lambda m: m[1] + table + m[2], page.read_text(), flags=re.DOTALL))


def measure(workers, folder):
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "KERAS_BACKEND": "tensorflow",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TF_NUM_INTRAOP_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "-1",
    }
    command = [sys.executable, "-m", "tfring.launch", "-n", str(workers), __file__, "worker", folder]
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    return json.loads(re.search(r"\{.*\}", output)[0])


def train(folder):
    import keras
    import numpy as np
    import tensorflow as tf

    import tfring

    strategy = tfring.RingStrategy()

    def wait(x, y):
        def sleep(x):
            time.sleep(0.005)
            return x

        return tf.ensure_shape(tf.numpy_function(sleep, [x], tf.float32), [4]), y

    def decode(path):
        image = tf.io.decode_jpeg(tf.io.read_file(path), channels=3)
        return tf.reduce_mean(tf.reshape(tf.cast(image, tf.float32), [4, -1]), 1) / 255, tf.constant([1.0])

    rows = np.random.default_rng(0).normal(size=(203, 4)).astype("float32")
    datasets = {
        "waiting": tf.data.Dataset.from_tensor_slices((rows, rows[:, :1])).map(wait).batch(20),
        "jpeg": tf.data.Dataset.from_tensor_slices(pictures(pathlib.Path(folder), strategy)).map(decode).batch(32),
    }
    seconds = {}
    for name, dataset in datasets.items():
        with strategy.scope():
            model = keras.Sequential([keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        epochs = epoch_times()
        model.fit(dataset, epochs=4, verbose=0, callbacks=[epochs])
        seconds[name] = min(epochs.seconds[1:])
    if strategy.cluster.is_chief:
        print(json.dumps(seconds))


def epoch_times():
    import keras

    class Times(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.begin = time.perf_counter()

        def on_epoch_end(self, epoch, logs=None):
            self.seconds.append(time.perf_counter() - self.begin)

    times = Times()
    times.seconds = []
    return times


def pictures(folder, strategy):
    import numpy as np
    import tensorflow as tf

    paths = [folder / f"{i}.jpg" for i in range(1024)]
    if strategy.cluster.is_chief and not paths[0].exists():
        image = np.random.default_rng(0).integers(0, 255, (256, 256, 3), dtype=np.uint8)
        encoded = tf.io.encode_jpeg(image).numpy()
        for path in paths:
            path.write_bytes(encoded)
    strategy.barrier()
    return [str(path) for path in paths]


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[int(os.environ["TFRING_LOCAL_RANK"])]})
        train(sys.argv[2])
    else:
        main()
