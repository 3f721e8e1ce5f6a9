"""Logs that callbacks, `history` and `evaluate` get: those of one process, and the same bits on every rank."""

import numpy as np
import pytest
from common import devices, is_reference, relative_error, skewed_rows
from harness import strategy, workers


def as_arrays(logs):
    return {name: np.asarray(value) for name, value in logs.items()}


def run(model, x, y, *, batch_size=20, sample_weight=None, epochs=2, unread=False, **kwargs):
    """`{where: logs}` of every batch of `fit`, of `history` and of `evaluate`; `unread`: of the latter once more, while
    no callback reads the logs of a batch."""
    import keras

    seen = {}

    def note(kind):
        return lambda batch, logs: seen.update({f"{kind} {len(seen)} batch {batch}": as_arrays(logs)})

    watch = keras.callbacks.LambdaCallback(on_train_batch_end=note("train"), on_test_batch_end=note("test"))
    options = {"batch_size": batch_size, "verbose": 0, "sample_weight": sample_weight, "callbacks": [watch]}
    history = model.fit(x, y, epochs=epochs, shuffle=False, **options, **kwargs).history
    seen["history"] = as_arrays(history)
    seen["evaluate"] = as_arrays(model.evaluate(x, y, return_dict=True, **options))
    if unread:
        del options["callbacks"]
        seen["history, unread"] = as_arrays(model.fit(x, y, epochs=1, shuffle=False, **options, **kwargs).history)
        seen["evaluate, unread"] = as_arrays(model.evaluate(x, y, return_dict=True, **options))
    return seen


def compare(ring, make, x, y, **kwargs):
    """The logs under the strategy; on one rank with the largest difference from those of one process."""
    import keras

    keras.utils.set_random_seed(1)
    with ring.scope():
        model = make()
    start = model.get_weights()
    got = run(model, x, y, **kwargs)
    errors = {"bits": {f"{k} {n}": v.tolist() for k, logs in got.items() for n, v in logs.items()}}
    errors["bits"].update((f"weight {i}", w.tolist()) for i, w in enumerate(model.get_weights()))
    if is_reference(ring):
        alone = make()
        alone.set_weights(start)
        want = run(alone, x, y, **kwargs)
        assert got.keys() == want.keys(), (sorted(got), sorted(want))
        for where, logs in want.items():
            assert got[where].keys() == logs.keys(), (where, got[where].keys(), logs.keys())
            for name, value in logs.items():
                if value.dtype.kind not in "biuf":
                    assert got[where][name].tolist() == value.tolist(), (where, name)
                    continue
                errors[f"{where} {name}"] = relative_error([got[where][name]], [value])
        errors["weights"] = relative_error(model.get_weights(), alone.get_weights())
    return errors


def assert_equal(results, tolerance=1e-5):
    """Every log within `tolerance` of one process, and the same bits on all ranks."""
    wrong = [f"{case} was compared with nothing" for case in results[0] if all(len(r[case]) == 1 for r in results)]
    for rank, cases in enumerate(results):
        for case, errors in cases.items():
            for name, value in results[0][case]["bits"].items():
                if errors["bits"][name] != value:
                    wrong.append(f"{case}, {name}: {value} on rank 0, {errors['bits'][name]} on rank {rank}")
            wrong += [f"{case}, {k}: {e:.2g}" for k, e in errors.items() if k != "bits" and not e <= tolerance]
    assert not wrong, "\n".join(wrong)


def layers():
    import keras

    return [
        keras.layers.Input((4,)),
        keras.layers.Dense(8, activation="tanh"),
        keras.layers.Dense(1, activation="sigmoid"),
    ]


def rows():
    x, y = skewed_rows(83)  # batches of 20: the last one has 3 rows
    return x, (y > np.median(y)).astype("float32")


# -- metrics that `compile` is given -----------------------------------------------------------------------------------


