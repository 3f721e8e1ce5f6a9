"""Finds which replica of this process made each operation of a graph, and its twins: those that the others made.

`tf.distribute` traces the replicas of a process in turn into one graph, each in a scope named `replica_1`, `replica_2`
and so on; the first has none. All run the same program, so the n-th operation of each is the same operation.
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
    """Notes that a replica of this process makes the operations in here.

    Args:
      number: Which, from 0.
      is_scoped: Whether TensorFlow has not entered the scope of the replica.
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
    """Returns True in a graph, where a replica's operations are noted: marks say what they are given and give."""
    return getattr(_local, "replica", None) is not None and not tf.executing_eagerly()


@contextlib.contextmanager
def own() -> Iterator[None]:
    """Around operations of tfring's own, which exchange what replicas hold: they are not looked into, nor converted.

    What comes in is marked by `expect`, what comes out by `declare`. The variables that are written stay as they were.
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

    What replicas merge is made while all of them are in it, and counts as the first's.
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
      count: How many there are; 1 where none is noted.

    Args:
      graph: A FuncGraph.
      needed: The names of operations of which something comes. The first replica alone makes others, of shapes that
        TensorFlow computes while it traces and keeps with the graph.

    Raises:
      DifferentReplicasError: Where replicas did not make the same of those.
    """

    def __init__(self, graph: Any, needed: Collection[str]) -> None:
        spans = _spans.get(graph, ())
        self.count = 1 + max((number for number, _, _ in spans), default=0)
        self._names: dict[str, str] = {}  # of operations of other replicas, those of the first's
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
        """Returns the names of operations that were made where the first replica needed them, as what is captured."""
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
        """Returns the name of the first replica's twin of an operation; of any other operation its own."""
        return self._names.get(op.name, op.name)

    def replica(self, op: Any) -> int:
        """Returns the replica that made an operation; the first of what replicas merge."""
        return self._replicas.get(op.name, 0)


def _replica_of(name: str) -> int:
    found = _SCOPE.search(name)
    return int(found[1]) if found else 0
