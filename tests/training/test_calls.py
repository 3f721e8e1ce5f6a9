"""Failures name the user's calls, with their lines, and the rule."""

from __future__ import annotations

import pathlib
import re
import time
import traceback

import harness
import numpy as np
import pytest
from harness import workers

from tfring.errors import MismatchError, PeerLostError


def make_model(strategy):
    import keras

    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    return model


def messages_of_calls(_):
    """What each rank is told, of calls that differ and batches that differ; the ring may be used on."""
    import tensorflow as tf

    strategy = harness.strategy()
    rank, model = strategy.rank, make_model(strategy)
    x, y = np.arange(160.0).reshape(40, 4).astype("float32"), np.ones((40, 1), "float32")
    told = []
    try:
        if rank == 0:
            model.evaluate(x, y, verbose=0)
        model.fit(x, y, verbose=0)
    except MismatchError as error:
        told.append(str(error))
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(40, seed=rank).batch(10)
    for run in (lambda: model.fit(dataset, verbose=0), lambda: model.predict(dataset.map(lambda x, y: x), verbose=0)):
        try:
            run()
        except MismatchError as error:
            told.append(f"{type(error).__module__}.{type(error).__qualname__}: {error}")
    assert len(model.fit(x, y, verbose=0).history["loss"]) == 1
    return told


def message_of_a_rank_that_left(_):
    strategy = harness.strategy()
    model = make_model(strategy)
    x, y = np.ones((40, 4), "float32"), np.ones((40, 1), "float32")
    model.fit(x, y, verbose=0)
    if strategy.rank == 1:
        strategy.close()  # as at the end of a script
        return None
    try:
        model.evaluate(x, y, verbose=0)
    except PeerLostError as error:
        return str(error)


def tracebacks_of_a_rank_that_left(how):
    """Of errors of the program and of Keras, of one in tfring, and of what rank 0 raises once rank 1 has left."""
    import keras
    import tensorflow as tf

    strategy = harness.strategy()
    model = make_model(strategy)
    x, y = np.ones((40, 4), "float32"), np.ones((40, 1), "float32")

    class Raises(keras.callbacks.Callback):
        def on_test_begin(self, logs=None):
            raise ValueError("on all ranks")

    class Evaluates(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            if strategy.rank == 1:
                raise LookupError("on rank 1")
            model.evaluate(x, y, verbose=0)

    class Recurs(keras.callbacks.Callback):
        def on_test_begin(self, logs=None):
            self.on_test_begin()

    with pytest.raises(ValueError) as own:
        model.evaluate(x, y, verbose=0, callbacks=[Raises()])
    with pytest.raises(RecursionError) as recurred:
        model.evaluate(x, y, verbose=0, callbacks=[Recurs()])
    assert {entry.path.name for entry in recurred.traceback} == {"test_calls.py"}
    with pytest.raises(ValueError) as keras_own:
        model.evaluate(x[:, :3], y, verbose=0)  # which Keras raises in the step
    with pytest.raises(AttributeError) as within:
        model.evaluate(x, y, verbose=0, callbacks=3)
    if strategy.rank == 1:
        if how == "callback":
            with pytest.raises(LookupError):
                model.fit(x, y, verbose=0, callbacks=[Evaluates()])
        strategy.close()
        return None
    if how == "unfiltered":
        keras.config.disable_traceback_filtering()
    try:
        with pytest.raises(PeerLostError) as lost:
            if how == "run":
                strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("sum", tf.ones(3)))
            else:
                model.fit(x, y, verbose=0, callbacks=[Evaluates()] if how == "callback" else [])
    finally:
        keras.config.enable_traceback_filtering()
    return ["".join(traceback.format_exception(error.value)) for error in (own, keras_own, within, lost)]


def error_of_an_operation(_):
    """Of a label that is no class, in both workers' rows and in a loss of the program."""
    import keras
    import tensorflow as tf

    def crossentropy(labels, logits):
        return tf.nn.sparse_softmax_cross_entropy_with_logits(tf.cast(labels[:, 0], "int32"), logits)

    with harness.strategy().scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        model.compile("sgd", crossentropy)
    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        model.fit(np.ones((6, 4)), np.full((6, 1), 3), batch_size=6, verbose=0)
    return "".join(traceback.format_exception(raised.value))


