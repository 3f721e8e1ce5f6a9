"""Worker processes shared by the whole test session, forked from two that have imported TensorFlow.

A test hands a module-level function to N real processes and gets their results by rank:

    from harness import workers

    def train(rows, seed):                       # runs in a worker, once a rank
        strategy = harness.strategy()            # tfring.RingStrategy of this process
        ...
        return model.get_weights()

    def test_ranks_agree():
        results = workers(3).run(train, 50, per_rank=[1, 2, 3])   # rank 1 calls train(50, 2)

How it is laid out:

    pytest ──pipe (task: pickled function and arguments; result or traceback)── worker process, rank 0
      │    ──pipe──────────────────────────────────────────────────────────── worker process, rank 1 ...
      │                                                                         │
      └──socket (file descriptors, environment; process id, exit code)── forks ranks 0, 2, ...
      └──socket─────────────────────────────────────────────────────────  forks ranks 1, 3, ...

Over the ring engine a process is a rank of any world size, because its place in the ring comes with each
task; so `workers(2)`, `workers(3)` and `workers(4)` share four processes. TensorFlow's own runtime is wired
up once in a process's life, so over it each world size has its own processes. Five such pools live at a time, and
processes that have grown large make room for new ones.

An import of TensorFlow costs seconds, a fork milliseconds. A process that forks has imported and done nothing else,
so it has one thread, and neither a context nor a device of TensorFlow. There are two of them: neighbors that hash
strings alike would iterate over sets in one order.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import ctypes
import faulthandler
import functools
import gc
import os
import pathlib
import pickle
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection
from typing import Any, NamedTuple

from tfring.cluster import Cluster, launch_variables

COMMUNICATIONS = ("ring", "tensorflow")
_MAX_POOLS = 5
_MAX_WORLD_SIZE = 8  # over the ring engine
_START_SECONDS = 180
_CLEAN_UP_SECONDS = 60
_GRACE_SECONDS = 10  # how long the others may go on after the first rank has failed
_TAIL_LINES = 60
_MESSAGE_BYTES = 1 << 17
_FULL_BYTES = 1536 << 20  # resident; what tasks leave to TensorFlow is never collected, see _clean_up

# ------------------------------------------------------------------------------------------- in the test


class WorkersFailedError(AssertionError):
    """A rank raised, died or ran out of time. Shows every rank's traceback and the end of its log."""


class Workers:
    """`world_size` processes that run a function together."""

    def __init__(self, world_size: int, kind: _Kind) -> None:
        self.world_size = world_size
        self._kind = kind

    def run(
        self, fn: Callable[..., Any], *args: Any, per_rank: Sequence[Any] | None = None, timeout: float = 240
    ) -> list[Any]:
        """Calls `fn(*args)`, or `fn(*args, per_rank[rank])`, on every rank.

        Args:
          fn: A function at the top level of a module (workers import it by name).
          *args: Pickled; NumPy arrays rather than tensors.
          per_rank: One more, last argument for each rank.
          timeout: Seconds until the processes are shown their stacks, killed and replaced.

        Returns:
          The results, by rank.

        Raises:
          WorkersFailedError: Any rank raised, died or ran out of time.
        """
        __tracebackhide__ = True
        if per_rank is not None and len(per_rank) != self.world_size:
            raise ValueError(f"`per_rank` has one entry a rank. Received: {len(per_rank)} for {self.world_size} ranks.")
        if "<" in fn.__qualname__:
            raise ValueError(f"A task is a function at the top level of a module. Received: {fn.__qualname__}.")
        calls = [(fn, args if per_rank is None else (*args, per_rank[rank])) for rank in range(self.world_size)]
        try:
            return _pool(self._kind).run(calls, timeout)
        except BaseException:
            _discard(self._kind)  # whatever broke: what is left of a ring is no ground for the next test
            raise


