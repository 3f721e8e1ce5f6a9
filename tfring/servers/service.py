"""The server's side: a thread for each worker answers its requests. One lock guards parameters and bookkeeping.

    worker 0 ═ requests ═► thread 0 ─┐               ┌─► ShardStore: shards and the optimizer of one model
    worker 1 ═ requests ═► thread 1 ─┼─ Admission ───┤   (the store is passed in: it needs TensorFlow)
    worker 2 ═ requests ═► thread 2 ─┘  who, when    └─► replies to the threads whose gradients were in the update
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from tfring import config
from tfring.cluster import launch_variables
from tfring.cluster.roles import Roles
from tfring.errors import ConfigurationError, MismatchError, PeerLostError, RendezvousError
from tfring.ring import clocks, trace
from tfring.servers.admission import Admission, Arrival
from tfring.servers.connection import Connection
from tfring.servers.replica import PRIMARY, Replica
from tfring.servers.snapshots import Snapshots
from tfring.servers.tracing import UNTRACED, ServerTrace

_MOST_MEETINGS = 4  # that are kept
_LAST_REPLY_SECONDS = 5.0  # until the reply to a worker that leaves is sent

_log = logging.getLogger(__name__)

Answer = tuple[Mapping[str, Any], list[np.ndarray]]


class ShardStore(Protocol):
    """The shards of one optimizer's variables, and the optimizer."""

    def load(self, head: Mapping[str, Any], arrays: list[np.ndarray]) -> None:
        """Loads values of variables and slots."""

    def merge(self, gradients: list[tuple[float | None, list[np.ndarray]]]) -> Any:
        """Returns the sum of gradients, each times its factor. None: the gradient is already weighted."""

    def norms(self, merged: Any) -> list[float]:
        """Returns the sum of squares of each shard's gradient, or an empty list if the optimizer clips by no norm."""

    def update(self, merged: Any, norms: list[float] | None, learning_rate: float | None) -> None:
        """Applies an update."""

    def values(self, wanted: str) -> list[np.ndarray]:
        """Returns shards. "pulled": those sent in full with each reply. "all": all of them."""

    def rows(self, variable: int, ids: np.ndarray) -> np.ndarray:
        """Returns rows of a shard by their index in it."""

    def slots(self) -> Answer:
        """Returns the optimizer's variables."""

    def iterations(self) -> int:
        """Returns the number of gradients that the optimizer has applied, as Keras counts them."""

    def describe(self) -> Mapping[str, Any]:
        """Returns the description of the slots that a worker needs."""


class _Group:
    """One optimizer: its shards, and the gradients that wait for its next update."""

    def __init__(self, held: ShardStore, description: Mapping[str, Any], admission: Admission) -> None:
        self.held = held
        self.description = description
        self.admission = admission
        self.gradients: dict[int, tuple[float | None, list[np.ndarray], float | None]] = {}
        self.taken: dict[int, Arrival] = {}  # by worker: its last gradient that was applied or dropped
        self.made: dict[int, tuple[int, int]] = {}  # by worker: when its update began, and the worker that came last
        self.merged: Any = None  # of the update that waits for the norms of all servers
        self.norms: list[float] = []
        self.learning_rate: float | None = None  # sent with the last gradient
        self.numbers: dict[int, int] = {}  # of the request that brought the last gradient of each worker

    def update(self, merged: Any, rate: float | None) -> None:
        """Applies an update, or keeps it until the norms of all servers are known."""
        if self.norms:
            self.merged = merged
        else:
            self.held.update(merged, None, rate)


