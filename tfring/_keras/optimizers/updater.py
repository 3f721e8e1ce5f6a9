"""The interface of what stands between optimizers and weights on a worker: servers, or steps of each worker's own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfring.cross_device_ops import values_of


class Updater:
    """Takes the gradients of optimizers in a step, and is notified before weights are read.

    Attributes:
      is_star: Whether workers exchange nothing with each other, and each goes on by itself.
      weighs: Whether gradients come times their replica's share of the rows.
    """

    is_star = False
    weighs = True

    def settings(self) -> dict[str, Any]:
        """Returns what has to be the same on all ranks, by name."""
        return {}

    def bytes_sent(self) -> int:
        """Returns the bytes this worker has sent beside the ring."""
        return 0

    def seconds_waited(self) -> float | None:
        """Returns the seconds this worker has waited beside the ring; None if they are not counted."""
        return 0.0

    def check_model(self, model: Any) -> None:
        """Raises ConfigurationError for a compiled model that cannot be trained so."""

    def on_build(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Prepares an optimizer that has made its slots."""

    def apply(
        self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any], active: Any, apply: Callable
    ) -> None:
        """Updates variables in a step, in a graph or eagerly, in the cross-replica context.

        Args:
          optimizer: Whose update it is.
          gradients: Of this worker, None where there is none.
          variables: The weights.
          active: bool scalar, whether this worker has rows; None where it does.
          apply: Keras' `apply` of this optimizer.
        """
        raise NotImplementedError

    def reads_more(self) -> bool:
        """Returns True if the step that is being traced has to be traced again, for what it reads after its update."""
        return False

    def before_first_step(self, is_traced: bool) -> None:
        """Prepares the first step of training.

        Args:
          is_traced: Whether its graph is traced, and not yet run; else it runs eagerly.
        """

    @contextlib.contextmanager
    def around_lookup(self, variable: Any, ids: Any) -> Iterator[Any]:
        """Makes the rows of a table current that a lookup inside reads, and yields the ids to look up."""
        yield ids

    def on_assign(self, variable: Any) -> None:
        """Notes that the program assigns a variable of TensorFlow's outside of a step."""

    @contextlib.contextmanager
    def around_pass(self, epoch_iterator: Any, loop: Any, inside: Any) -> Iterator[None]:
        """Surrounds a pass over batches.

        Args:
          epoch_iterator: The RingEpochIterator.
          loop: Its Loop; None where nothing is trained or evaluated.
          inside: The context manager of the pass itself.
        """
        with inside:
            yield

    def claimed(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Returns the batches that this worker trains on."""
        return dataset

    def callbacks(self, callbacks: list) -> list:
        """Returns the callbacks of `fit`, with others that this needs."""
        return callbacks

    def before_evaluation(self, model: Any) -> None:
        """Makes this worker's weights those of the model that is trained; all ranks call it."""

    def is_at_rest(self, model: Any) -> bool:
        """Returns True if saving now would not change how training goes on."""
        return True

    def before_saving(self, model: Any, keep: bool = True) -> None:
        """Makes weights and slots what a file holds; all ranks call it. `keep`: this rank writes."""


def read(variable: Any) -> Any:
    """Returns the value of a Keras variable on this worker, outside of a replica."""
    return values_of(variable.value)[0]


def assign(variable: Any, value: Any) -> None:
    """Writes a Keras variable on this worker, outside of a replica."""
    for component in values_of(variable.value):
        component.assign(value)