def own_metric():
    import keras

    class Both(keras.Metric):
        """Made of others, with a result of several values, one of them a variable itself."""

        def __init__(self):
            super().__init__(name="both")
            self.precision = keras.metrics.Precision()
            self.recall = keras.metrics.Recall()
            self.positives = self.add_variable((), "zeros", name="positives")

        def update_state(self, y, p, sample_weight=None):
            self.precision.update_state(y, p)
            self.recall.update_state(y, p)
            self.positives.assign_add(keras.ops.sum(y))

        def result(self):
            p, r = self.precision.result(), self.recall.result()
            return {"f": 2 * p * r / (p + r + 1e-7), "p": p, "positives": self.positives}

        def reset_state(self):
            for part in (self.precision, self.recall):
                part.reset_state()
            self.positives.assign(0.0)

    return Both()


def compiled(few=False, **options):
    import keras

    def make():
        model = keras.Sequential(layers())
        metrics = [
            "accuracy",
            keras.metrics.RootMeanSquaredError(name="rmse"),
            lambda y, p: keras.ops.mean(keras.ops.abs(y - p)),
            own_metric(),
        ]
        if not few:
            metrics += [
                "mae",
                keras.metrics.AUC(name="auc"),
                keras.metrics.R2Score(name="r2"),
                keras.metrics.F1Score(threshold=0.5, average=None, name="f1"),
            ]
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=metrics, weighted_metrics=["mae"], **options)
        return model

    return make


def two_outputs():
    import keras

    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(8, activation="tanh")(inputs)
    outputs = {
        "a": keras.layers.Dense(1, activation="sigmoid", name="a")(hidden),
        "b": keras.layers.Dense(1, activation="sigmoid", name="b")(hidden),
    }
    model = keras.Model(inputs, outputs)
    losses = {"a": "mse", "b": "binary_crossentropy"}
    model.compile(keras.optimizers.SGD(0.1), losses, metrics={"a": ["mae"], "b": ["accuracy", "Recall"]})
    return model


def no_reduction():
    import keras

    model = keras.Sequential(layers())
    model.compile(keras.optimizers.SGD(0.01), keras.losses.MeanSquaredError(reduction=None), metrics=["mae"])
    return model


def of_compile():
    ring = strategy(**devices())
    x, y = rows()
    weight = np.linspace(0, 2, len(x)).astype("float32")
    return {
        "metrics": compare(ring, compiled(), x, y, sample_weight=weight),
        "two steps": compare(ring, compiled(few=True, steps_per_execution=2), x[:43], y[:43], epochs=1),
        "eagerly": compare(ring, compiled(few=True, run_eagerly=True), x[:23], y[:23], epochs=1),
        "two outputs": compare(ring, two_outputs, x, {"a": y, "b": 1 - y}),
        "vector of losses": compare(ring, no_reduction, x[:23], y[:23], epochs=1),
    }


@pytest.mark.oldest
def test_metrics_of_compile():
    assert_equal(workers(2).run(of_compile, timeout=300))


@pytest.mark.long
def test_metrics_of_compile_with_two_replicas_a_worker():
    assert_equal(workers(2, logical_cpus=2).run(of_compile, timeout=300))


# -- what a step returns itself ----------------------------------------------------------------------------------------


def own_step(**options):
    import keras
    import tensorflow as tf

    class OwnStep(keras.Sequential):
        """As Keras' guides write it, with more in the logs."""

        def __init__(self, layers):
            super().__init__(layers)
            self.loss_tracker = keras.metrics.Mean(name="loss")
            self.others = [keras.metrics.RootMeanSquaredError(name="rmse")]

        @property
        def metrics(self):
            return [self.loss_tracker, *self.others]

        def logs(self, y, pred):
            losses = keras.ops.mean(keras.ops.square(y - pred), axis=1)
            loss = keras.ops.mean(losses)
            self.loss_tracker.update_state(loss)
            self.others[0].update_state(y, pred)
            return {
                **{m.name: m.result() for m in self.metrics},
                "loss of the batch": loss,
                "loss of each row": losses,
                "two": keras.ops.stack([loss, 2 * loss]),
                "rate": self.optimizer.learning_rate,
                "step": self.optimizer.iterations,
                "third": 1 / 3,
                "even": self.optimizer.iterations % 2 == 0,
                "big": tf.constant(2**40 + 1, tf.int64),
                "text": "text",
            }

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                pred = self(x, training=True)
                loss = self.compute_loss(x=x, y=y, y_pred=pred)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return self.logs(y, pred)

        def test_step(self, data):
            x, y = data
            return self.logs(y, self(x, training=False))

    def make():
        model = OwnStep(layers())
        model.compile(keras.optimizers.SGD(0.1), "mse", **options)
        return model

    return make


