"""Runs a function of rows on all rows and on the rows of replicas, and compares with what the analysis says of it."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import tensorflow as tf

from tfring import partition
from tfring.partition.analysis import Walk
from tfring.partition.dims import Dim, symbols
from tfring.partition.types import Partial, Replicate, Shard, Unplaced

SIZES = (5, 3)


class Checked:
    """What the analysis says of each result of a function, all of which was compared with what replicas compute.

    Attributes:
      values: of the results.
      findings: of the marks in the function.
    """

    def __init__(self, values, findings):
        self.values = values
        self.findings = findings

    @property
    def reasons(self):
        """Of each result why it is not placed; None where it is."""
        return [v.placement.reason if isinstance(v.placement, Unplaced) else None for v in self.values]


def check(function, *arrays, sizes=SIZES, tolerance=1e-9):
    """Analyzes `function(*rows)` and compares each result that is placed.

    Args:
      function: of tensors that have rows along the first axis; returns tensors in any structure.
      *arrays: all rows, `sum(sizes)` of them.
      sizes: rows of each replica.
      tolerance: of floats, relative to the largest.
    """
    traced = _traced(function, arrays)
    graph = traced.graph
    walk = Walk()
    known = walk.graph(graph, [walk.input(tensor) for tensor in graph.inputs])
    values = [known[tensor.name] for tensor in graph.outputs]
    kept = {op.name: tensor for op, tensor in zip(graph.kept, graph.kept_counts, strict=True)}
    count = len(values) - len(kept)
    everything = [np.asarray(result) for result in traced(*map(tf.constant, arrays))]
    ends = np.cumsum(sizes)
    parts = [
        [np.asarray(result) for result in traced(*(tf.constant(a[end - size : end]) for a in arrays))]
        for size, end in zip(sizes, ends, strict=True)
    ]
    numbers = [{"n": int(ends[-1])}, *({"n": size} for size in sizes)]
    for results, known_sizes in zip([everything, *parts], numbers, strict=True):
        for name, number in zip(kept, results[count:], strict=True):
            known_sizes[f"rows:{graph.name}/{name}"] = int(number)
    for i, value in enumerate(values[:count]):
        compare(
            value,
            everything[i],
            [part[i] for part in parts],
            numbers,
            where=(i, graph.outputs[i].op.name, value),
            tolerance=tolerance,
        )
    return Checked(values[:count], walk.findings)


def _traced(function, arrays):
    @tf.function(autograph=False)
    def of_rows(*rows):
        rows = [partition.declare(tensor, "rows") for tensor in rows]
        results = [tf.convert_to_tensor(r) for r in tf.nest.flatten(function(*rows))]
        graph = tf.compat.v1.get_default_graph()
        graph.kept = [op for op in graph.get_operations() if op.type == "Where"]
        graph.kept_counts = [tf.shape(op.outputs[0])[0] for op in graph.kept]
        return [*map(tf.identity, results), *map(tf.identity, graph.kept_counts)]

    return of_rows.get_concrete_function(*(tf.TensorSpec([None, *a.shape[1:]], a.dtype) for a in arrays))


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
    if isinstance(value.placement, Unplaced) or value.points_into is not None:
        return
    if value.shape is not None and all(_is_known(size, numbers[0]) for size in value.shape):
        assert tuple(_number(size, numbers[0]) for size in value.shape) == whole.shape, where
    if value.const is not None:
        consts = [
            np.array([_number(s, known) for s in np.ravel(value.const)]).reshape(np.shape(value.const))
            for known in numbers
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
            for part in parts:
                _assert_equal(part, whole, where, tolerance)
        case Shard(axis, blocks):
            if isinstance(blocks, tuple) and not all(_is_known(size, numbers[0]) for size in blocks):
                return
            cuts = [_blocks(part, axis, blocks, known) for part, known in zip(parts, numbers[1:], strict=True)]
            joined = [block for same in zip(*cuts, strict=True) for block in same]
            _assert_equal(np.concatenate(joined, axis), whole, where, tolerance)
        case Partial(op):
            reduced = {"sum": np.add, "max": np.maximum, "min": np.minimum}[op].reduce(np.stack(parts), 0)
            _assert_equal(reduced, whole, where, tolerance)


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
        factor *= (mine[name] / whole[name]) ** float(Fraction(power)) if whole[name] else np.nan
    return part * factor if scale else part


def _assert_equal(part, whole, where, tolerance):
    assert part.shape == whole.shape, (where, part.shape, whole.shape)
    if part.dtype.kind in "fc":
        is_finite = np.isfinite(part) & np.isfinite(whole)  # infinities of replicas may cancel to NaN
        part, whole = np.where(is_finite, part, 0), np.where(is_finite, whole, 0)
        size = 1.0 + np.abs(whole).max(initial=0)
        np.testing.assert_allclose(part / size, whole / size, rtol=tolerance, atol=tolerance, err_msg=str(where))
    else:
        np.testing.assert_array_equal(part, whole, str(where))
