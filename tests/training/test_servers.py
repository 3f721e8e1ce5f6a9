"""Parameter servers: N workers and S servers equal one process, as a ring does, for every optimizer.

A test's processes are the ranks of a pool: the first are workers, the last servers.
"""

import os

import harness
import pytest
from common import (
    all_optimizers,
    assert_equal,
    is_reference,
    optimizer_settings,
    relative_error,
    skewed_ids,
)
from harness import workers

import tfring

VOCABULARY, DIM = 90, 8
REFUSED = {"MultiOptimizer", "ema", "loss_scale"}


def roles(num_servers):
    """The role of this process of the pool."""
    from tfring.cluster.roles import Roles

    cluster = tfring.Cluster(
        *(int(os.environ[f"TFRING_{n}"]) for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")),
        1,
        tuple(os.environ["TFRING_ADDRESSES"].split(",")),
        "harness",
        int(os.environ["TFRING_LISTEN_FD"]),
    )
    num_workers = cluster.world_size - num_servers
    addresses = cluster.addresses
    is_server = cluster.rank >= num_workers
    index = cluster.rank - num_workers if is_server else cluster.rank
    return Roles(addresses[:num_workers], addresses[num_workers:], is_server, index, "harness", cluster.listen_fd)


def with_servers(work, num_servers, options, *args):
    """What a worker makes of `work(strategy, *args)`; None in a server, once it has served."""
    try:
        strategy = tfring.ParameterServerStrategy(roles=roles(num_servers), **options)
    except SystemExit as end:
        assert end.code == 0
        return None
    harness._strategies.add(strategy)
    result = work(strategy, *args)
    strategy.close()
    return result


def run(num_workers, num_servers, work, *args, timeout=400, **options):
    """The workers' results."""
    pool = workers(num_workers + num_servers)
    return pool.run(with_servers, work, num_servers, options, *args, timeout=timeout)[:num_workers]


def small_pieces():
    """Has tables be cut and pulled by rows that are as small as those of the tests."""
    from tfring._keras import served

    served.ROWS_BYTES = 1
    served.SPLIT_BYTES = 1 << 10


def embedding_model(optimizer, lookup="embedding"):
    """Mean of looked-up rows, then a dense layer; `lookup="one_hot"` is the same model with a dense table."""
    import keras

    ids = keras.Input((3,), dtype="int32")
    if lookup == "embedding":
        rows = keras.layers.Embedding(VOCABULARY, DIM, name="embedding_table")(ids)
    else:
        hot = keras.ops.one_hot(ids, VOCABULARY)
        rows = keras.layers.Dense(DIM, use_bias=False, name="embedding_table")(hot)
    hidden = keras.layers.Dense(4, activation="tanh")(keras.ops.mean(rows, axis=1))
    model = keras.Model(ids, keras.layers.Dense(1)(hidden))
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


def train_embeddings(strategy, names):
    """Trains with each optimizer under servers, and the one-hot model alone."""
    import keras

    small_pieces()
    x, y = skewed_ids(vocabulary=VOCABULARY)
    cases = {}
    for name in names:
        make = {**all_optimizers(), **optimizer_settings()}[name]
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = embedding_model(make())
        start = model.get_weights()
        keras.utils.set_random_seed(2)
        history = model.fit(x, y, batch_size=20, epochs=2, shuffle=False, verbose=0).history
        errors = cases[name] = {"bits": b"".join(w.tobytes() for w in model.get_weights())}
        errors["changed"] = 0.0 if relative_error(model.get_weights(), start) > 1e-4 else 1.0
        if is_reference(strategy):
            alone = embedding_model(make(), "one_hot")
            alone.set_weights(start)
            alone.optimizer.build(alone.trainable_variables)
            want = alone.fit(x, y, batch_size=20, epochs=2, shuffle=False, verbose=0).history
            errors["weights"] = relative_error(model.get_weights(), alone.get_weights())
            errors["history"] = relative_error([history[k] for k in want], [want[k] for k in want])
        evaluated, predicted = model.evaluate(x, y, batch_size=20, verbose=0), model.predict(x, verbose=0)
        if "weights" in errors:
            errors["evaluate"] = relative_error([evaluated], [alone.evaluate(x, y, batch_size=20, verbose=0)])
            errors["predict"] = relative_error([predicted], [alone.predict(x, verbose=0)])
    return cases


@pytest.mark.parametrize(("n", "servers"), [(2, 1), (3, 2), (4, 2)])
def test_every_optimizer_equals_one_process(n, servers):
    every = [name for name in all_optimizers() if name not in REFUSED]
    names = every if (n, servers) == (3, 2) else ["SGD", "Adam"]
    assert_equal(run(n, servers, train_embeddings, names))


def test_clipping_schedules_and_accumulation_equal_one_process():
    names = [name for name in optimizer_settings() if name not in (*REFUSED, "accumulation")]
    assert_equal(run(2, 2, train_embeddings, names))
