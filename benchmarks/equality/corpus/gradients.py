"""What steps do with gradients between tape and optimizer, and with tapes themselves."""

import keras
import tensorflow as tf
from keras import layers, ops

from corpus import FEATURES, compiled, dense, program, rows, sgd


class Between(keras.Model):
    """A model whose step hands gradients through `between(model, gradients)` on their way to the optimizer."""

    def __init__(self, between, net=None):
        super().__init__()
        self.net, self.between = net or dense(), between

    def call(self, x):
        return self.net(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        gradients = self.between(self, gradients)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


def between(fn):
    """Adds a program that does something with gradients."""
    program(rows)(_named(fn, lambda: compiled(Between(fn), "mse")))
    return fn


def _named(fn, make):
    make.__name__, make.__module__ = fn.__name__, fn.__module__
    return make


@between
def unchanged(model, gradients):
    return gradients


@between
def halved(model, gradients):
    return [0.5 * g for g in gradients]


@between
def with_decay(model, gradients):
    return [g + 0.01 * v for g, v in zip(gradients, model.trainable_variables, strict=True)]


@between
def clipped_by_global_norm(model, gradients):
    return tf.clip_by_global_norm(gradients, 0.5)[0]


@between
def clipped_by_norm(model, gradients):
    return [tf.clip_by_norm(g, 0.3) for g in gradients]


@between
def clipped_by_value(model, gradients):
    return [tf.clip_by_value(g, -0.1, 0.1) for g in gradients]


@between
def clipped_by_value_with_keras_ops(model, gradients):
    return [ops.clip(g, -0.2, 0.2) for g in gradients]


@between
def clipped_by_a_norm_written_out(model, gradients):
    norm = tf.sqrt(sum(tf.reduce_sum(tf.square(g)) for g in gradients))
    scale = tf.cond(norm > 0.5, lambda: 0.5 / norm, lambda: 1.0)
    return [g * scale for g in gradients]


@between
def clipped_adaptively(model, gradients):
    """As NFNets do: by the ratio of the norms of gradients and weights."""
    clipped = []
    for g, v in zip(gradients, model.trainable_variables, strict=True):
        limit = 0.05 * tf.maximum(tf.norm(v), 1e-1)
        clipped.append(tf.where(tf.norm(g) > limit, g * limit / tf.norm(g), g))
    return clipped


@between
def normalized(model, gradients):
    norm = tf.linalg.global_norm(gradients)
    return [g / (norm + 1e-6) for g in gradients]


@between
def normalized_each(model, gradients):
    return [tf.math.l2_normalize(g) for g in gradients]


@between
def signs(model, gradients):
    return [0.1 * tf.sign(g) for g in gradients]


@between
def centralized(model, gradients):
    return [g - tf.reduce_mean(g, axis=0, keepdims=True) if len(g.shape) > 1 else g for g in gradients]


@between
def largest_entries_alone(model, gradients):
    kept = []
    for g in gradients:
        limit = tf.reduce_max(tf.abs(g)) * 0.3
        kept.append(tf.where(tf.abs(g) >= limit, g, 0.0))
    return kept


@between
def not_finite_ones_left_out(model, gradients):
    return [tf.where(tf.math.is_finite(g), g, tf.zeros_like(g)) for g in gradients]


@between
def skipped_unless_finite(model, gradients):
    finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(g)) for g in gradients])
    return [tf.where(finite, g, 0.0) for g in gradients]


@between
def skipped_where_the_norm_is_large(model, gradients):
    norm = tf.linalg.global_norm(gradients)
    return [tf.where(norm < 1.2, g, tf.zeros_like(g)) for g in gradients]


@between
def to_half_precision_and_back(model, gradients):
    return [tf.cast(tf.cast(g, tf.bfloat16), tf.float32) for g in gradients]


@between
def trust_ratio(model, gradients):
    scaled = []
    for g, v in zip(gradients, model.trainable_variables, strict=True):
        ratio = (tf.norm(v) + 0.1) / (tf.norm(g) + 0.1)
        scaled.append(g * tf.minimum(ratio, 2.0))
    return scaled


