"""Models with a fixed number of rows, such as stateful recurrent ones, and batches whose rows are known beforehand."""

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
      model: A Keras model; one that takes any number of rows passes.
      batch_size: Rows of a batch of all workers; None where it is unknown.

    Raises:
      ValueError: If they differ.
    """
    given = fixed(model)
    if not given or batch_size is None or given == {batch_size}:
        return
    raise ValueError(
        f"A batch has {batch_size} rows, and the model the fixed batch shape {', '.join(map(str, sorted(given)))}. "
        "Make the model with `keras.Input(batch_shape=(batch_size, ...))`, and let every batch have `batch_size` rows."
    )


def is_stateful(model: Any) -> bool:
    """Returns True if layers remember something of each row of a batch, as stateful RNNs do."""
    return any(getattr(layer, "stateful", False) for layer in all_layers(model))


def fixed(model: Any) -> set[int]:
    """Returns the static numbers of rows of a model's inputs.

    Of a Sequential model Keras notes that of a first batch, as if it had been given, and writes it to files. Only
    layers that remember rows look at it. Beside inputs of any number of rows a fixed one is a constant.
    """
    import keras

    if isinstance(model, keras.Sequential) and not is_stateful(model):
        return set()
    inputs = getattr(model, "inputs", None) or []
    counts = {x.shape[0] for x in inputs if len(x.shape)}
    return set() if None in counts and not is_stateful(model) else counts - {None}


def of_call(given: Any) -> AbstractContextManager:
    """Around a call of `fit`, `evaluate` or `predict`, which is given a dataset or something else."""
    return setting(_local, "rows", _static_rows(given))


def static_rows_of_call() -> int | None:
    """Returns the rows of every batch of the call that runs, where one process knows their number before."""
    return getattr(_local, "rows", None)


def _static_rows(given: Any) -> int | None:
    """Returns the rows of every batch of a dataset, where they are static."""
    if not isinstance(given, tf.data.Dataset):
        return None
    counts = [static_rows(spec) for spec in tf.nest.flatten(given.element_spec)]
    return counts[0] if counts and None not in counts and len(set(counts)) == 1 else None
