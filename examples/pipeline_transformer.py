"""A Transformer encoder in stages, each on a worker of its own.

    python examples/pipeline_transformer.py                          one worker, the whole model
    tfring launch -n 2 examples/pipeline_transformer.py              two stages, which take about as long
    tfring launch -n 4 examples/pipeline_transformer.py --stages 2   two pipelines of two stages, each half of the rows

Sequences of tokens; the model says which of two tokens stands more often in each, so that it has to look at all of it
(attention as in Vaswani et al. 2017, arXiv:1706.03762; normalization before each part as in arXiv:2002.04745).
"""

from __future__ import annotations

import argparse

import keras
import numpy as np
from keras import layers, ops

import tfring
import tfring.cluster

VOCABULARY, LENGTH = 50, 32


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--stages", type=int, default=None, help="of a pipeline; default: as many as workers")
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--schedule", choices=("1f1b", "gpipe"), default="1f1b")
    parser.add_argument("--recompute", action="store_true", help="keep what comes into a stage, and no more")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=256, help="of all workers together")
    parser.add_argument("--examples", type=int, default=8192)
    args = parser.parse_args()
    cluster = tfring.cluster.detect()
    stages = args.stages or cluster.world_size
    strategy = tfring.RingStrategy(cluster, mesh=tfring.Mesh(pipeline=stages))
    if strategy.cluster.is_chief:
        print(tfring.parallel.plan_schedule(args.schedule, stages, args.microbatches).draw())
    settings = {"schedule": args.schedule, "recompute": args.recompute, "num_microbatches": args.microbatches}
    data = generated(args.examples)
    history = train(strategy, *data, args.epochs, args.batch_size, args.blocks, args.width, **settings)
    if strategy.cluster.is_chief:
        print(f"Accuracy on sequences held out: {history['val_accuracy'][-1]:.3f}")


def generated(examples: int, seed: int = 0):
    """Sequences to learn from and others held out, as `(tokens, labels)`."""
    generator = np.random.default_rng(seed)
    tokens = generator.integers(VOCABULARY, size=(examples, LENGTH))
    tokens[generator.random(tokens.shape) < 0.4] = 0
    tokens[generator.random(tokens.shape) < 0.3] = 1
    labels = (tokens == 0).sum(axis=1) > (tokens == 1).sum(axis=1)
    data, cut = (tokens.astype("int32"), labels.astype("float32")), examples * 9 // 10
    return tuple(array[:cut] for array in data), tuple(array[cut:] for array in data)


def make_model(blocks: int, width: int) -> keras.Model:
    tokens = keras.Input((LENGTH,), dtype="int32")
    places = ops.cumsum(ops.ones_like(tokens), axis=1) - 1
    x = layers.Embedding(VOCABULARY, width)(tokens) + layers.Embedding(LENGTH, width)(places)
    for number in range(1, blocks + 1):
        normal = layers.LayerNormalization(name=f"block{number}")(x)
        x = layers.Add()([x, layers.MultiHeadAttention(4, width // 4)(normal, normal)])
        wide = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(width)(wide)])
    pooled = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
    return keras.Model(tokens, layers.Flatten()(layers.Dense(1)(pooled)))


def train(strategy, learn, held_out, epochs, batch_size, blocks, width, **settings) -> dict[str, list[float]]:
    """The curves of a run; `settings` are those of `tfring.parallel.Pipeline`."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = make_model(blocks, width)
    rows = batch_size // strategy.num_replicas_in_sync // settings["num_microbatches"]
    costs = tfring.parallel.measure_layers(model, learn[0][: max(1, rows)], repetitions=3)
    plan = tfring.parallel.plan_stages(costs, strategy.mesh.pipeline, **settings)
    if strategy.cluster.is_chief:
        print(plan)
    with strategy.scope():
        model = tfring.parallel.Pipeline(model, plan.begins, **settings)
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
        accuracy = keras.metrics.BinaryAccuracy("accuracy", threshold=0.0)
        model.compile(keras.optimizers.Adam(1e-3, global_clipnorm=1.0), loss, metrics=[accuracy])
    data = (learn[0], learn[1][:, None])
    held_out = (held_out[0], held_out[1][:, None])
    return model.fit(*data, validation_data=held_out, epochs=epochs, batch_size=batch_size, verbose=2).history


if __name__ == "__main__":
    main()
