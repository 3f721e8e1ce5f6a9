"""One rank of one contestant: answers run.py's questions."""

from __future__ import annotations

import json
import os
import time

import contest

LAYERS, ROWS, SIZE, CHANNELS = 20, 8, 8, 32
STEPS = 24  # of one measurement; sync_every divides it


class Contestant:
    """The network with and without synchronized statistics, and how a step of it runs."""

    def __init__(self, rank, ranks, ports):
        import tensorflow as tf

        self.tf, self.rank, self.ranks, self.ports = tf, rank, ranks, ports
        self.connect()
        self.steps = {synchronized: self.step(synchronized) for synchronized in (True, False)}
        self.synchronise_layer = self.steps[True]  # a step of it ends after all ranks have begun it

    def connect(self):
        """Joins the other ranks."""

    def layer(self, synchronized):
        """A batch normalization layer."""
        raise NotImplementedError

    def scope(self):
        return self.strategy.scope()

    def on_replica(self, step):
        return self.strategy.run(step)

    def step(self, synchronized):
        """A function that runs forward and backward of the network once."""
        tf = self.tf
        with self.scope():
            layers = []
            for _ in range(LAYERS):
                layers += [
                    tf.keras.layers.Conv2D(CHANNELS, 3, padding="same", use_bias=False),
                    self.layer(synchronized),
                    tf.keras.layers.ReLU(),
                ]
            model = tf.keras.Sequential([tf.keras.Input((SIZE, SIZE, CHANNELS)), *layers])
        x = tf.random.normal([ROWS, SIZE, SIZE, CHANNELS])

        def replica():
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(x, training=True) ** 2)
            # Keras 3 wraps TensorFlow's variables, Keras 2 (Horovod's) does not.
            variables = [v if isinstance(v, tf.Variable) else v.value for v in model.trainable_variables]
            gradients = tape.gradient(loss, variables)
            gradients = [g if tf.is_tensor(g) else tf.convert_to_tensor(g) for g in gradients]
            return tf.add_n([tf.reduce_sum(g) for g in gradients])

        return tf.function(lambda: self.on_replica(replica), autograph=False)

    def collectives(self):
        """Collectives of one step: the nodes of its graph."""
        graph = self.steps[True].get_concrete_function().graph.as_graph_def()
        nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
        return sum(node.op.startswith(("Collective", "Horovod", "Tfring")) for node in nodes)

    def facts(self):
        return [f"TensorFlow {self.tf.__version__}", f"Keras {self.tf.keras.__version__}"]


class Keras(Contestant):
    def connect(self):
        tf = self.tf
        workers = [f"127.0.0.1:{port}" for port in self.ports]
        os.environ["TF_CONFIG"] = json.dumps(
            {"cluster": {"worker": workers}, "task": {"type": "worker", "index": self.rank}}
        )
        options = tf.distribute.experimental.CommunicationOptions(
            implementation=tf.distribute.experimental.CommunicationImplementation.RING
        )
        self.strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)

    def layer(self, synchronized):
        return self.tf.keras.layers.BatchNormalization(synchronized=synchronized)


class Tfring(Contestant):
    communication, transport, options = "ring", "auto", {}

    def connect(self):
        os.environ["TFRING_TRANSPORT"] = self.transport
        import tfring

        addresses = [f"127.0.0.1:{port}" for port in self.ports]
        cluster = tfring.Cluster.from_hosts(addresses, rank=self.rank)
        self.strategy = tfring.RingStrategy(cluster, communication=self.communication)
        self.version = tfring.__version__

    def layer(self, synchronized):
        import tfring

        if not synchronized:
            return self.tf.keras.layers.BatchNormalization()
        return tfring.SyncBatchNormalization(**self.options)

    def collectives(self):
        if self.communication != "ring":
            return super().collectives()

        def count():
            statistics = [c.communicator.statistics()["collectives"] for c in self.strategy.ring.channels]
            return sum(sum(kinds.values()) for kinds in statistics)

        before = count()
        for _ in range(STEPS):
            self.steps[True]()
        return (count() - before) / STEPS

    def facts(self):
        return [*super().facts(), f"tfring {self.version}"]


class TfringTcp(Tfring):
    transport = "tcp"


class TfringCentral(Tfring):
    options = {"synchronization": "central"}


class TfringEvery4(Tfring):
    options = {"sync_every": 4}


class TfringTensorFlow(Tfring):
    communication = "tensorflow"


class Horovod(Contestant):
    def connect(self):
        import horovod
        import horovod.tensorflow as hvd

        hvd.init()
        self.hvd, self.version = hvd, horovod.__version__

    def scope(self):
        return self.tf.device("CPU:0")

    def on_replica(self, step):
        return step()

    def layer(self, synchronized):
        if synchronized:
            self.number = getattr(self, "number", 0) + 1
            return self.hvd.SyncBatchNormalization(name=f"synchronized_{self.number}")  # it finds no names itself
        return self.tf.keras.layers.BatchNormalization(fused=False)

    def facts(self):
        return [f"Horovod {self.version} on TensorFlow {self.tf.__version__}"]


MAKERS = {
    "keras": Keras,
    "horovod": Horovod,
    "tfring": Tfring,
    "tfring_tcp": TfringTcp,
    "tfring_central": TfringCentral,
    "tfring_every_4": TfringEvery4,
    "tfring_tensorflow": TfringTensorFlow,
}


def measure(contestant, synchronized):
    """Seconds a step takes, on average."""
    step = contestant.steps[synchronized]
    step()
    for _ in range(STEPS // 4):  # the ranks begin together
        contestant.synchronise_layer()
    start = time.perf_counter()
    for _ in range(STEPS):
        step().numpy()
    return (time.perf_counter() - start) / STEPS


def main():
    name, *where = contest.place()
    contestant = MAKERS[name](*where)

    def timed(synchronized, at_realtime):
        with contest.realtime(at_realtime):
            return measure(contestant, synchronized)

    contest.serve(where[0], facts=contestant.facts, collectives=contestant.collectives, measure=timed)


if __name__ == "__main__":
    main()
