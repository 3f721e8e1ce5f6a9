"""Aggregates the state that a step writes on each replica, such as moving statistics, at the end of the step.

Keras keeps a BatchNormalization's moving mean in a mirrored variable that each replica writes for itself, so that
ranks evaluate and save different models. Here the step notes what its replicas wrote to variables of Keras and of
TensorFlow, and afterwards each such variable has one value on all ranks. In an edited step it is the value that one
process writes, in a step of the whole batch that of the first replica. In a step of each replica's own rows:

| written | becomes |
|---|---|
| aggregation "sum": `assign_add`, `assign` | the old value plus all increments; the sum of the values |
| aggregation "mean", "only_first_replica" | the mean, weighted by rows; the first replica's |
| floats without aggregation | the mean, weighted by rows |
| integers and booleans without aggregation: `assign_add` | the old value plus all increments |
| integers and booleans without aggregation: `assign` | kept if all wrote the same; otherwise an error |
| state of a metric | summed when it is read |

A moving average is linear in the values that it averages, so the mean of moving averages is the moving average of the
mean. A replica without rows has NaN statistics and no weight. TensorFlow variables with an aggregation follow
TensorFlow's own rules, with means weighted by rows.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfring import _tf, partition, step
from tfring._keras import exactness
from tfring._keras.layers import all_layers, objects_in
from tfring.cross_device_ops import values_of
from tfring.errors import ConfigurationError
from tfring.runtime import Ring, current_ring, ring_of
from tfring.setting import setting

_EDITED, _SUMMED = "edited", "summed"  # instead of a rule, in an edited step: for all, or a replica's part
_local = threading.local()


class Written(NamedTuple):
    """A variable that a step wrote, and the rule that combines what replicas wrote."""

    variable: Any
    rule: str


class _RingTFVariable(_tf.distribute_values.DistributedVariable):
    """A variable of TensorFlow, such as `tf.Variable` makes in the scope of a RingStrategy."""

    def _update_replica(self, update_fn: Callable[..., Any], value: Any, **kwargs: Any) -> Any:
        """Writes the variable in a replica; in a step, by the rule that combines what replicas write."""
        running = step.weighing()
        ring = ring_of(self.distribute_strategy)
        if running is None and ring is not None and ring.num_replicas == 1:  # even if no replica can merge
            return update_fn(values_of(self)[0], value, **kwargs)
        by_tensorflow = getattr(_local, "is_by_tensorflow", False) or step.is_kept_by_replica(self)
        if running is None or by_tensorflow:
            return super()._update_replica(update_fn, value, **kwargs)
        is_read_as_one = self.synchronization == tf.VariableSynchronization.ON_READ
        if running.is_plain or is_read_as_one or self.aggregation == tf.VariableAggregation.NONE:
            return update_fn(_Copy(running, self), value, **kwargs)
        if isinstance(value, tf.IndexedSlices):
            return super()._update_replica(update_fn, value, **kwargs)
        if self.aggregation == tf.VariableAggregation.MEAN:  # TensorFlow's mean counts all replicas alike
            value = running.weigh(value) * tf.cast(self.distribute_strategy.ring.num_replicas, self.dtype)
        return super()._update_replica(update_fn, running.zero_if_empty(value), **kwargs)

    # As for a variable that is not distributed. TensorFlow's class does not convert to numbers, nor scalars to arrays.

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.array(self.numpy(), dtype=dtype)

    def __int__(self) -> int:
        return int(self.numpy())

    def __float__(self) -> float:
        return float(self.numpy())


class RingSyncOnReadVariable(_RingTFVariable, _tf.distribute_values.SyncOnReadVariable):
    """A variable of which each replica holds a part, or its own value, until it is read."""


class RingMirroredVariable(_RingTFVariable, _tf.distribute_values.MirroredVariable):
    """A variable with the same value on all replicas."""

    # TensorFlow's class cannot write by indices.

    def scatter_nd_update(self, indices: Any, updates: Any, name: str | None = None) -> Any:
        return self.assign(tf.tensor_scatter_nd_update(self, indices, updates), name=name)

    def scatter_nd_add(self, indices: Any, updates: Any, name: str | None = None) -> Any:
        return self.assign(tf.tensor_scatter_nd_add(self, indices, updates), name=name)

    def scatter_nd_sub(self, indices: Any, updates: Any, name: str | None = None) -> Any:
        return self.assign(tf.tensor_scatter_nd_sub(self, indices, updates), name=name)


def write(variable: Any, value: Any, assign: Callable[[Any], None]) -> None:
    """Writes a variable of Keras; in a step of a ring, by the rule that combines what replicas write.

    Args:
      variable: A variable of Keras.
      value: The value to write.
      assign: Keras' own assignment.
    """
    running = step.weighing()  # in a custom loop TensorFlow's rules hold
    if running is None and _reset(variable._value, value):
        return
    if running is None or current_ring() is None or tf.distribute.get_replica_context() is None:
        assign(value)
    elif step.is_written_alike(variable) or step.is_kept_by_replica(variable):
        if step.is_written_alike(variable):
            value = partition.expect(value, "same", f"the state {_name(variable)}")
        with setting(_local, "is_by_tensorflow", True):
            assign(value)
    else:
        _refuse_outside(variable)
        _write_own(running, variable, value, getattr(_local, "adding", None) is variable)


def made_by_keras() -> AbstractContextManager:
    """Notes that Keras makes the variables that are made inside the context."""
    return setting(_local, "is_of_keras", True)


def is_of_own_values(synchronization: Any, aggregation: Any) -> bool:
    """Returns True for a variable that is made now if each replica has a value of its own, which nothing aggregates.

    A variable of Keras without an aggregation, such as the state of a metric, is summed over replicas instead.
    """
    is_read_as_one = synchronization == tf.VariableSynchronization.ON_READ
    has_none = aggregation in (None, tf.VariableAggregation.NONE)
    return is_read_as_one and has_none and not getattr(_local, "is_of_keras", False)


def adding_to(variable: Any) -> AbstractContextManager:
    """Notes that writes to a variable of Keras inside the context add to it."""
    return setting(_local, "adding", variable)


def _reset(variable: Any, value: Any) -> bool:
    """Writes zeros, or integers, to every copy of a metric's state, and returns whether it did.

    TensorFlow takes a millisecond for each such variable: it divides the value by the number of replicas, and reads
    what it has written. An integer loses part of its value in the division: here the first replica gets all of it, and
    the others zeros.
    """
    if not isinstance(variable, tf.distribute.DistributedValues) or not tf.executing_eagerly():
        return False
    ring = ring_of(variable.distribute_strategy)
    if variable.synchronization != tf.VariableSynchronization.ON_READ or ring is None:
        return False
    is_sum_of_integers = variable.dtype.is_integer and variable.aggregation == tf.VariableAggregation.SUM
    if tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context():
        return False
    if not is_sum_of_integers and not _is_zero(value):
        return False
    value = tf.cast(value, variable.dtype)
    for number, copy in enumerate(values_of(variable)):
        is_first = number == 0 and ring.control.rank == 0
        copy.assign(value if is_first else tf.zeros_like(value), read_value=False)
    return True


class _Copy:
    """A replica's copy of a TensorFlow variable, with the methods by which TensorFlow writes it."""

    def __init__(self, running: step.Step, variable: Any) -> None:
        self._step, self._variable, self._own = running, variable, own_copy(variable)

    def assign(self, value: Any, use_locking: Any = None, name: Any = None, read_value: bool = True) -> Any:
        return self._write(value, False, read_value)

    def assign_add(self, value: Any, use_locking: Any = None, name: Any = None, read_value: bool = True) -> Any:
        return self._write(self._own + tf.cast(value, self._own.dtype), True, read_value)

    def assign_sub(self, value: Any, use_locking: Any = None, name: Any = None, read_value: bool = True) -> Any:
        return self._write(self._own - tf.cast(value, self._own.dtype), True, read_value)

    def _write(self, value: Any, adding: bool, read_value: bool) -> Any:
        _write_own(self._step, self._variable, value, adding)
        return self._own if read_value else None

    def __getattr__(self, name: str) -> Any:
        """Returns a `scatter_...` method, which writes rows by ids that differ from replica to replica."""
        rule = "mean"
        if self._step.is_plain:
            rule = "values" if self._step.is_whole else _EDITED
        self._step.written.append(Written(self._variable, rule))
        return getattr(self._own, name)