class _Timing(threading.local):
    """Times in nanoseconds of the request that a thread answers, and the worker it has waited for (-1: none)."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.waited = self.queued = 0
        self.whom = -1


class Service:
    """Serves the workers of a job until the last has left.

    Args:
      roles: Roles of this process, which is a server.
      settings: Settings with which this program's strategy was made.
      make_held: A function `make_held(description, shards)` that returns the store of one optimizer.
      make_admission: A function that returns the bookkeeping of one optimizer.
      needs_all: Whether the loss of one worker ends the job. Otherwise another process may come back in its place.
      snapshots: The snapshots of this server. If given, a worker that has lost this server may come back.
      snapshot_seconds: Interval between snapshots, in seconds.
      server_trace: The trace of this server. By default no trace is written.
      shards: Number of the server whose shards are served. Defaults to this server.
      is_replicated: Whether this is one of two servers that hold these shards. See `tfring.servers.replica`.
    """

    def __init__(
        self,
        roles: Roles,
        settings: Mapping[str, Any],
        make_held: Callable[[Mapping[str, Any], int], ShardStore],
        make_admission: Callable[[], Admission],
        needs_all: bool,
        snapshots: Snapshots | None = None,
        snapshot_seconds: float = 30.0,
        server_trace: ServerTrace | None = None,
        shards: int | None = None,
        is_replicated: bool = False,
    ) -> None:
        self._roles = roles
        self._settings = dict(settings)
        self._make_held = make_held
        self._make_admission = make_admission
        self._needs_all = needs_all
        self._snapshots = snapshots
        self._snapshot_seconds = snapshot_seconds
        self._shards = roles.index if shards is None else shards
        self._trace = server_trace or ServerTrace(roles, None)
        self._run = secrets.randbits(62)  # the number of the traces of this job, if this is server 0
        self._timing = _Timing()
        # The job of the snapshots that are written, or of the shards held. Workers tell it to a restarted server.
        self._job: str | None = secrets.token_hex(8) if is_replicated else None
        self._num_ordered = self._num_written = 0  # snapshots that a thread waits for
        self._changed = threading.Condition()
        self._replica = Replica(roles, self._shards, self, self._changed) if is_replicated else None
        self._joined: set[int] = set()  # workers that are connected to this server as a primary
        self._groups: dict[int, _Group] = {}
        self._live = set(range(len(roles.workers)))
        self._training: set[int] = set()  # workers that have begun an epoch and not ended it
        self._left: set[int] = set()
        self._lost: dict[int, str] = {}
        self._returning: set[int] = set()  # lost workers: another process has joined in their place, and does not train
        self._position: dict[str, Any] | None = None  # of the epoch under way, as workers report it
        self._last_end: list[np.ndarray] = []  # results of the last meeting at the end of an epoch
        self._awaited: set[int] = set()  # workers that have not come back yet since a restart, or since `promote`
        self._done: dict[int, int] = {}  # the number of the last answered request of each worker
        self._failure: str | None = None
        self._is_over = False  # ended before it held any state
        self._board: dict[str, Answer] = {}
        self._asked: dict[int, int] = {}  # the number of the last post that each worker has asked for
        self._batches: dict[str | None, dict[int, tuple[int, int]]] = {}  # of an epoch: who drew each first, its digest
        self._claims: dict[str, int] = {}  # number of batches handed out in each epoch
        self._claimed: dict[int, int] = {}  # the last batch of each worker
        self._meetings: dict[str, dict[int, list[np.ndarray]]] = {}
        self._results: dict[str, list[np.ndarray]] = {}
        self._at: dict[int, str] = {}  # the meeting that a worker waits in
        self._last_come: dict[str, int] = {}  # the last worker at each meeting
        self._operations: dict[str, Callable[[int, dict[str, Any], list[np.ndarray]], Answer]] = {
            "join": self._join,
            "return": self._return,
            "create": self._create,
            "push": self._push,
            "commit": self._commit,
            "rows": self._rows,
            "pull": self._pull,
            "slots": self._slots,
            "begin": self._begin,
            "end": self._end,
            "claim": self._claim,
            "meet": self._meet,
            "post": self._post,
            "clock": self._tell_clock,
            "trace": self._begin_trace,
        }

    def start(self) -> None:
        """Starts to serve, in threads."""
        self._threads = {
            worker: threading.Thread(target=self._serve, args=(worker,), name=f"tfring-worker-{worker}", daemon=True)
            for worker in sorted(self._live)
        }
        for thread in self._threads.values():
            thread.start()
        if self._snapshots is not None:
            threading.Thread(target=self._write_snapshots, name="tfring-snapshots", daemon=True).start()
        if self._replica is not None:
            self._replica.start()
        survives = self._snapshots is not None or (self._replica is not None and not self._needs_all)
        waits = survives or config.read("TFRING_MAX_WORKER_RESTARTS") > 0
        self._patience = config.read("TFRING_CONNECT_TIMEOUT_SECONDS") if waits else 0.0
        self._alone_since: float | None = None

    def check_over(self) -> bool:
        """Returns whether all workers that were not lost have left, or the other server while it filled this one.

        Raises:
          PeerLostError: If a worker that the others need was lost or did not connect in time, or all were; if the other
            server with these shards was lost; or if the job failed, for instance in an update.
        """
        if self._replica is not None and self._failure is not None:
            raise PeerLostError(self._failure)
        if self._is_over:
            return True
        with self._changed:
            if self._live or self._returning:
                self._alone_since = None
                return False
        if self._alone_since is None:
            self._alone_since = time.monotonic()
        if not self._left and time.monotonic() - self._alone_since < self._patience:
            return False
        for worker, thread in self._threads.items():
            if self._is_secondary:
                break  # workers connect to the other server, and leave there
            if worker in self._left or self._needs_all:
                thread.join(None if self._replica is None else _LAST_REPLY_SECONDS)
        if self._failure or not self._left:
            raise PeerLostError(self._failure or "; ".join(self._lost.values()))
        return True

    @property
    def _is_secondary(self) -> bool:
        return self._replica is not None and self._replica.role != PRIMARY

    def _serve(self, worker: int) -> None:
        """Answers a worker until it leaves or is lost. Answers it again if the job continues and it comes back."""
        while worker not in self._left:
            connection = None
            try:
                shards = None if self._replica is None else self._shards
                connection = Connection(self._roles, worker, shards=shards)
                self._answer_all(worker, connection)
            except Exception as error:
                with self._changed:
                    # A worker sends one request to a secondary, then goes to the primary.
                    is_missed = self._replica is None or worker in self._joined or (
                        not self._is_secondary and isinstance(error, RendezvousError)
                    )
                    self._joined.discard(worker)
                if is_missed:
                    self._leave(worker, str(error) or type(error).__name__)
                    if self._needs_all:
                        return
            finally:
                if connection is not None:
                    connection.close()

    def _answer_all(self, worker: int, connection: Connection) -> None:
        while worker not in self._left:
            head, arrays = connection.receive()
            began = clocks.now()
            operation = head.pop("op", None)
            if operation == "leave":
                self._leave(worker, None)
                connection.send({})
                continue
            self._timing.reset()
            reply, arrays = self._answer(worker, operation, head, arrays)
            recorder = self._trace.recorder
            if recorder is None or operation in UNTRACED:
                connection.send(reply, arrays)
                continue
            timing = self._timing
            times = (timing.waited, timing.whom, clocks.now() - began - timing.waited, timing.queued)
            connection.send({**reply, "timing": times}, arrays)
            sizes, staleness = (connection.last_sent, connection.last_received), reply.get("staleness", -1)
            recorder.request(trace.Request(began, clocks.now(), worker, operation, *sizes, *times, staleness))

    def _answer(self, worker: int, operation: Any, head: dict[str, Any], arrays: list[np.ndarray]) -> Answer:
        try:
            if operation not in self._operations:
                raise ConfigurationError(f"There is no operation {operation!r}.")
            number, came = head.pop("number", None), clocks.now()
            with self._changed:
                self._timing.queued = clocks.now() - came
                if self._replica is not None:
                    self._wait_until(lambda: self._replica is not None and self._replica.role is not None)
                    if self._is_secondary:
                        return {"is_secondary": True}, []
                # A worker repeats its last request if it has lost the connection before the reply.
                head["number"] = number
                head["is_repeated"] = number is not None and self._done.get(worker) == number
                answer = self._operations[operation](worker, head, arrays)
                if number is not None:
                    self._done[worker] = number
                return answer
        except Exception as error:
            if isinstance(error, (ConfigurationError, MismatchError, PeerLostError)):
                return {"error": str(error), "kind": type(error).__name__}, []
            _log.error("A request %r of worker %d failed.\n%s", operation, worker, traceback.format_exc())
            return {"error": f"{type(error).__name__}: {error}"}, []

    def _fail_all_workers(self, why: str) -> None:
        """Makes all workers that wait, or send a request, end with an error."""
        with self._changed:
            self._failure = self._failure or why
            self._changed.notify_all()

    @contextlib.contextmanager
    def _fail_all_on_error(self) -> Iterator[None]:
        """Ends all workers if an update fails: it runs in the thread of only one of those whose gradients it uses."""
        try:
            yield
        except PeerLostError:
            raise
        except Exception as error:
            self._fail_all_workers(f"an update failed: {type(error).__name__}: {error}")
            raise

    def _leave(self, worker: int, why: str | None) -> None:
        with self._changed:
            self._live.discard(worker)
            self._training.discard(worker)
            self._awaited.discard(worker)
            self._returning.discard(worker)
            with contextlib.suppress(PeerLostError):  # then this server ends
                self._pass_on({"what": "leave", "worker": worker, "why": why})
            if why is None:
                self._left.add(worker)
            elif worker not in self._lost:
                self._lost[worker] = why
                _log.warning("Worker %d is lost: %s", worker, why)
                if self._needs_all and self._failure is None:
                    self._failure = f"worker {worker} is lost, but synchronous updates need all workers: {why}"
            for group in self._groups.values():
                group.admission.lose(worker)
                group.gradients.pop(worker, None)
                self._try_update(group, worker)
            self._settle_meetings()
            self._changed.notify_all()

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        """Waits for a condition. Releases the lock meanwhile.

        Raises:
          PeerLostError: If the job has failed, for instance because a worker that all need is lost.
        """
        began = clocks.now()
        self._changed.wait_for(lambda: self._failure is not None or condition())
        self._timing.waited += clocks.now() - began
        if self._failure is not None:
            raise PeerLostError(self._failure)

    # -- operations, each with the lock held ---------------------------------------------------------------------

    def _join(self, worker: int, head: dict[str, Any], arrays: list[np.ndarray]) -> Answer:
        if head["settings"] != self._settings:
            raise ConfigurationError(
                f"Worker {worker} made its strategy with the settings {head['settings']}, but server "
                f"{self._roles.index} with {self._settings}. Pass the same settings in all processes of a job."
            )
        job = head.get("job")
        is_back = job is None and worker in self._lost  # another process in the place of one that was lost
        if is_back:
            self._returning.add(worker)
            self._asked.pop(worker, None)
        if head.get("run") is not None and self._trace.recorder is None:  # this server was started again
            self._run = head["run"]
            clock = clocks.Distance(clocks.now(), 0, 0, 0, 0)._asdict()  # until it is measured
            self._begin_trace(worker, {"run": self._run, "clock": clock}, [])
        self._joined.add(worker)
        if self._snapshots is None and self._replica is None:
            return {"is_back": is_back, "run": self._run}, []
        if job is not None and job != self._job:
            self._restore(job)
        elif self._job is None and self._snapshots is not None:
            self._job = secrets.token_hex(8)
            self._snapshots.begin(self._job)
            self._order_snapshot()
        if job is not None:
            self._readmit(worker, head, arrays)
        return {"job": self._job, "is_back": is_back, "run": self._run}, []

    def _return(self, worker: int, head: dict[str, Any], arrays: list[np.ndarray]) -> Answer:
        """Admits another process in the place of a lost worker: from now on the others wait for it at meetings.

        If no state is held yet, it begins as all do.
        """
        position = self._position if self._groups else None
        if position is not None and position["fit"] != head["fit"]:
            raise MismatchError(
                f"Worker {worker} cannot come back in call {position['fit']} of `fit`: the job continues without it. A "
                "worker can come back only in the first `fit` of its program."
            )
        self._pass_on({"what": "return", "worker": worker})
        self._add_live_worker(worker)
        where = "before training" if position is None else f"in epoch {position['epoch'] + 1}"
        _log.warning("Worker %d is back, %s.", worker, where)
        rates = {str(number): group.learning_rate for number, group in self._groups.items()}
        return {"position": position, "learning_rates": rates}, self._last_end

    def _add_live_worker(self, worker: int) -> None:
        self._returning.discard(worker)
        self._lost.pop(worker, None)
        self._live.add(worker)
        for group in self._groups.values():
            group.admission.live.add(worker)

    def _readmit(self, worker: int, head: dict[str, Any], arrays: list[np.ndarray]) -> None:
        """Readmits a worker, and adopts what only this worker knows: its last batch and its last meeting."""
        if worker in self._awaited:
            if head.get("claimed"):
                epoch, batch = head["claimed"]
                self._claims[epoch] = max(self._claims.get(epoch, 0), batch + 1)
            if head.get("meeting"):
                self._results.setdefault(head["meeting"], [a.copy() for a in arrays])
                self._meetings.setdefault(head["meeting"], {})
                if head["meeting"].startswith("end/"):
                    self._last_end = self._results[head["meeting"]]
        if worker not in self._live:
            self._pass_on({"what": "return", "worker": worker})
        self._live.add(worker)
        self._lost.pop(worker, None)
        self._awaited.discard(worker)
        for group in self._groups.values():
            group.admission.live.add(worker)
        if head.get("is_training"):
            self._begin(worker, {"position": head.get("position")}, [])
        self._changed.notify_all()

    def _create(self, worker: int, head: dict[str, Any], arrays: list[np.ndarray]) -> Answer:
        """Loads the values of worker 0. The others wait for them, and have to describe the same variables.

        A worker 0 that comes back takes the values held, as the others do.
        """
        number, description = int(head["group"]), head["description"]
        if worker == 0 and ("values" in head or "slots" in head):
            if not head["is_repeated"]:
                self._pass_on({"what": "create", "by": worker, **head}, arrays)
            group = self._load(head, arrays)
            self._changed.notify_all()
            self._order_snapshot()
        else:
            self._wait_until(lambda: number in self._groups or worker == 0 or 0 not in self._live)
            if number not in self._groups:
                raise PeerLostError("worker 0 left before it sent the parameters")
            group = self._groups[number]
            if group.description != description:
                raise ConfigurationError(
                    f"Workers 0 and {worker} train different variables, or use different optimizers: "
                    f"{_difference(group.description, description)}."
                )
        return {"slots": group.held.describe(), "version": group.admission.version}, group.held.values("all")

    def _load(self, head: Mapping[str, Any], arrays: list[np.ndarray]) -> _Group:
        number, description = int(head["group"]), head["description"]
        group = self._groups.get(number)
        if group is None or group.description != description:
            held = self._make_held(description, self._shards)
            group = self._groups[number] = _Group(held, description, self._make_admission())
            for trainer in self._training:
                group.admission.begin(trainer)
        if not head["is_repeated"]:
            group.held.load(head, arrays)
        return group

    def _push(self, worker: int, head: dict[str, Any], arrays: list[np.ndarray]) -> Answer:
        group, began, came = self._groups[int(head["group"])], time.monotonic(), clocks.now()
        if not head["is_repeated"]:
            if self._replica is not None:  # other gradients of its update may not have reached this server yet
                self._wait_until(lambda: not self._awaited)
            rate = group.learning_rate = head.get("learning_rate")
            group.numbers[worker] = head["number"]
            group.gradients[worker] = (head.get("weight"), [a.copy() for a in arrays], rate)
            group.taken.pop(worker, None)
            group.admission.arrive(worker)
            self._try_update(group, worker)
            self._wait_until(lambda: worker in group.taken)
            made, last = group.made[worker]  # then the update is computed, on the thread of the last worker
            self._timing.waited = min(self._timing.waited, max(0, made - came))
            self._timing.whom = last if last != worker else -1
        arrival = group.taken.get(worker) or Arrival(worker, 0, 1.0)
        reply = {
            "staleness": arrival.staleness,
            "factor": arrival.factor,
            "waited": time.monotonic() - began,
            "version": group.admission.version,
            "iterations": group.held.iterations(),
        }
        if group.norms:  # still the norms of this update: the next one waits for this worker
            return {**reply, "norms": group.norms}, []
        return reply, group.held.values("pulled")

    def _commit(self, worker: int, head: dict[str, Any], arrays: list[np.ndarray]) -> Answer:
        """Applies the update that waits for the norms of all servers, for the first worker that sends them."""
        group = self._groups[int(head["group"])]
        if group.merged is not None:
            merged, group.merged = group.merged, None
            rate = head.get("learning_rate")
            with self._fail_all_on_error():
                self._pass_on(
                    {"what": "commit", "group": int(head["group"]), "norms": head["norms"], "rate": rate},
                    meanwhile=lambda: group.held.update(merged, head["norms"], rate),
                )
        return {"iterations": group.held.iterations()}, group.held.values("pulled")

    def _try_update(self, group: _Group, worker: int) -> None:
        """Applies an update if one is due. `worker` has just arrived, or left."""
        made = clocks.now(), worker
        arrivals = group.admission.take()
        if not arrivals:
            return
        counted = [a for a in arrivals if a.factor]
        gradients = [group.gradients.pop(a.worker) for a in arrivals]
        if counted:
            pairs = [(a, g) for a, g in zip(arrivals, gradients, strict=True) if a.factor]
            weights = [g[0] for _, g in pairs]
            total = sum(w for w in weights if w is not None) or 1.0
            with self._fail_all_on_error():
                factors = [None if g[0] is None else a.factor * g[0] / total for a, g in pairs]
                merged = group.held.merge([(factor, g[1]) for factor, (_, g) in zip(factors, pairs, strict=True)])
                rate = pairs[0][1][2]
                group.norms = group.held.norms(merged)
                self._pass_on_update(group, merged, arrivals, rate)
        group.taken.update({a.worker: a for a in arrivals})
        group.made.update({a.worker: made for a in arrivals})
        self._changed.notify_all()
        if not counted:
            self._try_update(group, worker)

    def _pass_on_update(self, group: _Group, merged: Any, arrivals: list[Arrival], rate: float | None) -> None:
        """Applies an update, and has the secondary apply it."""
        head: dict[str, Any] = {}
        arrays: list[np.ndarray] = []
        if self._replica is not None:
            pairs, arrays = _flat(merged)
            head = {
                "what": "update",
                "group": next(number for number, each in self._groups.items() if each is group),
                "version": group.admission.version,
                "done": {str(a.worker): group.numbers[a.worker] for a in arrivals},
                "arrivals": arrivals,
                "pairs": pairs,
                "norms": group.norms,
                "rate": rate,
            }
        self._pass_on(head, arrays, lambda: group.update(merged, rate))

    def _rows(self, worker: int, head: dict[str, Any], arrays: list[np.ndarray]) -> Answer:
        held = self._groups[int(head["group"])].held
        return {}, [held.rows(variable, ids) for variable, ids in zip(head["variables"], arrays, strict=True)]

    def _pull(self, worker: int, head: dict[str, Any], arrays: list[np.ndarray]) -> Answer:
        group = self._groups[int(head["group"])]
        return {"version": group.admission.version}, group.held.values("all")

    def _slots(self, worker: int, head: dict[str, Any], arrays: list[np.ndarray]) -> Answer:
        return self._groups[int(head["group"])].held.slots()

    def _begin(self, worker: int, head: dict[str, Any], arrays: list[np.ndarray]) -> Answer:
        self._training.add(worker)
        position = head.get("position")
        if position is not None and (self._position is None or self._position["number"] < position["number"]):
            self._position = position
        for group in self._groups.values():
            group.admission.begin(worker)
        return {}, []

    def _end(self, worker: int, head: dict[str, Any], arrays: list[np.ndarray]) -> Answer:
        self._compare_batches(worker, head, arrays)
        self._training.discard(worker)
        for group in self._groups.values():
            group.admission.end(worker)
            self._try_update(group, worker)
        return {}, []

    def _claim(self, worker: int, head: dict[str, Any], arrays: list[np.ndarray]) -> Answer:
        """Hands out the numbers of an epoch's batches, each once."""
        self._wait_until(lambda: not self._awaited)
        self._compare_batches(worker, head, arrays)
        if not head["is_repeated"] or worker not in self._claimed:
            number = self._claims.get(head["epoch"], 0)
            told = {"epoch": head["epoch"], "batch": number, "by": worker, "number": head["number"]}
            self._pass_on({"what": "claim", **told})
            self._claims[head["epoch"]] = number + 1
            self._claimed[worker] = number
        return {"batch": self._claimed[worker]}, []

    def _compare_batches(self, worker: int, head: Mapping[str, Any], arrays: list[np.ndarray]) -> None:
        """Compares digests of the batches that a worker has drawn with those of the others. Server 0 does this.

        Raises:
          MismatchError: If they differ. All others end as well, because rows are then not trained once each.
        """
        epoch, first = head.get("epoch"), head.get("first", 0)
        if epoch not in self._batches:
            self._batches = {epoch: {}}
        for number, digest in enumerate(arrays[0].tolist() if arrays else (), first):
            of, theirs = self._batches[epoch].setdefault(number, (worker, digest))
            if theirs != digest:
                why = (
                    f"Batch {number} of worker {worker} differs from that of worker {of}. All workers must draw the "
                    "same batches in the same order, and one of them trains each. Use one seed for shuffles on all "
                    "workers, pass all rows on each, and leave out `deterministic=False` (docs/data.md)."
                )
                self._fail_all_workers(why)
                raise MismatchError(why)

    def _post(self, worker: int, head: dict[str, Any], arrays: list[np.ndarray]) -> Answer:
        """Sends what worker 0 has posted under a name to all workers that ask for it."""
        name = head["name"]
        self._asked[worker] = max(self._asked.get(worker, -1), _number_of_post(name))
        if worker == 0 and name not in self._board:  # otherwise it has come back, and others have its earlier post
            dropped = self._drop_posts()
            self._pass_on({"what": "post", "name": name, "dropped": dropped}, arrays)
            self._board[name] = ({}, [a.copy() for a in arrays])
            if self._snapshots is not None:
                self._snapshots.post({"name": name}, arrays)
            self._changed.notify_all()
        self._wait_until(lambda: name in self._board or 0 not in self._live)
        if name not in self._board:
            raise PeerLostError(f"worker 0 left before it posted {name!r}")
        return self._board[name]

    def _drop_posts(self) -> list[str]:
        """Drops posts older than one that all workers have asked for: all have replies. Returns the posts' names."""
        if self._returning or self._may_come_back():  # a worker that comes back asks for all again
            return []
        least = min((self._asked.get(worker, -1) for worker in self._live), default=-1)
        dropped = [name for name in self._board if 0 <= _number_of_post(name) < least]
        for name in dropped:
            del self._board[name]
        return dropped

    def _meet(self, worker: int, head: dict[str, Any], arrays: list[np.ndarray]) -> Answer:
        """Waits for all workers that are left, and returns the sums of their arrays."""
        name = head["name"]
        self._wait_until(lambda: not self._awaited)
        if name not in self._results and any(_number(name) < _number(other) for other in self._results):
            raise MismatchError(
                f"Worker {worker} was lost, and the others have continued without it: it is at {name!r}, and they are "
                f"at {max(self._results, key=_number)!r}."
            )
        brought = self._meetings.setdefault(name, {})
        if name in self._results and brought and worker not in brought and name.startswith("end/"):
            text = "Worker %d is back. The others continued without it: the logs of the epoch lack its rows."
            _log.warning(text, worker)
        brought[worker] = [a.copy() for a in arrays]
        self._at[worker] = name
        self._last_come[name] = worker
        self._settle_meetings()
        others = {w: n for w, n in self._at.items() if w in self._live and n not in self._results}
        if len(others) == len(self._live) and len(set(others.values())) > 1:
            del self._at[worker]
            del self._meetings[name][worker]
            raise MismatchError(
                "Workers wait for each other: "
                f"{', '.join((f'worker {w} at {n!r}' for w, n in sorted(others.items())))}. All workers must begin "
                "and end the same epochs, and exchange the same values between them. Stop training by a value that is "
                "the same on all workers: the logs of an epoch."
            )
        self._wait_until(lambda: name in self._results)
        self._at.pop(worker, None)
        self._timing.whom = self._last_come[name] if self._last_come.get(name, worker) != worker else -1
        return {"workers": len(self._meetings[name])}, self._results[name]

    def _settle_meetings(self) -> None:
        for name, brought in self._meetings.items():
            if name not in self._results and self._live <= brought.keys():
                columns = zip(*(brought[w] for w in sorted(brought)), strict=True)
                self._results[name] = [np.sum(column, axis=0, dtype=column[0].dtype) for column in columns]
                if name.startswith("end/"):
                    self._last_end = self._results[name]
                self._changed.notify_all()
        for name in list(self._results)[:-_MOST_MEETINGS]:  # all have left them: workers attend them in order
            if name.startswith("exchange/") and self._may_come_back():
                continue  # a worker that comes back repeats its program, and the calls of the others
            del self._results[name], self._meetings[name]
            self._last_come.pop(name, None)

    def _may_come_back(self) -> bool:
        """Returns whether another process may take the place of a worker. It may before the second call of `fit`."""
        is_restarted = self._roles.source != launch_variables.SOURCE or config.read("TFRING_MAX_WORKER_RESTARTS") > 0
        is_first = self._position is None or self._position["fit"] <= 1
        return not self._needs_all and is_restarted and is_first

    # -- the trace --------------------------------------------------------------------------------------------------

    def _tell_clock(self, worker: int, head: dict[str, Any], arrays: list[np.ndarray]) -> Answer:
        return {"at": clocks.now(), "kernel": clocks.kernel()}, []

    def _begin_trace(self, worker: int, head: dict[str, Any], arrays: list[np.ndarray]) -> Answer:
        self._trace.begin(head["run"], head["clock"])
        return {}, []

    # -- a copy on another server; see `tfring.servers.replica.Copied` ---------------------------------------------

    def _pass_on(
        self, head: Mapping[str, Any], arrays: Sequence[np.ndarray] = (), meanwhile: Callable[[], None] | None = None
    ) -> None:
        if self._replica is not None and self._replica.role == PRIMARY:
            self._replica.pass_on(head, arrays, meanwhile)
        elif meanwhile is not None:
            meanwhile()

    def full(self) -> tuple[dict[str, Any], list[np.ndarray]]:
        """Returns all state that a secondary needs."""
        head, arrays = self._snapshot()
        for number, group in self._groups.items():
            if group.merged is not None:
                pairs, flat = _flat(group.merged)
                head["groups"][str(number)]["merged"] = pairs
                arrays += flat
        posts = [[name, len(its)] for name, (_, its) in self._board.items()]
        arrays += [array for _, its in self._board.values() for array in its]
        lost = {str(worker): why for worker, why in self._lost.items()}
        claimed = {str(worker): batch for worker, batch in self._claimed.items()}
        head.update(what="full", run=self._run, posts=posts, claims=self._claims, claimed=claimed)
        head.update(left=sorted(self._left), lost=lost, num_end=len(self._last_end))
        return head, [*arrays, *self._last_end]

    def take(self, head: Mapping[str, Any], arrays: list[np.ndarray]) -> None:
        """Applies a message that the primary has passed on."""
        what, arrays = head["what"], list(arrays)
        if what == "full":
            self._take_full(head, arrays)
        elif what == "update":
            group = self._groups[head["group"]]
            group.norms, group.learning_rate = head["norms"], head["rate"]
            kept = [a.copy() for a in arrays] if group.norms else arrays
            group.update(_unflat(head["pairs"], kept), head["rate"])
            group.admission.version = head["version"]
            group.taken.update({arrival[0]: Arrival(*arrival) for arrival in head["arrivals"]})
            self._done.update({int(worker): number for worker, number in head["done"].items()})
        elif what == "commit":
            group = self._groups[head["group"]]
            merged, group.merged = group.merged, None
            group.held.update(merged, head["norms"], head["rate"])
        elif what == "create":
            self._load(head, arrays)
            self._done[head["by"]] = head["number"]
        elif what == "claim":
            self._claims[head["epoch"]] = head["batch"] + 1
            self._claimed[head["by"]] = head["batch"]
            self._done[head["by"]] = head["number"]
        elif what == "post":
            for name in head["dropped"]:
                self._board.pop(name, None)
            self._board[head["name"]] = ({}, [a.copy() for a in arrays])
        elif what == "return":
            self._add_live_worker(head["worker"])
        else:
            assert what == "leave"
            self._live.discard(head["worker"])
            if head["why"] is None:
                self._left.add(head["worker"])
            else:
                self._lost[head["worker"]] = head["why"]

    def _take_full(self, head: Mapping[str, Any], arrays: list[np.ndarray]) -> None:
        self._job, self._run = head["job"], head["run"]
        self._take_groups(head, arrays)
        for number, about in head["groups"].items():
            if "merged" in about:
                size = sum(1 + is_pair for is_pair in about["merged"])
                group = self._groups[int(number)]
                group.merged = _unflat(about["merged"], [a.copy() for a in arrays[:size]])
                group.norms = about["norms"]
                del arrays[:size]
        for name, size in head["posts"]:
            self._board[name] = ({}, [a.copy() for a in arrays[:size]])
            del arrays[:size]
        self._last_end = [a.copy() for a in arrays]
        self._claims = dict(head["claims"])
        self._claimed = {int(worker): batch for worker, batch in head["claimed"].items()}
        self._left, self._lost = set(head["left"]), {int(worker): why for worker, why in head["lost"].items()}
        if head["groups"]:  # none if the job has just begun
            _log.warning(
                "Server %d holds the shards of server %d again. Two servers hold them now: one can be lost.",
                *(self._roles.index, self._shards),
            )

    def promote(self) -> None:
        """Continues as the primary. Workers connect, and report what only they know."""
        self._awaited = set(self._live)
        for group in self._groups.values():
            computing = self._live if self._needs_all else ()
            group.admission.resume(group.admission.version, self._live, computing)
            group.gradients.clear()
        self._start_rejoin_timer(config.read("TFRING_LOST_SECONDS"))
        _log.warning(
            "Server %d continues with the shards that server %d held: nothing that was acknowledged is lost.",
            *(self._roles.index, self._shards if self._shards != self._roles.index else self._replica_number()),
        )
        self._changed.notify_all()

    def _replica_number(self) -> int:
        return (self._shards + 1) % len(self._roles.servers)

    def fail(self, why: str) -> None:
        """Ends this server with an error."""
        if self._failure is None and (self._live or self._returning):
            self._failure = why
        self._changed.notify_all()

    def end(self) -> None:
        """Ends this server, which holds no state."""
        self._is_over = True

    # -- snapshots, and a server that is started again -------------------------------------------------------------

    def _order_snapshot(self) -> None:
        """Waits until a snapshot of the current state is written. Releases the lock meanwhile."""
        if self._snapshots is not None:
            self._num_ordered += 1
            ordered = self._num_ordered
            self._changed.notify_all()
            self._wait_until(lambda: self._num_written >= ordered)

    def _write_snapshots(self) -> None:
        assert self._snapshots is not None
        written: list[int] = []  # the versions in the last snapshot
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._num_ordered > self._num_written, self._snapshot_seconds)
                ordered = self._num_ordered
                versions = [group.admission.version for group in self._groups.values()]
                if self._job is None or (ordered == self._num_written and versions == written):
                    continue
            try:
                with self._changed:
                    head, arrays = self._snapshot()
                self._snapshots.write(head, arrays)
                written = versions
            except Exception as error:  # a full disk, or memory; the thread that ordered it continues
                folder = self._snapshots.folder
                _log.warning("Server %d cannot write its snapshot in %s: %s", self._roles.index, folder, error)
            with self._changed:
                self._num_written = ordered
                self._changed.notify_all()

    def _snapshot(self) -> tuple[dict[str, Any], list[np.ndarray]]:
        """Returns copies of the current state, with the lock held."""
        groups, arrays = {}, []
        for number, group in self._groups.items():
            values, slots = group.held.values("all"), group.held.slots()[1]
            arrays += [array.copy() for array in (*values, *slots)]
            groups[str(number)] = {
                "description": group.description,
                "version": group.admission.version,
                "num_values": len(values),
                "num_slots": len(slots),
                "norms": group.norms,
            }
        done = {str(worker): number for worker, number in self._done.items()}
        head = {"job": self._job, "time": time.time(), "live": sorted(self._live), "done": done, "groups": groups}
        return head, arrays

    def _restore(self, job: str) -> None:
        """Restores the last snapshot. The first worker that comes back to a restarted server asks for it.

        Raises:
          PeerLostError: If there is no snapshot of this job.
        """
        if self._snapshots is None:
            raise PeerLostError(
                f"the servers that held the shards of server {self._shards} were both lost and started again"
            )
        found = self._snapshots.read(job) if self._job is None else None
        if found is None:
            raise PeerLostError(
                f"the server was started again, but {self._snapshots.folder} has no snapshot of this job that it "
                "wrote"
            )
        (head, arrays), posts = found
        self._job = job
        self._take_groups(head, arrays)
        self._awaited = set(self._live)
        self._board = {told["name"]: ({}, its) for told, its in posts}
        self._start_rejoin_timer(config.read("TFRING_LOST_SECONDS"))
        updates = ", ".join(str(about["version"]) for about in head["groups"].values()) or "0"
        _log.warning(
            "Server %d continues from its snapshot, written %.1f s ago after update %s: what was pushed to it since "
            "then is lost.", self._roles.index, time.time() - head["time"], updates,
        )

    def _take_groups(self, head: Mapping[str, Any], arrays: list[np.ndarray]) -> None:
        """Restores the result of `_snapshot`. Removes the arrays that it restores from `arrays`."""
        self._live = set(head["live"])
        self._done = {int(worker): number for worker, number in head["done"].items()}
        for number, about in head["groups"].items():
            held = self._make_held(about["description"], self._shards)
            num_slots, num_arrays = about["num_slots"], about["num_values"] + about["num_slots"]
            every = {"values": list(range(len(about["description"]["variables"]))), "slots": list(range(num_slots))}
            held.load(every, arrays[:num_arrays])
            del arrays[:num_arrays]
            group = self._groups[int(number)] = _Group(held, about["description"], self._make_admission())
            group.admission.resume(about["version"], self._live, ())

    def _start_rejoin_timer(self, seconds: float) -> None:
        timer = threading.Timer(seconds, self._drop_awaited_workers)
        timer.daemon = True
        timer.start()

    def _drop_awaited_workers(self) -> None:
        for worker in list(self._awaited):
            self._leave(worker, f"worker {worker} has not come back to server {self._roles.index}")


