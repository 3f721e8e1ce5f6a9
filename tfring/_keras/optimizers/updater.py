"""The interface between optimizers and weights on a worker, for servers and for local steps of each worker."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfring.cross_device_ops import values_of


class Updater:
    """Receives the gradients of optimizers in a step, and is notified before weights are read.

    Attributes:
      is_star: Whether workers exchange nothing with each other, and each proceeds by itself.
      weighs: Whether gradients are multiplied by their replica's share of the rows.
    """

    is_star = False
    weighs = True

    def settings(self) -> dict[str, Any]:
        """Returns the settings that have to be the same on all ranks, by name."""
        return {}

    def bytes_sent(self) -> int:
        """Returns the number of bytes that this worker has sent outside of the ring."""
        return 0

    def seconds_waited(self) -> float | None:
        """Returns the seconds that this worker has waited outside of the ring; None if they are not counted."""
        return 0.0

    def check_model(self, model: Any) -> None:
        """Raises ConfigurationError for a compiled model that cannot be trained with this updater."""

    def on_build(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Prepares an optimizer that has made its slots."""

    def apply(
        self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any], active: Any, apply: Callable
    ) -> None:
        """Updates variables in a step, in a graph or eagerly, in the cross-replica context.

        Args:
          optimizer: The optimizer that is applied.
          gradients: The gradients of this worker, None for a weight without one.
          variables: The weights.
          active: bool scalar, whether this worker has rows; None if it has.
          apply: Keras' `apply` of this optimizer.
        """
        raise NotImplementedError

    def should_retrace(self) -> bool:
        """Returns True if the step that is being traced has to be traced again, because of reads after its update."""
        return False

    def before_first_step(self, is_traced: bool) -> None:
        """Prepares the first step of training.

        Args:
          is_traced: Whether its graph is traced and has not run yet; otherwise it runs eagerly.
        """

    @contextlib.contextmanager
    def around_lookup(self, variable: Any, ids: Any) -> Iterator[Any]:
        """Updates the rows of a table that a lookup inside reads, and yields the ids to look up."""
        yield ids

    def on_assign(self, variable: Any) -> None:
        """Notes that the program assigns a variable of TensorFlow's outside of a step."""

    @contextlib.contextmanager
    def around_pass(self, epoch_iterator: Any, loop: Any, inside: Any) -> Iterator[None]:
        """Surrounds a pass over batches.

        Args:
          epoch_iterator: The RingEpochIterator.
          loop: Its Loop; None if nothing is trained or evaluated.
          inside: The context manager of the pass itself.
        """
        with inside:
            yield

    def claimed(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Returns the batches that this worker trains on."""
        return dataset

    def callbacks(self, callbacks: list) -> list:
        """Returns the callbacks of `fit`, with others that this updater needs."""
        return callbacks

    def before_evaluation(self, model: Any) -> None:
        """Sets this worker's weights to those of the model that is trained. All ranks call it."""

    def is_at_rest(self, model: Any) -> bool:
        """Returns True if saving now would not change how training continues."""
        return True

    def before_saving(self, model: Any, keep: bool = True) -> None:
        """Sets weights and slots to the values for a file. All ranks call it. `keep`: Whether this rank writes."""


def read(variable: Any) -> Any:
    """Returns the value of a Keras variable on this worker, outside of a replica."""
    return values_of(variable.value)[0]


def assign(variable: Any, value: Any) -> None:
    """Writes a Keras variable on this worker, outside of a replica."""
    for component in values_of(variable.value):
        component.assign(value)
