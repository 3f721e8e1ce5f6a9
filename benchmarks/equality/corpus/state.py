"""State that a step or a layer writes from the rows of the batch."""

import keras
import tensorflow as tf
from keras import layers, ops

from corpus import CLASSES, FEATURES, ROWS, classes, compiled, dense, program, rows, same, sgd


class WithCenters(keras.Model):
    """A classifier and a center of each class; `update` makes new centers of features and labels."""

    def __init__(self, update):
        super().__init__()
        self.net, self.head = dense(4), layers.Dense(CLASSES)
        self.centers = self.add_weight(shape=(CLASSES, 4), initializer="zeros", trainable=False, name="centers")
        self.update = update

    def call(self, x):
        return self.head(self.net(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            features = self.net(x)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, self.head(features)))
            loss += 0.1 * tf.reduce_mean(tf.square(features - tf.gather(self.centers, y)))
        self.optimizer.apply_gradients(
            zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables, strict=True)
        )
        self.centers.assign(self.update(self.centers.value, features, y))
        return {"loss": loss}


@program(classes)
def class_centers_by_segment_mean():
    def update(centers, features, y):
        means = tf.math.unsorted_segment_mean(features, y, CLASSES)
        return 0.9 * centers + 0.1 * means

    return compiled(WithCenters(update))


@program(classes)
def class_centers_of_seen_classes():
    def update(centers, features, y):
        one_hot = tf.one_hot(y, CLASSES)
        counts = tf.reduce_sum(one_hot, 0)[:, None]
        means = tf.matmul(one_hot, features, transpose_a=True) / tf.maximum(counts, 1.0)
        return tf.where(counts > 0, 0.9 * centers + 0.1 * means, centers)

    return compiled(WithCenters(update))


@program(classes)
def class_centers_by_scatter_add():
    def update(centers, features, y):
        return tf.tensor_scatter_nd_add(centers, y[:, None], 0.1 * (features - tf.gather(centers, y)))

    return compiled(WithCenters(update))


@program(classes)
def class_centers_by_scatter_update():
    def update(centers, features, y):
        return tf.tensor_scatter_nd_update(centers, y[:, None], features)

    return compiled(WithCenters(update))


@program(classes)
def class_centers_by_scatter_of_keras_ops():
    def update(centers, features, y):
        return centers + ops.scatter(ops.expand_dims(y, 1), 0.1 * features, (CLASSES, 4))

    return compiled(WithCenters(update))


@program(classes)
def class_centers_as_running_sums():
    def update(centers, features, y):
        return centers + tf.math.unsorted_segment_sum(features, y, CLASSES)

    return compiled(WithCenters(update))


@program(classes)
def class_centers_by_a_loop_over_classes():
    def update(centers, features, y):
        new = []
        for k in range(CLASSES):
            mine = tf.boolean_mask(features, tf.equal(y, k))
            mean = tf.math.divide_no_nan(tf.reduce_sum(mine, 0), tf.cast(tf.shape(mine)[0], tf.float32))
            new.append(0.8 * centers[k] + 0.2 * mean)
        return tf.stack(new)

    return compiled(WithCenters(update))


class Stateful(keras.layers.Layer):
    """A layer whose call writes its state: `write(layer, x)` returns the outputs."""

    def __init__(self, write, shapes=((),), dtype=None, initializer="zeros"):
        super().__init__()
        self.write = write
        self.states = [
            self.add_weight(shape=shape, initializer=initializer, trainable=False, dtype=dtype, name=f"state_{i}")
            for i, shape in enumerate(shapes)
        ]

    def call(self, x, training=False):
        return self.write(self, x) if training else x


def with_layer(write, *shapes, dtype=None, initializer="zeros"):
    """Returns a compiled model with a layer that writes state, before a dense layer."""
    layer = Stateful(write, shapes or ((),), dtype, initializer)
    return compiled(
        keras.Sequential([layers.Input((FEATURES,)), layers.Dense(4, "tanh"), layer, layers.Dense(1)]), "mse"
    )


@program(rows)
def moving_mean_of_rows():
    def write(layer, x):
        [state] = layer.states
        state.assign(0.9 * state + 0.1 * ops.mean(x, axis=0))
        return x - state

    return with_layer(write, (4,))


