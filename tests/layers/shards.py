"""Helpers of the layer tests: skewed batches cut into unequal shards, and training a layer on one of them.

Every row has a mean and a scale of its own, and so has every channel and every step, so that no shard's statistics
look like another's and local statistics cannot pass.
"""

from __future__ import annotations

import contextlib

import numpy as np

STEPS = 20


def batches(shape, *, dtype="float32", axis=-1, masked=False, seed=0):
    """`STEPS` tuples `(x, slope, mask)`: inputs, what the outputs are multiplied by in the loss, mask or None."""
    generator = np.random.default_rng(seed)
    rows, channels = shape[0], shape[axis]
    row = np.linspace(-2, 2, rows).reshape([rows] + [1] * (len(shape) - 1))
    channel = np.linspace(0.5, 1.5, channels).reshape([-1] + [1] * (len(shape) - 1 - axis % len(shape)))
    for step in range(STEPS):
        x = generator.normal(size=shape) * (0.3 + row**2) * channel + 3 * row + channel + 0.1 * step
        mask = None
        if masked:
            mask = generator.random(shape[:-1]) < 0.6
            mask[0] = False  # a row of the first rank, all of it
        yield x.astype(dtype), generator.normal(size=shape).astype(dtype), mask


def bounds(rows, parts, empty=()):
    """Returns the bounds of unequal shards; those in `empty` get no row."""
    weights = np.array([0 if part in empty else 1 + 2 * (part % 2) for part in range(parts)], "float64")
    ends = np.round(np.cumsum(weights) / weights.sum() * rows).astype(int)
    return list(zip([0, *ends[:-1]], ends, strict=True))


def train(layer, data, strategy=None, shards=None, eager=False):
    """Trains a built layer on `data` with a loss of `sum(outputs * slope)`.

    Args:
      layer: batch normalization.
      data: what `batches` yields.
      strategy: runs each step on its replicas, one shard each; None trains on the whole batch.
      shards: `(begin, end)` of each replica of this worker.
      eager: whether the steps run outside of a `tf.function`.

    Returns:
      `{"outputs": [...], "d_inputs": [...], "d_gamma": ...}`, an array a step, of all shards of this worker one
      after the other, and the weights at the end.
    """
    import tensorflow as tf

    parameters = [v for v in (layer.gamma, layer.beta) if v is not None]

    def step(x, slope, mask):
        with tf.GradientTape() as tape:
            tape.watch(x)
            outputs = layer(x, training=True, mask=mask)
            loss = tf.reduce_sum(tf.cast(outputs * tf.cast(slope, outputs.dtype), tf.float64))
        d_x, *d_parameters = tape.gradient(loss, [x, *(v.value for v in parameters)])
        if strategy is not None and d_parameters:
            context = tf.distribute.get_replica_context()
            d_parameters = context.all_reduce(tf.distribute.ReduceOp.SUM, d_parameters)
        for parameter, gradient in zip(parameters, d_parameters, strict=True):
            parameter.assign(parameter - tf.cast(0.01, gradient.dtype) * gradient)
        return outputs, d_x, *d_parameters

    def run(*args):
        return step(*args) if strategy is None else strategy.run(step, args=args)

    if not eager:
        run = tf.function(run, autograph=False, reduce_retracing=True)
    names = ["outputs", "d_inputs", *(f"d_{v.name}" for v in parameters)]
    results = {name: [] for name in names}
    for x, slope, mask in data:
        args = (x, slope) if mask is None else (x, slope, mask)
        if strategy is None:
            args = [tf.constant(a) for a in args]
        else:
            args = [per_replica(strategy, [a[begin:end] for begin, end in shards]) for a in args]
        values = run(*args, *([None] if mask is None else []))
        for name, value in zip(names, values, strict=True):
            local = [value] if strategy is None else strategy.experimental_local_results(value)
            local = [np.asarray(tf.cast(v, tf.float64)) for v in local]
            results[name].append(local[0] if name in ("d_gamma", "d_beta") else np.concatenate(local))
    for weight in layer.weights:
        results[weight.name] = [np.asarray(tf.cast(weight.value, tf.float64))]
    return results


def per_replica(strategy, values):
    """One value a replica of this worker, as `strategy.run` takes them."""
    import tensorflow as tf

    first = strategy.cluster.rank * len(values) if hasattr(strategy, "cluster") else 0
    return strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(values[context.replica_id_in_sync_group - first])
    )


def assert_close(got, want, rows=None, tolerance=1e-5, weights_tolerance=None):
    """Every array of `got` equals that of `want`, of which outputs and inputs' gradients are cut to `rows`."""
    assert got.keys() == want.keys()
    for name, values in got.items():
        allowed = tolerance if name in ("outputs", "d_inputs") else weights_tolerance or tolerance
        for step, (a, b) in enumerate(zip(values, want[name], strict=True)):
            scale = np.abs(b).max()
            b = b[rows or slice(None)] if name in ("outputs", "d_inputs") else b
            assert a.shape == b.shape, (name, step, a.shape, b.shape)
            assert np.isfinite(a).all(), (name, step)
            error = np.abs(a - b).max(initial=0) / scale
            assert error <= allowed, f"{name}, step {step}: {error:.1e} > {allowed:.0e}"


def bits(layer):
    """The weights' bits of every replica of this worker."""
    copies = [getattr(v.value, "values", [v.value]) for v in layer.weights]
    return {b"".join(np.asarray(c).tobytes() for c in replica) for replica in zip(*copies, strict=True)}


@contextlib.contextmanager
def exact_masks():
    """Keras adds its epsilon, 1e-7, to the count of unmasked elements."""
    import keras

    before = keras.config.epsilon()
    keras.config.set_epsilon(1e-30)
    try:
        yield
    finally:
        keras.config.set_epsilon(before)
