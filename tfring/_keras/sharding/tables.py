"""Initial values and updates of the tables of `tfring.layers.ShardedEmbedding` and `DistributedEmbedding`.

A table's variable holds this worker's rows, and its slots are those of these rows. An optimizer gets the gradient of
the whole batch, as IndexedSlices whose ids number this worker's rows. With `update="dense"` Keras updates all rows of
this worker; with `update="rows"` it updates those that have a gradient:

```
ids with a gradient ─► rows of the weight ─┐                        ┌─► written back
                   └─► rows of each slot ──┴─► Keras' update_step ──┘
```

`ring_optimizer.py` handles the gradients of several workers, `slots.py` handles files.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfring._keras.sharding import ShardGroup, mark, mark_of
from tfring.cross_device_ops import values_of
from tfring.errors import ConfigurationError
from tfring.ring.collectives import LocalCollectives
from tfring.sharding import Sharding

UPDATES = ("rows", "dense")
WHOLE_ELEMENTS = 1 << 24  # the largest table that is drawn at once, as keras.layers.Embedding draws it
BLOCK_ELEMENTS = 1 << 22  # elements of a larger table that are drawn at a time
_ROW_BY_ROW = ("Zeros", "Ones", "Constant", "RandomUniform", "RandomNormal", "TruncatedNormal")

_NOT_SLOTS = ("_variables", "_trainable_variables")  # lists of an optimizer


def update_of(variable: Any) -> str | None:
    """Returns "rows" or "dense" for a table; None for any other variable."""
    return mark_of(variable).update


def add_table(layer: Any, name: str, parts: Iterable[Any], sharding: Sharding, group: ShardGroup) -> Any:
    """Makes a weight of a layer with `update` that holds this worker's shard of a table, or of several in one.

    See `InitialRows` for `parts`.
    """
    initializer = InitialRows(parts, sharding, group, layer.name)
    variable = group.add_weight(layer.add_weight, sharding, initializer, name=name, trainable=True)
    return mark(variable, update=layer.update)


def check_update(update: str) -> None:
    """Raises ConfigurationError for an unknown way to update tables."""
    if update not in UPDATES:
        raise ConfigurationError(f"`update` is {update!r}, not one of {UPDATES}.")


# -- initial values ----------------------------------------------------------------------------------------------------


class InitialRows:
    """The initializer of this worker's shard. The tables are the same for any number of workers.

    Args:
      parts: `(initializer, begin, end)` of each table, in the order in which workers hold them: a Keras initializer for
        the full table, and the range of its rows among those of all tables.
      sharding: Sharding of all tables together.
      group: The ranks that have the shards.
      layer: Name of the layer, for errors.
    """

    def __init__(self, parts: Iterable[Any], sharding: Sharding, group: ShardGroup, layer: str) -> None:
        self._parts = list(parts)
        self._sharding = sharding
        self._rank = group.collectives.rank
        self._world = group.world
        for initializer, begin, end in self._parts:
            if self._is_large(end - begin) and not _draws_row_by_row(initializer):
                raise ConfigurationError(
                    f"{layer!r} has the shape {(end - begin, *sharding.shape[1:])}, too large to be drawn in one "
                    f"block, but its initializer {type(initializer).__name__} cannot draw blocks of rows. For a table "
                    f"of more than {WHOLE_ELEMENTS} elements use {', '.join(_ROW_BY_ROW)}, or VarianceScaling with "
                    'mode="fan_out".'
                )

    def __call__(self, shape: Any, dtype: Any = None) -> tf.Tensor:
        from keras.src.backend.common.stateless_scope import in_stateless_scope

        if in_stateless_scope():  # while Keras infers shapes
            return tf.zeros(shape, dtype)
        drawn = [
            (self._in_blocks if self._is_large(end - begin) else self._at_once)(initializer, begin, end, dtype)
            for initializer, begin, end in self._parts
        ]
        return drawn[0] if len(drawn) == 1 else tf.concat(drawn, 0)

    def _is_large(self, rows: int) -> bool:
        return rows * math.prod(self._sharding.shape[1:]) > WHOLE_ELEMENTS

    def _at_once(self, initializer: Any, begin: int, end: int, dtype: Any) -> tf.Tensor:
        whole = tf.convert_to_tensor(initializer((end - begin, *self._sharding.shape[1:]), dtype=dtype))
        [whole] = self._world.broadcast([whole], name="initial value of a table")
        return whole[self._sharding.within(self._rank, begin, end)]

    def _in_blocks(self, initializer: Any, begin: int, end: int, dtype: Any) -> tf.Tensor:
        row_shape = self._sharding.shape[1:]
        step = max(1, BLOCK_ELEMENTS // math.prod(row_shape))
        config, seed = initializer.get_config(), self._agreed_seed(initializer)
        result = _Filled((self._count(begin, end), *self._sharding.shape_of(self._rank)[1:]), dtype)
        filled = 0
        for number, first in enumerate(range(begin, end, step)):
            last = min(first + step, end)
            count = self._count(first, last)
            if not count:
                continue
            if "seed" in config:
                config["seed"] = int(np.random.SeedSequence([seed, number]).generate_state(1)[0] >> 1)
            block = type(initializer).from_config(config)((last - first, *row_shape), dtype=dtype)
            result.write(filled, tf.convert_to_tensor(block)[self._sharding.within(self._rank, first, last)])
            filled += count
        return result.finish()

    def _count(self, begin: int, end: int) -> int:
        """Returns the number of these rows that are this worker's."""
        rows, *_ = self._sharding.within(self._rank, begin, end)
        return len(range(*rows.indices(end - begin)))

    def _agreed_seed(self, initializer: Any) -> int:
        seed = getattr(initializer, "seed", 0)
        seed = seed if isinstance(seed, int) else int(np.asarray(seed.next()).reshape(-1)[0])
        [agreed] = self._world.broadcast([tf.constant([seed], tf.int64)], name="seed of a table")
        return abs(int(agreed[0]))


