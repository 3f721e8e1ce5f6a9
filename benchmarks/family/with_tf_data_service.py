"""A dispatcher and worker at rank 0, batches dealt out by distributed_epoch, policy OFF: evaluate has each row once."""

from __future__ import annotations

import models
import tensorflow as tf

import tfring

service = tf.data.experimental.service


def train(strategy, folder):
    x, y = models.digits()
    servers = []
    if tfring.is_chief():
        dispatcher = service.DispatchServer()
        address = dispatcher.target.split("://")[1]
        servers = [dispatcher, service.WorkerServer(service.WorkerConfig(dispatcher_address=address))]
    address = tfring.broadcast(address if servers else None)

    def dealt(job):
        rows = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)
        rows = rows.apply(service.distribute("distributed_epoch", f"grpc://{address}", job_name=job))
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        return rows.with_options(options)

    with strategy.scope():
        model = models.dense()
    evaluated = model.evaluate(dealt("evaluate"), verbose=0)
    history = model.fit(dealt("fit"), epochs=3, verbose=0).history["loss"]
    assert history[-1] < history[0] / 2
    tfring.barrier()  # the servers end with rank 0
    return {"evaluated": evaluated, "loss, of ranks": history, "weights, of ranks": models.weights(model)}