def _write_plainly(running: step.Step, variable: Any, value: Any) -> None:
    """Writes a copy in an edited or whole-batch step as one process would; for a metric's state, its part of a sum."""
    held = held_by(variable)
    own = own_copy(held)
    value = tf.cast(value, own.dtype)
    is_summed = held.aggregation not in (tf.VariableAggregation.MEAN, tf.VariableAggregation.ONLY_FIRST_REPLICA)
    is_part = held.synchronization == tf.VariableSynchronization.ON_READ and is_summed
    if running.is_whole and is_part:  # the first replica holds it
        own.assign(tf.where(running.active, value, own))
    elif running.is_whole:
        own.assign(value)
        running.written.append(Written(variable, "values"))
    elif exactness.is_own_statistic(variable):
        own.assign(value)
        running.written.append(Written(variable, "mean"))
    elif is_part:
        name = f"the state {_name(variable)}"
        if tf.compat.v1.get_default_graph() is running.graph:
            value = partition.expect(value, "sum", name)
        elif not _is_zero(value):  # in a body, which is not edited
            before = own.read_value()
            value = tf.where(running.active, partition.expect(value, "added", name, before), before)
        own.assign(value)
        running.written.append(Written(variable, _SUMMED))
    else:
        own.assign(value)
        running.written.append(Written(variable, _EDITED))


