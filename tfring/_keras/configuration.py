"""Describes what must be equal on all ranks before training: model, compile settings, tables, constants of the graph.

Each item is `name: [text for an error, compared text]`. Python orders sets of strings by a hash that each process seeds
itself, so the order of names in lists, inputs, layers and vocabularies may differ from rank to rank, while weights are
paired by position. Keras numbers names with a counter of the process, so only the order of these numbers is compared.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import xxhash

from tfring import _tf
from tfring._keras.layers import all_layers
from tfring._keras.optimizers import optimizers_of
from tfring._keras.sharding import sharding_of
from tfring.data.plan import plan_of

_MOST_TEXT = 100  # characters of a value in an error
# Keys of configurations: the location of code, shapes of a rank's rows, a rank's own random numbers, and items that
# are compared separately.
_NOT_COMPARED = ("module", "registered_name", "build_config", "batch_shape", "seed", "vocabulary")
_COMPARED = (tf.float16, tf.bfloat16, tf.float32, tf.float64)
_COMPARED_NUMBERS = tuple(dtype.as_datatype_enum for dtype in _COMPARED)


def of_compile(model: Any) -> dict:
    """Describes the loss, metrics and optimizers of a compiled model. All ranks use the learning rates of rank 0."""
    import keras

    items: dict = {}
    compiled = getattr(getattr(model, "_compile_config", None), "config", {})
    for name in ("loss", "loss_weights", "metrics", "weighted_metrics", "run_eagerly", "steps_per_execution"):
        items[name] = item(compiled.get(name))
    for number, optimizer in enumerate(optimizers_of(model)):
        kind = type(optimizer).__name__
        items[f"optimizer {number}"] = item(kind)
        for name, value in _config(optimizer).items():
            rate = name == "learning_rate" and not isinstance(
                getattr(optimizer, "_learning_rate", None), keras.optimizers.schedules.LearningRateSchedule
            )
            if not rate and name != "inner_optimizer":
                items[f"{name} of optimizer {number}, {kind}"] = item(value)
    return items


def of_model(model: Any) -> dict:
    """Describes the layers of a model with their settings, tables, vocabularies and inputs, and the model's weights."""
    layers = all_layers(model)
    operations = [op for layer in layers for op in getattr(layer, "_operations", ())]
    names = _Names([*layers, *operations])
    items: dict = {}
    for layer in layers:
        for what, text, digest in _readable(_tables, layer):
            items[f"{what} of {names[layer]}"] = [text, digest]
    for number, layer in enumerate(layers):
        items[f"layer {number}"] = item(f"{type(layer).__name__} {names[layer]!r}")
        for name, value in _readable(_settings, layer):
            items[f"{name} of {names[layer]}"] = item(value)
    for layer in layers:
        for op, parents in _calls(layer, names):
            items[f"input of {op}"] = item(parents)
    for number, variable in enumerate(model.variables):
        name = re.sub(r"^variable_\d+$", "variable", variable.name)
        is_sharded = sharding_of(variable) is not None
        shape = "of which each rank holds a shard" if is_sharded else f"of shape {tuple(variable.shape)}"
        text = f"{variable.path!r} {shape}, {variable.dtype}, {'' if variable.trainable else 'not '}trainable"
        items[f"weight {number}"] = [text, json.dumps([name, shape, str(variable.dtype), bool(variable.trainable)])]
    return items


def of_graph(graph: Any) -> dict:
    """Describes the constants of a graph that hold several floats: what Python drew while it was traced.

    Integers are left out, as they include each rank's bounds and seeds; so are strings, which are names.
    """
    nodes = filter(_may_differ, _tf.nodes_of(graph))
    arrays = [(tf.make_ndarray(node.attr["value"].tensor), node.name) for node in nodes]
    for tensor, inner in graph.captures:
        if tf.is_tensor(tensor) and not hasattr(tensor, "graph") and tensor.dtype in _COMPARED:
            arrays.append((tensor.numpy(), inner.op.name))
    found: dict = {}  # each once: its number of occurrences in a graph does not matter
    for array, where in arrays:
        if array.size > 1:
            kind = f"constant of shape {array.shape}, {array.dtype.name}"
            found.setdefault((kind, digest(array)), f"{_beginning(array)} in {where!r}")
    return {
        f"{kind} ({number})": [text, compared] for number, ((kind, compared), text) in enumerate(sorted(found.items()))
    }