@between
def orthogonal_to_weights(model, gradients):
    projected = []
    for g, v in zip(gradients, model.trainable_variables, strict=True):
        along = tf.reduce_sum(g * v) / (tf.reduce_sum(v * v) + 1e-3)
        projected.append(g - along * v)
    return projected


@between
def masked_by_weights(model, gradients):
    """Pruned weights stay where they are."""
    return [g * tf.cast(tf.abs(v) > 0.1, g.dtype) for g, v in zip(gradients, model.trainable_variables, strict=True)]


class Two(keras.Model):
    """A model of two losses, whose gradients `merge(first, second)` makes into one."""

    def __init__(self, merge):
        super().__init__()
        self.body = layers.Dense(4, "tanh")
        self.first, self.second = layers.Dense(1), layers.Dense(1)
        self.merge = merge

    def build(self, shape):
        self.body.build(shape)
        for head in (self.first, self.second):
            head.build((None, 4))

    def call(self, x):
        h = self.body(x)
        return self.first(h), self.second(h)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            a, b = self(x, training=True)
            losses = tf.reduce_mean(tf.square(a - y)), tf.reduce_mean(tf.abs(b - x[:, :1]))
        shared = self.body.trainable_variables
        gradients = [tape.gradient(loss, shared) for loss in losses]
        merged = [self.merge(*pair) for pair in zip(*gradients, strict=True)]
        heads = [*self.first.trainable_variables, *self.second.trainable_variables]
        of_heads = tape.gradient(losses[0] + losses[1], heads)
        del tape
        self.optimizer.apply_gradients(zip(merged + of_heads, shared + heads, strict=True))
        return {"a": losses[0], "b": losses[1]}


@program(rows)
def two_losses_added():
    return compiled(Two(lambda a, b: a + b))


@program(rows)
def pcgrad():
    def merge(a, b):
        dot = tf.reduce_sum(a * b)
        project = lambda g, other: g - tf.minimum(dot, 0.0) / (tf.reduce_sum(other * other) + 1e-6) * other  # noqa: E731
        return project(a, b) + project(b, a)

    return compiled(Two(merge))


@program(rows)
def multiple_gradient_descent():
    def merge(a, b):
        weight = tf.reduce_sum((b - a) * b) / (tf.reduce_sum(tf.square(a - b)) + 1e-6)
        weight = tf.clip_by_value(weight, 0.0, 1.0)
        return weight * a + (1 - weight) * b

    return compiled(Two(merge))


@program(rows)
def gradients_weighted_by_cosine():
    def merge(a, b):
        cosine = tf.reduce_sum(a * b) / (tf.norm(a) * tf.norm(b) + 1e-3)
        return a + b * tf.nn.relu(cosine)

    return compiled(Two(merge))


@program(rows)
def gradients_of_equal_signs():
    return compiled(Two(lambda a, b: tf.where(a * b > 0, a + b, 0.0)))


# ----------------------------------------------------------------------------- optimizers by hand


class ByHand(keras.Model):
    """A model with a slot for each weight, whose step is `step(model, x, y)`, which returns logs."""

    def __init__(self, step, slots=1):
        super().__init__()
        self.net, self.step = dense(), step
        self.slots = [
            [
                self.add_weight(shape=v.shape, initializer="zeros", trainable=False, name=f"slot_{i}_{k}")
                for i, v in enumerate(self.net.trainable_variables)
            ]
            for k in range(slots)
        ]
        self.count = self.add_weight(shape=(), initializer="zeros", dtype="int32", trainable=False, name="count")

    def call(self, x):
        return self.net(x)

    def train_step(self, data):
        return self.step(self, *data)

    def gradients(self, x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(y - self(x, training=True)))
        return loss, tape.gradient(loss, self.net.trainable_variables)


def by_hand(slots=1):
    def add(fn):
        program(rows)(_named(fn, lambda: compiled(ByHand(fn, slots))))
        return fn

    return add


@by_hand()
def descent_by_assign_sub(model, x, y):
    loss, gradients = model.gradients(x, y)
    for v, g in zip(model.net.trainable_variables, gradients, strict=True):
        v.assign_sub(0.05 * g)
    return {"loss": loss}


