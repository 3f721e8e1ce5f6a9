"""BasicWorkflow with a coupling flow, offline data, two epochs in the scope, without its running standardization."""

from __future__ import annotations

import bayesflow
import keras
import models
import numpy as np


def train(strategy, folder):
    random = np.random.default_rng(0)
    theta = random.normal(size=(200, 2)).astype("float32")
    data = {"theta": theta, "x": theta + random.normal(scale=0.3, size=(200, 2)).astype("float32")}
    with strategy.scope():
        workflow = bayesflow.BasicWorkflow(
            inference_network=bayesflow.networks.CouplingFlow(
                depth=2, subnet_kwargs={"widths": (16, 16), "dropout": 0.0, "activation": "tanh"}
            ),
            inference_variables=["theta"],
            inference_conditions=["x"],
            optimizer=keras.optimizers.SGD(0.01),
            standardize=None,
        )
        history = workflow.fit_offline(data, epochs=2, batch_size=32, verbose=0)
    density = workflow.log_prob(data)
    return {"loss": history.history["loss"], "density": density, "weights": models.weights(workflow.approximator)}