def of_dataset(dataset: tf.data.Dataset, *, with_constants: bool) -> dict:
    """Describes the tables and the constants that functions of a `tf.data` pipeline hold."""
    items: dict = {}
    plan = plan_of(dataset)
    for tables, constants in plan.kept("held", lambda: [(_tables_of(graph), of_graph(graph)) for graph in plan.graphs]):
        for name, item in {**tables, **(constants if with_constants else {})}.items():
            items[f"{name}, function {len(items)}"] = item
    return items


def item(value: Any) -> list:
    """Describes a setting: numbers, strings, arrays, and Keras objects by their configuration, in any structure."""
    text, *_ = [*_readable(lambda value: [json.dumps(_plain(value))], value), json.dumps(type(value).__name__)]
    return [text if len(text) <= _MOST_TEXT else text[:_MOST_TEXT] + "...", text]


def number(value: Any) -> int:
    """Returns a 56-bit integer that is the same for values with the same JSON."""
    return int.from_bytes(hashlib.blake2b(json.dumps(value).encode(), digest_size=7).digest(), "little")


def digest(array: np.ndarray) -> str:
    """Returns a short string that is the same for arrays with the same bits: their XXH3 hash, at memory speed."""
    if array.dtype.hasobject:
        octets = repr(array.tolist()).encode()
    else:
        # As bytes: the buffers of dtypes that are not NumPy's own, such as bfloat16, cannot be cast.
        octets = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    return xxhash.xxh3_64_hexdigest(octets)


class _Names(dict):
    """Maps layers and operations to names. Of names that end in a number, only the order of the numbers is kept."""

    def __init__(self, operations: Iterable[Any]) -> None:
        super().__init__()
        groups: dict = {}
        for op in dict.fromkeys(operations):
            base, _, number = op.name.rpartition("_")
            base, number = (base, int(number)) if base and number.isdecimal() else (op.name, 0)
            groups.setdefault(base, {})[op] = number
        for base, numbers in groups.items():
            distinct = sorted(set(numbers.values()))
            for op, number in numbers.items():
                place = distinct.index(number)
                self[op] = f"{base}_{place}" if place else base

    def __missing__(self, op: Any) -> str:
        return type(op).__name__


def _calls(layer: Any, names: _Names) -> Iterator[tuple[str, list]]:
    """Yields `(name, inputs of each call)` of the operations of a functional model, and its inputs and outputs."""
    if not hasattr(layer, "_operations"):
        return

    def origins(tensors: Sequence[Any]) -> list:
        return [[names[t._keras_history.operation], t._keras_history.tensor_index] for t in tensors]

    own = set(layer._nodes)  # keys of its nodes
    for op in layer._operations:
        calls = [node for i, node in enumerate(op._inbound_nodes) if f"{id(op)}_ib-{i}" in own]
        yield names[op], [origins(node.arguments.keras_tensors) for node in calls]
    yield f"{names[layer]} itself", origins(layer.inputs)
    yield f"result of {names[layer]}", origins(layer.outputs)


def _settings(layer: Any) -> Iterator[tuple[str, Any]]:
    """Yields `(name, value)` of a layer: a Keras layer's configuration; lists and dicts of strings that others hold."""
    import keras

    if type(layer).__module__.startswith("keras.") and not isinstance(layer, (keras.Model, keras.layers.Lambda)):
        yield from _config(layer).items()
    own = () if type(layer).__module__.startswith(("keras.", "tfring.")) else vars(layer).items()
    for name, value in own:
        # Keras numbers the names of a functional model's outputs; `_calls` compares the layers that they come from.
        if name.startswith("_") or name == "output_names" or not isinstance(value, (dict, list, tuple)) or not value:
            continue
        texts = list(value)
        if not all(isinstance(text, str) and os.sep not in text for text in texts):
            continue
        if isinstance(value, dict) and all(isinstance(v, (str, int, float)) for v in value.values()):
            texts = sorted(value.items())
        yield name, texts


