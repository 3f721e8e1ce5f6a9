"""Helpers of the training tests: skewed data, models, and the comparison with one process on the whole batch."""

from __future__ import annotations

import weakref

import harness
import numpy as np

_references: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # how many each strategy was compared with


def devices():
    """Arguments of `strategy` by which a worker with several logical CPUs holds a replica on each."""
    import tensorflow as tf

    if harness.communication() == "tensorflow":  # which has to come before TensorFlow looks at its devices
        return {}
    cpus = tf.config.list_logical_devices("CPU")
    return {"devices": [f"CPU:{i}" for i in range(len(cpus))]} if len(cpus) > 1 else {}


def skewed_rows(num_rows=83, num_features=4, seed=0):
    """Features whose mean and scale drift with the row, so that no rank's share looks like another's."""
    generator = np.random.default_rng(seed)
    drift = np.linspace(0, 3, num_rows)[:, None]
    x = generator.normal(size=(num_rows, num_features)) * (1 + drift) + drift
    y = x @ generator.normal(size=(num_features, 1)) + generator.normal(size=(num_rows, 1))
    return x.astype("float32"), y.astype("float32")


def skewed_ids(num_rows=83, vocabulary=30, ids_per_row=3, seed=0):
    """Ids with many duplicates, drifting with the row; 0 never occurs."""
    generator = np.random.default_rng(seed)
    low = 1 + np.arange(num_rows) * (vocabulary - 8) // num_rows
    ids = low[:, None] + generator.integers(0, 7, size=(num_rows, ids_per_row))
    y = np.sin(ids).sum(axis=1, keepdims=True) + 0.1 * generator.normal(size=(num_rows, 1))
    return ids.astype("int32"), y.astype("float32")


def all_optimizers():
    """Every optimizer of Keras, by name."""
    import keras

    o = keras.optimizers
    newer = {
        "Muon": lambda: o.Muon(0.01),
        "ScheduleFreeAdamW": lambda: o.ScheduleFreeAdamW(0.01),
        "MultiOptimizer": lambda: o.MultiOptimizer(o.OptimizerMap(o.Adam(0.01), {"embedding.*": o.SGD(0.03)})),
    }
    return {
        "SGD": lambda: o.SGD(0.03),
        "SGD momentum": lambda: o.SGD(0.01, momentum=0.9, nesterov=True),
        "RMSprop": lambda: o.RMSprop(0.003, momentum=0.9, centered=True),
        "Adam": lambda: o.Adam(0.01),
        "Adam amsgrad": lambda: o.Adam(0.01, amsgrad=True),
        "AdamW": lambda: o.AdamW(0.01, weight_decay=0.01),
        "Adadelta": lambda: o.Adadelta(0.1),
        "Adagrad": lambda: o.Adagrad(0.05),
        "Adamax": lambda: o.Adamax(0.01),
        "Adafactor": lambda: o.Adafactor(0.01),
        "Nadam": lambda: o.Nadam(0.01),
        "Ftrl": lambda: o.Ftrl(0.05, l1_regularization_strength=0.01),
        "Lion": lambda: o.Lion(0.01),
        "Lamb": lambda: o.Lamb(0.01),
        **{name: make for name, make in newer.items() if hasattr(o, name)},
    }


def element_wise_optimizers():
    """Those of which a piece of a weight can be updated alone, by name."""
    return {name: make for name, make in all_optimizers().items() if name not in ("Adafactor", "Lamb", "Muon")}


def optimizer_settings():
    """Such optimizers by what is set of them."""
    import keras

    o = keras.optimizers

    def sgd(**options):
        return lambda: o.SGD(0.05, momentum=0.9, **options)

    return {
        "clipnorm": sgd(clipnorm=0.01),
        "global_clipnorm": sgd(global_clipnorm=0.01),
        "clipvalue": sgd(clipvalue=0.001),
        "weight_decay": lambda: o.AdamW(0.01, weight_decay=0.5),
        "accumulation": sgd(gradient_accumulation_steps=2, global_clipnorm=0.1),
        "ema": sgd(use_ema=True, ema_momentum=0.7, ema_overwrite_frequency=3),
        "loss_scale": lambda: o.LossScaleOptimizer(o.SGD(0.05, momentum=0.9, global_clipnorm=0.1)),
        "schedule": lambda: o.Adam(o.schedules.ExponentialDecay(0.1, 3, 0.5)),
    }


def relative_error(got, want):
    """The largest difference over the largest value, over a list of arrays."""
    worst = 0.0
    for a, b in zip(got, want, strict=True):
        a, b = np.asarray(a, "float64"), np.asarray(b, "float64")
        assert a.shape == b.shape, (a.shape, b.shape)
        if a.size:
            difference = np.abs(a - b).max()
            worst = max(worst, np.inf if np.isnan(difference) else difference / max(np.abs(b).max(), 1e-3))
    return worst


def history_error(got, want):
    """The largest difference of two histories of `fit`, which must hold the same entries."""
    assert got.keys() == want.keys(), (sorted(got), sorted(want))
    return relative_error([got[k] for k in sorted(got)], [want[k] for k in sorted(want)])


def is_reference(strategy):
    """Returns True if this rank is the one to train the next model alone too: in turns, for the others go on meanwhile.

    One is enough, for the ranks' bits are compared.
    """
    turn = _references[strategy] = _references.get(strategy, -1) + 1
    return strategy.cluster.rank == turn % strategy.cluster.world_size


def train_both(strategy, make_model, *args, evaluate=None, predict=None, **kwargs):
    """Trains `make_model()` under the strategy, and on one rank alone too; `fit(*args, **kwargs)` on both.

    Returns:
      The bits of the weights, and on that rank a dict of relative errors besides (weights, history, evaluate, predict).
    """
    import keras

    from tfring import step

    kwargs = {"epochs": 2, "batch_size": 20, "verbose": 0, "shuffle": False, **kwargs}

    def outcome(model):
        keras.utils.set_random_seed(2)
        results = {"history": model.fit(*args, **kwargs).history, "weights": model.get_weights()}
        if evaluate is not None:
            results["evaluate"] = [model.evaluate(*evaluate, batch_size=20, verbose=0)]
        if predict is not None:
            results["predict"] = [model.predict(predict, batch_size=20, verbose=0)]
        return results

    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = make_model()
    start = model.get_weights()
    got = outcome(model)
    variables = [*model.variables, *(model.optimizer.variables if model.optimizer else ())]
    own = [step.is_kept_by_replica(v) or "gradient_accumulator" in v.path for v in variables]  # of each replica
    strategy.assert_equal([v for v, is_own in zip(variables, own, strict=True) if not is_own])
    errors = {"bits": b"".join(np.ascontiguousarray(w).tobytes() for w in got["weights"])}
    if is_reference(strategy):
        keras.utils.set_random_seed(1)
        alone = make_model()
        alone.set_weights(start)
        want = outcome(alone)
        errors["history"] = history_error(got.pop("history"), want.pop("history"))
        errors.update((what, relative_error(got[what], want[what])) for what in got)
    return errors


def assert_equal(results, tolerance=1e-5):
    """Every rank within `tolerance` of one process, and all ranks with the same bits."""
    for case in results[0]:
        assert any(errors[case].keys() - {"bits"} for errors in results), f"{case} was compared with nothing"
    for rank, cases in enumerate(results):
        for case, errors in cases.items():
            for what, error in errors.items():
                if what != "bits":
                    assert error <= tolerance, f"rank {rank}, {case}, {what}: {error} > {tolerance}"
            assert errors["bits"] == results[0][case]["bits"], f"rank {rank}, {case}: other bits than rank 0"
