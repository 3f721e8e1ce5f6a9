"""Steps of users' own: minibatches, chosen and mixed rows, loops, conditions, several losses, and what layers add."""

import keras
import tensorflow as tf
from keras import layers, ops

from corpus import BATCH, CLASSES, FEATURES, classes, compiled, dense, masks, one_hot, program, rows, same, sgd


class Own(keras.Model):
    """A dense model whose step is `step(model, x, y)`, which returns logs."""

    def __init__(self, step, outputs=1):
        super().__init__()
        self.net, self.step = dense(outputs), step
        self.tracker = keras.metrics.Mean(name="tracked")

    def call(self, x):
        return self.net(x)

    def train_step(self, data):
        return self.step(self, *data)

    def update(self, loss_of):
        """Takes a step along the gradient of `loss_of()`, and returns the loss."""
        with tf.GradientTape() as tape:
            loss = loss_of()
        self.optimizer.apply_gradients(
            zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables, strict=True)
        )
        return loss


def step(data=rows, outputs=1, **options):
    """Adds a program of a step; options are those of `compile`."""

    def add(fn):
        def make():
            return compiled(Own(fn, outputs), **options)

        make.__name__, make.__module__ = fn.__name__, fn.__module__
        program(data)(make)
        return fn

    return add


def mse(y, p):
    return tf.reduce_mean(tf.square(y - p))


# ---------------------------------------------------------------------------- minibatches and chosen rows


@step()
def two_halves(model, x, y):
    half = tf.shape(x)[0] // 2
    first = model.update(lambda: mse(y[half:], model(x[half:])))
    second = model.update(lambda: mse(y[: half + 1], model(x[: half + 1])))
    return {"first": first, "second": second}


@step()
def minibatches_of_two_rows(model, x, y):
    total = 0.0
    for begin in (0, 1):
        total += model.update(lambda begin=begin: mse(y[begin : begin + 2], model(x[begin : begin + 2])))
    return {"loss": total}


@step()
def minibatches_of_a_permutation(model, x, y):
    order = tf.random.experimental.stateless_shuffle(tf.range(tf.shape(x)[0]), seed=(3, 4))
    x, y = tf.gather(x, order), tf.gather(y, order)
    loss = model.update(lambda: mse(y[:2], model(x[:2])))
    return {"loss": loss + model.update(lambda: mse(y[1:], model(x[1:])))}


@step()
def shuffled_rows(model, x, y):
    """Shuffles all rows, of which the loss is a mean: the order does not count."""
    order = tf.random.experimental.stateless_shuffle(tf.range(tf.shape(x)[0]), seed=(1, 2))
    return {"loss": model.update(lambda: mse(tf.gather(y, order), model(tf.gather(x, order))))}


@step()
def every_other_row(model, x, y):
    return {"loss": model.update(lambda: mse(y[::2], model(x[::2])))}


@step()
def parts_by_dynamic_partition(model, x, y):
    which = tf.cast(y[:, 0] > 0.2, tf.int32)
    (x0, x1), (y0, y1) = tf.dynamic_partition(x, which, 2), tf.dynamic_partition(y, which, 2)

    def loss():
        sums = [tf.reduce_sum(tf.square(b - model(a))) for a, b in ((x0, y0), (x1, y1))]
        counts = [tf.cast(tf.maximum(tf.shape(a)[0], 1), tf.float32) for a in (x0, x1)]
        return sums[0] / counts[0] + 2.0 * sums[1] / counts[1]

    return {"loss": model.update(loss)}


@step()
def parts_stitched_again(model, x, y):
    which = tf.cast(y[:, 0] > 0.2, tf.int32)
    places = tf.dynamic_partition(tf.range(tf.shape(x)[0]), which, 2)
    parts = tf.dynamic_partition(x, which, 2)

    def loss():
        p = tf.dynamic_stitch(places, [model(parts[0]), 2.0 * model(parts[1])])
        return mse(y, p)

    return {"loss": model.update(loss)}


@step()
def rows_of_known_targets(model, x, y):
    """Rows without a target are filtered out before the model sees them."""
    known = tf.where(tf.abs(y[:, 0]) < 1.2)[:, 0]
    x, y = tf.gather(x, known), tf.gather(y, known)
    loss = model.update(lambda: tf.reduce_mean(keras.losses.huber(y, model(x, training=True))))
    model.tracker.update_state(loss)
    return {"loss": model.tracker.result()}


