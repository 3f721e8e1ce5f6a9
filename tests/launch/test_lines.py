"""The lines that rank 0 prints when a run starts and ends, under `tfring launch`."""

from __future__ import annotations

import re

from test_launch import launch, plain_environment

from tfring.strategy.lines import end_line

__all__ = ["launch", "plain_environment"]  # fixtures

TRAIN = """
import keras, numpy as np, tfring
strategy = tfring.RingStrategy()
class Late(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        time.sleep(0.2 if rank == 1 and "late" in sys.argv else 0)
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x, y = np.ones((80, 4), "float32"), np.ones((80, 1), "float32")
model.fit(x, y, batch_size=10, validation_data=(x, y), epochs=2, verbose=0, callbacks=[Late()])
"""
FIRST = re.compile(r"^tfring: 2 workers on 1 host \(tfring launch\): ring over (.+), with a secret, seed 7\.$", re.M)
LAST = re.compile(
    r"^tfring: ([\d.]+) s in fit, evaluate and predict: ([\d.]+) s of computation, ([\d.]+) s \((\d+)%\) of waiting "
    r"for others; rank 0 sent ([\d.]+) kB\.(.*)$",
    re.M,
)


def test_a_run_tells_who_trains_and_what_was_waited_for(launch):
    said = launch(2, TRAIN, options=["--seed", "7"], arguments=["late"]).stderr
    assert [m.group(1) for m in FIRST.finditer(said)] == ["shared memory"], said
    [last] = LAST.finditer(said)
    seconds, computed, waited, share, sent = map(float, last.groups()[:5])
    assert said.endswith(last.group() + "\n") and said.count("tfring: ") == 2
    assert abs(seconds - computed - waited) < 0.2 and abs(share - 100 * waited / seconds) < 5
    assert waited > 2, "rank 1 sleeps 3.2 seconds, and rank 0 waits"
    assert (share > 50) == ("More than half was waiting" in last.group(6))
    assert 0.5 < sent < 100


def test_lines_that_are_not_printed(launch, monkeypatch):
    failing = launch(2, TRAIN + "if rank == 0: raise ValueError('boom')", options=["--seed", "7"], code=1).stderr
    assert FIRST.search(failing) and "in fit" not in failing and "ValueError: boom" in failing
    monkeypatch.setenv("TFRING_QUIET", "1")
    monkeypatch.setenv("TFRING_TRANSPORT", "tcp")
    assert "tfring: " not in launch(2, TRAIN).stderr
    monkeypatch.setenv("TFRING_QUIET", "0")
    loop = "import tfring; strategy = tfring.RingStrategy(); strategy.barrier()"
    said = launch(2, loop, options=["--seed", "7", "--encrypt"]).stderr  # nothing was trained
    assert [m.group(1) for m in FIRST.finditer(said)] == ["TCP, TCP encrypted by TLS"] and said.count("tfring: ") == 1


def test_advice_where_more_than_half_was_waiting():
    assert "docs/speed.md" in end_line(10.0, 5.1, 10) and "docs/speed.md" not in end_line(10.0, 4.9, 10)
    at_most_half = end_line(7.0, 3.52, 0)  # 50.3 %
    assert "(50%)" in at_most_half and "docs/speed.md" not in at_most_half
    assert ": 0.0 s of computation, 10.0 s (100%) of waiting" in end_line(10.0, 14.0, 0)  # of two channels
