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

    All ranks must call the same collectives in the same order. If they do not, they raise a `MismatchError` that names
    both calls. After any error the communicator can no longer be used.

    Collectives accept a NumPy array (or anything that `np.asarray` accepts) and return a new one. Given TensorFlow
    tensors, they return TensorFlow tensors and work inside `tf.function` (see `tfring.ring.ops`).

    Attributes:
      rank: Rank of this process, from 0 to `world_size - 1`.
      world_size: Number of processes in the ring.
      name: Name of the ring, which distinguishes rings of the same processes.
      ranks: The ranks of this group in the communicator that `connect` returned.
      handle: The number that identifies this communicator to native ops.

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
        # Closes once nothing refers to this communicator or one of its groups, or the process ends, at the latest.
        owner = world if world.handle == handle else self
        self._close = weakref.finalize(owner, self._core.tfring_close, handle)

    @property
    def order(self) -> int:
        """Returns the number of this communicator in this process, shared with its groups; see `tfring.ring.ops`."""
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
        """Returns the transports to the next and previous rank, e.g. `("shm", "tcp")`; empty for a single rank."""
        if self.world_size < 2 or self.rank < 0:
            return ()
        order = self._layout().order
        position = order.index(self.rank)
        beside = (self.ranks[order[(position + step) % self.world_size]] for step in (1, -1))
        return tuple(self._world.links.transports[rank] for rank in beside)

    @property
    def algorithms(self) -> list[tuple[int | None, str]]:
        """Returns pairs `(most bytes, algorithm)` of `all_reduce`; None: no limit. See `tfring.ring.schedule`."""
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
        """Joins the ring of this name. Blocks until all ranks have joined.

        Args:
          cluster: A `tfring.cluster.Cluster`, or an object with `rank`, `world_size`, `addresses` and `listen_fd`.
          name: Name of the ring, the same on all ranks. Processes may form several rings, one after the other or
            concurrently.
          transport: "auto" (shared memory between ranks of a host, TCP otherwise), "tcp" or "shm". Defaults to
            `TFRING_TRANSPORT`, or "auto" if that is not set.
          timeout_seconds: Time that a collective waits for a rank that is alive but busy elsewhere. Defaults to
            `TFRING_TIMEOUT_SECONDS`, or 600 if that is not set. A rank that gives no sign of life is lost after
            `TFRING_LOST_SECONDS` (15 if not set); a rank that died is lost at once.
          connect_timeout_seconds: Time to wait for all ranks. Defaults to `TFRING_CONNECT_TIMEOUT_SECONDS`, or 300
            if that is not set.
          stall_warning_seconds: Time after which a wait for a rank that is alive logs a warning. Defaults to
            `TFRING_STALL_WARNING_SECONDS`, or 30 if that is not set.
          beside: Another ring of the same processes. If it breaks, this ring cannot form.

        Raises:
          RendezvousError: If ranks did not answer in time (the message names them), or at once if a rank that had
            connected has gone.
          NativeLibraryError: If the compiled ring cannot be used.
          ConfigurationError: If an argument or a `TFRING_*` variable is not valid.
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
            # Ranks that know which rank is missing report it when their own timeout expires.
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

        All ranks of a group must make the same calls of this method in the same order; other ranks need not call it.
        Groups share the links, threads, failures and the order of calls of the communicator they come from: a process
        runs one call at a time, so all ranks must call the collectives of overlapping groups in one order. To run
        collectives at the same time, use separate communicators (`connect`).

        Args:
          ranks: Ranks of this communicator. In the group they are numbered from 0 in this order.
          name: Name of the group, the same on all its ranks. Distinguishes groups of the same ranks.

        Returns:
          A `Communicator`. A process that is not in the group cannot call its collectives; its `rank` there is -1.

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
        """Divides the ranks into groups, as MPI_Comm_split does. This is a collective.

        Args:
          color: Ranks with the same number form a group. None: this rank joins no group.
          key: Determines the order of the ranks in a group. Ranks with equal keys are ordered by rank.
          name: Name of the groups.

        Returns:
          The group of this rank, or None if `color` is None.
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
            dtype. bool supports only max (any) and min (all), complex numbers support only sum and product. Integers
            wrap around. float16 and bfloat16 are computed in float32 and rounded at most once for each
            rank after the first (small arrays: once in total). NaN takes precedence over any number.
          op: "sum", "max", "min" or "product".
          out: NumPy arrays to write to, as in `numpy.add`: `value` itself, or arrays of its shape and dtype. For large
            new arrays, half of the time is spent in the kernel, which clears the memory. Defaults to new arrays.
          compression: "bfloat16" or "float16", the dtype in which float32 is sent, in half the bytes. Sums are
            computed in float32 from contributions that are rounded once each, and the sums are rounded once: the
            result is within u * (|sum| + sum of all |contributions|) of the exact one, where u is 2**-8 for bfloat16
            and 2**-11 for float16 (the largest number of float16 is 65504, and its smallest step is 6e-8). Small
            values (64 kB over all ranks) are sent without compression. Defaults to None, no compression.
          name: Name of the call in errors, the same on all ranks. Defaults to "all_reduce".

        Returns:
          An array or tensor, or a list of them, as `value`; or `out` if given.

        Raises:
          MismatchError, PeerLostError, CollectiveTimeoutError: See `tfring.errors`.
          ValueError: If the arguments are not valid, such as `out` of another shape. Nothing was sent.

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
                    "`out` was given for a tensor, but TensorFlow's tensors cannot be written. Use it with arrays only."
                )
            return _ops().all_reduce(self, value, op, compression=compression, name=name or "all_reduce")
        return arrays.run(self, "all_reduce", value, out=out, op=op, compression=compression, name=name)

    def plan_all_reduce(
        self, value: Any, op: str = "sum", *, out: Any = None, compression: str | None = None, name: str | None = None
    ) -> Callable[[], Any]:
        """Returns a function that calls `all_reduce` with these arguments, which are checked once, here.

        It is meant for loops over small arrays, like MPI_Allreduce_init. A rank that calls the function and a rank that
        calls `all_reduce` with the same arguments take part in the same collective.

        Args:
          value: See `all_reduce`. Only NumPy arrays, which each call reads in place.
          op: See `all_reduce`.
          out: See `all_reduce`. Defaults to new arrays, the same for each call.
          compression: See `all_reduce`.
          name: See `all_reduce`.

        Returns:
          A function without arguments that returns `out` and raises the errors of `all_reduce`.

        Raises:
          ValueError: If `all_reduce` does not accept the arguments, or a call could not read an array in place.

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
        """Reduces like `all_reduce`, but only the root gets the result. The other ranks get zeros."""
        if is_tensorflow(value):
            return _ops().reduce(self, value, root, op, name=name or "reduce")
        make = np.empty_like if self.rank == root else np.zeros_like
        return arrays.run(self, "reduce", value, make, op=op, root=root, name=name)

    def reduce_scatter(self, value: Any, op: str = "sum", *, name: str | None = None) -> Any:
        """Reduces like `all_reduce` and returns this rank's share of the rows.

        Args:
          value: Array or tensor of shape `[rows, ...]`, of the same shape and dtype on all ranks, or a list of them.
            `schedule.chunk_bounds(rows, world_size)` gives the rows of each rank. If `world_size` does not divide the
            number of rows, the first ranks get one more.
          op: "sum", "max", "min" or "product".
          name: Name of the call in errors. Defaults to "reduce_scatter".

        Returns:
          An array or tensor of shape `[rows of this rank, ...]`, or a list of them.
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
          value: Array or tensor of the same shape and dtype on all ranks. Only the root's content is used.
          root: The rank that sends its value.
          name: Name of the call in errors. Defaults to "broadcast".
        """
        if is_tensorflow(value):
            return _ops().broadcast(self, value, root, name=name or "broadcast")
        return arrays.run(self, "broadcast", value, root=root, name=name)

    def barrier(self, *, name: str | None = None) -> None:
        """Blocks until all ranks have called it."""
        arrays.barrier(self, name=name or "barrier")

    def all_gather(self, value: Any, *, name: str | None = None) -> Any:
        """Concatenates the rows of all ranks, in rank order.

        Args:
          value: Array or tensor of shape `[rows, ...]`, or a list of them. The number of rows may differ between
            ranks; the dtype and the other dimensions may not.
          name: Name of the call in errors. Defaults to "all_gather".

        Returns:
          An array or tensor of shape `[rows of rank 0 + rows of rank 1 + ..., ...]`, or a list of them.
        """
        if is_tensorflow(value):
            return _ops().all_gather(self, value, name=name or "all_gather")
        return arrays.exchange(self, "all_gather", value, name=name)[0]

    def gather(self, value: Any, root: int = 0, *, name: str | None = None) -> Any:
        """Concatenates like `all_gather`, but only the root gets the rows. The other ranks get no rows."""
        self._ensure_links_for_root(root)
        if is_tensorflow(value):
            return _ops().gather(self, value, root, name=name or "gather")
        return arrays.exchange(self, "gather", value, root=root, name=name)[0]

    def scatter(self, value: Any, counts: Any = None, root: int = 0, *, name: str | None = None) -> Any:
        """Sends some of the root's rows to each rank.

        Args:
          value: Array or tensor of shape `[rows, ...]`. On other ranks than the root it may have any number of rows,
            which are ignored; its dtype and other dimensions must be those of the root.
          counts: Number of the root's rows for each rank, in rank order. Defaults to the shares of `reduce_scatter`.
          root: The rank that sends its rows.
          name: Name of the call in errors. Defaults to "scatter".

        Returns:
          An array or tensor of shape `[rows for this rank, ...]`.
        """
        self._ensure_links_for_root(root)
        if is_tensorflow(value):
            return _ops().scatter(self, value, counts, root, name=name or "scatter")
        counts = counts if self.rank == root else None  # only the root's counts are used
        return arrays.exchange(self, "scatter", value, counts=counts, splits=True, root=root, name=name)[0]

    def all_to_all(self, value: Any, counts: Any = None, *, name: str | None = None) -> Any:
        """Sends some rows of every rank to every rank.

        Args:
          value: Array or tensor of shape `[rows, ...]`, first the rows for rank 0, then those for rank 1, and so on; or
            a list of them. The number of rows may differ between ranks; the dtype and the other dimensions may not.
          counts: Number of rows for each rank, of shape `[world_size]`; or a list of them if `value` is a list.
            Defaults to the shares of `reduce_scatter`.
          name: Name of the call in errors. Defaults to "all_to_all".

        Returns:
          A tuple of the rows for this rank, those of rank 0 first, and the number of rows from each rank, of shape
          `[world_size]`; or a tuple of two lists.
        """
        self._ensure_links(range(self.world_size))
        if is_tensorflow(value):
            return _ops().all_to_all(self, value, counts, name=name or "all_to_all")
        results, received = arrays.exchange(self, "all_to_all", value, counts=counts, splits=True, name=name)
        return results, list(received) if isinstance(results, list) else received[0]

    def all_reduce_rows(
        self, values: Any, indices: Any, *, reduction: str = "auto", name: str | None = None
    ) -> Any:
        """Sums rows with equal ids over all ranks, such as an embedding's gradients. Each id is returned once.

        A rank first adds up its own rows with equal ids. With "gather", all ranks then get the rows of all ranks. With
        "owner", the rows of an id are sent to the rank that owns the id by its hash, which adds them up and passes the
        sums on. Either way the rows of an id are added in the order of the ranks: the results have the same bits and
        the same order of ids, by owner and then by first occurrence in the order of the ranks.

        Args:
          values: Array or tensor of shape `[rows, ...]`, of any dtype that has a sum. The number of rows may differ
            between ranks. float16 and bfloat16 are added in float32 and rounded twice: on the rank, and in the sum over
            ranks. Or a list of them, sent as one buffer.
          indices: int32 or int64 array or tensor of shape `[rows]`, any ids; or a list of them.
          reduction: "gather", "owner" or "auto". "auto" uses the one that would have moved fewer bytes in the last call
            of this name, where a second delay counts as 64 KiB a rank; the first call uses "gather". With two ranks
            "owner" never moves fewer bytes.
          name: Name of the call in errors, the same on all ranks. Defaults to "all_reduce_rows".

        Returns:
          A tuple `(values, indices)` with every id of any rank once, or a list of such tuples.

        Raises:
          MismatchError, PeerLostError, CollectiveTimeoutError: See `tfring.errors`.
          ValueError: If ids are not int32 or int64, or their number is not that of the rows. Nothing was sent.

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
        """Sends a tensor to one rank, which must call `receive` with this rank, dtype and name.

        It may return before the other rank receives, as soon as the rest fits into the transport's buffer (1 MiB in
        shared memory), or block until it does: two ranks that both send first may wait for each other. `all_to_all` in
        a group of the two exchanges data in both directions without this.
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
          dtype: dtype of the array.
          shape: Expected shape. None accepts any shape, and None as a dimension any size.
          name: Name of the `send`. Defaults to "send".

        Raises:
          MismatchError: If name, dtype or shape differ.
        """
        self._ensure_links([source])
        return arrays.receive(self, source, dtype, shape, name=name or "send")

    def statistics(self) -> dict[str, Any]:
        """Returns counters of this communicator since it was connected.

        Returns:
          A dict with `bytes_sent`, `bytes_received`, `seconds_waited` (for other ranks, in collectives),
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
        """Leaves the ring. Ranks still in a collective that needs this rank raise a `PeerLostError`.

        A communicator is also closed once nothing refers to it or to any of its groups. Closing a group does not close
        the communicator it comes from.
        """
        if self.handle == self._world.handle:
            self._world.links.close()
        self._close()

    def abort(self, failure: BaseException) -> None:
        """Breaks this ring on all ranks because of a failure outside it. Does nothing if the ring is already broken."""
        self._core.tfring_abort(self.handle, library.describe(failure))

    def tell_raised(self, error: BaseException) -> None:
        """Tells the other ranks that the program raised an error on this one.

        Ranks that wait for this rank's next call raise a `PeerLostError` with the first line of the error, unless their
        own program raises an error there as well.
        """
        # TensorFlow's errors begin with the location of the operation in the program.
        where = ("Graph execution error:", "Detected at node", "<stack traces unavailable>", " ", "\t")
        lines = [line for line in str(error).splitlines() if line and not line.startswith(where)]
        text = ": ".join([type(error).__name__, *lines[:1]])
        self._core.tfring_tell_raised(self.handle, text.encode(errors="replace"))

    def failure(self) -> BaseException | None:
        """Returns the `MismatchError`, `PeerLostError` or `CollectiveTimeoutError` that broke this ring, or None.

        Returns a KeyboardInterrupt if Ctrl-C ended a collective of this rank.
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
        """Ensures links to these members of the group, which must call this as well."""
        if self.rank < 0:
            return  # the core will reject the call
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
    """Returns the number of polls of shared memory before sleeping: 0 if ranks of this host share cores."""
    ranks = getattr(cluster, "local_world_size", cluster.world_size)
    return 1000 if ranks <= available_cpus() else 0


