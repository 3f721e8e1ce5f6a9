"""Tables of embeddings: recommenders, sequences with masks, and language models."""

import keras
import tensorflow as tf
from keras import layers, ops

from corpus import IDS, LENGTH, compiled, ids, next_ids, pairs, program, sgd


class Factors(keras.Model):
    """Matrix factorization with biases, whose loss is `loss_of(model, x, y, p)`."""

    def __init__(self, loss_of):
        super().__init__()
        self.users, self.items = layers.Embedding(IDS, 3), layers.Embedding(IDS, 3)
        self.user_bias, self.item_bias = layers.Embedding(IDS, 1), layers.Embedding(IDS, 1)
        self.mean = self.add_weight(shape=(), initializer="zeros", name="mean")
        self.loss_of = loss_of

    def call(self, x):
        user, item = x[:, 0], x[:, 1]
        dot = tf.reduce_sum(self.users(user) * self.items(item), 1, keepdims=True)
        return dot + self.user_bias(user) + self.item_bias(item) + self.mean

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(self, x, y, self(x, training=True))
        self.optimizer.apply_gradients(
            zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables, strict=True)
        )
        return {"loss": loss}


def factors(fn):
    def make():
        return compiled(Factors(fn), optimizer=sgd(0.3))

    make.__name__, make.__module__ = fn.__name__, fn.__module__
    program(pairs)(make)
    return fn


@factors
def matrix_factorization(model, x, y, p):
    return tf.reduce_mean(tf.square(y - p))


@factors
def matrix_factorization_with_a_penalty_of_the_rows_used(model, x, y, p):
    used = tf.nn.embedding_lookup(model.users.embeddings, x[:, 0])
    return tf.reduce_mean(tf.square(y - p)) + 0.1 * tf.nn.l2_loss(used)


@factors
def matrix_factorization_with_a_mean_penalty_of_the_rows_used(model, x, y, p):
    used = tf.gather(model.users.embeddings, x[:, 0])
    return tf.reduce_mean(tf.square(y - p)) + 0.1 * tf.reduce_mean(tf.reduce_sum(tf.square(used), 1))


@factors
def matrix_factorization_with_a_penalty_of_distinct_users(model, x, y, p):
    users, _ = tf.unique(x[:, 0])
    used = tf.gather(model.users.embeddings, users)
    return tf.reduce_mean(tf.square(y - p)) + 0.1 * tf.reduce_mean(tf.square(used))


@factors
def matrix_factorization_of_centered_ratings(model, x, y, p):
    return tf.reduce_mean(tf.square(y - tf.reduce_mean(y) - p))


@factors
def bayesian_personalized_ranking(model, x, y, p):
    """The negative item of a row is the next id: of the row alone."""
    negative = model(tf.stack([x[:, 0], (x[:, 1] + 1) % IDS], 1))
    return tf.reduce_mean(tf.nn.softplus(negative - p))


@factors
def ranking_by_items_of_other_rows(model, x, y, p):
    negative = model(tf.stack([x[:, 0], tf.roll(x[:, 1], 1, 0)], 1))
    return tf.reduce_mean(tf.nn.softplus(negative - p))


@factors
def ranking_of_all_pairs_of_the_batch(model, x, y, p):
    better = tf.cast(y > tf.transpose(y), tf.float32)
    return tf.reduce_sum(better * tf.nn.softplus(tf.transpose(p) - p)) / tf.maximum(tf.reduce_sum(better), 1.0)


@factors
def implicit_with_frequencies_of_the_batch(model, x, y, p):
    counts = tf.math.bincount(x[:, 1], minlength=IDS, maxlength=IDS, dtype=tf.float32)
    weights = 1.0 / tf.gather(counts, x[:, 1])
    return tf.reduce_mean(weights[:, None] * tf.square(y - p))


@factors
def scores_against_all_items(model, x, y, p):
    logits = tf.matmul(model.users(x[:, 0]), model.items.embeddings, transpose_b=True)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(x[:, 1], logits))


@factors
def embeddings_apart(model, x, y, p):
    """A penalty of the whole table, that no row enters."""
    table = tf.math.l2_normalize(tf.convert_to_tensor(model.items.embeddings) + 0.1, 1)
    return tf.reduce_mean(tf.square(y - p)) + 0.1 * tf.reduce_mean(tf.square(tf.matmul(table, table, transpose_b=True)))


