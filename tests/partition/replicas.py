"""Runs an edited function on replicas, threads of this process, which together give what all rows give."""

from __future__ import annotations

import functools
import threading

import numpy as np
import tensorflow as tf

from tfring import partition
from tfring.partition import edit

_REDUCE = {"sum": np.add, "max": np.maximum, "min": np.minimum}
_SECONDS = 60


class Meeting:
    """What all replicas exchange in program order."""

    def __init__(self, size):
        self.size = size
        self.names = []
        self._brought = [None] * size
        self._barrier = threading.Barrier(size, timeout=_SECONDS)

    def exchange(self, replica, name, arrays):
        self._brought[replica] = (name, arrays)
        self._barrier.wait()
        brought = list(self._brought)
        self._barrier.wait()
        assert len({name for name, _ in brought}) == 1, [name for name, _ in brought]
        if replica == 0:
            self.names.append(name)
        return [arrays for _, arrays in brought]

    def abort(self):
        self._barrier.abort()


class Exchange:
    """One replica's side of a meeting; see `edit.Exchange`."""

    def __init__(self, meeting, replica):
        self.rows = None
        self.replica = replica
        self._meeting = meeting
        self._last = None

    def note_lines(self, name, lines):
        pass

    def others(self):
        return []

    def all_reduce(self, tensors, op, name):
        return self._call(tensors, name, lambda every: functools.reduce(_REDUCE[op], every), [t.shape for t in tensors])

    def all_gather(self, tensors, name):
        shapes = [tf.TensorShape([None, *t.shape[1:]]) for t in tensors]
        return self._call(tensors, name, lambda every: np.concatenate(every, 0), shapes)

    def _call(self, tensors, name, combine, shapes):
        def meet(*arrays):
            every = self._meeting.exchange(self.replica, name, arrays)
            columns = zip(zip(*every, strict=True), arrays, strict=True)
            return [np.asarray(combine(list(column)), array.dtype) for column, array in columns]

        with tf.control_dependencies([] if self._last is None else [self._last]):
            results = tf.numpy_function(meet, tensors, [t.dtype for t in tensors], stateful=False)
        self._last = results[-1].op
        for result, shape in zip(results, shapes, strict=True):
            result.set_shape(shape)
        return results


def run(function, *arrays, sizes=(5, 3), tolerance=1e-9, held=None):
    """Asserts that every replica has each result of `function(*rows)` as one process has it.

    Where replicas hold parts of a variable, what is written to it has to be such parts again.

    Args:
      function: of tensors that have rows along the first axis; returns tensors in any structure.
      *arrays: all rows, `sum(sizes)` of them.
      sizes: rows of each replica; one without computes on a row of another.
      tolerance: of floats, relative to the largest.
      held: for each replica its part of a variable, whose value the function is given behind the rows.

    Returns:
      The Analysis, and the names of what replicas exchanged.
    """
    state = [] if held is None else [np.sum(held, 0)]
    everything = whole(lambda *rows: function(*rows, *map(tf.constant, state)), *arrays)
    meeting = Meeting(len(sizes))
    ends = np.cumsum(sizes)
    steps, analysis = [], None
    for replica in range(len(sizes)):
        exchange = Exchange(meeting, replica)
        read = None if held is None else tf.Variable(held[replica]).read_value

        def step(counts, *rows, exchange=exchange, read=read):
            nonlocal analysis
            exchange.rows = counts  # no constant, of which TensorFlow would compute with beforehand
            rows = [partition.declare(tensor, "rows") for tensor in rows]
            results = present(function(*rows, *([] if read is None else [read()])))
            written = [] if read is None else results
            written = [partition.expect(r, "sum", f"sum {i}") for i, r in enumerate(written)]
            results = [partition.expect(r, "same", f"result {i}") for i, r in enumerate(results)]
            held = "copies" if read is None else "parts"
            analysis = partition.analyze(tf.compat.v1.get_default_graph(), lambda handle, held=held: held)
            edit.apply(analysis, exchange)
            return results, written

        counts = tf.TensorSpec([len(sizes)], tf.int64)
        steps.append(tf.function(step, autograph=False).get_concrete_function(counts, *specs(arrays)))
    got, sums, errors = [None] * len(sizes), [None] * len(sizes), []

    def work(replica):
        end, size = ends[replica], sizes[replica]
        rows = [a[end - size : end] if size else a[-1:] for a in arrays]
        try:
            results = steps[replica](tf.constant(sizes, tf.int64), *map(tf.constant, rows))
            got[replica], sums[replica] = tf.nest.map_structure(np.asarray, results)
        except Exception as error:
            errors.append(error)  # of any kind: the other threads are not to wait
            meeting.abort()

    threads = [threading.Thread(target=work, args=(replica,)) for replica in range(len(sizes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_SECONDS)
    if errors:
        raise errors[0]
    if any(thread.is_alive() for thread in threads):
        raise TimeoutError(f"A replica has not ended after {_SECONDS} s.")
    bad = {finding.name for finding in analysis.findings}
    for i, result in enumerate(everything):
        if sums[0] and sums[0][i].shape == result.shape and f"sum {i}" not in bad:  # else rows
            total = np.sum([each[i] for each in sums], 0, result.dtype)
            assert_equal(total, result, (i, "sum"), tolerance)
        if f"result {i}" in bad:
            continue
        for replica in range(len(sizes)):
            assert_equal(got[replica][i], result, (i, replica), tolerance)
    return analysis, meeting.names


def whole(function, *arrays):
    """Returns what one process has of all rows."""
    traced = tf.function(lambda *rows: present(function(*rows)), autograph=False)
    return [np.asarray(result) for result in traced.get_concrete_function(*specs(arrays))(*map(tf.constant, arrays))]


def specs(arrays):
    """Returns the specification of each array, of any number of rows."""
    return [tf.TensorSpec([None, *a.shape[1:]], a.dtype) for a in arrays]


def present(results):
    """Returns the tensors in a structure."""
    return [tf.convert_to_tensor(r) for r in tf.nest.flatten(results) if r is not None]


def assert_equal(part, whole, where, tolerance):
    """Asserts that an array is another, where that is finite; `where` is shown on failure."""
    assert part.shape == whole.shape, (where, part.shape, whole.shape)
    if part.dtype.kind in "fc":
        # Where one process divides by zero, parts of a sum may be of both signs: infinity minus infinity.
        is_finite = np.isfinite(whole)
        np.testing.assert_array_equal(np.isfinite(part), is_finite, str(where))
        part, whole = np.where(is_finite, part, 0), np.where(is_finite, whole, 0)
        size = 1.0 + np.abs(whole).max(initial=0)
        np.testing.assert_allclose(part / size, whole / size, rtol=tolerance, atol=tolerance, err_msg=str(where))
    else:
        np.testing.assert_array_equal(part, whole, str(where))
