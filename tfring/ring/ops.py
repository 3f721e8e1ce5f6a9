"""The collectives as TensorFlow ops: eagerly, inside `tf.function`, with gradients.

All ranks must run the same collectives of a communicator in the same order. Inside a `tf.function` this is program
order, through `tf.cond` and `tf.while_loop` as well. Collectives of two communicators are independent of each other as
long as TensorFlow has an inter-op thread for each communicator. Inside a `tf.function` errors are TensorFlow's:
InvalidArgumentError (ranks disagree), AbortedError (a rank is lost), DeadlineExceededError (a rank makes no progress).
`communicator.failure()` returns the same error as one of tfring, which `fit`, `evaluate` and `predict` raise. XLA
(`jit_compile=True`) rejects these ops, as it rejects TensorFlow's own collectives on CPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tfring import _tf
from tfring.errors import ConfigurationError, NativeLibraryError
from tfring.ring import library, order
from tfring.ring.schedule import chunk_bounds

_PAYLOAD = "tfring"  # in the status of an operation with a broken ring: the ring's identity; see native/invocation.h
Tensors: TypeAlias = tf.Tensor | Sequence[tf.Tensor]
_log = logging.getLogger("tfring")
_tokens: dict[int | str, tf.Tensor] = {}
_apart = threading.local()  # its `token` is set inside `apart`
_lines: dict[int, order.Line] = {}  # by the handle of a communicator that has called an op with a gradient
# The communicators that each graph calls, kept alive as long as the graph.
_users: weakref.WeakKeyDictionary[tf.Graph, set[Any]] = weakref.WeakKeyDictionary()


def all_reduce(
    communicator: Any,
    tensors: Tensors,
    op: str = "sum",
    *,
    name: str = "all_reduce",
    active: tf.Tensor | None = None,
    compression: str | None = None,
) -> Any:
    """Reduces tensors element-wise over all ranks. A list is sent as one buffer.

    Differentiable for "sum": the gradient is summed over the ranks as well.

    Args:
      communicator: A `tfring.ring.communicator.Communicator`.
      tensors: A tensor, or a list of tensors of one dtype, of the same shapes on all ranks.
      op: "sum", "max", "min" or "product".
      name: Name of the collective in errors, the same on all ranks.
      active: A bool scalar. If False, this rank contributes zeros, whatever values `tensors` hold (including NaN).
        Defaults to None, which means True.
      compression: "bfloat16" or "float16", the dtype in which float32 is sent; see `Communicator.all_reduce`. The
        gradient is sent in it as well.

    Returns:
      A tensor, or a list of tensors.

    Example:
        >>> import tensorflow as tf
        >>> from tfring.cluster.cluster import Cluster
        >>> from tfring.ring.communicator import Communicator
        >>> all_reduce(Communicator.connect(Cluster.alone()), tf.constant([1.0, 2.0])).numpy()
        array([1., 2.], dtype=float32)
    """
    many, tensors = _as_list(tensors)
    if not tensors:
        return []
    active = True if active is None else active
    number = library.compression_number(compression)
    if number:
        communicator._ensure_links(range(communicator.world_size))
    results = _call_in_order(
        "all_reduce", communicator, name, tensors, active=active, tensors=tensors, op=_operation(op), compression=number
    )
    return list(results) if many else results[0]


def reduce(
    communicator: Any, tensors: Tensors, root: int = 0, op: str = "sum", *, name: str = "reduce"
) -> Any:
    """Reduces like `all_reduce`, but only the root gets the result. The other ranks get zeros.

    Differentiable for "sum": every rank's gradient is the root's.
    """
    many, tensors = _as_list(tensors)
    if not tensors:
        return []
    results = _call_in_order("reduce", communicator, name, tensors, tensors=tensors, op=_operation(op), root=root)
    return list(results) if many else results[0]


def all_gather(communicator: Any, tensor: Tensors, *, name: str = "all_gather") -> Any:
    """Concatenates the rows of all ranks, in rank order.

    Differentiable: a rank's gradient is the sum over all ranks of the gradient of its own rows.

    Args:
      communicator: A `Communicator`.
      tensor: A tensor of shape `[rows, ...]`, or a list of them. The number of rows may differ between ranks.
      name: Name of the collective in errors.

    Returns:
      A tensor of shape `[rows of all ranks, ...]`, with an unknown first dimension while tracing; or a list of them.
    """
    many, tensors = _as_list(tensor)
    if not tensors:
        return []
    results, _ = _call_in_order("all_gather_rows", communicator, name, tensors, tensors=tensors)
    for result, each in zip(results, tensors, strict=True):
        if each.shape.rank:
            result.set_shape([None, *each.shape[1:]])
    return list(results) if many else results[0]


def all_reduce_rows(
    communicator: Any,
    values: Tensors,
    indices: Tensors,
    *,
    name: str = "all_reduce_rows",
    active: tf.Tensor | None = None,
    reduction: str = "auto",
) -> Any:
    """Sums rows with equal ids, each id once; see `Communicator.all_reduce_rows`. Not differentiable.

    Args:
      communicator: A `Communicator`.
      values: A tensor of shape `[rows, ...]`, or a list of them, which is sent as one buffer.
      indices: int32 or int64 tensor of shape `[rows]`, or a list of them.
      name: Name of the collective in errors.
      active: A bool scalar. If False, this rank contributes no rows. Defaults to None, which means True.
      reduction: "auto", "gather" or "owner".

    Returns:
      A tuple `(values, indices)`, or a list of such tuples.
    """
    many, values = _as_list(values)
    _, indices = _as_list(indices)
    pairs, _ = sum_rows(communicator, values, indices, name=name, active=active, reduction=reduction)
    return pairs if many else pairs[0]


def sum_rows(
    communicator: Any,
    values: Sequence[tf.Tensor],
    indices: Sequence[tf.Tensor],
    *,
    name: str,
    active: tf.Tensor | None = None,
    reduction: str = "auto",
) -> tuple[list[tuple[tf.Tensor, tf.Tensor]], tf.Tensor]:
    """Sums like `all_reduce_rows`, for lists. If `communicator` is None, sums the rows of this process only.

    Returns:
      A tuple of a list of pairs `(values, indices)`, and the number of different ids of this rank in each of
      `indices`, int64 of shape `[len(values)]`.
    """
    if len(values) != len(indices):
        raise ValueError(f"`values` has {len(values)} tensors, but `indices` {len(indices)}. Pass the indices of each.")
    number = library.row_sums_number(reduction)
    if not values:
        return [], tf.zeros([0], tf.int64)
    inputs = {"active": True if active is None else active, "values": values, "indices": indices}
    if communicator is None:
        with tf.device("CPU:0"):
            made = _ops().tfring_all_reduce_rows(token=_resource("alone"), handle=0, key=name, **inputs)
    else:
        communicator._ensure_links_for_rows(reduction)
        made = _call("all_reduce_rows", communicator, name, op=number, **inputs)
    sums, ids, rows = made
    for result, value in zip(sums, values, strict=True):
        result.set_shape([None, *value.shape[1:]])
    for result in ids:
        result.set_shape([None])
    return list(zip(sums, ids, strict=True)), rows[-1, : len(values)]


def reduce_scatter(communicator: Any, tensor: Tensors, op: str = "sum", *, name: str = "reduce_scatter") -> Any:
    """Reduces over all ranks and returns this rank's share of the rows.

    Differentiable for "sum": the gradient is gathered.

    Args:
      communicator: A `Communicator`.
      tensor: A tensor of shape `[rows, ...]`, the same on all ranks, or a list of them of one dtype.
        `schedule.chunk_bounds(rows, world_size)` gives the rows of each rank.
      op: "sum", "max", "min" or "product".
      name: Name of the collective in errors.
    """
    many, tensors = _as_list(tensor)
    if not tensors:
        return []
    results = _call_in_order("reduce_scatter", communicator, name, tensors, tensors=tensors, op=_operation(op))
    for result, each in zip(results, tensors, strict=True):
        if not each.shape.rank:
            continue
        rows = each.shape[0]
        if rows is not None:
            begin, end = chunk_bounds(rows, communicator.world_size)[communicator.rank]
            rows = end - begin
        result.set_shape([rows, *each.shape[1:]])
    return list(results) if many else results[0]


def gather(communicator: Any, tensor: Tensors, root: int = 0, *, name: str = "gather") -> Any:
    """Gathers like `all_gather`; ranks other than the root get no rows. Differentiable: the gradient is scattered."""
    results, _ = _exchange(communicator, tensor, None, "gather", name, root)
    return results


def scatter(communicator: Any, tensor: Tensors, counts: Any = None, root: int = 0, *, name: str = "scatter") -> Any:
    """Sends some of the root's rows to each rank; see `Communicator.scatter`. Its gradient is gathered."""
    results, _ = _exchange(communicator, tensor, counts, "scatter", name, root)
    return results


