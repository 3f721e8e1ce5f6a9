"""A small StarDist2D on images of discs: two epochs of random patches, drawn alike on all ranks by `seed`."""

from __future__ import annotations

import models
import numpy as np
from stardist.models import Config2D, StarDist2D


def discs(number, seed):
    """Returns images float32 `[64, 64]` and their labels."""
    random = np.random.default_rng(seed)
    rows, columns = np.mgrid[:64, :64]
    images, labels = [], []
    for _ in range(number):
        label = np.zeros((64, 64), "uint16")
        for i in range(1, 6):
            row, column = random.integers(8, 56, 2)
            label[(rows - row) ** 2 + (columns - column) ** 2 < 36] = i
        images.append(((label > 0) + random.normal(scale=0.1, size=label.shape)).astype("float32"))
        labels.append(label)
    return images, labels


def train(strategy, folder):
    config = Config2D(
        n_rays=8,
        grid=(2, 2),
        unet_n_depth=1,
        unet_n_filter_base=4,
        net_conv_after_unet=8,
        train_patch_size=(32, 32),
        train_batch_size=3,
        train_steps_per_epoch=4,
        train_epochs=2,
        train_tensorboard=False,
        train_reduce_lr=None,
    )
    with strategy.scope():
        model = StarDist2D(config, basedir=None)
        model.prepare_for_training()
    history = model.train(*discs(8, 0), validation_data=discs(3, 1), seed=1)
    predicted = model.keras_model.predict(np.stack(discs(3, 1)[0])[..., None], verbose=0)
    loss = history.history["loss"], history.history["val_loss"]
    return {"loss": loss, "predicted": predicted[0], "weights": models.weights(model.keras_model)}
