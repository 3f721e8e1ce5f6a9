"""Losses that compare the rows of a batch with each other, and self-supervised learning."""

import keras
import tensorflow as tf
from keras import layers, ops

from corpus import BATCH, CLASSES, FEATURES, classes, compiled, dense, pairs, program, rows, same, sgd


class Embedded(keras.Model):
    """A network to vectors, whose loss is `loss_of(model, x, y, vectors)` in `compute_loss`."""

    def __init__(self, loss_of, width=4):
        super().__init__()
        self.net, self.loss_of = dense(width), loss_of
        self.scale = self.add_weight(
            shape=(), initializer="ones", name="scale", trainable="learned" in loss_of.__name__
        )
        self.tracker = keras.metrics.Mean(name="loss")

    def call(self, x):
        return self.net(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return self.loss_of(self, x, y, y_pred)


class EmbeddedStep(Embedded):
    """The same in a step of its own."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(self, x, y, self(x, training=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        self.tracker.update_state(loss)
        return {"tracked": self.tracker.result()}


def embedded(data, *, both=True):
    """Adds programs of a loss of vectors, in `compute_loss` and in a step."""

    def add(fn):
        for kind, more in ((Embedded, ""), (EmbeddedStep, "_in_step"))[: 1 + both]:
            make = lambda kind=kind: compiled(kind(fn))  # noqa: E731
            make.__name__, make.__module__ = fn.__name__ + more, fn.__module__
            program(data)(make)
        return fn

    return add


def _unit(x):
    return tf.math.l2_normalize(x + 1e-3, 1)


@embedded(rows)
def simclr(model, x, y, z):
    """Two views of a row, of which one is scaled: its mate among all rows is its own."""
    a, b = _unit(z), _unit(model.net(x * 0.8 + 0.1))
    logits = tf.matmul(a, b, transpose_b=True) / 0.5
    labels = tf.range(tf.shape(x)[0])
    loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    return tf.reduce_mean(loss + tf.nn.sparse_softmax_cross_entropy_with_logits(labels, tf.transpose(logits)))


@embedded(rows)
def nt_xent_of_both_views(model, x, y, z):
    both = ops.concatenate([_unit(z), _unit(model.net(x * 0.8 + 0.1))], axis=0)
    n = ops.shape(x)[0]
    logits = ops.matmul(both, ops.transpose(both)) / 0.5 - 1e9 * tf.eye(2 * n)
    labels = ops.concatenate([ops.arange(n) + n, ops.arange(n)], axis=0)
    return ops.mean(keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True))


@embedded(rows)
def clip_with_a_learned_temperature(model, x, y, z):
    logits = tf.matmul(_unit(z), _unit(model.net(tf.reverse(x, [1]))), transpose_b=True)
    logits *= tf.exp(model.scale.value)
    return tf.reduce_mean(-tf.linalg.diag_part(tf.nn.log_softmax(logits)))


@embedded(classes)
def supervised_contrastive(model, x, y, z):
    z = _unit(z)
    logits = tf.matmul(z, z, transpose_b=True) / 0.5
    y = tf.reshape(y, [-1, 1])
    mates = tf.cast(tf.equal(y, tf.transpose(y)), tf.float32) * (1.0 - tf.eye(tf.shape(y)[0]))
    log_p = tf.nn.log_softmax(logits - 1e9 * tf.eye(tf.shape(y)[0]))
    log_p = tf.where(mates > 0, log_p, 0.0)
    return -tf.reduce_mean(tf.math.divide_no_nan(tf.reduce_sum(mates * log_p, 1), tf.reduce_sum(mates, 1)))


@embedded(classes)
def triplet_of_hardest_rows(model, x, y, z):
    y = ops.reshape(y, (-1, 1))
    same_class = ops.equal(y, ops.transpose(y))
    distances = ops.sum(ops.square(ops.expand_dims(z, 1) - ops.expand_dims(z, 0)), axis=-1)
    farthest = ops.max(ops.where(same_class, distances, 0.0), axis=1)
    nearest = ops.min(ops.where(same_class, 1e3, distances), axis=1)
    return ops.mean(ops.softplus(farthest - ops.minimum(nearest, 4.0)))


@embedded(classes)
def triplet_of_all_rows(model, x, y, z):
    y = tf.reshape(y, [-1])
    distances = tf.norm(z[:, None] - z[None] + 1e-3, axis=-1)
    alike = tf.equal(y[:, None], y[None])
    valid = tf.cast(alike[:, :, None] & ~alike[:, None, :], tf.float32)
    losses = valid * tf.maximum(distances[:, :, None] - distances[:, None, :] + 0.5, 0.0)
    return tf.reduce_sum(losses) / (tf.math.count_nonzero(losses, dtype=tf.float32) + 1e-3)


@embedded(classes, both=False)
def circle_of_keras(model, x, y, z):
    return tf.reduce_mean(keras.losses.circle(y, _unit(z)))


@embedded(classes, both=False)
def contrastive_of_neighbors(model, x, y, z):
    """Each row with the next: pairs cut across the batch."""
    alike = tf.cast(tf.equal(y[1:], y[:-1]), tf.float32)
    distance = tf.norm(z[1:] - z[:-1] + 1e-3, axis=1)
    losses = alike * tf.square(distance) + (1 - alike) * tf.square(tf.maximum(1.0 - distance, 0.0))
    return tf.reduce_sum(losses) / BATCH


@embedded(classes)
def prototypes_of_the_batch(model, x, y, z):
    y = tf.reshape(y, [-1])
    prototypes = tf.math.unsorted_segment_mean(z, y, CLASSES)
    distances = tf.reduce_sum(tf.square(z[:, None] - prototypes[None]), -1)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, -distances))


@embedded(classes)
def fisher_ratio(model, x, y, z):
    one_hot = ops.one_hot(ops.reshape(y, (-1,)), CLASSES)
    counts = ops.sum(one_hot, axis=0)
    means = ops.matmul(ops.transpose(one_hot), z) / ops.expand_dims(counts + 0.1, 1)
    within = ops.mean(ops.square(z - ops.matmul(one_hot, means)))
    between = ops.mean(ops.square(ops.matmul(one_hot, means) - ops.mean(z, axis=0)))
    return within / (between + 1.0)


@embedded(rows)
def barlow_twins(model, x, y, z):
    def standardized(h):
        return (h - tf.reduce_mean(h, 0)) / (tf.math.reduce_std(h, 0) + 0.1)

    a, b = standardized(z), standardized(model.net(x * 0.8 + 0.1))
    c = tf.matmul(a, b, transpose_a=True) / tf.cast(tf.shape(x)[0], tf.float32)
    return 0.1 * tf.reduce_sum(tf.square(c - tf.eye(4)) * (0.1 + 0.9 * tf.eye(4)))


@embedded(rows)
def vicreg(model, x, y, z):
    other = model.net(x * 0.8 + 0.1)
    loss = tf.reduce_mean(tf.square(z - other))
    for h in (z, other):
        h = h - tf.reduce_mean(h, axis=0)
        covariance = tf.matmul(h, h, transpose_a=True) / tf.cast(tf.shape(x)[0], tf.float32)
        loss += tf.reduce_mean(tf.nn.relu(1.0 - tf.sqrt(tf.linalg.diag_part(covariance) + 1e-2)))
        loss += 0.1 * tf.reduce_sum(tf.square(covariance - tf.linalg.diag(tf.linalg.diag_part(covariance))))
    return loss


@embedded(rows)
def covariance_of_features(model, x, y, z):
    centered = ops.subtract(z, ops.mean(z, axis=0, keepdims=True))
    covariance = ops.matmul(ops.transpose(centered), centered) / ops.cast(ops.shape(z)[0], "float32")
    return ops.mean(ops.square(y - z[:, :1])) + ops.mean(ops.square(covariance - ops.eye(4)))


@embedded(rows)
def coral(model, x, y, z):
    """The second moments of two halves of the features."""

    def covariance(h):
        mean, n = tf.reduce_mean(h, 0, keepdims=True), tf.cast(tf.shape(h)[0], tf.float32)
        return tf.matmul(h, h, transpose_a=True) / n - tf.matmul(mean, mean, transpose_a=True)

    return tf.reduce_mean(tf.square(covariance(z[:, :2]) - covariance(z[:, 2:]))) + tf.reduce_mean(tf.square(z))


@embedded(rows)
def gram_matrix(model, x, y, z):
    return tf.reduce_mean(tf.square(tf.matmul(z, z, transpose_b=True) - tf.matmul(y, y, transpose_b=True)))


@embedded(rows)
def alignment_of_kernels(model, x, y, z):
    k, t = tf.matmul(z, z, transpose_b=True), tf.matmul(y, y, transpose_b=True)
    return -tf.reduce_sum(k * t) / (tf.norm(k) * tf.norm(t) + 0.1)


@embedded(rows, both=False)
def distances_to_be_kept(model, x, y, z):
    far = tf.reduce_sum(tf.square(x[:, None] - x[None]), -1)
    near = tf.reduce_sum(tf.square(z[:, None] - z[None]), -1)
    return tf.reduce_mean(tf.square(tf.exp(-far / 4) - tf.exp(-near / 4)))


@embedded(rows, both=False)
def uniformity(model, x, y, z):
    u = _unit(z)
    squares = tf.reduce_sum(tf.square(u[:, None] - u[None]), -1)
    return tf.reduce_mean(tf.square(z[:, :1] - y)) + tf.math.log(tf.reduce_mean(tf.exp(-2.0 * squares)))


@embedded(rows, both=False)
def attention_over_rows(model, x, y, z):
    weights = tf.nn.softmax(tf.matmul(z, z, transpose_b=True))
    return tf.reduce_mean(tf.square(tf.matmul(weights, y) - y))


@embedded(rows, both=False)
def nearest_neighbor(model, x, y, z):
    distances = tf.reduce_sum(tf.square(z[:, None] - z[None]), -1) + 1e3 * tf.eye(tf.shape(z)[0])
    mates = tf.gather(y, tf.argmin(distances, 1))
    return tf.reduce_mean(tf.square(mates - z[:, :1]))


@embedded(rows, both=False)
def whitened_mse(model, x, y, z):
    centered = z - tf.reduce_mean(z, 0)
    covariance = tf.matmul(centered, centered, transpose_a=True) / tf.cast(tf.shape(z)[0], tf.float32)
    values, vectors = tf.linalg.eigh(covariance + tf.linalg.diag([0.5, 1.0, 1.5, 2.0]))
    return tf.reduce_mean(tf.square(tf.matmul(centered, vectors) * tf.math.rsqrt(values) - x[:, :4]))


class TwoTowers(keras.Model):
    """Users and items, each with a table of embeddings, after TensorFlow Recommenders' retrieval."""

    def __init__(self, loss_of, optimizer_of_tables=None):
        super().__init__()
        self.users, self.items = layers.Embedding(9, 3), layers.Embedding(9, 3)
        self.loss_of = loss_of

    def call(self, x):
        return self.users(x[:, 0]), self.items(x[:, 1])

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            users, items = self(x, training=True)
            loss = self.loss_of(x, y, users, items)
        self.optimizer.apply_gradients(
            zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables, strict=True)
        )
        return {"loss": loss}


