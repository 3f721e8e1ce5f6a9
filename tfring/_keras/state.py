"""State that a step writes on each replica, such as moving statistics, is brought together at the end of the step.

Keras keeps a BatchNormalization's moving mean as a mirrored variable that each replica writes for itself, so that
ranks evaluate and save different models. Here the step notes what its replicas wrote, and afterwards each such variable
has one value on all ranks.

| written | becomes |
|---|---|
| from constants and the variable itself alone, so the same on all replicas | stays |
| `maximum(variable, ...)`, `minimum(variable, ...)` | the maximum, the minimum |
| aggregation "sum": `assign_add`, `assign` | the old value and all increments; the sum of the values |
| aggregation "mean", "only_first_replica" | the mean, weighted by rows; the first replica's |
| floats without aggregation | the mean, weighted by rows |
| integers without: `assign_add` | the old value and all increments |
| integers and booleans without: `assign` | stays where all wrote the same; else an error |

Moving averages are linear in what they average, so the mean of them is the moving average of the mean; a replica
without rows, whose statistics are NaN, has no weight. Eagerly nothing tells how a value was computed: there
`assign_add` alone adds up, and maxima become means.
"""

from __future__ import annotations

import inspect
import threading

import tensorflow as tf

from tfring import _tf, step
from tfring._keras.seam import seam
from tfring.cross_device_ops import values_of
from tfring.errors import ConfigurationError
from tfring.recognition import current_ring

_local = threading.local()


def install():
    import keras
    from keras.src.backend.tensorflow import core

    if "synchronization" not in inspect.signature(keras.Variable.__init__).parameters:
        _sum_metrics_when_read(keras.metrics.Metric, core.Variable)

    for name in ("assign_add", "assign_sub"):
        seam(core.Variable, name)(_adding)

    def as_number(original, self):
        if isinstance(self._value, tf.distribute.DistributedValues):  # which is no number to Python
            return getattr(self.numpy(), original.__name__)()
        return original(self)

    seam(core.Variable, "__float__")(as_number)
    seam(core.Variable, "__int__")(as_number)

    @seam(core.Variable, "_direct_assign")
    def direct_assign(original, self, value):
        running = step.weighing()  # in a custom loop TensorFlow's rules hold
        if running is None or current_ring() is None or tf.distribute.get_replica_context() is None:
            return original(self, value)
        if step.is_written_alike(self) or step.is_kept_by_replica(self):
            return original(self, value)
        _refuse_outside(self)
        rule = _rule(self, value)
        own = own_copy(self._value)
        if rule is None:  # the row that a replica without rows was given does not count
            return original(self, tf.where(running.active, tf.cast(value, own.dtype), own))
        if rule != "stay":
            running.written.append((self, rule))
        own.assign(tf.cast(value, own.dtype))


def _adding(original, self, value):
    before = getattr(_local, "adding", None)
    _local.adding = self
    try:
        return original(self, value)
    finally:
        _local.adding = before


def _sum_metrics_when_read(metric, keras_variable):
    """Keras before 3.10 sums `total + value` over replicas at each write, so earlier batches count again and again."""
    making_metric = threading.local()

    @seam(metric, "add_variable")
    def add_variable(original, self, *args, **kwargs):
        making_metric.now = True
        try:
            variable = original(self, *args, **kwargs)
        finally:
            making_metric.now = False
        variable._tfring_of_metric = True  # for one that Keras initializes later
        return variable

    def creator(next_creator, **kwargs):
        return next_creator(**{**kwargs, "synchronization": tf.VariableSynchronization.ON_READ})

    @seam(keras_variable, "_initialize")
    def initialize(original, self, value):
        of_metric = getattr(making_metric, "now", False) or getattr(self, "_tfring_of_metric", False)
        if not of_metric or current_ring() is None:
            return original(self, value)
        with tf.variable_creator_scope(creator):
            return original(self, value)


def _refuse_outside(variable):
    if not isinstance(variable._value, tf.distribute.DistributedValues):
        raise ConfigurationError(
            "What a step writes is made in the strategy's scope, or each rank would go its own way. Received: the "
            f"variable {variable.path!r}, made outside. Make the layer or metric it belongs to inside "
            "`with strategy.scope():`."
        )


def _rule(variable, value) -> str | None:
    """How what the replicas write to a variable becomes one; None where that is not for the step to do."""
    here = variable._value
    how = _computed(here, value)
    if here.synchronization == tf.VariableSynchronization.ON_READ:  # a metric's, brought together when it is read
        if how not in ("max", "min"):
            return None
        # Not the sum of maxima that Keras' default asks for: all replicas will hold the same.
        _tf.set_aggregation(here, tf.VariableAggregation.ONLY_FIRST_REPLICA)
        return how
    if how in ("stay", "max", "min"):
        return how
    adding = how == "add" or getattr(_local, "adding", None) is variable
    if here.aggregation == tf.VariableAggregation.SUM:
        return "increments" if adding else "values"
    if here.aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA:
        return "first"
    if here.dtype.is_floating or here.dtype.is_complex:
        return "mean"
    return "increments" if adding else "same"


def _computed(variable, value) -> str:
    """How a value was computed from the variable it is written to: "stay", "max", "min", "add" or "" for unknown."""
    if tf.executing_eagerly():
        return ""
    if not tf.is_tensor(value) or not hasattr(value, "graph"):
        return "stay"
    inside = getattr(value.graph, "captures", ())
    handles = {id(copy.handle) for copy in values_of(variable)}
    own = {id(internal) for external, internal in inside if id(external) in handles}

    def is_read(op):
        return op.type == "ReadVariableOp" and id(op.inputs[0]) in own

    def passed_on(tensor):
        op = tensor.op
        while op.type in ("Identity", "Cast"):
            op = op.inputs[0].op
        return op

    todo, seen = [value.op], set()
    while todo:
        op = todo.pop()
        if op.name in seen or op.type == "Const" or is_read(op):
            continue
        seen.add(op.name)
        if not op.inputs or op.op_def.is_stateful or op.type == "Placeholder":
            break
        todo.extend(tensor.op for tensor in op.inputs)
    else:
        return "stay"
    last = passed_on(value)
    if not any(is_read(passed_on(tensor)) for tensor in last.inputs):
        return ""
    return {"Maximum": "max", "Minimum": "min", "AddV2": "add", "Add": "add", "Sub": "add"}.get(last.type, "")


