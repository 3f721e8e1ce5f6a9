"""Collectives of a worker that goes on by itself: what worker 0 has, it learns from a server; all else is its own."""

from __future__ import annotations

import itertools
from typing import Any

import tensorflow as tf

from tfring.ring.collectives import LocalCollectives
from tfring.servers import messages
from tfring.servers.client import Client


class PostedCollectives(LocalCollectives):
    """One process alone, but for `broadcast`: server 0 hands on what worker 0 has posted. All workers call it alike.

    Args:
        client: The connections of this worker.
    """

    reaches_others = True

    def __init__(self, client: Client) -> None:
        self._client = client
        self._numbers = itertools.count()

    def broadcast(self, tensors: Any, root: int = 0, *, name: str) -> list[tf.Tensor]:
        """Returns worker 0's tensors."""
        assert root == 0
        return [self._posted(tf.convert_to_tensor(t), f"{name} {next(self._numbers)}") for t in tensors]

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
