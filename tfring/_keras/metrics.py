"""Finds the metrics of a step, and the logs that are their results.

A metric's state is summed over replicas, but its result is not: the root of a mean is not the mean of roots. The step
therefore notes which of the values it returned are results, and these are computed again from the sums.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfring import step
from tfring._keras.layers import all_layers
from tfring._keras.losses import undivided_loss
from tfring._keras.seam import seam
from tfring._keras.state import held_by
from tfring.cross_device_ops import values_of
from tfring.runtime import Ring
from tfring.step import graphs


def install() -> None:
    import keras

    @seam(keras.metrics.Mean, "update_state")
    def mean_of_numbers(original: Callable[..., Any], self: Any, values: Any, sample_weight: Any = None) -> Any:
        """Weights a number by the share in a step of a replica's own rows, so that all replicas count as one batch."""
        running, values = step.current_own_rows_step(), undivided_loss(values)
        if running is not None and sample_weight is None and tf.is_tensor(values) and values.shape.rank == 0:
            sample_weight = running.weigh(tf.ones([], self.dtype))
        return original(self, values, sample_weight=sample_weight)


def values_of_results(results: dict) -> dict:
    """Returns results of an epoch, in which the values of variables replace those results that are variables."""
    import keras

    variables = {name: v for name, v in results.items() if isinstance(v, keras.Variable)}
    return {**results, **{name: tf.convert_to_tensor(v.value) for name, v in variables.items()}}


def metrics_of(model: Any) -> list:
    """Returns every metric that a model, its layers and its other metrics hold, each once."""
    found: dict = {}

    def add(metrics: Iterable[Any]) -> None:
        for metric in metrics:
            if metric is not None and id(metric) not in found:
                found[id(metric)] = metric
                add(getattr(metric, "metrics", ()))  # those that `compile` was given
                add(metric._metrics)

    add([model._loss_tracker, model._compile_metrics])
    if model._compile_loss is not None:
        add(model._compile_loss.metrics)
    for layer in all_layers(model):
        add(layer._metrics)
    add(model.metrics)
    return list(found.values())


class Source(NamedTuple):
    """The metric that returned a value as its result, and the position of the value in that result."""

    metric: Any
    position: int


class Results:
    """Notes what the metrics of a model return from `result` while a step is traced or run."""

    def __init__(self, model: Any) -> None:
        self._metrics = metrics_of(model)
        self._found: dict = {}

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Notes results inside the context."""
        try:
            for metric in self._metrics:
                vars(metric)["result"] = self._noting(metric, metric.result)
            yield
        finally:
            for metric in self._metrics:
                vars(metric).pop("result", None)

    def _noting(self, metric: Any, result: Callable[[], Any]) -> Callable[[], Any]:
        def noting() -> Any:
            moment = _ResultSnapshot(metric)
            value = result()
            moment.end()
            for position, leaf in enumerate(tf.nest.flatten(value)):
                # A metric made of others may return their results: the metric that first returned one computes it.
                self._found.setdefault(id(leaf), (leaf, Source(metric, position), moment))
            return value

        return noting

    def sources(self, outputs: Any) -> list[Source | None]:
        """Returns for each value of `outputs` its Source if it is the result of a metric and still valid, or None."""
        found = [self._found.get(id(leaf)) for leaf in tf.nest.flatten(outputs)]
        return [None if each is None or not each[2].lasts() else each[1] for each in found]


class _ResultSnapshot:
    """The computation of a metric's result. The step may afterwards write the variables that it has read."""

    def __init__(self, metric: Any) -> None:
        self._metric = metric
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        self._state: list[int] = []  # in eager mode: number of writes to each of its variables
        self._handles: list | None = None  # in a graph
        self._number = 0 if self._graph is None else len(self._graph.get_operations())

    def end(self) -> None:
        """Notes what the result was computed from."""
        if self._graph is None:
            self._state = self._writes()
        else:
            self._handles = graphs.handles_read(self._graph.get_operations()[self._number :])
            self._number = len(self._graph.get_operations())

    def lasts(self) -> bool:
        """Returns True if the result would be the same now."""
        if self._graph is None:
            return self._state == self._writes()
        after = self._graph.get_operations()[self._number :]
        return self._handles is not None and not graphs.writes_any(after, self._handles)

    def _writes(self) -> list[int]:
        running = step.current()
        return [] if running is None else [running.writes[id(variable)] for variable in self._metric.variables]


def is_sync_on_read(variable: Any) -> bool:
    """Returns True if each replica has its own value of a variable, and reading the variable combines them."""
    held = held_by(variable)
    is_distributed = isinstance(held, tf.distribute.DistributedValues)
    return is_distributed and held.synchronization == tf.VariableSynchronization.ON_READ


def local_state(ring: Ring, variable: Any) -> tf.Tensor | None:
    """Returns what this worker adds to a metric's variable over all replicas; None if all hold the same already.

    A boolean is summed as a number, as there is no sum of booleans.
    """
    if not is_sync_on_read(variable):
        return None
    value = held_by(variable)
    copies = [tf.convert_to_tensor(copy) for copy in values_of(value)]
    copies = [tf.cast(copy, tf.int32) if copy.dtype == tf.bool else copy for copy in copies]
    if value.aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA:
        return copies[0] if ring.control.rank == 0 else tf.zeros_like(copies[0])
    total = copies[0] if len(copies) == 1 else tf.add_n(copies)
    if value.aggregation == tf.VariableAggregation.MEAN:
        return total / tf.cast(ring.num_replicas, total.dtype)
    return total


@contextlib.contextmanager
def summed_metric_state(ring: Ring, metrics: Sequence[Any]) -> Iterator[None]:
    """Makes variables of metrics read as the sums over all replicas, which take one collective per dtype in total."""
    import keras

    variables = {id(v): v for metric in metrics for v in metric.variables}
    state = [(v, local_state(ring, v)) for v in variables.values()]
    state = [(v, value) for v, value in state if value is not None]
    values = [value for _, value in state]
    totals = ring.control_ops.sum_over_workers(values, name="state of metrics") if values else []
    mapping = [(v, tf.cast(total, v.dtype)) for (v, _), total in zip(state, totals, strict=True)]
    with keras.StatelessScope(state_mapping=mapping, initialize_variables=False):
        yield


def compute_results(state: list[tuple], sources: list[Source]) -> list[tf.Tensor]:
    """Returns the values of `sources`, with `(variable, value)` in place of what the variables hold here."""
    import keras

    computed: dict = {}
    with keras.StatelessScope(state_mapping=state, initialize_variables=False):
        for metric, _ in sources:
            if id(metric) not in computed:
                leaves = tf.nest.flatten(metric.result())
                computed[id(metric)] = [tf.convert_to_tensor(leaf) for leaf in leaves]
    return [computed[id(metric)][position] for metric, position in sources]
