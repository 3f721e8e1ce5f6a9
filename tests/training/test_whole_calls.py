"""Calls of `fit`, `evaluate`, `predict` and `train_on_batch`: what they send and trace, and whose methods they are."""

import contextlib
import inspect
import pickle

import keras
import numpy as np
import pytest
from common import relative_error, skewed_rows
from harness import strategy, workers
from test_loop import calls
from test_steps import small_model

from tfring.errors import ConfigurationError

# -- what a call sends -------------------------------------------------------------------------------------------------


def sent_by(ring, call):
    """Returns how many collectives of each kind a second call sends on the ring of control, without those it lacks."""
    call()
    before = calls(ring)[0].copy()
    call()
    return {kind: n - before[kind] for kind, n in calls(ring)[0].items() if n != before[kind]}


def collectives_of_calls():
    import tensorflow as tf

    ring = strategy()
    x, y = skewed_rows(60)
    with ring.scope():
        model = small_model(metrics=["mae"])

    def batches(n):
        return tf.data.Dataset.from_tensor_slices((x[: 10 * n], y[: 10 * n])).batch(10)

    two, six = batches(2), batches(6)
    sees = keras.callbacks.LambdaCallback(on_predict_batch_end=lambda batch, logs: None)
    one_rank = [sees] if ring.cluster.rank == 1 else []
    begins = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: None)
    stopping = keras.callbacks.EarlyStopping("loss", patience=9)

    def fit(epochs, callbacks=()):
        return sent_by(ring, lambda: model.fit(two, epochs=epochs, verbose=0, callbacks=list(callbacks)))

    def predict(batches, callbacks=()):
        rows = batches.map(lambda x, y: x)
        return sent_by(ring, lambda: model.predict(rows, verbose=0, callbacks=list(callbacks)))

    return {
        "one epoch": fit(1),
        "four epochs": fit(4),
        "a callback": fit(4, [stopping]),
        "one that begins epochs": fit(4, [begins]),
        "predict two": predict(two),
        "predict six": predict(six),
        "predict two, rank 1 sees batches": predict(two, one_rank),
        "predict six, rank 1 sees batches": predict(six, one_rank),
        "train_on_batch": sent_by(ring, lambda: model.train_on_batch(x[:8], y[:8])),
        "predict_on_batch": sent_by(ring, lambda: model.predict_on_batch(x[:8])),
    }


def test_collectives_of_a_call():
    for counts in workers(2).run(collectives_of_calls, timeout=300):

        def more(one, other, counts=counts):
            """Returns what the call `one` sends beyond `other`."""
            kinds = counts[one] | counts[other]
            beyond = {k: counts[one].get(k, 0) - counts[other].get(k, 0) for k in kinds}
            return {k: n for k, n in beyond.items() if n}

        # An epoch of two steps: status twice, that a rank has left the loop, logs, state of metrics.
        assert more("four epochs", "one epoch") == {"all_reduce": 3 * 5}, counts
        assert counts["one epoch"]["all_reduce"] <= 5 + 3 and sum(counts["one epoch"].values()) <= 5 + 4
        # As training begins, at the end of each epoch; the barrier as it ends.
        assert more("a callback", "four epochs") == {"all_reduce": 1 + 4, "barrier": 1}, counts
        assert more("one that begins epochs", "a callback") == {"all_reduce": 4}, counts
        # Rows of all batches are gathered at once, after their sizes.
        assert more("predict six", "predict two") == {}, counts
        assert counts["predict two"]["all_gather"] == 2 and counts["predict two"]["all_reduce"] <= 5
        assert more("predict six, rank 1 sees batches", "predict two, rank 1 sees batches")["all_gather"] == 4, counts
        assert counts["train_on_batch"] == {"all_reduce": 3}  # whether the batch is the same; status; logs
        assert counts["predict_on_batch"] == {}


# -- what a call traces ------------------------------------------------------------------------------------------------