def workers(
    n: int,
    communication: str = "ring",
    *,
    logical_cpus: int = 1,
    tensorflow: bool = True,
    env: dict[str, str] | None = None,
) -> Workers:
    """The session's `n` worker processes, started on first use and kept for later tests.

    Args:
      n: World size.
      communication: "ring" or "tensorflow"; what `harness.strategy()` passes to `RingStrategy`.
      logical_cpus: Logical CPU devices in each process, so that a worker holds several replicas.
      tensorflow: Whether the processes import it; without, they start in a moment.
      env: Environment of the processes, for what is read once, with TensorFlow's first device.
    """
    if communication not in COMMUNICATIONS:
        raise ValueError(f"`communication` is one of {COMMUNICATIONS}. Received: {communication!r}.")
    if communication == "ring" and n > _MAX_WORLD_SIZE:
        raise ValueError(f"At most {_MAX_WORLD_SIZE} ranks. Received: {n}. Raise _MAX_WORLD_SIZE.")
    fixed_size = n if communication == "tensorflow" else None
    return Workers(n, _Kind(communication, fixed_size, logical_cpus, tensorflow, tuple(sorted((env or {}).items()))))


def shut_down() -> None:
    """Stops all processes; called at the end of the session."""
    for kind in list(_pools):
        _discard(kind)
    while _forkers:
        for forker in _forkers.popitem()[1]:
            forker.kill()


def listening_sockets(n: int) -> list[socket.socket]:
    """`n` sockets that listen on ports of their own on 127.0.0.1."""
    sockets = []
    for _ in range(n):
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        sockets.append(listener)
    return sockets


def free_ports(n: int) -> list[int]:
    """`n` ports nobody listens on *now*; for servers that insist on binding a port themselves.

    Taken below the range from which the kernel serves outgoing connections, so that only a program that wants
    this very number can take it in the meantime.
    """
    held: list[socket.socket] = []
    with contextlib.ExitStack() as stack:
        while len(held) < n:
            probe = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", random.SystemRandom().randrange(12000, 32000)))
                held.append(probe)
        return [probe.getsockname()[1] for probe in held]


class _Kind(NamedTuple):
    communication: str
    fixed_size: int | None  # of the world, where a process cannot change it
    logical_cpus: int
    tensorflow: bool
    env: tuple[tuple[str, str], ...]


_pools: collections.OrderedDict[_Kind, _Pool] = collections.OrderedDict()  # least recently used first


def _pool(kind: _Kind) -> _Pool:
    if kind in _pools and _pools[kind].is_full():
        _discard(kind)
    while kind not in _pools and len(_pools) >= _MAX_POOLS:
        _discard(next(iter(_pools)))
    if kind not in _pools:
        _pools[kind] = _Pool(kind)
    _pools.move_to_end(kind)
    return _pools[kind]


def _discard(kind: _Kind) -> None:
    pool = _pools.pop(kind, None)
    if pool is not None:
        pool.kill()


class _Pool:
    """Processes of one kind. Grows to the largest world size asked for."""

    def __init__(self, kind: _Kind) -> None:
        self._kind = kind
        self._processes: list[_Process] = []
        # TensorFlow's gRPC server binds its port itself and does not share it: here alone no port is held.
        self._free_ports = free_ports(kind.fixed_size) if kind.fixed_size else []
        self._folder = tempfile.TemporaryDirectory(prefix="tfring-test-")  # for logs and temporary files

    def run(self, calls: list[tuple], timeout: float) -> list[Any]:
        __tracebackhide__ = True
        tasks = [pickle.dumps(call) for call in calls]
        n = len(tasks)
        self._grow(n)
        ranks = self._processes[:n]
        addresses = tuple(f"127.0.0.1:{process.ports[n]}" for process in ranks)
        for process in ranks:  # not when the last task ended: other ranks may still have been busy with it
            process.send(None)
        self._await(ranks, _CLEAN_UP_SECONDS, 0)
        for rank, (process, task) in enumerate(zip(ranks, tasks, strict=True)):
            cluster = Cluster(rank, n, rank, n, 1, addresses, "harness", process.listen_fds.get(n))
            process.send((sys.path, launch_variables.write(cluster), task))
        return self._await(ranks, timeout, _GRACE_SECONDS)

    def _await(self, ranks: list[_Process], timeout: float, grace: float) -> list[Any]:
        __tracebackhide__ = True
        replies = _collect(ranks, timeout, grace)
        if any(reply.failed for reply in replies):
            raise WorkersFailedError(_report(ranks, replies))
        return [reply.value for reply in replies]

    def _grow(self, n: int) -> None:
        __tracebackhide__ = True
        new = []
        for index in range(len(self._processes), n):
            folder = pathlib.Path(self._folder.name)
            new.append(_Process(folder, index, self._kind, self._free_ports[index : index + 1]))
            self._processes.append(new[-1])
        self._await(new, _START_SECONDS, 0)

    def is_full(self) -> bool:
        """Returns True if a process has grown so large that new ones are better."""
        return any(process.resident_bytes() > _FULL_BYTES for process in self._processes)

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
        self._folder.cleanup()


