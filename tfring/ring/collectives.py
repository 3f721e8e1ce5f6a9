"""The engines behind one interface: the compiled ring, TensorFlow's collective runtime, and no peers at all.

Everything above `ring/` speaks to an engine through the methods of `Collectives`, on TensorFlow tensors,
eagerly or inside a `tf.function`. `op` is "sum", "max", "min" or "product"; `name` says what is sent, for errors.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence

import tensorflow as tf


def zeros_unless(active: tf.Tensor | None, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The tensors, or zeros of their shapes where `active` is False; NaN does not survive."""
    if active is None:
        return list(tensors)
    return [tf.where(active, t, tf.zeros_like(t)) for t in tensors]


class Collectives(abc.ABC):
    """What an engine offers; all ranks must make the same calls in the same order."""

    rank: int
    world_size: int

    @abc.abstractmethod
    def all_reduce(
        self, tensors: Sequence[tf.Tensor], op: str = "sum", *, name: str, active: tf.Tensor | None = None
    ) -> list[tf.Tensor]:
        """Reduces tensors of one dtype over all ranks, in one collective."""

    @abc.abstractmethod
    def all_gather(self, tensor: tf.Tensor, *, name: str) -> tf.Tensor:
        """Concatenates over ranks along dimension 0, which may differ from rank to rank."""

    def gather_equal(self, tensor: tf.Tensor, *, name: str) -> tf.Tensor:
        """As `all_gather`, of tensors that have the same static shape on every rank: one collective on any engine."""
        gathered = self.all_gather(tensor, name=name)
        gathered.set_shape([self.world_size * tensor.shape[0], *tensor.shape[1:]])
        return gathered

    @abc.abstractmethod
    def gather_rows(
        self,
        values: Sequence[tf.Tensor],
        indices: Sequence[tf.Tensor],
        num_rows: Sequence[tf.Tensor],
        *,
        name: str,
    ) -> list[tuple[tf.Tensor, tf.Tensor]]:
        """The first `num_rows[i]` rows of each padded (values, indices) of every rank, in rank order.

        Where `needs_fixed_shapes`, all rows with their padding.
        """

    @abc.abstractmethod
    def reduce_scatter(self, tensor: tf.Tensor, op: str = "sum", *, name: str) -> tf.Tensor:
        """Reduces over ranks; each rank keeps its chunk of dimension 0 (chunk bounds as in `schedule.py`)."""

    @abc.abstractmethod
    def broadcast(self, tensors: Sequence[tf.Tensor], root: int = 0, *, name: str) -> list[tf.Tensor]:
        """The tensors of rank `root`, on every rank; shapes and dtypes must agree."""

    @abc.abstractmethod
    def barrier(self, *, name: str) -> None:
        """Returns once every rank has called it."""

    def bytes_sent(self) -> int | None:
        """Bytes this rank has sent so far, or None where the engine does not count."""
        return None

    def failure(self) -> BaseException | None:
        """What broke this engine, as an exception of `tfring.errors`; None if nothing did, or it cannot tell."""
        return None

    def abort(self, failure: BaseException) -> None:  # noqa: B027  an engine need not know how
        """Breaks this engine on all ranks for what has failed elsewhere, so that nobody waits in it in vain."""

    @property
    def needs_fixed_shapes(self) -> bool:
        """Whether `gather_rows` needs the same capacity on every rank, because padding travels too."""
        return False

    @abc.abstractmethod
    def close(self) -> None:
        """Leaves the ring."""


class LocalCollectives(Collectives):
    """One process alone: every collective is the identity."""

    rank = 0
    world_size = 1

    def all_reduce(self, tensors, op="sum", *, name, active=None):
        return zeros_unless(active, tensors)

    def all_gather(self, tensor, *, name):
        return tf.identity(tensor)

    def gather_rows(self, values, indices, num_rows, *, name):
        return [(v[:n], i[:n]) for v, i, n in zip(values, indices, num_rows, strict=True)]

    def reduce_scatter(self, tensor, op="sum", *, name):
        return tf.identity(tensor)

    def broadcast(self, tensors, root=0, *, name):
        return [tf.identity(t) for t in tensors]

    def barrier(self, *, name):
        pass

    def bytes_sent(self):
        return 0

    def close(self):
        pass


class RingCollectives(Collectives):
    """The compiled ring (`tfring/ring/native`)."""

    def __init__(self, communicator):
        from tfring.ring import ops

        self._ops = ops
        self.communicator = communicator
        self.rank = communicator.rank
        self.world_size = communicator.world_size

    def all_reduce(self, tensors, op="sum", *, name, active=None):
        return self._ops.all_reduce(self.communicator, list(tensors), op, name=name, active=active)

    def all_gather(self, tensor, *, name):
        return self._ops.all_gather(self.communicator, tensor, name=name)

    def gather_rows(self, values, indices, num_rows, *, name):
        gathered = self._ops.all_gather_rows(
            self.communicator, list(values), list(indices), list(num_rows), name=name
        )
        return [tuple(pair) for pair in gathered]

    def reduce_scatter(self, tensor, op="sum", *, name):
        return self._ops.reduce_scatter(self.communicator, tensor, op, name=name)

    def broadcast(self, tensors, root=0, *, name):
        return self._ops.broadcast(self.communicator, list(tensors), root, name=name)

    def barrier(self, *, name):
        self._ops.barrier(self.communicator, name=name)

    def bytes_sent(self):
        return self.communicator.statistics()["bytes_sent"]

    def failure(self):
        return self.communicator.failure()

    def abort(self, failure):
        self.communicator.abort(failure)

    def close(self):
        self.communicator.close()
