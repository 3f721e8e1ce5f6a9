"""Cuts a functional model into stages: which calls of layers each makes, and which tensors cross between stages.

```
model:    in ─► a ─► b ─┬─► c ─► d ─► out          stages=["c", "d"]
                        └────────► +                stage 0: a, b    stage 1: c    stage 2: d, +
crossings of forward passes:   b: 0 ─► 1, 0 ─► 2    c: 1 ─► 2
```

Calls follow the order of `model.layers`, in which a layer comes after those it needs. A tensor is sent from the stage
that computes it directly to each stage that uses it. The inputs of the model are available on every stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import keras

from tfring._keras.layers import all_layers
from tfring.errors import ConfigurationError


class Crossing(NamedTuple):
    """A tensor that one stage computes and a later one uses.

    Attributes:
      tensor: The `keras.KerasTensor` of the model.
      source: The stage that computes it.
      to: The stage that uses it.
      name: Name of its messages.
    """

    tensor: keras.KerasTensor
    source: int
    to: int
    name: str


class Stage(keras.layers.Layer):
    """The calls that one stage makes, as a layer around the model's own layers.

    Call arguments:
      values: A dict from the id of a tensor of the model to its value, for the model's inputs and the tensors that
        cross to this stage.
      training: The `training` argument of the model.

    Returns:
      A dict of these values and those of all tensors that the stage computes.
    """

    def __init__(self, number: int, nodes: Sequence) -> None:
        super().__init__(name=f"stage_{number}", autocast=False)
        self.number = number
        self._nodes = _Untracked(nodes)
        operations = {id(node.operation): node.operation for node in nodes}.values()
        self.parts = [operation for operation in operations if isinstance(operation, keras.layers.Layer)]
        self.built = True

    def call(self, values: dict[int, Any], training: bool | None = None) -> dict[int, Any]:
        values = dict(values)
        for node in self._nodes.value:
            values.update(outputs_of(node, values, training))
        return values


def outputs_of(node: Any, values: dict[int, Any], training: bool | None) -> dict:
    """Makes one call and returns its outputs by the id of their tensors; `values` holds its inputs."""

    def filled(argument: Any) -> Any:
        return values[id(argument)] if isinstance(argument, keras.KerasTensor) else argument

    operation = node.operation
    args, kwargs = keras.tree.map_structure(filled, (node.arguments.args, node.arguments.kwargs))
    if training is not None and getattr(operation, "_call_has_training_arg", False):  # as Functional does
        kwargs = {**kwargs, "training": training}
    outputs = keras.tree.flatten(operation(*args, **kwargs))
    return dict(zip(map(id, node.outputs), outputs, strict=True))


class _Untracked:
    """Hides a value that Keras would search for layers and variables."""

    def __init__(self, value: Any) -> None:
        self.value = value


class StagedModel(NamedTuple):
    """A model cut into stages.

    Attributes:
      model: The functional model.
      stages: The stages, in order.
      crossings: The crossings of all forward passes of a microbatch, in the order of their messages: by source, then by
        destination.
    """

    model: keras.Model
    stages: list[Stage]
    crossings: list[Crossing]

    def into(self, stage: int) -> list[Crossing]:
        return [crossing for crossing in self.crossings if crossing.to == stage]

    def out_of(self, stage: int) -> list[Crossing]:
        return [crossing for crossing in self.crossings if crossing.source == stage]


def cut_model(model: keras.Model, names: Sequence[str]) -> StagedModel:
    """Cuts a model before the named layers.

    Args:
      model: A built Sequential or functional model, with the methods of `keras.Model`.
      names: Names of the layers with which the second stage begins, the third, and so on.

    Raises:
      ConfigurationError: If the model is of another kind, the names are not those of layers in the order of the model,
        two stages would use the same variable, or a tensor cannot cross.
    """
    functional = functional_of(model)
    nodes = calls_of(functional)
    if _are_names(names) and set(names) - {node.operation.name for node in nodes}:
        functional = _unnested(functional, kept=names)
        nodes = calls_of(functional)
    begins = _begins(model, nodes, names)
    stage_of = [sum(begin <= position for begin in begins) for position in range(len(nodes))]
    crossings = crossings_of(functional, nodes, stage_of)
    count = len(begins) + 1
    stages = [Stage(s, [n for n, of in zip(nodes, stage_of, strict=True) if of == s]) for s in range(count)]
    return StagedModel(functional, stages, crossings)


def crossings_of(model: keras.Model, nodes: Sequence, stage_of: Sequence[int]) -> list[Crossing]:
    """Returns the crossings between stages; `stage_of` gives the stage of each call of `nodes`.

    Raises:
      ConfigurationError: If two stages would use the same variable, or a tensor cannot cross.
    """
    _refuse_shared(nodes, stage_of)
    last = stage_of[-1]
    source = {id(tensor): of for node, of in zip(nodes, stage_of, strict=True) for tensor in node.outputs}
    users: dict[int, set[int]] = {}
    tensors = {id(tensor): tensor for node in nodes for tensor in node.outputs}
    for node, of in zip(nodes, stage_of, strict=True):
        for tensor in node.input_tensors:
            users.setdefault(id(tensor), set()).add(of)
    for tensor in model.outputs:  # the last stage computes losses, metrics and predictions from them
        users.setdefault(id(tensor), set()).add(last)
    found = [
        (source[key], to, number, tensor)
        for number, (key, tensor) in enumerate(tensors.items())
        for to in users.get(key, ())
        if to != source[key]
    ]
    crossings = []
    for begin, to, number, tensor in sorted(found, key=lambda item: item[:3]):
        _check_crossing(tensor, begin, to)
        crossings.append(Crossing(tensor, begin, to, f"tensor {number}"))
    return crossings


def functional_of(model: Any) -> keras.Model:
    """Returns the model as a functional one, with calls that can be distinguished.

    Raises:
      ConfigurationError: If it is not a built Sequential or functional model with the methods of `keras.Model`.
    """
    if isinstance(model, keras.Sequential) and model.built and model.layers:
        return keras.Model(model.inputs, model.outputs, name=model.name)
    if isinstance(model, keras.Sequential) or not hasattr(model, "operations"):
        kind = type(model).__name__
        raise ConfigurationError(
            f"{getattr(model, 'name', model)!r}, a "
            f"{kind}{' that is not built' if isinstance(model, keras.Sequential) else ''}, has no layers that a "
            "Pipeline can distinguish. A Pipeline needs a built Sequential or functional model. Make it from "
            "keras.Input and layers."
        )
    plain = type(keras.Model(model.inputs, model.outputs))
    for method in ("call", "train_step", "test_step", "predict_step", "compute_loss", "compute_metrics"):
        if getattr(type(model), method) is not getattr(plain, method):
            raise ConfigurationError(
                f"A model of class {type(model).__name__} has its own `{method}`, but a Pipeline has its own steps, in "
                "which no rank holds the whole model. Use a plain functional model."
            )
    return model


def _unnested(model: keras.Model, kept: Iterable[str]) -> keras.Model:
    """Returns the model with nested functional models replaced by their layers, except those named in `kept`."""

    def run(functional: keras.Model, values: dict) -> dict:
        for node in calls_of(functional):
            nested = _nested_of(node)
            if nested is None or nested.name in kept:
                values.update(outputs_of(node, values, None))
                continue
            given = dict(zip(map(id, nested.inputs), [values[id(t)] for t in node.input_tensors], strict=True))
            found = run(nested, given)
            values.update((id(t), found[id(o)]) for t, o in zip(node.outputs, nested.outputs, strict=True))
        return values

    values = run(model, {id(tensor): tensor for tensor in model.inputs})
    outputs = keras.tree.map_structure(lambda tensor: values[id(tensor)], model._outputs_struct)
    try:
        return keras.Model(model._inputs_struct, outputs, name=model.name)
    except ValueError:  # layers of the same name in several models
        return model


def _nested_of(node: Any) -> keras.Model | None:
    """Returns the functional model that a node calls with unchanged inputs only; None for any other call."""
    nested = node.operation
    if not isinstance(nested, keras.Model) or any(value is not None for value in node.arguments.kwargs.values()):
        return None
    try:
        nested = functional_of(nested)
    except ConfigurationError:
        return None
    pairs = list(zip(nested.inputs, node.input_tensors, strict=False))
    same = all(inner.dtype == outer.dtype and len(inner.shape) == len(outer.shape) for inner, outer in pairs)
    return nested if same and len(nested.inputs) == len(node.input_tensors) else None


def calls_of(model: keras.Model) -> list:
    """Returns the calls of operations that the outputs need, each after those it needs, in Keras' order of layers."""

    def node_of(tensor: Any) -> Any:
        operation, index, _ = tensor._keras_history
        return operation._inbound_nodes[index]

    behind: list = []  # each node after those it needs
    seen: set[int] = set()
    todo = [(node_of(tensor), False) for tensor in reversed(model.outputs)]
    while todo:
        node, is_done = todo.pop()
        if is_done:
            behind.append(node)
        elif id(node) not in seen:
            seen.add(id(node))
            todo.append((node, True))
            todo += [(node_of(tensor), False) for tensor in node.input_tensors]
    depths = dict.fromkeys(seen, 0)
    for node in reversed(behind):
        for tensor in node.input_tensors:
            needed = id(node_of(tensor))
            depths[needed] = max(depths[needed], depths[id(node)] + 1)
    rank = {id(operation): number for number, operation in enumerate(model.operations)}
    calls = [node for node in behind if not node.is_input]
    return sorted(calls, key=lambda node: (-depths[id(node)], rank[id(node.operation)]))


