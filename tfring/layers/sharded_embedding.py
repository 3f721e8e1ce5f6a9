"""ShardedEmbedding: a table of embeddings sharded over the workers, by rows or columns."""

from __future__ import annotations

from typing import Any, NoReturn

import keras
import tensorflow as tf

from tfring import _keras
from tfring._keras.layers import save_under_name_of
from tfring._keras.sharding import ShardGroup, check_axis, slots, stores, tables
from tfring.cross_device_ops import values_of
from tfring.errors import ConfigurationError
from tfring.layers.choice import next_layer_number
from tfring.layers.combiners import check_combiner, check_ids, combined, flat
from tfring.layers.lookup import exchange
from tfring.sharding import shard_table

_REFUSED = ("embeddings_regularizer", "embeddings_constraint", "lora_rank", "lora_alpha", "quantization_config")


@keras.saving.register_keras_serializable(package="tfring")
class ShardedEmbedding(keras.layers.Embedding):
    """A `keras.layers.Embedding` whose table is sharded over the workers of a `tfring.RingStrategy`.

    Each worker holds its rows of the table and of the optimizer's slots. It asks the owners for the rows of its ids,
    each id once, and sends them the gradients of those rows. The owners sum and apply the gradients, which computes
    what one process computes on the whole batch. In one process, with or without a strategy, the layer has the full
    table and exchanges nothing.

    Every call is a collective: all workers call the layer, in eager mode too. `weights` and `embeddings` hold this
    worker's rows. `get_weights()` gathers the full table, on all ranks together, and `set_weights` expects a full one.
    Files hold the full table, like those of `keras.layers.Embedding`, and load into either layer and any number of
    workers.

    Args:
      input_dim: Number of rows of the table. Ids range from 0 to `input_dim - 1`.
      output_dim: Number of columns of the table.
      embeddings_initializer: Initializer of the table. A table of up to 16,777,216 elements is drawn in full, as
        `keras.layers.Embedding` draws it. A larger one is drawn in blocks of rows, the same for any number of workers,
        by one of Zeros, Ones, Constant, RandomUniform, RandomNormal, TruncatedNormal, or VarianceScaling with
        `mode="fan_out"`. Defaults to "uniform".
      mask_zero: Whether id 0 is padding, which is masked and not counted by a `combiner`. Defaults to False.
      combiner: How to combine the rows of the ids along the last axis: None (default) for not at all; "sum" for
        `sum w_i r_i`; "mean" and "sqrtn" for the same divided by `sum w_i` and by `sqrt(sum w_i^2)`. The result is
        zeros if all `w_i` are 0.
      placement: "interleaved" (default): worker `r % N` holds row `r`, so the load is balanced if ids are sorted
        by frequency. "range": equal ranges of rows. "columns": some columns of all rows, for a table of few wide rows;
        "a worker's rows" then means its columns of all rows.
      update: How an optimizer treats rows that have no gradient in a step. "rows" (default): it skips them, so a step
        costs only the rows it uses. SGD without momentum and Adagrad give the same results either way; others behave
        like LazyAdam: the momenta and weight decay of a row pause until its next gradient. "dense": it updates all of
        this worker's rows, as Keras does.
      axis: The mesh axis over which the table is sharded. Workers along "model" look up the same ids; workers along
        "data" each have their own ids. Defaults to "model" if the strategy's mesh has that axis, otherwise "data".
      **kwargs: `weights` of `keras.layers.Embedding`, and the arguments of `keras.layers.Layer`.

    Call arguments:
      inputs: int32 or int64 ids of any shape, `[..., ids]` with a combiner. Other dtypes are cast to int32. With a
        combiner also a `tf.RaggedTensor` or a `tf.SparseTensor` of shape `[examples, ids]`.
      id_weights: float `w_i`, with the layout of `inputs`. Only with a combiner. Defaults to 1 for each id.

    Returns:
      A tensor of shape `[*inputs.shape, output_dim]`, or `[*inputs.shape[:-1], output_dim]` with a combiner, in the
      layer's compute dtype.

    Raises:
      ConfigurationError: If an argument is not supported, if a worker has several replicas, and in `fit` if the
        optimizer needs more than rows (Adafactor, Lamb, Muon) or, with `update="rows"`, has `use_ema` or
        `gradient_accumulation_steps`.
      tf.errors.InvalidArgumentError: On every rank, if the table has no row for an id.

    >>> layer = ShardedEmbedding(4, 2, embeddings_initializer="ones", combiner="mean")
    >>> layer(tf.constant([[3, 3, 1]])).numpy()
    array([[1., 1.]], dtype=float32)
    """

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        embeddings_initializer: Any = "uniform",
        *,
        mask_zero: bool = False,
        combiner: str | None = None,
        placement: str = "interleaved",
        update: str = "rows",
        axis: str | None = None,
        **kwargs: Any,
    ) -> None:
        _keras.install()
        for name in _REFUSED:
            if kwargs.pop(name, None) is not None:
                raise ConfigurationError(
                    f"`{name}` of a ShardedEmbedding with input_dim={input_dim} needs the full table, which no worker "
                    "has. Use keras.layers.Embedding, or leave it out."
                )
        weights = kwargs.pop("weights", None)
        super().__init__(input_dim, output_dim, embeddings_initializer, mask_zero=mask_zero, **kwargs)
        check_combiner(combiner, self.name)
        tables.check_update(update)
        check_axis(axis)
        shard_table((input_dim, output_dim), 1, placement)  # checks `placement`
        self.combiner = combiner
        self.placement = placement
        self.update = update
        self.axis = axis
        self.supports_jit = False  # XLA has no outputs whose size depends on the number of distinct ids
        if weights is not None:
            self.build()
            self.set_weights(weights if isinstance(weights, (list, tuple)) else [weights])

    def build(self, input_shape: Any = None) -> None:
        if getattr(self, "built", False):
            return
        group = ShardGroup.of(self.axis, "ShardedEmbedding", "keras.layers.Embedding")
        shape = (self.input_dim, self.output_dim)
        sharding = shard_table(shape, group.collectives.world_size, self.placement, group.axis)
        parts = [(self.embeddings_initializer, 0, self.input_dim)]
        self._embeddings = tables.add_table(self, "embeddings", parts, sharding, group)
        key = f"table {next_layer_number()}"
        self._exchange = exchange(sharding, [(self.name, self.input_dim)], group, key)
        self.built = True

    def call(self, inputs: Any, id_weights: Any = None) -> Any:
        check_ids(inputs, self.combiner, self.name)
        if id_weights is not None and self.combiner is None:
            raise ValueError("`id_weights` were given to a layer with combiner=None. Only a combiner takes weights.")
        if inputs.dtype not in ("int32", "int64"):
            inputs = tf.cast(inputs, tf.int32)
        ids = tf.convert_to_tensor(flat(inputs))
        [rows] = self._exchange.rows(values_of(self._embeddings.value)[0], [(0, ids)])
        rows = tf.cast(rows, self.compute_dtype)
        return rows if self.combiner is None else combined(rows, inputs, id_weights, self.combiner, self.mask_zero)

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        return None if self.combiner is not None else super().compute_mask(inputs, mask)

    def compute_output_shape(self, input_shape: Any) -> tuple:
        shape = input_shape if self.combiner is None else input_shape[:-1]
        return (*shape, self.output_dim)

    def compute_output_spec(self, inputs: Any, id_weights: Any = None) -> keras.KerasTensor:
        check_ids(inputs, self.combiner, self.name)
        return keras.KerasTensor(self.compute_output_shape(inputs.shape), dtype=self.compute_dtype)

    def enable_lora(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise _not_supported("enable_lora")

    def quantize(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise _not_supported("quantize")

    # -- files ---------------------------------------------------------------------------------------------------------

    def save_own_variables(self, store: Any) -> None:
        """Saves the full table. All ranks call it, or are in `tfring.save` or `model.save` together."""
        if self.built:
            store["0"] = slots.gather_full(self._embeddings)

    def load_own_variables(self, store: Any) -> None:
        if not self.built:
            return
        self._check_load_own_variables(store)
        store = stores.InBlocks(store)
        shape = (self.input_dim, self.output_dim)
        if tuple(store["0"].shape) != shape:
            raise ValueError(
                f"The file has a table of shape {tuple(store['0'].shape)}, but {self.name!r} has one of shape {shape}. "
                "Make the layer as large as the table in the file, or load another file."
            )
        self._embeddings.assign(store["0"])

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        for name in _REFUSED:
            config.pop(name, None)
        own = {"combiner": self.combiner, "placement": self.placement, "update": self.update, "axis": self.axis}
        return {**config, **own}


def _not_supported(method: str) -> ConfigurationError:
    return ConfigurationError(
        f"`{method}` needs the full table, which no worker of a ShardedEmbedding has. Use keras.layers.Embedding."
    )


save_under_name_of(ShardedEmbedding, keras.layers.Embedding)