@program(pairs)
def retrieval_by_sampled_softmax():
    def loss(x, y, users, items):
        scores = tf.matmul(users, items, transpose_b=True) * 20
        return tf.reduce_mean(
            tf.keras.losses.categorical_crossentropy(tf.eye(tf.shape(scores)[0]), scores, from_logits=True)
        )

    return compiled(TwoTowers(loss), optimizer=sgd(0.5))


@program(pairs)
def retrieval_with_accidental_hits_removed():
    def loss(x, y, users, items):
        scores = tf.matmul(users, items, transpose_b=True) * 20
        alike = tf.cast(tf.equal(x[:, 1:], tf.transpose(x[:, 1:])), tf.float32) - tf.eye(tf.shape(x)[0])
        labels = tf.range(tf.shape(x)[0])
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, scores - 1e3 * alike))

    return compiled(TwoTowers(loss), optimizer=sgd(0.5))


@program(pairs)
def retrieval_corrected_by_counts_of_items():
    def loss(x, y, users, items):
        scores = tf.matmul(users, items, transpose_b=True) * 20
        counts = tf.reduce_sum(tf.cast(tf.equal(x[:, 1:], tf.transpose(x[:, 1:])), tf.float32), 1)
        logits = scores - tf.math.log(counts)[None, :]
        return -tf.reduce_mean(tf.linalg.diag_part(tf.nn.log_softmax(logits, 1)))

    return compiled(TwoTowers(loss), optimizer=sgd(0.5))


