"""The running step: a replica's share of the batch, and the state that it wrote.

It is kept per thread, because `tf.distribute` traces each replica in its own thread.
"""

from __future__ import annotations

import collections
import enum
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from tfring.errors import ConfigurationError
from tfring.setting import setting

_local = threading.local()


class Way(enum.Enum):
    """The way in which the steps of replicas become one step.

    Attributes:
      EDITED: The traced graph is edited so that it computes what one process computes.
      WHOLE: Each replica computes the step from the rows of all replicas, and the results of the first one count.
      OWN: Each replica computes the step from its own rows, if workers train by themselves or share a model's
        stages. Gradients and state become means weighted by rows.
    """

    EDITED = "edited"
    WHOLE = "whole"
    OWN = "own"


class Step:
    """One replica's view of one step, while it is being traced or run.

    If the share is known, the values that replicas compute are averaged, weighted by their shares: the gradient of the
    whole batch is `sum share_i * gradient_i`.

    Attributes:
      share: float64 scalar, this replica's rows divided by the rows of the global batch; None if rows are not counted
        (a custom loop, whose gradients are summed) or if there is one replica.
      active: bool scalar, False if this replica has no row; None if it always has rows.
      written: For each variable that the step assigned in this replica, the rule that combines the values of replicas;
        see `_keras/state.py`.
      writes: Number of times that the step has assigned a variable in this replica, by the variable's identity.
      parts: Number of parts into which a pipeline has cut the rows of the batch. This step sees one of them.
      part: float64 scalar, the fraction of the replica's rows that this step sees; None if it sees all.
      is_plain: Whether the step is traced as that of one process: it is edited, or computed from the rows of all
        replicas.
      is_whole: Whether it is computed from the rows of all replicas.
      graph: The graph in which the step is traced; None in eager mode. Operations of a graph inside it may not run on
        all replicas.
      added: Losses that layers have added with `add_loss` in this replica, by the identity of the layer.
      applying: The optimizer whose own `apply` is running, with gradients of the whole batch.
    """

    def __init__(
        self,
        share: tf.Tensor | None = None,
        active: tf.Tensor | None = None,
        parts: int = 1,
        part: tf.Tensor | None = None,
        way: Way = Way.OWN,
    ) -> None:
        self.share = share
        self.active = active
        self.num_rows: Any = None  # number of rows of the replica's element, if counted
        self.written: list = []
        self.writes: collections.Counter[int] = collections.Counter()
        self.parts = parts
        self.part = part
        self.is_plain, self.is_whole = way is not Way.OWN, way is Way.WHOLE
        self.graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        self.added: dict[int, list] = {}
        self.applying: Any = None
        self._shares: dict = {}  # `share` by graph and dtype

    def weigh(self, value: Any) -> Any:
        """Returns `value` times the share, if that is known; zero in a replica without rows, whatever `value` is."""
        return self._by_share(tf.math.multiply_no_nan, value)

    def unweigh(self, value: Any) -> Any:
        """Returns `value` divided by the share, if that is known; zero in a replica without rows."""
        return self._by_share(tf.math.divide_no_nan, value)

    def zero_if_empty(self, value: Any) -> Any:
        """Returns `value`, or zeros in a replica without rows, which computes on a padding row."""
        if self.active is None:
            return value
        value = tf.convert_to_tensor(value)
        return tf.where(self.active, value, tf.zeros_like(value))

    def drop_if_empty(self, value: Any, axis: int = 0) -> Any:
        """Returns `value`, or none of its entries along `axis` in a replica without rows."""
        if self.active is None or self.is_whole:
            return value
        sizes = tf.shape(value)
        size = tf.where(self.active, sizes[axis], 0)
        return tf.slice(value, tf.zeros_like(sizes), tf.tensor_scatter_nd_update(sizes, [[axis]], [size]))

    def refuse_in_parts(self, what: str) -> None:
        """Raises ConfigurationError in a pipeline that cuts the rows of a batch, because `what` needs all of them."""
        if self.parts > 1:
            raise ConfigurationError(
                f"{what} needs all rows of a batch, but this Pipeline computes its loss from {self.parts} parts, of "
                "replicas and microbatches. Make the Pipeline with num_microbatches=1 and data=1, or use another loss."
            )

    def _by_share(self, operation: Callable, value: Any) -> Any:
        if value is None or self.share is None:
            return value
        if isinstance(value, tf.IndexedSlices):
            return tf.IndexedSlices(self._by_share(operation, value.values), value.indices, value.dense_shape)
        value = tf.convert_to_tensor(value)
        place = tf.compat.v1.get_default_graph(), value.dtype
        if place not in self._shares:
            self._shares[place] = tf.cast(self.share, value.dtype)
        return operation(value, self._shares[place])


def current() -> Step | None:
    """Returns the step that this thread runs, or None outside of a step."""
    return getattr(_local, "step", None)


def weighing() -> Step | None:
    """Returns the step that this thread runs if each replica's share of the batch is known, otherwise None."""
    running = current()
    return running if running is not None and running.share is not None else None


def current_own_rows_step() -> Step | None:
    """Returns the step that this thread runs if the share is known and the step is of the replica's own rows."""
    running = weighing()
    return running if running is not None and not running.is_plain else None


def running(step: Step) -> AbstractContextManager[Step]:
    """Makes `step` the current step of this thread, inside the context."""
    return setting(_local, "step", step)


def one_replica() -> AbstractContextManager:
    """Makes `num_replicas_in_sync` of a RingStrategy 1 for this thread, inside the context."""
    return setting(_local, "one_replica", True)


def is_one_replica() -> bool:
    """Returns True inside `one_replica`, and in a replica's step in which each replica's share is known."""
    in_step = weighing() is not None and tf.distribute.get_replica_context() is not None
    return in_step or getattr(_local, "one_replica", False)


def written_alike(variable: Any) -> None:
    """Marks a Keras variable to which every replica writes the same value, so that it needs no reduction."""
    variable._tfring_written_alike = True


def is_written_alike(variable: Any) -> bool:
    """Returns True if `written_alike` marked this variable."""
    return getattr(variable, "_tfring_written_alike", False)


def keep_by_replica(variable: Any) -> None:
    """Marks a variable whose value on each replica belongs to the replica's rows, so that it is not averaged."""
    variable._tfring_kept_by_replica = True


def is_kept_by_replica(variable: Any) -> bool:
    """Returns True if `keep_by_replica` marked this variable."""
    return getattr(variable, "_tfring_kept_by_replica", False)


def note_sum(gradient: Any) -> None:
    """Marks a gradient that `all_reduce_gradients` has summed over replicas in the user's own loop."""
    _values_of(gradient)._tfring_sum = True


def is_sum(gradient: Any) -> bool:
    """Returns True if `note_sum` marked this gradient."""
    return getattr(_values_of(gradient), "_tfring_sum", False)


def _values_of(gradient: Any) -> Any:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
