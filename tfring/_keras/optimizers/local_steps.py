"""Local steps of each worker between two synchronizations, and the outer optimizer of `tfring.Delayed`.

```
             a window of k steps                         its synchronization
worker 0     anchor := weights ─► k updates ─► anchor - weights ─┐ (1) rows of each worker
                                                                 ├─ (2) mean by rows ─► outer optimizer ─► anchor
worker 1     anchor := weights ─► k updates ─► anchor - weights ─┘                          weights := anchor ◄┘
```

The anchor is set when a window begins, so that weights which a program assigns between two windows count. A worker's
update is Keras' own, with gradients that are not weighed by rows: the gradient of the whole batch is their mean by
rows, and a worker without rows has a gradient of zeros.

For a table (a variable with a sparse gradient), the rows that differ from the anchor are sent with their ids. With
`tables="diversity"` their mean is scaled by what the workers' differences have in common (row_diversity.py).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfring import step
from tfring._keras.layers import all_layers
from tfring._keras.optimizers import optimizers_of, row_diversity
from tfring._keras.optimizers.ring_optimizer import Update
from tfring._keras.optimizers.updater import Updater, assign, read
from tfring._keras.sharding import mark_of
from tfring._keras.sharding.shards import is_value
from tfring.errors import ConfigurationError
from tfring.ring.collectives import LocalCollectives
from tfring.runtime import Ring

NORM = "difference_norm"  # in the logs of an epoch
_NOT_WITH = ("use_ema", "gradient_accumulation_steps")
_WEIGHTS_IN_SLOTS = ("Ftrl", "ScheduleFreeAdamW")  # their updates recompute weights from slots


class Window:
    """The weights of one optimizer since the last synchronization, on this worker.

    Args:
      ring: The workers. Their scope has been entered.
      variables: The weights.
      outer: The optimizer that applies the averaged difference, not built yet.
      by_diversity: Whether to combine rows of tables by their diversity.

    Attributes:
      anchors: The weights when the window began.
      num_steps: int64 scalar, the number of steps since then.
      rows: float64 `[1]`, the number of rows trained since then.
      norms: float64 `[2]`, the sum of the norms of averaged differences, and their number.
      tables: The positions of weights with sparse gradients.
    """

    def __init__(self, ring: Ring, variables: Sequence[Any], outer: Any, by_diversity: bool) -> None:
        self.variables = list(variables)
        self.outer = outer
        self.by_diversity = by_diversity
        self.tables: set[int] = set()
        with ring.variables_of_worker():
            self.anchors = [zeros(v.shape, v.dtype, "anchor") for v in self.variables]
            self.num_steps = zeros((), "int64", "steps_of_window")
            self.rows = zeros((1,), "float64", "rows_of_window")
            self.norms = zeros((2,), "float64", "norms")
        for anchor, variable in zip(self.anchors, self.variables, strict=True):
            anchor._path = variable.path  # slots are named after it
        outer.build(self.anchors)

    def begin(self) -> None:
        """Sets the anchor before the first step."""

        def take() -> tf.Tensor:
            for anchor, variable in zip(self.anchors, self.variables, strict=True):
                assign(anchor, read(variable))
            return tf.zeros([])

        tf.cond(tf.equal(read(self.num_steps), 0), take, lambda: tf.zeros([]))

    def difference(self, position: int, share: tf.Tensor) -> Any:
        """Returns the anchor minus a weight, times this worker's share of the rows, to be summed over workers."""
        anchor = read(self.anchors[position])
        difference = anchor - read(self.variables[position])
        if position not in self.tables:
            return difference * tf.cast(share, difference.dtype)
        others = list(range(1, difference.shape.rank))
        ids = tf.where(tf.reduce_any(tf.not_equal(difference, 0), others))[:, 0]
        rows = tf.gather(difference, ids)
        shape = anchor.shape.as_list()
        if self.by_diversity:
            rows = row_diversity.with_squares(rows, share)
            shape = [shape[0], rows.shape[1]]
        else:
            rows *= tf.cast(share, rows.dtype)
        return tf.IndexedSlices(rows, ids, tf.constant(shape, tf.int64))

    def average(self, position: int, total: Any) -> tf.Tensor:
        """Returns the averaged difference of a weight, from the sum of `difference` over workers."""
        if self.by_diversity and position in self.tables:
            anchor = read(self.anchors[position])
            shape = anchor.shape.as_list()
            rows = row_diversity.combined(total.values, shape[1:], anchor.dtype)
            total = tf.IndexedSlices(rows, total.indices, tf.constant(shape, tf.int64))
        return tf.convert_to_tensor(total)

    def end(self, norm: tf.Tensor) -> None:
        """Assigns the anchor's values to the weights, and notes the norm of the averaged difference."""
        for anchor, variable in zip(self.anchors, self.variables, strict=True):
            assign(variable, read(anchor))
            if variable.constraint is not None:
                variable.assign(variable.constraint(variable))
        assign(self.norms, read(self.norms) + tf.stack([tf.cast(norm, tf.float64), 1.0]))
        assign(self.num_steps, tf.constant(0, tf.int64))
        assign(self.rows, tf.zeros([1], tf.float64))


