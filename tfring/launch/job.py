"""A job: its workers started, watched and, when one fails or someone asks, stopped."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import BinaryIO

from tfring.cluster import Cluster, launch_variables
from tfring.launch import processes
from tfring.launch.cpus import available_cpus, thread_variables
from tfring.launch.guard import STOP_SIGNALS
from tfring.launch.output import Shown, Stream, prefix, surfaces

# Ladders: signals to send, and the seconds each is given. Ctrl-C lets the scripts write a checkpoint.
_INTERRUPT = ((signal.SIGINT, 10.0), (signal.SIGTERM, 3.0), (signal.SIGKILL, 5.0))
_TERMINATE = ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0))
_KILL = ((signal.SIGKILL, 5.0),)

# So begin the exceptions of a rank that lost another one; it is not the first to fail.
_LOST_PEER = re.compile(rb"^[\w.]*\b(PeerLostError|AbortedError|UnavailableError|RendezvousError)\b")
_CAUSE_SECONDS = 2.0  # how long the first to fail may take to exit after the others have noticed

_CANNOT_START = 71  # EX_OSERR


class _CannotStartError(Exception):
    pass


@dataclasses.dataclass
class Worker:
    """One process of the job."""

    rank: int
    process: subprocess.Popen
    out: Stream
    err: Stream
    log: BinaryIO | None
    exit_code: int | None = None  # negative for a signal
    failed_at: float = 0.0  # when its traceback began, or it ended without

    @property
    def lost_a_peer(self) -> bool:
        """Whether it ended because another had, going by its last words."""
        return any(_LOST_PEER.match(line) for line in self.err.last_words()[0])

    def close(self) -> None:
        self.out.close()
        self.err.close()
        if self.log:
            self.log.close()


class Job:
    """`num_workers` processes of one command on this host, in one ring.

    Args:
        command: What follows the name of the interpreter: `["train.py", "--epochs", "3"]`.
        num_workers: The world size.
        log_dir: An existing folder for `rank-<rank>.log`, all that a worker prints; none by default.
        environ: The workers' environment, to which the launcher adds; its own by default.
    """

    def __init__(
        self,
        command: Sequence[str],
        num_workers: int,
        *,
        log_dir: pathlib.Path | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._command = [sys.executable, *command]
        self._num_workers = num_workers
        self._log_dir = log_dir
        self._environ = dict(os.environ if environ is None else environ)
        self._selector = selectors.DefaultSelector()
        self._workers: list[Worker] = []
        self._shown = Shown()
        self._out, self._err = surfaces()
        self._failed: list[Worker] = []  # by themselves, not because they were stopped
        self._first: Worker | None = None  # of them
        self._decide_at: float | None = None  # when to settle which was the first
        self._stop_code: int | None = None  # the job's exit code, once it is being stopped
        self._ladder: list[tuple[signal.Signals, float]] = []
        self._next_step_at: float | None = None

    def run(self, parent_gone: int) -> int:
        """Starts the workers and returns when none is left.

        Args:
            parent_gone: A descriptor that reads as ended when the workers are to be stopped.

        Returns:
            0 if all workers ended with 0; the exit code of the first that failed, 128 + signal if it was
            killed; 128 + signal if one of STOP_SIGNALS arrived.
        """
        signals = self._watch_signals()
        self._watch(signals, lambda: self._on_signals(signals))
        self._watch(parent_gone, lambda: self._on_parent_gone(parent_gone))
        try:
            self._start()
            while any(worker.exit_code is None for worker in self._workers):
                self._turn()
            self._decide()
        except BrokenPipeError:  # `tfring launch ... | head`
            self._stop_code = 128 + signal.SIGPIPE
        except _CannotStartError as error:
            self._stop_code = _CANNOT_START
            self._say(str(error))
        finally:
            processes.end_descendants()
        with contextlib.suppress(BrokenPipeError):
            self._report()
        return self._stop_code or 0

    # ------------------------------------------------------------------------------------------------ start

    def _start(self) -> None:
        # Bound here and handed down, so that no other program takes a port before its worker listens.
        listeners = [socket.create_server(("127.0.0.1", 0), backlog=128) for _ in range(self._num_workers)]
        addresses = [f"127.0.0.1:{listener.getsockname()[1]}" for listener in listeners]
        threads = thread_variables(self._num_workers, available_cpus(), self._environ)
        for rank, listener in enumerate(listeners):
            cluster = Cluster.from_hosts(addresses, rank, source=launch_variables.SOURCE)
            cluster = dataclasses.replace(cluster, listen_fd=listener.fileno())
            variables = {**self._environ, **threads, **launch_variables.write(cluster)}
            variables.setdefault("PYTHONUNBUFFERED", "1")  # what it prints is shown when it is printed
            variables.setdefault("PYTHONFAULTHANDLER", "1")  # a crash in native code shows where
            try:
                self._workers.append(self._start_worker(rank, variables, listener.fileno()))
            except OSError as error:
                raise _CannotStartError(f"could not start rank {rank}: {error}") from error
        for listener in listeners:
            listener.close()  # or a dead worker's port would still take connections

    def _start_worker(self, rank: int, variables: dict[str, str], listen_fd: int) -> Worker:
        log = (self._log_dir / f"rank-{rank}.log").open("wb", buffering=0) if self._log_dir else None
        out, out_end = os.pipe()
        err, err_end = os.pipe()
        process = subprocess.Popen(
            self._command,
            env=variables,
            stdin=None if rank == 0 else subprocess.DEVNULL,
            stdout=out_end,
            stderr=err_end,
            pass_fds=[listen_fd],
            start_new_session=True,  # leads a group of its own, to be signalled with what it starts
            preexec_fn=functools.partial(processes.die_with_parent, os.getpid()),
        )
        os.close(out_end)
        os.close(err_end)
        worker = Worker(
            rank,
            process,
            Stream(rank, out, self._out, log, self._shown),
            Stream(rank, err, self._err, log, self._shown),
            log,
        )
        for stream in (worker.out, worker.err):
            self._watch(stream.fd, functools.partial(self._on_output, stream))
        return worker

    # ------------------------------------------------------------------------------------------------ watch

    def _turn(self) -> None:
        """Waits for something to happen and deals with it."""
        streams = [stream for worker in self._workers for stream in (worker.out, worker.err)]
        due = [self._decide_at, self._next_step_at, *(stream.show_rest_at for stream in streams)]
        times = [at for at in due if at is not None]
        ready = self._selector.select(max(0.0, min(times) - time.monotonic()) if times else None)
        # Ends come before output: a peer's complaint is never taken for older than the end that caused it.
        self._collect_ended()
        for key, _ in ready:
            key.data()
        now = time.monotonic()
        for stream in streams:
            if stream.show_rest_at is not None and now >= stream.show_rest_at:
                stream.show_rest()
        if self._decide_at is not None and now >= self._decide_at:
            self._decide()
        if self._next_step_at is not None and now >= self._next_step_at:
            self._next_step()

    def _collect_ended(self) -> None:
        ended = processes.reap()
        for worker in self._workers:
            if worker.process.pid in ended:
                self._on_ended(worker, ended[worker.process.pid])

    def _on_ended(self, worker: Worker, code: int) -> None:
        worker.exit_code = worker.process.returncode = code
        now = time.monotonic()
        worker.out.pump()
        worker.err.pump()
        if code == 0 or self._stop_code is not None:
            return
        worker.failed_at = now if code < 0 else (worker.err.traceback_at or now)
        self._failed.append(worker)
        if not self._another_may_be_first(worker):
            self._decide_at = now
        elif self._decide_at is None:
            self._decide_at = now + _CAUSE_SECONDS

    def _another_may_be_first(self, worker: Worker) -> bool:
        """Whether one that still runs may have failed before: a traceback comes a while before the end."""
        running = [other for other in self._workers if other.exit_code is None]
        tracebacks = [other.err.traceback_at for other in running if other.err.traceback_at is not None]
        return bool(running) and (worker.lost_a_peer or any(at < worker.failed_at for at in tracebacks))

    def _decide(self) -> None:
        """Settles who failed first, and stops the others."""
        self._decide_at = None
        if self._failed and self._stop_code is None:
            self._failed.sort(key=lambda worker: (worker.lost_a_peer, worker.failed_at))
            self._first = self._failed[0]
            self._stop(_exit_status(self._first.exit_code), _TERMINATE)

    def _on_output(self, stream: Stream) -> None:
        if not stream.pump():
            self._selector.unregister(stream.fd)

    # ------------------------------------------------------------------------------------------------- stop

    def _on_signals(self, fd: int) -> None:
        for signum in os.read(fd, 256):
            if signum == signal.SIGCHLD:
                continue  # it has woken us up; _turn does the rest
            if self._stop_code is None:
                self._stop(128 + signum, _INTERRUPT if signum == signal.SIGINT else _TERMINATE)
            elif signum == signal.SIGINT:  # asked again
                self._stop(self._stop_code, _KILL)

    def _on_parent_gone(self, fd: int) -> None:
        self._selector.unregister(fd)
        self._stop(128 + signal.SIGKILL, _TERMINATE)

    def _stop(self, code: int, ladder: Sequence[tuple[signal.Signals, float]]) -> None:
        self._stop_code = code
        self._ladder = list(ladder)
        self._next_step()

    def _next_step(self) -> None:
        self._next_step_at = None
        if self._ladder:
            signum, seconds = self._ladder.pop(0)
            self._next_step_at = time.monotonic() + seconds
            for worker in self._workers:
                if worker.exit_code is None:
                    processes.send_signal(worker.process.pid, signum, to_group=True)

    # ----------------------------------------------------------------------------------------------- report

    def _report(self) -> None:
        for worker in self._workers:
            worker.close()
        if self._first:
            self._report_failure(self._first)
        for signum in STOP_SIGNALS:
            if self._stop_code == 128 + signum and not self._first:
                self._say(f"stopped by {signum.name}, with all workers.")

    def _report_failure(self, first: Worker) -> None:
        words, others_since = first.err.last_words()
        if others_since and first.exit_code not in (-signal.SIGKILL, -signal.SIGTERM):  # it had no last words
            for line in words:
                self._err.write_line(prefix(first.rank) + line)
        which = "failed first" if self._num_workers > 1 else "failed"
        text = f"rank {first.rank} {which}: {_describe(first.exit_code)}."
        early = [worker.rank for worker in self._workers if worker.exit_code == 0]
        if early and first.lost_a_peer:
            text += f" Before it {_ranks(early)} had ended with exit code 0."
        if len(self._failed) > 1:
            text += f" After it failed {_ranks(sorted(worker.rank for worker in self._failed[1:]))}."
        stopped = [worker.rank for worker in self._workers if worker.exit_code and worker not in self._failed]
        if stopped:
            text += f" Stopped: {_ranks(stopped)}."
        if self._log_dir:
            text += f" All it printed: {self._log_dir / f'rank-{first.rank}.log'}"
        self._say(text)

    def _say(self, text: str) -> None:
        self._err.write_line(f"tfring launch: {text}".encode())

    # -------------------------------------------------------------------------------------------- machinery

    def _watch(self, fd: int, on_ready: Callable[[], None]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, on_ready)

    def _watch_signals(self) -> int:
        """A descriptor from which the number of each signal that arrives can be read."""
        numbers, write_end = os.pipe()
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        for signum in (*STOP_SIGNALS, signal.SIGCHLD):
            if signal.getsignal(signum) != signal.SIG_IGN:  # as under nohup
                signal.signal(signum, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        return numbers


def _exit_status(code: int | None) -> int:
    assert code is not None
    return code if code >= 0 else 128 - code


def _describe(code: int | None) -> str:
    assert code is not None
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:  # a real-time signal
        name = f"signal {-code}"
    return f"killed by {name}" + (" (out of memory? see `dmesg`)" if -code == signal.SIGKILL else "")


def _ranks(ranks: Sequence[int]) -> str:
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"