@program(rows)
def moving_mean_of_gathered_rows():
    def write(layer, x):
        [state] = layer.states
        large = tf.gather(x, tf.where(x[:, 0] > 0.0)[:, 0])
        mean = tf.math.divide_no_nan(tf.reduce_sum(large, 0), tf.cast(tf.shape(large)[0], tf.float32))
        state.assign(0.9 * state + 0.1 * mean)
        return x

    return with_layer(write, (4,))


@program(rows)
def moving_variance_of_rows():
    def write(layer, x):
        mean, variance = layer.states
        mean.assign(0.9 * mean + 0.1 * ops.mean(x, axis=0))
        variance.assign(0.9 * variance + 0.1 * ops.var(x, axis=0))
        return x

    return with_layer(write, (4,), (4,))


@program(rows)
def moving_mean_of_squares():
    def write(layer, x):
        mean, square = layer.states
        mean.assign(0.9 * mean + 0.1 * tf.reduce_mean(x, 0))
        square.assign(0.9 * square + 0.1 * tf.reduce_mean(tf.square(x), 0))
        return (x - mean) * tf.math.rsqrt(tf.maximum(square - tf.square(mean), 0.0) + 0.5)

    return with_layer(write, (4,), (4,))


@program(rows)
def moving_covariance():
    def write(layer, x):
        [state] = layer.states
        centered = x - tf.reduce_mean(x, 0)
        covariance = tf.matmul(centered, centered, transpose_a=True) / tf.cast(tf.shape(x)[0], x.dtype)
        state.assign(0.9 * state + 0.1 * covariance)
        return x

    return with_layer(write, (4, 4))


@program(rows)
def moving_second_moment_matrix():
    def write(layer, x):
        [state] = layer.states
        state.assign(0.9 * state + 0.1 * tf.matmul(x, x, transpose_a=True) / tf.cast(tf.shape(x)[0], x.dtype))
        return x

    return with_layer(write, (4, 4))


@program(rows)
def moving_gram_as_sum():
    def write(layer, x):
        [state] = layer.states
        state.assign_add(ops.matmul(ops.transpose(x), x))
        return x

    return with_layer(write, (4, 4))


@program(rows)
def moving_norm_of_the_batch():
    def write(layer, x):
        [state] = layer.states
        state.assign(0.9 * state + 0.1 * tf.norm(x))
        return x

    return with_layer(write)


@program(rows)
def moving_root_of_the_mean():
    def write(layer, x):
        [state] = layer.states
        state.assign(0.9 * state + 0.1 * tf.sqrt(tf.reduce_mean(tf.square(x))))
        return x / (state + 1.0)

    return with_layer(write)


@program(rows)
def running_maximum():
    def write(layer, x):
        [state] = layer.states
        state.assign(ops.maximum(state, ops.max(ops.abs(x))))
        return x / state

    return with_layer(write, initializer="ones")


@program(rows)
def moving_maximum():
    def write(layer, x):
        [state] = layer.states
        state.assign(0.9 * state + 0.1 * tf.reduce_max(tf.abs(x)))
        return x / state

    return with_layer(write, initializer="ones")


@program(rows)
def maximum_of_this_batch():
    def write(layer, x):
        [state] = layer.states
        state.assign(tf.reduce_max(tf.abs(x)))
        return x

    return with_layer(write)


@program(rows)
def range_of_fake_quantization():
    def write(layer, x):
        low, high = layer.states
        low.assign(tf.minimum(low, tf.reduce_min(x)))
        high.assign(tf.maximum(high, tf.reduce_max(x)))
        return tf.quantization.fake_quant_with_min_max_vars(x, low.value, high.value + 0.1)

    return with_layer(write, (), ())


@program(rows)
def actnorm():
    def write(layer, x):
        scale, shift, seen = layer.states
        first = tf.equal(seen.value, 0.0)
        mean, variance = tf.nn.moments(x, [0])
        shift.assign(tf.where(first, -mean, shift.value))
        scale.assign(tf.where(first, tf.math.rsqrt(variance + 1e-2), scale.value))
        seen.assign(1.0)
        return (x + shift) * scale

    return with_layer(write, (4,), (4,), ())


@program(rows)
def actnorm_by_cond():
    def write(layer, x):
        scale, seen = layer.states

        def first():
            scale.assign(1.0 / (tf.math.reduce_std(x, 0) + 0.1))
            seen.assign(1.0)

        tf.cond(seen.value < 0.5, first, lambda: None)
        return x * scale

    return with_layer(write, (4,), ())


