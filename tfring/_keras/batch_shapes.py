"""Models with a fixed number of rows, such as stateful recurrent ones: it is that of a replica's share.

What a stateful layer remembers of its rows stays with the replica that has them; it is no statistic to be averaged.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfring import data, step
from tfring._keras.layers import all_layers
from tfring._keras.seam import seam
from tfring.errors import ConfigurationError, TfringError
from tfring.recognition import ring_of_process

if TYPE_CHECKING:
    from tfring.strategy.ring import RingStrategy

_OF_CONSTANT = re.compile(r"Incompatible shapes: \[(\d+)[,\d]*\] vs\. \[(\d+)[,\d]*\]")
_OF_NONE = re.compile(r"NoneType|of \(None,|\(None\)|None values not supported|got None|None for argument")


def install() -> None:
    import keras
    from keras.src import tree

    @seam(keras.layers.RNN, "_create_state_variables")
    def create_state_variables(original: Callable[..., Any], self: Any, batch_size: Any) -> None:
        original(self, batch_size)
        for variable in tree.flatten(self.states):
            step.keep_by_replica(variable)


def check(model: Any, strategy: RingStrategy, batch_size: int | None) -> None:
    """Refuses batches whose shares do not fit the model's fixed number of rows.

    Args:
      model: a Keras model; one that takes any number of rows passes.
      strategy: its RingStrategy.
      batch_size: rows of a global batch; None where it is unknown.

    Raises:
      ValueError: at the door of `fit`, `evaluate` or `predict`.
    """
    replicas = strategy.num_replicas_in_sync
    given = fixed(model)
    if not given or batch_size is None or replicas == 1 or given == {batch_size / replicas}:
        return
    raise ValueError(
        "A model with a fixed batch shape is given a replica's share of each batch, which must have that many rows. "
        f"Received: a batch shape of {', '.join(map(str, sorted(given)))}, and a batch of {batch_size} rows, "
        f"of which each of {replicas} replicas gets {batch_size / replicas:g} rows. Make the model with "
        "`keras.Input(batch_shape=(batch_size // strategy.num_replicas_in_sync, ...))`, and let every batch have "
        "`batch_size` rows."
    )


def fixed(model: Any) -> set[int]:
    """Returns the static numbers of rows of a model's inputs.

    Of a Sequential model Keras notes that of a first batch, as if it had been given, and writes it to files. Only
    layers that remember rows look at it. Beside inputs of any number of rows a fixed one is a constant.
    """
    import keras

    is_stateful = any(getattr(layer, "stateful", False) for layer in all_layers(model))
    if isinstance(model, keras.Sequential) and not is_stateful:
        return set()
    inputs = getattr(model, "inputs", None) or []
    counts = {x.shape[0] for x in inputs if len(x.shape)}
    return set() if None in counts and not is_stateful else counts - {None}


@contextlib.contextmanager
def static_rows_explained(given: Any) -> Iterator[None]:
    """While it lasts, an error of a step that takes a static number of rows, as one process has, says what to write.

    So does one of a constant with the rows of the whole batch, beside a share.

    Args:
      given: what `fit`, `evaluate` or `predict` trains on.

    Raises:
      ConfigurationError: in place of TensorFlow's and Keras' errors of a dimension that is None, or of shapes that are
        incompatible as those of a batch and a share are.
    """
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        found, strategy = _OF_CONSTANT.search(error.message), ring_of_process()
        if found is None or strategy is None:
            raise
        share, batch = sorted(map(int, found.groups()))
        replicas = strategy.num_replicas_in_sync
        if share == batch or abs(replicas * share - batch) >= replicas:
            raise
        raise ConfigurationError(
            "A step computes on a replica's share of the rows of a batch. Received: "
            f"{found.group()}, on one of {replicas} replicas: it looks as if a constant had the rows of a whole "
            "batch, such as `tf.ones([batch_size, 1])`. Make it of the rows of the share: `tf.ones_like(y_pred)`, "
            "`tf.ones([tf.shape(x)[0], 1])`. (docs/data.md)"
        ) from error
    except (TypeError, ValueError, RuntimeError) as error:
        rows = _static_rows(given)
        if rows is None or isinstance(error, TfringError) or not _OF_NONE.search(str(error)):
            raise
        raise ConfigurationError(
            "A replica's number of rows is known when the step runs, not before: it is no number of Python's there. "
            f"Received: batches of {rows} rows, and a step that takes `x.shape[0]`, or another dimension that is None, "
            f"for a number ({type(error).__name__}, above). Write `keras.ops.shape(x)[0]` or `tf.shape(x)[0]`. "
            "(docs/data.md)"
        ) from error


def _static_rows(given: Any) -> int | None:
    """Returns the rows of every batch of a dataset, where they are static."""
    if not isinstance(given, tf.data.Dataset):
        return None
    counts = [data.static_rows(spec) for spec in tf.nest.flatten(given.element_spec)]
    return counts[0] if counts and None not in counts and len(set(counts)) == 1 else None