@program(pairs)
def retrieval_as_sum_over_the_batch():
    def loss(x, y, users, items):
        scores = tf.matmul(users, items, transpose_b=True) * 20
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.range(tf.shape(scores)[0]), scores)
        return tf.reduce_sum(losses) / BATCH

    return compiled(TwoTowers(loss), optimizer=sgd(0.5))


@program(pairs)
def negatives_by_rolling_the_batch():
    def loss(x, y, users, items):
        good = tf.reduce_sum(users * items, 1)
        bad = tf.reduce_sum(users * tf.roll(items, 1, 0), 1)
        return tf.reduce_mean(tf.nn.softplus(20 * (bad - good)))

    return compiled(TwoTowers(loss), optimizer=sgd(0.5))


# ---------------------------------------------------------------------- teachers, queues and banks


class Teacher(keras.Model):
    """A student and a teacher that follows it: BYOL, DINO and MoCo, with a queue of `length` rows if that is not 0."""

    def __init__(self, loss_of, length=0, write=None):
        super().__init__()
        self.student, self.teacher, self.head = dense(3), dense(3), layers.Dense(3)
        self.teacher.trainable = False
        self.teacher.set_weights(self.student.get_weights())
        self.head.build((None, 3))
        self.loss_of, self.write = loss_of, write
        self.center = self.add_weight(shape=(3,), initializer="zeros", trainable=False, name="center")
        if length:
            self.queue = self.add_weight(
                shape=(length, 3), initializer=keras.initializers.RandomNormal(seed=4), trainable=False, name="queue"
            )
            self.place = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="place")

    def call(self, x):
        return self.head(self.student(x))

    def train_step(self, data):
        x, _ = data
        seen = self.teacher(0.8 * x + 0.1)
        with tf.GradientTape() as tape:
            loss = self.loss_of(self, self(x, training=True), tf.stop_gradient(seen))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        for old, new in zip(self.teacher.variables, self.student.variables, strict=True):
            old.assign(0.9 * old + 0.1 * new)
        if self.write is not None:
            self.write(self, seen)
        return {"loss": loss}


