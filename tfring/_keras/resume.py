"""Resumes `fit` at a position in its data: draws, without training, what was drawn before.

A pass is one epoch of training or one validation. Each begins with seeds, generators and PyDatasets as the previous one
left them, so the passes are repeated, each up to the point it had reached. Their batches are drawn only if a later pass
depends on that. Otherwise it depends on the number of iterators made, as each uses the next seed of a shuffle.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfring import _tf
from tfring.data.plan import plan_of
from tfring.errors import ConfigurationError


class _Fit:
    """The data and the logs of a `fit` under way."""

    def __init__(self) -> None:
        self.iterator: Any = None  # Keras' EpochIterator of the training data
        self.logs: dict | None = None  # of the last step before it was interrupted


class Position(NamedTuple):
    """A position in data, of one pass or of several."""

    executions: list[int]  # calls of the step function in each pass; the last is the current pass
    reset: bool  # whether Keras resets the iterator between passes, as for validation


_fits: list[_Fit] = []  # innermost last


@contextlib.contextmanager
def fit_under_way() -> Iterator[None]:
    """Notes that `fit` runs, so that the functions below find its training data and logs."""
    _fits.append(_Fit())
    try:
        yield
    finally:
        _fits.pop()


def training(executions: Sequence[int], logs: dict | None) -> None:
    """Makes the innermost `fit` begin its first epoch at the position that another `fit` had reached in its data.

    Args:
      executions: Number of calls of the step function in each epoch since that `fit` began. The last epoch is the
        current one.
      logs: Logs of the last step, if the current epoch was interrupted.
    """
    _fits[-1].iterator.position = Position(list(executions), reset=False)
    _fits[-1].logs = logs if executions[-1] else None


def skip_passes(number: int) -> None:
    """Makes the innermost `fit` begin its first epoch with the data of a later pass.

    If data keeps something from one pass to the next, it is drawn; data that claims its batches then claims none.

    Args:
      number: Number of earlier passes.
    """
    epoch_iterator = _fits[-1].iterator
    epoch_iterator._num_batches = None
    draws = isinstance(epoch_iterator.source, tf.data.Dataset) and plan_of(epoch_iterator.source).keeps_between_passes
    for _ in range(number):
        step = next(epoch_iterator.begin_pass())
        if draws:
            with contextlib.suppress(tf.errors.OutOfRangeError):
                _tf.draw(step[-1])
        epoch_iterator.data_adapter.on_epoch_end()


def interrupted_logs() -> dict | None:
    """Returns the logs of an epoch that was interrupted after its last step, as no step is left to return them."""
    return _fits[-1].logs if _fits else None


def validation(model: Any, executions: Sequence[int]) -> None:
    """Resumes the validation data of `model` after one validation for each of these numbers of executions."""
    model._eval_epoch_iterator.position = Position([*executions, 0], reset=True)


def draws_from_python() -> bool:
    """Returns True if a pass through the training data may run Python, or depend on the draws of an earlier one."""
    return _keeps_between_passes(_fits[-1].iterator._distributed_dataset)


def note_data(epoch_iterator: Any) -> None:
    """Notes Keras' iterator of the training data of the innermost `fit`: the first iterator that it makes."""
    if _fits and _fits[-1].iterator is None:
        _fits[-1].iterator = epoch_iterator


def fast_forwarded(epoch_iterator: Any, position: Position) -> Iterator[tuple]:
    """Yields the steps of a pass after those that were taken before.

    Args:
      epoch_iterator: A RingEpochIterator.
      position: The position at which the pass continues.
    """
    *past, present = position.executions
    batches = epoch_iterator.steps_per_execution
    # With `steps_per_epoch` one iterator serves all epochs.
    draws = bool(epoch_iterator.steps_per_epoch) or _keeps_between_passes(epoch_iterator._distributed_dataset)
    for executions in past:
        with warnings.catch_warnings(), epoch_iterator.catch_stop_iteration():
            warnings.simplefilter("ignore")  # that the data has run out was reported then
            steps = epoch_iterator.begin_pass()
            _advance(steps, executions, batches if draws else 0)
            if next(steps, None) is not None:
                raise tf.errors.OutOfRangeError(None, None, "the end of a pass of unknown length")
        if position.reset:
            running = epoch_iterator._epoch_iterator
            epoch_iterator.reset()
            epoch_iterator._epoch_iterator = running
    steps = epoch_iterator.begin_pass()
    _advance(steps, present, batches)
    yield from steps


def _advance(steps: Iterator[tuple], executions: int, batches: int) -> None:
    """Takes `executions` steps, and draws `batches` from the iterator in each."""
    for number in range(executions):
        step = next(steps, None)
        if step is None:
            raise ConfigurationError(
                f"The data ends after step {number} of an epoch, but training had reached step {executions} of it "
                "before the restart. Train on the same data."
            )
        for _ in range(batches):
            _tf.draw(step[-1])  # this worker's alone: no collective


def _keeps_between_passes(distributed: Any) -> bool:
    datasets = getattr(distributed, "_cloned_datasets", None)
    if datasets is None:  # `distribute_datasets_from_function`, and anything else that yields batches
        return True
    return any(plan_of(dataset).keeps_between_passes for dataset in datasets)
