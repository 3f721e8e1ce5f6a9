"""Runs an edited function on replicas of this process and compares with what the analysis says of its results."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import tensorflow as tf
from replicas import assert_equal, present, specs, whole

from tfring import partition
from tfring.partition.dims import Dim, symbols
from tfring.partition.types import Partial, Replicate, Shard, Unplaced

SIZES = (5, 3)


class InOneProcess:
    """See `edit.Exchange`: all replicas are of this process, which has reduced and concatenated what they have."""

    replica = 0

    def __init__(self, rows):
        self.rows = rows

    def note_lines(self, name, lines):
        pass

    def others(self):
        return []

    def all_reduce(self, tensors, op, name):
        return [tf.identity(tensor) for tensor in tensors]

    def all_gather(self, tensors, name):
        return [tf.identity(tensor) for tensor in tensors]


def check(function, *arrays, sizes=SIZES, tolerance=1e-9, expected="same"):
    """Edits `function(*rows)`, compares each result with its type, and what is expected of it with one process.

    Args:
      function: of tensors that have rows along the first axis; returns tensors in any structure.
      *arrays: all rows, `sum(sizes)` of them.
      sizes: rows of each replica.
      tolerance: of floats, relative to the largest.
      expected: what results are marked to be, see `partition.expect`.

    Returns:
      The results' Values, and the Analysis.
    """
    everything, whole_counts = _with_counts(function, arrays)
    analysis = values = None

    def step(counts, *rows):
        nonlocal analysis, values
        graph, results, marked, kept = tf.compat.v1.get_default_graph(), [], [], []
        for replica in range(len(sizes)):
            begin = len(graph.get_operations())
            with partition.replica(replica, is_scoped=True):
                mine = rows[replica * len(arrays) : (replica + 1) * len(arrays)]
                results.append(present(function(*(partition.declare(tensor, "rows") for tensor in mine))))
                marked.append([partition.expect(r, expected, f"result {i}") for i, r in enumerate(results[-1])])
            kept.append(_kept(graph.get_operations()[begin:]))
        analysis = partition.analyze(graph)
        values = [analysis.values[result.name] for result in results[0]]
        partition.apply_edits(analysis, InOneProcess(counts))
        numbers = [[tf.shape(op.outputs[0])[0] for op in ops] for ops in kept]
        names = [f"rows:{graph.name}/{op.name}" for op in kept[0]]
        return tf.nest.map_structure(
            tf.identity, (results, marked, [dict(zip(names, each, strict=True)) for each in numbers])
        )

    results, marked, own_counts = _run(step, arrays, sizes)
    numbers = [{"n": sum(sizes), **dict(zip(own_counts[0], whole_counts, strict=True))}]
    numbers += [{"n": size, **mine} for size, mine in zip(sizes, own_counts, strict=True)]
    numbers = [{name: int(number) for name, number in each.items()} for each in numbers]
    for i, value in enumerate(values):
        compare(value, everything[i], [each[i] for each in results], numbers, (i, value), tolerance)
    found = {finding.name for finding in analysis.findings}
    for i in range(len(values) if expected == "same" else 0):
        for replica in range(len(sizes)):
            if f"result {i}" not in found:
                assert_equal(marked[replica][i], everything[i], (i, replica, values[i]), tolerance)
    return values, analysis


def on_replicas(function, *arrays, sizes=SIZES):
    """Edits `function(*rows)`, whose results are to be the same; returns those of each replica, and the Analysis."""
    analysis = None

    def step(counts, *rows):
        nonlocal analysis
        results = []
        for replica in range(len(sizes)):
            with partition.replica(replica, is_scoped=True):
                mine = rows[replica * len(arrays) : (replica + 1) * len(arrays)]
                found = present(function(*(partition.declare(tensor, "rows") for tensor in mine)))
                results.append([partition.expect(r, "same", f"result {i}") for i, r in enumerate(found)])
        analysis = partition.analyze(tf.compat.v1.get_default_graph())
        partition.apply_edits(analysis, InOneProcess(counts))
        return tf.nest.map_structure(tf.identity, results)

    return _run(step, arrays, sizes), analysis


def _run(step, arrays, sizes):
    """Returns the results of `step(counts, *rows)`, of the rows of each replica in turn."""
    ends = np.cumsum(sizes)
    parts = [tf.constant(a[end - size : end]) for size, end in zip(sizes, ends, strict=True) for a in arrays]
    traced = tf.function(step, autograph=False).get_concrete_function(
        tf.TensorSpec([len(sizes)], tf.int64), *specs(arrays) * len(sizes)
    )
    return tf.nest.map_structure(np.asarray, traced(tf.constant(sizes, tf.int64), *parts))


def _kept(operations):
    return [op for op in operations if op.type == "Where"]


def _with_counts(function, arrays):
    """Returns what one process has of all rows, and how many rows each mask keeps."""
    count = 0

    def counted(*rows):
        nonlocal count
        results = present(function(*rows))
        count = len(results)
        return results + [tf.shape(op.outputs[0])[0] for op in _kept(results[0].graph.get_operations())]

    results = whole(counted, *arrays)
    return results[:count], results[count:]


def compare(value, whole, parts, numbers, where, tolerance):
    """Asserts that a value says how the parts of replicas make the whole.

    Args:
      value: a Value.
      whole: of all rows.
      parts: of each replica's.
      numbers: what symbols stand for: of all rows, then of each replica's.
      where: shown on failure.
      tolerance: of floats.
    """
    if isinstance(value.placement, Unplaced) or value.indexed_rows is not None:
        return
    if value.shape is not None and all(_is_known(size, numbers[0]) for size in value.shape):
        assert tuple(_number(size, numbers[0]) for size in value.shape) == whole.shape, where
    if value.const is not None:
        consts = [
            np.array([_number(s, known) for s in np.ravel(value.const)]).reshape(np.shape(value.const))
            for known in (numbers[:1] * len(numbers) if value.is_total else numbers)
        ]
        for const, result in zip(consts, [whole, *parts], strict=True):
            np.testing.assert_array_equal(const, result, str(where))
        return
    if any(name not in numbers[0] for name, _ in value.scale):
        return
    parts = [_scaled(part, value.scale, numbers[0], mine) for part, mine in zip(parts, numbers[1:], strict=True)]
    if value.is_zero:
        for each in [whole, *parts]:
            assert not np.any(np.nan_to_num(each)), where
        return
    match value.placement:
        case Replicate():
            for part, mine in zip(parts, numbers[1:], strict=True):
                if all(mine[name] or not numbers[0][name] for name, _ in value.scale):  # else it holds no such value
                    assert_equal(part, whole, where, tolerance)
        case Shard(axis, blocks):
            if isinstance(blocks, tuple) and not all(_is_known(size, numbers[0]) for size in blocks):
                return
            cuts = [_blocks(part, axis, blocks, known) for part, known in zip(parts, numbers[1:], strict=True)]
            joined = [block for same in zip(*cuts, strict=True) for block in same]
            assert_equal(np.concatenate(joined, axis), whole, where, tolerance)
        case Partial(op):
            reduced = {"sum": np.add, "max": np.maximum, "min": np.minimum}[op].reduce(np.stack(parts), 0)
            assert_equal(reduced, whole, where, tolerance)


def _blocks(part, axis, blocks, known):
    if isinstance(blocks, tuple):
        return np.split(part, np.cumsum([_number(size, known) for size in blocks])[:-1], axis)
    return np.split(part, _number(blocks, known), axis)


def _is_known(size, known):
    return size is not None and all(name in known for name in symbols(size))


def _number(size, known):
    if not isinstance(size, Dim):
        return int(size)
    return size.coefficient * int(np.prod([known[name] ** power for name, power in size.powers]))


def _scaled(part, scale, whole, mine):
    factor = 1.0
    for name, power in scale:
        share = mine[name] / whole[name] if whole[name] else 1.0  # as one process computes of none
        factor *= share ** float(Fraction(power)) if share else 0.0
    if not scale:
        return part
    return part * factor if factor else np.zeros_like(part)  # of a replica without rows
