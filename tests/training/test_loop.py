"""Keras' loop over batches: what a step sends and what Python does for it; where it ends when one rank stops it."""

import warnings

import pytest
from common import devices, relative_error, skewed_rows
from harness import strategy, workers
from test_steps import assert_same, bits, small_model

# -- collectives a step ------------------------------------------------------------------------------------------------


def calls(ring):
    """Counts the calls of each kind so far, on the rings of control and of gradients."""
    return [channel.communicator.statistics()["collectives"] for channel in ring.ring.channels]


def calls_a_step(ring, run):
    """Returns the calls of each further step of `run(steps)`: `{kind: calls}` of each ring, without zeros."""
    run(6)  # traced
    counts = []
    for steps in (6, 18):
        before = calls(ring)
        run(steps)
        after = calls(ring)
        counts.append([{k: b[k] - a[k] for k in a} for a, b in zip(before, after, strict=True)])
    few, many = counts
    return [{k: (b[k] - a[k]) / 12 for k in a if b[k] != a[k]} for a, b in zip(few, many, strict=True)]


def batch_normalized(**options):
    import keras

    layers = [keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.layers.Input((4,)), *layers])
    model.compile("sgd", "mse", **options)
    return model


def count_calls():
    import keras

    ring = strategy()
    x, y = skewed_rows(18 * 10)
    models = {}  # by how they are made: traced once

    def model_of(make, **options):
        key = make, *options.items()
        if key not in models:
            with ring.scope():
                models[key] = make(metrics=["mae"], **options)
        return models[key]

    def fit(make, callbacks=(), verbose=0, **options):
        model = model_of(make, **options)
        return calls_a_step(
            ring,
            lambda steps: model.fit(
                x[: 10 * steps], y[: 10 * steps], batch_size=10, verbose=verbose, callbacks=list(callbacks)
            ),
        )

    def evaluate(callbacks=()):
        model = model_of(small_model)
        return calls_a_step(
            ring,
            lambda steps: model.evaluate(
                x[: 10 * steps], y[: 10 * steps], batch_size=10, verbose=0, callbacks=list(callbacks)
            ),
        )

    reads = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: logs["loss"])
    reads_tests = keras.callbacks.LambdaCallback(on_test_batch_end=lambda batch, logs: logs["loss"])
    begins = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: None)
    epochs = keras.callbacks.EarlyStopping("loss", patience=5)
    return {
        "plain": fit(small_model),
        "of an epoch alone": fit(small_model, [epochs, keras.callbacks.ReduceLROnPlateau("loss")]),
        "progress bar on rank 0": fit(small_model, verbose="auto"),
        "logs are read on rank 1": fit(small_model, [reads] if ring.cluster.rank == 1 else []),
        "batch normalization": fit(batch_normalized),
        "batch normalization, logs are read": fit(batch_normalized, [reads]),
        "beginnings are watched": fit(small_model, [begins]),
        "three steps an execution": fit(small_model, steps_per_execution=3),
        "three steps an execution, logs are read": fit(small_model, [reads], steps_per_execution=3),
        "eagerly": fit(small_model, run_eagerly=True),
        "evaluate": evaluate(),
        "evaluate, logs are read": evaluate([reads_tests]),
    }


def test_collectives_of_a_step():
    def control(n, gradients=1.0):
        return [{"all_reduce": n}, {"all_reduce": gradients} if gradients else {}]

    for counts in workers(2).run(count_calls, timeout=300):
        assert counts == {
            "plain": control(1),  # status
            "of an epoch alone": control(1),
            "progress bar on rank 0": control(2),  # status; logs
            "logs are read on rank 1": control(2),
            "batch normalization": control(2),  # status; state
            "batch normalization, logs are read": control(2),  # status; state and logs
            "beginnings are watched": control(2),  # status; whether to begin another batch
            "three steps an execution": control(1),
            "three steps an execution, logs are read": control(1 + 1 / 3),
            "eagerly": [{"all_gather": 2, "all_reduce": 1}, {"all_reduce": 1}],  # x and y; status
            "evaluate": control(1, 0),
            "evaluate, logs are read": control(2, 0),
        }


# -- operations that Python runs ---------------------------------------------------------------------------------------


def operations_a_step():
    """Counts Python's operations in each further step of `fit`, of a model under the strategy and of a plain one."""
    from tensorflow.python.framework import op_callbacks

    ring = strategy()
    x, y = skewed_rows(18 * 10)
    with ring.scope():
        model = small_model(metrics=["mae"])
    results = []
    for trained in (model, small_model(metrics=["mae"])):
        counts = []
        for steps in (6, 6, 18):
            ran = []

            def note(kind, *_, graph=None, ran=ran, **__):
                if graph is None:
                    ran.append(kind)

            op_callbacks.add_op_callback(note)
            try:
                trained.fit(x[: 10 * steps], y[: 10 * steps], batch_size=10, shuffle=False, verbose=0)
            finally:
                op_callbacks.remove_op_callback(note)
            counts.append(len(ran))
        results.append((counts[2] - counts[1]) / 12)
    return results