@program(pairs)
def factorization_machine():
    class Machine(keras.Model):
        def __init__(self):
            super().__init__()
            self.linear, self.factors = layers.Embedding(2 * IDS, 1), layers.Embedding(2 * IDS, 3)

        def call(self, x):
            x = x + tf.constant([[0, IDS]])
            v = self.factors(x)
            second = tf.square(tf.reduce_sum(v, 1)) - tf.reduce_sum(tf.square(v), 1)
            return tf.reduce_sum(self.linear(x), 1) + 0.5 * tf.reduce_sum(second, 1, keepdims=True)

    return compiled(Machine(), "mse", sgd(0.1), metrics=["mae"])


@program(pairs)
def deep_and_wide():
    inputs = layers.Input((2,), dtype="int32")
    wide = layers.Flatten()(layers.Embedding(IDS, 1)(inputs))
    deep = layers.Dense(4, "tanh")(layers.Flatten()(layers.Embedding(IDS, 3)(inputs)))
    outputs = layers.Dense(1)(layers.Concatenate()([wide, deep]))
    return compiled(keras.Model(inputs, outputs), "mse", keras.optimizers.Adagrad(0.05, epsilon=1e-2))


@program(pairs)
def interactions_of_dlrm():
    class Interactions(layers.Layer):
        def call(self, v):
            dots = ops.matmul(v, ops.transpose(v, (0, 2, 1)))
            return ops.reshape(dots, (-1, 4))

    inputs = layers.Input((2,), dtype="int32")
    v = layers.Embedding(IDS, 3)(inputs)
    h = layers.Concatenate()([layers.Flatten()(v), Interactions()(v)])
    return compiled(keras.Model(inputs, layers.Dense(1)(h)), "mse", sgd(0.2))


@program(pairs)
def embeddings_of_counts():
    """A table of how often each item was seen, which the loss reads."""

    class Counted(Factors):
        def __init__(self):
            super().__init__(self.weighed)
            self.seen = self.add_weight(shape=(IDS,), initializer="zeros", trainable=False, name="seen")

        def weighed(self, model, x, y, p):
            hits = tf.reduce_sum(tf.one_hot(x[:, 1], IDS), 0)
            self.seen.assign_add(hits)
            return tf.reduce_mean(tf.square(y - p) / (1.0 + tf.gather(self.seen.value, x[:, 1]))[:, None])

    return compiled(Counted(), optimizer=sgd(0.3))


@program(pairs)
def embeddings_of_integer_counts():
    class Counted(Factors):
        def __init__(self):
            super().__init__(lambda model, x, y, p: tf.reduce_mean(tf.square(y - p)))
            self.seen = self.add_weight(shape=(IDS,), dtype="int32", initializer="zeros", trainable=False, name="seen")

        def train_step(self, data):
            logs = super().train_step(data)
            self.seen.assign_add(tf.reduce_sum(tf.one_hot(data[0][:, 1], IDS, dtype=tf.int32), 0))
            return logs

    return compiled(Counted(), optimizer=sgd(0.3))


@program(pairs)
def gradients_of_embeddings_clipped():
    class Clipped(Factors):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(y - self(x)))
            gradients = tape.gradient(loss, self.trainable_variables)
            gradients, _ = tf.clip_by_global_norm([tf.convert_to_tensor(g) for g in gradients], 0.3)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss}

    return compiled(Clipped(None), optimizer=sgd(0.3))


@program(pairs)
def indexed_slices_clipped():
    class Clipped(Factors):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(y - self(x)))
            gradients = tape.gradient(loss, self.trainable_variables)
            gradients = [tf.clip_by_norm(g, 0.2) for g in gradients]
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss}

    return compiled(Clipped(None), optimizer=sgd(0.3))


@program(pairs)
def indexed_slices_scaled():
    class Scaled(Factors):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(y - self(x)))
            gradients = [
                tf.IndexedSlices(2.0 * g.values, g.indices, g.dense_shape)
                if isinstance(g, tf.IndexedSlices)
                else 2.0 * g
                for g in tape.gradient(loss, self.trainable_variables)
            ]
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss}

    return compiled(Scaled(None), optimizer=sgd(0.15))


