"""The command line: `tfring launch -n 4 train.py`, `tfring doctor`, `bench`, `test`, `report` and `completion`."""

from __future__ import annotations

import argparse
import difflib
import functools
import importlib.util
import json
import os
import pathlib
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from tfring import _requirements, config, cpus, gpus
from tfring._version import __version__
from tfring.bench import options
from tfring.cluster import detection, slurm, tf_config
from tfring.errors import ConfigurationError
from tfring.launch import exit_codes, job_file, plan, remote, texts
from tfring.launch.guard import run_guarded
from tfring.launch.hosts import Host, ask_script, num_workers, of_allocation, parse_hosts, read_hostfile
from tfring.launch.job import Job
from tfring.launch.restarts import Limits, Restarts
from tfring.transport import secret

_NOT_READY = 10  # of rank 0 after it has reported this; any other code except 0: the doctor failed
_BENCH_FAILED = 2  # rank 0 has reported why
_TEST_FAILED = 1  # the rank has reported why
_AUTO = "auto"
_SHELLS = ("bash", "zsh")
_NO_RESTARTS = Limits(max_restarts=0)
_WHERE = ("n", "hosts", "hostfile", "hosts_from")  # one of them on the command line overrides all of them in a file
_VARIABLE_OF = {  # options that set a variable, for the launcher and all workers
    "--seed": "TFRING_SEED",
    "--start-timeout": "TFRING_CONNECT_TIMEOUT_SECONDS",
    "--interface": "TFRING_INTERFACE",
    "--port-range": "TFRING_PORT_RANGE",
    "--bind": "TFRING_BIND",
    "--encrypt": "TFRING_ENCRYPT",
}
# No effect if all workers start on this machine. Those of addresses have an effect on a rank that connects to others.
_SSH_OPTIONS = ("--ssh-port", "--ssh-identity", "--ssh-config")
_OPTIONS_OF_STARTED = ("--workdir", "--python")
_OPTIONS_OF_ADDRESSES = ("--interface", "--port-range")
# Options of Horovod, mpirun and torchrun.
_OPTIONS_OF_OTHERS = (
    "-np",
    "--np",
    "--num-proc",
    "-H",
    "--nproc-per-node",
    "--nproc_per_node",
    "--nnodes",
    "--workers",
    "--num-workers",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command of `tfring`.

    Args:
      argv: Arguments without the program's name. Defaults to `sys.argv[1:]`.

    Returns:
      The exit code.
    """
    _open_standard_streams()
    try:
        try:
            return _run_command(list(sys.argv[1:] if argv is None else argv))
        finally:
            if sys.stdout is not None:  # otherwise it is closed
                sys.stdout.flush()
    except BrokenPipeError:  # `tfring report ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for output that Python flushes at exit
        return 128 + signal.SIGPIPE


def _run_command(argv: list[str]) -> int:
    if argv[:1] == ["help"]:
        argv = [*argv[1:2], "--help"]
    parser = _parser()
    _check_command(parser, argv)
    arguments, unknown = parser.parse_known_args(argv)
    in_file = _options_in_a_file(parser, arguments)
    if in_file:  # the command line wins
        arguments, unknown = arguments.parser.parse_known_args(argv[1:], argparse.Namespace(**in_file))
    if getattr(arguments, "n", None) == _AUTO:
        in_slurm = slurm.in_allocation(os.environ)
        arguments.n = None if in_slurm else len(gpus.visible_gpus(os.environ)) or cpus.available_cpus()
    if unknown:
        near = _near(unknown[0], arguments.parser._option_string_actions)
        where = " Options of the program come after its name." if "script" in arguments else ""
        arguments.parser.error(f"unknown option {unknown[0]}.{near}{where}")
    for option, variable in _VARIABLE_OF.items():
        text = _given(arguments, option)
        if text is not None:
            os.environ[variable] = text
    return int(arguments.run(arguments))


def _options_in_a_file(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the values that the job's file, if there is one, has for options of the command."""
    launch = _commands(parser)["launch"]
    path = getattr(arguments, "config", None)
    if path is None and arguments.parser is launch and os.path.exists(job_file.PYPROJECT):
        path = pathlib.Path(job_file.PYPROJECT)
    if path is None:
        return {}
    try:
        words = job_file.arguments_of(path, launch)
    except ConfigurationError as problem:
        arguments.parser.error(str(problem))
    launch.place = f"{path}: "
    found = vars(launch.parse_args(words))
    launch.place = ""
    says_where = any(getattr(arguments, name) is not None for name in _WHERE)
    return {
        name: value
        for name, value in found.items()
        if hasattr(arguments, name) and value != launch.get_default(name) and not (says_where and name in _WHERE)
    }


def _commands(parser: argparse.ArgumentParser) -> Mapping[str, Any]:
    [commands] = [a.choices for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    return commands


def _near(name: str, names: Iterable[str]) -> str:
    """Returns a question about the name that was meant, or an empty string if none is close."""
    here = dict.fromkeys(_OPTIONS_OF_OTHERS, "-n") | {"-H": "--hosts"}
    close = difflib.get_close_matches(name, names, 1)
    return f" Did you mean {here.get(close[0], close[0])!r}?" if close else ""


def _given(arguments: argparse.Namespace, option: str) -> Any:
    """Returns the value of an option, or None if the command does not have it."""
    return getattr(arguments, option.lstrip("-").replace("-", "_"), None)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="tfring", description="Trains Keras models on many processes and machines.")
    parser.add_argument("--version", action="version", version=f"tfring {__version__}")
    commands = parser.add_subparsers(metavar="command", required=True)

    def command(name: str, run: Callable[[argparse.Namespace], int], **shown: Any) -> argparse.ArgumentParser:
        raw = argparse.RawDescriptionHelpFormatter
        added = commands.add_parser(name, formatter_class=raw, allow_abbrev=False, **shown)
        added.set_defaults(run=run, parser=added)
        return added

    def cluster_command(name: str, run: Callable[[argparse.Namespace], int], **shown: Any) -> argparse.ArgumentParser:
        usage = f"tfring {name} [-n N | --hosts HOSTS | --hostfile FILE | --hosts-from FILE] [OPTION ...]"
        added = command(name, run, usage=usage, **shown)
        _add_options_of_a_job(added)
        return added

    launch = command(
        "launch",
        _launch,
        help="start the workers of a program",
        usage="tfring launch {-n N | --hosts HOSTS | --hostfile FILE | --hosts-from FILE} [OPTION ...] "
        "{SCRIPT | -m MODULE} [ARGUMENT ...]",
        description=texts.LAUNCH_HELP,
        epilog=texts.LAUNCH_DETAILS,
    )
    _add_options_of_a_job(launch)
    launch.add_argument(
        "-m",
        dest="module",
        nargs=argparse.REMAINDER,
        metavar="MODULE",
        help="run a module, like `python -m`",
    )
    launch.add_argument(
        "--max-restarts",
        type=_number,
        default=0,
        metavar="K",
        help="start all workers again after a failure, at most K times (default: 0)",
    )
    launch.add_argument(
        "--servers",
        type=_number,
        default=0,
        metavar="S",
        help="start S parameter servers, for tfring.ParameterServerStrategy (default: 0)",
    )
    launch.add_argument(
        "--max-server-restarts",
        type=_number,
        default=3,
        metavar="K",
        help="restart each server that keeps snapshots (snapshot_dir) or whose shards another server holds "
        "(replicas=2), at most K times (default: 3)",
    )
    launch.add_argument(
        "--max-worker-restarts",
        type=_number,
        default=0,
        metavar="K",
        help='restart each worker of asynchronous servers (update="async") by itself, at most K times (default: 0)',
    )
    launch.add_argument(
        "--min-workers",
        type=_positive,
        metavar="M",
        help="leave lost hosts out of a restart if M workers remain (default: all workers; 1 with --hosts-from)",
    )
    launch.add_argument(
        "--max-workers", type=_positive, metavar="M", help="use only as many hosts of --hosts-from as M workers need"
    )
    _add_setting(launch, "--bind", "TO", "cores: bind each worker to its share of its host's cores (default: none)")
    _add_setting(
        launch,
        "--seed",
        "SEED",
        "the seed of Python's random, NumPy and tf.data, the same on all ranks; none: each rank draws its own "
        "(default: TFRING_SEED, else a new one for each run)",
    )
    launch.add_argument(
        "--timestamps",
        action=argparse.BooleanOptionalAction,
        help="begin each line with the time, in UTC, and the rank",
    )
    launch.add_argument("--dry-run", action="store_true", help="print the hosts and ranks of workers, and exit")
    launch.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT", help="the program, and its arguments")
    doctor = cluster_command(
        "doctor",
        _doctor,
        help="check whether a cluster can train",
        description=texts.DOCTOR_HELP,
        epilog=texts.DOCTOR_EXAMPLES,
    )
    doctor.add_argument("--servers", type=_number, default=0, metavar="S", help="also check S parameter servers")
    doctor.add_argument("--json", action="store_true", help="print the report as one JSON document (docs/clusters.md)")
    bench = cluster_command(
        "bench",
        _bench,
        help="measure a cluster's collectives",
        description=texts.BENCH_HELP,
        epilog=texts.BENCH_EXAMPLES,
    )
    bench.add_argument(
        "--op",
        type=_parsed_by(options.parse_ops),
        default=options.DEFAULT_OPS,
        metavar="NAMES",
        help=f"collectives, from {', '.join(options.FACTORS)} (default: {', '.join(options.DEFAULT_OPS)})",
    )
    bench.add_argument(
        "--sizes",
        type=_parsed_by(options.parse_sizes),
        default=options.DEFAULT_SIZES,
        metavar="SIZES",
        help=f"bytes (default: {options.DEFAULT_SIZES})",
    )
    bench.add_argument("--dtype", choices=tuple(options.ITEM_BYTES), default="float32", help="default: float32")
    bench.add_argument("--json", action="store_true", help="print one JSON document (docs/clusters.md)")
    bench.add_argument("--plot", metavar="FILE", help="plot bus bandwidth over size to FILE, such as bench.png")
    test = cluster_command(
        "test",
        _test,
        help="train a small model on a cluster and compare it with one process",
        description=texts.TEST_HELP,
        epilog=texts.TEST_EXAMPLES,
    )
    test.add_argument("--json", action="store_true", help="print one JSON document (docs/clusters.md)")
    report = command(
        "report",
        _report,
        help="show who waits for whom, from a trace",
        usage="tfring report FOLDER [--json] [--trace FILE] [--plot FILE]",
        description=texts.REPORT_HELP,
        epilog=texts.REPORT_EXAMPLES,
    )
    report.add_argument("folder", type=pathlib.Path, metavar="FOLDER", help="the directory of the trace")
    report.add_argument("--json", action="store_true", help="print one JSON document (docs/report.md)")
    report.add_argument("--trace", type=pathlib.Path, metavar="FILE", help="write a Chrome trace of all ranks")
    report.add_argument("--plot", metavar="FILE", help="plot a few steps of all ranks to FILE, such as steps.png")
    completion_of = command(
        "completion",
        _completion,
        help="print a shell completion script",
        description=texts.COMPLETION_HELP,
        epilog=texts.COMPLETION_EXAMPLES,
    )
    completion_of.add_argument("shell", nargs="?", choices=_SHELLS, help="the shell")
    return parser


def _check_command(parser: argparse.ArgumentParser, argv: Sequence[str]) -> None:
    """Exits with a list of the commands if none is named, or one that does not exist."""
    commands = _commands(parser)
    if argv and (argv[0] in commands or argv[0] in parser._option_string_actions):
        return
    problem, near = "name a command", ""
    if argv:
        problem = f"no such command: {argv[0]!r}"
        near = _near(argv[0], [*commands, "--version"])
        if argv[0] == "run" or argv[0].endswith(".py") or argv[0] in commands["launch"]._option_string_actions:
            rest = " ".join(argv[argv[0] == "run" :])
            near = f" Did you mean `tfring launch {rest if '-n' in argv else f'-n 2 {rest}'}`?"
    parser.error(f"{problem}.{near} The commands are {', '.join(commands)}.")


def _launch(arguments: argparse.Namespace) -> int:
    error = arguments.parser.error
    if arguments.module is not None:
        if not arguments.module or arguments.module[0].startswith("-"):
            error("-m needs the name of a module, followed by its arguments")
        command = ["-m", *arguments.module]
    elif not arguments.script:
        error("name a script or a module to run: tfring launch -n 2 train.py")
    else:
        command = list(arguments.script)
        if command[0] == "--":
            del command[0]
        script = command[0] if command else ""
        if script.endswith(".ipynb"):
            error(f"a notebook is not a program: {script!r}. Convert it:\n  jupyter nbconvert --to script {script}")
        if script == "-":
            error("a program cannot come from standard input, which several workers cannot share")
        if not arguments.workdir and not os.path.exists(script):
            left_out = f". Leave out {script!r}" if os.path.basename(script).startswith("python") else ""
            error(f"no such script: {script!r} (from {os.getcwd()}){left_out}")
        if not arguments.workdir and os.path.isdir(script) and not os.path.exists(os.path.join(script, "__main__.py")):
            error(f"a folder without __main__.py is not a program: {script!r}. Name a script in it")
    if arguments.min_workers and not arguments.max_restarts:
        error("--min-workers sets the number of workers to restart with: add --max-restarts")
    try:
        seed = config.read("TFRING_SEED")
    except ConfigurationError as problem:
        error(str(problem))
    variables = {"TFRING_SEED": str(secrets.randbelow(10**9) if seed is None else seed)}
    if arguments.max_workers and not arguments.hosts_from:
        error("--max-workers limits the hosts of --hosts-from: leave it out, or add --hosts-from")
    limits = Limits(arguments.max_restarts, arguments.min_workers)
    if arguments.max_worker_restarts and not arguments.servers:
        error("--max-worker-restarts needs workers with parameter servers: add --servers, or use --max-restarts")
    servers = {
        "num_servers": arguments.servers,
        "max_server_restarts": arguments.max_server_restarts,
        "max_worker_restarts": arguments.max_worker_restarts,
    }
    return _run(
        arguments,
        command,
        limits=limits,
        servers=servers,
        variables=variables,
        timestamps=bool(arguments.timestamps),
        dry_run=arguments.dry_run,
    )


def _doctor(arguments: argparse.Namespace) -> int:
    from tfring.doctor import examination

    seconds = float(arguments.start_timeout or examination.DEFAULT_SECONDS)
    if _runs_here(arguments):
        return examination.examine(seconds, as_json=arguments.json)
    options = ["--timeout", str(seconds), "--not-ready-code", str(_NOT_READY)]
    command = ["-m", "tfring.doctor.entry", *options, *(["--json"] if arguments.json else [])]
    with _Printed() as printed:
        code = _run(arguments, command, quiet_codes=(_NOT_READY,), servers={"num_servers": arguments.servers})
    if code == 0 or 128 < code < exit_codes.LOST_HOST:  # killed, by Ctrl-C for instance
        return code
    if code == _NOT_READY:
        return 1
    over_ssh = code == exit_codes.CANNOT_START and arguments.n is None
    return examination.report_failed_start(code, printed.text, over_ssh=over_ssh, as_json=arguments.json)


class _Printed:
    """Keeps the standard error of this process and its children, and passes it on."""

    text = ""

    def __enter__(self) -> _Printed:
        self._fd = os.dup(2)
        reading, writing = os.pipe()
        os.dup2(writing, 2)
        os.close(writing)
        self._thread = threading.Thread(target=self._pass_on, args=(reading,), daemon=True)
        self._thread.start()
        return self

    def _pass_on(self, reading: int) -> None:
        with open(reading, "rb", buffering=0) as pipe:
            while data := pipe.read(1 << 16):
                self.text += data.decode(errors="replace")
                os.write(self._fd, data)

    def __exit__(self, *_: object) -> None:
        sys.stderr.flush()
        os.dup2(self._fd, 2)  # closes the pipe here; children have ended, or are left to themselves
        self._thread.join(timeout=1.0)


def _bench(arguments: argparse.Namespace) -> int:
    wanted = options.Options(arguments.op, arguments.sizes, arguments.dtype, arguments.json, arguments.plot)
    if _runs_here(arguments):
        from tfring.bench import run

        return run.run(wanted)
    return _run(arguments, ["-m", "tfring.bench.entry", wanted.to_json()], quiet_codes=(_BENCH_FAILED,))


def _test(arguments: argparse.Namespace) -> int:
    elsewhere = arguments.hosts or arguments.hostfile or arguments.hosts_from
    if importlib.util.find_spec("tensorflow") is None and not elsewhere:
        arguments.parser.error(_requirements.NO_TENSORFLOW)
    if _runs_here(arguments):
        from tfring import test

        return test.run(arguments.json)
    command = ["-m", "tfring.test", *(["--json"] if arguments.json else [])]
    code = _run(arguments, command, variables={"TFRING_SEED": "1"}, quiet_codes=(_TEST_FAILED,))
    if code in (0, _TEST_FAILED) or 128 < code < exit_codes.LOST_HOST:
        return code
    verdict = f"Failed: the workers did not start, or ended before the comparison (exit code {code})."
    print(json.dumps({"schema": 1, "passed": False, "verdict": verdict}) if arguments.json else verdict)
    return code


def _report(arguments: argparse.Namespace) -> int:
    from tfring.report import run

    return run.run(arguments.folder, arguments.json, arguments.trace, arguments.plot)


def _completion(arguments: argparse.Namespace) -> int:
    if arguments.shell is None:
        arguments.parser.error(f"name a shell: {' or '.join(_SHELLS)}")
    import shtab

    parser = _parser()
    by_metavar = {"FILE": shtab.FILE, "SCRIPT": shtab.FILE, "DIR": shtab.DIRECTORY, "FOLDER": shtab.DIRECTORY}
    for of in (parser, *_commands(parser).values()):
        for action in of._actions:
            if action.metavar in by_metavar:
                action.complete = by_metavar[action.metavar]
    print(shtab.complete(parser, arguments.shell))
    return 0


def _runs_here(arguments: argparse.Namespace) -> bool:
    """Returns True if this process is a rank of its cluster, or alone, and starts no other."""
    if any(getattr(arguments, name) is not None for name in _WHERE):
        return False
    if slurm.in_allocation(os.environ) and not _is_a_rank():
        return False
    _check_options_of_hosts(arguments, (), _SSH_OPTIONS + _OPTIONS_OF_STARTED)
    return True


def _is_a_rank() -> bool:
    """Returns True if a source describes a cluster, even an invalid one, which the doctor will report."""
    try:
        return detection.find(os.environ) is not None
    except ConfigurationError:
        return True


def _add_options_of_a_job(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-n",
        type=_positive_or_auto,
        metavar="N",
        help="number of workers; auto: one per GPU of this machine, or per CPU; in SLURM, all tasks by default",
    )
    parser.add_argument(
        "--config",
        type=pathlib.Path,
        metavar="FILE",
        help="read options from a TOML file (default of launch: [tool.tfring.launch] of pyproject.toml)",
    )
    parser.add_argument(*_OPTIONS_OF_OTHERS, nargs="?", action=_ForeignOption, dest="elsewhere", help=argparse.SUPPRESS)
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--hosts", metavar="HOSTS", help="start workers on these hosts, over ssh (localhost needs no ssh)"
    )
    where.add_argument("--hostfile", type=pathlib.Path, metavar="FILE", help="start workers on the hosts of a file")
    where.add_argument(
        "--hosts-from", type=pathlib.Path, metavar="FILE", help="start workers on the hosts that this program prints"
    )
    parser.add_argument("--ssh-port", type=_positive, metavar="PORT", help="the port of the ssh servers")
    parser.add_argument("--ssh-identity", type=pathlib.Path, metavar="FILE", help="the private key for ssh")
    parser.add_argument("--ssh-config", type=pathlib.Path, metavar="FILE", help="a configuration file for ssh (its -F)")
    parser.add_argument("--workdir", metavar="DIR", help="the working directory on the hosts (default: this one)")
    parser.add_argument("--python", metavar="FILE", help="the interpreter on the hosts (default: this one)")
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME",
        help="pass this environment variable to the hosts; may be repeated",
    )
    parser.add_argument(
        "--log-dir", type=pathlib.Path, metavar="DIR", help="write the output of each rank to DIR/rank-<rank>.log"
    )
    _add_setting(
        parser,
        "--start-timeout",
        "SECONDS",
        "how long to wait for hosts and ranks at the start (default: 60 for the doctor, else "
        "TFRING_CONNECT_TIMEOUT_SECONDS, else 300)",
    )
    _add_setting(
        parser, "--interface", "NAME", "the network interface or network that ranks use: eth0, or 192.0.2.0/24"
    )
    _add_setting(parser, "--port-range", "PORTS", "the ports that ranks listen on, such as 20000-20100")
    parser.add_argument(
        "--encrypt",
        action="store_const",
        const="1",
        help="encrypt with TLS what workers send over the network (default: TFRING_ENCRYPT, else off)",
    )