class _Filled:
    """A tensor that is written part by part. It exists once, in TensorFlow's own memory, so that its holder may write
    to it (the holder would copy NumPy's memory).
    """

    def __init__(self, shape: Sequence[int], dtype: Any) -> None:
        self._of = {"dtype": tf.as_dtype(dtype)}
        self._handle = tf.raw_ops.VarHandleOp(**self._of, shape=shape, shared_name=f"tfring/filled/{uuid.uuid4()}")
        empty = tf.raw_ops.Empty(shape=shape, **self._of)
        tf.raw_ops.AssignVariableOp(resource=self._handle, value=empty)

    def write(self, begin: int, rows: tf.Tensor) -> None:
        tf.raw_ops.ResourceStridedSliceAssign(
            ref=self._handle, begin=[begin], end=[begin + len(rows)], strides=[1], value=rows
        )

    def finish(self) -> tf.Tensor:
        tensor = tf.raw_ops.ReadVariableOp(resource=self._handle, **self._of)
        tf.raw_ops.DestroyResourceOp(resource=self._handle)
        return tensor


def _draws_row_by_row(initializer: Any) -> bool:
    kind = type(initializer).__name__
    return kind in _ROW_BY_ROW or (kind == "VarianceScaling" and initializer.mode == "fan_out")


# -- updates -----------------------------------------------------------------------------------------------------------