def _config(thing: Any) -> dict:
    config = dict(_readable(lambda thing: thing.get_config().items(), thing))
    return {name: value for name, value in _without_numbers(config).items() if name not in _NOT_COMPARED}


def _readable(read: Callable[[Any], Iterable], thing: Any) -> list:
    """Returns what `read(thing)` yields, nothing if it raises: a user's object may raise any exception."""
    try:
        return list(read(thing))
    except Exception:
        return []


def _without_numbers(config: dict) -> dict:
    """Returns a configuration without the number that Keras appends to a name."""
    name = config.get("name")
    return {**config, "name": re.sub(r"_\d+$", "", name)} if isinstance(name, str) else config


def _plain(value: Any) -> Any:
    """Returns the parts of a setting that JSON can hold, with types in place of values that may show an address."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, dict) and value.get("class_name") == "__lambda__" and "value" in value["config"]:
        return _plain(value["config"]["value"][:2])  # without its closure, such as names that Keras numbers
    if isinstance(value, dict):
        return {str(name): _plain(v) for name, v in _without_numbers(value).items() if name not in _NOT_COMPARED}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, np.ndarray) or tf.is_tensor(value):
        array = np.asarray(value)
        return f"{_beginning(array)} of shape {array.shape}, {digest(array)}"
    if hasattr(value, "get_config"):
        return {type(value).__name__: _plain(_config(value))}
    return getattr(value, "__qualname__", type(value).__name__)


def _tables(layer: Any) -> Iterator[tuple[str, str, str]]:
    """Yields `(what, text, digest)` of vocabularies and tables that are attributes of a layer."""
    if hasattr(layer, "get_vocabulary"):
        without = "include_special_tokens" in inspect.signature(layer.get_vocabulary).parameters
        words = layer.get_vocabulary(**{"include_special_tokens": False} if without else {})
        words = np.asarray([str(word) for word in words])
        yield "vocabulary", f"{len(words)} words, {_beginning(words)}", digest(words)
        return
    for name, value in vars(layer).items():
        if isinstance(value, (tf.lookup.StaticHashTable, tf.lookup.experimental.DenseHashTable)):
            yield (name, *_exported(*value.export()))


def _tables_of(graph: Any) -> dict:
    """Describes the tables in which the operations of a graph itself look up values."""
    items: dict = {}
    for op in graph.get_operations():
        if op.type == "LookupTableFindV2":
            handle = next((outer for outer, inner in graph.captures if inner is op.inputs[0]), None)
            if handle is not None and not hasattr(handle, "graph"):
                dtypes = {"Tkeys": op.get_attr("Tin"), "Tvalues": op.get_attr("Tout")}
                pairs = tf.raw_ops.LookupTableExportV2(table_handle=handle, **dtypes)
                items[f"lookup table ({len(items)})"] = list(_exported(pairs.keys, pairs.values))
    return items


def _exported(keys: tf.Tensor, values: tf.Tensor) -> tuple[str, str]:
    """Returns `(text, digest)` of a table, which exports its entries in no particular order."""
    order = np.argsort(keys.numpy())
    keys, values = keys.numpy()[order], values.numpy()[order]
    return f"{len(keys)} entries, {_beginning(keys)}", digest(keys) + digest(values)


def _may_differ(node: Any) -> bool:
    """Returns True if a node holds several values of a compared dtype. TensorFlow keeps one value if all are equal."""
    tensor = node.attr["value"].tensor
    if node.op != "Const" or tensor.dtype not in _COMPARED_NUMBERS:
        return False
    return bool(tensor.tensor_content) or any(
        len(values) > 1 for values in (tensor.half_val, tensor.float_val, tensor.double_val)
    )


def _beginning(array: np.ndarray) -> str:
    values = [v.decode(errors="replace") if isinstance(v, bytes) else v for v in array.ravel()[:3].tolist()]
    return "beginning with " + ", ".join(f"{v:.6g}" if isinstance(v, float) else repr(v) for v in values)
