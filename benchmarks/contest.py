"""Shared by the benchmarks: contestants, whose processes live through one run and sleep while others are measured.

run.py, of whatever Python, starts the ranks of each contestant (worker.py) and puts questions to them:

    run.py ── ("measure", ...) ──► rank 0 of a contestant ── seconds ──► run.py
           ── ("measure", ...) ──► rank 1 ...

worker.py runs under the contestant's Python, which may be an old one.
"""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import pathlib
import platform
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing import connection

ROOT = pathlib.Path(__file__).parents[1]
HOROVOD_PYTHON = ROOT / "benchmarks" / "collectives" / ".horovod" / "bin" / "python"
START_SECONDS = 240
MEASURE_SECONDS = 180
IDLE_LOAD = 0.5
_ENTRANCE = "TFRING_BENCHMARK"  # where a worker finds run.py
# Of those with a launcher of their own.
_RANK_VARIABLES = {"mpich": "PMI_RANK", "openmpi": "OMPI_COMM_WORLD_RANK", "horovod": "HOROVOD_RANK"}
_RESTLESS = ("horovod",)  # whose processes take a quarter of a core each while they are asked nothing


# ------------------------------------------------------------------------------------------------------------ run.py


class Contestant:
    """The processes of one contestant, each with a connection to this one.

    Attributes:
      name: as `worker.py` knows it.
      facts: what rank 0 answered to ("facts",).
    """

    def __init__(self, name, worker, python, ranks, listener, hosts=(), realtime=False):
        self.name = name
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")]),
            _ENTRANCE: f"{listener.address} {_key.hex()} {int(realtime)}",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "CUDA_VISIBLE_DEVICES": "-1",
            "HOROVOD_GLOO_TIMEOUT_SECONDS": "3600",  # of which a stopped process may be stopped for the most
            "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",  # as under `tfring launch`, for all alike
        }
        ports = free_ports(ranks)
        names = [host.ipv4 for host in hosts] or ["127.0.0.1"] * ranks
        addresses = ",".join(f"{name}:{port}" for name, port in zip(names, ports))  # noqa: B905 (old Pythons)
        command = [python, str(worker), name, str(ranks), addresses]
        tools = pathlib.Path(python).parent
        if name == "mpich":
            commands = [[str(tools / "mpiexec"), "-n", str(ranks), *command]]
        elif name == "openmpi":
            mpiexec = [str(tools / "mpiexec"), "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
            commands = [[*mpiexec, "-n", str(ranks), *command]]
        elif name == "horovod":
            commands = [[str(tools / "horovodrun"), "-np", str(ranks), "--gloo", *command]]
        else:
            commands = [[*command, str(rank)] for rank in range(ranks)]
            commands = [hosts[rank].command(*commands[rank]) if hosts else commands[rank] for rank in range(ranks)]
        null = subprocess.DEVNULL
        self.processes = [
            subprocess.Popen(c, env=environment, stdin=null, stdout=null, stderr=subprocess.PIPE) for c in commands
        ]
        self.pipes = {}
        self.restless = []  # ids of processes that are stopped while others are asked
        deadline = time.monotonic() + START_SECONDS
        while len(self.pipes) < ranks:
            if connection.wait([listener._listener._socket], 1):
                pipe = listener.accept()
                rank, pid = pipe.recv()
                self.pipes[rank] = pipe
                if name in _RESTLESS:
                    self.restless.append(pid)
            elif time.monotonic() > deadline or any(process.poll() is not None for process in self.processes):
                raise RuntimeError(f"{name} did not start\n{self._errors()}")
        self.facts = self.ask("facts")[0]
        print(f"started {name}", file=sys.stderr)

    def ask(self, *question):
        """Puts a question to all ranks; their answers, by rank."""
        answers, rank = [], min(self.pipes)
        try:
            self._signal(signal.SIGCONT)
            for rank in sorted(self.pipes):
                self.pipes[rank].send(question)
            for rank in sorted(self.pipes):
                if not self.pipes[rank].poll(MEASURE_SECONDS):
                    raise RuntimeError(f"{self.name}: rank {rank} did not answer {question}\n{self._errors()}")
                answers.append(self.pipes[rank].recv())
        except (EOFError, ConnectionError, ProcessLookupError):
            reason = self._reason()
            raise RuntimeError(f"{self.name}: rank {rank} died at {question}{reason}\n{self._errors()}") from None
        self._signal(signal.SIGSTOP)
        return answers

    def _signal(self, number):
        for pid in self.restless:
            os.kill(pid, number)

    def close(self):
        with contextlib.suppress(ProcessLookupError):
            self._signal(signal.SIGKILL)
        for process in self.processes:
            process.kill()
            process.wait()

    def _reason(self):
        """Returns how the first of the processes that have ended did, as text."""
        time.sleep(1)
        codes = [code for code in (process.poll() for process in self.processes) if code is not None]
        if not codes:
            return ""
        if codes[0] in (-signal.SIGKILL, 128 + signal.SIGKILL):
            return ", killed: the kernel does so where memory is short"
        return f", with exit code {codes[0]}"

    def _errors(self):
        self.close()
        return "\n".join(process.stderr.read().decode()[-3000:] for process in self.processes)


@contextlib.contextmanager
def started(worker, wanted, ranks, hosts=(), realtime=False):
    """The contestants that can start here, and texts on those that cannot.

    Args:
      worker: path of worker.py.
      wanted: a `(name, heading, Python, module it needs)` each.
      ranks: number of processes of each.
      hosts: the host of each rank, if they are namespaces (tests/cluster/engines/namespaces.py).
      realtime: whether they are at real-time priority from then on, so that none is late to hear a question, or
        taken for dead by its peers, while the machine starts others.
    """
    running, missing = [], []
    with connection.Listener(family="AF_UNIX", backlog=64, authkey=_key) as listener:
        try:
            for name, heading, python, module in wanted:
                if _can_import(python, module):
                    running.append(Contestant(name, worker, python, ranks, listener, hosts, realtime))
                else:
                    missing.append(f"{heading} (no {module} for {python})")
            yield running, missing
        finally:
            for contestant in running:
                contestant.close()


@contextlib.contextmanager
def own_ranks(make, ranks, transport):
    """Processes of this program's own, where there is one contestant.

    Args:
      make: a class of the program, whose `make(rank, addresses, transport)` each process holds.
      ranks: their number.
      transport: of the ring.

    Yields:
      `ask(realtime, *question)`: what their `measure(*question)` return, by rank.
    """
    context = multiprocessing.get_context("spawn")
    addresses = [f"127.0.0.1:{port}" for port in free_ports(ranks)]
    pipes, processes = [], []

    def answers(seconds):
        for pipe in pipes:
            if not pipe.poll(seconds):
                raise RuntimeError(f"A rank did not answer within {seconds} s.")
        return [pipe.recv() for pipe in pipes]

    def ask(realtime, *question):
        for pipe in pipes:
            pipe.send((realtime, question))
        return answers(MEASURE_SECONDS)

    try:
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_answer, args=(theirs, make, rank, addresses, transport), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        answers(START_SECONDS)
        yield ask
    finally:
        for process in processes:
            process.kill()


def _answer(pipe, make, *arguments):
    made = make(*arguments)
    pipe.send(None)
    while True:
        at_realtime, question = pipe.recv()
        with realtime(at_realtime):
            answer = made.measure(*question)
        pipe.send(answer)


def add_arguments(parser, contestants):
    """The options that all benchmarks have."""
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--contestants", default=",".join(contestants))
    parser.add_argument("--horovod-python", default=str(HOROVOD_PYTHON))
    add_realtime(parser)


def add_write(parser):
    parser.add_argument(
        "--write", action="store_true", help="write into this folder's tracked files, not into one of its own"
    )


def folder_of_results(arguments, tracked):
    """`tracked`, or without --write a new folder that begins with a copy of its results."""
    if arguments.write:
        return tracked
    folder = pathlib.Path(tempfile.mkdtemp(prefix=f"{tracked.name}-"))
    shutil.copy(tracked / "results.json", folder)
    print(f"results go into {folder}; with --write into {tracked}", file=sys.stderr)
    return folder


def add_realtime(parser):
    parser.add_argument(
        "--realtime",
        action="store_true",
        help="measure at real-time priority (needs root), where the machine has other things to do",
    )


def conditions(realtime, load_before=None):
    """Describes the machine, the date, and its other load."""
    load = os.getloadavg()[0] if load_before is None else load_before
    idle = "" if load < IDLE_LOAD else ": the machine had other things to do"
    priority = ", measured at real-time priority" if realtime else ""
    return f"Machine: {_machine()}. Date: {datetime.date.today()}. Load {load:.1f} at the start{idle}{priority}."


def print_conditions(realtime, facts=(), missing=(), load_before=None):
    """Describes the machine, the date, and the versions."""
    print(conditions(realtime, load_before))
    if facts:
        print("Versions: " + ", ".join(sorted(set(facts))) + ".")
    if missing:
        print("Left out: " + "; ".join(missing) + ".")


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


_key = secrets.token_bytes(16)


def _can_import(python, module):
    if shutil.which(python) is None:
        return False
    command = [python, "-c", f"import {module}"]
    return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0


def _machine():
    model = "unknown processor"
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return f"{len(os.sched_getaffinity(0))} cores of {model}, Linux {platform.release().split('-')[0]}"


# --------------------------------------------------------------------------------------------------------- worker.py


def place():
    """`(name of the contestant, rank, ranks, ports)` of this worker."""
    name, ranks = sys.argv[1], int(sys.argv[2])
    ports = [int(address.rpartition(":")[2]) for address in addresses()]
    rank = int(os.environ[_RANK_VARIABLES[name]] if name in _RANK_VARIABLES else sys.argv[4])
    return name, rank, ranks, ports


def addresses():
    """Returns the addresses of all ranks, `host:port` each."""
    return tuple(sys.argv[3].split(","))


def serve(rank, **answers):
    """Answers run.py's questions, each by the function of its name, until run.py has gone."""
    path, key, at_realtime = os.environ[_ENTRANCE].rsplit(None, 2)
    if at_realtime == "1":
        to_realtime()
    pipe = connection.Client(path, authkey=bytes.fromhex(key))
    pipe.send((rank, os.getpid()))
    while True:
        try:
            question, *arguments = pipe.recv()
        except (EOFError, ConnectionError):
            return
        pipe.send(answers[question](*arguments))


@contextlib.contextmanager
def realtime(wanted):
    """All threads of the process at real-time priority."""
    if wanted:
        to_realtime()
    try:
        yield
    finally:
        if wanted:
            _schedule(os.SCHED_OTHER, 0)


@contextlib.contextmanager
def realtime_without_limit(wanted):
    """As `realtime`, for the one process that asks; meanwhile the kernel does not limit real-time priority.

    By default it takes such threads off their core for 50 ms in each second. Ranks that wait for each other then wait
    for the pauses of all cores, and a call of half a second has one or none.
    """
    if not wanted:
        yield
        return
    limit = pathlib.Path("/proc/sys/kernel/sched_rt_runtime_us")
    usual = limit.read_text()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # restores the limit, too
    try:
        limit.write_text("-1")
        with realtime(True):
            yield
    finally:
        limit.write_text(usual)


def to_realtime():
    """All threads that there are, and those they start, at real-time priority, in turns among themselves."""
    _schedule(os.SCHED_RR, 10)


def _schedule(policy, priority):
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setscheduler(int(thread), policy, os.sched_param(priority))
