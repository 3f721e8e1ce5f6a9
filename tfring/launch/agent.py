"""The launcher's agent on another host: `python -m tfring.launch.agent`, started over ssh or srun.

It starts the workers of its host, forwards their output and their exit codes, and stops them when its standard input
closes. They thus end with the launcher, even if the launcher is killed.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import queue
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

from tfring.cluster import Cluster, launch_variables
from tfring.errors import ConfigurationError
from tfring.launch import exit_codes, frames, processes, worker
from tfring.launch.guard import STOP_SIGNALS, run_guarded
from tfring.transport import ports, sockets, wire

_STDIN, _STDOUT = 0, 1
_TERMINATE_SECONDS = 5.0
_PREEMPT_SECONDS = 25.0  # lets tfring.callbacks.Backup save
_telling = threading.Lock()


class _Agent:
    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._processes: dict[int, worker.Started] = {}  # by rank: running workers
        self._open = 0  # number of their open streams
        self._stdin: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._kill_at: float | None = None
        self._gone = False

    def run(self, parent_gone: int) -> int:
        children, write_end = os.pipe()
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        for signum in (*STOP_SIGNALS, signal.SIGCHLD):
            signal.signal(signum, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        _tell(frames.greeting("agent"))
        reader = frames.Reader("launcher", frames.TO_AGENT)
        self._watch(_STDIN, lambda: self._on_input(reader))
        self._watch(parent_gone, lambda: self._on_gone(parent_gone))
        self._watch(children, lambda: self._on_signals(children))
        self._setup: dict[str, Any] | None = None
        self._started = False
        try:
            while not (self._gone and not self._processes) and not (self._started and self._is_done()):
                timeout = None if self._kill_at is None else max(0.0, self._kill_at - time.monotonic())
                for key, _ in self._selector.select(timeout):
                    key.data()
                if self._kill_at is not None and time.monotonic() >= self._kill_at:
                    self._kill_at = None
                    self._signal(signal.SIGKILL)
        except frames.OtherProtocolError as error:
            print(f"tfring launch, on {socket.gethostname()}: {error}", file=sys.stderr)
            return exit_codes.REFUSES_LAUNCHER
        finally:
            processes.end_descendants()
        return 0

    def _is_done(self) -> bool:
        return not self._processes and not self._open

    def _on_input(self, reader: frames.Reader) -> None:
        data = os.read(_STDIN, 1 << 16)
        if not data:
            self._on_gone(_STDIN)
            return
        for kind, message, content in reader.feed(data):
            if kind == "start":
                self._prepare(message)
            elif kind == "addresses":
                self._start(message["addresses"])
            elif kind == "input":
                self._stdin.put(content or None)
            elif kind == "signal":
                self._signal(message["number"], message["rank"])

    def _prepare(self, setup: dict[str, Any]) -> None:
        self._setup = setup
        self._limit = sockets.raise_descriptor_limit(len(setup["ranks"]) * worker.FDS_OF_A_WORKER)
        os.environ.update({name: text for name, text in setup["environ"].items() if name.startswith("TFRING_")})
        try:
            # "192.0.2.9 50000 192.0.2.1 22": the others can reach this host at the address that the launcher used.
            to_here = [*os.environ.get("SSH_CONNECTION", "").split(), *[""] * 4][2]
            if setup["num_nodes"] == 1:
                to_here = "127.0.0.1"
            elif to_here and ports.is_loopback(to_here):
                to_here = ""
            address = ports.named_address() or to_here or ports.own_address()
            loopback = ports.is_loopback(address)
            self._listeners = [ports.open_listener(loopback=loopback) for _ in setup["ranks"]]
        except (OSError, ConfigurationError) as error:
            self._tell_problem("", error)
            self._gone = True
            return
        _tell(wire.pack("listening", address=address, ports=[each.getsockname()[1] for each in self._listeners]))

    def _start(self, addresses: list[str]) -> None:
        assert self._setup is not None
        setup, self._started = self._setup, True
        ranks = setup["ranks"]
        # Set for the program, and never seen on a command line. This process has HOME, PATH and the like from ssh.
        environ = {**os.environ, **setup["environ"]}
        workers, servers = addresses[: setup["num_workers"]], addresses[setup["num_workers"] :]
        for rank, listener in zip(ranks, self._listeners, strict=True):
            if rank < len(workers):
                # By the addresses: two names in --hosts may be those of one host.
                cluster = Cluster.from_hosts(workers, rank, launch_variables.SOURCE, listener.fileno())
                place = launch_variables.write(cluster, servers)
            else:
                number = rank - len(workers)
                cluster = Cluster.from_hosts(servers, number, launch_variables.SOURCE, listener.fileno())
                place = launch_variables.write_server(cluster, workers)
            command = [sys.executable, *setup["command"]]
            stdin = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            try:
                started = worker.start(command, cluster, environ, stdin=stdin, place=place)
            except (OSError, ConfigurationError) as error:
                self._tell_problem(f"could not start rank {rank}: ", error)
                self._stop()
                return
            self._processes[rank] = started
            for name, fd in (("out", started.out), ("err", started.err)):
                self._open += 1
                self._watch(fd, functools.partial(self._on_output, rank, name, fd))
            if rank == 0:
                threading.Thread(target=self._feed, args=(started.process.stdin,), daemon=True).start()
        for listener in self._listeners:
            listener.close()

    def _tell_problem(self, where: str, error: Exception) -> None:
        assert self._setup is not None
        why = str(error)
        if getattr(error, "errno", None) == errno.EMFILE:
            where, why = "", sockets.without_descriptors(len(self._setup["ranks"]), self._limit)
        _tell(wire.pack("problem", what=f"{where}{why}"[:4000]))

    def _on_output(self, rank: int, name: str, fd: int) -> None:
        data = os.read(fd, 1 << 16)
        if data:
            _tell(wire.pack("output", data, rank=rank, stream=name))
        else:
            self._selector.unregister(fd)
            os.close(fd)
            self._open -= 1

    def _on_signals(self, fd: int) -> None:
        if set(os.read(fd, 256)) & set(STOP_SIGNALS):  # the host shuts down, or the batch system ends the job
            self._stop(_PREEMPT_SECONDS)
        for pid, code in processes.reap().items():
            for rank, started in list(self._processes.items()):
                if started.process.pid == pid:
                    started.process.returncode = code
                    self._drain(rank, started)
                    del self._processes[rank]
                    with contextlib.suppress(OSError):
                        _tell(wire.pack("ended", rank=rank, code=code, said=_notes_of(started)))

    def _drain(self, rank: int, started: worker.Started) -> None:
        """Reads all output of a worker before its end is reported. Its children may hold the streams open longer."""
        for name, fd in (("out", started.out), ("err", started.err)):
            if fd in self._selector.get_map():
                os.set_blocking(fd, False)
                with contextlib.suppress(OSError):
                    while data := os.read(fd, 1 << 16):
                        _tell(wire.pack("output", data, rank=rank, stream=name))
                self._selector.unregister(fd)
                os.close(fd)
                self._open -= 1

    def _on_gone(self, fd: int) -> None:
        self._selector.unregister(fd)
        self._stop()

    def _stop(self, seconds: float = _TERMINATE_SECONDS) -> None:
        self._gone = True
        self._stdin.put(None)
        self._signal(signal.SIGTERM)
        self._kill_at = time.monotonic() + seconds

    def _signal(self, signum: int, only: int | None = None) -> None:
        for rank, started in self._processes.items():
            if only in (None, rank):
                processes.send_signal(started.process.pid, signum, to_group=True)

    def _feed(self, stdin: Any) -> None:
        """Writes rank 0's standard input, in a separate thread: rank 0 may not read it."""
        with contextlib.suppress(OSError), stdin:
            while (data := self._stdin.get()) is not None:
                stdin.write(data)
                stdin.flush()
                _tell(wire.pack("taken"))

    def _watch(self, fd: int, on_ready: Any) -> None:
        self._selector.register(fd, selectors.EVENT_READ, on_ready)


def _notes_of(started: worker.Started) -> str:
    """Returns the notes that a worker has sent about its place."""
    os.set_blocking(started.taken, False)  # a process that it has started may hold the other end
    said = b""
    with contextlib.suppress(BlockingIOError):
        said = os.read(started.taken, 16)
    os.close(started.taken)
    return said.decode(errors="replace")


def _tell(data: bytes) -> None:
    with _telling, contextlib.suppress(BrokenPipeError):  # the launcher is gone: standard input will end
        frames.write(_STDOUT, data)


if __name__ == "__main__":
    sys.exit(run_guarded(_Agent().run))
