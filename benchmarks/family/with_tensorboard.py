"""The callback with histograms and the profiler, one folder; scalars read back, the profile opened by its plugin."""

from __future__ import annotations

import keras
import models
import tensorflow as tf
from tensorboard.backend.event_processing import event_accumulator
from xprof.convert import raw_to_tool_data

import tfring


def train(strategy, folder):
    x, y = models.digits()
    with strategy.scope():
        model = models.dense()
    callback = keras.callbacks.TensorBoard(str(folder / "logs"), histogram_freq=1, update_freq=2, profile_batch=(2, 4))
    validation = models.digits(50, seed=0)
    history = model.fit(x, y, batch_size=32, epochs=2, validation_data=validation, callbacks=[callback], verbose=0)
    tfring.barrier()
    read = {}
    for kind, tag in (("train", "batch_loss"), ("validation", "epoch_loss")):
        [file] = (folder / "logs" / kind).glob("events.out.tfevents.*.v2")  # one writer, however many workers
        events = event_accumulator.EventAccumulator(str(file), size_guidance={"tensors": 0}, purge_orphaned_data=False)
        events.Reload()
        read[kind] = [float(tf.make_ndarray(event.tensor_proto)) for event in events.Tensors(tag)]
    profiles = sorted((folder / "logs").rglob("*.xplane.pb"))
    found, _ = raw_to_tool_data.xspace_to_tool_data([str(path) for path in profiles], "overview_page", {})
    assert found
    return {"profiles": len(profiles), **read, "loss": history.history["loss"], "weights": models.weights(model)}