def of_steps():
    ring = strategy(**devices())
    x, y = rows()
    return {
        "own step": compare(ring, own_step(), x, y, unread=True),
        "two steps": compare(ring, own_step(steps_per_execution=2), x[:43], y[:43], epochs=1, unread=True),
        "eagerly": compare(ring, own_step(run_eagerly=True), x[:23], y[:23], epochs=1, unread=True),
    }


@pytest.mark.oldest
def test_what_a_step_returns_itself():
    assert_equal(workers(2).run(of_steps, timeout=300))


@pytest.mark.long
def test_what_a_step_returns_itself_with_two_replicas_a_worker():
    assert_equal(workers(2, logical_cpus=2).run(of_steps, timeout=300))


# -- made outside the scope --------------------------------------------------------------------------------------------


def with_parts_from_outside(parts):
    """A model and what it is compiled with; on a tracker and a second optimizer see Keras' GAN example."""
    import keras
    import tensorflow as tf

    class TwoOptimizers(keras.Sequential):
        def compile(self, first, second, tracker, **options):
            super().compile(**options)
            self.first, self.second, self.tracker = first, second, tracker

        @property
        def metrics(self):
            return [self.tracker]

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = keras.ops.mean(keras.ops.square(y - self(x, training=True)))
            weights = self.trainable_weights
            gradients = tape.gradient(loss, weights)
            self.first.apply_gradients(list(zip(gradients, weights, strict=True))[:2])
            self.second.apply_gradients(list(zip(gradients, weights, strict=True))[2:])
            self.tracker.update_state(loss)
            return {"tracked": self.tracker.result()}

        def test_step(self, data):
            x, y = data
            self.tracker.update_state(keras.ops.mean(keras.ops.square(y - self(x, training=False))))
            return {"tracked": self.tracker.result()}

    def make_compiled():
        model = keras.Sequential(layers())
        model.compile(parts["adam"], "mse", metrics=parts["metrics"], weighted_metrics=parts["weighted"])
        return model

    def make_own():
        model = TwoOptimizers(layers())
        model.compile(parts["sgd"], parts["rmsprop"], parts["tracker"])
        return model

    return make_compiled, make_own


def parts():
    import keras

    return {
        "adam": keras.optimizers.Adam(0.01),
        "metrics": [keras.metrics.MeanAbsoluteError(name="mae"), keras.metrics.RootMeanSquaredError(name="rmse")],
        "weighted": [keras.metrics.AUC(name="auc"), own_metric()],
        "sgd": keras.optimizers.SGD(0.01, momentum=0.9),
        "rmsprop": keras.optimizers.RMSprop(0.01),
        "tracker": keras.metrics.Mean(name="tracked"),
    }


def made_outside():
    x, y = rows()
    ring = strategy(**devices())
    mine, alone = parts(), parts()  # before any scope
    makers = zip(with_parts_from_outside(mine), with_parts_from_outside(alone), strict=True)
    results = {}
    for name, (inside, outside) in zip(("compiled", "own train_step"), makers, strict=True):

        def make(inside=inside, outside=outside):
            import tensorflow as tf

            return inside() if tf.distribute.has_strategy() else outside()

        results[name] = compare(ring, make, x, y)
    # The user's objects are those that were trained with.
    assert int(mine["adam"].iterations.numpy()) == int(mine["rmsprop"].iterations.numpy()) == 10
    for name, of in {"compiled": lambda p: p["metrics"], "own train_step": lambda p: [p["tracker"]]}.items():
        for metric, other in zip(of(mine), of(alone), strict=True):
            value, trained_alone = float(metric.result()), results[name].keys() != {"bits"}
            assert not trained_alone or abs(value - float(other.result())) < 1e-5, (metric, value, other.result())
    return results


