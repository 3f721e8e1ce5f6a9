"""Shards large tables of a model over the workers."""

from __future__ import annotations

from typing import Any

import keras

from tfring._keras.layers import all_layers
from tfring.layers.conversion import check_built, converted
from tfring.layers.sharded_embedding import ShardedEmbedding


def shard_embeddings(
    model: keras.Model,
    *,
    min_rows: int = 1_000_000,
    placement: str = "interleaved",
    update: str = "rows",
) -> keras.Model:
    """Returns a copy of the model whose large tables are sharded over the workers; all weights are kept.

    Every `keras.layers.Embedding` with at least `min_rows` rows becomes a `tfring.layers.ShardedEmbedding`, also inside
    nested models and wrappers. Call it in the scope of the strategy that will train the copy, on all ranks, then
    compile the copy: it is not compiled. By then each worker has held the full tables of `model`. Make a table that
    does not fit into the memory of a worker as a ShardedEmbedding from the start.

    Args:
      model: A built functional or sequential model.
      min_rows: Minimum number of rows of a table to shard. Smaller tables stay in full on each worker. Defaults to
        1,000,000.
      placement: See `ShardedEmbedding`. Defaults to "interleaved".
      update: See `ShardedEmbedding`. Defaults to "rows".

    Returns:
      A new model with the weights, names and `trainable` settings of the original.

    Raises:
      ValueError: If the model cannot be rebuilt layer by layer, or a custom layer hides a large table.
      ConfigurationError: If a large table has a regularizer, a constraint or LoRA.

    >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Embedding(1000, 4)])
    >>> type(shard_embeddings(model, min_rows=100).layers[0]).__name__
    'ShardedEmbedding'
    """
    check_built(model)

    def is_large(layer: Any) -> bool:
        return isinstance(layer, keras.layers.Embedding) and layer.input_dim >= min_rows

    def sharded(layer: keras.layers.Layer) -> ShardedEmbedding:
        return ShardedEmbedding.from_config({**layer.get_config(), "placement": placement, "update": update})

    def copy_weights(old: keras.layers.Layer, new: keras.layers.Layer) -> None:
        new.set_weights(old.get_weights())

    def is_wanted(layer: keras.layers.Layer) -> bool:
        return type(layer) is keras.layers.Embedding and is_large(layer)

    copy = converted(model, is_wanted, sharded, copy_weights)
    hidden = [layer for layer in all_layers(copy) if is_large(layer) and not isinstance(layer, ShardedEmbedding)]
    if hidden:
        raise ValueError(
            "Custom layers make or derive from tables, which cannot be replaced there: "
            f"{', '.join(layer.path for layer in hidden)}. Use tfring.layers.ShardedEmbedding in their source."
        )
    return copy