def message_of_calls_at_two_places(_):
    """Rank 0 evaluates in a callback, where the others take a step."""
    import keras

    strategy = harness.strategy()
    model = make_model(strategy)
    x, y = np.ones((40, 4), "float32"), np.ones((40, 1), "float32")

    class Evaluates(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if strategy.rank == 0:
                model.evaluate(x, y, verbose=0)

    try:
        model.fit(x, y, verbose=0, batch_size=10, callbacks=[Evaluates()])
    except MismatchError as error:
        return str(error)


def where_one_rank_raises(folder, how):
    """Rank 1 raises an error, and its process lives on until rank 0 has its own."""
    import keras
    import tensorflow as tf

    strategy = harness.strategy()
    rank, model = strategy.rank, make_model(strategy)
    rows = np.ones((40, 4), "float32"), np.ones((40, 1), "float32")

    class Raises(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if rank == 1 and batch == 1:
                raise ValueError("no such row\nas this one")

    def draw():
        for number, row in enumerate(zip(*rows, strict=True)):
            if rank == 1 and how == "operation" and number == 20:
                raise ValueError("no such row")
            yield row

    spec = tf.TensorSpec((4,)), tf.TensorSpec((1,))
    data = tf.data.Dataset.from_generator(draw, output_signature=spec).batch(10)
    ended = pathlib.Path(folder, "rank 0 has ended")
    with pytest.raises(PeerLostError if rank == 0 else (ValueError, tf.errors.OpError)) as raised:
        model.fit(data, verbose=0, callbacks=[Raises()] if how == "callback" else [])
    if rank == 0:
        ended.touch()
    deadline = time.monotonic() + 100
    while not ended.exists():
        assert time.monotonic() < deadline, "rank 0 waits"
        time.sleep(0.1)
    return str(raised.value)


def where_all_ranks_raise(_):
    """The ring is used on, also where one rank takes its time between two calls."""
    import keras

    class Raises(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise ValueError("on all ranks")

    strategy = harness.strategy()
    model = make_model(strategy)
    x, y = np.ones((40, 4), "float32"), np.ones((40, 1), "float32")
    with pytest.raises(ValueError, match="on all ranks"):
        model.fit(x, y, verbose=0, callbacks=[Raises()])
    time.sleep(6 * strategy.rank)
    return len(model.fit(x, y, verbose=0).history["loss"])


def where_a_condition_differs(_):
    """One replica calls a step that updates, the other does not, in a loop of the program's own."""
    import keras
    import tensorflow as tf

    ring = harness.strategy()
    with ring.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        rows = ring.experimental_distribute_dataset(tf.data.Dataset.range(20).batch(20))  # sums of 45 and of 145

    @tf.function
    def step(x):
        x = tf.cast(x, tf.float32)[:, None]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - x))
        model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    with pytest.raises(MismatchError) as raised:
        for x in rows:
            if float(tf.reduce_sum(ring.experimental_local_results(x)[0])) > 100.0:
                ring.run(step, args=(x,))
            ring.barrier()
    return str(raised.value)


def test_a_condition_that_differs_between_replicas_is_told():
    env = {"TFRING_STALL_WARNING_SECONDS": "2"}
    for message in workers(2, env=env).run(where_a_condition_differs, None):
        assert "wait for each other in different rings, and neither computes" in message
        assert "if a condition around an update (tf.cond) depends on a replica's own value" in message


def test_calls_and_batches_that_differ():
    results = workers(2).run(messages_of_calls, None)
    assert results[0][0] == results[1][0]
    calls, fits, predicts = results[1]
    assert re.match(
        r"The ranks make different calls: `model\.evaluate` at test_calls\.py:\d+ on rank 0, `model\.fit` at "
        r"test_calls\.py:\d+ on rank 1\. All ranks must make the same calls in the same order",
        calls,
    )
    for text, call in ((fits, "fit"), (predicts, "predict")):
        assert text.startswith("tfring.errors.MismatchError: The ranks drew different batches. ")
        where = rf" The call was `model\.{call}` at test_calls\.py:\d+, whose `x` is from_tensor_slices\.shuffle"
        assert re.search(where, text), text


def test_a_rank_that_left():
    told, _ = workers(2).run(message_of_a_rank_that_left, None)
    assert told.startswith("rank 1 left the ring") and "Rank 0 was in `model.evaluate` at test_calls.py:" in told
    assert "All ranks must make the same calls in the same order" in told


def _files(error):
    return re.findall(r'File ".*/(.*)", line', error)


@pytest.mark.parametrize("how", ["fit", "callback", "run", "unfiltered"])
def test_an_error_of_another_rank_has_the_frames_of_the_program_alone(how):
    """So has one that its code raises; one that tfring runs into has the last of tfring. Keras' switch shows all."""
    (own, keras_own, within, lost), _ = workers(2).run(tracebacks_of_a_rank_that_left, how)
    assert {*_files(own)} == {"test_calls.py"}, own
    for error in (keras_own, within):
        *before, last = _files(error)
        assert {*before} == {"test_calls.py"} and last in ("trainer.py", "callbacks.py"), error
    files = _files(lost)
    if how == "unfiltered":
        assert {"test_calls.py", "trainer.py", "contextlib.py", "agreement.py"} <= {*files}, lost
    else:
        wrapper = {"api.py"} if how == "run" else set()  # TensorFlow's, around all of `strategy.run`
        assert {*files} - wrapper == {"test_calls.py"} and "Graph execution error" not in lost, lost
        assert lost.count("in on_train_begin") == (how == "callback")
    assert lost.splitlines()[-1].startswith("tfring.errors.PeerLostError: rank 1 ")


def test_an_operation_that_fails_has_the_frames_of_the_program_and_where_it_was_traced():
    for error in workers(2).run(error_of_an_operation, None):
        assert re.findall(r"File .*, in (.*)", error) == ["error_of_an_operation", "crossentropy"], error
        assert "Received a label value of 3" in error


def test_calls_at_two_places():
    of_0, of_1 = workers(2).run(message_of_calls_at_two_places, None)
    assert of_0.startswith("ranks disagree: ") and "Rank 0 was in `model.evaluate` at test_calls.py:" in of_0
    assert "Rank 1 was in `model.fit` at test_calls.py:" in of_1 and of_1.count("All ranks must make") == 1


@pytest.mark.parametrize("how", ["callback", "operation"])
def test_an_error_of_one_rank_reaches_the_others(tmp_path, how):
    of_0, of_1 = workers(2).run(where_one_rank_raises, str(tmp_path), how, timeout=200)
    told = r"rank 1 failed while rank 0 waited for it in .*: \w+Error: .*no such row\.? Rank 0 was in"
    assert re.match(told, of_0), of_0
    assert "as this one" not in of_0 and "no such row" in of_1


def test_ranks_that_raise_alike_may_go_on():
    assert workers(2).run(where_all_ranks_raise, None) == [1, 1]
