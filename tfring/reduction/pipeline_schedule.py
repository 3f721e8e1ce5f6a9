"""Schedules the microbatches of a pipeline's stages, in a pure table.

```
gpipe   stage 1  F0 F1 F2 .. .. .. B0--- B1--- B2---      all forward passes F, then all backward passes B
        stage 2  .. F0 F1 F2 B0--- B1--- B2--- .. ..

1f1b    stage 1  F0 F1 .. .. B0--- F2 B1--- .. B2---      no more forward passes ahead than keep all stages busy
        stage 2  .. F0 B0--- F1 B1--- F2 B2--- .. ..
```

With S equally long stages and M microbatches both are idle for (S - 1) / (M + S - 1) of the time.
GPipe (https://arxiv.org/abs/1811.06965) holds the activations of M microbatches on each stage. 1F1B (PipeDream-flush,
https://arxiv.org/abs/2006.09503) holds those of at most S - s microbatches on stage s, counted from 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from tfring.errors import ConfigurationError

SCHEDULES = ("1f1b", "gpipe")
FORWARD, BACKWARD = "forward", "backward"
_UNITS = {FORWARD: 1, BACKWARD: 2}  # of time: a backward pass computes the gradients of inputs and of weights


class Task(NamedTuple):
    """One pass of a stage: its `kind`, FORWARD or BACKWARD, and its microbatch, counted from 0."""

    kind: str
    microbatch: int


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The tasks of each stage, in order.

    Args:
      num_microbatches: Number of parts into which a batch is cut.
      tasks: The tasks of each stage.

    >>> plan_schedule("1f1b", 2, 2).tasks[0][:3]
    (Task(kind='forward', microbatch=0), Task(kind='forward', microbatch=1), Task(kind='backward', microbatch=0))
    """

    num_microbatches: int
    tasks: tuple[tuple[Task, ...], ...]

    @property
    def num_stages(self) -> int:
        return len(self.tasks)

    def played(self, durations: Sequence[tuple[float, float]] | None = None) -> list[dict[Task, float]]:
        """Returns the time at which each stage begins each task.

        A forward pass waits for that of the previous stage, a backward pass for that of the next stage.

        Args:
          durations: The durations of the forward and the backward pass on each stage. Defaults to (1, 2) on all stages,
            in units of a forward pass.

        Raises:
          ValueError: If the table deadlocks.

        >>> plan_schedule("gpipe", 2, 1).played()[1]
        {Task(kind='forward', microbatch=0): 1, Task(kind='backward', microbatch=0): 2}
        """
        lasts = self._lasts(durations)
        begun: list[dict[Task, float]] = [{} for _ in self.tasks]
        free: list[float] = [0] * self.num_stages
        moved = True
        while moved:
            moved = False
            for stage, tasks in enumerate(self.tasks):
                while len(begun[stage]) < len(tasks):
                    task = tasks[len(begun[stage])]
                    ready = self._ready(begun, lasts, stage, task)
                    if ready is None:
                        break
                    begun[stage][task] = max(ready, free[stage])
                    free[stage] = begun[stage][task] + lasts[stage][task.kind]
                    moved = True
        if any(len(b) < len(tasks) for b, tasks in zip(begun, self.tasks, strict=True)):
            raise ValueError(f"The schedule comes to a standstill: {self.tasks}")
        return begun

    def _lasts(self, durations: Sequence[tuple[float, float]] | None) -> list[dict[str, float]]:
        """Returns the durations of each stage, by the kind of pass."""
        if durations is None:
            return [dict(_UNITS) for _ in self.tasks]
        return [{FORWARD: forward, BACKWARD: backward} for forward, backward in durations]

    def _ready(self, begun: Any, lasts: Any, stage: int, task: Task) -> float | None:
        """Returns the time at which a task's inputs are ready; None while it is not known."""
        waits_for = stage - 1 if task.kind == FORWARD else stage + 1
        if task.kind == BACKWARD and Task(FORWARD, task.microbatch) not in begun[stage]:
            return None
        if not 0 <= waits_for < self.num_stages:
            return 0
        start = begun[waits_for].get(task)
        return None if start is None else start + lasts[waits_for][task.kind]

    def length(self, durations: Sequence[tuple[float, float]] | None = None) -> float:
        """Returns the time from the first pass to the end of the last; see `played` for `durations`.

        >>> plan_schedule("gpipe", 2, 3).length(), plan_schedule("gpipe", 2, 3).length([(1, 2), (2, 4)])
        (12, 21)
        """
        lasts = self._lasts(durations)
        begun = self.played(durations)
        return max(start + lasts[s][task.kind] for s, stage in enumerate(begun) for task, start in stage.items())

    def bubble(self, durations: Sequence[tuple[float, float]] | None = None) -> float:
        """Returns the share of the time in which stages are idle; see `played` for `durations`, by default all equal.

        >>> plan_schedule("1f1b", 4, 8).bubble()  # (S - 1) / (M + S - 1)
        0.2727272727272727
        """
        lasts = self._lasts(durations)
        busy = sum(lasts[s][task.kind] for s, tasks in enumerate(self.tasks) for task in tasks)
        return 1 - busy / (self.length(durations) * self.num_stages)

    def most_held(self) -> tuple[int, ...]:
        """Returns the maximum number of microbatches whose activations each stage holds at a time.

        >>> plan_schedule("1f1b", 3, 8).most_held(), plan_schedule("gpipe", 3, 8).most_held()
        ((3, 2, 1), (8, 8, 8))
        """
        most = []
        for tasks in self.tasks:
            held = highest = 0
            for task in tasks:
                held += 1 if task.kind == FORWARD else -1
                highest = max(highest, held)
            most.append(highest)
        return tuple(most)

    def draw(self) -> str:
        """Returns the table as text, with one column per unit of time.

        >>> print(plan_schedule("1f1b", 2, 3).draw())
        stage 1  F0 F1 .. .. B0--- F2 B1--- .. B2---
        stage 2  .. F0 B0--- F1 B1--- F2 B2--- .. ..
        """
        begun, end = self.played(), round(self.length())
        width = 1 + len(str(self.num_microbatches - 1))
        lines = []
        for number, stage in enumerate(begun, 1):
            cells, now = [], 0
            for task, start in sorted(stage.items(), key=lambda item: item[1]):
                cells += ["." * width] * round(start - now)
                units = _UNITS[task.kind]
                text = f"{task.kind[0].upper()}{task.microbatch}"
                cells.append(text.ljust(width if units == 1 else units * (width + 1) - 1, " " if units == 1 else "-"))
                now = round(start) + units
            cells += ["." * width] * (end - now)
            lines.append(f"stage {number}  {' '.join(cells)}")
        return "\n".join(lines)