def own_copy(variable):
    """Of a variable that replicas hold, the copy of the replica that runs."""
    copies = values_of(variable)
    if len(copies) == 1:
        return copies[0]
    replica = tf.distribute.get_replica_context().replica_id_in_sync_group
    return copies[int(tf.get_static_value(tf.convert_to_tensor(replica))) % len(copies)]


def values_before(model) -> dict:
    """By identity, what variables that a step may add to hold before it."""
    before = {}
    for variable in model.non_trainable_variables:
        value = variable._value
        if not isinstance(value, tf.distribute.DistributedValues) or step.is_written_alike(variable):
            continue
        if value.dtype.is_integer or value.aggregation == tf.VariableAggregation.SUM:
            before[id(variable)] = tf.identity(values_of(value)[0])
    return before


def written_together(strategy, written, shares, before) -> tuple:
    """One value for each variable that the replicas wrote; maxima and minima are written before this returns.

    Args:
      strategy: the RingStrategy.
      written: `(variable, rule)` of every write, the same on every rank.
      shares: float64 `[replicas_per_worker]`, rows of each replica over those of the batch.
      before: what `values_before` returned.

    Returns:
      What this worker adds to the sums over all workers, and a function that writes what these sums become.
    """
    if strategy.num_replicas_in_sync == 1:
        written = []
    rules: dict = {}
    for variable, rule in written:
        if rules.setdefault(id(variable), (variable, rule))[1] != rule:
            rules[id(variable)] = (variable, "same")
    summed, highest = [], []  # (variable, rule, this worker's part)
    for variable, rule in rules.values():
        copies = [tf.convert_to_tensor(copy) for copy in values_of(variable._value)]
        if rule in ("max", "min", "same"):
            highest.append((variable, rule, copies))
        else:
            summed.append((variable, rule, _part(strategy, variable, rule, copies, shares, before)))
    for variable, rule, copies in highest:
        _write(strategy, variable, _highest(strategy, variable, rule, copies, shares))

    def finish(totals):
        for (variable, rule, _), total in zip(summed, totals, strict=True):
            if rule == "first":
                total = total[tf.argmax(total[:, 0] > 0), 1:]
                total = tf.reshape(total, variable.shape)
            if rule == "increments":
                total += tf.cast(before[id(variable)], total.dtype)
            _write(strategy, variable, total)

    return [part for *_, part in summed], finish


def _part(strategy, variable, rule, copies, shares, before):
    if copies[0].dtype.is_integer:
        copies = [tf.cast(copy, tf.int64) for copy in copies]
    if rule == "mean":
        return tf.add_n([tf.math.multiply_no_nan(c, tf.cast(shares[i], c.dtype)) for i, c in enumerate(copies)])
    if rule == "first":
        return _rows_of_replicas(strategy, copies, shares)
    # A replica without rows adds nothing, not even NaN.
    copies = [tf.where(shares[i] > 0, c, tf.zeros_like(c)) if rule == "values" else c for i, c in enumerate(copies)]
    if rule == "increments":
        if id(variable) not in before:
            raise ConfigurationError(_no_rule(variable))
        old = tf.cast(before[id(variable)], copies[0].dtype)
        copies = [tf.where(shares[i] > 0, c - old, tf.zeros_like(c)) for i, c in enumerate(copies)]
    return tf.add_n(copies)


def _rows_of_replicas(strategy, copies, shares):
    """A row for each replica of all workers: whether it has rows of the batch, then its copy; others' rows are 0."""
    before = strategy.extended.control.rank * len(copies)
    after = strategy.num_replicas_in_sync - before - len(copies)
    flags = tf.cast(shares > 0, copies[0].dtype)[:, None]
    mine = tf.concat([flags, tf.reshape(tf.stack(copies), [len(copies), -1])], 1)
    return tf.pad(mine, [[before, after], [0, 0]])


def _highest(strategy, variable, rule, copies, shares):
    control = strategy.extended.control
    dtype = copies[0].dtype
    numbers = tf.stack([c if dtype.is_floating else tf.cast(c, tf.int64) for c in copies])
    has_rows = tf.reshape(shares > 0, [-1] + [1] * copies[0].shape.rank)
    highest = tf.reduce_max(tf.where(has_rows, numbers, numbers.dtype.min), 0)
    lowest = tf.reduce_min(tf.where(has_rows, numbers, numbers.dtype.max), 0)
    highest, lowest = control.all_reduce([highest, -lowest], "max", name="state")
    if rule == "same":
        check = tf.debugging.assert_equal(highest, -lowest, _no_rule(variable))
        with tf.control_dependencies([] if check is None else [check]):
            highest = tf.identity(highest)
    return tf.cast(highest if rule != "min" else -lowest, dtype)


def _write(strategy, variable, value):
    for copy in values_of(variable._value):
        copy.assign(tf.cast(value, copy.dtype))


def _no_rule(variable) -> str:
    return (
        f"The replicas wrote different values to {variable.path!r} ({variable.dtype}), and nothing says how they "
        'become one. Give it an aggregation, such as `add_weight(..., aggregation="sum")`, or write it by `assign_add`.'
    )
