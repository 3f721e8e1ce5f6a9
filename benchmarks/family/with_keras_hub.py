"""A BERT of two layers from its config, no preset: classification with padding masks, two epochs, ragged batches."""

from __future__ import annotations

import keras
import keras_hub
import models
import numpy as np


def train(strategy, folder):
    random = np.random.default_rng(0)
    tokens = random.integers(1, 100, (75, 16), "int32")
    x = {
        "token_ids": tokens,
        "segment_ids": np.zeros_like(tokens),
        "padding_mask": (np.arange(16) < random.integers(4, 17, (75, 1))).astype("int32"),
    }
    y = (tokens[:, 0] % 2).astype("int32")
    with strategy.scope():
        backbone = keras_hub.models.BertBackbone(
            vocabulary_size=100,
            num_layers=2,
            num_heads=2,
            hidden_dim=32,
            intermediate_dim=64,
            max_sequence_length=16,
            dropout=0.0,
        )
        model = keras_hub.models.BertTextClassifier(backbone, num_classes=2, dropout=0.0)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.05), loss, metrics=["accuracy"])
    history = model.fit(x, y, batch_size=16, epochs=2, verbose=0)
    predicted = model.predict(x, batch_size=16, verbose=0)
    return {"loss": history.history["loss"], "predicted": predicted, "weights": models.weights(model)}
