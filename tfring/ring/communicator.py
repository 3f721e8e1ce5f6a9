"""A rank's membership in one ring, and collectives on NumPy arrays."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import itertools
import logging
import operator
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from tfring import config, program
from tfring.cluster import Cluster, launch_variables
from tfring.cpus import available_cpus
from tfring.errors import ConfigurationError, RendezvousError
from tfring.ring import arrays, library, schedule
from tfring.ring.links import Links
from tfring.transport.address import parse_address

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
      ranks: The ranks of a group, as the communicator it comes from at first counts them.
      handle: The number by which native ops know this communicator.

    Example:
        >>> from tfring.cluster.cluster import Cluster
        >>> communicator = Communicator.connect(Cluster.alone())
        >>> communicator.all_reduce([1.0, 2.0])
        array([1., 2.])
        >>> communicator.close()
    """

    def __init__(
        self, handle: int, name: str, rank: int, world_size: int, world: _World, ranks: Sequence[int]
    ) -> None:
        self.handle = handle
        self.name = name
        self.rank = rank
        self.world_size = world_size
        self.ranks = tuple(ranks)
        self._world = world
        self._num_splits = itertools.count()
        self._core = library.core()
        # At the latest when nothing refers to this communicator or one of its groups any more, or the process ends.
        owner = world if world.handle == handle else self
        self._close = weakref.finalize(owner, self._core.tfring_close, handle)

    @property
    def order(self) -> int:
        """Counts the communicators of this process, a group as the one it comes from; see `tfring.ring.ops`."""
        return self._world.order

    @order.setter
    def order(self, number: int) -> None:
        self._world.order = number

    @property
    def identity(self) -> int:
        """Returns the number of the ring, the same on all ranks and in all groups."""
        return self._world.identity

    @property
    def transport(self) -> tuple[str, ...]:
        """Returns the transports to the next and previous rank, e.g. `("shm", "tcp")`; empty if alone.
        """
        if self.world_size < 2 or self.rank < 0:
            return ()
        order = self._layout().order
        position = order.index(self.rank)
        beside = (self.ranks[order[(position + step) % self.world_size]] for step in (1, -1))
        return tuple(self._world.links.transports[rank] for rank in beside)

    @property
    def algorithms(self) -> list[tuple[int | None, str]]:
        """Returns `(most bytes, algorithm)` of `all_reduce`, None for no limit; see `tfring.ring.schedule`."""
        return schedule.all_reduce_choices(self.world_size, self._layout().local_size, self._world.algorithm)

    @classmethod
    def connect(
        cls,
        cluster: Cluster,
        name: str = "world",
        *,
        transport: str | None = None,
        timeout_seconds: float | None = None,
        connect_timeout_seconds: float | None = None,
        stall_warning_seconds: float | None = None,
        beside: Communicator | None = None,
    ) -> Communicator:
        """Joins the ring of this name; returns when all ranks have.

        Args:
          cluster: A `tfring.cluster.Cluster`; `rank`, `world_size`, `addresses` and `listen_fd` do.
          name: The same on all ranks. Processes may form several rings, one after the other or at once.
          transport: "auto" (shared memory between ranks of a host, TCP otherwise), "tcp" or "shm".
            Default: `TFRING_TRANSPORT`, else "auto".
          timeout_seconds: How long a collective waits for a rank that is alive, but busy elsewhere. Default:
            `TFRING_TIMEOUT_SECONDS`, else 600. One that gives no sign of life is lost after
            `TFRING_LOST_SECONDS`, else 15; one that died, at once.
          connect_timeout_seconds: How long to wait for all ranks. Default:
            `TFRING_CONNECT_TIMEOUT_SECONDS`, else 300.
          stall_warning_seconds: After how long a wait for a rank that is alive is warned of. Default:
            `TFRING_STALL_WARNING_SECONDS`, else 30.
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
        if stall_warning_seconds is None:
            stall_warning_seconds = config.read("TFRING_STALL_WARNING_SECONDS")
        if transport not in ("auto", "tcp", "shm"):
            raise ConfigurationError(f"`transport` is {transport!r}, not auto, tcp or shm.")
        for argument, seconds in (
            ("timeout_seconds", timeout_seconds),
            ("connect_timeout_seconds", connect_timeout_seconds),
            ("stall_warning_seconds", stall_warning_seconds),
        ):
            if not seconds > 0:
                raise ConfigurationError(f"`{argument}` is {seconds!r}, not above 0.")
        hosts = [parse_address(address).host for address in cluster.addresses] or ["this host"]  # alone
        algorithm = config.read("TFRING_ALGORITHM")
        numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
        options = library.Options(
            name=name.encode(),
            host=hosts[cluster.rank].encode(),
            identity=_identity(cluster, name),
            rank=cluster.rank,
            world_size=cluster.world_size,
            algorithm=library.ALGORITHMS[algorithm],
            num_spins=_num_spins(cluster),
            timeout_seconds=timeout_seconds,
            stall_seconds=stall_warning_seconds,
            lost_seconds=config.read("TFRING_LOST_SECONDS"),
            # Ranks that know who is missing say so when their own time is over.
            opening_timeout_seconds=connect_timeout_seconds + _OPENING_GRACE_SECONDS,
        )
        places = [numbers[host] for host in hosts]
        world = _World(
            *(cluster.rank, places, algorithm),
            Links(cluster, name, transport, connect_timeout_seconds, hosts),
            options.identity,
        )
        if cluster.listen_fd is not None:
            launch_variables.notify_launcher()
        if cluster.world_size > 1:
            partners = schedule.Layout.of(places).partners(cluster.rank)
            if len(partners) < cluster.world_size - 1:
                world.links.serve()
            links = world.links.form(partners, None if beside is None else beside.failure)
            options.links, options.num_links = links, len(links)
            options.hosts = (ctypes.c_int32 * len(hosts))(*places)
            _log_warnings()
        error = library.Error()
        handle = core.tfring_open(options, error)
        if handle == 0:
            if error.code in (library.PEER_LOST, library.TIMEOUT):
                raise RendezvousError(error.message.decode(errors="replace"), **library.about(error))
            library.raise_error(error)
        world.handle = handle
        world.links.opened(handle)
        return cls(handle, name, cluster.rank, cluster.world_size, world, range(cluster.world_size))

    def group(self, ranks: Sequence[int], name: str) -> Communicator:
        """Returns a communicator over some of this communicator's ranks.

        The ranks of a group call this alike and in the same order; the others need not call it. Groups share
        the links, threads, failures and the order of calls of the communicator they come from: a process is in one
        call at a time, so all ranks call the collectives of overlapping groups in one order. What should run at the
        same time is a communicator of its own (`connect`).

        Args:
          ranks: Of this communicator; in the group they count from 0 in this order.
          name: The same on all of them; tells groups of the same ranks apart.

        Returns:
          The group. A process that is not in it cannot call its collectives; its `rank` is -1.

        Example:
            >>> from tfring.cluster.cluster import Cluster
            >>> with Communicator.connect(Cluster.alone()) as communicator:
            ...     communicator.group([0], "mine").all_reduce([1.0])
            array([1.])
        """
        ranks = [operator.index(rank) for rank in ranks]
        if not ranks or len(set(ranks)) < len(ranks) or not all(0 <= rank < self.world_size for rank in ranks):
            raise ValueError(
                f"The ranks of a group are {ranks}, not one or more different ranks from 0 to {self.world_size - 1}."
            )
        error = library.Error()
        members = (ctypes.c_int32 * len(ranks))(*ranks)
        handle = self._core.tfring_group(self.handle, members, len(ranks), name.encode(), error)
        if handle == 0:
            library.raise_error(error)
        rank = ranks.index(self.rank) if self.rank in ranks else -1
        made = Communicator(handle, name, rank, len(ranks), self._world, [self.ranks[r] for r in ranks])
        if rank >= 0:
            made._ensure_links(made._layout().partners(rank))
        return made

    def split(self, color: int | None, key: int = 0, *, name: str = "split") -> Communicator | None:
        """Divides the ranks into groups; a collective, as MPI_Comm_split.

        Args:
          color: Ranks of the same number form a group; None for none.
          key: Their order in it; where keys are equal, that of their ranks.
          name: Of the groups.

        Returns:
          The group of this rank, or None without a color.
        """
        mine = np.array([[color is not None, 0 if color is None else color, key]], np.int64)
        all_of_them = self.all_gather(mine, name=name).tolist()
        number = next(self._num_splits)  # collectives run in one order, so it is the same on all ranks
        if color is None:
            return None
        ranks = [rank for rank, (has, its, _) in enumerate(all_of_them) if has and its == color]
        ranks.sort(key=lambda rank: all_of_them[rank][2])
        return self.group(ranks, f"{name} {number}: {color}")

    def all_reduce(
        self,
        value: Any,
        op: str = "sum",
        *,
        out: Any = None,
        compression: str | None = None,
        name: str | None = None,
    ) -> Any:
        """Reduces values element-wise over all ranks; the result is bitwise the same on every rank.

        Args:
          value: Array or tensor of the same shape and dtype on all ranks, or a list of them of one
            dtype. bool has max (any) and min (all) only, complex numbers have sum and product. Integers
            wrap round. float16 and bfloat16 are computed in float32 and rounded at most once for each
            rank after the first (small arrays once in all). NaN wins over any number.
          op: "sum", "max", "min" or "product".
          out: NumPy arrays to write to, as `numpy.add` takes them: `value` itself, or of its shape and dtype. With
            large arrays half the time is the kernel's, which clears new memory. Default: new arrays.
          compression: "bfloat16" or "float16": what float32 travels as, in half the bytes. Sums are made in float32
            of contributions each rounded once, and are rounded once themselves: the result is within u * (|sum| +
            sum of all |contributions|) of the exact one, where u is 2**-8 for bfloat16 and 2**-11 for float16
            (whose largest number is 65504, and whose smallest steps are of 6e-8). What is small (64 kB in all
            ranks) travels as it is. Default: None, float32.
          name: What to call it in errors; the same on all ranks. Default: "all_reduce".

        Returns:
          As `value`; `out` where it is given.

        Raises:
          MismatchError, PeerLostError, CollectiveTimeoutError: See there.
          ValueError: This call cannot be, such as `out` of another shape; nothing was sent.

        Example:
            >>> from tfring.cluster.cluster import Cluster
            >>> gradient = np.array([1.0, 2.0])
            >>> with Communicator.connect(Cluster.alone()) as communicator:
            ...     communicator.all_reduce(gradient, out=gradient) is gradient
            True
        """
        if compression is not None:
            self._ensure_links(range(self.world_size))
        if is_tensorflow(value):
            if out is not None:
                raise ValueError(
                    "`out` was given for a tensor, and TensorFlow's tensors cannot be written. It is for arrays."
                )
            return _ops().all_reduce(self, value, op, compression=compression, name=name or "all_reduce")
        return arrays.run(self, "all_reduce", value, out=out, op=op, compression=compression, name=name)

    def plan_all_reduce(
        self, value: Any, op: str = "sum", *, out: Any = None, compression: str | None = None, name: str | None = None
    ) -> Callable[[], Any]:
        """Returns a function that calls `all_reduce` with these arguments, which are checked here and once.

        For loops over small arrays, as MPI_Allreduce_init is. A rank that calls it and one that calls `all_reduce` with
        the same arguments take part in the same collective.

        Args:
          value: As of `all_reduce`; NumPy arrays alone, which each call reads where they are.
          op: As of `all_reduce`.
          out: As of `all_reduce`. Default: new arrays, the same for each call.
          compression: As of `all_reduce`.
          name: As of `all_reduce`.

        Returns:
          A function without arguments that returns `out`, and raises what `all_reduce` does.

        Raises:
          ValueError: Arguments that `all_reduce` does not take, or arrays that a call could not read where they are.

        Example:
            >>> from tfring.cluster.cluster import Cluster
            >>> gradient = np.array([1.0, 2.0])
            >>> with Communicator.connect(Cluster.alone()) as communicator:
            ...     reduce_gradient = communicator.plan_all_reduce(gradient, out=gradient)
            ...     reduce_gradient() is gradient
            True
        """
        if compression is not None:
            self._ensure_links(range(self.world_size))
        return arrays.PlannedAllReduce(
            self, value, op, out=out, compression=compression, name=name or "all_reduce"
        )

    def reduce(self, value: Any, root: int = 0, op: str = "sum", *, name: str | None = None) -> Any:
        """As `all_reduce`, for one rank only: zeros on the others."""
        if is_tensorflow(value):
            return _ops().reduce(self, value, root, op, name=name or "reduce")
        make = np.empty_like if self.rank == root else np.zeros_like
        return arrays.run(self, "reduce", value, make, op=op, root=root, name=name)

    def reduce_scatter(self, value: Any, op: str = "sum", *, name: str | None = None) -> Any:
        """Reduces as `all_reduce` and returns this rank's share of the rows.

        Args:
          value: `[rows, ...]` of the same shape and dtype on all ranks, or a list of such. `schedule.chunk_bounds(
            rows, world_size)` says who gets which rows; where `world_size` does not divide them, the first
            ranks get one more.
          op: "sum", "max", "min" or "product".
          name: What to call it in errors. Default: "reduce_scatter".

        Returns:
          `[rows of this rank, ...]`.
        """
        if is_tensorflow(value):
            return _ops().reduce_scatter(self, value, op, name=name or "reduce_scatter")

        def make(rows: np.ndarray) -> np.ndarray:
            begin, end = schedule.chunk_bounds(rows.shape[0] if rows.ndim else 0, self.world_size)[self.rank]
            return np.empty((end - begin, *rows.shape[1:]), rows.dtype)

        return arrays.run(self, "reduce_scatter", value, make, op=op, name=name)

    def broadcast(self, value: Any, root: int = 0, *, name: str | None = None) -> Any:
        """Sends the root's value to all ranks.

        Args:
          value: Of the same shape and dtype on all ranks; only the root's content counts.
          root: The rank whose value it is.
          name: What to call it in errors. Default: "broadcast".
        """
        if is_tensorflow(value):
            return _ops().broadcast(self, value, root, name=name or "broadcast")
        return arrays.run(self, "broadcast", value, root=root, name=name)

    def barrier(self, *, name: str | None = None) -> None:
        """Returns when all ranks have called it."""
        arrays.barrier(self, name=name or "barrier")

    def all_gather(self, value: Any, *, name: str | None = None) -> Any:
        """Concatenates the rows of all ranks, in rank order.

        Args:
          value: `[rows, ...]`; the number of rows may differ from rank to rank, dtype and the other
            dimensions not. Or a list of such.
          name: What to call it in errors. Default: "all_gather".

        Returns:
          `[rows of rank 0 + rows of rank 1 + ..., ...]`.
        """
        if is_tensorflow(value):
            return _ops().all_gather(self, value, name=name or "all_gather")
        return arrays.exchange(self, "all_gather", value, name=name)[0]

    def gather(self, value: Any, root: int = 0, *, name: str | None = None) -> Any:
        """As `all_gather`, for one rank only: the others get no rows."""
        self._ensure_links_for_root(root)
        if is_tensorflow(value):
            return _ops().gather(self, value, root, name=name or "gather")
        return arrays.exchange(self, "gather", value, root=root, name=name)[0]

    def scatter(self, value: Any, counts: Any = None, root: int = 0, *, name: str | None = None) -> Any:
        """Sends some of the root's rows to each rank.

        Args:
          value: `[rows, ...]` on the root; on the others any number of rows, which do not matter, of the same dtype
            and other dimensions.
          counts: How many of the root's rows go to each rank, in rank order. Default: as `reduce_scatter`.
          root: Whose rows they are.
          name: What to call it in errors. Default: "scatter".

        Returns:
          `[rows for this rank, ...]`.
        """
        self._ensure_links_for_root(root)
        if is_tensorflow(value):
            return _ops().scatter(self, value, counts, root, name=name or "scatter")
        counts = counts if self.rank == root else None  # the root's count
        return arrays.exchange(self, "scatter", value, counts=counts, splits=True, root=root, name=name)[0]

    def all_to_all(self, value: Any, counts: Any = None, *, name: str | None = None) -> Any:
        """Sends some rows of every rank to every rank.

        Args:
          value: `[rows, ...]`, first those for rank 0, then those for rank 1, and so on; or a list of such. The
            number of rows may differ, dtype and the other dimensions not.
          counts: `[world_size]`, how many of the rows go to each rank; for a list, a list of such. Default: as
            `reduce_scatter`.
          name: What to call it in errors. Default: "all_to_all".

        Returns:
          The rows for this rank, those of rank 0 first, and `[world_size]` how many come from each; for a list, two
          lists.
        """
        self._ensure_links(range(self.world_size))
        if is_tensorflow(value):
            return _ops().all_to_all(self, value, counts, name=name or "all_to_all")
        results, received = arrays.exchange(self, "all_to_all", value, counts=counts, splits=True, name=name)
        return results, list(received) if isinstance(results, list) else received[0]

    def all_reduce_rows(
        self, values: Any, indices: Any, *, reduction: str = "auto", name: str | None = None
    ) -> Any:
        """Sums over all ranks the rows that stand under ids, such as an embedding's gradients: each id once.

        A rank first adds up its own rows of equal ids. Then all get those of all ("gather"); or an id's rows go to the
        rank that owns it by its hash, which adds them up and passes the sums on ("owner"). Either way the rows of an
        id are added in the order of the ranks: the same bits, in the same order of ids, which is that of the owners and
        of nothing else.

        Args:
          values: `[rows, ...]`, any dtype that has a sum; the number of rows may differ from rank to rank. float16
            and bfloat16 are added in float32 and rounded twice: on the rank, and where all are added. Or a list of
            such, which go as one.
          indices: `[rows]`, int32 or int64, any ids; or a list.
          reduction: "gather", "owner", or "auto": what moved fewer bytes the last time under this name, a second
            delay being worth 64 KiB a rank; at first, "gather". With two ranks "owner" never moves fewer.
          name: What to call it in errors; the same on all ranks. Default: "all_reduce_rows".

        Returns:
          `(values, indices)` with every id that any rank has, once; or a list of such pairs.

        Raises:
          MismatchError, PeerLostError, CollectiveTimeoutError: See there.
          ValueError: Ids that are no int32 or int64, or not one for each row; nothing was sent.

        Example:
            >>> from tfring.cluster.cluster import Cluster
            >>> with Communicator.connect(Cluster.alone()) as communicator:
            ...     communicator.all_reduce_rows(np.array([[1.0], [2.0], [4.0]]), np.array([7, 3, 7]))
            (array([[5.],
                   [2.]]), array([7, 3]))
        """
        self._ensure_links_for_rows(reduction)
        where = _ops() if is_tensorflow(values) else arrays
        return where.all_reduce_rows(self, values, indices, reduction=reduction, name=name or "all_reduce_rows")

    def send(self, value: Any, to: int, *, name: str | None = None) -> Any:
        """Sends a tensor to one rank, which calls `receive` with this rank, dtype and name.

        It may return before the other rank receives, as soon as what is left fits on the way (1 MB in shared
        memory), or wait until it does: two ranks that both send first may wait for each other. Where both have
        something for each other, `all_to_all` in a group of the two does not.
        """
        self._ensure_links([to])
        where = _ops() if is_tensorflow(value) else arrays
        return where.send(self, value, to, name=name or "send")

    def receive(
        self, source: int, dtype: Any, shape: Any = None, *, name: str | None = None
    ) -> np.ndarray:
        """Receives an array from rank `source`; for tensors of TensorFlow see `tfring.ring.ops.receive`.

        Args:
          source: The rank that calls `send`.
          dtype: Of what it sends.
          shape: What it should be; None for any, as is None for one of its dimensions.
          name: As of the `send`. Default: "send".

        Raises:
          MismatchError: Name, dtype or shape differ.
        """
        self._ensure_links([source])
        return arrays.receive(self, source, dtype, shape, name=name or "send")

    def statistics(self) -> dict[str, Any]:
        """Returns counters of this communicator since it was connected.

        Returns:
          `bytes_sent`, `bytes_received`, `seconds_waited` (for other ranks, in collectives),
          `scratch_bytes` (held in addition to the caller's arrays) and `collectives`, the number of calls of each
          kind.
        """
        statistics = library.Statistics()
        if self._core.tfring_get_statistics(self.handle, statistics):
            raise ValueError(f'Communicator "{self.name}" is closed.')
        return {
            "bytes_sent": statistics.bytes_sent,
            "bytes_received": statistics.bytes_received,
            "seconds_waited": statistics.seconds_waited,
            "scratch_bytes": statistics.scratch_bytes,
            "collectives": dict(zip(library.kinds(), statistics.collectives, strict=False)),
        }

    def close(self) -> None:
        """Leaves the ring. Others still in a collective that needs this rank get a `PeerLostError`.

        A communicator that nothing refers to any more, and none of its groups, is closed as well. Of a group only
        that is closed, not the communicator it comes from.
        """
        if self.handle == self._world.handle:
            self._world.links.close()
        self._close()

    def abort(self, failure: BaseException) -> None:
        """Breaks this ring, on all ranks, because of a failure outside it; does nothing to one that is broken."""
        self._core.tfring_abort(self.handle, library.describe(failure))

    def tell_raised(self, error: BaseException) -> None:
        """Tells the other ranks that the program raised an error on this one.

        Those that wait for this rank's next call get a `PeerLostError` with its first line, unless they raise one
        there, too.
        """
        # TensorFlow's errors begin with where the operation stands in the program.
        where = ("Graph execution error:", "Detected at node", "<stack traces unavailable>", " ", "\t")
        lines = [line for line in str(error).splitlines() if line and not line.startswith(where)]
        text = ": ".join([type(error).__name__, *lines[:1]])
        self._core.tfring_tell_raised(self.handle, text.encode(errors="replace"))

    def failure(self) -> BaseException | None:
        """Returns the `MismatchError`, `PeerLostError` or `CollectiveTimeoutError` that broke this ring, or None.

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

    def _layout(self) -> schedule.Layout:
        return schedule.Layout.of([self._world.hosts[rank] for rank in self.ranks])

    def _ensure_links_for_root(self, root: int) -> None:
        self._ensure_links(range(self.world_size) if root == self.rank else [root])

    def _ensure_links_for_rows(self, reduction: str) -> None:
        if reduction != "gather":
            self._ensure_links(range(self.world_size))

    def _ensure_links(self, members: Iterable[int]) -> None:
        """Ensures links to these members of the group; they call this as well."""
        if self.rank < 0:
            return  # the call will be refused
        wanted = {self.ranks[m] for m in members if 0 <= m < self.world_size}
        self._world.links.connect(wanted - {self._world.rank}, self.failure)


@dataclasses.dataclass
class _World:
    """State that a communicator shares with its groups."""

    rank: int
    hosts: list[int]  # [rank]
    algorithm: str  # TFRING_ALGORITHM
    links: Links
    identity: int  # the same on all ranks
    handle: int = 0
    order: int = dataclasses.field(default_factory=lambda: next(_numbers))


def _num_spins(cluster: Cluster) -> int:
    """Returns the polls of shared memory before sleeping: none where ranks of this host share cores."""
    ranks = getattr(cluster, "local_world_size", cluster.world_size)
    return 1000 if ranks <= available_cpus() else 0


def _ops() -> Any:
    """Returns the collectives on TensorFlow's tensors."""
    from tfring.ring import ops  # imports TensorFlow, which the caller has imported already

    return ops


def is_tensorflow(value: Any) -> bool:
    """Returns True if TensorFlow made this value, or the first of this list. Never imports TensorFlow."""
    if "tensorflow" not in sys.modules:
        return False
    if isinstance(value, (list, tuple)) and value:
        value = value[0]
    import tensorflow as tf

    return (
        tf.is_tensor(value) or isinstance(value, tf.Variable) or type(value).__module__.startswith("keras.")
    )


def _identity(cluster: Cluster, name: str) -> int:
    """Returns a number that tells rings apart, the same on all ranks of one."""
    digest = hashlib.sha256("\n".join((name, *cluster.addresses)).encode()).digest()
    return int.from_bytes(digest[:8], "little")


@functools.cache  # once a process; a forked child has a cache of its own, see below
def _log_warnings() -> None:
    """Logs what the core finds worth telling, such as the name of a rank that all wait for."""

    def log_for_ever() -> None:
        line = ctypes.create_string_buffer(_WARNING_BYTES)
        while True:
            with_stack = library.core().tfring_next_warning(line, _WARNING_BYTES)
            stack = f"\n{program.stack()}" if with_stack else ""
            _log.warning("%s%s", line.value.decode(errors="replace"), stack)

    threading.Thread(target=log_for_ever, name="tfring-warnings", daemon=True).start()


os.register_at_fork(after_in_child=_log_warnings.cache_clear)
