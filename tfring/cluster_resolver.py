"""Presents a cluster of tfring as a resolver of `tf.distribute`."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfring.cluster import Cluster, detect
from tfring.cluster.launch_variables import release_listener


class ClusterResolver(tf.distribute.cluster_resolver.ClusterResolver):
    """Describes the cluster to a strategy of TensorFlow, from any source that tfring knows.

    ```python
    strategy = tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=tfring.ClusterResolver())
    ```

    Every rank is a task of the job "worker". Rank 0 is worker 0, which TensorFlow treats as the chief. A process that
    is alone has an empty cluster and no task.

    Args:
      cluster: A `tfring.Cluster`. Defaults to the cluster that `RingStrategy()` would find.
      release_port: Whether to close the socket that tfring may hold at this worker's address, so that TensorFlow's
        server can listen there. `RingStrategy` passes False, as it listens there itself. Defaults to True.

    Attributes:
      cluster: The `tfring.Cluster`.
      rpc_layer: The name of the RPC layer, "grpc". It can be set.

    >>> resolver = ClusterResolver(Cluster.from_hosts(["host1:12345", "host2:12345"], rank=1))
    >>> resolver.cluster_spec().as_dict()
    {'worker': ['host1:12345', 'host2:12345']}
    >>> resolver.task_type, resolver.task_id, resolver.master()
    ('worker', 1, 'grpc://host2:12345')
    """

    def __init__(self, cluster: Cluster | None = None, *, release_port: bool = True) -> None:
        cluster = detect(cluster)
        self.cluster = release_listener(cluster) if release_port else cluster
        self.rpc_layer = "grpc"
        self._is_alone = cluster.world_size == 1
        self._task_type = None if self._is_alone else "worker"
        self._task_id = None if self._is_alone else cluster.rank

    def cluster_spec(self) -> tf.train.ClusterSpec:
        """Returns a spec with one job, "worker", of all ranks; an empty spec if this process is alone."""
        return tf.train.ClusterSpec({} if self._is_alone else {"worker": list(self.cluster.addresses)})

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Returns the URL of a task, by default of this process's task; an empty string if this process is alone."""
        if self._is_alone:
            return ""
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        layer = self.rpc_layer if rpc_layer is None else rpc_layer
        address = self.cluster_spec().task_address(task_type, task_id)
        return f"{layer}://{address}" if layer else address

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: Any = None
    ) -> dict[str, int]:
        """Returns the number of this worker's GPUs, the same on every worker, without starting TensorFlow."""
        gpus = tf.config.list_physical_devices("GPU")
        return {"GPU": sum(len(tf.config.get_logical_device_configuration(gpu) or [gpu]) for gpu in gpus)}