@program(pairs)
def rows_of_a_table_updated_by_hand():
    """Online updates of the rows that the batch holds, by scatter."""

    class Online(Factors):
        def train_step(self, data):
            x, y = data
            error = y - self(x)
            users, items = self.users(x[:, 0]), self.items(x[:, 1])
            table = self.users.embeddings
            table.assign(tf.tensor_scatter_nd_add(tf.convert_to_tensor(table), x[:, :1], 0.1 * error * items))
            table = self.items.embeddings
            table.assign(tf.tensor_scatter_nd_add(tf.convert_to_tensor(table), x[:, 1:], 0.1 * error * users))
            return {"loss": tf.reduce_mean(tf.square(error))}

    return compiled(Online(None))


@program(pairs)
def rows_of_a_table_updated_by_their_mean():
    class Online(Factors):
        def train_step(self, data):
            x, y = data
            error = y - self(x)
            one_hot = tf.one_hot(x[:, 0], IDS)
            change = tf.matmul(one_hot, error * self.items(x[:, 1]), transpose_a=True)
            self.users.embeddings.assign_add(0.5 * change / tf.cast(tf.shape(x)[0], tf.float32))
            return {"loss": tf.reduce_mean(tf.square(error))}

    return compiled(Online(None))


# ---------------------------------------------------------------------------------------- sequences


class Sequences(keras.Model):
    """Logits of the next id at each place, whose loss is `loss_of(x, y, logits)`."""

    def __init__(self, loss_of, mask_zero=False):
        super().__init__()
        self.table, self.rnn = layers.Embedding(IDS, 4, mask_zero=mask_zero), layers.GRU(4, return_sequences=True)
        self.out, self.loss_of = layers.Dense(IDS), loss_of

    def call(self, x):
        return self.out(self.rnn(self.table(x)))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return self.loss_of(x, y, y_pred)


def _losses(y, logits):
    return tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)


def sequences(fn):
    def make():
        return compiled(Sequences(fn), optimizer=sgd(0.2))

    make.__name__, make.__module__ = fn.__name__, fn.__module__
    program(next_ids)(make)
    return fn


@sequences
def language_model_of_all_places(x, y, logits):
    return tf.reduce_mean(_losses(y, logits))


@sequences
def language_model_over_known_places(x, y, logits):
    known = tf.cast(y > 0, tf.float32)
    return tf.reduce_sum(known * _losses(y, logits)) / tf.reduce_sum(known + 1e-6)


@sequences
def language_model_by_boolean_mask(x, y, logits):
    return tf.reduce_mean(tf.boolean_mask(_losses(y, logits), y > -1)) + tf.math.divide_no_nan(
        tf.reduce_sum(tf.boolean_mask(_losses(y, logits), y > 0)), tf.cast(tf.math.count_nonzero(y), tf.float32)
    )


@sequences
def language_model_by_mean_of_each_row(x, y, logits):
    known = ops.cast(y > 0, "float32")
    by_row = ops.sum(known * _losses(y, logits), axis=1) / ops.maximum(ops.sum(known, axis=1), 1.0)
    return ops.mean(by_row)


@sequences
def language_model_by_sum_of_each_row(x, y, logits):
    known = ops.cast(y > 0, "float32")
    return ops.mean(ops.sum(known * _losses(y, logits), axis=1))


@sequences
def masked_language_model_of_gathered_places(x, y, logits):
    places = tf.where(tf.equal(x % 3, 1))
    losses = _losses(tf.gather_nd(x, places), tf.gather_nd(logits, places))
    return tf.reduce_sum(losses) / (tf.cast(tf.shape(losses)[0], tf.float32) + 1e-3)


@sequences
def perplexity(x, y, logits):
    return 0.2 * tf.exp(tf.reduce_mean(_losses(y, logits)))


@sequences
def last_known_place(x, y, logits):
    last = tf.maximum(tf.reduce_sum(tf.cast(x > 0, tf.int32), 1) - 1, 0)
    return tf.reduce_mean(_losses(tf.gather(y, last, batch_dims=1), tf.gather(logits, last, batch_dims=1)))


@sequences
def sequences_up_to_the_longest(x, y, logits):
    """Cuts the batch to its longest row, which one process has for all."""
    longest = tf.reduce_max(tf.reduce_sum(tf.cast(x > 0, tf.int32), 1))
    return tf.reduce_mean(_losses(y[:, :longest], logits[:, :longest]))


@sequences
def sequence_mask_of_the_longest(x, y, logits):
    lengths = tf.reduce_sum(tf.cast(x > 0, tf.int32), 1)
    mask = tf.sequence_mask(lengths, LENGTH, dtype=tf.float32)
    return tf.reduce_sum(mask * _losses(y, logits)) / tf.cast(tf.reduce_sum(lengths), tf.float32)


