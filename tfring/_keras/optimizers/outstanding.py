"""Exchanges what `tfring.Delayed` and `tfring.OneStepLate` hold back before weights are read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras

from tfring import step
from tfring._keras.optimizers import optimizers_of
from tfring._keras.optimizers.updater import Updater
from tfring._keras.sharding import mark_of
from tfring._keras.sharding.shards import is_value
from tfring.cross_device_ops import values_of
from tfring.errors import ConfigurationError

if TYPE_CHECKING:
    from tfring.strategy.ring import RingStrategy

_NOT_WITH = ("use_ema", "gradient_accumulation_steps")


class Outstanding(Updater):
    """Holds something back from step to step, for each optimizer in its `_tfring_window`.

    Args:
      strategy: the RingStrategy.
      asked: the object given as `synchronization`.
    """

    def __init__(self, strategy: RingStrategy, asked: Any) -> None:
        self.strategy = strategy
        self._asked = asked
        self._given = f"synchronization={type(asked).__name__}(...)"

    def _synchronize(self, optimizer: Any) -> None:
        """Exchanges and applies what is held back, on all workers, in a graph or eagerly, in the strategy's scope."""
        raise NotImplementedError

    # -- optimizers and steps --------------------------------------------------------------------------------------

    def _problem_of(self, optimizer: Any, variables: Sequence[Any]) -> str | None:
        """Returns what an optimizer has that does not go with it; None where it has nothing of it."""
        problem = next((f"{n}={getattr(optimizer, n)!r}" for n in _NOT_WITH if getattr(optimizer, n, None)), None)
        if optimizer._delegates:
            problem = "an optimizer around others"
        for variable in variables:
            if mark_of(variable).sharding or mark_of(variable).update or is_value(variable):
                problem = f"the variable {variable.path!r}, which is sharded or no plain weight"
        return problem

    def _check_optimizer(self, optimizer: Any, variables: Sequence[Any]) -> None:
        problem = self._problem_of(optimizer, variables)
        if problem:
            raise ConfigurationError(
                f"With {self._given} each worker holds full weights, and its own optimizer updates them. Received: "
                f"{type(optimizer).__name__} {optimizer.name!r} with {problem}. Leave it out, or train without "
                f"{type(self._asked).__name__}."
            )

    def _running_step(self, optimizer: Any) -> step.Step:
        """Returns the step under way, in which the rows of each worker are known."""
        running = step.current()
        if running is None or (self.strategy.num_replicas_in_sync > 1 and running.share is None):
            raise ConfigurationError(
                f"With {self._given} models are trained by Keras' steps, which know the rows of each worker. Received: "
                f"apply of {type(optimizer).__name__} {optimizer.name!r} in a loop of your own. Use `fit` or "
                f"`train_on_batch`, or train without {type(self._asked).__name__}."
            )
        return running

    # -- where weights are read ------------------------------------------------------------------------------------

    def before_evaluation(self, model: Any) -> None:
        for optimizer in optimizers_of(model):
            window = getattr(optimizer, "_tfring_window", None)
            if window is not None and int(read(window.num_steps)) > 0:
                with self.strategy.scope():
                    self._synchronize(optimizer)

    def before_saving(self, model: Any, keep: bool = True) -> None:
        self.before_evaluation(model)

    @contextlib.contextmanager
    def around_pass(self, epoch_iterator: Any, loop: Any, inside: Any) -> Iterator[None]:
        with inside:
            yield
        if loop is not None and loop.kind == "train":
            self.before_evaluation(loop.model)


def zeros(shape: Any, dtype: Any, name: str) -> Any:
    """Returns a variable of this worker's own, in `variables_of_worker`."""
    return keras.Variable("zeros", shape=shape, dtype=dtype, trainable=False, name=name)


def read(variable: Any) -> Any:
    """Returns the value of a Keras variable on this worker, outside of a replica."""
    return values_of(variable.value)[0]


def assign(variable: Any, value: Any) -> None:
    """Writes a Keras variable on this worker, outside of a replica."""
    for component in values_of(variable.value):
        component.assign(value)
