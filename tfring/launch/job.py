"""A job: starts its workers, watches them, and stops them if one fails or a signal asks for it."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import os
import pathlib
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import BinaryIO

from tfring.cluster import Address, Cluster, launch_variables
from tfring.cluster.launch_variables import Note
from tfring.errors import ConfigurationError
from tfring.launch import exit_codes, frames, processes, tracebacks
from tfring.launch.guard import STOP_SIGNALS
from tfring.launch.hosts import Host
from tfring.launch.output import Shown, Stream, Surface, prefix, surfaces
from tfring.launch.remote import RemoteHost, Way
from tfring.launch.worker import FDS_OF_A_WORKER, start
from tfring.transport import secret, sockets

# Ladders: signals to send, and the seconds to wait after each. Ctrl-C lets the scripts write a checkpoint.
_INTERRUPT = ((signal.SIGINT, 10.0), (signal.SIGTERM, 3.0), (signal.SIGKILL, 5.0))
_TERMINATE = ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0))
_PREEMPT = ((signal.SIGTERM, 25.0), (signal.SIGKILL, 5.0))  # lets tfring.callbacks.Backup save
_KILL = ((signal.SIGKILL, 5.0),)

_CAUSE_SECONDS = 2.0  # for the first to fail to exit after the others have noticed
_SAME_ERROR_SECONDS = 1.0  # for the others to end with the same error, after the first traceback
_RAISED = 1  # the exit code of Python after an uncaught error
_MOST_EXIT_SECONDS = 30.0  # from a traceback to the end of the process; a later end has another cause

_ALONE_SECONDS = 60.0  # after which a warning reports that the job has no ring; repeated at its end
_CLOSE_SECONDS = 10.0  # for the connections to other hosts to close
_LAST_WRITE_SECONDS = 2.0  # for a stopped job to wait for a reader of its pending output
_BACKLOG = 128  # pending connections of a worker
_MOST_PENDING_BYTES = 1 << 20  # no more is read from workers while this much is still to be shown


class _CannotStartError(Exception):
    pass


@dataclasses.dataclass
class Worker:
    """One process of the job."""

    rank: int
    pid: int | None  # on this host
    send_signal: Callable[[int], None]
    out: Stream
    err: Stream
    log: BinaryIO | None
    server: int | None = None  # the number of a parameter server; its rank follows those of the workers
    exit_code: int | None = None  # negative for a signal
    failed_at: float = 0.0  # start of its traceback, or its end without one
    error: list[bytes] = dataclasses.field(default_factory=list)  # the traceback with which it ended
    has_lost_peer: bool = False  # it reported that it ended because another had: it is not the first to fail

    @property
    def name(self) -> str:
        """The name of the process, for messages."""
        return f"rank {self.rank}" if self.server is None else f"server {self.server}"

    def close(self) -> None:
        self.out.close()
        self.err.close()
        if self.log:
            self.log.close()


class Job:
    """`num_workers` processes of one command, in one ring: on this host, or on others.

    Args:
      command: Arguments of the interpreter: `["train.py", "--epochs", "3"]`.
      num_workers: The world size.
      num_servers: Number of additional processes that serve parameters. Several hosts take them in turn.
      max_server_restarts: Maximum number of restarts of each server that keeps snapshots, in its place on this host.
      max_worker_restarts: The same for each worker whose loss the others survive.
      log_dir: An existing folder for `rank-<rank>.log` and `server-<number>.log`, the full output of each process. By
        default there are no logs.
      environ: Environment of the workers, to which the launcher adds variables. Defaults to the launcher's own.
      hosts: Hosts on which to start them, for `num_workers` in all. Defaults to this host.
      way: The command that reaches `hosts`, and the workers' environment there.
      start_seconds: Time to wait for `hosts`, in seconds.
      timestamps: Whether to show lines with their time.
      quiet_codes: Exit codes of a worker that are not reported, because the worker has reported the problem.
      restart: Number of earlier starts of the command. If there are any, rank 0 has no standard input, and logs grow.
      delay_seconds: Time to wait before the start, in seconds.
      sequel: A function that returns a few words on what follows a failure. It is called once the failure is known.
    """

    def __init__(
        self,
        command: Sequence[str],
        num_workers: int,
        *,
        num_servers: int = 0,
        max_server_restarts: int = 0,
        max_worker_restarts: int = 0,
        log_dir: pathlib.Path | None = None,
        environ: Mapping[str, str] | None = None,
        hosts: Sequence[Host] = (),
        way: Way | None = None,
        start_seconds: float = 300.0,
        timestamps: bool = False,
        quiet_codes: Sequence[int] = (),
        restart: int = 0,
        delay_seconds: float = 0.0,
        sequel: Callable[[Job], str] = lambda job: "",
    ) -> None:
        self._command = list(command)
        self._num_workers = num_workers
        self._num_servers = num_servers
        self._max_server_restarts = max_server_restarts
        self._max_worker_restarts = max_worker_restarts
        self._restarts: dict[int, int] = {}  # by rank: number of restarts in its place
        self._replicated: set[int] = set()  # servers whose loss the others survive
        self._addresses: list[str] = []  # of workers, then of servers, if all are on this host
        self._reserved: dict[int, socket.socket] = {}  # by rank: bound for the next process in its place
        self._log_dir = log_dir
        self._timestamps = timestamps
        self._quiet_codes = quiet_codes
        self._environ = dict(os.environ if environ is None else environ)
        self._environ[secret.VARIABLE] = secret.configured(self._environ) or secret.fresh()
        self._environ.setdefault("PYTHONHASHSEED", "0")  # sets of strings have one order on all ranks
        if max_worker_restarts:
            self._environ[launch_variables.MAX_WORKER_RESTARTS] = str(max_worker_restarts)
        self._restart = restart
        self._start_at = time.monotonic() + delay_seconds
        self._describe_followup = sequel
        self.lost_hosts: list[str] = []
        self.is_stop_requested = False  # by a signal, or because the parent is gone
        self._start_seconds = start_seconds
        self._give_up_at: float | None = None  # the deadline for hosts to listen
        self._warn_no_ring_at = self._start_at + _ALONE_SECONDS if num_workers > 1 else None
        self._hosts: list[RemoteHost] = []
        first = 0
        for number, host in enumerate(hosts):
            assert way is not None
            way.environ[secret.VARIABLE] = self._environ[secret.VARIABLE]  # a file may be missing there
            way.environ.setdefault("PYTHONHASHSEED", self._environ["PYTHONHASHSEED"])
            servers = range(num_workers + number, num_workers + num_servers, len(hosts))
            self._hosts.append(RemoteHost(host, [*range(first, first + host.num_workers), *servers], way))
            first += host.num_workers
        self._selector = selectors.DefaultSelector()
        self._taken: dict[int, int] = {}  # by rank: pipes by which workers here report that they joined the ring
        self._notes: dict[int, bytes] = {}  # by rank: reports read from these pipes
        self._outputs: dict[int, Callable[[], None]] = {}  # read only while their output can be shown
        self._is_reading = True
        self._writing: dict[Surface, int] = {}  # those with pending output, and their descriptors
        self._workers: list[Worker] = []
        self._replaced: list[Worker] = []  # that were started again: their output may still be unread
        self._shown = Shown()
        self._out, self._err = surfaces()
        self._failed: list[Worker] = []  # by themselves, not because they were stopped
        self._first: Worker | None = None  # the first of them
        self._decide_at: float | None = None  # when to decide which was the first
        self._stop_code: int | None = None  # the job's exit code, once it is being stopped
        self._ladder: list[tuple[signal.Signals, float]] = []
        self._next_step_at: float | None = None
        self._processes: list[subprocess.Popen] = []  # kept: a new Popen collects those without a reference
        self._may_have_ended = False  # whether a child may have ended since the last collection

    def run(self, parent_gone: int) -> int:
        """Starts the workers and returns when none is left.

        Args:
          parent_gone: A descriptor that is at end-of-file when the workers have to be stopped.

        Returns:
          0 if all workers ended with 0; the exit code of the first that failed, or 128 + signal if it was
          killed; 128 + signal if one of STOP_SIGNALS arrived.
        """
        signals = _signals()
        self._watch(signals, lambda: self._on_signals(signals))
        self._watch(parent_gone, lambda: self._on_parent_gone(parent_gone))
        try:
            self._wait_to_start()
            if self._stop_code is None:
                self._start_elsewhere() if self._hosts else self._start()
                while any(worker.exit_code is None for worker in self._workers):
                    self._turn()
                self._decide()
                self._close_hosts()
        except BrokenPipeError:  # `tfring launch ... | head`
            self._stop_code = 128 + signal.SIGPIPE
        except _CannotStartError as error:
            self._stop_code = exit_codes.CANNOT_START
            self._say(str(error) + self._describe_followup(self))
        finally:
            processes.end_descendants()
        with contextlib.suppress(BrokenPipeError):
            self._report()
            self._show_rest()
        self._selector.close()
        return self._stop_code or 0

    # ------------------------------------------------------------------------------------------------ start

    def _wait_to_start(self) -> None:
        while self._stop_code is None and (seconds := self._start_at - time.monotonic()) > 0:
            for key, _ in self._selector.select(seconds):
                key.data()

    def _start(self) -> None:
        num_processes = self._num_workers + self._num_servers
        limit = sockets.raise_descriptor_limit(num_processes * FDS_OF_A_WORKER)
        try:
            self._start_all(num_processes)
        except (OSError, _CannotStartError) as error:
            if getattr(error.__cause__ or error, "errno", None) != errno.EMFILE:
                raise
            raise _CannotStartError(sockets.without_descriptors(num_processes, limit)) from error

    def _start_all(self, num_processes: int) -> None:
        # Bound here and inherited, so that no other program takes a port before its worker listens.
        listeners = [_bound() for _ in range(num_processes)]
        self._addresses = [f"127.0.0.1:{listener.getsockname()[1]}" for listener in listeners]
        for rank, listener in enumerate(listeners):
            if self._max_restarts(rank):
                self._reserved[rank] = _bound(listener.getsockname()[1])
            listener.listen(_BACKLOG)
        for rank, listener in enumerate(listeners):
            self._start_at_place(rank, listener)
        for listener in listeners:
            listener.close()  # or a dead worker's port would still accept connections

    def _start_at_place(self, rank: int, listener: socket.socket) -> None:
        workers, servers = self._addresses[: self._num_workers], self._addresses[self._num_workers :]
        number = None if rank < self._num_workers else rank - self._num_workers
        own, index = (workers, rank) if number is None else (servers, number)
        cluster = Cluster.from_hosts(own, index, launch_variables.SOURCE, listener.fileno())
        try:
            self._start_worker(rank, cluster, number, servers if number is None else workers)
        except (OSError, ConfigurationError) as error:
            what = f"rank {rank}" if number is None else f"server {number}"
            raise _CannotStartError(f"could not start {what}: {error}") from error

    def _max_restarts(self, rank: int) -> int:
        return self._max_worker_restarts if rank < self._num_workers else self._max_server_restarts

    def _start_again(self, worker: Worker, what_follows: str) -> None:
        """Starts another process in the place of a server that keeps snapshots, or of a worker that may come back."""
        rank = worker.rank
        restart = self._restarts[rank] = self._restarts.get(rank, 0) + 1
        self._say(
            f"{worker.name} is lost: {_describe(worker.exit_code)}. Its restart {restart} of "
            f"{self._max_restarts(rank)}: {what_follows}."
        )
        self._replaced.append(worker)
        os.close(self._taken.pop(rank))
        self._notes.pop(rank, None)
        with self._reserved[rank] as listener:
            self._reserved[rank] = _bound(listener.getsockname()[1])
            listener.listen(_BACKLOG)
            self._start_at_place(rank, listener)
        self._workers[rank] = self._workers.pop()

    def _start_worker(self, rank: int, cluster: Cluster, server: int | None, others: Sequence[str]) -> None:
        """Starts a worker or a server, and passes it the addresses of the `others`: the servers, or the workers."""
        log = self._open_log(rank, server)
        is_first = not self._restart and rank not in self._restarts
        stdin = None if rank == 0 and is_first else subprocess.DEVNULL
        write = launch_variables.write if server is None else launch_variables.write_server
        command = [sys.executable, *self._command]
        process, out, err, taken = start(command, cluster, self._environ, stdin=stdin, place=write(cluster, others))
        send_signal = functools.partial(processes.send_signal, process.pid, to_group=True)
        self._add_worker(rank, process.pid, send_signal, (out, err), log, server)
        self._taken[rank] = taken
        self._processes.append(process)

    def _add_worker(
        self,
        rank: int,
        pid: int | None,
        send_signal: Callable[[int], None],
        fds: tuple[int | None, int | None],
        log: BinaryIO | None,
        server: int | None = None,
    ) -> None:
        name = None if server is None else f"server {server}"
        out = Stream(rank, fds[0], self._out, log, self._shown, name, self._timestamps)
        err = Stream(rank, fds[1], self._err, log, self._shown, name, self._timestamps)
        self._workers.append(Worker(rank, pid, send_signal, out, err, log, server))
        for stream in (out, err):
            if stream.fd is not None:
                self._watch_output(stream.fd, functools.partial(self._on_output, stream))

    def _open_log(self, rank: int, server: int | None = None) -> BinaryIO | None:
        if not self._log_dir:
            return None
        path = self._log_dir / (f"rank-{rank}.log" if server is None else f"server-{server}.log")
        grows = self._restart or rank in self._restarts
        return path.open("ab", buffering=0) if grows else path.open("wb", buffering=0)

    # ---------------------------------------------------------------------------------------------- elsewhere

    def _start_elsewhere(self) -> None:
        host_of = {rank: host for host in self._hosts for rank in host.ranks}
        for rank, host in sorted(host_of.items()):
            send_signal = functools.partial(self._signal_elsewhere, host, rank)
            server = None if rank < self._num_workers else rank - self._num_workers
            self._add_worker(rank, None, send_signal, (None, None), self._open_log(rank, server), server)
        for host in self._hosts:
            try:
                host.start(self._command, len(self._hosts), self._num_workers)
            except OSError as error:
                raise _CannotStartError(f"{host.name}: {error}") from error
            self._watch_output(host.fd, functools.partial(self._on_host, host))
        self._give_up_at = time.monotonic() + self._start_seconds

    def _give_up(self) -> None:
        late = [host.name for host in self._hosts if host.listening is None]
        self.lost_hosts += late
        raise _CannotStartError(
            f"{', '.join(late)}: no answer within {self._start_seconds:g} s. Look for what hangs there: the login, the "
            "disk with Python or the working folder. If they are just slow, allow more time with --start-timeout."
        )

    def _on_host(self, host: RemoteHost) -> None:
        try:
            received = host.read()
        except frames.OtherProtocolError as error:
            raise _CannotStartError(f"{host.name}: {error}") from error
        except ValueError as error:
            host.kill()
            received = None
            self._say(f"{host.name} does not answer like an agent of tfring: {error}")
        if received is None:
            self._on_host_gone(host)
            return
        for kind, message, data in received:
            if kind == "listening" and len(message["ports"]) == len(host.ranks):
                host.listening, host.address = message["ports"], message["address"]
                self._tell_addresses()
            elif kind == "problem":
                raise _CannotStartError(f"{host.name}: {message['what']}")
            elif kind == "taken":
                host.on_taken()
            elif message.get("rank") not in host.ranks:
                raise _CannotStartError(f"{host.name} reports ranks that are not its own")
            elif kind == "output":
                worker = self._workers[message["rank"]]
                (worker.out if message["stream"] == "out" else worker.err).take(data)
            elif kind == "ended":
                self._notes[message["rank"]] = message["said"].encode()
                self._on_ended(self._workers[message["rank"]], message["code"])

    def _tell_addresses(self) -> None:
        """Sends the addresses to all hosts, once all listen: then all workers start."""
        addresses: dict[int, str] = {}
        for host in self._hosts:
            if host.listening is None:
                return
        self._give_up_at = None
        for host in self._hosts:
            assert host.listening is not None
            for rank, port in zip(host.ranks, host.listening, strict=True):
                addresses[rank] = str(Address(host.address, port))
        for host in self._hosts:
            host.tell("addresses", addresses=[addresses[rank] for rank in sorted(addresses)])
        if self._restart:
            self._hosts[0].tell("input")  # the end of input: the first try has read it
        else:
            self._hosts[0].forward_stdin()

    def _on_host_gone(self, host: RemoteHost) -> None:
        self._forget_output(host.fd)
        code = host.process.wait()
        text = f"{host.way_there} ended with exit code {code}"
        left = [self._workers[rank] for rank in host.ranks if self._workers[rank].exit_code is None]
        if left:
            self.lost_hosts.append(host.name)
        if host.listening is None and self._stop_code is None:
            raise _CannotStartError(f"no workers on {host.name}: {text}; its reason is above.")
        if left and self._stop_code is None:
            self._say(f"lost {host.name}: {text}.")
        for worker in left:
            self._on_ended(worker, exit_codes.LOST_HOST)

    def _signal_elsewhere(self, host: RemoteHost, rank: int, signum: int) -> None:
        host.tell("signal", rank=rank, number=signum)

    def _close_hosts(self) -> None:
        for host in self._hosts:
            host.close()
        deadline = time.monotonic() + _CLOSE_SECONDS
        for host in self._hosts:
            with contextlib.suppress(subprocess.TimeoutExpired):
                host.process.wait(max(0.0, deadline - time.monotonic()))

    # ------------------------------------------------------------------------------------------------ watch

    def _turn(self) -> None:
        """Waits for events and handles them."""
        self._pace()
        streams = [stream for worker in self._workers for stream in (worker.out, worker.err)]
        due = [self._decide_at, self._next_step_at, self._give_up_at, self._warn_no_ring_at]
        due += [stream.show_rest_at for stream in streams]
        times = [at for at in due if at is not None]
        times = [0.0] if self._may_have_ended else times
        self._may_have_ended = False
        ready = self._selector.select(max(0.0, min(times) - time.monotonic()) if times else None)
        # Ends are handled before output: a peer's error never seems older than the end that caused it.
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
        if self._give_up_at is not None and now >= self._give_up_at:
            self._give_up()
        if self._warn_no_ring_at is not None and now >= self._warn_no_ring_at:
            self._warn_if_no_ring()

    def _warn_if_no_ring(self) -> None:
        """Warns if no worker has joined a ring. A program does this before it trains."""
        self._warn_no_ring_at = None
        if self._taken and not any([self._notes_of(rank) for rank in self._taken]):
            self._say(
                f"after {_ALONE_SECONDS:.0f} s no ring was formed. If the program makes no tfring.RingStrategy, each "
                f"of the {self._num_workers} processes trains alone."
            )

    def _pace(self) -> None:
        """Reads no more from workers than can be shown: they wait for a slow reader, and the launcher does not."""
        surfaces = {self._out, self._err}
        for surface in surfaces:
            problem = surface.take_problem()
            if problem is not None and surface is self._out and surface is not self._err:
                self._say(f"standard output is gone ({problem}); the workers continue.")
            if surface.num_pending and surface not in self._writing:  # a file is never waited for
                self._writing[surface] = surface.fd
                self._selector.register(surface.fd, selectors.EVENT_WRITE, surface.flush)
            elif not surface.num_pending and surface in self._writing:
                self._selector.unregister(self._writing.pop(surface))
        # Output of workers that are being stopped is read to its end.
        reads = self._stop_code is not None or max(s.num_pending for s in surfaces) < _MOST_PENDING_BYTES
        if reads != self._is_reading:
            self._is_reading = reads
            for fd, on_ready in self._outputs.items():
                self._watch(fd, on_ready) if reads else self._selector.unregister(fd)

    def _collect_ended(self) -> None:
        ended = processes.reap()
        for worker in self._workers:
            if worker.pid in ended:
                self._on_ended(worker, ended[worker.pid])
        for host in self._hosts:
            if host.process.pid in ended:
                host.process.returncode = ended[host.process.pid]

    def _on_ended(self, worker: Worker, code: int) -> None:
        worker.exit_code = code
        worker.has_lost_peer = Note.PEER_LOST in self._notes_of(worker.rank)
        now = time.monotonic()
        worker.out.pump()
        worker.err.pump()
        if worker.err.traceback_at is not None and now - worker.err.traceback_at < _MOST_EXIT_SECONDS:
            worker.error = worker.err.last_traceback()
        if code == 0:
            self._end_unneeded_restarts()
        if code == 0 or self._stop_code is not None:
            return
        if self._should_restart_worker(worker):
            self._start_again(worker, "it comes back in the current epoch")
            return
        if self._can_continue_without(worker):
            self._say(f"{worker.name} is lost: {_describe(code)}. The other workers continue.")
            self._end_unneeded_restarts()
            return
        if self._can_recover_server(worker):
            if self._is_training():
                self._start_server_again(worker)
            return
        traceback_at = worker.err.traceback_at if code > 0 else None
        worker.failed_at = now if traceback_at is None else traceback_at
        self._failed.append(worker)
        decide_at = now
        if self._may_be_secondary_failure(worker):
            decide_at = now + _CAUSE_SECONDS
        elif traceback_at is not None:
            decide_at = traceback_at + _SAME_ERROR_SECONDS
        self._decide_at = decide_at if self._decide_at is None else min(self._decide_at, decide_at)

    def _start_server_again(self, server: Worker) -> None:
        if server.rank in self._replicated and self._restarts.get(server.rank, 0) >= self._max_server_restarts:
            self._say(
                f"{server.name} is lost: {_describe(server.exit_code)}. The servers that hold its shards continue."
            )
        elif server.rank in self._replicated:
            self._start_again(server, "the workers continue, and the servers that hold its shards copy them to it")
        else:
            self._start_again(server, "the workers wait for it, and it continues from its last snapshot")

    def _can_continue_without(self, worker: Worker) -> bool:
        """Returns whether the others continue without a failed worker: it has reported so, and one of them is left."""
        others = [w for w in self._workers if w.server is None and w is not worker]
        is_one_left = any(w.exit_code in (None, 0) for w in others)
        return self._can_survive_loss(worker) and is_one_left

    def _can_survive_loss(self, worker: Worker) -> bool:
        """Returns whether the others survive the loss of a worker."""
        is_back = worker.rank in self._restarts
        return worker.server is None and (is_back or Note.SURVIVABLE in self._notes_of(worker.rank))

    def _should_restart_worker(self, worker: Worker) -> bool:
        """Returns whether a failed worker is started again: the others, if any, have not finished."""
        if any(w.exit_code == 0 for w in self._workers) or not self._can_survive_loss(worker):
            return False
        return self._restarts.get(worker.rank, 0) < self._max_worker_restarts

    def _is_training(self) -> bool:
        """Returns whether a worker is still running."""
        return any(worker.server is None and worker.exit_code is None for worker in self._workers)

    def _can_recover_server(self, worker: Worker) -> bool:
        """Returns whether a failed server is started again, or is no longer needed."""
        if worker.server is None:
            return False
        restarts, said = self._restarts.get(worker.rank, 0), self._notes_of(worker.rank)
        if Note.REPLICATED in said:
            self._replicated.add(worker.rank)
        if worker.rank in self._replicated:  # one that ends with an error has notified the others, which end too
            return (worker.exit_code or 0) < 0 or not self._is_training()
        if not restarts and Note.RESTORABLE not in said:
            return False
        return (worker.rank in self._reserved and restarts < self._max_server_restarts) or not self._is_training()

    def _end_unneeded_restarts(self) -> None:
        """Ends restarted servers if no worker is left, and restarted workers that come after the servers have ended."""
        has_server_ended = any(worker.exit_code == 0 for worker in self._workers if worker.server is not None)
        for worker in self._workers:
            if worker.rank not in self._restarts or worker.exit_code is not None:
                continue
            if worker.server is not None:
                ends = not self._is_training()
            else:
                ends = has_server_ended and Note.JOINED not in self._notes_of(worker.rank)
                if ends:
                    self._say(f"{worker.name} comes back too late: the servers have ended.")
            if ends:
                worker.send_signal(signal.SIGTERM)

    def _notes_of(self, rank: int) -> bytes:
        """Returns the notes that a worker on this host has sent about its place."""
        if rank in self._taken:
            os.set_blocking(self._taken[rank], False)  # a process left by a worker may hold the other end
            with contextlib.suppress(BlockingIOError):
                self._notes[rank] = self._notes.get(rank, b"") + os.read(self._taken[rank], 16)
        return self._notes.get(rank, b"")

    def _may_be_secondary_failure(self, worker: Worker) -> bool:
        """Returns True if a running worker may have failed before: a traceback comes a while before the end."""
        running = [other for other in self._workers if other.exit_code is None]
        tracebacks = [other.err.traceback_at for other in running if other.err.traceback_at is not None]
        return bool(running) and (worker.has_lost_peer or any(at < worker.failed_at for at in tracebacks))

    def _decide(self) -> None:
        """Decides which worker failed first, and stops the others."""
        self._decide_at = None
        if self._failed and self._stop_code is None:
            self._failed.sort(key=lambda worker: (worker.has_lost_peer, worker.failed_at))
            self._first = self._failed[0]
            self._stop(_exit_status(self._first.exit_code), _TERMINATE)

    def _on_output(self, stream: Stream) -> None:
        if not stream.pump():
            assert stream.fd is not None
            self._forget_output(stream.fd)

    # ------------------------------------------------------------------------------------------------- stop

    def _on_signals(self, fd: int) -> None:
        for signum in os.read(fd, 256):
            if signum == signal.SIGCHLD:
                self._may_have_ended = True  # after the last collection: its byte was read here with another one
                continue
            self.is_stop_requested = True
            if self._stop_code is None:
                ladders = {signal.SIGINT: _INTERRUPT, signal.SIGTERM: _PREEMPT}
                self._stop(128 + signum, ladders.get(signal.Signals(signum), _TERMINATE))
            elif signum == signal.SIGINT:  # asked again
                self._stop(self._stop_code, _KILL)

    def _on_parent_gone(self, fd: int) -> None:
        self._selector.unregister(fd)
        self.is_stop_requested = True
        self._stop(128 + signal.SIGKILL, _TERMINATE)

    def _stop(self, code: int, ladder: Sequence[tuple[signal.Signals, float]]) -> None:
        self._stop_code = code
        self._give_up_at = None
        self._ladder = list(ladder)
        self._next_step()

    def _next_step(self) -> None:
        self._next_step_at = None
        if self._ladder:
            signum, seconds = self._ladder.pop(0)
            self._next_step_at = time.monotonic() + seconds
            for worker in self._workers:
                if worker.exit_code is None:
                    worker.send_signal(signum)
        else:
            for host in self._hosts:  # they do not answer
                host.kill()

    # ----------------------------------------------------------------------------------------------- report

    @property
    def first_to_fail(self) -> Worker | None:
        """The worker that ended the job because it failed before any other."""
        return self._first

    @property
    def seconds(self) -> float:
        """Returns the running time of the job in seconds."""
        return time.monotonic() - self._start_at

    def _report(self) -> None:
        for worker in (*self._replaced, *self._workers):
            worker.close()
        for reserved in self._reserved.values():
            reserved.close()
        repeated = self._shown.repeated_warnings()
        if repeated:
            for warning in repeated:
                self._say(warning)
        alone = self._num_workers > 1 and bool(self._taken) and not self._collect_taken()
        if self._first and self._first.exit_code not in self._quiet_codes:
            self._report_failure(self._first)
        if alone and self._stop_code is None:
            self._say(
                f"no ring was formed: each of the {self._num_workers} processes ran alone. To train together, make "
                "`strategy = tfring.RingStrategy()`, and the model in `with strategy.scope():` (docs/migration.md)."
            )
        for signum in STOP_SIGNALS:
            if self._stop_code == 128 + signum and not self._first:
                self._say(f"stopped by {signum.name}, with all workers.")

    def _collect_taken(self) -> bool:
        """Closes the pipes of workers on this host. Returns whether any has joined the ring."""
        said = [self._notes_of(rank) for rank in self._taken]
        for fd in self._taken.values():
            os.close(fd)
        self._taken.clear()
        return any(said)

    def _report_failure(self, first: Worker) -> None:
        alike = self._workers_with_same_error(first)
        others = [worker for worker in self._failed if worker is not first and worker not in alike]
        words, others_since = first.err.get_failure_output()
        had_last_words = first.exit_code not in (-signal.SIGKILL, -signal.SIGTERM)
        is_last = bool(alike) and not others  # the output above is from these alone
        if others_since and had_last_words and not is_last:
            for line in tracebacks.without_frames(words):
                self._err.write_line(prefix(first.rank if first.server is None else first.name) + line)
        which = "failed first" if len(self._workers) > 1 else "failed"
        if first.exit_code == launch_variables.PREEMPTED:
            which = "was preempted, and has saved the state that tfring.callbacks.Backup resumes from"
        text = f"{first.name} {which}: {_describe(first.exit_code)}."
        if alike:
            error = tracebacks.summary(first.error)
            text = f"{_ranks([first, *alike])} failed with the same error: {error}"
        elif first.has_lost_peer and first.error:
            text = f"{first.name} ended because another rank was lost: {tracebacks.summary(first.error)}"
        early = [worker for worker in self._workers if worker.exit_code == 0]
        if early and first.has_lost_peer:
            text += f" Before it {_ranks(early)} had ended with exit code 0."
        preempted = [worker for worker in others if worker.exit_code == launch_variables.PREEMPTED]
        if preempted:
            text += f" Also preempted: {_ranks(preempted)}."
        failed = [worker for worker in others if worker.exit_code != launch_variables.PREEMPTED]
        if failed:
            text += f" {_ranks(failed).capitalize()} failed after it."
        stopped = [worker for worker in self._workers if worker.exit_code and worker not in [*self._failed, *alike]]
        if stopped:
            text += f" Ended by the launcher: {_ranks(stopped)}."
        text += self._describe_followup(self)
        if self._log_dir:
            text += f" Its full output: {self._log_dir / (first.name.replace(' ', '-') + '.log')}"
        self._say(text)

    def _workers_with_same_error(self, first: Worker) -> list[Worker]:
        """Returns the workers that ended with the first failure's error, unless that is the loss of another process."""
        if first.has_lost_peer or first.exit_code != _RAISED:
            return []
        others = [worker for worker in self._workers if worker is not first and worker.exit_code]
        return [worker for worker in others if tracebacks.is_same(first.error, worker.error)]

    def _say(self, text: str) -> None:
        self._err.write_line(f"tfring launch: {text}".encode())

    def _show_rest(self) -> None:
        """Waits until all output is shown, but only briefly once the job was asked to stop."""
        for fd in self._outputs:
            if self._is_reading:
                self._selector.unregister(fd)
        self._outputs.clear()
        deadline: float | None = None
        while max(self._out.num_pending, self._err.num_pending):
            if self.is_stop_requested and deadline is None:
                deadline = time.monotonic() + _LAST_WRITE_SECONDS
            if deadline is not None and time.monotonic() >= deadline:
                return
            self._pace()
            for key, _ in self._selector.select(None if deadline is None else deadline - time.monotonic()):
                key.data()

    # -------------------------------------------------------------------------------------------- machinery

    def _watch_output(self, fd: int, on_ready: Callable[[], None]) -> None:
        self._outputs[fd] = on_ready
        if self._is_reading:
            self._watch(fd, on_ready)

    def _forget_output(self, fd: int) -> None:
        if self._outputs.pop(fd, None) is not None and self._is_reading:
            self._selector.unregister(fd)

    def _watch(self, fd: int, on_ready: Callable[[], None]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, on_ready)


