"""Learning rates that grow with the workers, and warm-ups: their values, their files, and after a restart."""

import contextlib
import tempfile

import keras
import numpy as np
import pytest
from common import skewed_rows
from harness import strategy, workers

from tfring.callbacks import Backup, WarmUp
from tfring.errors import ConfigurationError
from tfring.schedules import Scaled


@pytest.mark.parametrize(("rule", "factor"), [("linear", 4.0), ("sqrt", 2.0)])
def test_rates(rule, factor):
    base = keras.optimizers.schedules.ExponentialDecay(0.1, decay_steps=10, decay_rate=0.5)
    scaled = Scaled(base, 4, rule, warmup_steps=5)
    rates = np.array([float(scaled(step)) for step in range(8)])
    plain = np.array([float(base(step)) for step in range(8)])
    reached = np.minimum(np.arange(1, 9) / 5, 1)
    np.testing.assert_allclose(rates, plain * (1 + (factor - 1) * reached), rtol=1e-6)
    assert rates[4] == pytest.approx(plain[4] * factor) and rates[0] < plain[0] * factor


def test_one_worker_trains_with_the_base():
    assert [float(Scaled(0.3, 1, warmup_steps=4)(step)) for step in range(6)] == pytest.approx([0.3] * 6)


@pytest.mark.parametrize("base", [0.2, keras.optimizers.schedules.CosineDecay(0.2, 50)])
def test_a_saved_model_has_its_schedule(base, tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(Scaled(base, 3, "sqrt", warmup_steps=7)), "mse")
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras").optimizer._learning_rate
    assert isinstance(loaded, Scaled)
    assert [float(loaded(s)) for s in (0, 3, 20)] == [float(model.optimizer._learning_rate(s)) for s in (0, 3, 20)]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Scaled(0.1, 0), "`world_size` is 0, not an integer of at least 1"),
        (lambda: Scaled(0.1, 2, "cubic"), "`rule` is 'cubic', not one of"),
        (lambda: Scaled(-0.1, 2), "`base` is -0.1, not a number above 0"),
        (lambda: Scaled(0.1, 2, warmup_steps=-1), "`warmup_steps` is -1, not an integer of at least 0"),
        (lambda: WarmUp(0), "`warmup_steps` is 0, not an integer of at least 1"),
        (lambda: WarmUp(3, start=1.5), "`start` is 1.5, not a number from 0 to 1"),
    ],
)
def test_wrong_arguments(make, text):
    with pytest.raises(ConfigurationError, match=text):
        make()


def test_a_schedule_has_its_own_warm_up():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 5)), "mse")
    with pytest.raises(ConfigurationError, match="CosineDecay"):
        model.fit(np.ones((4, 2)), np.ones((4, 1)), callbacks=[WarmUp(3)], verbose=0)


class Rates(keras.callbacks.Callback):
    """Notes the rate of each update, as the optimizer has it before it."""

    def __init__(self):
        super().__init__()
        self.rates = []

    def on_train_batch_begin(self, batch, logs=None):
        self.rates.append(round(float(self.model.optimizer.learning_rate), 6))


def rates_of(folder, *epochs):
    """Returns the rates of a program that is started once for each of `epochs`, and goes on from `folder`.

    A Backup keeps what callbacks have noted.
    """
    ring = strategy()
    x, y = skewed_rows(40)
    for last in epochs:
        with ring.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.08), "mse")
        rates = Rates()
        callbacks = [rates, WarmUp(8, start=0.25), *([Backup(folder)] if folder else [])]
        model.fit(x, y, batch_size=10, epochs=last, callbacks=callbacks, verbose=0)
    return rates.rates


def test_warm_up_goes_on_after_a_restart():
    want = [round(0.08 * (0.25 + 0.75 * min((t + 1) / 8, 1)), 6) for t in range(12)]
    undisturbed = workers(2).run(rates_of, None, 3)
    with tempfile.TemporaryDirectory() as folder:
        restarted = workers(2).run(rates_of, folder, 1, 3)
    assert undisturbed == [want, want]
    assert restarted == [want, want]


def warm(folder, epochs, stops_after, *, load=None):
    """Trains by Keras' own BackupAndRestore, or what a file holds; returns the rates of updates of a warm-up of 16."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.08), "mse")
    model = keras.models.load_model(load) if load else model
    rates = Rates()
    stop = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: (epoch + 1 == stops_after and 1 / 0) or None)
    callbacks = [WarmUp(16), rates, *([] if load else [keras.callbacks.BackupAndRestore(folder / "backup")]), stop]
    with contextlib.suppress(ZeroDivisionError):
        model.fit(*skewed_rows(40), batch_size=10, epochs=epochs, callbacks=callbacks[::-1], verbose=0)
    model.save(folder / "model.keras")
    return rates.rates


def test_warm_up_goes_on_after_keras_restores(tmp_path):
    want = [round(0.08 * min((t + 1) / 16, 1), 6) for t in range(20)]
    assert warm(tmp_path, 5, 2) == want[:8]
    assert warm(tmp_path, 5, None) in (want[8:], want[4:])  # by Keras' version, whether it had saved the last epoch


def test_warm_up_goes_on_with_a_model_from_a_file(tmp_path):
    want = [round(0.08 * min((t + 1) / 16, 1), 6) for t in range(20)]
    assert warm(tmp_path, 2, None) == want[:8]
    with pytest.warns(UserWarning, match=r"at update 8 of 16: .* the full rate is 0\.08\. If"):
        assert warm(tmp_path, 3, None, load=tmp_path / "model.keras") == want[8:]
