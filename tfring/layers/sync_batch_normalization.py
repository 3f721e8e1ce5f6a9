"""SyncBatchNormalization: batch normalization by the mean and variance of the whole global batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfring import partition, step
from tfring._keras import layers
from tfring.layers import choice
from tfring.layers.exchange import LocalStatistics
from tfring.layers.moments import along, channel_sums, local_moments, mean_and_variance

_SYNCHRONIZATIONS = ("all_reduce", "central")


@keras.saving.register_keras_serializable(package="tfring")
class SyncBatchNormalization(keras.layers.BatchNormalization):
    """Batch normalization by the mean and variance of the whole global batch, over all devices.

    A `keras.layers.BatchNormalization` whose training statistics are those that one process would compute from the
    rows of all replicas. If replica `i` holds `n_i` elements of a channel (those that no mask excludes), with mean
    `m_i` and variance `v_i`:

    ```
    n    = sum n_i
    mean = sum n_i m_i / n
    var  = sum n_i (v_i + (m_i - mean)^2) / n                     (Chan, Golub, LeVeque 1983)
    y    = gamma (x - mean) / sqrt(var + epsilon) + beta
    ```

    With `xhat = (x - mean) / sqrt(var + epsilon)` the gradient is that of the global batch as well:

    ```
    d gamma = sum dy xhat         d beta = sum dy
    d x     = gamma / sqrt(var + epsilon) (dy - d beta / n - xhat d gamma / n)
    ```

    Masked elements keep only the first term of `d x`. The layer calls one collective in the forward pass and one in the
    backward pass, for any number of replicas. Nothing is exchanged in inference, nor by a frozen layer
    (`trainable=False`). All replicas compute the same bits, so the moving averages stay equal by themselves.
    Replicas may hold different numbers of rows, or none. Statistics are computed in float32 (float64 for float64
    inputs) about the mean and merged in float64. If no element is counted (all are masked), the moving averages stay
    as they are.

    Works under `tfring.RingStrategy`, `tf.distribute.MirroredStrategy` and related strategies, and without any
    strategy. Outside of `strategy.run` (and `fit`) a call sees only its own inputs. Second derivatives are refused.

    Args:
      axis: The axis of the channels. This and the arguments up to `gamma_constraint` are those of
        `keras.layers.BatchNormalization`. Defaults to -1.
      momentum: Momentum of the moving averages. Defaults to 0.99.
      epsilon: Float added to the variance. Defaults to 1e-3.
      center: Whether to add beta. Defaults to True.
      scale: Whether to multiply by gamma. Defaults to True.
      beta_initializer: Initializer of beta. Defaults to "zeros".
      gamma_initializer: Initializer of gamma. Defaults to "ones".
      moving_mean_initializer: Initializer of the moving mean. Defaults to "zeros".
      moving_variance_initializer: Initializer of the moving variance. Defaults to "ones".
      beta_regularizer: Regularizer of beta. Defaults to None.
      gamma_regularizer: Regularizer of gamma. Defaults to None.
      beta_constraint: Constraint of beta. Defaults to None.
      gamma_constraint: Constraint of gamma. Defaults to None.
      synchronization: How the workers of a RingStrategy exchange statistics. "all_reduce" (default): around the ring.
        "central": through rank 0. Other strategies always reduce over all devices.
      sync_every: Number of training steps per exchange: statistics are shared only in every `sync_every`-th step. In
        the steps between, each replica normalizes by its own statistics. The moving averages include all of these
        steps, exactly, from the next shared step on, so they are equal on all replicas at any time. Defaults to 1.
      **kwargs: `renorm`, `renorm_clipping`, `renorm_momentum` if Keras has them, and the arguments of
        `keras.layers.Layer`. `synchronized` is accepted, and always True.

    Call arguments:
      inputs: A float tensor of any rank; `[batch, ..., channels]` for axis -1.
      training: Whether to normalize by the batch (and update the moving averages) or by the moving averages.
      mask: A bool tensor of the inputs' shape without the last dimension. False elements do not count.

    Returns:
      A tensor of the inputs' shape, in the layer's compute dtype.

    References:
      Ioffe and Szegedy 2015, "Batch Normalization", arXiv:1502.03167. Chan, Golub and LeVeque 1983,
      "Algorithms for Computing the Sample Variance", The American Statistician 37(3).

    >>> layer = SyncBatchNormalization(epsilon=0.0)
    >>> layer(tf.constant([[1.0], [3.0]]), training=True).numpy()
    array([[-1.],
           [ 1.]], dtype=float32)
    """

    def __init__(
        self,
        axis: int = -1,
        momentum: float = 0.99,
        epsilon: float = 1e-3,
        center: bool = True,
        scale: bool = True,
        beta_initializer: Any = "zeros",
        gamma_initializer: Any = "ones",
        moving_mean_initializer: Any = "zeros",
        moving_variance_initializer: Any = "ones",
        beta_regularizer: Any = None,
        gamma_regularizer: Any = None,
        beta_constraint: Any = None,
        gamma_constraint: Any = None,
        *,
        synchronization: str = "all_reduce",
        sync_every: int = 1,
        **kwargs: Any,
    ) -> None:
        layers.install()
        if synchronization not in _SYNCHRONIZATIONS:
            raise ValueError(f"`synchronization` is {synchronization!r}, not one of {_SYNCHRONIZATIONS}.")
        if isinstance(sync_every, bool) or not isinstance(sync_every, int) or sync_every < 1:
            raise ValueError(f"`sync_every` is {sync_every!r}, not a number of steps (an integer of at least 1).")
        kwargs["synchronized"] = True
        super().__init__(
            axis=axis,
            momentum=momentum,
            epsilon=epsilon,
            center=center,
            scale=scale,
            beta_initializer=beta_initializer,
            gamma_initializer=gamma_initializer,
            moving_mean_initializer=moving_mean_initializer,
            moving_variance_initializer=moving_variance_initializer,
            beta_regularizer=beta_regularizer,
            gamma_regularizer=gamma_regularizer,
            beta_constraint=beta_constraint,
            gamma_constraint=gamma_constraint,
            **kwargs,
        )
        self.synchronization = synchronization
        self.sync_every = sync_every

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "synchronization": self.synchronization,
            "sync_every": self.sync_every,
        }

    def build(self, input_shape: Any) -> None:
        super().build(input_shape)
        self._number = choice.next_layer_number()
        for variable in self.non_trainable_variables:
            step.written_alike(variable)
        if self.sync_every > 1:
            # Not weights: the moments of the steps since the last shared step, and their number.
            window = [self.sync_every, 3, input_shape[self.axis]]
            with tf.init_scope():  # a model without an Input is built while Keras traces it
                self._window = tf.Variable(tf.zeros(window, tf.float64), trainable=False, name="window")
                self._position = tf.Variable(0, trainable=False, dtype=tf.int32, name="position")
            for variable in (self._window, self._position):
                step.keep_by_replica(variable)
        choice.prepare(self.synchronization)

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        if mask is not None and len(mask.shape) != len(inputs.shape) - 1:
            raise ValueError(
                f"`mask` has shape {mask.shape}, not one dimension less than the inputs, which have shape "
                f"{inputs.shape}."
            )
        if not (training and self.trainable):
            return super().call(inputs, training=False, mask=mask)

        running = step.current() or step.Step()
        inputs = tf.convert_to_tensor(inputs)
        if running.share is not None:
            inputs = partition.expect(inputs, "rows", "the inputs of batch normalization")
        axis = self.axis % inputs.shape.rank
        compute_dtype = keras.backend.result_type(inputs.dtype.name, "float32")
        if mask is not None:
            mask = tf.broadcast_to(tf.cast(mask, tf.bool)[..., None], tf.shape(inputs))
            mask.set_shape(inputs.shape)

        exchange = choice.of_replica(self.synchronization, self._number)
        with partition.own():
            mine = local_moments(tf.cast(tf.stop_gradient(inputs), compute_dtype), axis, mask)
            mine = running.zero_if_empty(mine)
        moments, window, share = self._shared(exchange, mine)
        scale, offset = self._scale_and_offset(moments, compute_dtype)
        self._update_averages(window, share)
        outputs = _normalize(inputs, scale, offset, moments, self.epsilon, axis, mask, exchange, share)
        return tf.cast(outputs, self.compute_dtype)

    def _shared(self, exchange: LocalStatistics, mine: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor | None]:
        """Returns the moments of this step, those of the steps for the averages, and whether this step shares them."""
        if self.sync_every == 1:
            with partition.own():
                moments = exchange.merge(mine)
            moments = partition.declare(moments, "full")
            return moments, moments[None], None
        position = tf.convert_to_tensor(self._position)
        share = position == self.sync_every - 1
        with partition.own():
            window = tf.tensor_scatter_nd_update(tf.convert_to_tensor(self._window), [[position]], [mine])
            window = exchange.merge(window, share)
        window = partition.declare(window, "full")
        self._window.assign(window)
        self._position.assign((position + 1) % self.sync_every)
        return tf.gather(window, position), window, share

    def _scale_and_offset(self, moments: tf.Tensor, dtype: str) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the factor and the offset of normalized inputs: gamma and beta, renormalized if requested."""
        channels = [moments.shape[-1]]
        gamma = tf.cast(self.gamma, dtype) if self.scale else tf.ones(channels, dtype)
        beta = tf.cast(self.beta, dtype) if self.center else tf.zeros(channels, dtype)
        if not self.renorm:
            return gamma, beta
        mean, variance = mean_and_variance(moments)
        renorm_stddev = tf.maximum(tf.cast(self.renorm_stddev, tf.float64), self.epsilon**0.5)
        r = tf.sqrt(variance + self.epsilon) / renorm_stddev
        d = (mean - tf.cast(self.renorm_mean, tf.float64)) / renorm_stddev
        clip = self.renorm_clipping
        if clip.get("rmin") is not None:
            r = tf.maximum(r, clip["rmin"])
        if clip.get("rmax") is not None:
            r = tf.minimum(r, clip["rmax"])
        if clip.get("dmax") is not None:
            d = tf.clip_by_value(d, -clip["dmax"], clip["dmax"])
        return tf.cast(r, dtype) * gamma, tf.cast(d, dtype) * gamma + beta

    def _update_averages(self, window: tf.Tensor, share: tf.Tensor | None) -> None:
        counts = window[:, 0]
        means, variances = mean_and_variance(window)

        def update(variable: Any, values: tf.Tensor, momentum: float) -> tf.Tensor:
            """Assigns `average * momentum + value * (1 - momentum)` for each step of the window that counted."""
            keep = tf.where(counts > 0, tf.constant(momentum, tf.float64), 1.0)
            later = tf.math.cumprod(keep, 0, exclusive=True, reverse=True)
            old = tf.cast(variable, tf.float64)
            new = old * tf.reduce_prod(keep, 0) + tf.reduce_sum(later * (1.0 - keep) * values, 0)
            new = new if share is None else tf.where(share, new, old)
            variable.assign(tf.cast(new, variable.dtype))
            return new

        update(self.moving_mean, means, self.momentum)
        if not self.renorm:
            update(self.moving_variance, variances, self.momentum)
            return
        stddevs = tf.sqrt(variances + self.epsilon)
        update(self.renorm_mean, means, self.renorm_momentum)
        update(self.renorm_stddev, stddevs, self.renorm_momentum)
        stddev = update(self.moving_stddev, stddevs, self.momentum)
        variance = tf.nn.relu(tf.square(stddev) - self.epsilon)
        self.moving_variance.assign(tf.cast(variance, self.moving_variance.dtype))


