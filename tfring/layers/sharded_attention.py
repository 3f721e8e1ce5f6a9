"""ShardedMultiHeadAttention: attention whose heads are sharded over the workers."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any, NoReturn

import keras
import tensorflow as tf

from tfring import _keras
from tfring._keras.layers import save_under_name_of
from tfring._keras.sharding import ShardGroup
from tfring.errors import ConfigurationError
from tfring.layers.choice import next_layer_number
from tfring.layers.replicated_input_matmul import ReplicatedInputMatmul
from tfring.layers.shards import ShardedWeights, check_sharded_arguments
from tfring.ring.schedule import chunk_bounds


@keras.saving.register_keras_serializable(package="tfring")
class ShardedMultiHeadAttention(keras.layers.MultiHeadAttention):
    """A `keras.layers.MultiHeadAttention` whose heads are sharded over the "model" axis of a mesh (Megatron-LM, 2019).

    Each worker has the projections of its heads and their slots; the attention of a head needs no other head. A step
    costs one sum over the axis in the forward pass, of the projected outputs, and one in the backward pass for each
    different tensor among query, value and key. The layer computes what one process computes, and its files are those
    of `keras.layers.MultiHeadAttention`. If the mesh has no model axis, and in one process, it is that layer.

    Every call is a collective of the axis. `weights`, `get_weights` and files work as described in `ShardedDense`. With
    `dropout` all workers drop the same positions of their heads.

    Args:
      num_heads: Number of attention heads. Each worker along the axis has the same number of them.
      key_dim: Size of each head for query and key.
      *args, **kwargs: The arguments of `keras.layers.MultiHeadAttention`. Regularizers must be L1, L2 or L1L2, and
        constraints NonNeg.

    Call arguments:
      those of `keras.layers.MultiHeadAttention`, except `return_attention_scores=True`: a worker has only the scores of
      its heads.

    Raises:
      ConfigurationError: If an argument is not supported, a worker has several replicas, the heads do not divide
        evenly, or, in `fit`, the optimizer needs full weights (Adafactor, Lamb, Muon).

    >>> layer = ShardedMultiHeadAttention(num_heads=2, key_dim=3)
    >>> x = tf.ones([1, 4, 5])
    >>> layer(x, x).shape
    TensorShape([1, 4, 5])
    """

    def __init__(self, num_heads: int, key_dim: int, *args: Any, **kwargs: Any) -> None:
        _keras.install()
        super().__init__(num_heads, key_dim, *args, **kwargs)
        check_sharded_arguments(
            self,
            kernel_regularizer=self._kernel_regularizer,
            bias_regularizer=self._bias_regularizer,
            kernel_constraint=self._kernel_constraint,
            bias_constraint=self._bias_constraint,
        )
        self._ranks: ReplicatedInputMatmul | None = None

    def build(self, query_shape: Any, value_shape: Any, key_shape: Any = None) -> None:
        group = ShardGroup.of("model", "ShardedMultiHeadAttention", "keras.layers.MultiHeadAttention")
        number = next_layer_number()
        if group.is_alone:
            return super().build(query_shape, value_shape, key_shape)
        collectives, heads = group.collectives, self._num_heads
        if heads % collectives.world_size:
            raise ConfigurationError(
                f"{self.name!r} has num_heads={heads}, which {collectives.world_size} workers along the model axis "
                "cannot share equally. Use another number of heads or another mesh, or keras.layers.MultiHeadAttention."
            )
        self.supports_jit = False  # XLA has no collectives of a ring
        bounds = chunk_bounds(heads, collectives.world_size)
        self._ranks = ReplicatedInputMatmul(collectives, bounds, f"attention {number}")
        key_shape = value_shape if key_shape is None else key_shape

        def heads_of(shape: Any, size: int, name: str, **options: Any) -> _Projection:
            parts = {"kernel": 1, "bias": 0}
            return self._projection(_Projection, group, parts, shape, 1, (heads, size), name, **options)

        # Made in the order of Keras, so that the same initial values are drawn.
        self._query_dense = heads_of(query_shape, self._key_dim, "query")
        self._key_dense = heads_of(key_shape, self._key_dim, "key")
        if self._use_gate:
            self._gate_dense = heads_of(query_shape, self._value_dim, "gate", activation="sigmoid")
        self._value_dense = heads_of(value_shape, self._value_dim, "value")
        self._build_attention(len(value_shape) + 1)
        shape = (*query_shape[:-1], heads, self._value_dim)
        outputs = self._output_shape or (query_shape[-1],)
        self._output_dense = self._projection(
            _Summed, group, {"kernel": 0}, shape, 2, outputs, "attention_output", ranks=self._ranks
        )
        self.built = True
        return None

    def _projection(
        self,
        kind: type[_Projection],
        group: ShardGroup,
        dimensions: dict[str, int],
        shape: Any,
        num_bound: int,
        outputs: Sequence[int],
        name: str,
        **options: Any,
    ) -> _Projection:
        """Makes a Keras layer with sharded weights that maps the last `num_bound` dimensions to `outputs`."""
        letters = iter(string.ascii_lowercase)
        free, bound, new = (
            "".join(next(letters) for _ in range(count)) for count in (len(shape) - num_bound, num_bound, len(outputs))
        )
        layer = kind(
            f"{free}{bound},{bound}{new}->{free}{new}",
            output_shape=(*[None] * (len(free) - 1), *outputs),
            bias_axes=new if self._use_bias else None,
            name=name,
            **options,
            **self._get_common_kwargs_for_sublayer(),
        )
        layer.shard_group, layer.dimensions = group, dimensions
        layer.build(shape)
        return layer

    def call(
        self,
        query: Any,
        value: Any,
        key: Any = None,
        query_mask: Any = None,
        value_mask: Any = None,
        key_mask: Any = None,
        attention_mask: Any = None,
        return_attention_scores: bool = False,
        training: bool | None = None,
        use_causal_mask: bool = False,
    ) -> Any:
        given, copies = [query, value, key], {}
        if self._ranks is not None:
            if return_attention_scores:
                raise ConfigurationError(
                    f"{self.name!r} cannot return attention scores (return_attention_scores=True): a worker has only "
                    "those of its own heads. Leave it out, or use keras.layers.MultiHeadAttention."
                )
            copies = {id(each): self._ranks.copied(tf.convert_to_tensor(each)) for each in given if each is not None}
        masked = [each for each in given if getattr(each, "_keras_mask", None) is not None and id(each) in copies]
        for each in masked:
            copies[id(each)]._keras_mask = each._keras_mask
        outputs = super().call(
            *(copies.get(id(each), each) for each in given),
            query_mask=query_mask,
            value_mask=value_mask,
            key_mask=key_mask,
            attention_mask=attention_mask,
            return_attention_scores=return_attention_scores,
            training=training,
            use_causal_mask=use_causal_mask,
        )
        for each in masked:  # Keras has removed some of the masks
            each._keras_mask = copies[id(each)]._keras_mask
        return outputs


class _Projection(ShardedWeights, keras.layers.EinsumDense):
    """Projects to this worker's heads."""

    def enable_lora(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ConfigurationError(
            f"enable_lora() of {self.path!r} needs the full kernel, which no worker of a ShardedMultiHeadAttention "
            "has. Use keras.layers.MultiHeadAttention."
        )


class _Summed(_Projection):
    """Projects this worker's heads to outputs and sums the outputs over the workers; the bias is replicated."""

    def __init__(self, *args: Any, ranks: ReplicatedInputMatmul, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._ranks = ranks

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        outputs = self._ranks.summed(keras.ops.einsum(self.equation, inputs, self.kernel))
        return outputs if self.bias is None else keras.ops.add(outputs, self.bias)


save_under_name_of(ShardedMultiHeadAttention, keras.layers.MultiHeadAttention)
