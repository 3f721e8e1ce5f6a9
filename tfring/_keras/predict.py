"""`predict`: the outputs of all rows, in order, on every rank."""

from __future__ import annotations

import tensorflow as tf

from tfring import _tf, data
from tfring._keras.functions import graph_function, to_tensor, without_optionals
from tfring._keras.seam import entry_under_way
from tfring.cross_device_ops import values_of


class PredictFunction:
    """What `model.predict_function` is: elements of the distributed dataset in, outputs of all rows out.

    `predict` returns all rows in order on every rank; `predict_on_batch` the rows it was given.
    """

    def __init__(self, model, strategy):
        self._model = model
        self._strategy = strategy
        self._replicas = len(strategy.extended.worker_devices)
        eager = model.run_eagerly
        self._gathered = self._gathered_body if eager else graph_function(self._gathered_body)
        self._local = self._local_body if eager else graph_function(self._local_body)

    def __call__(self, batches):
        if entry_under_way("predict"):
            return self._gathered(batches)
        [batch] = batches
        return self._local(tf.nest.map_structure(to_tensor, batch))

    def _run(self, inputs):
        outputs = self._strategy.run(lambda e: self._model.predict_step(without_optionals(e)), args=(inputs,))
        return outputs

    def _on_worker(self, outputs):
        """This worker's rows, of its replicas in turn."""

        def joined(value):
            values = self._strategy.experimental_local_results(value)
            return values[0] if len(values) == 1 else tf.concat(values, 0)

        return tf.nest.map_structure(joined, outputs, expand_composites=False)

    def _gathered_body(self, batches):
        cross_device_ops = self._strategy.extended._cross_device_ops
        steps = []
        for batch in batches:
            if isinstance(batch, data.Shares):
                # TensorFlow takes what its iterator yields for a value a replica.
                parts = tf.nest.map_structure(lambda leaf: values_of(leaf)[0], batch.parts)
                batch = _tf.distribute_utils.regroup(parts)
            outputs = self._on_worker(self._run(batch))
            if self._strategy.cluster.world_size > 1:
                outputs = tf.nest.map_structure(
                    lambda v: cross_device_ops.gather_over_workers(v, 0, name="predictions"), outputs
                )
            steps.append(outputs)
        return steps[0] if len(steps) == 1 else tf.nest.map_structure(lambda *v: tf.concat(v, 0), *steps)

    def _local_body(self, batch):
        parts = data.split_rows(batch, self._replicas)
        regrouped = _tf.distribute_utils.regroup(tuple(parts))
        return self._on_worker(self._run(regrouped))
