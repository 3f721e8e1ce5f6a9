"""Checks that the replicas of a user's own loop take one branch, if the branch exchanges values.

With `if tf.math.is_finite(loss): optimizer.apply(...)`, a replica may skip an update that another makes. Its next
gradients would then be added to those that the other computed one step before.

A number counts the steps outside of the branch: each run of the graph around the outermost branch adds 1; in eager
mode, each call of `strategy.run` does. Replicas compare it, and the branch, before they exchange values in a branch.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfring import _tf
from tfring.runtime import Ring
from tfring.step import Step

_MESSAGE = (
    "Replicas took different branches of a condition, such as `if tf.math.is_finite(loss)`, and one of the branches "
    "applies gradients or calls another function that exchanges values. All replicas must take the same branch. "
    "Reduce the condition over the replicas first, as in `tf.distribute.get_replica_context().all_reduce('sum', "
    "loss)`. (docs/custom_training.md, Loops of your own)"
)
_names = itertools.count()
_counts: weakref.WeakKeyDictionary[Ring, Count] = weakref.WeakKeyDictionary()


class Count:
    """The number of steps that a worker has run outside of branches, an int64 variable."""

    def __init__(self) -> None:
        self._name = f"tfring/steps/{next(_names)}"
        with tf.init_scope(), tf.device("CPU:0"):
            self._handle = tf.raw_ops.VarHandleOp(dtype=tf.int64, shape=[], shared_name=self._name)
            tf.raw_ops.AssignVariableOp(resource=self._handle, value=tf.constant(0, tf.int64))

    def add(self, number: Any) -> Any:
        """Adds to the count; returns the operation in a graph."""
        with tf.device("CPU:0"):
            number = tf.convert_to_tensor(number, tf.int64)
            return tf.raw_ops.AssignAddVariableOp(resource=self._handle, value=number)

    def read(self, *after: Any) -> tf.Tensor:
        with tf.device("CPU:0"), tf.control_dependencies(list(after)):
            return tf.raw_ops.ReadVariableOp(resource=self._handle, dtype=tf.int64)

    def in_branch(self, around: tf.Graph, branch: tf.Graph) -> list[tf.Tensor]:
        """Returns the count, to which each run of the graph around a branch adds 1, and the number of the branch."""
        found = around.get_collection_ref(self._name)  # the count, and the branches
        if not found:
            with around.as_default():
                found.append(self.read(self.add(1)))
        if not any(each is branch for each in found):
            found.append(branch)
        number = next(i for i, each in enumerate(found) if each is branch)
        return [found[0], tf.constant(number, tf.int64)]


def begin_run(ring: Ring) -> None:
    """Counts a call of `strategy.run` in eager mode."""
    if tf.executing_eagerly():
        _count(ring).add(1)


@contextlib.contextmanager
def checked(ring: Ring, running: Step | None) -> Iterator[None]:
    """Makes the operations of the context run only after replicas have found that they are in one branch of one step.

    Outside of a branch, and in steps of Keras, whose conditions are those of one process, nothing is compared.

    Raises:
      tf.errors.InvalidArgumentError: On every replica, if replicas are in different steps or branches.
    """
    is_own_loop = running is not None and running.share is None
    numbers = _numbers(ring) if is_own_loop and not (ring.is_alone or ring.trains_alone) else []
    if not numbers:
        yield
        return
    both = tf.stack([*numbers, *map(tf.negative, numbers)])
    [largest] = ring.control.all_reduce([both], "max", name="whether all replicas take this branch")
    is_equal = tf.reduce_all(tf.equal(largest[: len(numbers)], -largest[len(numbers) :]))
    catch_up = _count(ring).add(largest[0] - numbers[0])  # a program that goes on after the error
    with tf.control_dependencies([catch_up]):
        check = tf.debugging.Assert(is_equal, [_MESSAGE])
    with tf.control_dependencies([check]):
        yield


def _numbers(ring: Ring) -> list[tf.Tensor]:
    """Returns the numbers that are equal on all replicas if they are in one branch of one step; none outside of one."""
    if tf.executing_eagerly():
        return [_count(ring).read()]
    found = _tf.outermost_branch()
    return _count(ring).in_branch(*found) if found else []


def _count(ring: Ring) -> Count:
    if ring not in _counts:
        _counts[ring] = Count()
    return _counts[ring]