class _Rows:
    """Some rows of a variable, passed to Keras' `update_step` in place of the variable."""

    def __init__(self, variable: Any, ids: tf.Tensor, key: Any) -> None:
        self._variable = values_of(variable.value)[0]
        self._ids = ids
        self._unique_id = key  # the optimizer finds its slots by this
        self._tensor = tf.gather(self._variable, ids)
        self._is_written = False
        self.dtype = self._variable.dtype
        self.name = self._variable.name

    @property
    def shape(self) -> tf.TensorShape:
        return self._tensor.shape

    @property
    def value(self) -> _Rows:
        return self

    def assign(self, value: Any) -> None:
        self._tensor = tf.ensure_shape(tf.cast(value, self.dtype), self._tensor.shape)
        self._is_written = True

    def assign_add(self, value: Any) -> None:
        self.assign(self._tensor + tf.cast(value, self.dtype))

    def assign_sub(self, value: Any) -> None:
        self.assign(self._tensor - tf.cast(value, self.dtype))

    def write_back(self) -> None:
        if self._is_written:
            self._variable.scatter_update(tf.IndexedSlices(self._tensor, self._ids))

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        return tf.convert_to_tensor(self._tensor, dtype=dtype, name=name)


def _operator(name: str) -> Callable:
    def apply(self: Any, *others: Any) -> tf.Tensor:
        return getattr(self._tensor, name)(*(tf.convert_to_tensor(o, self.dtype) for o in others))

    return apply


for _name in ("neg", *(side + name for side in ("", "r") for name in ("add", "sub", "mul", "truediv", "pow"))):
    setattr(_Rows, f"__{_name}__", _operator(f"__{_name}__"))


def update_rows(optimizer: Any, gradient: Any, variable: Any, learning_rate: Any) -> None:
    """Applies Keras' update, and weight decay, to the rows of a table that have a gradient, and to their slots."""
    if not isinstance(gradient, tf.IndexedSlices):
        raise ConfigurationError(
            f'Table {variable.path!r} has update="rows" and got a dense gradient, of shape {gradient.shape}. Only '
            'lookups may use such a table. Make the layer with update="dense", and do not use its `embeddings` in a '
            "loss: each worker has only its own rows."
        )
    key, index = optimizer._var_key(variable), optimizer._get_variable_index(variable)
    weight = _Rows(variable, gradient.indices, key)
    parts = [weight]
    # Not copy.copy, which pickles in Keras. Bypasses Keras' trackers, which expect a slot to be a variable.
    of_rows = object.__new__(optimizer.__class__)
    vars(of_rows).update(vars(optimizer))
    for name, slots in vars(optimizer).items():
        slot = slots[index] if isinstance(slots, list) and name not in _NOT_SLOTS and len(slots) > index else None
        if update_of(slot) is not None:
            parts.append(_Rows(slot, gradient.indices, key))
            vars(of_rows)[name] = {index: parts[-1]}
    if optimizer.weight_decay is not None and optimizer._use_weight_decay(variable):
        decay = tf.cast(optimizer.weight_decay, weight.dtype) * tf.cast(learning_rate, weight.dtype)
        weight.assign_sub(weight * decay)
    of_rows.update_step(gradient.values, weight, learning_rate)
    for part in parts:
        part.write_back()


def sum_duplicate_ids(gradient: tf.IndexedSlices) -> tf.IndexedSlices:
    """Returns a gradient of a table with the rows of each id summed."""
    [(values, indices)], _ = LocalCollectives().sum_rows([gradient.values], [gradient.indices], name="rows of a table")
    return tf.IndexedSlices(values, indices, gradient.dense_shape)


def refuse_what_goes_over_all_rows(optimizer: Any, table: Any) -> None:
    """Raises ConfigurationError for settings of an optimizer that do not go with a table with update="rows"."""
    wanted = [name for name in ("use_ema", "gradient_accumulation_steps") if getattr(optimizer, name)]
    if wanted:
        raise ConfigurationError(
            f"{type(optimizer).__name__} {optimizer.name!r} has {wanted[0]}={getattr(optimizer, wanted[0])}, which "
            f'changes all rows, but table {table.path!r} has update="rows", which changes only rows with a gradient. '
            'Make the layer with update="dense".'
        )


def without_copies(initializer: Any) -> Any:
    """Returns an initializer of the same values; for a number without the temporary copies of Keras' Constant."""
    import keras

    if type(initializer) is not keras.initializers.Constant or np.ndim(initializer.value):
        return initializer
    return lambda shape, dtype=None: tf.fill(shape, tf.cast(initializer.value, dtype))
