"""Models with a fixed number of rows, such as stateful recurrent ones: it is that of a replica's share.

What a stateful layer remembers of its rows stays with the replica that has them; it is no statistic to be averaged.
"""

from __future__ import annotations

from tfring import step
from tfring._keras.layers import all_layers
from tfring._keras.seam import seam


def install():
    import keras
    from keras.src import tree

    @seam(keras.Sequential, "build")
    def build(original, self, input_shape=None):
        is_given = any(isinstance(layer, keras.layers.InputLayer) for layer in self._layers[:1])
        original(self, input_shape)
        if not is_given:
            vars(self)["_tfring_noted_shape"] = True  # by Keras, of the first batch that it saw

    @seam(keras.layers.RNN, "_create_state_variables")
    def create_state_variables(original, self, batch_size):
        original(self, batch_size)
        for variable in tree.flatten(self.states):
            step.keep_by_replica(variable)


def check(model, strategy, batch_size: int | None) -> None:
    """Refuses batches whose shares do not fit the model's fixed number of rows.

    Args:
      model: a Keras model; one that takes any number of rows passes.
      strategy: its RingStrategy.
      batch_size: rows of a global batch; None where nobody knows.

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


def fixed(model) -> set[int]:
    """Returns the static numbers of rows of a model's inputs, but where Keras noted those of a first batch."""
    is_stateful = any(getattr(layer, "stateful", False) for layer in all_layers(model))
    if "_tfring_noted_shape" in vars(model) and not is_stateful:
        return set()
    inputs = getattr(model, "inputs", None) or []
    return {x.shape[0] for x in inputs if len(x.shape) and x.shape[0] is not None}