@by_hand()
def momentum_by_hand(model, x, y):
    loss, gradients = model.gradients(x, y)
    for v, m, g in zip(model.net.trainable_variables, model.slots[0], gradients, strict=True):
        m.assign(0.9 * m - 0.03 * g)
        v.assign_add(m)
    return {"loss": loss}


@by_hand(2)
def adam_by_hand(model, x, y):
    loss, gradients = model.gradients(x, y)
    for v, m, s, g in zip(model.net.trainable_variables, *model.slots, gradients, strict=True):
        m.assign(0.9 * m + 0.1 * g)
        s.assign(0.9 * s + 0.1 * tf.square(g))
        v.assign_sub(0.03 * m / (tf.sqrt(s) + 0.1))
    return {"loss": loss}


@by_hand()
def accumulated_by_hand(model, x, y):
    """Gradients of three steps, of which the last of the epoch has fewer rows."""
    loss, gradients = model.gradients(x, y)
    for slot, g in zip(model.slots[0], gradients, strict=True):
        slot.assign_add(g / 3.0)
    model.count.assign_add(1)

    def apply():
        model.optimizer.apply_gradients(zip(model.slots[0], model.net.trainable_variables, strict=True))
        for slot in model.slots[0]:
            slot.assign(tf.zeros_like(slot))

    tf.cond(tf.equal(model.count % 3, 0), apply, lambda: None)
    return {"loss": loss}


@by_hand()
def accumulated_by_hand_without_cond(model, x, y):
    loss, gradients = model.gradients(x, y)
    model.count.assign_add(1)
    ready = tf.cast(tf.equal(model.count.value % 2, 0), tf.float32)
    for slot, v, g in zip(model.slots[0], model.net.trainable_variables, gradients, strict=True):
        total = slot + g
        v.assign_sub(0.05 * ready * total)
        slot.assign((1.0 - ready) * total)
    return {"loss": loss}


@by_hand()
def moving_average_of_weights(model, x, y):
    loss, gradients = model.gradients(x, y)
    model.optimizer.apply_gradients(zip(gradients, model.net.trainable_variables, strict=True))
    for slot, v in zip(model.slots[0], model.net.trainable_variables, strict=True):
        slot.assign(0.8 * slot + 0.2 * v)
    return {"loss": loss}


@by_hand()
def lookahead(model, x, y):
    loss, gradients = model.gradients(x, y)
    model.optimizer.apply_gradients(zip(gradients, model.net.trainable_variables, strict=True))
    model.count.assign_add(1)
    every = tf.equal(model.count.value % 2, 0)
    for slow, v in zip(model.slots[0], model.net.trainable_variables, strict=True):
        new = tf.where(every, slow + 0.5 * (v - slow), slow.value)
        slow.assign(new)
        v.assign(tf.where(every, new, v.value))
    return {"loss": loss}


@by_hand()
def sharpness_aware(model, x, y):
    loss, gradients = model.gradients(x, y)
    scale = 0.05 / (tf.linalg.global_norm(gradients) + 1e-6)
    moves = [g * scale for g in gradients]
    for v, move in zip(model.net.trainable_variables, moves, strict=True):
        v.assign_add(move)
    _, gradients = model.gradients(x, y)
    for v, move in zip(model.net.trainable_variables, moves, strict=True):
        v.assign_sub(move)
    model.optimizer.apply_gradients(zip(gradients, model.net.trainable_variables, strict=True))
    return {"loss": loss}


@by_hand()
def extragradient(model, x, y):
    """Moves along the gradient, and applies the gradient of where it comes to."""
    loss, gradients = model.gradients(x, y)
    for v, g in zip(model.net.trainable_variables, gradients, strict=True):
        v.assign_sub(0.05 * g)
    _, ahead = model.gradients(x, y)
    for v, g, a in zip(model.net.trainable_variables, gradients, ahead, strict=True):
        v.assign_add(0.05 * g - 0.05 * a)
    return {"loss": loss}


