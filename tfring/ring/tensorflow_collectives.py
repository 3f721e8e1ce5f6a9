"""The engine `communication="tensorflow"`: TensorFlow's collective runtime (NCCL on GPUs, gRPC ring on CPUs).

It is slower on CPUs than the compiled ring by an order of magnitude, and does not count bytes. Use it on clusters of
GPUs with NCCL and on machines where the ring cannot be compiled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfring import _tf
from tfring.errors import ConfigurationError
from tfring.ring.collectives import Collectives, zeros_unless
from tfring.ring.schedule import chunk_bounds

_MERGE_OPS = {"sum": "Add", "max": "Max", "min": "Min", "product": "Mul"}
# The runtime gathers float16/32/64 and int32/64 only.
_GATHERED_AS = dict.fromkeys((tf.bool, tf.int8, tf.uint8, tf.int16, tf.uint16), tf.int32) | {
    tf.uint32: tf.int64,
    tf.bfloat16: tf.float32,
}


class _OrderVariables(NamedTuple):
    """Variables that keep collectives in one order: the token they wait for, and the number of collectives so far."""

    token: tf.Tensor
    count: tf.Tensor


class TensorFlowCollectives(Collectives):
    """The engine that runs on one device of each worker, after `enable_collective_ops` has connected the workers."""

    needs_fixed_shapes = True

    def __init__(self, rank: int, world_size: int, device: str, options: Any, keys: Any) -> None:
        self.rank = rank
        self.world_size = world_size
        self._device = device
        self._options = options
        group_key = keys.get_group_key((device,))
        self._group_key = group_key
        self._line = self._in_program_order = self._make_order_variables(0)
        self._apart = self._make_order_variables(1 << 30)

    def _make_order_variables(self, first: int) -> _OrderVariables:
        with tf.init_scope(), tf.device(self._device):
            token = _tf.ResourceVariable(0.0, trainable=False)
        with tf.init_scope(), tf.device("CPU:0"):
            return _OrderVariables(token, _tf.ResourceVariable(first, dtype=tf.int32, trainable=False))

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """See `ops.apart`."""
        self._line = self._apart
        try:
            yield
        finally:
            self._line = self._in_program_order

    def ordered_ops(self) -> list[tf.Operation]:
        """See `ops.ordered_ops`."""
        graph = tf.compat.v1.get_default_graph()
        token = graph.capture(self._in_program_order.token.handle)
        return [op for op in graph.get_operations() if any(tensor is token for tensor in op.inputs)]

    def _arguments(self) -> dict:
        # The key counts collectives when they run. TensorFlow's own key counts them when functions are traced or called
        # (`capture_call_time_value`), which fails for a tf.function called inside a loop; and ranks with shares of
        # different sizes may trace a different number of times.
        with tf.device("CPU:0"):
            instance_key = self._line.count.assign_add(1, read_value=True)
            if not isinstance(instance_key, tf.Tensor):
                instance_key = tf.identity(instance_key)
        return {
            "group_size": self.world_size,
            "group_key": self._group_key,
            "instance_key": instance_key,
            "communication_hint": self._options.implementation.value,
            "timeout": self._options.timeout_seconds,
            "ordering_token": self._line.token.handle,
        }

    def _run(self, kind: str, *values: Any, name: str, **settings: Any) -> Any:
        raise _not_here(f'{kind} "{name}"', "it cannot send from one worker to another")

    def _all_reduce(self, tensor: tf.Tensor, op: str) -> tf.Tensor:
        with tf.device(self._device):
            return _tf.collective_ops.all_reduce_v2(
                tensor, merge_op=_MERGE_OPS[op], final_op="Id", **self._arguments()
            )

    def _all_gather(self, tensor: tf.Tensor) -> tf.Tensor:
        with tf.device(self._device):
            return _tf.collective_ops.all_gather_v2(tensor, **self._arguments())

    def all_reduce(
        self,
        tensors: Sequence[tf.Tensor],
        op: str = "sum",
        *,
        name: str,
        active: tf.Tensor | None = None,
        compression: str | None = None,
    ) -> list[tf.Tensor]:
        assert compression is None  # RingStrategy refuses it
        dtype = tensors[0].dtype
        if op != "sum" and (dtype == tf.uint64 or dtype.is_complex):
            raise TypeError(
                f"TensorFlow's collectives do not support {op} of {dtype.name}, as in {name}. Cast the tensor, or use "
                "the compiled ring."
            )
        tensors = zeros_unless(active, [_to_wire(t) for t in tensors])
        if len(tensors) == 1 and tensors[0].shape.rank:
            results = [self._all_reduce(tensors[0], op)]
        else:
            packed = self._all_reduce(tf.concat([tf.reshape(t, [-1]) for t in tensors], 0), op)
            parts = tf.split(packed, [tf.size(t) for t in tensors])
            results = [tf.reshape(part, tf.shape(t)) for part, t in zip(parts, tensors, strict=True)]
        for result, t in zip(results, tensors, strict=True):
            result.set_shape(t.shape)
        return [_from_wire(r, dtype) for r in results]

    def all_gather(self, tensor: tf.Tensor, *, name: str) -> tf.Tensor:
        if isinstance(tensor, Sequence):
            return [self.all_gather(each, name=name) for each in tensor]
        # The first dimension differs between ranks: gather the lengths, pad to the longest, cut the padding.
        dtype, tensor = tensor.dtype, _to_wire(tensor)
        num_rows = tf.shape(tensor)[0]
        all_rows = self._all_gather(num_rows[None])
        longest = tf.reduce_max(all_rows)
        wire = _GATHERED_AS.get(tensor.dtype, tensor.dtype)
        gathered = tf.cast(self._all_gather(_pad(tf.cast(tensor, wire), longest)), tensor.dtype)
        real = tf.range(longest)[None, :] < all_rows[:, None]
        result = tf.boolean_mask(gathered, tf.reshape(real, [-1]))
        result.set_shape([None, *tensor.shape[1:]])
        return _from_wire(result, dtype)

    def gather_equal(self, tensor: tf.Tensor, *, name: str) -> tf.Tensor:
        gathered = self._all_gather(tensor)
        gathered.set_shape([self.world_size * tensor.shape[0], *tensor.shape[1:]])
        return gathered

    def gather_rows(
        self, values: Sequence[tf.Tensor], indices: Sequence[tf.Tensor], *, name: str
    ) -> list[tuple[tf.Tensor, tf.Tensor]]:
        return [(self._all_gather(v), self._all_gather(i)) for v, i in zip(values, indices, strict=True)]

    def reduce_scatter(self, tensor: tf.Tensor, op: str = "sum", *, name: str) -> tf.Tensor:
        tensors = tensor if isinstance(tensor, Sequence) else [tensor]
        bounds = [chunk_bounds(each.shape[0], self.world_size)[self.rank] for each in tensors]
        reduced = self.all_reduce(tensors, op, name=name)
        chunks = [each[begin:end] for each, (begin, end) in zip(reduced, bounds, strict=True)]
        return chunks if tensors is tensor else chunks[0]

    def broadcast(self, tensors: Sequence[tf.Tensor], root: int = 0, *, name: str) -> list[tf.Tensor]:
        mine = tf.constant(self.rank == root)
        results = []
        for t in tensors:  # other ranks contribute zeros: x + 0 is x, bit for bit except for the sign of zero
            results += self.all_reduce([t], name=name, active=mine)
        return results

    def reduce(self, tensors: Sequence[tf.Tensor], root: int = 0, op: str = "sum", *, name: str) -> list[tf.Tensor]:
        self._check_rank("root", root)
        reduced = self.all_reduce(tensors, op, name=name)
        return reduced if self.rank == root else [tf.zeros_like(each) for each in reduced]

    def all_to_all(
        self, tensor: tf.Tensor, counts: tf.Tensor | None = None, *, name: str
    ) -> tuple[tf.Tensor, tf.Tensor]:
        if isinstance(tensor, Sequence):
            everyones = [None] * len(tensor) if counts is None else counts
            pairs = [self.all_to_all(each, n, name=name) for each, n in zip(tensor, everyones, strict=True)]
            return [rows for rows, _ in pairs], [received for _, received in pairs]
        rows = tf.shape(tensor, tf.int64)[0]
        if counts is None:
            numbers = tf.range(self.world_size, dtype=tf.int64)
            counts = rows // self.world_size + tf.cast(numbers < rows % self.world_size, tf.int64)
        counts = tf.ensure_shape(tf.cast(counts, tf.int64), [self.world_size])
        problem = f'all_to_all "{name}": `counts` do not add up to the rows of the tensor'
        right = tf.debugging.assert_equal(tf.reduce_sum(counts), rows, problem)
        with tf.control_dependencies([] if right is None else [right]):  # None eagerly
            counts = tf.identity(counts)

        @tf.custom_gradient
        def exchange(tensor: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            rows, received = self._exchange(tensor, counts)
            return (rows, received), lambda gradient, _: self._exchange(gradient, received)[0]

        return exchange(tensor)

    def _exchange(self, tensor: tf.Tensor, counts: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        # The runtime exchanges blocks of equal size: pad to the largest of any rank, cut the padding.
        everyones = tf.reshape(self._all_gather(counts), [self.world_size, self.world_size])
        received = everyones[:, self.rank]
        dtype, tensor = tensor.dtype, _to_wire(tensor)
        wire = _GATHERED_AS.get(tensor.dtype, tensor.dtype)
        place = tf.range(tf.maximum(tf.reduce_max(everyones), 1))[None, :]
        begins, end = tf.cumsum(counts, exclusive=True), tf.reduce_sum(counts)
        taken = tf.where(place < counts[:, None], begins[:, None] + place, end)  # the last row is padding
        blocks = tf.gather(_pad(tf.cast(tensor, wire), tf.shape(tensor)[0] + 1), taken)
        with tf.device(self._device):
            blocks = _tf.collective_ops.all_to_all_v2(blocks, **self._arguments())
        blocks = tf.cast(tf.ensure_shape(blocks, [self.world_size, None, *tensor.shape[1:]]), tensor.dtype)
        return _from_wire(tf.boolean_mask(blocks, place < received[:, None]), dtype), received

    def gather(self, tensor: tf.Tensor, root: int = 0, *, name: str) -> tf.Tensor:
        self._check_rank("root", root)
        rows = tf.shape(tensor, tf.int64)[0]
        return self.all_to_all(tensor, rows * tf.one_hot(root, self.world_size, dtype=tf.int64), name=name)[0]

    def scatter(self, tensor: tf.Tensor, counts: tf.Tensor | None = None, root: int = 0, *, name: str) -> tf.Tensor:
        self._check_rank("root", root)
        if self.rank != root:
            tensor, counts = tensor[:0], None
        return self.all_to_all(tensor, counts, name=name)[0]

    def group(self, ranks: Sequence[int], name: str) -> Collectives:
        raise _not_here(f'group "{name}"', "its collectives always include all workers")

    def _check_rank(self, what: str, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"`{what}` is {rank}, not from 0 to {self.world_size - 1}.")

    def barrier(self, *, name: str) -> None:
        self._all_reduce(tf.zeros([1], tf.int32), "sum")

    def close(self) -> None:
        pass  # TensorFlow's runtime cannot be left


def _not_here(what: str, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"{what} is not supported by TensorFlow's collective runtime: {why}. Use the compiled ring, "
        'RingStrategy(communication="ring").'
    )


# TensorFlow's runtime sends float16/32/64, bfloat16 and int32/64 only.
_CARRIED_AS = {
    **dict.fromkeys((tf.bool, tf.int8, tf.uint8, tf.int16, tf.uint16), tf.int32),
    tf.uint32: tf.int64,
    tf.uint64: tf.int64,
    tf.complex64: tf.float32,
    tf.complex128: tf.float64,
}


def _to_wire(tensor: tf.Tensor) -> tf.Tensor:
    wire = _CARRIED_AS.get(tensor.dtype)
    if wire is None:
        return tensor
    same_bits = tensor.dtype.is_complex or tensor.dtype == tf.uint64
    return tf.bitcast(tensor, wire) if same_bits else tf.cast(tensor, wire)


def _from_wire(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    if tensor.dtype == dtype:
        return tensor
    same_bits = dtype.is_complex or dtype == tf.uint64
    return tf.bitcast(tensor, dtype) if same_bits else tf.cast(tensor, dtype)


def _pad(tensor: tf.Tensor, num_rows: tf.Tensor) -> tf.Tensor:
    missing = num_rows - tf.shape(tensor)[0]
    paddings = tf.concat([[[0, missing]], tf.zeros([tf.rank(tensor) - 1, 2], tf.int32)], 0)
    padded = tf.pad(tensor, paddings)
    padded.set_shape([None, *tensor.shape[1:]])
    return padded
