"""Savings by `shard_optimizer`: steps with and without it in turns, in the same processes, and the bytes of slots.

    tfring launch -n 2 benchmarks/shard_optimizer/train.py
    tfring launch -n 4 benchmarks/shard_optimizer/train.py
"""

import argparse
import time

import keras
import numpy as np
import tensorflow as tf

import tfring

STEPS, INPUTS, OUTPUTS = 15, 512, 10


def make_model(strategy, width):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        hidden = [keras.layers.Dense(width, activation="relu") for _ in range(3)]
        model = keras.Sequential([keras.Input((INPUTS,)), *hidden, keras.layers.Dense(OUTPUTS)])
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=64, help="rows of the global batch")
    parser.add_argument("--width", type=int, default=1024, help="of three dense layers")
    parser.add_argument("--rounds", type=int, default=9, help=f"of {STEPS} steps each way")
    arguments = parser.parse_args()

    generator = np.random.default_rng(0)
    x = generator.normal(size=(STEPS * arguments.batch_size, INPUTS)).astype("float32")
    y = generator.integers(0, OUTPUTS, size=len(x))
    strategies = {sharded: tfring.RingStrategy(shard_optimizer=sharded) for sharded in (False, True)}
    models = {sharded: make_model(strategy, arguments.width) for sharded, strategy in strategies.items()}
    ms: dict = {False: [], True: []}
    for number in range(arguments.rounds + 2):
        for sharded, model in models.items():
            strategies[sharded].barrier()
            begin = time.perf_counter()
            model.fit(x, y, batch_size=arguments.batch_size, shuffle=False, verbose=0)
            if number >= 2:  # the first trace, and warm up
                ms[sharded].append((time.perf_counter() - begin) / STEPS * 1000)

    def slot_bytes(model):
        return sum(int(np.prod(v.shape)) * tf.as_dtype(v.dtype).size for v in model.optimizer.variables)

    whole, share = slot_bytes(models[False]), slot_bytes(models[True])
    cluster = strategies[False].cluster
    if cluster.is_chief:
        low, middle, high = np.percentile(np.array(ms[False]) / ms[True], [25, 50, 75])
        print(
            f"{cluster.world_size} workers, {models[False].count_params():,} weights: "
            f"{np.median(ms[False]):.1f} ms a step, sharded {np.median(ms[True]):.1f} "
            f"(whole / sharded of each round: {middle:.2f}, quartiles {low:.2f} to {high:.2f}); "
            f"slots {whole:,} bytes a worker, sharded {share:,} ({share / whole:.4f})"
        )


if __name__ == "__main__":
    main()