@by_hand()
def line_search(model, x, y):
    loss, gradients = model.gradients(x, y)
    before = [tf.identity(v.value) for v in model.net.trainable_variables]
    rate = tf.constant(0.4)
    for _ in range(2):
        for v, b, g in zip(model.net.trainable_variables, before, gradients, strict=True):
            v.assign(b - rate * g)
        now = tf.reduce_mean(tf.square(y - model(x)))
        rate = tf.where(now < loss - 0.5 * rate * tf.square(tf.linalg.global_norm(gradients)), rate, rate * 0.5)
    for v, b, g in zip(model.net.trainable_variables, before, gradients, strict=True):
        v.assign(b - rate * g)
    return {"loss": loss, "rate": rate}


@by_hand()
def scaled_loss_by_hand(model, x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(y - model(x, training=True)))
        scaled = loss * 64.0
    gradients = [g / 64.0 for g in tape.gradient(scaled, model.net.trainable_variables)]
    model.optimizer.apply_gradients(zip(gradients, model.net.trainable_variables, strict=True))
    return {"loss": loss}


@by_hand()
def dynamic_loss_scale_by_hand(model, x, y):
    model.count.assign_add(1)
    scale = tf.pow(2.0, tf.cast(model.count, tf.float32))
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(y - model(x, training=True)))
        scaled = loss * scale
    gradients = [g / scale for g in tape.gradient(scaled, model.net.trainable_variables)]
    finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(g)) for g in gradients])

    def apply():
        model.optimizer.apply_gradients(zip(gradients, model.net.trainable_variables, strict=True))

    tf.cond(finite, apply, lambda: None)
    return {"loss": loss}


@by_hand()
def norm_of_gradients_logged(model, x, y):
    loss, gradients = model.gradients(x, y)
    model.optimizer.apply_gradients(zip(gradients, model.net.trainable_variables, strict=True))
    return {"loss": loss, "norm": tf.linalg.global_norm(gradients)}


@by_hand()
def gradients_logged(model, x, y):
    loss, gradients = model.gradients(x, y)
    model.optimizer.apply_gradients(zip(gradients, model.net.trainable_variables, strict=True))
    return {"loss": loss, "mean gradient": tf.reduce_mean(gradients[0]), "largest": tf.reduce_max(tf.abs(gradients[0]))}


@by_hand()
def norm_of_gradients_in_a_metric_of_norms_of_weights(model, x, y):
    loss, gradients = model.gradients(x, y)
    model.optimizer.apply_gradients(zip(gradients, model.net.trainable_variables, strict=True))
    return {"loss": loss, "norm": tf.linalg.global_norm([v.value for v in model.net.trainable_variables])}


@by_hand()
def variance_of_gradients(model, x, y):
    """The second moment of gradients, of which those of each row are not known."""
    loss, gradients = model.gradients(x, y)
    for slot, g in zip(model.slots[0], gradients, strict=True):
        slot.assign_add(tf.square(g))
    model.optimizer.apply_gradients(zip(gradients, model.net.trainable_variables, strict=True))
    return {"loss": loss}


@by_hand()
def elastic_weight_consolidation(model, x, y):
    """The Fisher information, by a moving average of squared gradients, holds weights."""
    loss, gradients = model.gradients(x, y)
    pulled = [g + 0.5 * f * v for g, f, v in zip(gradients, model.slots[0], model.net.trainable_variables, strict=True)]
    for slot, g in zip(model.slots[0], gradients, strict=True):
        slot.assign(0.9 * slot + 0.1 * tf.square(g))
    model.optimizer.apply_gradients(zip(pulled, model.net.trainable_variables, strict=True))
    return {"loss": loss}


# ------------------------------------------------------------------------------------- kinds of tapes


class OwnLoss(keras.Model):
    """A model whose step takes the gradients of `loss_of(model, x, y)`."""

    def __init__(self, loss_of, net=None):
        super().__init__()
        self.net, self.loss_of = net or dense(), loss_of

    def call(self, x):
        return self.net(x)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.loss_of(self, *data)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def loss_of_model(fn):
    program(rows)(_named(fn, lambda: compiled(OwnLoss(fn))))
    return fn