@pytest.mark.oldest
def test_metrics_and_optimizers_made_outside():
    assert_equal(workers(3).run(made_outside, timeout=300))


def refused():
    """Returns the error of each program."""
    import keras

    from tfring.errors import ConfigurationError

    x, y = rows()
    ring = strategy(**devices())
    said = {}

    def attempt(name, program):
        try:
            program()
        except ConfigurationError as error:
            said[name] = str(error)

    def layer():
        first = keras.layers.Dense(8, name="early")
        first.build((None, 4))
        with ring.scope():
            model = keras.Sequential([keras.layers.Input((4,)), first, keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        model.fit(x, y, verbose=0)

    def statistics():
        norm = keras.layers.BatchNormalization(center=False, scale=False, name="early")
        norm.build((None, 4))
        with ring.scope():
            model = keras.Sequential([keras.layers.Input((4,)), norm, keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        model.fit(x, y, verbose=0)

    def compiled_in_scope():
        model = keras.Sequential(layers(), name="early")
        with ring.scope():
            model.compile("sgd", "mse")

    def fit_in_scope():
        model = keras.Sequential(layers(), name="early")
        model.compile("sgd", "mse")
        with ring.scope():
            model.fit(x, y, verbose=0)

    def optimizer():
        adam = keras.optimizers.Adam(name="early")
        keras.Sequential(layers()).compile(adam, "mse")
        adam.build([keras.Variable(1.0)])
        with ring.scope():
            model = keras.Sequential(layers())
            model.compile(adam, "mse")

    for program in (layer, statistics, compiled_in_scope, fit_in_scope, optimizer):
        attempt(program.__name__, program)
    return said


@pytest.mark.oldest
def test_what_cannot_be_taken_in_is_refused_by_name():
    for said in workers(2, logical_cpus=2).run(refused):
        for name in ("layer", "statistics", "compiled_in_scope", "fit_in_scope", "optimizer"):
            assert "early" in said.get(name, "") and "inside `with strategy.scope():`" in said[name], (name, said)


# -- state that is no mean ---------------------------------------------------------------------------------------------


def state_layer(name):
    import keras

    ops = keras.ops

    class State(keras.layers.Layer):
        def build(self, shape):
            def state(name, dtype="float32", **options):
                return self.add_weight((), "zeros", dtype, trainable=False, name=name, **options)

            self.dense = keras.layers.Dense(1)
            self.dense.build(shape)
            self.rows = state("rows", "int64")
            self.positives = state("positives", "int32")
            self.steps = state("steps", "int32")
            self.float_steps = state("float_steps")
            self.moving = state("moving")
            self.largest = state("largest")
            self.smallest = state("smallest")
            self.most = state("most", "int32")
            self.summed = state("summed", aggregation="sum")
            self.sum_of_batch = state("sum_of_batch", aggregation="sum")
            self.first = state("first", aggregation="only_first_replica")
            self.mean = state("mean", aggregation="mean")
            self.seen = state("seen", "bool")

        def call(self, x):
            self.rows.assign_add(ops.cast(ops.shape(x)[0], "int64"))
            self.positives.assign(self.positives + ops.sum(ops.cast(x > 0, "int32")))
            self.steps.assign_add(1)
            self.float_steps.assign(self.float_steps + 1)
            self.moving.assign(self.moving * 0.9 + ops.mean(x) * 0.1)
            self.largest.assign(ops.maximum(self.largest, ops.max(x)))
            self.smallest.assign(ops.minimum(ops.min(x), self.smallest))
            self.most.assign(ops.maximum(self.most, ops.cast(ops.max(x) * 1000, "int32")))
            self.summed.assign_add(ops.sum(x))
            self.sum_of_batch.assign(ops.sum(x))
            self.first.assign(ops.sum(x[:1]))
            self.mean.assign(ops.mean(x))
            self.seen.assign(True)
            return self.dense(x)

    return State(name=name)


def with_state():
    import keras

    class Largest(keras.Metric):
        """The largest error so far."""

        def __init__(self):
            super().__init__(name="largest")
            self.largest = self.add_variable((), "zeros", name="largest")

        def update_state(self, y, p, sample_weight=None):
            self.largest.assign(keras.ops.maximum(self.largest, keras.ops.max(keras.ops.abs(y - p))))

        def result(self):
            return self.largest

    model = keras.Sequential([keras.layers.Input((4,)), state_layer("state")])
    model.compile(keras.optimizers.SGD(0.001), "mse", metrics=[Largest()])
    return model


def of_state():
    ring = strategy(**devices())
    x, y = rows()
    return {
        "state": compare(ring, with_state, x, y),
        "two steps": compare(ring, lambda: two_steps(with_state()), x[:60], y[:60]),
    }


def two_steps(model):
    model.steps_per_execution = 2
    return model


@pytest.mark.oldest
def test_state_is_that_of_one_process():
    assert_equal(workers(3).run(of_state, timeout=300))


@pytest.mark.long
def test_state_is_that_of_one_process_with_two_replicas_a_worker():
    assert_equal(workers(2, logical_cpus=2).run(of_state, timeout=300))


# -- callbacks that decide ---------------------------------------------------------------------------------------------


def plateau_on_metric_from_outside():
    import keras

    x, y = skewed_rows()

    def make():
        hidden = keras.layers.Dense(4, activation="tanh")
        return keras.Sequential([keras.layers.Input((4,)), hidden, keras.layers.Dense(1)])

    def train(model, mae):
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=[mae])
        watch = keras.callbacks.ReduceLROnPlateau("val_mae", patience=1, factor=0.5, min_delta=1.0)
        options = {"batch_size": 20, "epochs": 8, "verbose": 0, "shuffle": False, "validation_split": 0.3}
        return model.fit(x, y, callbacks=[watch], **options).history

    keras.utils.set_random_seed(1)
    alone, mae = make(), keras.metrics.MeanAbsoluteError(name="mae")
    ring = strategy()
    with ring.scope():
        model = make()
    model.set_weights(alone.get_weights())
    history = train(model, mae)
    want = train(alone, keras.metrics.MeanAbsoluteError(name="mae"))
    assert history["learning_rate"] == want["learning_rate"], (history["val_mae"], want["val_mae"])
    return history, [w.tobytes() for w in model.get_weights()]


def rate_of_one_rank():
    import warnings

    import keras

    x, y = skewed_rows()
    ring = strategy()
    rank = ring.cluster.rank
    keras.utils.set_random_seed(1)
    with ring.scope():
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), "mse")

    class OwnRule(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if rank == 1 and epoch == 0:
                self.model.optimizer.learning_rate = 0.001

    scheduler = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate if epoch < 2 else 0.001 * (1 + rank))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        history = model.fit(x, y, batch_size=20, epochs=4, verbose=0, callbacks=[OwnRule(), scheduler]).history
    told = [str(w.message) for w in caught if "learning rate" in str(w.message)]
    weights, rate = [w.tobytes() for w in model.get_weights()], float(model.optimizer.learning_rate.numpy())
    return history["loss"], weights, rate, told


@pytest.mark.oldest
def test_callbacks_decide_once_for_all_ranks():
    results = workers(2).run(plateau_on_metric_from_outside)
    assert results[0] == results[1]
    assert len(set(results[0][0]["learning_rate"])) > 1
    results = workers(2).run(rate_of_one_rank)
    assert results[0][:3] == results[1][:3]
    assert results[0][2] == pytest.approx(0.001) and not results[0][3]
    assert "rank 1" in results[1][3][0] and "on rank 0. All ranks now use that of rank 0." in results[1][3][0]