@step()
def sum_of_kept_over_their_number(model, x, y):
    keep = tf.cast(y > 0.2, tf.float32)
    loss = model.update(
        lambda: tf.math.divide_no_nan(tf.reduce_sum(keep * tf.square(y - model(x))), tf.reduce_sum(keep))
    )
    return {"loss": loss, "kept": tf.reduce_mean(keep)}


@step()
def sum_of_kept_over_the_number_of_rows(model, x, y):
    keep = tf.cast(y > 0.2, tf.float32)
    loss = model.update(lambda: tf.reduce_sum(keep * tf.square(y - model(x))) / tf.cast(tf.shape(x)[0], tf.float32))
    return {"loss": loss}


@step()
def hard_rows_trained_again(model, x, y):
    errors = tf.abs(y - model(x))[:, 0]
    hard = tf.where(errors > tf.reduce_mean(errors))[:, 0]
    x, y = tf.concat([x, tf.gather(x, hard)], 0), tf.concat([y, tf.gather(y, hard)], 0)
    return {"loss": model.update(lambda: mse(y, model(x)))}


@step(one_hot, CLASSES)
def online_hard_examples(model, x, y):
    def loss():
        losses = tf.nn.softmax_cross_entropy_with_logits(y, model(x))
        _, places = tf.nn.top_k(losses, k=tf.maximum(tf.shape(x)[0] // 2, 1))
        return tf.reduce_mean(tf.gather(losses, places))

    return {"loss": model.update(loss)}


@step()
def small_losses_under_a_constant(model, x, y):
    """Rows whose own loss is under a fixed limit count: of each row by itself, but for their number."""

    def loss():
        losses = tf.square(y - model(x))[:, 0]
        return tf.reduce_mean(tf.where(losses < 2.0, losses, 0.0))

    return {"loss": model.update(loss)}


# ------------------------------------------------------------------------------- rows mixed with others


@step()
def mixup_with_reversed_rows(model, x, y):
    return {"loss": model.update(lambda: mse(0.7 * y + 0.3 * y[::-1], model(0.7 * x + 0.3 * tf.reverse(x, [0]))))}


@step(one_hot, CLASSES)
def mixup_with_rolled_rows(model, x, y):
    x, y = 0.8 * x + 0.2 * ops.roll(x, 1, axis=0), 0.8 * y + 0.2 * ops.roll(y, 1, axis=0)
    loss = model.update(
        lambda: ops.mean(keras.losses.categorical_crossentropy(y, model(x), from_logits=True, label_smoothing=0.1))
    )
    return {"loss": loss}


@step()
def cutmix_of_features(model, x, y):
    other, mask = tf.reverse(x, [0]), tf.constant([1.0, 1, 1, 1, 0, 0])
    y = y * (4 / 6) + tf.reverse(y, [0]) * (2 / 6)
    return {"loss": model.update(lambda: mse(y, model(x * mask + other * (1 - mask))))}


@step()
def features_normalized_by_the_batch(model, x, y):
    mean, variance = tf.nn.moments(x, axes=[0])
    x = tf.nn.batch_normalization(x, mean, variance, None, None, 1e-2)
    return {"loss": model.update(lambda: mse(y, model(x)))}


@step()
def targets_normalized_by_the_batch(model, x, y):
    y = (y - ops.mean(y)) / (ops.std(y) + 0.1)
    return {"loss": model.update(lambda: mse(y, model(x)))}


@step()
def targets_as_ranks(model, x, y):
    order = tf.argsort(tf.argsort(y[:, 0]))
    ranks = tf.cast(order, tf.float32)[:, None] / tf.cast(tf.shape(x)[0], tf.float32)
    return {"loss": model.update(lambda: mse(ranks, model(x)))}


@step()
def position_of_rows_as_weight(model, x, y):
    weights = 1.0 / (1.0 + tf.cast(tf.range(tf.shape(x)[0]), tf.float32))
    return {"loss": model.update(lambda: tf.reduce_mean(weights * tf.square(y - model(x))[:, 0]))}


@step()
def weights_that_sum_to_one(model, x, y):
    weights = tf.exp(-tf.abs(y))
    weights /= tf.reduce_sum(weights)
    return {"loss": model.update(lambda: tf.reduce_sum(weights * tf.square(y - model(x))))}


@step()
def rows_scaled_by_their_own_norm(model, x, y):
    x = x / (tf.norm(x, axis=1, keepdims=True) + 0.1)
    return {"loss": model.update(lambda: mse(y, model(x)))}


@step()
def weights_of_rows_by_an_inverse(model, x, y):
    h = tf.concat([x[:, :2], tf.ones_like(y)], 1)
    solution = tf.linalg.lstsq(h, y, l2_regularizer=0.5)
    return {"loss": model.update(lambda: mse(y - tf.matmul(h, solution), model(x)))}


# -------------------------------------------------------------------------------------- control flow


@step()
def map_fn_over_rows(model, x, y):
    def loss():
        p = tf.map_fn(lambda row: model(row[None])[0], x)
        return mse(y, p)

    return {"loss": model.update(loss)}


@step()
def vectorized_map_over_rows(model, x, y):
    def loss():
        of_row = lambda pair: tf.reduce_sum(tf.square(pair[0] - pair[1]))  # noqa: E731
        return tf.reduce_mean(tf.vectorized_map(of_row, (model(x), y)))

    return {"loss": model.update(loss)}


@step()
def scan_over_rows(model, x, y):
    def loss():
        smooth = tf.scan(lambda old, p: 0.5 * old + 0.5 * p, model(x), initializer=tf.zeros([1]))
        return mse(y, smooth)

    return {"loss": model.update(loss)}


@step()
def scan_over_features(model, x, y):
    def loss():
        state = tf.scan(lambda h, column: 0.5 * h + column, tf.transpose(x), initializer=tf.zeros_like(x[:, 0]))
        return mse(y, model(x + tf.transpose(state)))

    return {"loss": model.update(loss)}


@step()
def fold_over_losses(model, x, y):
    def loss():
        losses = tf.square(y - model(x))[:, 0]
        return tf.foldl(lambda total, each: total + each, losses, 0.0) / tf.cast(tf.shape(x)[0], tf.float32)

    return {"loss": model.update(loss)}


@step()
def loop_over_rows(model, x, y):
    def loss():
        losses = tf.square(y - model(x))[:, 0]
        total = tf.constant(0.0)
        for i in tf.range(tf.shape(losses)[0]):
            total += losses[i]
        return total / tf.cast(tf.shape(losses)[0], tf.float32)

    return {"loss": model.update(tf.function(loss))}


@step()
def loop_of_fixed_length(model, x, y):
    def loss():
        _, h = tf.while_loop(lambda i, _: i < 3, lambda i, h: (i + 1, h + 0.1 * tf.tanh(h)), (0, x))
        return mse(y, model(h))

    return {"loss": model.update(loss)}


@step()
def loop_until_the_error_is_small(model, x, y):
    def loss():
        p = model(x)
        _, scale = tf.while_loop(
            lambda i, s: tf.logical_and(i < 5, tf.reduce_mean(tf.square(y - s * p)) > 0.6),
            lambda i, s: (i + 1, s * 0.8),
            (0, tf.constant(1.0)),
        )
        return mse(y, scale * p)

    return {"loss": model.update(loss)}


@step()
def fixed_point_of_each_row(model, x, y):
    def loss():
        h = x
        for _ in range(3):
            h = tf.tanh(h) + 0.5 * x
        return mse(y, model(h))

    return {"loss": model.update(loss)}


@step()
def helper_in_a_function_of_tensorflow(model, x, y):
    @tf.function
    def penalized(y, p):
        return tf.reduce_mean(tf.square(y - p)) + 0.1 * tf.reduce_mean(tf.abs(p))

    return {"loss": model.update(lambda: penalized(y, model(x)))}


@step()
def ratio_in_a_function_of_tensorflow(model, x, y):
    @tf.function
    def ratio(y, p):
        return tf.reduce_sum(tf.abs(y - p)) / tf.reduce_sum(tf.abs(y))

    return {"loss": model.update(lambda: ratio(y, model(x)))}


@step()
def cond_on_the_step(model, x, y):
    even = tf.equal(model.optimizer.iterations % 2, 0)

    def loss():
        p = model(x)
        return tf.cond(even, lambda: mse(y, p), lambda: tf.reduce_mean(tf.abs(y - p)))

    return {"loss": model.update(loss)}


@step()
def cond_on_the_mean_target(model, x, y):
    positive = tf.reduce_mean(y) > 0.3
    return {"loss": model.update(lambda: mse(y, model(x)) * tf.where(positive, 2.0, 1.0))}


@step()
def cond_on_any_row(model, x, y):
    any_large = tf.reduce_any(tf.abs(y) > 1.0)
    return {"loss": model.update(lambda: tf.cond(any_large, lambda: 0.5 * mse(y, model(x)), lambda: mse(y, model(x))))}


@step()
def cond_on_an_empty_selection(model, x, y):
    kept = tf.where(y[:, 0] > 0.5)[:, 0]

    def loss():
        p = model(x)
        of_kept = lambda: mse(tf.gather(y, kept), tf.gather(p, kept))  # noqa: E731
        return tf.cond(tf.size(kept) > 0, of_kept, lambda: 0.0 * tf.reduce_sum(p))

    return {"loss": model.update(loss)}


@step()
def switch_case_by_the_step(model, x, y):
    which = tf.cast(model.optimizer.iterations % 3, tf.int32)

    def loss():
        p = model(x)
        return tf.switch_case(which, [lambda: mse(y, p), lambda: tf.reduce_mean(tf.abs(y - p)), lambda: 2 * mse(y, p)])

    return {"loss": model.update(loss)}


@step()
def assertion_on_the_loss(model, x, y):
    loss = model.update(lambda: mse(y, model(x)))
    tf.debugging.assert_all_finite(loss, "not finite")
    tf.debugging.assert_less(loss, 1e6)
    return {"loss": loss}


@step()
def numpy_function(model, x, y):
    weights = tf.numpy_function(lambda a: abs(a) + 0.5, [y], tf.float32)
    weights.set_shape([None, 1])
    return {"loss": model.update(lambda: tf.reduce_mean(weights * tf.square(y - model(x))))}


@step()
def py_function_over_the_batch(model, x, y):
    spread = tf.py_function(lambda a: a - tf.reduce_mean(a), [y], tf.float32)
    spread.set_shape([None, 1])
    return {"loss": model.update(lambda: mse(spread, model(x)))}


@step()
def einsum_and_reshapes(model, x, y):
    def loss():
        h = tf.reshape(x, [-1, 2, 3])
        h = tf.einsum("bij,bkj->bik", h, h)
        p = model(tf.concat([tf.reshape(h, [-1, 4]), x[:, :2]], 1))
        return mse(y, p)

    return {"loss": model.update(loss)}


@step()
def transposed_and_back(model, x, y):
    def loss():
        p = tf.transpose(tf.transpose(model(x)) * 2.0)
        return tf.reduce_mean(tf.reshape(tf.square(y - p), [-1]))

    return {"loss": model.update(loss)}


@step()
def unstacked_features(model, x, y):
    def loss():
        columns = tf.unstack(x, axis=1)
        return mse(y, model(tf.stack(columns[::-1], axis=1)))

    return {"loss": model.update(loss)}


@step()
def rows_repeated_and_averaged(model, x, y):
    def loss():
        p = model(tf.repeat(x, 2, axis=0) * tf.tile([[1.0], [0.9]], [tf.shape(x)[0], 1]))
        return mse(y, tf.reduce_mean(tf.reshape(p, [-1, 2]), 1, keepdims=True))

    return {"loss": model.update(loss)}


@step()
def two_views_concatenated(model, x, y):
    def loss():
        p = model(tf.concat([x, 0.9 * x], 0))
        a, b = tf.split(p, 2)
        return mse(y, a) + tf.reduce_mean(tf.square(a - b))

    return {"loss": model.update(loss)}


@step()
def two_views_interleaved(model, x, y):
    def loss():
        p = model(tf.reshape(tf.stack([x, 0.9 * x], 1), [-1, FEATURES]))
        p = tf.reshape(p, [-1, 2])
        return mse(y, p[:, :1]) + tf.reduce_mean(tf.square(p[:, 0] - p[:, 1]))

    return {"loss": model.update(loss)}


@step()
def batch_size_written_out(model, x, y):
    """The number of rows as a constant of the program: the sum over rows over BATCH."""
    return {"loss": model.update(lambda: tf.add_n([tf.reduce_sum(tf.square(y - model(x)))]) / float(BATCH))}


@step()
def number_of_rows_as_weight(model, x, y):
    n = tf.cast(tf.shape(x)[0], tf.float32)
    return {"loss": model.update(lambda: mse(y, model(x)) * n / BATCH)}


@step()
def root_of_the_number_of_rows(model, x, y):
    n = tf.cast(tf.shape(x)[0], tf.float32)
    return {"loss": model.update(lambda: mse(y, model(x)) / tf.sqrt(n))}


# ------------------------------------------------------------------------------- several terms and tasks


@step()
def sum_and_mean_added(model, x, y):
    return {"loss": model.update(lambda: mse(y, model(x)) + 0.01 * tf.reduce_sum(tf.abs(model(x))))}


@step()
def losses_of_the_model_added(model, x, y):
    return {"loss": model.update(lambda: mse(y, model(x)) + 0.01 * tf.add_n([tf.nn.l2_loss(v) for v in model.weights]))}


@step()
def anneal_by_the_step(model, x, y):
    weight = tf.minimum(1.0, tf.cast(model.optimizer.iterations, tf.float32) / 4.0)
    loss = model.update(lambda: mse(y, model(x)) + weight * tf.reduce_mean(tf.abs(model(x))))
    return {"loss": loss, "weight": weight}


@step()
def losses_weighted_by_their_own_size(model, x, y):
    def loss():
        a, b = mse(y, model(x)), tf.reduce_mean(tf.abs(model(x)))
        return a / tf.stop_gradient(a) + b / tf.stop_gradient(b)

    return {"loss": model.update(loss)}


@step(same, FEATURES)
def kullback_leibler_of_moments_of_the_batch(model, x, y):
    def loss():
        mean, variance = tf.nn.moments(model(x), [0])
        return mse(y, model(x)) + 0.1 * tf.reduce_mean(variance + tf.square(mean) - 1.0 - tf.math.log(variance + 0.1))

    return {"loss": model.update(loss)}


@program(rows)
def uncertainty_weights():
    class Uncertain(Own):
        def __init__(self):
            super().__init__(None, 2)
            self.log_variances = self.add_weight(shape=(2,), initializer="zeros", name="log_variances")

        def train_step(self, data):
            x, y = data

            def loss():
                p = self(x)
                losses = tf.stack([mse(y[:, 0], p[:, 0]), tf.reduce_mean(tf.abs(p[:, 1] - x[:, 0]))])
                return tf.reduce_sum(tf.exp(-self.log_variances.value) * losses + self.log_variances.value)

            return {"loss": self.update(loss)}

    return compiled(Uncertain())


@program(rows)
def loss_kept_as_an_attribute():
    """The loss is a method, and the step that of Keras' guide with `compute_loss`, metrics and `loss_tracker`."""

    class Guide(keras.Model):
        def __init__(self):
            super().__init__()
            self.net = dense()
            self.loss_tracker = keras.metrics.Mean(name="loss")
            self.mae = keras.metrics.MeanAbsoluteError(name="mae")

        def call(self, x):
            return self.net(x)

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = keras.ops.mean(keras.losses.mean_squared_error(y, y_pred))
            trainable_weights = self.trainable_weights
            self.optimizer.apply(tape.gradient(loss, trainable_weights), trainable_weights)
            self.loss_tracker.update_state(loss)
            self.mae.update_state(y, y_pred)
            return {"loss": self.loss_tracker.result(), "mae": self.mae.result()}

        @property
        def metrics(self):
            return [self.loss_tracker, self.mae]

    return compiled(Guide())


@program(rows)
def compiled_loss_in_a_step():
    class Guide(keras.Model):
        def __init__(self):
            super().__init__()
            self.net = dense()

        def call(self, x):
            return self.net(x)

        def train_step(self, data):
            x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = self.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight)
                loss = self.optimizer.scale_loss(loss)
            self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
            return self.compute_metrics(x, y, y_pred, sample_weight)

    return compiled(Guide(), "mse", metrics=["mae"])


@program(classes)
def distillation():
    class Distiller(keras.Model):
        def __init__(self):
            super().__init__()
            self.student, self.teacher = dense(CLASSES), dense(CLASSES)
            self.teacher.trainable = False

        def call(self, x):
            return self.student(x)

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            soft = ops.softmax(self.teacher(x, training=False) / 3.0)
            own = keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True)
            return ops.mean(own) + ops.mean(keras.losses.kl_divergence(soft, ops.softmax(y_pred / 3.0))) * 9.0

    return compiled(Distiller(), metrics=["accuracy"])