@program(next_ids)
def masks_of_keras_in_a_step():
    """The mask of the embedding reaches the compiled loss, which weighs places by it."""

    class Step(keras.Model):
        def __init__(self):
            super().__init__()
            self.net = keras.Sequential(
                [
                    *(layers.Input((LENGTH,)), layers.Embedding(IDS, 4, mask_zero=True)),
                    *(layers.LSTM(4, return_sequences=True), layers.Dense(IDS)),
                ]
            )
            self.loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

        def call(self, x):
            return self.net(x)

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.loss_fn(y, self(x, training=True))
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": loss}

    return compiled(Step(), optimizer=sgd(0.2))


@program(ids)
def mean_of_known_places():
    class Pooled(layers.Layer):
        def call(self, h, mask=None):
            mask = ops.cast(mask, "float32")[..., None]
            return ops.sum(h * mask, axis=1) / (ops.sum(mask, axis=1) + 1e-3)

    inputs = layers.Input((LENGTH,), dtype="int32")
    h = Pooled()(layers.Embedding(IDS, 4, mask_zero=True)(inputs))
    return compiled(keras.Model(inputs, layers.Dense(1)(h)), "mse", sgd(0.2))


@program(ids)
def ctc_of_keras():
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.table, self.out = layers.Embedding(IDS, 4), layers.Dense(IDS, "softmax")

        def call(self, x):
            return self.out(self.table(x))

        def train_step(self, data):
            x, _ = data
            labels = 1 + x[:, :2] % (IDS - 2)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(keras.losses.ctc(labels, self(x, training=True)))
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": loss}

    return compiled(Net(), optimizer=sgd(0.02))


@program(ids)
def reduced_over_time_by_a_cell():
    """A recurrent cell by hand, in a loop of the graph over time."""

    class Cell(keras.Model):
        def __init__(self):
            super().__init__()
            self.table, self.cell, self.out = layers.Embedding(IDS, 4), layers.Dense(4, "tanh"), layers.Dense(1)

        def call(self, x):
            h = tf.transpose(self.table(x), [1, 0, 2])
            state = tf.zeros_like(h[0])
            for t in range(LENGTH):
                state = self.cell(tf.concat([h[t], state], 1))
            return self.out(state)

    return compiled(Cell(), "mse", sgd(0.1))


@program(ids)
def state_kept_between_batches():
    """The mean state of the batch starts the next one."""

    class Kept(keras.Model):
        def __init__(self):
            super().__init__()
            self.table, self.out = layers.Embedding(IDS, 4), layers.Dense(1)
            self.state = self.add_weight(shape=(4,), initializer="zeros", trainable=False, name="state")

        def call(self, x, training=False):
            h = tf.tanh(tf.reduce_mean(self.table(x), 1) + self.state.value)
            if training:
                self.state.assign(tf.stop_gradient(tf.reduce_mean(h, 0)))
            return self.out(h)

    return compiled(Kept(), "mse", sgd(0.2))


@program(ids)
def tied_weights():
    class Tied(keras.Model):
        def __init__(self):
            super().__init__()
            self.table = layers.Embedding(IDS, 4)

        def call(self, x):
            h = tf.reduce_mean(self.table(x), 1)
            return tf.matmul(h, tf.convert_to_tensor(self.table.embeddings), transpose_b=True)

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return tf.reduce_mean(_losses(x[:, 0], y_pred))

    return compiled(Tied(), optimizer=sgd(0.5))


@program(ids)
def words_by_negative_samples_of_a_table():
    """Word2vec: the negatives of a row follow from its own ids."""

    class Words(keras.Model):
        def __init__(self):
            super().__init__()
            self.center, self.context = layers.Embedding(IDS, 3), layers.Embedding(IDS, 3)

        def call(self, x):
            return self.center(x) + self.context(x)

        def train_step(self, data):
            x, _ = data
            with tf.GradientTape() as tape:
                center, context = self.center(x[:, :1]), self.context(tf.concat([x[:, 1:2], (x[:, :2] + 3) % IDS], 1))
                logits = tf.reduce_sum(center * context, -1)
                labels = tf.ones_like(logits) * tf.constant([[1.0, 0.0, 0.0]])
                loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, logits))
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": loss}

    return compiled(Words(), optimizer=sgd(1.0))