def _ops() -> Any:
    """Returns the collectives on TensorFlow's tensors."""
    from tfring.ring import ops  # imports TensorFlow, which the caller has imported already

    return ops


def is_tensorflow(value: Any) -> bool:
    """Returns True if this value, or the first of a list, is of TensorFlow or Keras. Does not import TensorFlow."""
    if "tensorflow" not in sys.modules:
        return False
    if isinstance(value, (list, tuple)) and value:
        value = value[0]
    import tensorflow as tf

    return (
        tf.is_tensor(value) or isinstance(value, tf.Variable) or type(value).__module__.startswith("keras.")
    )


def _identity(cluster: Cluster, name: str) -> int:
    """Returns a number that identifies a ring, the same on all its ranks."""
    digest = hashlib.sha256("\n".join((name, *cluster.addresses)).encode()).digest()
    return int.from_bytes(digest[:8], "little")


@functools.cache  # once a process; a forked child clears its cache, see below
def _log_warnings() -> None:
    """Logs the warnings of the core, such as the name of a rank that all others wait for."""

    def log_for_ever() -> None:
        line = ctypes.create_string_buffer(_WARNING_BYTES)
        while True:
            with_stack = library.core().tfring_next_warning(line, _WARNING_BYTES)
            stack = f"\n{program.stack()}" if with_stack else ""
            _log.warning("%s%s", line.value.decode(errors="replace"), stack)

    threading.Thread(target=log_for_ever, name="tfring-warnings", daemon=True).start()


os.register_at_fork(after_in_child=_log_warnings.cache_clear)