def test_python_runs_one_operation_a_step():
    for ours, plain in workers(2).run(operations_a_step):
        assert ours == 1.0 <= plain  # the function of the step


# -- a rank that stops -------------------------------------------------------------------------------------------------


class Course:
    """Records the calls of callbacks in `fit`, and where one of them stops it."""

    def __init__(self, stops_at, stops, watch_begin):
        self.seen, self.stops_at, self.stops, self.watch_begin = [], stops_at, stops, watch_begin

    def callback(self):
        import keras

        course = self

        class Watch(keras.callbacks.Callback):
            def note(self, what, number):
                course.seen.append((what, number))
                if (what, sum(w == what for w, *_ in course.seen)) == course.stops_at and course.stops:
                    flag = "stop_evaluating" if what == "test batch" else "stop_training"
                    setattr(self.model, flag, True)

            def on_epoch_begin(self, epoch, logs=None):
                self.note("epoch", epoch)

            def on_train_batch_end(self, batch, logs=None):
                self.note("batch", batch)

            def on_test_batch_end(self, batch, logs=None):
                self.note("test batch", batch)

            def on_epoch_end(self, epoch, logs=None):
                course.seen.append(("end", epoch, self.model.stop_training))

        class WatchBegin(Watch):
            def on_train_batch_begin(self, batch, logs=None):
                self.note("begin", batch)

        return WatchBegin() if self.watch_begin else Watch()


def of_unknown_length(x, y):
    import tensorflow as tf

    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(10)
    return batches.filter(lambda x, y: True)


class Models:
    """A model under a strategy, and on rank 0 one alone: compiled and traced once for many courses from one start."""

    def __init__(self, ring, **options):
        import keras

        def make():
            model = small_model(keras.optimizers.SGD(0.01, momentum=0.9), metrics=["mae"], **options)
            model.optimizer.build(model.trainable_variables)
            return model

        keras.utils.set_random_seed(1)
        with ring.scope():
            self.model = make()
        self.alone = make() if ring.cluster.rank == 0 else None
        self._start = self.model.get_weights(), [v.numpy() for v in self.model.optimizer.variables]

    def reset(self):
        weights, state = self._start
        for model in (self.model, self.alone):
            if model is not None:
                model.set_weights(weights)
                for variable, value in zip(model.optimizer.variables, state, strict=True):
                    variable.assign(value)
                model.stop_training = model.stop_evaluating = False


def course_of(ring, models, stops_at, stopping, *, watch_begin=False, unknown=False):
    """On each rank what callbacks saw, the weights and warnings; on rank 0 the error against one process too."""
    x, y = skewed_rows(43)

    def run(model, stops):
        course = Course(stops_at, stops, watch_begin)
        given = {"x": of_unknown_length(x, y)} if unknown else {"x": x, "y": y, "batch_size": 10, "shuffle": False}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            history = model.fit(
                **given, epochs=3, verbose=0, callbacks=[course.callback()],
                validation_data=(x[:25], y[:25]), validation_batch_size=10,
            ).history
            again = model.fit(x, y, batch_size=10, shuffle=False, verbose=0).history  # goes on as if nothing was
        said = [str(w.message) for w in caught if "ran out of data" in str(w.message)]
        updates = int(model.optimizer.iterations.numpy())
        return course.seen, said, updates, {**history, "again": again["loss"]}

    models.reset()
    model, alone = models.model, models.alone
    got = run(model, ring.cluster.rank in stopping)
    errors = {}
    if alone is not None:
        want = run(alone, True)
        assert got[0] == want[0], (got[0], want[0])
        assert got[1] == want[1] and got[3].keys() == want[3].keys()
        errors = {k: relative_error([got[3][k]], [want[3][k]]) for k in want[3]}
        errors["weights"] = relative_error(model.get_weights(), alone.get_weights())
        if not unknown:  # at the end of such data plain Keras may count a step that there is not
            assert got[2] == want[2], (got[2], want[2])
    return [got, bits(model)], errors


CASES = {
    "in mid-epoch": (("batch", 2), {}),
    "after the first": (("batch", 1), {}),
    "in the second epoch": (("batch", 8), {}),
    "after an epoch's last": (("batch", 5), {}),
    "begins": (("batch", 2), {"watch_begin": True}),
    "before a batch": (("begin", 3), {"watch_begin": True}),
    "unknown length": (("batch", 2), {"unknown": True}),
    "unknown length, last": (("batch", 5), {"unknown": True}),
    "in a validation": (("test batch", 1), {}),
    "last of a validation": (("test batch", 3), {}),
    "when an epoch begins": (("epoch", 2), {}),
    "nobody": (("batch", 99), {}),
}
OTHERWISE = {
    "two steps": (("batch", 1), {"steps_per_execution": 2}),
    "eagerly": (("batch", 2), {"run_eagerly": True}),
}
FEW = ["in mid-epoch", "after an epoch's last", "unknown length", "in a validation"]


