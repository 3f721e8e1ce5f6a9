"""Losses of targets and predictions that are no means over rows, in the places where users write them."""

import keras
import tensorflow as tf
from keras import ops

from corpus import BATCH, CLASSES, binary, classes, labels, loss, one_hot, same, times

# ------------------------------------------------------------------------------- sums and kept rows


@loss("step", "compile", "compute_loss", "add_loss", "class")
def sum_over_global_batch(y, p):
    return tf.reduce_sum(tf.square(y - p)) * (1.0 / BATCH)


@loss("step", "compile")
def sum_of_keras_ops_over_global_batch(y, p):
    return ops.sum(ops.square(y - p), axis=None) / BATCH


@loss("step", "compute_loss", "compile")
def sum_of_rows(y, p):
    return 0.1 * ops.sum(ops.abs(y - p))


@loss("step")
def vector_to_the_tape(y, p):
    return 0.1 * tf.reduce_sum(tf.square(y - p), axis=1)


@loss("step")
def several_losses_to_the_tape(y, p):
    return tf.stack([tf.reduce_mean(tf.square(y - p)), tf.reduce_mean(tf.abs(y - p))])


@loss("step", "compile", "compute_loss", "add_loss")
def kept_by_boolean_mask(y, p):
    kept = tf.boolean_mask(tf.square(y - p), y[:, 0] > 0.2)
    return tf.math.divide_no_nan(tf.reduce_sum(kept), tf.cast(tf.size(kept), tf.float32))


@loss("step", "compile")
def kept_by_where_and_gather(y, p):
    indices = tf.where(tf.abs(y[:, 0]) < 1.5)[:, 0]
    return tf.reduce_mean(tf.square(tf.gather(y, indices) - tf.gather(p, indices)))


@loss("step", "compile", "class")
def kept_by_weights_of_ones(y, p):
    weights = ops.cast(y > 0.2, "float32")
    return ops.sum(weights * ops.square(y - p)) / ops.maximum(ops.sum(weights), 1.0)


@loss("compile", "compute_loss")
def kept_by_where_of_zero(y, p):
    """The rows that do not count are zero, and the mean is over all rows."""
    return ops.mean(ops.where(y > 0.2, ops.square(y - p), 0.0))


@loss("step", "add_loss")
def kept_by_nan_of_targets(y, p):
    y = tf.where(y < -0.2, float("nan") * tf.ones_like(y), y)
    known = tf.math.is_finite(y)
    return tf.reduce_sum(tf.where(known, tf.square(tf.where(known, y, 0.0) - p), 0.0)) / (
        1e-6 + tf.math.count_nonzero(known, dtype=tf.float32)
    )


# ---------------------------------------------------------------------- functions of means of rows


@loss("step", "compile", "compute_loss", "class")
def ratio_of_sums(y, p):
    return tf.reduce_sum(tf.abs(y - p)) / tf.reduce_sum(tf.abs(y))


@loss("step", "compile")
def product_of_means(y, p):
    return tf.reduce_mean(tf.square(y - p)) * tf.reduce_mean(tf.abs(p))


@loss("step", "compile", "add_loss")
def log_of_mean(y, p):
    return ops.log(ops.mean(ops.square(y - p)) + 0.1)


@loss("step", "compile", "compute_loss", "class")
def root_of_mean(y, p):
    return tf.sqrt(tf.reduce_mean(tf.square(y - p)))


@loss("step", "compile")
def maximum_of_means(y, p):
    return tf.maximum(tf.reduce_mean(tf.square(y - p)), tf.reduce_mean(2 * tf.abs(y)))


@loss("step", "compute_loss")
def stack_and_maximum_of_means(y, p):
    return tf.reduce_max(tf.stack([tf.reduce_mean(tf.square(y - p)), tf.reduce_mean(tf.abs(y))]))


@loss("step", "compile")
def square_of_mean_error(y, p):
    return ops.square(ops.mean(y - p)) + ops.mean(ops.square(y - p))


@loss("step", "compile", "compute_loss")
def flooding(y, p):
    return tf.abs(tf.reduce_mean(tf.square(y - p)) - 0.8) + 0.8


@loss("step")
def condition_on_loss(y, p):
    mse, mae = tf.reduce_mean(tf.square(y - p)), tf.reduce_mean(tf.abs(y - p))
    return tf.cond(mse > 1.0, lambda: mae, lambda: mse)


@loss("step", "compile")
def switch_of_losses_by_where(y, p):
    mse, mae = tf.reduce_mean(tf.square(y - p)), tf.reduce_mean(tf.abs(y - p))
    return tf.where(mse > 1.0, mae, mse)


@loss("step", "compile")
def correlation(y, p):
    y, p = y - tf.reduce_mean(y), p - tf.reduce_mean(p)
    return 1.0 - tf.reduce_sum(y * p) / (tf.norm(y) * tf.norm(p) + 0.1)


@loss("compile", "class")
def concordance(y, p):
    mean_y, mean_p = ops.mean(y), ops.mean(p)
    covariance = ops.mean((y - mean_y) * (p - mean_p))
    return 1.0 - 2.0 * covariance / (ops.var(y) + ops.var(p) + ops.square(mean_y - mean_p) + 1e-3)


