"""Throughput's logs, callbacks of rank 0 alone, and the lines of strategies that are closed."""

from __future__ import annotations

import contextlib
import io
import time
import warnings

import harness
import numpy as np
import pytest
from harness import workers

import tfring


def make_model(strategy, **compile):
    import keras

    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", **compile)
    return model


def logs_of_a_slow_rank(accumulate):
    import keras

    from tfring.callbacks import Throughput

    strategy = harness.strategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(gradient_accumulation_steps=accumulate), "mse")
    x, y = np.ones((80, 4), "float32"), np.ones((80, 1), "float32")

    class Late(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            time.sleep(0.25 if strategy.rank == 1 else 0)

    model.fit(x, y, batch_size=10, verbose=0)
    begin = time.monotonic()
    history = model.fit(x, y, batch_size=10, epochs=2, verbose=0, callbacks=[Late(), Throughput(10)]).history
    return history, time.monotonic() - begin


@pytest.mark.parametrize("accumulate", [None, 4])
def test_throughput_is_that_of_all_workers(accumulate):
    (logs, seconds), (others, _) = workers(2).run(logs_of_a_slow_rank, accumulate)
    assert logs == others
    updates = 8 if accumulate is None else 2
    for epoch in range(2):
        of_epoch = {name: values[epoch] for name, values in logs.items()}
        assert 80 / seconds < of_epoch["samples_per_second"] <= 80 / 2.0  # eight steps of at least 0.25 s
        assert of_epoch["steps_per_second"] == pytest.approx(of_epoch["samples_per_second"] * updates / 80)
        assert 0.2 < of_epoch["waiting"] < 0.7  # rank 0 most of the time, rank 1 hardly
        assert 8 * 2 * 5 * 4 / 1e6 / (accumulate or 1) < of_epoch["megabytes_sent"] < 0.1


def logs_over_tensorflow():
    from tfring.callbacks import Throughput

    strategy = harness.strategy()
    x, y = np.ones((80, 4), "float32"), np.ones((80, 1), "float32")
    return make_model(strategy).fit(x, y, batch_size=10, verbose=0, callbacks=[Throughput()]).history


def test_throughput_where_the_engine_counts_nothing():
    first, second = workers(2, "tensorflow").run(logs_over_tensorflow)
    assert first == second and set(first) == {"loss", "steps_per_second"}


def test_throughput_at_the_door():
    from tfring.callbacks import Throughput

    for wrong in (0, 2.0, True, "8"):
        with pytest.raises(ValueError, match=r"`batch_size` is .*, not an integer of at least 1, or None"):
            Throughput(wrong)
    callback = Throughput()
    with pytest.raises(ValueError, match="The model has no optimizer"):
        callback.on_train_begin()


def batches_that_callbacks_saw():
    import keras

    from tfring.callbacks import chief_only

    strategy = harness.strategy()
    model = make_model(strategy)
    x, y = np.ones((80, 4), "float32"), np.ones((80, 1), "float32")
    seen, made = [], []

    class Reports(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            made.append(self)

        def on_train_batch_end(self, batch, logs=None):
            seen.append(logs["loss"])

        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = epoch == 1

    history = model.fit(x, y, batch_size=10, epochs=5, verbose=0, callbacks=[chief_only(Reports)]).history
    return len(made), len(seen), len(history["loss"])


def test_a_callback_of_rank_0_alone():
    from tfring.callbacks import chief_only

    assert workers(2).run(batches_that_callbacks_saw) == [(1, 16, 2), (0, 0, 2)]
    with pytest.raises(TypeError, match="`callback` is 3, not a Keras callback"):
        chief_only(3)
    with pytest.raises(TypeError, match="which is not a Keras callback"):
        chief_only(dict)


def lines_of_calls(_):
    """What is printed while a strategy is made, trains and fails, trains again, and is closed twice."""
    import keras

    with contextlib.redirect_stderr(io.StringIO()) as printed:
        strategy = harness.strategy()
        model = make_model(strategy)
        x, y = np.ones((80, 4), "float32"), np.ones((80, 1), "float32")

        class Stop(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                raise KeyboardInterrupt

        with contextlib.suppress(KeyboardInterrupt):
            model.fit(x, y, verbose=0, callbacks=[Stop()])
        begin = time.monotonic()
        model.fit(x, y, verbose=0, validation_data=(x, y))
        seconds = time.monotonic() - begin
        strategy.close()
        strategy.close()
    return printed.getvalue().splitlines(), seconds


@pytest.mark.parametrize("communication", harness.COMMUNICATIONS)
def test_lines_of_calls(communication):
    (lines, seconds), (others, _) = workers(2, communication).run(lines_of_calls, None)
    lines = [line for line in lines if line.startswith("tfring: ")]
    assert len(lines) == 2 and not [line for line in others if line.startswith("tfring: ")]
    engine = {"ring": "ring over shared memory, without a secret", "tensorflow": "TensorFlow's collectives"}
    assert lines[0] == f"tfring: 2 workers on 1 host (tfring launch): {engine[communication]}."
    # The call that was interrupted is not counted, nor is validation twice.
    assert float(lines[1].split()[1]) == pytest.approx(seconds, abs=0.2)
    assert ("of computation" in lines[1]) == (communication == "ring")


def lines_of_layers(batch_normalization, options):
    """What is printed of a model with batch normalization, two dropouts and an augmentation, which trains twice."""
    import keras

    with contextlib.redirect_stderr(io.StringIO()) as printed:
        strategy = harness.strategy(**options)
        with strategy.scope():
            normalize = {"keras": keras.layers.BatchNormalization, "tfring": tfring.SyncBatchNormalization}
            layers = [keras.layers.RandomFlip(name="flip"), normalize[batch_normalization](name="normalize")]
            drop = [keras.layers.Dropout(rate, name=f"drop_{rate}".replace(".", "")) for rate in (0.0, 0.2)]
            model = keras.Sequential([keras.Input((4, 4, 3)), *layers, keras.layers.Flatten(), *drop])
            model.compile("sgd", "mse")
        for _ in range(2):
            model.fit(np.ones((8, 4, 4, 3)), np.ones((8, 48)), verbose=0)
        strategy.close()
    return [line for line in printed.getvalue().splitlines() if line.startswith("tfring: ")][1:-1]


def test_layers_that_compute_what_one_process_does_not_are_named_once():
    lines, others = workers(2).run(lines_of_layers, "keras", {})
    assert others == [] and lines == [
        "tfring: BatchNormalization 'normalize' normalizes each worker's own rows, and RandomFlip 'flip' (and 1 more) "
        "draws different random numbers than in one process. To get the result of one process, use "
        "tfring.SyncBatchNormalization (or tfring.layers.to_sync_batch_normalization(model)) and "
        'RingStrategy(random="global").'
    ]
    assert workers(2).run(lines_of_layers, "tfring", {"random": "global"}) == [[], []]


def lines_of_a_step_that_draws(options):
    """What is printed of a model that draws numbers itself, and of layers with a generator that they do not use."""
    import keras

    class Sampled(keras.Model):
        def __init__(self):
            super().__init__()
            self.seeds = keras.random.SeedGenerator(1)
            self.recurrent, self.dense = keras.layers.LSTM(2), keras.layers.Dense(1)

        def call(self, x):
            noise = keras.random.normal(keras.ops.shape(x), seed=self.seeds)
            return self.dense(self.recurrent(x + noise))

    with contextlib.redirect_stderr(io.StringIO()) as printed:
        strategy = harness.strategy(**options)
        with strategy.scope():
            model = Sampled()
            model.compile("sgd", "mse")
        model.fit(np.ones((8, 3, 4)), np.ones((8, 1)), verbose=0)
        strategy.close()
    return [line for line in printed.getvalue().splitlines() if line.startswith("tfring: ")][1:-1]


def test_a_step_that_draws_numbers_itself_is_named():
    [line], _ = workers(2).run(lines_of_a_step_that_draws, {})
    assert line.startswith("tfring: Sampled 'sampled' draws different random numbers than in one process. "), line
    assert workers(2).run(lines_of_a_step_that_draws, {"random": "global"}) == [[], []]


def errors_of_a_rank(_):
    """Errors of a layer of another size on each rank, and of a wrong argument; a warning of another learning rate."""
    import keras

    strategy = harness.strategy()
    model = make_model(strategy)
    x, y = np.ones((8, 4)), np.ones((8, 1))
    with pytest.raises(TypeError) as wrong:
        model.fit(x, y, workers=4)
    model.optimizer.learning_rate = 0.5 * (strategy.rank + 1)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        model.fit(x, y, verbose=0)
    with strategy.scope(), pytest.raises(tfring.errors.MismatchError) as other:
        keras.layers.Dense(3 + strategy.rank).build((None, 4))
    return str(wrong.value), [str(w.message) for w in warned], str(other.value)


def test_what_differs_on_a_rank_before_training_is_told():
    of_0, of_1 = workers(2).run(errors_of_a_rank, None)
    for rank, (wrong, _, other) in enumerate((of_0, of_1)):
        assert wrong == "fit() got an unexpected keyword argument 'workers'"
        begin = f"The ranks make different models: this rank makes kernel of shape (4, {3 + rank})."
        assert other.startswith(begin), other
    [warned] = [text for text in of_1[1] if "learning rate" in text]
    assert "The learning rate of SGD 'sgd' is 1.0 on rank 1 and 0.5 on rank 0. All ranks now use that of" in warned
