"""On a server: shards of variables, and Keras' own optimizer on them, recreated from its configuration.

Keras' own code computes the elementwise parts of an optimizer on the shards. Norms are those of full variables, over
servers: the sum of squares of each shard is sent to the workers, which add them up, and the gradient is scaled before
Keras sees it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfring.errors import ConfigurationError
from tfring.servers.shard_plan import Span

TOKEN = "tfring_shard_"  # then the variable's number among all: the name of a shard, and the start of its slots' names
NAME = "on_servers"  # of the optimizer: each worker numbers its own optimizers


class ServerShards:
    """The shards of one optimizer's variables on one server. Implements `tfring.servers.service.ShardStore`.

    Args:
      store: All shards of this server, which optimizers of the same variables share.
      description: The result of `describe`, which all servers get.
      server: Number of this server.
    """

    def __init__(self, store: MutableMapping[tuple, Any], description: Mapping[str, Any], server: int) -> None:
        import keras

        self._clip = description["clip"]
        config = json.loads(description["optimizer"])
        self._optimizer = optimizer = keras.saving.deserialize_keras_object(config)
        self._parts = [p for p in description["parts"] if p["server"] == server]
        of_variable = description["variables"]
        self._about = [of_variable[p["variable"]] for p in self._parts]
        self._shards: list[Any] = []
        for span, about in zip(self._parts, self._about, strict=True):
            key = (about["number"], span["begin"])
            if key in store:
                self._shards.append(store[key])
                continue
            shape = about["shape"] if span["is_full"] else [span["end"] - span["begin"], *about["shape"][1:]]
            name = f"{TOKEN}{about['number']}"
            constraint = about["constraint"] and keras.constraints.deserialize(json.loads(about["constraint"]))
            shard = keras.Variable(np.zeros(shape, about["dtype"]), name=name, dtype=about["dtype"])
            shard.constraint = constraint
            store[key] = shard
            self._shards.append(shard)
        for method in _FLAGS:
            if hasattr(optimizer, method):
                # Keras passes its own variable, or TensorFlow's behind it.
                told = {
                    id(variable): about["flags"].get(method, False)
                    for shard, about in zip(self._shards, self._about, strict=True)
                    for variable in (shard, shard.value)
                }
                object.__setattr__(optimizer, method, lambda variable, told=told: told[id(variable)])
        self._update: Any = None

    def load(self, head: Mapping[str, Any], arrays: list[np.ndarray]) -> None:
        """See `ShardStore`. The arrays are the shards of the variables `values`, and those of `slots`, by number."""
        arrays = list(arrays)
        wanted = set(head.get("values", ()))
        for shard, span in zip(self._shards, self._parts, strict=True):
            if span["variable"] in wanted:
                shard.assign(arrays.pop(0))
        if not self._optimizer.built:
            self._optimizer.build(self._shards)  # some slots begin as their weights
            self._update = tf.function(self._apply, input_signature=self._signature(), autograph=False)
        for number in head.get("slots", ()):
            variable = self._optimizer.variables[number]
            variable.assign(arrays.pop(0))

    def describe(self) -> Mapping[str, Any]:
        """See `ShardStore`: the path of each variable of the optimizer."""
        return {"paths": [v.path for v in self._optimizer.variables]}

    def slots(self) -> tuple[Mapping[str, Any], list[np.ndarray]]:
        """See `ShardStore`."""
        return {}, [v.numpy() for v in self._optimizer.variables]

    def iterations(self) -> int:
        """See `ShardStore`."""
        return int(self._optimizer._iterations.numpy())

    def merge(self, gradients: list[tuple[float | None, list[np.ndarray]]]) -> list[Any]:
        """See `ShardStore`. Returns an array for each shard, or a pair of rows and ids with each id once."""
        merged: list[Any] = []
        position = 0
        for about in self._about:
            if not about["is_sparse"]:
                merged.append(_sum([_times(factor, arrays[position]) for factor, arrays in gradients]))
                position += 1
                continue
            rows = [_times(factor, arrays[position]) for factor, arrays in gradients]
            ids = [arrays[position + 1] for _, arrays in gradients]
            merged.append(_sum_rows(rows, ids))
            position += 2
        return merged

    def norms(self, merged: list[Any]) -> list[float]:
        """See `ShardStore`."""
        if self._clip["kind"] not in ("clipnorm", "global_clipnorm"):
            return []
        values = [gradient[0] if isinstance(gradient, tuple) else gradient for gradient in merged]
        return [float(np.sum(np.square(v, dtype=np.float64))) for v in values]

    def update(self, merged: list[Any], norms: list[float] | None, learning_rate: float | None) -> None:
        """See `ShardStore`; `norms` are sums of squares of the full gradient of each variable."""
        if not self._shards:
            return
        bound = self._clip["bound"]
        if self._clip["kind"] == "clipvalue":
            merged = [_each(lambda v: np.clip(v, -bound, bound), g) for g in merged]
        elif norms is not None:
            total = float(np.sqrt(sum(norms)))
            is_global = self._clip["kind"] == "global_clipnorm"
            largest = [total if is_global else float(np.sqrt(norms[p["variable"]])) for p in self._parts]
            scales = [1.0 if n <= bound else bound / n for n in largest]
            merged = [_each(functools.partial(_times, s), g) for g, s in zip(merged, scales, strict=True)]
        if learning_rate is not None:
            self._optimizer.learning_rate = learning_rate
        flat = [part for gradient in merged for part in (gradient if isinstance(gradient, tuple) else (gradient,))]
        self._update(*flat)

    def values(self, wanted: str) -> list[np.ndarray]:
        """See `ShardStore`."""
        shards = zip(self._shards, self._about, strict=True)
        return [shard.numpy() for shard, about in shards if wanted == "all" or not about["is_pulled_by_rows"]]

    def rows(self, variable: int, ids: np.ndarray) -> np.ndarray:
        """See `ShardStore`."""
        number = next(i for i, span in enumerate(self._parts) if span["variable"] == variable)
        return tf.gather(self._shards[number].value, ids).numpy()

    def _apply(self, *flat: tf.Tensor) -> None:
        parts = list(flat)
        gradients = []
        for shard, about in zip(self._shards, self._about, strict=True):
            gradient = parts.pop(0)
            if about["is_sparse"]:
                gradient = tf.IndexedSlices(gradient, parts.pop(0), tf.constant(list(shard.shape), tf.int64))
            gradients.append(gradient)
        self._optimizer.apply(gradients, self._shards)

    def _signature(self) -> list[tf.TensorSpec]:
        specs = []
        for shard, about in zip(self._shards, self._about, strict=True):
            if about["is_sparse"]:
                specs += [tf.TensorSpec([None, *shard.shape[1:]], about["dtype"]), tf.TensorSpec([None], tf.int64)]
            else:
                specs.append(tf.TensorSpec(shard.shape, about["dtype"]))
        return specs


_FLAGS = ("_use_weight_decay", "_should_use_adamw")  # methods of optimizers that depend on a variable's path
_CLIPS = ("clipnorm", "global_clipnorm", "clipvalue")


def describe(
    optimizer: Any,
    variables: Sequence[Any],
    numbers: Sequence[int],
    are_sparse: Sequence[bool],
    are_pulled_by_rows: Sequence[bool],
    parts: Sequence[Span],
    clips_norms: bool = True,
) -> dict[str, Any]:
    """Returns the description from which servers make an optimizer and its shards: JSON, and no code.

    Args:
      optimizer: A Keras optimizer on a worker.
      variables: The Keras variables that have gradients.
      numbers: The numbers of these variables among all that servers hold.
      are_sparse: Whether the gradient of each variable is IndexedSlices.
      are_pulled_by_rows: Whether each variable is a table of which workers pull only a batch's rows.
      parts: The result of `tfring.servers.shard_plan.plan`.
      clips_norms: Whether servers clip by norms; otherwise the worker has done it. Defaults to True.

    Raises:
      ConfigurationError: If servers cannot run the optimizer.
    """
    import keras

    check_optimizer(optimizer)
    config = keras.saving.serialize_keras_object(optimizer)
    config["config"]["name"] = NAME
    if isinstance(getattr(optimizer, "_learning_rate", None), keras.Variable):
        config["config"]["learning_rate"] = 1.0  # the real one is sent with each gradient
    bounds = {kind: getattr(optimizer, kind) for kind in _CLIPS if getattr(optimizer, kind)}
    kind, bound = next(iter(bounds.items()), (None, 0.0))
    if bounds and optimizer.gradient_accumulation_steps:
        if kind != "clipvalue":
            raise ConfigurationError(
                f"Servers do not run {type(optimizer).__name__} {optimizer.name!r} with {kind}={bound} and "
                f"gradient_accumulation_steps={optimizer.gradient_accumulation_steps}: accumulated gradients are "
                "clipped by value only. Leave out one of them, or use `clipvalue`."
            )
        kind = None  # Keras clips the accumulated gradients
    if kind is not None:
        config["config"].update(dict.fromkeys(_CLIPS))
    if kind != "clipvalue" and not clips_norms:
        kind = None
    about = []
    every = zip(variables, numbers, are_sparse, are_pulled_by_rows, strict=True)
    for variable, number, is_sparse, by_rows in every:
        constraint = variable.constraint
        about.append({
            "number": number,
            "shape": list(variable.shape),
            "dtype": str(variable.dtype),
            "is_sparse": bool(is_sparse),
            "is_pulled_by_rows": bool(by_rows),
            "constraint": constraint and json.dumps(keras.constraints.serialize(constraint)),
            "flags": {name: bool(getattr(optimizer, name)(variable)) for name in _FLAGS if hasattr(optimizer, name)},
        })
    return {
        "optimizer": json.dumps(config),
        "clip": {"kind": kind, "bound": bound},
        "variables": about,
        "parts": [part._asdict() for part in parts],
    }


def check_optimizer(optimizer: Any) -> None:
    """Raises a ConfigurationError that names an optimizer, if servers cannot run it."""
    import keras

    what = f"{type(optimizer).__name__} {optimizer.name!r}"
    if type(optimizer).__name__ in ("LossScaleOptimizer", "MultiOptimizer"):
        raise ConfigurationError(
            f"Servers do not run {what}: they run Keras' own optimizers, but none that wraps another. Use the inner "
            "one."
        )
    if optimizer.use_ema:
        raise ConfigurationError(
            f"Servers do not run {what} with use_ema=True: they keep no moving averages of weights. Leave it out."
        )
    if optimizer.loss_scale_factor:
        raise ConfigurationError(
            f"Servers do not run {what} with loss_scale_factor={optimizer.loss_scale_factor}: they do not scale "
            "gradients. Leave it out."
        )
    try:
        made = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(optimizer))
        if type(made) is not type(optimizer):
            raise TypeError(f"its configuration yields a {type(made).__name__}")
    except Exception as error:
        raise ConfigurationError(
            f"Servers cannot make {what} from its configuration: {error}. Register its class and all classes in it "
            "(`@keras.saving.register_keras_serializable`) before the strategy is made."
        ) from error


def _times(factor: float | None, value: np.ndarray) -> np.ndarray:
    return value if factor is None or factor == 1.0 else value * value.dtype.type(factor)


def _sum(values: list[np.ndarray]) -> np.ndarray:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


def _each(function: Callable[[np.ndarray], np.ndarray], gradient: Any) -> Any:
    return (function(gradient[0]), gradient[1]) if isinstance(gradient, tuple) else function(gradient)


def _sum_rows(rows: list[np.ndarray], ids: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rows of all workers with each id once; rows of an id are added in the order of workers."""
    if len(rows) == 1:
        return rows[0], ids[0]  # a worker sends each id once
    every, values = np.concatenate(ids), np.concatenate(rows)
    if not len(every):
        return values, every
    order = np.argsort(every, kind="stable")
    every = every[order]
    begins = np.flatnonzero(np.concatenate([[True], every[1:] != every[:-1]]))
    return np.add.reduceat(values[order], begins, axis=0), every[begins]