def edit_step_and_state(
    ring: Ring, written: Sequence[Written], edit: Callable[[], list]
) -> tuple[list, list[Written]]:
    """Edits the graph of a step, and makes what the step wrote the same on all replicas.

    Args:
      ring: The workers.
      written: A `Written` for every write of the step.
      edit: A function that edits the graph and returns operations after which exchanges have been made.

    Returns:
      The operations that `edit` returns, and the elements of `written` with a rule that `combine_writes` applies.

    Raises:
      WholeBatchRequired: If `edit` raises it.
    """
    variables = {id(w.variable): w.variable for w in written if w.rule == _EDITED}
    marks = []  # of the first replica: each variable, its value and its mark
    for replica in range(len(ring.devices)):
        with partition.replica(replica, is_scoped=True):
            for variable in variables.values():
                read = tf.identity(values_of(held_by(variable))[replica])
                mark = partition.expect(read, "same", f"the state {_name(variable)}")
                if replica == 0:
                    marks.append((variable, read, mark))
    made = edit()
    with tf.control_dependencies(made):
        for variable, read, mark in marks:
            if mark.op.inputs[0] is not read:
                _write(ring, variable, mark)
    return made, [w for w in written if w.rule not in (_EDITED, _SUMMED)]


def _write_own(running: step.Step, variable: Any, value: Any, adding: bool) -> None:
    """Writes a replica's copy, and notes the rule that combines what replicas write."""
    running.writes[id(variable)] += 1
    if running.is_plain:
        _write_plainly(running, variable, value)
        return
    held = held_by(variable)
    own = own_copy(held)
    value = tf.cast(value, own.dtype)
    if held.synchronization == tf.VariableSynchronization.ON_READ:
        own.assign(tf.where(running.active, value, own))  # the padding row of a replica without rows does not count
        return
    own.assign(value)
    running.written.append(Written(variable, _rule(held, adding)))