@program(rows)
def byol():
    return compiled(Teacher(lambda model, p, t: tf.reduce_mean(2.0 - 2.0 * tf.reduce_sum(_unit(p) * _unit(t), 1))))


@program(rows)
def mean_teacher():
    return compiled(Teacher(lambda model, p, t: tf.reduce_mean(tf.square(p - t))))


@program(rows)
def dino_with_a_moving_center():
    def loss(model, p, t):
        target = tf.nn.softmax((t - model.center) / 0.2)
        return -tf.reduce_mean(tf.reduce_sum(target * tf.nn.log_softmax(p), 1))

    def write(model, t):
        model.center.assign(0.9 * model.center + 0.1 * tf.reduce_mean(t, 0))

    return compiled(Teacher(loss, write=write))


@program(rows)
def swav_with_sinkhorn():
    def loss(model, p, t):
        q = tf.exp(t / 0.5)
        for _ in range(2):
            q /= tf.reduce_sum(q, 0, keepdims=True) * 3.0
            q /= tf.reduce_sum(q, 1, keepdims=True)
        return -tf.reduce_mean(tf.reduce_sum(q * tf.nn.log_softmax(p), 1))

    return compiled(Teacher(loss))


def _moco(model, p, t):
    good = tf.reduce_sum(_unit(p) * _unit(t), 1, keepdims=True)
    bad = tf.matmul(_unit(p), _unit(model.queue), transpose_b=True)
    logits = tf.concat([good, bad], 1) / 0.5
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(tf.zeros(tf.shape(p)[0], tf.int32), logits))


