"""Admission of gradients to updates: pure bookkeeping of one server, without threads and tensors.

A worker computes its gradient from the version of the parameters that it has pulled. The staleness of the gradient is
the number of updates made in between.

    version        0         1         2
    worker 0    ───●─────────●         ┊          gradient of version 0, update 1: staleness 0
    worker 1    ───●───────────────────●          gradient of version 0, update 2: staleness 1

"wait" (stale synchronous parallel, Ho et al. 2013): an update is made only while no gradient that is still being
computed would become staler than the bound. Gradients that have to wait for this are applied together in one update.
With a bound of 0 this is the update of all workers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

LATE = ("wait", "scale", "drop")


class Arrival(NamedTuple):
    """A gradient that has arrived: its worker, its staleness in updates, and its factor (0: dropped)."""

    worker: int
    staleness: int
    factor: float


class Admission:
    """Decides which gradients make the next update.

    Args:
      workers: Ranks of the workers.
      is_sync: Whether each update uses the gradients of all workers that train.
      backup_workers: Number of workers that a synchronous update does not wait for. Gradients that arrive after the
        update are dropped.
      max_staleness: Staleness bound of asynchronous updates. None: no bound.
      late: Treatment of a gradient beyond the bound: "wait", "scale" (by 1 / staleness) or "drop".

    >>> admission = Admission([0, 1], is_sync=False, max_staleness=1, late="drop")
    >>> for worker in (0, 1):
    ...     admission.begin(worker)
    >>> admission.arrive(0)
    >>> admission.take()
    [Arrival(worker=0, staleness=0, factor=1.0)]
    >>> admission.version
    1
    """

    def __init__(
        self,
        workers: list[int],
        *,
        is_sync: bool,
        backup_workers: int = 0,
        max_staleness: int | None = None,
        late: str = "wait",
    ) -> None:
        assert late in LATE
        self.live = set(workers)
        self.version = 0
        self._is_sync = is_sync
        self._backup_workers = backup_workers
        self._max_staleness = max_staleness
        self._late = late
        self._pulled: dict[int, int] = {}  # for each worker that trains: the version it computes from
        self._waiting: list[int] = []

    def resume(self, version: int, live: set[int], computing: Iterable[int]) -> None:
        """Resumes at a version, as after a loss of this server: no gradient waits, and staleness begins at 0.

        Args:
          version: Version of the parameters.
          live: Workers that are left.
          computing: Those of them that are computing a gradient.
        """
        self.version = version
        self.live = set(live)
        self._waiting = []
        self._pulled = dict.fromkeys(computing, version)

    def begin(self, worker: int) -> None:
        """Records that a worker begins to compute, from the current version."""
        if worker in self.live:
            self._pulled[worker] = self.version

    def end(self, worker: int) -> None:
        """Records that a worker has stopped training for now: no server waits for it."""
        self._pulled.pop(worker, None)
        if worker in self._waiting:
            self._waiting.remove(worker)

    def lose(self, worker: int) -> None:
        """Records that a worker is gone for good. Its waiting gradient is gone as well."""
        self.end(worker)
        self.live.discard(worker)

    def arrive(self, worker: int) -> None:
        """Records that the gradient of a worker has arrived."""
        self._pulled.setdefault(worker, self.version)  # if its beginning was not recorded
        self._waiting.append(worker)

    def take(self) -> list[Arrival]:
        """Returns the gradients of the next update in the order of workers, and counts it. Empty while all wait.

        If gradients are to be dropped, returns only these, in the order of arrival and with factor 0, and counts no
        update. The workers of the returned gradients compute from the current version on.
        """
        late = [w for w in self._waiting if self._factor(w) == 0.0]
        if not late and not self._is_ready():
            return []
        taken = late or sorted(self._waiting)
        arrivals = [Arrival(w, self.version - self._pulled[w], self._factor(w)) for w in taken]
        self._waiting = [w for w in self._waiting if w not in taken]
        if not late:
            self.version += 1
        for worker in taken:
            self._pulled[worker] = self.version
        return arrivals

    def _factor(self, worker: int) -> float:
        staleness = self.version - self._pulled[worker]
        if self._is_sync:
            return 1.0 if staleness == 0 else 0.0
        if self._max_staleness is None or staleness <= self._max_staleness or self._late == "wait":
            return 1.0
        return 0.0 if self._late == "drop" else 1.0 / staleness

    def _is_ready(self) -> bool:
        if not self._waiting:
            return False
        computing = [w for w in self._pulled if w not in self._waiting]
        if self._is_sync:
            return len(self._waiting) >= max(1, len(self._pulled) - self._backup_workers)
        if self._max_staleness is None or self._late != "wait":
            return True
        return all(self._pulled[w] + self._max_staleness > self.version for w in computing)