def _rule(variable: Any, adding: bool) -> str:
    """Returns the rule that combines the values that replicas write to a variable."""
    is_float = variable.dtype.is_floating or variable.dtype.is_complex
    if variable.aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA:
        return "first"
    if variable.aggregation == tf.VariableAggregation.SUM or not is_float:
        if adding:
            return "increments"
        return "same" if variable.aggregation != tf.VariableAggregation.SUM else "values"
    return "mean"


def held_by(variable: Any) -> Any:
    """Returns the TensorFlow variable that a variable is or holds."""
    return variable if isinstance(variable, tf.distribute.DistributedValues) else variable._value


def _refuse_outside(variable: Any) -> None:
    if not isinstance(variable._value, tf.distribute.DistributedValues):
        raise ConfigurationError(
            f"A step writes variable {variable.path!r}, which was made outside of the strategy's scope, so each rank "
            "would have a different value. Make the layer or metric it belongs to inside `with strategy.scope():`."
        )


def _is_zero(value: Any) -> bool:
    value = tf.get_static_value(tf.convert_to_tensor(value))
    return value is not None and not value.any()


def _name(variable: Any) -> str:
    return getattr(variable, "path", None) or variable.name


def own_copy(variable: Any) -> Any:
    """Returns the running replica's copy of a variable that replicas hold."""
    copies = values_of(variable)
    if len(copies) == 1:
        return copies[0]
    replica = tf.distribute.get_replica_context().replica_id_in_sync_group
    return copies[int(tf.get_static_value(tf.convert_to_tensor(replica))) % len(copies)]


def snapshot_values(model: Any) -> dict:
    """Returns the values of variables that a step may add to, before the step, by the variables' identity."""
    before = {}
    for variable in [*model.non_trainable_variables, *_variables_of_tensorflow(model)]:
        value = getattr(variable, "_value", variable)
        if not isinstance(value, tf.distribute.DistributedValues) or step.is_written_alike(variable):
            continue
        if not value.dtype.is_floating or value.aggregation == tf.VariableAggregation.SUM:
            before[id(variable)] = tf.identity(values_of(value)[0])
    return before


def _variables_of_tensorflow(model: Any) -> list:
    """Returns the TensorFlow variables that layers and the model hold as attributes, also in lists and dicts."""
    values = [value for layer in all_layers(model) for value in vars(layer).values()]
    return [v for v in objects_in(values, tf.Variable) if isinstance(v, tf.distribute.DistributedValues)]


def combine_writes(ring: Ring, written: Sequence[Written], shares: tf.Tensor, before: dict) -> tuple:
    """Prepares one value for each variable that replicas wrote. Writes at once those that all must have written alike.

    Args:
      ring: The workers.
      written: A `Written` for every write, the same on every rank.
      shares: float64 `[replicas_per_worker]`, rows of each replica divided by the rows of the batch.
      before: The result of `snapshot_values`.

    Returns:
      The values that this worker adds to the sums over all workers, and a function that writes the variables from these
      sums.
    """
    if ring.num_replicas == 1:
        written = []
    rules: dict = {}
    for variable, rule in written:
        known = rules.setdefault(id(variable), (variable, rule))[1]
        if known != rule:  # a float that is a mean, and a constant in a branch, stays a mean
            rules[id(variable)] = (variable, "mean" if {known, rule} == {"mean", "same"} else "same")
    # Once per dtype, as there may be hundreds of variables.
    weights = functools.cache(lambda dtype: [tf.cast(shares[i], dtype) for i in range(len(ring.devices))])
    summed, alike = [], []  # (variable, rule, this worker's part), and what all replicas have to write alike
    for variable, rule in rules.values():
        copies = [tf.convert_to_tensor(copy) for copy in values_of(held_by(variable))]
        if rule == "same":
            alike.append((variable, copies))
        else:
            summed.append((variable, rule, _part(ring, variable, rule, copies, shares, weights, before)))
    for variable, copies in alike:
        _write(ring, variable, _written_by_all(ring, variable, copies, shares))

    def finish(totals: Sequence[tf.Tensor]) -> None:
        for (variable, rule, _), total in zip(summed, totals, strict=True):
            if rule == "first":
                total = total[tf.argmax(total[:, 0] > 0), 1:]
                total = tf.reshape(total, variable.shape)
            if rule == "increments":
                total += tf.cast(before[id(variable)], total.dtype)
            _write(ring, variable, total)

    return [part for *_, part in summed], finish