def all_to_all(communicator: Any, tensor: Tensors, counts: Any = None, *, name: str = "all_to_all") -> tuple[Any, Any]:
    """Sends some rows of every rank to every rank.

    Differentiable: the gradient is sent back the same way.

    Args:
      communicator: A `Communicator`.
      tensor: A tensor of shape `[rows, ...]`, first the rows for rank 0, then those for rank 1, and so on; or a list
        of them.
      counts: Number of rows for each rank, integers of shape `[world_size]`; or a list of them. Defaults to the shares
        of `reduce_scatter`.
      name: Name of the collective in errors.

    Returns:
      A tuple of the rows for this rank, those of rank 0 first, and the number of rows from each rank, int64 of shape
      `[world_size]`; or a tuple of two lists.
    """
    return _exchange(communicator, tensor, counts, "all_to_all", name)


def send(communicator: Any, tensor: tf.Tensor, to: int, *, name: str = "send") -> tf.Tensor:
    """Sends a tensor to one rank, which must call `receive`; see `Communicator.send`.

    Differentiable through its result: if the result is part of a loss, the gradient of `tensor` is received from the
    rank it was sent to, which sends it as the gradient of its `receive`.

    Returns:
      A receipt, the float32 scalar 0.

    Example:
        Rank 0 has the first half of a model, rank 1 the second and the loss:

            rank 0:  loss = ring.send(communicator, first(x), to=1)
            rank 1:  loss = second(ring.receive(communicator, 0, tf.float32, anchor=anchor))

        `anchor` is any float32 scalar that the tape watches. Both ranks then compute their gradients by the tape.
    """
    communicator._ensure_links([to])
    tensor = tf.convert_to_tensor(tensor)
    return _call_in_order("send", communicator, name, [tensor], tensor=tensor, root=to)


