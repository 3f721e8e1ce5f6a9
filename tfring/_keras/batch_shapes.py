"""Models with a fixed batch size, such as stateful RNNs, and batches with a number of rows known in advance."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from tfring._keras.layers import all_layers
from tfring.data.rows import static_rows
from tfring.setting import setting

_local = threading.local()


def check(model: Any, batch_size: int | None) -> None:
    """Refuses batches that do not have a model's fixed number of rows, before the first step.

    Args:
      model: A Keras model. One that accepts any number of rows passes.
      batch_size: Number of rows of the global batch. None if unknown.

    Raises:
      ValueError: If the numbers of rows differ.
    """
    given = fixed(model)
    if not given or batch_size is None or given == {batch_size}:
        return
    raise ValueError(
        f"A batch has {batch_size} rows, but the model has the fixed batch shape {', '.join(map(str, sorted(given)))}. "
        "Make the model with `keras.Input(batch_shape=(batch_size, ...))`, and make every batch `batch_size` rows long."
    )


def is_stateful(model: Any) -> bool:
    """Returns True if a layer keeps state for each row of a batch, as stateful RNNs do."""
    return any(getattr(layer, "stateful", False) for layer in all_layers(model))


def fixed(model: Any) -> set[int]:
    """Returns the static numbers of rows of a model's inputs.

    For a Sequential model Keras records the rows of the first batch, as if the user had given their number, and writes
    it to files. Only layers that keep state for rows use it. Beside inputs with any number of rows, a fixed input is a
    constant.
    """
    import keras

    if isinstance(model, keras.Sequential) and not is_stateful(model):
        return set()
    inputs = getattr(model, "inputs", None) or []
    counts = {x.shape[0] for x in inputs if len(x.shape)}
    return set() if None in counts and not is_stateful(model) else counts - {None}


def of_call(given: Any) -> AbstractContextManager:
    """Sets `static_rows_of_call` during a call of `fit`, `evaluate` or `predict` with a dataset or something else."""
    return setting(_local, "rows", _static_rows(given))


def static_rows_of_call() -> int | None:
    """Returns the number of rows of every batch of the running call if one process knows it in advance, or None."""
    return getattr(_local, "rows", None)


def _static_rows(given: Any) -> int | None:
    """Returns the number of rows of every batch of a dataset if it is static, or None."""
    if not isinstance(given, tf.data.Dataset):
        return None
    counts = [static_rows(spec) for spec in tf.nest.flatten(given.element_spec)]
    return counts[0] if counts and None not in counts and len(set(counts)) == 1 else None
