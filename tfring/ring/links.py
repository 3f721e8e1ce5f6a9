"""The links of one rank in one ring: those made when the ring opens, and those that a pair of ranks needs later.

    rank r, in a call that needs a link to rank q         rank q, whatever it computes
       │ hello, link ───────────────────────────────────────► │     a thread of its process answers
       │ ◄─────────────────────────────────────────── welcome │     as while a ring forms (rendezvous.py)
       │                         ...                          │
    both add the link to the open ring

If two ranks need each other at the same time, the attempt of the higher rank counts.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection
from typing import Any

from tfring.cluster import Cluster
from tfring.errors import PeerLostError, RendezvousError
from tfring.ring import library, rendezvous
from tfring.ring.link import Link
from tfring.transport import handshake, wire
from tfring.transport.listener import Connection, Listener

_SLICE_SECONDS = 0.1  # between checks for other events
_OPENING_SECONDS = 10.0
_NEVER_SECONDS = 1e6
_REASON_SECONDS = 1.0  # for this rank to learn what broke the ring, if another rank reports that instead of a link

_log = logging.getLogger(__name__)


class Links:
    """The links of one rank in one ring.

    Attributes:
      transports: A dict that maps each rank with a link to "shm" or "tcp".
    """

    def __init__(
        self, cluster: Cluster, name: str, transport: str, timeout_seconds: float, host_names: list[str]
    ) -> None:
        self.transports: dict[int, str] = {}
        self._cluster = cluster
        self._name = name
        self._transport = transport
        self._timeout_seconds = timeout_seconds
        self._host_names = host_names
        self._handle = 0  # of the open ring
        self._dialing = -1  # the rank to which this one connects
        self._answering = -1  # the rank from which this one takes a connection
        self._is_closed = False
        self._one_thread = threading.Lock()  # held while a thread of the user connects
        self._changed = threading.Condition()

    def form(self, ranks: Collection[int], broken: Callable[[], BaseException | None] | None) -> Any:
        """Forms links to these ranks, each of which forms one to this rank. Returns an array of them."""
        formed = rendezvous.connect(
            self._cluster,
            self._name,
            ranks,
            transport=self._transport,
            timeout_seconds=self._timeout_seconds,
            broken=broken,
        )
        self.transports = {rank: link.transport for rank, link in formed.items()}
        detached = [link.detach(self._host_names[rank].encode()) for rank, link in formed.items()]
        return (library.Link * len(detached))(*detached)

    def serve(self) -> None:
        """Starts to answer ranks that need a link to this one."""
        _serve(self._cluster, self._name, self)

    def opened(self, handle: int) -> None:
        """Sets the open ring to which links are added from now on."""
        with self._changed:
            self._handle = handle
            self._changed.notify_all()

    def close(self) -> None:
        """Rejects ranks that need a link to this one from now on."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._answering < 0, _REASON_SECONDS)  # it gets the reason

    def connect(self, ranks: set[int], broken: Callable[[], BaseException | None]) -> None:
        """Adds a link to each of these ranks that has none.

        Raises:
          PeerLostError: If a rank has left the ring.
          RendezvousError: If a rank cannot be linked. If the ring broke, its failure is raised instead.
        """
        if ranks <= self.transports.keys():
            return
        with self._one_thread:
            for rank in sorted(ranks - self.transports.keys()):
                try:
                    self._connect_to(rank, broken)
                except (PeerLostError, RendezvousError) as gave_up:
                    until = time.monotonic() + _REASON_SECONDS
                    while (failure := broken()) is None and time.monotonic() < until:
                        time.sleep(_REASON_SECONDS / 20)
                    failure = failure or gave_up  # a disagreement, or a lost rank, if there is one
                    library.core().tfring_abort(self._handle, library.describe(failure))
                    raise failure from (None if failure is gave_up else gave_up)

    def _connect_to(self, rank: int, broken: Callable[[], BaseException | None]) -> None:
        with self._changed:
            while self._answering == rank:
                self._changed.wait(_SLICE_SECONDS)
            if rank in self.transports:
                return
            self._dialing = rank
        try:
            link = rendezvous.connect_to(
                self._cluster,
                self._name,
                rank,
                transport=self._transport,
                timeout_seconds=self._timeout_seconds,
                broken=broken,
                is_linked=lambda: rank in self.transports,
            )
            if link is not None:
                self._add(link)
        finally:
            with self._changed:
                self._dialing = -1

    def answer(self, connection: Connection) -> None:
        """Makes the link that another rank asks for, or tells that rank why not."""
        rank = connection.hello["rank"]
        with self._changed:
            # The other ranks have opened the ring, and this rank is about to.
            self._changed.wait_for(lambda: self._handle != 0 or self._is_closed, _OPENING_SECONDS)
            if self._is_closed or self._handle == 0:
                _refuse(connection, _left_ring_message(self._cluster.rank, self._name), final=True)
                return
            if rank in self.transports or (self._dialing == rank and rank < self._cluster.rank):
                _refuse(connection, f"rank {self._cluster.rank} connects to rank {rank} itself", final=False)
                return
            self._answering = rank
        try:
            link = rendezvous.answer(self._cluster, self._name, connection, transport=self._transport)
            if link is not None:
                self._add(link)
        except (RendezvousError, ValueError) as error:  # ValueError: the ring was closed meanwhile
            _log.debug("no link to rank %d: %s", rank, error)
        finally:
            with self._changed:
                self._answering = -1
                self._changed.notify_all()

    def _add(self, link: Link) -> None:
        transport = link.transport
        detached = link.detach(self._host_names[link.rank].encode())
        error = library.Error()
        if library.core().tfring_add_link(self._handle, ctypes.byref(detached), error):
            library.raise_error(error)
        self.transports[link.rank] = transport


# Each listener of this process has a thread, which answers for these links, by job and ring.
_served: dict[Listener, weakref.WeakValueDictionary[tuple[str, str], Links]] = {}
_served_lock = threading.Lock()


def _serve(cluster: Cluster, name: str, links: Links) -> None:
    listener = Listener.of(cluster)
    with _served_lock:
        is_first = listener not in _served
        rings = _served.setdefault(listener, weakref.WeakValueDictionary())
        rings[handshake.job_id(tuple(cluster.addresses)), name] = links
    if is_first:
        threading.Thread(target=_answer_all, args=(listener, rings), name="tfring-links", daemon=True).start()


def _answer_all(listener: Listener, rings: weakref.WeakValueDictionary[tuple[str, str], Links]) -> None:
    while True:
        connection = listener.take(lambda each: each.kind == "link", _NEVER_SECONDS)
        if connection is None:
            continue
        hello = connection.hello
        links = rings.get((hello["job"], hello["ring"]))
        try:
            if links is None:
                _refuse(connection, _left_ring_message(hello["to"], hello["ring"]), final=True)
            else:
                links.answer(connection)
        except Exception:
            _log.exception("rank %d asked for a link to this one", hello["rank"])
            connection.channel.close()
        del links


def _left_ring_message(rank: int, ring: str) -> str:
    return f'rank {rank} left the ring "{ring}" (its script ended?) before another rank needed a link to it'


def _refuse(connection: Connection, why: str, *, final: bool) -> None:
    with contextlib.suppress(OSError, wire.WireError), connection.channel as channel:
        channel.send("refused", why=why, final=final)


def _forget_in_child() -> None:
    global _served_lock
    _served.clear()
    _served_lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_in_child)
