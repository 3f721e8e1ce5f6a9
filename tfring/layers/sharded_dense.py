"""ShardedDense: a dense layer whose kernel is sharded over the workers."""

from __future__ import annotations

from typing import Any, NoReturn

import keras
import tensorflow as tf

from tfring import _keras, partition
from tfring._keras.layers import save_under_name_of
from tfring._keras.sharding import ShardGroup, check_axis
from tfring.errors import ConfigurationError
from tfring.layers.choice import next_layer_number
from tfring.layers.data_parallel_matmul import DataParallelMatmul
from tfring.layers.replicated_input_matmul import ReplicatedInputMatmul
from tfring.layers.shards import ShardedWeights, check_sharded_arguments
from tfring.ring.schedule import chunk_bounds

SPLITS = ("columns", "rows")
_OVER_UNITS = ("softmax", "log_softmax", "sparsemax", "glu")  # activations that depend on more than one unit
_REFUSED = ("lora_rank", "lora_alpha", "quantization_config")


@keras.saving.register_keras_serializable(package="tfring")
class ShardedDense(ShardedWeights, keras.layers.Dense):
    """A `keras.layers.Dense` whose kernel is sharded over the workers of a `tfring.RingStrategy` (Megatron-LM, 2019).

    Each worker holds its columns or rows of the kernel and of the optimizer's slots. The layer computes what one
    process computes on the whole batch, with a part of its memory. Workers along the "model" axis of the strategy's
    mesh have the same rows of the batch. Workers along its "data" axis have their own rows, which they exchange first.
    In one process, with or without a strategy, it is a `keras.layers.Dense`.

    Every call is a collective: all workers call the layer, in eager mode too. `weights`, `kernel` and, with columns,
    `bias` hold this worker's shards. `get_weights()` gathers full weights, on all ranks together, and `set_weights`
    expects full ones. Files hold full weights, like those of `keras.layers.Dense`, and load into either layer and any
    number of workers.

    Args:
      units: Dimensionality of the output.
      split: "columns" (default): each worker has the columns of its outputs, and of the bias. "rows": each worker has
        the rows of its inputs, and all of the bias. Shards differ by one if the size does not divide evenly.
      axis: The mesh axis over which the kernel is sharded, "model" or "data". Defaults to "model" if the mesh has that
        axis, otherwise "data".
      gather_output: Whether each worker gets all outputs. False, for `split="columns"`, leaves a worker along the model
        axis only the outputs of its columns, for a layer with `input_is_parallel=True`. Along the data axis, and in one
        process, a worker always gets all outputs. Defaults to True.
      input_is_parallel: Whether inputs are the outputs of a layer with `gather_output=False`, for `split="rows"`: along
        the model axis only those of this worker's rows. Between the two layers only element-wise operations are
        allowed. Defaults to False.
      **kwargs: The arguments of `keras.layers.Dense`. Regularizers of the kernel must be L1, L2 or L1L2 and its
        constraint NonNeg; with columns, those of the bias too.

    Call arguments:
      inputs: A tensor of shape `[..., features]`. Along the model axis with `input_is_parallel`, the features of this
        worker's rows.

    Returns:
      A tensor of shape `[..., units]`. Along the model axis with `gather_output=False`, the units of this worker's
      columns.

    Raises:
      ConfigurationError: If an argument is not supported, a worker has several replicas, there are fewer columns or
        rows than workers, or, in `fit`, the optimizer needs full weights (Adafactor, Lamb, Muon).

    >>> layer = ShardedDense(2, split="rows", kernel_initializer="ones")
    >>> layer(tf.constant([[3.0, 1.0]])).numpy()
    array([[4., 4.]], dtype=float32)
    """

    def __init__(
        self,
        units: int,
        split: str = "columns",
        *,
        axis: str | None = None,
        gather_output: bool = True,
        input_is_parallel: bool = False,
        **kwargs: Any,
    ) -> None:
        _keras.install()
        for name in _REFUSED:
            if kwargs.pop(name, None) is not None:
                raise ConfigurationError(
                    f"`{name}` of a ShardedDense with units={units} needs the full kernel, which no worker has. Use "
                    "keras.layers.Dense, or leave it out."
                )
        if split not in SPLITS:
            raise ConfigurationError(f"`split` is {split!r}, not one of {SPLITS}.")
        check_axis(axis)
        super().__init__(units, **kwargs)
        self.split = split
        self.axis = axis
        self.gather_output = bool(gather_output)
        self.input_is_parallel = bool(input_is_parallel)
        self._check()
        self._ranks: ReplicatedInputMatmul | DataParallelMatmul | None = None
        self._features: int | None = None  # of all workers, if they are sharded
        self._is_of_one_process = False  # whether `build` gets the input shape of one process

    def _check(self) -> None:
        of_kernel = {"kernel_regularizer": self.kernel_regularizer, "kernel_constraint": self.kernel_constraint}
        of_bias = {"bias_regularizer": self.bias_regularizer, "bias_constraint": self.bias_constraint}
        check_sharded_arguments(self, **of_kernel, **(of_bias if self.split == "columns" else {}))
        if not self.gather_output and self.split == "rows":
            raise _wrong(self, "only outputs of columns are gathered; those of rows are summed", "gather_output=False")
        if self.input_is_parallel and self.split == "columns":
            raise _wrong(self, "columns need all inputs, rows only their own", "input_is_parallel=True")
        activation = getattr(self.activation, "__name__", "")
        if not self.gather_output and activation in _OVER_UNITS:
            raise _wrong(self, f"{activation} needs all units", f"gather_output=False, activation={activation!r}")
        if not self.gather_output and self.activity_regularizer is not None:
            raise _wrong(
                self,
                "a worker does not have the outputs of others",
                "gather_output=False with an activity_regularizer",
            )

    def build(self, input_shape: Any) -> None:
        group = self.shard_group = ShardGroup.of(self.axis, "ShardedDense", "keras.layers.Dense")
        number = next_layer_number()
        if group.is_alone:
            return super().build(input_shape)
        collectives, features = group.collectives, input_shape[-1]
        if self.takes_parts and not self._is_of_one_process:
            features = self._all_features(features)
        self.supports_jit = False  # XLA has no collectives of a ring
        self.dimensions = {"kernel": 1, "bias": 0} if self.split == "columns" else {"kernel": 0}
        super().build((*input_shape[:-1], features))
        bounds = chunk_bounds(self.units if self.split == "columns" else features, collectives.world_size)
        if self.takes_parts:
            begin, end = bounds[collectives.rank]
            self.input_spec = keras.layers.InputSpec(min_ndim=2, axes={-1: end - begin})
        self._features = features
        matmul = ReplicatedInputMatmul if group.axis == "model" else DataParallelMatmul
        self._ranks = matmul(collectives, bounds, f"dense {number}")
        return None

    def get_build_config(self) -> dict[str, Any] | None:
        """Returns the config with the input shape of one process, as files hold full weights."""
        config = super().get_build_config()
        if config and self._features is not None:
            config = {**config, "input_shape": (*config["input_shape"][:-1], self._features)}
        return config

    def build_from_config(self, config: dict[str, Any]) -> None:
        self._is_of_one_process = True
        super().build_from_config(config)

    @property
    def leaves_parts(self) -> bool:
        """Returns True if outputs are the units of this worker's columns."""
        return self.shard_group.axis == "model" and not self.gather_output and not self.shard_group.is_alone

    @property
    def takes_parts(self) -> bool:
        """Returns True if inputs are the features of this worker's rows."""
        return self.shard_group.axis == "model" and self.input_is_parallel and not self.shard_group.is_alone

    def _all_features(self, mine: int) -> int:
        """Returns the number of features of all workers together."""
        collectives = self.shard_group.collectives
        with tf.init_scope():  # also when a step is being traced
            everyones = collectives.gather_equal(tf.constant([mine]), name="features of a dense layer").numpy().tolist()
        features = sum(everyones)
        wanted = [end - begin for begin, end in chunk_bounds(features, collectives.world_size)]
        if everyones != wanted:
            raise _wrong(self, f"the workers' features are parts of {features}: {wanted}", f"features {everyones}")
        return features

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        if self._ranks is None:
            return super().call(inputs)
        kernel = tf.convert_to_tensor(keras.ops.convert_to_tensor(self._kernel))
        bias = None if self.bias is None else tf.convert_to_tensor(keras.ops.convert_to_tensor(self.bias))
        inputs = partition.declare_gradient(tf.cast(inputs, kernel.dtype))
        if bias is not None and partition.is_noted():
            bias = partition.declare_gradient(bias, "mean")
        if partition.is_noted():
            inputs = partition.expect(inputs, "rows", "the inputs of a sharded layer")
        with partition.own():
            outputs = self._product(self._ranks, inputs, kernel, bias)
        if partition.is_noted():
            name = "the gradient of a sharded layer's outputs"
            outputs = partition.expect_upstream(outputs, "gradients of rows", name)
            outputs = partition.declare(outputs, "rows")
        return outputs if self.activation is None else self.activation(outputs)

    def _product(
        self,
        ranks: ReplicatedInputMatmul | DataParallelMatmul,
        inputs: tf.Tensor,
        kernel: tf.Tensor,
        bias: tf.Tensor | None,
    ) -> tf.Tensor:
        """Returns `inputs @ kernel + bias` with the full kernel."""
        rows = tf.reshape(inputs, [-1, inputs.shape[-1]])
        if self.split == "columns":
            outputs = ranks.columns(rows, kernel, bias, self.leaves_parts)
        else:
            outputs = ranks.rows(rows, kernel, self.takes_parts)
            outputs = outputs if bias is None else outputs + bias
        outputs = tf.reshape(outputs, tf.concat([tf.shape(inputs)[:-1], [self._num_outputs()]], 0))
        outputs.set_shape([*inputs.shape[:-1], self._num_outputs()])
        return outputs

    def _num_outputs(self) -> int:
        """Returns the number of units of the outputs on this worker."""
        if not self.leaves_parts:
            return self.units
        collectives = self.shard_group.collectives
        begin, end = chunk_bounds(self.units, collectives.world_size)[collectives.rank]
        return end - begin

    def compute_output_shape(self, input_shape: Any) -> tuple:
        return (*input_shape[:-1], self._num_outputs())

    def enable_lora(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise _not_supported("enable_lora")

    def quantize(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise _not_supported("quantize")

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        for name in _REFUSED:
            config.pop(name, None)
        own = {"split": self.split, "axis": self.axis}
        flags = {"gather_output": self.gather_output, "input_is_parallel": self.input_is_parallel}
        return {**config, **own, **flags}


def _wrong(layer: keras.layers.Layer, rule: str, received: str) -> ConfigurationError:
    return ConfigurationError(
        f"ShardedDense {layer.name!r} does not support {received} with split={layer.split!r}, axis={layer.axis!r}: "
        f"{rule}. Leave out gather_output=False and input_is_parallel=True, or use them on a layer with "
        "split='columns' and a layer with split='rows' after it, with only element-wise layers in between."
    )


def _not_supported(method: str) -> ConfigurationError:
    return ConfigurationError(
        f"`{method}` needs the full kernel, which no worker of a ShardedDense has. Use keras.layers.Dense."
    )


save_under_name_of(ShardedDense, keras.layers.Dense)