@program(classes)
def distillation_of_similarities():
    class Distiller(keras.Model):
        def __init__(self):
            super().__init__()
            self.student, self.teacher = dense(CLASSES), dense(CLASSES)
            self.teacher.trainable = False

        def call(self, x):
            return self.student(x)

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            t = self.teacher(x)
            similar = [tf.nn.l2_normalize(tf.matmul(h, h, transpose_b=True), 1) for h in (t, y_pred)]
            return tf.reduce_mean(tf.square(similar[0] - similar[1]))

    return compiled(Distiller())


@program(classes)
def pseudo_labels_above_a_confidence():
    """FixMatch: unlabelled rows count where the model is sure, over the number of those rows or of all."""

    def step(model, x, y):
        def loss():
            p = tf.stop_gradient(tf.nn.softmax(model(x)))
            sure = tf.cast(tf.reduce_max(p, 1) > 0.4, tf.float32)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.argmax(p, 1), model(0.8 * x))
            return tf.reduce_mean(sure * losses) + tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x))
            )

        return {"loss": model.update(loss)}

    return compiled(Own(step, CLASSES))


@program(classes)
def pseudo_labels_over_the_number_of_sure_rows():
    def step(model, x, y):
        def loss():
            p = tf.stop_gradient(tf.nn.softmax(model(x)))
            sure = tf.reduce_max(p, 1) > 0.4
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.argmax(p, 1), model(0.8 * x))
            kept = tf.boolean_mask(losses, sure)
            return tf.reduce_sum(kept) / (tf.cast(tf.size(kept), tf.float32) + 1.0)

        return {"loss": model.update(loss)}

    return compiled(Own(step, CLASSES))