def forward_passes():
    """Returns how often a layer of each kind of model is traced by calls, their logs, and those of one process."""

    class Counted(keras.layers.Dense):
        times = 0

        def call(self, inputs, training=None):
            Counted.times += 1
            return super().call(inputs, training=training)

    def functional():
        inputs = {"b": keras.Input((2,), name="b"), "a": keras.Input((2,), name="a")}
        joined = keras.layers.Concatenate()([inputs["a"], inputs["b"]])
        return keras.Model(inputs, Counted(2, "sigmoid")(joined))

    def sequential():
        return keras.Sequential([keras.Input((4,)), Counted(2, "sigmoid")])

    def of_any_length():
        inputs = keras.Input((None,))
        return keras.Model(inputs, Counted(2, "sigmoid")(keras.layers.Reshape((4,))(inputs)))

    ring = strategy()
    x, y = skewed_rows(24)
    y = (np.concatenate([y, -y], axis=1) > 0).astype("float32")

    def trained(make, scope):
        keras.utils.set_random_seed(1)
        with scope:
            model = make()
            # F1Score makes its variables when it is updated first.
            model.compile("sgd", "binary_crossentropy", metrics=[keras.metrics.F1Score(threshold=0.4)])
        inputs = {"a": x[:, :2], "b": x[:, 2:]} if make is functional else x
        Counted.times = 0
        logs = model.fit(inputs, y, batch_size=5, shuffle=False, verbose=0).history
        in_fit, Counted.times = Counted.times, 0
        evaluated = model.evaluate(inputs, y, batch_size=5, verbose=0, return_dict=True)
        logs.update({f"of evaluate: {name}": value for name, value in evaluated.items()})
        return (in_fit, Counted.times), [np.asarray(logs[name]) for name in sorted(logs)]

    kinds = (functional, sequential, of_any_length)
    return {make.__name__: (trained(make, ring.scope()), trained(make, contextlib.nullcontext())) for make in kinds}


def test_a_functional_model_is_traced_once():
    for results in workers(2).run(forward_passes):
        for name, ((passes, logs), (_, want)) in results.items():
            assert passes == ((1, 1) if name != "of_any_length" else (2, 1)), name
            assert relative_error(logs, want) < 1e-5, name


# -- rows of predict ---------------------------------------------------------------------------------------------------