def courses(stopping):
    """`stopping`: the ranks that stop in each course."""
    ring = strategy(**devices())
    models = Models(ring)
    return {
        name: course_of(ring, models, CASES[name][0], ranks, **CASES[name][1]) for name, ranks in stopping.items()
    }


def courses_otherwise(stopping):
    ring = strategy(**devices())
    return {name: course_of(ring, Models(ring, **options), at, stopping) for name, (at, options) in OTHERWISE.items()}


def check_courses(results):
    for name in results[0]:
        assert_same([result[name][0] for result in results])
        _, errors = results[0][name]
        assert errors and max(errors.values()) <= 1e-5, (name, errors)


@pytest.mark.oldest
def test_one_rank_stops_all_where_one_process_stops():
    check_courses(workers(2).run(courses, dict.fromkeys(CASES, (1,)), timeout=300))
    check_courses(workers(2).run(courses_otherwise, [1], timeout=300))


def test_some_and_all_ranks_stop():
    of_all = dict.fromkeys(["after the first", "when an epoch begins"], (0, 1, 2))
    check_courses(workers(3).run(courses, {**dict.fromkeys(FEW, (0, 2)), **of_all}, timeout=300))


@pytest.mark.long
def test_one_rank_stops_two_replicas_a_worker():
    check_courses(workers(2, logical_cpus=2).run(courses, dict.fromkeys(FEW, (1,)), timeout=300))


@pytest.mark.long
def test_one_rank_stops_over_the_runtime_of_tensorflow():
    check_courses(workers(2, "tensorflow").run(courses, dict.fromkeys(FEW, (1,)), timeout=300))


# -- a generator, from which a batch is drawn that nobody trains -------------------------------------------------------


def one_generator_two_fits():
    """The second `fit` goes on where the first has left the generator, on all ranks alike."""
    import keras

    ring = strategy()
    x, y = skewed_rows(40)
    drawn = []

    def generate():
        for begin in range(0, 4000, 10):
            drawn.append(begin)
            yield x[begin % 40 : begin % 40 + 10], y[begin % 40 : begin % 40 + 10]

    with ring.scope():
        model = small_model()
    generator = generate()

    def stop(batch, logs):
        model.stop_training = batch == 2 and ring.cluster.rank == 1

    model.fit(
        generator, steps_per_epoch=6, verbose=0, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=stop)]
    )
    model.fit(generator, steps_per_epoch=3, epochs=2, verbose=0)
    return drawn, bits(model)


def test_a_generator_goes_on_alike_on_all_ranks():
    assert_same(workers(3).run(one_generator_two_fits))


# -- a train function of one's own -------------------------------------------------------------------------------------


def wrapped_train_function():
    """Rank 0 alone wraps Keras' function, to see each of its calls; rank 1 stops after the sixth batch."""
    import keras

    ring = strategy(check_equal=True)
    x, y = skewed_rows(80)
    with ring.scope():
        model = small_model()
    model.fit(x[:10], y[:10], batch_size=10, verbose=0)  # which makes the function
    seen = []
    function = model.train_function
    if ring.cluster.rank == 0:
        model.train_function = lambda iterator: (seen.append(0), function(iterator))[1]

    def stop(batch, logs):
        model.stop_training = batch == 5 and ring.cluster.rank == 1

    callbacks = [keras.callbacks.LambdaCallback(on_train_batch_end=stop)]
    history = [model.fit(x, y, batch_size=10, verbose=0, callbacks=callbacks).history for _ in range(2)]
    return {"logs": repr(history), "bits": bits(model)}, len(seen)


def test_a_train_function_may_be_wrapped_on_one_rank():
    results = workers(2).run(wrapped_train_function)
    assert_same([result for result, _ in results])
    assert [calls for _, calls in results] == [14, 0]  # twice six, and the one that finds out that rank 1 stopped


# -- ranks that take other numbers of steps ----------------------------------------------------------------------------


def other_steps(rank):
    import tensorflow as tf

    from tfring.errors import MismatchError

    ring = strategy()
    x, y = skewed_rows(80)
    with ring.scope():
        model = small_model()
    try:
        model.fit(
            tf.data.Dataset.from_tensor_slices((x, y)).batch(10).repeat(), steps_per_epoch=[4, 6][rank], verbose=0
        )
    except (MismatchError, tf.errors.InvalidArgumentError) as error:
        return str(error)
    raise AssertionError("no error")


def test_other_numbers_of_steps_are_told():
    for message in workers(2).run(other_steps, per_rank=[0, 1]):
        assert "`steps_per_epoch` is not the same on every rank" in message
        assert "4 on rank 0, 6 on rank 1" in message, message
