"""KerasClassifier on all workers, in a pipeline of scikit-learn and its cross-validation of three folds."""

from __future__ import annotations

import models
from scikeras.wrappers import KerasClassifier
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler


def train(strategy, folder):
    x, y = models.digits()

    def build():
        with strategy.scope():
            return models.dense()

    classifier = make_pipeline(StandardScaler(), KerasClassifier(build, epochs=2, batch_size=32, verbose=0))
    scores = cross_val_score(classifier, x, y, cv=3)
    classifier.fit(x, y)
    fitted = classifier[-1]
    return {
        "scores": scores,
        "loss": fitted.history_["loss"],
        "probabilities": classifier.predict_proba(x),
        "weights": models.weights(fitted.model_),
    }
