"""Trains, compares and measures tfring on a GPU, within six minutes: see README.md.

    python benchmarks/gpu/run.py                            # all checks, the first in the order of their value
    python benchmarks/gpu/run.py --only "optimizer|where"   # those whose names a regular expression is found in
    python benchmarks/gpu/run.py --list

Prints a line for each check as it ends, and writes `results.json` after it. A check that fails or takes longer than its
limit stops none that follow. On a machine without a GPU logical CPU devices stand in for it.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import os
import pathlib
import platform
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(pathlib.Path(__file__).resolve().parent)]

import gpu_checks as checks  # noqa: E402
from gpu_checks import CHECKS, Check  # noqa: E402

from tfring.gpus import visible_gpus  # noqa: E402

ENVIRONMENT = {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "1", "TF_FORCE_GPU_ALLOW_GROWTH": "true"}
SECONDS = 360.0  # for all: what has not begun then is not run
SLOWER = 1.0 if visible_gpus(os.environ) else 3.0  # than a GPU's machine
START_SECONDS = 60.0  # of a job, until its first check is done, beyond the limit of that
END_SECONDS = 10.0  # of a job that was told to end


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", metavar="PATTERN", help="a regular expression, found in names")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"for all, default {SECONDS:.0f}")
    parser.add_argument("--list", action="store_true", help="print the names alone")
    out = pathlib.Path(os.environ.get("OUT", "."))
    parser.add_argument("--out", type=pathlib.Path, default=out, help="folder of results.json, default $OUT or here")
    arguments = parser.parse_args()
    chosen = [check for check in CHECKS if re.search(arguments.only, check.name)]
    if arguments.list or not chosen:
        print("\n".join(check.name for check in chosen) or f"no name has {arguments.only!r}")
        return 0 if chosen else 2
    results: dict[str, Any] = {"machine": machine(), "checks": []}
    deadline = time.monotonic() + arguments.seconds
    for found in outcomes(chosen, deadline):
        results["checks"].append(found)
        print(line_of(found), flush=True)
        (arguments.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    counts = {verdict: sum(found["verdict"] == verdict for found in results["checks"]) for verdict in VERDICTS}
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count))
    return int(counts["ok"] < len(chosen))


VERDICTS = ("ok", "FAILED", "not run")


def outcomes(chosen: list[Check], deadline: float) -> Iterator[dict[str, Any]]:
    """Yields what has become of each check, in order; those of one kind of job that stand together share it."""
    for job, group in itertools.groupby(chosen, lambda check: check.job):
        rest = list(group)
        while rest:  # after one that failed, the rest run in a job of their own
            done = 0
            for found in outcomes_of_job(job, rest, deadline):
                yield found
                done += 1
            rest = rest[done:]


def outcomes_of_job(job: str, rest: list[Check], deadline: float) -> Iterator[dict[str, Any]]:
    """Yields what has become of checks until one has failed, or of all; at least of one."""
    if time.monotonic() > deadline:
        yield from ({"name": check.name, "job": job, "verdict": "not run"} for check in rest)
        return
    with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
        program = [str(pathlib.Path(checks.__file__)), folder, *(check.name for check in rest)]
        launch = ["-m", "tfring.launch", *shlex.split(job)] if job.startswith("-n") else []
        ranks = int(shlex.split(job)[1]) if launch else 1
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": path}
        log = pathlib.Path(folder, "log")
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *launch, *program],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                files = [pathlib.Path(folder, f"rank-{rank}.jsonl") for rank in range(ranks)]
                yield from follow(process, rest, files, log)
            finally:
                end(process)


def follow(
    process: subprocess.Popen, rest: list[Check], files: list[pathlib.Path], log: pathlib.Path
) -> Iterator[dict[str, Any]]:
    """Yields what has become of checks that a job runs, until one has failed."""
    begin = time.monotonic()
    for number, check in enumerate(rest):
        limit = SLOWER * check.seconds + (START_SECONDS if number == 0 else 0.0)
        found: dict[str, Any] = {"name": check.name, "job": check.job}
        while True:
            has_ended = process.poll() is not None
            told = [each for each in map(read, files) if check.name in each]
            if len(told) == len(files) and not any("error" in each[check.name] for each in told):
                break
            if has_ended or time.monotonic() - begin > limit:
                errors = [each[check.name]["error"] for each in told if "error" in each[check.name]]
                why = f"took longer than {limit:.0f} s" if not has_ended else f"ended with {process.returncode}"
                end(process)
                tail = log.read_text(errors="replace").splitlines()[-40:]
                error = next((each for each in errors if "PeerLost" not in each), "; ".join([*errors[:1], why]))
                yield {**found, "verdict": "FAILED", "error": error, "log": tail}
                return
            time.sleep(0.05)
        figures: dict[str, Any] = {}
        for each in reversed(told):  # those of rank 0 count, where several have one
            figures.update(each[check.name]["figures"])
        seconds = max(each[check.name]["seconds"] for each in told)
        yield {**found, "verdict": "ok", "seconds": seconds, "figures": figures}
        begin = time.monotonic()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_SECONDS)


def read(file: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Returns what a rank has noted of each check; a line that is being written is left for later."""
    text = file.read_text() if file.exists() else ""
    lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return {line["name"]: line for line in lines}


def end(process: subprocess.Popen) -> None:
    """Ends a job, with all that it has started."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            process.send_signal(signum)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def line_of(found: dict[str, Any]) -> str:
    start = f"{found['verdict']:<8}{found['name']:<34}{found['job']:<24}"
    if found["verdict"] == "ok":
        shown = ", ".join(f"{name} {_shown(value)}" for name, value in found["figures"].items())
        return f"{start}{found['seconds']:6.1f} s  {shown}"
    return start + found.get("error", "").replace("\n", " ")[:300]


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.1e}" if 0 < abs(value) < 1e-2 else f"{value:g}"
    text = str(value)
    return text if len(text) <= 400 else f"{text[:400]} ..."  # results.json has all of it


def machine() -> dict[str, Any]:
    """Returns the date, the processor and what the driver tells of the GPU."""
    model = next((line for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), "")
    question = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        gpu = subprocess.run(question, capture_output=True, text=True, timeout=30).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        gpu = ""
    return {
        "date": str(datetime.date.today()),
        "cpu": model.partition(":")[2].strip(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "gpu": gpu or "none: logical CPU devices stand in",
    }


if __name__ == "__main__":
    sys.exit(main())