class Of(keras.Model):
    """Computes a function of its rows."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, x):
        return self.function(x)


def ragged(x):
    import tensorflow as tf

    lengths = tf.cast(4 * tf.abs(x[:, 1]), tf.int32) % 4
    return {"ragged": tf.RaggedTensor.from_row_lengths(tf.repeat(x[:, 0], lengths), lengths), "rows": x}


def several(x):
    import tensorflow as tf

    return {"a": x, "b": [tf.cast(tf.reduce_sum(x, 1), tf.float64), x > 0], "c": tf.cast(x, tf.bfloat16)}


def as_written(outputs):
    import tensorflow as tf

    def plain(value):
        if isinstance(value, tf.RaggedTensor):
            return "ragged", value.to_list()
        return type(value).__name__, str(value.dtype), value.shape, value.tobytes()

    return tf.nest.map_structure(plain, outputs, expand_composites=False)


def rows_of_predict():
    """Returns by case whether all rows are those of a plain model; the last batch has one row."""
    import tensorflow as tf

    ring = strategy()
    x, _ = skewed_rows(43)
    widths = [(5, 2), (5, 3), (5, 3), (4, 2)]  # of batches whose rows have other shapes
    signature = tf.TensorSpec([None, None])
    varied = tf.data.Dataset.from_generator(
        lambda: (np.ones(s, "float32") * s[1] for s in widths), output_signature=signature
    )
    cases = {
        "one": (lambda x: 2 * x, {}, {}),
        "several": (several, {}, {}),
        "rows that a model chooses": (lambda x: x[x[:, 0] > 0.1], {}, {}),
        "three batches an execution": (lambda x: 2 * x, {"steps_per_execution": 3}, {}),
        "ragged": (ragged, {}, {}),
        "eagerly": (several, {"run_eagerly": True}, {}),
        "other shapes": (lambda x: 2 * x, {}, {"x": varied}),
    }
    same = {}
    for name, (function, options, given) in cases.items():
        given = given or {"x": x, "batch_size": 21}
        with ring.scope():
            model = Of(function)
            model.compile(**options)
        alone = Of(function)
        alone.compile(**options)
        want = as_written(alone.predict(**given, verbose=0))
        same[name] = [as_written(model.predict(**given, verbose=0)) == want for _ in range(2)]
    return same


def test_rows_of_predict_are_those_of_one_process():
    for same in workers(2).run(rows_of_predict, timeout=300):
        assert all(all(twice) for twice in same.values()), same


def other_rows_on_a_rank():
    import tensorflow as tf

    from tfring.errors import MismatchError

    ring = strategy()
    x, _ = skewed_rows(40)
    rank = ring.cluster.rank
    with ring.scope():
        model = Of(lambda x: 2 * x)
        model.compile()
    messages = []
    for rows in (x + rank, x[: 40 - 20 * rank]):
        try:
            model.predict(tf.data.Dataset.from_tensor_slices(rows).batch(10).filter(lambda x: True), verbose=0)
            messages.append("no error")
        except MismatchError as error:
            messages.append(str(error))
    return messages, model.predict(x, verbose=0).tobytes() == (2 * x).tobytes()


def test_other_rows_on_a_rank_are_told_behind_the_loop():
    for (other, fewer), goes_on in workers(2).run(other_rows_on_a_rank):
        assert other.startswith("The ranks drew different batches."), other
        assert fewer.startswith("The data of one rank has ended while another still has rows."), fewer
        assert goes_on


# -- whose methods they are --------------------------------------------------------------------------------------------


@keras.saving.register_keras_serializable("tests_of_calls")
class Own(keras.Sequential):
    """Overrides what users override, and takes other arguments than Keras."""

    seen: list = []

    def fit(self, rows, *, times=1):
        self.seen.append("fit")
        return super().fit(*rows, epochs=times, batch_size=10, verbose=0, shuffle=False)

    def make_train_function(self, force=False):
        self.seen.append("make")
        return super().make_train_function(force)

    def predict(self, x, **kwargs):
        return super().predict(x, verbose=0, **kwargs) + 1


def methods():
    ring = strategy()
    x, y = skewed_rows(40)

    def make():
        model = Own([keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile("sgd", "mse")
        return model

    with ring.scope():
        model = make()
    alone = make()
    Own.seen.clear()
    losses = [m.fit((x, y), times=2).history["loss"] for m in (model, alone)]
    again = pickle.loads(pickle.dumps(alone))
    return {
        "classes": type(model) is type(alone) is type(again) is Own,
        "clone": type(keras.models.clone_model(model)) is type(keras.models.clone_model(alone)),
        "kinds": isinstance(model, keras.Sequential) and isinstance(model, keras.Model),
        "order": Own.seen == ["fit", "make"] * 2,
        "one base": sum(c.__name__ == "RingTrainer" for c in type(model).__mro__) == 1,
        "signature": "validation_split" in inspect.signature(keras.Model.fit).parameters,
        "compile": alone.get_compile_config()["loss"] == "mse",
        "registered": keras.saving.serialize_keras_object(model)["registered_name"] == "tests_of_calls>Own",
        "plain": type(alone.train_function).__module__ != "tfring._keras.trainer",
        "losses": bool(np.allclose(losses[0], losses[1], rtol=1e-5)),
        "predict": relative_error([model.predict(x)], [alone.predict(x)]) < 1e-5,
        "pickled": bool(np.array_equal(again.get_weights()[0], alone.get_weights()[0])),
    }


@pytest.mark.oldest
def test_methods_of_a_users_class_come_first_and_classes_stay():
    for facts in workers(2).run(methods):
        assert all(facts.values()), facts


class Wraps(keras.Sequential):
    """Calls the function that Keras would call, and reads what it returns."""

    def make_train_function(self, force=False):
        super().make_train_function(force)
        if self.train_function not in self.wrappers:
            inner = self.train_function
            self.train_function = lambda iterator: self.note(inner(iterator))
            self.wrappers.append(self.train_function)

    def note(self, logs):
        self.seen.append(float(logs["loss"]))
        return logs


class Iterates(keras.Sequential):
    """Draws batches by itself, as Keras' own function does."""

    def make_train_function(self, force=False):
        def function(iterator):
            for batch in iterator:
                return self.distribute_strategy.run(self.train_step, args=(batch,))

        self.train_function = function


def of_own_functions(kind):
    ring = strategy()
    x, y = skewed_rows(40)
    with ring.scope():
        model = kind([keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="ones")])
        model.wrappers, model.seen = [], []
        model.compile("sgd", "mse")
    try:
        model.fit(x, y, batch_size=16, verbose=0, shuffle=False)
    except ConfigurationError as error:
        return str(error)
    return [*model.seen]


def test_a_function_around_the_one_that_trains_reads_its_logs():
    [one] = workers(1).run(of_own_functions, Wraps)
    assert len(one) == 3
    for losses in workers(2).run(of_own_functions, Wraps):
        np.testing.assert_allclose(losses, one, rtol=1e-5)


def test_a_function_that_draws_batches_by_itself_is_refused_on_several_workers():
    assert workers(1).run(of_own_functions, Iterates) == [[]]
    for error in workers(2).run(of_own_functions, Iterates):
        assert "a batch from the iterator of `fit`" in error and "Override `train_step`" in error
