"""Computes logs over all rows, with the same bits on every rank, from what the steps of replicas returned.

| returned | becomes |
|---|---|
| the result of a metric | its result from the state of all replicas |
| the value of a variable that the step wrote | its value after the step, the same on all replicas |
| a number, or several in a fixed shape | unchanged if all replicas returned the same, otherwise the mean by rows |
| a value for each row | the values of all rows, in order |
| anything else, such as strings and unknown shapes | as in one process; in a step of own rows, this worker's value |

Sums of states and the numbers of each replica are sent in one collective per dtype, with the state that the step wrote
or, if they depend on it, after it; results that are formulas, such as AUC and F1, in one more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfring import _tf, partition, step
from tfring._keras import whole
from tfring._keras.exactness import declared_layers
from tfring._keras.losses import undivided_loss
from tfring._keras.metrics import Results, Source, compute_results, is_sync_on_read, local_state
from tfring._keras.state import Written, held_by
from tfring.cross_device_ops import values_of
from tfring.runtime import Ring
from tfring.step import Way, graphs

_ALL_ROWS = object()  # in place of a source: aggregated within the step


class Holder(NamedTuple):
    """A variable that the step wrote, in place of a source.

    Attributes:
      variable: The variable.
      is_in_parts: Whether each replica holds a part of its value.
    """

    variable: Any
    is_in_parts: bool


class Logs:
    """The logs of one step function.

    Args:
      model: The Keras model.
      ring: The workers.
    """

    def __init__(self, model: Any, ring: Ring) -> None:
        self._model = model
        self._ring = ring
        # For the values that the step returned when it was last traced or run:
        self._sources: list = []
        self._variables: list = []  # the variables among them
        self._numbers: list[int] = []  # positions of values that become one number over all replicas

    def run_and_classify(
        self,
        run: Callable[..., tuple[Any, list[Written]]],
        step: Callable[[Any], Any],
        rows: Sequence[Any],
        way: Way,
    ) -> tuple[Any, list[Written]]:
        """Runs a step on each replica. In what it returned, values for each row are those of all rows.

        Args:
          run: A function that calls another on each replica: `outputs, rest = run(fn)`.
          step: Keras' step, one batch in, logs out.
          rows: Number of rows of each replica of this worker, None if unknown.
          way: Way in which the steps of replicas become that of one process. After EDITED, `with_all_rows` follows.
        """
        results = Results(self._model)

        def noting(element: Any) -> Any:
            outputs = step(element)
            self._sources = results.sources(outputs)
            self._variables = [leaf if _is_variable(leaf) else None for leaf in tf.nest.flatten(outputs)]
            return tf.nest.map_structure(lambda value: _counted(_plain(value)), outputs)

        with results.noted(), declared_layers(self._model, way):
            outputs, written = run(noting)
        self._note_variables(outputs, written)
        if way is Way.OWN:
            outputs = self.with_all_rows(outputs, rows)
        leaves = [values_of(leaf)[0] for leaf in tf.nest.flatten(outputs)]
        self._numbers = [i for i, source in enumerate(self._sources) if source is None and _is_number(leaves[i])]
        if way is Way.WHOLE:
            outputs = self._first_replica_outputs(outputs)
        return self._marked(outputs, way is Way.EDITED), written

    def _first_replica_outputs(self, outputs: Any) -> Any:
        """Returns the outputs of a step of the whole batch. Those without a source are the first replica's."""
        leaves = tf.nest.flatten(outputs)
        for i, leaf in enumerate(leaves):
            value = values_of(leaf)[0]
            if self._sources[i] is None and i not in self._numbers and isinstance(value, tf.Tensor):
                leaves[i] = whole.broadcast_first(self._ring, value)
        return tf.nest.pack_sequence_as(outputs, leaves)

    def _marked(self, outputs: Any, is_edited: bool) -> Any:
        """Returns outputs in which the numbers of replicas, which become their mean, and their rows are marked."""
        leaves = tf.nest.flatten(outputs)
        keys = sorted(outputs) if isinstance(outputs, dict) and len(outputs) == len(leaves) else None
        expected = dict.fromkeys(self._numbers, "mean")
        if is_edited:
            for i, leaf in enumerate(leaves):
                if self._sources[i] is None and i not in expected:
                    expected[i] = "concatenated" if _may_be_rows(values_of(leaf)[0]) else "same"
        for i, what in expected.items():
            name = f"the log {keys[i]!r}" if keys else "what the step returns"
            marked = []
            for replica, value in enumerate(values_of(leaves[i])):
                with partition.replica(replica, is_scoped=True):
                    marked.append(_expect(value, what, name))
            leaves[i] = marked[0] if len(marked) == 1 else _tf.distribute_utils.regroup(tuple(marked))
        return tf.nest.pack_sequence_as(outputs, leaves)

    def _note_variables(self, outputs: Any, written: Sequence[Written]) -> None:
        """Notes which values are those of variables that the step wrote before: they still differ between replicas."""
        variables = {id(held_by(w.variable)): w for w in written}
        for i, leaf in enumerate(tf.nest.flatten(outputs)):
            if self._sources[i] is not None or not variables:
                continue
            variable = self._variables[i]
            if variable is not None:
                found = variables.get(id(held_by(variable)))
            else:
                leaf = values_of(leaf)[0]
                found = next((w for w in variables.values() if graphs.is_last_value(leaf, held_by(w.variable))), None)
            if found is not None:
                self._sources[i] = Holder(found.variable, is_sync_on_read(found.variable))

    def read(self, written: Sequence[Written]) -> bool:
        """Returns True if the values that the step returned are computed from variables that it wrote."""
        variables = {id(w.variable) for w in written}
        of_metrics = {id(v) for s in self._sources if isinstance(s, Source) for v in s.metric.variables}
        return bool(variables & of_metrics) or any(isinstance(s, Holder) for s in self._sources)

    def with_all_rows(self, outputs: Any, rows: Sequence[Any], shares: tf.Tensor | None = None) -> Any:
        """Returns outputs in which values for each row are those of all rows.

        Args:
          outputs: The outputs of replicas.
          rows: See `run_and_classify`.
          shares: float64 `[replicas_per_worker]`, the shares of the batch. None if padding rows were dropped.
        """
        if self._ring.num_replicas == 1 or any(n is None for n in rows):
            return outputs
        leaves = tf.nest.flatten(outputs)
        for i, leaf in enumerate(leaves):
            values = values_of(leaf)
            if shares is not None and _may_be_rows(values[0]):
                values = [v[: tf.where(shares[r] > 0, tf.shape(v)[0], 0)] for r, v in enumerate(values)]
            if self._sources[i] is None and _may_be_rows(values[0]):
                leaves[i] = self._gather_or_average(values, rows)
                self._sources[i] = _ALL_ROWS
        return tf.nest.pack_sequence_as(outputs, leaves)

    def _gather_or_average(self, values: Sequence[tf.Tensor], rows: Any) -> tf.Tensor:
        """Returns all rows in order; or the mean by rows, if sizes are the same everywhere but not those of rows."""
        sizes = [tf.stack([tf.shape(v)[0], tf.cast(n, tf.int32)]) for v, n in zip(values, rows, strict=True)]
        everyone = self._ring.control.gather_equal(tf.stack(sizes), name="sizes of logs")
        together = self._ring.control_ops.gather_over_workers(tf.concat(values, 0), 0, name="logs")
        sizes, rows = everyone[:, 0], everyone[:, 1]

        def mean() -> tf.Tensor:
            each = tf.reshape(together, tf.concat([[tf.size(sizes), sizes[0]], tf.shape(together)[1:]], 0))
            weights = tf.cast(rows, tf.float64) / tf.cast(tf.reduce_sum(rows), tf.float64)
            return _common_or_mean(each, weights)

        alike = tf.reduce_all(sizes == sizes[0])
        return tf.cond(tf.reduce_all(sizes == rows) | ~alike, lambda: together, mean)

    def pending_reduction(self, outputs: Any, shares: tf.Tensor) -> tuple:
        """Prepares the reduction of the logs of a batch.

        Args:
          outputs: The result of `run_and_classify`.
          shares: float64 `[replicas_per_worker]`, rows of each replica divided by the rows of the batch.

        Returns:
          The values that this worker adds to the sums over all workers, and a function that turns these sums into the
          logs: the structure of `outputs` with one tensor per leaf.
        """
        leaves = [values_of(leaf) for leaf in tf.nest.flatten(outputs)]
        logs = [values[0] for values in leaves]
        if self._ring.num_replicas == 1:
            return [], lambda _: tf.nest.pack_sequence_as(outputs, logs)
        for i, source in enumerate(self._sources):
            if isinstance(source, Holder) and not source.is_in_parts:
                value = tf.convert_to_tensor(values_of(held_by(source.variable))[0])
                logs[i] = tf.reshape(tf.cast(value, logs[i].dtype), logs[i].shape)
        results = [i for i, source in enumerate(self._sources) if isinstance(source, Source)]
        held = {i: s.variable for i, s in enumerate(self._sources) if isinstance(s, Holder) and s.is_in_parts}
        state = self._local_state([self._sources[i].metric for i in results], held.values())
        packed = self._packed([leaves[i] for i in self._numbers], shares)

        def finish(totals: Sequence[tf.Tensor]) -> Any:
            numbers = dict(zip(packed, totals, strict=False))
            everywhere = [
                (v, tf.cast(total, v.dtype)) for (v, _), total in zip(state, totals[len(packed) :], strict=True)
            ]
            for i, variable in held.items():
                logs[i] = tf.reshape(next(total for v, total in everywhere if v is variable), logs[i].shape)
            values = compute_results(everywhere, [self._sources[i] for i in results])
            for i, value in zip(results, self._use_rank_0_bits(values, everywhere), strict=True):
                logs[i] = value
            for i, value in zip(self._numbers, _unpacked(numbers, [logs[i] for i in self._numbers]), strict=True):
                logs[i] = value
            return tf.nest.pack_sequence_as(outputs, logs)

        return [*packed.values(), *(value for _, value in state)], finish

    def _local_state(self, metrics: Sequence[Any], others: Iterable[Any]) -> list[tuple]:
        variables = {id(v): v for v in [*(v for metric in metrics for v in metric.variables), *others]}
        state = [(v, local_state(self._ring, v)) for v in variables.values()]
        return [(v, value) for v, value in state if value is not None]

    def _use_rank_0_bits(self, values: Sequence[Any], state: Sequence[tuple[Any, tf.Tensor]]) -> Sequence[Any]:
        """Returns rank 0's values of results that are formulas: ranks may order a graph's operations differently."""
        inputs = {id(total) for _, total in state}
        formulas = [i for i, value in enumerate(values) if _is_number(value) and _is_formula(value, inputs)]
        if not formulas:
            return values
        flat = [tf.reshape(tf.cast(values[i], tf.float64), [-1]) for i in formulas]
        [sent] = self._ring.control.broadcast([tf.concat(flat, 0)], name="results of metrics")
        values = list(values)
        for i, part in zip(formulas, tf.split(sent, [f.shape[0] for f in flat]), strict=True):
            values[i] = tf.reshape(tf.cast(part, values[i].dtype), values[i].shape)
        return values

    def _packed(self, numbers: Sequence[Sequence[tf.Tensor]], shares: tf.Tensor) -> dict:
        """Returns `[replicas, 1 + numbers]` by dtype: the share and numbers of each replica, 0 for other workers."""
        before = self._ring.first_replica
        after = self._ring.num_replicas - before - len(self._ring.devices)
        columns: dict = {}
        for values in numbers:
            dtype = _sent_as(values[0].dtype)
            share = tf.cast(shares, dtype)[:, None]
            flat = tf.stack([tf.reshape(tf.cast(v, dtype), [-1]) for v in values])
            columns.setdefault(dtype, [share]).append(flat)
        return {dtype: tf.pad(tf.concat(c, 1), [[before, after], [0, 0]]) for dtype, c in columns.items()}