def _bound(port: int = 0) -> socket.socket:
    """Returns a bound socket that does not listen yet. Several may be bound to a port as long as none listens."""
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind(("127.0.0.1", port))
    return bound


def interrupted(parent_gone: int, seconds: float) -> int | None:
    """Waits between two jobs. Returns the exit code if the launcher has to stop meanwhile, otherwise None."""
    signals, end = _signals(), time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        ready, *_ = select.select([signals, parent_gone], [], [], left)
        if parent_gone in ready:
            return 128 + signal.SIGKILL
        received = [number for number in os.read(signals, 256) if number != signal.SIGCHLD] if ready else []
        if received:
            return 128 + received[0]
    return None


@functools.cache
def _signals() -> int:
    """Returns a descriptor from which one job after the other reads the number of each signal that arrives."""
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


def _ranks(workers: Sequence[Worker]) -> str:
    """Returns the names of workers, such as "ranks 0, 1 and 2 and server 0"."""
    workers = sorted(workers, key=lambda worker: worker.rank)
    parts = []
    for kind, numbers in (
        ("rank", [worker.rank for worker in workers if worker.server is None]),
        ("server", [worker.server for worker in workers if worker.server is not None]),
    ):
        if numbers:
            *most, last = map(str, numbers)
            parts.append(f"{kind}s {', '.join(most)} and {last}" if most else f"{kind} {last}")
    return " and ".join(parts)