@program(rows)
def bias_from_the_first_batch():
    def write(layer, x):
        shift, seen = layer.states
        shift.assign(tf.where(seen.value < 0.5, tf.reduce_mean(x, 0), shift.value))
        seen.assign_add(1.0)
        return x - shift

    return with_layer(write, (4,), ())


@program(rows)
def counter_of_steps():
    def write(layer, x):
        [state] = layer.states
        state.assign_add(1)
        return x * (1.0 + 0.1 * ops.cast(state, "float32"))

    return with_layer(write, dtype="int32")


@program(rows)
def counter_of_rows():
    def write(layer, x):
        [state] = layer.states
        state.assign_add(tf.shape(x)[0])
        return x

    return with_layer(write, dtype="int32")


@program(rows)
def counter_of_rows_in_float():
    def write(layer, x):
        [state] = layer.states
        state.assign_add(ops.cast(ops.shape(x)[0], "float32"))
        return x

    return with_layer(write)


@program(rows)
def counter_of_kept_rows():
    def write(layer, x):
        [state] = layer.states
        state.assign_add(tf.math.count_nonzero(x[:, 0] > 0, dtype=tf.int32))
        return x

    return with_layer(write, dtype="int32")


@program(rows)
def sum_of_rows_in_a_state():
    def write(layer, x):
        [state] = layer.states
        state.assign_add(tf.reduce_sum(x, 0))
        return x

    return with_layer(write, (4,))


@program(rows)
def sum_of_rows_in_a_state_of_sums():
    class Summed(layers.Layer):
        def __init__(self):
            super().__init__()
            self.total = self.add_weight(shape=(4,), initializer="zeros", trainable=False, aggregation="sum")

        def call(self, x):
            self.total.assign_add(ops.sum(x, axis=0))
            return x

    return compiled(keras.Sequential([layers.Input((FEATURES,)), layers.Dense(4), Summed(), layers.Dense(1)]), "mse")


@program(rows)
def mean_as_total_over_count():
    def write(layer, x):
        total, count = layer.states
        total.assign_add(ops.sum(x, axis=0))
        count.assign_add(ops.cast(ops.shape(x)[0], "float32"))
        return x - total / count

    return with_layer(write, (4,), ())


@program(rows)
def welford():
    def write(layer, x):
        count, mean, spread = layer.states
        rows_here = tf.cast(tf.shape(x)[0], tf.float32)
        total = count + rows_here
        delta = tf.reduce_mean(x, 0) - mean
        spread.assign_add(tf.reduce_sum(tf.square(x - tf.reduce_mean(x, 0)), 0))
        spread.assign_add(tf.square(delta) * count * rows_here / total)
        mean.assign_add(delta * rows_here / total)
        count.assign(total)
        return (x - mean) / tf.sqrt(spread / count + 0.5)

    return with_layer(write, (), (4,), (4,))


@program(rows)
def welford_row_by_row():
    def write(layer, x):
        count, mean = layer.states

        def one(i, n, m):
            n += 1.0
            return i + 1, n, m + (x[i] - m) / n

        _, n, m = tf.while_loop(lambda i, *_: i < tf.shape(x)[0], one, (0, count.value, mean.value))
        count.assign(n)
        mean.assign(m)
        return x - m

    return with_layer(write, (), (4,))


@program(rows)
def last_row():
    def write(layer, x):
        [state] = layer.states
        state.assign(x[-1])
        return x

    return with_layer(write, (4,))


@program(rows)
def queue_of_rows():
    def write(layer, x):
        [state] = layer.states
        state.assign(tf.concat([x, state.value], 0)[:5])
        return x + 0.1 * tf.reduce_mean(state.value, 0)

    return with_layer(write, (5, 4))


@program(rows)
def batch_renormalization():
    def write(layer, x):
        mean, deviation = layer.states
        own_mean, own_variance = tf.nn.moments(x, [0])
        own_deviation = tf.sqrt(own_variance + 1e-2)
        r = tf.stop_gradient(tf.clip_by_value(own_deviation / deviation, 0.5, 2.0))
        d = tf.stop_gradient(tf.clip_by_value((own_mean - mean) / deviation, -1.0, 1.0))
        mean.assign(0.9 * mean + 0.1 * own_mean)
        deviation.assign(0.9 * deviation + 0.1 * own_deviation)
        return (x - own_mean) / own_deviation * r + d

    return with_layer(write, (4,), (4,), initializer="ones")


