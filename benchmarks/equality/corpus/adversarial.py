"""Several models, losses and optimizers in one step: adversarial training and what is like it."""

import keras
import tensorflow as tf
from keras import layers, ops

from corpus import CLASSES, FEATURES, classes, compiled, dense, program, rows, same, sgd


class Gan(keras.Model):
    """A generator that makes rows of the first features of others, and a discriminator; each has an optimizer.

    `d_loss(model, real, fake)` and `g_loss(model, fake)` are of logits.
    """

    def __init__(self, d_loss, g_loss, penalty=None, discriminator_steps=1, in_two_tapes=True):
        super().__init__()
        self.generator, self.discriminator = dense(FEATURES, features=2), dense(1)
        self.d_loss, self.g_loss, self.penalty = d_loss, g_loss, penalty
        self.discriminator_steps, self.in_two_tapes = discriminator_steps, in_two_tapes
        self.d_metric, self.g_metric = keras.metrics.Mean(name="d_loss"), keras.metrics.Mean(name="g_loss")

    def compile(self, d_optimizer, g_optimizer):
        super().compile(jit_compile=False)
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer

    @property
    def metrics(self):
        return [self.d_metric, self.g_metric]

    def call(self, x):
        return self.discriminator(self.generator(x[:, :2]))

    def train_step(self, data):
        real = data[0]
        latent = tf.sin(3.0 * real[:, 2:4])
        for _ in range(self.discriminator_steps):
            with tf.GradientTape() as tape:
                fake = self.generator(latent, training=True)
                d_loss = self.d_loss(self.discriminator(real), self.discriminator(fake))
                if self.penalty is not None:
                    d_loss += self.penalty(self, real, fake)
            weights = self.discriminator.trainable_weights
            self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights, strict=True))
        with tf.GradientTape() as tape:
            g_loss = self.g_loss(self.discriminator(self.generator(latent, training=True)))
        weights = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights, strict=True))
        self.d_metric.update_state(d_loss)
        self.g_metric.update_state(g_loss)
        return {"d_loss": self.d_metric.result(), "g_loss": self.g_metric.result()}


def _compiled(model, rate=0.05):
    model.compile(sgd(rate), keras.optimizers.Adam(0.01, epsilon=1e-2))
    return model


def _crossentropy(logits, target):
    return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(tf.ones_like(logits) * target, logits))


def _d(real, fake):
    return _crossentropy(real, 0.9) + _crossentropy(fake, 0.0)


def _g(fake):
    return _crossentropy(fake, 1.0)


@program(same)
def gan():
    return _compiled(Gan(_d, _g))


@program(same)
def gan_of_least_squares():
    return _compiled(
        Gan(lambda r, f: ops.mean(ops.square(r - 1)) + ops.mean(ops.square(f)), lambda f: ops.mean(ops.square(f - 1)))
    )


@program(same)
def gan_with_hinge_loss():
    return _compiled(
        Gan(
            lambda r, f: tf.reduce_mean(tf.nn.relu(1 - r)) + tf.reduce_mean(tf.nn.relu(1 + f)),
            lambda f: -tf.reduce_mean(f),
        )
    )


@program(same)
def gan_of_relativistic_averages():
    """Each logit beside the mean logit of the others."""
    return _compiled(
        Gan(
            lambda r, f: _crossentropy(r - tf.reduce_mean(f), 1.0) + _crossentropy(f - tf.reduce_mean(r), 0.0),
            lambda f: _crossentropy(f - tf.reduce_mean(f), 1.0) + _g(f),
        )
    )


@program(same)
def wgan_with_gradient_penalty():
    def penalty(model, real, fake):
        mixed = 0.3 * real + 0.7 * fake
        with tf.GradientTape() as tape:
            tape.watch(mixed)
            logits = model.discriminator(mixed, training=True)
        norms = tf.sqrt(tf.reduce_sum(tf.square(tape.gradient(logits, [mixed])[0]), axis=1) + 1e-6)
        return 2.0 * tf.reduce_mean((norms - 1.0) ** 2)

    model = Gan(lambda r, f: tf.reduce_mean(f) - tf.reduce_mean(r), lambda f: -tf.reduce_mean(f), penalty, 2)
    return _compiled(model)


@program(same)
def gan_with_r1_penalty():
    def penalty(model, real, fake):
        with tf.GradientTape() as tape:
            tape.watch(real)
            logits = tf.reduce_sum(model.discriminator(real))
        return 0.5 * tf.reduce_mean(tf.reduce_sum(tf.square(tape.gradient(logits, real)), 1))

    return _compiled(Gan(_d, _g, penalty))


@program(same)
def gan_with_a_penalty_of_all_gradients():
    def penalty(model, real, fake):
        with tf.GradientTape() as tape:
            tape.watch(real)
            logits = model.discriminator(real)
        return 0.5 * tf.square(tf.norm(tape.gradient(logits, real)) - 1.0)

    return _compiled(Gan(_d, _g, penalty))


