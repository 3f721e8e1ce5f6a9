"""Collectives of a worker that trains independently of the others.

During training it gets worker 0's values from a server, and everything else is its own. Values that the program itself
exchanges, by the functions for scripts, are sent to server 0 by all workers that are left.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfring.errors import MismatchError, PeerLostError
from tfring.ring.collectives import LocalCollectives
from tfring.servers import messages
from tfring.servers.client import Client


class PostedCollectives(LocalCollectives):
    """Collectives of one process alone, except `broadcast`: server 0 passes on what worker 0 has posted.

    All workers make the same calls of `broadcast`.

    Args:
      client: The connections of this worker to the servers.
    """

    reaches_others = True

    def __init__(self, client: Client) -> None:
        self._client = client
        self._numbers = itertools.count()

    def broadcast(self, tensors: Any, root: int = 0, *, name: str) -> list[tf.Tensor]:
        """Returns worker 0's tensors."""
        assert root == 0
        in_graph = "" if tf.executing_eagerly() else " in a graph"
        return [self._posted(tf.convert_to_tensor(t), f"{name} {next(self._numbers)}{in_graph}") for t in tensors]

    def tell_raised(self, error: BaseException) -> None:
        self._client.tell_raised(error)

    def _posted(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        if tensor.dtype.name not in messages.DTYPES:
            return tensor

        def post(value: Any) -> Any:
            own = [value] if self._client.rank == 0 else []
            return self._client.ask(0, "post", {"name": name}, own)[1][0]

        if tf.executing_eagerly():
            return tf.constant(post(tensor.numpy()))
        result = tf.numpy_function(post, [tensor], tensor.dtype, stateful=True)
        result.set_shape(tensor.shape)
        return result


_REDUCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "sum": np.add, "product": np.multiply, "max": np.maximum, "min": np.minimum,
}  # fmt: skip


class MeetingCollectives:
    """Collectives that the program itself calls, over all workers that are left, if workers train independently.

    A lost worker does not take part. If it comes back, the calls that the others made while it was away return what
    the others exchanged. All others make the same calls, outside of training steps.

    Args:
      rank: Rank of this worker.
      world_size: Number of workers at the start of the job.
      meet: A function that sends arrays to server 0, and returns their sums over all workers that are left.
    """

    def __init__(
        self, rank: int, world_size: int, meet: Callable[[str, list[np.ndarray]], list[np.ndarray]]
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._meet = meet

    def barrier(self, *, name: str) -> None:
        """Blocks until every worker that is left has called it."""
        self._gather([], name)

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: str = "sum", *, name: str) -> list[tf.Tensor]:
        """See `Collectives.all_reduce`."""
        about = f"{name} ({op} of {', '.join(f'{t.dtype.name} {t.shape.as_list()}' for t in tensors)})"
        return self._call(tensors, about, lambda every: [functools.reduce(_REDUCTIONS[op], its) for its in every])

    def largest(self, numbers: Sequence[int], *, name: str) -> list[int]:
        """See `Collectives.largest`."""
        return self.all_reduce([tf.constant(numbers, tf.int64)], "max", name=name)[0].numpy().tolist()

    def all_gather(self, tensor: Any, *, name: str) -> Any:
        """See `Collectives.all_gather`."""
        tensors = tensor if isinstance(tensor, (list, tuple)) else [tensor]
        results = self._call(tensors, name, lambda every: [np.concatenate(its) for its in every], rows=True)
        return results if isinstance(tensor, (list, tuple)) else results[0]

    def gather_equal(self, tensor: tf.Tensor, *, name: str) -> tf.Tensor:
        """See `Collectives.gather_equal`."""
        return self.all_gather(tensor, name=name)

    def broadcast(self, tensors: Sequence[tf.Tensor], root: int = 0, *, name: str) -> list[tf.Tensor]:
        """See `Collectives.broadcast`."""
        own = tensors if self.rank == root else [t[:0] if t.shape.rank else t for t in tensors]

        def of_root(values: list[np.ndarray]) -> list[np.ndarray]:
            found = self._gather(values, f"{name} from rank {root}")
            if root not in found:
                raise PeerLostError(f"{name}: rank {root}, which has the values, is lost.")
            return found[root]

        return self._run(own, of_root, [t.shape for t in tensors])

    def _call(
        self,
        tensors: Sequence[tf.Tensor],
        name: str,
        combine: Callable[[list[list[np.ndarray]]], list[np.ndarray]],
        rows: bool = False,
    ) -> list[tf.Tensor]:
        def combined(values: list[np.ndarray]) -> list[np.ndarray]:
            found = self._gather(values, name)
            its = combine([list(each) for each in zip(*found.values(), strict=True)])
            return [np.asarray(a, v.dtype) for a, v in zip(its, values, strict=True)]

        shapes = [tf.TensorShape([None, *t.shape[1:]]) if rows else t.shape for t in tensors]
        return self._run(tensors, combined, shapes)

    def _run(
        self,
        tensors: Sequence[tf.Tensor],
        function: Callable[[list[np.ndarray]], list[np.ndarray]],
        shapes: Sequence[tf.TensorShape],
    ) -> list[tf.Tensor]:
        """Runs a function of arrays on tensors, eagerly or in a graph."""
        if tf.executing_eagerly():
            return [tf.constant(array) for array in function([t.numpy() for t in tensors])]
        dtypes = [t.dtype for t in tensors]
        results = tf.numpy_function(lambda *arrays: function(list(arrays)), tensors, dtypes, stateful=True)
        for result, shape in zip(results, shapes, strict=True):
            result.set_shape(shape)
        return results

    def _gather(self, arrays: Sequence[np.ndarray], name: str) -> dict[int, list[np.ndarray]]:
        """Returns the arrays of each worker that is left, by rank.

        Raises:
          MismatchError: On all workers, if one of them makes a different call.
        """
        message = messages.pack({"call": name}, arrays)
        lengths = np.zeros([self.world_size], np.int64)
        lengths[self.rank] = message.size
        [lengths] = self._meet("exchange", [lengths])
        ends = np.cumsum(lengths)
        every = np.zeros([int(ends[-1])], np.uint8)
        if lengths[self.rank]:  # otherwise it came back after this call, and takes what the others exchanged
            every[ends[self.rank] - lengths[self.rank] : ends[self.rank]] = message
        [every] = self._meet("exchange", [every])
        found, calls = {}, {}
        for rank, (end, length) in enumerate(zip(ends.tolist(), lengths.tolist(), strict=True)):
            part = every[end - length : end].copy()
            if part.any():  # otherwise it was lost before, or between the two
                head, found[rank] = messages.unpack(part)
                calls[rank] = head["call"]
        other = next((rank for rank, call in calls.items() if call != name), None)
        if other is not None:
            raise MismatchError(
                f"Workers exchange different values: {name!r} on rank {self.rank}, {calls[other]!r} on rank {other}. "
                "All workers must exchange the same values in the same order."
            )
        return found