@loss("step", "compile")
def r_squared(y, p):
    return tf.reduce_sum(tf.square(y - p)) / (tf.reduce_sum(tf.square(y - tf.reduce_mean(y))) + 0.1)


@loss("step")
def variance_of_losses(y, p):
    per_row = tf.square(y - p)
    return tf.reduce_mean(per_row) + 0.1 * tf.math.reduce_variance(per_row)


@loss("compile", "step")
def log_sum_exp_of_losses(y, p):
    return ops.logsumexp(ops.square(y - p) * 0.5)


@loss("step", "compile")
def softmax_weighted_losses(y, p):
    per_row = ops.square(y - p)[:, 0]
    return ops.sum(ops.stop_gradient(ops.softmax(per_row, axis=0)) * per_row)


@loss("step")
def norm_of_errors(y, p):
    return tf.norm(y - p) * 0.3


@loss("step", "compile")
def normalized_by_largest_target(y, p):
    return tf.reduce_mean(tf.square(y - p)) / tf.reduce_max(tf.abs(y))


# ------------------------------------------------------------------------------------- segmentation


@loss("compile", "step", "class", data=labels, outputs=CLASSES, activation="sigmoid")
def dice(y, p):
    return 1.0 - (2.0 * tf.reduce_sum(y * p) + 1.0) / (tf.reduce_sum(y) + tf.reduce_sum(p) + 1.0)


@loss("compile", data=labels, outputs=CLASSES, activation="sigmoid")
def dice_of_each_row(y, p):
    return 1.0 - (2.0 * ops.sum(y * p, axis=-1) + 1.0) / (ops.sum(y, axis=-1) + ops.sum(p, axis=-1) + 1.0)


@loss("compile", "add_loss", data=labels, outputs=CLASSES, activation="sigmoid")
def tversky(y, p):
    hits = ops.sum(y * p)
    return 1.0 - (hits + 1.0) / (hits + 0.3 * ops.sum((1 - y) * p) + 0.7 * ops.sum(y * (1 - p)) + 1.0)


@loss("compile", "compute_loss", data=labels, outputs=CLASSES, activation="sigmoid")
def soft_f1_of_each_class(y, p):
    hits = tf.reduce_sum(y * p, axis=0)
    f1 = 2 * hits / (2 * hits + tf.reduce_sum((1 - y) * p, axis=0) + tf.reduce_sum(y * (1 - p), axis=0) + 1e-3)
    return 1.0 - tf.reduce_mean(f1)


@loss("step", "compile", data=labels, outputs=CLASSES, activation="sigmoid")
def jaccard(y, p):
    both = tf.reduce_sum(y * p)
    return -tf.math.log((both + 0.5) / (tf.reduce_sum(y + p) - both + 0.5))


@loss("compile", "step", data=labels, outputs=CLASSES)
def focal_over_positives(y, p):
    losses = keras.losses.binary_focal_crossentropy(y, p, from_logits=True)
    return tf.reduce_sum(losses) / tf.maximum(tf.reduce_sum(y), 1.0)


@loss("compile", "step", data=binary)
def balanced_by_the_batch(y, p):
    positive = tf.reduce_mean(y)
    weights = y * (1.0 - positive) + (1.0 - y) * positive
    return tf.reduce_mean(weights * tf.nn.sigmoid_cross_entropy_with_logits(y, p))


@loss("compile", "step", data=one_hot, outputs=CLASSES)
def class_weights_of_the_batch(y, p):
    counts = ops.sum(y, axis=0)
    weights = ops.sum(y * (1.0 / (counts + 1.0)), axis=-1)
    return ops.mean(weights * keras.losses.categorical_crossentropy(y, p, from_logits=True))


# ----------------------------------------------------------------------------------- all rows at once


@loss("step", "compile", "compute_loss")
def hardest_row(y, p):
    return tf.reduce_max(tf.square(y - p))


@loss("step", "compile", "add_loss")
def hardest_rows_by_top_k(y, p):
    values, _ = tf.math.top_k(tf.square(y - p)[:, 0], k=tf.minimum(2, tf.shape(y)[0]))
    return tf.reduce_mean(values)