@program(masks)
def segmentation_of_pixels():
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.convolution = layers.Conv2D(1, 3, padding="same", activation="sigmoid")

        def call(self, x):
            return self.convolution(x)

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            flat = [ops.reshape(each, (ops.shape(y)[0], -1)) for each in (y, y_pred)]
            both, either = ops.sum(flat[0] * flat[1], axis=1), ops.sum(flat[0] + flat[1], axis=1)
            return 1.0 - ops.mean((2.0 * both + 1.0) / (either + 1.0))

    return compiled(Net())


@program(masks)
def segmentation_of_objects_alone():
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.convolution = layers.Conv2D(1, 3, padding="same", activation="sigmoid")

        def call(self, x):
            return self.convolution(x)

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                losses = keras.losses.binary_crossentropy(y, self(x, training=True))
                loss = tf.reduce_mean(tf.boolean_mask(losses, y[..., 0] > 0.5))
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": loss}

    return compiled(Net())


@program(masks)
def flattened_pixels_of_all_images():
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.convolution = layers.Conv2D(1, 3, padding="same", activation="sigmoid")

        def call(self, x):
            return self.convolution(x)

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                p = self(x, training=True)
                loss = tf.reduce_mean(keras.losses.binary_crossentropy(tf.reshape(y, [-1, 1]), tf.reshape(p, [-1, 1])))
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": loss}

    return compiled(Net())


