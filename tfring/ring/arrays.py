"""The collectives on NumPy arrays; `tfring.ring.ops` has the same for TensorFlow's tensors.

`tfring.ring.communicator.Communicator` says what each does.
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


def all_reduce(
    communicator: Any,
    value: Any,
    op: str = "sum",
    *,
    out: Any = None,
    compression: str | None = None,
    name: str = "all_reduce",
) -> Any:
    many, values = _as_list(value)
    results = [np.empty_like(value) for value in values] if out is None else _outputs(out, values, many)
    _run("all_reduce", communicator, name, values, results, op=op, compression=compression)
    return results if many else results[0]


class PlannedAllReduce:
    """An `all_reduce` whose arguments are checked once, and which is called many times.

    Raises:
        ValueError: An array that a call could not read where it is.
    """

    def __init__(
        self, communicator: Any, value: Any, op: str, *, out: Any = None, compression: str | None = None, name: str
    ) -> None:
        many, values = _as_list(value)
        given = value if many else [value]
        if any(a is not b for a, b in zip(given, values, strict=True)):
            raise ValueError(
                "A planned all_reduce reads its arrays where they are: `value` is a NumPy array, contiguous in the "
                f"order of C and of this machine's byte order, or a list of such. Received: {type(given[0]).__name__}"
            )
        results = [np.empty_like(value) for value in values] if out is None else _outputs(out, values, many)
        self._communicator, self._result = communicator, results if many else results[0]
        self._arrays = values, results  # which the calls point to
        _, self._tensors = _prepare("all_reduce", name, values, results, op=op, compression=compression)
        self._calls = [_call(name, op, 0, is_main, compression) for is_main in (False, True)]
        self._count = len(values)
        self._function = library.core().tfring_all_reduce

    def __call__(self) -> Any:
        """Reduces what the arrays hold now, and returns the result: the same arrays each time."""
        call = self._calls[threading.get_ident() == _main_thread]
        _check(self._function, self._communicator.handle, call, self._tensors, self._count)
        return self._result


def reduce(communicator: Any, value: Any, root: int = 0, op: str = "sum", *, name: str = "reduce") -> Any:
    many, values = _as_list(value)
    make = np.empty_like if communicator.rank == root else np.zeros_like
    results = [make(value) for value in values]
    _run("reduce", communicator, name, values, results, op=op, root=root)
    return results if many else results[0]


def reduce_scatter(communicator: Any, value: Any, op: str = "sum", *, name: str = "reduce_scatter") -> Any:
    many, values = _as_list(value)
    results = []
    for each in values:
        begin, end = chunk_bounds(each.shape[0] if each.ndim else 0, communicator.world_size)[communicator.rank]
        results.append(np.empty((end - begin, *each.shape[1:]), each.dtype))
    _run("reduce_scatter", communicator, name, values, results, op=op)
    return results if many else results[0]


def broadcast(communicator: Any, value: Any, root: int = 0, *, name: str = "broadcast") -> Any:
    many, values = _as_list(value)
    results = [np.empty_like(value) for value in values]
    _run("broadcast", communicator, name, values, results, root=root)
    return results if many else results[0]


def barrier(communicator: Any, *, name: str = "barrier") -> None:
    call = _call(name, "sum", 0, threading.get_ident() == _main_thread)
    _check(library.core().tfring_barrier, communicator.handle, call)


def all_gather(communicator: Any, value: Any, *, name: str = "all_gather") -> Any:
    many, values = _as_list(value)
    results, _ = _exchange("all_gather", communicator, name, values, None)
    return results if many else results[0]


def gather(communicator: Any, value: Any, root: int = 0, *, name: str = "gather") -> Any:
    many, values = _as_list(value)
    results, _ = _exchange("gather", communicator, name, values, None, root)
    return results if many else results[0]


def scatter(
    communicator: Any, value: Any, counts: Any = None, root: int = 0, *, name: str = "scatter"
) -> Any:
    many, values = _as_list(value)
    if communicator.rank == root:
        numbers = _counts(communicator, values, counts, many)
    else:
        numbers = np.zeros((communicator.world_size, len(values)), np.int64)  # the root's count
    results, _ = _exchange("scatter", communicator, name, values, numbers, root)
    return results if many else results[0]


def all_to_all(communicator: Any, value: Any, counts: Any = None, *, name: str = "all_to_all") -> Any:
    many, values = _as_list(value)
    results, rows = _exchange("all_to_all", communicator, name, values, _counts(communicator, values, counts, many))
    return (results, list(rows.T.copy())) if many else (results[0], rows[:, 0].copy())


def all_reduce_rows(
    communicator: Any, values: Any, indices: Any, *, reduction: str = "auto", name: str = "all_reduce_rows"
) -> Any:
    many, values = _as_list(values)
    _, indices = _as_list(indices)
    if len(values) != len(indices):
        raise ValueError(
            f"`values` and `indices` are lists of equal length. Received: {len(values)} and {len(indices)}"
        )
    results, _ = _exchange(
        "all_reduce_rows", communicator, name, [*values, *indices], None, way=library.row_sums_number(reduction)
    )
    pairs = list(zip(results[: len(values)], results[len(values) :], strict=True))
    return pairs if many else pairs[0]


def send(communicator: Any, value: Any, to: int, *, name: str = "send") -> None:
    value = _as_array(value)
    call, tensors = _prepare("send", name, [value], [None], root=to)
    _check(library.core().tfring_send, communicator.handle, call, tensors)


def receive(
    communicator: Any, source: int, dtype: Any, shape: Any = None, *, name: str = "receive"
) -> np.ndarray:
    dtype = np.dtype(dtype)
    results: list[np.ndarray] = []
    raised: list[BaseException] = []

    @library.Shape
    def place(_: Any, dims: Any, num_dims: int, output: Any, placed: Any) -> None:
        try:
            received = tuple(dims[:num_dims])
            placed[0] = library.UNWANTED
            check_shape(name, source, shape, received)
            placed[0] = 0
            results.append(np.empty(received, dtype))
            output[0] = results[0].ctypes.data
            placed[0] = 1
        except BaseException as error:  # no memory, or Ctrl-C, unless it came before `try`
            raised.append(error)

    call, _ = _prepare("receive", name, [np.empty(0, dtype)], [None], root=source)
    arguments = (communicator.handle, call, library.DTYPES[dtype.name], place, None)
    _check(library.core().tfring_receive, *arguments, raised=raised)
    return results[0]


def check_shape(name: str, source: int, wanted: Any, received: tuple[int, ...]) -> None:
    """Raises MismatchError where what comes is not of the shape it should have; None stands for any size."""
    if wanted is None:
        return
    wanted = tuple(wanted)
    if len(wanted) != len(received) or any(w not in (None, r) for w, r in zip(wanted, received, strict=True)):
        raise MismatchError(
            f'receive "{name}" wants shape {list(wanted)}, and rank {source} sends {list(received)}. '
            "Send and receive the same, or leave `shape` out."
        )


def _exchange(
    kind: str, communicator: Any, name: str, values: list[np.ndarray], counts: Any, root: int = 0, way: int = 0
) -> tuple[list[np.ndarray], np.ndarray]:
    """The rows that come to this rank, and `[rank, tensor]` how many from each."""
    call, tensors = _prepare(kind, name, values, [None] * len(values), root=root, way=way)
    coming = _Coming(values, communicator.world_size)
    numbers = () if counts is None else (counts.ctypes.data_as(_NUMBERS),)
    function = getattr(library.core(), f"tfring_{kind}")
    before, _thread.coming = getattr(_thread, "coming", None), coming  # a signal handler's is inside another's
    try:
        _check(
            function, communicator.handle, call, tensors, len(values), *numbers, _place, None, raised=coming.raised
        )
    finally:
        _thread.coming = before
    return coming.results, coming.received


class _Coming:
    """Receives the rows of an exchange into arrays that it allocates once their number is known."""

    def __init__(self, values: list[np.ndarray], size: int) -> None:
        self.results = [value[:0].copy() for value in values] if all(v.ndim for v in values) else []
        self.received = np.zeros((size, len(values)), np.int64)
        self.raised: list[BaseException] = []

    def place(self, rows: Any, outputs: Any) -> None:
        ctypes.memmove(self.received.__array_interface__["data"][0], rows, self.received.nbytes)
        for t, total in enumerate(self.received.sum(axis=0).tolist()):
            result = np.empty((total, *self.results[t].shape[1:]), self.results[t].dtype)
            outputs[t] = result.__array_interface__["data"][0]
            self.results[t] = result


_NUMBERS = ctypes.POINTER(ctypes.c_int64)


@library.Place  # one for all exchanges: to make one takes longer than a small exchange
def _place(_: Any, rows: Any, outputs: Any, placed: Any) -> None:
    coming: _Coming = _thread.coming
    try:
        coming.place(rows, outputs)
        placed[0] = 1
    except BaseException as error:  # no memory, or Ctrl-C, unless it came before `try`
        coming.raised.append(error)


def _counts(communicator: Any, values: list[np.ndarray], counts: Any, many: bool) -> np.ndarray:
    """`[rank, tensor]`: how many rows of each tensor go to each rank."""
    size = communicator.world_size
    if counts is None:
        return _shares(tuple(value.shape[0] if value.ndim else 0 for value in values), size)
    columns: Sequence[Any] = counts if many else [counts]
    if len(columns) != len(values):
        raise ValueError(
            f"`counts` has one entry for each of {len(values)} tensors. Received: {len(columns)} entries"
        )
    numbers = np.empty((size, len(values)), np.int64)
    for t, (value, column) in enumerate(zip(values, columns, strict=True)):
        column = np.asarray(column)
        if column.shape != (size,) or column.dtype.kind not in "iu" or column.min() < 0:
            raise ValueError(f"`counts` holds a number of rows for each of {size} ranks. Received: {column.tolist()}")
        if value.ndim and column.sum() != value.shape[0]:
            raise ValueError(
                f"`counts` add up to the rows there are. Received: counts={column.tolist()}, shape={value.shape}"
            )
        numbers[:, t] = column
    return numbers


@functools.lru_cache(256)
def _shares(rows: tuple[int, ...], size: int) -> np.ndarray:
    columns = [[end - begin for begin, end in chunk_bounds(count, size)] for count in rows]
    return np.array(columns, np.int64).T.copy()


def _run(
    kind: str, communicator: Any, name: str, inputs: list[np.ndarray], outputs: list[Any], **settings: Any
) -> None:
    call, tensors = _prepare(kind, name, inputs, outputs, **settings)
    _check(getattr(library.core(), f"tfring_{kind}"), communicator.handle, call, tensors, len(inputs))


def _check(function: Callable[..., int], *arguments: Any, raised: Sequence[BaseException] = ()) -> None:
    error: library.Error = getattr(_thread, "error", None) or _thread.__dict__.setdefault("error", library.Error())
    if function(*arguments, error):
        if raised:
            raise raised[0]
        library.raise_error(error)


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
    """Returns the arguments of a native call; the caller keeps the arrays alive until it returns."""
    call = _call(name, op, root, threading.get_ident() == _main_thread, compression, way)
    tensors = []
    for source, target in zip(inputs, outputs, strict=True):
        dtype = _number(source.dtype)
        if dtype is None:
            raise ValueError(
                f'{kind} "{name}" carries {", ".join(sorted(library.DTYPES))}. Received: dtype={source.dtype}'
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


# A small collective takes a few microseconds, and so would these.
_thread = threading.local()
_main_thread = threading.main_thread().ident  # a forked child's has the same


@functools.lru_cache(1024)
def _call(
    name: str, op: str, root: int, on_main_thread: bool, compression: str | None = None, way: int = 0
) -> library.Call:
    if op not in library.OPERATIONS:
        raise ValueError(f"`op` is {library.OPERATION_NAMES}. Received: op={op!r}")
    if not -(2**31) <= root < 2**31:  # or the core would be told another
        raise ValueError(f"A rank, as a root or a peer, is below the number of ranks. Received: {root}")
    caller = library.PYTHON_MAIN_THREAD if on_main_thread else library.ANY_THREAD
    return library.Call(
        name.encode(), way or library.OPERATIONS[op], root, 0, caller, library.compression_number(compression)
    )


@functools.lru_cache(256)
def _dims(shape: tuple[int, ...]) -> tuple[Any, int]:
    """The numbers of a shape, and where they lie."""
    dims = (ctypes.c_int64 * len(shape))(*shape)
    return dims, ctypes.addressof(dims)


@functools.cache
def _number(dtype: np.dtype) -> int | None:
    return library.DTYPES.get(dtype.name)


def _as_list(value: Any) -> tuple[bool, list[np.ndarray]]:
    """A list of arrays is several values; one of numbers is one."""
    if isinstance(value, (list, tuple)) and value and all(isinstance(each, np.ndarray) for each in value):
        return True, [_as_array(each) for each in value]
    return False, [_as_array(value)]


def _outputs(out: Any, values: list[np.ndarray], many: bool) -> list[np.ndarray]:
    """The arrays to write to, one for each value."""
    outputs = list(out) if many and isinstance(out, (list, tuple)) else [out]
    if len(outputs) != len(values):
        raise ValueError(f"`out` holds an array for each value. Received: {len(outputs)} for {len(values)}")
    for output, value in zip(outputs, values, strict=True):
        if not isinstance(output, np.ndarray) or (output.shape, output.dtype) != (value.shape, value.dtype):
            raise ValueError(
                f"`out` is an array of the value's shape and dtype, {list(value.shape)} of {value.dtype}. Received: "
                + (f"{list(output.shape)} of {output.dtype}" if isinstance(output, np.ndarray) else repr(output))
            )
        if not (output.flags.c_contiguous and output.flags.writeable):
            raise ValueError("`out` is contiguous, in the order of C, and writeable. Received: an array that is not")
    for i, output in enumerate(outputs):
        in_place = output.__array_interface__["data"] == values[i].__array_interface__["data"]
        others = [*outputs[:i], *(value for j, value in enumerate(values) if j != i or not in_place)]
        if any(np.may_share_memory(output, other) for other in others):
            raise ValueError("`out` is the value itself, or memory of its own. Received: arrays that overlap")
    return outputs


def _as_array(value: Any) -> np.ndarray:
    value = np.asarray(value)
    # Not ascontiguousarray: it makes a scalar one-dimensional.
    value = value if value.flags.c_contiguous else value.copy()
    return value if value.dtype.isnative else value.astype(value.dtype.newbyteorder("="))