def _unpacked(packed: dict, likes: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the logs from the result of `_packed`, summed over workers, in the dtypes and shapes of `likes`."""
    place = dict.fromkeys(packed, 1)
    logs = []
    for like in likes:
        dtype = _sent_as(like.dtype)
        begin, size = place[dtype], like.shape.num_elements()
        place[dtype] = begin + size
        weights = tf.cast(packed[dtype][:, 0], tf.float64)
        value = _common_or_mean(packed[dtype][:, begin : begin + size], weights)
        logs.append(tf.reshape(tf.cast(value, like.dtype), like.shape))
    return logs


def _common_or_mean(each: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    """Returns the mean of `each[replica]`; a value that is the same on all replicas with a weight stays bit for bit."""
    shape = tf.concat([tf.shape(weights), tf.ones_like(tf.shape(each)[1:])], 0)
    weights = tf.reshape(weights, shape)
    first = each[tf.argmax(tf.reshape(weights, [-1]) > 0)]
    same = tf.reduce_all((each == first) | (weights <= 0), 0)
    wide = tf.math.multiply_no_nan(tf.cast(each, tf.float64), weights)
    mean = tf.math.divide_no_nan(tf.reduce_sum(wide, 0), tf.reduce_sum(weights))
    if not each.dtype.is_floating:
        mean = tf.round(mean)
    return tf.where(same, first, tf.cast(mean, each.dtype))


def _sent_as(dtype: tf.DType) -> tf.DType:
    """Returns a dtype that workers can exchange and that holds every value of `dtype` (of int64, those up to 2^53)."""
    if dtype in (tf.float32, tf.float64):
        return dtype
    return tf.float32 if dtype.is_floating else tf.float64


def _is_number(value: Any) -> bool:
    if not tf.is_tensor(value) or not isinstance(value, tf.Tensor) or not value.shape.is_fully_defined():
        return False
    return value.dtype.is_floating or value.dtype.is_integer or value.dtype == tf.bool


def _is_formula(value: tf.Tensor, inputs: set[int]) -> bool:
    """Returns True if a graph needs more than one operation on several values to compute a value from `inputs`."""
    if tf.executing_eagerly():
        return False  # operations run in program order
    todo, seen, operations = [value], set(), 0
    while todo:
        tensor = todo.pop()
        if id(tensor) in inputs or tensor.op.name in seen:
            continue
        seen.add(tensor.op.name)
        operations += len(tensor.op.inputs) > 1
        todo.extend(tensor.op.inputs)
    return operations > 1


def _is_variable(value: Any) -> bool:
    import keras

    return isinstance(value, (keras.Variable, tf.Variable))


def _expect(value: Any, what: str, name: str) -> Any:
    """Returns a value marked with what the step treats it as; if it has several tensors, each is marked."""
    if not tf.is_tensor(value):
        return value
    parts = [
        part if part.dtype in (tf.variant, tf.resource) else partition.expect(part, what, name)
        for part in tf.nest.flatten(value, expand_composites=True)
    ]
    return tf.nest.pack_sequence_as(value, parts, expand_composites=True)


def _may_be_rows(value: Any) -> bool:
    """Returns True if a value may have one entry per row."""
    if not isinstance(value, tf.Tensor) or value.dtype == tf.string or not value.shape.rank:
        return False
    return value.shape[0] is None or tf.executing_eagerly()


def _counted(value: Any) -> Any:
    """Returns values of rows without the padding row, which does not count; any other value as it is."""
    running = step.current_own_rows_step()
    return running.drop_if_empty(value) if running is not None and _may_be_rows(value) else value


def _plain(value: Any) -> Any:
    """Returns values of Python and NumPy, and variables such as a learning rate, as tensors."""
    import keras

    kinds = (bool, int, float, str, bytes, np.ndarray, np.generic, keras.Variable, tf.Variable, tf.IndexedSlices)
    return tf.convert_to_tensor(value) if isinstance(value, kinds) else undivided_loss(value)