def receive(
    communicator: Any, source: int, dtype: tf.DType, shape: Any = None, *, anchor: Any = 0.0, name: str = "send"
) -> tf.Tensor:
    """Receives a tensor that rank `source` sends to this one.

    Args:
      communicator: A `Communicator`.
      source: The rank that calls `send`.
      dtype: dtype of the tensor.
      shape: Expected shape. None accepts any shape, and None as a dimension any size.
      anchor: A float32 scalar. If a gradient tape watches it, the gradient of the received tensor is sent back.
      name: Name of the `send`.
    """
    communicator._ensure_links([source])
    dtype = tf.as_dtype(dtype)
    anchor = tf.convert_to_tensor(anchor, tf.float32)
    received = _call_in_order(
        "receive", communicator, name, [anchor], anchor=anchor, root=source, which=dtype.as_datatype_enum, T=dtype
    )
    return received if shape is None else tf.ensure_shape(received, shape)


def broadcast(communicator: Any, tensors: Tensors, root: int = 0, *, name: str = "broadcast") -> Any:
    """Sends the root's values to all ranks. A list is sent as one buffer.

    Differentiable: the root's gradient is the sum over all ranks, the others' is zero.

    Args:
      communicator: A `Communicator`.
      tensors: A tensor, or a list of tensors, of the same shapes and dtypes on all ranks.
      root: The rank that sends its values.
      name: Name of the collective in errors.
    """
    many, tensors = _as_list(tensors)
    if not tensors:
        return []
    results = _call_in_order("broadcast", communicator, name, tensors, tensors=tensors, root=root)
    return list(results) if many else results[0]


def barrier(communicator: Any, *, name: str = "barrier") -> Any:
    """Blocks until all ranks have called it. Returns the operation inside a graph, None eagerly."""
    return _call("barrier", communicator, name)


def mark(name: str, communicator: Any = None, after: Sequence[tf.Tensor] = ()) -> list[Any]:
    """Records in the trace of this process when the program gets here, once the tensors `after` are computed.

    With a communicator the mark is ordered between the collectives before and after it; without one, it is not ordered
    with them.

    Returns:
      A list for `tf.control_dependencies`.
    """
    token = _resource("marks") if communicator is None else _token(communicator)
    with tf.device("CPU:0"), tf.control_dependencies(list(after)):
        made = _ops().tfring_mark(token=token, handle=0, key=name)
    return [] if made is None else [made]


