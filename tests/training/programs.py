"""Programs as users write them, whose losses Keras does not scale: for `test_losses.py`."""

import numpy as np
from common import skewed_ids, skewed_rows


def layers(outputs=1, activation=None, width=6):
    import keras

    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(width, activation="tanh")(inputs)
    return inputs, keras.layers.Dense(outputs, activation=activation)(hidden)


def compiled(loss, cls=None, net=layers, optimizer=None, **options):
    def make():
        import keras

        model = (cls() if cls else keras.Model)(*net())
        model.compile(optimizer() if optimizer else keras.optimizers.SGD(0.05), loss=loss, **options)
        return model

    return make


def segmentation():
    return layers(3, "sigmoid")


def embedded():
    return layers(3)


def mean_loss(y, p):
    import tensorflow as tf

    return tf.reduce_mean((y - p) ** 2)


def gathered_dice(y, p):
    import keras

    import tfring

    return keras.losses.dice(*tfring.gather_for_loss((y, p)))


def gathered_circle(y, p):
    import keras

    import tfring

    return keras.losses.circle(*tfring.gather_for_loss((y, p)))


def loss_of_all_rows(y, p):
    """Every replica computes the same number: what is the mean of how close rows of one sign are."""
    import tensorflow as tf

    import tfring

    rows = tfring.gather_for_loss({"y": y > 0, "p": p, "none": None})
    return similarity_loss(rows["p"], rows["p"], rows["y"], rows["y"], tf.reduce_mean)


def loss_of_own_anchors(y, p):
    """A value for each of this replica's rows, compared with all rows."""
    import tfring

    all_y, all_p = tfring.gather_for_loss([is_positive(y), p])
    return similarity_loss(p, all_p, is_positive(y), all_y, lambda rows: rows)


def is_positive(y):
    import tensorflow as tf

    return tf.cast(y > 0, tf.int32)


def similarity_loss(anchors, others, labels, other_labels, reduce):
    import tensorflow as tf

    logits = tf.matmul(tf.math.l2_normalize(anchors, 1), tf.math.l2_normalize(others, 1), transpose_b=True) / 0.5
    same = tf.cast(tf.equal(labels, tf.transpose(other_labels)), tf.float32)
    return reduce(tf.nn.softmax_cross_entropy_with_logits(same / tf.reduce_sum(same, 1, keepdims=True), logits))


def compute_loss_overridden():
    """The example of `keras.Model.compute_loss`."""
    import keras
    from keras import ops

    class MyModel(keras.Model):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.loss_tracker = keras.metrics.Mean(name="loss")

        def compute_loss(self, x, y, y_pred, sample_weight, training=True):
            loss = ops.mean((y_pred - y) ** 2)
            loss += ops.sum(self.losses)
            self.loss_tracker.update_state(loss)
            return loss

        def reset_metrics(self):
            self.loss_tracker.reset_state()

        @property
        def metrics(self):
            return [self.loss_tracker]

    return MyModel