@loss_of_model
def gradient_penalty_by_row(model, x, y):
    with tf.GradientTape() as inner:
        inner.watch(x)
        p = model(x)
    slope = inner.gradient(p, x)
    norms = tf.sqrt(tf.reduce_sum(tf.square(slope), 1) + 1e-3)
    return tf.reduce_mean(tf.square(y - p)) + 0.1 * tf.reduce_mean(tf.square(norms - 1.0))


@loss_of_model
def gradient_penalty_of_the_loss(model, x, y):
    """Double backpropagation: how the loss of all rows moves with them."""
    with tf.GradientTape() as inner:
        inner.watch(x)
        loss = tf.reduce_mean(tf.square(y - model(x)))
    slope = inner.gradient(loss, x)
    return loss + tf.reduce_sum(tf.square(slope))


@loss_of_model
def adversarial_rows(model, x, y):
    with tf.GradientTape() as inner:
        inner.watch(x)
        loss = keras.losses.mean_squared_error(y, model(x))
    x = x + 0.05 * tf.stop_gradient(tf.sign(inner.gradient(loss, x)))
    return tf.reduce_mean(loss) + tf.reduce_mean(tf.square(y - model(x)))


@loss_of_model
def adversarial_rows_of_the_mean_loss(model, x, y):
    with tf.GradientTape() as inner:
        inner.watch(x)
        loss = tf.reduce_mean(tf.square(y - model(x)))
    x = x + 0.5 * tf.stop_gradient(inner.gradient(loss, x))
    return tf.reduce_mean(tf.square(y - model(x)))


@loss_of_model
def norm_of_the_gradient_as_penalty(model, x, y):
    with tf.GradientTape() as inner:
        loss = tf.reduce_mean(tf.square(y - model(x)))
    return loss + 0.1 * tf.linalg.global_norm(inner.gradient(loss, model.trainable_variables))


@loss_of_model
def physics_informed(model, x, y):
    """The residual of an equation with a second derivative by an input."""
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            p = model(x)
        first = inner.gradient(p, x)[:, :1]
    second = outer.gradient(first, x)[:, :1]
    return tf.reduce_mean(tf.square(second + p - y))


@loss_of_model
def jacobian_by_batch(model, x, y):
    with tf.GradientTape() as inner:
        inner.watch(x)
        p = model(x)
    return tf.reduce_mean(tf.square(y - p)) + 0.1 * tf.reduce_mean(tf.square(inner.batch_jacobian(p, x)))


@loss_of_model
def maml(model, x, y):
    """One inner step on the batch, and the loss of the weights that it comes to."""
    hidden, out = model.net.layers
    with tf.GradientTape() as inner:
        loss = tf.reduce_mean(tf.square(y - model(x)))
    slopes = inner.gradient(loss, out.trainable_variables)
    w, b = (v - 0.1 * g for v, g in zip(out.trainable_variables, slopes, strict=True))
    return tf.reduce_mean(tf.square(y - (tf.matmul(hidden(x), w) + b)))


@loss_of_model
def recompute_grad(model, x, y):
    hidden, out = model.net.layers
    block = tf.recompute_grad(lambda h: tf.tanh(hidden(h)))
    return tf.reduce_mean(tf.square(y - out(block(x))))


@loss_of_model
def custom_gradient_that_reverses(model, x, y):
    @tf.custom_gradient
    def reverse(h):
        return h, lambda g: -0.3 * g

    hidden, out = model.net.layers
    h = hidden(x)
    return tf.reduce_mean(tf.square(y - out(h))) + tf.reduce_mean(tf.square(x[:, :1] - out(reverse(h))))


@loss_of_model
def custom_gradient_that_clips(model, x, y):
    @tf.custom_gradient
    def clip(h):
        return tf.identity(h), lambda g: tf.clip_by_value(g, -0.05, 0.05)

    hidden, out = model.net.layers
    return tf.reduce_mean(tf.square(y - out(clip(hidden(x)))))


@loss_of_model
def custom_gradient_that_normalizes_by_the_batch(model, x, y):
    @tf.custom_gradient
    def normalize(h):
        return tf.identity(h), lambda g: g / (tf.norm(g) + 0.1)

    hidden, out = model.net.layers
    return tf.reduce_mean(tf.square(y - out(normalize(hidden(x)))))