@program(same)
def wgan_with_clipped_weights():
    class Clipped(Gan):
        def train_step(self, data):
            logs = super().train_step(data)
            for v in self.discriminator.trainable_variables:
                v.assign(tf.clip_by_value(v, -0.4, 0.4))
            return logs

    return _compiled(Clipped(lambda r, f: tf.reduce_mean(f) - tf.reduce_mean(r), lambda f: -tf.reduce_mean(f)))


@program(same)
def gan_with_deviation_of_the_batch():
    """The discriminator sees the deviation of the batch as a feature."""

    class Deviating(Gan):
        def __init__(self):
            super().__init__(self.first, self.second)

        def first(self, r, f):
            return _d(r + tf.math.reduce_std(r), f + tf.math.reduce_std(f))

        def second(self, f):
            return _g(f + tf.math.reduce_std(f))

    return _compiled(Deviating())


@program(same)
def gan_with_matched_features():
    class Matched(Gan):
        def train_step(self, data):
            logs = super().train_step(data)
            real = data[0]
            hidden = self.discriminator.layers[0]
            with tf.GradientTape() as tape:
                fake = self.generator(tf.sin(3.0 * real[:, 2:4]))
                loss = tf.reduce_sum(tf.square(tf.reduce_mean(hidden(real), 0) - tf.reduce_mean(hidden(fake), 0)))
            weights = self.generator.trainable_weights
            self.g_optimizer.apply(tape.gradient(loss, weights), weights)
            return logs

    return _compiled(Matched(_d, _g))


@program(same)
def gan_balanced_as_began():
    class Balanced(Gan):
        def __init__(self):
            super().__init__(_d, _g)
            self.k = self.add_weight(shape=(), initializer="ones", trainable=False, name="k")

        def train_step(self, data):
            logs = super().train_step(data)
            real = self.discriminator(data[0])
            self.k.assign(tf.clip_by_value(self.k + 0.1 * tf.reduce_mean(real), 0.0, 1.0))
            return {**logs, "k": self.k}

    return _compiled(Balanced())


@program(same)
def gan_with_a_moving_average_of_the_generator():
    class Averaged(Gan):
        def __init__(self):
            super().__init__(_d, _g)
            self.average = dense(FEATURES, features=2)
            self.average.trainable = False

        def train_step(self, data):
            logs = super().train_step(data)
            for old, new in zip(self.average.weights, self.generator.weights, strict=True):
                old.assign(old * 0.8 + new * 0.2)
            return logs

    return _compiled(Averaged())


@program(classes)
def domain_adversarial():
    """Two heads behind a layer that reverses gradients."""

    @tf.custom_gradient
    def reverse(h):
        return tf.identity(h), lambda g: -0.5 * g

    class Domains(keras.Model):
        def __init__(self):
            super().__init__()
            self.body, self.labels, self.domains = dense(4), layers.Dense(CLASSES), layers.Dense(1)

        def call(self, x):
            h = self.body(x)
            return self.labels(h), self.domains(reverse(h))

        def train_step(self, data):
            x, y = data
            domain = tf.cast(x[:, :1] > 0, tf.float32)
            with tf.GradientTape() as tape:
                labels, domains = self(x, training=True)
                loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, labels, from_logits=True))
                loss += tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(domain, domains))
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": loss}

    return compiled(Domains())


@program(classes)
def domain_adaptation_on_source_rows_alone():
    """The classes of the rows of one domain count, over their number; the domain of all."""

    class Domains(keras.Model):
        def __init__(self):
            super().__init__()
            self.body, self.labels = dense(4), layers.Dense(CLASSES)

        def call(self, x):
            return self.labels(self.body(x))

        def train_step(self, data):
            x, y = data
            source = tf.where(x[:, 0] > -0.3)[:, 0]
            with tf.GradientTape() as tape:
                logits = self(x, training=True)
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.gather(y, source), tf.gather(logits, source))
                loss = tf.reduce_sum(losses) / tf.cast(tf.maximum(tf.shape(source)[0], 1), tf.float32)
                loss += 0.1 * tf.reduce_mean(tf.square(logits))
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": loss}

    return compiled(Domains())


class Cycle(keras.Model):
    """Two generators there and back, whose losses one persistent tape records."""

    def __init__(self, merge):
        super().__init__()
        self.there, self.back, self.merge = dense(FEATURES), dense(FEATURES), merge
        self.second = sgd(0.02)

    def call(self, x):
        return self.back(self.there(x))

    def train_step(self, data):
        x, _ = data
        with tf.GradientTape(persistent=True) as tape:
            a, b = self.there(x), self.back(tf.reverse(x, [1]))
            cycle = tf.reduce_mean(tf.abs(x - self.back(a))) + tf.reduce_mean(tf.abs(x - self.there(b)))
            first, last = self.merge(tf.reduce_mean(tf.square(a)), cycle), cycle + tf.reduce_mean(tf.abs(b - x))
        for loss, net, optimizer in ((first, self.there, self.optimizer), (last, self.back, self.second)):
            optimizer.apply_gradients(
                zip(tape.gradient(loss, net.trainable_variables), net.trainable_variables, strict=True)
            )
        return {"first": first, "last": last}