class LocalSteps(Updater):
    """Updates each worker's weights by its own gradients, and synchronizes them at the end of a window.

    Args:
      ring: The workers.
      delayed: The `tfring.Delayed`.
    """

    weighs = False

    def __init__(self, ring: Ring, delayed: Any) -> None:
        self.ring = ring
        self._asked = delayed
        self._outers: weakref.WeakSet = weakref.WeakSet()
        ops = ring.gradient_ops
        self._on_worker = ops.over(LocalCollectives())
        self._over_workers = ops.over(ring.gradients)

    def settings(self) -> dict[str, Any]:
        return {f"{name} of Delayed": getattr(self._asked, name) for name in ("every", "local_momentum", "tables")}

    # -- optimizers and models -------------------------------------------------------------------------------------

    def check_model(self, model: Any) -> None:
        problem = "jit_compile=True" if model.jit_compile is True else None
        for layer in all_layers(model):
            if getattr(layer, "synchronized", False) or hasattr(layer, "synchronization"):
                problem = f"{type(layer).__name__} {layer.name!r}, which exchanges statistics of batches"
        if problem:
            raise ConfigurationError(
                f"synchronization=Delayed(...) cannot train a model with {problem}. Each worker computes steps from "
                "its own rows, without XLA. Leave it out (use keras.layers.BatchNormalization instead), or train "
                "without Delayed."
            )

    def on_build(self, optimizer: Any, variables: Sequence[Any]) -> None:
        if optimizer in self._outers or optimizer._tfring_window is not None:
            return
        self._check_optimizer(optimizer, variables)
        with self.ring.scope():
            outer = type(self._asked.outer).from_config(self._asked.outer.get_config())
            self._outers.add(outer)
            window = Window(self.ring, variables, outer, self._asked.tables == "diversity")
        # `optimizers_of` finds it there. Files, which other processes load, leave out such a name.
        object.__setattr__(optimizer, "__tfring_outer__", outer)
        object.__setattr__(optimizer, "_tfring_window", window)

    def _problem_of(self, optimizer: Any, variables: Sequence[Any]) -> str | None:
        """Returns the property of an optimizer that does not go with Delayed; None if it has none."""
        if any(base.__name__ in _WEIGHTS_IN_SLOTS for base in type(optimizer).__mro__):
            return "slots from which weights are recomputed"
        if self._asked.local_momentum == "reset" and not isinstance(optimizer, keras.optimizers.SGD):
            return "local_momentum='reset', which works with SGD only"
        problem = next((f"{n}={getattr(optimizer, n)!r}" for n in _NOT_WITH if getattr(optimizer, n, None)), None)
        if optimizer._delegates:
            problem = "other optimizers inside it"
        for variable in variables:
            if mark_of(variable).sharding or mark_of(variable).update or is_value(variable):
                problem = f"the variable {variable.path!r}, which is sharded or not a plain weight"
        return problem

    def _check_optimizer(self, optimizer: Any, variables: Sequence[Any]) -> None:
        problem = self._problem_of(optimizer, variables)
        if problem:
            raise ConfigurationError(
                f"synchronization=Delayed(...) cannot use {type(optimizer).__name__} {optimizer.name!r} with "
                f"{problem}. Each worker holds full weights, and its own optimizer updates them. Leave it out, or "
                "train without Delayed."
            )

    def is_at_rest(self, model: Any) -> bool:
        windows = [getattr(optimizer, "_tfring_window", None) for optimizer in optimizers_of(model)]
        return all(window is None or int(read(window.num_steps)) == 0 for window in windows)

    # -- in a step -------------------------------------------------------------------------------------------------

    def _running_step(self, optimizer: Any) -> step.Step:
        """Returns the current step, in which the rows of each worker are known."""
        running = step.current()
        if running is None or (self.ring.num_replicas > 1 and running.share is None):
            raise ConfigurationError(
                "synchronization=Delayed(...) cannot train in a custom training loop, such as the one that called "
                f"`apply` of {type(optimizer).__name__} {optimizer.name!r}: only Keras' steps know the rows of each "
                "worker. Use `fit` or `train_on_batch`, or train without Delayed."
            )
        return running

    def apply(
        self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any], active: Any, apply: Callable
    ) -> None:
        running = self._running_step(optimizer)
        window = optimizer._tfring_window
        gradients = list(gradients)
        present = [i for i, gradient in enumerate(gradients) if gradient is not None]
        names = [variables[i].path for i in present]
        summed = self._on_worker.sum_over_workers(
            [gradients[i] for i in present], name="gradients", value_names=names, active=active
        )
        positions = {id(v): position for position, v in enumerate(window.variables)}
        for i, gradient in zip(present, summed, strict=True):
            if isinstance(gradients[i], tf.IndexedSlices):
                window.tables.add(positions[id(variables[i])])
            gradients[i] = gradient
        window.begin()
        apply(gradients, variables)
        rows = tf.cast(1 if running.num_rows is None else running.num_rows, tf.float64)
        rows = rows if active is None else tf.where(active, rows, tf.zeros_like(rows))
        assign(window.rows, read(window.rows) + rows)
        assign(window.num_steps, read(window.num_steps) + 1)

        def synchronize() -> tf.Tensor:
            self._synchronize(optimizer)
            return tf.zeros([])

        tf.cond(read(window.num_steps) >= self._asked.every, synchronize, lambda: tf.zeros([]))

    def _synchronize(self, optimizer: Any) -> None:
        """Ends the window of an optimizer on all workers, in a graph or eagerly."""
        window, outer = optimizer._tfring_window, optimizer.__tfring_outer__
        # On the channel on which other ranks report their status, in case only this rank gets here.
        [total] = self.ring.control_ops.sum_over_workers([read(window.rows)], name="rows of a window")
        share = tf.math.divide_no_nan(read(window.rows), total)[0]
        differences = [window.difference(i, share) for i in range(len(window.variables))]
        slots = _slots_of(optimizer) if self._asked.local_momentum == "average" else []
        values = [*differences, *(read(s) * tf.cast(share, read(s).dtype) for s in slots)]
        names = [v.path for v in [*window.variables, *slots]]
        sums = self._over_workers.sum_over_workers(
            values, name="differences of weights", value_names=names, keep_sparse=window.by_diversity
        )  # rows with their squares are not compressed
        averages = [window.average(i, sums[i]) for i in range(len(differences))]
        for slot, average in zip(slots, sums[len(differences) :], strict=True):
            assign(slot, average)
        if self._asked.local_momentum == "reset":
            for slot in _slots_of(optimizer):
                assign(slot, tf.zeros_like(read(slot)))
        squares = [tf.reduce_sum(tf.square(tf.cast(each, tf.float32))) for each in averages]
        with outer._updating(Update(is_reduced=True)):
            outer.apply(averages, window.anchors)
        window.end(tf.sqrt(tf.add_n(squares)))

    # -- before weights are read -----------------------------------------------------------------------------------

    def before_evaluation(self, model: Any) -> None:
        for optimizer in optimizers_of(model):
            window = getattr(optimizer, "_tfring_window", None)
            if window is not None and int(read(window.num_steps)) > 0:
                with self.ring.scope():
                    self._synchronize(optimizer)

    def before_saving(self, model: Any, keep: bool = True) -> None:
        self.before_evaluation(model)

    @contextlib.contextmanager
    def around_pass(self, epoch_iterator: Any, loop: Any, inside: Any) -> Iterator[None]:
        with inside:
            yield
        if loop is not None and loop.kind == "train":
            self.before_evaluation(loop.model)

    def callbacks(self, callbacks: list) -> list:
        """Returns the callbacks of `fit`, after one that adds the norm of averaged differences to the logs."""
        return [_NormLogs(), *callbacks]


