"""Plans the layers with which the stages of a pipeline begin. Pure: from the cost of each layer.

```
layer     a    b    c │  d    e    f         cut before d each stage takes 7 ms,
ms        2    3    2 │  4    1    2         before c or e one of them 9 or 11
          ─ stage 1 ──┴─ stage 2 ──
```

Makes two searches, each exact, by dynamic programming over the ends of stages. The first finds how fast the slowest
stage can be. The second finds, among all plans about as fast, the one with the fewest bytes that cross between stages.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tfring.errors import ConfigurationError
from tfring.reduction.pipeline_schedule import Schedule, plan_schedule


@dataclasses.dataclass(frozen=True)
class LayerCost:
    """The cost of one call of a layer, for a microbatch.

    Attributes:
      name: Name of the layer.
      seconds: Seconds of its forward and backward pass.
      weight_bytes: Bytes of its weights, their gradients and their slots. Defaults to 0.
      activation_bytes: Bytes that it keeps from a forward pass for the backward pass. Defaults to 0.
      crossing_bytes: Bytes of the tensors that are made before the layer and used by it or after it, which a stage that
        begins with it receives. Defaults to 0.
      may_begin: Whether a stage may begin with it. Defaults to True.
    """

    name: str
    seconds: float
    weight_bytes: int = 0
    activation_bytes: int = 0
    crossing_bytes: int = 0
    may_begin: bool = True


@dataclasses.dataclass(frozen=True)
class PlannedStage:
    """One stage of a plan.

    Attributes:
      layers: The names of its layers, in order.
      forward_seconds: Seconds of the forward pass of a microbatch.
      backward_seconds: Seconds of the backward pass of a microbatch, with the forward pass if it is computed again.
      bytes_a_worker: Bytes of its weights, gradients and slots, and the most that it keeps of microbatches.
      crossing_bytes: Bytes that it receives per microbatch. The same number goes back in the backward pass.
    """

    layers: tuple[str, ...]
    forward_seconds: float
    backward_seconds: float
    bytes_a_worker: int
    crossing_bytes: int

    @property
    def seconds(self) -> float:
        """Returns the seconds of both passes of a microbatch."""
        return self.forward_seconds + self.backward_seconds


@dataclasses.dataclass(frozen=True)
class StagePlan:
    """The stages of a pipeline; `str(plan)` is a table of them.

    Attributes:
      stages: The stages, in order.
      schedule: The order in which they compute microbatches.
    """

    stages: tuple[PlannedStage, ...]
    schedule: Schedule

    @property
    def begins(self) -> list[str]:
        """Returns the names of the layers with which the second stage begins, the third, and so on."""
        return [stage.layers[0] for stage in self.stages[1:]]

    @property
    def seconds(self) -> float:
        """Returns the seconds of the passes of a step, without communication and the update."""
        return self.schedule.length(self._durations)

    @property
    def bubble(self) -> float:
        """Returns the share of the time in which stages are idle, including waits for slower stages."""
        return self.schedule.bubble(self._durations)

    @property
    def _durations(self) -> list[tuple[float, float]]:
        return [(stage.forward_seconds, stage.backward_seconds) for stage in self.stages]

    def __str__(self) -> str:
        total = sum(stage.seconds for stage in self.stages)
        lines = [("stage", "layers", "ms", "share", "MB", "MB in")]
        for number, stage in enumerate(self.stages, 1):
            first, last = stage.layers[0], stage.layers[-1]
            layers = first if len(stage.layers) == 1 else f"{first} to {last}"
            share = f"{100 * stage.seconds / total:.0f} %" if total else ""
            held, into = f"{stage.bytes_a_worker / 1e6:,.1f}", f"{stage.crossing_bytes / 1e6:,.2f}"
            lines.append((str(number), layers, f"{stage.seconds * 1e3:,.2f}", share, held, into if number > 1 else ""))
        w = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = [
            f"{n:>{w[0]}}  {layers:<{w[1]}}  {ms:>{w[2]}}  {share:>{w[3]}}  {held:>{w[4]}}  {into:>{w[5]}}".rstrip()
            for n, layers, ms, share, held, into in lines
        ]
        text.append(
            f"a step of {self.schedule.num_microbatches} microbatches: {self.seconds * 1e3:,.2f} ms, "
            f"{100 * self.bubble:.0f} % idle; {100 * self.schedule.bubble():.0f} % with stages of equal length"
        )
        return "\n".join(text)


def plan_stages(
    layers: Sequence[LayerCost],
    num_stages: int,
    *,
    num_microbatches: int = 8,
    schedule: str = "1f1b",
    recompute: bool = False,
    memory_bytes: int | None = None,
    slack: float = 0.05,
) -> StagePlan:
    """Divides the layers of a model into stages of a pipeline, so that the slowest stage is as fast as possible.

    A pure function without communication: every rank computes the same plan from the same costs. A backward pass counts
    as two forward passes. The memory of a worker is that of its stage's weights with gradients and slots and, for each
    microbatch that the schedule lets it hold, of its inputs and what its layers keep. With `recompute`, what the layers
    keep counts for one microbatch only. The rows of the batch and the memory that TensorFlow uses are not counted.

    Args:
      layers: The costs of the layers, in the order of the model; `tfring.parallel.measure_layers` measures them.
      num_stages: Number of stages, at least 1.
      num_microbatches: See `tfring.parallel.Pipeline`. Defaults to 8.
      schedule: See `tfring.parallel.Pipeline`. Defaults to "1f1b".
      recompute: See `tfring.parallel.Pipeline`. All stages except the last compute the forward pass twice, and so get
        fewer layers. Defaults to False.
      memory_bytes: Memory of a worker in bytes. Defaults to None: no limit.
      slack: Additional time of the slowest stage, as a share of the shortest possible, that is allowed if fewer bytes
        then cross from stage to stage. Defaults to 0.05, about the random variation of measured times.

    Returns:
      A `StagePlan`, for `tfring.parallel.Pipeline(model, plan.begins, ...)`.

    Raises:
      ConfigurationError: If the layers cannot begin that number of stages, no plan fits into `memory_bytes`, or `slack`
        is negative.

    >>> milliseconds = {"a": 2, "b": 3, "c": 2, "d": 4, "e": 1, "f": 2}
    >>> layers = [LayerCost(name, ms / 1e3, 4_000_000, 100_000, 50_000) for name, ms in milliseconds.items()]
    >>> plan = plan_stages(layers, 2)
    >>> plan.begins
    ['d']
    >>> print(plan)
    stage  layers    ms  share    MB  MB in
        1  a to c  7.00   50 %  12.6
        2  d to f  7.00   50 %  12.3   0.05
    a step of 8 microbatches: 63.00 ms, 11 % idle; 11 % with stages of equal length
    """
    table = plan_schedule(schedule, num_stages, num_microbatches)
    if not slack >= 0:
        raise ConfigurationError(
            f"`slack` is {slack!r}, not a number of at least 0 (a share of the least possible time)."
        )
    costs = _Costs(tuple(layers), table, recompute)
    cuts = [place for place, layer in enumerate(layers) if place and layer.may_begin]
    if not layers or len(cuts) < num_stages - 1:
        names = ", ".join(repr(layers[place].name) for place in cuts)
        raise ConfigurationError(
            f"`num_stages` is {num_stages}, but only {len(cuts)} layers may begin a stage after the first: "
            f"{names or 'none'}."
        )
    places = [0, *cuts, len(layers)]

    def seconds_of(stage: int, begin: int, end: int) -> float:
        fits = memory_bytes is None or costs.bytes(stage, begin, end) <= memory_bytes
        return costs.seconds(stage, begin, end) if fits else math.inf

    def slowest(before: Sequence[float], stage: int, begin: int, end: int) -> tuple[float, ...]:
        return (max(before[0], seconds_of(stage, begin, end)),)

    def fewest_bytes(before: Sequence[float], stage: int, begin: int, end: int) -> tuple[float, ...]:
        into = costs.layers[begin].crossing_bytes if stage else 0
        seconds = max(before[1], seconds_of(stage, begin, end))
        return before[0] + into if seconds <= limit else math.inf, seconds

    def largest(before: Sequence[float], stage: int, begin: int, end: int) -> tuple[float, ...]:
        return (max(before[0], costs.bytes(stage, begin, end)),)

    (seconds,), _ = _least(slowest, (0.0,), num_stages, places)
    if seconds == math.inf:
        _, begins = _least(largest, (0,), num_stages, places)
        raise ConfigurationError(
            f"No plan fits memory_bytes={memory_bytes:,}; the plan that needs least is\n{costs.plan(begins)}\nUse more "
            'stages, recompute=True, schedule="1f1b", microbatches of fewer rows, or an optimizer with fewer slots.'
        )
    limit = seconds * (1 + slack)
    _, begins = _least(fewest_bytes, (0, 0.0), num_stages, places)
    return costs.plan(begins)


class _Costs:
    """The costs of stages, each of `layers[begin:end]`."""

    def __init__(self, layers: tuple[LayerCost, ...], schedule: Schedule, recompute: bool) -> None:
        def summed(values: Iterable[Any]) -> list[Any]:
            return list(itertools.accumulate(values, initial=0))

        self.layers = layers
        self._schedule = schedule
        self._recompute = recompute
        self._held = schedule.most_held()
        # Stages that compute forward passes twice; the last computes them once, at the backward pass.
        self._twice = range(schedule.num_stages - 1) if recompute else range(0)
        self._seconds = summed(layer.seconds for layer in layers)
        self._weights = summed(layer.weight_bytes for layer in layers)
        self._activations = summed(layer.activation_bytes for layer in layers)

    def seconds(self, stage: int, begin: int, end: int) -> float:
        seconds = self._seconds[end] - self._seconds[begin]
        return seconds + seconds / 3 if stage in self._twice else seconds

    def passes(self, stage: int, begin: int, end: int) -> tuple[float, float]:
        """Returns the seconds of a forward and a backward pass."""
        seconds = self.seconds(stage, begin, end)
        if not self._recompute:
            return seconds / 3, 2 * seconds / 3
        return (seconds / 4, 3 * seconds / 4) if stage in self._twice else (0.0, seconds)

    def bytes(self, stage: int, begin: int, end: int) -> int:
        held = self._held[stage]
        into = self.layers[begin].crossing_bytes if begin else 0
        kept = self._activations[end] - self._activations[begin]
        return self._weights[end] - self._weights[begin] + held * into + (1 if self._recompute else held) * kept

    def plan(self, begins: Sequence[int]) -> StagePlan:
        stages = [
            PlannedStage(
                tuple(layer.name for layer in self.layers[begin:end]),
                *self.passes(stage, begin, end),
                self.bytes(stage, begin, end),
                self.layers[begin].crossing_bytes if begin else 0,
            )
            for stage, (begin, end) in enumerate(itertools.pairwise([*begins, len(self.layers)]))
        ]
        return StagePlan(tuple(stages), self._schedule)


def _least(cost: Callable, nothing: tuple, num_stages: int, places: Sequence[int]) -> tuple[tuple, tuple[int, ...]]:
    """Returns the division with the least cost, and among equal ones the one whose stages begin first.

    Args:
      cost: A function of `(cost of the previous stages, number of the stage, its begin, its end)` that never decreases
        when the cost of the previous stages increases.
      nothing: The cost of no stage.
      num_stages: Number of stages.
      places: The places where stages may begin or end, in order. The first stage begins at the first place, the last
        stage ends at the last.

    Returns:
      The cost of the division, and the places where its stages begin.
    """
    found: dict[int, tuple[tuple, tuple[int, ...]]] = {places[0]: (nothing, ())}  # by the end of the stages so far
    for stage in range(num_stages):
        behind = num_stages - 1 - stage  # stages that still need a place each
        ends = places[stage + 1 : len(places) - behind] if behind else places[-1:]
        found = {
            end: min(
                (cost(before, stage, begin, end), (*begins, begin))
                for begin, (before, begins) in found.items()
                if begin < end
            )
            for end in ends
        }
    return found[places[-1]]