def _normalize(
    x: tf.Tensor,
    scale: tf.Tensor,
    offset: tf.Tensor,
    moments: tf.Tensor,
    epsilon: float,
    axis: int,
    mask: Any,
    exchange: LocalStatistics,
    share: tf.Tensor | None,
) -> tf.Tensor:
    """Returns `(x - mean) / sqrt(var + epsilon) * scale + offset`, with the gradient over all replicas.

    The mean is a sum of two numbers of the compute dtype, so that outputs are accurate if it is large: at a mean of
    1e5 a single float32 would be off by 0.004.
    """
    dtype, rank = scale.dtype, x.shape.rank
    mean, variance = mean_and_variance(moments)
    count = moments[0]
    inverse = tf.math.rsqrt(variance + epsilon)
    high = tf.cast(mean, dtype)
    low = mean - tf.cast(high, tf.float64)

    def channels(values: tf.Tensor) -> tf.Tensor:
        return along(tf.cast(values, dtype), axis, rank)

    def centred(x: tf.Tensor) -> tf.Tensor:
        return tf.cast(x, dtype) - channels(high)

    running = step.current() or step.Step()

    @tf.custom_gradient
    def normalized(x: tf.Tensor, scale: tf.Tensor, offset: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
        with partition.own():
            factor = tf.cast(scale, tf.float64) * inverse
            outputs = centred(x) * channels(factor) + channels(tf.cast(offset, tf.float64) - factor * low)

        def gradient(d_outputs: tf.Tensor) -> tuple[tf.Tensor, ...]:
            if running.share is None:
                return backward(once(x), once(d_outputs), once(factor))
            d_outputs = partition.expect(d_outputs, "gradients of rows", "the gradient of batch normalization")
            with partition.own():
                d_x, *others = backward(once(x), once(d_outputs), once(factor))
            return partition.declare(d_x, "gradients of rows"), *(partition.declare(d, "mean") for d in others)

        return outputs if running.share is None else partition.declare(outputs, "rows"), gradient

    def backward(x: tf.Tensor, d_outputs: tf.Tensor, factor: tf.Tensor) -> tuple[tf.Tensor, ...]:
        deviations = centred(x)
        sum_dy = channel_sums(d_outputs, axis)
        sum_dy_xhat = (channel_sums(d_outputs * deviations, axis) - low * sum_dy) * inverse
        total_dy, total_dy_xhat = tf.unstack(sum_of_gradients(tf.stack([sum_dy, sum_dy_xhat])))
        mean_dy = tf.math.divide_no_nan(total_dy, count)
        slope = tf.math.divide_no_nan(total_dy_xhat, count) * inverse
        through_moments = deviations * channels(factor * slope) + channels(factor * (mean_dy - low * slope))
        if mask is not None:
            through_moments = tf.where(mask, through_moments, tf.zeros_like(through_moments))
        d_x = d_outputs * channels(factor) - through_moments
        return tf.cast(d_x, x.dtype), tf.cast(sum_dy_xhat, dtype), tf.cast(sum_dy, dtype)

    def sum_of_gradients(sums: tf.Tensor) -> tf.Tensor:
        # Gradients of other replicas are weighted by their shares of the batch; the optimizer weights this one's.
        return running.unweigh(exchange.sum(running.weigh(sums), share))

    def once(tensor: tf.Tensor) -> tf.Tensor:
        # Not a nested tf.custom_gradient, which ties its outputs together by an IdentityN: Grappler derives an order
        # from it, drops the explicit one (of two collectives, of a variable's read and its assignment), and then
        # removes the IdentityN.
        return tf.raw_ops.PreventGradient(input=tensor, message=_NO_SECOND_DERIVATIVE)

    return exchange.call_in_order(normalized, x, scale, offset)


layers.save_under_name_of(SyncBatchNormalization, keras.layers.BatchNormalization)

_NO_SECOND_DERIVATIVE = (
    "SyncBatchNormalization has no second derivative. Compute the penalty on the gradient without it, or use "
    "keras.layers.GroupNormalization (tfring.layers.to_group_normalization)."
)
