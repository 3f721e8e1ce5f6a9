"""Shards of weights for `RingStrategy(shard_optimizer=True)`: a worker updates its shard and holds its slots.

```
gradients of the worker ─► reduce_scatter ─► clip ─► update of the shard ─► all_gather ─► weights
                              (gradient of the shard)   (slots of the shard)
```

A shard is a variable of this worker, filled from the weight before each update: weights belong to the user, who may
assign them at any time. Keras' optimizer makes slots for shards and updates them as it would weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from tfring._keras.sharding import gather, mark_of, mark_shard
from tfring.errors import ConfigurationError
from tfring.runtime import Ring
from tfring.sharding import plan_shards

_ELEMENT_WISE = (
    *("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "Ftrl", "Lion", "Nadam", "RMSprop", "SGD"),
    "ScheduleFreeAdamW",  # from Keras 3.14 on
)


class Shards:
    """This worker's shards of the weights of one optimizer.

    Args:
      ring: The workers.
      optimizer: A Keras optimizer, not built yet.
      variables: The Keras variables to train.
    """

    def __init__(self, ring: Ring, optimizer: Any, variables: Sequence[Any]) -> None:
        self.ring = ring
        self.key = optimizer._var_key  # returns the key of a weight, later of its shard too
        self.weights: dict = {}  # by their keys
        self.shards: dict = {}  # by the keys of the weights
        self.keys: dict = {}  # keys of weights, by the keys of their shards
        for variable in variables:
            marked = mark_of(variable)
            if is_value(variable) or marked.sharding is not None or marked.update is not None:
                continue  # a value, already a shard, or a table, which may be updated by rows
            shard = _new_shard(ring, variable)
            key = self.key(variable)
            self.weights[key], self.shards[key], self.keys[self.key(shard)] = variable, shard, key

    def shard(self, variable: Any) -> Any:
        """Returns the shard of a weight; None for one that is not sharded."""
        return self.shards.get(self.key(variable))

    def held(self, variables: Sequence[Any]) -> list:
        """Returns the shards of weights; weights that are not sharded as they are."""
        return [self.shards.get(self.key(variable), variable) for variable in variables]

    def filled(self, variables: Sequence[Any]) -> list:
        """Returns the same as `held`, with the values that the weights have now."""
        held = self.held(variables)
        for variable, shard in zip(variables, held, strict=True):
            if shard is not variable:
                shard.assign(variable)
        return held

    def gather_into(self, variables: Sequence[Any], values: Sequence[Any]) -> None:
        """Assigns to weights, on all ranks, the full values gathered from the shards or slots of each rank."""
        gathered = gather(self.ring.gradient_ops, values, name="weights")
        for variable, value in zip(variables, gathered, strict=True):
            variable.assign(value)


def shards_of(optimizer: Any) -> Shards | None:
    """Returns this worker's shards of an optimizer's weights; None for an optimizer that updates full weights."""
    return getattr(optimizer, "_tfring_shards", None)


def is_value(variable: Any) -> bool:
    """Returns whether the "gradient" of a variable is its next value, as for the scales of float8."""
    return getattr(variable, "overwrite_with_gradient", False)


def is_element_wise(optimizer: Any) -> bool:
    """Returns whether an optimizer is known to compute element by element."""
    kind = optimizer.__class__
    known = kind.__name__ in _ELEMENT_WISE and kind is getattr(keras.optimizers, kind.__name__, None)
    return known or bool(vars(kind).get("element_wise", False))


def refuse_unless_element_wise(optimizer: Any, rule: str, way_out: str) -> None:
    """Raises ConfigurationError for an optimizer that is not known to compute element by element."""
    if is_element_wise(optimizer):
        return
    kind = optimizer.__class__
    raise ConfigurationError(
        f"{kind.__name__} {optimizer.name!r} is not known to compute element by element. {rule}, so the optimizer must "
        "update each element from its own gradient and slots. Adafactor, Lamb and Muon need full weights. Use another "
        f"optimizer, such as AdamW, or {way_out}. If your own class computes element by element and makes its slots "
        "with `add_optimizer_variables` or `add_variable_from_reference`, give it the class attribute `element_wise = "
        "True`."
    )


def _new_shard(ring: Ring, variable: Any) -> Any:
    sharding = plan_shards(variable.shape, ring.cluster.world_size)
    with ring.variables_of_worker():
        shard = keras.Variable(
            "zeros",
            shape=sharding.shape_of(ring.cluster.rank),
            dtype=variable.dtype,
            trainable=False,
            name="shard",
        )
    shard._path = getattr(variable, "path", None) or variable.name.replace(":", "_")  # slots are named after it
    return mark_shard(shard, ring, sharding)
