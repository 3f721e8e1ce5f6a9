"""The variance of N(mu, 1) by Keras' synchronized layer and by tfring's, against float64; prints a Markdown table.

    python benchmarks/sync_bn/precision.py

Two replicas hold 2048 rows of 64 channels each, in float32. "Exact" is the variance of these very float32 numbers,
computed in float64; rounding N(mu, 1) to float32 in the first place moves it by up to the last column.
"""

import numpy as np
import tensorflow as tf

(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)

import keras  # noqa: E402

import tfring  # noqa: E402

ROWS, CHANNELS = 4096, 64
MEANS = (0, 10, 100, 1_000, 10_000, 100_000)
DEVICES = ["CPU:0", "CPU:1"]


def variance_and_outputs(strategy, layer_class, x):
    """Returns the variance that one training step uses, and its result."""
    with strategy.scope():
        layer = layer_class(synchronized=True, momentum=0.0, epsilon=0.0)
        layer.build(x.shape)
    halves = np.split(x, 2)
    values = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(halves[context.replica_id_in_sync_group])
    )
    step = tf.function(lambda v: strategy.run(lambda x: layer(x, training=True), (v,)), autograph=False)
    outputs = strategy.experimental_local_results(step(values))
    return layer.moving_variance.numpy(), np.concatenate([o.numpy() for o in outputs])


def main():
    mirrored = tf.distribute.MirroredStrategy(DEVICES)
    ring = tfring.RingStrategy(devices=DEVICES)
    print("| mean | variance: Keras | tfring | outputs: Keras | tfring | rounding of the inputs |")
    print("|---|---|---|---|---|---|")
    for mean in MEANS:
        wide = np.random.default_rng(0).normal(size=(ROWS, CHANNELS)) + mean
        x = wide.astype("float32")
        exact = x.astype("float64")
        exact_outputs = (exact - exact.mean(0)) / exact.std(0)
        cells = [[], []]
        for strategy, layer in ((mirrored, keras.layers.BatchNormalization), (ring, tfring.SyncBatchNormalization)):
            variance, outputs = variance_and_outputs(strategy, layer, x)
            cells[0].append(np.abs(variance / exact.var(0) - 1).max())
            cells[1].append(np.abs(outputs - exact_outputs).max())
        rounding = np.abs(exact.var(0) / wide.var(0) - 1).max()
        texts = [f"{v:.0e}" if np.isfinite(v) else str(v) for v in (*cells[0], *cells[1], rounding)]
        print(f"| {mean:g} | {' | '.join(texts)} |", flush=True)


if __name__ == "__main__":
    main()
