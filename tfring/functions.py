"""Functions for scripts: the rank of this process, and small exchanges with the other ranks.

They work before a strategy is created, together with one and without any, and in a process that is alone.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import numpy as np

from tfring.cluster import Cluster, detection
from tfring.cluster.roles import Roles
from tfring.cluster.unresolved import UnresolvedCluster
from tfring.program import short_traceback
from tfring.ring.communicator import Communicator, is_tensorflow
from tfring.ring.library import DTYPES

_PLAIN = "None, bool, int, float, str, and lists, tuples and dicts of them with strings as keys, as in JSON"
_NOT_PLAIN = -1  # instead of a length: the value of the root or of a rank cannot be sent

_own: Communicator | None = None  # created when a program without a strategy first exchanges something


def rank() -> int:
    """Returns the rank of this process, from 0 to `world_size() - 1`; 0 if it is alone. Does not communicate.

    In a parameter server, before its strategy is created, it is a number above the ranks of all workers.

    >>> rank()
    0
    """
    return _identity().rank


def world_size() -> int:
    """Returns the number of processes that train together; 1 for a process that is alone. Does not communicate.

    Parameter servers are not counted.

    >>> world_size()
    1
    """
    roles = _server()
    return _identity().world_size if roles is None else len(roles.workers)


def local_rank() -> int:
    """Returns the rank of this process among those of its host, from 0.

    Under MPI, SLURM and torchrun-style variables, and before a strategy exists, the ranks connect to find out which of
    them share a host: all ranks must then call it.

    >>> local_rank()
    0
    """
    return _cluster().local_rank


def local_world_size() -> int:
    """Returns the number of processes on the host of this process.

    Connects in the same cases as `local_rank`.

    >>> local_world_size()
    1
    """
    return _cluster().local_world_size


def is_chief() -> bool:
    """Returns whether this is rank 0, which prints, logs and writes on behalf of all ranks. Does not communicate.

    >>> is_chief()
    True
    """
    return rank() == 0


def print_once(*values: Any, **options: Any) -> None:
    """Prints on rank 0 only. Accepts the arguments of `print`. The other ranks need not call it.

    >>> print_once("epochs:", 3)
    epochs: 3
    """
    if is_chief():
        print(*values, **options)


@short_traceback
def barrier() -> None:
    """Blocks until all ranks have called it.

    Raises:
      MismatchError, PeerLostError, CollectiveTimeoutError: If another rank calls something else, has ended, or
        takes longer than `TFRING_TIMEOUT_SECONDS`.

    >>> barrier()
    """
    peers = _peers()
    if peers is not None:
        peers.barrier(name="tfring.barrier")


@short_traceback
def all_reduce(value: Any, op: str = "sum") -> Any:
    """Reduces a value over all ranks. All ranks must call it; the result is the same on every rank.

    Args:
      value: A number, an array or a tensor (eager or in a `tf.function`), of the same shape and dtype on all ranks; or
        a list of arrays, or of tensors, of one dtype.
      op: "sum", "mean", "max", "min" or "product". The mean of integers is a float64. For bool, use "max" (any) or
        "min" (all). Defaults to "sum".

    Returns:
      A Python number if `value` is one; otherwise an array, a tensor or a list, as `value` is.

    Raises:
      ValueError: If `op` is something else, or if the dtype cannot be reduced.
      MismatchError, PeerLostError, CollectiveTimeoutError: See `barrier`.

    >>> all_reduce(0.5, "mean"), all_reduce(np.array([1, 2]), "max")
    (0.5, array([1, 2]))
    """
    if op not in ("sum", "mean", "max", "min", "product"):
        raise ValueError(f"`op` is {op!r}, not sum, mean, max, min or product.")
    if isinstance(value, (bool, int, float, complex)):
        return all_reduce(np.asarray(value), op).item()
    peers = _peers()
    if peers is None:
        result = _copied(value)
    else:
        result = peers.all_reduce(value, "sum" if op == "mean" else op, name="tfring.all_reduce")
    if op != "mean":
        return result
    size = 1 if peers is None else peers.world_size
    return [each / size for each in result] if isinstance(result, list) else result / size


@short_traceback
def all_gather(value: Any) -> Any:
    """Gathers the values of all ranks. All ranks must call it.

    Args:
      value: An array or a tensor of shape `[rows, ...]`, where the number of rows may differ between ranks; or a plain
        Python value (None, numbers, strings, lists, dicts), which is sent as JSON and never as pickle.

    Returns:
      The rows of all ranks, in rank order. For plain values, a list with the value of each rank, in which tuples have
      become lists.

    Raises:
      TypeError: On all ranks, if one of them has a value that JSON cannot represent.
      MismatchError, PeerLostError, CollectiveTimeoutError: See `barrier`.

    >>> all_gather({"loss": 0.5})
    [{'loss': 0.5}]
    >>> all_gather(np.array([[1, 2]]))
    array([[1, 2]])
    """
    if _is_array(value):
        peers = _peers()
        return _copied(value) if peers is None else peers.all_gather(value, name="tfring.all_gather")
    text, problem = _encoded(value)
    peers = _peers()
    lengths, texts = [len(text)], text
    if peers is not None:
        mine = np.array([_NOT_PLAIN if problem else len(text)])
        lengths = peers.all_gather(mine, name="tfring.all_gather of Python values").tolist()
        if _NOT_PLAIN not in lengths:
            texts = peers.all_gather(np.frombuffer(text, np.uint8), name="tfring.all_gather as JSON").tobytes()
    if problem is None and _NOT_PLAIN in lengths:
        problem = TypeError(
            f"The value of rank {lengths.index(_NOT_PLAIN)} cannot be gathered: it is not a plain value ({_PLAIN})."
        )
    if problem is not None:
        raise problem
    ends = np.cumsum(lengths)
    return [json.loads(texts[end - length : end]) for end, length in zip(ends, lengths, strict=True)]


@short_traceback
def broadcast(value: Any, root: int = 0) -> Any:
    """Returns the value of rank `root` on every rank. All ranks must call it.

    Args:
      value: An array, a tensor, or a plain Python value (None, numbers, strings, lists, dicts), which is sent as JSON
        and never as pickle. Ranks other than `root` may pass any value; in a `tf.function` they must pass a tensor of
        the same shape and dtype.
      root: The rank whose value is returned, from 0 to `world_size() - 1`. Defaults to 0.

    Returns:
      A copy on every rank: an array for an array, a tensor for a tensor. In plain values, tuples become lists.

    Raises:
      TypeError: On all ranks, if the root has a value that JSON cannot represent.
      ValueError: If `root` is not a rank.
      MismatchError, PeerLostError, CollectiveTimeoutError: See `barrier`.

    >>> broadcast({"run": "a", "folds": [1, 2]})
    {'run': 'a', 'folds': [1, 2]}
    """
    peers, size = _peers(), world_size()
    if isinstance(root, bool) or not isinstance(root, int) or not 0 <= root < size:
        raise ValueError(f"`root` is {root!r}, not a rank from 0 to {size - 1}.")
    if _is_symbolic(value):
        return value if peers is None else peers.broadcast(value, root, name="tfring.broadcast")
    if peers is None:
        return _copied(value) if _is_array(value) else _of_json(*_encoded(value))
    is_root = peers.rank == root
    array = np.asarray(value) if is_root and _is_array(value) else None
    text, problem = b"", None
    if array is not None:
        about = {"dtype": array.dtype.name, "shape": array.shape, "tensor": is_tensorflow(value)}
        text, problem = _encoded(about) if array.dtype.name in DTYPES else (b"", _wrong_dtype(array))
    elif is_root:
        text, problem = _encoded(value)
    head = np.array([_NOT_PLAIN if problem else len(text), array is not None])
    length, follows = peers.broadcast(head, root, name="tfring.broadcast").tolist()
    if length == _NOT_PLAIN:
        raise problem or TypeError(
            f"The value of rank {root} cannot be broadcast: it is neither an array nor a plain value ({_PLAIN})."
        )
    mine = np.frombuffer(text, np.uint8) if is_root else np.empty(length, np.uint8)
    said = json.loads(peers.broadcast(mine, root, name="tfring.broadcast as JSON").tobytes())
    if not follows:
        return said
    if array is None:
        array = np.empty(said["shape"], said["dtype"])
    result = peers.broadcast(array, root, name="tfring.broadcast of an array")
    return _as_tensor(result) if said["tensor"] else result


# ------------------------------------------------------------------------------------------- the other ranks


def _ring() -> Any:
    """Returns the ring of the newest strategy; None without one, and so before TensorFlow is imported."""
    runtime = sys.modules.get("tfring.runtime")
    return None if runtime is None else runtime.ring_of_process()


def _cluster() -> Cluster:
    """Returns the cluster of this process, whose hosts are known; see `local_rank`."""
    ring, roles = _ring(), _server()
    if roles is not None:
        return roles.cluster_of_all()
    return detection.detect() if ring is None else ring.cluster


def _identity() -> Cluster | UnresolvedCluster:
    ring, roles = _ring(), _server()
    if ring is not None:
        return ring.cluster
    if roles is not None:
        return roles.cluster_of_all()
    return detection.find(os.environ) or Cluster.alone()


def _server() -> Roles | None:
    """Returns the roles of the job in a parameter server, which has no rank among the workers; None elsewhere."""
    roles = Roles.of()
    return roles if roles is not None and roles.is_server else None


def _peers() -> Any:
    """Returns the Communicator to the other ranks, or an object with its methods; None if this process is alone.

    It also returns None in a step of Keras that is traced for all rows, as one process computes it: such a step
    exchanges nothing by itself.
    """
    global _own
    ring = _ring()
    if ring is not None:
        running = sys.modules["tfring.step"].current()
        if running is not None and running.is_plain:
            return None
        peers = ring.peers
        return getattr(peers, "communicator", None) or _Runtime(peers)
    cluster = detection.detect()
    if cluster.world_size == 1:
        return None
    if _own is None:
        _own = Communicator.connect(cluster, "functions")
    return _own


class _Runtime:
    """Gives TensorFlow's runtime, or parameter servers, the methods of a Communicator that are needed here."""

    def __init__(self, collectives: Any) -> None:
        self._collectives = collectives
        self.rank, self.world_size = collectives.rank, collectives.world_size

    def barrier(self, name: str) -> None:
        self._collectives.barrier(name=name)

    def all_reduce(self, value: Any, op: str, name: str) -> Any:
        return self._of_list(lambda tensors: self._collectives.all_reduce(tensors, op, name=name), value)

    def broadcast(self, value: Any, root: int, name: str) -> Any:
        return self._of_list(lambda tensors: self._collectives.broadcast(tensors, root, name=name), value)

    def all_gather(self, value: Any, name: str) -> Any:
        return self._of_list(lambda tensors: self._collectives.all_gather(tensors, name=name), value)

    def _of_list(self, function: Any, value: Any) -> Any:
        import tensorflow as tf

        many = isinstance(value, (list, tuple)) and all(map(_is_array, value))
        values = list(value) if many else [value]
        results = function([tf.convert_to_tensor(each) for each in values])
        results = [r if is_tensorflow(v) else r.numpy() for r, v in zip(results, values, strict=True)]
        return results if many else results[0]


