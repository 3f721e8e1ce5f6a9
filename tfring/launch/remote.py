"""A host reached over ssh, or a node over srun: the launcher's side of frames.py."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import queue
import shlex
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, NamedTuple

from tfring.launch import frames, processes
from tfring.launch.hosts import Host
from tfring.transport import wire

# A worker on another host gets these variables of the launcher's environment, and those that --env names.
_PASSED_PREFIXES = ("TFRING_", "TF_", "KERAS_", "OMP_", "XLA_", "NCCL_", "CUDA_VISIBLE_DEVICES", "PYTHON")
_NOT_PASSED = ("TF_CONFIG",)


class Way(NamedTuple):
    """The command that reaches hosts, and the environment of the workers there."""

    connect: Callable[[str, str], list[str]]  # the host, a shell command -> the command that runs it there
    python: str
    workdir: str
    environ: dict[str, str]


def passed_on(environ: Mapping[str, str], names: Sequence[str] = ()) -> dict[str, str]:
    """Returns the variables that workers on other hosts get.

    >>> passed_on({"KERAS_BACKEND": "tensorflow", "HOME": "/root", "TOKEN": "x"}, ["TOKEN"])
    {'KERAS_BACKEND': 'tensorflow', 'TOKEN': 'x'}
    """
    return {
        name: text
        for name, text in environ.items()
        if name in names or (name.startswith(_PASSED_PREFIXES) and name not in _NOT_PASSED)
    }


def ssh(
    host: str,
    command: str,
    *,
    port: int | None = None,
    identity: pathlib.Path | None = None,
    config: pathlib.Path | None = None,
) -> list[str]:
    """Returns the command that runs a shell command on a host, and never prompts.

    >>> ssh("user@host1", "uname", port=2222)[-5:]
    ['-p', '2222', '--', 'user@host1', 'uname']
    """
    options = ["BatchMode=yes", "ConnectTimeout=30", "ServerAliveInterval=15", "ServerAliveCountMax=8"]
    flags = [flag for option in options for flag in ("-o", option)]
    flags += ["-F", str(config)] if config else []
    flags += ["-i", str(identity)] if identity else []
    flags += ["-p", str(port)] if port else []
    return ["ssh", "-T", *flags, "--", host, command]


def by_ssh(**options: Any) -> Callable[[str, str], list[str]]:
    """Returns a function that makes the ssh command with these options. Without any, this host is reached without ssh.

    >>> by_ssh(port=None)("localhost", "uname")
    ['sh', '-c', 'uname']
    """
    has_options = any(value is not None for value in options.values())

    def connect(host: str, command: str) -> list[str]:
        is_here = host in ("localhost", "127.0.0.1", "::1", socket.gethostname()) and not has_options
        return ["sh", "-c", command] if is_here else ssh(host, command, **options)

    return connect


def srun(host: str, command: str) -> list[str]:
    """Returns the command that runs a shell command on a node of this allocation, beside other programs there.

    >>> srun("node1", "uname")[-4:]
    ['--nodelist=node1', 'sh', '-c', 'uname']
    """
    # Unbuffered: SLURM holds back incomplete lines, and frames are not lines.
    job = ["srun", "--overlap", "--nodes=1", "--ntasks=1", "--cpu-bind=none", "--kill-on-bad-exit=0", "--unbuffered"]
    return [*job, f"--nodelist={host}", "sh", "-c", command]


class RemoteHost:
    """An agent on a host, with its workers."""

    def __init__(self, host: Host, ranks: Sequence[int], way: Way) -> None:
        self.name = host.name
        self.ranks = ranks
        self.listening: list[int] | None = None
        self.address = ""
        self._way = way
        self._reader = frames.Reader("agent", frames.TO_LAUNCHER)
        self._to_write: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._credit = threading.Semaphore(frames.INPUT_MESSAGES)

    def start(self, command: Sequence[str], num_nodes: int, num_workers: int) -> None:
        """Connects to the host, and sends the command to run (1)."""
        agent = f"cd -- {shlex.quote(self._way.workdir)} && exec {shlex.quote(self._way.python)} -m tfring.launch.agent"
        connect = self._way.connect(self.name, agent)
        self.way_there = connect[0]
        self.process = subprocess.Popen(
            connect,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            preexec_fn=functools.partial(processes.die_with_parent, os.getpid()),
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.fd = self.process.stdout.fileno()
        threading.Thread(target=self._write_all, args=(self.process.stdin,), daemon=True).start()
        self._to_write.put(frames.greeting("launcher"))
        self.tell(
            "start",
            ranks=list(self.ranks),
            num_workers=num_workers,
            command=list(command),
            cwd=self._way.workdir,
            environ=self._way.environ,
            num_nodes=num_nodes,
        )

    def tell(self, kind: str, data: bytes = b"", **fields: Any) -> None:
        """Sends a message without waiting. It is dropped if the connection is gone."""
        self._to_write.put(wire.pack(kind, data, **fields))

    def _write_all(self, stdin: IO[bytes]) -> None:
        """Writes in a separate thread: an agent that is writing may not read."""
        with contextlib.suppress(OSError), stdin:
            while (data := self._to_write.get()) is not None:
                frames.write(stdin.fileno(), data)

    def read(self) -> list[wire.Message] | None:
        """Returns the messages that have arrived, or None once the connection is closed."""
        data = os.read(self.fd, 1 << 18)
        return list(self._reader.feed(data)) if data else None

    def forward_stdin(self) -> None:
        """Passes this process's standard input on, from a separate thread: it may be a file, a terminal or a pipe."""

        def forward() -> None:
            with contextlib.suppress(OSError):
                while data := os.read(0, frames.INPUT_BYTES):
                    self._credit.acquire()
                    self.tell("input", data)
            self.tell("input")

        threading.Thread(target=forward, daemon=True).start()

    def on_taken(self) -> None:
        """Allows another message of standard input to follow: rank 0 has taken one."""
        self._credit.release()

    def close(self) -> None:
        """Lets the agent end. It stops workers that still run."""
        self._to_write.put(None)

    def kill(self) -> None:
        """Kills the process that connects to the host."""
        processes.send_signal(self.process.pid, 9)