def plan_schedule(kind: str, num_stages: int, num_microbatches: int) -> Schedule:
    """Returns the table of one of `SCHEDULES`.

    Args:
      kind: "1f1b" or "gpipe".
      num_stages: Number of stages, at least 1.
      num_microbatches: Number of microbatches, at least 1.

    Raises:
      ConfigurationError: If `kind` is another schedule, or a number is too small.

    >>> [task.microbatch for task in plan_schedule("gpipe", 2, 2).tasks[1]]
    [0, 1, 0, 1]
    """
    if kind not in SCHEDULES:
        raise ConfigurationError(f"`schedule` is {kind!r}, not one of {SCHEDULES}.")
    for name, number in (("num_stages", num_stages), ("num_microbatches", num_microbatches)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ConfigurationError(f"`{name}` is {number!r}, not an integer of at least 1.")
    table = []
    for stage in range(num_stages):
        ahead = num_microbatches if kind == "gpipe" else min(num_stages - 1 - stage, num_microbatches)
        tasks = [Task(FORWARD, m) for m in range(ahead)]
        for m in range(num_microbatches):
            if m + ahead < num_microbatches:
                tasks.append(Task(FORWARD, m + ahead))
            tasks.append(Task(BACKWARD, m))
        table.append(tuple(tasks))
    return Schedule(num_microbatches, tuple(table))
