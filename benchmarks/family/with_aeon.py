"""TimeCNNClassifier in the scope, its best model saved under a fixed name in one folder; predictions."""

from __future__ import annotations

import models
import numpy as np
from aeon.classification.deep_learning import TimeCNNClassifier


def train(strategy, folder):
    random = np.random.default_rng(0)
    y = random.integers(0, 2, 75)
    x = (np.sin(np.arange(24) * (1 + y[:, None])) + random.normal(scale=0.3, size=(75, 24)))[:, None].astype("float32")
    with strategy.scope():
        classifier = TimeCNNClassifier(
            n_epochs=3,
            batch_size=16,
            random_state=1,
            save_best_model=True,
            best_file_name="best",
            file_path=f"{folder}/",
        )
        classifier.fit(x, y)
        probabilities = classifier.predict_proba(x)
    history = classifier.history.history["loss"]
    return {"loss": history, "probabilities": probabilities, "weights": models.weights(classifier.training_model_)}
