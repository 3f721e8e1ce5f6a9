"""The interface of the engines: the compiled ring, TensorFlow's collective runtime, and a single process.

All code above `ring/` calls an engine through the methods of `Collectives`, on TensorFlow tensors, eagerly or inside a
`tf.function`. `op` is "sum", "max", "min" or "product"; `name` names the data in errors.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfring.ring import library, order
from tfring.ring.communicator import Communicator
from tfring.ring.trace import READY

_LINE = order.Line("an engine without a token", None, lambda tensor: tf.zeros([]))


def zeros_unless(active: tf.Tensor | None, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the tensors, or zeros of their shapes if `active` is False, even for NaN."""
    if active is None:
        return list(tensors)
    return [tf.where(active, t, tf.zeros_like(t)) for t in tensors]


def sum_duplicates(
    values: tf.Tensor, indices: tf.Tensor, active: tf.Tensor | None = None
) -> tuple[tf.Tensor, tf.Tensor]:
    """Sums the rows of equal ids with TensorFlow operations.

    Args:
      values: Tensor of shape `[num_rows, ...]`, of any float or integer dtype. float16 and bfloat16 are summed in
        float32.
      indices: int32 or int64 tensor of shape `[num_rows]`.
      active: bool scalar. If False, the result has no rows. Defaults to None, which means True.

    Returns:
      A tuple `(values, indices)` with each id once, in the order of first occurrence.

    >>> values, indices = sum_duplicates(tf.constant([[1.0], [2.0], [4.0]]), tf.constant([7, 3, 7]))
    >>> values.numpy().tolist(), indices.numpy().tolist()
    ([[5.0], [2.0]], [7, 3])
    """
    ids, position = tf.unique(indices)
    wide = tf.float32 if values.dtype in (tf.float16, tf.bfloat16) else values.dtype
    summed = tf.math.unsorted_segment_sum(tf.cast(values, wide), position, tf.size(ids))
    if active is not None:
        num_rows = tf.where(active, tf.size(ids), 0)
        summed, ids = summed[:num_rows], ids[:num_rows]
    return tf.cast(summed, values.dtype), ids


