"""Copies a functional or sequential model and replaces some of its layers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras

from tfring._keras.layers import all_layers, is_functional


def check_built(model: Any) -> None:
    """Raises ValueError if `model` is not a built Keras model."""
    if not isinstance(model, keras.Model) or not model.built:
        raise ValueError(f"`model` is {model}, not a built Keras model.")


def converted(
    model: keras.Model,
    is_wanted: Callable[[keras.layers.Layer], bool],
    convert: Callable[[keras.layers.Layer], keras.layers.Layer],
    copy_weights: Callable[[keras.layers.Layer, keras.layers.Layer], None],
) -> keras.Model:
    """Returns a copy of `model` with some layers replaced, also inside nested models and wrappers.

    The copy is not compiled. All other weights are kept.

    Args:
      model: A built model.
      is_wanted: A function that returns True for a layer to replace.
      convert: A function that makes the replacement of a layer.
      copy_weights: A function that is called with the layer and its replacement once both are built.

    Raises:
      ValueError: If the model cannot be rebuilt layer by layer.
    """
    copies: dict[int, keras.layers.Layer] = {}  # by id of the layer: one that is used in several places stays one layer
    weights_of: list[tuple] = []

    def copy_of(layer: Any) -> Any:
        if id(layer) not in copies:
            copies[id(layer)] = make(layer)
        return copies[id(layer)]

    def make(layer: Any) -> Any:
        if isinstance(layer, keras.Model):
            return rebuild(layer)
        if is_wanted(layer):
            new = convert(layer)
            weights_of.append((layer, new, copy_weights))
            return new
        if isinstance(layer, keras.layers.Wrapper) and any(map(is_wanted, all_layers(layer))):
            config = layer.get_config()
            del config["layer"]
            return type(layer)(copy_of(layer.layer), **config)
        new = type(layer).from_config(layer.get_config())
        if isinstance(layer, keras.layers.Layer):  # and not an operation, such as a mask's `!=`
            weights_of.append((layer, new, lambda old, new: new.set_weights(old.get_weights())))
        return new

    def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(layer, keras.layers.GroupNormalization):
            kwargs = {k: v for k, v in kwargs.items() if k not in ("mask", "training")}  # it accepts neither
        return layer(*args, **kwargs)

    def rebuild(model: keras.Model) -> keras.Model:
        if not is_functional(model):
            raise ValueError(
                f"{model.name} is a {type(model).__name__}, but only functional and sequential models can be rebuilt "
                "layer by layer. Use the new layer in its source."
            )
        call_function = None if isinstance(model, keras.Sequential) else call
        return keras.models.clone_model(model, clone_function=copy_of, call_function=call_function)

    with _not_compiled(model):
        copy = rebuild(model)
    for old, new, give in weights_of:
        give(old, new)
    return copy


@contextlib.contextmanager
def _not_compiled(model: keras.Model) -> Iterator[None]:
    """Marks models as not compiled. Newer versions of Keras compile their copies too, which fails for some losses."""
    compiled = [m for m in all_layers(model) if isinstance(m, keras.Model) and m.compiled]
    try:
        for m in compiled:
            m.compiled = False
        yield
    finally:
        for m in compiled:
            m.compiled = True
