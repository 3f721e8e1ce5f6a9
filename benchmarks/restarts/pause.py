"""How long do steps take that save a backup, and those during which it is written?

    python benchmarks/restarts/pause.py                    # two workers, 500 MB of state, five backups
    python benchmarks/restarts/pause.py -n 1 --megabytes 100 --folder /mnt/shared/backup

An embedding that is not trained is the state, so that a step takes about as long whatever its size.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
SAVES, STEPS_BETWEEN = 5, 500
DIMENSION, ROWS = 64, 2048


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-n", type=int, default=2, metavar="WORKERS", help="default 2")
    parser.add_argument("--megabytes", type=int, default=500, help="of state (default 500)")
    parser.add_argument("--folder", help="where backups are written (default: a temporary folder)")
    args = parser.parse_args()
    if "TFRING_RANK" in os.environ:
        train(args.megabytes, args.folder)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tfring.launch", "-n", str(args.n), str(HERE / "pause.py")]
        command += ["--megabytes", str(args.megabytes), "--folder", args.folder or folder]
        environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
        environ["PYTHONPATH"] = os.pathsep.join([*filter(None, [environ.get("PYTHONPATH")]), str(HERE.parents[1])])
        return subprocess.run(command, env=environ, check=False).returncode


def train(megabytes: int, folder: str) -> None:
    import keras
    import numpy as np

    import tfring

    class Times(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.began: list[float] = []

        def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
            self.began.append(time.perf_counter())

    with tfring.RingStrategy().scope():
        ids = keras.Input((1,), dtype="int32")
        table = keras.layers.Embedding(megabytes * 10**6 // (4 * DIMENSION), DIMENSION, trainable=False)
        features = keras.layers.Flatten()(table(ids))
        for _ in range(3):
            features = keras.layers.Dense(512, activation="relu")(features)
        model = keras.Model(ids, keras.layers.Dense(1)(features))
        model.compile("sgd", "mse")
    count = (SAVES + 1) * STEPS_BETWEEN * ROWS
    x, y, times = np.arange(count, dtype=np.int32) % 1000, np.ones(count, np.float32), Times()
    backup = tfring.callbacks.Backup(folder, every_steps=STEPS_BETWEEN)
    model.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0, callbacks=[times, backup])
    took = np.diff(times.began)
    saving = [number for number in range(len(took)) if (number + 1) % STEPS_BETWEEN == 0]
    near = {number + later for number in saving for later in range(STEPS_BETWEEN // 2)}
    others = [float(took[number]) for number in range(STEPS_BETWEEN, len(took)) if number not in near]
    after = [sum(map(float, took[number + 1 : number + STEPS_BETWEEN // 2])) for number in saving]
    undisturbed = statistics.median(others)
    if tfring.rank() == 0:
        pauses = [float(took[number]) - undisturbed for number in saving]
        slower = [seconds - undisturbed * (STEPS_BETWEEN // 2 - 1) for seconds in after]
        print(f"{tfring.__file__}: load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
        print(f"a step: {1e3 * undisturbed:.1f} ms")
        print(f"pause of a step that saves: median {statistics.median(pauses):.2f} s, longest {max(pauses):.2f} s")
        print(f"time that the {STEPS_BETWEEN // 2 - 1} steps after it lose: median {statistics.median(slower):.2f} s")


if __name__ == "__main__":
    sys.exit(main())