# ------------------------------------------------------------------------------- losses that layers add


class Adding(layers.Layer):
    """A layer that adds `loss_of(x)`."""

    def __init__(self, loss_of):
        super().__init__()
        self.loss_of = loss_of

    def call(self, x):
        self.add_loss(self.loss_of(x))
        return x


def added(fn):
    """Adds a program with a layer that adds a loss of activations."""

    def make():
        inputs = layers.Input((FEATURES,))
        hidden = Adding(fn)(layers.Dense(4, "tanh")(inputs))
        return compiled(keras.Model(inputs, layers.Dense(1)(hidden)), "mse")

    make.__name__, make.__module__ = f"added_{fn.__name__}", fn.__module__
    program(rows)(make)
    return fn


@added
def mean_of_activations(x):
    return 0.1 * ops.mean(ops.abs(x))


@added
def sum_of_activations(x):
    return 0.01 * tf.reduce_sum(tf.square(x))


@added
def sum_over_number_of_rows(x):
    return ops.sum(ops.square(x)) / ops.cast(ops.shape(x)[0], "float32")


@added
def loss_of_each_row(x):
    return 0.1 * tf.reduce_sum(tf.square(x), axis=1)


@added
def mean_of_gathered_rows(x):
    chosen = tf.gather(x, tf.where(x[:, 0] > 0.0)[:, 0])
    return tf.math.divide_no_nan(tf.reduce_sum(tf.abs(chosen)), tf.cast(tf.size(chosen), tf.float32))