def _add_setting(parser: argparse.ArgumentParser, option: str, metavar: str, text: str) -> None:
    """Adds an option that sets a variable and accepts the values of that variable."""
    setting = config.SETTINGS[_VARIABLE_OF[option]]

    def checked(value: str) -> str:
        try:
            setting.parse(value)
        except (ValueError, KeyError):
            raise argparse.ArgumentTypeError(f"{value!r} is not {setting.legal}") from None
        return value

    parser.add_argument(option, type=checked, metavar=metavar, help=text)


def _run(
    arguments: argparse.Namespace,
    command: list[str],
    quiet_codes: Sequence[int] = (),
    limits: Limits = _NO_RESTARTS,
    servers: dict[str, Any] | None = None,
    variables: Mapping[str, str] | None = None,
    timestamps: bool = False,
    dry_run: bool = False,
) -> int:
    """Runs a command as a job, on the hosts of the options, with these variables in the workers' environment."""
    of_all = variables or {}
    error = arguments.parser.error
    try:
        hosts = _hosts(arguments)
        secret.configured()
        start_seconds = config.read("TFRING_CONNECT_TIMEOUT_SECONDS")
        config.read("TFRING_BIND")
        describes_a_cluster = tf_config.parse(os.environ.get(tf_config.VARIABLE, "")) is not None
    except ConfigurationError as problem:
        error(str(problem))
    if arguments.hosts_from and num_workers(hosts) < (limits.min_workers or 1):
        error(f"{arguments.hosts_from} names hosts for {num_workers(hosts)} workers, fewer than the job needs")
    if not hosts and arguments.n is None:
        if "-n" in command:
            error("-n comes after the program's name, so it is an option of the program: put it before that name")
        error("set the number of workers with -n, or their hosts with --hosts, --hostfile or --hosts-from")
    _check_options_of_hosts(arguments, hosts, _SSH_OPTIONS + _OPTIONS_OF_STARTED + _OPTIONS_OF_ADDRESSES)
    if hosts and (servers or {}).get("max_worker_restarts"):
        error("--max-worker-restarts restarts only workers on this machine: start them with -n")
    if describes_a_cluster:
        error(
            "TF_CONFIG is set, and so is -n or --hosts: both define the workers of the job. TF_CONFIG is:\n"
            f"  {os.environ[tf_config.VARIABLE]}\n"
            f"Leave -n and --hosts out (and run a program by itself), or first:\n  unset TF_CONFIG"
        )
    for name in arguments.env:
        if name not in os.environ:
            error(f"--env needs the name of a variable that is set, as its value stays off the command line: {name}")
    if arguments.log_dir and not dry_run:
        try:
            arguments.log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            error(f"cannot make the folder of --log-dir: {problem}")
    way = remote.Way(
        remote.by_ssh(port=arguments.ssh_port, identity=arguments.ssh_identity, config=arguments.ssh_config)
        if _names_hosts(arguments)
        else remote.srun,
        arguments.python or sys.executable,
        arguments.workdir or os.getcwd(),
        {**remote.passed_on(os.environ, arguments.env), **of_all},
    )
    at_first = num_workers(hosts) or arguments.n
    if limits.min_workers and limits.min_workers > at_first:
        error(f"--min-workers is {limits.min_workers}, more than the number of workers, {at_first}")
    if dry_run:
        num_servers = (servers or {}).get("num_servers", 0)
        print(plan.text([way.python if hosts else sys.executable, *command], hosts, at_first, num_servers, way))
        return 0

    def make_job(hosts: Sequence[Host], variables: Mapping[str, str], **options: Any) -> Job:
        return Job(
            command,
            num_workers(hosts) or arguments.n,
            **(servers or {}),
            log_dir=arguments.log_dir,
            environ={**os.environ, **of_all, **variables},
            hosts=hosts,
            way=way._replace(environ={**way.environ, **variables}),
            start_seconds=start_seconds,
            quiet_codes=quiet_codes,
            timestamps=timestamps,
            **options,
        )

    ask = functools.partial(_ask_for_hosts, arguments) if arguments.hosts_from else None
    return run_guarded(Restarts(make_job, hosts, limits, os.environ, ask, start_seconds).run)