class _Process:
    def __init__(self, folder: pathlib.Path, index: int, kind: _Kind, free_port: list[int]) -> None:
        self.log = folder / f"process-{index}.log"
        self._log_start = 0
        self.pipe, theirs = connection.Pipe()
        # A worker listens for one cluster as long as it lives; so a socket for every world size.
        listeners = [] if free_port else listening_sockets(_MAX_WORLD_SIZE)
        self.ports = {n: listener.getsockname()[1] for n, listener in enumerate(listeners, 1)}
        if kind.fixed_size:
            self.ports = {kind.fixed_size: free_port[0]}
        environ = {
            name: value for name, value in os.environ.items() if name not in (*launch_variables.ALL, "TF_CONFIG")
        }
        environ = {**environ, **_limits(), "TMPDIR": str(folder), **dict(kind.env)}
        self._forker = _forkers_of(kind.tensorflow)[index % 2]
        self._exit_code: int | None = None
        with self.log.open("wb") as output, theirs, contextlib.ExitStack() as stack:
            fds = [output.fileno(), theirs.fileno(), *(stack.enter_context(each).fileno() for each in listeners)]
            self.pid, (_, _, *listen_fds) = self._forker.fork(fds, (environ, kind.communication, kind.logical_cpus))
        self.listen_fds = dict(enumerate(listen_fds, 1))

    def send(self, message: Any) -> None:
        self._log_start = self.log.stat().st_size
        with contextlib.suppress(OSError):  # dead already: _collect says how it died
            self.pipe.send(message)

    def receive(self) -> _Reply:
        try:
            kind, value = self.pipe.recv()
        except (EOFError, OSError):
            return _Reply("died", f"The process died: {_exit_text(self._wait())}.")
        except Exception:
            return _Reply("raised", f"The result does not unpickle in the test:\n{traceback.format_exc()}")
        return _Reply(kind, value)

    def resident_bytes(self) -> int:
        try:
            pages = pathlib.Path(f"/proc/{self.pid}/statm").read_text().split()[1]
        except (OSError, IndexError):  # it is gone
            return 0
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def dump_stacks(self) -> None:
        os.kill(self.pid, signal.SIGUSR1)

    def kill(self) -> None:
        if self._exit_code is None:
            for kill in (os.killpg, os.kill):  # its session, with what the task may have started; or it has none yet
                with contextlib.suppress(ProcessLookupError):
                    kill(self.pid, signal.SIGKILL)
            self._wait()
        self.pipe.close()

    def _wait(self) -> int:
        if self._exit_code is None:
            self._exit_code = self._forker.wait(self.pid)
        return self._exit_code

    def log_tail(self) -> str:
        with self.log.open("rb") as file:
            file.seek(self._log_start)
            lines = file.read().decode(errors="replace").splitlines()
        cut = [f"... ({len(lines) - _TAIL_LINES} lines before)"] if len(lines) > _TAIL_LINES else []
        return "\n".join(cut + lines[-_TAIL_LINES:])


class _Forker:
    """A process that forks workers, and waits for them: they are its children."""

    def __init__(self, tensorflow: bool) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(_START_SECONDS)
        start = (
            f"import sys; sys.path[:] = {sys.path!r}; import harness; "
            f"harness._fork_workers({os.getpid()}, {theirs.fileno()}, {tensorflow})"
        )
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  as long as the process
        with theirs:
            self._popen = subprocess.Popen(
                [sys.executable, "-c", start],
                env={**os.environ, **_limits()},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                start_new_session=True,
            )

    def fork(self, fds: list[int], options: tuple) -> tuple[int, list[int]]:
        """Returns the process id of a worker, and its numbers of these file descriptors."""
        return self._ask(options, fds)

    def wait(self, pid: int) -> int:
        """Returns the exit code of a worker that has ended or been killed."""
        return self._ask(pid)

    def kill(self) -> None:
        self._popen.kill()
        self._popen.wait()
        self._socket.close()
        self._log.close()

    def _ask(self, request: Any, fds: Sequence[int] = ()) -> Any:
        try:
            socket.send_fds(self._socket, [pickle.dumps(request)], fds)
            reply = self._socket.recv(_MESSAGE_BYTES)
        except OSError as error:
            reply = b""
            self._log.write(repr(error).encode())
        if not reply:
            self._log.seek(0)
            raise WorkersFailedError(f"No worker can be forked.\n{self._log.read().decode(errors='replace')}")
        return pickle.loads(reply)


