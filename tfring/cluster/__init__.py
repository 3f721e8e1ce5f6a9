"""The cluster's configuration: the rank of this process and the addresses of all ranks. Does not import TensorFlow."""

from tfring.cluster.cluster import Cluster
from tfring.cluster.detection import detect
from tfring.cluster.mesh import Mesh
from tfring.cluster.tf_config import for_hosts
from tfring.transport.address import Address, parse_address
from tfring.transport.ports import listen

__all__ = ["Address", "Cluster", "Mesh", "detect", "for_hosts", "listen", "parse_address"]
