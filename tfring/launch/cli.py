"""The command line: `tfring launch -n 4 train.py --my-args`."""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import NoReturn

from tfring._version import __version__
from tfring.cluster import tf_config
from tfring.errors import ConfigurationError
from tfring.launch.guard import run_guarded
from tfring.launch.job import Job

_LAUNCH_HELP = """\
Starts N workers of a program on this machine, joined in a ring.

output:
  Rank 0's is passed on as it is; of the other ranks whole lines are shown, "[rank] " in front, without
  their progress bars. Standard input goes to rank 0.

ends:
  When all workers have ended with exit code 0, with 0. When one fails, the others are stopped, its traceback
  comes last, and its exit code (128 + signal if it was killed) is the launcher's. Ctrl-C interrupts all
  workers; a second one kills them. Nothing a worker has started outlives the job.

environment of a worker:
  TFRING_RANK, TFRING_WORLD_SIZE, TFRING_LOCAL_RANK, TFRING_LOCAL_WORLD_SIZE, TFRING_ADDRESSES,
  TFRING_LISTEN_FD
      its place in the ring; tfring.RingStrategy() reads them.
  TF_NUM_INTRAOP_THREADS, TF_NUM_INTEROP_THREADS, OMP_NUM_THREADS
      its share of the CPUs this process may use, unless set already.
  PYTHONUNBUFFERED=1, PYTHONFAULTHANDLER=1
      unless set already (to nothing, to turn them off).
"""

_EXAMPLES = """\
examples:
  tfring launch -n 4 train.py --epochs 3
  tfring launch -n 2 --log-dir logs -m my_package.train
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command of `tfring`.

    Args:
        argv: Without the program's name; `sys.argv[1:]` by default.

    Returns:
        The exit code.
    """
    _open_standard_streams()
    arguments, unknown = _parser().parse_known_args(argv)
    if unknown:
        arguments.parser.error(f"unknown option {unknown[0]} (options of the program stand behind its name)")
    return arguments.run(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="tfring", description="Trains Keras models on many processes, round a ring.")
    parser.add_argument("--version", action="version", version=f"tfring {__version__}")
    commands = parser.add_subparsers(metavar="command", required=True)
    launch = commands.add_parser(
        "launch",
        help="start the workers of a program",
        usage="tfring launch -n N [--log-dir DIR] {SCRIPT | -m MODULE} [ARGUMENT ...]",
        description=_LAUNCH_HELP,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    launch.add_argument("-n", type=_positive, required=True, metavar="N", help="number of workers")
    launch.add_argument(
        "--log-dir",
        type=pathlib.Path,
        metavar="DIR",
        help="write all that a rank prints to DIR/rank-<rank>.log",
    )
    launch.add_argument(
        "-m",
        dest="module",
        nargs=argparse.REMAINDER,
        metavar="MODULE",
        help="run a module, as `python -m` does",
    )
    launch.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT", help="run a script, with its arguments")
    launch.set_defaults(run=_launch, parser=launch)
    return parser


def _launch(arguments: argparse.Namespace) -> int:
    error = arguments.parser.error
    if arguments.module is not None:
        if not arguments.module or arguments.module[0].startswith("-"):
            error("-m takes the name of a module, with its arguments behind it")
        command = ["-m", *arguments.module]
    elif not arguments.script:
        error("name a script or a module to run: tfring launch -n 2 train.py")
    else:
        command = list(arguments.script)
        if command[0] == "--":
            del command[0]
        script = command[0] if command else ""
        if script == "-":
            error("a program cannot come from standard input: there is one, and several workers")
        if not os.path.exists(script):
            error(f"no such script: {script!r} (from {os.getcwd()})")
    value = os.environ.get(tf_config.VARIABLE, "")
    try:
        describes_a_cluster = tf_config.parse(value) is not None
    except ConfigurationError as problem:
        error(str(problem))
    if describes_a_cluster:
        error(
            f"TF_CONFIG is set, and so is -n: both say who is in the ring. Received: TF_CONFIG={value}\n"
            f"Run the program without `tfring launch`, or first:\n  unset TF_CONFIG"
        )
    if arguments.log_dir:
        try:
            arguments.log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            error(f"cannot make the folder of --log-dir: {problem}")
    job = Job(command, arguments.n, log_dir=arguments.log_dir)
    return run_guarded(job.run)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong, then where help is, in place of the whole usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\nSee {self.prog} --help\n")


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"a whole number from 1 up, not {text!r}")
    return int(text)


def _open_standard_streams() -> None:
    """Under `>&-` a pipe of ours would get the closed stream's number, and take what is printed."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is fd


if __name__ == "__main__":
    sys.exit(main())