_forkers: dict[bool, list[_Forker]] = {}  # by whether they import TensorFlow


def _forkers_of(tensorflow: bool) -> list[_Forker]:
    if tensorflow not in _forkers:
        _forkers[tensorflow] = [_Forker(tensorflow) for _ in range(2)]
    return _forkers[tensorflow]


class _Reply:
    def __init__(self, kind: str, value: Any) -> None:
        self.kind, self.value = kind, value

    @property
    def failed(self) -> bool:
        return self.kind != "returned"


def _collect(processes: list[_Process], timeout: float, grace: float) -> list[_Reply]:
    """One reply a process. After the first failure the rest get `grace` seconds: they may wait for it."""
    replies: dict[_Process, _Reply] = {}
    deadline = time.monotonic() + timeout
    why = f"Still running after {timeout:g} s."
    while len(replies) < len(processes):
        waiting = {process.pipe: process for process in processes if process not in replies}
        ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            for process in waiting.values():
                process.dump_stacks()
            time.sleep(0.5)
            for process in waiting.values():
                replies[process] = _Reply("timed out", f"{why} Its stacks are in the log.")
        for process in (waiting[pipe] for pipe in waiting if pipe in ready):
            replies[process] = process.receive()
            if replies[process].failed and time.monotonic() + grace < deadline:
                deadline = time.monotonic() + grace
                why = f"Still running {grace:g} s after another rank had failed."
    return [replies[process] for process in processes]


def _report(processes: list[_Process], replies: list[_Reply]) -> str:
    """Returns each rank's reply and log; those that raised or died come first, before those that waited for them."""
    parts = [f"{sum(reply.failed for reply in replies)} of {len(replies)} ranks failed."]
    ranks = sorted(enumerate(zip(processes, replies, strict=True)), key=lambda each: each[1][1].kind == "timed out")
    for rank, (process, reply) in ranks:
        parts.append(f"===== rank {rank} {reply.kind}" + (f"\n{reply.value}" if reply.failed else ""))
        tail = process.log_tail()
        if tail:
            parts.append(f"----- rank {rank}, end of its log\n{tail}")
    return "\n".join(parts)