@added
def sparsity_of_mean_activation(x):
    """The divergence of a sparse autoencoder: of the mean activation of each unit."""
    rho = ops.mean(0.5 + 0.4 * x, axis=0)
    return 0.1 * ops.sum(0.2 * ops.log(0.2 / rho) + 0.8 * ops.log(0.8 / (1 - rho)))


@added
def decorrelation(x):
    x -= tf.reduce_mean(x, 0)
    return tf.reduce_mean(tf.square(tf.matmul(x, x, transpose_a=True) / tf.cast(tf.shape(x)[0], tf.float32)))


@added
def balance_of_experts(x):
    """The loss of a mixture of experts: the fraction of rows for each expert times its mean probability."""
    p = tf.nn.softmax(x)
    fraction = tf.reduce_mean(tf.one_hot(tf.argmax(x, 1), 4), 0)
    return 4.0 * tf.reduce_sum(tf.stop_gradient(fraction) * tf.reduce_mean(p, 0))


@added
def variation_of_load(x):
    load = tf.reduce_sum(tf.nn.softmax(x), 0)
    return tf.math.reduce_variance(load) / tf.square(tf.reduce_mean(load))


@added
def router_z_loss(x):
    return 0.1 * ops.mean(ops.square(ops.logsumexp(x, axis=-1)))


