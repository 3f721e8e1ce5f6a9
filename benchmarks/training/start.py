"""How long after it was started a program has trained its first step, and its memory: Keras alone, and launched.

The models are one of two dense layers, and MobileNetV2 of 156 layers.

As many processes of Keras alone, started at once and with nothing to do with each other, are what a machine allows.

    python benchmarks/training/start.py              # prints the table
    python benchmarks/training/start.py --write      # and writes it into README.md

Each start is a new process, or a new job; they take turns, round by round.
"""

from __future__ import annotations

import argparse
import itertools
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import contest  # noqa: E402

MARKS = re.compile("(<!-- start.py -->\n).*?(<!-- end of start.py -->)", re.DOTALL)
LARGE = "MobileNetV2"
SECONDS = 300
STAGES = ("Python", "Keras", "strategy", "model", "`fit`")  # by their ends
PROGRAM = """
import time
ends = [time.monotonic()]
import contextlib, os, pathlib, resource, sys
import keras
import numpy as np
ends.append(time.monotonic())
scope = contextlib.nullcontext()
if sys.argv[2] == "tfring":
    import tfring
    scope = tfring.RingStrategy().scope()
ends.append(time.monotonic())
with scope:
    if sys.argv[3:]:
        model, shape = keras.applications.MobileNetV2((32, 32, 3), weights=None, classes=1), (32, 32, 32, 3)
        model.compile("adam", "mse")
    else:
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        shape = (32, 64)
ends.append(time.monotonic())
model.fit(np.ones(shape, "float32"), np.ones((32, 1), "float32"), batch_size=32, verbose=0)
ends.append(time.monotonic())
pathlib.Path(sys.argv[1], str(os.getpid())).write_text(
    " ".join(map(str, [*ends, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss]))
)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", default="1,2,8")
    parser.add_argument("--write", action="store_true", help="write the table into README.md")
    arguments = parser.parse_args()
    conditions = contest.conditions(realtime=False)
    starts: dict[str, tuple] = {"Keras alone": (1, False)}
    for n in map(int, arguments.workers.split(",")):
        starts |= {f"Keras alone, {n} at once": (n, False)} if n > 1 else {}
        starts |= {f"`tfring launch -n {n}`": (n, True)}
    starts |= {f"Keras alone, {LARGE}": (1, False, LARGE)}
    starts |= {f"`tfring launch -n {n}`, {LARGE}": (n, True, LARGE) for n in (1, 2)}
    stages: dict[str, list[list[float]]] = {name: [] for name in starts}
    kilobytes: dict[str, list[int]] = {name: [] for name in starts}
    with tempfile.TemporaryDirectory() as folder:
        program = pathlib.Path(folder, "program.py")
        program.write_text(PROGRAM)
        for _ in range(arguments.rounds + 1):  # the first reads TensorFlow's files into memory
            for name, how in starts.items():
                took, memory = start(program, pathlib.Path(folder, "ends"), *how)
                stages[name].append(took)
                kilobytes[name].append(memory)
    lines = [
        f"{conditions} Seconds from a start to the end of the first step of the slowest worker, medians of "
        f"{arguments.rounds} rounds, and beyond Keras alone; the seconds of its stages, from when all workers are "
        "through the one before. The most memory that a process took until then.",
        "",
        f"| | seconds | later | {' | '.join(STAGES)} | MB a process |",
        f"|---|{'---:|' * (len(STAGES) + 3)}",
    ]
    for name, rounds in stages.items():
        alone = stages[f"Keras alone, {LARGE}" if LARGE in name else "Keras alone"][1:]
        later = statistics.median(sum(took) - sum(other) for took, other in zip(rounds[1:], alone, strict=True))
        medians = [statistics.median(map(sum, rounds[1:])), later]
        medians += map(statistics.median, zip(*rounds[1:], strict=True))
        memory = statistics.median(kilobytes[name][1:]) / 1000
        lines.append(f"| {name} | {' | '.join(f'{seconds:.2f}' for seconds in medians)} | {memory:,.0f} |")
    text = "\n".join(lines)
    print(text)
    if arguments.write:
        page = HERE / "README.md"
        page.write_text(MARKS.sub(lambda marks: f"{marks[1]}\n{text}\n\n{marks[2]}", page.read_text()))


def start(
    program: pathlib.Path, folder: pathlib.Path, num_processes: int, is_launched: bool, *model: str
) -> tuple[list[float], int]:
    """Returns seconds of each stage, from when all are through the one before, and kB of the largest process."""
    folder.mkdir()
    command = [sys.executable, *(["-m", "tfring.launch", "-n", str(num_processes)] if is_launched else [])]
    command += [str(program), str(folder), "tfring" if is_launched else "Keras", *model]
    # As installed: pip compiles what it installs, and here the first round does.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    begin = time.monotonic()
    started = [
        subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(1 if is_launched else num_processes)
    ]
    try:
        for process in started:
            if process.wait(SECONDS):
                raise subprocess.CalledProcessError(process.returncode, command)
    finally:
        for process in started:
            process.kill()
    processes = [[*map(float, path.read_text().split())] for path in folder.iterdir()]
    shutil.rmtree(folder)
    ends = [max(of_stage) for of_stage in zip(*(ends for *ends, _ in processes), strict=True)]
    return [end - start for start, end in itertools.pairwise([begin, *ends])], int(max(one[-1] for one in processes))


if __name__ == "__main__":
    main()
