"""Checks, in a model with known calls, that outputs which a layer leaves in parts go to layers that take parts.

```
leaves_parts ─► what works element by element ─► takes_parts        each worker its own features, one sum at the end
             ─► a layer with weights, an output of the model        weights that differ from worker to worker: refused
full ─────────────────────────────────────────► takes_parts        each feature once a worker: refused
```

For some operations it is unknown whether they work element by element, and for calls made in Python where they go.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from tfring._keras.layers import all_layers
from tfring.errors import ConfigurationError

_UNKNOWN = object()  # from a layer that calls other layers itself


def check_parallel_pairs(model: Any) -> None:
    """Raises ConfigurationError for a functional or sequential model in which parts go to a layer that takes none."""
    graph = _graph_of(model)
    if graph is None or not any(map(_in_parts, all_layers(model))):
        return
    for source in _through_graph(graph, [None] * len(graph.inputs)):
        if source is not None and source is not _UNKNOWN:
            raise _unpaired(f"parts of {source.name!r} are among the outputs of model {model.name!r}")


def _in_parts(layer: Any) -> bool:
    return getattr(layer, "leaves_parts", False) or getattr(layer, "takes_parts", False)


def _graph_of(operation: Any) -> Any:
    graph = getattr(operation, "_functional", None) or operation  # of a sequential model
    return graph if hasattr(graph, "_nodes_by_depth") else None


def _through_graph(graph: Any, sources: Sequence) -> list:
    """Returns for each output the layer that left it in parts, None for a full one. `sources` are those of inputs."""
    of = dict(zip(map(id, graph.inputs), sources, strict=True))
    for depth in sorted(graph._nodes_by_depth, reverse=True):
        for node in graph._nodes_by_depth[depth]:
            if not node.is_input:
                found = _through(node.operation, [of.get(id(t), _UNKNOWN) for t in node.input_tensors])
                of.update((id(tensor), found) for tensor in node.outputs)
    return [of.get(id(tensor), _UNKNOWN) for tensor in graph.outputs]


def _through(operation: Any, sources: Sequence) -> Any:
    """Returns the same as `_through_graph`, for all outputs of one call."""
    different = {id(source): source for source in sources}
    graph = _graph_of(operation)
    if graph is not None:
        found = _through_graph(graph, [*different.values()] * len(graph.inputs)) if len(different) == 1 else [_UNKNOWN]
        return found[0] if len({id(source) for source in found}) == 1 else _UNKNOWN
    if getattr(operation, "takes_parts", False):
        if None in sources:
            raise _unpaired(f"{operation.name!r} with input_is_parallel=True gets full inputs")
        return None
    part = next((source for source in sources if source is not None and source is not _UNKNOWN), None)
    if isinstance(operation, keras.layers.Layer):
        if part is not None and operation.weights:
            raise _unpaired(f"parts of {part.name!r} go to {type(operation).__name__} {operation.name!r}")
        if getattr(operation, "leaves_parts", False):
            return operation
        if any(map(_in_parts, all_layers(operation))):
            return _UNKNOWN
    return _UNKNOWN if _UNKNOWN in sources else part


def _unpaired(received: str) -> ConfigurationError:
    return ConfigurationError(
        f"A ShardedDense has no partner: {received}. The outputs of a layer with gather_output=False must go to a "
        "layer with input_is_parallel=True, with only element-wise layers without weights in between. Leave out "
        "gather_output=False and input_is_parallel=True, or use them on two layers, one after the other."
    )
