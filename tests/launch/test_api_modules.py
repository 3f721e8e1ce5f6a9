"""Programs that import modules of TensorFlow's API under other names, which are executed again, on two workers."""

from __future__ import annotations

import json
import subprocess

import pytest
from test_launch import LAUNCH

PROGRAM = """
import json, sys
import keras, numpy as np, tensorflow as tf, tfring

def imported():
    import tensorflow.compat.v1
    from tensorflow.nn import compute_average_loss
    return compute_average_loss

before = imported() if "before" in sys.argv else None
if "tensorboard" in sys.argv:  # which imports TensorFlow's API of version 1
    recording = keras.callbacks.TensorBoard(sys.argv[2])
    recording.set_model(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]))
    recording.on_train_begin()
    recording.on_train_end()
strategy = tfring.RingStrategy()
average = imported()
with strategy.scope():
    keras.backend.clear_session()  # which resets TensorFlow's default graph, but no open scope
    assert tf.distribute.get_strategy() is strategy
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")

class Averaged(keras.losses.Loss):
    def __call__(self, y_true, y_pred, sample_weight=None):
        return average(tf.reduce_mean((y_true - y_pred) ** 2, -1), global_batch_size=9)

with strategy.scope():
    model.compile("sgd", Averaged())
model.set_weights([np.ones((2, 1)), np.ones(1)])
x = np.arange(18.0).reshape(9, 2)
history = model.fit(x, x[:, :1], batch_size=9, verbose=0)
print(json.dumps([history.history["loss"], tf.nn.compute_average_loss is average]))
"""


@pytest.mark.parametrize("imports", ["before", "after", "tensorboard"])
def test_api_modules_that_are_executed_again(imports, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [*LAUNCH, "-n", "2", str(tmp_path / "program.py"), imports, str(tmp_path / "logs")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    ((loss,), is_same), *_ = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[[")]
    assert is_same and loss == pytest.approx(sum((2 * i + 2) ** 2 for i in range(9)) / 9, rel=1e-5)