def run(services: Sequence[Service], server_trace: ServerTrace) -> None:
    """Serves until all workers have left. See `Service.check_over`."""
    for service in services:
        service.start()
    try:
        while not all([service.check_over() for service in services]):
            time.sleep(0.2)  # so that Ctrl-C is handled
    finally:
        server_trace.close()


def _flat(merged: list[Any]) -> tuple[list[bool], list[np.ndarray]]:
    """Returns whether each gradient is a pair of rows and ids, and all arrays."""
    pairs = [isinstance(gradient, tuple) for gradient in merged]
    return pairs, [part for gradient in merged for part in (gradient if isinstance(gradient, tuple) else (gradient,))]


def _unflat(pairs: list[bool], arrays: list[np.ndarray]) -> list[Any]:
    """Returns the gradients from the results of `_flat`."""
    rest = iter(arrays)
    return [(next(rest), next(rest)) if is_pair else next(rest) for is_pair in pairs]


def _number(meeting: str) -> int:
    """Returns the position of a meeting in the order of all meetings."""
    return int(meeting.rpartition("/")[2])


def _number_of_post(name: str) -> int:
    """Returns the position of a post in the order of all posts. -1: a post in a graph, which may be asked for again."""
    number = name.rpartition(" ")[2]
    return int(number) if number.isdecimal() else -1


def _difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Names the first entry that differs."""
    name = next(name for name in {**one, **other} if one.get(name) != other.get(name))
    return f"{name}={one.get(name)!r} and {name}={other.get(name)!r}"
