"""Shards in files: slots of a sharded optimizer and sharded weights are full there, as one process writes them.

So they load into any cluster. Each rank has a shard of them, so all ranks take part in saving, even if only one writes.
Saving a model first gathers all its shards, always in the same order, regardless of which ones are then written. No
rank receives more than a block of rows at a time. The rank that writes keeps large full values in a file until then
(`blocks.py`).
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfring import blocks
from tfring._keras.optimizers import optimizers_of
from tfring._keras.seam import ring_of_model, seam
from tfring._keras.sharding import full_shape, full_shapes, gather, large, local_value, shard_of, sharding_of, stores
from tfring._keras.sharding.shards import shards_of
from tfring.errors import ConfigurationError
from tfring.runtime import ring_of

_gathered: dict[int, np.ndarray] = {}  # full values while a model is saved, by the identity of the variable
_in_hdf5 = False


def sharded_variables_of(model: Any) -> list:
    """Returns the weights of a model and the slots of its optimizers that are sharded over ranks."""
    variables = [*model.variables, *(v for optimizer in optimizers_of(model) for v in optimizer.variables)]
    return [v for v in {id(v): v for v in variables}.values() if sharding_of(v) is not None]


@contextlib.contextmanager
def full_values_of(model: Any, keep: bool = True) -> Iterator[None]:
    """Gathers a model's shards in full while it is saved. All ranks call it. `keep`: Whether this rank writes."""
    ring = ring_of_model(model)
    if ring is not None and ring.updater is not None:
        ring.updater.before_saving(model, keep)
    if keep and ring is not None and ring.cluster.world_size > 1:
        _warn_of_parts(model)
    sharded = [] if _gathered else sharded_variables_of(model)
    for variable in sharded:  # one by one: a rank that does not write has memory for no more
        value = gather_full(variable, keep)
        if keep:
            _gathered[id(variable)] = value
    try:
        yield
    finally:
        if sharded:
            _gathered.clear()


def _warn_of_parts(model: Any) -> None:
    """Warns of gradients that were accumulated since the last update: each worker has those of its own rows."""
    for optimizer in optimizers_of(model):
        every = optimizer.gradient_accumulation_steps
        steps = int(optimizer._iterations.numpy()) % every if every and optimizer.built else 0
        if steps:
            warnings.warn(
                f"The file of model {model.name!r} has this worker's part of the gradients that {optimizer.name!r} has "
                f"accumulated in {steps} of {every} steps, so training that continues from it differs by an update "
                f"from training in one process. Save after a multiple of {every} steps, or use "
                "tfring.callbacks.Backup, which saves the parts of all workers.",
                stacklevel=2,
            )


def gathered(variable: Any) -> np.ndarray | None:
    """Returns the full value of a sharded variable while a model is saved; otherwise None."""
    return _gathered.get(id(variable))


def gather_full(variable: Any, keep: bool = True, of_each_replica: bool = False) -> np.ndarray:
    """Returns the full value of a variable; for a sharded one an empty array if this rank does not `keep` it.

    All ranks call it. With `of_each_replica` it returns the full values of all replicas, which differ, stacked
    along the data axis.
    """
    sharding = sharding_of(variable)
    if sharding is None:
        return variable.numpy()
    if id(variable) in _gathered:
        return _gathered[id(variable)]
    held = np.atleast_1d(large.view(variable))
    ring = ring_of(variable.value.distribute_strategy)
    assert ring is not None  # its ranks have the shards
    mesh = ring.mesh
    along = f"{sharding.axis}+data" if of_each_replica else sharding.axis
    collectives = ring.along(along)
    ranks = mesh.ranks(along, ring.cluster.rank)
    places = [(mesh.coordinate("data", r) if of_each_replica else 0, mesh.coordinate(sharding.axis, r)) for r in ranks]
    sizes = [sharding.count(place) for _, place in places]
    replicas = mesh.size_along("data") if of_each_replica else 1
    result = blocks.allocate((replicas, *sharding.lined_up) if keep else (0, 0), held.dtype)
    held = np.moveaxis(held, sharding.dimension, 0)
    rows_of = [np.moveaxis(each, sharding.dimension, 0) for each in result]  # views
    step = blocks.rows_of_a_block(held, len(sizes))
    name = "shards of all ranks, which save together"  # not the variable's name: Keras numbers names on each rank
    for begin in range(0, max(sizes), step):
        counts = [min(step, max(0, size - begin)) for size in sizes]
        block = collectives.all_gather(tf.constant(held[begin : begin + step]), name=name)
        parts = np.split(block.numpy(), np.cumsum(counts)[:-1]) if keep else ()
        for (replica, place), rows in zip(places, parts, strict=False):
            blocks.write_rows(rows, begin, [rows_of[replica][part] for part in sharding.slices(place)])
    shape = (replicas, *sharding.shape) if of_each_replica else sharding.shape
    return result.reshape(shape) if keep else result