@loss("step")
def easiest_half_by_sort(y, p):
    ordered = tf.sort(tf.square(y - p)[:, 0])
    return tf.reduce_mean(ordered[: tf.maximum(tf.shape(y)[0] // 2, 1)])


@loss("step", "compile")
def trimmed_by_quantile(y, p):
    per_row = ops.square(y - p)[:, 0]
    limit = ops.stop_gradient(ops.quantile(per_row, 0.7))
    return ops.mean(ops.where(per_row <= limit, per_row, 0.0))


@loss("step", "compile")
def wasserstein_of_sorted_rows(y, p):
    return tf.reduce_mean(tf.abs(tf.sort(y, axis=0) - tf.sort(p, axis=0)))


@loss("step", "compile", data=same, outputs=6)
def maximum_mean_discrepancy(y, p):
    def kernel(a, b):
        return tf.reduce_mean(tf.exp(-tf.reduce_mean(tf.square(a[:, None] - b[None]), -1)))

    return kernel(y, y) + kernel(p, p) - 2 * kernel(y, p)


@loss("step", "compile")
def pairwise_hinge(y, p):
    margin = tf.maximum(0.0, 0.5 - (p - tf.transpose(p)))
    return tf.reduce_mean(tf.where(y > tf.transpose(y), margin, 0.0))


@loss("compile", "class")
def ranknet(y, p):
    better = ops.cast(y > ops.transpose(y), "float32")
    return ops.sum(better * ops.softplus(-(p - ops.transpose(p)))) / (ops.sum(better) + 1.0)


@loss("step", "compile")
def listwise_ranking(y, p):
    return -tf.reduce_sum(tf.nn.softmax(y, axis=0) * tf.nn.log_softmax(p, axis=0))


@loss("compile", "step", data=times)
def cox(y, p):
    time, event, risk = y[:, 0], y[:, 1], p[:, 0]
    at_risk = tf.cast(time[None, :] >= time[:, None], tf.float32)
    log_risk = tf.math.log(tf.reduce_sum(at_risk * tf.exp(risk)[None, :], axis=1))
    return -tf.reduce_sum((risk - log_risk) * event) / tf.maximum(tf.reduce_sum(event), 1.0)


@loss("step", data=times)
def cox_by_cumulative_sum(y, p):
    order = tf.argsort(y[:, 0], direction="DESCENDING")
    risk, event = tf.gather(p[:, 0], order), tf.gather(y[:, 1], order)
    return -tf.reduce_mean((risk - tf.math.log(tf.cumsum(tf.exp(risk)))) * event)


@loss("step", "compile")
def differences_of_neighbors(y, p):
    return tf.reduce_mean(tf.square(y - p)) + tf.reduce_sum(tf.square(p[1:] - p[:-1])) / 7.0


@loss("step", "compile")
def total_variation_by_roll(y, p):
    return ops.mean(ops.square(y - p)) + 0.2 * ops.mean(ops.abs(p - ops.roll(p, 1, axis=0)))


@loss("step")
def cumulative_sum_of_rows(y, p):
    return tf.reduce_mean(tf.square(tf.cumsum(y - p, axis=0))) * 0.1


@loss("step")
def first_row(y, p):
    return tf.reduce_mean(tf.square(y[0] - p[0]))


@loss("compile", "step")
def reversed_rows(y, p):
    """Mixup of predictions with those of the batch in reversed order."""
    return tf.reduce_mean(tf.square(0.7 * p + 0.3 * tf.reverse(p, [0]) - (0.7 * y + 0.3 * y[::-1])))


@loss("step", "compile", data=classes, outputs=CLASSES)
def mean_of_means_of_classes(y, p):
    labels = tf.cast(tf.reshape(y, [-1]), tf.int32)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, p)
    sums = tf.math.unsorted_segment_sum(losses, labels, CLASSES)
    counts = tf.math.unsorted_segment_sum(tf.ones_like(losses), labels, CLASSES)
    return tf.reduce_mean(tf.math.divide_no_nan(sums, counts))


@loss("step", data=classes, outputs=CLASSES)
def unsorted_segment_mean_by_label(y, p):
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, p)
    return tf.reduce_sum(tf.math.unsorted_segment_mean(losses, y, CLASSES))


@loss("step", data=classes, outputs=CLASSES)
def weights_by_unique_with_counts(y, p):
    _, index, counts = tf.unique_with_counts(y)
    weights = 1.0 / tf.cast(tf.gather(counts, index), tf.float32)
    return tf.reduce_sum(weights * tf.nn.sparse_softmax_cross_entropy_with_logits(y, p))


@loss("step", "compile", data=classes, outputs=CLASSES)
def weights_by_bincount(y, p):
    y = tf.reshape(tf.cast(y, tf.int32), [-1])
    counts = tf.cast(tf.math.bincount(y, minlength=CLASSES, maxlength=CLASSES), tf.float32)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, p) / tf.gather(counts, y))


@loss("step")
def histogram_of_errors(y, p):
    error = tf.abs(y - p)[:, 0]
    counts = tf.cast(tf.histogram_fixed_width(error, [0.0, 2.0], nbins=4), tf.float32)
    return tf.reduce_mean(error * tf.gather(counts, tf.cast(tf.clip_by_value(error * 2.0, 0.0, 3.0), tf.int32)))


@loss("step", data=one_hot, outputs=CLASSES, activation="softmax")
def entropy_of_mean_prediction(y, p):
    mean = tf.reduce_mean(p, axis=0)
    return tf.reduce_mean(keras.losses.categorical_crossentropy(y, p)) + tf.reduce_sum(mean * tf.math.log(mean))


@loss("step", "compile", data=one_hot, outputs=CLASSES)
def sinkhorn(y, p):
    assignment = tf.exp(p)
    for _ in range(3):
        assignment /= tf.reduce_sum(assignment, axis=0, keepdims=True)
        assignment /= tf.reduce_sum(assignment, axis=1, keepdims=True)
    return -tf.reduce_mean(tf.reduce_sum(y * tf.math.log(assignment), axis=1))