def vector_from_compute_loss():
    import keras
    from keras import ops

    class Vector(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return ops.mean((y_pred - y) ** 2, axis=-1) / 20

    return Vector


def guide_train_step():
    """Keras' guide, "Customizing what happens in fit() with TensorFlow": its first and its third example."""
    import keras
    import tensorflow as tf

    class CustomModel(keras.Model):
        def train_step(self, data):
            if len(data) == 3:
                x, y, sample_weight = data
            else:
                sample_weight = None
                x, y = data
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = self.compute_loss(y=y, y_pred=y_pred, sample_weight=sample_weight)
            trainable_vars = self.trainable_variables
            gradients = tape.gradient(loss, trainable_vars)
            self.optimizer.apply(gradients, trainable_vars)
            for metric in self.metrics:
                if metric.name == "loss":
                    metric.update_state(loss)
                else:
                    metric.update_state(y, y_pred, sample_weight=sample_weight)
            return {m.name: m.result() for m in self.metrics}

    return CustomModel


def guide_low_level(loss_fn=None, update=None):
    """The guide's second example; `update` is what the model does with its gradients."""
    import keras
    import tensorflow as tf

    class CustomModel(keras.Model):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.loss_tracker = keras.metrics.Mean(name="loss")
            self.mae_metric = keras.metrics.MeanAbsoluteError(name="mae")
            self.loss_fn = loss_fn or keras.losses.MeanSquaredError()

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = self.loss_fn(y, y_pred)
            trainable_vars = self.trainable_variables
            gradients = tape.gradient(loss, trainable_vars)
            if update is None:
                self.optimizer.apply(gradients, trainable_vars)
            else:
                update(self, gradients, trainable_vars)
            self.loss_tracker.update_state(loss)
            self.mae_metric.update_state(y, y_pred)
            return {"loss": self.loss_tracker.result(), "mae": self.mae_metric.result()}

        @property
        def metrics(self):
            return [self.loss_tracker, self.mae_metric]

    return CustomModel


def by_hand(model, gradients, variables):
    for gradient, variable in zip(gradients, variables, strict=True):
        variable.assign_sub(0.05 * gradient)


def clip_by_hand(model, gradients, variables):
    import tensorflow as tf

    strategy = tf.distribute.get_strategy()
    if strategy.num_replicas_in_sync > 1:
        gradients = strategy.all_reduce_gradients(gradients)
        assert [isinstance(g, tf.IndexedSlices) for g in gradients] == [True, False, False]
    else:  # TensorFlow takes the norm of an id's rows one by one
        gradients = [tf.convert_to_tensor(g) for g in gradients]
    clipped, _ = tf.clip_by_global_norm(gradients, 0.1)
    model.optimizer.apply_gradients(zip(clipped, variables, strict=True))


def mean_of_losses_a_row(y, p):
    import keras
    import tensorflow as tf

    return tf.reduce_mean(keras.losses.MeanSquaredError(reduction="none")(y, p))


def average_loss(y, p):
    """As programs for `tf.distribute` have it; 20 rows are a full batch."""
    import tensorflow as tf

    per_row = tf.reduce_mean((y - p) ** 2, -1)
    return tf.nn.compute_average_loss(per_row) + tf.nn.compute_average_loss(per_row, global_batch_size=20)


def vae():
    """Keras' VAE, small; what it samples follows from its inputs, so that it does not depend on who draws."""
    import keras
    import tensorflow as tf
    from keras import layers, ops

    class Sampling(layers.Layer):
        def call(self, inputs):
            z_mean, z_log_var = inputs
            return z_mean + ops.exp(0.5 * z_log_var) * ops.stop_gradient(ops.sin(9.0 * z_mean))

    class VAE(keras.Model):
        def __init__(self, encoder, decoder, **kwargs):
            super().__init__(**kwargs)
            self.encoder = encoder
            self.decoder = decoder
            self.total_loss_tracker = keras.metrics.Mean(name="total_loss")
            self.reconstruction_loss_tracker = keras.metrics.Mean(name="reconstruction_loss")
            self.kl_loss_tracker = keras.metrics.Mean(name="kl_loss")

        @property
        def metrics(self):
            return [self.total_loss_tracker, self.reconstruction_loss_tracker, self.kl_loss_tracker]

        def call(self, x):
            return self.decoder(self.encoder(x)[2])

        def train_step(self, data):
            [data] = data if isinstance(data, tuple) else [data]
            with tf.GradientTape() as tape:
                z_mean, z_log_var, z = self.encoder(data)
                reconstruction = self.decoder(z)
                reconstruction_loss = ops.mean(
                    ops.sum(keras.losses.binary_crossentropy(data, reconstruction), axis=(1, 2))
                )
                kl_loss = -0.5 * (1 + z_log_var - ops.square(z_mean) - ops.exp(z_log_var))
                kl_loss = ops.mean(ops.sum(kl_loss, axis=1))
                total_loss = reconstruction_loss + kl_loss
            grads = tape.gradient(total_loss, self.trainable_weights)
            self.optimizer.apply_gradients(zip(grads, self.trainable_weights, strict=True))
            self.total_loss_tracker.update_state(total_loss)
            self.reconstruction_loss_tracker.update_state(reconstruction_loss)
            self.kl_loss_tracker.update_state(kl_loss)
            return {
                "loss": self.total_loss_tracker.result(),
                "reconstruction_loss": self.reconstruction_loss_tracker.result(),
                "kl_loss": self.kl_loss_tracker.result(),
            }

    encoder_inputs = keras.Input((4, 4, 1))
    x = layers.Dense(8, activation="relu")(layers.Flatten()(encoder_inputs))
    z_mean = layers.Dense(2, name="z_mean")(x)
    z_log_var = layers.Dense(2, name="z_log_var")(x)
    encoder = keras.Model(encoder_inputs, [z_mean, z_log_var, Sampling()([z_mean, z_log_var])])
    latent_inputs = keras.Input((2,))
    x = layers.Dense(16, activation="sigmoid")(latent_inputs)
    decoder = keras.Model(latent_inputs, layers.Reshape((4, 4, 1))(x))
    model = VAE(encoder, decoder)
    model.build((None, 4, 4, 1))
    model.compile(keras.optimizers.SGD(0.01))
    return model


def gan():
    """The guide's GAN, small; its latent vectors and noise follow from the images."""
    import keras
    import tensorflow as tf
    from keras import layers

    class GAN(keras.Model):
        def __init__(self, discriminator, generator):
            super().__init__()
            self.discriminator = discriminator
            self.generator = generator
            self.d_loss_tracker = keras.metrics.Mean(name="d_loss")
            self.g_loss_tracker = keras.metrics.Mean(name="g_loss")

        @property
        def metrics(self):
            return [self.d_loss_tracker, self.g_loss_tracker]

        def call(self, images):
            return self.discriminator(self.generator(images[:, :4, 0, 0])), self.discriminator(images)

        def compile(self, d_optimizer, g_optimizer, loss_fn):
            super().compile()
            self.d_optimizer = d_optimizer
            self.g_optimizer = g_optimizer
            self.loss_fn = loss_fn

        def train_step(self, real_images):
            if isinstance(real_images, tuple):
                real_images = real_images[0]
            batch_size = tf.shape(real_images)[0]
            random_latent_vectors = tf.sin(100.0 * real_images[:, :4, 0, 0])
            generated_images = self.generator(random_latent_vectors)
            combined_images = tf.concat([generated_images, real_images], axis=0)
            labels = tf.concat([tf.ones((batch_size, 1)), tf.zeros((batch_size, 1))], axis=0)
            labels += 0.05 * tf.concat([real_images[:, 0, 0], real_images[:, 1, 0]], axis=0)
            with tf.GradientTape() as tape:
                predictions = self.discriminator(combined_images)
                d_loss = self.loss_fn(labels, predictions)
            grads = tape.gradient(d_loss, self.discriminator.trainable_weights)
            self.d_optimizer.apply(grads, self.discriminator.trainable_weights)

            random_latent_vectors = tf.cos(100.0 * real_images[:, :4, 0, 0])
            misleading_labels = tf.zeros((batch_size, 1))
            with tf.GradientTape() as tape:
                predictions = self.discriminator(self.generator(random_latent_vectors))
                g_loss = self.loss_fn(misleading_labels, predictions)
            grads = tape.gradient(g_loss, self.generator.trainable_weights)
            self.g_optimizer.apply(grads, self.generator.trainable_weights)

            self.d_loss_tracker.update_state(d_loss)
            self.g_loss_tracker.update_state(g_loss)
            return {"d_loss": self.d_loss_tracker.result(), "g_loss": self.g_loss_tracker.result()}

    discriminator = keras.Sequential([
        keras.Input((4, 4, 1)),
        layers.Flatten(),
        layers.Dense(8),
        layers.LeakyReLU(negative_slope=0.2),
        layers.Dense(1),
    ])
    generator = keras.Sequential([
        keras.Input((4,)),
        layers.Dense(8),
        layers.LeakyReLU(negative_slope=0.2),
        layers.Dense(16, activation="sigmoid"),
        layers.Reshape((4, 4, 1)),
    ])
    model = GAN(discriminator, generator)
    model.build((None, 4, 4, 1))
    model.compile(
        d_optimizer=keras.optimizers.SGD(0.05, momentum=0.9),
        g_optimizer=keras.optimizers.SGD(0.05, gradient_accumulation_steps=2),
        loss_fn=keras.losses.BinaryCrossentropy(from_logits=True),
    )
    return model


def masked(loss="mse", **options):
    """Lengths of 1 and 8; the rows of the first replica of the second batch are all masked."""

    def make():
        import keras

        inputs = keras.Input((8,), dtype="int32")
        hidden = keras.layers.Embedding(9, 4, mask_zero=True)(inputs)
        hidden = keras.layers.LSTM(5, return_sequences=True)(hidden)
        model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
        model.compile(keras.optimizers.SGD(0.5), loss, metrics=["mae"], weighted_metrics=["mse"], **options)
        return model

    return make


def masked_rows():
    generator = np.random.default_rng(3)
    lengths = np.tile([1, 8], 21)[:41]
    lengths[20:28] = 0
    lengths[40] = 0  # the last batch: one row, all masked
    ids = generator.integers(1, 9, size=(41, 8)) * (np.arange(8) < lengths[:, None])
    y = np.where(lengths == 8, 1.0, -2.0)[:, None, None] + np.sin(ids)[..., None]
    return ids.astype("int32"), y.astype("float32")


def added(kind):
    """A layer that adds a loss."""

    def make():
        import keras
        from keras import ops

        class Adds(keras.layers.Layer):
            def call(self, x):
                value = {
                    "mean": lambda: ops.mean(ops.square(x)),
                    "Keras' mean": lambda: keras.losses.MeanSquaredError()(ops.zeros_like(x), x),
                    "Keras' sum": lambda: 0.01 * keras.losses.MeanSquaredError(reduction="sum")(ops.zeros_like(x), x),
                    "a value a row": lambda: 0.01 * ops.sum(ops.square(x), axis=-1),
                }[kind]()
                self.add_loss(value)
                return x

        inputs = keras.Input((4,))
        hidden = Adds()(keras.layers.Dense(6, activation="tanh")(inputs))
        model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
        model.compile(keras.optimizers.SGD(0.05), "mse")
        return model

    return make


def with_embedding(update):
    def make():
        import keras

        inputs = keras.Input((3,), dtype="int32")
        hidden = keras.layers.Embedding(500, 4)(inputs)
        outputs = keras.layers.Dense(1)(keras.layers.Flatten()(hidden))
        model = guide_low_level(update=update)(inputs, outputs)
        model.compile(keras.optimizers.SGD(0.5))
        return model

    return make


def synchronized_normalization():
    import keras

    import tfring

    inputs = keras.Input((4,))
    # No bias, which the normalization takes out: its gradient is rounding alone.
    hidden = keras.layers.BatchNormalization(synchronized=True)(keras.layers.Dense(6, use_bias=False)(inputs))
    hidden = tfring.SyncBatchNormalization()(keras.layers.Dense(6, activation="tanh")(hidden))
    model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model


def several_outputs():
    import keras

    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(6, activation="tanh", kernel_regularizer=lambda w: 0.01 * w**2)(inputs)
    outputs = {"a": keras.layers.Dense(1, name="a")(hidden), "b": keras.layers.Dense(1, name="b")(hidden)}
    model = keras.Model(inputs, outputs)
    losses = {"a": mean_loss, "b": keras.losses.MeanAbsoluteError(reduction="sum")}
    model.compile(keras.optimizers.SGD(0.01), losses, loss_weights={"a": 0.5, "b": 0.02})
    return model


def several_optimizers():
    import keras

    model = keras.Model(*layers())
    first = model.trainable_variables[0].path
    sgd, adam = keras.optimizers.SGD(0.05), keras.optimizers.Adam(0.01)
    model.compile(keras.optimizers.MultiOptimizer(lambda v: adam if v.path == first else sgd), mean_loss)
    return model


def programs():
    """`{name: (make, data, options of fit)}`: what makes a compiled model, what it is fitted on, and how."""
    import keras

    losses, sgd = keras.losses, keras.optimizers.SGD
    x, y = skewed_rows(41)  # the last batch of 20 is one row
    classes = (y > [-2, 0, 2]).astype("float32")
    images = np.random.default_rng(5).uniform(size=(41, 4, 4, 1)) * np.linspace(0.2, 1, 41)[:, None, None, None]
    images = images.astype("float32")
    weights = np.linspace(0, 2, 41).astype("float32")
    ids, y_of_ids = skewed_ids(41, 400)
    masked_ids, y_of_masked = masked_rows()
    found = {}

    def program(name, make, *data, **options):
        found[name] = (make, data or (x, y), options)

    def small(optimizer=sgd):
        return optimizer(1e-3)

    program("mean", compiled(mean_loss))
    program("mean, eager", compiled(mean_loss, run_eagerly=True))
    program("mean, accumulated", compiled(mean_loss, optimizer=lambda: sgd(0.1, gradient_accumulation_steps=2)))
    program("mean, scaled", compiled(mean_loss, optimizer=lambda: keras.optimizers.LossScaleOptimizer(sgd(0.05))))
    if hasattr(keras.optimizers, "MultiOptimizer"):
        program("several optimizers", several_optimizers)
    program("several outputs", several_outputs, x, {"a": y, "b": y})
    program("compute_loss", compiled("mse", compute_loss_overridden))
    program("compute_loss, a value a row", compiled("mse", vector_from_compute_loss))
    program("guide", compiled("mse", guide_train_step, metrics=["mae"]))
    program("guide, weighted", compiled("mse", guide_train_step, metrics=["mae"]), sample_weight=weights)
    program("guide, low level", compiled(None, guide_low_level))
    program("gan", gan, images)
    program("vae", vae, images)
    program("mean of rows", compiled(None, lambda: guide_low_level(mean_of_losses_a_row)))
    program("average loss", compiled(None, lambda: guide_low_level(average_loss)))
    program("updated by hand", compiled(None, lambda: guide_low_level(update=by_hand)))
    program("clipped by hand", with_embedding(clip_by_hand), ids, y_of_ids)

    summed = losses.MeanSquaredError(reduction="sum")
    unreduced = losses.MeanSquaredError(reduction=None)
    program("sum", compiled(summed, optimizer=small))
    program("sum, low level", compiled(None, lambda: guide_low_level(summed), optimizer=small))
    program("unreduced", compiled(unreduced, optimizer=small))
    program("unreduced, scaled", compiled(unreduced, optimizer=lambda: keras.optimizers.LossScaleOptimizer(small())))
    program("unreduced, guide", compiled(unreduced, guide_train_step, optimizer=small))
    by_weights = losses.MeanSquaredError(reduction="mean_with_sample_weight")
    program("mean by weights", compiled(by_weights), sample_weight=weights, validation_data=(x, y, weights))

    program("masked", masked(), masked_ids, y_of_masked, validation_data=(masked_ids, y_of_masked))
    program("masked, eager", masked(run_eagerly=True), masked_ids[:40], y_of_masked[:40])
    weights_of_steps = np.tile(weights[:, None], 8)
    program("masked, weighted", masked(), masked_ids, y_of_masked, sample_weight=weights_of_steps)
    program("masked, by weights", masked(by_weights), masked_ids, y_of_masked, sample_weight=weights_of_steps)

    for kind in ("mean", "Keras' mean", "Keras' sum", "a value a row"):
        program(f"add_loss of {kind}", added(kind))

    program("dice", compiled(gathered_dice, net=segmentation), x, classes)
    program("dice of Keras", compiled(keras.losses.Dice(), net=segmentation), x, classes)
    program("dice of a row", compiled(keras.losses.Dice(axis=-1), net=segmentation), x, classes)
    program("tversky of Keras", compiled("tversky", net=segmentation), x, classes)
    program("circle of Keras", compiled(keras.losses.Circle(), net=embedded), x, (y > 0).astype("int32"))
    program("circle", compiled(gathered_circle, net=embedded), x, (y > 0).astype("int32"))
    program("contrastive", compiled(loss_of_all_rows, net=embedded))
    program("contrastive, eager", compiled(loss_of_all_rows, net=embedded, run_eagerly=True))
    program("own anchors", compiled(loss_of_own_anchors, net=embedded))
    program("synchronized normalization", synchronized_normalization, *skewed_rows(43))
    return found
