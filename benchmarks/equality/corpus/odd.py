"""Operations and layers that are seldom seen in a step, and steps that gather the rows of all replicas."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

import tfring
from corpus import BATCH, CLASSES, FEATURES, binary, classes, compiled, loss, program, rows, same, sgd
from corpus.own_steps import mse, step

# ---------------------------------------------------------------------------------- rounding and casts


@step()
def loss_in_half_precision(model, x, y):
    return {"loss": model.update(lambda: tf.cast(tf.cast(mse(y, model(x)), tf.bfloat16), tf.float32))}


@step()
def loss_rounded(model, x, y):
    return {"loss": model.update(lambda: mse(y, model(x)) * tf.round(tf.reduce_mean(tf.abs(y)) * 4.0))}


@step()
def rate_of_an_integer_from_the_loss(model, x, y):
    loss = model.update(lambda: mse(y, model(x)))
    model.optimizer.learning_rate.assign(0.01 * tf.cast(tf.cast(10.0 * loss, tf.int32), tf.float32))
    return {"loss": loss}


@step()
def loss_bitcast(model, x, y):
    loss = model.update(lambda: mse(y, model(x)))
    bits = tf.bitwise.bitwise_and(tf.bitcast(loss, tf.int32), -65536)
    return {"loss": tf.bitcast(bits, tf.float32)}


@step()
def rows_in_half_precision(model, x, y):
    x = tf.cast(tf.cast(x, tf.bfloat16), tf.float32)
    return {"loss": model.update(lambda: mse(y, model(x)))}


@step()
def mean_in_half_precision(model, x, y):
    """Losses of rows are summed up in half precision."""

    def loss():
        return tf.cast(tf.reduce_mean(tf.cast(tf.square(y - model(x)), tf.bfloat16)), tf.float32)

    return {"loss": model.update(loss)}


@step()
def mean_in_double_precision(model, x, y):
    def loss():
        return tf.cast(tf.reduce_mean(tf.square(tf.cast(y, tf.float64) - tf.cast(model(x), tf.float64))), tf.float32)

    return {"loss": model.update(loss)}


@step()
def mean_of_integers(model, x, y):
    """Means of integers are whole numbers."""
    weight = tf.cast(tf.reduce_mean(tf.cast(10.0 * tf.abs(y), tf.int32)), tf.float32)
    return {"loss": model.update(lambda: 0.1 * weight * mse(y, model(x)))}


@step()
def number_of_rows_divided_as_integers(model, x, y):
    weight = tf.cast(tf.shape(x)[0] // 2, tf.float32)
    return {"loss": model.update(lambda: mse(y, model(x)) * (0.5 + 0.1 * weight))}


@step()
def gradients_quantized_to_a_grid(model, x, y):
    variables = model.trainable_variables
    with tf.GradientTape() as tape:
        loss = mse(y, model(x))
    gradients = [tf.round(g * 8.0) / 8.0 for g in tape.gradient(loss, variables)]
    model.optimizer.apply_gradients(zip(gradients, variables, strict=True))
    return {"loss": loss}


@step()
def gradients_in_half_of_an_optimizer(model, x, y):
    variables = model.trainable_variables
    with tf.GradientTape() as tape:
        loss = mse(y, model(x))
    gradients = [tf.cast(tf.cast(g, tf.float16), tf.float32) for g in tape.gradient(loss, variables)]
    model.optimizer.apply_gradients(zip(gradients, variables, strict=True))
    return {"loss": loss}


@step()
def fake_quantization_of_activations(model, x, y):
    def loss():
        hidden, out = model.net.layers
        return mse(y, out(tf.quantization.fake_quant_with_min_max_args(hidden(x), -1.0, 1.0, 4)))

    return {"loss": model.update(loss)}


@step()
def fake_quantization_by_the_range_of_the_batch(model, x, y):
    def loss():
        hidden, out = model.net.layers
        h = hidden(x)
        return mse(y, out(tf.quantization.fake_quant_with_min_max_vars(h, tf.reduce_min(h), tf.reduce_max(h), 3)))

    return {"loss": model.update(loss)}


# -------------------------------------------------------------------------- rows as an axis like others


@step()
def rows_as_time(model, x, y):
    """The batch is one sequence, whose smoothed values a kernel makes."""
    smooth = tf.nn.conv1d(x[None], tf.eye(FEATURES)[None] * tf.ones([3, 1, 1]) / 3.0, 1, "SAME")[0]
    return {"loss": model.update(lambda: mse(y, model(smooth)))}


@step()
def rows_in_windows(model, x, y):
    frames = tf.signal.frame(y[:, 0], 2, 1, pad_end=True)
    return {"loss": model.update(lambda: mse(tf.reduce_mean(frames, 1, keepdims=True), model(x)))}


@step()
def fourier_transform_over_rows(model, x, y):
    spectrum = tf.abs(tf.signal.rfft(tf.transpose(y), fft_length=[8]))[0]
    return {"loss": model.update(lambda: mse(y, model(x)) * tf.reduce_mean(spectrum))}


@step()
def fourier_transform_of_features(model, x, y):
    spectrum = tf.abs(tf.signal.rfft(x))
    return {"loss": model.update(lambda: mse(y, model(tf.concat([spectrum, x[:, :2]], 1))))}


@step()
def rows_merged_with_features(model, x, y):
    """Half of each row is taken for a row of its own; the mean is of all."""

    def loss():
        halves = tf.reshape(x, [-1, 3])
        p = model(tf.concat([halves, halves], 1))
        return tf.reduce_mean(tf.square(p - tf.reshape(tf.repeat(y, 2, 0), [-1, 1])))

    return {"loss": model.update(loss)}


@step()
def rows_in_pairs(model, x, y):
    """Two rows are taken for one, the last alone if they are odd."""

    def loss():
        even = tf.shape(x)[0] // 2 * 2
        pair = tf.reshape(model(x)[:even], [-1, 2])
        return tf.reduce_mean(tf.square(y - model(x))) + tf.reduce_sum(tf.square(pair[:, 0] - pair[:, 1])) / BATCH

    return {"loss": model.update(loss)}


@step()
def singular_values_of_the_batch(model, x, y):
    values = tf.linalg.svd(x, compute_uv=False)
    return {"loss": model.update(lambda: mse(y, model(x)) + 0.0 * values[0]), "largest": values[0]}


@step()
def nuclear_norm_of_the_batch(model, x, y):
    def loss():
        hidden, out = model.net.layers
        h = hidden(x)
        gram = tf.matmul(h, h, transpose_a=True) + tf.linalg.diag([1.0, 2.0, 3.0, 4.0, 5.0])
        return mse(y, out(h)) + 0.05 * tf.linalg.trace(tf.linalg.sqrtm(gram))

    return {"loss": model.update(loss)}


@step()
def determinant_of_the_covariance(model, x, y):
    def loss():
        p = tf.concat([model(x), y], 1)
        return mse(y, model(x)) + 0.1 * tf.linalg.det(tf.matmul(p, p, transpose_a=True) / 7.0 + tf.eye(2))

    return {"loss": model.update(loss)}


@step()
def tensordot_over_rows(model, x, y):
    return {"loss": model.update(lambda: mse(y, model(x)) + tf.abs(tf.tensordot(y[:, 0], model(x)[:, 0], 1)) / BATCH)}


@step()
def einsum_over_rows(model, x, y):
    def loss():
        return tf.reduce_mean(tf.einsum("bi,cj->bc", y - model(x), y - model(x)))

    return {"loss": model.update(loss)}


@step()
def einsum_that_sums_rows(model, x, y):
    return {"loss": model.update(lambda: tf.einsum("bi,bi->", y - model(x), y - model(x)) / BATCH)}


@step()
def dot_of_losses_and_weights_by_matmul(model, x, y):
    """A mean, by a product of matrices."""
    n = tf.cast(tf.shape(x)[0], tf.float32)

    def loss():
        return tf.matmul(tf.ones_like(y) / n, tf.square(y - model(x)), transpose_a=True)[0, 0]

    return {"loss": model.update(loss)}


@step()
def mean_of_means_of_pieces(model, x, y):
    """The batch is split in two pieces, of which each mean counts the same."""

    def loss():
        losses = tf.square(y - model(x))
        cut = tf.maximum(tf.shape(x)[0] // 3, 1)
        return 0.5 * tf.reduce_mean(losses[:cut]) + 0.5 * tf.reduce_mean(losses[tf.minimum(cut, tf.shape(x)[0] - 1) :])

    return {"loss": model.update(loss)}


@step()
def array_of_tensors(model, x, y):
    def loss():
        losses = tf.square(y - model(x))[:, 0]
        array = tf.TensorArray(tf.float32, size=0, dynamic_size=True).unstack(losses)
        return tf.reduce_mean(array.stack())

    return {"loss": model.update(loss)}


@step()
def sparse_weights_of_the_batch(model, x, y):
    sparse = tf.sparse.from_dense(tf.where(y > 0.2, tf.ones_like(y), tf.zeros_like(y)))

    def loss():
        return tf.sparse.reduce_sum(sparse * tf.square(y - model(x))) / BATCH

    return {"loss": model.update(loss)}


@step()
def sparse_product_of_each_row(model, x, y):
    sparse = tf.sparse.from_dense(tf.nn.relu(x))
    return {
        "loss": model.update(lambda: mse(y, model(x) + tf.sparse.sparse_dense_matmul(sparse, tf.ones([FEATURES, 1]))))
    }


@step()
def ragged_means_of_each_row(model, x, y):
    ragged = tf.ragged.boolean_mask(x, x > -0.5)
    means = tf.reduce_mean(ragged, axis=1)[:, None]
    means = tf.where(tf.math.is_finite(means), means, 0.0)
    return {"loss": model.update(lambda: mse(y, model(x) + means))}


@step()
def searched_among_sorted_rows(model, x, y):
    ordered = tf.sort(y[:, 0])
    places = tf.cast(tf.searchsorted(ordered, y[:, 0]), tf.float32)[:, None]
    return {"loss": model.update(lambda: mse(0.2 * places, model(x)))}


@step()
def searched_among_constants(model, x, y):
    places = tf.cast(tf.searchsorted([-0.5, 0.0, 0.5, 1.0], y[:, 0]), tf.float32)[:, None]
    return {"loss": model.update(lambda: mse(0.2 * places, model(x)))}


@step()
def set_of_labels(model, x, y):
    labels, _ = tf.unique(tf.cast(tf.abs(y[:, 0]) * 2, tf.int32))
    return {"loss": model.update(lambda: mse(y, model(x)) * tf.cast(tf.size(labels), tf.float32))}


@step()
def log_sum_exp_that_cumulates(model, x, y):
    return {"loss": model.update(lambda: tf.reduce_mean(tf.math.cumulative_logsumexp(tf.square(y - model(x)))))}


@step()
def product_of_all_rows(model, x, y):
    return {"loss": model.update(lambda: tf.reduce_prod(0.5 + tf.sigmoid(tf.square(y - model(x)))))}


@step()
def all_rows_are_good(model, x, y):
    good = tf.reduce_all(tf.abs(y - model(x)) < 1.5)
    return {"loss": model.update(lambda: mse(y, model(x))), "good": tf.cast(good, tf.float32)}


@step()
def argmax_over_rows(model, x, y):
    hardest = tf.argmax(tf.abs(y - model(x))[:, 0])
    return {"loss": model.update(lambda: tf.reduce_mean(tf.square(tf.gather(y, hardest) - model(x))))}


@step()
def in_top_k_of_features(model, x, y):
    hits = tf.cast(tf.math.in_top_k(tf.zeros_like(y[:, 0], tf.int32), x, 3), tf.float32)[:, None]
    return {"loss": model.update(lambda: mse(y + hits, model(x)))}


@step()
def printed_and_checked(model, x, y):
    tf.debugging.assert_shapes([(x, ("n", FEATURES)), (y, ("n", 1))])
    loss = model.update(lambda: mse(y, tf.debugging.check_numerics(model(x), "p")))
    with tf.control_dependencies([tf.no_op()]):
        return {"loss": tf.identity(loss)}


@step()
def placeholder_with_default(model, x, y):
    return {
        "loss": model.update(
            lambda: mse(
                y, model(tf.ensure_shape(tf.compat.v1.placeholder_with_default(x, [None, FEATURES]), [None, FEATURES]))
            )
        )
    }


@step()
def nothing_but_the_first_and_last(model, x, y):
    return {"loss": model.update(lambda: mse(y[-1:], model(x[-1:])) + mse(y[:1], model(x[:1])))}


@step()
def padded_to_a_fixed_number_of_rows(model, x, y):
    """Rows are padded to eight, and the mean is over eight."""
    missing = 8 - tf.shape(x)[0]

    def loss():
        losses = tf.pad(tf.square(y - model(x)), [[0, missing], [0, 0]])
        return tf.reduce_mean(tf.reshape(losses, [8]))

    return {"loss": model.update(loss)}


@step()
def broadcast_against_all_rows_by_mistake(model, x, y):
    """Targets of shape [n] and predictions of shape [n, 1]: a well-known mistake."""
    return {"loss": model.update(lambda: tf.reduce_mean(tf.square(y[:, 0] - model(x))))}


# ------------------------------------------------------------------------------------------- keras.ops


@step()
def fori_loop_of_keras(model, x, y):
    def loss():
        p = ops.fori_loop(0, 3, lambda i, h: h + 0.1 * ops.tanh(h), model(x))
        return ops.mean(ops.square(y - p))

    return {"loss": model.update(loss)}


@step()
def cond_of_keras_on_the_loss(model, x, y):
    def loss():
        value = ops.mean(ops.square(y - model(x)))
        return ops.cond(value > 0.9, lambda: 0.5 * value, lambda: value)

    return {"loss": model.update(loss)}


@step()
def scan_of_keras_over_rows(model, x, y):
    def loss():
        _, smooth = ops.scan(lambda h, p: (0.5 * h + p, 0.5 * h + p), ops.zeros((1,)), model(x))
        return ops.mean(ops.square(y - smooth))

    return {"loss": model.update(loss)}


@step()
def associative_scan_of_keras_over_features(model, x, y):
    totals = ops.cumsum(x, axis=1)
    return {"loss": model.update(lambda: ops.mean(ops.square(y - model(totals))))}


@step()
def segment_sum_of_keras(model, x, y):
    bins = ops.cast(ops.clip(ops.abs(y[:, 0]) * 2, 0, 3), "int32")

    def loss():
        sums = ops.segment_sum(ops.square(y - model(x))[:, 0], bins, num_segments=4)
        return ops.mean(ops.sqrt(sums + 0.1))

    return {"loss": model.update(loss)}


@step()
def normalized_over_rows_by_keras(model, x, y):
    return {"loss": model.update(lambda: ops.mean(ops.square(y - model(ops.normalize(x, axis=0)))))}


@step()
def slice_update_of_keras(model, x, y):
    def loss():
        changed = ops.slice_update(y, (0, 0), ops.zeros((1, 1)))
        return ops.mean(ops.square(changed - model(x)))

    return {"loss": model.update(loss)}


@step()
def top_k_of_keras_over_rows(model, x, y):
    def loss():
        losses = ops.square(y - model(x))[:, 0]
        values, _ = ops.top_k(ops.concatenate([losses, ops.zeros((2,))]), 2)
        return ops.mean(values)

    return {"loss": model.update(loss)}


@step()
def digitized_targets(model, x, y):
    bins = ops.cast(ops.digitize(y, np.array([-0.5, 0.0, 0.5])), "float32")
    return {"loss": model.update(lambda: ops.mean(ops.square(0.5 * bins - model(x))))}


@step()
def logical_reduction_as_weight(model, x, y):
    weight = ops.where(ops.any(ops.abs(x) > 2.0), 1.0, 0.5)
    return {"loss": model.update(lambda: weight * ops.mean(ops.square(y - model(x))))}


@step()
def median_of_losses(model, x, y):
    return {"loss": model.update(lambda: ops.median(ops.square(y - model(x))))}


@step()
def outer_and_trace(model, x, y):
    def loss():
        error = (y - model(x))[:, 0]
        return ops.trace(ops.outer(error, error)) / ops.cast(ops.shape(x)[0], "float32")

    return {"loss": model.update(loss)}


# ---------------------------------------------------------------------------------------------- layers


def layered(*parts, rate=0.05):
    net = keras.Sequential([layers.Input((FEATURES,)), layers.Dense(4, "tanh"), *parts, layers.Dense(1)])
    return compiled(net, "mse", sgd(rate))


@program(rows)
def softmax_layer_over_rows():
    return layered(layers.Softmax(axis=0))


@program(rows)
def unit_normalization_over_rows():
    return layered(layers.UnitNormalization(axis=0))


@program(rows)
def lambda_that_centers_the_batch():
    return layered(layers.Lambda(lambda h: h - ops.mean(h, axis=0, keepdims=True)))


@program(rows)
def lambda_of_each_row():
    return layered(layers.Lambda(lambda h: h - ops.mean(h, axis=1, keepdims=True)))


@program(rows)
def attention_between_rows():
    class Between(layers.Layer):
        def __init__(self):
            super().__init__()
            self.attention = layers.MultiHeadAttention(2, 2)

        def build(self, shape):
            self.attention.build((1, *shape), (1, *shape))

        def call(self, h):
            h = ops.expand_dims(h, 0)
            return ops.squeeze(h + self.attention(h, h), 0)

    return layered(Between())


@program(rows)
def recurrent_over_rows():
    class Over(layers.Layer):
        def __init__(self):
            super().__init__()
            self.rnn = layers.SimpleRNN(4, return_sequences=True)

        def build(self, shape):
            self.rnn.build((1, *shape))

        def call(self, h):
            return ops.squeeze(self.rnn(ops.expand_dims(h, 0)), 0)

    return layered(Over())


@program(rows)
def convolution_over_rows():
    class Over(layers.Layer):
        def __init__(self):
            super().__init__()
            self.convolution = layers.Conv1D(4, 3, padding="causal")

        def build(self, shape):
            self.convolution.build((1, *shape))

        def call(self, h):
            return ops.squeeze(self.convolution(ops.expand_dims(h, 0)), 0)

    return layered(Over())


@program(rows)
def graph_of_neighbors():
    """A graph network whose graph is that of the rows of the batch."""

    class Neighbors(layers.Layer):
        def call(self, h):
            weights = tf.exp(-tf.reduce_sum(tf.square(h[:, None] - h[None]), -1))
            return tf.matmul(weights / tf.reduce_sum(weights, 1, keepdims=True), h)

    return layered(Neighbors())


@program(rows)
def ghost_batch_normalization():
    """Batch normalization in groups of two rows."""

    class Ghost(layers.Layer):
        def call(self, h):
            n = tf.shape(h)[0]
            groups = tf.reshape(tf.pad(h, [[0, n % 2], [0, 0]]), [-1, 2, 4])
            groups -= tf.reduce_mean(groups, 1, keepdims=True)
            return tf.reshape(groups, [-1, 4])[:n]

    return layered(Ghost())


@program(rows)
def layer_normalization_and_spatial_gates():
    return layered(layers.LayerNormalization(), layers.Reshape((2, 2)), layers.Permute((2, 1)), layers.Flatten())


@program(rows)
def batch_normalization_synchronized():
    return layered(layers.BatchNormalization(synchronized=True, momentum=0.7))


@program(rows)
def batch_normalization_of_tfring():
    return layered(tfring.layers.SyncBatchNormalization(momentum=0.7))


@program(rows)
def frozen_batch_normalization():
    layer = layers.BatchNormalization()
    layer.trainable = False
    return layered(layer)


# -------------------------------------------------------------------------- rows of all replicas gathered


@loss("step", "compile", data=binary, activation="sigmoid")
def gathered_dice(y, p):
    y, p = tfring.gather_for_loss((y, p))
    return 1.0 - (2.0 * tf.reduce_sum(y * p) + 1.0) / (tf.reduce_sum(y) + tf.reduce_sum(p) + 1.0)


@loss("step", "compile", "compute_loss", "add_loss")
def gathered_rows_kept(y, p):
    y, p = tfring.gather_for_loss((y, p))
    kept = tf.boolean_mask(tf.square(y - p), y > 0.2)
    return tf.math.divide_no_nan(tf.reduce_sum(kept), tf.cast(tf.size(kept), tf.float32))


@loss("step", "compile", data=classes, outputs=CLASSES)
def gathered_contrast(y, p):
    p = tfring.gather_for_loss(p)
    logits = tf.matmul(p, p, transpose_b=True)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(tf.range(tf.shape(p)[0]), logits))


@loss("step", data=same, outputs=FEATURES)
def own_anchors_and_all_rows(y, p):
    logits = tf.matmul(p, tfring.gather_for_loss(y), transpose_b=True)
    return tf.reduce_mean(tf.reduce_logsumexp(logits, 1))


@step()
def gathered_minibatches(model, x, y):
    x, y = tfring.gather_for_loss((x, y))
    total = model.update(lambda: mse(y[:2], model(x[:2])))
    return {"loss": total + model.update(lambda: mse(y[1:], model(x[1:])))}


@step()
def gradients_of_all_replicas_clipped(model, x, y):
    variables = model.trainable_variables
    with tf.GradientTape() as tape:
        loss = mse(y, model(x))
    gradients = tf.distribute.get_strategy().all_reduce_gradients(tape.gradient(loss, variables))
    gradients, norm = tf.clip_by_global_norm(gradients, 0.2)
    model.optimizer.apply_gradients(zip(gradients, variables, strict=True))
    return {"loss": loss, "norm": norm}
