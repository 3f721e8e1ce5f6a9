"""Metrics: how steps and layers feed them, and metrics of users' own."""

import keras
import tensorflow as tf
from keras import layers, ops

from corpus import CLASSES, FEATURES, binary, classes, compiled, dense, program, rows


class Fed(keras.Model):
    """A dense model whose step feeds metrics by `feed(model, x, y, predictions, loss)`, and logs their results."""

    def __init__(self, feed, *metrics, outputs=1, activation=None):
        super().__init__()
        self.net, self.feed, self.fed = dense(outputs, activation), feed, list(metrics)

    def call(self, x):
        return self.net(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            p = self(x, training=True)
            losses = keras.losses.mean_squared_error(tf.cast(tf.reshape(y, [-1, 1]), tf.float32), p)
            loss = tf.reduce_mean(losses)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        logs = self.feed(self, x, y, p, loss)
        return {**{metric.name: metric.result() for metric in self.fed}, **(logs or {})}

    @property
    def metrics(self):
        return self.fed


def fed(*kinds, data=rows, outputs=1, activation=None):
    """Adds a program that makes metrics, each by a function, and feeds them."""

    def add(fn):
        def make():
            return compiled(Fed(fn, *(kind() for kind in kinds), outputs=outputs, activation=activation))

        make.__name__, make.__module__ = fn.__name__, fn.__module__
        program(data)(make)
        return fn

    return add


@fed(keras.metrics.Mean)
def mean_of_loss(model, x, y, p, loss):
    model.fed[0].update_state(loss)


@fed(keras.metrics.Mean)
def mean_of_loss_with_weight_two(model, x, y, p, loss):
    model.fed[0].update_state(loss, sample_weight=2.0)


@fed(keras.metrics.Mean)
def mean_of_loss_with_weight_of_rows(model, x, y, p, loss):
    model.fed[0].update_state(loss, sample_weight=tf.cast(tf.shape(x)[0], tf.float32))


@fed(keras.metrics.Mean)
def mean_of_loss_with_weight_of_the_step(model, x, y, p, loss):
    model.fed[0].update_state(loss, sample_weight=tf.cast(model.optimizer.iterations, tf.float32))


@fed(keras.metrics.Mean)
def mean_of_loss_with_weight_of_kept_rows(model, x, y, p, loss):
    model.fed[0].update_state(loss, sample_weight=tf.reduce_sum(tf.cast(y > 0.2, tf.float32)))


@fed(keras.metrics.Mean)
def mean_of_rows(model, x, y, p, loss):
    model.fed[0].update_state(tf.abs(y - p))


@fed(keras.metrics.Mean)
def mean_of_rows_with_weights_of_rows(model, x, y, p, loss):
    model.fed[0].update_state(tf.abs(y - p)[:, 0], sample_weight=tf.abs(x[:, 0]))


@fed(keras.metrics.Mean)
def mean_of_rows_with_weight_two(model, x, y, p, loss):
    model.fed[0].update_state(tf.abs(y - p), sample_weight=2.0)


@fed(keras.metrics.Mean)
def mean_of_kept_rows(model, x, y, p, loss):
    model.fed[0].update_state(tf.boolean_mask(tf.abs(y - p), y > 0.2))


@fed(keras.metrics.Mean)
def mean_of_the_mean_of_kept_rows(model, x, y, p, loss):
    kept = tf.gather(tf.abs(y - p)[:, 0], tf.where(y[:, 0] > 0.2)[:, 0])
    model.fed[0].update_state(tf.math.divide_no_nan(tf.reduce_sum(kept), tf.cast(tf.size(kept), tf.float32)))


@fed(keras.metrics.Mean)
def mean_of_roots(model, x, y, p, loss):
    model.fed[0].update_state(tf.sqrt(loss))


@fed(keras.metrics.Mean)
def mean_of_sums(model, x, y, p, loss):
    model.fed[0].update_state(tf.reduce_sum(tf.abs(y - p)))


@fed(keras.metrics.Mean)
def mean_of_maxima(model, x, y, p, loss):
    model.fed[0].update_state(ops.max(ops.abs(y - p)))


@fed(keras.metrics.Mean)
def mean_of_ratios(model, x, y, p, loss):
    model.fed[0].update_state(loss / tf.reduce_mean(tf.square(y)))


@fed(keras.metrics.Mean)
def mean_of_norms_of_weights(model, x, y, p, loss):
    model.fed[0].update_state(tf.norm(model.net.layers[0].kernel))


@fed(keras.metrics.Mean)
def mean_of_a_constant_and_of_rates(model, x, y, p, loss):
    model.fed[0].update_state(model.optimizer.learning_rate)


@fed(keras.metrics.Sum)
def sum_of_rows(model, x, y, p, loss):
    model.fed[0].update_state(tf.abs(y - p))


@fed(keras.metrics.Sum)
def sum_of_means(model, x, y, p, loss):
    model.fed[0].update_state(loss)


@fed(keras.metrics.Sum)
def sum_of_numbers_of_rows(model, x, y, p, loss):
    model.fed[0].update_state(tf.cast(tf.shape(x)[0], tf.float32))


@fed(keras.metrics.Sum)
def sum_of_ones(model, x, y, p, loss):
    model.fed[0].update_state(1.0)


@fed(keras.metrics.Sum)
def sum_with_weights(model, x, y, p, loss):
    model.fed[0].update_state(tf.abs(y - p)[:, 0], sample_weight=tf.cast(y[:, 0] > 0, tf.float32))


@fed(keras.metrics.RootMeanSquaredError, keras.metrics.MeanAbsolutePercentageError, keras.metrics.R2Score)
def regression_metrics(model, x, y, p, loss):
    for metric in model.fed:
        metric.update_state(y, p)


@fed(keras.metrics.MeanSquaredError)
def metric_of_kept_rows(model, x, y, p, loss):
    kept = tf.where(y[:, 0] > 0.2)[:, 0]
    model.fed[0].update_state(tf.gather(y, kept), tf.gather(p, kept))


@fed(keras.metrics.MeanSquaredError)
def metric_with_zero_weights(model, x, y, p, loss):
    model.fed[0].update_state(y, p, sample_weight=tf.cast(y > 0.2, tf.float32))


@fed(
    lambda: keras.metrics.AUC(40),
    keras.metrics.Precision,
    keras.metrics.Recall,
    lambda: keras.metrics.PrecisionAtRecall(0.5, 20),
    keras.metrics.FalseNegatives,
    data=binary,
    activation="sigmoid",
)
def classification_metrics(model, x, y, p, loss):
    for metric in model.fed:
        metric.update_state(y, p)


@fed(lambda: keras.metrics.MeanIoU(CLASSES, sparse_y_pred=False), data=classes)
def mean_intersection_over_union(model, x, y, p, loss):
    model.fed[0].update_state(y, tf.one_hot(tf.argmax(x[:, :CLASSES], 1), CLASSES))


@fed()
def mean_in_logs(model, x, y, p, loss):
    return {"loss": loss, "mae": tf.reduce_mean(tf.abs(y - p)), "bias": ops.mean(p)}


@fed()
def sums_in_logs(model, x, y, p, loss):
    return {"sum": tf.reduce_sum(tf.abs(y - p))}


@fed()
def number_of_rows_in_logs(model, x, y, p, loss):
    return {"rows": tf.shape(x)[0]}


@fed()
def number_of_kept_rows_in_logs(model, x, y, p, loss):
    return {"kept": tf.reduce_sum(tf.cast(y > 0.2, tf.float32))}


@fed()
def roots_and_maxima_in_logs(model, x, y, p, loss):
    return {"root": tf.sqrt(loss), "largest": tf.reduce_max(p)}


@fed()
def minimum_and_maximum_in_logs(model, x, y, p, loss):
    return {"least": ops.min(p), "most": ops.max(p)}


@fed()
def deviation_in_logs(model, x, y, p, loss):
    return {"deviation": tf.math.reduce_std(p)}


@fed()
def perplexity_in_logs(model, x, y, p, loss):
    return {"perplexity": tf.exp(loss)}


@fed()
def median_in_logs(model, x, y, p, loss):
    return {"median": ops.median(p)}


@fed()
def first_prediction_in_logs(model, x, y, p, loss):
    return {"first": p[0, 0]}


@fed()
def step_and_rate_in_logs(model, x, y, p, loss):
    return {"step": model.optimizer.iterations, "rate": model.optimizer.learning_rate}


@fed(lambda: keras.metrics.Mean("a"), lambda: keras.metrics.Mean("b"))
def ratio_of_metrics_in_logs(model, x, y, p, loss):
    a, b = model.fed
    a.update_state(tf.square(y - p))
    b.update_state(tf.square(y))
    return {"ratio": a.result() / b.result()}


# --------------------------------------------------------------------------------- metrics of users' own


class Total(keras.metrics.Metric):
    """A metric with weights of its own, which `update(metric, y, p)` writes, and `read(metric)` reads."""

    def __init__(self, update, read, *shapes, name="own"):
        super().__init__(name=name)
        self.update, self.read = update, read
        self.parts = [
            self.add_weight(shape=shape, initializer="zeros", name=f"part_{i}") for i, shape in enumerate(shapes)
        ]

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.update(self, tf.cast(y_true, tf.float32), y_pred)

    def result(self):
        return self.read(self)


def own_metric(read, *shapes, data=rows):
    """Adds a program with a metric of a user's own in `compile`, of parts that a function updates."""

    def add(fn):
        def make():
            return compiled(dense(), "mse", metrics=[Total(fn, read, *(shapes or ((), ())))])

        make.__name__, make.__module__ = fn.__name__, fn.__module__
        program(data)(make)
        return fn

    return add


def ratio(metric):
    return ops.divide_no_nan(metric.parts[0], metric.parts[1])


@own_metric(ratio)
def own_sum_over_rows(metric, y, p):
    metric.parts[0].assign_add(tf.reduce_sum(tf.abs(y - p)))
    metric.parts[1].assign_add(tf.cast(tf.size(y), tf.float32))


@own_metric(ratio)
def own_mean_over_batches(metric, y, p):
    metric.parts[0].assign_add(ops.mean(ops.abs(y - p)))
    metric.parts[1].assign_add(1.0)


@own_metric(ratio)
def own_root_over_batches(metric, y, p):
    metric.parts[0].assign_add(tf.sqrt(tf.reduce_mean(tf.square(y - p))))
    metric.parts[1].assign_add(1.0)


@own_metric(ratio)
def own_relative_error(metric, y, p):
    metric.parts[0].assign_add(tf.reduce_sum(tf.abs(y - p)))
    metric.parts[1].assign_add(tf.reduce_sum(tf.abs(y)))


@own_metric(ratio)
def own_mean_of_kept_rows(metric, y, p):
    kept = tf.boolean_mask(tf.abs(y - p), y > 0.2)
    metric.parts[0].assign_add(tf.reduce_sum(kept))
    metric.parts[1].assign_add(tf.cast(tf.size(kept), tf.float32))


@own_metric(lambda metric: metric.parts[0] + 0.0, ())
def own_maximum(metric, y, p):
    metric.parts[0].assign(ops.maximum(metric.parts[0], ops.max(ops.abs(y - p))))


@own_metric(lambda metric: metric.parts[0] + 0.0, ())
def own_last_mean(metric, y, p):
    metric.parts[0].assign(tf.reduce_mean(tf.abs(y - p)))


@own_metric(lambda metric: metric.parts[0] + 0.0, ())
def own_moving_mean(metric, y, p):
    metric.parts[0].assign(0.9 * metric.parts[0] + 0.1 * tf.reduce_mean(tf.abs(y - p)))


@own_metric(ratio)
def own_correlation_by_batch(metric, y, p):
    a, b = y - tf.reduce_mean(y), p - tf.reduce_mean(p)
    metric.parts[0].assign_add(tf.reduce_sum(a * b) / (tf.norm(a) * tf.norm(b) + 1e-2))
    metric.parts[1].assign_add(1.0)


@own_metric(lambda m: (m.parts[2] - m.parts[0] * m.parts[1] / m.parts[3]) / (m.parts[3] + 1.0), (), (), (), ())
def own_covariance_of_sums(metric, y, p):
    for part, value in zip(metric.parts, (y, p, y * p, tf.ones_like(y)), strict=True):
        part.assign_add(tf.reduce_sum(value))


@own_metric(lambda m: ops.sum(m.parts[0] * ops.arange(4, dtype="float32")), (4,))
def own_histogram(metric, y, p):
    bins = tf.cast(tf.clip_by_value(tf.abs(y - p) * 2, 0, 3), tf.int32)
    metric.parts[0].assign_add(tf.reduce_sum(tf.one_hot(bins[:, 0], 4), 0))


@own_metric(lambda m: m.parts[0][0, 0] / (ops.sum(m.parts[0]) + 1.0), (2, 2), data=binary)
def own_confusion_matrix(metric, y, p):
    truth, said = tf.cast(y[:, 0], tf.int32), tf.cast(p[:, 0] > 0, tf.int32)
    metric.parts[0].assign_add(tf.math.confusion_matrix(truth, said, 2, dtype=tf.float32))


@own_metric(lambda m: m.parts[1] + 0.0)
def own_welford(metric, y, p):
    metric.parts[0].assign_add(tf.cast(tf.size(y), tf.float32))
    metric.parts[1].assign_add(tf.reduce_sum(p - metric.parts[1]) / metric.parts[0])


@program(rows)
def function_of_one_number():
    def rmse(y, p):
        return tf.sqrt(tf.reduce_mean(tf.square(y - p)))

    return compiled(dense(), "mse", metrics=[rmse])


@program(rows)
def function_of_each_row():
    def within(y, p):
        return ops.cast(ops.abs(y - p) < 0.5, "float32")

    return compiled(dense(), "mse", metrics=[within])


@program(binary)
def f1_as_a_function():
    def f1(y, p):
        said = ops.round(p)
        hits = ops.sum(y * said)
        return 2 * hits / (ops.sum(y) + ops.sum(said) + 1e-6)

    return compiled(dense(1, "sigmoid"), "binary_crossentropy", metrics=[f1])


@program(rows)
def mean_metric_wrapper():
    metric = keras.metrics.MeanMetricWrapper(lambda y, p: tf.abs(y - p) / (tf.abs(y) + 1.0), name="relative")
    return compiled(dense(), "mse", metrics=[metric])


@program(rows)
def subclass_of_mean():
    class Relative(keras.metrics.Mean):
        def update_state(self, y_true, y_pred, sample_weight=None):
            error = ops.sum(ops.abs(y_true - y_pred)) / ops.sum(ops.abs(y_true))
            return super().update_state(error, sample_weight=sample_weight)

    return compiled(dense(), "mse", metrics=[Relative("relative")])


@program(rows)
def metric_in_a_layer():
    class Measured(layers.Layer):
        def __init__(self):
            super().__init__()
            self.mean = keras.metrics.Mean(name="activity")
            self.kept = keras.metrics.Mean(name="kept")

        def call(self, x):
            self.mean.update_state(ops.mean(ops.abs(x)))
            self.kept.update_state(tf.boolean_mask(x, x > 0))
            return x

    return compiled(
        keras.Sequential([layers.Input((FEATURES,)), layers.Dense(3, "tanh"), Measured(), layers.Dense(1)]), "mse"
    )


@program(rows)
def ratio_in_a_metric_of_a_layer():
    class Measured(layers.Layer):
        def __init__(self):
            super().__init__()
            self.mean = keras.metrics.Mean(name="share")

        def call(self, x):
            large = tf.reduce_sum(tf.where(x > 0, x, 0.0))
            self.mean.update_state(large / tf.reduce_sum(tf.abs(x)))
            return x

    return compiled(
        keras.Sequential([layers.Input((FEATURES,)), layers.Dense(3, "tanh"), Measured(), layers.Dense(1)]), "mse"
    )
