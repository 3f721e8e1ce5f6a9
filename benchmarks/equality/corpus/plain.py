"""Models as they stand in every guide: all of them equal one process."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from corpus import (
    BATCH,
    CLASSES,
    IDS,
    LENGTH,
    ROWS,
    binary,
    classes,
    compiled,
    dense,
    ids,
    images,
    labels,
    next_ids,
    one_hot,
    program,
    rows,
    same,
    sgd,
)


@program(rows)
def mse():
    return compiled(dense(), "mse", metrics=["mae"])


@program(rows, sample_weight=np.linspace(0.5, 2.0, ROWS))
def sample_weights():
    return compiled(dense(), "mse", weighted_metrics=["mae"])


@program(classes, class_weight={0: 0.5, 1: 1.0, 2: 3.0})
def class_weights():
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return compiled(dense(CLASSES), loss, metrics=["accuracy"])


@program(one_hot)
def label_smoothing():
    loss = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)
    return compiled(dense(CLASSES), loss, metrics=["accuracy", keras.metrics.TopKCategoricalAccuracy(2)])


@program(labels)
def regularizers_of_all_kinds():
    model = keras.Sequential(
        [
            layers.Input((6,)),
            layers.Dense(5, "tanh", kernel_regularizer=keras.regularizers.L1L2(0.01, 0.02), bias_regularizer="l2"),
            layers.Dense(CLASSES, "sigmoid", activity_regularizer="l2"),
        ]
    )
    return compiled(model, "binary_crossentropy", metrics=["binary_accuracy", keras.metrics.AUC(50)])


@program(rows)
def adam_clipnorm_and_ema():
    optimizer = keras.optimizers.Adam(0.02, clipnorm=0.3, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=2)
    return compiled(dense(), "mse", optimizer)


@program(rows)
def global_clipnorm_weight_decay_accumulation():
    optimizer = keras.optimizers.AdamW(
        0.02, weight_decay=0.01, global_clipnorm=0.5, gradient_accumulation_steps=2, epsilon=1e-3
    )
    return compiled(dense(), "huber", optimizer)


@program(rows)
def schedule_of_the_rate():
    rate = keras.optimizers.schedules.CosineDecay(0.1, 6, alpha=0.1)
    return compiled(dense(), "log_cosh", sgd(rate, momentum=0.9, nesterov=True))


@program(binary)
def focal_crossentropy_and_metrics():
    metrics = [keras.metrics.Precision(), keras.metrics.Recall(), keras.metrics.F1Score(threshold=0.5)]
    loss = keras.losses.BinaryFocalCrossentropy(apply_class_balancing=True)
    return compiled(dense(1, "sigmoid"), loss, metrics=metrics)


@program(binary)
def dice_of_keras():
    return compiled(dense(1, "sigmoid"), keras.losses.Dice())


@program(binary)
def tversky_of_keras():
    return compiled(dense(1, "sigmoid"), keras.losses.Tversky(alpha=0.3, beta=0.7))


@program(rows)
def hinge():
    return compiled(dense(), lambda y, p: keras.losses.hinge(ops.sign(y), p))


@program(binary)
def hinge_of_keras():
    return compiled(dense(), keras.losses.SquaredHinge())


@program(images)
def convolutions_and_batch_normalization_synchronized():
    model = keras.Sequential(
        [
            layers.Input((6, 6, 2)),
            layers.Conv2D(3, 3, padding="same"),
            layers.BatchNormalization(synchronized=True, momentum=0.8),
            layers.Activation("tanh"),
            layers.MaxPooling2D(),
            layers.DepthwiseConv2D(2),
            layers.GroupNormalization(1),
            layers.Flatten(),
            layers.Dense(CLASSES),
        ]
    )
    return compiled(model, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])


@program(ids)
def masked_embedding_and_lstm():
    model = keras.Sequential(
        [layers.Input((LENGTH,)), layers.Embedding(IDS, 4, mask_zero=True), layers.LSTM(4), layers.Dense(1)]
    )
    return compiled(model, "mse")


@program(ids)
def masked_bidirectional_gru():
    model = keras.Sequential(
        [
            *(layers.Input((LENGTH,)), layers.Embedding(IDS, 4, mask_zero=True)),
            *(layers.Bidirectional(layers.GRU(3, return_sequences=True)), layers.TimeDistributed(layers.Dense(2))),
            *(layers.GlobalAveragePooling1D(), layers.Dense(1)),
        ]
    )
    return compiled(model, "mse", keras.optimizers.RMSprop(0.01, epsilon=1e-3))


@program(next_ids)
def masked_language_model_of_keras():
    model = keras.Sequential(
        [
            *(layers.Input((LENGTH,)), layers.Embedding(IDS, 4, mask_zero=True)),
            *(layers.GRU(4, return_sequences=True), layers.Dense(IDS)),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return compiled(model, loss, weighted_metrics=["accuracy"])


@program(next_ids)
def crossentropy_that_ignores_a_class():
    model = keras.Sequential([layers.Input((LENGTH,)), layers.Embedding(IDS, 4), layers.Dense(IDS)])
    return compiled(model, keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0))


@program(ids)
def transformer():
    inputs = layers.Input((LENGTH,))
    h = layers.Embedding(IDS, 4)(inputs)
    h = layers.LayerNormalization()(h + layers.MultiHeadAttention(2, 2)(h, h, use_causal_mask=True))
    h = layers.LayerNormalization()(h + layers.Dense(4, "gelu")(h))
    model = keras.Model(inputs, layers.Dense(1)(layers.GlobalMaxPooling1D()(h)))
    return compiled(model, "mse", keras.optimizers.Adam(0.01, epsilon=1e-3))


@program(same)
def autoencoder_with_two_outputs():
    inputs = layers.Input((6,))
    code = layers.Dense(3, "tanh", name="code")(inputs)
    outputs = {"out": layers.Dense(6, name="out")(code), "size": layers.UnitNormalization()(code)}
    return compiled(keras.Model(inputs, outputs), {"out": "mse"}, loss_weights={"out": 2.0})


@program(rows)
def steps_per_execution():
    return compiled(dense(), "mse", steps_per_execution=2)


@program(binary)
def loss_scale_optimizer():
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01, epsilon=1e-3), initial_scale=64.0)
    return compiled(dense(), keras.losses.BinaryCrossentropy(from_logits=True), optimizer)


@program(rows)
def functional_with_shared_layers():
    inputs = layers.Input((6,))
    shared = layers.Dense(6, "tanh")
    h = layers.Concatenate()([shared(inputs), layers.Multiply()([shared(shared(inputs)), inputs])])
    return compiled(keras.Model(inputs, layers.Dense(1, kernel_constraint="max_norm")(h)), "mae")


@program(rows)
def mean_written_by_hand_in_compile():
    return compiled(dense(), lambda y, p: tf.reduce_mean(tf.square(y - p)))


@program(rows)
def value_a_row_in_compile():
    return compiled(dense(), lambda y, p: ops.mean(ops.abs(y - p) ** 1.5, axis=-1))


@program(rows)
def sum_over_rows_by_their_number():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.net = dense()

        def call(self, x):
            return self.net(x)

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                per_row = keras.losses.mean_squared_error(y, self(x, training=True))
                loss = tf.reduce_sum(per_row) / tf.cast(tf.shape(x)[0], per_row.dtype)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"loss": loss}

    return compiled(Own())


@program(rows)
def compute_average_loss_of_tensorflow():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.net = dense()

        def call(self, x):
            return self.net(x)

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                per_row = tf.square(y - self(x, training=True))[:, 0]
                loss = tf.nn.compute_average_loss(per_row, global_batch_size=BATCH)
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": loss}

    return compiled(Own())