def _are_names(names: Any) -> bool:
    return isinstance(names, Iterable) and not isinstance(names, str) and all(isinstance(name, str) for name in names)


def _begins(model: Any, nodes: Sequence, names: Any) -> list[int]:
    """Returns the positions at which the stages after the first begin."""
    if not _are_names(names):
        raise ConfigurationError(
            f"`stages` is {names!r}, not a list of the names of the layers that begin the second stage, the third, and "
            "so on."
        )
    order: dict[str, int] = {}
    for position, node in enumerate(nodes):
        order.setdefault(node.operation.name, position)
    unknown = [name for name in names if name not in order]
    if unknown:
        raise ConfigurationError(
            f"`stages` has {unknown[0]!r}, which is not a layer of model {model.name!r}: {', '.join(map(repr, order))}."
        )
    begins = [order[name] for name in names]
    if begins != sorted(set(begins)) or begins[:1] == [0]:
        raise ConfigurationError(
            f"`stages` is {list(names)!r}, not in the order of the model: {', '.join(map(repr, order))}. It must name "
            "the layers that begin the second stage, the third, and so on, and each stage needs a layer."
        )
    return begins


def _refuse_shared(nodes: Sequence, stage_of: Sequence[int]) -> None:
    user: dict[int, tuple] = {}  # keyed by a variable's id
    for node, stage in zip(nodes, stage_of, strict=True):
        if not isinstance(node.operation, keras.layers.Layer):
            continue
        for variable in node.operation.variables:
            first, name = user.setdefault(id(variable), (stage, node.operation.name))
            if first != stage:
                raise ConfigurationError(
                    f"{variable.path!r} is used by {name!r} in stage {first + 1} and by {node.operation.name!r} in "
                    f"stage {stage + 1}, but a weight belongs to one stage of a Pipeline. Cut the model so that both "
                    "are in one stage, or give each its own weights: a keras.layers.Dense instead of the transpose of "
                    "an embedding table."
                )