class Collectives(abc.ABC):
    """Defines the collectives of an engine. All ranks must make the same calls in the same order.

    An engine implements `_run`, which all of them call, or overrides some of them.
    """

    rank: int
    world_size: int
    identity = 0  # of its ring, which the status of a failed operation names
    reaches_others = False  # whether `broadcast` reaches others although `world_size` is 1
    marks_ready = False  # whether a trace records when the input is ready, which may be before the collective begins

    @abc.abstractmethod
    def _run(self, kind: str, *values: Any, name: str, **settings: Any) -> Any:
        """Calls the collective of this name in `tfring.ring.ops` with these arguments."""

    def all_reduce(
        self,
        tensors: Sequence[tf.Tensor],
        op: str = "sum",
        *,
        name: str,
        active: tf.Tensor | None = None,
        compression: str | None = None,
    ) -> list[tf.Tensor]:
        """Reduces tensors of one dtype over all ranks, in one collective.

        `compression` is the dtype in which float32 is sent, if the engine supports it; see `Communicator.all_reduce`.
        """
        return self._run("all_reduce", list(tensors), op, name=name, active=active, compression=compression)

    def largest(self, numbers: Sequence[int], *, name: str) -> list[int]:
        """Returns the maximum of each int64 number over all ranks, which must call this eagerly."""
        [agreed] = self.all_reduce([tf.constant(numbers, tf.int64)], "max", name=name)
        return agreed.numpy().tolist()

    def agreed(self, number: int, *, name: str) -> int | None:
        """Returns the number, or None if ranks have different ones. All ranks must call this eagerly."""
        highest, lowest = self.largest([number, -number], name=name)
        return number if highest == -lowest else None

    def all_gather(self, tensor: tf.Tensor | Sequence[tf.Tensor], *, name: str) -> Any:
        """Concatenates over ranks along dimension 0, which may differ between ranks. A list returns a list."""
        return self._run("all_gather", tensor, name=name)

    def gather_equal(self, tensor: tf.Tensor, *, name: str) -> tf.Tensor:
        """Gathers tensors of the same static shape on every rank, as `all_gather`, in one collective on any engine."""
        gathered = self.all_gather(tensor, name=name)
        gathered.set_shape([self.world_size * tensor.shape[0], *tensor.shape[1:]])
        return gathered

    def sum_rows(
        self,
        values: Sequence[tf.Tensor],
        indices: Sequence[tf.Tensor],
        *,
        name: str,
        active: tf.Tensor | None = None,
        reduction: str = "auto",
    ) -> tuple[list[tuple[tf.Tensor, tf.Tensor]], tf.Tensor]:
        """Returns each id of any rank once, with the sum of its rows; see `tfring.ring.ops.sum_rows`.

        Not available if `needs_fixed_shapes`.
        """
        return self._run("sum_rows", values, indices, name=name, active=active, reduction=reduction)

    def gather_rows(
        self, values: Sequence[tf.Tensor], indices: Sequence[tf.Tensor], *, name: str
    ) -> list[tuple[tf.Tensor, tf.Tensor]]:
        """Returns padded (values, indices) of every rank, in rank order; only available if `needs_fixed_shapes`."""
        raise NotImplementedError

    def reduce_scatter(self, tensor: tf.Tensor | Sequence[tf.Tensor], op: str = "sum", *, name: str) -> tf.Tensor:
        """Reduces over ranks. Each rank keeps its chunk of dimension 0 (chunk bounds as in `schedule.py`).

        A list of one dtype returns a list.
        """
        return self._run("reduce_scatter", tensor, op, name=name)

    def broadcast(self, tensors: Sequence[tf.Tensor], root: int = 0, *, name: str) -> list[tf.Tensor]:
        """Returns the tensors of rank `root` on every rank. Shapes and dtypes must agree."""
        return self._run("broadcast", list(tensors), root, name=name)

    def reduce(
        self, tensors: Sequence[tf.Tensor], root: int = 0, op: str = "sum", *, name: str
    ) -> list[tf.Tensor]:
        """Reduces like `all_reduce`, but only rank `root` gets the result. The others get zeros."""
        return self._run("reduce", list(tensors), root, op, name=name)

    def all_to_all(
        self, tensor: tf.Tensor | Sequence[tf.Tensor], counts: tf.Tensor | None = None, *, name: str
    ) -> tuple[Any, Any]:
        """Sends some rows of every rank to every rank.

        Args:
          tensor: Tensor of shape `[rows, ...]`, first the rows for rank 0, then those for rank 1, and so on; or a list
            of them.
          counts: Number of rows for each rank, integers of shape `[world_size]`; or a list of them. Defaults to the
            shares of `reduce_scatter`.
          name: Name of the data in errors.

        Returns:
          A tuple of the rows for this rank, those of rank 0 first, and the number of rows from each rank, int64 of
          shape `[world_size]`; or a tuple of two lists.
        """
        return self._run("all_to_all", tensor, counts, name=name)

    def gather(self, tensor: tf.Tensor, root: int = 0, *, name: str) -> tf.Tensor:
        """Gathers like `all_gather`, but only rank `root` gets the rows. The others get no rows."""
        return self._run("gather", tensor, root, name=name)

    def scatter(
        self, tensor: tf.Tensor, counts: tf.Tensor | None = None, root: int = 0, *, name: str
    ) -> tf.Tensor:
        """Distributes rank `root`'s rows by its `counts` (see `all_to_all`). Other ranks' rows are ignored."""
        return self._run("scatter", tensor, counts, root, name=name)

    @abc.abstractmethod
    def group(self, ranks: Sequence[int], name: str) -> Collectives:
        """Returns an engine over some of the ranks, all of which must make the same call.

        Raises:
          ConfigurationError: If the engine has no groups.
        """

    def send(self, tensor: tf.Tensor, to: int, *, name: str) -> tf.Tensor:
        """Sends to one rank, which must call `receive` with this name. Returns a receipt, float32 0.

        Raises:
          ConfigurationError: If the engine cannot send between two ranks.
        """
        return self._run("send", tensor, to, name=name)

    def receive(
        self, source: int, dtype: tf.DType, shape: Sequence[int | None] | None = None, *, anchor: Any = 0.0, name: str
    ) -> tf.Tensor:
        """Receives the tensor that rank `source` sends; see `tfring.ring.ops.receive`.

        Raises:
          ConfigurationError: If the engine cannot send between two ranks.
        """
        return self._run("receive", source, dtype, shape, anchor=anchor, name=name)

    def barrier(self, *, name: str) -> None:
        """Blocks until all ranks have called it."""
        self._run("barrier", name=name)

    def call_in_order(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls a function of tensors that calls collectives in its gradient, such as a `tf.custom_gradient`.

        The backward pass then calls the collectives of such functions in the reverse order of the forward pass,
        regardless of other operations in the graph of a rank; see `order.py`.
        """
        return order.call_in_order(_LINE, function, *args)

    def bytes_sent(self) -> int | None:
        """Returns the bytes this rank has sent so far, or None if the engine does not count them."""
        return None

    def seconds_waited(self) -> float | None:
        """Returns the seconds this rank's collectives have waited for others, or None if they are not measured."""
        return None

    def failure(self) -> BaseException | None:
        """Returns the error of `tfring.errors` that broke this engine; None if it works or cannot tell."""
        return None

    def abort(self, failure: BaseException) -> None:  # noqa: B027  optional for an engine
        """Breaks this engine on all ranks after a failure elsewhere, so that no rank waits in it in vain."""

    def tell_raised(self, error: BaseException) -> None:  # noqa: B027  the same
        """Reports an error of this rank's program to the other ranks, so that those without one do not wait."""

    @property
    def needs_fixed_shapes(self) -> bool:
        """Returns True if rows need the same capacity on every rank, because padding is sent too."""
        return False

    @abc.abstractmethod
    def close(self) -> None:
        """Leaves the ring."""


class LocalCollectives(Collectives):
    """The engine of a single process: every collective is the identity."""

    rank = 0
    world_size = 1

    def _run(self, kind: str, *values: Any, name: str, **settings: Any) -> Any:
        return tf.nest.map_structure(tf.identity, values[0])

    def all_reduce(
        self,
        tensors: Sequence[tf.Tensor],
        op: str = "sum",
        *,
        name: str,
        active: tf.Tensor | None = None,
        compression: str | None = None,
    ) -> list[tf.Tensor]:
        return zeros_unless(active, tensors)

    def largest(self, numbers: Sequence[int], *, name: str) -> list[int]:
        return list(numbers)

    def sum_rows(
        self,
        values: Sequence[tf.Tensor],
        indices: Sequence[tf.Tensor],
        *,
        name: str,
        active: tf.Tensor | None = None,
        reduction: str = "auto",
    ) -> Any:
        # Tensors on a GPU stay there, and training in one process does not need the compiled ring.
        if library.OPS.exists() and not tf.config.list_logical_devices("GPU"):
            from tfring.ring import ops

            return ops.sum_rows(None, values, indices, name=name, active=active)
        pairs = [sum_duplicates(v, i, active) for v, i in zip(values, indices, strict=True)]
        return pairs, tf.stack([tf.size(ids, tf.int64) for _, ids in pairs])

    def all_to_all(
        self, tensor: tf.Tensor, counts: tf.Tensor | None = None, *, name: str
    ) -> tuple[tf.Tensor, tf.Tensor]:
        if isinstance(tensor, Sequence):
            return [tf.identity(each) for each in tensor], [tf.shape(each, tf.int64)[:1] for each in tensor]
        return tf.identity(tensor), tf.shape(tensor, tf.int64)[:1]

    def group(self, ranks: Sequence[int], name: str) -> Collectives:
        if list(ranks) != [0]:
            raise ValueError(f"The ranks of a group are {list(ranks)}, not one or more different ranks from 0 to 0.")
        return self

    def send(self, tensor: tf.Tensor, to: int, *, name: str) -> tf.Operation | None:
        raise ValueError(f'send "{name}" has no peer: to={to}, but there is only one rank.')

    def receive(self, source: int, dtype: tf.DType, shape: Any = None, *, anchor: Any = 0.0, name: str) -> tf.Tensor:
        raise ValueError(f'receive "{name}" has no peer: source={source}, but there is only one rank.')

    def barrier(self, *, name: str) -> None:
        pass

    def call_in_order(self, function: Callable, *args: Any) -> Any:
        return function(*args)

    def apart(self) -> contextlib.AbstractContextManager[None]:
        """See `ops.apart`."""
        return contextlib.nullcontext()

    def ordered_ops(self) -> list[tf.Operation]:
        """See `ops.ordered_ops`."""
        return []

    def bytes_sent(self) -> int:
        return 0

    def seconds_waited(self) -> float:
        return 0.0

    def close(self) -> None:
        pass


class RingCollectives(Collectives):
    """The engine of the compiled ring (`tfring/ring/native`)."""

    def __init__(self, communicator: Communicator) -> None:
        from tfring.ring import ops

        self._ops = ops
        self.communicator = communicator
        self.rank = communicator.rank
        self.identity = communicator.identity
        self.world_size = communicator.world_size

    def _run(self, kind: str, *values: Any, name: str, **settings: Any) -> Any:
        if self.marks_ready and kind in ("all_reduce", "reduce_scatter", "sum_rows"):
            reduced = [each for each in tf.nest.flatten(values) if tf.is_tensor(each)]
            self._ops.mark(f"{READY} {name}", after=reduced)
        return getattr(self._ops, kind)(self.communicator, *values, name=name, **settings)

    def largest(self, numbers: Sequence[int], *, name: str) -> list[int]:
        # With NumPy: a tenth of the time of a TensorFlow operation.
        return self.communicator.all_reduce(np.array(numbers, np.int64), "max", name=name).tolist()

    def group(self, ranks: Sequence[int], name: str) -> Collectives:
        return RingCollectives(self.communicator.group(ranks, name))

    def call_in_order(self, function: Callable, *args: Any) -> Any:
        return self._ops.call_in_order(self.communicator, function, *args)

    def apart(self) -> contextlib.AbstractContextManager[None]:
        """See `ops.apart`."""
        return self._ops.apart(self.communicator)

    def ordered_ops(self) -> list[tf.Operation]:
        """See `ops.ordered_ops`."""
        return self._ops.ordered_ops(self.communicator)

    def bytes_sent(self) -> int:
        return self.communicator.statistics()["bytes_sent"]

    def seconds_waited(self) -> float:
        return self.communicator.statistics()["seconds_waited"]

    def failure(self) -> BaseException | None:
        return self.communicator.failure()

    def abort(self, failure: BaseException) -> None:
        self.communicator.abort(failure)

    def tell_raised(self, error: BaseException) -> None:
        self.communicator.tell_raised(error)

    def close(self) -> None:
        self.communicator.close()