@program(same)
def kullback_leibler_of_a_variational_autoencoder():
    inputs = layers.Input((FEATURES,))
    mean, log_variance = layers.Dense(2)(inputs), layers.Dense(2)(inputs)

    class Divergence(layers.Layer):
        def call(self, mean, log_variance):
            kl = -0.5 * ops.sum(1 + log_variance - ops.square(mean) - ops.exp(log_variance), axis=1)
            self.add_loss(0.1 * ops.mean(kl))
            return mean

    outputs = layers.Dense(FEATURES)(Divergence()(mean, log_variance))
    return compiled(keras.Model(inputs, outputs), "mse", sgd(0.02))


@program(same)
def variational_autoencoder_of_keras_example():
    """Sums over features and means over rows in a step with three trackers, without the noise."""

    class Vae(keras.Model):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = dense(4), dense(FEATURES, features=2)
            self.trackers = [keras.metrics.Mean(name=name) for name in ("total", "reconstruction", "kl")]

        @property
        def metrics(self):
            return self.trackers

        def call(self, x):
            return self.decoder(self.encoder(x)[:, :2])

        def train_step(self, data):
            x, _ = data
            with tf.GradientTape() as tape:
                mean, log_variance = tf.split(self.encoder(x), 2, axis=1)
                reconstruction = ops.mean(ops.sum(ops.square(x - self.decoder(mean)), axis=1))
                kl = -0.5 * (1 + log_variance - ops.square(mean) - ops.exp(log_variance))
                kl = ops.mean(ops.sum(kl, axis=1))
                total = reconstruction + kl
            self.optimizer.apply_gradients(
                zip(tape.gradient(total, self.trainable_weights), self.trainable_weights, strict=True)
            )
            for tracker, value in zip(self.trackers, (total, reconstruction, kl), strict=True):
                tracker.update_state(value)
            return {m.name: m.result() for m in self.metrics}

    return compiled(Vae(), optimizer=sgd(0.01))