def _check_crossing(tensor: Any, source: int, to: int) -> None:
    where = f"between stages {source + 1} and {to + 1} ({tensor.name!r}, made by {tensor._keras_history[0].name!r})"
    if getattr(tensor, "_keras_mask", None) is not None:
        raise ConfigurationError(
            f"A masked tensor {where} would cross from one stage of a Pipeline to the next, but Keras masks cannot. "
            "Cut after the layers that use the mask, or pass the mask to layers as an input of the model."
        )
    if getattr(tensor, "sparse", False) or getattr(tensor, "ragged", False):
        raise ConfigurationError(
            f"A sparse or ragged tensor {where} would cross from one stage of a Pipeline to the next, but only dense "
            "ones can. Cut after the layers that make it dense."
        )
    if len(tensor.shape) == 0:
        raise ConfigurationError(
            f"A scalar {where} would cross from one stage of a Pipeline to the next: it has no rows, and its value for "
            "a microbatch is not that for the batch. Cut elsewhere, or compute it in each stage that uses it."
        )


def batch_normalizations(model: Any) -> list[keras.layers.Layer]:
    """Returns the layers that compute statistics of a batch in training and are not frozen."""
    kinds = (keras.layers.BatchNormalization,)
    return [layer for layer in all_layers(model) if isinstance(layer, kinds) and layer.trainable]
