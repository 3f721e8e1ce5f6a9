"""`fit` where the input is the work: one worker and two, which map half of the rows each, and their peers.

    python benchmarks/input/run.py                   # prints the tables
    python benchmarks/input/run.py --write           # and writes them into docs/data.md and README.md
    python benchmarks/input/run.py --rounds 0        # the first alone, that of docs/data.md

Two inputs of an epoch: 203 rows that each wait 5 ms in a serial map, and 1,024 JPEG files of 256 x 256. Each worker has
one core, as if it had a host of its own: TensorFlow runs maps without state on all cores, so one would use both.
Shown is the shortest of three epochs after the first.

Then pictures in memory, in TFRecords and in a folder (pictures.py), in interleaved rounds: Keras alone, two workers,
two that exchange nothing, two that only wait for each other in each step, and Horovod (made by
../collectives/make_horovod.sh).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE.parent))

import contest  # noqa: E402

KERAS, TFRING, APART, MEETING = ("plain", 1), ("tfring", 2), ("apart", 2), ("meeting", 2)
OLD, HOROVOD = ("old", 1), ("horovod", 2)
# (contestant, workers): heading, whether it runs under Horovod's Python, module it needs
COLUMNS = {
    KERAS: ("Keras alone", False, "tensorflow"),
    TFRING: ("two workers", False, "tensorflow"),
    APART: ("two, nothing exchanged", False, "tensorflow"),
    MEETING: ("two, one number exchanged a step", False, "tensorflow"),
    OLD: ("tf.keras of Horovod's TensorFlow", True, "tensorflow"),
    HOROVOD: ("Horovod, two workers", True, "horovod.tensorflow"),
}
RATIOS = {
    "two workers over one": KERAS,
    "over two that exchange nothing": APART,
    "over two that exchange one number": MEETING,
    "over Horovod": HOROVOD,
}
KINDS = {"memory": "in memory", "records": "in TFRecords", "folder": "in a folder, by `image_dataset_from_directory`"}
BATCH, STEPS = 128, (12, 64)
INPUTS = {"waiting": "203 rows, 5 ms of waiting each", "jpeg": "1,024 JPEG files of 256 x 256"}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the tables into the pages")
    parser.add_argument("--rounds", type=int, default=5, help="of the pictures")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of the pictures")
    parser.add_argument("--steps", default=",".join(map(str, STEPS)), help="of the pictures")
    parser.add_argument("--horovod-python", default=str(contest.HOROVOD_PYTHON))
    parser.add_argument("--no-epochs", dest="epochs", action="store_false", help="not the table of docs/data.md")
    contest.add_realtime(parser)
    arguments = parser.parse_args()
    tables = {ROOT / "docs" / "data.md": table_of_epochs} if arguments.epochs else {}
    if arguments.rounds:
        tables[HERE / "README.md"] = lambda: table_of_pictures(arguments)
    for page, table in tables.items():
        text = table()
        print(text)
        if arguments.write:
            marks = r"(<!-- benchmarks/input/run.py -->\n).*?(\n<!-- end -->)"
            written = re.sub(marks, lambda m, text=text: m[1] + text + m[2], page.read_text(), flags=re.DOTALL)
            page.write_text(written)


def table_of_epochs():
    with tempfile.TemporaryDirectory() as folder:
        seconds = {n: measure(n, folder) for n in (1, 2)}
    lines = ["| input | 1 worker, s | 2 workers, s | ratio |", "|---|---:|---:|---:|"]
    for name, text in INPUTS.items():
        one, two = seconds[1][name], seconds[2][name]
        lines.append(f"| {text} | {one:.2f} | {two:.2f} | {two / one:.2f} |")
    return "\n".join(lines)


def table_of_pictures(arguments):
    """The table of pictures, with what it was measured on."""
    conditions = contest.conditions(arguments.realtime)
    cells = [(kind, int(steps)) for kind in arguments.kinds.split(",") for steps in arguments.steps.split(",")]
    running, seconds, versions, missing = {}, {}, [], []
    def table(rounds):
        ratios = {title: column for title, column in RATIOS.items() if column in running}
        headings = [*(COLUMNS[column][0] for column in running), *ratios]
        lines = [
            f"{conditions} Versions: {'; '.join(versions)}. Files of {size / 1000:.0f} kB. Medians of {rounds} "
            "interleaved rounds; ratios are taken within a round.",
            *(f"Left out: {each}." for each in missing),
            "",
            f"| rows a second | {' | '.join(headings)} |",
            "|---|" + "---:|" * len(headings),
        ]
        for kind, steps in cells:
            of = {column: seconds[(kind, steps), column] for column in running}
            row = [f"{steps * BATCH / statistics.median(of[column]):,.0f}" for column in running]
            row += [
                f"{statistics.median(theirs / ours for ours, theirs in zip(of[TFRING], of[column], strict=True)):.2f}"
                for column in ratios.values()
            ]
            lines.append(f"| {KINDS[kind]}, {steps} steps | {' | '.join(row)} |")
        return "\n".join(lines)

    with contextlib.ExitStack() as stack:
        for column, (heading, is_old, module) in COLUMNS.items():
            wanted = [(column[0], heading, arguments.horovod_python if is_old else sys.executable, module)]
            started, left_out = stack.enter_context(
                contest.started(HERE / "pictures.py", wanted, column[1], realtime=arguments.realtime)
            )
            missing += left_out
            for contestant in started:
                running[column] = contestant
                versions += [fact for fact in contestant.facts if fact not in versions]
        size = running[KERAS].ask("size")[0]
        with contest.realtime_without_limit(arguments.realtime):
            for number in range(arguments.rounds):
                for cell in cells:
                    for column, contestant in running.items():
                        seconds.setdefault((cell, column), []).append(max(contestant.ask("pictures", *cell)))
                print(table(number + 1), file=sys.stderr)

    return table(arguments.rounds)


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