@program(rows)
def batch_normalization_by_hand():
    def write(layer, x):
        mean, variance = layer.states
        batch_mean, batch_variance = ops.moments(x, axes=[0])
        mean.assign(mean * 0.9 + batch_mean * 0.1)
        variance.assign(variance * 0.9 + batch_variance * 0.1)
        return (x - batch_mean) / ops.sqrt(batch_variance + 1e-2)

    return with_layer(write, (4,), (4,))


@program(rows)
def whitening():
    def write(layer, x):
        [state] = layer.states
        centered = x - tf.reduce_mean(x, 0)
        covariance = tf.matmul(centered, centered, transpose_a=True) / tf.cast(tf.shape(x)[0], tf.float32)
        factor = tf.linalg.cholesky(covariance + tf.eye(4))
        state.assign(0.9 * state + 0.1 * factor)
        return tf.transpose(tf.linalg.triangular_solve(factor, tf.transpose(centered)))

    return with_layer(write, (4, 4))


@program(rows)
def spectral_normalization_of_keras():
    model = keras.Sequential(
        [layers.Input((FEATURES,)), layers.SpectralNormalization(layers.Dense(4, "tanh"), 2), layers.Dense(1)]
    )
    return compiled(model, "mse")


@program(rows)
def spectral_normalization_by_hand():
    class Spectral(layers.Layer):
        def build(self, shape):
            self.w = self.add_weight(shape=(shape[-1], 4), name="w")
            self.u = self.add_weight(shape=(1, 4), initializer="ones", trainable=False, name="u")

        def call(self, x, training=False):
            v = tf.math.l2_normalize(tf.matmul(self.u.value, self.w.value, transpose_b=True))
            u = tf.math.l2_normalize(tf.matmul(v, self.w.value))
            if training:
                self.u.assign(tf.stop_gradient(u))
            sigma = tf.matmul(tf.matmul(v, self.w.value), u, transpose_b=True)
            return tf.matmul(x, self.w.value / sigma)

    return compiled(keras.Sequential([layers.Input((FEATURES,)), Spectral(), layers.Dense(1)]), "mse")


class Quantizer(layers.Layer):
    """A codebook of five codes, after Keras' example; `update` moves codes by the rows that chose them."""

    def __init__(self, update=None):
        super().__init__()
        self.update = update
        self.codes = self.add_weight(
            shape=(5, 3), initializer=keras.initializers.RandomNormal(seed=3), trainable=update is None, name="codes"
        )
        self.counts = self.add_weight(shape=(5,), initializer="ones", trainable=False, name="counts")
        self.sums = self.add_weight(shape=(5, 3), initializer="zeros", trainable=False, name="sums")

    def call(self, x, training=False):
        codes = tf.convert_to_tensor(self.codes)
        distances = tf.reduce_sum(tf.square(x[:, None] - codes[None]), -1)
        chosen = tf.one_hot(tf.argmin(distances, 1), 5)
        quantized = tf.matmul(chosen, codes)
        self.add_loss(0.25 * tf.reduce_mean(tf.square(tf.stop_gradient(quantized) - x)))
        if self.update is None:
            self.add_loss(tf.reduce_mean(tf.square(quantized - tf.stop_gradient(x))))
        elif training:
            self.update(self, x, chosen)
        return x + tf.stop_gradient(quantized - x)


def autoencoder(quantizer):
    return compiled(
        keras.Sequential([layers.Input((FEATURES,)), layers.Dense(3, "tanh"), quantizer, layers.Dense(FEATURES)]), "mse"
    )


@program(same)
def vq_vae():
    return autoencoder(Quantizer())


@program(same)
def vq_vae_codebook_of_moving_sums():
    def update(layer, x, chosen):
        layer.counts.assign(0.9 * layer.counts + 0.1 * tf.reduce_sum(chosen, 0))
        layer.sums.assign(0.9 * layer.sums + 0.1 * tf.matmul(chosen, x, transpose_a=True))
        layer.codes.assign(layer.sums / (layer.counts[:, None] + 0.1))

    return autoencoder(Quantizer(update))


@program(same)
def vq_vae_codebook_of_moving_means():
    def update(layer, x, chosen):
        layer.counts.assign(0.9 * layer.counts + 0.1 * ops.mean(chosen, axis=0))
        rows_here = ops.cast(ops.shape(x)[0], "float32")
        layer.sums.assign(0.9 * layer.sums + 0.1 * ops.matmul(ops.transpose(chosen), x) / rows_here)
        layer.codes.assign(layer.sums / (ops.expand_dims(layer.counts, 1) + 0.1))

    return autoencoder(Quantizer(update))


