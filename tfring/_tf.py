"""The one file that imports `tensorflow.python.*`: each symbol with the reason it is needed.

A new TensorFlow release should touch this file alone.
"""

# Why each is needed; `tf.distribute` has no public way to write a strategy outside TensorFlow.
from tensorflow.python.data.util import random_seed as data_random_seed  # seeds of unseeded tf.data shuffles
from tensorflow.python.distribute import (
    collective_all_reduce_strategy as _mwms,  # the class Keras asks for, and its Extended
)
from tensorflow.python.distribute import collective_util as _collective_util  # its communication options
from tensorflow.python.distribute import cross_device_ops as _cross_device_ops  # helpers of CrossDeviceOps
from tensorflow.python.distribute import cross_device_utils as _cross_device_utils  # keys of its collectives
from tensorflow.python.distribute import (
    device_util,  # canonical device names
    distribute_lib,  # contexts: replica, cross-replica
    distribute_utils,  # regroup values of replicas
    input_lib,  # DistributedDataset over one worker's share
)
from tensorflow.python.distribute import values as distribute_values  # PerReplica, Mirrored, SyncOnRead
from tensorflow.python.eager import context as eager_context  # number of GPUs; is eager async
from tensorflow.python.framework import ops as framework_ops  # the function graph being built
from tensorflow.python.ops import collective_ops  # communication="tensorflow"
from tensorflow.python.ops.resource_variable_ops import ResourceVariable  # a variable no strategy mirrors

CollectiveAllReduceExtended = _mwms.CollectiveAllReduceExtended
CommunicationOptions = _collective_util.Options
CollectiveKeys = _cross_device_utils.CollectiveKeys
StrategyExtendedV1 = distribute_lib.StrategyExtendedV1
simple_broadcast = _cross_device_ops.simple_broadcast
devices_of = _cross_device_ops.get_devices_from
aggregate_slices = _cross_device_utils.aggregate_tensors_or_indexed_slices

__all__ = [
    "CollectiveAllReduceExtended",
    "CollectiveKeys",
    "CommunicationOptions",
    "ResourceVariable",
    "StrategyExtendedV1",
    "aggregate_slices",
    "collective_ops",
    "data_random_seed",
    "device_util",
    "devices_of",
    "distribute_lib",
    "distribute_utils",
    "distribute_values",
    "eager_context",
    "framework_ops",
    "input_lib",
    "simple_broadcast",
]
