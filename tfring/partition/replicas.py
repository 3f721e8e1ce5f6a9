"""Finds the replica of this process that made each operation of a graph, and the twins that other replicas made.

`tf.distribute` traces the replicas of a process in turn into one graph, each in a scope named `replica_1`, `replica_2`
and so on, except the first, which has no scope. All run the same program, so the n-th operations of all are twins.
"""

from __future__ import annotations

import contextlib
import re
import threading
import weakref
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfring import _tf
from tfring.setting import setting

_SCOPE = re.compile(r"(?:^|/)replica_(\d+)(?:_\d+)?/")
_spans: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # by graph: (replica, first operation, end)
_own: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # by graph: (replica or None, first operation, end)
_local = threading.local()


class DifferentReplicasError(Exception):
    """The replicas of this process did not trace the same operations."""


@contextlib.contextmanager
def replica(number: int, is_scoped: bool = False) -> Iterator[None]:
    """Opens a context whose operations are recorded as those of one replica of this process.

    Args:
      number: Number of the replica, from 0.
      is_scoped: Whether to enter the scope of the replica, if TensorFlow has not.
    """
    if tf.executing_eagerly():
        yield
        return
    graph = tf.compat.v1.get_default_graph()
    begin = len(graph.get_operations())
    scope = tf.name_scope(f"replica_{number}") if is_scoped and number else contextlib.nullcontext()
    with setting(_local, "replica", number), scope, _tf.traced_summaries():
        yield
    _spans.setdefault(graph, []).append((number, begin, len(graph.get_operations())))


def is_noted() -> bool:
    """Returns True in a graph while a replica's operations are recorded; marks then describe inputs and outputs."""
    return getattr(_local, "replica", None) is not None and not tf.executing_eagerly()


@contextlib.contextmanager
def own() -> Iterator[None]:
    """Opens a context for tfring's own operations, which exchange tensors: they are neither analyzed nor converted.

    The caller must mark their inputs by `expect` and their outputs by `declare`. For the analysis, variables that they
    write keep their values.
    """
    if tf.executing_eagerly():
        yield
        return
    graph = tf.compat.v1.get_default_graph()
    begin = len(graph.get_operations())
    yield
    _own.setdefault(graph, []).append((getattr(_local, "replica", None), begin, len(graph.get_operations())))


def names_of_own(graph: Any) -> set[str]:
    """Returns the names of the operations of a graph that were made in `own`.

    Operations of a merge of replicas are made while all replicas are in it, and count as the first replica's.
    """
    operations = graph.get_operations()
    return {
        op.name
        for number, begin, end in _own.get(graph, ())
        for op in operations[begin:end]
        if number is None or _replica_of(op.name) == number
    }


class Twins:
    """The replicas of this process in a graph.

    Attributes:
      count: Number of replicas; 1 if none is recorded.

    Args:
      graph: A FuncGraph.
      needed: Names of operations that effects or marks depend on, effects included. Only the first replica makes other
        operations, for shapes that TensorFlow computes while tracing and keeps with the graph.

    Raises:
      DifferentReplicasError: If replicas did not make the same needed operations.
    """

    def __init__(self, graph: Any, needed: Collection[str]) -> None:
        spans = _spans.get(graph, ())
        self.count = 1 + max((number for number, _, _ in spans), default=0)
        self._names: dict[str, str] = {}  # of operations of other replicas: the names of their twins in the first
        self._replicas: dict[str, int] = {}
        if self.count == 1:
            return
        own, operations = names_of_own(graph), graph.get_operations()
        for number, begin, end in spans:
            mine = (op for op in operations[begin:end] if _replica_of(op.name) == number and op.name not in own)
            self._replicas.update((op.name, number) for op in mine)
        shared = self._shared(operations)
        sequences: list[list] = [[] for _ in range(self.count)]
        for op in operations:
            if op.name in self._replicas and op.name in needed and op.name not in shared:
                sequences[self._replicas[op.name]].append(op)
        first, *others = sequences
        for ops in others:
            if [op.type for op in ops] != [op.type for op in first]:
                raise DifferentReplicasError
            self._names.update((op.name, twin.name) for op, twin in zip(ops, first, strict=True))

    def _shared(self, operations: Sequence[Any]) -> set[str]:
        """Returns the names of operations that the first replica to need them made for all, such as captures."""
        found: set[str] = set()
        for op in reversed(operations):
            replica = self._replicas.get(op.name)
            if replica is None:
                continue
            for consumer in (consumer.name for tensor in op.outputs for consumer in tensor.consumers()):
                if op.type == "Placeholder" or consumer in found or self._replicas.get(consumer, replica) != replica:
                    found.add(op.name)
                    break
        return found

    def name(self, op: Any) -> str:
        """Returns the name of the first replica's twin of an operation; for other operations, their own name."""
        return self._names.get(op.name, op.name)

    def replica(self, op: Any) -> int:
        """Returns the replica that made an operation; the first for operations of a merge of replicas."""
        return self._replicas.get(op.name, 0)


def _replica_of(name: str) -> int:
    found = _SCOPE.search(name)
    return int(found[1]) if found else 0
