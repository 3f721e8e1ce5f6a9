"""Digits with 4 images a worker: synchronized batch normalization against plain, and against one process.

    tfring launch -n 4 examples/digits_sync_bn.py

A small residual network learns scikit-learn's digits from batches of 16 images, three times from the same initial
weights: on all workers with `tfring.SyncBatchNormalization`, on all workers with `keras.layers.BatchNormalization`,
and in one process. The synchronized run is the one-process run; the plain one normalizes by a worker's few images
and is not. Prints both comparisons and plots the accuracy of each epoch.
"""

from __future__ import annotations

import argparse
import pathlib

import keras
import numpy as np
from sklearn.datasets import load_digits

import tfring

BATCH = 16


def digits(shuffled):
    """`(x, y, x_test, y_test)`: 8x8 images of 0 to 9, in random order.

    Args:
      shuffled: False sorts each batch by digit, so that every worker sees other digits, as when each reads files of
        its own.
    """
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = x[order].reshape(-1, 8, 8, 1).astype("float32") / 16, y[order]
    num_test = len(x) // 5
    x_test, y_test, x, y = x[:num_test], y[:num_test], x[num_test:], y[num_test:]
    if not shuffled:
        order = np.concatenate([i + np.argsort(y[i : i + BATCH], kind="stable") for i in range(0, len(y), BATCH)])
        x, y = x[order], y[order]
    return x, y, x_test, y_test


def residual_network(normalization):
    """Three residual blocks, seven normalizations.

    Its activations are smooth: a ReLU makes another derivative of the last bit of a sum, and two runs that add up in
    another order then drift apart within an epoch, in one process too.
    """
    layers = keras.layers

    def convolution(x, filters, stride=1):
        return normalization()(layers.Conv2D(filters, 3, stride, padding="same", use_bias=False)(x))

    inputs = keras.Input((8, 8, 1))
    x = layers.Activation("silu")(convolution(inputs, 16))
    for filters, stride in ((16, 1), (32, 2), (32, 1)):
        y = layers.Activation("silu")(convolution(x, filters, stride))
        y = convolution(y, filters)
        if stride > 1:
            x = layers.Conv2D(filters, 1, stride)(x)
        x = layers.Activation("silu")(layers.Add()([x, y]))
    outputs = layers.Dense(10)(layers.GlobalAveragePooling2D()(x))
    model = keras.Model(inputs, outputs)
    model.compile(
        keras.optimizers.SGD(0.05, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def train(data, normalization, epochs, strategy=None):
    """Trains from the same initial weights; the weights after one epoch and the test accuracy after each."""
    x, y, x_test, y_test = data
    keras.utils.set_random_seed(1)
    if strategy is None:
        model = residual_network(normalization)
    else:
        with strategy.scope():
            model = residual_network(normalization)
    after_one = []
    note = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: after_one.append(model.get_weights()) if epoch == 0 else None
    )
    history = model.fit(
        x,
        y,
        batch_size=BATCH,
        epochs=epochs,
        shuffle=False,
        validation_data=(x_test, y_test),
        verbose=0,
        callbacks=[note],
    ).history
    return after_one[0], history["val_accuracy"]


def difference(weights, others):
    """The largest difference of two lists of weights."""
    return max(float(np.abs(a - b).max()) for a, b in zip(weights, others, strict=True))


def plot(curves, path, title):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    styles = {"one process": dict(color="black", linewidth=5, alpha=0.25)}
    for name, accuracy in curves.items():
        axes.plot(range(1, len(accuracy) + 1), accuracy, marker=".", label=name, **styles.get(name, {}))
    axes.set(xlabel="epoch", ylabel="accuracy on the test images", title=title)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


def compare(strategy, data, epochs):
    """Trains all three ways; rank 0 also alone.

    Returns:
      `{name: (accuracy after each epoch, its largest distance from one process, that of any weight after one epoch)}`
      on rank 0, None on the others.
    """
    runs = {
        "SyncBatchNormalization": train(data, tfring.SyncBatchNormalization, epochs, strategy),
        "BatchNormalization": train(data, keras.layers.BatchNormalization, epochs, strategy),
    }
    if not strategy.cluster.is_chief:
        return None
    runs["one process"] = train(data, keras.layers.BatchNormalization, epochs)
    want_weights, want_accuracy = runs["one process"]
    return {
        name: (
            accuracy,
            max(abs(a - b) for a, b in zip(accuracy, want_accuracy, strict=True)),
            difference(weights, want_weights),
        )
        for name, (weights, accuracy) in runs.items()
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--shuffled", action="store_true", help="all workers see all digits")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("results", "digits_sync_bn.png"))
    arguments = parser.parse_args()

    strategy = tfring.RingStrategy()
    workers = strategy.cluster.world_size
    results = compare(strategy, digits(arguments.shuffled), arguments.epochs)
    if results:
        title = f"Digits, {workers} workers with {BATCH // workers} images each"
        print(f"{title}; each worker sees {'all' if arguments.shuffled else 'other'} digits\n")
        print("| | accuracy | off one process: most in any epoch | any weight, after one epoch |\n|---|---|---|---|")
        for name, (accuracy, off, weights_off) in results.items():
            print(f"| {name} | {accuracy[-1]:.3f} | {off:.3f} | {weights_off:.0e} |")
        plot({name: accuracy for name, (accuracy, *_) in results.items()}, arguments.output, title)
        print(f"\nThe curves: {arguments.output}")
    strategy.barrier()
    strategy.close()


if __name__ == "__main__":
    main()
