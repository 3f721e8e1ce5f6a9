"""Real processes for the ring's tests, without TensorFlow: light enough to be killed and stopped.

    def task(cluster, value):                    # runs in a process of its own, once a rank
        with Communicator.connect(cluster, ...) as ring:
            return ring.all_reduce(value)

    ranks.run(3, task, 1.0)                      # the results by rank; a failure shows every rank's log

Processes wait for tasks and are shared by the tests of a session; a test that harms them takes
`ranks.Group(n)`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import itertools
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import connection
from types import SimpleNamespace
from typing import Any

CONNECT_SECONDS = 15.0
_START_SECONDS = 60.0
_ring_numbers = itertools.count()


class Failed(Exception):
    """The error of a task, by name and text; exceptions themselves do not always unpickle."""

    def __init__(self, kind: str, message: str, trace: str) -> None:
        super().__init__(kind, message, trace)
        self.kind, self.message, self.trace = kind, message, trace


class Group:
    """Processes, each with a listening socket of its own."""

    def __init__(self, count: int, host: str = "127.0.0.1", environ: dict[str, str] | None = None) -> None:
        self._logs = tempfile.TemporaryDirectory(prefix="tfring-ring-")
        self._members = [_Member(os.path.join(self._logs.name, f"{i}.log"), host, environ or {}) for i in range(count)]
        self._running: list[_Member] = []

    def start(self, world_size: int, task: Callable[..., Any], *args: Any) -> None:
        """Begins `task(cluster, *args)` on the first `world_size` processes, once all have imported what it needs."""
        self._running = self._members[:world_size]
        addresses = tuple(member.address for member in self._running)
        ring = f"ring-{next(_ring_numbers)}"
        for rank, member in enumerate(self._running):
            member.send((list(sys.path), task, (rank, world_size, addresses, member.listen_fd, ring), args))
        deadline = time.monotonic() + _START_SECONDS
        for rank, member in enumerate(self._running):
            if not member.pipe.poll(max(0.0, deadline - time.monotonic())):
                raise AssertionError(f"rank {rank} has not begun after {_START_SECONDS} s\n{self.logs()}")
            try:
                member.pipe.recv()
            except EOFError:
                raise AssertionError(f"rank {rank} died before it began\n{self.logs()}") from None
        for member in self._running:
            member.pipe.send(None)

    def pid(self, rank: int) -> int:
        return self._members[rank].process.pid

    def end(self, rank: int) -> subprocess.Popen:
        """Lets a process end, whose task is through, as a program does; returns it."""
        self._members[rank].pipe.close()
        return self._members[rank].process

    def wait_for(self, rank: int, text: str, seconds: float = 20) -> None:
        """Returns once this text stands in a rank's log."""
        deadline = time.monotonic() + seconds
        while text not in self._members[rank].log_tail():
            assert time.monotonic() < deadline, f"rank {rank} never wrote {text!r}\n{self.logs()}"
            time.sleep(0.01)

    def outcomes(self, seconds: float = 30, without: tuple[int, ...] = ()) -> list[Any]:
        """Returns the result of each rank, or the `Failed` it ended in; None for the ranks left out."""
        deadline = time.monotonic() + seconds
        results: list[Any] = [None] * len(self._running)
        for rank, member in enumerate(self._running):
            if rank in without:
                continue
            if not member.pipe.poll(max(0.0, deadline - time.monotonic())):
                raise AssertionError(f"rank {rank} is still running after {seconds} s\n{self.logs()}")
            try:
                results[rank] = member.pipe.recv()
            except EOFError:
                results[rank] = Failed("Died", f"with code {member.process.wait()}", "")
        return results

    def logs(self) -> str:
        return "\n".join(f"----- rank {r}\n{m.log_tail()}" for r, m in enumerate(self._running))

    def close(self) -> None:
        for member in self._members:
            member.close()
        self._logs.cleanup()

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_shared: list[Group] = []


def run(world_size: int, task: Callable[..., Any], *args: Any, seconds: float = 30) -> list[Any]:
    """The results of `task(cluster, *args)` by rank, on the session's processes.

    Raises:
      AssertionError: Any rank failed; with all tracebacks and logs.
    """
    __tracebackhide__ = True
    results = try_run(world_size, task, *args, seconds=seconds)
    failures = [f"===== rank {r}\n{f.trace or f}" for r, f in enumerate(results) if isinstance(f, Failed)]
    if failures:
        raise AssertionError("\n".join([*failures, _shared[0].logs()]))
    return results


def try_run(world_size: int, task: Callable[..., Any], *args: Any, seconds: float = 30) -> list[Any]:
    """As `run`, with a `Failed` in the place of each rank that raised."""
    __tracebackhide__ = True
    if not _shared:
        _shared.append(Group(8))
    try:
        _shared[0].start(world_size, task, *args)
        return _shared[0].outcomes(seconds)
    except BaseException:
        _shared.pop().close()
        raise


@atexit.register
def _close_shared() -> None:
    while _shared:
        _shared.pop().close()


class _Member:
    def __init__(self, log: str, host: str, environ: dict[str, str]) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family)
        port = listener.getsockname()[1]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.listen_fd = listener.fileno()
        self.log = log
        self.pipe, theirs = connection.Pipe()
        serve = f"ranks._serve({os.getpid()}, {theirs.fileno()})"
        start = f"import sys; sys.path[:] = {sys.path!r}; import ranks; {serve}"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TFRING_")}
        with open(log, "wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", start],
                pass_fds=[theirs.fileno(), self.listen_fd],
                env={
                    **environment,
                    "PYTHONUNBUFFERED": "1",
                    "OMP_NUM_THREADS": "1",
                    "OPENBLAS_NUM_THREADS": "1",
                    **environ,
                },
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        theirs.close()
        listener.close()

    def send(self, task: Any) -> None:
        self._log_start = os.path.getsize(self.log)
        self.pipe.send_bytes(pickle.dumps(task[0]))  # the path first: the rest unpickles with it
        self.pipe.send_bytes(pickle.dumps(task[1:]))

    def log_tail(self) -> str:
        with open(self.log, errors="replace") as file:
            file.seek(self._log_start)
            return file.read()[-4000:]

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        self.pipe.close()


def _serve(parent: int, pipe_fd: int) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)
    os.set_inheritable(pipe_fd, False)
    pipe = connection.Connection(pipe_fd)
    from tfring import imports

    imports.quicken()
    while True:
        try:
            sys.path[:] = pickle.loads(pipe.recv_bytes())
            task, (rank, world_size, addresses, listen_fd, ring), args = pickle.loads(pipe.recv_bytes())
            import tfring.ring.communicator  # noqa: F401  what `join` needs, before limits of a few seconds begin

            pipe.send(None)
            pipe.recv()
        except EOFError:
            return
        cluster = SimpleNamespace(rank=rank, world_size=world_size, addresses=addresses, listen_fd=listen_fd, ring=ring)
        try:
            answer = task(cluster, *args)
        except BaseException as error:
            answer = Failed(type(error).__name__, str(error), traceback.format_exc())
        pipe.send(answer)
        sys.stdout.flush()


def join(cluster: Any, **kwargs: Any) -> Any:
    """This rank's communicator in the task's ring. For use in a task."""
    from tfring.ring.communicator import Communicator

    kwargs = {
        "name": cluster.ring,
        "connect_timeout_seconds": CONNECT_SECONDS,
        "timeout_seconds": 20,
        **kwargs,
    }
    return Communicator.connect(cluster, **kwargs)