def _exchange(
    communicator: Any, tensor: Tensors, counts: Any, kind: str, name: str, root: int = 0
) -> tuple[Tensors, Tensors]:
    if kind == "all_to_all":
        communicator._ensure_links(range(communicator.world_size))
    else:
        communicator._ensure_links_for_root(root)
    many, tensors = _as_list(tensor)
    if not tensors:
        return [], []
    size = communicator.world_size
    if kind == "gather":
        numbers = tf.zeros([size, len(tensors)], tf.int64)
    elif counts is None:
        numbers = tf.stack([_shares(tf.shape(each, tf.int64)[0], size) for each in tensors], axis=1)
    else:
        numbers = tf.stack([tf.cast(column, tf.int64) for column in (counts if many else [counts])], axis=1)
    inputs = {"counts": numbers, "tensors": tensors, "which": library.kinds().index(kind), "root": root}
    results, rows = _call_in_order("exchange", communicator, name, tensors, **inputs)
    for result, each in zip(results, tensors, strict=True):
        if each.shape.rank:
            result.set_shape([None, *each.shape[1:]])
    rows.set_shape([size, len(tensors)])
    return (list(results), tf.unstack(rows, axis=1)) if many else (results[0], rows[:, 0])


def _shares(rows: tf.Tensor, size: int) -> tf.Tensor:
    """Returns the sizes of `schedule.chunk_bounds` for a number that is known when the op runs."""
    return rows // size + tf.cast(tf.range(size, dtype=tf.int64) < rows % size, tf.int64)


def adam(weight: Any, momentum: Any, velocity: Any, gradient: tf.Tensor, scalars: tf.Tensor) -> list[tf.Tensor]:
    """Computes one update of Adam (Kingma and Ba 2015) in one pass over memory, with Keras' operations in their order.

    Args:
      weight: A float32 or float64 TensorFlow variable on a CPU.
      momentum: A variable of the shape and dtype of `weight`.
      velocity: A variable of the shape and dtype of `weight`.
      gradient: A tensor of the shape and dtype of `weight`; or IndexedSlices with each id once, where other rows are
        zero.
      scalars: `alpha`, `1 - beta_1`, `1 - beta_2` and `epsilon`, of shape `[4]` and the dtype of `weight`.

    Returns:
      A list of the new momentum, velocity and weight, which are not assigned yet.

    Raises:
      tf.errors.InvalidArgumentError: If the shapes differ, an id occurs twice, or an id is not a row of the weight.

    Example:
        >>> import tensorflow as tf
        >>> weight, momentum, velocity = (tf.Variable([value, value]) for value in (1.0, 0.0, 0.0))
        >>> scalars = [0.5, 0.5, 0.25, 1.0]
        >>> [new.numpy().tolist() for new in adam(weight, momentum, velocity, [2.0, 0.0], scalars)]
        [[1.0, 0.0], [1.0, 0.0], [0.75, 1.0]]
        >>> rows = tf.IndexedSlices([2.0], [0], [2])
        >>> [new.numpy().tolist() for new in adam(weight, momentum, velocity, rows, scalars)]
        [[1.0, 0.0], [1.0, 0.0], [0.75, 1.0]]
    """
    with tf.device("CPU:0"):
        # The weight's own handle keeps this in order with other reads and assignments of it.
        common = {"token": weight.handle, "handle": 0, "key": "adam"}
        common["scalars"] = tf.convert_to_tensor(scalars, weight.dtype)
        slots = {"momentum": momentum, "velocity": velocity, "weight": weight}
        if isinstance(gradient, tf.IndexedSlices):
            rows = tf.convert_to_tensor(gradient.values, weight.dtype)
            return _ops().tfring_adam_rows(rows=rows, ids=tf.convert_to_tensor(gradient.indices), **common, **slots)
        return _ops().tfring_adam(gradient=tf.convert_to_tensor(gradient, weight.dtype), **common, **slots)