@program(same)
def vq_vae_counts_of_uses():
    def update(layer, x, chosen):
        layer.counts.assign_add(tf.reduce_sum(chosen, 0))

    return autoencoder(Quantizer(update))


@program(same)
def k_means_in_a_layer():
    def update(layer, x, chosen):
        counts = tf.reduce_sum(chosen, 0)[:, None]
        means = tf.math.divide_no_nan(tf.matmul(chosen, x, transpose_a=True), counts)
        layer.codes.assign(tf.where(counts > 0, means, layer.codes.value))

    return autoencoder(Quantizer(update))


class Steps(keras.Model):
    """A model whose step calls `after(model, x, y, predictions, loss)`, which returns logs, once it has trained."""

    def __init__(self, after, shapes=((),), dtype=None, initializer="zeros"):
        super().__init__()
        self.net, self.after = dense(), after
        self.states = [
            self.add_weight(shape=shape, initializer=initializer, trainable=False, dtype=dtype, name=f"state_{i}")
            for i, shape in enumerate(shapes)
        ]

    def call(self, x):
        return self.net(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            p = self(x, training=True)
            loss = tf.reduce_mean(tf.square(y - p))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss, **(self.after(self, x, y, p, loss) or {})}


@program(rows)
def moving_mean_of_the_loss():
    def after(model, x, y, p, loss):
        [state] = model.states
        state.assign(0.9 * state + 0.1 * loss)
        return {"smooth": state}

    return compiled(Steps(after))


@program(rows)
def best_loss_so_far():
    def after(model, x, y, p, loss):
        [best] = model.states
        best.assign(tf.minimum(best.value, loss))
        return {"best": best}

    return compiled(Steps(after, initializer="ones"))


@program(rows)
def patience_that_counts_bad_steps():
    def after(model, x, y, p, loss):
        best, bad = model.states
        better = loss < best.value
        bad.assign(tf.where(better, 0.0, bad.value + 1.0))
        best.assign(tf.minimum(best.value, loss))

    return compiled(Steps(after, ((), ()), initializer="ones"))


@program(rows)
def flag_to_stop_early():
    def after(model, x, y, p, loss):
        [stop] = model.states
        stop.assign(tf.logical_or(stop.value, loss < 0.5))

    return compiled(Steps(after, dtype="bool"))


@program(rows)
def rate_from_the_loss():
    def after(model, x, y, p, loss):
        rate = model.optimizer.learning_rate
        rate.assign(tf.where(loss > 0.8, rate * 0.5, rate.value))
        return {"rate": rate}

    return compiled(Steps(after))


@program(rows)
def rate_in_proportion_to_the_loss():
    def after(model, x, y, p, loss):
        model.optimizer.learning_rate.assign(0.05 * tf.sqrt(loss))

    return compiled(Steps(after))


@program(rows)
def rate_that_plateaus_in_the_graph():
    def after(model, x, y, p, loss):
        best, wait = model.states
        wait.assign(tf.where(loss < best.value, 0.0, wait.value + 1.0))
        best.assign(tf.minimum(best.value, loss))
        rate = model.optimizer.learning_rate
        rate.assign(tf.where(wait.value >= 2.0, rate.value * 0.1, rate.value))

    return compiled(Steps(after, ((), ()), initializer="ones"))


@program(rows)
def rate_from_a_counter_of_steps():
    def after(model, x, y, p, loss):
        [step] = model.states
        step.assign_add(1.0)
        model.optimizer.learning_rate.assign(0.05 / tf.sqrt(step.value))

    return compiled(Steps(after))


@program(rows)
def confusion_matrix_in_a_state():
    def after(model, x, y, p, loss):
        [state] = model.states
        truth, said = tf.cast(y[:, 0] > 0, tf.int32), tf.cast(p[:, 0] > 0, tf.int32)
        state.assign_add(tf.math.confusion_matrix(truth, said, 2, dtype=tf.float32))

    return compiled(Steps(after, ((2, 2),)))


@program(rows)
def confusion_matrix_of_integers():
    def after(model, x, y, p, loss):
        [state] = model.states
        truth, said = tf.cast(y[:, 0] > 0, tf.int32), tf.cast(p[:, 0] > 0, tf.int32)
        state.assign_add(tf.math.confusion_matrix(truth, said, 2, dtype=tf.int32))

    return compiled(Steps(after, ((2, 2),), "int32"))


