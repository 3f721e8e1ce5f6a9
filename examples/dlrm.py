"""A DLRM-like recommender whose large tables are divided over the workers.

    python examples/dlrm.py                                      MovieLens-100K, one worker
    tfring launch -n 4 examples/dlrm.py                          four workers, a quarter of the large tables each
    tfring launch -n 2 examples/dlrm.py --data generated --rows 1000000     26 tables, the largest with a million rows

Numbers go through a tower of dense layers, ids through tables; all pairs of the vectors are multiplied, and a tower on
top says whether a person likes a movie (four stars and more), or clicks (Naumov et al. 2019, arXiv:1906.00091).
"""

from __future__ import annotations

import argparse
import pathlib
import sys

import keras
import movielens_data
import numpy as np
from keras import layers, ops

import tfring


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", choices=("movielens", "generated"), default="movielens")
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the largest generated table")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=1024, help="of all workers together")
    parser.add_argument("--embedding-dim", type=int, default=16)
    parser.add_argument("--data-dir", type=pathlib.Path, default=movielens_data.DEFAULT_FOLDER)
    args = parser.parse_args()
    strategy = tfring.RingStrategy()
    if args.data == "generated":
        data = generated(args.rows)
    else:
        try:
            if strategy.cluster.local_rank == 0:
                movielens_data.fetch(args.data_dir)
            strategy.barrier()
            data = movielens(args.data_dir)
        except movielens_data.DataError as error:
            sys.exit(str(error))
    history = train(strategy, *data, args.epochs, args.batch_size, args.embedding_dim)
    if strategy.cluster.is_chief:
        print(f"AUC of examples held out: {history['val_auc'][-1]:.3f}")


def movielens(folder: pathlib.Path, max_ratings: int | None = None):
    """Rows of each table, and the examples to learn from and those held out, as `(features, labels)`."""
    data = movielens_data.load(folder, max_ratings)

    def examples(ratings):
        features = {name: ratings.features[name] for name in data.num_categories}
        return {**features, "numbers": ratings.features["genres"]}, (ratings.stars >= 4).astype("float32")

    return data.num_categories, examples(data.train), examples(data.held_out)


def generated(rows: int, examples: int = 50_000):
    """26 tables, the largest of so many rows, each half the one before; few ids are frequent, as everywhere."""
    generator = np.random.default_rng(0)
    sizes = {f"table_{number}": max(10, rows >> number) for number in range(26)}
    features: dict = {"numbers": generator.normal(size=(examples, 13)).astype("float32")}
    score = features["numbers"][:, 0]
    for name, size in sizes.items():
        features[name] = ((generator.zipf(1.2, examples) - 1) % size).astype("int32")
        score = score + 0.5 * np.sin(features[name])
    labels = (score > generator.logistic(size=examples)).astype("float32")
    cut = examples * 9 // 10
    old, new = ({name: values[part] for name, values in features.items()} for part in (slice(cut), slice(cut, None)))
    return sizes, (old, labels[:cut]), (new, labels[cut:])


def train(strategy, sizes, learned, held_out, epochs, batch_size, dim) -> dict:
    """Trains, and returns the measurements of `fit`, epoch by epoch."""
    keras.utils.set_random_seed(1)
    first = strategy.cluster.is_chief
    if first:
        tables = {name: (rows, dim) for name, rows in sizes.items()}
        print(tfring.parallel.plan_tables(tables, strategy.cluster.world_size))
    with strategy.scope():
        model = build_model(sizes, learned[0]["numbers"].shape[1], dim)
        model.compile(
            optimizer=keras.optimizers.Adagrad(0.05),
            loss=keras.losses.BinaryCrossentropy(from_logits=True),
            metrics=[keras.metrics.AUC(from_logits=True, name="auc")],
        )
    fitted = model.fit(
        *learned, batch_size=batch_size, epochs=epochs, validation_data=held_out, verbose=2 if first else 0
    )
    return fitted.history


def build_model(sizes: dict[str, int], num_numbers: int, dim: int) -> keras.Model:
    numbers = keras.Input((num_numbers,), name="numbers")
    ids = {name: keras.Input((), name=name, dtype="int32") for name in sizes}
    features = {
        name: tfring.layers.FeatureConfig(name, tfring.layers.TableConfig(name, rows, dim, combiner=None))
        for name, rows in sizes.items()
    }
    rows = tfring.layers.DistributedEmbedding(features)(ids)  # all tables in one exchange
    bottom = layers.Dense(dim, activation="tanh")(layers.Dense(64, activation="tanh")(numbers))
    vectors = ops.stack([bottom, *rows.values()], axis=1)
    products = ops.matmul(vectors, ops.transpose(vectors, (0, 2, 1)))
    count = len(sizes) + 1
    below = np.flatnonzero(np.tri(count, k=-1))  # each pair once
    pairs = ops.take(ops.reshape(products, (-1, count * count)), below, axis=1)
    top = layers.Dense(64, activation="tanh")(layers.Concatenate()([bottom, pairs]))
    return keras.Model({"numbers": numbers, **ids}, layers.Dense(1)(top))


if __name__ == "__main__":
    main()