class _Whole:
    """Replaces a slot when Keras asks for its path and its value."""

    def __init__(self, slot: Any) -> None:
        self.path = slot.path
        self._value = gather_full(slot)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self._value if dtype is None else self._value.astype(dtype)


@contextlib.contextmanager
def written_to_hdf5() -> Iterator[None]:
    """Notes that a model is being saved to a file of Keras' older format, which stores slots as they are."""
    global _in_hdf5
    _in_hdf5 = True
    try:
        yield
    finally:
        _in_hdf5 = False


def as_written(slots: list) -> list:
    """Returns the variables of an optimizer; within `written_to_hdf5` with full values in place of shards."""
    return [_Whole(slot) if _in_hdf5 and sharding_of(slot) is not None else slot for slot in slots]


def shard_write_error(kind: str, shards: Sequence[Any], holder: Any, save_type: str) -> ConfigurationError:
    """Returns the error to raise when TensorFlow asks a layer or an optimizer with shards what to write.

    Args:
      kind: "weight" or "slot".
      shards: The variables of shards, possibly none yet.
      holder: The layer or the optimizer.
      save_type: "checkpoint" or "savedmodel", as TensorFlow gives it.
    """
    writer, cure = "tf.saved_model.save", "load that file in one process, and export it there"
    if save_type == "checkpoint":
        writer, cure = "tf.train.Checkpoint", "which writes full weights and slots"
    received = "".join(f"{v.path!r} of " for v in shards[:1])
    return ConfigurationError(
        f"{writer} would write only this rank's shard of a {kind}, {received}{type(holder).__name__} {holder.name!r}. "
        f"Save with `tfring.save(model, path)` on all ranks, {cure}."
    )


def install() -> None:
    import keras
    from keras.src.saving import saving_lib

    @seam(saving_lib.H5IOStore, "__setitem__")
    def set_item(original: Callable[..., Any], self: Any, key: str, value: Any) -> Any:
        value = _gathered.get(id(value), value)
        if isinstance(value, np.memmap) and value.dtype.isbuiltin == 1:
            return stores.write(self, key, value)
        return original(self, key, value)

    @seam(saving_lib, "is_memory_sufficient")
    def is_memory_sufficient(original: Callable[..., Any], model: Any) -> bool:
        """Returns False also for large sharded values. With True, Keras packs and unpacks a file in memory."""
        sizes = [math.prod(full_shape(v)) * v.value.dtype.size for v in sharded_variables_of(model)]
        with full_shapes():
            return max(sizes, default=0) < blocks.LARGE_BYTES and original(model)

    @seam(keras.layers.Layer, "get_weights")
    def get_weights(original: Callable[..., Any], self: Any) -> list:
        if not any(map(sharding_of, self.weights)):
            return original(self)
        return [*map(gather_full, self.weights)]

    @seam(keras.layers.Layer, "set_weights")
    def set_weights(original: Callable[..., Any], self: Any, weights: Sequence[Any]) -> Any:
        pairs = zip(self.weights, weights, strict=False)  # Keras reports if they are more or fewer
        held = [shard_of(v, np.asarray(w)) if sharding_of(v) is not None else w for v, w in pairs]
        return original(self, [*held, *weights[len(held) :]])


def swap_averages(original: Callable[..., Any], optimizer: Any) -> Any:
    """Swaps weights and their moving averages for SwapEMAWeights, also for a sharded optimizer."""
    shards = shards_of(optimizer)
    if shards is None:
        return original(optimizer)
    for variable, average in _averaged(optimizer):
        value = local_value(average)
        if sharding_of(variable) is None:  # for a table the average is a shard of the same size
            [value] = gather(shards.ring.control_ops, [average], name="moving average of a weight")
        average.assign(variable)
        variable.assign(value)
    return None


def keep_averages(original: Callable[..., Any], optimizer: Any) -> Any:
    """Assigns the values of weights to their moving averages for SwapEMAWeights, also for a sharded optimizer."""
    if shards_of(optimizer) is None:
        return original(optimizer)
    for variable, average in _averaged(optimizer):
        average.assign(variable)
    return None


def _averaged(optimizer: Any) -> list[tuple[Any, Any]]:
    pairs = zip(optimizer._trainable_variables, optimizer._model_variables_moving_average, strict=True)
    return [(variable, average) for variable, average in pairs if average is not None]