class _NormLogs(keras.callbacks.Callback):
    """Adds the mean norm of an epoch's averaged differences to its logs."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._read()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        total, count = self._read()
        if logs is not None and count:
            logs[NORM] = total / count

    def _read(self) -> tuple[float, float]:
        """Returns the sum of the norms since the last call, and their number."""
        total = count = 0.0
        for optimizer in optimizers_of(self.model):
            window = getattr(optimizer, "_tfring_window", None)
            if window is not None:
                norm, number = read(window.norms).numpy().tolist()
                total, count = total + norm, count + number
                assign(window.norms, tf.zeros([2], tf.float64))
        return total, count


def norms_of(model: Any) -> list[keras.Variable]:
    """Returns the norms of averaged differences for the logs of the current epoch, of all optimizers."""
    windows = [getattr(optimizer, "_tfring_window", None) for optimizer in optimizers_of(model)]
    return [window.norms for window in windows if isinstance(window, Window)]


def _slots_of(optimizer: Any) -> list[Any]:
    """Returns the float variables of an optimizer except the learning rate."""
    rate = getattr(optimizer, "_learning_rate", None)
    return [v for v in optimizer.variables if v is not rate and read(v).dtype.is_floating]


def zeros(shape: Any, dtype: Any, name: str) -> Any:
    """Returns a variable of zeros of this worker alone, within `variables_of_worker`."""
    return keras.Variable("zeros", shape=shape, dtype=dtype, trainable=False, name=name)