@loss_of_model
def straight_through(model, x, y):
    hidden, out = model.net.layers
    h = hidden(x)
    h += tf.stop_gradient(tf.sign(h) - h)
    return tf.reduce_mean(tf.square(y - out(h)))


@loss_of_model
def stopped_tape(model, x, y):
    with tf.GradientTape() as unused, unused.stop_recording():
        constant = tf.reduce_mean(tf.abs(y))
    return tf.reduce_mean(tf.square(y - model(x))) + 0.0 * constant


@program(rows)
def jacobian_of_losses_of_rows():
    """The gradient of each row's loss, clipped by itself, as in private training."""

    class Own(OwnLoss):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                losses = tf.square(y - self(x))[:, 0]
            by_row = tape.jacobian(losses, self.trainable_variables)
            gradients = []
            for g in by_row:
                norms = tf.sqrt(tf.reduce_sum(tf.square(g), list(range(1, len(g.shape))), keepdims=True) + 1e-6)
                gradients.append(tf.reduce_mean(g * tf.minimum(1.0, 0.3 / norms), 0))
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": tf.reduce_mean(losses)}

    return compiled(Own(None))


@program(rows)
def output_gradients():
    """Gradients of predictions, handed to the tape, that are divided by the number of rows."""

    class Own(OwnLoss):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                p = self(x)
            upstream = 2 * (p - y) / tf.cast(tf.shape(x)[0], tf.float32)
            gradients = tape.gradient(p, self.trainable_variables, output_gradients=upstream)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": tf.reduce_mean(tf.square(p - y))}

    return compiled(Own(None))


@program(rows)
def output_gradients_as_a_sum():
    class Own(OwnLoss):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                p = self(x)
            gradients = tape.gradient(p, self.trainable_variables, output_gradients=(p - y) * 0.2)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {}

    return compiled(Own(None))


@program(rows)
def gauss_newton():
    class Own(OwnLoss):
        def train_step(self, data):
            x, y = data
            out = self.net.layers[1]
            h = self.net.layers[0](x)
            normal = tf.matmul(h, h, transpose_a=True) / tf.cast(tf.shape(x)[0], tf.float32) + 0.5 * tf.eye(5)
            error = tf.matmul(h, out(h) - y, transpose_a=True) / tf.cast(tf.shape(x)[0], tf.float32)
            out.kernel.assign_sub(0.2 * tf.linalg.solve(normal, error))
            return {"loss": tf.reduce_mean(tf.square(out(h) - y))}

    return compiled(Own(None))


@program(rows)
def layers_with_other_rates():
    class Own(OwnLoss):
        def __init__(self):
            super().__init__(None)
            self.second = sgd(0.01)

        def train_step(self, data):
            x, y = data
            hidden, out = self.net.layers
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x))
            first, second = tape.gradient(loss, [hidden.trainable_variables, out.trainable_variables])
            self.optimizer.apply_gradients(zip(first, hidden.trainable_variables, strict=True))
            self.second.apply_gradients(zip(second, out.trainable_variables, strict=True))
            return {"loss": loss}

    return compiled(Own(), "mse")


@program(rows)
def two_updates_a_step():
    class Own(OwnLoss):
        def train_step(self, data):
            for _ in range(2):
                logs = super().train_step(data)
            return logs

    return compiled(Own(lambda model, x, y: tf.reduce_mean(tf.square(y - model(x)))))


@program(rows)
def updates_in_a_loop_of_the_graph():
    class Own(OwnLoss):
        def train_step(self, data):
            x, y = data

            def one(i, total):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(tf.square(y - self(x)))
                gradients = tape.gradient(loss, self.trainable_variables)
                for v, g in zip(self.trainable_variables, gradients, strict=True):
                    v.assign_sub(0.02 * g)
                return i + 1, total + loss

            _, total = tf.while_loop(lambda i, _: i < 3, one, (0, 0.0))
            return {"loss": total / 3.0}

    return compiled(Own(None))


@program(rows)
def optimizer_of_its_own_class():
    class Normalized(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            super().update_step(gradient / (ops.norm(gradient) + 0.1), variable, learning_rate)

    return compiled(dense(features=FEATURES), "mse", Normalized(0.05))