def gather_rows(head: tf.Tensor, body: tf.Tensor, like: tf.Tensor, indices: tf.Tensor) -> tf.Tensor:
    """Gathers rows of an array with elements in two tensors, one after the other.

    TensorFlow shares the memory of an array only from its first aligned address; the elements before it are the head.

    Args:
      head: A tensor of shape `[h]`, the first elements of the array.
      body: A tensor of shape `[n - h]` of the same dtype, the other elements.
      like: A tensor of shape `[0, ...]` of the same dtype. Rows of the array have the shape of its rows.
      indices: int64 tensor of shape `[rows]`.

    Returns:
      A tensor of shape `[rows, *like.shape[1:]]`.

    Raises:
      InvalidArgumentError: If an index is below 0 or beyond the last row.

    Example:
        >>> import tensorflow as tf
        >>> gather_rows([1.0], [2.0, 3.0, 4.0], tf.zeros([0, 2]), [1, 0, 1]).numpy().tolist()
        [[3.0, 4.0], [1.0, 2.0], [3.0, 4.0]]
    """
    with tf.device("CPU:0"):
        rows = _ops().tfring_gather_rows(head=head, body=body, like=like, indices=indices, handle=0, key="rows")
    return tf.ensure_shape(rows, [None, *like.shape[1:]])


def index_records(path: str | bytes) -> Any:
    """Finds the records of a TFRecord file without reading their data.

    Args:
      path: Path of the file, which must not be compressed.

    Returns:
      An int64 array of shape `[records, 3]`: the offset of each record, the length of its data, and their checksum.

    Raises:
      OpError: If there is no such file, or it is not a sequence of records.

    Example:
        >>> import tempfile, tensorflow as tf
        >>> path = tempfile.mkstemp()[1]
        >>> with tf.io.TFRecordWriter(path) as writer:
        ...     writer.write(b"first")
        ...     writer.write(b"second")
        >>> index_records(path)[:, :2].tolist()
        [[0, 5], [21, 6]]
    """
    with tf.device("CPU:0"):
        return _ops().tfring_index_records(path=path, handle=0, key="records").numpy()


def read_records(paths: tf.Tensor, sizes: tf.Tensor, places: tf.Tensor) -> tf.Tensor:
    """Reads records of TFRecord files, and no other bytes of the files.

    Args:
      paths: String tensor of shape `[files]`.
      sizes: int64 tensor of shape `[files]`, the sizes of the files in bytes.
      places: int64 tensor of shape `[n, 3]`: the number of each record's file, its offset, and the length of its data.

    Returns:
      A string tensor of shape `[n]`.

    Raises:
      DataLossError: If a file has another size, or a checksum does not match the length or the data.

    Example:
        >>> import tempfile, tensorflow as tf
        >>> path = tempfile.mkstemp()[1]
        >>> with tf.io.TFRecordWriter(path) as writer:
        ...     writer.write(b"first")
        ...     writer.write(b"second")
        >>> read_records([path], [43], [[0, 21, 6], [0, 0, 5]]).numpy().tolist()
        [b'second', b'first']
    """
    with tf.device("CPU:0"):
        records = _ops().tfring_read_records(paths=paths, sizes=sizes, places=places, handle=0, key="records")
    return tf.ensure_shape(records, [None])


def _call(kind: str, communicator: Any, name: str, **inputs: Any) -> Any:
    op = getattr(_ops(), f"tfring_{kind}")
    token = getattr(_apart, "token", None)
    try:
        with tf.device("CPU:0"):
            token = _token(communicator) if token is None else token
            return op(token=token, handle=communicator.handle, key=name, **inputs)
    except tf.errors.OpError as error:  # eagerly
        failure = communicator.failure() if rings_of(error) else None
        if failure is None:
            raise
        raise failure from error
    except RuntimeError as error:
        raise_interrupt(error)
        raise


def rings_of(error: tf.errors.OpError) -> set[int]:
    """Returns the identities of the broken rings that made TensorFlow's operations fail."""
    return {int(value) for key, value in error.experimental_payloads.items() if _text(key) == _PAYLOAD}


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def raise_interrupt(error: RuntimeError) -> None:
    """Raises KeyboardInterrupt if Ctrl-C came while TensorFlow created this error of the collective that it ended."""
    if "REPLACED BY KeyboardInterrupt" in str(error):  # pybind11's words
        raise KeyboardInterrupt from None


