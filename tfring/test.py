"""`tfring test`: trains a small model on all ranks, and compares it with one process.

`python -m tfring.test` runs one of the ranks.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from typing import Any, NamedTuple

import keras
import numpy as np

from tfring.callbacks import Throughput
from tfring.cluster import detect, detection
from tfring.errors import TfringError
from tfring.functions import broadcast
from tfring.strategy import RingStrategy

_SCHEMA = 1
_FAILED = 1
_BATCHES = 20
_ROWS_A_RANK = 128  # in a batch
_EPOCHS = 3  # the last is timed; the first traces
_NUM_IDS = 1000
_TOLERANCE = 1e-3  # relative to a variable's largest weight; rounding stays far below, even with TF32 on GPUs


class _Trained(NamedTuple):
    weights: list[np.ndarray]
    rows_a_second: float


def run(as_json: bool = False) -> int:
    """Runs this process's part of the test; rank 0 compares and prints.

    Args:
      as_json: Whether to print one JSON document (docs/clusters.md) instead of text. Defaults to False.

    Returns:
      The exit code: on rank 0, 1 if its weights are not those of one process; on all ranks, 1 if they could not train.
    """
    rank = 0
    try:
        said = detection.find(os.environ)
        rank = said.rank if said is not None else 0
        return _compare(as_json)
    except TfringError as error:
        print(f"tfring test: rank {rank}: {error}", file=sys.stderr, flush=True)
        return _FAILED


def _compare(as_json: bool) -> int:
    os.environ["TFRING_QUIET"] = "1"  # the verdict comes last
    cluster = detect()
    strategy = RingStrategy(cluster)
    batch = _ROWS_A_RANK * cluster.world_size
    with strategy.scope():
        model = _model()
    together = _train(model, batch)
    strategy.assert_equal(model.variables)
    differs = False
    if cluster.rank == 0:  # the others wait
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # the warning that the model trains alone
            alone = _train(_model(), batch)
        largest = max(map(_difference, together.weights, alone.weights))
        differs = not largest <= _TOLERANCE
        passed = "the weights are those of one process" if cluster.world_size > 1 else "this process trains"
        verdict = "Failed: the weights differ." if differs else f"Passed: {passed}."
        document = {
            "schema": _SCHEMA,
            "passed": not differs,
            "verdict": verdict,
            "cluster": {
                "source": cluster.source,
                "world_size": cluster.world_size,
                "num_hosts": cluster.num_nodes,
            },
            "steps": _EPOCHS * _BATCHES,
            "rows_per_step": batch,
            "rows_per_second": together.rows_a_second,
            "rows_per_second_alone": alone.rows_a_second,
            "difference": largest if np.isfinite(largest) else None,
            "tolerance": _TOLERANCE,
        }
        print(json.dumps(document) if as_json else _text(document, largest), flush=True)
    broadcast(differs)
    return _FAILED if differs else 0


def _text(document: dict[str, Any], difference: float) -> str:
    cluster = document["cluster"]
    workers = f"{cluster['world_size']} worker{'s' if cluster['world_size'] > 1 else ''}"
    hosts = f"{cluster['num_hosts']} host{'s' if cluster['num_hosts'] > 1 else ''}"
    rows, rows_alone = f"{document['rows_per_second']:,.0f}", f"{document['rows_per_second_alone']:,.0f}"
    if cluster["world_size"] == 1:
        return (
            f"tfring test: this process is alone ({cluster['source']}) and trains {rows} rows a second. To test two "
            f"workers, type: tfring test -n 2\n\n{document['verdict']}"
        )
    return (
        f"tfring test: {workers} on {hosts}, from {cluster['source']}; {document['steps']} steps of "
        f"{document['rows_per_step']} rows\n\n"
        f"Rows a second  {rows} with {workers}, {rows_alone} with rank 0 alone "
        "(this model is too small to predict the gain of larger ones)\n"
        f"Weights        differ from those of one process by {difference:.1e} of a variable's largest value; "
        f"{document['tolerance']:g} is allowed\n\n{document['verdict']}"
    )


def _model() -> keras.Model:
    """Returns a model with everything that ranks share: dense and sparse gradients, batch statistics, a metric."""
    keras.utils.set_random_seed(1)
    ids, features = keras.Input((), dtype="int32"), keras.Input((32,))
    x = keras.layers.Concatenate()([keras.layers.Embedding(_NUM_IDS, 16)(ids), features])
    x = keras.layers.BatchNormalization(synchronized=True)(keras.layers.Dense(128, activation="tanh")(x))
    model = keras.Model([ids, features], keras.layers.Dense(1)(x))
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", metrics=["mae"])
    return model


def _train(model: keras.Model, batch: int) -> _Trained:
    draw = np.random.default_rng(1)
    rows = _BATCHES * batch - 3  # makes the shares of the last batch unequal
    ids, features = draw.integers(_NUM_IDS, size=rows, dtype="int32"), draw.normal(size=(rows, 32)).astype("float32")
    labels = np.tanh(features[:, :1] + ids[:, None] / _NUM_IDS)
    throughput = Throughput(batch)
    history = model.fit([ids, features], labels, batch, _EPOCHS, verbose=0, callbacks=[throughput], shuffle=False)
    return _Trained(model.get_weights(), history.history["samples_per_second"][-1])


def _difference(received: np.ndarray, expected: np.ndarray) -> float:
    """Returns the largest difference relative to the largest value; NaN if either array contains NaN.

    >>> _difference(np.array([1.0, 2.0]), np.array([1.0, 4.0]))
    0.5
    """
    return float(np.max(np.abs(received - expected)) / max(float(np.max(np.abs(expected))), 1e-6))


if __name__ == "__main__":
    sys.exit(run(as_json="--json" in sys.argv[1:]))
