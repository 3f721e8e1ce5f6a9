"""Trains with packages of the Keras family on two workers and in one plain process, and prints a row for each.

    python benchmarks/family/run.py [NAME ...] [--write] [--venv FOLDER]

One environment has TensorFlow, Keras and a wheel of this checkout; each package gets one of its own on top of it, so
that none of them sees another's requirements. TensorFlow and Keras are held at the versions of the first: pip's reason
stands in the table where a package cannot be had beside them. `--write` puts the table into docs/family.md, where rows
of other packages stay.
"""

from __future__ import annotations

import argparse
import datetime
import os
import pathlib
import re
import subprocess
import sys
from typing import NamedTuple

FOLDER = pathlib.Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
PAGE = ROOT / "docs" / "family.md"
BEGIN, END = "<!-- table -->\n", "<!-- end -->\n"
INSTALL_SECONDS, RUN_SECONDS = 900, 300
EQUAL = 1e-4  # of a figure, relative to the largest of its array


class Program(NamedTuple):
    """A file with_NAME.py: its row's package, and where something else is installed or has the version, that.

    `why` tells by whose doing its figures are not those of one process.
    """

    package: str
    requirements: tuple[str, ...] = ()
    version_of: str = ""
    why: str = ""


PROGRAMS = {
    "keras_rs": Program("keras-rs"),
    "keras_tuner": Program("keras-tuner"),
    "keras_hub": Program("keras-hub"),
    "optuna": Program("optuna"),
    "tensorboard": Program("tensorboard", ("tensorboard-plugin-profile",)),
    "scikeras": Program("scikeras"),
    "mlflow": Program("mlflow"),
    "wandb": Program("wandb"),
    "tf_data_service": Program("tf.data service", ("tensorflow-cpu",), version_of="tensorflow-cpu"),
    "absl": Program("absl-py"),
    "aeon": Program("aeon"),
    "stardist": Program("stardist", why="its loss is a ratio: a mean over the batch divided by the mean of its mask"),
    "keras_tcn": Program("keras-tcn"),
    "bayesflow": Program("bayesflow"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(PROGRAMS)}")
    parser.add_argument("--write", action="store_true", help=f"put the rows into {PAGE.relative_to(ROOT)}")
    parser.add_argument("--venv", type=pathlib.Path, default=ROOT / ".venv-family", metavar="FOLDER")
    parser.add_argument("--tensorflow", default="tensorflow-cpu>=2.18,<2.22", metavar="REQUIREMENT")
    arguments = parser.parse_args()
    for name in arguments.names:
        if name not in PROGRAMS:
            parser.error(f"a NAME is one of {', '.join(PROGRAMS)}, not {name!r}")
    base = make_base(arguments.venv.resolve(), arguments.tensorflow)
    rows = {}
    for name in arguments.names or PROGRAMS:
        rows[name] = row_of(name, base)
        print(rows[name], flush=True)
        if arguments.write:
            write(rows, base)
    return 0


class Base(NamedTuple):
    """The environment with TensorFlow, Keras and tfring."""

    folder: pathlib.Path
    tensorflow: str
    keras: str

    @property
    def python(self) -> pathlib.Path:
        return self.folder / "base" / "bin" / "python"

    @property
    def constraints(self) -> pathlib.Path:
        return self.folder / "constraints.txt"


def make_base(folder: pathlib.Path, tensorflow: str) -> Base:
    """Makes the environment that all packages see, with a wheel of this checkout."""
    python, wheels = folder / "base" / "bin" / "python", folder / "wheels"
    if not python.exists():
        check([sys.executable, "-m", "venv", folder / "base"])
        check([python, "-m", "pip", "install", "--quiet", "--upgrade", "pip"])
    for old in wheels.glob("*.whl"):
        old.unlink()
    check([python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", wheels, ROOT])
    [wheel] = wheels.glob("*.whl")
    check([python, "-m", "pip", "install", "--quiet", wheel, tensorflow, "keras>=3.8", "tensorboard"])
    check([python, "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall", wheel])
    base = Base(folder, version(python, "tensorflow-cpu"), version(python, "keras"))
    # tensorflow and tensorflow-cpu install into the same folder: whoever asks for the first has it by the second.
    site = site_packages(python)
    info = site / f"tensorflow-{base.tensorflow}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: tensorflow\nVersion: {base.tensorflow}\n")
    (info / "RECORD").write_text("")
    pins = [f"tensorflow=={base.tensorflow}", f"tensorflow-cpu=={base.tensorflow}", f"keras=={base.keras}"]
    base.constraints.write_text("\n".join(pins) + "\n")
    return base


def row_of(name: str, base: Base) -> str:
    """Installs what a program needs, runs it, and returns its row of the table."""
    program = PROGRAMS[name]
    tried = (FOLDER / f"with_{name}.py").read_text().split('"""')[1].strip().rstrip(".")
    folder = base.folder / name
    python = folder / "bin" / "python"
    if not python.exists():
        check([base.python, "-m", "venv", "--without-pip", folder])
        (site_packages(python) / "base.pth").write_text(f"{site_packages(base.python)}\n")
    pip = [base.python, "-m", "pip", "--python", python, "install", "--quiet", "--prefer-binary"]
    done = run([*pip, "-c", base.constraints, *(program.requirements or [program.package])], INSTALL_SECONDS)
    if done.returncode:
        return row(program.package, "", base.keras, tried, f"not installed: {reason_of_pip(done.stderr)}")
    result = compare(name, python, base.folder / "runs" / name)
    return row(program.package, version(python, program.version_of or program.package), base.keras, tried, result)


def compare(name: str, python: pathlib.Path, folder: pathlib.Path) -> str:
    """Runs a program plain and on two workers; returns what came of it."""
    plain, ring = folder / "plain", folder / "ring"
    for empty in (plain, ring):
        run(["rm", "-rf", empty])
        empty.mkdir(parents=True)
    worker = FOLDER / "worker.py"
    alone = run([python, worker, f"with_{name}", plain, "--plain"], RUN_SECONDS, plain)
    if alone.returncode:
        return f"fails in one plain process: {last_error(alone)}"
    two = run([python, "-m", "tfring.launch", "-n", "2", worker, f"with_{name}", ring], RUN_SECONDS, ring)
    if two.returncode:
        return f"fails: {last_error(two)}"
    command = [python, FOLDER / "difference.py", plain, ring]
    ranks, process = (float(word) for word in run(command, RUN_SECONDS).stdout.split())
    if ranks:
        return f"the ranks differ by {ranks:.0e}"
    if process <= EQUAL:
        return f"equal to one process within {process:.0e}"
    why = PROGRAMS[name].why or "not explained"
    return f"trains, both ranks alike; {process:.0e} from one process: {why}"


def row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def reason_of_pip(text: str) -> str:
    """Returns pip's reason: the conflict it names, else its first error."""
    lines = [line.strip() for line in text.splitlines()]
    errors = [line for line in lines if line.startswith("ERROR")]
    conflict = [line for line in lines if " depends on " in line or "requires" in line.lower()]
    return "; ".join([*conflict[:3], *errors[:1]])[:300] or "it gave none"


def last_error(done: subprocess.CompletedProcess) -> str:
    """Returns the last line that names an exception."""
    text = done.stdout + done.stderr
    lines = [line.strip() for line in text.splitlines() if re.search(r"\w(Error|Exception|Exit)\b", line)]
    return lines[-1][:300] if lines else f"exit code {done.returncode}"


def run(command, seconds: float = RUN_SECONDS, folder: pathlib.Path | None = None) -> subprocess.CompletedProcess:
    """Runs a command within a limit, and keeps its output in `folder`."""
    environment = {**os.environ, "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("PYTHONPATH", None)  # what is imported is the wheel
    words = ["timeout", "--kill-after=10", str(seconds), *map(str, command)]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, stdin=subprocess.DEVNULL, cwd=folder)
    if folder:
        (folder / "output.txt").write_text(done.stdout + done.stderr)
    return done


def check(command) -> str:
    done = run(command, INSTALL_SECONDS)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


def version(python: pathlib.Path, package: str) -> str:
    return check([python, "-c", f"from importlib import metadata; print(metadata.version({package!r}))"])


def site_packages(python: pathlib.Path) -> pathlib.Path:
    return pathlib.Path(check([python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"]))


def write(rows: dict[str, str], base: Base) -> None:
    """Puts rows into the page, in the order of `PROGRAMS`."""
    before, table = PAGE.read_text().split(BEGIN)
    table, after = table.split(END)
    packages = {name: program.package for name, program in PROGRAMS.items()}
    old = {line.split("|")[1].strip(): line for line in table.splitlines() if line.startswith("| ")}
    lines = [rows.get(name) or old.get(package) for name, package in packages.items()]
    head = (
        f"TensorFlow {base.tensorflow}, Keras {base.keras}, Python {check([base.python, '-V']).split()[1]}, "
        f"{datetime.date.today()}.\n\n| package | version | Keras | tried | two workers |\n|---|---|---|---|---|\n"
    )
    PAGE.write_text(before + BEGIN + head + "".join(f"{line}\n" for line in lines if line) + END + after)


if __name__ == "__main__":
    sys.exit(main())
