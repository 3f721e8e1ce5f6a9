"""Records Keras' loops in the trace: `fit`, `evaluate` and `predict`, passes over batches, steps, waits for a batch."""

from __future__ import annotations

import contextlib
from typing import Any

import tensorflow as tf

from tfring import _tf
from tfring.ring import trace


def _recorder(ring: Any) -> Any:
    return getattr(ring, "trace", None)


def _control(ring: Any) -> Any:
    return getattr(ring.world, "communicator", None)  # None with one worker


def begin_loop(ring: Any) -> None:
    """Records in the trace that a pass over batches begins."""
    recorder = _recorder(ring)
    if recorder is not None:
        recorder.new_loop()


def entry(ring: Any) -> Any:
    """Returns a context that records a call of `fit`, `evaluate` or `predict`."""
    recorder = _recorder(ring)
    return contextlib.nullcontext() if recorder is None else recorder.entry(ring.trace_source)


def step(ring: Any, kind: str) -> Any:
    """Returns a context that records a call of a step function; `kind` is "train", "test" or "predict"."""
    recorder = _recorder(ring)
    return contextlib.nullcontext() if recorder is None else recorder.step(kind)


def graph_of_step(ring: Any) -> None:
    """Records in the trace that the current step builds a graph, unless this runs eagerly. Called while it is built."""
    recorder = _recorder(ring)
    if recorder is not None and not tf.executing_eagerly():
        recorder.building = True


def compiled(ring: Any, kind: str) -> None:
    """Records in the trace which operations of a step XLA compiles. Called while the graph of the step is built."""
    recorder = _recorder(ring)
    if recorder is None or tf.executing_eagerly():
        return
    types = _tf.types_in_jit_scopes(tf.compat.v1.get_default_graph())
    others = sorted({name for name in types if not _tf.has_xla_kernel(name)})
    recorder.compiled(kind, len(types), sum(name not in others for name in types), others)


def next_batch(ring: Any, draw: Any) -> Any:
    """Calls `draw()`, which creates the ops that wait for the next batch, between two marks; returns its result."""
    recorder = _recorder(ring)
    if recorder is None:
        return draw()
    from tfring.ring import ops

    graph_of_step(ring)
    control = _control(ring)  # its next collective is that of the row counts
    with tf.control_dependencies(ops.mark(trace.INPUT_BEGINS, control)):
        drawn = draw()
    tensors = [t for t in tf.nest.flatten(drawn, expand_composites=True) if tf.is_tensor(t)]
    ops.mark(trace.INPUT_ENDS, control, after=tensors)
    return drawn
