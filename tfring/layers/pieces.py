"""Weights of a layer in pieces: made as Keras makes whole ones, kept whole in files."""

from __future__ import annotations

import keras
import tensorflow as tf

from tfring import step
from tfring._keras import slots, stores
from tfring._keras.sharding import Division, InitialPiece, cut_of
from tfring.errors import ConfigurationError
from tfring.reduction.cuts import cut_along

_SUMS = ("L1", "L2", "L1L2")  # regularizers of which that of the whole is the sum of those of pieces


class InPieces(keras.layers.Layer):
    """Before a layer of Keras among its bases: of weights that `dimensions` names this worker has its piece.

    Its `build` asks for whole weights, by `add_weight` with a name; each is drawn whole, as one process draws it, and
    the piece is kept. Optimizers, files, `get_weights` and `set_weights` know of pieces (`tfring/_keras/sharding.py`).

    Attributes:
      division: over which ranks.
      dimensions: by the name of a weight, along which dimension it is divided.
    """

    division = Division()
    dimensions: dict[str, int] = {}

    def add_weight(self, shape=None, initializer=None, *, name=None, regularizer=None, **options):
        dimension = None if self.division.is_alone else self.dimensions.get(name)
        add_weight = super().add_weight
        if dimension is None:
            return add_weight(shape, initializer, name=name, regularizer=regularizer, **options)
        cut = cut_along(shape, dimension, self.division.collectives.world_size)
        if not all(end > begin for begin, end in cut.bounds):
            raise ConfigurationError(
                f"A weight is divided into a piece for each of {len(cut.bounds)} workers. Received: {name!r} of "
                f"{self.name!r}, of shape {tuple(shape)}, of which dimension {dimension} is divided. Use fewer "
                f"workers along the {self.division.axis} axis, or the layer of Keras."
            )
        if regularizer is not None:
            regularizer = _OfPieces(regularizer, self.division, f"regularizer of {name}")
        initial = InitialPiece(keras.initializers.get(initializer), cut, self.division)
        return self.division.add_weight(add_weight, cut, initial, name=name, regularizer=regularizer, **options)

    def save_own_variables(self, store):
        """All ranks call it, or are in `tfring.save` or `model.save` together."""
        if not any(cut_of(v) is not None for v in self._own_variables()):
            return super().save_own_variables(store)
        for number, variable in enumerate(self._own_variables()):
            store[str(number)] = variable if cut_of(variable) is None else slots.whole(variable)
        return None

    def load_own_variables(self, store):
        stored = set(store.keys())
        store = stores.InBlocks(store)
        for number, variable in enumerate(self._own_variables()):
            cut = cut_of(variable)
            if cut is not None and str(number) in stored and tuple(store[str(number)].shape) != cut.shape:
                raise ValueError(
                    f"A file for {self.name!r} has a whole {variable.name!r}, of shape {cut.shape}. Received: shape "
                    f"{tuple(store[str(number)].shape)}."
                )
        super().load_own_variables(store)

    def _own_variables(self):
        return [*self._trainable_variables, *self._non_trainable_variables]


class _OfPieces(keras.regularizers.Regularizer):
    """What a regularizer gives for the whole; each piece has its own gradient of it."""

    def __init__(self, regularizer, division, name):
        self._regularizer = regularizer
        self._division = division
        self._name = name

    def __call__(self, piece):
        running = step.current()
        # Nobody weighs the gradient of a piece of the data axis (`gradient_is_complete`), and each microbatch has one.
        part = running.part if running is not None and self._division.axis == "data" else None

        @tf.custom_gradient
        def summed(value):
            def gradient(given):
                return given if part is None else given * tf.cast(part, given.dtype)

            return self._division.collectives.all_reduce([value], name=self._name)[0], gradient

        return summed(self._regularizer(piece))


def refuse_what_needs_the_whole(layer, **given) -> None:
    """Raises ConfigurationError for arguments of `layer`, by name, that no piece is enough for."""
    for name, value in given.items():
        kind = type(value)
        of_keras = kind is getattr(keras.regularizers, kind.__name__, None) or kind is keras.constraints.NonNeg
        if value is None or (of_keras and kind.__name__ in (*_SUMS, "NonNeg")):
            continue
        shown = getattr(value, "__name__", kind.__name__)
        raise ConfigurationError(
            f"A {type(layer).__name__} takes no such `{name}`: no worker has the whole weight. It takes regularizers "
            f"that are sums over elements, {', '.join(_SUMS)}, and the constraint NonNeg. Received: "
            f"{name}={shown} for {layer.name!r}. Use a layer of Keras, or leave it out."
        )
