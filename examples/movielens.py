"""A movie recommender on MovieLens-100K, trained by one worker or by several, with the same result.

    python examples/movielens.py                       one worker
    tfring launch -n 2 examples/movielens.py           two workers on this machine

It predicts how many stars a person gives a movie, from embeddings of both and from what is known of them:
age, gender and occupation, year and genres. It learns from everyone's older ratings and is measured on each
one's newest tenth, beside two predictors that know less. The lines marked (1) to (4) are there for tfring.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import sys
import time

import keras
import movielens_data
import numpy as np
import tensorflow as tf
from keras import layers
from movielens_quality import baselines, quality

import tfring  # (1)


def main() -> None:
    args = parse_arguments()
    keras.utils.set_random_seed(args.seed)
    strategy = tfring.RingStrategy(communication=args.communication)  # (2)
    first = strategy.cluster.is_chief

    data = load_data(strategy, args)
    mean = float(data.train.stars.mean())
    steps = args.epochs * math.ceil(len(data.train.stars) / args.batch_size)
    learning_rate = keras.optimizers.schedules.CosineDecay(args.learning_rate, steps)
    with strategy.scope():  # (3)
        model = build_model(data, args.embedding_dim, mean)
        model.compile(
            optimizer=keras.optimizers.AdamW(learning_rate, weight_decay=args.weight_decay),
            loss="mse",
            metrics=[keras.metrics.RootMeanSquaredError(name="rmse")],
        )
    if first:
        print(f"{len(data.train.stars):,} ratings to learn from, {len(data.held_out.stars):,} held out")
        print(f"{model.count_params():,} weights, workers: {strategy.cluster.world_size}")

    # The batch size is that of the whole: each worker takes its share of every batch.
    timer = EpochTimer()
    history = model.fit(
        *data.train,
        batch_size=args.batch_size,
        epochs=args.epochs,
        validation_data=data.held_out,
        callbacks=[timer, *([tfring.callbacks.Backup(args.backup, every_steps=20)] if args.backup else [])],
        verbose=2 if first else 0,
    )
    predicted = model.predict(data.held_out.features, batch_size=args.batch_size, verbose=0)[:, 0]
    bytes_sent = of_each_worker(strategy, strategy.bytes_sent())

    if not first:  # (4)
        return
    figures = {
        "workers": strategy.cluster.world_size,
        "communication": args.communication,
        "batch_size": args.batch_size,
        "epochs": args.epochs,
        "metrics": quality(data.held_out, predicted),
        "baselines": baselines(data, mean),
        "history": {
            "train_rmse": history.history["rmse"],
            "held_out_rmse": history.history["val_rmse"],
        },
        "epoch_seconds": timer.seconds,
        "bytes_sent": bytes_sent,
    }
    report(figures)
    save_plot(figures, args.output_dir / f"movielens_{figures['workers']}_workers.png")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--backup", type=pathlib.Path, help="go on from what is saved in this folder, and save there")
    parser.add_argument("--batch-size", type=int, default=1024, help="of all workers together (default 1024)")
    parser.add_argument("--embedding-dim", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--weight-decay", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--communication", choices=("ring", "tensorflow"), default="ring")
    parser.add_argument("--max-ratings", type=int, help="use the oldest ones only, for a quick try")
    parser.add_argument("--data-dir", type=pathlib.Path, default=movielens_data.DEFAULT_FOLDER)
    parser.add_argument("--output-dir", type=pathlib.Path, default=pathlib.Path("results"))
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="writes the figures there")
    return parser.parse_args()


def load_data(strategy: tfring.RingStrategy, args: argparse.Namespace) -> movielens_data.MovieLens:
    """One worker of each machine downloads, the others wait for it."""
    try:
        if strategy.cluster.local_rank == 0:
            movielens_data.fetch(args.data_dir)
        strategy.barrier()
        return movielens_data.load(args.data_dir, args.max_ratings)
    except movielens_data.DataError as error:
        sys.exit(str(error))


def build_model(data: movielens_data.MovieLens, dim: int, mean: float) -> keras.Model:
    """Stars = bias of the person + bias of the movie + a tower over both, their features and their match.

    tanh, because it has no kink. The order in which float32 numbers are summed, and with it their last bit,
    depends on the number of workers; in 700 steps relu's kink lets that bit grow to 2e-3 in the RMSE, with
    tanh it stays below 1e-5.
    """
    inputs = {name: keras.Input((), name=name, dtype="int32") for name in data.num_categories}
    inputs["genres"] = keras.Input(data.train.features["genres"].shape[1:], name="genres")

    def embedding(name, width, initializer=None):
        initializer = initializer or keras.initializers.RandomNormal(stddev=0.05)
        num = data.num_categories[name]
        return layers.Embedding(num, width, embeddings_initializer=initializer)(inputs[name])

    def side(width):
        return keras.Sequential([layers.Dense(4 * width, activation="tanh"), layers.Dense(width)])

    known_of_user = [embedding(name, 8) for name in ("age", "gender", "occupation")]
    known_of_movie = [embedding("year", 8), layers.Dense(8)(inputs["genres"])]
    user = layers.Concatenate()([embedding("user", dim), *known_of_user])
    movie = layers.Concatenate()([embedding("movie", dim), *known_of_movie])
    match = layers.Multiply()([side(dim)(user), side(dim)(movie)])
    tower = layers.Concatenate()([user, movie, match])
    tower = layers.Dense(64, activation="tanh")(tower)
    tower = layers.Dense(32, activation="tanh")(tower)
    by_tower = layers.Dense(1, bias_initializer=keras.initializers.Constant(mean))(tower)
    stars = layers.Add()([by_tower, embedding("user", 1, "zeros"), embedding("movie", 1, "zeros")])
    return keras.Model(inputs, stars)


class EpochTimer(keras.callbacks.Callback):
    """Seconds of training in each epoch, without the evaluation at its end."""

    def __init__(self):
        super().__init__()
        self.seconds: list[float] = []

    def on_epoch_begin(self, epoch, logs=None):
        self._start = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        self._last = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        self.seconds.append(self._last - self._start)


def of_each_worker(strategy: tfring.RingStrategy, number: int | None) -> list[int] | None:
    """Every worker's number, by rank, on all of them."""
    if number is None:
        return None
    mine = strategy.experimental_distribute_values_from_function(lambda _: tf.constant([number], tf.int64))
    replicas_per_worker = strategy.num_replicas_in_sync // strategy.cluster.world_size
    return strategy.gather(mine, axis=0).numpy().tolist()[::replicas_per_worker]