def _call_in_order(kind: str, communicator: Any, name: str, watched: Sequence[tf.Tensor], **inputs: Any) -> Any:
    """Calls an op like `_call`, but one with a gradient, with respect to `watched`."""
    is_apart = getattr(_apart, "token", None) is not None
    if is_apart or (tf.executing_eagerly() and not _tf.is_watched(watched)):
        *results, _ = _call(kind, communicator, name, before=order.zero(), of=order.zero(), **inputs)
        return results if len(results) > 1 else results[0]
    line = _line(communicator)
    slot = order.CallSlot(line, watched)
    _lines[communicator.handle] = line
    with slot.recording():
        *results, done = _call(kind, communicator, name, before=slot.before, of=order.zero(), **inputs)
    slot.take(done)
    return results if len(results) > 1 else results[0]


def call_in_order(communicator: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function with collectives in its gradient, in order with other collectives; see `order.py`."""
    return order.call_in_order(_line(communicator), function, *args)


@contextlib.contextmanager
def apart(communicator: Any) -> Iterator[None]:
    """Opens a context in which a communicator's collectives in a graph have no order and no gradient.

    The caller must add control dependencies on the collectives around them (`ordered_ops`), so that all ranks run them
    in one order.
    """
    _token(communicator)
    _apart.token = _resource("apart")
    try:
        yield
    finally:
        _apart.token = None


def ordered_ops(communicator: Any) -> list[Any]:
    """Returns the operations of the graph being built that run in one order with a communicator's collectives."""
    graph = tf.compat.v1.get_default_graph()
    token = graph.capture(_token(communicator))
    return [op for op in graph.get_operations() if any(tensor is token for tensor in op.inputs)]


def _line(communicator: Any) -> order.Line:
    number = communicator.order % num_threads("inter")
    return order.Line(number, _resource(number), _end)


def _end(tensor: tf.Tensor) -> tf.Tensor:
    with tf.device("CPU:0"):
        return _ops().tfring_call_slot(token=_resource("slots"), handle=0, key="slot", tensor=tensor)


def _as_list(tensors: Any) -> tuple[bool, list[tf.Tensor]]:
    if isinstance(tensors, Sequence) and not isinstance(tensors, (str, bytes)):
        return True, [tf.convert_to_tensor(tensor) for tensor in tensors]
    return False, [tf.convert_to_tensor(tensors)]


def _operation(op: str) -> int:
    if op not in library.OPERATIONS:
        raise ValueError(f"`op` is {op!r}, not {library.OPERATION_NAMES}.")
    return library.OPERATIONS[op]


def _token(communicator: Any) -> tf.Tensor:
    """Returns the resource that keeps a communicator's collectives in order. It holds no value and is never read.

    A collective waits on a thread of TensorFlow's inter-op pool. With more rings than threads, two ranks
    could fill their pools with collectives of different rings and wait for each other forever. Therefore there are no
    more tokens than threads: further rings share a token, and their collectives run in program order. (Functions on
    different Python threads have no such order; the core detects this and fails, see stall_inspector.cc.)

    Raises:
      ConfigurationError: If called in a TensorFlow 1 graph.
    """
    if not tf.executing_eagerly():
        _refuse_graph_without_order(communicator)
        _users.setdefault(tf.compat.v1.get_default_graph(), set()).add(communicator)
    return _resource(communicator.order % num_threads("inter"))


def _refuse_graph_without_order(communicator: Any) -> None:
    with tf.init_scope():
        if tf.executing_eagerly():
            return
    raise ConfigurationError(
        f"A collective of the ring {communicator.name!r}, or a variable of a strategy over several workers, is "
        "used in `tf.Graph().as_default()` or without eager execution, where ranks may run collectives in different "
        "orders. Make the graph with tf.function; make and read variables outside of a tf.Graph."
    )


def share_a_token(one: Any, other: Any) -> bool:
    """Returns True if two communicators share one order because TensorFlow has too few threads."""
    return one.order % num_threads("inter") == other.order % num_threads("inter")


def _resource(number: int | str) -> tf.Tensor:
    if number not in _tokens:
        with tf.init_scope(), tf.device("CPU:0"):
            token = tf.raw_ops.VarHandleOp(dtype=tf.bool, shape=[], shared_name=f"tfring/order/{number}")
            if not tf.executing_eagerly():
                return token  # of a TensorFlow 1 graph, which has no collectives
            _tokens[number] = token
    return _tokens[number]


def share_order(communicator: Any, other: Any) -> None:
    """Keeps the collectives of `communicator`, which must not have run any yet, in one order with those of `other`.

    A rank then waits in only one of the two at a time, and no third ring has to wait for them.
    """
    communicator.order = other.order


@functools.cache  # TensorFlow fixes it with the first operation
def num_threads(pool: str) -> int:
    """Returns the size of TensorFlow's "inter" or "intra" op pool, as its process_util.cc and local_device.cc do."""
    configured = getattr(tf.config.threading, f"get_{pool}_op_parallelism_threads")()
    if configured > 0:
        return configured
    from_environment = os.environ.get(f"TF_NUM_{pool.upper()}OP_THREADS", "")
    if from_environment.isdecimal() and int(from_environment) > 0:
        return int(from_environment)
    return len(os.sched_getaffinity(0))


@functools.cache
def _ops() -> Any:
    library.core().tfring_set_pool_size(num_threads("inter"))
    if not library.OPS.exists():
        raise NativeLibraryError(
            f"The TensorFlow ops of the ring are missing ({library.OPS}). Install tfring again."
        )
    try:
        loaded = tf.load_op_library(str(library.OPS))
    except tf.errors.OpError as error:
        raise NativeLibraryError(f"The TensorFlow ops of the ring cannot be loaded: {error}") from error
    native = ctypes.CDLL(str(library.OPS))
    native.tfring_ops_problem.restype = ctypes.c_char_p
    if problem := native.tfring_ops_problem():
        raise NativeLibraryError(
            f"The TensorFlow ops of the ring do not work with TensorFlow {tf.__version__}: {problem.decode()}. "
            'Use TensorFlow 2.18 to 2.21, or pass communication="tensorflow" to RingStrategy.'
        )
    if not find_cancellation(tf.__version__):
        _log.info(
            "In this version of TensorFlow, collectives are not cancelled when another operation of their step fails."
        )
    return loaded


def find_cancellation(version: str) -> bool:
    """Cancels collectives with their step, if the location of TensorFlow's cancellation is known for this version."""
    native = ctypes.CDLL(str(library.OPS))
    return bool(native.tfring_find_cancellation(ctypes.c_void_p(_tf.eager_context_address()), version.encode()))


# Gradients. A gradient is itself a collective: every rank differentiates the values that all ranks computed.


def _call_for_gradient(kind: str, op: tf.Operation, watched: Sequence[tf.Tensor], **inputs: Any) -> Any:
    """Calls the collective of the gradient of `op`.

    It captures the token from the outer graph. In the gradient of a loop the token of `op` is an output of the loop,
    which TensorFlow does not keep in order with other operations on the token.
    """
    line = _lines[op.get_attr("handle")]
    slot = order.CallSlot(line, watched)
    with slot.recording(), tf.device("CPU:0"):
        *results, done = getattr(_ops(), f"tfring_{kind}")(
            token=_tf.capture_outer_tensor(_resource(line.number)),
            handle=op.get_attr("handle"),
            key=op.get_attr("key").decode() + "/gradient",
            before=slot.before,
            of=op.outputs[-1],
            **inputs,
        )
    slot.take(done)
    return results if len(results) > 1 else results[0]


tf.no_gradient("TfringCallSlot")


def _register(kind: str) -> Any:
    """Registers a function as the gradient of an op, without the inputs and the output that keep calls in order."""

    def decorate(function: Any) -> Any:
        @tf.RegisterGradient(kind)
        def gradient(op: tf.Operation, *gradients: tf.Tensor) -> list[Any]:
            return [*function(op, list(op.inputs[:-2]), *gradients[:-1]), None, None]

        return function

    return decorate


def _only_sums(op: tf.Operation) -> None:
    if op.get_attr("op") != library.OPERATIONS["sum"]:
        raise LookupError(
            f'"{op.get_attr("key").decode()}" has no gradient: only sums over the ring have one.'
        )


@_register("TfringAllReduce")
def _all_reduce_gradient(op: tf.Operation, inputs: list[tf.Tensor], *gradients: tf.Tensor) -> list[Any]:
    _only_sums(op)
    active = inputs[1]
    sums = _call_for_gradient(
        "all_reduce", op, gradients, active=True, tensors=list(gradients), compression=op.get_attr("compression")
    )
    return [None, None, *(tf.where(active, gradient, tf.zeros_like(gradient)) for gradient in sums)]


@_register("TfringAllGatherRows")
def _all_gather_gradient(op: tf.Operation, inputs: list[tf.Tensor], *gradients: tf.Tensor) -> list[Any]:
    rows = op.outputs[-2]  # [world_size, tensors]
    results: list[Any] = [None]
    rank = library.core().tfring_rank(op.get_attr("handle"))
    with tf.device("CPU:0"):
        for i, (tensor, gradient) in enumerate(zip(inputs[1:], gradients[:-1], strict=True)):
            if not (tensor.dtype.is_floating or tensor.dtype.is_complex):
                results.append(None)
                continue
            (total,) = _call_for_gradient("all_reduce", op, [gradient], active=True, tensors=[gradient])
            begin, count = tf.reduce_sum(rows[:rank, i]), rows[rank, i]
            own = total[begin : begin + count]
            own.set_shape(tensor.shape)
            results.append(own)
    return results


@_register("TfringReduceScatter")
def _reduce_scatter_gradient(op: tf.Operation, inputs: list[tf.Tensor], *gradients: tf.Tensor) -> list[Any]:
    _only_sums(op)
    gathered, _ = _call_for_gradient("all_gather_rows", op, gradients, tensors=list(gradients))
    for result, tensor in zip(gathered, inputs[1:], strict=True):
        result.set_shape(tensor.shape)
    return [None, *gathered]


@_register("TfringReduce")
def _reduce_gradient(op: tf.Operation, inputs: list[tf.Tensor], *gradients: tf.Tensor) -> list[Any]:
    _only_sums(op)
    return [None, *_call_for_gradient("broadcast", op, gradients, tensors=list(gradients), root=op.get_attr("root"))]


@_register("TfringExchange")
def _exchange_gradient(op: tf.Operation, inputs: list[tf.Tensor], *gradients: tf.Tensor) -> list[Any]:
    kind, root = library.kinds()[op.get_attr("which")], op.get_attr("root")
    tensors, rows = inputs[2:], op.outputs[-2]
    floats = [i for i, tensor in enumerate(tensors) if tensor.dtype.is_floating or tensor.dtype.is_complex]
    results: list[Any] = [None] * len(inputs)
    if not floats:
        return results
    sent = [gradients[i] for i in floats]
    back_again = library.kinds().index({"gather": "scatter", "scatter": "gather"}.get(kind, kind))
    with tf.device("CPU:0"):
        counts = tf.gather(rows, floats, axis=1)
    back, _ = _call_for_gradient("exchange", op, sent, counts=counts, tensors=sent, which=back_again, root=root)
    ignored = kind == "scatter" and library.core().tfring_rank(op.get_attr("handle")) != root
    for i, result in zip(floats, back, strict=True):
        result.set_shape([None, *tensors[i].shape[1:]])
        results[i + 2] = tf.zeros_like(tensors[i]) if ignored else result
    return results


@_register("TfringSend")
def _send_gradient(op: tf.Operation, inputs: list[tf.Tensor], gradient: tf.Tensor) -> list[Any]:
    tensor = inputs[1]
    if not (tensor.dtype.is_floating or tensor.dtype.is_complex):
        return [None, None]
    received = _call_for_gradient(
        "receive",
        op,
        [gradient],
        anchor=gradient,
        root=op.get_attr("root"),
        which=tensor.dtype.as_datatype_enum,
        T=tensor.dtype,
    )
    return [None, tf.ensure_shape(received, tensor.shape)]


@_register("TfringReceive")
def _receive_gradient(op: tf.Operation, inputs: list[tf.Tensor], gradient: tf.Tensor) -> list[Any]:
    return [None, _call_for_gradient("send", op, [gradient], tensor=gradient, root=op.get_attr("root"))]


@_register("TfringBroadcast")
def _broadcast_gradient(op: tf.Operation, inputs: list[tf.Tensor], *gradients: tf.Tensor) -> list[Any]:
    is_root = library.core().tfring_rank(op.get_attr("handle")) == op.get_attr("root")
    results: list[Any] = [None]
    with tf.device("CPU:0"):
        for tensor, gradient in zip(inputs[1:], gradients, strict=True):
            if not (tensor.dtype.is_floating or tensor.dtype.is_complex):
                results.append(None)
                continue
            (total,) = _call_for_gradient("all_reduce", op, [gradient], active=True, tensors=[gradient])
            results.append(total if is_root else tf.zeros_like(total))
    return results
