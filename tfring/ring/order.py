"""Makes the backward pass call collectives in the reverse order of the forward pass, on every rank.

A gradient tape visits operations in an order that depends on the graph, and the graphs of ranks may differ between two
collectives. So each collective that a tape watches takes a scalar from the one before and gives one to the next:

    forward   x ─► A ──done──► B ──done──► C ─►        backward   ◄─ A' ◄┄┄┄┄┄ B' ◄┄┄┄┄┄ C' ◄─ dy

No gradient flows back along the scalar, but a tape begins the gradient of an operation once the gradients of all
operations that use its outputs are done: C', B', A', whatever other operations there are. A collective without a
gradient is skipped. The value of the scalar is the number of the call, and the call of its gradient carries it (`of`),
so that ranks that differentiate different calls disagree.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfring import _tf

_CALLS = ("If", "Case", "While", "StatefulPartitionedCall")


class Line(NamedTuple):
    """The communicators that share a token, so that their collectives run in one order."""

    number: int | str
    token: tf.Tensor
    end: Callable[[tf.Tensor], tf.Tensor]  # makes a float32 scalar from any float tensor; the gradient ends there


@dataclasses.dataclass
class _Chain:
    """Holds the last of the collectives that run in one order in one graph, or eagerly."""

    last: tf.Tensor | None = None  # the scalar of the last collective
    num_seen: int = 0  # operations of the graph that have been inspected


_eager = _Chain()  # one for all communicators: a thread waits in one of them at a time
_chains: weakref.WeakKeyDictionary[tf.Graph, dict[int | str, _Chain]] = weakref.WeakKeyDictionary()
_zeros: weakref.WeakKeyDictionary[tf.Graph, tf.Tensor] = weakref.WeakKeyDictionary()
_eager_zero: list[tf.Tensor] = []


class CallSlot:
    """Position of a collective, or of a function with collectives in its gradient, among those of one token.

    Attributes:
      before: The float32 scalar to use as an input.
    """

    def __init__(self, line: Line, inputs: Sequence[tf.Tensor]) -> None:
        self._records = True
        if tf.executing_eagerly():
            self._chain = _eager if _tf.is_watched(inputs) else _Chain()
        else:
            self._chain = _chain_of(tf.compat.v1.get_default_graph(), line)
            # A tape in this graph orders the collectives that it watches, as if there were no others.
            last = self._chain.last
            self._records = last is None or not _tf.is_watched([last]) or _tf.is_watched(inputs)
        self.before = self.latest()

    def latest(self) -> tf.Tensor:
        """Returns the scalar of the last collective so far."""
        return zero() if self._chain.last is None else self._chain.last

    def recording(self) -> contextlib.AbstractContextManager:
        """Returns the context in which to create the operation."""
        return contextlib.nullcontext() if self._records else _tf.stop_recording()

    def take(self, done: tf.Tensor) -> None:
        """Makes `done` the scalar of the last collective."""
        if self._records:
            self._chain.last = done


def call_in_order(line: Line, function: Callable[..., Any], *args: Any) -> Any:
    """Calls a differentiable function of tensors that calls collectives in its gradient.

    Its gradient runs after the gradients of later calls and before those of earlier calls.
    """
    args = tuple(tf.convert_to_tensor(arg) for arg in args)
    number = next((i for i, arg in enumerate(args) if arg.dtype.is_floating and _tf.is_watched([arg])), None)
    if number is None:
        return function(*args)
    slot = CallSlot(line, args)
    with slot.recording():
        args = (*args[:number], _tf.with_tape_dependencies(args[number], slot.before), *args[number + 1 :])
    results = function(*args)
    result = next(each for each in tf.nest.flatten(results) if each.dtype.is_floating)
    with slot.recording():
        slot.take(_tf.with_tape_dependencies(zero(), result))
    return results


def zero() -> tf.Tensor:
    """Returns the scalar that stands for no call."""
    if tf.executing_eagerly():
        if not _eager_zero:
            _eager_zero.append(_make_zero())
        return _eager_zero[0]
    graph = tf.compat.v1.get_default_graph()
    if graph not in _zeros:
        with tf.control_dependencies(None):
            _zeros[graph] = _make_zero()
    return _zeros[graph]


def _make_zero() -> tf.Tensor:
    with tf.device("CPU:0"):
        return tf.constant(0.0)


def _chain_of(graph: tf.Graph, line: Line) -> _Chain:
    """Returns the chain of a graph, updated with calls of functions that may contain collectives.

    The branches of a `tf.cond` and the body of a `tf.while_loop` begin at the current position of the outer graph;
    other functions begin with an empty chain.
    """
    chains = _chains.setdefault(graph, {})
    chain = chains.get(line.number)
    if chain is None:
        chain = chains[line.number] = _Chain()
        if _tf.is_branch_or_body(graph) and _tf.is_function_graph(graph.outer_graph):
            with graph.outer_graph.as_default():
                before = _chain_of(graph.outer_graph, line).last
                # The gradient ends there: otherwise a loop would send back zeros and call collectives for them.
                chain.last = None if before is None else line.end(before)
    if _tf.is_function_graph(graph):
        operations = graph.get_operations()
        for op in operations[chain.num_seen :]:
            floats = [each for each in op.outputs if each.dtype.is_floating] if op.type in _CALLS else []
            if floats and any(_root(each) is line.token for each in op.inputs if each.dtype == tf.resource):
                chain.last = line.end(min(floats, key=lambda each: each.shape.num_elements() or 1 << 62))
        chain.num_seen = len(operations)
    return chain


def _root(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the tensor that a function's graph, and its outer graphs, have captured as `tensor`."""
    while _tf.is_function_graph(getattr(tensor, "graph", None)):
        captured = next((outer for outer, inner in tensor.graph.captures if inner is tensor), None)
        if captured is None:
            break
        tensor = captured
    return tensor
