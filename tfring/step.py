"""The running step: what a replica's share of the batch is, and which state it wrote.

Kept for each thread, because `tf.distribute` traces each replica in a thread of its own.
"""

from __future__ import annotations

import contextlib
import threading

import tensorflow as tf

_local = threading.local()


class Step:
    """One replica's view of one step, while it is being traced or run.

    Attributes:
      share: float64 scalar, this replica's rows over the rows of the global batch; None where nobody counted
        (a custom loop), and Keras' own rule, one over the number of replicas, stands.
      active: bool scalar, False where this replica has no row; None where it always has.
      written: Keras variables that the step assigned in this replica.
    """

    def __init__(self, share: tf.Tensor | None = None, active: tf.Tensor | None = None):
        self.share = share
        self.active = active
        self.written: list = []


def current() -> Step | None:
    """The step this thread runs, or None outside a step."""
    return getattr(_local, "step", None)


@contextlib.contextmanager
def running(step: Step):
    """Makes `step` the current one of this thread."""
    before = current()
    _local.step = step
    try:
        yield step
    finally:
        _local.step = before


def written_alike(variable) -> None:
    """Marks a Keras variable that every replica writes with the same value: nobody has to bring it together."""
    variable._tfring_written_alike = True


def is_written_alike(variable) -> bool:
    """Whether `written_alike` marked this variable."""
    return getattr(variable, "_tfring_written_alike", False)
