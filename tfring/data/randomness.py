"""Determines the components of a dataset that depend on random numbers, so that ranks compare only the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfring import _tf

_RANDOM = ("Random", "TruncatedNormal", "Multinomial", "SampleDistorted", "StatefulUniform", "StatefulStandardNormal")
_ALIKE_ON_RANKS = ("Assert", "Print", "Lookup", "TensorArray", "NoOp")  # stateful, but the same on every rank


def depends_on_randomness(dataset: tf.data.Dataset) -> list[bool]:
    """Returns, for each component, whether ranks may hold different values of the same rows.

    They may after a `map` that draws random numbers, calls Python or reads a variable, in the outputs that depend on
    these, and after later steps that keep the components, such as `zip`, `cache`, `padded_batch`, `unbatch`. A step
    that selects rows by random values, such as `filter`, would select different rows on each rank: after it every
    component is compared.
    """
    inputs = _tf.datasets_before(dataset)
    before = [depends_on_randomness(d) for d in inputs]
    count = len(tf.nest.flatten(dataset.element_spec))
    graphs = _tf.graphs_of(dataset)
    if _tf.dataset_step(dataset).kind == "map":
        reached = _outputs_reached(graphs[0], before[0], _may_differ_by_rank)
        return reached if len(reached) == count else [any(reached)] * count
    reached = _combined(before, count)
    for graph in graphs:
        makes_rows = all(tensor.dtype == tf.variant for tensor in graph.outputs)
        if _takes_rows(graph, inputs) and not makes_rows and any(_outputs_reached(graph, before[0], _is_random)):
            return [False] * count
        if any(map(_is_random, (node.op for node in _tf.nodes_of(graph)))):
            return [True] * count
    return reached


def _combined(before: Sequence[list[bool]], count: int) -> list[bool]:
    """Combines the results for a step's inputs, which are side by side, one after another, or otherwise combined."""
    joined = [reached for of in before for reached in of]
    if len(joined) == count:
        return joined
    alike = [of for of in before if len(of) == count]
    if alike and not any(any(of) for of in before if len(of) != count):  # such an input may choose among the others
        return [any(of) for of in zip(*alike, strict=True)]
    return [any(joined)] * count


def _takes_rows(graph: Any, inputs: Sequence[tf.data.Dataset]) -> bool:
    """Returns whether a function receives the elements of a step's only input."""
    if len(inputs) != 1:
        return False
    specs = tf.nest.flatten(inputs[0].element_spec)
    captured = {id(placeholder) for _, placeholder in graph.captures}
    given = [tensor for tensor in graph.inputs if id(tensor) not in captured]
    return len(given) == len(specs) and all(
        not isinstance(spec, tf.TensorSpec) or (spec.dtype == tensor.dtype and spec.shape.rank == tensor.shape.rank)
        for spec, tensor in zip(specs, given, strict=True)
    )


def _outputs_reached(graph: Any, inputs: Sequence[bool], is_source: Callable[[str], bool]) -> list[bool]:
    """Returns, for each output of a function, whether it depends on a True input or an operation that is a source."""
    reached = {id(tensor) for tensor, is_reached in zip(graph.inputs, inputs, strict=False) if is_reached}
    library = {function.signature.name: function for function in graph.as_graph_def().library.function}
    for operation in graph.get_operations():
        if _has(operation.node_def, library, is_source) or any(id(tensor) in reached for tensor in operation.inputs):
            reached.update(id(tensor) for tensor in operation.outputs)
    return [id(tensor) in reached for tensor in graph.outputs]


def _has(node: Any, library: dict, is_source: Callable[[str], bool]) -> bool:
    """Returns whether an operation is a source; if it calls functions, whether these contain a source."""
    called = _called(node)
    if called:
        return any(_has(n, library, is_source) for name in called if name in library for n in library[name].node_def)
    return is_source(node.op)


def _may_differ_by_rank(kind: str) -> bool:
    """Returns whether operations of a kind may produce different values on each rank."""
    return _tf.is_stateful(kind) and not kind.startswith(_ALIKE_ON_RANKS)


def _is_random(kind: str) -> bool:
    """Returns whether operations of a kind draw random numbers. Python functions, which feed generators, do not."""
    return kind.startswith(_RANDOM) and not kind.endswith("Dataset")


def _called(node: Any) -> list[str]:
    values = node.attr.values()
    return [v.func.name for v in values if v.func.name] + [f.name for v in values for f in v.list.func]