def _part(
    ring: Ring,
    variable: Any,
    rule: str,
    copies: Sequence[tf.Tensor],
    shares: tf.Tensor,
    weights: Callable[[tf.DType], list[tf.Tensor]],
    before: dict,
) -> tf.Tensor:
    if copies[0].dtype.is_integer or copies[0].dtype.is_bool:
        copies = [tf.cast(copy, tf.int64) for copy in copies]
    if rule == "mean":
        of_replicas = zip(copies, weights(copies[0].dtype), strict=False)
        return tf.add_n([tf.math.multiply_no_nan(copy, weight) for copy, weight in of_replicas])
    if rule == "first":
        return _rows_of_replicas(ring, copies, shares)
    # A replica without rows adds nothing, not even NaN.
    copies = [tf.where(shares[i] > 0, c, tf.zeros_like(c)) if rule == "values" else c for i, c in enumerate(copies)]
    if rule == "increments":
        if id(variable) not in before:
            raise ConfigurationError(_no_rule(variable))
        old = tf.cast(before[id(variable)], copies[0].dtype)
        copies = [tf.where(shares[i] > 0, c - old, tf.zeros_like(c)) for i, c in enumerate(copies)]
    return tf.add_n(copies)


def _rows_of_replicas(ring: Ring, copies: Sequence[tf.Tensor], shares: tf.Tensor) -> tf.Tensor:
    """Returns a row for each replica of all workers: whether it has rows of the batch, then its copy.

    The rows of other workers' replicas are 0.
    """
    before = ring.first_replica
    after = ring.num_replicas - before - len(copies)
    flags = tf.cast(shares > 0, copies[0].dtype)[:, None]
    mine = tf.concat([flags, tf.reshape(tf.stack(copies), [len(copies), -1])], 1)
    return tf.pad(mine, [[before, after], [0, 0]])


def _written_by_all(
    ring: Ring, variable: Any, copies: Sequence[tf.Tensor], shares: tf.Tensor
) -> tf.Tensor:
    """Returns the value that all replicas with rows wrote, which must be the same."""
    dtype = copies[0].dtype
    numbers = tf.stack([c if dtype.is_floating else tf.cast(c, tf.int64) for c in copies])
    has_rows = tf.reshape(shares > 0, [-1] + [1] * copies[0].shape.rank)
    highest = tf.reduce_max(tf.where(has_rows, numbers, numbers.dtype.min), 0)
    lowest = tf.reduce_min(tf.where(has_rows, numbers, numbers.dtype.max), 0)
    highest, lowest = ring.control.all_reduce([highest, -lowest], "max", name="state")
    check = tf.debugging.assert_equal(highest, -lowest, _no_rule(variable))
    with tf.control_dependencies([] if check is None else [check]):
        return tf.cast(highest, dtype)


def _write(ring: Ring, variable: Any, value: Any) -> None:
    for copy in values_of(held_by(variable)):
        copy.assign(tf.cast(value, copy.dtype), read_value=False)


def _no_rule(variable: Any) -> str:
    return (
        f"The replicas wrote different values to {_name(variable)!r} ({variable.dtype}), and no rule combines them. "
        'Give it an aggregation, such as `add_weight(..., aggregation="sum")`, or write it with `assign_add`; a '
        "TensorFlow variable has to be an attribute of a layer or the model."
    )
