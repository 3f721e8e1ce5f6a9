"""tfring: trains Keras 3 models on TensorFlow over many processes and machines, connected in a ring."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from tfring import imports, seeding
from tfring._requirements import check_tensorflow
from tfring._version import __version__

# Public names, loaded on first use, so that `tfring launch` starts without TensorFlow (PEP 562).
_EXPORTS = {
    "Cluster": "tfring.cluster",
    "ClusterResolver": "tfring.cluster_resolver",
    "Communicator": "tfring.ring.communicator",
    "Delayed": "tfring.strategy",
    "Mesh": "tfring.cluster",
    "ParameterServerStrategy": "tfring.strategy",
    "RingAllReduce": "tfring.cross_device_ops",
    "RingStrategy": "tfring.strategy",
    "SparseOptions": "tfring.reduction.sparse",
    "SyncBatchNormalization": "tfring.layers",
    "all_gather": "tfring.functions",
    "all_reduce": "tfring.functions",
    "barrier": "tfring.functions",
    "broadcast": "tfring.functions",
    "gather_for_loss": "tfring.losses",
    "is_chief": "tfring.functions",
    "local_rank": "tfring.functions",
    "local_world_size": "tfring.functions",
    "print_once": "tfring.functions",
    "rank": "tfring.functions",
    "save": "tfring._keras.saving",
    "world_size": "tfring.functions",
}
_WITHOUT_TENSORFLOW = ("tfring.cluster", "tfring.functions", "tfring.ring.communicator")
# So that `tfring.callbacks.Backup` works without importing `tfring.callbacks`.
_ROOMS = ("callbacks", "data", "errors", "layers", "notebook", "parallel", "schedules")
_OF_HOROVOD = (
    *("init", "shutdown", "size", "local_size", "allreduce", "allgather", "broadcast_variables", "Compression"),
    *("DistributedOptimizer", "DistributedGradientTape", "BroadcastGlobalVariablesCallback", "MetricAverageCallback"),
    *("LearningRateWarmupCallback", "elastic"),
)

if TYPE_CHECKING:
    from tfring import callbacks, data, errors, layers, notebook, parallel, schedules
    from tfring._keras.saving import save
    from tfring.cluster import Cluster, Mesh
    from tfring.cluster_resolver import ClusterResolver
    from tfring.cross_device_ops import RingAllReduce
    from tfring.functions import (
        all_gather,
        all_reduce,
        barrier,
        broadcast,
        is_chief,
        local_rank,
        local_world_size,
        print_once,
        rank,
        world_size,
    )
    from tfring.layers import SyncBatchNormalization
    from tfring.losses import gather_for_loss
    from tfring.reduction.sparse import SparseOptions
    from tfring.ring.communicator import Communicator
    from tfring.strategy import Delayed, ParameterServerStrategy, RingStrategy

__all__ = [
    "Cluster",
    "ClusterResolver",
    "Communicator",
    "Delayed",
    "Mesh",
    "ParameterServerStrategy",
    "RingAllReduce",
    "RingStrategy",
    "SparseOptions",
    "SyncBatchNormalization",
    "__version__",
    "all_gather",
    "all_reduce",
    "barrier",
    "broadcast",
    "callbacks",
    "data",
    "errors",
    "gather_for_loss",
    "is_chief",
    "layers",
    "local_rank",
    "local_world_size",
    "notebook",
    "parallel",
    "print_once",
    "rank",
    "save",
    "schedules",
    "world_size",
]


def _load(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"tfring.{name}")
    if name not in _EXPORTS:
        horovods = ", which is Horovod's: docs/migration.md says what replaces it" if name in _OF_HOROVOD else ""
        raise AttributeError(f"module 'tfring' has no attribute {name!r}{horovods}")
    if _EXPORTS[name] not in _WITHOUT_TENSORFLOW:
        check_tensorflow()
    value = getattr(importlib.import_module(_EXPORTS[name]), name)
    if _EXPORTS[name] == "tfring.strategy":
        importlib.import_module("tfring.layers")  # registers the layers, so that Keras finds those that a file names
    globals()[name] = value
    return value


if not TYPE_CHECKING:  # a type checker that saw it would accept any name
    __getattr__ = _load


def __dir__() -> list[str]:
    return sorted(__all__)


if os.environ.get("TFRING_SEED"):  # for runs without `tfring launch`, whose workers do it before the program begins
    seeding.apply_from_environment(imports.after_import)