def _exit_text(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


def _limits() -> dict[str, str]:
    return {
        "TF_NUM_INTRAOP_THREADS": "1",
        "TF_NUM_INTEROP_THREADS": "2",
        "OMP_NUM_THREADS": "1",
        "KERAS_BACKEND": "tensorflow",
        "CUDA_VISIBLE_DEVICES": "-1",
        "TF_CPP_MIN_LOG_LEVEL": "1",
        "PYTHONUNBUFFERED": "1",
    }


atexit.register(shut_down)

# ----------------------------------------------------------------------------------------- in the worker

_communication = ""
_strategies: weakref.WeakSet = weakref.WeakSet()


def strategy(**kwargs: Any) -> Any:
    """`tfring.RingStrategy` of this process, over the communication of its group. For use in a task.

    Left to itself it is closed before the next task.
    """
    import tfring

    made = tfring.RingStrategy(communication=_communication, **kwargs)
    _strategies.add(made)
    return made


def communication() -> str:
    """The communication of this process's group. For use in a task."""
    return _communication


def _fork_workers(parent: int, fd: int, tensorflow: bool) -> None:
    """Forks a worker for each request, and returns in the worker when that has ended."""
    _die_with(parent)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is pytest's
    _rewrite_asserts()
    if tensorflow:
        import keras  # noqa: F401  once for all workers
        import tensorflow as tf  # noqa: F401
    gc.collect()
    gc.freeze()  # TensorFlow's own objects are for ever: no need to walk them after each task
    assert len(os.listdir("/proc/self/task")) == 1, "a fork has no copies of other threads, and of the locks they hold"
    with socket.socket(fileno=fd) as requests:
        while True:
            message, fds, _, _ = socket.recv_fds(requests, _MESSAGE_BYTES, 2 + _MAX_WORLD_SIZE)
            if not message:
                return
            request = pickle.loads(message)
            if isinstance(request, int):
                _, status = os.waitpid(request, 0)
                requests.send(pickle.dumps(os.waitstatus_to_exitcode(status)))
                continue
            forker = os.getpid()
            pid = os.fork()
            if pid == 0:
                break
            requests.send(pickle.dumps((pid, fds)))
            for each in fds:
                os.close(each)
    _serve(forker, fds, tensorflow, *request)


def _serve(
    parent: int, fds: list[int], tensorflow: bool, environ: dict[str, str], communication: str, logical_cpus: int
) -> None:
    global _communication
    _communication = communication
    os.setsid()
    _die_with(parent)
    log, pipe_fd, *_ = fds
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.set_inheritable(pipe_fd, False)
    _set_environment(environ)
    tempfile.tempdir = None  # TMPDIR is another
    pipe = connection.Connection(pipe_fd)
    with _replying(pipe):
        if tensorflow:
            _prepare_tensorflow(logical_cpus)
        pipe.send(("returned", None))
    while True:
        try:
            message = pipe.recv()
        except EOFError:
            return
        if message is None:
            with _replying(pipe):
                _clean_up(tensorflow)
                pipe.send(("returned", None))
            continue
        path, variables, task = message
        with _replying(pipe):
            sys.path[:] = path  # before unpickling, which finds the task by its module's name
            _set_environment({**environ, **variables})
            fn, args = pickle.loads(task)
            _draw_apart(f"{fn.__module__}.{fn.__qualname__} on rank {os.environ['TFRING_RANK']}")
            pipe.send_bytes(pickle.dumps(("returned", fn(*args))))
        fn = args = None
        sys.stdout.flush()


@contextlib.contextmanager
def _replying(pipe: connection.Connection) -> Iterator[None]:
    try:
        yield
    except BaseException:
        pipe.send(("raised", traceback.format_exc()))


def _set_environment(wanted: dict[str, str]) -> None:
    """Changes what differs alone: threads that the task before has left to TensorFlow may call getenv meanwhile."""
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    for name, value in wanted.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _die_with(parent: int) -> None:
    """Has the kernel kill this process when its parent dies, however it dies."""
    pr_set_pdeathsig = 1
    if ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it died before the call
        os._exit(1)


def _rewrite_asserts() -> None:
    """So that a failed `assert` inside a task shows its values, as in a test."""
    from _pytest.config import _prepareconfig

    _prepareconfig(["--noconftest"])  # installs pytest's import hook


def _prepare_tensorflow(logical_cpus: int) -> None:
    import tensorflow as tf
    from tensorflow.python.eager import context as eager_context

    # A machine that stands still for TensorFlow's ten seconds would end all groups that idle on its collectives.
    eager = eager_context.context()
    eager.configure_coordination_service = functools.partial(
        eager.configure_coordination_service, heartbeat_timeout_in_ms=600_000
    )
    if logical_cpus > 1:
        (cpu,) = tf.config.list_physical_devices("CPU")
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * logical_cpus)


def _draw_apart(text: str) -> None:
    """Seeds Python's, NumPy's and so Keras' numbers: no two ranks draw alike, and each run draws what the last drew."""
    import numpy as np

    random.seed(text)
    np.random.seed(random.getrandbits(32))


def _clean_up(tensorflow: bool) -> None:
    while _strategies:
        _strategies.pop().close()
    if tensorflow:
        import keras
        import tensorflow as tf

        # Kept, not collected: on an overloaded machine a worker has stood still for good inside the collection of what
        # a task with Python generators had left to TensorFlow. Where is not known yet.
        keras.backend.clear_session(free_memory=False)
        keras.config.set_floatx("float32")
        tf.config.run_functions_eagerly(False)
        tf.random.set_seed(None)  # of a task that only some of the processes ran
    gc.freeze()
