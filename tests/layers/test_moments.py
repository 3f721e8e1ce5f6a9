"""Moments of a replica's elements are right where float32 sums are not; merged, they are those of the whole."""

import numpy as np
import pytest
import tensorflow as tf

from tfring.layers.moments import channel_sums, local_moments, mean_and_variance, merge


def exact(x, axis, mask=None):
    """Count, mean and sum of squared deviations of each channel, in float64."""
    x = np.moveaxis(x.astype("float64"), axis, -1)
    mask = np.ones(x.shape, bool) if mask is None else np.moveaxis(mask, axis, -1)
    columns = [x[..., c][mask[..., c]] for c in range(x.shape[-1])]
    return np.array(
        [
            [len(c) for c in columns],
            [c.mean() if len(c) else 0 for c in columns],
            [((c - c.mean()) ** 2).sum() if len(c) else 0 for c in columns],
        ]
    )


def skewed(shape, seed=0):
    generator = np.random.default_rng(seed)
    return (generator.normal(size=shape) * generator.uniform(1, 9, shape[-1:]) + 5).astype("float32")


@pytest.mark.parametrize(
    ("shape", "axis"),
    [((7, 3), 1), ((5, 4, 3), 2), ((5, 4, 3), 1), ((3, 2, 5, 4), 1), ((2, 3, 2, 3, 4), 4), ((2, 3, 2, 3, 4), 2)],
)
@pytest.mark.parametrize("masked", [False, True])
def test_any_rank_and_axis(shape, axis, masked):
    x = skewed(shape)
    mask = np.random.default_rng(1).random(shape) < 0.7 if masked else None
    got = local_moments(tf.constant(x), axis, None if mask is None else tf.constant(mask))
    np.testing.assert_allclose(got, exact(x, axis, mask), rtol=1e-6)


@pytest.mark.parametrize("rows", [255, 256, 257, 700])
def test_blocks_and_the_rest(rows):
    x = skewed((rows, 3))
    np.testing.assert_allclose(channel_sums(tf.constant(x), 1), x.astype("float64").sum(0), rtol=1e-6)


def test_no_elements():
    assert not np.any(local_moments(tf.zeros([0, 4, 3]), 2))
    nothing = tf.zeros([2, 3], tf.bool)
    assert not np.any(local_moments(tf.fill([2, 3], np.nan), 1, nothing))


@pytest.mark.parametrize("mean", [0, 10, 1e2, 1e3, 1e4, 1e5])
def test_variance_about_a_large_mean(mean):
    x = (np.random.default_rng(0).normal(size=(4096, 8)) + mean).astype("float32")
    # Merged from parts, of which each has a mean of its own.
    parts = [local_moments(tf.constant(part), 1) for part in np.split(x, [100, 101, 3000])]
    for moments in (local_moments(tf.constant(x), 1), merge(tf.stack(parts))):
        got_mean, variance = mean_and_variance(moments)
        wide = x.astype("float64")
        np.testing.assert_allclose(variance, wide.var(0), rtol=1e-6)
        np.testing.assert_allclose(got_mean, wide.mean(0), rtol=1e-7, atol=1e-7)


def test_a_million_rows():
    x = (np.random.default_rng(0).normal(size=(1_000_000, 2)) + 1000).astype("float32")
    _, variance = mean_and_variance(local_moments(tf.constant(x), 1))
    np.testing.assert_allclose(variance, x.astype("float64").var(0), rtol=1e-6)


def test_merge_is_that_of_the_whole():
    x = np.random.default_rng(0).normal(size=(50, 3)) * [1, 10, 100] + [0, 5, -70]
    parts = [local_moments(tf.constant(part), 1) for part in np.split(x, [0, 3, 3, 20, 21])]
    np.testing.assert_allclose(merge(tf.stack(parts)), exact(x, 1), rtol=1e-13)
    twice = merge(tf.stack([tf.stack([part, part]) for part in parts]))  # a dimension in between
    np.testing.assert_allclose(twice, np.stack([exact(x, 1)] * 2), rtol=1e-13)


def test_merge_of_nothing():
    assert not np.any(merge(tf.zeros([4, 3, 5], tf.float64)))