@program(same)
def cycle_of_two_generators():
    return compiled(Cycle(lambda a, b: a + 2.0 * b))


@program(same)
def cycle_with_a_product_of_losses():
    return compiled(Cycle(lambda a, b: a * b))


@program(rows)
def alternating_by_the_step():
    """One of two networks trains at each step."""

    class Alternating(keras.Model):
        def __init__(self):
            super().__init__()
            self.a, self.b = dense(), dense()
            self.second = sgd(0.05)
            self.turn = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="turn")

        def call(self, x):
            return self.a(x) + self.b(x)

        def train_step(self, data):
            x, y = data
            with tf.GradientTape(persistent=True) as tape:
                loss = tf.reduce_mean(tf.square(y - self(x)))
            on_a = tf.cast(tf.equal(self.turn % 2, 0), tf.float32)
            for net, optimizer, weight in ((self.a, self.optimizer, on_a), (self.b, self.second, 1 - on_a)):
                gradients = [weight * g for g in tape.gradient(loss, net.trainable_variables)]
                optimizer.apply_gradients(zip(gradients, net.trainable_variables, strict=True))
            self.turn.assign_add(1)
            return {"loss": loss}

    return compiled(Alternating())


@program(rows)
def ensemble_with_negative_correlation():
    class Ensemble(keras.Model):
        def __init__(self):
            super().__init__()
            self.members = [dense() for _ in range(3)]

        def call(self, x):
            return tf.stack([member(x) for member in self.members])

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                p = self(x)
                spread = tf.reduce_mean(tf.math.reduce_variance(p, 0))
                loss = tf.reduce_mean(tf.square(p - y[None])) - 0.2 * spread
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": loss, "spread": spread}

    return compiled(Ensemble())


@program(rows)
def best_of_several_hypotheses():
    """The best of three heads of each row, or of the batch, trains."""

    class Heads(keras.Model):
        def __init__(self):
            super().__init__()
            self.net = dense(3)

        def call(self, x):
            return self.net(x)

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.reduce_min(tf.square(self(x) - y), 1))
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": loss}

    return compiled(Heads())


@program(rows)
def best_head_of_the_batch():
    class Heads(keras.Model):
        def __init__(self):
            super().__init__()
            self.net = dense(3)

        def call(self, x):
            return self.net(x)

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                losses = tf.reduce_mean(tf.square(self(x) - y), axis=0)
                loss = tf.reduce_min(losses)
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": loss, "best": tf.cast(tf.argmin(losses), tf.float32)}

    return compiled(Heads())


@program(rows)
def mean_of_mixture_densities():
    class Mixture(keras.Model):
        def __init__(self):
            super().__init__()
            self.net = dense(6)

        def call(self, x):
            return self.net(x)

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                weights, means, scales = tf.split(self(x), 3, axis=1)
                densities = tf.nn.log_softmax(weights) - scales - 0.5 * tf.square((y - means) / tf.exp(scales))
                loss = -tf.reduce_mean(tf.reduce_logsumexp(densities, 1))
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": loss}

    return compiled(Mixture(), optimizer=sgd(0.02))


@program(rows)
def normalizing_flow_with_actnorm():
    """Affine coupling; the layer's scale is that of the first batch."""

    class Flow(keras.Model):
        def __init__(self):
            super().__init__()
            self.net = dense(6, features=3)
            self.scale = self.add_weight(shape=(FEATURES,), initializer="ones", name="scale")
            self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False, name="seen")

        def call(self, x):
            x = x * self.scale
            a, b = x[:, :3], x[:, 3:]
            shift, log_scale = tf.split(self.net(a), 2, axis=1)
            return tf.concat([a, b * tf.exp(tf.tanh(log_scale)) + shift], 1), tf.reduce_sum(tf.tanh(log_scale), 1)

        def train_step(self, data):
            x, _ = data
            first = 1.0 / (tf.math.reduce_std(x, 0) + 0.2)
            self.scale.assign(tf.where(self.seen.value > 0, self.scale.value, first))
            self.seen.assign_add(1.0)
            with tf.GradientTape() as tape:
                z, determinant = self(x)
                loss = tf.reduce_mean(0.5 * tf.reduce_sum(tf.square(z), 1) - determinant)
                loss -= tf.reduce_sum(tf.math.log(tf.abs(self.scale.value)))
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": loss}

    return compiled(Flow(), optimizer=sgd(0.01))