def _check_options_of_hosts(arguments: argparse.Namespace, hosts: Sequence[Host], options: Iterable[str]) -> None:
    """Rejects these options if no worker is started on another host."""
    by_ssh = _names_hosts(arguments)
    for option in options:
        has_effect = by_ssh if option in _SSH_OPTIONS else bool(hosts)
        if _given(arguments, option) is not None and not has_effect:
            arguments.parser.error(
                f"{option} has no effect without --hosts or --hostfile: all workers start "
                f"{'through srun' if hosts else 'on this machine'}. Name the hosts, or leave {option} out"
            )


def _hosts(arguments: argparse.Namespace) -> list[Host]:
    """Returns the hosts to start workers on. An empty list: this host alone."""
    if _names_hosts(arguments):
        if arguments.n is not None:
            raise ConfigurationError("-n and the numbers after the hosts both give the number of workers: leave -n out")
        if arguments.hosts_from:
            return _ask_for_hosts(arguments)
        return parse_hosts(arguments.hosts) if arguments.hosts else read_hostfile(arguments.hostfile)
    return of_allocation(os.environ, arguments.n) if slurm.in_allocation(os.environ) else []


def _ask_for_hosts(arguments: argparse.Namespace) -> list[Host]:
    return ask_script(arguments.hosts_from, _given(arguments, "--max-workers"))


