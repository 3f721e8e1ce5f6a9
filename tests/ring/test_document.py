"""The programs in docs/collectives.md run, and give what stands beside them."""

import pathlib
import re

import numpy as np
import pytest
import ranks
from harness import workers
from test_ring_ops import join

DOCUMENT = pathlib.Path(__file__).parents[2] / "docs" / "collectives.md"


def blocks(of_tensorflow=False):
    found = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(), re.DOTALL | re.MULTILINE)
    return [block for block in found if ("tf." in block) == of_tensorflow]


def results(block):
    """Expressions beside which a result stands: `expression   # [1 2]`, or `# rank 1: [1 2]`."""
    pattern = r"^(\S.*?)\s+# (?:rank (\d): )?(\[[\d. ]+\])"
    return re.findall(pattern, block, re.MULTILINE)


def play(cluster, first, *others):
    given = {"cluster": cluster}
    exec(first.replace("tfring.cluster.detect()", "cluster"), given)
    np.testing.assert_array_equal(given["total"], [4.0, 4.0, 4.0])
    checked = 0
    with ranks.join(cluster) as ring:
        given["ring"] = ring
        given["table"] = np.arange(ring.rank, 1000, 4)[:, None] * np.ones(3)  # a row's number, in each column
        for block in others:
            exec(block, given)
            for expression, rank, text in results(block):
                value = eval(expression, given)
                assert rank not in ("", str(ring.rank)) or str(value) == text, expression
                checked += 1
        np.testing.assert_array_equal(given["rows"], given["ids"][:, None] * np.ones(3))
        assert dict(zip(given["each"].tolist(), given["sums"][:, 0], strict=True)) == {3: 1.0, 7: 5.0, 9: 3.0}
        np.testing.assert_array_equal(given["later"], [0, 4, 8])
        assert given["pair"].rank == {0: 0, 2: 1}.get(ring.rank, -1)
        assert given["row"].ranks == ((0, 1), (2, 3))[ring.rank // 2]
    return checked


def test_programs_on_arrays():
    assert len(blocks()) == 5
    assert set(ranks.run(4, play, *blocks())) == {2}


def train(name, block):
    import tensorflow as tf

    def half(seed):
        weights = tf.Variable(tf.random.stateless_normal([64, 64], [seed, 0]))
        return weights, lambda x: tf.tanh(x @ weights)

    (one, first), (two, last) = half(1), half(2)

    def second(y):
        return tf.reduce_sum(last(y) ** 2)

    with join(name) as ring:
        mine = tf.Module()
        mine.weights = (one, two)[ring.rank]
        given = {"ring": ring, "tf": tf, "first": first, "second": second, "mine": mine}
        exec(block.replace("@tf.function", "@tf.function(autograph=False)"), given)
        x = tf.random.stateless_normal([5, 64], [3, 0])
        (gradient,) = given["step"](x, tf.Variable(0.0))
    with tf.GradientTape() as tape:
        loss = second(first(x))
    np.testing.assert_allclose(gradient, tape.gradient(loss, mine.weights), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("block", blocks(of_tensorflow=True))
def test_programs_on_tensors(block):
    workers(2).run(train, "document", block)
