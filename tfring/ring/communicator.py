"""A rank's membership in one ring, and collectives on NumPy arrays."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import logging
import os
import sys
import threading
import weakref
from typing import Any

import numpy as np

from tfring import config
from tfring.cluster.address import parse_address
from tfring.errors import ConfigurationError, RendezvousError
from tfring.ring import library, rendezvous
from tfring.ring.schedule import chunk_bounds

_OPENING_GRACE_SECONDS = 10.0
_WARNING_BYTES = 4096

_numbers = itertools.count()
_log = logging.getLogger("tfring")


class Communicator:
    """A rank's membership in one ring.

    All ranks call the same collectives in the same order. Ranks that do not get a `MismatchError` that names
    both calls. After any error the communicator cannot be used any more.

    Collectives take a NumPy array (or what `np.asarray` takes) and return a new one; given TensorFlow tensors
    they return TensorFlow tensors, and work inside `tf.function` (see `tfring.ring.ops`).

    Attributes:
        rank: This process, from 0 to `world_size - 1`.
        world_size: Number of processes in the ring.
        name: Tells apart rings of the same processes.
        transport: How the next and the previous rank are reached, e.g. `("shm", "tcp")`; empty if alone.
        handle: The number by which native ops know this communicator.
        order: Counts the communicators of this process; see `tfring.ring.ops`.

    Example:
        >>> from tfring.cluster.cluster import Cluster
        >>> communicator = Communicator.connect(Cluster.alone())
        >>> communicator.all_reduce([1.0, 2.0])
        array([1., 2.])
        >>> communicator.close()
    """

    def __init__(
        self, handle: int, name: str, rank: int, world_size: int, transport: tuple[str, ...]
    ) -> None:
        self.handle = handle
        self.name = name
        self.rank = rank
        self.world_size = world_size
        self.transport = transport
        self.order = next(_numbers)
        self._core = library.core()
        # At the latest when nothing refers to this communicator any more, or the process ends.
        self._close = weakref.finalize(self, self._core.tfring_close, handle)

    @classmethod
    def connect(
        cls,
        cluster: Any,
        name: str = "world",
        *,
        transport: str | None = None,
        timeout_seconds: float | None = None,
        connect_timeout_seconds: float | None = None,
        beside: Communicator | None = None,
    ) -> Communicator:
        """Joins the ring of this name; returns when all ranks have.

        Args:
            cluster: Anything with `rank`, `world_size`, `addresses` and `listen_fd`, such as
                `tfring.cluster.Cluster`.
            name: The same on all ranks. Processes may form several rings, one after the other or at once.
            transport: "auto" (shared memory between ranks of a host, TCP otherwise), "tcp" or "shm".
                Default: `TFRING_TRANSPORT`, else "auto".
            timeout_seconds: How long a collective waits for a rank that is alive, but busy elsewhere. Default:
                `TFRING_TIMEOUT_SECONDS`, else 600. One that gives no sign of life is lost after
                `TFRING_LOST_SECONDS`, else 15; one that died, at once.
            connect_timeout_seconds: How long to wait for all ranks. Default:
                `TFRING_CONNECT_TIMEOUT_SECONDS`, else 300.
            beside: A ring of the same processes: when it breaks, this one cannot form.

        Raises:
            RendezvousError: Ranks did not answer in time; names them. At once where one that was connected has gone.
            NativeLibraryError: The compiled ring cannot be used.
            ConfigurationError: An argument or a `TFRING_*` variable is not legal.
        """
        core = library.core()
        transport = config.read("TFRING_TRANSPORT") if transport is None else transport
        timeout_seconds = (
            config.read("TFRING_TIMEOUT_SECONDS") if timeout_seconds is None else timeout_seconds
        )
        if connect_timeout_seconds is None:
            connect_timeout_seconds = config.read("TFRING_CONNECT_TIMEOUT_SECONDS")
        if transport not in ("auto", "tcp", "shm"):
            raise ConfigurationError(f"`transport` is auto, tcp or shm. Received: transport={transport!r}")
        for argument, seconds in (
            ("timeout_seconds", timeout_seconds),
            ("connect_timeout_seconds", connect_timeout_seconds),
        ):
            if not seconds > 0:
                raise ConfigurationError(f"`{argument}` is above 0. Received: {argument}={seconds!r}")
        hosts = [parse_address(address).host.encode() for address in cluster.addresses]
        alone = library.Link(-1, -1, -1, -1)
        options = library.Options(
            name=name.encode(),
            host=hosts[cluster.rank] if hosts else b"this host",
            identity=_identity(cluster, name),
            rank=cluster.rank,
            world_size=cluster.world_size,
            next=alone,
            previous=alone,
            mailbox_fd=-1,
            doorbell_fd=-1,
            num_spins=_num_spins(cluster),
            timeout_seconds=timeout_seconds,
            stall_seconds=config.read("TFRING_STALL_WARNING_SECONDS"),
            lost_seconds=config.read("TFRING_LOST_SECONDS"),
            # Ranks that know who is missing say so when their own time is over.
            opening_timeout_seconds=connect_timeout_seconds + _OPENING_GRACE_SECONDS,
        )
        links: tuple[str, ...] = ()
        if cluster.world_size > 1:
            following, previous, mailbox = rendezvous.connect_ring(
                cluster,
                name,
                transport=transport,
                timeout_seconds=connect_timeout_seconds,
                broken=None if beside is None else beside.failure,
            )
            links = (following.transport, previous.transport)
            options.next, options.previous = following.detach(), previous.detach()
            options.next.host, options.previous.host = hosts[following.rank], hosts[previous.rank]
            if mailbox is not None:
                options.mailbox_fd, options.doorbell_fd = mailbox.detach()
            _log_warnings()
        error = library.Error()
        handle = core.tfring_open(options, error)
        if handle == 0:
            if error.code in (library.PEER_LOST, library.TIMEOUT):
                raise RendezvousError(error.message.decode(errors="replace"))
            library.raise_error(error)
        return cls(handle, name, cluster.rank, cluster.world_size, links)

    def all_reduce(self, value: Any, op: str = "sum", *, name: str | None = None) -> Any:
        """The element-wise sum, maximum, minimum or product over all ranks; bitwise the same on every rank.

        Args:
            value: Array or tensor of the same shape and dtype on all ranks, or a list of tensors of one
                dtype. bool has max (any) and min (all) only, complex numbers have sum and product. Integers
                wrap round. float16 and bfloat16 are computed in float32 and rounded at most once for each
                rank after the first (small arrays once in all). NaN wins over any number.
            op: "sum", "max", "min" or "product".
            name: What to call it in errors; the same on all ranks. Default: "all_reduce".

        Returns:
            As `value`.

        Raises:
            MismatchError, PeerLostError, CollectiveTimeoutError: See there.
        """
        if _is_tensorflow(value):
            return self._ops().all_reduce(self, value, op, name=name or "all_reduce")
        value = _as_array(value)
        result = np.empty_like(value)
        self._run("all_reduce", name, [value], [result], op=op)
        return result

    def all_gather(self, value: Any, *, name: str | None = None) -> Any:
        """The rows of all ranks, in rank order.

        Args:
            value: `[rows, ...]`; the number of rows may differ from rank to rank, dtype and the other
                dimensions not.
            name: What to call it in errors. Default: "all_gather".

        Returns:
            `[rows of rank 0 + rows of rank 1 + ..., ...]`.
        """
        if _is_tensorflow(value):
            return self._ops().all_gather(self, value, name=name or "all_gather")
        value = _as_array(value)
        call, tensors, keep = self._prepare("all_gather", name, [value], [None])
        results: list[np.ndarray] = []
        raised: list[BaseException] = []

        @library.Place
        def place(_: Any, rows: Any, outputs: Any, placed: Any) -> None:
            try:
                total = sum(rows[: self.world_size])
                results.append(np.empty((total, *value.shape[1:]), value.dtype))
                outputs[0] = results[0].ctypes.data
                placed[0] = 1
            except BaseException as error:  # no memory, or Ctrl-C, unless it came before `try`
                raised.append(error)

        error = library.Error()
        if self._core.tfring_all_gather(self.handle, call, tensors, 1, place, None, error):
            if raised:
                raise raised[0]
            library.raise_error(error)
        del keep
        return results[0]

    def reduce_scatter(self, value: Any, op: str = "sum", *, name: str | None = None) -> Any:
        """This rank's share of the rows of the sum, maximum, minimum or product over all ranks.

        Args:
            value: `[rows, ...]` of the same shape and dtype on all ranks. `schedule.chunk_bounds(rows,
                world_size)` says who gets which rows; where `world_size` does not divide them, the first
                ranks get one more.
            op: "sum", "max", "min" or "product".
            name: What to call it in errors. Default: "reduce_scatter".

        Returns:
            `[rows of this rank, ...]`.
        """
        if _is_tensorflow(value):
            return self._ops().reduce_scatter(self, value, op, name=name or "reduce_scatter")
        value = _as_array(value)
        begin, end = chunk_bounds(value.shape[0] if value.ndim else 0, self.world_size)[self.rank]
        result = np.empty((end - begin, *value.shape[1:]), value.dtype)
        self._run("reduce_scatter", name, [value], [result], op=op)
        return result

    def broadcast(self, value: Any, root: int = 0, *, name: str | None = None) -> Any:
        """The root's value, on all ranks.

        Args:
            value: Of the same shape and dtype on all ranks; only the root's content counts.
            root: The rank whose value it is.
            name: What to call it in errors. Default: "broadcast".
        """
        if _is_tensorflow(value):
            return self._ops().broadcast(self, value, root, name=name or "broadcast")
        value = _as_array(value)
        result = np.empty_like(value)
        self._run("broadcast", name, [value], [result], root=root)
        return result

    def barrier(self, *, name: str | None = None) -> None:
        """Returns when all ranks have called it."""
        call, _, _ = self._prepare("barrier", name, [], [])
        error = library.Error()
        if self._core.tfring_barrier(self.handle, call, error):
            library.raise_error(error)

    def statistics(self) -> dict[str, Any]:
        """What this communicator has done so far.

        Returns:
            `bytes_sent`, `bytes_received`, `seconds_waited` (for other ranks, in collectives),
            `scratch_bytes` (held beside the caller's arrays) and `collectives`, the number of calls of each
            kind.
        """
        statistics = library.Statistics()
        if self._core.tfring_get_statistics(self.handle, statistics):
            raise ValueError(f'communicator "{self.name}" is closed')
        return {
            "bytes_sent": statistics.bytes_sent,
            "bytes_received": statistics.bytes_received,
            "seconds_waited": statistics.seconds_waited,
            "scratch_bytes": statistics.scratch_bytes,
            "collectives": dict(zip(library.KINDS, statistics.collectives, strict=True)),
        }

    def close(self) -> None:
        """Leaves the ring. Others still in a collective that needs this rank get a `PeerLostError`.

        A communicator that nothing refers to any more is closed as well.
        """
        self._close()

    def abort(self, failure: BaseException) -> None:
        """Breaks this ring, on all ranks, because of a failure outside it; does nothing to one that is broken."""
        self._core.tfring_abort(self.handle, library.code_of(failure), str(failure).encode())

    def failure(self) -> BaseException | None:
        """What broke this ring: a `MismatchError`, `PeerLostError` or `CollectiveTimeoutError`; None if nothing did.

        KeyboardInterrupt where Ctrl-C ended a collective of this rank.
        """
        error = library.Error()
        return library.error_of(error) if self._core.tfring_failure(self.handle, error) else None

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        place = f"rank={self.rank}, world_size={self.world_size}"
        return f"Communicator(name={self.name!r}, {place}, transport={self.transport})"

    def _ops(self) -> Any:
        from tfring.ring import ops  # imports TensorFlow, which the caller has imported already

        return ops

    def _run(
        self, kind: str, name: str | None, inputs: list[np.ndarray], outputs: list[Any], **settings: Any
    ) -> None:
        call, tensors, keep = self._prepare(kind, name, inputs, outputs, **settings)
        error = library.Error()
        function = getattr(self._core, f"tfring_{kind}")
        arguments = (tensors,) if kind == "reduce_scatter" else (tensors, len(inputs))
        if function(self.handle, call, *arguments, error):
            library.raise_error(error)
        del keep

    def _prepare(
        self,
        kind: str,
        name: str | None,
        inputs: list[np.ndarray],
        outputs: list[Any],
        op: str = "sum",
        root: int = 0,
    ) -> tuple[Any, Any, Any]:
        if op not in library.OPERATIONS:
            raise ValueError(f"{kind} has op {library.OPERATION_NAMES}. Received: op={op!r}")
        main = threading.current_thread() is threading.main_thread()
        caller = library.PYTHON_MAIN_THREAD if main else library.ANY_THREAD
        call = library.Call((name or kind).encode(), library.OPERATIONS[op], root, 0, caller)
        tensors = (library.Tensor * len(inputs))()
        for tensor, source, target in zip(tensors, inputs, outputs, strict=True):
            dtype = library.DTYPES.get(source.dtype.name)
            if dtype is None:
                raise ValueError(
                    f'{kind} "{name or kind}" carries {", ".join(sorted(library.DTYPES))}. '
                    f"Received: dtype={source.dtype}"
                )
            tensor.input = source.ctypes.data
            tensor.output = None if target is None else target.ctypes.data
            tensor.dims = (ctypes.c_int64 * source.ndim)(*source.shape)
            tensor.num_dims = source.ndim
            tensor.dtype = dtype
        return call, tensors, (inputs, outputs)


def _num_spins(cluster: Any) -> int:
    """How often to look at shared memory before going to sleep: never where ranks of this host share cores."""
    ranks = getattr(cluster, "local_world_size", cluster.world_size)
    return 1000 if ranks <= len(os.sched_getaffinity(0)) else 0


def _as_array(value: Any) -> np.ndarray:
    value = np.asarray(value)
    # Not ascontiguousarray: it makes a scalar one-dimensional.
    value = value if value.flags.c_contiguous else value.copy()
    return value if value.dtype.isnative else value.astype(value.dtype.newbyteorder("="))


def _is_tensorflow(value: Any) -> bool:
    """Whether TensorFlow made this value, or the first of this list. Never imports TensorFlow."""
    if "tensorflow" not in sys.modules:
        return False
    if isinstance(value, (list, tuple)) and value:
        value = value[0]
    import tensorflow as tf

    return (
        tf.is_tensor(value) or isinstance(value, tf.Variable) or type(value).__module__.startswith("keras.")
    )


def _identity(cluster: Any, name: str) -> int:
    """Tells rings apart, the same on all ranks of one."""
    digest = hashlib.sha256("\n".join((name, *cluster.addresses)).encode()).digest()
    return int.from_bytes(digest[:8], "little")


@functools.cache  # once a process; a forked child has a cache of its own, see below
def _log_warnings() -> None:
    """Logs what the core finds worth telling, such as the name of a rank that all wait for."""

    def log_for_ever() -> None:
        line = ctypes.create_string_buffer(_WARNING_BYTES)
        while True:
            library.core().tfring_next_warning(line, _WARNING_BYTES)
            _log.warning("%s", line.value.decode(errors="replace"))

    threading.Thread(target=log_for_ever, name="tfring-warnings", daemon=True).start()


os.register_at_fork(after_in_child=_log_warnings.cache_clear)