@program(rows)
def moco_with_a_queue_by_concat():
    def write(model, t):
        model.queue.assign(tf.concat([t, model.queue.value], 0)[:10])

    return compiled(Teacher(_moco, 10, write))


@program(rows)
def moco_with_a_queue_by_scatter():
    def write(model, t):
        n = tf.shape(t)[0]
        places = (model.place.value + tf.range(n)) % 10
        model.queue.assign(tf.tensor_scatter_nd_update(model.queue.value, places[:, None], t))
        model.place.assign((model.place.value + n) % 10)

    return compiled(Teacher(_moco, 10, write))


@program(rows)
def moco_with_a_queue_of_variables_of_tensorflow():
    class Own(Teacher):
        def __init__(self):
            super().__init__(self.loss, write=self.push)
            self.bank = tf.Variable(tf.ones([10, 3]), trainable=False)

        def loss(self, model, p, t):
            return tf.reduce_mean(tf.square(p - t)) + tf.reduce_mean(tf.matmul(p, self.bank, transpose_b=True))

        def push(self, model, t):
            self.bank.assign(tf.concat([self.bank[tf.shape(t)[0] :], t], 0))

    return compiled(Own())


@program(rows)
def moco_with_a_queue_that_shuffles():
    def write(model, t):
        rolled = tf.roll(model.queue.value, tf.shape(t)[0], 0)
        mask = tf.range(10)[:, None] < tf.shape(t)[0]
        padded = tf.pad(t, [[0, 10 - tf.shape(t)[0]], [0, 0]])
        model.queue.assign(tf.where(mask, padded, rolled))

    return compiled(Teacher(_moco, 10, write))


@program(same)
def memory_bank_by_row():
    """A memory of each row's vector, at a place that the row itself tells."""

    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.net = dense(3)
            self.bank = self.add_weight(shape=(50, 3), initializer="zeros", trainable=False, name="bank")

        def call(self, x):
            return self.net(x)

        def train_step(self, data):
            x, _ = data
            place = tf.cast(tf.abs(x[:, 0]) * 1000, tf.int32) % 50
            with tf.GradientTape() as tape:
                z = self(x)
                loss = tf.reduce_mean(tf.square(z - tf.gather(self.bank, place) - x[:, :3]))
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            moved = 0.5 * tf.gather(self.bank, place) + 0.5 * z
            self.bank.assign(tf.tensor_scatter_nd_update(self.bank.value, place[:, None], moved))
            return {"loss": loss}

    return compiled(Own())


@program(classes)
def negative_free_clusters():
    """Logits to clusters whose mean over the batch shall have a high entropy."""

    class Own(Embedded):
        pass

    def loss(model, x, y, z):
        p = ops.softmax(z, axis=-1)
        mean = ops.mean(p, axis=0)
        return -ops.mean(ops.sum(p * ops.log(p), axis=1)) + ops.sum(mean * ops.log(mean))

    return compiled(Own(loss, FEATURES))
