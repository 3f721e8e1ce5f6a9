"""Forms a ring: ranks that will exchange data connect in pairs, the higher rank to the lower.

    rank r                                 rank q < r
       │ (1) hello, ring ───────────────────► │     through its listener (transport/listener.py): who I am, which ring
       │ ◄──────────────────────── welcome (2) │     transport, and its mailbox; or: refused, and why
       │ (3) confirm ───────────────────────► │     with my mailbox; or: TCP instead
       │ ◄───────────────────────── agreed (4) │     the transport; TCP within a host: with a connection for the data
       │ (5) hello, data ───────────────────► │     TCP to another host: a second connection

Mailboxes are handed over as descriptors (transport/mailbox.py) between processes of one user on one host, connected by
a Unix socket. The control connection belongs to the native code after (4), and the data connection after (5).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import itertools
import logging
import os
import resource
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NoReturn

from tfring import config
from tfring.cluster import Cluster
from tfring.errors import PeerLostError, Reason, RendezvousError
from tfring.ring import encryption, library
from tfring.ring.link import Link, adopt_data_connection, data_connection
from tfring.transport import handshake, mailbox, ports, secret, sockets, wire
from tfring.transport.address import parse_address
from tfring.transport.dial import dial, probe
from tfring.transport.listener import Connection, Listener

_ANSWER_SECONDS = 10.0  # for each message once both ranks are present
_PROBE_SECONDS = 2.0
_LAST_WORDS_SECONDS = 0.3  # for a rank that gives up to tell the ranks that are about to connect
_FDS_OF_A_LINK = 8  # while it is made; 3 afterwards
_SILENT_SECONDS = 3.0  # before a waiting rank reports for which ranks, and between checks whether one has ended
_REPORT_SECONDS = 30.0  # between two such reports
_MOST_FACTS = 16  # ranks that a report describes; for the others it gives the numbers only
_SLICE_SECONDS = 0.1  # between checks for other events
_PAUSES_SECONDS = (0.01, 0.02, 0.05, 0.1)  # between attempts to connect; the last one repeats

_TRANSPORT = {"transport": wire.one_of("shm", "tcp")}
_FAILED = {"why": wire.REASON}
_WELCOMES = wire.Format(
    {
        "welcome": {**_TRANSPORT, "wanted": wire.one_of("auto", "shm", "tcp")},
        "refused": handshake.REFUSED,
        "failed": _FAILED,
    },
    max_json_bytes=16384,
)
_CONFIRMS = wire.Format({"confirm": _TRANSPORT, "failed": _FAILED}, max_json_bytes=16384)
_AGREED = wire.Format({"agreed": _TRANSPORT, "failed": _FAILED}, max_json_bytes=16384)

_log = logging.getLogger(__name__)
_process = secrets.token_hex(16)  # distinguishes this process from another of the same rank
_warned: set[str] = set()  # texts of warnings, to log each once


def connect(
    cluster: Cluster,
    ring: str,
    peers: Collection[int],
    *,
    transport: str,
    timeout_seconds: float,
    broken: Callable[[], BaseException | None] | None = None,
) -> dict[int, Link]:
    """Connects this rank with its peers, each of which must call this as well.

    Args:
      cluster: A cluster with `rank`, `world_size` above 1, `addresses` and `listen_fd`.
      ring: Name of the ring.
      peers: The other ranks to connect with.
      transport: "auto", "tcp" or "shm".
      timeout_seconds: Time to wait.
      broken: A function that returns the reason to stop waiting, or None as long as there is none.

    Returns:
      A dict that maps each peer to its link.

    Raises:
      RendezvousError: If ranks never answered (the message names them), or the ranks cannot form one ring.
    """
    sockets.raise_descriptor_limit(len(peers) * _FDS_OF_A_LINK)
    return _Rendezvous(cluster, ring, peers, transport, timeout_seconds, broken).run()


def connect_to(
    cluster: Cluster,
    ring: str,
    rank: int,
    *,
    transport: str,
    timeout_seconds: float,
    broken: Callable[[], BaseException | None],
    is_linked: Callable[[], bool],
) -> Link | None:
    """Connects this rank of an open ring with another, which calls `answer`.

    Args:
      cluster: See `connect`.
      ring: Name of the ring.
      rank: The other rank.
      transport: "auto", "tcp" or "shm".
      timeout_seconds: Time to wait.
      broken: A function that returns the reason to stop waiting, or None as long as there is none.
      is_linked: A function that returns True once that rank has connected with this one.

    Returns:
      The link; or None if that rank connected first.

    Raises:
      PeerLostError: If that rank has left the ring.
      RendezvousError: See `connect`.
    """
    sockets.raise_descriptor_limit(_FDS_OF_A_LINK)
    forming = _Rendezvous(cluster, ring, [rank], transport, timeout_seconds, broken)
    forming.kind, forming.is_linked = "link", is_linked
    return forming.run().get(rank)


def answer(cluster: Cluster, ring: str, connection: Connection, *, transport: str) -> Link | None:
    """Answers `connect_to` of another rank. Returns the link, or None if that rank went away.

    Raises:
      RendezvousError: If the two ranks cannot be linked. The other rank gets the error as well.
    """
    sockets.raise_descriptor_limit(_FDS_OF_A_LINK)
    forming = _Rendezvous(cluster, ring, [connection.hello["rank"]], transport, _ANSWER_SECONDS, None)
    forming.answer(connection)
    return forming.links.get(connection.hello["rank"])


class _Rendezvous:
    """Forms the links of one rank in one ring."""

    def __init__(
        self,
        cluster: Cluster,
        ring: str,
        peers: Collection[int],
        transport: str,
        timeout_seconds: float,
        broken: Callable[[], BaseException | None] | None,
    ) -> None:
        self.cluster = cluster
        self.ring = ring
        self.peers = peers
        self.transport = transport
        self.timeout_seconds = timeout_seconds
        self.broken = broken
        self.began = time.monotonic()
        self.deadline = self.began + timeout_seconds
        self.listener = Listener.of(cluster)
        self.key = secret.of(cluster)
        self.encrypts = encryption.is_wanted(self.key)
        self.job = handshake.job_id(tuple(cluster.addresses))
        self.network = bool(self.key) or ports.spans_hosts(tuple(cluster.addresses))
        self.links: dict[int, Link] = {}  # the connecting thread adds to it as well
        self.connect_error: BaseException | None = None
        self.reasons: dict[int, str] = {}  # why the last attempt to connect failed
        self.kind = "ring"
        self.is_linked: Callable[[], bool] = lambda: False  # by the other rank
        self.failure = ""  # why this rank gives up
        self.cause: BaseException = PeerLostError(rank=cluster.rank)  # the kind of this failure
        self.cancelled = threading.Event()
        self.last_words_seconds = _LAST_WORDS_SECONDS

    def run(self) -> dict[int, Link]:
        connecting = threading.Thread(target=self._connect_all, name="tfring-connect", daemon=True)
        connecting.start()
        reporting = threading.Thread(target=self._report_while_waiting, name="tfring-report", daemon=True)
        if self.kind == "ring":
            reporting.start()
        try:
            while len(self.links) < len(self.peers) and not self.is_linked():
                if time.monotonic() > self.deadline:
                    raise self._timeout_error()
                if any(rank not in self.links and not self._dials(rank) for rank in self.peers):
                    self._accept()
                else:
                    connecting.join(_SLICE_SECONDS)
                if self.connect_error is not None:
                    raise self.connect_error
                if self.broken is not None and (failure := self.broken()) is not None:
                    self.last_words_seconds = 0.0  # the other ranks learn of it as this rank did
                    self.cause = failure
                    if self.kind == "link":
                        raise RendezvousError(str(failure))
                    raise RendezvousError(f'Ring "{self.ring}" cannot form because the ring beside it broke: {failure}')
                for link in list(self.links.values()):
                    link.check_still_there(self.ring)
            self.cancelled.set()
            connecting.join()
            return self.links
        except BaseException as error:
            self.failure = str(error) or f"rank {self.cluster.rank} was interrupted while the ring formed"
            self.cancelled.set()
            connecting.join()
            for link in self.links.values():
                link.send_failure(library.describe(self.cause, self.failure))
            self._reject_pending()
            raise

    def _reject_pending(self) -> None:
        """Tells the ranks that are about to connect to this one why it gives up."""
        deadline = time.monotonic() + self.last_words_seconds
        while any(rank not in self.links and not self._dials(rank) for rank in self.peers):
            connection = self.listener.take(self._is_expected, max(0.0, deadline - time.monotonic()))
            if connection is None:
                return
            with contextlib.suppress(OSError, wire.WireError), connection.channel as channel:
                channel.send("refused", why=self.failure[: wire.MOST_REASON], final=True)

    # Reporting for which ranks this one waits, in its own thread.

    def _report_while_waiting(self) -> None:
        try:
            pause, next_report = _SILENT_SECONDS, time.monotonic()
            while not self.cancelled.wait(pause):
                pause = min(_SILENT_SECONDS, _REPORT_SECONDS)
                if self._is_report_delegated():
                    reasons = self.reasons.copy()
                    self._raise_if_rank_ended({rank: reasons[rank] for rank in reasons.keys() - self.links.keys()})
                    continue
                missing = _missing_ranks(self.cluster, self._unlinked_ranks(range(self.cluster.world_size)))
                self._raise_if_rank_ended(missing)
                if time.monotonic() >= next_report:
                    next_report = time.monotonic() + _REPORT_SECONDS
                    self._report(missing)
        except BaseException as error:
            self.connect_error = self.connect_error or error

    def _is_report_delegated(self) -> bool:
        """Returns True if a lower rank is present: it is enough that one rank probes all others and reports."""
        if any(rank < self.cluster.rank for rank in list(self.links)):
            return True
        return self.cluster.rank > 0 and not _missing_ranks(self.cluster, [0])

    def _report(self, missing: Mapping[int, str]) -> None:
        present = set(range(self.cluster.world_size)) - set(missing)
        if self.cluster.rank == min(present) and not self.cancelled.is_set():
            seconds = time.monotonic() - self.began
            _log.warning(
                'tfring: rank %d has waited %.0f s for ring "%s" to form, and waits up to %g s; %s.',
                *(self.cluster.rank, seconds, self.ring, self.timeout_seconds, self._who_is_missing(missing)),
            )

    def _unlinked_ranks(self, ranks: Iterable[int]) -> list[int]:
        return sorted(set(ranks) - {self.cluster.rank, *self.links})

    def _raise_if_rank_ended(self, missing: Mapping[int, str]) -> None:
        """Raises if a rank no longer listens. If ranks inherit sockets, all of them listen before the first begins."""
        ended = [rank for rank, why in missing.items() if why == os.strerror(errno.ECONNREFUSED)]
        if self.cluster.listen_fd is not None and ended and not config.read("TFRING_MAX_WORKER_RESTARTS"):
            raise RendezvousError(
                f'Rank {min(ended)} has ended, and ring "{self.ring}" cannot form without it. All ranks must make the '
                "same calls: make this one on all ranks, or on none."
            )

    def _dials(self, rank: int) -> bool:
        return rank < self.cluster.rank or self.kind == "link"

    # Connecting to the lower ranks, in its own thread.

    def _connect_all(self) -> None:
        try:
            for rank in sorted(filter(self._dials, self.peers)):
                self._connect_to(rank)
        except BaseException as error:
            self.connect_error = error

    def _connect_to(self, rank: int) -> None:
        pauses = iter(_PAUSES_SECONDS)
        while not self.cancelled.is_set() and not self.is_linked() and time.monotonic() < self.deadline:
            try:
                self.links[rank] = self._attempt(rank)
                return
            except wire.GivenUpError:
                return
            except TimeoutError:
                self.reasons[rank] = "it listens, but did not answer"
            except wire.NoProofError as error:
                self._warn_about_secret(rank, error)
            except handshake.RefusedError as error:
                if error.final:
                    if self.kind == "link":
                        raise PeerLostError(str(error), reason=Reason.LEFT, rank=rank) from None
                    raise RendezvousError(str(error)) from None
                self.reasons[rank] = str(error)
            except (OSError, wire.WireError) as error:
                self._check_descriptors_left(error)
                self.reasons[rank] = getattr(error, "strerror", None) or str(error) or type(error).__name__
            self.cancelled.wait(next(pauses, _PAUSES_SECONDS[-1]))

    def _attempt(self, rank: int) -> Link:
        session = secrets.token_hex(16)
        channel = self._dial(
            rank,
            self.kind,
            ring=self.ring,
            transport=self.transport,
            encrypts=self.encrypts,
            process=_process,
            session=session,
        )
        # The answer comes when the other rank asks for this ring, which may take some time.
        link = Link(rank, channel.socket)
        confirmed = False
        fds: list[int] = []
        try:
            welcome = channel.receive(_WELCOMES, fds, max_fds=2)  # (2)
            if welcome.kind == "failed":
                raise RendezvousError(welcome.fields["why"])
            if welcome.kind == "refused":
                raise handshake.RefusedError(welcome.fields["why"], welcome.fields["final"])
            channel.deadline = time.monotonic() + _ANSWER_SECONDS
            if welcome.fields["transport"] == "shm":
                link.own, problem = _make_mailbox(self.transport)
                problem = problem or link.adopt_mailbox(fds)
                if problem is not None:
                    self._fall_back_to_tcp(problem, channel, welcome.fields["wanted"])
                wire.close_all(fds)
            channel.send("confirm", _own_descriptors(link), transport=link.transport)  # (3)
            confirmed = True
            agreed = channel.receive(_AGREED, fds, max_fds=1)  # (4)
            if agreed.kind == "failed":
                raise RendezvousError(agreed.fields["why"])
            if agreed.fields["transport"] == "tcp":
                link.drop_mailboxes()
                link.data = adopt_data_connection(fds) if fds else self._dial(rank, "data", session=session).socket
                self._encrypt(link, session, accepts=False)
            elif link.transport == "tcp":
                raise wire.WireError("it uses shared memory, which this rank has ruled out")
            return link
        except BaseException as error:
            wire.close_all(fds)
            if not confirmed:
                link.close()
                raise
            # The other rank considers this one connected, so there can be no other attempt.
            self.failure = self.failure or f"Rank {self.cluster.rank} lost rank {rank}: {error}"
            link.send_failure(library.describe(self.cause, self.failure))
            if isinstance(error, RendezvousError):
                raise
            raise RendezvousError(self.failure) from error

    def _encrypt(self, link: Link, session: str, *, accepts: bool) -> None:
        if self.encrypts and link.data is not None:
            name = f"{self.ring} {session}"
            link.tls = encryption.encrypt(link.data, self.key, name, accepts=accepts, seconds=_ANSWER_SECONDS)

    def _dial(self, rank: int, kind: str, **more: Any) -> wire.Channel:
        return dial(
            parse_address(self.cluster.addresses[rank]),
            self.key,
            kind,
            {"job": self.job, "rank": self.cluster.rank, "to": rank, **more},
            network=self.network,
            seconds=max(0.0, self.deadline - time.monotonic()),
            wait_for=lambda: not self.cancelled.is_set(),
        )

    def _warn_about_secret(self, rank: int, error: Exception) -> None:
        self.reasons[rank] = str(error)
        where = self.cluster.addresses[rank]
        _warn_once(f"Rank {rank} at {where} rejects rank {self.cluster.rank}: {error}.")

    # Answering the higher ranks.

    def _accept(self) -> None:
        connection = self.listener.take(self._is_expected, _SLICE_SECONDS)
        if connection is not None:
            self.answer(connection)

    def answer(self, connection: Connection) -> None:
        """Makes the link that a rank asks for.

        Raises:
          RendezvousError: If the link cannot be made.
        """
        channel, hello = connection.channel, connection.hello
        link = Link(hello["rank"], channel.socket)
        fds: list[int] = []
        try:
            if {self.transport, hello["transport"]} == {"tcp", "shm"}:
                self._reject(
                    channel,
                    "Ranks use transports that exclude each other: rank "
                    f'{hello["rank"]} "{hello["transport"]}", rank {self.cluster.rank} "{self.transport}". Set '
                    "the same TFRING_TRANSPORT on all ranks.",
                )
            if hello["encrypts"] != self.encrypts:
                one, other = (hello["rank"], self.cluster.rank)[:: 1 if hello["encrypts"] else -1]
                self._reject(
                    channel,
                    f"Rank {one} encrypts what it sends, but rank {other} does not. Set the same TFRING_ENCRYPT on all "
                    "ranks.",
                )
            mine: tuple[int, ...] = ()
            if "tcp" not in (self.transport, hello["transport"]):
                if not channel.is_local:
                    if "shm" in (self.transport, hello["transport"]):
                        self._reject(
                            channel,
                            f'transport="shm" needs ranks on one host (and network namespace), but ranks '
                            f'{hello["rank"]} and {self.cluster.rank} do not share one. Use transport="auto".',
                        )
                else:
                    link.own, problem = _make_mailbox(self.transport)
                    if problem is not None:
                        self._fall_back_to_tcp(problem, channel, hello["transport"])
                    elif link.own is not None:
                        mine = link.own.for_peer
            offered = "shm" if mine else "tcp"
            channel.send("welcome", mine, transport=offered, wanted=self.transport)  # (2)
            confirm = channel.receive(_CONFIRMS, fds, max_fds=2)  # (3): not sent if the rank died in the meantime
            if confirm.kind == "failed":
                raise RendezvousError(confirm.fields["why"])
            if mine and confirm.fields["transport"] == "shm":
                problem = link.adopt_mailbox(fds)
                if problem is not None:
                    self._fall_back_to_tcp(problem, channel, hello["transport"])
                wire.close_all(fds)
            theirs = None
            if link.transport == "tcp":
                link.drop_mailboxes()
                if channel.is_local:
                    link.data, theirs = data_connection()
            with theirs or contextlib.nullcontext():
                handed = () if theirs is None else (theirs.fileno(),)
                channel.send("agreed", handed, transport=link.transport)  # (4)
            if link.transport == "tcp" and not channel.is_local:
                data = self.listener.take(lambda connection: self._is_data_of(connection, hello), _ANSWER_SECONDS)
                if data is None:
                    raise ConnectionError("the data connection did not arrive")
                link.data = data.channel.socket
            self._encrypt(link, hello["session"], accepts=True)
            self.links[link.rank] = link
        except (OSError, wire.WireError) as error:
            wire.close_all(fds)
            try:
                self._check_descriptors_left(error)
                _log.debug("rank %d connected and went away: %s", link.rank, error)
            except RendezvousError as failure:
                with contextlib.suppress(OSError):
                    channel.send("failed", why=str(failure)[: wire.MOST_REASON])
                raise
            finally:
                link.close()
        except BaseException:
            wire.close_all(fds)
            link.close()
            raise

    def _is_expected(self, connection: Connection) -> bool:
        hello = connection.hello
        if connection.kind != "ring" or (hello["job"], hello["ring"]) != (self.job, self.ring):
            return False
        rank = hello["rank"]
        return rank > self.cluster.rank and rank in self.peers and rank not in self.links

    def _is_data_of(self, connection: Connection, ring: dict[str, Any]) -> bool:
        names = ("job", "rank", "session")
        return connection.kind == "data" and all(connection.hello[name] == ring[name] for name in names)

    def _reject(self, channel: wire.Channel, why: str) -> NoReturn:
        channel.send("refused", why=why, final=True)
        raise RendezvousError(why)

    # Falling back from shared memory to TCP.

    def _check_descriptors_left(self, error: Exception) -> None:
        """Raises if the process has no descriptors left, which further attempts would not change."""
        if getattr(error, "errno", None) != errno.EMFILE:
            return
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise RendezvousError(
            f'Rank {self.cluster.rank} has no file descriptors left for ring "{self.ring}": its limit is {soft}, and '
            f"links to {len(self.peers)} ranks take up to {len(self.peers) * _FDS_OF_A_LINK}. Raise the limit to "
            f"{soft + len(self.peers) * _FDS_OF_A_LINK} or more (`ulimit -n`, or LimitNOFILE of a service)."
        ) from error

    def _fall_back_to_tcp(self, problem: str, channel: wire.Channel, other_wants: str) -> None:
        problem = f"Rank {self.cluster.rank} has no shared memory with a rank of its host: {problem}"
        if "shm" in (self.transport, other_wants):
            channel.send("failed", why=problem)
            raise RendezvousError(problem)
        _warn_once(f"{problem}. They use TCP, which is slower.")

    # Giving up.

    def _timeout_error(self) -> RendezvousError:
        """Returns an error that names all missing ranks on the lowest present rank, and missing peers on others."""
        all_ranks = self.kind == "ring" and not self._is_report_delegated()
        ranks = self._unlinked_ranks(range(self.cluster.world_size) if all_ranks else self.peers)
        missing = _missing_ranks(self.cluster, ranks)
        return RendezvousError(
            f"Rank {self.cluster.rank} of {self.cluster.world_size} waited {self.timeout_seconds:g} s for "
            f'ring "{self.ring}" to form; {self._who_is_missing(missing)}. Are all ranks started '
            "with the same list of addresses, and are the ports open between the hosts?"
        )

    def _who_is_missing(self, missing: Mapping[int, str]) -> str:
        ranks = sorted(missing)
        facts = [f"rank {r} at {self.cluster.addresses[r]} ({missing[r]})" for r in ranks[:_MOST_FACTS]]
        told = f"never answered: {', '.join(facts)}" if facts else "all ranks that it still waits for respond"
        told += f", and ranks {_in_short(ranks[_MOST_FACTS:])}" if ranks[_MOST_FACTS:] else ""
        for rank in sorted(set(self.peers) - set(self.links) - set(missing)):
            did_not = "accept" if rank < self.cluster.rank else "connect to"
            told += f"; rank {rank} is there but did not {did_not} rank {self.cluster.rank}"
            told += f" ({self.reasons[rank]})" if rank in self.reasons else ""
        if self.listener.turned_away:
            told += f". Turned away here: {self.listener.turned_away}"
        return told


def _own_descriptors(link: Link) -> tuple[int, ...]:
    return link.own.for_peer if link.own is not None and link.transport == "shm" else ()


def _make_mailbox(transport: str) -> tuple[mailbox.Mailbox | None, str | None]:
    """Returns a mailbox of this rank, or the reason why there is none."""
    if transport == "tcp":
        return None, "TFRING_TRANSPORT=tcp"
    try:
        return mailbox.Mailbox(), None
    except OSError as error:
        return None, f"the system provides none ({error})"


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        _log.warning("%s", text)


def _in_short(ranks: list[int]) -> str:
    """Returns ascending numbers as text, with runs in short.

    >>> _in_short([3, 4, 5, 7, 9, 10])
    '3 to 5, 7, 9 to 10'
    """
    runs = [[rank for _, rank in run] for _, run in itertools.groupby(enumerate(ranks), lambda at: at[1] - at[0])]
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _missing_ranks(cluster: Cluster, ranks: list[int]) -> dict[int, str]:
    """Probes these ranks. Returns the ranks that do not answer, with the reasons."""

    def problem(rank: int) -> str | None:
        try:
            found = probe(cluster, rank, _PROBE_SECONDS)
        except OSError as error:
            return error.strerror or str(error) or type(error).__name__
        if found.problem is not None:
            return str(found.problem)
        return None if found.rank == rank else f"the process there says that it is rank {found.rank}"

    if not ranks:
        return {}
    with concurrent.futures.ThreadPoolExecutor(min(32, len(ranks))) as pool:
        answers = dict(zip(ranks, pool.map(problem, ranks), strict=True))
    return {rank: why for rank, why in answers.items() if why is not None}
