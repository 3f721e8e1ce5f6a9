"""Layers at any depth of a model, and the names under which files keep them."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
from keras.src.models.functional import Functional
from keras.src.utils import naming

from tfring._keras.seam import seam, undo

_saved_as: dict[str, str] = {}  # maps the name of a class to that of the class with which it shares files


def all_layers(layer: keras.layers.Layer) -> list[keras.layers.Layer]:
    """Returns `layer` and the layers in it, at any depth, each once. Keras shows them only for models."""
    return list(layer._flatten_layers(include_self=True, recursive=True))


def is_functional(model: keras.Model) -> bool:
    """Returns whether Keras knows a model's layers and their connections: it is functional or sequential."""
    return isinstance(model, (keras.Sequential, Functional))


def objects_in(values: Iterable[Any], kind: type) -> Iterator[Any]:
    """Yields the objects of type `kind` among values and in their lists, tuples and dicts, breadth first, each once.

    Containers may hold each other and themselves: each is visited once.
    """
    seen: set[int] = set()
    todo: deque[Any] = deque([list(values)])
    while todo:
        holder = todo.popleft()
        for value in holder.values() if isinstance(holder, dict) else holder:
            if isinstance(value, (kind, dict, list, tuple)) and id(value) not in seen:
                seen.add(id(value))
                if isinstance(value, kind):
                    yield value
                else:
                    todo.append(value)


@functools.cache
def install() -> None:
    """Makes files use the names that `save_under_name_of` gives to layers. The first of these layers calls it, too."""
    undo.append(install.cache_clear)

    @seam(naming, "to_snake_case")
    def to_snake_case(original: Callable[..., Any], name: str) -> str:
        return original(_saved_as.get(name, name))


def save_under_name_of(cls: type, other: type) -> None:
    """Makes files of weights and models hold layers of `cls` as if they were of class `other`; either class loads them.

    Keras addresses a layer's weights by the name of its class, so that otherwise a file of one class would not fit a
    model with the other.
    """
    _saved_as[cls.__name__] = other.__name__