# ---------------------------------------------------------------------------------------------------- values


def _is_array(value: Any) -> bool:
    """Returns True if a value is sent as an array. NumPy scalars are sent as plain numbers."""
    return hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, np.generic)


def _is_symbolic(value: Any) -> bool:
    """Returns True if a value is a symbolic tensor of a `tf.function`."""
    if not _is_array(value) or not is_tensorflow(value):
        return False
    import tensorflow as tf

    return tf.is_symbolic_tensor(value)


def _as_tensor(array: np.ndarray) -> Any:
    import tensorflow as tf

    return tf.convert_to_tensor(array)


def _copied(value: Any) -> Any:
    if isinstance(value, (list, tuple)) and value and all(map(_is_array, value)):
        return [_copied(each) for each in value]
    return value if is_tensorflow(value) else np.array(value)


def _encoded(value: Any) -> tuple[bytes, TypeError | None]:
    """Returns the JSON of a plain value, or the error if it has none."""
    wrong = describe_non_json_part(value)
    if wrong is not None:
        return b"", TypeError(
            f"The value has {wrong}, which cannot be sent. Plain values are {_PLAIN}. Pass arrays by themselves."
        )
    return json.dumps(value, default=lambda number: number.item()).encode(), None


def _of_json(text: bytes, problem: TypeError | None) -> Any:
    if problem is not None:
        raise problem
    return json.loads(text)


def describe_non_json_part(value: Any) -> str | None:
    """Describes a part of a value that JSON cannot represent, or would return as something else; None without one."""
    if value is None or isinstance(value, (bool, int, float, str, np.bool_, np.integer, np.floating)):
        return None
    if isinstance(value, (list, tuple)):
        return next((wrong for each in value if (wrong := describe_non_json_part(each)) is not None), None)
    if isinstance(value, dict):
        keys = [key for key in value if not isinstance(key, str)]
        if keys:
            return f"a dict with the non-string key {keys[0]!r}"
        return describe_non_json_part(list(value.values()))
    return f"a {type(value).__name__}"


def _wrong_dtype(array: np.ndarray) -> TypeError:
    return TypeError(f"Arrays of dtype {array.dtype} cannot be sent. Supported dtypes: {', '.join(sorted(DTYPES))}")
