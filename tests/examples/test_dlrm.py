"""The DLRM example: two workers train as one process, each with its share of the large tables."""

from __future__ import annotations

import pathlib
import sys

import harness
import pytest
from harness import workers

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))
import dlrm  # noqa: E402
import movielens_data  # noqa: E402


def trained(kind):
    """In a worker: the curves of a short run, and the bytes it sent."""
    if kind == "movielens":
        data = dlrm.movielens(movielens_data.DEFAULT_FOLDER, 6_000)
    else:
        data = dlrm.generated(5_000, examples=2_000)
    strategy = harness.strategy()
    before = strategy.bytes_sent()
    return dlrm.train(strategy, *data, epochs=2, batch_size=500, dim=8), strategy.bytes_sent() - before


@pytest.mark.parametrize("kind", ["movielens", pytest.param("generated", marks=pytest.mark.long)])
def test_as_one_process(kind):
    if kind == "movielens":
        movielens_data.fetch()
    [(alone, _)] = workers(1).run(trained, kind)
    for curves, sent in workers(2).run(trained, kind):
        assert curves.keys() == alone.keys() and len(curves["val_auc"]) == 2
        for name, values in curves.items():
            assert values == pytest.approx(alone[name], abs=1e-4)
        assert sent > 0
    assert alone["loss"][1] < alone["loss"][0]