@program(rows)
def histogram_in_a_state():
    def after(model, x, y, p, loss):
        [state] = model.states
        state.assign_add(tf.cast(tf.histogram_fixed_width(y - p, [-2.0, 2.0], 4), tf.float32))

    return compiled(Steps(after, ((4,),)))


@program(rows)
def bincount_in_an_integer_state():
    def after(model, x, y, p, loss):
        [state] = model.states
        bins = tf.cast(tf.clip_by_value(tf.abs(y[:, 0]) * 2, 0, 3), tf.int32)
        state.assign(state.value + tf.math.bincount(bins, minlength=4, maxlength=4))

    return compiled(Steps(after, ((4,),), "int32"))


@program(rows)
def scatter_on_a_variable_of_tensorflow():
    class Own(Steps):
        def __init__(self):
            super().__init__(self.write)
            self.seen = tf.Variable(tf.zeros([4]), trainable=False)

        def write(self, model, x, y, p, loss):
            bins = tf.cast(tf.clip_by_value(tf.abs(y[:, 0]) * 2, 0, 3), tf.int32)
            self.seen.assign(tf.tensor_scatter_nd_add(self.seen, bins[:, None], tf.abs(y - p)[:, 0]))

    return compiled(Own())


@program(rows)
def error_of_each_bin_by_scatter():
    def after(model, x, y, p, loss):
        [state] = model.states
        bins = tf.cast(tf.clip_by_value(tf.abs(y) * 2, 0, 3), tf.int32)
        state.assign(tf.tensor_scatter_nd_add(state.value, bins, tf.square(y - p)[:, 0]))

    return compiled(Steps(after, ((4,),)))


@program(rows)
def priorities_by_index_of_row():
    """Priorities of a replay buffer: the error of each row at its place, which targets hold."""

    def after(model, x, y, p, loss):
        [state] = model.states
        place = tf.cast(tf.abs(y) * 1000, tf.int32) % ROWS
        state.assign(tf.tensor_scatter_nd_max(state.value, place, tf.abs(y - p)[:, 0]))

    return compiled(Steps(after, ((ROWS,),)))


@program(rows)
def normalizer_of_targets():
    """PopArt without its correction of weights: moving moments of targets that scale the loss."""

    class Own(Steps):
        def train_step(self, data):
            x, y = data
            mean, square = self.states
            mean.assign(0.9 * mean + 0.1 * tf.reduce_mean(y))
            square.assign(0.9 * square + 0.1 * tf.reduce_mean(tf.square(y)))
            deviation = tf.sqrt(tf.maximum(square.value - tf.square(mean.value), 0.0) + 0.1)
            return super().train_step((x, (y - mean.value) / deviation))

    return compiled(Own(lambda *_: {}, ((), ())))


@program(rows)
def accuracy_under_a_threshold_that_adapts():
    def after(model, x, y, p, loss):
        [threshold] = model.states
        good = tf.reduce_mean(tf.cast(tf.abs(y - p) < threshold.value, tf.float32))
        threshold.assign_add(0.1 * (0.5 - good))
        return {"good": good}

    return compiled(Steps(after, initializer="ones"))


@program(rows)
def lagrange_multiplier():
    class Own(Steps):
        def train_step(self, data):
            x, y = data
            [multiplier] = self.states
            with tf.GradientTape() as tape:
                p = self(x, training=True)
                excess = tf.reduce_mean(p) - 0.1
                loss = tf.reduce_mean(tf.square(y - p)) + multiplier * excess
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            multiplier.assign(tf.maximum(multiplier.value + 0.5 * excess, 0.0))
            return {"loss": loss, "multiplier": multiplier}

    return compiled(Own(None))


@program(rows)
def loss_weights_of_gradnorm():
    """Two losses, weighted by how far each has come since the first step."""

    class Own(Steps):
        def train_step(self, data):
            x, y = data
            first, weights = self.states
            with tf.GradientTape() as tape:
                p = self(x, training=True)
                losses = tf.stack([tf.reduce_mean(tf.square(y - p)), tf.reduce_mean(tf.abs(y - p))])
                loss = tf.reduce_sum(losses * weights.value)
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            first.assign(tf.where(first.value < 0, losses, first.value))
            weights.assign(2 * tf.nn.softmax(losses / first.value))
            return {"loss": loss}

    model = Own(None, ((2,), (2,)), initializer=keras.initializers.Constant(-1.0))
    model.states[1].assign([1.0, 1.0])
    return compiled(model, optimizer=sgd(0.03))