def report(figures: dict) -> None:
    print(f"\n{'on held-out ratings':<22}{'RMSE':>8}{'NDCG@10':>10}")
    for name, metrics in {**figures["baselines"], "this model": figures["metrics"]}.items():
        print(f"{name:<22}{metrics['rmse']:>8.4f}{metrics['ndcg_at_10']:>10.4f}")
    first, typical = figures["epoch_seconds"][0], np.median(figures["epoch_seconds"])
    print(f"\nseconds per epoch     {typical:.2f} (median; the first, with tracing, {first:.2f})")
    if figures["bytes_sent"] is None:
        print('bytes sent            not counted by communication="tensorflow"')
    else:
        sent = ", ".join(f"{number:,}" for number in figures["bytes_sent"])
        print(f"bytes sent            {sent} (by each worker, all epochs with evaluation and prediction)")


def save_plot(figures: dict, path: pathlib.Path) -> None:
    try:
        import matplotlib
    except ImportError:
        print("plot                  none: matplotlib is missing (pip install matplotlib)")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    history = figures["history"]
    epochs = range(1, figures["epochs"] + 1)
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    axes.plot(epochs, history["train_rmse"], color="tab:gray", label="training")
    axes.plot(epochs, history["held_out_rmse"], color="tab:blue", marker="o", label="held out")
    for (name, metrics), style in zip(figures["baselines"].items(), (":", "--"), strict=True):
        axes.axhline(metrics["rmse"], color="tab:red", linestyle=style, label=f"held out, {name}")
    axes.set(xlabel="epoch", ylabel="RMSE (stars)", title=f"MovieLens-100K, workers: {figures['workers']}")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"plot                  {path}")


if __name__ == "__main__":
    main()
