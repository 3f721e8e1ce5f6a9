"""Slots of a sharded optimizer in files: whole, as one process writes them, so that they load into any cluster.

A rank has a piece of each slot, so all ranks take part in saving, also where one alone writes. Whoever saves a model
gathers its slots first, all of them at once and always in the same order, whatever goes on to be written.
"""

from __future__ import annotations

import contextlib

import numpy as np

from tfring._keras import outside
from tfring._keras.seam import ring_of_model, seam
from tfring._keras.sharding import cut_of, gather, shards_of
from tfring.errors import ConfigurationError

_gathered: dict[int, np.ndarray] = {}  # whole slots while a model is saved, by the identity of the variable


def slots_of(model) -> list:
    """The slots of a model's optimizers of which each rank has a piece."""
    variables = [v for optimizer in outside.optimizers_of(model) for v in optimizer.variables]
    return [v for v in {id(v): v for v in variables}.values() if cut_of(v) is not None]


@contextlib.contextmanager
def whole_slots(model, keep: bool = True):
    """While a model is saved; all ranks call it. `keep`: whether this rank writes."""
    slots = [] if _gathered else slots_of(model)
    for slot in slots:  # one by one: a rank that does not write has room for no more
        value = whole(ring_of_model(model), slot)
        if keep:
            _gathered[id(slot)] = value
    try:
        yield
    finally:
        if slots:
            _gathered.clear()


def whole(strategy, slot) -> np.ndarray:
    """The whole value of a slot; all ranks call it."""
    if id(slot) in _gathered:
        return _gathered[id(slot)]
    [value] = gather(strategy.extended.control_ops, [slot], name=f"{slot.path} of all ranks, which save together")
    return value.numpy()


class _Whole:
    """Stands for a slot where Keras asks for its path and its value."""

    def __init__(self, strategy, slot):
        self.path = slot.path
        self._value = whole(strategy, slot)

    def __array__(self, dtype=None, copy=None):
        return self._value if dtype is None else self._value.astype(dtype)


class _Weights:
    """Stands for an optimizer where Keras asks for its weights."""

    def __init__(self, weights):
        self.weights = weights


def install():
    import keras
    from keras.src.backend.tensorflow import optimizer as tensorflow_optimizer
    from keras.src.legacy.saving import legacy_h5_format
    from keras.src.optimizers import base_optimizer

    @seam(base_optimizer.BaseOptimizer, "save_own_variables")
    def save_own_variables(original, self, store):
        variables = self.variables
        if all(cut_of(v) is None for v in variables):
            return original(self, store)
        for number, variable in enumerate(variables):
            is_cut = cut_of(variable) is not None
            store[str(number)] = whole(self._distribution_strategy, variable) if is_cut else variable.numpy()

    @seam(legacy_h5_format, "save_optimizer_weights_to_hdf5_group")
    def save_optimizer_weights_to_hdf5_group(original, group, optimizer):
        variables = getattr(optimizer, "variables", ())
        if any(cut_of(v) is not None for v in variables):
            strategy = optimizer._distribution_strategy
            optimizer = _Weights([v if cut_of(v) is None else _Whole(strategy, v) for v in variables])
        return original(group, optimizer)

    @seam(tensorflow_optimizer.TFOptimizer, "_trackable_children")
    def trackable_children(original, self, save_type="checkpoint", **kwargs):
        if save_type == "checkpoint" and shards_of(self) is not None:
            raise ConfigurationError(
                "With shard_optimizer=True a rank has a piece of each slot, and tf.train.Checkpoint would write "
                f"pieces. Received: {type(self).__name__} {self.name!r}. Save by `tfring.save(model, path)`, by "
                "`model.save` on all ranks, or by tfring.callbacks.Backup."
            )
        return original(self, save_type, **kwargs)

    @seam(keras.callbacks.SwapEMAWeights, "_tf_swap_variables")
    def swap_variables(original, self, optimizer):
        shards = shards_of(optimizer)
        if shards is None:
            return original(self, optimizer)
        for variable, average in _averaged(optimizer):
            [value] = gather(shards.strategy.extended.control_ops, [average], name="moving average of a weight")
            average.assign(variable)
            variable.assign(value)

    @seam(keras.callbacks.SwapEMAWeights, "_tf_finalize_ema_values")
    def finalize_ema_values(original, self, optimizer):
        if shards_of(optimizer) is None:
            return original(self, optimizer)
        for variable, average in _averaged(optimizer):
            average.assign(variable)


def _averaged(optimizer):
    pairs = zip(optimizer._trainable_variables, optimizer._model_variables_moving_average, strict=True)
    return [(variable, average) for variable, average in pairs if average is not None]