def _names_hosts(arguments: argparse.Namespace) -> bool:
    return bool(arguments.hosts or arguments.hostfile or arguments.hosts_from)


class _ForeignOption(argparse.Action):
    """Reports the name that an option of Horovod, mpirun or torchrun has here."""

    def __call__(self, parser: Any, namespace: Any, value: Any, option: str | None = None) -> None:
        if option == "-H":
            here = f"--hosts {value or 'host1:4,host2:4'}: hosts, with the number of workers on each"
        else:
            here = f"-n {value or 'N'}: all workers, on this machine; for other hosts --hosts host1:4,host2:4"
        parser.error(f"{option} is an option of another launcher. Use {here}")


class _Parser(argparse.ArgumentParser):
    """Prints the problem and how to get help, instead of the full usage."""

    place = ""  # the file from which the arguments were read

    def error(self, message: str) -> NoReturn:
        self.exit(exit_codes.WRONG_OPTIONS, f"{self.prog}: {self.place}{message}\nSee {self.prog} --help\n")


def _number(text: str) -> int:
    return 0 if text == "0" else _positive(text)


def _positive_or_auto(text: str) -> int | str:
    return text if text == _AUTO else _positive(text, " or auto")


def _positive(text: str, other: str = "") -> int:
    if not (text.isascii() and text.isdecimal() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up{other}")
    return int(text)


def _parsed_by(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


def _open_standard_streams() -> None:
    """Opens closed standard streams. Under `>&-`, a pipe of ours would otherwise get their number and their output."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest free number, which is fd


if __name__ == "__main__":
    sys.exit(main())
