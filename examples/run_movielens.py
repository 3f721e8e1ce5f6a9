"""Sets everything up and trains the movie recommender with two workers; one command from a fresh clone.

    python3 examples/run_movielens.py                     two workers
    python3 examples/run_movielens.py -n 4 --epochs 3     what it does not know it passes on to movielens.py

It makes the virtual environment `.venv`, installs tfring into it, downloads the data into `data/` and leaves
a plot in `results/`. What is done already is not done again. It needs Python 3.11 to 3.13, with venv, and
g++.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
INSTALLED = VENV / "tfring-installed"  # the fingerprint of the sources that were installed


def main() -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        allow_abbrev=False,
        epilog="Other arguments go to movielens.py; see `python examples/movielens.py --help`.",
    )
    parser.add_argument("-n", type=int, default=2, metavar="WORKERS", help="default 2")
    args, for_example = parser.parse_known_args()

    check_machine()
    make_environment()
    install()
    print(f"[3/3] Training with {args.n} workers", flush=True)
    launch = [f"{VENV}/bin/tfring", "launch", "-n", str(args.n)]
    command = [*launch, f"{ROOT}/examples/movielens.py", "--output-dir", f"{ROOT}/results", *for_example]
    environ = {"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ}  # fewer notes of TensorFlow on its start
    return subprocess.run(command, env=environ).returncode


def check_machine() -> None:
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        sys.exit(f"{sys.executable} is Python {sys.version.split()[0]}, and tfring runs on Python 3.11 to 3.13.")
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        sys.exit("This Python makes no virtual environments. Debian, Ubuntu:   apt install python3-venv")
    sys.path.insert(0, str(ROOT))
    from tfring import _build

    try:
        _build.compiler()
    except _build.BuildError as error:
        sys.exit(str(error))


def make_environment() -> None:
    if succeeds(PYTHON, "-m", "pip", "--version"):
        print(f"[1/3] {VENV} is there", flush=True)
        return
    print(f"[1/3] Making {VENV}", flush=True)
    run(sys.executable, "-m", "venv", VENV)


def install() -> None:
    """Installs this folder into the environment, unless what is installed came from the same sources."""
    fingerprint = fingerprint_of_sources()
    if INSTALLED.exists() and INSTALLED.read_text() == fingerprint:
        print("[2/3] tfring is installed", flush=True)
        return
    print("[2/3] Installing tfring and TensorFlow; the first time this takes minutes", flush=True)
    # tensorflow and tensorflow-cpu share a folder: where there is one already, it stays.
    find = "import importlib.util, sys; sys.exit(importlib.util.find_spec('tensorflow') is None)"
    extras = "examples" if succeeds(PYTHON, "-c", find) else "cpu,examples"
    run(PYTHON, "-m", "pip", "install", "--disable-pip-version-check", f".[{extras}]")
    INSTALLED.write_text(fingerprint)


def fingerprint_of_sources() -> str:
    sources = [ROOT / "pyproject.toml", ROOT / "setup.py"]
    sources += (path for path in (ROOT / "tfring").rglob("*") if path.suffix in (".py", ".cc", ".h"))
    digest = hashlib.sha256()
    for path in sorted(sources):
        digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()


def succeeds(*command: str | pathlib.Path) -> bool:
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False


def run(*command: str | pathlib.Path) -> None:
    """Runs a command in the root of the repository; ends the program where it fails."""
    code = subprocess.run(command, cwd=ROOT).returncode
    if code:
        sys.exit(f"`{' '.join(map(str, command))}` failed with exit code {code}; the reason is above.")


if __name__ == "__main__":
    sys.exit(main())
