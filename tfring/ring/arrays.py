"""The collectives on NumPy arrays; `tfring.ring.ops` has the same collectives for TensorFlow tensors.

`tfring.ring.communicator.Communicator` documents each of them.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tfring.errors import MismatchError
from tfring.ring import library
from tfring.ring.schedule import chunk_bounds

_NUMBERS = ctypes.POINTER(ctypes.c_int64)
_NO_PLACE = library.Place()  # null


def run(
    communicator: Any,
    kind: str,
    value: Any,
    make: Callable[[np.ndarray], np.ndarray] = np.empty_like,
    *,
    out: Any = None,
    op: str = "sum",
    root: int = 0,
    compression: str | None = None,
    name: str | None = None,
) -> Any:
    """Calls a collective with results of a size that is known in advance.

    Args:
      communicator: A `tfring.ring.communicator.Communicator`.
      kind: The collective, one of `library.kinds()`.
      value: An array, or a list of arrays.
      make: A function that returns the memory for the result of an array.
      out: Arrays to write the results to instead.
      op: "sum", "max", "min" or "product".
      root: Rank of the root.
      compression: See `Communicator.all_reduce`.
      name: Name of the call in errors. Defaults to the kind.

    Returns:
      An array, or a list of arrays, as `value`.
    """
    many, values = _as_list(value)
    results = [make(each) for each in values] if out is None else _outputs(out, values, many)
    call, tensors = _prepare(kind, name or kind, values, results, op=op, root=root, compression=compression)
    _run(communicator, call, tensors, len(values))
    return results if many else results[0]


def exchange(
    communicator: Any,
    kind: str,
    value: Any,
    *,
    counts: Any = None,
    splits: bool = False,
    root: int = 0,
    name: str | None = None,
) -> tuple[Any, np.ndarray]:
    """Calls a collective in which ranks learn the numbers of rows on the way.

    Args:
      communicator: A `tfring.ring.communicator.Communicator`.
      kind: The collective, one of `library.kinds()`.
      value: `[rows, ...]`, or a list of such arrays.
      counts: See `Communicator.all_to_all`.
      splits: Whether each rank gets some of the rows, by `counts`, instead of all of them.
      root: Rank of the root.
      name: Name of the call in errors. Defaults to the kind.

    Returns:
      A tuple of the rows that this rank receives, an array or a list as `value`, and the number of rows from each
      rank, int64 of shape `[tensors, world_size]`.
    """
    many, values = _as_list(value)
    numbers = _counts(communicator, values, counts, many) if splits else None
    call, tensors = _prepare(kind, name or kind, values, [None] * len(values), root=root)
    rows = _Rows(values, communicator.world_size)
    _run_with_allocator(communicator, call, tensors, len(values), rows, numbers)
    return rows.results if many else rows.results[0], rows.received.T.copy()


class PlannedAllReduce:
    """An `all_reduce` with arguments that are checked once, to be called many times.

    Raises:
      ValueError: If a call could not read an array in place.
    """

    def __init__(
        self, communicator: Any, value: Any, op: str, *, out: Any = None, compression: str | None = None, name: str
    ) -> None:
        many, values = _as_list(value)
        given = value if many else [value]
        if any(a is not b for a, b in zip(given, values, strict=True)):
            raise ValueError(
                f"`value` is a {type(given[0]).__name__}, but a planned all_reduce reads arrays in place. Pass a "
                "C-contiguous NumPy array in this machine's byte order, or a list of these."
            )
        results = [np.empty_like(value) for value in values] if out is None else _outputs(out, values, many)
        self._communicator, self._result = communicator, results if many else results[0]
        self._arrays = values, results  # the calls point to them
        _, self._tensors = _prepare("all_reduce", name, values, results, op=op, compression=compression)
        self._calls = [_call("all_reduce", name, op, 0, is_main, compression) for is_main in (False, True)]
        self._count = len(values)

    def __call__(self) -> Any:
        """Reduces the current content of the arrays and returns the result: the same arrays each time."""
        call = self._calls[threading.get_ident() == _main_thread]
        _run(self._communicator, call, self._tensors, self._count)
        return self._result


def barrier(communicator: Any, name: str) -> None:
    _run(communicator, _call("barrier", name, "sum", 0, threading.get_ident() == _main_thread), None, 0)


def all_reduce_rows(communicator: Any, values: Any, indices: Any, *, reduction: str, name: str) -> Any:
    many, values = _as_list(values)
    _, indices = _as_list(indices)
    if len(values) != len(indices):
        raise ValueError(f"`values` has {len(values)} arrays, but `indices` {len(indices)}. Pass the indices of each.")
    inputs, way = [*values, *indices], library.row_sums_number(reduction)
    call, tensors = _prepare("all_reduce_rows", name, inputs, [None] * len(inputs), way=way)
    rows = _Rows(inputs, communicator.world_size)
    _run_with_allocator(communicator, call, tensors, len(inputs), rows)
    pairs = list(zip(rows.results[: len(values)], rows.results[len(values) :], strict=True))
    return pairs if many else pairs[0]


def send(communicator: Any, value: Any, to: int, *, name: str) -> None:
    value = _as_array(value)
    call, tensors = _prepare("send", name, [value], [None], root=to)
    _run(communicator, call, tensors, 1)


def receive(communicator: Any, source: int, dtype: Any, shape: Any, *, name: str) -> np.ndarray:
    like = np.empty((), dtype)
    call, tensors = _prepare("receive", name, [like], [None], root=source)
    received = _Received(name, source, like.dtype, shape)
    _run_with_allocator(communicator, call, tensors, 1, received)
    return received.result


class _Rows:
    """Receives the rows of an exchange into arrays that it allocates once their number is known."""

    def __init__(self, values: list[np.ndarray], size: int) -> None:
        self.results = [value[:0].copy() for value in values] if all(v.ndim for v in values) else []
        self.received = np.zeros((size, len(values)), np.int64)

    def place(self, numbers: Any, count: int, outputs: Any) -> None:
        ctypes.memmove(self.received.__array_interface__["data"][0], numbers, self.received.nbytes)
        for t, total in enumerate(self.received.sum(axis=0).tolist()):
            result = np.empty((total, *self.results[t].shape[1:]), self.results[t].dtype)
            outputs[t] = result.__array_interface__["data"][0]
            self.results[t] = result


class _Received:
    """Receives one array, of a shape that the sender determines."""

    result: np.ndarray

    def __init__(self, name: str, source: int, dtype: np.dtype, shape: Any) -> None:
        self._name, self._source, self._dtype = name, source, dtype
        self._shape = None if shape is None else tuple(shape)

    def place(self, numbers: Any, count: int, outputs: Any) -> None:
        shape, wanted = numbers[:count], self._shape
        if wanted is not None and (
            len(wanted) != count or any(w not in (None, s) for w, s in zip(wanted, shape, strict=True))
        ):
            raise MismatchError(
                f'receive "{self._name}" expects shape {list(wanted)}, but rank {self._source} sends {shape}. '
                "Use the same shape on both ranks, or leave `shape` out."
            )
        self.result = np.empty(shape, self._dtype)
        outputs[0] = self.result.__array_interface__["data"][0]


@library.Place  # one for all calls: creating one takes longer than a small exchange
def _place(_: Any, numbers: Any, count: int, outputs: Any, placed: Any) -> None:
    coming, raised = _thread.asked
    try:
        coming.place(numbers, count, outputs)
        placed[0] = 1
    except BaseException as error:  # no memory, or Ctrl-C, unless raised before `try`
        raised.append(error)
        placed[0] = library.UNWANTED if isinstance(error, MismatchError) else 0


def _run_with_allocator(
    communicator: Any, call: Any, tensors: Any, count: int, coming: _Rows | _Received, counts: Any = None
) -> None:
    """Runs a call that gets its memory from `coming`."""
    numbers = None if counts is None else counts.ctypes.data_as(_NUMBERS)
    raised: list[BaseException] = []
    before, _thread.asked = getattr(_thread, "asked", None), (coming, raised)  # a signal handler's call nests
    try:
        _run(communicator, call, tensors, count, numbers, _place, raised)
    finally:
        _thread.asked = before


def _run(
    communicator: Any,
    call: library.Call,
    tensors: Any,
    count: int,
    counts: Any = None,
    place: Any = _NO_PLACE,
    raised: Sequence[BaseException] = (),
) -> None:
    error: library.Error = getattr(_thread, "error", None) or _thread.__dict__.setdefault("error", library.Error())
    if library.core().tfring_run(communicator.handle, call, tensors, count, counts, place, None, error):
        if raised:
            raise raised[0]
        library.raise_error(error)


def _counts(communicator: Any, values: list[np.ndarray], counts: Any, many: bool) -> np.ndarray:
    """Returns the number of rows of each tensor for each rank, of shape `[rank, tensor]`."""
    size = communicator.world_size
    if counts is None:
        return _shares(tuple(value.shape[0] if value.ndim else 0 for value in values), size)
    columns: Sequence[Any] = counts if many else [counts]
    if len(columns) != len(values):
        raise ValueError(f"`counts` has {len(columns)} entries for {len(values)} tensors. Pass one for each.")
    numbers = np.empty((size, len(values)), np.int64)
    for t, (value, column) in enumerate(zip(values, columns, strict=True)):
        column = np.asarray(column)
        if column.shape != (size,) or column.dtype.kind not in "iu" or column.min() < 0:
            raise ValueError(f"`counts` is {column.tolist()}, not a number of rows for each of {size} ranks.")
        if value.ndim and column.sum() != value.shape[0]:
            raise ValueError(f"`counts` is {column.tolist()}, but does not add up to the rows of shape {value.shape}.")
        numbers[:, t] = column
    return numbers


@functools.lru_cache(256)
def _shares(rows: tuple[int, ...], size: int) -> np.ndarray:
    columns = [[end - begin for begin, end in chunk_bounds(count, size)] for count in rows]
    return np.array(columns, np.int64).T.copy()


def _prepare(
    kind: str,
    name: str,
    inputs: list[np.ndarray],
    outputs: list[Any],
    op: str = "sum",
    root: int = 0,
    compression: str | None = None,
    way: int = 0,
) -> tuple[Any, Any]:
    """Returns the arguments of a native call. The caller must keep the arrays alive until the call returns."""
    call = _call(kind, name, op, root, threading.get_ident() == _main_thread, compression, way)
    tensors = []
    for source, target in zip(inputs, outputs, strict=True):
        dtype = _number(source.dtype)
        if dtype is None:
            raise ValueError(
                f"{kind} \"{name}\" does not support dtype {source.dtype}; it supports "
                f"{', '.join(sorted(library.DTYPES))}"
            )
        output = None if target is None else target.__array_interface__["data"][0]
        dims, address = _dims(source.shape)
        tensor = library.Tensor(source.__array_interface__["data"][0], output, address, source.ndim, dtype)
        tensor.keep = dims
        tensors.append(tensor)
    if len(tensors) == 1:
        return call, tensors[0]
    together: Any = (library.Tensor * len(tensors))(*tensors)
    together.keep = tensors
    return call, together


# Computed once: a small collective takes a few microseconds, and these would take as long.
_thread = threading.local()
_main_thread = threading.main_thread().ident  # the same in a forked child


@functools.lru_cache(1024)
def _call(
    kind: str, name: str, op: str, root: int, on_main_thread: bool, compression: str | None = None, way: int = 0
) -> library.Call:
    if op not in library.OPERATIONS:
        raise ValueError(f"`op` is {op!r}, not {library.OPERATION_NAMES}.")
    if not -(2**31) <= root < 2**31:  # otherwise the core would get another number
        raise ValueError(f"Rank {root}, given as root or peer, is not below the number of ranks.")
    caller = library.PYTHON_MAIN_THREAD if on_main_thread else library.ANY_THREAD
    number, op_number = library.kinds().index(kind), way or library.OPERATIONS[op]
    return library.Call(
        name.encode(), number, op_number, root, 0, caller, library.compression_number(compression)
    )


@functools.lru_cache(256)
def _dims(shape: tuple[int, ...]) -> tuple[Any, int]:
    """Returns the dimensions of a shape as a ctypes array, and its address."""
    dims = (ctypes.c_int64 * len(shape))(*shape)
    return dims, ctypes.addressof(dims)


@functools.cache
def _number(dtype: np.dtype) -> int | None:
    return library.DTYPES.get(dtype.name)


def _as_list(value: Any) -> tuple[bool, list[np.ndarray]]:
    """Returns whether this is a list of arrays, and the arrays. A list of numbers is one array."""
    if isinstance(value, (list, tuple)) and value and all(isinstance(each, np.ndarray) for each in value):
        return True, [_as_array(each) for each in value]
    return False, [_as_array(value)]


def _outputs(out: Any, values: list[np.ndarray], many: bool) -> list[np.ndarray]:
    """Returns the arrays to write to, one for each value."""
    outputs = list(out) if many and isinstance(out, (list, tuple)) else [out]
    if len(outputs) != len(values):
        raise ValueError(f"`out` has {len(outputs)} arrays for {len(values)} values. Pass one for each.")
    for output, value in zip(outputs, values, strict=True):
        if not isinstance(output, np.ndarray) or (output.shape, output.dtype) != (value.shape, value.dtype):
            shown = f"{list(output.shape)} of {output.dtype}" if isinstance(output, np.ndarray) else repr(output)
            raise ValueError(f"`out` is {shown}, but the value is {list(value.shape)} of {value.dtype}.")
        if not (output.flags.c_contiguous and output.flags.writeable):
            raise ValueError("`out` is not C-contiguous, or not writeable.")
    for i, output in enumerate(outputs):
        in_place = output.__array_interface__["data"] == values[i].__array_interface__["data"]
        others = [*outputs[:i], *(value for j, value in enumerate(values) if j != i or not in_place)]
        if any(np.may_share_memory(output, other) for other in others):
            raise ValueError("`out` overlaps another array. Pass the value itself, or an array with its own memory.")
    return outputs


def _as_array(value: Any) -> np.ndarray:
    value = np.asarray(value)
    # Not ascontiguousarray: it makes a scalar one-dimensional.
    value = value if value.flags.c_contiguous else value.copy()
    return value if value.dtype.isnative else value.astype(value.dtype.newbyteorder("="))
